/* Matrix instructions: D = A * B + C on one wave, whatever EXEC holds.

   Arithmetic: every element starts from C and adds its products in ascending k, each by one fused multiply-add in the type of
   D. The hardware's own order and intermediate precision are not published; last bits differ. Denormals are kept in all
   types. xf32 inputs lose the low 13 mantissa bits.

   Layouts (AMD's matrix instruction calculator and ISA documents): lane l of A holds row l % M of block l / M % blocks, and
   element e of its registers is k = l / (M * blocks) * E + e for E elements; B alike with columns. So the elements e of A, or
   of B, lie side by side in the lanes: a row of B is a run of N lanes, and nothing is transposed. smfmac: a lane of A holds the
   stored ones of E ascending k, a lane of B E ascending k in 4 registers, in 8 (gfx950) two runs of E / 2, K / 2 apart; the
   latter from public probes of a gfx950 (B of 16x16x64 f16 and 16x16x128 fp8), the others of that size by analogy. */
#include <math.h>
#include <string.h>

#include "core.h"
#include "floats.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(CDNA_PORTABLE)
#define HAVE_AVX2 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum Kind { F32, XF32, F16, BF16, I8, FP8, BF8, F64, F8F6F4 };
enum { MAX_ELEMENTS = 32, MAX_K = 128 };

typedef struct {
    uint8_t a, b; /* enum Kind */
    uint8_t m, k, blocks; /* n == m */
    bool broadcast_a, broadcast_b; /* CBSZ and ABID, BLGP as lane patterns */
    bool sparse;
} Shape;

