"""Vector ALU outside VOP3P against numpy, on random and special values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from valu_support import (
    ARCHS,
    LANES,
    MODE,
    U32,
    assert_same_f16,
    assert_same_f32,
    doubles,
    f32,
    floats,
    halves,
    high,
    ints,
    joined,
    low,
    pair,
    run,
)

Array = npt.NDArray[Any]
I64, U64 = np.int64, np.uint64


def signed(x: U32) -> Array:
    return x.view(np.int32).astype(I64)


def wide(x: U32) -> Array:
    return x.astype(U64)


def as_u32(x: Array) -> U32:
    return (np.asarray(x).astype(I64) & 0xFFFFFFFF).astype(np.uint32)


def signed24(x: U32) -> Array:
    return signed((x << np.uint32(8)).astype(np.uint32)) >> 8


def reversed_bits(x: int) -> int:
    return int(f"{x:032b}"[::-1], 2)


def each(function: Callable[..., int]) -> Callable[..., U32]:
    """A function of Python integers on arrays of them."""
    return lambda *args: np.array(
        [function(*map(int, lane)) & 0xFFFFFFFF for lane in zip(*args, strict=True)], np.uint32
    )


def bfe_i32(x: int, offset: int, width: int) -> int:
    offset, width = offset & 31, width & 31
    field = x >> offset & (1 << width) - 1
    return field - (1 << width) if width and field >> (width - 1) else field


def perm(a: int, b: int, selectors: int) -> int:
    both = [(a << 32 | b) >> 8 * n & 0xFF for n in range(8)]
    chosen = [selectors >> 8 * n & 0xFF for n in range(4)]
    pick = [
        both[s] if s < 8 else (0xFF if both[2 * s - 15] & 0x80 else 0) if s < 12 else 0 if s == 12 else 0xFF
        for s in chosen
    ]
    return sum(byte << 8 * n for n, byte in enumerate(pick))


INTEGER: dict[str, Callable[..., U32]] = {
    "v_mov_b32 v0, v1": lambda a: a,
    "v_not_b32 v0, v1": lambda a: ~a,
    "v_bfrev_b32 v0, v1": each(reversed_bits),
    "v_ffbh_u32 v0, v1": each(lambda a: 32 - a.bit_length() if a else -1),
    "v_ffbl_b32 v0, v1": each(lambda a: (a & -a).bit_length() - 1),
    "v_ffbh_i32 v0, v1": each(
        lambda a: 32 - (a ^ (0xFFFFFFFF * (a >> 31))).bit_length() if a not in (0, 0xFFFFFFFF) else -1
    ),
    "v_and_b32 v0, v1, v2": lambda a, b: a & b,
    "v_or_b32 v0, v1, v2": lambda a, b: a | b,
    "v_xor_b32 v0, v1, v2": lambda a, b: a ^ b,
    "v_xnor_b32 v0, v1, v2": lambda a, b: ~(a ^ b),
    "v_add_u32 v0, v1, v2": lambda a, b: a + b,
    "v_sub_u32 v0, v1, v2": lambda a, b: a - b,
    "v_subrev_u32 v0, v1, v2": lambda a, b: b - a,
    "v_add_u32_e64 v0, v1, v2 clamp": lambda a, b: as_u32(np.minimum(wide(a) + wide(b), U64(0xFFFFFFFF))),
    "v_sub_u32_e64 v0, v1, v2 clamp": lambda a, b: as_u32(np.maximum(wide(a).astype(I64) - wide(b).astype(I64), 0)),
    "v_add_i32 v0, v1, v2 clamp": lambda a, b: as_u32(np.clip(signed(a) + signed(b), -(1 << 31), (1 << 31) - 1)),
    "v_sub_i32 v0, v1, v2": lambda a, b: a - b,
    "v_lshlrev_b32 v0, v1, v2": lambda a, b: b << (a & 31),
    "v_lshrrev_b32 v0, v1, v2": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32 v0, v1, v2": lambda a, b: as_u32(signed(b) >> (a & 31).astype(I64)),
    "v_min_i32 v0, v1, v2": lambda a, b: as_u32(np.minimum(signed(a), signed(b))),
    "v_max_i32 v0, v1, v2": lambda a, b: as_u32(np.maximum(signed(a), signed(b))),
    "v_min_u32 v0, v1, v2": np.minimum,
    "v_max_u32 v0, v1, v2": np.maximum,
    "v_mul_lo_u32 v0, v1, v2": lambda a, b: a * b,
    "v_mul_hi_u32 v0, v1, v2": lambda a, b: as_u32((wide(a) * wide(b)) >> U64(32)),
    "v_mul_hi_i32 v0, v1, v2": lambda a, b: as_u32((signed(a) * signed(b)) >> 32),
    "v_mul_u32_u24 v0, v1, v2": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_hi_u32_u24 v0, v1, v2": lambda a, b: as_u32((wide(a & 0xFFFFFF) * wide(b & 0xFFFFFF)) >> U64(32)),
    "v_mul_i32_i24 v0, v1, v2": lambda a, b: as_u32(signed24(a) * signed24(b)),
    "v_mul_hi_i32_i24 v0, v1, v2": lambda a, b: as_u32((signed24(a) * signed24(b)) >> 32),
    "v_bfm_b32 v0, v1, v2": lambda a, b: ((np.uint32(1) << (a & 31)) - 1) << (b & 31),
    "v_bcnt_u32_b32 v0, v1, v2": each(lambda a, b: b + a.bit_count()),
    "v_mad_u32_u24 v0, v1, v2, v3": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24 v0, v1, v2, v3": lambda a, b, c: as_u32(signed24(a) * signed24(b) + signed(c)),
    "v_add3_u32 v0, v1, v2, v3": lambda a, b, c: a + b + c,
    "v_lshl_add_u32 v0, v1, v2, v3": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 v0, v1, v2, v3": lambda a, b, c: (a + b) << (c & 31),
    "v_lshl_or_b32 v0, v1, v2, v3": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32 v0, v1, v2, v3": lambda a, b, c: a & b | c,
    "v_or3_b32 v0, v1, v2, v3": lambda a, b, c: a | b | c,
    "v_xad_u32 v0, v1, v2, v3": lambda a, b, c: (a ^ b) + c,
    "v_min3_i32 v0, v1, v2, v3": lambda a, b, c: as_u32(np.min([signed(a), signed(b), signed(c)], 0)),
    "v_max3_i32 v0, v1, v2, v3": lambda a, b, c: as_u32(np.max([signed(a), signed(b), signed(c)], 0)),
    "v_med3_i32 v0, v1, v2, v3": lambda a, b, c: as_u32(np.median([signed(a), signed(b), signed(c)], 0)),
    "v_min3_u32 v0, v1, v2, v3": lambda a, b, c: np.min([a, b, c], 0),
    "v_max3_u32 v0, v1, v2, v3": lambda a, b, c: np.max([a, b, c], 0),
    "v_med3_u32 v0, v1, v2, v3": lambda a, b, c: as_u32(np.median([a, b, c], 0)),
    "v_bfe_u32 v0, v1, v2, v3": each(lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1),
    "v_bfe_i32 v0, v1, v2, v3": each(bfe_i32),
    "v_bfi_b32 v0, v1, v2, v3": lambda a, b, c: a & b | ~a & c,
    "v_perm_b32 v0, v1, v2, v3": each(perm),
    "v_perm_b32 v0, v1, v2, s8": each(lambda a, b: perm(a, b, 0x07060302)),
    "v_alignbit_b32 v0, v1, v2, v3": each(lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32 v0, v1, v2, v3": each(lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_sad_u8 v0, v1, v2, v3": each(
        lambda a, b, c: c + sum(abs((a >> n & 255) - (b >> n & 255)) for n in (0, 8, 16, 24))
    ),
    "v_sad_u32 v0, v1, v2, v3": each(lambda a, b, c: c + abs(a - b)),
    "v_mul_lo_u32 v0, v1, s7": lambda a: a * np.uint32(0xDEADBEEF),
    "v_add_u32 v0, 0x12345678, v1": lambda a: a + np.uint32(0x12345678),
    "v_lshl_add_u32 v0, v1, 3, -16": lambda a: (a << 3) - np.uint32(16),
    "v_add_u32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1": lambda a, b: (
        (a >> 16 & 255) + (b >> 16)
    ),
}


@pytest.mark.parametrize("text", INTEGER)
def test_integer_ops(text: str) -> None:
    function = INTEGER[text]
    for turn in range(3):
        sources = [ints(turn + k) for k in range(3)]
        if "v_perm" in text:
            sources[2] = (sources[2] & 0x0F0F0F0F).astype(np.uint32)
        used = sources[
            : function.__code__.co_argcount if hasattr(function, "__code__") and function.__code__.co_argcount else 3
        ]
        if isinstance(function, np.ufunc):
            used = sources[:2]
        elif function.__code__.co_argcount == 0:
            used = sources[: 1 + ("v2" in text) + ("v3" in text)]
        got = run(text, dict(enumerate(sources, 1)), sgpr={7: 0xDEADBEEF, 8: 0x07060302}).vgpr(0)
        expected = np.asarray(function(*used)).astype(np.uint32)
        assert (got == expected).all(), np.flatnonzero(got != expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_only_active_lanes_are_written(arch: str) -> None:
    exec_mask = 0x8000_0001_F0F0_00FF
    active = np.array([exec_mask >> n & 1 for n in range(LANES)], bool)
    state = run("v_add_u32 v0, v1, v2", {0: 7, 1: ints(0), 2: 5}, arch, exec_mask=exec_mask)
    assert (state.vgpr(0) == np.where(active, ints_at(state, 1) + 5, 7)).all()


def ints_at(state: Any, register: int) -> U32:
    return np.asarray(state.vgpr(register), np.uint32)


def mask_of(lanes: Array) -> int:
    return sum(1 << int(n) for n in np.flatnonzero(lanes))


def lanes_of(mask: int) -> Array:
    return np.array([mask >> n & 1 for n in range(LANES)], U64)


VCC_IN = 0xA5A5_0F0F_3C3C_9669


@pytest.mark.parametrize(
    ("text", "sign", "carry_in", "reverse"),
    [
        ("v_add_co_u32_e32 v0, vcc, v1, v2", 1, False, False),
        ("v_sub_co_u32_e32 v0, vcc, v1, v2", -1, False, False),
        ("v_subrev_co_u32_e32 v0, vcc, v1, v2", -1, False, True),
        ("v_addc_co_u32_e32 v0, vcc, v1, v2, vcc", 1, True, False),
        ("v_subb_co_u32_e32 v0, vcc, v1, v2, vcc", -1, True, False),
        ("v_subbrev_co_u32_e32 v0, vcc, v1, v2, vcc", -1, True, True),
        ("v_addc_co_u32_e64 v0, s[10:11], v1, v2, s[12:13]", 1, True, False),
        ("v_subb_co_u32_e64 v0, s[10:11], v1, v2, s[12:13]", -1, True, False),
    ],
)
def test_carries(text: str, sign: int, carry_in: bool, reverse: bool) -> None:
    a, b = ints(1), ints(2)
    a[:8] = b[:8]
    exec_mask = 0xFFFF_FFFF_0FFF_FFFF
    state = run(text, {1: a, 2: b}, vcc=VCC_IN, sgpr={12: VCC_IN}, exec_mask=exec_mask)
    x, y = (b, a) if reverse else (a, b)
    exact = x.astype(I64) + sign * (y.astype(I64) + (lanes_of(VCC_IN).astype(I64) if carry_in else 0))
    active = lanes_of(exec_mask).astype(bool)
    assert (state.vgpr(0)[active] == as_u32(exact)[active]).all()
    expected = mask_of(((exact < 0) | (exact > 0xFFFFFFFF)) & active)
    assert (state.sgpr(10) | state.sgpr(11) << 32 if "e64" in text else state.vcc) == expected


def test_select_takes_vcc_or_a_pair_and_modifiers() -> None:
    a, b = floats(0), floats(1)
    chosen = lanes_of(VCC_IN).astype(bool)
    state = run("v_cndmask_b32_e32 v0, v1, v2, vcc", {1: a, 2: b}, vcc=VCC_IN)
    assert (state.vgpr(0) == np.where(chosen, b, a)).all()
    state = run("v_cndmask_b32_e64 v0, -v1, |v2|, s[4:5]", {1: a, 2: b}, sgpr={4: VCC_IN})
    assert (state.vgpr(0) == np.where(chosen, b & 0x7FFFFFFF, a ^ 0x80000000)).all()


def test_64_bit_integers() -> None:
    a, b, c = ints(0), ints(1), np.arange(LANES, dtype=np.uint32)
    base = {1: c, 2: a, 3: b, 4: ints(2), 5: ints(3)}
    value = wide(a) | wide(b) << U64(32)
    assert (joined(run("v_lshlrev_b64 v[8:9], v1, v[2:3]", base), 8) == value << wide(c)).all()
    assert (joined(run("v_lshrrev_b64 v[8:9], v1, v[2:3]", base), 8) == value >> wide(c)).all()
    got = joined(run("v_ashrrev_i64 v[8:9], v1, v[2:3]", base), 8)
    assert (got.view(I64) == value.view(I64) >> c.astype(I64)).all()
    addend = wide(base[4]) | wide(base[5]) << U64(32)
    assert (joined(run("v_lshl_add_u64 v[8:9], v[2:3], 4, v[4:5]", base), 8) == (value << U64(4)) + addend).all()
    state = run("v_mad_u64_u32 v[8:9], s[10:11], v2, v3, v[4:5]", base)
    exact = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, addend, strict=True)]
    assert [int(x) for x in joined(state, 8)] == [x & (1 << 64) - 1 for x in exact]
    assert state.sgpr(10) | state.sgpr(11) << 32 == sum((x >> 64) << n for n, x in enumerate(exact))
    state = run("v_mad_i64_i32 v[8:9], vcc, v2, v3, v[4:5]", base)
    exact = [int(x) * int(y) + int(z) for x, y, z in zip(signed(a), signed(b), addend.view(I64), strict=True)]
    assert [int(x) for x in joined(state, 8)] == [x & (1 << 64) - 1 for x in exact]
    assert (joined(run("v_mov_b64 v[8:9], v[2:3]", base), 8) == value).all()
    assert (joined(run("v_mov_b64 v[8:9], 1.0", base), 8) == 0x3FF0_0000_0000_0000).all()
    assert (joined(run("v_mov_b64 v[8:9], -3", base), 8) == (1 << 64) - 3).all()


def test_moves_between_lanes_and_register_files() -> None:
    a, b = ints(0), ints(1)
    assert run("v_readfirstlane_b32 s4, v1", {1: a}, exec_mask=0xF0).sgpr(4) == a[4]
    assert run("v_readfirstlane_b32 s4, v1", {1: a}, exec_mask=0).sgpr(4) == a[0]
    assert run("v_readlane_b32 s4, v1, s5", {1: a}, sgpr={5: 64 + 33}).sgpr(4) == a[33]
    state = run("v_writelane_b32 v0, s4, 61", {0: a}, sgpr={4: 77}, exec_mask=0)
    assert (state.vgpr(0) == np.where(np.arange(LANES) == 61, 77, a)).all()
    state = run("v_swap_b32 v0, v1", {0: a, 1: b})
    assert (state.vgpr(0) == b).all() and (state.vgpr(1) == a).all()
    assert (run("v_accvgpr_write_b32 a3, v1", {1: a}).agpr(3) == a).all()
    assert (run("v_accvgpr_write_b32 a3, 1.0", {}).agpr(3) == 0x3F800000).all()
    assert (run("v_accvgpr_read_b32 v0, a3", {}, agpr={3: a}).vgpr(0) == a).all()
    assert (run("v_accvgpr_mov_b32 a4, a3", {}, agpr={3: a}).agpr(4) == a).all()


def test_mbcnt_counts_the_lanes_below() -> None:
    mask = VCC_IN
    below = np.array([(mask & (1 << n) - 1).bit_count() for n in range(LANES)])
    text = "v_mbcnt_lo_u32_b32 v0, s4, 0\nv_mbcnt_hi_u32_b32 v0, s5, v0"
    assert (run(text, {}, sgpr={4: mask}).vgpr(0) == below).all()


def test_permlane_swaps_exchange_rows() -> None:
    lanes = np.arange(LANES, dtype=np.uint32)
    state = run("v_permlane32_swap_b32 v0, v1", {0: lanes, 1: 100 + lanes})
    assert (state.vgpr(0) == np.where(lanes < 32, lanes, 100 + lanes - 32)).all()
    assert (state.vgpr(1) == np.where(lanes < 32, lanes + 32, 100 + lanes)).all()
    state = run("v_permlane16_swap_b32 v0, v1", {0: lanes, 1: 100 + lanes})
    odd = lanes // 16 % 2 == 1
    assert (state.vgpr(0) == np.where(odd, 100 + lanes - 16, lanes)).all()
    assert (state.vgpr(1) == np.where(odd, 100 + lanes, lanes + 16)).all()


@pytest.mark.parametrize("table", [0x00, 0x36, 0x6C, 0x78, 0x96, 0xCA, 0xF6, 0xFF])
def test_bitop3_follows_its_truth_table(table: int) -> None:
    a, b, c = ints(0), ints(1), ints(2)
    index = [(a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1) for n in range(32)]
    expected = sum(
        ((np.uint32(table) >> i & 1) << np.uint32(n) for n, i in enumerate(index)), np.zeros(LANES, np.uint32)
    )
    assert (run(f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table}", {1: a, 2: b, 3: c}).vgpr(0) == expected).all()
    state = run(f"v_bitop3_b16 v0, v1, v2, v3 bitop3:{table}", {0: 0xABCD1234, 1: a, 2: b, 3: c})
    assert (state.vgpr(0) == (0xABCD0000 | expected & 0xFFFF)).all()


# ---- f32


def fma(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float32 with one rounding, by exact rational arithmetic."""
    from fractions import Fraction

    out = np.empty(LANES, np.float32)
    for n, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        if not np.isfinite([x, y, z]).all():
            out[n] = np.float64(x) * np.float64(y) + np.float64(z)
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        out[n] = nearest_f32(exact) if exact else np.float32(x) * np.float32(y) + np.float32(z)
    return out


