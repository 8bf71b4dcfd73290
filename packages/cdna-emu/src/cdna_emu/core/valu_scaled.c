/* Vector ALU: conversions of the microscaling formats (gfx950).

   The scale is the power of two in the exponent field of a float, E8M0: what comes from a narrow format is multiplied by it, what
   goes to one is divided. Every value is rounded once, to nearest even; fp8 and bf8 are the OCP ones and overflow as in
   v_cvt_pk_fp8_f32; fp4 has neither infinity nor NaN: what is too large, infinity and NaN become the largest, with their sign
   (for NaN AMD's documents name no value). A scale of 2^128 (exponent field 255) is NaN. */
#include "valu.h"

enum Narrow { FP8, BF8, FP4 };
enum Wide { F32, F16, BF16 };

/* 2^(field - 127); NaN for 255. */
static inline double scale_of(uint32_t bits)
{
    uint32_t field = bits >> 23 & 0xff;
    return field == 255 ? (double)NAN : ldexp(1.0, (int)field - 127);
}

static inline float f32_from_fp4(uint32_t v)
{
    static const float values[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return v & 8 ? -values[v & 7] : values[v & 7];
}

static inline uint32_t fp4_from_f32(float value)
{
    uint32_t bits = bits_of_f32(value), sign = bits >> 28 & 8, magnitude;
    magnitude = (bits & 0x7fffffff) >= 0x7f800000 ? 7 : narrow_magnitude(bits, 1, 1, ROUND_NEAREST_EVEN, 0);
    return sign | (magnitude > 7 ? 7 : magnitude);
}

static inline float from_narrow(uint32_t v, enum Narrow kind)
{
    return kind == FP8 ? f32_from_fp8((uint8_t)v, false) : kind == BF8 ? f32_from_bf8((uint8_t)v, false) : f32_from_fp4(v & 15);
}

static inline uint32_t to_narrow(float x, enum Narrow kind, bool saturate)
{
    return kind == FP8   ? fp8_from_f32_mode(x, false, saturate)
           : kind == BF8 ? bf8_from_f32_mode(x, false, saturate)
                         : fp4_from_f32(x);
}

/* `count` values of source 0 from the byte, or the half, that op_sel names. A float holds every one of them exactly. */
static bool widen(Wave *w, const Insn *i, enum Narrow from, enum Wide to, int count)
{
    uint32_t ta[LANES], tb[LANES], d[2][LANES], bits = from == FP4 ? 4 : 8;
    const uint32_t *a = source32(w, i, 0, 0, ta), *scale = source32(w, i, 1, 0, tb);
    if (to == F16 && (w->mode & MODE_FP16_OVFL)) return false; /* saturation of f16 results is not modelled */
    bool by_byte = from == FP4 || count == 1;
    uint32_t shift = by_byte ? 8 * (op_sel(i, 0) + 2 * op_sel(i, 1)) : 16 * op_sel(i, 0);
    for (int r = 0; r < count; r++)
        EACH_LANE d[r][l] = bits_of_f32((float)(from_narrow(a[l] >> (shift + bits * (uint32_t)r), from) * scale_of(scale[l])));
    if (to == F32) {
        for (int r = 0; r < count; r++) finish32(w, i, d[r]);
        for (int r = 0; r < count; r++) write32(w, i, r, d[r], lane_mask(w, i));
        return true;
    }
    uint16_t half[2][LANES];
    for (int r = 0; r < count; r++)
        EACH_LANE half[r][l] = to == F16 ? f16_from_f32(f32_of_bits(d[r][l])) : bf16_from_f32(f32_of_bits(d[r][l]));
    if (count == 1) {
        write16(w, i, half[0], true);
        return true;
    }
    EACH_LANE d[0][l] = half[0][l] | (uint32_t)half[1][l] << 16;
    write32(w, i, 0, d[0], lane_mask(w, i));
    return true;
}

/* Two values, into the byte or the half of the destination that op_sel names; the rest of it stays. */
static bool narrow(Wave *w, const Insn *i, enum Wide from, enum Narrow to)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES], d[LANES], bits = to == FP4 ? 4 : 8;
    const uint32_t *a, *b = tb, *scale, *old = destination32(w, i, 0);
    if (from == F32) {
        a = float_source(w, i, 0, ta);
        b = float_source(w, i, 1, tb);
        scale = source32(w, i, 2, 0, tc);
    } else {
        if (i->src[0].code < VGPR0 || i->src[0].mods) return false; /* what a constant or a sign does here is not documented */
        a = source32(w, i, 0, 0, ta);
        scale = source32(w, i, 1, 0, tc);
    }
    uint32_t shift = to == FP4 ? 8 * (op_sel(i, 2) + 2 * op_sel(i, 3)) : 16 * op_sel(i, 3), field = (1u << 2 * bits) - 1;
    bool saturate = w->mode & MODE_FP16_OVFL;
    EACH_LANE {
        float x, y;
        if (from == F32) {
            x = f32_of_bits(a[l]);
            y = f32_of_bits(b[l]);
        } else if (from == F16) {
            x = f32_from_f16((uint16_t)a[l]);
            y = f32_from_f16((uint16_t)(a[l] >> 16));
        } else {
            x = f32_from_bf16((uint16_t)a[l]);
            y = f32_from_bf16((uint16_t)(a[l] >> 16));
        }
        /* To float exactly, but for what is beyond the narrow formats in either direction. */
        double factor = 1.0 / scale_of(scale[l]);
        uint32_t pair = to_narrow((float)(x * factor), to, saturate) | to_narrow((float)(y * factor), to, saturate) << bits;
        d[l] = (old[l] & ~(field << shift)) | pair << shift;
    }
    write32(w, i, 0, d, lane_mask(w, i));
    return true;
}