static bool shape_of(uint16_t op, Shape *s)
{
    switch (op) {
#define MFMA_OP(name, a, b, m, k, blocks, broadcast_a, broadcast_b) \
    case OP_##name: \
        *s = (Shape){a, b, m, k, blocks, broadcast_a, broadcast_b, false}; \
        return true;
#define SMFMAC_OP(name, a, b, m, k) \
    case OP_##name: \
        *s = (Shape){a, b, m, k, 1, false, false, true}; \
        return true;
        MFMA_OP(v_mfma_f32_32x32x1_2b_f32, F32, F32, 32, 1, 2, true, true)
        MFMA_OP(v_mfma_f32_16x16x1_4b_f32, F32, F32, 16, 1, 4, true, true)
        MFMA_OP(v_mfma_f32_4x4x1_16b_f32, F32, F32, 4, 1, 16, true, true)
        MFMA_OP(v_mfma_f32_32x32x2_f32, F32, F32, 32, 2, 1, false, true)
        MFMA_OP(v_mfma_f32_16x16x4_f32, F32, F32, 16, 4, 1, false, true)
        MFMA_OP(v_mfma_f32_16x16x8_xf32, XF32, XF32, 16, 8, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x4_xf32, XF32, XF32, 32, 4, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x4_2b_f16, F16, F16, 32, 4, 2, true, true)
        MFMA_OP(v_mfma_f32_16x16x4_4b_f16, F16, F16, 16, 4, 4, true, true)
        MFMA_OP(v_mfma_f32_4x4x4_16b_f16, F16, F16, 4, 4, 16, true, true)
        MFMA_OP(v_mfma_f32_32x32x8_f16, F16, F16, 32, 8, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x16_f16, F16, F16, 16, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x16_f16, F16, F16, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x32_f16, F16, F16, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x4_2b_bf16, BF16, BF16, 32, 4, 2, true, true)
        MFMA_OP(v_mfma_f32_16x16x4_4b_bf16, BF16, BF16, 16, 4, 4, true, true)
        MFMA_OP(v_mfma_f32_4x4x4_16b_bf16, BF16, BF16, 4, 4, 16, true, true)
        MFMA_OP(v_mfma_f32_32x32x8_bf16, BF16, BF16, 32, 8, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x16_bf16, BF16, BF16, 16, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x16_bf16, BF16, BF16, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x32_bf16, BF16, BF16, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_i32_32x32x4_2b_i8, I8, I8, 32, 4, 2, true, true)
        MFMA_OP(v_mfma_i32_16x16x4_4b_i8, I8, I8, 16, 4, 4, true, true)
        MFMA_OP(v_mfma_i32_4x4x4_16b_i8, I8, I8, 4, 4, 16, true, true)
        MFMA_OP(v_mfma_i32_32x32x16_i8, I8, I8, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_i32_16x16x32_i8, I8, I8, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_i32_16x16x64_i8, I8, I8, 16, 64, 1, false, false)
        MFMA_OP(v_mfma_i32_32x32x32_i8, I8, I8, 32, 32, 1, false, false)
        MFMA_OP(v_mfma_f64_16x16x4_f64, F64, F64, 16, 4, 1, false, false)
        MFMA_OP(v_mfma_f64_4x4x4_4b_f64, F64, F64, 4, 4, 4, false, false)
        MFMA_OP(v_mfma_f32_16x16x32_fp8_fp8, FP8, FP8, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x32_fp8_bf8, FP8, BF8, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x32_bf8_fp8, BF8, FP8, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x32_bf8_bf8, BF8, BF8, 16, 32, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x16_fp8_fp8, FP8, FP8, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x16_fp8_bf8, FP8, BF8, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x16_bf8_fp8, BF8, FP8, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x16_bf8_bf8, BF8, BF8, 32, 16, 1, false, false)
        MFMA_OP(v_mfma_f32_16x16x128_f8f6f4, F8F6F4, F8F6F4, 16, 128, 1, false, false)
        MFMA_OP(v_mfma_f32_32x32x64_f8f6f4, F8F6F4, F8F6F4, 32, 64, 1, false, false)
        MFMA_OP(v_mfma_scale_f32_16x16x128_f8f6f4, F8F6F4, F8F6F4, 16, 128, 1, false, false)
        MFMA_OP(v_mfma_scale_f32_32x32x64_f8f6f4, F8F6F4, F8F6F4, 32, 64, 1, false, false)
        SMFMAC_OP(v_smfmac_f32_32x32x16_f16, F16, F16, 32, 16)
        SMFMAC_OP(v_smfmac_f32_16x16x32_f16, F16, F16, 16, 32)
        SMFMAC_OP(v_smfmac_f32_32x32x32_f16, F16, F16, 32, 32)
        SMFMAC_OP(v_smfmac_f32_16x16x64_f16, F16, F16, 16, 64)
        SMFMAC_OP(v_smfmac_f32_32x32x16_bf16, BF16, BF16, 32, 16)
        SMFMAC_OP(v_smfmac_f32_16x16x32_bf16, BF16, BF16, 16, 32)
        SMFMAC_OP(v_smfmac_f32_32x32x32_bf16, BF16, BF16, 32, 32)
        SMFMAC_OP(v_smfmac_f32_16x16x64_bf16, BF16, BF16, 16, 64)
        SMFMAC_OP(v_smfmac_i32_32x32x32_i8, I8, I8, 32, 32)
        SMFMAC_OP(v_smfmac_i32_16x16x64_i8, I8, I8, 16, 64)
        SMFMAC_OP(v_smfmac_i32_32x32x64_i8, I8, I8, 32, 64)
        SMFMAC_OP(v_smfmac_i32_16x16x128_i8, I8, I8, 16, 128)
        SMFMAC_OP(v_smfmac_f32_32x32x32_fp8_fp8, FP8, FP8, 32, 32)
        SMFMAC_OP(v_smfmac_f32_16x16x64_fp8_fp8, FP8, FP8, 16, 64)
        SMFMAC_OP(v_smfmac_f32_32x32x64_fp8_fp8, FP8, FP8, 32, 64)
        SMFMAC_OP(v_smfmac_f32_16x16x128_fp8_fp8, FP8, FP8, 16, 128)
        SMFMAC_OP(v_smfmac_f32_32x32x32_fp8_bf8, FP8, BF8, 32, 32)
        SMFMAC_OP(v_smfmac_f32_16x16x64_fp8_bf8, FP8, BF8, 16, 64)
        SMFMAC_OP(v_smfmac_f32_32x32x64_fp8_bf8, FP8, BF8, 32, 64)
        SMFMAC_OP(v_smfmac_f32_16x16x128_fp8_bf8, FP8, BF8, 16, 128)
        SMFMAC_OP(v_smfmac_f32_32x32x32_bf8_fp8, BF8, FP8, 32, 32)
        SMFMAC_OP(v_smfmac_f32_16x16x64_bf8_fp8, BF8, FP8, 16, 64)
        SMFMAC_OP(v_smfmac_f32_32x32x64_bf8_fp8, BF8, FP8, 32, 64)
        SMFMAC_OP(v_smfmac_f32_16x16x128_bf8_fp8, BF8, FP8, 16, 128)
        SMFMAC_OP(v_smfmac_f32_32x32x32_bf8_bf8, BF8, BF8, 32, 32)
        SMFMAC_OP(v_smfmac_f32_16x16x64_bf8_bf8, BF8, BF8, 16, 64)
        SMFMAC_OP(v_smfmac_f32_32x32x64_bf8_bf8, BF8, BF8, 32, 64)
        SMFMAC_OP(v_smfmac_f32_16x16x128_bf8_bf8, BF8, BF8, 16, 128)
#undef MFMA_OP
#undef SMFMAC_OP
    default:
        return false;
    }
}

