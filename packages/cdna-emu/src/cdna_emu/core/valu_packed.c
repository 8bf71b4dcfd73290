/* Vector ALU: VOP3P, ops on two 16-bit or two 32-bit values, mixed-precision fma, and dot products. */
#include <fenv.h>

#include "valu.h"

static inline uint32_t op_sel_hi(const Insn *i, int k) { return i->flags >> (F_OPSEL_HI_SHIFT + k) & 1; }
static inline bool neg_lo(const Insn *i, int k) { return i->src[k].mods & MOD_NEG; }
static inline bool neg_hi(const Insn *i, int k) { return i->flags >> (F_NEG_HI_SHIFT + k) & 1; }

/* The two 16-bit values that source k gives to the low and to the high result. */
typedef struct {
    uint16_t half[2][LANES];
} Halves;

static inline void integer_halves(const Wave *w, const Insn *i, int k, Halves *out)
{
    uint32_t tmp[LANES];
    const uint32_t *from = source32(w, i, k, 0, tmp);
    select_half(from, op_sel(i, k), out->half[0]);
    select_half(from, op_sel_hi(i, k), out->half[1]);
}

static inline void float_halves(const Wave *w, const Insn *i, int k, Halves *out)
{
    uint32_t tmp[LANES];
    const uint32_t *from = source16f(w, i, k, tmp);
    select_half(from, op_sel(i, k), out->half[0]);
    select_half(from, op_sel_hi(i, k), out->half[1]);
    modify16(w, neg_lo(i, k) ? MOD_NEG : 0, out->half[0]);
    modify16(w, neg_hi(i, k) ? MOD_NEG : 0, out->half[1]);
}

static inline void write_halves(Wave *w, const Insn *i, uint16_t low[LANES], uint16_t high[LANES])
{
    uint32_t d[LANES];
    EACH_LANE d[l] = low[l] | (uint32_t)high[l] << 16;
    write32(w, i, 0, d, lane_mask(w, i));
}

static inline int saturate(int64_t v, int low, int high) { return v < low ? low : v > high ? high : (int)v; }
static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

#define UA ((uint32_t)a.half[h][l])
#define UB ((uint32_t)b.half[h][l])
#define UC ((uint32_t)c.half[h][l])
#define SA ((int16_t)a.half[h][l])
#define SB ((int16_t)b.half[h][l])
#define SC ((int16_t)c.half[h][l])
#define BOTH_HALVES for (int h = 0; h < 2; h++) EACH_LANE
#define INTEGER(expression) \
    Halves d; \
    BOTH_HALVES d.half[h][l] = (uint16_t)(expression); \
    write_halves(w, i, d.half[0], d.half[1]); \
    return true
#define BINARY(op, expression) \
    case OP_##op: { \
        Halves a, b; \
        integer_halves(w, i, 0, &a); \
        integer_halves(w, i, 1, &b); \
        INTEGER(expression); \
    }
#define TERNARY(op, expression) \
    case OP_##op: { \
        Halves a, b, c; \
        integer_halves(w, i, 0, &a); \
        integer_halves(w, i, 1, &b); \
        integer_halves(w, i, 2, &c); \
        INTEGER(expression); \
    }

WIDE static bool exec_pk_clamped(Wave *w, const Insn *i)
{
    switch (i->op) {
        BINARY(v_pk_add_u16, saturate((int)UA + (int)UB, 0, 0xffff))
        BINARY(v_pk_sub_u16, saturate((int)UA - (int)UB, 0, 0xffff))
        BINARY(v_pk_add_i16, saturate(SA + SB, INT16_MIN, INT16_MAX))
        BINARY(v_pk_sub_i16, saturate(SA - SB, INT16_MIN, INT16_MAX))
        TERNARY(v_pk_mad_u16, saturate((int64_t)UA * UB + UC, 0, 0xffff))
        TERNARY(v_pk_mad_i16, saturate((int64_t)SA * SB + SC, INT16_MIN, INT16_MAX))
    default: return false;
    }
}

