/* Scalar instructions and branches. */
#include "core.h"

/* The fields of s_getreg and s_setreg's immediate. */
enum { HW_REG_MODE = 1 };

static uint64_t low_bits(uint32_t count) { return count >= 64 ? UINT64_MAX : (1ull << count) - 1; }

static uint64_t reverse64(uint64_t x) {
    uint64_t out = 0;
    for (int n = 0; n < 64; n++) out |= (x >> n & 1) << (63 - n);
    return out;
}

static uint32_t find_first_one(uint64_t x) { return x ? (uint32_t)__builtin_ctzll(x) : UINT32_MAX; }

/* Zeros above the highest one, in a value of width bits. */
static uint32_t leading_zeros(uint64_t x, int width) {
    return x ? (uint32_t)(__builtin_clzll(x) - (64 - width)) : UINT32_MAX;
}

static uint64_t whole_quads(uint64_t x) {
    uint64_t any = (x | x >> 1 | x >> 2 | x >> 3) & 0x1111111111111111;
    return any * 15;
}

static uint64_t quad_mask(uint64_t x) {
    uint64_t out = 0;
    for (int n = 0; n < 16; n++) out |= (uint64_t)((x >> 4 * n & 15) != 0) << n;
    return out;
}

static uint64_t replicate_bits(uint32_t x) {
    uint64_t out = 0;
    for (int n = 0; n < 32; n++) out |= (uint64_t)(x >> n & 1) * 3 << 2 * n;
    return out;
}

static uint64_t bit_field(uint64_t x, uint32_t control, uint32_t offset_mask) {
    return x >> (control & offset_mask) & low_bits(control >> 16 & 127);
}

static int64_t signed_bit_field(int64_t x, uint32_t control, uint32_t offset_mask, uint32_t width) {
    uint32_t count = control >> 16 & 127;
    if (count == 0) return 0;
    int64_t shifted = x >> (control & offset_mask);
    return count >= width ? shifted : (int64_t)((uint64_t)shifted << (64 - count)) >> (64 - count);
}

static bool add_overflows(uint32_t a, uint32_t b) { return (~(a ^ b) & (a ^ (a + b))) >> 31; }
static bool sub_overflows(uint32_t a, uint32_t b) { return ((a ^ b) & (a ^ (a - b))) >> 31; }

static bool jump_to_address(const Launch *launch, Wave *w, uint64_t address) {
    uint32_t low = 0, high = launch->code_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (launch->code[middle].address < address) low = middle + 1;
        else high = middle;
    }
    if (low == launch->code_count || launch->code[low].address != address) return false;
    w->pc = low;
    return true;
}

/* The destination operand's old value, of instructions that update it. */
static uint32_t old32(const Wave *w, const Insn *i) { return w->sgpr[i->dst.code]; }
static uint64_t old64(const Wave *w, const Insn *i) {
    return w->sgpr[i->dst.code] | (uint64_t)w->sgpr[i->dst.code + 1] << 32;
}

/* 64-bit source of a signed operation: a literal is sign extended. */
static int64_t signed64(const Wave *w, const Insn *i, int k) {
    return i->src[k].code == LITERAL ? (int64_t)(int32_t)i->literal : (int64_t)scalar64(w, i, k);
}

static bool get_register(Wave *w, const Insn *i) {
    uint32_t field = (uint16_t)i->offset, offset = field >> 6 & 31, count = (field >> 11 & 31) + 1;
    if ((field & 63) != HW_REG_MODE) return false;
    write_scalar32(w, i->dst.code, (uint32_t)(w->mode >> offset & low_bits(count)));
    return true;
}

static bool set_register(Wave *w, const Insn *i, uint32_t value) {
    uint32_t field = (uint16_t)i->offset, offset = field >> 6 & 31, count = (field >> 11 & 31) + 1;
    if ((field & 63) != HW_REG_MODE) return false;
    uint32_t mask = (uint32_t)(low_bits(count) << offset);
    w->mode = (w->mode & ~mask) | (value << offset & mask);
    return true;
}

static bool save_exec(Wave *w, const Insn *i, uint64_t exec) {
    uint64_t old = exec_mask(w);
    write_scalar64(w, EXEC_LO, exec);
    write_scalar64(w, i->dst.code, old);
    w->scc = exec_mask(w) != 0;
    return true;
}