def nearest_f32(exact: Any) -> np.float32:
    """The float32 nearest to a rational number, ties to even."""
    guess = np.float32(float(exact)) if abs(exact) < 1 << 128 else np.float32(np.inf * (1 if exact > 0 else -1))
    if np.isinf(guess):
        limit = (2**24 - 1) * 2**104 + 2**103
        return guess if abs(exact) >= limit else np.float32(np.sign(float(exact))) * np.finfo(np.float32).max
    from fractions import Fraction

    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    finite = [value for value in near if np.isfinite(value)]
    return min(finite, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1))


def ieee_min(a: Array, b: Array) -> Array:
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def ieee_max(a: Array, b: Array) -> Array:
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def flushed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Denormals become zeros of their sign."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


F32: dict[str, Callable[..., Array]] = {
    "v_add_f32 v0, v1, v2": lambda a, b, c: a + b,
    "v_sub_f32 v0, v1, v2": lambda a, b, c: a - b,
    "v_subrev_f32 v0, v1, v2": lambda a, b, c: b - a,
    "v_mul_f32 v0, v1, v2": lambda a, b, c: a * b,
    "v_mul_f32_e64 v0, -v1, |v2|": lambda a, b, c: -a * abs(b),
    "v_add_f32_e64 v0, -|v1|, v2": lambda a, b, c: b - abs(a),
    "v_mul_legacy_f32 v0, v1, v2": lambda a, b, c: np.where((a == 0) | (b == 0), np.float32(0), a * b),
    "v_fma_f32 v0, v1, v2, v3": fma,
    "v_fma_f32 v0, -v1, v2, -v3": lambda a, b, c: fma(-a, b, -c),
    "v_fmac_f32 v3, v1, v2": fma,
    "v_fmamk_f32 v0, v1, 0x3fc90fdb, v3": lambda a, b, c: fma(
        a, np.full(LANES, 0x3FC90FDB, np.uint32).view(np.float32), c
    ),
    "v_fmaak_f32 v0, v1, v2, 0x3fc90fdb": lambda a, b, c: fma(
        a, b, np.full(LANES, 0x3FC90FDB, np.uint32).view(np.float32)
    ),
    "v_min_f32 v0, v1, v2": lambda a, b, c: ieee_min(a, b),
    "v_max_f32 v0, v1, v2": lambda a, b, c: ieee_max(a, b),
    "v_min3_f32 v0, v1, v2, v3": lambda a, b, c: ieee_min(ieee_min(a, b), c),
    "v_max3_f32 v0, v1, v2, v3": lambda a, b, c: ieee_max(ieee_max(a, b), c),
    "v_trunc_f32 v0, v1": lambda a, b, c: np.trunc(a),
    "v_ceil_f32 v0, v1": lambda a, b, c: np.ceil(a),
    "v_floor_f32 v0, v1": lambda a, b, c: np.floor(a),
    "v_rndne_f32 v0, v1": lambda a, b, c: np.rint(a),
    "v_frexp_mant_f32 v0, v1": lambda a, b, c: np.where(np.isfinite(a), np.frexp(a)[0], a),
    "v_rcp_f32 v0, v1": lambda a, b, c: flushed(np.float32(1) / flushed(a)),
    "v_add_f32 v0, 0.15915494, v1": lambda a, b, c: a + np.uint32(0x3E22F983).view(np.float32),
}


