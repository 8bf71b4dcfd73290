/* Vector ALU: arithmetic of f32 and f64. Transcendental results are those of the C library, rounded to f32: their last bit
   may differ from the hardware's. */
#include <fenv.h>

#include "valu.h"

#define PI 3.14159265358979323846

/* ---- f32 */

static inline float flush_denormal(float x) { return f32_of_bits(flush32(bits_of_f32(x))); }

/* exp, log, rcp, sqrt and rsq flush denormals whatever the mode says. */
static inline float exp_base2(float x) { return flush_denormal(exp2f(flush_denormal(x))); }
static inline float log_base2(float x) { return log2f(flush_denormal(x)); }
static inline float square_root(float x) { return sqrtf(flush_denormal(x)); }
static inline float reciprocal(float x) { return flush_denormal(1.0f / flush_denormal(x)); }
static inline float inverse_root(float x) { return (float)(1.0 / sqrt((double)flush_denormal(x))); }

/* Sine and cosine take revolutions; beyond 256 of them the hardware gives the value at 0. */
static inline float sine(float x)
{
    if (fabsf(x) > 256.0f) return isinf(x) ? NAN : 0.0f;
    return (float)sin(2 * PI * ((double)x - floor((double)x)));
}

static inline float cosine(float x)
{
    if (fabsf(x) > 256.0f) return isinf(x) ? NAN : 1.0f;
    return (float)cos(2 * PI * ((double)x - floor((double)x)));
}

/* Below 1 also where x - floor(x) rounds up to it. */
static inline float fraction(float x)
{
    float r = x - floorf(x);
    return r > 0x1.fffffep-1f ? 0x1.fffffep-1f : r;
}

static inline double fraction64(double x)
{
    double r = x - floor(x);
    return r > 0x1.fffffffffffffp-1 ? 0x1.fffffffffffffp-1 : r;
}

static inline int clamp_exponent(int32_t e) { return e < -5000 ? -5000 : e > 5000 ? 5000 : e; }

static inline uint32_t median32(uint32_t a, uint32_t b, uint32_t c, bool ieee)
{
    float x = f32_of_bits(a), y = f32_of_bits(b), z = f32_of_bits(c);
    if (x != x || y != y || z != z) return min32(min32(a, b, ieee), c, ieee);
    float top = f32_of_bits(max32(max32(a, b, ieee), c, ieee));
    return top == x ? max32(b, c, ieee) : top == y ? max32(a, c, ieee) : max32(a, b, ieee);
}

static inline float legacy_product(float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; }

static inline uint32_t exponent_of(float x)
{
    int e = 0;
    if (isfinite(x)) frexpf(x, &e);
    return (uint32_t)e;
}

static inline float mantissa_of(float x)
{
    int e;
    return isfinite(x) ? frexpf(x, &e) : x;
}

/* Cube map face selection: 0 id, 1 s, 2 t, 3 major axis times two. */
static inline float cube(float x, float y, float z, int what)
{
    bool z_major = fabsf(z) >= fabsf(x) && fabsf(z) >= fabsf(y), y_major = !z_major && fabsf(y) >= fabsf(x);
    if (z_major) return what == 0 ? (z < 0 ? 5 : 4) : what == 1 ? (z < 0 ? -x : x) : what == 2 ? -y : 2 * z;
    if (y_major) return what == 0 ? (y < 0 ? 3 : 2) : what == 1 ? x : what == 2 ? (y < 0 ? -z : z) : 2 * y;
    return what == 0 ? (x < 0 ? 1 : 0) : what == 1 ? (x < 0 ? z : -z) : what == 2 ? -y : 2 * x;
}

/* ---- division. The ISA document's pseudocode with four corrections without which the expansion of a division that LLVM
   emits would not be right: 1/denominator is tested for f32's denormals, the denominator alone is scaled down where both
   1/denominator and the quotient are denormal, div_fmas scales by 2^64 or 2^-64 by the quotient's exponent, and div_fixup
   looks for overflow in the quotient (the denominator, which the document names, is finite there). */

typedef struct {
    float value;
    bool scaled;
} DivScale;

static inline bool denormal32(double x) { return x != 0 && fabs(x) < 0x1p-126; }
static inline int biased32(float x) { return (int)(bits_of_f32(x) >> 23 & 0xff); }

