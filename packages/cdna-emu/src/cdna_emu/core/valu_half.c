/* Vector ALU: arithmetic of f16, and of 16-bit integers outside VOP3P. */
#include "valu.h"

/* Which half of the destination the ops of gfx9 leave alone: the older ones clear the high half, those that came with
   op_sel keep it. */
enum { CLEAR_HIGH = 0, KEEP_HIGH = 1 };

static inline float sum(float a, float b, uint32_t rounding)
{
    return rounding ? narrow_to_odd((double)a + b) : a + b; /* the double is exact */
}

static inline float fraction(float x)
{
    float r = x - floorf(x);
    return r > 0x1.ffcp-1f ? 0x1.ffcp-1f : r;
}

static inline float quotient_to_odd(double exact) { return narrow_to_odd(exact); }

static inline float sine(float x)
{
    if (fabsf(x) > 256.0f) return isinf(x) ? NAN : 0.0f;
    return (float)sin(6.283185307179586 * ((double)x - floor((double)x)));
}

static inline float cosine(float x)
{
    if (fabsf(x) > 256.0f) return isinf(x) ? NAN : 1.0f;
    return (float)cos(6.283185307179586 * ((double)x - floor((double)x)));
}

static inline uint16_t median16(uint16_t a, uint16_t b, uint16_t c, bool ieee)
{
    if (nan16(a) || nan16(b) || nan16(c)) return min16(min16(a, b, ieee), c, ieee);
    int x = order16(a), y = order16(b), z = order16(c);
    if (x >= y && x >= z) return max16(b, c, ieee);
    return y >= x && y >= z ? max16(a, c, ieee) : max16(a, b, ieee);
}

static inline uint16_t div_fixup16(uint16_t quotient, uint16_t den, uint16_t num)
{
    uint16_t sign = (den ^ num) & 0x8000, d = den & 0x7fff, n = num & 0x7fff;
    if (nan16(num)) return num | 0x200;
    if (nan16(den)) return den | 0x200;
    if ((d == 0 && n == 0) || (d == 0x7c00 && n == 0x7c00)) return 0xfe00;
    if (d == 0 || n == 0x7c00) return sign | 0x7c00;
    if (d == 0x7c00 || n == 0) return sign;
    return sign | (quotient & 0x7fff);
}

static inline uint16_t exponent_of(float x)
{
    int e = 0;
    if (isfinite(x)) frexpf(x, &e);
    return (uint16_t)e;
}

static inline float mantissa_of(float x)
{
    int e;
    return isfinite(x) ? frexpf(x, &e) : x;
}

static inline int clamp_exponent(int e) { return e < -100 ? -100 : e > 100 ? 100 : e; }

#define RESULT(expression, keep) \
    float r[LANES]; \
    uint16_t d[LANES]; \
    EACH_LANE r[l] = (expression); \
    round_lanes16(r, d, rounding); \
    finish16(w, i, d); \
    write16(w, i, d, keep); \
    return true
#define RESULT_BITS(expression, keep) \
    uint16_t d[LANES]; \
    EACH_LANE d[l] = (uint16_t)(expression); \
    finish16(w, i, d); \
    write16(w, i, d, keep); \
    return true
#define SOURCE(name, k) float name[LANES]; half_source(w, i, k, name)
#define BITS(name, k) uint16_t name[LANES]; half_bits(w, i, k, name)
#define A a[l]
#define B b[l]
#define C c[l]
#define UNARY(op, expression) case OP_##op: { SOURCE(a, 0); RESULT(expression, CLEAR_HIGH); }
#define BINARY(op, expression) case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); RESULT(expression, CLEAR_HIGH); }
#define TERNARY(op, expression, keep) \
    case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); SOURCE(c, 2); RESULT(expression, keep); }
#define BINARY_BITS(op, expression) case OP_##op: { BITS(a, 0); BITS(b, 1); RESULT_BITS(expression, CLEAR_HIGH); }
#define TERNARY_BITS(op, expression, keep) \
    case OP_##op: { BITS(a, 0); BITS(b, 1); BITS(c, 2); RESULT_BITS(expression, keep); }

