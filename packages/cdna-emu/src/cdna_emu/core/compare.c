/* Vector compares. ops_compare.def lists them in the order of the ISA's opcodes: in a block of one type the place of an
   op is its relation as a bit set. */
#include <string.h>

#include "core.h"

enum { LESS = 1, EQUAL = 2, GREATER = 4, UNORDERED = 8 };
enum { FLOAT_OPS = 16, INT_OPS = 8 };
enum { FIRST_INT = 3 * FLOAT_OPS, FIRST_CLASS = FIRST_INT + 6 * INT_OPS, OPS = FIRST_CLASS + 3 };
enum FloatType { F16, F32, F64 };
enum IntType { I16, U16, I32, U32, I64, U64 };

#define PLACE(op, place) _Static_assert(OP_##op - OP_v_cmp_f_f16 == (place), "order of ops_compare.def")
PLACE(v_cmp_lt_f32, F32 * FLOAT_OPS + LESS);
PLACE(v_cmp_nle_f64, F64 * FLOAT_OPS + (UNORDERED | GREATER));
PLACE(v_cmp_ge_u64, FIRST_INT + U64 * INT_OPS + (EQUAL | GREATER));
PLACE(v_cmp_class_f64, FIRST_CLASS + F64);
PLACE(v_cmpx_f_f16, OPS);
PLACE(v_cmpx_class_f64, 2 * OPS - 1);

/* Bit n of the result: hit[n], which is 0 or 1. The product gathers eight bytes in its top byte. */
static uint64_t lanes_hit(const uint8_t hit[LANES]) {
    uint64_t mask = 0;
    for (int n = 0; n < LANES; n += 8) {
        uint64_t eight;
        memcpy(&eight, hit + n, sizeof eight);
        mask |= (eight * 0x0102040810204080 >> 56) << n;
    }
    return mask;
}

static uint64_t relate32(const int32_t a[LANES], const int32_t b[LANES], int relation) {
    uint8_t hit[LANES];
    for (int n = 0; n < LANES; n++) {
        int is = a[n] < b[n] ? LESS : a[n] == b[n] ? EQUAL : GREATER;
        hit[n] = (relation & is) != 0;
    }
    return lanes_hit(hit);
}

static uint64_t relate64(const int64_t a[LANES], const int64_t b[LANES], int relation) {
    uint8_t hit[LANES];
    for (int n = 0; n < LANES; n++) {
        int is = a[n] < b[n] ? LESS : a[n] == b[n] ? EQUAL : GREATER;
        hit[n] = (relation & is) != 0;
    }
    return lanes_hit(hit);
}

/* Lanes with a NaN satisfy a relation by its UNORDERED bit alone. */
static uint64_t with_nans(uint64_t ordered, uint64_t nans, int relation) {
    return relation & UNORDERED ? ordered | nans : ordered & ~nans;
}

static bool flushes_inputs(const Wave *w, enum FloatType type) {
    return !(w->mode >> (type == F32 ? 4 : 6) & 1);
}

static bool opsel(const Insn *i, int k) { return i->flags >> F_OPSEL_SHIFT >> k & 1; }

/* The usual case of f32, with no modifier and denormals kept. */
static uint64_t relate_plain_f32(const uint32_t *x, const uint32_t *y, int relation) {
    float a[LANES], b[LANES];
    uint8_t hit[LANES];
    memcpy(a, x, sizeof a);
    memcpy(b, y, sizeof b);
    for (int n = 0; n < LANES; n++) {
        int is = a[n] < b[n] ? LESS : a[n] == b[n] ? EQUAL : a[n] > b[n] ? GREATER : UNORDERED;
        hit[n] = (relation & is) != 0;
    }
    return lanes_hit(hit);
}

