/* Vector ALU: dispatch, moves, and integer ops of 32 and 64 bits. */
#include "valu.h"

bool exec_valu(Group *g, Wave *w, const Insn *i)
{
    if ((i->flags & F_DPP) && !dpp_known(i)) return false;
    for (int k = 0; k < i->sources; k++)
        if (i->src[k].code < VGPR0 && !scalar_source_known(i->src[k])) return false;
    return exec_vector_integer(g, w, i) || exec_vector_float(g, w, i) || exec_vector_convert(g, w, i) ||
           exec_vector_packed(g, w, i) || exec_vector_half(g, w, i) || exec_compare(g, w, i) ||
           exec_vector_scaled(g, w, i);
}

static inline uint32_t shift_right_signed(uint32_t value, uint32_t by) { return (uint32_t)((int32_t)value >> by); }
static inline int32_t signed24(uint32_t v) { return (int32_t)(v << 8) >> 8; }
static inline uint32_t low24(uint32_t v) { return v & 0xffffff; }
static inline uint32_t min_i32(uint32_t a, uint32_t b) { return (int32_t)a < (int32_t)b ? a : b; }
static inline uint32_t max_i32(uint32_t a, uint32_t b) { return (int32_t)a > (int32_t)b ? a : b; }
static inline uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint32_t saturate_i32(int64_t v)
{
    return (uint32_t)(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v);
}

static inline uint32_t bit_reverse(uint32_t v)
{
    v = (v >> 1 & 0x55555555) | (v & 0x55555555) << 1;
    v = (v >> 2 & 0x33333333) | (v & 0x33333333) << 2;
    v = (v >> 4 & 0x0f0f0f0f) | (v & 0x0f0f0f0f) << 4;
    v = (v >> 8 & 0x00ff00ff) | (v & 0x00ff00ff) << 8;
    return v >> 16 | v << 16;
}

static inline uint32_t bit_count(uint32_t v)
{
    v -= v >> 1 & 0x55555555;
    v = (v & 0x33333333) + (v >> 2 & 0x33333333);
    return ((v + (v >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24;
}

static inline uint32_t first_high(uint32_t v) { return v ? (uint32_t)__builtin_clz(v) : UINT32_MAX; }
static inline uint32_t first_low(uint32_t v) { return v ? (uint32_t)__builtin_ctz(v) : UINT32_MAX; }

static inline uint32_t field_unsigned(uint32_t v, uint32_t from, uint32_t width)
{
    return v >> (from & 31) & ((1u << (width & 31)) - 1);
}

static inline uint32_t field_signed(uint32_t v, uint32_t from, uint32_t width)
{
    uint32_t unused = 32 - (width & 31), field = field_unsigned(v, from, width);
    return width & 31 ? shift_right_signed(field << unused, unused) : 0;
}

/* Selectors: 0..7 a byte of {a, b}, 8..11 the sign of byte 1, 3, 5, 7 repeated, 12 zero, above 0xff. */
static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors)
{
    uint64_t both = (uint64_t)a << 32 | b;
    uint32_t r = 0;
    for (int n = 0; n < 4; n++) {
        uint32_t s = selectors >> 8 * n & 0xff, byte;
        if (s < 8) byte = (uint32_t)(both >> 8 * s) & 0xff;
        else if (s < 12) byte = both >> (16 * (s - 8) + 15) & 1 ? 0xff : 0;
        else byte = s == 12 ? 0 : 0xff;
        r |= byte << 8 * n;
    }
    return r;
}

static inline void permute(Wave *w, const Insn *i)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES], d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb), *c = source32(w, i, 2, 0, tc);
    if (i->src[2].code >= VGPR0 || (c[0] & 0xf8f8f8f8)) {
        EACH_LANE d[l] = permute_bytes(a[l], b[l], c[l]);
    } else { /* the usual case: the same four bytes in all lanes */
        EACH_LANE d[l] = 0;
        for (int n = 0; n < 4; n++) {
            uint32_t selector = c[0] >> 8 * n & 7, shift = 8 * (selector & 3);
            const uint32_t *from = selector & 4 ? a : b;
            EACH_LANE d[l] |= (from[l] >> shift & 0xff) << 8 * n;
        }
    }
    write32(w, i, 0, d, lane_mask(w, i));
}

