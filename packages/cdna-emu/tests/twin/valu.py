"""Common vector instructions, written from the ISA documents' descriptions, one lane after the other in Python numbers.

Integers are Python integers, cut to width at the end; float32 and float16 sums, products and quotients are formed in
float64 and rounded once more, which is exact rounding (53 bits >= 2 * 24 + 2); fused ones are rational numbers.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from twin import formats

Numbers = tuple[Any, ...]
MASK = (1 << 32) - 1
QUIET = math.nan


def signed(value: int, bits: int = 32) -> int:
    """Two's complement."""
    return value - (1 << bits) if value >> bits - 1 & 1 else value


def clamp(value: int, low: int, high: int) -> int:
    """value within [low, high]."""
    return min(max(value, low), high)


def f32(bits: int) -> float:
    """float32 of its bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits & MASK))[0])


def f64(bits: int) -> float:
    """float64 of its bits."""
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def f16(bits: int) -> float:
    """float16 of its bits."""
    return float(formats.F16.decode([bits & 0xFFFF])[0])


def bits32(value: float) -> int:
    """float64 rounded to float32, as bits."""
    with np.errstate(all="ignore"):
        return int(np.float32(value).view(np.uint32))


def bits64(value: float) -> int:
    """Bits of a float64."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def bits16(value: float) -> int:
    """float64 rounded to float16, as bits."""
    return int(formats.F16.encode([value])[0])


def _round(value: Fraction, mantissa: int, lowest: int) -> float:
    """A rational to mantissa + 1 bits, ties to even; `lowest`: exponent of the least normal number."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, lowest) - mantissa)
    rounded = round(magnitude / unit) * unit
    try:
        result = float(rounded)
    except OverflowError:
        result = math.inf
    return -result if value < 0 else result


def _fused(a: float, b: float, c: float, mantissa: int, lowest: int) -> float:
    if math.isfinite(a) and math.isfinite(b) and math.isfinite(c):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            result = _round(exact, mantissa, lowest)
            return math.copysign(result, 1 if exact > 0 else -1)
        return a * b + c if a == 0 or b == 0 else 0.0
    with np.errstate(all="ignore"):
        product = np.float64(a) * np.float64(b) if not (math.isfinite(a) and math.isfinite(b)) else np.float64(0)
        return float(product + np.float64(c))


def fma_f32(a: float, b: float, c: float) -> float:
    """a * b + c, rounded to float32."""
    return _fused(a, b, c, 23, -126)


def fma_f64(a: float, b: float, c: float) -> float:
    """a * b + c, rounded to float64."""
    return _fused(a, b, c, 52, -1022)


def fma_f16(a: float, b: float, c: float) -> float:
    """a * b + c, rounded to float16."""
    return _fused(a, b, c, 10, -14)


def lesser(*values: float) -> float:
    """Minimum of the numbers among the values; -0 is less than +0. NaN if there is none."""
    numbers = [value for value in values if not math.isnan(value)]
    return min(numbers, key=lambda x: (x, math.copysign(1, x))) if numbers else QUIET


def greater(*values: float) -> float:
    """Maximum, as lesser."""
    numbers = [value for value in values if not math.isnan(value)]
    return max(numbers, key=lambda x: (x, math.copysign(1, x))) if numbers else QUIET


def middle(a: float, b: float, c: float) -> float:
    """Median; the least of the numbers if one is NaN."""
    if any(map(math.isnan, (a, b, c))):
        return lesser(a, b, c)
    return sorted((a, b, c), key=lambda x: (x, math.copysign(1, x)))[1]


def to_integer(value: float, low: int, high: int) -> int:
    """Truncated and saturated; NaN gives 0."""
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return high if value > 0 else low
    return clamp(math.trunc(value), low, high)


def whole(function: Callable[[float], float]) -> Callable[[float], float]:
    """A rounding to integers that keeps zeros' and results' signs, infinity and NaN."""

    def rounded(value: float) -> float:
        return math.copysign(function(value), value) if math.isfinite(value) else value

    return rounded


def ieee(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    """Python's arithmetic raises where IEEE has a result."""

    def computed(a: float, b: float) -> float:
        with np.errstate(all="ignore"):
            return float(function(np.float64(a), np.float64(b)))

    return computed


add, multiply = ieee(lambda a, b: a + b), ieee(lambda a, b: a * b)


def ff1(value: int) -> int:
    """Number of the lowest bit that is set, else -1."""
    return (value & -value).bit_length() - 1


def byte(value: int, n: int) -> int:
    """Byte n."""
    return value >> 8 * n & 0xFF