/* f16 and f32 values as integers of the same order, with one zero. Returns the lanes that hold a NaN. */
static uint64_t float_keys32(const Wave *w, const Insn *i, int k, enum FloatType type, int32_t key[LANES]) {
    uint32_t tmp[LANES], sign = type == F16 ? 0x8000 : 0x80000000, infinity = type == F16 ? 0x7c00 : 0x7f800000;
    uint32_t least = !flushes_inputs(w, type) ? 0 : type == F16 ? 0x400 : 0x800000;
    uint32_t keep = i->src[k].mods & MOD_ABS ? ~sign : UINT32_MAX, flip = i->src[k].mods & MOD_NEG ? sign : 0;
    uint32_t shift = type == F16 && opsel(i, k) ? 16 : 0;
    const uint32_t *x = type == F16 ? source16f(w, i, k, tmp) : source32(w, i, k, 0, tmp);
    uint8_t nan[LANES];
    for (int n = 0; n < LANES; n++) {
        uint32_t bits = (x[n] >> shift & keep) ^ flip, magnitude = bits & (sign - 1);
        nan[n] = magnitude > infinity;
        magnitude = magnitude < least ? 0 : magnitude;
        key[n] = bits & sign ? -(int32_t)magnitude : (int32_t)magnitude;
    }
    return lanes_hit(nan);
}

static void float_bits64(const Wave *w, const Insn *i, int k, uint64_t bits[LANES]) {
    const uint64_t sign = 1ull << 63;
    uint64_t keep = i->src[k].mods & MOD_ABS ? ~sign : UINT64_MAX, flip = i->src[k].mods & MOD_NEG ? sign : 0;
    source64(w, i, k, true, bits);
    for (int n = 0; n < LANES; n++) bits[n] = (bits[n] & keep) ^ flip;
}

static uint64_t float_keys64(const Wave *w, const Insn *i, int k, int64_t key[LANES]) {
    uint64_t bits[LANES], least = flushes_inputs(w, F64) ? 1ull << 52 : 0;
    uint8_t nan[LANES];
    float_bits64(w, i, k, bits);
    for (int n = 0; n < LANES; n++) {
        uint64_t magnitude = bits[n] & INT64_MAX;
        nan[n] = magnitude > 0x7ffull << 52;
        if (magnitude < least) magnitude = 0;
        key[n] = bits[n] >> 63 ? -(int64_t)magnitude : (int64_t)magnitude;
    }
    return lanes_hit(nan);
}

static uint64_t compare_floats(const Wave *w, const Insn *i, enum FloatType type, int relation) {
    uint64_t ordered, nans;
    if (type == F32 && !i->src[0].mods && !i->src[1].mods && !flushes_inputs(w, F32)) {
        uint32_t tmp0[LANES], tmp1[LANES];
        return relate_plain_f32(source32(w, i, 0, 0, tmp0), source32(w, i, 1, 0, tmp1), relation);
    }
    if (type == F64) {
        int64_t a[LANES], b[LANES];
        nans = float_keys64(w, i, 0, a) | float_keys64(w, i, 1, b);
        ordered = relate64(a, b, relation);
    } else {
        int32_t a[LANES], b[LANES];
        nans = float_keys32(w, i, 0, type, a) | float_keys32(w, i, 1, type, b);
        ordered = relate32(a, b, relation);
    }
    return with_nans(ordered, nans, relation);
}

/* Integers of 16 and 32 bits in an order that the signed compare keeps. */
static void int_keys32(const Wave *w, const Insn *i, int k, enum IntType type, int32_t key[LANES]) {
    uint32_t tmp[LANES], shift = type <= U16 && opsel(i, k) ? 16 : 0;
    const uint32_t *x = source32(w, i, k, 0, tmp);
    for (int n = 0; n < LANES; n++) {
        uint32_t bits = x[n] >> shift;
        key[n] = type == I16   ? (int16_t)bits
                 : type == U16 ? (int32_t)(uint16_t)bits
                 : type == I32 ? (int32_t)bits
                               : (int32_t)(bits ^ 0x80000000);
    }
}

static void int_keys64(const Wave *w, const Insn *i, int k, enum IntType type, int64_t key[LANES]) {
    uint64_t bits[LANES];
    source64(w, i, k, false, bits);
    bool sign_extend = type == I64 && i->src[k].code == LITERAL;
    for (int n = 0; n < LANES; n++) {
        if (sign_extend) bits[n] = (uint64_t)(int64_t)(int32_t)i->literal;
        key[n] = (int64_t)(type == U64 ? bits[n] ^ 1ull << 63 : bits[n]);
    }
}