/* ---- inputs: element e of lane l becomes out[e][l], as the bits of a float. Products of I8 too: |sum| <= 64 * 2^14, which
   float32 holds exactly. */

typedef uint32_t Lanes[LANES];

INLINE void widen_halves(const Lanes *in, Lanes *out, int elements, bool bfloat)
{
    for (int e = 0; e < elements; e++)
        for (int l = 0; l < LANES; l++) {
            uint32_t half = in[e / 2][l] >> (e % 2 * 16) & 0xffff;
            out[e][l] = bfloat ? half << 16 : bits_of_f32(f32_from_f16((uint16_t)half));
        }
}

INLINE void widen_bytes(const Lanes *in, Lanes *out, int elements, int mantissa, bool fnuz)
{
    for (int e = 0; e < elements; e++)
        for (int l = 0; l < LANES; l++) {
            uint32_t byte = in[e / 4][l] >> (e % 4 * 8) & 0xff;
            out[e][l] = bits_of_f32(mantissa ? e8_to_f32((uint8_t)byte, mantissa, fnuz) : (float)(int8_t)byte);
        }
}

/* fp6 (E2M3, bias 1), bf6 (E3M2, bias 3) and fp4 (E2M1, bias 1) of the OCP microscaling formats: no infinity, no NaN.
   Elements are packed without gaps, from bit 0 up. */
static void widen_bits(const Lanes *in, Lanes *out, int elements, int bits, int mantissa, int bias)
{
    for (int e = 0; e < elements; e++)
        for (int l = 0; l < LANES; l++) {
            int first = e * bits, word = first / 32, shift = first % 32;
            uint64_t pair = in[word][l] | (uint64_t)(shift + bits > 32 ? in[word + 1][l] : 0) << 32;
            uint32_t value = (uint32_t)(pair >> shift) & ((1u << bits) - 1), sign = value >> (bits - 1) << 31;
            uint32_t magnitude = value & ((1u << (bits - 1)) - 1), offset = (uint32_t)(128 - bias) << 23;
            uint32_t field = magnitude << (23 - mantissa);
            uint32_t denormal = bits_of_f32(f32_of_bits(offset + field) - f32_of_bits(offset));
            out[e][l] = sign | select_bits(magnitude >> mantissa, field + ((uint32_t)(127 - bias) << 23), denormal);
        }
}

