/* Arithmetic of read-modify-write instructions, shared by LDS and global memory. */
#ifndef CDNA_EMU_ATOMICS_H
#define CDNA_EMU_ATOMICS_H

#include "floats.h"

enum Rmw {
    RMW_ADD, RMW_SUB, RMW_RSUB, RMW_SMIN, RMW_SMAX, RMW_UMIN, RMW_UMAX, RMW_AND, RMW_OR, RMW_XOR, RMW_INC, RMW_DEC, RMW_SWAP,
    RMW_CMPSWAP, RMW_FADD, RMW_FMIN, RMW_FMAX, RMW_FCMPSWAP, RMW_PK_F16, RMW_PK_BF16, RMW_MSKOR, RMW_WRAP
};

/* FLOAT_MODE denormal fields in which nothing is flushed. */
enum { KEEP_DENORMALS = 0xf0 };

/* `field` has two bits: 1 keeps denormal inputs, 2 denormal results. */
static inline uint32_t flush32(uint32_t bits, bool keep) { return keep || bits & 0x7f800000 ? bits : bits & 0x80000000; }
static inline uint64_t flush64(uint64_t bits, bool keep)
{
    return keep || bits & 0x7ff0000000000000 ? bits : bits & 0x8000000000000000;
}

static inline uint32_t float_rmw32(enum Rmw op, uint32_t old, uint32_t value, uint32_t other, uint32_t mode)
{
    bool keep_inputs = mode >> 4 & 1, keep_results = mode >> 5 & 1;
    float a = f32_of_bits(flush32(old, keep_inputs)), b = f32_of_bits(flush32(value, keep_inputs));
    switch (op) {
    case RMW_FADD: return flush32(bits_of_f32(a + b), keep_results);
    case RMW_FMIN: return b < a ? value : old;
    case RMW_FMAX: return b > a ? value : old;
    default: return a == f32_of_bits(flush32(other, keep_inputs)) ? value : old; /* RMW_FCMPSWAP */
    }
}

static inline uint64_t float_rmw64(enum Rmw op, uint64_t old, uint64_t value, uint64_t other, uint32_t mode)
{
    bool keep_inputs = mode >> 6 & 1, keep_results = mode >> 7 & 1;
    double a = f64_of_bits(flush64(old, keep_inputs)), b = f64_of_bits(flush64(value, keep_inputs));
    switch (op) {
    case RMW_FADD: return flush64(bits_of_f64(a + b), keep_results);
    case RMW_FMIN: return b < a ? value : old;
    case RMW_FMAX: return b > a ? value : old;
    default: return a == f64_of_bits(flush64(other, keep_inputs)) ? value : old;
    }
}

static inline uint32_t packed_add(enum Rmw op, uint32_t a, uint32_t b)
{
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        uint16_t x = (uint16_t)(a >> shift), y = (uint16_t)(b >> shift);
        uint16_t sum = op == RMW_PK_F16 ? f16_from_f32(f32_from_f16(x) + f32_from_f16(y))
                                        : bf16_from_f32(f32_from_bf16(x) + f32_from_bf16(y));
        result |= (uint32_t)sum << shift;
    }
    return result;
}

/* New memory value. `bytes` is 4 or 8; 32-bit values come zero extended. `other` is the comparand of a compare and swap, the
   bits to set of MSKOR, the addend of WRAP. */
static inline uint64_t apply_rmw(enum Rmw op, uint32_t bytes, uint64_t old, uint64_t value, uint64_t other, uint32_t mode)
{
    bool wide = bytes == 8;
    uint64_t mask = wide ? UINT64_MAX : UINT32_MAX;
    int64_t signed_old = wide ? (int64_t)old : (int32_t)old, signed_value = wide ? (int64_t)value : (int32_t)value;
    switch (op) {
    case RMW_ADD: return (old + value) & mask;
    case RMW_SUB: return (old - value) & mask;
    case RMW_RSUB: return (value - old) & mask;
    case RMW_SMIN: return signed_value < signed_old ? value : old;
    case RMW_SMAX: return signed_value > signed_old ? value : old;
    case RMW_UMIN: return value < old ? value : old;
    case RMW_UMAX: return value > old ? value : old;
    case RMW_AND: return old & value;
    case RMW_OR: return old | value;
    case RMW_XOR: return old ^ value;
    case RMW_INC: return old >= value ? 0 : old + 1;
    case RMW_DEC: return old == 0 || old > value ? value : old - 1;
    case RMW_SWAP: return value;
    case RMW_CMPSWAP: return old == other ? value : old;
    case RMW_MSKOR: return (old & ~value) | other;
    case RMW_WRAP: return (old >= value ? old - value : old + other) & mask;
    case RMW_PK_F16:
    case RMW_PK_BF16: return packed_add(op, (uint32_t)old, (uint32_t)value);
    default:
        return wide ? float_rmw64(op, old, value, other, mode)
                    : float_rmw32(op, (uint32_t)old, (uint32_t)value, (uint32_t)other, mode);
    }
}

#endif
