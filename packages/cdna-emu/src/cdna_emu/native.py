"""The compiled core: ctypes mirrors of core.h, and single instructions for tests.

The structures are those of ``core/core.h``, field by field; loading the core compares their sizes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_int, c_int32, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cdna_emu import env, ops
from cdna_emu.errors import CoreMissingError

if TYPE_CHECKING:
    from cdna_emu.report import Finding

LANES, SGPRS, VGPRS, MAX_WAVES = 64, 128, 512, 16
AGPR_BASE = 256  # AGPRs follow the VGPRs in Wave.vgpr
VCC_LO, M0, EXEC_LO = 106, 124, 126
ALL_LANES = (1 << LANES) - 1
ARCHS = {"gfx942": 0, "gfx950": 1}
FINDING_LIMIT = 256

U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]


class Operand(ctypes.Structure):
    """A register range, constant or literal of an instruction."""

    _fields_ = [("code", c_uint16), ("count", c_uint8), ("mods", c_uint8)]


class Insn(ctypes.Structure):
    """One decoded instruction."""

    _fields_ = [
        ("address", c_uint32),
        ("op", c_uint16),
        ("size", c_uint8),
        ("sources", c_uint8),
        ("dst", Operand),
        ("sdst", Operand),
        ("src", Operand * 4),
        ("literal", c_uint32),
        ("offset", c_int32),
        ("flags", c_uint32),
        ("sub", c_uint32),
    ]


class Wave(ctypes.Structure):
    """The registers of one wave."""

    _fields_ = [
        ("sgpr", c_uint32 * SGPRS),
        ("vgpr", c_uint32 * LANES * VGPRS),
        ("vgpr_init", c_uint64 * VGPRS),
        ("sgpr_init", c_uint64 * 2),
        ("scc", c_uint32),
        ("pc", c_uint32),
        ("mode", c_uint32),
        ("status", c_uint32),
        ("id", c_uint32),
        ("scratch_bytes", c_uint32),
        ("executed", c_uint64),
        ("scratch", c_void_p),
        ("scratch_init", c_void_p),
        ("checks", c_void_p),
    ]


class Range(ctypes.Structure):
    """Bytes of device memory that a kernel may touch."""

    _fields_ = [("start", c_uint64), ("end", c_uint64), ("writable", c_uint32), ("argument", c_uint32)]


class NativeFinding(ctypes.Structure):
    """``Finding`` of core.h; see ``cdna_emu.report.Finding`` for the one to read."""

    _fields_ = [
        ("kind", c_uint32),
        ("insn", c_uint32),
        ("wave", c_uint32),
        ("lane", c_uint32),
        ("group", c_uint32 * 3),
        ("other_insn", c_uint32),
        ("other_wave", c_uint32),
        ("detail", c_uint32),
        ("address", c_uint64),
    ]


COUNT_FIELDS = ("executed", "lanes", "bytes", "lines64", "lines128", "lines64_min", "lds_cycles", "lds_cycles_min")


class Count(ctypes.Structure):
    """What one instruction did, summed over waves."""

    _fields_ = [(name, c_uint64) for name in COUNT_FIELDS]


class TraceEvent(ctypes.Structure):
    """One executed instruction; ``access`` is 1 + an index in ``Trace.access``, or 0."""

    _fields_ = [("insn", c_uint32), ("wave", c_uint32), ("access", c_uint32), ("lds_cycles", c_uint32)]


class TraceAccess(ctypes.Structure):
    """Where the lanes of one global access went."""

    _fields_ = [("address", c_uint64 * LANES), ("mask", c_uint64), ("bytes", c_uint64)]


class Trace(ctypes.Structure):
    """Memory for the events of one workgroup."""

    _fields_ = [
        ("event", POINTER(TraceEvent)),
        ("access", POINTER(TraceAccess)),
        ("event_limit", c_uint64),
        ("access_limit", c_uint64),
        ("events", c_uint64),
        ("accesses", c_uint64),
    ]


class Launch(ctypes.Structure):
    """One launch, shared by the threads that run its workgroups."""

    _fields_ = [
        ("code", POINTER(Insn)),
        ("code_count", c_uint32),
        ("arch", c_uint32),
        ("ranges", POINTER(Range)),
        ("range_count", c_uint32),
        ("lds_bytes", c_uint32),
        ("waves", c_uint32),
        ("checks", c_uint32),
        ("report_buffer_bounds", c_uint32),
        ("order", c_uint32),
        ("seed", c_uint32),
        ("budget", c_uint64),
        ("trace", POINTER(Trace)),
    ]


class Setup(ctypes.Structure):
    """What a wave's registers hold when it starts."""

    _fields_ = [
        ("block", c_uint32 * 3),
        ("user_sgprs", c_uint32),
        ("user_sgpr", c_uint32 * 16),
        ("workgroup_id", c_uint32 * 3),
        ("workitem_id", c_uint32),
        ("mode", c_uint32),
        ("scratch_bytes", c_uint32),
    ]