INLINE void widen(const Lanes *in, Lanes *out, enum Kind kind, int elements, bool fnuz)
{
    switch (kind) {
    case F32:
        memcpy(out, in, (size_t)elements * sizeof(Lanes));
        break;
    case XF32:
        for (int e = 0; e < elements; e++)
            for (int l = 0; l < LANES; l++) /* a NaN stays one: the quiet bit is among those kept, or is set */
                out[e][l] = (in[e][l] & ~0x1fffu) | (f32_bits_nan(in[e][l]) ? 0x400000 : 0);
        break;
    case F16:
        widen_halves(in, out, elements, false);
        break;
    case BF16:
        widen_halves(in, out, elements, true);
        break;
    case I8:
        widen_bytes(in, out, elements, 0, false);
        break;
    case FP8:
        if (fnuz)
            widen_bytes(in, out, elements, 3, true);
        else
            widen_bytes(in, out, elements, 3, false);
        break;
    case BF8:
        if (fnuz)
            widen_bytes(in, out, elements, 2, true);
        else
            widen_bytes(in, out, elements, 2, false);
        break;
    default:
        break;
    }
}

/* ---- products: d[i][j] = c[i][j] + a[0][i] * b[0][j] + a[1][i] * b[1][j] + ... for an m by m block. a and b hold the bits of
   floats; c and d too, or integers. d[i] may be c[i]. */

typedef const uint32_t *const *RowsIn;
typedef uint32_t *const *RowsOut;

INLINE void multiply_rows(RowsOut d, RowsIn c, RowsIn a, RowsIn b, int m, int k, bool integer)
{
    for (int i = 0; i < m; i++) {
        float sum[32];
        for (int j = 0; j < m; j++)
            sum[j] = integer ? 0 : f32_of_bits(c[i][j]);
        for (int step = 0; step < k; step++) {
            float factor = f32_of_bits(a[step][i]);
            for (int j = 0; j < m; j++)
                sum[j] = fmaf(factor, f32_of_bits(b[step][j]), sum[j]);
        }
        for (int j = 0; j < m; j++)
            d[i][j] = integer ? c[i][j] + (uint32_t)(int32_t)sum[j] : bits_of_f32(sum[j]);
    }
}

/* 4x4 blocks: the columns of all blocks lie side by side in the lanes; c[i] and d[i] are registers. */
INLINE void multiply_small(RowsOut d, RowsIn c, const Lanes *a, const Lanes *b, int k, bool integer, int cbsz, int abid)
{
    int from[LANES]; /* first row of A for the lane's block */
    for (int l = 0; l < LANES; l++)
        from[l] = 4 * (cbsz ? (l / 4 >> cbsz << cbsz) + abid : l / 4);
    for (int i = 0; i < 4; i++) {
        float sum[LANES];
        for (int l = 0; l < LANES; l++)
            sum[l] = integer ? 0 : f32_of_bits(c[i][l]);
        for (int step = 0; step < k; step++)
            for (int l = 0; l < LANES; l++)
                sum[l] = fmaf(f32_of_bits(a[step][from[l] + i]), f32_of_bits(b[step][l]), sum[l]);
        for (int l = 0; l < LANES; l++)
            d[i][l] = integer ? c[i][l] + (uint32_t)(int32_t)sum[l] : bits_of_f32(sum[l]);
    }
}

typedef struct {
    void (*widen)(const Lanes *in, Lanes *out, enum Kind kind, int elements, bool fnuz);
    void (*multiply)(RowsOut d, RowsIn c, RowsIn a, RowsIn b, int m, int k, bool integer);
    void (*multiply_small)(RowsOut d, RowsIn c, const Lanes *a, const Lanes *b, int k, bool integer, int cbsz, int abid);
} Loops;

static void widen_plain(const Lanes *in, Lanes *out, enum Kind kind, int elements, bool fnuz)
{
    widen(in, out, kind, elements, fnuz);
}

static void multiply_plain(RowsOut d, RowsIn c, RowsIn a, RowsIn b, int m, int k, bool integer)
{
    if (m == 32)
        multiply_rows(d, c, a, b, 32, k, integer);
    else
        multiply_rows(d, c, a, b, 16, k, integer);
}

static void multiply_small_plain(RowsOut d, RowsIn c, const Lanes *a, const Lanes *b, int k, bool integer, int cbsz, int abid)
{
    multiply_small(d, c, a, b, k, integer, cbsz, abid);
}

#ifdef HAVE_AVX2
#define AVX2 __attribute__((target("avx2,fma")))