WIDE static bool exec_pk_integer(Wave *w, const Insn *i)
{
    if (i->flags & F_CLAMP) return exec_pk_clamped(w, i);
    switch (i->op) {
        BINARY(v_pk_add_u16, UA + UB)
        BINARY(v_pk_sub_u16, UA - UB)
        BINARY(v_pk_add_i16, UA + UB)
        BINARY(v_pk_sub_i16, UA - UB)
        BINARY(v_pk_mul_lo_u16, UA * UB)
        TERNARY(v_pk_mad_u16, UA * UB + UC)
        TERNARY(v_pk_mad_i16, UA * UB + UC)
        BINARY(v_pk_lshlrev_b16, UB << (UA & 15))
        BINARY(v_pk_lshrrev_b16, UB >> (UA & 15))
        BINARY(v_pk_ashrrev_i16, SB >> (UA & 15))
        BINARY(v_pk_min_u16, least((int)UA, (int)UB))
        BINARY(v_pk_max_u16, most((int)UA, (int)UB))
        BINARY(v_pk_min_i16, least(SA, SB))
        BINARY(v_pk_max_i16, most(SA, SB))
    default: return false;
    }
}

/* ---- two f16 */

#define FA f32_from_f16(a.half[h][l])
#define FB f32_from_f16(b.half[h][l])
#define FC f32_from_f16(c.half[h][l])
#define HALF_RESULT(expression) \
    Halves d; \
    BOTH_HALVES d.half[h][l] = (expression); \
    finish16(w, i, d.half[0]); \
    finish16(w, i, d.half[1]); \
    write_halves(w, i, d.half[0], d.half[1]); \
    return true
#define ROUNDED_RESULT(expression) \
    Halves d; \
    for (int h = 0; h < 2; h++) { \
        float r[LANES]; \
        EACH_LANE r[l] = (expression); \
        round_lanes16(r, d.half[h], rounding); \
        finish16(w, i, d.half[h]); \
    } \
    write_halves(w, i, d.half[0], d.half[1]); \
    return true
#define BINARY_F16(op, RESULT, expression) \
    case OP_##op: { \
        Halves a, b; \
        float_halves(w, i, 0, &a); \
        float_halves(w, i, 1, &b); \
        RESULT(expression); \
    }
#define TERNARY_F16(op, RESULT, expression) \
    case OP_##op: { \
        Halves a, b, c; \
        float_halves(w, i, 0, &a); \
        float_halves(w, i, 1, &b); \
        float_halves(w, i, 2, &c); \
        RESULT(expression); \
    }

static inline float sum(float a, float b, uint32_t rounding)
{
    return rounding ? narrow_to_odd((double)a + b) : a + b; /* the double is exact */
}

WIDE static bool exec_pk_f16(Wave *w, const Insn *i)
{
    bool ieee = w->mode & MODE_IEEE;
    uint32_t rounding = rounding16(w);
    switch (i->op) {
        BINARY_F16(v_pk_add_f16, ROUNDED_RESULT, sum(FA, FB, rounding))
        BINARY_F16(v_pk_mul_f16, ROUNDED_RESULT, FA * FB)
        TERNARY_F16(v_pk_fma_f16, ROUNDED_RESULT, fma_half(FA, FB, FC))
        BINARY_F16(v_pk_min_f16, HALF_RESULT, min16(a.half[h][l], b.half[h][l], ieee))
        BINARY_F16(v_pk_max_f16, HALF_RESULT, max16(a.half[h][l], b.half[h][l], ieee))
        TERNARY_F16(v_pk_minimum3_f16, HALF_RESULT, minimum16(minimum16(a.half[h][l], b.half[h][l]), c.half[h][l]))
        TERNARY_F16(v_pk_maximum3_f16, HALF_RESULT, maximum16(maximum16(a.half[h][l], b.half[h][l]), c.half[h][l]))
    case OP_v_pk_fmac_f16: { /* VOP2: no modifiers, both halves */
        Halves d;
        uint32_t ta[LANES], tb[LANES];
        const uint32_t *a = source16f(w, i, 0, ta), *b = source16f(w, i, 1, tb), *c = destination32(w, i, 0);
        Halves x, y, z;
        for (uint32_t h = 0; h < 2; h++) {
            select_half(a, h, x.half[h]);
            select_half(b, h, y.half[h]);
            select_half(c, h, z.half[h]);
            modify16(w, 0, x.half[h]);
            modify16(w, 0, y.half[h]);
            modify16(w, 0, z.half[h]);
            EACH_LANE d.half[h][l] = f16_rounded(
                fma_half(f32_from_f16(x.half[h][l]), f32_from_f16(y.half[h][l]), f32_from_f16(z.half[h][l])), rounding);
            finish16(w, i, d.half[h]);
        }
        write_halves(w, i, d.half[0], d.half[1]);
        return true;
    }
    default: return false;
    }
}

