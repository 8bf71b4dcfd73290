"""Conversions of the microscaling formats against the twin's formats: all codes, all scales, every byte and half."""

import numpy as np
import numpy.typing as npt
import pytest
from asm import assemble
from twin import formats

from cdna_emu.native import run_instruction

FORMATS = {"fp8": formats.FP8, "bf8": formats.BF8, "fp4": formats.FP4}
HALVES = {"f16": formats.F16, "bf16": formats.BF16}
MODE = 0x3F0
LANES = 64

_rng = np.random.default_rng(23)


def scales() -> npt.NDArray[np.uint32]:
    """Floats of any sign and mantissa: their exponent field alone counts."""
    fields = _rng.integers(0, 256, LANES, np.uint32)
    fields[:8] = (0, 1, 126, 127, 128, 140, 254, 255)
    return fields << np.uint32(23) | _rng.integers(0, 1 << 23, LANES, np.uint32) | np.uint32(0x80000000)


def powers(scale: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    fields = (scale >> 23 & 0xFF).astype(int)
    return np.where(fields == 255, np.nan, np.exp2(fields - 127.0))


def same(got: npt.NDArray, expected: npt.NDArray) -> bool:
    """Equal with NaN and the sign of zero."""
    return bool(
        np.all((got == expected) & (np.signbit(got) == np.signbit(expected)) | np.isnan(got) & np.isnan(expected))
    )


def run(text: str, **vgpr: npt.NDArray[np.uint32]) -> list[npt.NDArray[np.uint32]]:
    state = run_instruction(
        "gfx950", assemble(text, "gfx950"), vgpr={int(n[1:]): value for n, value in vgpr.items()}, mode=MODE
    )
    assert not state.findings, str(state.findings[0])
    return [state.vgpr(n) for n in range(2)]


def rounded(values: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32).astype(np.float64)
    return single if kind == "f32" else HALVES[kind].decode(HALVES[kind].encode(values))


def of_register(bits: npt.NDArray[np.uint32], kind: str, half: int) -> npt.NDArray[np.float64]:
    if kind == "f32":
        return bits.view(np.float32).astype(np.float64)
    return HALVES[kind].decode(bits >> np.uint32(16 * half) & 0xFFFF)


@pytest.mark.parametrize("narrow", FORMATS)
@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
def test_pairs_from_a_narrow_format(narrow: str, wide: str) -> None:
    bits = FORMATS[narrow].bits
    target = "v[0:1]" if wide == "f32" else "v0"
    for place in range(4 if narrow == "fp4" else 2):
        suffix = f"op_sel:[{place & 1},{place >> 1},0]" if narrow == "fp4" else f"op_sel:[{place},0,0]"
        source, scale = _rng.integers(0, 1 << 32, LANES, np.uint32), scales()
        low, high = run(f"v_cvt_scalef32_pk_{wide}_{narrow} {target}, v2, v3 {suffix}", v2=source, v3=scale)
        for n, register in enumerate((low, high) if wide == "f32" else (low, low)):
            codes = source >> np.uint32(place * (8 if narrow == "fp4" else 16) + bits * n)
            expected = rounded(FORMATS[narrow].decode(codes & (1 << bits) - 1) * powers(scale), wide)
            assert same(of_register(register, wide, n), expected), (place, n)


@pytest.mark.parametrize("narrow", ["fp8", "bf8"])
@pytest.mark.parametrize("wide", ["f32", "f16"])
def test_one_from_a_byte(narrow: str, wide: str) -> None:
    old = np.full(LANES, 0x12345678, np.uint32)
    for byte in range(4):
        for high in range(2 if wide == "f16" else 1):
            source, scale = _rng.integers(0, 1 << 32, LANES, np.uint32), scales()
            suffix = (
                f"op_sel:[{byte & 1},{byte >> 1},{high}]" if wide == "f16" else f"op_sel:[{byte & 1},{byte >> 1},0]"
            )
            got, _ = run(f"v_cvt_scalef32_{wide}_{narrow} v0, v2, v3 {suffix}", v0=old, v2=source, v3=scale)
            expected = rounded(FORMATS[narrow].decode(source >> np.uint32(8 * byte) & 0xFF) * powers(scale), wide)
            assert same(of_register(got, wide, high), expected)
            if wide == "f16":
                assert np.all(got >> np.uint32(16 * (1 - high)) & 0xFFFF == (0x1234 if high == 0 else 0x5678))


def sources(wide: str) -> npt.NDArray[np.float64]:
    """Values that a wide format holds: many sizes, ties of the narrow formats, infinities and NaN."""
    value = _rng.standard_normal(LANES) * np.exp2(_rng.integers(-12, 12, LANES))
    value[:12] = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0625, 1.1875, -0.25, 0.75, 5.0, 3.5, 464.0)
    return rounded(value, wide)


@pytest.mark.parametrize("narrow", FORMATS)
@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
def test_pairs_to_a_narrow_format(narrow: str, wide: str) -> None:
    fmt = FORMATS[narrow]
    old = np.full(LANES, 0x9ABCDEF0, np.uint32)
    for place in range(4 if narrow == "fp4" else 2):
        pair, scale = [sources(wide), sources(wide)], scales()
        scale[:12] = 0x3F800000
        suffix = f"op_sel:[0,0,{place & 1},{place >> 1}]" if narrow == "fp4" else f"op_sel:[0,0,{{}}{place}]"
        if wide == "f32":
            text = f"v_cvt_scalef32_pk_{narrow}_f32 v0, v2, v4, v3 " + suffix.format("0,")
            registers = {n: x.astype(np.float32).view(np.uint32) for n, x in zip(("v2", "v4"), pair, strict=True)}
        else:
            text = f"v_cvt_scalef32_pk_{narrow}_{wide} v0, v2, v3 " + suffix.format("")
            codes = [HALVES[wide].encode(x).astype(np.uint32) for x in pair]
            registers = {"v2": codes[0] | codes[1] << np.uint32(16)}
        got, _ = run(text, v0=old, v3=scale, **registers)
        first = place * (8 if narrow == "fp4" else 16)
        for n, values in enumerate(pair):
            codes = got >> np.uint32(first + fmt.bits * n) & (1 << fmt.bits) - 1
            scaled = values / powers(scale)
            if narrow == "fp4":
                number = ~np.isnan(scaled)
                assert np.array_equal(codes[number], fmt.encode(scaled[number], saturate=True))
                assert np.all(codes[~number] & 7 == 7)
            else:
                assert same(fmt.decode(codes), fmt.decode(fmt.encode(scaled)))
        kept = ~np.uint32(((1 << 2 * fmt.bits) - 1) << first)
        assert np.array_equal(got & kept, old & kept)


def test_saturation_by_the_mode() -> None:
    large = np.full(LANES, 1e6, np.float32).view(np.uint32)
    code = assemble("v_cvt_scalef32_pk_fp8_f32 v0, v1, v1, 1.0", "gfx950")
    plain, saturated = (
        run_instruction("gfx950", code, vgpr={0: 0, 1: large}, mode=mode).vgpr(0) for mode in (MODE, MODE | 1 << 23)
    )
    assert np.all(plain == 0x7F7F)
    assert np.all(saturated == 0x7E7E)