static bool write_exec(Wave *w, const Insn *i, uint64_t exec) {
    write_scalar64(w, EXEC_LO, exec);
    write_scalar64(w, i->dst.code, exec);
    w->scc = exec != 0;
    return true;
}

/* False: the branch leaves the kernel's code. */
static bool branch_if(Wave *w, const Insn *i, bool taken) {
    if (!taken) return true;
    if (i->offset < 0) return false;
    w->pc = (uint32_t)i->offset;
    return true;
}

/* SGPR number a + M0 of the s_movrel ops; false beyond the SGPRs. */
static bool relative(const Wave *w, uint16_t code, uint32_t count, uint16_t *out) {
    uint64_t number = (uint64_t)code + w->sgpr[M0];
    *out = (uint16_t)number;
    return number + count <= VCC_LO;
}

static bool set32(Wave *w, uint16_t code, uint32_t value) {
    w->scc = value != 0;
    write_scalar32(w, code, value);
    return true;
}

static bool set64(Wave *w, uint16_t code, uint64_t value) {
    w->scc = value != 0;
    write_scalar64(w, code, value);
    return true;
}

#define A scalar32(w, i, 0)
#define B scalar32(w, i, 1)
#define A64 scalar64(w, i, 0)
#define B64 scalar64(w, i, 1)
#define SET(op, value) case OP_##op: write_scalar32(w, d, (uint32_t)(value)); return true;
#define SET64(op, value) case OP_##op: write_scalar64(w, d, (uint64_t)(value)); return true;
/* SCC tells whether the result is not zero. */
#define SET_SCC(op, value) case OP_##op: return set32(w, d, (uint32_t)(value));
#define SET64_SCC(op, value) case OP_##op: return set64(w, d, (uint64_t)(value));
#define BITWISE(op, expression) \
    case OP_s_##op##_b32: { uint32_t a = A, b = B; return set32(w, d, expression); } \
    case OP_s_##op##_b64: { uint64_t a = A64, b = B64; return set64(w, d, expression); }
/* An arithmetic result v, with SCC given. */
#define ARITHMETIC(op, value, flag) \
    case OP_##op: { \
        uint32_t a = A, b = B, v = (uint32_t)(value); \
        w->scc = (flag); \
        write_scalar32(w, d, v); \
        return true; \
    }
#define SHIFT_ADD(n) ARITHMETIC(s_lshl##n##_add_u32, (a << n) + b, (((uint64_t)a << n) + b) >> 32 != 0)
#define COMPARE(name, relation) \
    case OP_s_cmp_##name##_i32: w->scc = (int32_t)A relation (int32_t)B; return true; \
    case OP_s_cmp_##name##_u32: w->scc = A relation B; return true; \
    case OP_s_cmpk_##name##_i32: w->scc = (int32_t)k relation i->offset; return true; \
    case OP_s_cmpk_##name##_u32: w->scc = k relation (uint16_t)i->offset; return true;
#define TEST(op, flag) case OP_##op: w->scc = (flag); return true;
#define SAVE_EXEC(op, value) \
    case OP_s_##op##_saveexec_b64: { uint64_t a = A64, exec = exec_mask(w); return save_exec(w, i, value); }