AVX2 static void widen_avx2(const Lanes *in, Lanes *out, enum Kind kind, int elements, bool fnuz)
{
    widen(in, out, kind, elements, fnuz);
}

/* The same sums, eight columns a vector: four rows by 16 columns stay in registers over all of k. */
AVX2 static void multiply_avx2(RowsOut d, RowsIn c, RowsIn a, RowsIn b, int m, int k, bool integer)
{
    for (int i = 0; i < m; i += 4)
        for (int j = 0; j < m; j += 16) {
            __m256 sum[4][2];
            for (int r = 0; r < 4; r++)
                for (int h = 0; h < 2; h++) {
                    const __m256i start = _mm256_loadu_si256((const __m256i *)(c[i + r] + j + 8 * h));
                    sum[r][h] = integer ? _mm256_setzero_ps() : _mm256_castsi256_ps(start);
                }
            for (int step = 0; step < k; step++) {
                const uint32_t *row = b[step] + j;
                __m256 low = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)row));
                __m256 high = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)(row + 8)));
                for (int r = 0; r < 4; r++) {
                    __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((int)a[step][i + r]));
                    sum[r][0] = _mm256_fmadd_ps(factor, low, sum[r][0]);
                    sum[r][1] = _mm256_fmadd_ps(factor, high, sum[r][1]);
                }
            }
            for (int r = 0; r < 4; r++)
                for (int h = 0; h < 2; h++) {
                    __m256i end = _mm256_castps_si256(sum[r][h]);
                    if (integer) {
                        const __m256i start = _mm256_loadu_si256((const __m256i *)(c[i + r] + j + 8 * h));
                        end = _mm256_add_epi32(_mm256_cvtps_epi32(sum[r][h]), start);
                    }
                    _mm256_storeu_si256((__m256i *)(d[i + r] + j + 8 * h), end);
                }
        }
}

AVX2 static void multiply_small_avx2(RowsOut d, RowsIn c, const Lanes *a, const Lanes *b, int k, bool integer, int cbsz, int abid)
{
    multiply_small(d, c, a, b, k, integer, cbsz, abid);
}
#endif

/* fmaf rounds once with or without the instruction, so both sets of loops give the same bits. */
static const Loops *loops(void)
{
    static const Loops plain = {widen_plain, multiply_plain, multiply_small_plain};
#ifdef HAVE_AVX2
    static const Loops avx2 = {widen_avx2, multiply_avx2, multiply_small_avx2};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &avx2;
#endif
    return &plain;
}

/* BLGP: which lane of B lane l reads. */
static int blgp_lane(int pattern, int l)
{
    switch (pattern) {
    case 1:
        return l % 32;
    case 2:
        return 32 + l % 32;
    case 3:
        return (l + 16) % 64;
    case 4:
    case 5:
    case 6:
    case 7:
        return (pattern - 4) * 16 + l % 16;
    default:
        return l;
    }
}

static const Lanes *input(const Wave *w, const Insn *i, int k, int registers)
{
    uint16_t code = i->src[k].code;
    if (code < VGPR0 || code + registers > VGPR0 + VGPRS)
        return NULL;
    return (const Lanes *)w->vgpr[code - VGPR0];
}

static Lanes *output(Wave *w, const Insn *i, int registers)
{
    uint16_t code = i->dst.code;
    if (code < VGPR0 || code + registers > VGPR0 + VGPRS)
        return NULL;
    return (Lanes *)w->vgpr[code - VGPR0];
}

static uint32_t field(const Insn *i, uint32_t mask, int shift) { return (i->flags & mask) >> shift; }

/* ---- float64: 16x16x4 has rows 4 * r + l / 16 in register pair r; 4x4x4 has row l / 16 of block l / 4 % 4 */

/* An inline constant of a 64-bit float operand: integers are integers there too (their bits), floats are doubles. */
static double constant_f64(const Wave *w, const Insn *i, int k)
{
    static const double values[] = {0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532};
    uint16_t code = i->src[k].code;
    if (code >= FLOAT_HALF && code <= FLOAT_INV_2PI)
        return values[code - FLOAT_HALF];
    return f64_of_bits((uint64_t)(int64_t)(int32_t)scalar32(w, i, k));
}