/* ---- two f32 */

/* A constant in place of a register pair: what its second half is, the ISA document does not say; false unless zero. */
static bool half_known(const Insn *i, int k, uint32_t r)
{
    uint16_t code = i->src[k].code;
    return code < SGPRS || code >= VGPR0 || code == INT_0 || r == 0;
}

static bool halves_known(const Insn *i, int sources)
{
    for (int k = 0; k < sources; k++)
        if (!half_known(i, k, op_sel(i, k)) || !half_known(i, k, op_sel_hi(i, k))) return false;
    return true;
}

/* Source k of result h, with neg and flushed denormals. */
static inline const uint32_t *pair_source(const Wave *w, const Insn *i, int k, int h, uint32_t tmp[LANES])
{
    const uint32_t *from = source32(w, i, k, h ? (int)op_sel_hi(i, k) : (int)op_sel(i, k), tmp);
    bool negate = h ? neg_hi(i, k) : neg_lo(i, k), flush = !(w->mode & MODE_IN32);
    if (!negate && !flush) return from;
    modify32(from, tmp, negate ? MOD_NEG : 0, flush);
    return tmp;
}

#define A f32_of_bits(a[l])
#define B f32_of_bits(b[l])
#define C f32_of_bits(c[l])
#define PAIR(op, sources, expression) \
    case OP_##op: \
        if (!halves_known(i, sources)) return false; \
        for (int h = 0; h < 2; h++) { \
            const uint32_t *a = pair_source(w, i, 0, h, ta), *b = pair_source(w, i, 1, h, tb); \
            const uint32_t *c = sources == 3 ? pair_source(w, i, 2, h, tc) : tc; \
            (void)c; \
            EACH_LANE d[h][l] = bits_of_f32(expression); \
            finish32(w, i, d[h]); \
        } \
        break;

WIDE static bool exec_pk_f32(Wave *w, const Insn *i)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES], d[2][LANES];
    switch (i->op) {
        PAIR(v_pk_fma_f32, 3, fmaf(A, B, C))
        PAIR(v_pk_mul_f32, 2, A * B)
        PAIR(v_pk_add_f32, 2, A + B)
    case OP_v_pk_mov_b32:
        for (int k = 0; k < 2; k++) {
            if (!half_known(i, k, op_sel(i, k))) return false;
            const uint32_t *from = source32(w, i, k, (int)op_sel(i, k), ta);
            memcpy(d[k], from, sizeof d[k]);
        }
        break;
    default: return false;
    }
    uint64_t mask = lane_mask(w, i);
    write32(w, i, 0, d[0], mask);
    write32(w, i, 1, d[1], mask);
    return true;
}

/* ---- fma_mix: op_sel_hi says whether a source is f16, op_sel which half of it; neg_hi is abs */

