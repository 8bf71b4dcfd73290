"""Launching a kernel: from a code object and arguments to results, findings and counters."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cdna_emu import native
from cdna_emu.assembler import assemble
from cdna_emu.codeobject import CodeObject, Kernel
from cdna_emu.counters import LDS_BYTES, Counters, Resources, resources
from cdna_emu.decode import Instruction
from cdna_emu.errors import EmulationError
from cdna_emu.kernarg import Packed, hidden_arguments, pack
from cdna_emu.native import ARCHS, LANES, Count, NativeFinding
from cdna_emu.report import KERNARG, PACKET, Report, Span, findings_from

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
MAX_BLOCK = 1024
FINDING_LIMIT = 256  # different ones, per piece of the grid
CHUNKS_PER_THREAD = 8  # pieces of the grid: small enough to even out, large enough not to be felt
NO_MEMORY = 2  # cdna_run
FATAL = {"unsupported", "budget"}  # what ends a wave before its s_endpgm

Extent = int | Sequence[int]


@dataclass(frozen=True)
class Result:
    """What a launch gave.

    Attributes:
        kernel: its symbol. report: what it did wrong. counters: what it executed.
        completed: False if a wave did not reach its end: the results are not those of the kernel.
    """

    kernel: str
    report: Report
    counters: Counters
    completed: bool

    @property
    def registers(self) -> Resources:
        """Registers, LDS and occupancy."""
        return self.counters.resources


# Launching the same bytes again decodes nothing.
_parse = functools.lru_cache(maxsize=16)(CodeObject.parse)


def load(code: bytes | str | CodeObject, arch: str | None = None) -> CodeObject:
    """A code object from ELF bytes or .s text. ValueError if it is not for ``arch`` or for none that is known."""
    if arch is not None and arch not in ARCHS:
        raise ValueError(f"arch: got {arch!r}, expected one of {', '.join(ARCHS)}")
    if isinstance(code, str):
        code = assemble(code, arch)
    parsed = _parse(code) if isinstance(code, bytes) else code
    if parsed.arch not in ARCHS or arch not in {None, parsed.arch}:
        raise ValueError(f"arch: got a code object for {parsed.arch}, expected {arch or ' or '.join(ARCHS)}")
    return parsed


def extent(value: Extent, name: str) -> tuple[int, int, int]:
    """One to three positive sizes as x, y, z."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int) and 0 < size < 1 << 31 for size in sizes):
        raise ValueError(f"{name}: got {value}, expected one to three positive integers")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def launch(
    code: bytes | str | CodeObject,
    *,
    grid: Extent,
    block: Extent,
    kernel: str | None = None,
    args: Sequence[Any] | None = None,
    kernarg: bytes | None = None,
    ranges: Sequence[tuple[int, int, bool]] = (),
    dynamic_lds: int = 0,
    arch: str | None = None,
    checks: bool = True,
    order: str = "forward",
    seed: int = 0,
    threads: int | None = None,
    budget: int = 50_000_000,
    report_buffer_bounds: bool = False,
    strict: bool = True,
) -> Result:
    """Run a kernel on the CPU. Device addresses are host addresses: arrays are read and written in place.

    Args:
        code: a code object (ELF bytes), a parsed one, or .s text (needs Triton's assembler).
        grid: workgroups, x[, y[, z]]. block: work-items of a workgroup, at most 1,024 in all.
        kernel: symbol; may be left out if the code object has one kernel.
        args: one value per argument that is not hidden. Pointers: numpy arrays (writable unless flagged read-only),
            torch CPU tensors, None, or an integer address. By value: int, float, bytes, numpy or ctypes scalars. Up to
            two pointers at the end may be left out (null): Triton's scratch pointers.
        kernarg: the kernel arguments as bytes, instead of ``args``. ranges: (address, bytes, writable) of memory that
            the kernel may touch, beside that of ``args``.
        dynamic_lds: bytes of LDS on top of what the kernel declares.
        arch: "gfx942" or "gfx950"; needed only for .s text that does not say it.
        checks: look for races, uninitialised reads, missing waits and hazards; bounds are always checked.
        order: in which the waves of a workgroup run: "forward", "reverse" or "random" (by ``seed``).
        threads: over workgroups, default one per core. Kernels with global atomics run on one thread, workgroups in
            ascending order, for results not to depend on chance.
        budget: instructions that a wave may execute.
        report_buffer_bounds: report buffer accesses that the resource's range check catches.
        strict: raise EmulationError if a wave cannot go on; otherwise ``Result.completed`` says so.

    ValueError and TypeError for arguments that do not fit the kernel; nothing has run then.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads: got {threads}, expected a positive number")
    prepared = prepare(
        code,
        grid=grid,
        block=block,
        kernel=kernel,
        args=args,
        kernarg=kernarg,
        ranges=ranges,
        dynamic_lds=dynamic_lds,
        arch=arch,
        checks=checks,
        order=order,
        seed=seed,
        budget=budget,
        report_buffer_bounds=report_buffer_bounds,
    )
    instructions = prepared.instructions
    count = 1 if prepared.program.has_atomics else threads or len(os.sched_getaffinity(0))
    counts, found, dropped, failed = run_groups(
        prepared.shared, prepared.grid, prepared.setup, len(instructions), count
    )
    symbol = prepared.program.name
    report = Report(
        findings_from(found, instructions, kernel=symbol, spans=prepared.spans), kernel=symbol, dropped=dropped
    )
    if strict and failed:
        raise failure(report)
    counters = Counters(
        instructions, prepared.program.classes, counts, resources=prepared.resources, groups=math.prod(prepared.grid)
    )
    return Result(symbol, report, counters, not failed)


def failure(report: Report) -> EmulationError:
    """What to raise when a wave did not reach its end."""
    fatal = [finding for finding in report if finding.kind in FATAL] or list(report)
    return EmulationError(f"{report.kernel}: a wave could not go on\n" + "\n".join(map(str, fatal[:3])))


@dataclass
class Prepared:
    """A launch whose arguments were checked: what the core is called with. ``alive``: memory that it points to."""

    program: Kernel
    grid: tuple[int, int, int]
    instructions: Sequence[Instruction]
    shared: native.Launch
    setup: native.Setup
    resources: Resources
    spans: list[Span]
    alive: Any


def prepare(
    code: bytes | str | CodeObject,
    *,
    grid: Extent,
    block: Extent,
    kernel: str | None = None,
    args: Sequence[Any] | None = None,
    kernarg: bytes | None = None,
    ranges: Sequence[tuple[int, int, bool]] = (),
    dynamic_lds: int = 0,
    arch: str | None = None,
    checks: bool = True,
    order: str = "forward",
    seed: int = 0,
    budget: int = 50_000_000,
    report_buffer_bounds: bool = False,
) -> Prepared:
    """Check the arguments of ``launch``; errors as there."""
    parsed = load(code, arch)
    program = parsed.kernel(kernel)
    groups, items = extent(grid, "grid"), extent(block, "block")
    if math.prod(items) > MAX_BLOCK:
        raise ValueError(f"block: got {math.prod(items)} work-items, expected at most {MAX_BLOCK}")
    if math.prod(items) > program.max_workgroup_size:
        raise ValueError(
            f"block: got {math.prod(items)} work-items, expected at most the {program.max_workgroup_size} that "
            f"{program.name} was compiled for"
        )
    lds = program.lds_bytes + dynamic_lds
    if dynamic_lds < 0 or lds > LDS_BYTES[parsed.arch]:
        raise ValueError(
            f"dynamic_lds: got {dynamic_lds} with {program.lds_bytes} bytes static, expected at most "
            f"{LDS_BYTES[parsed.arch]} bytes of LDS in all on {parsed.arch}"
        )
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}, expected one of {', '.join(ORDERS)}")
    if budget < 1:
        raise ValueError(f"budget: got {budget}, expected a positive number")

    packed = kernel_arguments(program, args, kernarg, hidden_arguments(groups, items, dynamic_lds))
    for number, (address, size, writable) in enumerate(ranges):
        packed.spans.append((address, size, writable, len(packed.alive) + number))
    setup, memory = initial_registers(program, groups, items, lds, packed)
    instructions = program.instructions
    table = program.records
    known = native.ranges_of(packed.spans)
    waves = -(-math.prod(items) // LANES)
    shared = native.Launch(
        code=native.insns_of(table),
        code_count=len(table),
        arch=ARCHS[parsed.arch],
        ranges=known,
        range_count=len(known),
        lds_bytes=lds,
        waves=waves,
        checks=checks,
        report_buffer_bounds=report_buffer_bounds,
        order=ORDERS[order],
        seed=seed & 0xFFFFFFFF,
        budget=budget,
    )
    facts = resources(
        parsed.arch,
        vgprs=program.vgprs + program.agprs,
        agprs=program.agprs,
        sgprs=program.sgprs,
        lds_bytes=lds,
        scratch_bytes=program.scratch_bytes,
        waves=waves,
    )
    return Prepared(program, groups, instructions, shared, setup, facts, packed.spans, (packed, memory, table))


def kernel_arguments(
    program: Kernel, args: Sequence[Any] | None, kernarg: bytes | None, hidden: dict[str, int]
) -> Packed:
    """The kernarg segment, from values or as it is."""
    if kernarg is None:
        return pack(program.args, program.kernarg_size, args or (), hidden)
    if args is not None:
        raise ValueError("kernarg: got bytes beside args, expected one of the two")
    if len(kernarg) != program.kernarg_size:
        raise ValueError(f"kernarg: got {len(kernarg)} bytes, expected {program.kernarg_size}")
    return Packed(bytearray(kernarg))


def initial_registers(
    program: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], lds: int, packed: Packed
) -> tuple[native.Setup, list[npt.NDArray[np.uint8]]]:
    """What waves start with, and the memory behind it: kernarg segment and dispatch packet, which must stay alive."""
    descriptor = program.descriptor
    if descriptor.workgroup_info:
        raise EmulationError(
            f"{program.name}: its descriptor asks for the workgroup info register, which is unsupported"
        )
    if descriptor.dynamic_stack:
        raise EmulationError(
            f"{program.name}: its descriptor asks for a stack of dynamic size, which is unsupported: how much scratch "
            "memory a lane has is not known"
        )
    arguments, kernarg = aligned(packed.data)
    packet, dispatch = aligned(dispatch_packet(program, grid, block, lds, kernarg))
    # Compilers read whole aligned 16 bytes of the segment.
    packed.spans.append((kernarg, -(-len(packed.data) // 16) * 16, False, KERNARG))
    packed.spans.append((dispatch, PACKET_BYTES, False, PACKET))
    values = {"kernarg_segment_ptr": kernarg, "dispatch_ptr": dispatch, "private_segment_size": program.scratch_bytes}
    registers = [0] * 16
    for group in descriptor.user_sgprs:
        if group.name == "kernarg_preload":
            start = 4 * descriptor.preload_offset
            value = int.from_bytes(packed.data[start : start + 4 * group.count], "little")
        else:
            value = values.get(group.name, 0)
        for r in range(group.count):
            registers[group.first + r] = value >> 32 * r & 0xFFFFFFFF
    setup = native.Setup(
        block=block,
        user_sgprs=descriptor.user_sgpr_count,
        user_sgpr=tuple(registers),
        workgroup_id=tuple(map(int, descriptor.workgroup_id)),
        workitem_id=descriptor.workitem_id,
        # The MODE register: rounding and denormals, DX10_CLAMP, IEEE.
        mode=program.mode | descriptor.dx10_clamp << 8 | descriptor.ieee_mode << 9,
        scratch_bytes=program.scratch_bytes,
    )
    return setup, [arguments, packet]


PACKET_BYTES = 64


def dispatch_packet(
    program: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], lds: int, kernarg: int
) -> bytes:
    """An AQL kernel dispatch packet (HSA platform system architecture specification, 2.9.6) without a kernel object."""
    items = [groups * size for groups, size in zip(grid, block, strict=True)]
    return struct.pack("<2H3H2x3I2I4Q", 2, 3, *block, *items, program.scratch_bytes, lds, 0, kernarg, 0, 0)


def aligned(data: bytes | bytearray, alignment: int = 64) -> tuple[npt.NDArray[np.uint8], int]:
    """Memory that holds ``data`` at an aligned address, zeros behind it up to the alignment; and that address."""
    size = max(1, -(-len(data) // alignment)) * alignment
    memory = np.zeros(size + alignment, np.uint8)
    skip = -memory.ctypes.data % alignment
    memory[skip : skip + len(data)] = np.frombuffer(data, np.uint8)
    return memory, memory.ctypes.data + skip


def run_groups(
    shared: native.Launch, grid: tuple[int, int, int], setup: native.Setup, code_count: int, threads: int
) -> tuple[npt.NDArray[np.uint64], list[NativeFinding], int, bool]:
    """Run all workgroups; counts [instructions, fields], findings, how many were dropped, and whether a wave failed."""
    library = native.core()
    groups = math.prod(grid)
    pieces = min(groups, threads * CHUNKS_PER_THREAD) if threads > 1 else 1
    bounds = [groups * piece // pieces for piece in range(pieces + 1)]
    extents = (ctypes.c_uint32 * 3)(*grid)

    def run_piece(piece: int) -> tuple[npt.NDArray[np.uint64], ctypes.Array[NativeFinding], int, int]:
        counts = np.zeros((code_count, len(native.COUNT_FIELDS)), np.uint64)
        findings = (NativeFinding * FINDING_LIMIT)()
        made = ctypes.c_uint32(0)
        first, last = bounds[piece], bounds[piece + 1]
        pointer = counts.ctypes.data_as(ctypes.POINTER(Count))
        status = library.cdna_run(shared, extents, first, last, setup, pointer, findings, FINDING_LIMIT, made)
        return counts, findings, made.value, status

    if pieces == 1:
        ended = [run_piece(0)]
    else:
        with ThreadPoolExecutor(min(threads, pieces)) as pool:
            ended = list(pool.map(run_piece, range(pieces)))
    if any(status == NO_MEMORY for *_, status in ended):
        raise MemoryError("a launch needs more memory than there is, for registers, LDS and scratch of a workgroup")
    totals = np.zeros((code_count, len(native.COUNT_FIELDS)), np.uint64)
    # The core keeps the first finding of a kind and place in a piece; this, of the launch, whatever the pieces.
    kept: dict[tuple[int, int, int], NativeFinding] = {}
    dropped = 0
    for counts, findings, made, _ in ended:
        totals += counts
        dropped += max(0, made - FINDING_LIMIT)
        for finding in findings[: min(made, FINDING_LIMIT)]:
            kept.setdefault((finding.kind, finding.insn, finding.other_insn), finding)
    return totals, list(kept.values()), dropped, any(status for *_, status in ended)