@pytest.mark.parametrize("text", F32)
def test_f32_arithmetic_is_exact(text: str) -> None:
    destination = int(text.split()[1].strip("v,"))
    for turn in range(3):
        bits = [floats(turn + k) for k in range(3)]
        with np.errstate(all="ignore"):
            expected = F32[text](*map(f32, bits))
        assert_same_f32(run(text, dict(enumerate(bits, 1))).vgpr(destination), expected)


def test_minimum3_and_maximum3_let_nan_through() -> None:
    a, b, c = floats(0), floats(1), floats(2)
    x, y, z = f32(a), f32(b), f32(c)
    nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
    for name, function in (("minimum3", ieee_min), ("maximum3", ieee_max)):
        expected = np.where(nan, np.float32(np.nan), function(function(x, y), z))
        assert_same_f32(run(f"v_{name}_f32 v0, v1, v2, v3", {1: a, 2: b, 3: c}).vgpr(0), expected)


def test_med3() -> None:
    a, b, c = floats(0), floats(1), floats(2)
    x, y, z = f32(a), f32(b), f32(c)
    nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
    expected = np.where(nan, np.fmin(np.fmin(x, y), z), np.median([x, y, z], 0).astype(np.float32))
    got = f32(run("v_med3_f32 v0, v1, v2, v3", {1: a, 2: b, 3: c}).vgpr(0))
    assert ((got == expected) | (np.isnan(got) & np.isnan(expected))).all()


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("v_sqrt_f32 v0, v1", np.sqrt),
        ("v_rsq_f32 v0, v1", lambda a: 1 / np.sqrt(a)),
        ("v_exp_f32 v0, v1", np.exp2),
        ("v_log_f32 v0, v1", np.log2),
    ],
)
def test_transcendental_results_within_one_step_and_without_denormals(
    text: str, function: Callable[[Array], Array]
) -> None:
    for turn in range(2):
        bits = floats(turn)
        if turn:
            bits = (np.random.default_rng(3).uniform(-150, 130, LANES)).astype(np.float32).view(np.uint32)
        x = f32(bits).astype(np.float64)
        x = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)
        with np.errstate(all="ignore"):
            y = function(x).astype(np.float32)
        y = np.where(np.abs(y) < np.float32(2.0**-126), np.copysign(np.float32(0), y), y)
        assert_same_f32(run(text, {1: bits}).vgpr(0), y, ulp=1)