static inline uint32_t sad_u8(uint32_t a, uint32_t b, uint32_t sum, bool masked)
{
    for (int n = 0; n < 4; n++) {
        uint32_t x = a >> 8 * n & 0xff, y = b >> 8 * n & 0xff;
        if (!masked || y) sum += x > y ? x - y : y - x;
    }
    return sum;
}

static inline uint32_t difference(uint32_t a, uint32_t b) { return a > b ? a - b : b - a; }

static inline uint32_t lerp_u8(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r = 0;
    for (int n = 0; n < 32; n += 8) r |= ((a >> n & 0xff) + (b >> n & 0xff) + (c >> n & 1)) >> 1 << n;
    return r;
}

static inline uint32_t saturate_byte(int32_t v, int32_t low, int32_t high)
{
    return (uint32_t)(v < low ? low : v > high ? high : v) & 0xff;
}

/* Bit 4a + 2b + c of the table is the result for the bits a, b, c. */
static inline uint32_t by_truth_table(uint32_t table, uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r = 0;
    for (int n = 0; n < 8; n++)
        if (table >> n & 1) r |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return r;
}

static void read_first_lane(Wave *w, const Insn *i)
{
    uint32_t tmp[LANES];
    const uint32_t *a = source32(w, i, 0, 0, tmp);
    uint64_t exec = exec_mask(w);
    write_scalar32(w, i->dst.code, a[exec ? __builtin_ctzll(exec) : 0]);
}

static void read_lane(Wave *w, const Insn *i)
{
    uint32_t tmp[LANES];
    const uint32_t *a = source32(w, i, 0, 0, tmp);
    write_scalar32(w, i->dst.code, a[scalar32(w, i, 1) & 63]);
}

static void swap_registers(Wave *w, const Insn *i)
{
    uint32_t *a = w->vgpr[i->dst.code - VGPR0], *b = w->vgpr[i->src[0].code - VGPR0];
    uint64_t mask = lane_mask(w, i);
    EACH_LANE {
        if (!(mask >> l & 1)) continue;
        uint32_t kept = a[l];
        a[l] = b[l];
        b[l] = kept;
    }
}

/* Lanes of src with bit `distance` clear change places with those of dst that are `distance` higher. What a switched-off
   partner would give is not documented well enough to model: false. */
static bool swap_rows(Wave *w, const Insn *i, int distance)
{
    uint32_t *to = w->vgpr[i->dst.code - VGPR0], *from = w->vgpr[i->src[0].code - VGPR0];
    uint64_t exec = exec_mask(w);
    EACH_LANE
        if ((exec >> l & 1) != (exec >> (l ^ distance) & 1)) return false;
    EACH_LANE {
        if (l & distance || !(exec >> l & 1)) continue;
        uint32_t kept = from[l];
        from[l] = to[l + distance];
        to[l + distance] = kept;
    }
    return true;
}

static void conditional_mask(Wave *w, const Insn *i)
{
    uint32_t ta[LANES], tb[LANES], take[LANES], d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb);
    if (i->src[0].mods) modify32(a, ta, i->src[0].mods, false), a = ta;
    if (i->src[1].mods) modify32(b, tb, i->src[1].mods, false), b = tb;
    expand_mask(mask_source(w, i, 2), take);
    EACH_LANE d[l] = (a[l] & ~take[l]) | (b[l] & take[l]);
    write32(w, i, 0, d, lane_mask(w, i));
}

