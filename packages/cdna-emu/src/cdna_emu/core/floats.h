/* Conversions between float32 and the narrow formats. Each works on bits, whatever the host's rounding mode is. */
#ifndef CDNA_EMU_FLOATS_H
#define CDNA_EMU_FLOATS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* MODE bit 23 (FP16_OVFL): results of f16, fp8 and bf8 conversions that overflow become the largest finite value. */
enum { MODE_FP16_OVFL = 1u << 23 };

static inline uint32_t bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint64_t bits_of_f64(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

static inline double f64_of_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

/* yes or no by a mask: compilers turn a ?: on floating-point results into branches, which keeps loops scalar. */
static inline uint32_t select_bits(bool condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* Magnitude of a finite float32 in a format with `mantissa` stored bits and the given bias: exponent and mantissa fields as
   one integer, which may exceed the format's largest value. Discarded bits round to nearest even, or, if stochastic, after
   the top bits of `random` have been added to them. `toward_zero` drops them. */
enum Rounding { ROUND_NEAREST_EVEN, ROUND_TOWARD_ZERO, ROUND_STOCHASTIC };

static inline uint32_t narrow_magnitude(uint32_t bits, int mantissa, int bias, enum Rounding rounding, uint32_t random)
{
    uint32_t magnitude = bits & 0x7fffffff;
    int exponent = (int)(magnitude >> 23);
    uint32_t fraction = magnitude & 0x7fffff;
    if (exponent)
        fraction |= 0x800000;
    else
        exponent = 1;
    int narrow = exponent - 127 + bias; /* biased exponent in the narrow format */
    int below = narrow < 1 ? 1 - narrow : 0; /* further bits lost by a denormal result */
    int drop = 23 - mantissa + below;
    if (below > 31) {
        below = 31;
        drop = 23 - mantissa + below;
    }
    uint64_t kept = fraction;
    if (rounding == ROUND_NEAREST_EVEN)
        kept += ((uint64_t)1 << (drop - 1)) - 1 + (kept >> drop & 1);
    else if (rounding == ROUND_STOCHASTIC) /* the denormal shift comes first, then as many random bits as are dropped */
        kept += (uint64_t)(random >> (32 - (23 - mantissa))) << below;
    kept >>= drop;
    /* The implicit bit adds one to the exponent field, and so does a carry out of the mantissa. */
    return narrow < 1 ? (uint32_t)kept : (uint32_t)kept + ((uint32_t)(narrow - 1) << mantissa);
}

static inline bool f32_bits_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

/* ---- float16 */

static inline uint16_t f16_from_f32_rounded(float value, enum Rounding rounding, uint32_t random)
{
    uint32_t bits = bits_of_f32(value);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (f32_bits_nan(bits))
        return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x1ff));
    if ((bits & 0x7fffffff) == 0x7f800000)
        return sign | 0x7c00;
    uint32_t magnitude = narrow_magnitude(bits, 10, 15, rounding, random);
    if (magnitude >= 0x7c00)
        magnitude = rounding == ROUND_TOWARD_ZERO ? 0x7bff : 0x7c00;
    return (uint16_t)(sign | magnitude);
}

static inline uint16_t f16_from_f32(float value) { return f16_from_f32_rounded(value, ROUND_NEAREST_EVEN, 0); }
static inline uint16_t f16_from_f32_rtz(float value) { return f16_from_f32_rounded(value, ROUND_TOWARD_ZERO, 0); }

static inline float f32_from_f16(uint16_t half)
{
    /* Denormals: the field put under an implicit bit, which an exact subtraction takes away again. */
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t normal = (magnitude << 13) + select_bits(magnitude >= 0x7c00, 224u << 23, 112u << 23);
    uint32_t denormal = bits_of_f32(f32_of_bits((113u << 23) + (magnitude << 13)) - f32_of_bits(113u << 23));
    return f32_of_bits(sign | select_bits(magnitude < 0x400, denormal, normal));
}

/* ---- bfloat16 */