static inline DivScale div_scale32(float x, float den, float num)
{
    bool is_den = bits_of_f32(x) == bits_of_f32(den), is_num = bits_of_f32(x) == bits_of_f32(num);
    if (num == 0 || den == 0) return (DivScale){NAN, false};
    bool inverse_denormal = denormal32(1.0 / den), quotient_denormal = denormal32((double)num / den);
    if (biased32(num) - biased32(den) >= 96) return (DivScale){is_den ? ldexpf(x, 64) : x, true};
    if (denormal32(den)) return (DivScale){ldexpf(x, 64), false};
    if (inverse_denormal && quotient_denormal) return (DivScale){is_den ? ldexpf(x, -64) : x, true};
    if (inverse_denormal) return (DivScale){ldexpf(x, -64), false};
    if (quotient_denormal) return (DivScale){is_num ? ldexpf(x, 64) : x, true};
    if (biased32(num) <= 23) return (DivScale){ldexpf(x, 64), false};
    return (DivScale){x, false};
}

static inline float div_fmas32(float a, float b, float c, bool scale)
{
    float r = fmaf(a, b, c);
    return scale ? ldexpf(r, biased32(c) > 127 ? 64 : -64) : r;
}

static inline float div_fixup32(float quotient, float den, float num)
{
    float sign = signbit(den) != signbit(num) ? -1.0f : 1.0f;
    if (num != num) return f32_of_bits(bits_of_f32(num) | 0x400000);
    if (den != den) return f32_of_bits(bits_of_f32(den) | 0x400000);
    if ((den == 0 && num == 0) || (isinf(den) && isinf(num))) return f32_of_bits(0xffc00000);
    if (den == 0 || isinf(num)) return sign * INFINITY;
    if (isinf(den) || num == 0) return sign * 0.0f;
    if (biased32(num) - biased32(den) < -150) return sign * 0.0f;
    if (biased32(quotient) == 255) return sign * INFINITY;
    return sign * fabsf(quotient);
}

typedef struct {
    double value;
    bool scaled;
} DivScale64;

static inline bool denormal64(double x) { return x != 0 && fabs(x) < 0x1p-1022; }
static inline int biased64(double x) { return (int)(bits_of_f64(x) >> 52 & 0x7ff); }

static inline DivScale64 div_scale64(double x, double den, double num)
{
    bool is_den = bits_of_f64(x) == bits_of_f64(den), is_num = bits_of_f64(x) == bits_of_f64(num);
    if (num == 0 || den == 0) return (DivScale64){(double)NAN, false};
    bool inverse_denormal = denormal64(1.0 / den), quotient_denormal = denormal64(num / den);
    if (biased64(num) - biased64(den) >= 768) return (DivScale64){is_den ? ldexp(x, 128) : x, true};
    if (denormal64(den)) return (DivScale64){ldexp(x, 128), false};
    if (inverse_denormal && quotient_denormal) return (DivScale64){is_den ? ldexp(x, -128) : x, true};
    if (inverse_denormal) return (DivScale64){ldexp(x, -128), false};
    if (quotient_denormal) return (DivScale64){is_num ? ldexp(x, 128) : x, true};
    if (biased64(num) <= 53) return (DivScale64){ldexp(x, 128), false};
    return (DivScale64){x, false};
}

static inline double div_fmas64(double a, double b, double c, bool scale)
{
    double r = fma(a, b, c);
    return scale ? ldexp(r, biased64(c) > 1023 ? 128 : -128) : r;
}

static inline double div_fixup64(double quotient, double den, double num)
{
    double sign = signbit(den) != signbit(num) ? -1.0 : 1.0;
    if (num != num) return f64_of_bits(bits_of_f64(num) | 0x8000000000000);
    if (den != den) return f64_of_bits(bits_of_f64(den) | 0x8000000000000);
    if ((den == 0 && num == 0) || (isinf(den) && isinf(num))) return f64_of_bits(0xfff8000000000000);
    if (den == 0 || isinf(num)) return sign * (double)INFINITY;
    if (isinf(den) || num == 0) return sign * 0.0;
    if (biased64(num) - biased64(den) < -1075) return sign * 0.0;
    if (biased64(quotient) == 2047) return sign * (double)INFINITY;
    return sign * fabs(quotient);
}