WIDE static bool exec_f16(Wave *w, const Insn *i)
{
    bool ieee = w->mode & MODE_IEEE;
    uint32_t rounding = rounding16(w);
    switch (i->op) {
        BINARY(v_add_f16, sum(A, B, rounding))
        BINARY(v_sub_f16, sum(A, -B, rounding))
        BINARY(v_subrev_f16, sum(B, -A, rounding))
        BINARY(v_mul_f16, A * B)
        TERNARY(v_fma_f16, fma_half(A, B, C), KEEP_HIGH)
        TERNARY(v_fma_legacy_f16, fma_half(A, B, C), CLEAR_HIGH)
        BINARY_BITS(v_min_f16, min16(A, B, ieee))
        BINARY_BITS(v_max_f16, max16(A, B, ieee))
        TERNARY_BITS(v_min3_f16, min16(min16(A, B, ieee), C, ieee), KEEP_HIGH)
        TERNARY_BITS(v_max3_f16, max16(max16(A, B, ieee), C, ieee), KEEP_HIGH)
        TERNARY_BITS(v_med3_f16, median16(A, B, C, ieee), KEEP_HIGH)
        TERNARY_BITS(v_div_fixup_f16, div_fixup16(A, B, C), KEEP_HIGH)
        TERNARY_BITS(v_div_fixup_legacy_f16, div_fixup16(A, B, C), CLEAR_HIGH)
        UNARY(v_rcp_f16, quotient_to_odd(1.0 / A))
        UNARY(v_sqrt_f16, quotient_to_odd(sqrt((double)A)))
        UNARY(v_rsq_f16, quotient_to_odd(1.0 / sqrt((double)A)))
        UNARY(v_log_f16, log2f(A))
        UNARY(v_exp_f16, exp2f(A))
        UNARY(v_sin_f16, sine(A))
        UNARY(v_cos_f16, cosine(A))
        UNARY(v_floor_f16, floorf(A))
        UNARY(v_ceil_f16, ceilf(A))
        UNARY(v_trunc_f16, truncf(A))
        UNARY(v_rndne_f16, rintf(A))
        UNARY(v_fract_f16, fraction(A))
        UNARY(v_frexp_mant_f16, mantissa_of(A))
    case OP_v_frexp_exp_i16_f16: {
        SOURCE(a, 0);
        uint16_t d[LANES];
        EACH_LANE d[l] = exponent_of(A);
        write16(w, i, d, CLEAR_HIGH);
        return true;
    }
    case OP_v_ldexp_f16: {
        SOURCE(a, 0);
        uint32_t tmp[LANES];
        uint16_t b[LANES];
        select_half(source32(w, i, 1, 0, tmp), op_sel(i, 1), b);
        RESULT(ldexpf(A, clamp_exponent((int16_t)b[l])), CLEAR_HIGH);
    }
    case OP_v_pack_b32_f16: {
        BITS(a, 0);
        BITS(b, 1);
        uint32_t d[LANES];
        EACH_LANE d[l] = A | (uint32_t)B << 16;
        write32(w, i, 0, d, lane_mask(w, i));
        return true;
    }
    default: return false;
    }
}

#undef UNARY
#undef BINARY
#undef TERNARY
#undef RESULT
#undef SOURCE
#define SOURCE(name, k) \
    uint32_t name##_tmp[LANES]; \
    uint16_t name[LANES]; \
    select_half(source32(w, i, k, 0, name##_tmp), op_sel(i, k), name)
#define RESULT(expression, keep) \
    uint16_t d[LANES]; \
    EACH_LANE d[l] = (uint16_t)(expression); \
    write16(w, i, d, keep); \
    return true
#define BINARY(op, expression) case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); RESULT(expression, CLEAR_HIGH); }
#define TERNARY(op, expression, keep) \
    case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); SOURCE(c, 2); RESULT(expression, keep); }
#define SIGNED(x) ((int16_t)(x))

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }
static inline int middle(int a, int b, int c) { return most(least(a, b), least(most(a, b), c)); }
static inline int saturate(int v, int low, int high) { return v < low ? low : v > high ? high : v; }