def test_sine_takes_revolutions() -> None:
    x = np.linspace(-255, 255, LANES).astype(np.float32)
    with np.errstate(all="ignore"):
        turns = 2 * np.pi * (x.astype(np.float64) % 1)
    assert np.abs(f32(run("v_sin_f32 v0, v1", {1: x}).vgpr(0)) - np.sin(turns)).max() < 1e-6
    assert np.abs(f32(run("v_cos_f32 v0, v1", {1: x}).vgpr(0)) - np.cos(turns)).max() < 1e-6
    assert (f32(run("v_sin_f32 v0, v1", {1: np.full(64, 257.25, np.float32)}).vgpr(0)) == 0).all()


def test_fract_is_below_one() -> None:
    x = f32(floats(0)).copy()
    x[40] = -1e-20
    with np.errstate(all="ignore"):
        expected = np.minimum(x - np.floor(x), np.float32(1 - 2**-24))
    assert_same_f32(run("v_fract_f32 v0, v1", {1: x}).vgpr(0), expected)


def test_exponents() -> None:
    a, n = floats(0), np.arange(-150, -150 + 5 * LANES, 5).astype(np.int32)
    with np.errstate(all="ignore"):
        expected = np.ldexp(f32(a).astype(np.float64), n).astype(np.float32)
        exponent = np.where(np.isfinite(f32(a)), np.frexp(f32(a))[1], 0)
    assert_same_f32(run("v_ldexp_f32 v0, v1, v2", {1: a, 2: n}).vgpr(0), expected)
    assert (run("v_frexp_exp_i32_f32 v0, v1", {1: a}).vgpr(0).view(np.int32) == exponent).all()