# In the order of cdna_sizeof's argument.
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    *(Insn, Wave, Launch, Setup, Count, NativeFinding, Range),
    *(TraceEvent, TraceAccess, Trace),
)


def find_core() -> Path:
    """Path of the compiled core: CDNA_EMU_CORE if that is set, else the one beside this module.

    Raises CoreMissingError (an ImportError) if there is none.
    """
    chosen = env.core_path()
    path = chosen or Path(__file__).with_name("_core.so")
    if path.is_file():
        return path
    if chosen is not None:
        raise CoreMissingError(
            f"CDNA_EMU_CORE: got {chosen}, expected the path of a compiled core; there is no such file"
        )
    raise CoreMissingError(
        f"the compiled core of cdna-emu is missing ({path}). Install a wheel (pip install cdna-emu), or install a C "
        "compiler (the command cc, gcc or clang) and reinstall from source: the build compiles the core."
    )


@functools.cache
def core() -> ctypes.CDLL:
    """The loaded core, its structures checked against ours. ImportError if it is missing or of another version."""
    path = find_core()
    library = ctypes.CDLL(str(path))
    library.cdna_sizeof.argtypes, library.cdna_sizeof.restype = [c_int], c_uint32
    for which, structure in enumerate(STRUCTURES):
        got, expected = library.cdna_sizeof(which), ctypes.sizeof(structure)
        if got != expected:
            raise ImportError(
                f"{path} is of another version: {structure.__name__} has {got} bytes, expected {expected}; reinstall"
            )
    library.cdna_opcodes.argtypes, library.cdna_opcodes.restype = [], c_uint32
    if library.cdna_opcodes() != ops.fingerprint():
        raise ImportError(f"{path} is of another version: it was compiled from another table of opcodes; reinstall")
    library.cdna_run.restype = c_int
    library.cdna_run.argtypes = [
        POINTER(Launch),
        POINTER(c_uint32),
        c_uint64,
        c_uint64,
        POINTER(Setup),
        POINTER(Count),
        POINTER(NativeFinding),
        c_uint32,
        POINTER(c_uint32),
    ]
    library.cdna_step.restype = c_int
    library.cdna_step.argtypes = [
        POINTER(Launch),
        POINTER(Wave),
        POINTER(c_uint8),
        POINTER(Insn),
        POINTER(Count),
        POINTER(NativeFinding),
        c_uint32,
        POINTER(c_uint32),
    ]
    return library


def insns_of(table: npt.NDArray[np.void]) -> Any:
    """Pointer to the records of ``decode.records``; the array must outlive it."""
    return table.ctypes.data_as(POINTER(Insn))


def ranges_of(spans: Sequence[tuple[int, int, bool, int]]) -> ctypes.Array[Range]:
    """Known ranges, sorted as the core needs them. Each span: start, bytes, writable, number of the argument.

    Spans that overlap (one buffer passed twice) become one range, writable if one of them is.
    """
    merged: list[Range] = []
    for start, size, writable, argument in sorted(span for span in spans if span[1]):
        if merged and start < merged[-1].end:
            merged[-1].end = max(merged[-1].end, start + size)
            merged[-1].writable |= writable
        else:
            merged.append(Range(start, start + size, writable, argument))
    return (Range * len(merged))(*merged)


class State:
    """A wave after ``run_instruction``: registers as arrays that the caller owns."""

    def __init__(self, wave: Wave, lds: U8, findings: list[Finding], count: list[Count]) -> None:
        self._vgpr = np.ctypeslib.as_array(wave.vgpr).copy()
        self._sgpr = [int(value) for value in wave.sgpr]
        self.vgpr_init = [int(value) for value in wave.vgpr_init]
        self.scc = int(wave.scc)
        self.pc = int(wave.pc)
        self.status = int(wave.status)
        self.lds = lds
        self.findings = findings
        self.counts = count

    def vgpr(self, n: int) -> U32:
        """VGPR n, uint32 [64]."""
        return np.asarray(self._vgpr[n], np.uint32)

    def agpr(self, n: int) -> U32:
        """AGPR n, uint32 [64]."""
        return np.asarray(self._vgpr[AGPR_BASE + n], np.uint32)

    def sgpr(self, n: int) -> int:
        """SGPR n, or what else has an operand code below 128."""
        return self._sgpr[n]

    def _pair(self, n: int) -> int:
        return self._sgpr[n] | self._sgpr[n + 1] << 32

    @property
    def vcc(self) -> int:
        """VCC, 64 bits."""
        return self._pair(VCC_LO)

    @property
    def exec_mask(self) -> int:
        """EXEC, 64 bits."""
        return self._pair(EXEC_LO)

    @property
    def m0(self) -> int:
        """M0."""
        return self._sgpr[M0]