static bool exec_f64(Wave *w, const Insn *i, const Shape *s)
{
    int pairs = s->m == 16 ? 4 : 1;
    uint32_t negate = field(i, F_BLGP_MASK, F_BLGP_SHIFT);
    for (int k = 0; k < 3; k++)
        if (i->src[k].mods & MOD_NEG)
            negate |= 1u << k;
    const Lanes *a = input(w, i, 0, 2), *b = input(w, i, 1, 2), *c = input(w, i, 2, 2 * pairs);
    Lanes *d = output(w, i, 2 * pairs);
    if (!a || !b || !d || (!c && (i->src[2].code < INT_0 || i->src[2].code > FLOAT_INV_2PI)))
        return false;
    double constant = c ? 0 : constant_f64(w, i, 2);
    double left[LANES], right[LANES], sum[4][LANES];
    for (int l = 0; l < LANES; l++) {
        left[l] = f64_of_bits(a[0][l] | (uint64_t)a[1][l] << 32);
        right[l] = f64_of_bits(b[0][l] | (uint64_t)b[1][l] << 32);
        left[l] = negate & 1 ? -left[l] : left[l];
        right[l] = negate & 2 ? -right[l] : right[l];
    }
    for (int r = 0; r < pairs; r++)
        for (int l = 0; l < LANES; l++) {
            double value = c ? f64_of_bits(c[2 * r][l] | (uint64_t)c[2 * r + 1][l] << 32) : constant;
            value = negate & 4 ? -value : value;
            for (int k = 0; k < 4; k++) {
                int block = s->m == 16 ? 0 : l / 4 % 4 * 4; /* first lane of the block within a k */
                int row = s->m == 16 ? 4 * r + l / 16 : l / 16;
                value = fma(left[16 * k + block + row], right[16 * k + l % 16], value);
            }
            sum[r][l] = value;
        }
    for (int r = 0; r < pairs; r++)
        for (int l = 0; l < LANES; l++) {
            uint64_t bits = bits_of_f64(sum[r][l]);
            d[2 * r][l] = (uint32_t)bits;
            d[2 * r + 1][l] = (uint32_t)(bits >> 32);
        }
    return true;
}

/* ---- f8f6f4: the formats of A and B stand in CBSZ and BLGP: 0 fp8, 1 bf8, 2 fp6, 3 bf6, 4 fp4; 32 elements a lane.
   fp8 and bf8: a lane holds two runs of 16, k = 16 * group + e and K / 2 on from there; the narrower ones a run of 32. */

static bool widen_f8f6f4(const Lanes *in, Lanes *out, uint32_t format)
{
    switch (format) {
    case 0:
        loops()->widen(in, out, FP8, 32, false);
        return true;
    case 1:
        loops()->widen(in, out, BF8, 32, false);
        return true;
    case 2:
        widen_bits(in, out, 32, 6, 3, 1);
        return true;
    case 3:
        widen_bits(in, out, 32, 6, 2, 3);
        return true;
    case 4:
        widen_bits(in, out, 32, 4, 1, 1);
        return true;
    default:
        return false;
    }
}

/* E8M0 scales, 2^(byte - 127) and NaN for 255: one for each row of A (column of B) and 32 of k, in the lane that holds the
   row and the number k / 32 of the run; byte 2 * op_sel_hi + op_sel of the register. The inputs are scaled in float32. */