def test_modes_of_denormals() -> None:
    tiny = np.uint32(0x00400000)
    half = 0x3F000000
    assert (run("v_add_f32 v0, v1, v2", {1: tiny, 2: tiny}).vgpr(0) == 0x00800000).all()
    assert (run("v_add_f32 v0, v1, v2", {1: tiny, 2: tiny}, mode=0x300).vgpr(0) == 0).all()  # inputs flushed
    assert (run("v_mul_f32 v0, v1, v2", {1: 0x00800000, 2: half}, mode=0x310).vgpr(0) == 0).all()  # result flushed
    assert (run("v_mul_f32 v0, v1, v2", {1: 0x80800000, 2: half}, mode=0x310).vgpr(0) == 0x80000000).all()
    assert (run("v_mul_f32 v0, v1, v2", {1: 0x00800000, 2: half}, mode=0x320).vgpr(0) == tiny).all()
    assert (run("v_max_f32 v0, v1, v1", {1: tiny}, mode=0x300).vgpr(0) == 0).all()
    assert (run("v_mov_b32 v0, v1", {1: tiny}, mode=0x300).vgpr(0) == tiny).all()


@pytest.mark.parametrize(("rounding", "expected"), [(0, 0x3F800000), (1, 0x3F800001), (2, 0x3F800000), (3, 0x3F800000)])
def test_modes_of_rounding(rounding: int, expected: int) -> None:
    state = run("v_add_f32 v0, v1, v2", {1: 0x3F800000, 2: 0x30000000}, mode=MODE | rounding)
    assert (state.vgpr(0) == expected).all()
    state = run("v_add_f32 v0, v1, v2", {1: 0xBF800000, 2: 0xB0000000}, mode=MODE | rounding)
    assert (state.vgpr(0) == (0xBF800001 if rounding == 2 else 0xBF800000)).all()