bool exec_salu(Group *g, Wave *w, const Insn *i) {
    uint16_t d = i->dst.code, number;
    for (int n = 0; n < i->sources; n++)
        if (!scalar_source_known(i->src[n])) return false;
    uint32_t k = i->sources ? A : 0; /* register of s_cmpk and s_setreg */
    uint64_t next = i->address + i->size;
    switch (i->op) {
    SET(s_mov_b32, A)
    SET64(s_mov_b64, A64)
    SET(s_cmov_b32, w->scc ? A : old32(w, i))
    SET64(s_cmov_b64, w->scc ? A64 : old64(w, i))
    SET_SCC(s_not_b32, ~A)
    SET64_SCC(s_not_b64, ~A64)
    SET_SCC(s_wqm_b32, whole_quads(A))
    SET64_SCC(s_wqm_b64, whole_quads(A64))
    SET(s_brev_b32, reverse64(A) >> 32)
    SET64(s_brev_b64, reverse64(A64))
    SET_SCC(s_bcnt0_i32_b32, 32 - __builtin_popcount(A))
    SET_SCC(s_bcnt0_i32_b64, 64 - __builtin_popcountll(A64))
    SET_SCC(s_bcnt1_i32_b32, __builtin_popcount(A))
    SET_SCC(s_bcnt1_i32_b64, __builtin_popcountll(A64))
    SET(s_ff0_i32_b32, find_first_one((uint32_t)~A))
    SET(s_ff0_i32_b64, find_first_one(~A64))
    SET(s_ff1_i32_b32, find_first_one(A))
    SET(s_ff1_i32_b64, find_first_one(A64))
    SET(s_flbit_i32_b32, leading_zeros(A, 32))
    SET(s_flbit_i32_b64, leading_zeros(A64, 64))
    SET(s_flbit_i32, leading_zeros((uint32_t)((int32_t)A < 0 ? ~A : A), 32))
    SET(s_flbit_i32_i64, leading_zeros((uint64_t)(signed64(w, i, 0) ^ signed64(w, i, 0) >> 63), 64))
    SET(s_sext_i32_i8, (int32_t)(int8_t)A)
    SET(s_sext_i32_i16, (int32_t)(int16_t)A)
    SET(s_bitset0_b32, old32(w, i) & ~(1u << (A & 31)))
    SET64(s_bitset0_b64, old64(w, i) & ~(1ull << (A & 63)))
    SET(s_bitset1_b32, old32(w, i) | 1u << (A & 31))
    SET64(s_bitset1_b64, old64(w, i) | 1ull << (A & 63))
    SET_SCC(s_abs_i32, (int32_t)A < 0 ? 0u - A : A)
    SET_SCC(s_quadmask_b32, quad_mask(A))
    SET64_SCC(s_quadmask_b64, quad_mask(A64))
    SET64(s_bitreplicate_b64_b32, replicate_bits(A))

    SAVE_EXEC(and, a & exec)
    SAVE_EXEC(or, a | exec)
    SAVE_EXEC(xor, a ^ exec)
    SAVE_EXEC(andn2, a & ~exec)
    SAVE_EXEC(orn2, a | ~exec)
    SAVE_EXEC(nand, ~(a & exec))
    SAVE_EXEC(nor, ~(a | exec))
    SAVE_EXEC(xnor, ~(a ^ exec))
    SAVE_EXEC(andn1, ~a & exec)
    SAVE_EXEC(orn1, ~a | exec)
    case OP_s_andn1_wrexec_b64: return write_exec(w, i, ~A64 & exec_mask(w));
    case OP_s_andn2_wrexec_b64: return write_exec(w, i, A64 & ~exec_mask(w));

    case OP_s_movrels_b32:
        if (!relative(w, i->src[0].code, 1, &number)) return false;
        write_scalar32(w, d, w->sgpr[number]);
        return true;
    case OP_s_movrels_b64:
        if (!relative(w, i->src[0].code, 2, &number)) return false;
        write_scalar64(w, d, w->sgpr[number] | (uint64_t)w->sgpr[number + 1] << 32);
        return true;
    case OP_s_movreld_b32:
        if (!relative(w, d, 1, &number)) return false;
        write_scalar32(w, number, A);
        return true;
    case OP_s_movreld_b64:
        if (!relative(w, d, 2, &number)) return false;
        write_scalar64(w, number, A64);
        return true;

    ARITHMETIC(s_add_u32, a + b, v < a)
    ARITHMETIC(s_sub_u32, a - b, b > a)
    ARITHMETIC(s_add_i32, a + b, add_overflows(a, b))
    ARITHMETIC(s_sub_i32, a - b, sub_overflows(a, b))
    ARITHMETIC(s_addc_u32, a + b + w->scc, ((uint64_t)a + b + w->scc) >> 32 != 0)
    ARITHMETIC(s_subb_u32, a - b - w->scc, (uint64_t)b + w->scc > a)
    ARITHMETIC(s_min_i32, (int32_t)a < (int32_t)b ? a : b, (int32_t)a < (int32_t)b)
    ARITHMETIC(s_min_u32, a < b ? a : b, a < b)
    ARITHMETIC(s_max_i32, (int32_t)a >= (int32_t)b ? a : b, (int32_t)a >= (int32_t)b)
    ARITHMETIC(s_max_u32, a >= b ? a : b, a >= b)
    ARITHMETIC(s_absdiff_i32, (int32_t)(a - b) < 0 ? b - a : a - b, v != 0)
    SET(s_cselect_b32, w->scc ? A : B)
    SET64(s_cselect_b64, w->scc ? A64 : B64)
    BITWISE(and, a & b)
    BITWISE(or, a | b)
    BITWISE(xor, a ^ b)
    BITWISE(andn2, a & ~b)
    BITWISE(orn2, a | ~b)
    BITWISE(nand, ~(a & b))
    BITWISE(nor, ~(a | b))
    BITWISE(xnor, ~(a ^ b))
    SET_SCC(s_lshl_b32, A << (B & 31))
    SET64_SCC(s_lshl_b64, A64 << (B & 63))
    SET_SCC(s_lshr_b32, A >> (B & 31))
    SET64_SCC(s_lshr_b64, A64 >> (B & 63))
    SET_SCC(s_ashr_i32, (int32_t)A >> (B & 31))
    SET64_SCC(s_ashr_i64, (uint64_t)(signed64(w, i, 0) >> (B & 63)))
    SET(s_bfm_b32, low_bits(A & 31) << (B & 31))
    SET64(s_bfm_b64, low_bits(A & 63) << (B & 63))
    SET_SCC(s_bfe_u32, bit_field(A, B, 31))
    SET64_SCC(s_bfe_u64, bit_field(A64, B, 63))
    SET_SCC(s_bfe_i32, signed_bit_field((int32_t)A, B, 31, 32))
    SET64_SCC(s_bfe_i64, (uint64_t)signed_bit_field(signed64(w, i, 0), B, 63, 64))
    SET(s_mul_i32, A * B)
    SET(s_mul_hi_u32, (uint64_t)A * B >> 32)
    SET(s_mul_hi_i32, (int64_t)(int32_t)A * (int32_t)B >> 32)
    SHIFT_ADD(1)
    SHIFT_ADD(2)
    SHIFT_ADD(3)
    SHIFT_ADD(4)
    SET(s_pack_ll_b32_b16, (A & 0xffff) | B << 16)
    SET(s_pack_lh_b32_b16, (A & 0xffff) | (B & 0xffff0000))
    SET(s_pack_hh_b32_b16, A >> 16 | (B & 0xffff0000))

    COMPARE(eq, ==)
    COMPARE(lg, !=)
    COMPARE(gt, >)
    COMPARE(ge, >=)
    COMPARE(lt, <)
    COMPARE(le, <=)
    TEST(s_cmp_eq_u64, A64 == B64)
    TEST(s_cmp_lg_u64, A64 != B64)
    TEST(s_bitcmp0_b32, !(A >> (B & 31) & 1))
    TEST(s_bitcmp1_b32, A >> (B & 31) & 1)
    TEST(s_bitcmp0_b64, !(A64 >> (B & 63) & 1))
    TEST(s_bitcmp1_b64, A64 >> (B & 63) & 1)

    SET(s_movk_i32, i->offset)
    SET(s_cmovk_i32, w->scc ? (uint32_t)i->offset : old32(w, i))
    case OP_s_addk_i32: {
        uint32_t a = old32(w, i), b = (uint32_t)i->offset;
        w->scc = add_overflows(a, b);
        write_scalar32(w, d, a + b);
        return true;
    }
    SET(s_mulk_i32, old32(w, i) * (uint32_t)i->offset)
    case OP_s_getreg_b32: return get_register(w, i);
    case OP_s_setreg_b32: return set_register(w, i, k);
    case OP_s_setreg_imm32_b32: return set_register(w, i, i->literal);

    SET64(s_getpc_b64, next)
    case OP_s_setpc_b64: return jump_to_address(g->launch, w, A64);
    case OP_s_swappc_b64: {
        uint64_t target = A64;
        write_scalar64(w, d, next);
        return jump_to_address(g->launch, w, target);
    }
    case OP_s_call_b64: return branch_if(w, i, true) && (write_scalar64(w, d, next), true);
    case OP_s_branch: return branch_if(w, i, true);
    case OP_s_cbranch_scc0: return branch_if(w, i, !w->scc);
    case OP_s_cbranch_scc1: return branch_if(w, i, w->scc);
    case OP_s_cbranch_vccz: return branch_if(w, i, vcc_mask(w) == 0);
    case OP_s_cbranch_vccnz: return branch_if(w, i, vcc_mask(w) != 0);
    case OP_s_cbranch_execz: return branch_if(w, i, exec_mask(w) == 0);
    case OP_s_cbranch_execnz: return branch_if(w, i, exec_mask(w) != 0);
    default: return false;
    }
}