static inline uint16_t bf16_from_f32(float value)
{
    uint32_t bits = bits_of_f32(value);
    if (f32_bits_nan(bits))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Stochastic: the low half of random is added to the discarded bits (gfx950 v_cvt_sr_pk_bf16_f32). */
static inline uint16_t bf16_from_f32_sr(float value, uint32_t random)
{
    uint32_t bits = bits_of_f32(value);
    if (f32_bits_nan(bits))
        return (uint16_t)(bits >> 16 | 0x40);
    if ((bits & 0x7fffffff) == 0x7f800000)
        return (uint16_t)(bits >> 16);
    return (uint16_t)((bits + (random & 0xffff)) >> 16);
}

static inline float f32_from_bf16(uint16_t value) { return f32_of_bits((uint32_t)value << 16); }

/* ---- fp8 (E4M3) and bf8 (E5M2)
   OCP (gfx950): E4M3 bias 7, largest 448, NaN 0x7f and 0xff, no infinity; E5M2 bias 15, infinity 0x7c, NaN above it.
   FNUZ (gfx942): bias 8 and 16, largest 240 and 57344, 0x80 the only NaN, no infinity and no negative zero.
   Overflow gives NaN, or infinity in OCP E5M2; with saturate (MODE.FP16_OVFL) the largest finite value, for an infinite input
   too, as in the saturating mode of the OCP 8-bit specification. */

static inline uint8_t e8_from_f32(float value, int mantissa, bool fnuz, enum Rounding rounding, uint32_t random, bool saturate)
{
    uint32_t bits = bits_of_f32(value), sign = bits >> 24 & 0x80;
    bool e4m3 = mantissa == 3;
    uint32_t largest = fnuz ? 0x7f : e4m3 ? 0x7e : 0x7b;
    if (f32_bits_nan(bits))
        return (uint8_t)(fnuz ? 0x80 : sign | 0x7f);
    bool infinite = (bits & 0x7fffffff) == 0x7f800000;
    int bias = (e4m3 ? 7 : 15) + fnuz;
    uint32_t magnitude = infinite ? largest + 1 : narrow_magnitude(bits, mantissa, bias, rounding, random);
    if (magnitude > largest) {
        if (saturate)
            return (uint8_t)(sign | largest);
        if (fnuz)
            return 0x80;
        return (uint8_t)(sign | (e4m3 ? 0x7f : 0x7c));
    }
    return (uint8_t)(fnuz && !magnitude ? 0 : sign | magnitude);
}

static inline uint8_t fp8_from_f32_mode(float value, bool fnuz, bool saturate)
{
    return e8_from_f32(value, 3, fnuz, ROUND_NEAREST_EVEN, 0, saturate);
}

static inline uint8_t bf8_from_f32_mode(float value, bool fnuz, bool saturate)
{
    return e8_from_f32(value, 2, fnuz, ROUND_NEAREST_EVEN, 0, saturate);
}

static inline uint8_t fp8_from_f32(float value, bool fnuz) { return fp8_from_f32_mode(value, fnuz, false); }
static inline uint8_t bf8_from_f32(float value, bool fnuz) { return bf8_from_f32_mode(value, fnuz, false); }

/* v_cvt_sr_fp8_f32 adds random[31:12] to the 20 bits it drops, v_cvt_sr_bf8_f32 random[31:11] to its 21; then truncates. A
   carry goes into the exponent: the ISA documents' pseudocode wraps the mantissa instead and rounds once more, which would
   not be stochastic rounding (1.9999 could become 1.0), so it is not followed there. */
static inline uint8_t fp8_from_f32_sr(float value, uint32_t random, bool fnuz, bool saturate)
{
    return e8_from_f32(value, 3, fnuz, ROUND_STOCHASTIC, random, saturate);
}

static inline uint8_t bf8_from_f32_sr(float value, uint32_t random, bool fnuz, bool saturate)
{
    return e8_from_f32(value, 2, fnuz, ROUND_STOCHASTIC, random, saturate);
}

static inline float e8_to_f32(uint8_t value, int mantissa, bool fnuz)
{
    bool e4m3 = mantissa == 3;
    uint32_t sign = (uint32_t)(value & 0x80) << 24, magnitude = value & 0x7f, one = 1u << mantissa, nan = 0x7fc00000;
    uint32_t rebias = 127u - (e4m3 ? 7 : 15) - fnuz, field = magnitude << (23 - mantissa);
    uint32_t offset = (rebias + 1) << 23; /* denormals as in f32_from_f16 */
    uint32_t denormal = bits_of_f32(f32_of_bits(offset + field) - f32_of_bits(offset));
    uint32_t result = select_bits(magnitude < one, denormal, field + (rebias << 23));
    if (fnuz)
        return f32_of_bits(select_bits(value == 0x80, nan, sign | result));
    if (e4m3)
        return f32_of_bits(sign | select_bits(magnitude == 0x7f, nan, result));
    return f32_of_bits(sign | select_bits(magnitude > 0x7c, nan, select_bits(magnitude == 0x7c, 0x7f800000, result)));
}

static inline float f32_from_fp8(uint8_t value, bool fnuz) { return e8_to_f32(value, 3, fnuz); }
static inline float f32_from_bf8(uint8_t value, bool fnuz) { return e8_to_f32(value, 2, fnuz); }

#endif