static inline void mixed_source(const Wave *w, const Insn *i, int k, float out[LANES])
{
    uint32_t tmp[LANES], mods = (neg_lo(i, k) ? MOD_NEG : 0) | (neg_hi(i, k) || (i->src[k].mods & MOD_ABS) ? MOD_ABS : 0);
    if (op_sel_hi(i, k)) {
        uint16_t half[LANES];
        select_half(source16f(w, i, k, tmp), op_sel(i, k), half);
        modify16(w, mods, half);
        EACH_LANE out[l] = f32_from_f16(half[l]);
    } else {
        modify32(source32(w, i, k, 0, tmp), tmp, mods, !(w->mode & MODE_IN32));
        EACH_LANE out[l] = f32_of_bits(tmp[l]);
    }
}

WIDE static bool exec_mix(Wave *w, const Insn *i)
{
    float a[LANES], b[LANES], c[LANES];
    uint32_t d[LANES];
    mixed_source(w, i, 0, a);
    mixed_source(w, i, 1, b);
    mixed_source(w, i, 2, c);
    if (i->op == OP_v_fma_mix_f32) {
        EACH_LANE d[l] = bits_of_f32(fmaf(a[l], b[l], c[l]));
        write_float(w, i, d);
        return true;
    }
    /* Rounded to f32, then to f16: LLVM takes these ops for an fma of f32 that is then truncated. */
    const uint32_t *old = destination32(w, i, 0);
    uint32_t shift = i->op == OP_v_fma_mixhi_f16 ? 16 : 0, rounding = rounding16(w);
    uint16_t half[LANES];
    if (w->mode & 3) { /* the host's rounding is not to nearest then */
        EACH_LANE {
            c[l] = fmaf(a[l], b[l], c[l]);
            half[l] = rounding ? f16_rounded(c[l], rounding) : f16_from_f32(c[l]);
        }
    } else {
        EACH_LANE c[l] = fmaf(a[l], b[l], c[l]);
        round_lanes16(c, half, rounding);
    }
    if (w->mode & MODE_FP16_OVFL) saturate16(c, half);
    finish16(w, i, half);
    EACH_LANE d[l] = (old[l] & ~(0xffffu << shift)) | (uint32_t)half[l] << shift;
    write32(w, i, 0, d, lane_mask(w, i));
    return true;
}

/* ---- dot products */

static inline int64_t dot_signed(uint32_t a, uint32_t b, int width)
{
    int64_t r = 0;
    for (int at = 0; at < 32; at += width) {
        int32_t x = (int32_t)(a << (32 - width - at)) >> (32 - width), y = (int32_t)(b << (32 - width - at)) >> (32 - width);
        r += (int64_t)x * y;
    }
    return r;
}

static inline uint64_t dot_unsigned(uint32_t a, uint32_t b, int width)
{
    uint64_t r = 0;
    uint32_t mask = (1u << width) - 1;
    for (int at = 0; at < 32; at += width) r += (uint64_t)(a >> at & mask) * (b >> at & mask);
    return r;
}

static bool dot_integer(Wave *w, const Insn *i, int width, bool is_signed, bool accumulates)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES], d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb);
    const uint32_t *c = accumulates ? destination32(w, i, 0) : source32(w, i, 2, 0, tc);
    EACH_LANE {
        if (is_signed) {
            int64_t r = dot_signed(a[l], b[l], width) + (int32_t)c[l];
            bool over = (i->flags & F_CLAMP) && r != (int32_t)r;
            d[l] = over ? (r < 0 ? (uint32_t)INT32_MIN : INT32_MAX) : (uint32_t)r;
        } else {
            uint64_t r = dot_unsigned(a[l], b[l], width) + c[l];
            d[l] = (i->flags & F_CLAMP) && r > UINT32_MAX ? UINT32_MAX : (uint32_t)r;
        }
    }
    write32(w, i, 0, d, lane_mask(w, i));
    return true;
}

/* Products of two halves are exact in f32; the sums round one after the other, as in the ISA document's pseudocode. The VOP2
   forms take both halves as they are and add to the destination. */