def permute(a: int, b: int, selector: int) -> int:
    """v_perm_b32: bytes of {a, b}, sign bits, 0 or 0xff."""
    both, out = a << 32 | b, 0
    for n in range(4):
        s = byte(selector, n)
        if s >= 13:
            value = 0xFF
        elif s == 12:
            value = 0
        elif s >= 8:
            value = 0xFF * (both >> (16 * (s - 8) + 15) & 1)
        else:
            value = byte(both, s)
        out |= value << 8 * n
    return out


def halves(function: Callable[..., int]) -> Callable[..., int]:
    """A packed 16-bit operation from that on one half."""

    def packed(*sources: int) -> int:
        low, high = (function(*(source >> shift & 0xFFFF for source in sources)) & 0xFFFF for shift in (0, 16))
        return low | high << 16

    return packed


def pairs(function: Callable[..., float]) -> Callable[..., int]:
    """A packed float32 operation on 64-bit sources from that on one float."""

    def packed(*sources: int) -> int:
        low, high = (bits32(function(*(f32(source >> shift) for source in sources))) for shift in (0, 32))
        return low | high << 32

    return packed


def half(function: Callable[..., float]) -> Callable[..., int]:
    """A float16 operation on bits."""
    return lambda *sources: bits16(function(*(f16(source) for source in sources)))


@dataclass(frozen=True)
class Op:
    """One instruction.

    sources: a letter each: u integer of 32 bits, q of 64, f float32, d float64, h one float16 (low half), p two,
    P two float32. Functions get numbers of that type, but bits for h, p and P. result: the letter of what they return,
    m a bit of the mask in VCC. archs: where it exists.
    """

    sources: str
    result: str
    function: Callable[..., Any]
    archs: tuple[str, ...] = ("gfx942", "gfx950")