/* a + b + carry, or a - b - carry, with the carry out of each active lane. */
static void add_carry(Wave *w, const Insn *i, bool subtract, bool reversed, bool carry_in)
{
    uint32_t ta[LANES], tb[LANES], carry[LANES], d[LANES], out[LANES];
    const uint32_t *a = source32(w, i, reversed, 0, ta), *b = source32(w, i, !reversed, 0, tb);
    uint64_t mask = lane_mask(w, i);
    expand_mask(carry_in ? mask_source(w, i, 2) : 0, carry);
    EACH_LANE {
        uint64_t change = (uint64_t)b[l] + (carry[l] & 1);
        uint64_t r = subtract ? a[l] - change : a[l] + change;
        d[l] = (uint32_t)r;
        out[l] = (uint32_t)(r >> 32) & 1;
    }
    if (i->flags & F_CLAMP)
        EACH_LANE
            if (out[l]) d[l] = subtract ? 0 : UINT32_MAX;
    write32(w, i, 0, d, mask);
    write_mask(w, i, collect_mask(out) & mask);
}

static void multiply_add_64(Wave *w, const Insn *i, bool is_signed)
{
    uint32_t ta[LANES], tb[LANES], out[LANES];
    uint64_t c[LANES], d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb);
    source64(w, i, 2, false, c);
    EACH_LANE {
        if (is_signed) {
            int64_t product = (int64_t)(int32_t)a[l] * (int32_t)b[l];
            d[l] = (uint64_t)product + c[l];
            /* Bit 64 of the sum of two sign-extended operands. */
            out[l] = (uint32_t)(((uint64_t)product >> 63) + (c[l] >> 63) + (d[l] < c[l])) & 1;
        } else {
            d[l] = (uint64_t)a[l] * b[l] + c[l];
            out[l] = d[l] < c[l];
        }
    }
    uint64_t mask = lane_mask(w, i);
    write64(w, i, d, mask);
    write_mask(w, i, collect_mask(out) & mask);
}

static void count_below(Wave *w, const Insn *i, int first)
{
    uint32_t ta[LANES], tb[LANES], d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb);
    EACH_LANE {
        uint32_t below = l <= first ? 0 : l >= first + 32 ? UINT32_MAX : (1u << (l - first)) - 1;
        d[l] = b[l] + bit_count(a[l] & below);
    }
    write32(w, i, 0, d, lane_mask(w, i));
}

static void bit_op3(Wave *w, const Insn *i)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES], d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb), *c = source32(w, i, 2, 0, tc);
    uint32_t table = 0; /* the encoding keeps it in the fields neg, abs and omod */
    for (int k = 0; k < 3; k++)
        table |= (i->src[k].mods & MOD_NEG ? 1u : 0) << k | (i->src[k].mods & MOD_ABS ? 8u : 0) << k;
    table |= ((i->flags & F_OMOD_MASK) >> F_OMOD_SHIFT) << 6;
    for (int l = 0; l < LANES; l++) d[l] = 0;
    for (int n = 0; n < 8; n++) {
        if (!(table >> n & 1)) continue;
        uint32_t fa = n & 4 ? 0 : UINT32_MAX, fb = n & 2 ? 0 : UINT32_MAX, fc = n & 1 ? 0 : UINT32_MAX;
        EACH_LANE d[l] |= (a[l] ^ fa) & (b[l] ^ fb) & (c[l] ^ fc);
    }
    if (i->op == OP_v_bitop3_b16) {
        uint16_t half[LANES];
        EACH_LANE half[l] = (uint16_t)by_truth_table(table, a[l] >> 16 * op_sel(i, 0), b[l] >> 16 * op_sel(i, 1),
                                                     c[l] >> 16 * op_sel(i, 2));
        write16(w, i, half, true);
    } else {
        write32(w, i, 0, d, lane_mask(w, i));
    }
}

