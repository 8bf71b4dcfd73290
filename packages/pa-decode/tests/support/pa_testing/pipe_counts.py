"""What the D256 pipe executes per 256-token tile of a workgroup, counted on the emulator, and its bars.

The workload: one sequence, one task of 5 tiles less one of 4, random pages, query heads as many as rows (two query
tokens for 32 rows), scores and V scales largest in the first tile, so that no reference is raised in what is counted.
One workgroup of two KV heads is traced, with every check on.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import cdna_emu
from cdna_emu.counters import SIMDS_PER_CU, Resources
from cdna_emu.model import DEFAULTS
from gdn_runtime import env
from gdn_runtime.testing.tracing import TracingLauncher
from gdn_testing.counting import CLASSES, LINE, aligned, kind_of
from gdn_testing.public_kernel import Bar
from pa_decode.spec import AttentionSpec, ScaleMode
from pa_decode.traits import TILE

from .attention import arguments, empty_partials, flavour, work_of
from .inputs import make_inputs

TILES = 5
WAVES = 4
TILE_BYTES = 2 * TILE * 256
"""K and V of a tile and KV head."""

PUBLIC: dict[tuple[str, int, ScaleMode], int] = {
    ("gfx942", 64, "tensor"): 2164,
    ("gfx942", 64, "token"): 2356,
    ("gfx942", 16, "tensor"): 2188,
    ("gfx942", 16, "token"): 2424,
    ("gfx950", 64, "tensor"): 2228,
    ("gfx950", 64, "token"): 2468,
    ("gfx950", 16, "tensor"): 2252,
    ("gfx950", 16, "token"): 2532,
}
"""Wave-instructions per tile and workgroup of FlyDSL's public ``pa_decode_tile`` (snapshot of 2026-08-21) at head size
256, 16 query heads per KV head, transposed V, compiled with the same FlyDSL and counted in the same way by another
interpreter: architecture, page, scales."""

SHARE = 0.42
"""Of the public kernel's instructions, for up to 16 rows."""

MORE_ROWS = 1.3
"""Of the instructions for up to 16 rows, for up to 32."""


