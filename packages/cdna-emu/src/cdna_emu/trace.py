"""The instruction stream of one workgroup, with what the counters of a launch cannot tell: order and addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cdna_emu import native
from cdna_emu.counters import Counters, Resources
from cdna_emu.decode import Instruction
from cdna_emu.machine import failure, prepare
from cdna_emu.report import Report, findings_from

EVENT = np.dtype([("insn", "<u4"), ("wave", "<u4"), ("access", "<u4"), ("lds_cycles", "<u4")])
ACCESS = np.dtype([("address", "<u8", (native.LANES,)), ("mask", "<u8"), ("bytes", "<u8")])
EVENT_LIMIT, ACCESS_LIMIT = 1 << 23, 1 << 19  # 128 MB and 270 MB if they were ever filled
LANE = np.uint64(1) << np.arange(native.LANES, dtype=np.uint64)


@dataclass(frozen=True)
class Trace:
    """What the waves of one workgroup executed.

    Attributes:
        instructions: of the kernel; ``events["insn"]`` is an index into them.
        events: EVENT [n], in the order in which the emulator ran them: that of the program within a wave, and
            one wave after the other between barriers. ``access`` is 1 + an index into ``accesses``, or 0.
        accesses: ACCESS [m]: byte addresses of the lanes in ``mask``, ``bytes`` each, of every global access.
        counters: of the workgroup. resources: registers, LDS, occupancy. report: findings.
    """

    instructions: Sequence[Instruction]
    events: npt.NDArray[np.void]
    accesses: npt.NDArray[np.void]
    counters: Counters
    report: Report

    @property
    def resources(self) -> Resources:
        """Registers, LDS and occupancy."""
        return self.counters.resources

    @property
    def waves(self) -> int:
        """Of the workgroup."""
        return self.resources.waves

    def lines(self, size: int) -> npt.NDArray[np.int64]:
        """Distinct aligned lines of ``size`` bytes (a power of two) that each access touches, [m]."""
        first = self.accesses["address"] // np.uint64(size)
        end = self.accesses["address"] + self.accesses["bytes"][:, None] - np.uint64(1)
        both = np.concatenate([first, end // np.uint64(size)], axis=1)
        on = (self.accesses["mask"][:, None] & LANE) != 0
        on = np.concatenate([on, on], axis=1)
        # Lanes that are off repeat a line of a lane that is on.
        some = both[np.arange(len(both)), on.argmax(axis=1)]
        both = np.sort(np.where(on, both, some[:, None]), axis=1)
        changes: npt.NDArray[np.int64] = (both[:, 1:] != both[:, :-1]).sum(axis=1, dtype=np.int64)
        return 1 + changes

    def distinct_lines(self, which: npt.NDArray[np.intp], size: int) -> int:
        """Distinct aligned lines of ``size`` bytes that the accesses ``which`` touch together: the fewest requests."""
        chosen = self.accesses[which]
        on = (chosen["mask"][:, None] & LANE) != 0
        start = chosen["address"][on]
        end = (chosen["address"] + chosen["bytes"][:, None] - np.uint64(1))[on]
        return len(np.unique(np.concatenate([start // np.uint64(size), end // np.uint64(size)])))

    def unique_bytes(self, which: npt.NDArray[np.intp]) -> int:
        """Bytes of memory that the accesses ``which`` (indices into ``accesses``) touch, each counted once."""
        ends = []
        for size in np.unique(self.accesses["bytes"][which]):
            chosen = self.accesses[which[self.accesses["bytes"][which] == size]]
            start = np.unique(chosen["address"][(chosen["mask"][:, None] & LANE) != 0])
            ends.append(np.stack([start, start + size], axis=1))
        if not ends:
            return 0
        spans = np.concatenate(ends)
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
        before = np.maximum.accumulate(np.concatenate([spans[:1, 0], spans[:-1, 1]]))
        return int(np.maximum(spans[:, 1], before).sum() - np.maximum(spans[:, 0], before).sum())


def trace_group(
    code: Any,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    group: Sequence[int] = (0, 0, 0),
    checks: bool = False,
    **options: Any,
) -> Trace:
    """Run one workgroup of a launch, and record it. The other workgroups do not run.

    Args:
        code, grid, block, checks, options: as of ``launch`` (``threads``, ``strict`` left out).
        group: x[, y[, z]] of the workgroup.

    ValueError and TypeError as of ``launch``, and for a group outside the grid; EmulationError if a wave cannot go on;
    MemoryError if it executes more than ``EVENT_LIMIT`` instructions or ``ACCESS_LIMIT`` global accesses.
    """
    prepared = prepare(code, grid=grid, block=block, checks=checks, **options)
    x, y, z = (*group, 0, 0)[:3]
    width, height, depth = prepared.grid
    if not (0 <= x < width and 0 <= y < height and 0 <= z < depth):
        raise ValueError(f"group: got {tuple(group)}, expected a workgroup of the grid {prepared.grid}")
    number = x + width * (y + height * z)
    events, accesses = np.empty(EVENT_LIMIT, EVENT), np.empty(ACCESS_LIMIT, ACCESS)
    record = native.Trace(
        event=events.ctypes.data_as(ctypes.POINTER(native.TraceEvent)),
        access=accesses.ctypes.data_as(ctypes.POINTER(native.TraceAccess)),
        event_limit=EVENT_LIMIT,
        access_limit=ACCESS_LIMIT,
    )
    prepared.shared.trace = ctypes.pointer(record)
    counts = np.zeros((len(prepared.instructions), len(native.COUNT_FIELDS)), np.uint64)
    findings = (native.NativeFinding * native.FINDING_LIMIT)()
    made = ctypes.c_uint32(0)
    status = native.core().cdna_run(
        prepared.shared,
        (ctypes.c_uint32 * 3)(*prepared.grid),
        number,
        number + 1,
        prepared.setup,
        counts.ctypes.data_as(ctypes.POINTER(native.Count)),
        findings,
        native.FINDING_LIMIT,
        made,
    )
    symbol = prepared.program.name
    found = findings[: min(made.value, native.FINDING_LIMIT)]
    report = Report(
        findings_from(found, prepared.instructions, kernel=symbol, spans=prepared.spans),
        kernel=symbol,
        dropped=max(0, made.value - native.FINDING_LIMIT),
    )
    if status:
        raise failure(report)
    if record.events > EVENT_LIMIT or record.accesses > ACCESS_LIMIT:
        raise MemoryError(f"{symbol}: {record.events} instructions, {record.accesses} accesses are too many to trace")
    return Trace(
        prepared.instructions,
        events[: record.events].copy(),
        accesses[: record.accesses].copy(),
        Counters(prepared.instructions, prepared.program.classes, counts, resources=prepared.resources, groups=1),
        report,
    )