def _integers() -> dict[str, Op]:
    def u(count: int, function: Callable[..., int]) -> Op:
        return Op("u" * count, "u", function)

    return {
        "v_mov_b32": u(1, lambda a: a),
        "v_not_b32": u(1, lambda a: ~a),
        "v_and_b32": u(2, lambda a, b: a & b),
        "v_or_b32": u(2, lambda a, b: a | b),
        "v_xor_b32": u(2, lambda a, b: a ^ b),
        "v_xnor_b32": u(2, lambda a, b: ~(a ^ b)),
        "v_and_or_b32": u(3, lambda a, b, c: a & b | c),
        "v_or3_b32": u(3, lambda a, b, c: a | b | c),
        "v_lshl_or_b32": u(3, lambda a, b, c: a << (b & 31) | c),
        "v_lshl_add_u32": u(3, lambda a, b, c: (a << (b & 31)) + c),
        "v_add_lshl_u32": u(3, lambda a, b, c: a + b << (c & 31)),
        "v_add3_u32": u(3, lambda a, b, c: a + b + c),
        "v_xad_u32": u(3, lambda a, b, c: (a ^ b) + c),
        "v_add_u32": u(2, lambda a, b: a + b),
        "v_sub_u32": u(2, lambda a, b: a - b),
        "v_subrev_u32": u(2, lambda a, b: b - a),
        "v_lshlrev_b32": u(2, lambda a, b: b << (a & 31)),
        "v_lshrrev_b32": u(2, lambda a, b: b >> (a & 31)),
        "v_ashrrev_i32": u(2, lambda a, b: signed(b) >> (a & 31)),
        "v_mul_lo_u32": u(2, lambda a, b: a * b),
        "v_mul_hi_u32": u(2, lambda a, b: a * b >> 32),
        "v_mul_hi_i32": u(2, lambda a, b: signed(a) * signed(b) >> 32),
        "v_mul_u32_u24": u(2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
        "v_mul_i32_i24": u(2, lambda a, b: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24)),
        "v_mad_u32_u24": u(3, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
        "v_mad_i32_i24": u(3, lambda a, b, c: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24) + c),
        "v_min_u32": u(2, min),
        "v_max_u32": u(2, max),
        "v_min_i32": u(2, lambda a, b: min(signed(a), signed(b))),
        "v_max_i32": u(2, lambda a, b: max(signed(a), signed(b))),
        "v_med3_u32": u(3, lambda a, b, c: sorted((a, b, c))[1]),
        "v_med3_i32": u(3, lambda a, b, c: sorted(map(signed, (a, b, c)))[1]),
        "v_min3_i32": u(3, lambda a, b, c: min(map(signed, (a, b, c)))),
        "v_max3_u32": u(3, max),
        "v_bfe_u32": u(3, lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1),
        "v_bfe_i32": u(3, lambda a, b, c: signed(a >> (b & 31) & (1 << (c & 31)) - 1, c & 31) if c & 31 else 0),
        "v_bfi_b32": u(3, lambda a, b, c: a & b | ~a & c),
        "v_bfm_b32": u(2, lambda a, b: (1 << (a & 31)) - 1 << (b & 31)),
        "v_bfrev_b32": u(1, lambda a: int(f"{a:032b}"[::-1], 2)),
        "v_ffbh_u32": u(1, lambda a: 32 - a.bit_length() if a else -1),
        "v_ffbl_b32": u(1, ff1),
        "v_bcnt_u32_b32": u(2, lambda a, b: a.bit_count() + b),
        "v_alignbit_b32": u(3, lambda a, b, c: (a << 32 | b) >> (c & 31)),
        "v_alignbyte_b32": u(3, lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
        "v_perm_b32": u(3, permute),
        "v_sad_u32": u(3, lambda a, b, c: abs(a - b) + c),
        "v_lshlrev_b64": Op("uq", "q", lambda a, b: b << (a & 63)),
        "v_lshrrev_b64": Op("uq", "q", lambda a, b: b >> (a & 63)),
        "v_ashrrev_i64": Op("uq", "q", lambda a, b: signed(b, 64) >> (a & 63)),
        "v_lshl_add_u64": Op("quq", "q", lambda a, b, c: (a << (b & 7)) + c),
        "v_pk_add_u16": u(2, halves(lambda a, b: a + b)),
        "v_pk_sub_i16": u(2, halves(lambda a, b: a - b)),
        "v_pk_mul_lo_u16": u(2, halves(lambda a, b: a * b)),
        "v_pk_mad_u16": u(3, halves(lambda a, b, c: a * b + c)),
        "v_pk_lshlrev_b16": u(2, halves(lambda a, b: b << (a & 15))),
        "v_pk_ashrrev_i16": u(2, halves(lambda a, b: signed(b, 16) >> (a & 15))),
        "v_pk_min_i16": u(2, halves(lambda a, b: min(signed(a, 16), signed(b, 16)))),
        "v_pk_max_u16": u(2, halves(max)),
        "v_dot4_i32_i8": u(3, lambda a, b, c: sum(signed(byte(a, n), 8) * signed(byte(b, n), 8) for n in range(4)) + c),
    }


def _floats() -> dict[str, Op]:
    out = {}
    for letter, kind, fused in (("f", "f32", fma_f32), ("d", "f64", fma_f64)):
        for name, count, function in (
            ("add", 2, add),
            ("mul", 2, multiply),
            ("fma", 3, fused),
            ("min", 2, lesser),
            ("max", 2, greater),
            ("trunc", 1, whole(math.trunc)),
            ("floor", 1, whole(math.floor)),
            ("ceil", 1, whole(math.ceil)),
            ("rndne", 1, whole(round)),
        ):
            out[f"v_{name}_{kind}"] = Op(letter * count, letter, function)
    out |= {
        "v_sub_f32": Op("ff", "f", lambda a, b: add(a, -b)),
        "v_subrev_f32": Op("ff", "f", lambda a, b: add(b, -a)),
        "v_min3_f32": Op("fff", "f", lesser),
        "v_max3_f32": Op("fff", "f", greater),
        "v_med3_f32": Op("fff", "f", middle),
        "v_ldexp_f32": Op("fu", "f", lambda a, b: scaled(a, signed(b))),
        "v_ldexp_f64": Op("du", "d", lambda a, b: scaled(a, signed(b))),
        "v_pk_add_f32": Op("PP", "P", pairs(add)),
        "v_pk_mul_f32": Op("PP", "P", pairs(multiply)),
        "v_pk_fma_f32": Op("PPP", "P", pairs(fma_f32)),
        "v_add_f16": Op("hh", "h", half(add)),
        "v_sub_f16": Op("hh", "h", half(lambda a, b: add(a, -b))),
        "v_mul_f16": Op("hh", "h", half(multiply)),
        "v_fma_f16": Op("hhh", "h", half(fma_f16)),
        "v_min_f16": Op("hh", "h", half(lesser)),
        "v_max_f16": Op("hh", "h", half(greater)),
        "v_pk_add_f16": Op("pp", "p", halves(half(add))),
        "v_pk_mul_f16": Op("pp", "p", halves(half(multiply))),
        "v_pk_fma_f16": Op("ppp", "p", halves(half(fma_f16))),
        "v_pk_min_f16": Op("pp", "p", halves(half(lesser))),
        "v_pk_max_f16": Op("pp", "p", halves(half(greater))),
    }
    return out


def scaled(value: float, exponent: int) -> float:
    """value * 2^exponent, rounded once when it becomes a float32; float64 rounds here."""
    with np.errstate(all="ignore"):
        return float(np.ldexp(np.float64(value), clamp(exponent, -3000, 3000)))


def _rounded_to(fmt: formats.Format, rounding: str = "nearest") -> Callable[[float], int]:
    return lambda value: int(formats.encode_one(fmt, value, rounding))


def _conversions() -> dict[str, Op]:
    low, high = -(1 << 31), (1 << 31) - 1
    to_half, to_half_rtz, to_bf16 = (
        _rounded_to(formats.F16),
        _rounded_to(formats.F16, "zero"),
        _rounded_to(formats.BF16),
    )
    return {
        "v_cvt_f32_i32": Op("u", "f", lambda a: float(signed(a))),
        "v_cvt_f32_u32": Op("u", "f", float),
        "v_cvt_i32_f32": Op("f", "u", lambda a: to_integer(a, low, high)),
        "v_cvt_u32_f32": Op("f", "u", lambda a: to_integer(a, 0, MASK)),
        "v_cvt_f64_i32": Op("u", "d", lambda a: float(signed(a))),
        "v_cvt_f64_u32": Op("u", "d", float),
        "v_cvt_i32_f64": Op("d", "u", lambda a: to_integer(a, low, high)),
        "v_cvt_u32_f64": Op("d", "u", lambda a: to_integer(a, 0, MASK)),
        "v_cvt_f64_f32": Op("f", "d", lambda a: a),
        "v_cvt_f32_f64": Op("d", "f", lambda a: a),
        "v_cvt_f16_f32": Op("f", "h", to_half),
        "v_cvt_f32_f16": Op("h", "f", f16),
        "v_cvt_pkrtz_f16_f32": Op("ff", "p", lambda a, b: to_half_rtz(a) | to_half_rtz(b) << 16),
        "v_cvt_pk_bf16_f32": Op("ff", "b", lambda a, b: to_bf16(a) | to_bf16(b) << 16, ("gfx950",)),
        **{f"v_cvt_f32_ubyte{n}": Op("u", "f", lambda a, n=n: float(byte(a, n))) for n in range(4)},
    }


def _compares() -> dict[str, Op]:
    tests: dict[str, Callable[[Any, Any], bool]] = {
        "lt": lambda a, b: a < b,
        "eq": lambda a, b: a == b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    real: dict[str, Callable[[Any, Any], bool]] = {
        **tests,
        "lg": lambda a, b: a < b or a > b,
        "o": lambda a, b: not math.isnan(a) and not math.isnan(b),
        "u": lambda a, b: math.isnan(a) or math.isnan(b),
    }
    opposite = {"nlt": "lt", "neq": "eq", "nle": "le", "ngt": "gt", "nge": "ge", "nlg": "lg"}
    whole_numbers = {**tests, "ne": lambda a, b: a != b}
    out = {}
    for kind, letter in (("f32", "f"), ("f64", "d")):
        for name, test in real.items():
            out[f"v_cmp_{name}_{kind}"] = Op(2 * letter, "m", test)
        for name, test in opposite.items():
            out[f"v_cmp_{name}_{kind}"] = Op(2 * letter, "m", lambda a, b, test=real[test]: not test(a, b))
    for name, test in whole_numbers.items():
        for letter, bits in (("u", 32), ("q", 64)):
            out[f"v_cmp_{name}_u{bits}"] = Op(2 * letter, "m", test)
            out[f"v_cmp_{name}_i{bits}"] = Op(
                2 * letter, "m", lambda a, b, test=test, bits=bits: test(signed(a, bits), signed(b, bits))
            )
    return out


OPS: dict[str, Op] = {**_integers(), **_floats(), **_conversions(), **_compares()}


def run(op: Op, sources: Numbers) -> int:
    """Bits of the result of one lane; sources are bits."""
    read: dict[str, Callable[[int], Any]] = {"f": f32, "d": f64}
    numbers = [read.get(letter, int)(bits) for letter, bits in zip(op.sources, sources, strict=True)]
    result = op.function(*numbers)
    if op.result == "m":
        return int(result)
    if op.result == "f":
        return bits32(result)
    if op.result == "d":
        return bits64(result)
    width = {"q": 64, "P": 64, "h": 16}.get(op.result, 32)
    return int(result) & (1 << width) - 1