def _set_sgpr(wave: Wave, n: int, value: int, registers: int = 1) -> None:
    for r in range(registers):
        wave.sgpr[n + r] = value >> 32 * r & 0xFFFFFFFF
        wave.sgpr_init[(n + r) // 64] |= 1 << (n + r) % 64


def _set_vgpr(wave: Wave, n: int, value: npt.ArrayLike) -> None:
    view = np.ctypeslib.as_array(wave.vgpr)
    bits = np.asarray(value)
    if bits.dtype.itemsize == 4 and bits.dtype != np.uint32:
        bits = bits.view(np.uint32)
    view[n] = bits.astype(np.uint32)
    wave.vgpr_init[n] = ALL_LANES


def run_instruction(
    arch: str,
    code: bytes,
    *,
    vgpr: Mapping[int, npt.ArrayLike] | None = None,
    agpr: Mapping[int, npt.ArrayLike] | None = None,
    sgpr: Mapping[int, int] | None = None,
    exec_mask: int = -1,
    vcc: int = 0,
    scc: int = 0,
    m0: int = 0,
    mode: int = 0xF0,
    lds: npt.NDArray[Any] | None = None,
    memory: Sequence[npt.NDArray[Any]] = (),
    checks: bool = False,
) -> State:
    """Execute machine code on one wave, from the first instruction to the last; branches are followed.

    Args:
        arch: "gfx942" or "gfx950".
        code: machine code; one instruction or several.
        vgpr, agpr: register number to 64 values of 32 bits (a scalar fills all lanes); the others hold 0.
        sgpr: register number to value; one of more than 32 bits fills the following registers too.
        mode: FLOAT_MODE; 0xF0 rounds to nearest and keeps denormals.
        lds: LDS of the workgroup, any dtype; it is not changed: ``State.lds`` is the LDS afterwards, as bytes.
        memory: arrays that the code may touch at their own addresses.
        checks: also look for uninitialised registers and missing waits; findings of bounds come without it.
    """
    from cdna_emu.decode import decode_text, records
    from cdna_emu.report import findings_from

    if arch not in ARCHS:
        raise ValueError(f"arch: got {arch!r}, expected one of {', '.join(ARCHS)}")
    instructions = decode_text(code, arch=arch)
    table = records(instructions)
    wave = Wave(scc=scc, mode=mode)
    for base, registers in ((0, vgpr), (AGPR_BASE, agpr)):
        for n, value in (registers or {}).items():
            _set_vgpr(wave, base + n, value)
    for n, number in (sgpr or {}).items():
        _set_sgpr(wave, n, number, max(1, -(-int(number).bit_length() // 32)))
    _set_sgpr(wave, EXEC_LO, exec_mask, 2)
    _set_sgpr(wave, VCC_LO, vcc, 2)
    _set_sgpr(wave, M0, m0)
    shared = np.zeros(0, np.uint8) if lds is None else np.ascontiguousarray(lds).reshape(-1).view(np.uint8)
    padded = np.zeros(-(-shared.size // 16) * 16 + 16, np.uint8)
    padded[: shared.size] = shared
    spans = [(a.ctypes.data, a.nbytes, bool(a.flags.writeable), n) for n, a in enumerate(memory)]
    ranges = ranges_of(spans)
    launch = Launch(
        code=insns_of(table),
        code_count=len(table),
        arch=ARCHS[arch],
        ranges=ranges,
        range_count=len(ranges),
        lds_bytes=shared.size,
        waves=1,
        checks=checks,
        report_buffer_bounds=1,
        budget=1 << 20,
    )
    counts = (Count * max(1, len(table)))()
    native = (NativeFinding * FINDING_LIMIT)()
    found = c_uint32(0)
    library = core()
    while wave.pc < len(table):
        index = int(wave.pc)
        failed = library.cdna_step(
            launch,
            wave,
            padded.ctypes.data_as(POINTER(c_uint8)),
            launch.code[index],
            counts[index],
            native,
            FINDING_LIMIT,
            found,
        )
        if failed or wave.status:
            break
    findings = findings_from(native[: min(found.value, FINDING_LIMIT)], instructions, kernel="", spans=spans)
    return State(wave, padded[: shared.size].copy(), findings, list(counts))
