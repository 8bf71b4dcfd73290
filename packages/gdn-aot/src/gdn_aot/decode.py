"""Which specs of pa-decode to compile ahead of time: rows of its tables; ``jobs.Kernel`` does it for gdn-runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from gdn_runtime.arch import KNOWN
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.spec import AMD_ARCHS, KernelSpec
from gdn_runtime.tables import Located
from pa_decode import DecodeGeometry, PaDecodeSchedule, tables
from pa_decode.schedule import planner_of, specs_of
from pa_decode.spec import (
    MIN_BATCH_BUCKET,
    AttentionSpec,
    PlannerSpec,
    QueryDtype,
    ReduceSpec,
    ScaleMode,
    SinkDtype,
)
from pa_decode.traits import MAX_BATCH, power_of_two_at_least

from .columns import cell


@dataclass(frozen=True)
class DecodeKernel:
    """How the jobs of paged decode are made: attention, reducer and planner of each row. A shape is the geometry of a
    row, on the row's architecture."""

    name: str = "pa"
    archs: tuple[str, ...] = AMD_ARCHS
    kinds: tuple[type, ...] = (AttentionSpec, ReduceSpec, PlannerSpec)

    @property
    def columns(self) -> Mapping[str, str]:
        """Names of columns, and the fields of the specs to print there."""
        return {
            "kernel": "kernel",
            "D": "head_dim",
            "page": "page_size",
            "G": "group_size",
            "QL": "query_length",
            "dtype": "query_dtype",
            "scales": "scale_mode",
            "V packed": "v_packed",
            "window": "windowed",
            "one tile": "single_tile",
            "sinks": "sink_dtype",
            "parts": "max_parts",
            "batch": "max_batch",
        }

    def rows(self, paths: Iterable[Path] = tables.COMPILED) -> Iterator[Located[tables.BudgetRow]]:
        """Every row of ``paths``; bad rows and files are warnings."""
        return tables.rows(paths)

    def shapes(self, paths: Iterable[Path] = tables.COMPILED) -> tuple[DecodeGeometry, ...]:
        """Distinct geometries of the rows of ``paths``, in their order."""
        return tuple(dict.fromkeys(found.row.geometry for found in self.rows(paths)))

    def jobs(self, shapes: Iterable[DecodeGeometry], arch: str, *, complete: bool = False) -> tuple[KernelSpec, ...]:
        """Specs for ``shapes`` on ``arch``, each once. ``complete`` adds what a call of these heads may ask for beside:
        the other dtypes, scales, forms of V, windows, sinks and batches."""
        if arch not in self.archs:
            raise UnsupportedError(f"arch of kernel {self.name}", got=repr(arch), supported=self.archs)
        # On the architecture of a row with its compute units, on the other with those of the usual part.
        usual = KNOWN[arch].nominal_compute_units or 1
        geometries = [
            replace(shape, arch=arch, compute_units=shape.compute_units if shape.arch == arch else usual)
            for shape in shapes
        ]
        found: dict[KernelSpec, None] = {}
        for geometry in dict.fromkeys(geometries):
            found |= dict.fromkeys(_asked(geometry))
        if complete:
            for geometry in dict.fromkeys(replace(geometry, batch=1) for geometry in geometries):
                found |= dict.fromkeys(_complete(geometry))
        return tuple(found)

    def of_tables(self, paths: Iterable[Path], arch: str, *, complete: bool = False) -> tuple[KernelSpec, ...]:
        """``jobs`` of the shapes of ``paths``."""
        return self.jobs(self.shapes(paths), arch, complete=complete)

    def cells(self, spec: KernelSpec) -> tuple[str, ...]:
        """``spec`` as texts for ``columns``."""
        return tuple(cell(spec, path) for path in self.columns.values())


def _asked(geometry: DecodeGeometry) -> Iterator[KernelSpec]:
    """What a call of the row asks for, and the planners of all batches up to its own: they come and go."""
    schedule = PaDecodeSchedule.select(geometry)
    yield schedule.attention
    yield schedule.reduce
    for batch in powers_of_two(MIN_BATCH_BUCKET, schedule.planner.max_batch):
        yield planner_of(geometry.arch, batch)


def _complete(geometry: DecodeGeometry) -> Iterator[KernelSpec]:
    """Every spec of a call with the heads, the page and the query length of ``geometry``, on any number of sequences
    and of compute units up to its own."""
    dtypes = get_args(QueryDtype)
    for dtype, mode, packed, window in product(dtypes, get_args(ScaleMode), (True, False), (0, 1)):
        asked = replace(geometry, query_dtype=dtype, scale_mode=mode, v_packed=packed, window=window)
        for single_tile in (False, True) if window else (False,):
            yield specs_of(asked, single_tile=single_tile, max_partitions=1)[0]
    tasks = powers_of_two(1, power_of_two_at_least(geometry.compute_units))
    for dtype, sinks, most in product(dtypes, get_args(SinkDtype), tasks):
        asked = replace(geometry, query_dtype=dtype, sink_dtype=sinks)
        yield specs_of(asked, single_tile=False, max_partitions=most)[1]
    for batch in powers_of_two(MIN_BATCH_BUCKET, MAX_BATCH):
        yield planner_of(geometry.arch, batch)


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """``least``, twice that, ... ``most``: powers of two."""
    return tuple(1 << power for power in range(least.bit_length() - 1, most.bit_length()))
