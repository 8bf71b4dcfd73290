"""VOP3P and conversions against numpy, on random and special values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from asm import assemble
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

from cdna_emu.native import run_instruction

Array = npt.NDArray[Any]


def f16(bits: Array) -> Array:
    return bits.view(np.float16)


def packed(low_half: Array, high_half: Array) -> U32:
    return low_half.view(np.uint16).astype(np.uint32) | high_half.view(np.uint16).astype(np.uint32) << np.uint32(16)


I16: dict[str, Callable[..., Array]] = {
    "v_pk_add_u16": lambda a, b, c: a + b,
    "v_pk_sub_u16": lambda a, b, c: a - b,
    "v_pk_sub_i16": lambda a, b, c: a - b,
    "v_pk_mul_lo_u16": lambda a, b, c: a * b,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
    "v_pk_mad_i16": lambda a, b, c: a * b + c,
    "v_pk_lshlrev_b16": lambda a, b, c: b << (a & 15),
    "v_pk_lshrrev_b16": lambda a, b, c: b >> (a & 15),
    "v_pk_ashrrev_i16": lambda a, b, c: (b.view(np.int16) >> (a & 15).view(np.int16)).view(np.uint16),
    "v_pk_min_u16": lambda a, b, c: np.minimum(a, b),
    "v_pk_max_u16": lambda a, b, c: np.maximum(a, b),
    "v_pk_min_i16": lambda a, b, c: np.minimum(a.view(np.int16), b.view(np.int16)).view(np.uint16),
    "v_pk_max_i16": lambda a, b, c: np.maximum(a.view(np.int16), b.view(np.int16)).view(np.uint16),
}


@pytest.mark.parametrize("name", I16)
def test_packed_integers(name: str) -> None:
    third = ", v3" if "mad" in name else ""
    for turn in range(3):
        a, b, c = (ints(turn + k) for k in range(3))
        registers = {1: a, 2: b, 3: c}
        expected = packed(I16[name](low(a), low(b), low(c)), I16[name](high(a), high(b), high(c)))
        assert (run(f"{name} v0, v1, v2{third}", registers).vgpr(0) == expected).all()
        crossed = packed(I16[name](high(a), low(b), low(c)), I16[name](low(a), low(b), high(c)))
        select = "op_sel:[1,0,0] op_sel_hi:[0,0,1]" if third else "op_sel:[1,0] op_sel_hi:[0,0]"
        assert (run(f"{name} v0, v1, v2{third} {select}", registers).vgpr(0) == crossed).all()


def test_packed_integers_saturate() -> None:
    a, b = ints(0), ints(1)
    expected = packed(
        np.minimum(low(a).astype(int) + low(b), 0xFFFF).astype(np.uint16),
        np.minimum(high(a).astype(int) + high(b), 0xFFFF).astype(np.uint16),
    )
    assert (run("v_pk_add_u16 v0, v1, v2 clamp", {1: a, 2: b}).vgpr(0) == expected).all()


def least(a: Array, b: Array) -> Array:
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def greatest(a: Array, b: Array) -> Array:
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


F16: dict[str, Callable[..., Array]] = {
    "v_pk_add_f16": lambda a, b, c: a + b,
    "v_pk_mul_f16": lambda a, b, c: a * b,
    "v_pk_fma_f16": lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(np.float16),
    "v_pk_min_f16": lambda a, b, c: least(a, b),
    "v_pk_max_f16": lambda a, b, c: greatest(a, b),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", F16)
def test_packed_f16(name: str, arch: str) -> None:
    third = ", v3" if "fma" in name else ""
    function = F16[name]
    for turn in range(3):
        a, b, c = (halves(turn + k) for k in range(3))
        registers = {1: a, 2: b, 3: c}
        got = run(f"{name} v0, v1, v2{third}", registers, arch).vgpr(0)
        with np.errstate(all="ignore"):
            assert_same_f16(low(got), function(*(f16(low(x)) for x in (a, b, c))))
            assert_same_f16(high(got), function(*(f16(high(x)) for x in (a, b, c))))
        select = "op_sel:[1,0,1] op_sel_hi:[0,1,1]" if third else "op_sel:[1,0] op_sel_hi:[0,1]"
        negate = "neg_lo:[1,0,0] neg_hi:[0,1,1]" if third else "neg_lo:[1,0] neg_hi:[0,1]"
        got = run(f"{name} v0, v1, v2{third} {select} {negate}", registers, arch).vgpr(0)
        with np.errstate(all="ignore"):
            assert_same_f16(low(got), function(-f16(high(a)), f16(low(b)), f16(high(c))))
            assert_same_f16(high(got), function(f16(low(a)), -f16(high(b)), -f16(high(c))))


def test_packed_f16_constants_denormals_and_clamp() -> None:
    a = halves(0)
    got = run("v_pk_add_f16 v0, v1, 1.0 op_sel_hi:[1,0]", {1: a}).vgpr(0)
    with np.errstate(all="ignore"):
        assert_same_f16(low(got), f16(low(a)) + np.float16(1))
        assert_same_f16(high(got), f16(high(a)) + np.float16(1))
    assert (run("v_pk_add_f16 v0, v1, v1", {1: 0x02000200}).vgpr(0) == 0x04000400).all()
    assert (run("v_pk_add_f16 v0, v1, v1", {1: 0x02000200}, mode=0x330).vgpr(0) == 0).all()
    assert (run("v_pk_add_f16 v0, v1, v1 clamp", {1: 0x4000C000}).vgpr(0) == 0x3C000000).all()
    assert (run("v_pk_add_f16 v0, v1, v1 clamp", {1: 0x7E003000}).vgpr(0) == 0x00003400).all()


def test_packed_f32() -> None:
    for turn in range(3):
        bits = [floats(turn + k) for k in range(6)]
        registers = dict(enumerate(bits, 2))
        x = [f32(b) for b in bits]
        with np.errstate(all="ignore"):
            state = run("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", registers)
            assert_same_f32(state.vgpr(0), x[0] * x[2])
            assert_same_f32(state.vgpr(1), x[1] * x[3])
            state = run(
                "v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1] neg_hi:[1,0]", registers
            )
            assert_same_f32(state.vgpr(0), x[1] - x[2])
            assert_same_f32(state.vgpr(1), -x[0] + x[3])
            state = run(
                "v_pk_mul_f32 v[2:3], v[2:3], s[8:9] op_sel_hi:[1,0]", registers, sgpr={8: 0x40400000, 9: 0x3F000000}
            )
            assert_same_f32(state.vgpr(2), x[0] * np.float32(3))
            assert_same_f32(state.vgpr(3), x[1] * np.float32(3))
            exact = [x[k].astype(np.longdouble) * x[k + 2] + x[k + 4] for k in range(2)]
            state = run("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", registers)
            assert_same_f32(state.vgpr(0), exact[0].astype(np.float32), ulp=1)
            assert_same_f32(state.vgpr(1), exact[1].astype(np.float32), ulp=1)
        state = run("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]", registers)
        assert (state.vgpr(0) == bits[1]).all() and (state.vgpr(1) == bits[2]).all()


def test_second_half_of_a_constant_is_refused() -> None:
    code = assemble("v_pk_mul_f32 v[0:1], v[2:3], 2.0", "gfx950")
    assert run_instruction("gfx950", code).findings
    assert (
        run("v_pk_mul_f32 v[0:1], v[2:3], 2.0 op_sel_hi:[1,0]", {2: 0x3F800000, 3: 0x40000000}).vgpr(1) == 0x40800000
    ).all()


def test_fma_mix() -> None:
    a, b, c = halves(0), floats(1), halves(2)
    with np.errstate(all="ignore"):
        x, y, z = f16(high(a)).astype(np.float32), f32(b), f16(low(c)).astype(np.float32)
        exact = (-x).astype(np.longdouble) * np.abs(y) + z
        registers = {0: 0x1234ABCD, 1: a, 2: b, 3: c}
        modifiers = "op_sel:[1,0,0] op_sel_hi:[1,0,1]"
        assert_same_f32(
            run(f"v_fma_mix_f32 v0, -v1, |v2|, v3 {modifiers}", registers).vgpr(0), exact.astype(np.float32), ulp=1
        )
        once = exact.astype(np.float32).astype(np.float16)
        got = run(f"v_fma_mixlo_f16 v0, -v1, |v2|, v3 {modifiers}", registers).vgpr(0)
        assert_same_f16(low(got), once, ulp=1)
        assert (high(got) == 0x1234).all()
        got = run(f"v_fma_mixhi_f16 v0, -v1, |v2|, v3 {modifiers}", registers).vgpr(0)
        assert_same_f16(high(got), once, ulp=1)
        assert (low(got) == 0xABCD).all()


def test_dot_products() -> None:
    a, b, c = ints(0), ints(1), ints(2)
    registers = {1: a, 2: b, 3: c}

    def parts(x: U32, width: int, signed: bool) -> list[Array]:
        fields = [(x >> np.uint32(n)).astype(np.int64) & (1 << width) - 1 for n in range(0, 32, width)]
        return [np.where(signed & (f >> (width - 1) == 1), f - (1 << width), f) for f in fields]

    for name, width, signed in (
        ("v_dot2_i32_i16", 16, True),
        ("v_dot2_u32_u16", 16, False),
        ("v_dot4_i32_i8", 8, True),
        ("v_dot4_u32_u8", 8, False),
        ("v_dot8_i32_i4", 4, True),
        ("v_dot8_u32_u4", 4, False),
    ):
        products = sum(
            (x * y for x, y in zip(parts(a, width, signed), parts(b, width, signed), strict=True)),
            np.zeros(LANES, np.int64),
        )
        start = c.view(np.int32).astype(np.int64) if signed else c.astype(np.int64)
        bounds = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
        exact = products + start
        assert (run(f"{name} v0, v1, v2, v3", registers).vgpr(0) == (exact & 0xFFFFFFFF).astype(np.uint32)).all()
        got = run(f"{name} v0, v1, v2, v3 clamp", registers).vgpr(0)
        assert (got == (np.clip(exact, *bounds) & 0xFFFFFFFF).astype(np.uint32)).all()
    state = run("v_dot4c_i32_i8 v3, v1, v2", registers)
    assert (state.vgpr(3) == run("v_dot4_i32_i8 v0, v1, v2, v3", registers).vgpr(0)).all()
    h, k, start = halves(0), halves(1), floats(2)
    with np.errstate(all="ignore"):
        products = [f16(half(h)).astype(np.float32) * f16(half(k)).astype(np.float32) for half in (low, high)]
        assert_same_f32(
            run("v_dot2c_f32_f16 v0, v1, v2", {0: start, 1: h, 2: k}).vgpr(0), f32(start) + products[0] + products[1]
        )
        bf = [f32(half(h).astype(np.uint32) << 16) * f32(half(k).astype(np.uint32) << 16) for half in (low, high)]
        got = run("v_dot2_f32_bf16 v0, v1, v2, v3", {1: h, 2: k, 3: start}).vgpr(0)
        assert_same_f32(got, bf[0] + bf[1] + f32(start))


# ---- conversions


def clipped(x: Array, dtype: type) -> Array:
    info = np.iinfo(dtype)
    with np.errstate(all="ignore"):
        return np.clip(
            np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0, posinf=1e30, neginf=-1e30), info.min, info.max
        ).astype(dtype)


def test_between_integers_and_floats() -> None:
    for turn in range(2):
        a, b, d = floats(turn), ints(turn), doubles(turn)
        with np.errstate(all="ignore"):
            assert (run("v_cvt_i32_f32 v0, v1", {1: a}).vgpr(0) == clipped(f32(a), np.int32).view(np.uint32)).all()
            assert (run("v_cvt_u32_f32 v0, v1", {1: a}).vgpr(0) == clipped(f32(a), np.uint32)).all()
            assert_same_f32(run("v_cvt_f32_i32 v0, v1", {1: b}).vgpr(0), b.view(np.int32).astype(np.float32))
            assert_same_f32(run("v_cvt_f32_u32 v0, v1", {1: b}).vgpr(0), b.astype(np.float32))
            for n in range(4):
                got = run(f"v_cvt_f32_ubyte{n} v0, v1", {1: b}).vgpr(0)
                assert_same_f32(got, (b >> 8 * n & 255).astype(np.float32))
            registers = dict(zip((2, 3), pair(d), strict=True))
            assert (run("v_cvt_i32_f64 v0, v[2:3]", registers).vgpr(0) == clipped(d, np.int32).view(np.uint32)).all()
            assert (run("v_cvt_u32_f64 v0, v[2:3]", registers).vgpr(0) == clipped(d, np.uint32)).all()
            assert_same_f32(run("v_cvt_f32_f64 v0, v[2:3]", registers).vgpr(0), d.astype(np.float32))
            got = joined(run("v_cvt_f64_f32 v[0:1], v2", {2: a}), 0).view(np.float64)
            assert np.array_equal(got, f32(a).astype(np.float64), equal_nan=True)
            assert (joined(run("v_cvt_f64_i32 v[0:1], v2", {2: b}), 0).view(np.float64) == b.view(np.int32)).all()
            assert (joined(run("v_cvt_f64_u32 v[0:1], v2", {2: b}), 0).view(np.float64) == b).all()
    state = run("v_cvt_pk_u8_f32 v0, v1, 2, v3", {1: np.float32(200.6), 3: 0x11223344})
    assert (state.vgpr(0) == 0x11C93344).all()


@pytest.mark.parametrize(("rounding", "expected"), [(0, 1 << 24), (1, (1 << 24) + 2), (2, 1 << 24), (3, 1 << 24)])
def test_integers_and_f64_round_to_f32_by_the_mode(rounding: int, expected: int) -> None:
    number = (1 << 24) + 1
    mode = MODE | rounding | rounding << 2
    assert (f32(run("v_cvt_f32_i32 v0, v1", {1: number}, mode=mode).vgpr(0)) == expected).all()
    assert (f32(run("v_cvt_f32_u32 v0, v1", {1: number}, mode=mode).vgpr(0)) == expected).all()
    registers = dict(zip((2, 3), pair(np.full(LANES, float(number))), strict=True))
    assert (f32(run("v_cvt_f32_f64 v0, v[2:3]", registers, mode=mode).vgpr(0)) == expected).all()


def toward_zero(x: Array) -> Array:
    with np.errstate(all="ignore"):
        near = x.astype(np.float16)
        over = np.abs(near.astype(np.float64)) > np.abs(x.astype(np.float64))
        return np.where(over & np.isfinite(x), np.nextafter(near, np.float16(0)), near)


def test_f16_and_f32() -> None:
    rng = np.random.default_rng(5)
    every = np.arange(65536, dtype=np.uint32)
    for start in range(0, 65536, 64 * 128):
        bits = every[start : start + 64]
        assert_same_f32(run("v_cvt_f32_f16 v0, v1", {1: bits}).vgpr(0), f16(low(bits)).astype(np.float32))
    for turn in range(3):
        a = (rng.standard_normal(LANES) * np.exp2(rng.integers(-27, 18, LANES))).astype(np.float32).view(np.uint32)
        a = floats(turn) if turn == 0 else a
        with np.errstate(all="ignore"):
            near, cut = f32(a).astype(np.float16), toward_zero(f32(a))
        got = run("v_cvt_f16_f32 v0, v1", {0: 0xFFFFFFFF, 1: a}).vgpr(0)
        assert_same_f16(low(got), near)
        assert (high(got) == 0).all()
        got = run("v_cvt_pkrtz_f16_f32 v0, v1, -v1", {1: a}).vgpr(0)
        assert_same_f16(low(got), cut)
        assert_same_f16(high(got), -cut)
        got = run("v_cvt_pk_f16_f32 v0, v1, v1", {1: a}, mode=MODE | 12).vgpr(0)
        assert_same_f16(low(got), near)
        assert_same_f16(low(run("v_cvt_f16_f32 v0, v1", {1: a}, mode=MODE | 12).vgpr(0)), cut)


def test_f16_rounding_up_and_down() -> None:
    above = np.float32(1 + 2**-13)
    assert (run("v_cvt_f16_f32 v0, v1", {1: above}, mode=MODE | 4).vgpr(0) == 0x3C01).all()
    assert (run("v_cvt_f16_f32 v0, v1", {1: above}, mode=MODE | 8).vgpr(0) == 0x3C00).all()
    assert (run("v_cvt_f16_f32 v0, v1", {1: -above}, mode=MODE | 8).vgpr(0) == 0xBC01).all()


def test_f16_that_overflows_is_clamped_under_fp16_ovfl() -> None:
    """Infinities and NaN stay."""
    values = np.array([1e5, -1e5, 65519.0, 65520.0, np.inf, -np.inf, np.nan, 1.0], np.float32)
    a = np.tile(values, LANES // len(values)).view(np.uint32)
    got = f16(low(run("v_cvt_f16_f32 v0, v1", {1: a}, mode=MODE | 1 << 23).vgpr(0)))[: len(values)]
    expected = np.array([65504, -65504, 65504, 65504, np.inf, -np.inf, np.nan, 1], np.float16)
    np.testing.assert_array_equal(got, expected)
    both = run("v_cvt_pk_f16_f32 v0, v1, v1", {1: a}, mode=MODE | 1 << 23).vgpr(0)
    for part in (low(both), high(both)):
        np.testing.assert_array_equal(f16(part)[: len(values)], expected)
    one = np.full(LANES, 1.0, np.float32).view(np.uint32)
    mixed = run("v_fma_mixhi_f16 v0, v1, v2, neg(0)", {0: 0x1234, 1: a, 2: one}, mode=MODE | 1 << 23).vgpr(0)
    np.testing.assert_array_equal(f16(high(mixed))[: len(values)], expected)
    assert (low(mixed) == 0x1234).all()


def test_halves_of_sdwa_sources() -> None:
    a = halves(0)
    got = run("v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", {1: a}).vgpr(0)
    assert_same_f32(got, f16(high(a)).astype(np.float32))
    text = "v_cvt_f16_f32_sdwa v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD"
    x = floats(0)
    got = run(text, {0: 0x1234ABCD, 1: x}).vgpr(0)
    with np.errstate(all="ignore"):
        assert_same_f16(high(got), f32(x).astype(np.float16))
    assert (low(got) == 0xABCD).all()


def test_packs() -> None:
    a, b = ints(0), ints(1)
    got = run("v_cvt_pk_i16_i32 v0, v1, v2", {1: a, 2: b}).vgpr(0)
    assert (low(got).view(np.int16) == np.clip(a.view(np.int32), -32768, 32767)).all()
    assert (high(got).view(np.int16) == np.clip(b.view(np.int32), -32768, 32767)).all()
    got = run("v_cvt_pk_u16_u32 v0, v1, v2", {1: a, 2: b}).vgpr(0)
    assert (low(got) == np.minimum(a, 65535)).all() and (high(got) == np.minimum(b, 65535)).all()
    got = run("v_pack_b32_f16 v0, v1, v2 op_sel:[1,0,0]", {1: a, 2: b}, mode=MODE | 1 << 23).vgpr(0)
    assert (low(got) == high(a)).all() and (high(got) == low(b)).all()
    x = np.linspace(-2, 2, LANES).astype(np.float32)
    got = run("v_cvt_pknorm_i16_f32 v0, v1, v2", {1: x, 2: -x}).vgpr(0)
    assert (low(got).view(np.int16) == np.rint(np.clip(x, -1, 1) * np.float32(32767))).all()


def test_bf16_rounds_to_nearest_even() -> None:
    for turn in range(3):
        a, b = floats(turn), floats(turn + 1)
        got = run("v_cvt_pk_bf16_f32 v0, v1, v2", {1: a, 2: b}).vgpr(0)
        for half, source in ((low, a), (high, b)):
            expected = torch.from_numpy(f32(source).copy()).to(torch.bfloat16).float().numpy()
            assert_same_f32(half(got).astype(np.uint32) << 16, expected)
    a = ints(0)
    assert_same_f32(run("v_cvt_f32_bf16 v0, v1", {1: a}).vgpr(0), f32(a << 16))


FP8 = {
    ("gfx942", "fp8"): (torch.float8_e4m3fnuz, 240.0),
    ("gfx942", "bf8"): (torch.float8_e5m2fnuz, 57344.0),
    ("gfx950", "fp8"): (torch.float8_e4m3fn, 448.0),
    ("gfx950", "bf8"): (torch.float8_e5m2, 57344.0),
}


@pytest.mark.parametrize(("arch", "name"), FP8)
def test_fp8_flavour_of_the_architecture(arch: str, name: str) -> None:
    dtype, largest = FP8[arch, name]
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for start in range(0, 256, 64):
        code = np.arange(start, start + 64, dtype=np.uint32)
        expected = every[start : start + 64]
        assert_same_f32(run(f"v_cvt_f32_{name} v0, v1", {1: code}, arch).vgpr(0), expected)
        text = f"v_cvt_f32_{name}_sdwa v0, v1 src0_sel:BYTE_2"
        assert_same_f32(run(text, {1: code << 16 | 0xA500005A}, arch).vgpr(0), expected)
        both = run(f"v_cvt_pk_f32_{name} v[2:3], v1", {1: code | 0x3800}, arch)
        assert_same_f32(both.vgpr(2), expected)
        assert_same_f32(both.vgpr(3), np.full(64, every[0x38]))
        both = run(f"v_cvt_pk_f32_{name}_sdwa v[2:3], v1 src0_sel:WORD_1", {1: code << 24}, arch)
        assert_same_f32(both.vgpr(3), expected)
    rng = np.random.default_rng(9)
    x = (rng.uniform(-1, 1, LANES) * np.exp2(rng.integers(-20, 8, LANES))).astype(np.float32)
    x = np.where(np.abs(x) < largest, x, np.float32(1))
    x[:4] = 0.0, -0.0, largest, -largest
    expected = torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()
    got = run(f"v_cvt_pk_{name}_f32 v0, v1, -v1 op_sel:[0,0,1]", {0: 0x1234ABCD, 1: x}, arch).vgpr(0)
    assert (low(got) == 0xABCD).all()
    assert ((got >> 16 & 255) == expected).all()
    mirrored = torch.from_numpy(-x).to(dtype).view(torch.uint8).numpy()
    assert (got >> 24 == mirrored).all()


@pytest.mark.parametrize(("arch", "name"), FP8)
def test_stochastic_rounding_takes_one_of_the_neighbours(arch: str, name: str) -> None:
    dtype, _ = FP8[arch, name]
    x = np.linspace(0.6, 8, LANES).astype(np.float32)
    values = torch.arange(128, dtype=torch.uint8).view(dtype).float().numpy()
    for byte, select in enumerate(("", "op_sel:[0,0,1,0]", "op_sel:[0,0,0,1]", "op_sel:[0,0,1,1]")):
        for random, pick in ((0, "below"), (0xFFFFFFFF, "above")):
            got = run(f"v_cvt_sr_{name}_f32 v0, v1, v2 {select}", {0: 0xFFFFFFFF, 1: x, 2: random}, arch).vgpr(0)
            number = values[(got >> 8 * byte & 255).astype(int)]
            finite = values[np.isfinite(values)]
            expected = [max(finite[finite <= v]) if pick == "below" else min(finite[finite >= v]) for v in x]
            assert (number == np.array(expected, np.float32)).all()
            rest = 0xFFFFFFFF & ~(0xFF << 8 * byte)
            assert (got & rest == rest).all()
