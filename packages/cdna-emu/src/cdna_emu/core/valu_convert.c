/* Vector ALU: conversions. */
#include <fenv.h>

#include "valu.h"

static inline uint32_t int_of_f32(float x)
{
    if (x != x) return 0;
    return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? (uint32_t)INT32_MIN : (uint32_t)(int32_t)x;
}

static inline uint32_t uint_of_f32(float x)
{
    return x >= 0x1p32f ? UINT32_MAX : x > 0 ? (uint32_t)x : 0; /* NaN and what is negative: 0 */
}

static inline uint32_t int_of_f64(double x)
{
    if (x != x) return 0;
    return x >= 0x1p31 ? INT32_MAX : x <= -0x1p31 ? (uint32_t)INT32_MIN : (uint32_t)(int32_t)x;
}

static inline uint32_t uint_of_f64(double x) { return x >= 0x1p32 ? UINT32_MAX : x > 0 ? (uint32_t)x : 0; }

static inline uint16_t int16_of(float x)
{
    if (x != x) return 0;
    return (uint16_t)(x >= 32767 ? INT16_MAX : x <= -32768 ? INT16_MIN : (int)x);
}

static inline uint16_t uint16_of(float x) { return x >= 65535 ? UINT16_MAX : x > 0 ? (uint16_t)x : 0; }

/* Normalised integers round to nearest even after scaling. */
static inline uint16_t snorm16(float x)
{
    if (x != x) return 0;
    return (uint16_t)(int)rintf((x > 1 ? 1 : x < -1 ? -1 : x) * 32767.0f);
}

static inline uint16_t unorm16(float x) { return (uint16_t)rintf((x > 1 ? 1 : x > 0 ? x : 0) * 65535.0f); }

static inline uint32_t byte_of_f32(float x) { return x >= 255 ? 255 : x > 0 ? (uint32_t)rintf(x) : 0; }

