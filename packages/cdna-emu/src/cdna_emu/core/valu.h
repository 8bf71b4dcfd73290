/* What the files of vector ALU ops share: sources with modifiers, results with clamp, omod and flushed denormals. */
#ifndef CDNA_EMU_VALU_H
#define CDNA_EMU_VALU_H

#include <math.h>
#include <string.h>

#include "core.h"
#include "floats.h"

/* The lane loops are compiled twice on x86-64, for any CPU and for those with AVX2 and FMA; both give the same bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__)
#define WIDE __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define WIDE
#endif

#define EACH_LANE for (int l = 0; l < LANES; l++)

/* Wave.mode, as the hardware's MODE register. */
enum {
    MODE_IN32 = 1u << 4, MODE_OUT32 = 1u << 5, MODE_IN16 = 1u << 6, MODE_OUT16 = 1u << 7, /* set: denormals are kept */
    MODE_DX10_CLAMP = 1u << 8, MODE_IEEE = 1u << 9
};

/* Each file's switch. False: not an op of that file, or a form of it that is not modelled. */
bool exec_vector_integer(const Group *g, Wave *w, const Insn *i);
bool exec_vector_float(const Group *g, Wave *w, const Insn *i);
bool exec_vector_half(const Group *g, Wave *w, const Insn *i);
bool exec_vector_packed(const Group *g, Wave *w, const Insn *i);
bool exec_vector_convert(const Group *g, Wave *w, const Insn *i);
bool exec_vector_scaled(const Group *g, Wave *w, const Insn *i);

static inline uint32_t flush32(uint32_t bits) { return bits & 0x7f800000 ? bits : bits & 0x80000000; }
static inline uint64_t flush64(uint64_t bits)
{
    return bits & 0x7ff0000000000000 ? bits : bits & 0x8000000000000000;
}
static inline uint16_t flush16(uint16_t bits) { return bits & 0x7c00 ? bits : bits & 0x8000; }

/* All ones in the lanes of a mask. */
static inline void expand_mask(uint64_t mask, uint32_t out[LANES])
{
    for (int half = 0; half < 2; half++) {
        uint32_t part = (uint32_t)(mask >> 32 * half);
        for (int l = 0; l < 32; l++) out[32 * half + l] = part & 1u << l ? UINT32_MAX : 0;
    }
}

static inline uint64_t collect_mask(const uint32_t in[LANES])
{
    uint64_t mask = 0;
    EACH_LANE mask |= (uint64_t)(in[l] & 1) << l;
    return mask;
}

/* The mask operand behind n sources: an SGPR pair, or VCC where the encoding only implies it. */
static inline uint64_t mask_source(const Wave *w, const Insn *i, int n)
{
    return i->sources > n ? scalar64(w, i, i->sources - 1) : vcc_mask(w);
}

static inline void write_mask(Wave *w, const Insn *i, uint64_t value)
{
    write_scalar64(w, i->sdst.code == NO_OPERAND ? VCC_LO : i->sdst.code, value);
}

static inline const uint32_t *destination32(const Wave *w, const Insn *i, int r)
{
    return w->vgpr[i->dst.code - VGPR0 + r];
}

static inline void write64(Wave *w, const Insn *i, const uint64_t value[LANES], uint64_t mask)
{
    uint32_t low[LANES], high[LANES];
    EACH_LANE {
        low[l] = (uint32_t)value[l];
        high[l] = (uint32_t)(value[l] >> 32);
    }
    write32(w, i, 0, low, mask);
    write32(w, i, 1, high, mask);
}

/* ---- f32 */

static inline void modify32(const uint32_t *from, uint32_t *to, uint32_t mods, bool flush)
{
    uint32_t keep = mods & MOD_ABS ? 0x7fffffff : UINT32_MAX, flip = mods & MOD_NEG ? 0x80000000 : 0;
    if (flush)
        EACH_LANE to[l] = (flush32(from[l]) & keep) ^ flip;
    else
        EACH_LANE to[l] = (from[l] & keep) ^ flip;
}