static bool dot_float(Wave *w, const Insn *i, bool is_bf16, bool accumulates)
{
    Halves x, y;
    uint32_t ta[LANES], tb[LANES], c[LANES], d[LANES];
    for (int k = 0; k < 2; k++) {
        uint16_t code = i->src[k].code;
        if (is_bf16 && code >= FLOAT_HALF && code <= FLOAT_INV_2PI) return false; /* not documented */
        const uint32_t *from = is_bf16 ? source32(w, i, k, 0, ta) : source16f(w, i, k, tb);
        Halves *out = k ? &y : &x;
        select_half(from, accumulates ? 0 : op_sel(i, k), out->half[0]);
        select_half(from, accumulates ? 1 : op_sel_hi(i, k), out->half[1]);
        if (neg_lo(i, k)) EACH_LANE out->half[0][l] ^= 0x8000;
        if (neg_hi(i, k) || (accumulates && neg_lo(i, k))) EACH_LANE out->half[1][l] ^= 0x8000;
    }
    const uint32_t *from = accumulates ? destination32(w, i, 0) : source32(w, i, 2, 0, ta);
    modify32(from, c, accumulates ? 0 : i->src[2].mods, !(w->mode & MODE_IN32));
    EACH_LANE {
        float r[2];
        for (int h = 0; h < 2; h++) {
            uint16_t p = x.half[h][l], q = y.half[h][l];
            r[h] = is_bf16 ? f32_from_bf16(p) * f32_from_bf16(q) : f32_from_f16(p) * f32_from_f16(q);
        }
        float start = f32_of_bits(c[l]);
        d[l] = bits_of_f32(is_bf16 && !accumulates ? r[0] + r[1] + start : start + r[0] + r[1]);
    }
    write_float(w, i, d);
    return true;
}

static bool exec_dot(Wave *w, const Insn *i)
{
    switch (i->op) {
    case OP_v_dot2_i32_i16: return dot_integer(w, i, 16, true, false);
    case OP_v_dot2_u32_u16: return dot_integer(w, i, 16, false, false);
    case OP_v_dot4_i32_i8: return dot_integer(w, i, 8, true, false);
    case OP_v_dot4_u32_u8: return dot_integer(w, i, 8, false, false);
    case OP_v_dot8_i32_i4: return dot_integer(w, i, 4, true, false);
    case OP_v_dot8_u32_u4: return dot_integer(w, i, 4, false, false);
    case OP_v_dot2c_i32_i16: return dot_integer(w, i, 16, true, true);
    case OP_v_dot4c_i32_i8: return dot_integer(w, i, 8, true, true);
    case OP_v_dot8c_i32_i4: return dot_integer(w, i, 4, true, true);
    case OP_v_dot2_f32_f16: return dot_float(w, i, false, false);
    case OP_v_dot2_f32_bf16: return dot_float(w, i, true, false);
    case OP_v_dot2c_f32_f16: return dot_float(w, i, false, true);
    case OP_v_dot2c_f32_bf16: return dot_float(w, i, true, true);
    default: return false;
    }
}

bool exec_vector_packed(const Group *g, Wave *w, const Insn *i)
{
    (void)g;
    if (i->op < OP_v_pk_add_u16 || i->op > OP_v_dot2c_f32_bf16) return false;
    if (i->op < OP_v_pk_add_f16) return exec_pk_integer(w, i);
    if (i->op < OP_v_pk_fma_f32) return !(w->mode & MODE_FP16_OVFL) && exec_pk_f16(w, i);
    uint32_t rounding = w->mode & 3;
    static const int host[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    if (rounding) fesetround(host[rounding]);
    bool done = i->op < OP_v_fma_mix_f32 ? exec_pk_f32(w, i) : i->op < OP_v_dot2_i32_i16 ? exec_mix(w, i) : exec_dot(w, i);
    if (rounding) fesetround(FE_TONEAREST);
    return done;
}