static void pack_shifted(Wave *w, const Insn *i, int32_t low, int32_t high)
{
    uint32_t ta[LANES], tb[LANES], tc[LANES];
    uint16_t d[LANES];
    const uint32_t *a = source32(w, i, 0, 0, ta), *b = source32(w, i, 1, 0, tb), *c = source32(w, i, 2, 0, tc);
    EACH_LANE {
        uint32_t by = c[l] & 31;
        d[l] = (uint16_t)(saturate_byte((int32_t)a[l] >> by, low, high) |
                          saturate_byte((int32_t)b[l] >> by, low, high) << 8);
    }
    write16(w, i, d, true);
}

/* Four sums of differences between b and the bytes of a at offsets 0 to 3. */
static void quad_sad(Wave *w, const Insn *i, bool masked, bool wide)
{
    uint32_t tb[LANES], tc[LANES], d[4][LANES];
    uint64_t a[LANES];
    source64(w, i, 0, false, a);
    const uint32_t *b = source32(w, i, 1, 0, tb);
    for (int n = 0; n < 4; n++) {
        const uint32_t *c = source32(w, i, 2, wide ? n : n / 2, tc);
        EACH_LANE {
            uint32_t start = wide ? c[l] : c[l] >> 16 * (n & 1) & 0xffff;
            d[n][l] = sad_u8((uint32_t)(a[l] >> 8 * n), b[l], start, masked);
        }
    }
    uint64_t mask = lane_mask(w, i);
    if (!wide)
        for (int n = 0; n < 2; n++)
            EACH_LANE d[n][l] = (d[2 * n][l] & 0xffff) | d[2 * n + 1][l] << 16;
    for (int n = 0; n < (wide ? 4 : 2); n++) write32(w, i, n, d[n], mask);
}

#define SOURCE(name, k) uint32_t name##_tmp[LANES]; const uint32_t *name = source32(w, i, k, 0, name##_tmp)
#define RESULT(expression) \
    uint32_t d[LANES]; \
    EACH_LANE d[l] = (expression); \
    write32(w, i, 0, d, lane_mask(w, i)); \
    return true
#define A a[l]
#define B b[l]
#define C c[l]
#define UNARY(op, expression) case OP_##op: { SOURCE(a, 0); RESULT(expression); }
#define BINARY(op, expression) case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); RESULT(expression); }
#define TERNARY(op, expression) case OP_##op: { SOURCE(a, 0); SOURCE(b, 1); SOURCE(c, 2); RESULT(expression); }
#define SHIFT64(op, type, operator) \
    case OP_##op: { \
        SOURCE(a, 0); \
        uint64_t b[LANES], d[LANES]; \
        source64(w, i, 1, false, b); \
        EACH_LANE d[l] = (uint64_t)((type)b[l] operator (a[l] & 63)); \
        write64(w, i, d, lane_mask(w, i)); \
        return true; \
    }

/* Integer results that saturate when the instruction has clamp. */
static bool exec_clamped(Wave *w, const Insn *i)
{
    switch (i->op) {
        BINARY(v_add_u32, A + B < A ? UINT32_MAX : A + B)
        BINARY(v_sub_u32, A < B ? 0 : A - B)
        BINARY(v_subrev_u32, B < A ? 0 : B - A)
        BINARY(v_add_i32, saturate_i32((int64_t)(int32_t)A + (int32_t)B))
        BINARY(v_sub_i32, saturate_i32((int64_t)(int32_t)A - (int32_t)B))
    case OP_v_add_co_u32: add_carry(w, i, false, false, false); return true;
    case OP_v_sub_co_u32: add_carry(w, i, true, false, false); return true;
    case OP_v_subrev_co_u32: add_carry(w, i, true, true, false); return true;
    case OP_v_addc_co_u32: add_carry(w, i, false, false, true); return true;
    case OP_v_subb_co_u32: add_carry(w, i, true, false, true); return true;
    case OP_v_subbrev_co_u32: add_carry(w, i, true, true, true); return true;
    default: return false;
    }
}