static bool exec_i16_clamped(Wave *w, const Insn *i)
{
    switch (i->op) {
        BINARY(v_add_u16, saturate(A + B, 0, 0xffff))
        BINARY(v_sub_u16, saturate(A - B, 0, 0xffff))
        BINARY(v_subrev_u16, saturate(B - A, 0, 0xffff))
        BINARY(v_add_i16, saturate(SIGNED(A) + SIGNED(B), INT16_MIN, INT16_MAX))
        BINARY(v_sub_i16, saturate(SIGNED(A) - SIGNED(B), INT16_MIN, INT16_MAX))
    default: return false;
    }
}

/* What an inline float means to these ops is not documented. */
static bool has_float_constant(const Insn *i)
{
    for (int k = 0; k < i->sources; k++)
        if (i->src[k].code >= FLOAT_HALF && i->src[k].code <= FLOAT_INV_2PI) return true;
    return false;
}

WIDE static bool exec_i16(Wave *w, const Insn *i)
{
    if (has_float_constant(i)) return false;
    if (i->flags & F_CLAMP) return exec_i16_clamped(w, i);
    switch (i->op) {
        BINARY(v_add_u16, A + B)
        BINARY(v_sub_u16, A - B)
        BINARY(v_subrev_u16, B - A)
        BINARY(v_add_i16, A + B)
        BINARY(v_sub_i16, A - B)
        BINARY(v_mul_lo_u16, (uint32_t)A * B)
        BINARY(v_lshlrev_b16, B << (A & 15))
        BINARY(v_lshrrev_b16, B >> (A & 15))
        BINARY(v_ashrrev_i16, SIGNED(B) >> (A & 15))
        BINARY(v_max_u16, most(A, B))
        BINARY(v_max_i16, most(SIGNED(A), SIGNED(B)))
        BINARY(v_min_u16, least(A, B))
        BINARY(v_min_i16, least(SIGNED(A), SIGNED(B)))
        TERNARY(v_mad_u16, (uint32_t)A * B + C, KEEP_HIGH)
        TERNARY(v_mad_i16, (uint32_t)A * B + C, KEEP_HIGH)
        TERNARY(v_mad_legacy_u16, (uint32_t)A * B + C, CLEAR_HIGH)
        TERNARY(v_mad_legacy_i16, (uint32_t)A * B + C, CLEAR_HIGH)
        TERNARY(v_min3_u16, least(least(A, B), C), KEEP_HIGH)
        TERNARY(v_max3_u16, most(most(A, B), C), KEEP_HIGH)
        TERNARY(v_med3_u16, middle(A, B, C), KEEP_HIGH)
        TERNARY(v_min3_i16, least(least(SIGNED(A), SIGNED(B)), SIGNED(C)), KEEP_HIGH)
        TERNARY(v_max3_i16, most(most(SIGNED(A), SIGNED(B)), SIGNED(C)), KEEP_HIGH)
        TERNARY(v_med3_i16, middle(SIGNED(A), SIGNED(B), SIGNED(C)), KEEP_HIGH)
    case OP_v_mad_u32_u16:
    case OP_v_mad_i32_i16: {
        SOURCE(a, 0);
        SOURCE(b, 1);
        uint32_t c_tmp[LANES], d[LANES];
        const uint32_t *c = source32(w, i, 2, 0, c_tmp);
        if (i->op == OP_v_mad_u32_u16)
            EACH_LANE d[l] = (uint32_t)A * B + C;
        else
            EACH_LANE d[l] = (uint32_t)(SIGNED(A) * SIGNED(B)) + C;
        write32(w, i, 0, d, lane_mask(w, i));
        return true;
    }
    case OP_v_sat_pk_u8_i16: {
        uint32_t tmp[LANES];
        const uint32_t *a = source32(w, i, 0, 0, tmp);
        RESULT(saturate(SIGNED(A), 0, 255) | saturate(SIGNED(A >> 16), 0, 255) << 8, CLEAR_HIGH);
    }
    default: return false;
    }
}

bool exec_vector_half(const Group *g, Wave *w, const Insn *i)
{
    (void)g;
    if (i->op < OP_v_add_f16 || i->op > OP_v_sat_pk_u8_i16) return false;
    if (i->op >= OP_v_add_u16) return exec_i16(w, i);
    /* Saturation of f16 results is not modelled; packing cannot overflow. */
    return (!(w->mode & MODE_FP16_OVFL) || i->op == OP_v_pack_b32_f16) && exec_f16(w, i);
}