static inline float f32_of_exact(double x, uint32_t rounding)
{
    static const int host[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    if (rounding == 0) return (float)x;
    volatile double from = x; /* volatile: the conversion must not move across the changes of rounding */
    fesetround(host[rounding]);
    volatile float r = (float)from;
    fesetround(FE_TONEAREST);
    return r;
}

static inline uint32_t pair(uint16_t low, uint16_t high) { return low | (uint32_t)high << 16; }

static inline uint16_t saturate_u16(uint32_t v) { return v > 0xffff ? 0xffff : (uint16_t)v; }
static inline uint16_t saturate_i16(uint32_t v)
{
    int32_t s = (int32_t)v;
    return (uint16_t)(s > INT16_MAX ? INT16_MAX : s < INT16_MIN ? INT16_MIN : s);
}

/* ---- fp8 and bf8: FNUZ on gfx942, OCP on gfx950 */

static inline bool is_fnuz(const Group *g) { return g->launch->arch == GFX942; }
static inline float f32_of_e8(uint8_t v, bool fp8, bool fnuz)
{
    return fp8 ? f32_from_fp8(v, fnuz) : f32_from_bf8(v, fnuz);
}

static inline uint8_t e8_of_f32(float x, bool fp8, bool fnuz, bool saturate)
{
    return fp8 ? fp8_from_f32_mode(x, fnuz, saturate) : bf8_from_f32_mode(x, fnuz, saturate);
}

/* One value of the low byte, or two of the low half (SDWA has moved the chosen byte or half there). */
static bool from_e8(const Group *g, Wave *w, const Insn *i, bool fp8, int count)
{
    uint32_t tmp[LANES], d[2][LANES];
    const uint32_t *a = source32(w, i, 0, 0, tmp);
    bool fnuz = is_fnuz(g);
    if (i->flags & F_OPSEL_MASK) return false; /* VOP3 has no way to choose the byte on these architectures */
    for (int r = 0; r < count; r++) {
        EACH_LANE d[r][l] = bits_of_f32(f32_of_e8((uint8_t)(a[l] >> 8 * r), fp8, fnuz));
        finish32(w, i, d[r]);
    }
    uint64_t mask = lane_mask(w, i);
    for (int r = 0; r < count; r++) write32(w, i, r, d[r], mask);
    return true;
}

static bool to_e8_pair(const Group *g, Wave *w, const Insn *i, bool fp8)
{
    uint32_t ta[LANES], tb[LANES];
    uint16_t d[LANES];
    const uint32_t *a = float_source(w, i, 0, ta), *b = float_source(w, i, 1, tb);
    bool fnuz = is_fnuz(g), saturate = w->mode & MODE_FP16_OVFL;
    EACH_LANE d[l] = (uint16_t)(e8_of_f32(f32_of_bits(a[l]), fp8, fnuz, saturate) |
                                e8_of_f32(f32_of_bits(b[l]), fp8, fnuz, saturate) << 8);
    write16(w, i, d, true);
    return true;
}

/* Stochastic rounding into the byte that op_sel[3:2] names. */
static bool to_e8_stochastic(const Group *g, Wave *w, const Insn *i, bool fp8)
{
    uint32_t ta[LANES], tb[LANES], d[LANES];
    const uint32_t *a = float_source(w, i, 0, ta), *b = source32(w, i, 1, 0, tb), *old = destination32(w, i, 0);
    bool fnuz = is_fnuz(g), saturate = w->mode & MODE_FP16_OVFL;
    uint32_t shift = 8 * (2 * op_sel(i, 3) + op_sel(i, 2));
    EACH_LANE {
        float x = f32_of_bits(a[l]);
        uint32_t byte = fp8 ? fp8_from_f32_sr(x, b[l], fnuz, saturate) : bf8_from_f32_sr(x, b[l], fnuz, saturate);
        d[l] = (old[l] & ~(0xffu << shift)) | byte << shift;
    }
    write32(w, i, 0, d, lane_mask(w, i));
    return true;
}

/* Two f32 to f16, whatever the mode's rounding is; `rounding` as of f16_rounded. */
static inline bool to_half_pair(Wave *w, const Insn *i, uint32_t rounding)
{
    uint32_t ta[LANES], tb[LANES], d[LANES];
    uint16_t low[LANES], high[LANES];
    float fa[LANES], fb[LANES];
    const uint32_t *a = float_source(w, i, 0, ta), *b = float_source(w, i, 1, tb);
    EACH_LANE {
        fa[l] = f32_of_bits(a[l]);
        fb[l] = f32_of_bits(b[l]);
    }
    round_lanes16(fa, low, rounding);
    round_lanes16(fb, high, rounding);
    if (w->mode & MODE_FP16_OVFL) {
        saturate16(fa, low);
        saturate16(fb, high);
    }
    finish16(w, i, low);
    finish16(w, i, high);
    EACH_LANE d[l] = pair(low[l], high[l]);
    write32(w, i, 0, d, lane_mask(w, i));
    return true;
}

#define SOURCE(name, k) uint32_t name##_tmp[LANES]; const uint32_t *name = source32(w, i, k, 0, name##_tmp)
#define FLOAT(name, k) uint32_t name##_tmp[LANES]; const uint32_t *name = float_source(w, i, k, name##_tmp)
#define HALF(name, k) float name[LANES]; half_source(w, i, k, name)
#define DOUBLE(name, k) uint64_t name[LANES]; double_source(w, i, k, name)
#define A a[l]
#define B b[l]
#define FA f32_of_bits(a[l])
#define FB f32_of_bits(b[l])
#define DA f64_of_bits(a[l])
#define TO_INT(expression) \
    uint32_t d[LANES]; \
    EACH_LANE d[l] = (expression); \
    write32(w, i, 0, d, lane_mask(w, i)); \
    return true
#define TO_F32(expression) \
    uint32_t d[LANES]; \
    EACH_LANE d[l] = bits_of_f32(expression); \
    write_float(w, i, d); \
    return true
#define TO_F64(expression) \
    uint64_t d[LANES]; \
    EACH_LANE d[l] = bits_of_f64(expression); \
    write_double(w, i, d); \
    return true
#define TO_F16(expression) \
    float r[LANES]; \
    uint16_t d[LANES]; \
    EACH_LANE r[l] = (expression); \
    round_lanes16(r, d, rounding16(w)); \
    if (w->mode & MODE_FP16_OVFL) saturate16(r, d); \
    finish16(w, i, d); \
    write16(w, i, d, false); \
    return true
#define TO_16(expression) \
    uint16_t d[LANES]; \
    EACH_LANE d[l] = (expression); \
    write16(w, i, d, false); \
    return true

WIDE bool exec_vector_convert(const Group *g, Wave *w, const Insn *i)
{
    if (i->op < OP_v_cvt_f32_i32 || i->op > OP_v_cvt_sr_bf16_f32) return false;
    /* Saturation of stochastic rounding is not modelled. */
    if (i->op == OP_v_cvt_sr_f16_f32 && (w->mode & MODE_FP16_OVFL)) return false;
    uint32_t rounding32 = w->mode & 3;
    switch (i->op) {
    case OP_v_cvt_f32_i32: {
        SOURCE(a, 0);
        if (rounding32) { TO_F32(f32_of_exact((int32_t)A, rounding32)); }
        TO_F32((float)(int32_t)A);
    }
    case OP_v_cvt_f32_u32: {
        SOURCE(a, 0);
        if (rounding32) { TO_F32(f32_of_exact(A, rounding32)); }
        TO_F32((float)A);
    }
    case OP_v_cvt_i32_f32: { FLOAT(a, 0); TO_INT(int_of_f32(FA)); }
    case OP_v_cvt_u32_f32: { FLOAT(a, 0); TO_INT(uint_of_f32(FA)); }
    case OP_v_cvt_rpi_i32_f32: { FLOAT(a, 0); TO_INT(int_of_f32(floorf(FA + 0.5f))); }
    case OP_v_cvt_flr_i32_f32: { FLOAT(a, 0); TO_INT(int_of_f32(floorf(FA))); }
    case OP_v_cvt_off_f32_i4: { SOURCE(a, 0); TO_F32((float)((int32_t)(A << 28) >> 28) * 0.0625f); }
    case OP_v_cvt_f32_ubyte0: { SOURCE(a, 0); TO_F32((float)(A & 0xff)); }
    case OP_v_cvt_f32_ubyte1: { SOURCE(a, 0); TO_F32((float)(A >> 8 & 0xff)); }
    case OP_v_cvt_f32_ubyte2: { SOURCE(a, 0); TO_F32((float)(A >> 16 & 0xff)); }
    case OP_v_cvt_f32_ubyte3: { SOURCE(a, 0); TO_F32((float)(A >> 24)); }
    case OP_v_cvt_pk_u8_f32: {
        FLOAT(a, 0);
        SOURCE(b, 1);
        SOURCE(c, 2);
        TO_INT((c[l] & ~(0xffu << 8 * (B & 3))) | byte_of_f32(FA) << 8 * (B & 3));
    }

    case OP_v_cvt_f64_i32: { SOURCE(a, 0); TO_F64((double)(int32_t)A); }
    case OP_v_cvt_f64_u32: { SOURCE(a, 0); TO_F64((double)A); }
    case OP_v_cvt_f64_f32: { FLOAT(a, 0); TO_F64((double)FA); }
    case OP_v_cvt_i32_f64: { DOUBLE(a, 0); TO_INT(int_of_f64(DA)); }
    case OP_v_cvt_u32_f64: { DOUBLE(a, 0); TO_INT(uint_of_f64(DA)); }
    case OP_v_cvt_f32_f64: { DOUBLE(a, 0); TO_F32(f32_of_exact(DA, rounding16(w))); }

    case OP_v_cvt_f16_f32: { FLOAT(a, 0); TO_F16(FA); }
    case OP_v_cvt_f32_f16: { HALF(a, 0); TO_F32(A); }
    case OP_v_cvt_f16_u16: { SOURCE(a, 0); TO_F16((float)(A >> 16 * op_sel(i, 0) & 0xffff)); }
    case OP_v_cvt_f16_i16: { SOURCE(a, 0); TO_F16((float)(int16_t)(A >> 16 * op_sel(i, 0))); }
    case OP_v_cvt_u16_f16: { HALF(a, 0); TO_16(uint16_of(A)); }
    case OP_v_cvt_i16_f16: { HALF(a, 0); TO_16(int16_of(A)); }
    case OP_v_cvt_norm_i16_f16: { HALF(a, 0); TO_16(snorm16(A)); }
    case OP_v_cvt_norm_u16_f16: { HALF(a, 0); TO_16(unorm16(A)); }
    case OP_v_cvt_pkrtz_f16_f32: return to_half_pair(w, i, 3);
    case OP_v_cvt_pk_f16_f32: return to_half_pair(w, i, 0);
    case OP_v_cvt_pknorm_i16_f32: { FLOAT(a, 0); FLOAT(b, 1); TO_INT(pair(snorm16(FA), snorm16(FB))); }
    case OP_v_cvt_pknorm_u16_f32: { FLOAT(a, 0); FLOAT(b, 1); TO_INT(pair(unorm16(FA), unorm16(FB))); }
    case OP_v_cvt_pknorm_i16_f16: { HALF(a, 0); HALF(b, 1); TO_INT(pair(snorm16(A), snorm16(B))); }
    case OP_v_cvt_pknorm_u16_f16: { HALF(a, 0); HALF(b, 1); TO_INT(pair(unorm16(A), unorm16(B))); }
    case OP_v_cvt_pk_u16_u32: { SOURCE(a, 0); SOURCE(b, 1); TO_INT(pair(saturate_u16(A), saturate_u16(B))); }
    case OP_v_cvt_pk_i16_i32: { SOURCE(a, 0); SOURCE(b, 1); TO_INT(pair(saturate_i16(A), saturate_i16(B))); }
    case OP_v_cvt_pk_bf16_f32: { FLOAT(a, 0); FLOAT(b, 1); TO_INT(pair(bf16_from_f32(FA), bf16_from_f32(FB))); }
    case OP_v_cvt_f32_bf16: {
        SOURCE(a, 0);
        TO_F32(f32_from_bf16((uint16_t)(A >> 16 * op_sel(i, 0))));
    }

    case OP_v_cvt_f32_fp8: return from_e8(g, w, i, true, 1);
    case OP_v_cvt_f32_bf8: return from_e8(g, w, i, false, 1);
    case OP_v_cvt_pk_f32_fp8: return from_e8(g, w, i, true, 2);
    case OP_v_cvt_pk_f32_bf8: return from_e8(g, w, i, false, 2);
    case OP_v_cvt_pk_fp8_f32: return to_e8_pair(g, w, i, true);
    case OP_v_cvt_pk_bf8_f32: return to_e8_pair(g, w, i, false);
    case OP_v_cvt_sr_fp8_f32: return to_e8_stochastic(g, w, i, true);
    case OP_v_cvt_sr_bf8_f32: return to_e8_stochastic(g, w, i, false);
    case OP_v_cvt_sr_f16_f32: {
        FLOAT(a, 0);
        SOURCE(b, 1);
        uint16_t d[LANES];
        EACH_LANE d[l] = f16_from_f32_rounded(FA, ROUND_STOCHASTIC, B);
        write16(w, i, d, true);
        return true;
    }
    case OP_v_cvt_sr_bf16_f32: {
        FLOAT(a, 0);
        SOURCE(b, 1);
        uint16_t d[LANES];
        EACH_LANE d[l] = bf16_from_f32_sr(FA, B);
        write16(w, i, d, true);
        return true;
    }
    default: return false;
    }
}