WIDE bool exec_vector_integer(const Group *g, Wave *w, const Insn *i)
{
    (void)g;
    if (i->op < OP_v_nop || i->op > OP_v_mqsad_u32_u8) return false; /* the ends of this file's part of ops_valu.def */
    if (i->flags & F_CLAMP) return exec_clamped(w, i);
    switch (i->op) {
    case OP_v_nop: return true;
    case OP_v_mov_b32:
    case OP_v_accvgpr_read_b32:
    case OP_v_accvgpr_write_b32:
    case OP_v_accvgpr_mov_b32: {
        SOURCE(a, 0);
        write32(w, i, 0, a, lane_mask(w, i));
        return true;
    }
    case OP_v_mov_b64: {
        uint64_t a[LANES];
        source64(w, i, 0, false, a);
        write64(w, i, a, lane_mask(w, i));
        return true;
    }
    case OP_v_readfirstlane_b32: read_first_lane(w, i); return true;
    case OP_v_readlane_b32: read_lane(w, i); return true;
    case OP_v_writelane_b32:
        w->vgpr[i->dst.code - VGPR0][scalar32(w, i, 1) & 63] = scalar32(w, i, 0);
        return true;
    case OP_v_swap_b32: swap_registers(w, i); return true;
    case OP_v_permlane16_swap_b32: return swap_rows(w, i, 16);
    case OP_v_permlane32_swap_b32: return swap_rows(w, i, 32);
    case OP_v_cndmask_b32: conditional_mask(w, i); return true;
    case OP_v_bitop3_b32:
    case OP_v_bitop3_b16: bit_op3(w, i); return true;
    case OP_v_perm_b32: permute(w, i); return true;
        TERNARY(v_alignbit_b32, (uint32_t)(((uint64_t)A << 32 | B) >> (C & 31)))
        TERNARY(v_alignbyte_b32, (uint32_t)(((uint64_t)A << 32 | B) >> 8 * (C & 3)))
        TERNARY(v_bfe_u32, field_unsigned(A, B, C))
        TERNARY(v_bfe_i32, field_signed(A, B, C))
        TERNARY(v_bfi_b32, (A & B) | (~A & C))
        BINARY(v_bfm_b32, ((1u << (A & 31)) - 1) << (B & 31))
        UNARY(v_bfrev_b32, bit_reverse(A))
        UNARY(v_ffbh_u32, first_high(A))
        UNARY(v_ffbl_b32, first_low(A))
        UNARY(v_ffbh_i32, first_high(A ^ shift_right_signed(A, 31)))
        BINARY(v_bcnt_u32_b32, B + bit_count(A))
    case OP_v_mbcnt_lo_u32_b32: count_below(w, i, 0); return true;
    case OP_v_mbcnt_hi_u32_b32: count_below(w, i, 32); return true;
        UNARY(v_prng_b32, A << 1 ^ (A >> 31 ? 197u : 0))
        UNARY(v_not_b32, ~A)
        BINARY(v_and_b32, A & B)
        BINARY(v_or_b32, A | B)
        BINARY(v_xor_b32, A ^ B)
        BINARY(v_xnor_b32, ~(A ^ B))
        TERNARY(v_and_or_b32, (A & B) | C)
        TERNARY(v_or3_b32, A | B | C)
        TERNARY(v_lshl_or_b32, A << (B & 31) | C)
        TERNARY(v_lshl_add_u32, (A << (B & 31)) + C)
        TERNARY(v_add_lshl_u32, (A + B) << (C & 31))
        TERNARY(v_add3_u32, A + B + C)
        TERNARY(v_xad_u32, (A ^ B) + C)
        BINARY(v_lshlrev_b32, B << (A & 31))
        BINARY(v_lshrrev_b32, B >> (A & 31))
        BINARY(v_ashrrev_i32, shift_right_signed(B, A & 31))
        SHIFT64(v_lshlrev_b64, uint64_t, <<)
        SHIFT64(v_lshrrev_b64, uint64_t, >>)
        SHIFT64(v_ashrrev_i64, int64_t, >>)
    case OP_v_lshl_add_u64: {
        SOURCE(b, 1);
        uint64_t a[LANES], c[LANES];
        source64(w, i, 0, false, a);
        source64(w, i, 2, false, c);
        EACH_LANE c[l] += a[l] << (b[l] & 7);
        write64(w, i, c, lane_mask(w, i));
        return true;
    }
        BINARY(v_add_u32, A + B)
        BINARY(v_sub_u32, A - B)
        BINARY(v_subrev_u32, B - A)
        BINARY(v_add_i32, A + B)
        BINARY(v_sub_i32, A - B)
    case OP_v_add_co_u32: add_carry(w, i, false, false, false); return true;
    case OP_v_sub_co_u32: add_carry(w, i, true, false, false); return true;
    case OP_v_subrev_co_u32: add_carry(w, i, true, true, false); return true;
    case OP_v_addc_co_u32: add_carry(w, i, false, false, true); return true;
    case OP_v_subb_co_u32: add_carry(w, i, true, false, true); return true;
    case OP_v_subbrev_co_u32: add_carry(w, i, true, true, true); return true;
        BINARY(v_mul_lo_u32, A * B)
        BINARY(v_mul_hi_u32, (uint32_t)((uint64_t)A * B >> 32))
        BINARY(v_mul_hi_i32, (uint32_t)((int64_t)(int32_t)A * (int32_t)B >> 32))
        BINARY(v_mul_u32_u24, low24(A) * low24(B))
        BINARY(v_mul_hi_u32_u24, (uint32_t)((uint64_t)low24(A) * low24(B) >> 32))
        BINARY(v_mul_i32_i24, (uint32_t)signed24(A) * (uint32_t)signed24(B))
        BINARY(v_mul_hi_i32_i24, (uint32_t)((int64_t)signed24(A) * signed24(B) >> 32))
        TERNARY(v_mad_u32_u24, low24(A) * low24(B) + C)
        TERNARY(v_mad_i32_i24, (uint32_t)signed24(A) * (uint32_t)signed24(B) + C)
    case OP_v_mad_u64_u32: multiply_add_64(w, i, false); return true;
    case OP_v_mad_i64_i32: multiply_add_64(w, i, true); return true;
        BINARY(v_min_i32, min_i32(A, B))
        BINARY(v_max_i32, max_i32(A, B))
        BINARY(v_min_u32, min_u32(A, B))
        BINARY(v_max_u32, max_u32(A, B))
        TERNARY(v_min3_i32, min_i32(min_i32(A, B), C))
        TERNARY(v_max3_i32, max_i32(max_i32(A, B), C))
        TERNARY(v_min3_u32, min_u32(min_u32(A, B), C))
        TERNARY(v_max3_u32, max_u32(max_u32(A, B), C))
        TERNARY(v_med3_i32, max_i32(min_i32(A, B), min_i32(max_i32(A, B), C)))
        TERNARY(v_med3_u32, max_u32(min_u32(A, B), min_u32(max_u32(A, B), C)))
    case OP_v_ashr_pk_i8_i32: pack_shifted(w, i, -128, 127); return true;
    case OP_v_ashr_pk_u8_i32: pack_shifted(w, i, 0, 255); return true;
        TERNARY(v_lerp_u8, lerp_u8(A, B, C))
        TERNARY(v_sad_u8, sad_u8(A, B, C, false))
        TERNARY(v_sad_hi_u8, (sad_u8(A, B, 0, false) << 16) + C)
        TERNARY(v_sad_u16, C + difference(A & 0xffff, B & 0xffff) + difference(A >> 16, B >> 16))
        TERNARY(v_sad_u32, C + difference(A, B))
        TERNARY(v_msad_u8, sad_u8(A, B, C, true))
    case OP_v_qsad_pk_u16_u8: quad_sad(w, i, false, false); return true;
    case OP_v_mqsad_pk_u16_u8: quad_sad(w, i, true, false); return true;
    case OP_v_mqsad_u32_u8: quad_sad(w, i, true, true); return true;
    default: return false;
    }
}