def test_clamp_and_output_scale() -> None:
    a = floats(0)
    with np.errstate(all="ignore"):
        expected = np.where(np.isnan(f32(a)), 0, np.clip(f32(a), 0, 1)) + np.float32(0)
    assert_same_f32(run("v_add_f32_e64 v0, v1, 0 clamp", {1: a}).vgpr(0), expected)
    kept = f32(run("v_add_f32_e64 v0, v1, 0 clamp", {1: a}, mode=0x2F0).vgpr(0))
    assert (np.isnan(kept) == np.isnan(f32(a))).all()
    x = np.linspace(-3, 3, LANES).astype(np.float32)
    for text, factor in (("mul:2", 2), ("mul:4", 4), ("div:2", 0.5)):
        assert_same_f32(
            run(f"v_add_f32_e64 v0, v1, 1.0 {text}", {1: x}, mode=0x100).vgpr(0), (x + 1) * np.float32(factor)
        )
        assert_same_f32(run(f"v_add_f32_e64 v0, v1, 1.0 {text}", {1: x}).vgpr(0), x + 1)  # ignored beside denormals


def test_signaling_nan_in_minimum_and_maximum() -> None:
    signaling, one = np.uint32(0x7F800001), np.uint32(0x3F800000)
    for text in ("v_min_f32 v0, v1, v2", "v_max_f32 v0, v2, v1"):
        assert (run(text, {1: signaling, 2: one}).vgpr(0) == 0x7FC00001).all()
        assert (run(text, {1: signaling, 2: one}, mode=0xF0).vgpr(0) == one).all()


