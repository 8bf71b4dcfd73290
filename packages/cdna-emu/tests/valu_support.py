"""Inputs with special values, and one vector instruction on them."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from asm import assemble

from cdna_emu.native import State, run_instruction

ARCHS = ("gfx942", "gfx950")
LANES = 64
MODE = 0x3F0
"""Round to nearest, keep denormals, IEEE and DX10 clamp: what compilers ask for."""

_rng = np.random.default_rng(7)

INT_SPECIAL = (0, 1, 2, 31, 32, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF)
INT_SPECIAL += (0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF)
F32_SPECIAL = (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF)
F32_SPECIAL += (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x3F000000, 0x40200000, 0xC0600000, 0x4F000000)
F16_SPECIAL = (
    0,
    0x8000,
    1,
    0x8001,
    0x03FF,
    0x0400,
    0x3C00,
    0xBC00,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
    0x3800,
)
F16_SPECIAL += (0x3555, 0x4248, 0xC500)

U32 = npt.NDArray[np.uint32]


def ints(turn: int) -> U32:
    """64 random integers with special ones among them, another pairing for each `turn`."""
    values = _rng.integers(0, 1 << 32, LANES, np.uint32)
    values[_places(turn, len(INT_SPECIAL))] = INT_SPECIAL
    return values


def floats(turn: int) -> U32:
    """Bits of 64 float32 of mixed size with special ones among them."""
    values = (_rng.standard_normal(LANES) * np.exp2(_rng.integers(-20, 20, LANES))).astype(np.float32).view(np.uint32)
    values[_places(turn, len(F32_SPECIAL))] = F32_SPECIAL
    return values


def halves(turn: int) -> U32:
    """64 pairs of float16 with special ones among them."""
    pair = []
    for half in range(2):
        bits = (_rng.standard_normal(LANES) * np.exp2(_rng.integers(-8, 8, LANES))).astype(np.float16).view(np.uint16)
        bits[_places(turn + half, len(F16_SPECIAL))] = F16_SPECIAL
        pair.append(bits.astype(np.uint32))
    return pair[0] | pair[1] << 16


def doubles(turn: int) -> npt.NDArray[np.float64]:
    """64 float64 with special ones among them."""
    values = _rng.standard_normal(LANES) * np.exp2(_rng.integers(-200, 200, LANES))
    special = np.array(
        [0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.0, -1.0, np.inf, -np.inf, np.nan, 1.7e308, 0.5]
    )
    values[_places(turn, len(special))] = special
    return values


def _places(turn: int, count: int) -> npt.NDArray[np.int64]:
    return (np.arange(count) * (1 + 2 * turn) + 5 * turn) % LANES


def run(text: str, vgpr: Mapping[int, npt.ArrayLike], arch: str = "gfx950", mode: int = MODE, **state: object) -> State:
    """Execute `text`; findings fail."""
    after = run_instruction(arch, assemble(text, arch), vgpr=vgpr, mode=mode, **state)  # type: ignore[arg-type]
    assert not after.findings, [str(finding) for finding in after.findings]
    return after


def f32(bits: U32) -> npt.NDArray[np.float32]:
    return bits.view(np.float32)


def low(bits: U32) -> npt.NDArray[np.uint16]:
    return (bits & 0xFFFF).astype(np.uint16)


def high(bits: U32) -> npt.NDArray[np.uint16]:
    return (bits >> 16).astype(np.uint16)


def pair(values: npt.NDArray[np.float64]) -> tuple[U32, U32]:
    """Low and high registers of 64-bit values."""
    bits = values.view(np.uint64)
    return (bits & 0xFFFFFFFF).astype(np.uint32), (bits >> 32).astype(np.uint32)


def joined(state: State, register: int) -> npt.NDArray[np.uint64]:
    """The 64-bit values of two VGPRs."""
    return state.vgpr(register).astype(np.uint64) | state.vgpr(register + 1).astype(np.uint64) << np.uint64(32)


def assert_same_f32(got: U32, expected: npt.ArrayLike, ulp: int = 0) -> None:
    """Equal bits, or both NaN, or at most `ulp` steps apart."""
    wanted = np.asarray(expected, np.float32)
    have = f32(got)
    ok = (have.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(have) & np.isnan(wanted))
    if ulp:
        steps = np.abs(have.view(np.int32).astype(np.int64) - wanted.view(np.int32))
        ok |= np.isfinite(wanted) & (steps <= ulp)
    assert ok.all(), [(int(n), have[n], wanted[n]) for n in np.flatnonzero(~ok)]


def assert_same_f16(got: npt.NDArray[np.uint16], expected: npt.ArrayLike, ulp: int = 0) -> None:
    """As ``assert_same_f32``."""
    wanted = np.asarray(expected, np.float16)
    have = got.view(np.float16)
    ok = (got == wanted.view(np.uint16)) | (np.isnan(have) & np.isnan(wanted))
    if ulp:
        ok |= np.isfinite(wanted) & (np.abs(got.astype(int) - wanted.view(np.uint16)) <= ulp)
    assert ok.all(), [(int(n), have[n], wanted[n]) for n in np.flatnonzero(~ok)]