static bool scale_f8f6f4(const Wave *w, const Insn *i, Lanes *inputs, int which, int m, int k, uint32_t format)
{
    uint32_t code = which ? i->sub : i->src[3].code;
    uint32_t low = field(i, F_OPSEL_MASK, F_OPSEL_SHIFT), high = field(i, F_OPSEL_HI_MASK, F_OPSEL_HI_SHIFT);
    uint32_t byte = (low >> which & 1) | (high >> which & 1) << 1;
    const uint32_t *lanes = NULL;
    uint32_t constant = 0;
    if (code >= VGPR0 && code < VGPR0 + VGPRS)
        lanes = w->vgpr[code - VGPR0];
    else if (code >= INT_0 && code <= INT_64)
        constant = code - INT_0;
    else
        return false;
    float factor[LANES];
    for (int e = 0; e < 32; e++) {
        for (int l = 0; e % 16 == 0 && l < LANES; l++) { /* of 16 elements: they are of one run */
            int at = format < 2 ? l / m * 16 + e / 16 * (k / 2) : l / m * 32 + e;
            uint32_t scale = (lanes ? lanes[at / 32 * m + l % m] : constant) >> (8 * byte) & 0xff;
            factor[l] = f32_of_bits(scale == 255 ? 0x7fc00000 : scale ? scale << 23 : 0x400000);
        }
        for (int l = 0; l < LANES; l++)
            inputs[e][l] = bits_of_f32(f32_of_bits(inputs[e][l]) * factor[l]);
    }
    return true;
}

/* ---- smfmac: of every four k of a row of A two are stored, in ascending k. Two bits each say which: in a lane's src2 the bits of
   element e are 2 * e and up of the set that ABID chooses (the first where CBSZ is not 0). */

/* `packed` elements of A to all of them; false: not two different ones in ascending order, which AMD gives no meaning. */
static bool expand_sparse(const uint32_t index[LANES], const Lanes *packed, Lanes *out, int elements, uint32_t shift)
{
    memset(out, 0, (size_t)elements * sizeof *out);
    for (int pair = 0; pair < elements / 4; pair++)
        for (int l = 0; l < LANES; l++) {
            uint32_t bits = index[l] >> (shift + 4 * (uint32_t)pair), low = bits & 3, high = bits >> 2 & 3;
            if (low >= high)
                return false;
            out[4 * pair + (int)low][l] = packed[2 * pair][l];
            out[4 * pair + (int)high][l] = packed[2 * pair + 1][l];
        }
    return true;
}

static bool widen_sparse(const Wave *w, const Insn *i, const Shape *s, const Lanes *a, Lanes *out, int elements, bool fnuz)
{
    uint32_t cbsz = field(i, F_CBSZ_MASK, F_CBSZ_SHIFT), abid = field(i, F_ABID_MASK, F_ABID_SHIFT);
    uint32_t set = cbsz ? 0 : abid, sets = 32 / (uint32_t)elements;
    const Lanes *index = input(w, i, 2, 1);
    if (!index || set >= sets)
        return false;
    Lanes packed[MAX_ELEMENTS / 2];
    loops()->widen(a, packed, s->a, elements / 2, fnuz);
    return expand_sparse(*index, (const Lanes *)packed, out, elements, set * (uint32_t)elements);
}

static int f8f6f4_registers(uint32_t format) { return format < 2 ? 8 : format < 4 ? 6 : 4; }