DIVIDE = """
v_div_scale_f32 v3, s[4:5], v2, v2, v1
v_div_scale_f32 v4, vcc, v1, v2, v1
v_rcp_f32 v5, v3
v_fma_f32 v6, -v3, v5, 1.0
v_fma_f32 v5, v6, v5, v5
v_mul_f32 v6, v4, v5
v_fma_f32 v7, -v3, v6, v4
v_fma_f32 v6, v7, v5, v6
v_fma_f32 v7, -v3, v6, v4
v_div_fmas_f32 v7, v7, v5, v6
v_div_fixup_f32 v0, v7, v2, v1
"""


def test_llvms_division_rounds_correctly() -> None:
    rng = np.random.default_rng(11)
    for turn in range(6):
        a, b = floats(turn), floats(turn + 1)
        if turn > 2:
            a, b = (rng.integers(0, 1 << 32, LANES, np.uint32) for _ in range(2))
        if turn == 5:  # huge denominators, tiny quotients
            b = (b & 0x807FFFFF | 0x7E800000 + (b >> 3 & 0x00800000)).astype(np.uint32)
        with np.errstate(all="ignore"):
            expected = f32(a) / f32(b)
        got = run(DIVIDE, {1: a, 2: b}).vgpr(0)
        tiny = np.abs(expected) < np.float32(2.0**-126)
        assert_same_f32(np.where(tiny, 0, got).astype(np.uint32), np.where(tiny, np.float32(0), expected))
        assert_same_f32(np.where(tiny, got, 0).astype(np.uint32), np.where(tiny, expected, np.float32(0)), ulp=1)


# ---- f64


def test_f64_arithmetic() -> None:
    a, b, c = doubles(0), doubles(1), doubles(2)
    registers = dict(zip(range(2, 8), (*pair(a), *pair(b), *pair(c)), strict=True))
    with np.errstate(all="ignore"):
        cases = {
            "v_add_f64 v[0:1], v[2:3], v[4:5]": a + b,
            "v_add_f64 v[0:1], v[2:3], -|v[4:5]|": a - abs(b),
            "v_mul_f64 v[0:1], v[2:3], v[4:5]": a * b,
            "v_mul_f64 v[0:1], v[2:3], 0.5": a * 0.5,
            "v_add_f64 v[0:1], v[2:3], s[8:9]": a + 3.25,
            "v_fma_f64 v[0:1], v[2:3], 1.0, v[6:7]": a + c,
            "v_min_f64 v[0:1], v[2:3], v[4:5]": ieee_min(a, b),
            "v_max_f64 v[0:1], v[2:3], v[4:5]": ieee_max(a, b),
            "v_rcp_f64 v[0:1], v[2:3]": 1 / a,
            "v_sqrt_f64 v[0:1], v[2:3]": np.sqrt(a),
            "v_trunc_f64 v[0:1], v[2:3]": np.trunc(a),
            "v_floor_f64 v[0:1], v[2:3]": np.floor(a),
            "v_ceil_f64 v[0:1], v[2:3]": np.ceil(a),
            "v_rndne_f64 v[0:1], v[2:3]": np.rint(a),
            "v_ldexp_f64 v[0:1], v[2:3], 7": np.ldexp(a, 7),
        }
    three = int(np.float64(3.25).view(np.uint64))
    for text, expected in cases.items():
        got = joined(run(text, registers, sgpr={8: three & 0xFFFFFFFF, 9: three >> 32}), 0).view(np.float64)
        same = (got.view(np.uint64) == np.asarray(expected).view(np.uint64)) | (np.isnan(got) & np.isnan(expected))
        assert same.all(), (text, got[~same], np.asarray(expected)[~same])


# ---- f16 and 16-bit integers

F16: dict[str, Callable[[Array, Array], Array]] = {
    "v_add_f16 v0, v1, v2": lambda a, b: a + b,
    "v_sub_f16 v0, v1, v2": lambda a, b: a - b,
    "v_subrev_f16 v0, v1, v2": lambda a, b: b - a,
    "v_mul_f16 v0, v1, v2": lambda a, b: a * b,
    "v_mul_f16_e64 v0, -v1, |v2|": lambda a, b: -a * abs(b),
    "v_add_f16 v0, 0.15915494, v1": lambda a, b: a + np.uint16(0x3118).view(np.float16),
    "v_min_f16 v0, v1, v2": ieee_min,
    "v_max_f16 v0, v1, v2": ieee_max,
    "v_rcp_f16 v0, v1": lambda a, b: 1 / a.astype(np.float64),
    "v_sqrt_f16 v0, v1": lambda a, b: np.sqrt(a.astype(np.float64)),
    "v_floor_f16 v0, v1": lambda a, b: np.floor(a),
    "v_rndne_f16 v0, v1": lambda a, b: np.rint(a),
    "v_exp_f16 v0, v1": lambda a, b: np.exp2(a.astype(np.float64)),
    "v_log_f16 v0, v1": lambda a, b: np.log2(a.astype(np.float64)),
    "v_cvt_f16_u16 v0, v1": lambda a, b: a.view(np.uint16).astype(np.float32),
    "v_cvt_f16_i16 v0, v1": lambda a, b: a.view(np.int16).astype(np.float32),
}