/* source32 of a float operand: neg, abs and flushed denormals applied. */
static inline const uint32_t *float_source(const Wave *w, const Insn *i, int k, uint32_t tmp[LANES])
{
    const uint32_t *from = source32(w, i, k, 0, tmp);
    uint32_t mods = i->src[k].mods & (MOD_NEG | MOD_ABS);
    bool flush = !(w->mode & MODE_IN32);
    if (!mods && !flush) return from;
    modify32(from, tmp, mods, flush);
    return tmp;
}

/* Output modifiers are ignored where denormal results or IEEE mode are on, as the ISA document says. */
static inline uint32_t output_scale(const Wave *w, const Insn *i, uint32_t keeps_denormals)
{
    uint32_t omod = (i->flags & F_OMOD_MASK) >> F_OMOD_SHIFT;
    return w->mode & (keeps_denormals | MODE_IEEE) ? 0 : omod;
}

static inline double omod_factor(uint32_t omod) { return omod == 1 ? 2.0 : omod == 2 ? 4.0 : omod == 3 ? 0.5 : 1.0; }

static inline double clamp_unit(const Wave *w, double value)
{
    if (isnan(value)) return w->mode & MODE_DX10_CLAMP ? 0.0 : value;
    return value > 1.0 ? 1.0 : value > 0.0 ? value : 0.0;
}

static inline void finish32(const Wave *w, const Insn *i, uint32_t d[LANES])
{
    if (!(i->flags & (F_CLAMP | F_OMOD_MASK)) && (w->mode & MODE_OUT32)) return;
    uint32_t omod = output_scale(w, i, MODE_OUT32);
    if (omod) {
        float factor = (float)omod_factor(omod);
        EACH_LANE {
            float scaled = f32_of_bits(flush32(d[l])) * factor;
            d[l] = bits_of_f32(scaled == 0 ? 0.0f : scaled);
        }
    }
    if (!(w->mode & MODE_OUT32)) EACH_LANE d[l] = flush32(d[l]);
    if (i->flags & F_CLAMP) EACH_LANE d[l] = bits_of_f32((float)clamp_unit(w, f32_of_bits(d[l])));
}

static inline void write_float(Wave *w, const Insn *i, uint32_t d[LANES])
{
    finish32(w, i, d);
    write32(w, i, 0, d, lane_mask(w, i));
}

/* ---- f64 */

static inline void double_source(const Wave *w, const Insn *i, int k, uint64_t out[LANES])
{
    source64(w, i, k, true, out);
    uint32_t mods = i->src[k].mods;
    uint64_t keep = mods & MOD_ABS ? INT64_MAX : UINT64_MAX, flip = mods & MOD_NEG ? 1ull << 63 : 0;
    if (!(w->mode & MODE_IN16)) EACH_LANE out[l] = flush64(out[l]);
    if (mods) EACH_LANE out[l] = (out[l] & keep) ^ flip;
}

static inline void write_double(Wave *w, const Insn *i, uint64_t d[LANES])
{
    uint32_t omod = output_scale(w, i, MODE_OUT16);
    if (omod) {
        EACH_LANE {
            double scaled = f64_of_bits(flush64(d[l])) * omod_factor(omod);
            d[l] = bits_of_f64(scaled == 0 ? 0.0 : scaled);
        }
    }
    if (!(w->mode & MODE_OUT16)) EACH_LANE d[l] = flush64(d[l]);
    if (i->flags & F_CLAMP) EACH_LANE d[l] = bits_of_f64(clamp_unit(w, f64_of_bits(d[l])));
    write64(w, i, d, lane_mask(w, i));
}

/* ---- f16 and 16-bit integers */

static inline void select_half(const uint32_t *from, uint32_t high, uint16_t out[LANES])
{
    if (high)
        EACH_LANE out[l] = (uint16_t)(from[l] >> 16);
    else
        EACH_LANE out[l] = (uint16_t)from[l];
}

static inline uint32_t op_sel(const Insn *i, int k) { return i->flags >> (F_OPSEL_SHIFT + k) & 1; }

