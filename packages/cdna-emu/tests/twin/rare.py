"""Vector instructions that compilers seldom emit, as ``twin.valu`` has the others.

No test executes these opcodes of the core: v_ashr_pk_*, v_qsad_*, v_mqsad_* (what becomes of the rest of their
destination is not documented well enough to check it twice), v_exp_legacy_f32, v_log_legacy_f32, v_rsq_f64, v_rsq_f16,
v_sin_f16, v_cos_f16 (results within a tolerance only), v_cubesc/tc/ma, v_div_*_f64, v_div_fixup_*f16, v_ldexp_f16,
v_fract_f16,
v_fmac_f64, v_pk_fmac_f16, v_fma_legacy_f16, v_cvt_norm_*, v_cvt_pknorm_* of f16, v_cvt_sr_*16_f32, v_dot2_f32_f16,
v_dot2c_*, v_dot8c_*, v_pk_minimum3/maximum3_f16, v_cmpx_class_*, ds_wrap_rtn_b32, ds_pk_add_* without return. Those at
the end of ops_salu.def have no code: they are reported where they run.
"""

import math

import numpy as np

from twin.valu import MASK, Op, byte, clamp, f16, greater, halves, lesser, middle, signed, to_integer, whole
from twin.valu import half as of_halves

GFX950 = ("gfx950",)


def short(value: int) -> int:
    """Signed low half."""
    return signed(value & 0xFFFF, 16)


def low(function, count: int) -> Op:
    """A 16-bit integer operation on the low halves."""
    return Op("u" * count, "u", lambda *sources: function(*(source & 0xFFFF for source in sources)) & 0xFFFF)


def low_signed(function, count: int) -> Op:
    return Op("u" * count, "u", lambda *sources: function(*map(short, sources)) & 0xFFFF)


def bytes_of(a: int, b: int) -> list[tuple[int, int]]:
    return [(byte(a, n), byte(b, n)) for n in range(4)]


def lerp(a: int, b: int, c: int) -> int:
    return sum((x + y + (byte(c, n) & 1) >> 1) << 8 * n for n, (x, y) in enumerate(bytes_of(a, b)))


def mantissa(value: float) -> float:
    return math.frexp(value)[0] if math.isfinite(value) else value


def exponent(value: float) -> int:
    return math.frexp(value)[1] if math.isfinite(value) else 0


def fraction(value: float) -> float:
    if not math.isfinite(value):
        return math.nan
    return min(value - float(np.floor(value)), 1 - 2.0**-53)


def single(value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(value))


def saturated(a: int) -> int:
    return clamp(short(a), 0, 255) | clamp(short(a >> 16), 0, 255) << 8


def cube(x: float, y: float, z: float) -> int:
    """Number of the face: the largest magnitude wins, z before y before x."""
    if abs(z) >= abs(x) and abs(z) >= abs(y):
        return 5 if z < 0 else 4
    if abs(y) >= abs(x):
        return 3 if y < 0 else 2
    return 1 if x < 0 else 0


OPS: dict[str, Op] = {
    "v_sad_hi_u8": Op("uuu", "u", lambda a, b, c: (sum(abs(x - y) for x, y in bytes_of(a, b)) << 16) + c),
    "v_sad_u16": Op("uuu", "u", lambda a, b, c: sum(abs((a >> s & 0xFFFF) - (b >> s & 0xFFFF)) for s in (0, 16)) + c),
    "v_msad_u8": Op("uuu", "u", lambda a, b, c: sum(abs(x - y) for x, y in bytes_of(a, b) if y) + c),
    "v_lerp_u8": Op("uuu", "u", lerp),
    "v_prng_b32": Op("u", "u", lambda a: a << 1 & MASK ^ (197 if a >> 31 else 0), GFX950),
    "v_sat_pk_u8_i16": Op("u", "u", saturated),
    "v_add_i16": low(lambda a, b: a + b, 2),
    "v_sub_i16": low(lambda a, b: a - b, 2),
    "v_mad_i16": low(lambda a, b, c: a * b + c, 3),
    "v_mad_legacy_u16": low(lambda a, b, c: a * b + c, 3),
    "v_mad_legacy_i16": low(lambda a, b, c: a * b + c, 3),
    "v_min3_u16": low(min, 3),
    "v_max3_u16": low(max, 3),
    "v_min3_i16": low_signed(min, 3),
    "v_med3_i16": low_signed(lambda *values: sorted(values)[1], 3),
    "v_mad_u32_u16": Op("uuu", "u", lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c),
    "v_mad_i32_i16": Op("uuu", "u", lambda a, b, c: short(a) * short(b) + c),
    "v_pk_add_i16": Op("uu", "u", halves(lambda a, b: a + b)),
    "v_min3_f16": Op("hhh", "h", of_halves(lesser)),
    "v_max3_f16": Op("hhh", "h", of_halves(greater)),
    "v_med3_f16": Op("hhh", "h", of_halves(middle)),
    "v_ceil_f16": Op("h", "h", of_halves(whole(math.ceil))),
    "v_trunc_f16": Op("h", "h", of_halves(whole(math.trunc))),
    "v_frexp_mant_f16": Op("h", "h", of_halves(mantissa)),
    "v_frexp_exp_i16_f16": Op("h", "u", lambda a: exponent(f16(a)) & 0xFFFF),
    "v_frexp_mant_f64": Op("d", "d", mantissa),
    "v_frexp_exp_i32_f64": Op("d", "u", exponent),
    "v_fract_f64": Op("d", "d", fraction),
    "v_cvt_flr_i32_f32": Op("f", "u", lambda a: to_integer(whole(math.floor)(a), -(1 << 31), (1 << 31) - 1)),
    "v_cvt_rpi_i32_f32": Op(
        "f", "u", lambda a: to_integer(whole(math.floor)(single(a + 0.5)), -(1 << 31), (1 << 31) - 1)
    ),
    "v_cvt_off_f32_i4": Op("u", "f", lambda a: signed(a & 15, 4) / 16),
    "v_cvt_u16_f16": Op("h", "u", lambda a: to_integer(f16(a), 0, 0xFFFF)),
    "v_cvt_i16_f16": Op("h", "u", lambda a: to_integer(f16(a), -0x8000, 0x7FFF) & 0xFFFF),
    "v_cubeid_f32": Op("fff", "f", lambda x, y, z: float(cube(x, y, z))),
}