@pytest.mark.parametrize("text", F16)
def test_f16_arithmetic_clears_the_high_half(text: str) -> None:
    for turn in range(3):
        bits = [halves(turn), halves(turn + 1)]
        with np.errstate(all="ignore"):
            expected = F16[text](*(low(b).view(np.float16) for b in bits))
            expected = np.asarray(expected).astype(np.float16)
        state = run(text, {0: 0xFFFFFFFF, 1: bits[0], 2: bits[1]})
        assert_same_f16(low(state.vgpr(0)), expected, ulp=1 if "exp" in text or "log" in text else 0)
        assert (high(state.vgpr(0)) == 0).all()


def half_fma(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float16: longdouble holds the exact value of all but the most distant operands."""
    with np.errstate(all="ignore"):
        return (a.astype(np.longdouble) * b + c).astype(np.float16)


def test_f16_fma_keeps_the_other_half_and_takes_op_sel() -> None:
    a, b, c = halves(0), halves(1), halves(2)
    state = run("v_fma_f16 v0, v1, v2, v3 op_sel:[1,0,1,1]", {0: 0x1234ABCD, 1: a, 2: b, 3: c})
    expected = half_fma(*(x.view(np.float16) for x in (high(a), low(b), high(c))))
    assert_same_f16(high(state.vgpr(0)), expected)
    assert (low(state.vgpr(0)) == 0xABCD).all()
    state = run("v_fma_f16 v0, v1, v2, -v3", {0: 0x1234ABCD, 1: a, 2: b, 3: c})
    assert_same_f16(low(state.vgpr(0)), half_fma(*(x.view(np.float16) for x in (low(a), low(b), low(c) ^ 0x8000))))
    assert (high(state.vgpr(0)) == 0x1234).all()


def test_f16_denormals_follow_the_mode() -> None:
    assert (run("v_add_f16 v0, v1, v2", {1: 0x0200, 2: 0x0200}).vgpr(0) == 0x0400).all()
    assert (run("v_add_f16 v0, v1, v2", {1: 0x0200, 2: 0x0200}, mode=0x330).vgpr(0) == 0).all()
    assert (run("v_mul_f16 v0, v1, v2", {1: 0x0400, 2: 0x3800}).vgpr(0) == 0x0200).all()
    assert (run("v_mul_f16 v0, v1, v2", {1: 0x0400, 2: 0x3800}, mode=0x370).vgpr(0) == 0).all()


I16: dict[str, Callable[..., Array]] = {
    "v_add_u16 v0, v1, v2": lambda a, b, c: a + b,
    "v_sub_u16 v0, v1, v2": lambda a, b, c: a - b,
    "v_subrev_u16 v0, v1, v2": lambda a, b, c: b - a,
    "v_mul_lo_u16 v0, v1, v2": lambda a, b, c: a * b,
    "v_lshlrev_b16 v0, v1, v2": lambda a, b, c: b << (a & 15),
    "v_lshrrev_b16 v0, v1, v2": lambda a, b, c: b >> (a & 15),
    "v_ashrrev_i16 v0, v1, v2": lambda a, b, c: b.view(np.int16) >> (a & 15).view(np.int16),
    "v_min_u16 v0, v1, v2": lambda a, b, c: np.minimum(a, b),
    "v_max_u16 v0, v1, v2": lambda a, b, c: np.maximum(a, b),
    "v_min_i16 v0, v1, v2": lambda a, b, c: np.minimum(a.view(np.int16), b.view(np.int16)),
    "v_max_i16 v0, v1, v2": lambda a, b, c: np.maximum(a.view(np.int16), b.view(np.int16)),
    "v_mad_u16 v0, v1, v2, v3": lambda a, b, c: a * b + c,
    "v_med3_u16 v0, v1, v2, v3": lambda a, b, c: np.median([a, b, c], 0).astype(np.uint16),
    "v_max3_i16 v0, v1, v2, v3": lambda a, b, c: np.max([a.view(np.int16), b.view(np.int16), c.view(np.int16)], 0),
}


@pytest.mark.parametrize("text", I16)
def test_16_bit_integers(text: str) -> None:
    for turn in range(3):
        bits = [ints(turn + k) for k in range(3)]
        expected = I16[text](*map(low, bits)).view(np.uint16)
        # Every other turn with MODE.FP16_OVFL, which clamps results of f16 and leaves integers alone.
        state = run(text, {0: 0xABCD0000, **dict(enumerate(bits, 1))}, mode=MODE | turn % 2 << 23)
        assert (low(state.vgpr(0)) == expected).all()
        assert (high(state.vgpr(0)) == (0xABCD if "v3" in text else 0)).all()