def pipe_spec(arch: str, page: int, mode: ScaleMode, rows: int, *, v_packed: bool = True) -> AttentionSpec:
    """The pipe for a GQA group of ``rows``, or of half of them with two query tokens for more than 16."""
    length = 2 if rows > 16 else 1
    return AttentionSpec(arch, 256, page, rows // length, length, "bf16", mode, v_packed, False, False, "d256_pipe")


@dataclass(frozen=True)
class Loads:
    """Loads from one cache per tile: wave-instructions, 64-byte lines asked for, distinct ones, distinct bytes."""

    instructions: int
    lines: int
    distinct: int
    bytes: int


@dataclass(frozen=True)
class TileCounts:
    """One tile of a workgroup.

    ``classes``: wave-instructions by the names of ``CLASSES``. ``choices``: executed v_cndmask. ``matrix_cycles``: of
    the mean SIMD. ``in_flight``: most bytes of K and V that have been asked for and not waited for. ``cycles``: of the
    model, alone on a compute unit with a memory latency of 650 cycles; ``slow`` with 2000.
    """

    classes: dict[str, int]
    choices: int
    matrix_cycles: float
    keys: Loads
    values: Loads
    in_flight: int
    cycles: float
    slow: float
    resources: Resources

    @property
    def instructions(self) -> int:
        """Wave-instructions."""
        return sum(self.classes.values())


@functools.cache
def count_tile(spec: AttentionSpec) -> TileCounts:
    """The difference of two launches."""
    longer, shorter = (_trace(spec, tiles) for tiles in (TILES, TILES - 1))
    loads = {name: _less(longer.loads(name), shorter.loads(name)) for name in ("k_cache", "v_cache")}
    return TileCounts(
        classes={name: longer.classes[name] - shorter.classes[name] for name in CLASSES},
        choices=longer.choices - shorter.choices,
        matrix_cycles=longer.matrix_cycles - shorter.matrix_cycles,
        keys=loads["k_cache"],
        values=loads["v_cache"],
        in_flight=longer.in_flight(),
        cycles=longer.cycles(650) - shorter.cycles(650),
        slow=longer.cycles(2000) - shorter.cycles(2000),
        resources=longer.trace.resources,
    )


def bars(spec: AttentionSpec, counts: TileCounts, sixteen: TileCounts | None = None) -> list[Bar]:
    """What the loop is held to. ``sixteen``: counts of the same kernel for 16 rows, to compare those of 32 with."""
    public = PUBLIC[spec.arch, spec.page_size, spec.scale_mode]
    limit = SHARE * public if spec.rows <= 16 else MORE_ROWS * SHARE * public
    found = [Bar("instructions", counts.instructions, limit)]
    if sixteen is not None:
        found.append(Bar("instructions, of those for 16 rows", counts.instructions, MORE_ROWS * sixteen.instructions))
    names = ("LDS read", "LDS write", "barrier", "store")
    found += [Bar(name, counts.classes[name], 0) for name in names]
    # No masks: the choice of a share by lane and, where the two runs of 32 rows are kept apart by lanes, of 8 words.
    choices = 0 if spec.scale_mode == "tensor" else 9 if spec.rows > 16 and spec.arch == "gfx942" else 1
    found.append(Bar("v_cndmask", counts.choices, WAVES * choices))
    for name, loads in (("K", counts.keys), ("V", counts.values)):
        # Plain V for 32 rows comes in pieces of 32 bytes, two per line.
        pieces = 2 if name == "V" and spec.rows > 16 and spec.page_size == 64 and not spec.v_packed else 1
        found.append(Bar(f"{name} bytes", loads.bytes, TILE_BYTES // 2))
        found.append(Bar(f"{name} lines over distinct ones", loads.lines, pieces * loads.distinct))
        found.append(Bar(f"{name} distinct lines", 64 * loads.distinct, TILE_BYTES // 2))
    found.append(Bar("bytes that are not in flight", TILE_BYTES - counts.in_flight, 0))
    return found


def _less(a: Loads, b: Loads) -> Loads:
    return Loads(*(x - y for x, y in zip(vars(a).values(), vars(b).values(), strict=True)))


@dataclass(frozen=True)
class _Traced:
    trace: Any
    spans: dict[str, tuple[int, int]]

    @property
    def classes(self) -> dict[str, int]:
        counters = self.trace.counters
        return {name: sum(counters[kind] for kind in kinds) for name, kinds in CLASSES.items()}

    @property
    def choices(self) -> int:
        return sum(line.executed for line in self.trace.counters.lines if "v_cndmask" in line.text)

    @property
    def matrix_cycles(self) -> float:
        return self.trace.counters.mfma_cycles / SIMDS_PER_CU

    def cycles(self, latency: int) -> float:
        parameters = DEFAULTS[self.trace.resources.arch].__class__(
            **{**vars(DEFAULTS[self.trace.resources.arch]), "memory_latency": latency, "store_latency": latency}
        )
        return float(cdna_emu.simulate(self.trace, parameters).cycles)

    def _which(self, name: str) -> Any:
        """Indices of the accesses to a tensor."""
        first = self.trace.accesses["address"][:, 0]
        start, end = self.spans[name]
        return np.flatnonzero((first >= start) & (first < end))

    def loads(self, name: str) -> Loads:
        which = self._which(name)
        trace = self.trace
        lines = int(trace.lines(64)[which].sum())
        return Loads(len(which), lines, trace.distinct_lines(which, 64), trace.unique_bytes(which))

    def in_flight(self) -> int:
        """Most bytes of K and V that all waves together have on their way, each wave at its own best moment."""
        trace, total = self.trace, 0
        caches = {int(i) for name in ("k_cache", "v_cache") for i in self._which(name)}
        texts = [instruction.text for instruction in trace.instructions]
        kinds = [kind_of(instruction.mnemonic) for instruction in trace.instructions]
        for wave in range(trace.waves):
            pending: list[int] = []
            most = 0
            for event in trace.events[trace.events["wave"] == wave]:
                if kinds[event["insn"]]:
                    size = int(trace.accesses["bytes"][event["access"] - 1]) * 64 if event["access"] else 0
                    pending.append(size if int(event["access"]) - 1 in caches else 0)
                    most = max(most, sum(pending))
                elif wait := re.search(r"vmcnt\((\d+)\)", texts[event["insn"]]):
                    pending = pending[len(pending) - min(len(pending), int(wait[1])) :]
            total += most
        return total


def _trace(spec: AttentionSpec, tiles: int) -> _Traced:
    draw = torch.Generator().manual_seed(7)
    blocks = tiles * TILE // spec.page_size
    shape = blocks, spec.page_size, 2, 256
    later = torch.ones((blocks, 1, 1, 1))
    later[TILE // spec.page_size :] = 0.25
    inputs = make_inputs(
        [tiles * TILE],
        group=spec.group_size,
        head_dim=256,
        page=spec.page_size,
        query_length=spec.query_length,
        scale_mode=spec.scale_mode,
        v_packed=spec.v_packed,
        flavour=flavour(spec.arch),
        k=torch.randn(shape, generator=draw) * later,
        v=torch.randn(shape, generator=draw) * later,
    )
    for name in ("k_cache", "v_cache"):
        cache = getattr(inputs, name)
        placed = aligned(cache.numel() // 4).view(cache.dtype).view(cache.shape)
        object.__setattr__(inputs, name, placed.copy_(cache))
    assert inputs.k_cache.data_ptr() % LINE == 0
    launcher = TracingLauncher(spec.arch, (0, 1, 0))
    with env.override(jit=True):
        kernel = launcher.kernel(spec)
    work = work_of(inputs, 1)
    kernel(spec.grid(1, 2), arguments(inputs, work, empty_partials(inputs, 1)))
    return _Traced(kernel.trace, kernel.spans)