static inline void modify16(const Wave *w, uint32_t mods, uint16_t v[LANES])
{
    uint16_t keep = mods & MOD_ABS ? 0x7fff : 0xffff, flip = mods & MOD_NEG ? 0x8000 : 0;
    if (!(w->mode & MODE_IN16)) EACH_LANE v[l] = flush16(v[l]);
    if (mods & (MOD_NEG | MOD_ABS)) EACH_LANE v[l] = (uint16_t)((v[l] & keep) ^ flip);
}

/* Source k of a VOP1, VOP2 or VOP3 op on f16 as bits: op_sel, neg, abs and flushed denormals applied. */
static inline void half_bits(const Wave *w, const Insn *i, int k, uint16_t out[LANES])
{
    uint32_t tmp[LANES];
    select_half(source16f(w, i, k, tmp), op_sel(i, k), out);
    modify16(w, i->src[k].mods, out);
}

static inline void half_source(const Wave *w, const Insn *i, int k, float out[LANES])
{
    uint16_t bits[LANES];
    half_bits(w, i, k, bits);
    EACH_LANE out[l] = f32_from_f16(bits[l]);
}

/* f16_from_f32 without branches, for the vectoriser; the host must round to nearest. Adding 0.5 lets the host round to the
   denormals' step, 2^-24. */
