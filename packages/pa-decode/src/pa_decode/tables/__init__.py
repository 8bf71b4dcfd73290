"""Tuned tables: budgets of decode problems, and which shapes are compiled ahead of time.

Files are as those of gdn_runtime.tables (``kernel`` is "pa_decode"): the packaged ones, ``ARCH.json`` in this folder
and ``GRID``, and those of GDN_TABLES. Of two rows for one problem that counts which would there. Faults of files and
rows are warnings.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gdn_runtime import env
from gdn_runtime.arch import parse_arch
from gdn_runtime.spec import AMD_ARCHS
from gdn_runtime.tables import Located, Provenance, by_key, count, flag, read_rows, table_files

from ..geometry import DecodeGeometry

KERNEL = "pa_decode"
PACKAGED = Path(__file__).parent
COMPILED = tuple(PACKAGED / f"{arch}.json" for arch in AMD_ARCHS)
"""The packaged tables whose problems are compiled ahead of time unless others are named."""
GRID = PACKAGED / "grid"
"""The packaged tables of the problems of the public measurements: looked up like any other's."""
COUNTS = {
    "cu_num": "compute_units",
    "B": "batch",
    "Hq": "num_heads",
    "Hkv": "num_kv_heads",
    "D": "head_dim",
    "page": "page_size",
    "QL": "query_length",
}
TEXTS = ("query_dtype", "scale_mode", "sink_dtype")
FIELDS = {"gfx", *COUNTS, *TEXTS, "v_packed", "window", "budget", "provenance"}


@dataclass(frozen=True)
class BudgetRow:
    """``budget`` tasks over all KV heads for calls of exactly this ``geometry``."""

    geometry: DecodeGeometry
    budget: int
    provenance: Provenance


def parse_row(fields: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]) -> BudgetRow:
    """The row that ``fields`` spell out, in a file of ``arch``. ValueError says what is wrong."""
    if set(fields) != FIELDS:
        raise ValueError(f"columns: got {', '.join(sorted(fields))}, expected {', '.join(sorted(FIELDS))}")
    if fields["gfx"] != arch:
        raise ValueError(f"gfx: got {fields['gfx']!r}, expected the arch of the file, {arch!r}")
    name = fields["provenance"]
    if not isinstance(name, str) or name not in provenances:
        raise ValueError(f"provenance: got {name!r}, expected one of {', '.join(provenances) or 'none'}")
    texts = {field: fields[field] for field in TEXTS}
    window = fields["window"]
    values = {
        "arch": arch,
        **{field: count(fields, column) for column, field in COUNTS.items()},
        **texts,
        "v_packed": flag(fields, "v_packed"),
        "window": 0 if window == 0 else count(fields, "window"),
    }
    return BudgetRow(DecodeGeometry(**values), count(fields, "budget"), provenances[name])  # type: ignore[arg-type]


def rows(paths: Iterable[Path] = (PACKAGED,)) -> Iterator[Located[BudgetRow]]:
    """Every row of the tables in ``paths``, files and folders."""
    for path in paths:
        for file in table_files(path):
            yield from read_rows(file, KERNEL, parse_row)


def tuned_budget(geometry: DecodeGeometry) -> int | None:
    """The budget that the tables in force have for a problem; None if they have none."""
    return _table(env.settings().tables).get(_key(geometry))


@functools.lru_cache(maxsize=16)
def _table(paths: str) -> dict[DecodeGeometry, int]:
    named = [Path(entry).expanduser() for entry in paths.split(os.pathsep) if entry.strip()]
    found = by_key(rows([PACKAGED, *named]), lambda row: row.geometry, lambda row: f"budget={row.budget}")
    return {geometry: located.row.budget for geometry, located in found.items()}


def _key(geometry: DecodeGeometry) -> DecodeGeometry:
    name = parse_arch(geometry.arch).name
    return geometry if name == geometry.arch else DecodeGeometry(**{**vars(geometry), "arch": name})


def forget() -> None:
    """Read the files again at the next call, for tuners."""
    _table.cache_clear()