static uint64_t compare_ints(const Wave *w, const Insn *i, enum IntType type, int relation) {
    if (type >= I64) {
        int64_t a[LANES], b[LANES];
        int_keys64(w, i, 0, type, a);
        int_keys64(w, i, 1, type, b);
        return relate64(a, b, relation);
    }
    int32_t a[LANES], b[LANES];
    int_keys32(w, i, 0, type, a);
    int_keys32(w, i, 1, type, b);
    return relate32(a, b, relation);
}

/* Bit number of v_cmp_class. Denormals are seen whatever the mode. */
static uint32_t float_class(uint64_t bits, int mantissa_bits, int exponent_bits) {
    uint64_t mantissa = bits & ((1ull << mantissa_bits) - 1);
    uint32_t top = (1u << exponent_bits) - 1, exponent = (uint32_t)(bits >> mantissa_bits) & top;
    bool negative = bits >> (mantissa_bits + exponent_bits) & 1;
    if (exponent == top && mantissa) return mantissa >> (mantissa_bits - 1) ? 1 : 0;
    uint32_t size = exponent == top ? 3 : exponent ? 2 : mantissa ? 1 : 0; /* infinity, normal, denormal, zero */
    return negative ? 5 - size : 6 + size;
}

static uint64_t test_class(const Wave *w, const Insn *i, enum FloatType type) {
    uint32_t tmp[LANES], class_tmp[LANES];
    uint64_t value[LANES], mask = 0;
    const uint32_t *classes = source32(w, i, 1, 0, class_tmp);
    if (type == F64) {
        float_bits64(w, i, 0, value);
    } else {
        const uint32_t *x = type == F16 ? source16f(w, i, 0, tmp) : source32(w, i, 0, 0, tmp);
        uint32_t shift = type == F16 && opsel(i, 0) ? 16 : 0, sign = type == F16 ? 0x8000 : 0x80000000;
        uint32_t keep = i->src[0].mods & MOD_ABS ? ~sign : UINT32_MAX, flip = i->src[0].mods & MOD_NEG ? sign : 0;
        for (int n = 0; n < LANES; n++) value[n] = (x[n] >> shift & keep) ^ flip;
    }
    uint32_t class_shift = type == F16 && opsel(i, 1) ? 16 : 0;
    for (int n = 0; n < LANES; n++) {
        uint32_t is = type == F16   ? float_class(value[n], 10, 5)
                      : type == F32 ? float_class(value[n], 23, 8)
                                    : float_class(value[n], 52, 11);
        mask |= (uint64_t)(classes[n] >> class_shift >> is & 1) << n;
    }
    return mask;
}

/* What an inline float is to a 16-bit integer compare is not documented. */
static bool sources_known(const Insn *i, int type) {
    bool short_int = type == FIRST_INT / INT_OPS + I16 || type == FIRST_INT / INT_OPS + U16;
    for (int k = 0; k < 2; k++) {
        uint16_t code = i->src[k].code;
        if (code >= VGPR0) continue;
        if (!scalar_source_known(i->src[k]) || (short_int && code >= FLOAT_HALF && code <= FLOAT_INV_2PI)) return false;
    }
    return !(i->flags & F_DPP) || dpp_known(i);
}

bool exec_compare(Group *g, Wave *w, const Insn *i) {
    (void)g;
    if (i->op < OP_v_cmp_f_f16 || i->op > OP_v_cmpx_class_f64) return false;
    int place = i->op - OP_v_cmp_f_f16;
    bool writes_exec = place >= OPS;
    if (writes_exec) place -= OPS;
    if (!sources_known(i, place / INT_OPS)) return false;

    uint64_t result;
    if (place < FIRST_INT) result = compare_floats(w, i, place / FLOAT_OPS, place % FLOAT_OPS);
    else if (place < FIRST_CLASS) result = compare_ints(w, i, (place - FIRST_INT) / INT_OPS, place % INT_OPS);
    else result = test_class(w, i, place - FIRST_CLASS);

    result &= lane_mask(w, i);
    write_scalar64(w, i->dst.code == NO_OPERAND ? VCC_LO : i->dst.code, result);
    if (writes_exec) write_scalar64(w, EXEC_LO, result);
    return true;
}