bool exec_vector_scaled(const Group *g, Wave *w, const Insn *i)
{
    (void)g;
    switch (i->op) {
    case OP_v_cvt_scalef32_f32_fp8: return widen(w, i, FP8, F32, 1);
    case OP_v_cvt_scalef32_f32_bf8: return widen(w, i, BF8, F32, 1);
    case OP_v_cvt_scalef32_f16_fp8: return widen(w, i, FP8, F16, 1);
    case OP_v_cvt_scalef32_f16_bf8: return widen(w, i, BF8, F16, 1);
    case OP_v_cvt_scalef32_pk_f32_fp8: return widen(w, i, FP8, F32, 2);
    case OP_v_cvt_scalef32_pk_f32_bf8: return widen(w, i, BF8, F32, 2);
    case OP_v_cvt_scalef32_pk_f32_fp4: return widen(w, i, FP4, F32, 2);
    case OP_v_cvt_scalef32_pk_f16_fp8: return widen(w, i, FP8, F16, 2);
    case OP_v_cvt_scalef32_pk_f16_bf8: return widen(w, i, BF8, F16, 2);
    case OP_v_cvt_scalef32_pk_f16_fp4: return widen(w, i, FP4, F16, 2);
    case OP_v_cvt_scalef32_pk_bf16_fp8: return widen(w, i, FP8, BF16, 2);
    case OP_v_cvt_scalef32_pk_bf16_bf8: return widen(w, i, BF8, BF16, 2);
    case OP_v_cvt_scalef32_pk_bf16_fp4: return widen(w, i, FP4, BF16, 2);
    case OP_v_cvt_scalef32_pk_fp8_f32: return narrow(w, i, F32, FP8);
    case OP_v_cvt_scalef32_pk_bf8_f32: return narrow(w, i, F32, BF8);
    case OP_v_cvt_scalef32_pk_fp4_f32: return narrow(w, i, F32, FP4);
    case OP_v_cvt_scalef32_pk_fp8_f16: return narrow(w, i, F16, FP8);
    case OP_v_cvt_scalef32_pk_bf8_f16: return narrow(w, i, F16, BF8);
    case OP_v_cvt_scalef32_pk_fp4_f16: return narrow(w, i, F16, FP4);
    case OP_v_cvt_scalef32_pk_fp8_bf16: return narrow(w, i, BF16, FP8);
    case OP_v_cvt_scalef32_pk_bf8_bf16: return narrow(w, i, BF16, BF8);
    case OP_v_cvt_scalef32_pk_fp4_bf16: return narrow(w, i, BF16, FP4);
    default: return false;
    }
}