static void scale_quotient32(Wave *w, const Insn *i)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES], d[LANES];
    const uint32_t *a = float_source(w, i, 0, ta), *b = float_source(w, i, 1, tb), *c = float_source(w, i, 2, tc);
    uint64_t scaled = 0, mask = lane_mask(w, i);
    EACH_LANE {
        DivScale r = div_scale32(f32_of_bits(a[l]), f32_of_bits(b[l]), f32_of_bits(c[l]));
        d[l] = bits_of_f32(r.value);
        scaled |= (uint64_t)r.scaled << l;
    }
    write_float(w, i, d);
    write_mask(w, i, scaled & mask);
}

static void scale_quotient64(Wave *w, const Insn *i)
{
    uint64_t a[LANES], b[LANES], c[LANES], d[LANES], scaled = 0, mask = lane_mask(w, i);
    double_source(w, i, 0, a);
    double_source(w, i, 1, b);
    double_source(w, i, 2, c);
    EACH_LANE {
        DivScale64 r = div_scale64(f64_of_bits(a[l]), f64_of_bits(b[l]), f64_of_bits(c[l]));
        d[l] = bits_of_f64(r.value);
        scaled |= (uint64_t)r.scaled << l;
    }
    write_double(w, i, d);
    write_mask(w, i, scaled & mask);
}

/* ---- f64 */

static inline uint64_t quiet64(uint64_t b) { return b | 0x8000000000000; }
static inline bool nan64(uint64_t b) { return (b & INT64_MAX) > 0x7ff0000000000000; }
static inline bool signaling64(uint64_t b) { return nan64(b) && !(b & 0x8000000000000); }

static inline uint64_t min64(uint64_t a, uint64_t b, bool ieee)
{
    double x = f64_of_bits(a), y = f64_of_bits(b);
    if (ieee && signaling64(a)) return quiet64(a);
    if (ieee && signaling64(b)) return quiet64(b);
    if (nan64(a)) return b;
    if (nan64(b)) return a;
    return x == y ? a | b : x < y ? a : b;
}

static inline uint64_t max64(uint64_t a, uint64_t b, bool ieee)
{
    double x = f64_of_bits(a), y = f64_of_bits(b);
    if (ieee && signaling64(a)) return quiet64(a);
    if (ieee && signaling64(b)) return quiet64(b);
    if (nan64(a)) return b;
    if (nan64(b)) return a;
    return x == y ? a & b : x > y ? a : b;
}

static inline uint32_t exponent_of64(double x)
{
    int e = 0;
    if (isfinite(x)) frexp(x, &e);
    return (uint32_t)e;
}

static inline double mantissa_of64(double x)
{
    int e;
    return isfinite(x) ? frexp(x, &e) : x;
}

/* The literal of fmamk and fmaak is a source of its own; the other two are src0 and the one that is no literal. */
static inline int other_source(const Insn *i) { return i->src[1].code == LITERAL ? 2 : 1; }

#define SOURCE(name, k) uint32_t name##_tmp[LANES]; const uint32_t *name = float_source(w, i, k, name##_tmp)
#define A f32_of_bits(a[l])
#define B f32_of_bits(b[l])
#define C f32_of_bits(c[l])
#define RESULT_BITS(expression) \
    uint32_t d[LANES]; \
    EACH_LANE d[l] = (expression); \
    write_float(w, i, d); \
    return true
#define UNARY(op, expression) case OP_##op: { SOURCE(a, 0); RESULT_BITS(bits_of_f32(expression)); }
#define BINARY(op, expression) case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); RESULT_BITS(bits_of_f32(expression)); }
#define TERNARY(op, expression) \
    case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); SOURCE(c, 2); RESULT_BITS(bits_of_f32(expression)); }
#define BINARY_BITS(op, expression) case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); RESULT_BITS(expression); }
#define TERNARY_BITS(op, expression) \
    case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); SOURCE(c, 2); RESULT_BITS(expression); }

#define SOURCE64(name, k) uint64_t name[LANES]; double_source(w, i, k, name)
#define RESULT64(expression) \
    uint64_t d[LANES]; \
    EACH_LANE d[l] = (expression); \
    write_double(w, i, d); \
    return true