static inline uint16_t f16_nearest(float value)
{
    uint32_t bits = bits_of_f32(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t denormal = bits_of_f32(f32_of_bits(magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = magnitude < 113u << 23 ? denormal : normal;
    half = magnitude >= 143u << 23 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x1ff) : half;
    return (uint16_t)(sign | half);
}

/* Round to f16 in one of MODE's rounding modes: 0 nearest even, 1 up, 2 down, 3 toward zero. */
static inline uint16_t f16_rounded(float value, uint32_t rounding)
{
    if (rounding == 0) return f16_nearest(value);
    uint16_t half = f16_from_f32_rtz(value);
    bool away = rounding == 1 ? value > 0 : rounding == 2 && value < 0;
    return isfinite(value) && away && f32_from_f16(half) != value ? (uint16_t)(half + 1) : half;
}

static inline void round_lanes16(const float from[LANES], uint16_t to[LANES], uint32_t rounding)
{
    if (rounding == 0)
        EACH_LANE to[l] = f16_nearest(from[l]);
    else
        EACH_LANE to[l] = f16_rounded(from[l], rounding);
}

/* MODE.FP16_OVFL: what overflowed becomes the largest finite f16; infinities stay. */
static inline void saturate16(const float from[LANES], uint16_t to[LANES])
{
    EACH_LANE if ((to[l] & 0x7fff) == 0x7c00 && isfinite(from[l])) to[l]--;
}

static inline uint32_t rounding16(const Wave *w) { return w->mode >> 2 & 3; }

static inline void finish16(const Wave *w, const Insn *i, uint16_t d[LANES])
{
    uint32_t omod = output_scale(w, i, MODE_OUT16);
    if (omod) {
        EACH_LANE {
            float scaled = f32_from_f16(flush16(d[l])) * (float)omod_factor(omod);
            d[l] = f16_rounded(scaled == 0 ? 0.0f : scaled, rounding16(w));
        }
    }
    if (!(w->mode & MODE_OUT16)) EACH_LANE d[l] = flush16(d[l]);
    if (i->flags & F_CLAMP) EACH_LANE d[l] = f16_from_f32((float)clamp_unit(w, f32_from_f16(d[l])));
}

/* A 16-bit result: op_sel chooses the half, the other one is kept if so asked, else zero. */
static inline void write16(Wave *w, const Insn *i, const uint16_t value[LANES], bool keep_high)
{
    uint32_t d[LANES];
    const uint32_t *old = destination32(w, i, 0);
    if (op_sel(i, 3))
        EACH_LANE d[l] = (old[l] & 0xffff) | (uint32_t)value[l] << 16;
    else if (keep_high && !(i->flags & F_SDWA))
        EACH_LANE d[l] = (old[l] & 0xffff0000) | value[l];
    else
        EACH_LANE d[l] = value[l];
    write32(w, i, 0, d, lane_mask(w, i));
}

/* ---- minimum and maximum */

static inline bool signaling32(uint32_t b) { return (b & 0x7fc00000) == 0x7f800000 && (b & 0x3fffff); }

/* One of two numbers wins over a NaN; -0 is less than +0; a signaling NaN wins, quieted, in IEEE mode. */
static inline uint32_t min32(uint32_t a, uint32_t b, bool ieee)
{
    float x = f32_of_bits(a), y = f32_of_bits(b);
    uint32_t r = x == y ? a | b : y < x ? b : a;
    r = x != x ? b : r;
    if (ieee) {
        r = signaling32(b) ? b | 0x400000 : r;
        r = signaling32(a) ? a | 0x400000 : r;
    }
    return r;
}

static inline uint32_t max32(uint32_t a, uint32_t b, bool ieee)
{
    float x = f32_of_bits(a), y = f32_of_bits(b);
    uint32_t r = x == y ? a & b : y > x ? b : a;
    r = x != x ? b : r;
    if (ieee) {
        r = signaling32(b) ? b | 0x400000 : r;
        r = signaling32(a) ? a | 0x400000 : r;
    }
    return r;
}

/* The IEEE 754-2019 forms: a NaN wins. */
static inline uint32_t minimum32(uint32_t a, uint32_t b)
{
    float x = f32_of_bits(a), y = f32_of_bits(b);
    return x != x ? a | 0x400000 : y != y ? b | 0x400000 : min32(a, b, false);
}

static inline uint32_t maximum32(uint32_t a, uint32_t b)
{
    float x = f32_of_bits(a), y = f32_of_bits(b);
    return x != x ? a | 0x400000 : y != y ? b | 0x400000 : max32(a, b, false);
}

static inline bool nan16(uint16_t b) { return (b & 0x7fff) > 0x7c00; }
static inline bool signaling16(uint16_t b) { return nan16(b) && !(b & 0x200); }
/* Order of f16 numbers as integers, -0 below +0. */
static inline int order16(uint16_t b) { return b & 0x8000 ? -(int)(b & 0x7fff) - 1 : b; }

static inline uint16_t min16(uint16_t a, uint16_t b, bool ieee)
{
    if (ieee && signaling16(a)) return a | 0x200;
    if (ieee && signaling16(b)) return b | 0x200;
    if (nan16(a)) return b;
    if (nan16(b)) return a;
    return order16(a) < order16(b) ? a : b;
}

static inline uint16_t max16(uint16_t a, uint16_t b, bool ieee)
{
    if (ieee && signaling16(a)) return a | 0x200;
    if (ieee && signaling16(b)) return b | 0x200;
    if (nan16(a)) return b;
    if (nan16(b)) return a;
    return order16(a) > order16(b) ? a : b;
}

static inline uint16_t minimum16(uint16_t a, uint16_t b)
{
    return nan16(a) ? a | 0x200 : nan16(b) ? b | 0x200 : min16(a, b, false);
}

static inline uint16_t maximum16(uint16_t a, uint16_t b)
{
    return nan16(a) ? a | 0x200 : nan16(b) ? b | 0x200 : max16(a, b, false);
}

/* ---- fused multiply-add of f16 with one rounding */

/* Where a rounded double is inexact, make its last bit 1: further rounding to fewer bits is then as of the exact value. */
static inline double round_to_odd(double value, double error)
{
    uint64_t bits = bits_of_f64(value);
    if (error == 0 || error != error || (bits & 1)) return value;
    return f64_of_bits((error > 0) == (value > 0) ? bits + 1 : bits - 1);
}

static inline float narrow_to_odd(double value)
{
    float near = (float)value;
    double error = value - near;
    uint32_t bits = bits_of_f32(near);
    if (error == 0 || error != error || (bits & 1)) return near;
    return f32_of_bits((error > 0) == (near > 0) ? bits + 1 : bits - 1);
}

/* Exact to f16 after one more rounding to it; needs the host's rounding to be to nearest. */
static inline float fma_half(float a, float b, float c)
{
    double product = (double)a * b, sum = product + c; /* the product of two f16 is exact */
    if (!isfinite(sum)) return (float)sum;
    double other = sum - product, error = (product - (sum - other)) + (c - other);
    return narrow_to_odd(round_to_odd(sum, error));
}

#endif