bool exec_mfma(Group *g, Wave *w, const Insn *i)
{
    Shape s;
    if (!shape_of(i->op, &s))
        return false;
    if (s.a == F64)
        return exec_f64(w, i, &s);
    bool mixed = s.a == F8F6F4, integer = s.a == I8, fnuz = g->launch->arch == GFX942;
    uint32_t cbsz = field(i, F_CBSZ_MASK, F_CBSZ_SHIFT), abid = field(i, F_ABID_MASK, F_ABID_SHIFT);
    uint32_t blgp = field(i, F_BLGP_MASK, F_BLGP_SHIFT), format_a = cbsz, format_b = blgp;
    if (mixed)
        cbsz = blgp = abid = 0; /* bit 0 of ABID marks the scaled form */
    if (s.sparse)
        cbsz = abid = 0; /* of the index */
    /* Modifiers where AMD's documents give them no meaning are not guessed. */
    if ((cbsz || abid) && (!s.broadcast_a || (1u << cbsz) > s.blocks || abid >= 1u << cbsz))
        return false;
    if (blgp && !s.broadcast_b)
        return false;

    int m = s.m, k = s.k, blocks = s.blocks, elements = m * k * blocks / LANES, rows = m * m * blocks / LANES;
    int bits = s.a == F32 || s.a == XF32 ? 32 : s.a == F16 || s.a == BF16 ? 16 : 8;
    int registers = elements * bits / 32;
    const Lanes *a = input(w, i, 0, mixed ? f8f6f4_registers(format_a) : s.sparse ? registers / 2 : registers);
    const Lanes *b = input(w, i, 1, mixed ? f8f6f4_registers(format_b) : registers);
    const Lanes *c = input(w, i, s.sparse ? 3 : 2, rows);
    Lanes *d = output(w, i, rows);
    if (!a || !b || !d || (!c && (i->src[2].code < INT_0 || i->src[2].code > FLOAT_INV_2PI)))
        return false;

    Lanes left[MAX_ELEMENTS], right[MAX_ELEMENTS], copy[32];
    if (mixed) {
        if (!widen_f8f6f4(a, left, format_a) || !widen_f8f6f4(b, right, format_b))
            return false;
        bool scaled = i->op == OP_v_mfma_scale_f32_16x16x128_f8f6f4 || i->op == OP_v_mfma_scale_f32_32x32x64_f8f6f4;
        if (scaled && (!scale_f8f6f4(w, i, left, 0, m, k, format_a) || !scale_f8f6f4(w, i, right, 1, m, k, format_b)))
            return false;
    } else {
        if (!s.sparse)
            loops()->widen(a, left, s.a, elements, fnuz);
        else if (!widen_sparse(w, i, &s, a, left, elements, fnuz))
            return false;
        loops()->widen(b, right, s.b, elements, fnuz);
    }
    if (blgp)
        for (int e = 0; e < elements; e++) {
            Lanes from;
            memcpy(from, right[e], sizeof from);
            for (int l = 0; l < LANES; l++)
                right[e][l] = from[blgp_lane((int)blgp, l)];
        }

    if (!c) {
        uint32_t constant = scalar32(w, i, 2);
        for (int l = 0; l < LANES; l++)
            copy[0][l] = constant;
    } else if (c != d && c < d + rows && d < c + rows) { /* D over other rows of C */
        memcpy(copy, c, (size_t)rows * sizeof(Lanes));
        c = (const Lanes *)copy;
    }
    const uint32_t *from[32];
    uint32_t *to[32];
    if (m == 4) {
        for (int r = 0; r < 4; r++) {
            from[r] = c ? c[r] : copy[0];
            to[r] = d[r];
        }
        loops()->multiply_small(to, from, left, right, k, integer, (int)cbsz, (int)abid);
        return true;
    }
    const uint32_t *rows_a[MAX_K], *rows_b[MAX_K];
    for (int block = 0; block < blocks; block++) {
        int block_a = cbsz ? (block >> cbsz << cbsz) + (int)abid : block;
        for (int step = 0, e = 0, part = 0; step < k; step++) {
            rows_a[step] = left[e] + (part + block_a) * m;
            rows_b[step] = right[e] + (part + block) * m;
            if (++e == elements) {
                e = 0;
                part += blocks;
            }
        }
        /* Two runs of elements / 2: fp8 and bf8 of f8f6f4, and B of smfmac with 8 registers. */
        bool runs_a = mixed && format_a < 2, runs_b = (mixed && format_b < 2) || (s.sparse && registers == 8);
        for (int step = 0, half = elements / 2; (runs_a || runs_b) && step < k; step++) {
            int e = step % half + step / (k / 2) * half, run = step % (k / 2) / half * m;
            rows_a[step] = runs_a ? left[e] + run : rows_a[step];
            rows_b[step] = runs_b ? right[e] + run : rows_b[step];
        }
        /* Row 8 * (r / 4) + 4 * (l / 32) + r % 4 of 32, or 4 * (l / 16) + r % 4 of 16, is in register r of the block. */
        int groups = LANES / m, first = block * (rows / blocks);
        for (int row = 0; row < m; row++) {
            int r = first + row / (4 * groups) * 4 + row % 4, lane = row / 4 % groups * m;
            from[row] = c ? c[r] + lane : copy[0];
            to[row] = d[r] + lane;
        }
        loops()->multiply(to, from, rows_a, rows_b, m, k, integer);
    }
    return true;
}