#define A64 f64_of_bits(a[l])
#define B64 f64_of_bits(b[l])
#define C64 f64_of_bits(c[l])
#define UNARY64(op, expression) case OP_##op: { SOURCE64(a, 0); RESULT64(bits_of_f64(expression)); }
#define BINARY64(op, expression) case OP_##op: { SOURCE64(a, 0); SOURCE64(b, 1); RESULT64(expression); }
#define TERNARY64(op, expression) \
    case OP_##op: { SOURCE64(a, 0); SOURCE64(b, 1); SOURCE64(c, 2); RESULT64(bits_of_f64(expression)); }

WIDE static bool exec_f32(Wave *w, const Insn *i)
{
    bool ieee = w->mode & MODE_IEEE;
    switch (i->op) {
        BINARY(v_add_f32, A + B)
        BINARY(v_sub_f32, A - B)
        BINARY(v_subrev_f32, B - A)
        BINARY(v_mul_f32, A * B)
        BINARY(v_mul_legacy_f32, legacy_product(A, B))
        TERNARY(v_fma_f32, fmaf(A, B, C))
    case OP_v_fmac_f32: {
        SOURCE(a, 0);
        SOURCE(b, 1);
        uint32_t c[LANES];
        modify32(destination32(w, i, 0), c, 0, !(w->mode & MODE_IN32));
        RESULT_BITS(bits_of_f32(fmaf(A, B, C)));
    }
    case OP_v_fmamk_f32: {
        SOURCE(a, 0);
        SOURCE(c, other_source(i));
        float factor = f32_of_bits(w->mode & MODE_IN32 ? i->literal : flush32(i->literal));
        RESULT_BITS(bits_of_f32(fmaf(A, factor, C)));
    }
    case OP_v_fmaak_f32: {
        SOURCE(a, 0);
        SOURCE(b, other_source(i));
        float addend = f32_of_bits(w->mode & MODE_IN32 ? i->literal : flush32(i->literal));
        RESULT_BITS(bits_of_f32(fmaf(A, B, addend)));
    }
        BINARY_BITS(v_min_f32, min32(a[l], b[l], ieee))
        BINARY_BITS(v_max_f32, max32(a[l], b[l], ieee))
        TERNARY_BITS(v_min3_f32, min32(min32(a[l], b[l], ieee), c[l], ieee))
        TERNARY_BITS(v_max3_f32, max32(max32(a[l], b[l], ieee), c[l], ieee))
        TERNARY_BITS(v_med3_f32, median32(a[l], b[l], c[l], ieee))
        TERNARY_BITS(v_minimum3_f32, minimum32(minimum32(a[l], b[l]), c[l]))
        TERNARY_BITS(v_maximum3_f32, maximum32(maximum32(a[l], b[l]), c[l]))
        UNARY(v_rcp_f32, reciprocal(A))
        UNARY(v_rcp_iflag_f32, reciprocal(A))
        UNARY(v_rsq_f32, inverse_root(A))
        UNARY(v_sqrt_f32, square_root(A))
        UNARY(v_exp_f32, exp_base2(A))
        UNARY(v_log_f32, log_base2(A))
        UNARY(v_exp_legacy_f32, exp_base2(A))
        UNARY(v_log_legacy_f32, log_base2(A))
        UNARY(v_sin_f32, sine(A))
        UNARY(v_cos_f32, cosine(A))
        UNARY(v_fract_f32, fraction(A))
        UNARY(v_trunc_f32, truncf(A))
        UNARY(v_ceil_f32, ceilf(A))
        UNARY(v_floor_f32, floorf(A))
        UNARY(v_rndne_f32, rintf(A))
        UNARY(v_frexp_mant_f32, mantissa_of(A))
    case OP_v_frexp_exp_i32_f32: {
        SOURCE(a, 0);
        uint32_t d[LANES];
        EACH_LANE d[l] = exponent_of(A);
        write32(w, i, 0, d, lane_mask(w, i));
        return true;
    }
    case OP_v_ldexp_f32: {
        SOURCE(a, 0);
        uint32_t b_tmp[LANES];
        const uint32_t *b = source32(w, i, 1, 0, b_tmp);
        RESULT_BITS(bits_of_f32(ldexpf(A, clamp_exponent((int32_t)b[l]))));
    }
    case OP_v_div_scale_f32: scale_quotient32(w, i); return true;
    case OP_v_div_fmas_f32: {
        SOURCE(a, 0);
        SOURCE(b, 1);
        SOURCE(c, 2);
        uint64_t scale = mask_source(w, i, 3);
        RESULT_BITS(bits_of_f32(div_fmas32(A, B, C, scale >> l & 1)));
    }
        TERNARY(v_div_fixup_f32, div_fixup32(A, B, C))
        TERNARY(v_cubeid_f32, cube(A, B, C, 0))
        TERNARY(v_cubesc_f32, cube(A, B, C, 1))
        TERNARY(v_cubetc_f32, cube(A, B, C, 2))
        TERNARY(v_cubema_f32, cube(A, B, C, 3))
    default: return false;
    }
}

WIDE static bool exec_f64(Wave *w, const Insn *i)
{
    bool ieee = w->mode & MODE_IEEE;
    switch (i->op) {
        BINARY64(v_add_f64, bits_of_f64(A64 + B64))
        BINARY64(v_mul_f64, bits_of_f64(A64 * B64))
        TERNARY64(v_fma_f64, fma(A64, B64, C64))
    case OP_v_fmac_f64: {
        SOURCE64(a, 0);
        SOURCE64(b, 1);
        const uint32_t *low = destination32(w, i, 0), *high = destination32(w, i, 1);
        uint64_t c[LANES];
        EACH_LANE c[l] = low[l] | (uint64_t)high[l] << 32;
        if (!(w->mode & MODE_IN16)) EACH_LANE c[l] = flush64(c[l]);
        RESULT64(bits_of_f64(fma(A64, B64, C64)));
    }
        BINARY64(v_min_f64, min64(a[l], b[l], ieee))
        BINARY64(v_max_f64, max64(a[l], b[l], ieee))
        UNARY64(v_rcp_f64, 1.0 / A64)
        UNARY64(v_rsq_f64, 1.0 / sqrt(A64))
        UNARY64(v_sqrt_f64, sqrt(A64))
        UNARY64(v_fract_f64, fraction64(A64))
        UNARY64(v_trunc_f64, trunc(A64))
        UNARY64(v_ceil_f64, ceil(A64))
        UNARY64(v_floor_f64, floor(A64))
        UNARY64(v_rndne_f64, rint(A64))
        UNARY64(v_frexp_mant_f64, mantissa_of64(A64))
    case OP_v_frexp_exp_i32_f64: {
        SOURCE64(a, 0);
        uint32_t d[LANES];
        EACH_LANE d[l] = exponent_of64(A64);
        write32(w, i, 0, d, lane_mask(w, i));
        return true;
    }
    case OP_v_ldexp_f64: {
        SOURCE64(a, 0);
        uint32_t b_tmp[LANES];
        const uint32_t *b = source32(w, i, 1, 0, b_tmp);
        RESULT64(bits_of_f64(ldexp(A64, clamp_exponent((int32_t)b[l]))));
    }
    case OP_v_div_scale_f64: scale_quotient64(w, i); return true;
    case OP_v_div_fmas_f64: {
        SOURCE64(a, 0);
        SOURCE64(b, 1);
        SOURCE64(c, 2);
        uint64_t scale = mask_source(w, i, 3);
        RESULT64(bits_of_f64(div_fmas64(A64, B64, C64, scale >> l & 1)));
    }
        TERNARY64(v_div_fixup_f64, div_fixup64(A64, B64, C64))
    default: return false;
    }
}

bool exec_vector_float(const Group *g, Wave *w, const Insn *i)
{
    (void)g;
    if (i->op < OP_v_add_f32 || i->op > OP_v_div_fixup_f64) return false;
    bool is_f64 = i->op >= OP_v_add_f64;
    uint32_t rounding = is_f64 ? rounding16(w) : w->mode & 3;
    if (rounding == 0 || i->op == OP_v_rndne_f32 || i->op == OP_v_rndne_f64)
        return is_f64 ? exec_f64(w, i) : exec_f32(w, i);
    static const int host[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    fesetround(host[rounding]);
    bool done = is_f64 ? exec_f64(w, i) : exec_f32(w, i);
    fesetround(FE_TONEAREST);
    return done;
}
