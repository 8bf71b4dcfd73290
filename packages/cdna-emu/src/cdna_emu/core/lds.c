/* LDS and lane permutation (ds_*).

   Alignment: plain reads and writes may have any (amdhsa runs in unaligned access mode). Atomics must be aligned to their size,
   transposed reads to 8 bytes (16 for b96), else FIND_MISALIGNED, and the lane reads 0 or writes nothing. */
#include "atomics.h"
#include "checks.h"
#include "core.h"

enum Kind { OTHER = 0, READ, WRITE, READ2, WRITE2, ATOMIC, SWAP2, TRANSPOSED };
enum Place { WHOLE, LOW, HIGH };

typedef struct {
    uint8_t kind, bytes;
    uint8_t place;    /* enum Place; of atomics: enum Rmw; of transposed reads: bits per element */
    bool sign, returns;
    uint16_t stride;  /* of two-address forms: bytes per unit of offset */
} Access;

#define ATOMICS(name, type, size, rmw)                                            \
    case OP_ds_##name##_##type: return (Access){ATOMIC, size, rmw, false, false, 0}; \
    case OP_ds_##name##_rtn_##type: return (Access){ATOMIC, size, rmw, false, true, 0};
#define INTEGERS(size, u, i, b)         \
    ATOMICS(add, u, size, RMW_ADD)      \
    ATOMICS(sub, u, size, RMW_SUB)      \
    ATOMICS(rsub, u, size, RMW_RSUB)    \
    ATOMICS(inc, u, size, RMW_INC)      \
    ATOMICS(dec, u, size, RMW_DEC)      \
    ATOMICS(min, u, size, RMW_UMIN)     \
    ATOMICS(max, u, size, RMW_UMAX)     \
    ATOMICS(min, i, size, RMW_SMIN)     \
    ATOMICS(max, i, size, RMW_SMAX)     \
    ATOMICS(and, b, size, RMW_AND)      \
    ATOMICS(or, b, size, RMW_OR)        \
    ATOMICS(xor, b, size, RMW_XOR)      \
    ATOMICS(mskor, b, size, RMW_MSKOR)  \
    ATOMICS(cmpst, b, size, RMW_CMPSWAP)
#define FLOATS(size, f)                 \
    ATOMICS(add, f, size, RMW_FADD)     \
    ATOMICS(min, f, size, RMW_FMIN)     \
    ATOMICS(max, f, size, RMW_FMAX)     \
    ATOMICS(cmpst, f, size, RMW_FCMPSWAP)
#define TWO(type, size)                                                                             \
    case OP_ds_read2_##type: return (Access){READ2, size, WHOLE, false, true, size};                 \
    case OP_ds_read2st64_##type: return (Access){READ2, size, WHOLE, false, true, 64 * size};        \
    case OP_ds_write2_##type: return (Access){WRITE2, size, WHOLE, false, false, size};              \
    case OP_ds_write2st64_##type: return (Access){WRITE2, size, WHOLE, false, false, 64 * size};     \
    case OP_ds_wrxchg_rtn_##type: return (Access){ATOMIC, size, RMW_SWAP, false, true, 0};           \
    case OP_ds_wrxchg2_rtn_##type: return (Access){SWAP2, size, RMW_SWAP, false, true, size};        \
    case OP_ds_wrxchg2st64_rtn_##type: return (Access){SWAP2, size, RMW_SWAP, false, true, 64 * size};

static Access access_of(uint16_t op)
{
    switch (op) {
    case OP_ds_read_u8: return (Access){READ, 1, WHOLE, false, true, 0};
    case OP_ds_read_i8: return (Access){READ, 1, WHOLE, true, true, 0};
    case OP_ds_read_u16: return (Access){READ, 2, WHOLE, false, true, 0};
    case OP_ds_read_i16: return (Access){READ, 2, WHOLE, true, true, 0};
    case OP_ds_read_u8_d16: return (Access){READ, 1, LOW, false, true, 0};
    case OP_ds_read_u8_d16_hi: return (Access){READ, 1, HIGH, false, true, 0};
    case OP_ds_read_i8_d16: return (Access){READ, 1, LOW, true, true, 0};
    case OP_ds_read_i8_d16_hi: return (Access){READ, 1, HIGH, true, true, 0};
    case OP_ds_read_u16_d16: return (Access){READ, 2, LOW, false, true, 0};
    case OP_ds_read_u16_d16_hi: return (Access){READ, 2, HIGH, false, true, 0};
    case OP_ds_read_b32:
    case OP_ds_read_addtid_b32: return (Access){READ, 4, WHOLE, false, true, 0};
    case OP_ds_read_b64: return (Access){READ, 8, WHOLE, false, true, 0};
    case OP_ds_read_b96: return (Access){READ, 12, WHOLE, false, true, 0};
    case OP_ds_read_b128: return (Access){READ, 16, WHOLE, false, true, 0};
    case OP_ds_write_b8: return (Access){WRITE, 1, WHOLE, false, false, 0};
    case OP_ds_write_b8_d16_hi: return (Access){WRITE, 1, HIGH, false, false, 0};
    case OP_ds_write_b16: return (Access){WRITE, 2, WHOLE, false, false, 0};
    case OP_ds_write_b16_d16_hi: return (Access){WRITE, 2, HIGH, false, false, 0};
    case OP_ds_write_b32:
    case OP_ds_write_addtid_b32: return (Access){WRITE, 4, WHOLE, false, false, 0};
    case OP_ds_write_b64: return (Access){WRITE, 8, WHOLE, false, false, 0};
    case OP_ds_write_b96: return (Access){WRITE, 12, WHOLE, false, false, 0};
    case OP_ds_write_b128: return (Access){WRITE, 16, WHOLE, false, false, 0};
    TWO(b32, 4)
    TWO(b64, 8)
    INTEGERS(4, u32, i32, b32)
    INTEGERS(8, u64, i64, b64)
    FLOATS(4, f32)
    FLOATS(8, f64)
    ATOMICS(pk_add, f16, 4, RMW_PK_F16)
    ATOMICS(pk_add, bf16, 4, RMW_PK_BF16)
    case OP_ds_wrap_rtn_b32: return (Access){ATOMIC, 4, RMW_WRAP, false, true, 0};
    case OP_ds_read_b64_tr_b16: return (Access){TRANSPOSED, 8, 16, false, true, 0};
    case OP_ds_read_b64_tr_b8: return (Access){TRANSPOSED, 8, 8, false, true, 0};
    case OP_ds_read_b96_tr_b6: return (Access){TRANSPOSED, 12, 6, false, true, 0};
    case OP_ds_read_b64_tr_b4: return (Access){TRANSPOSED, 8, 4, false, true, 0};
    default: return (Access){OTHER, 0, 0, false, false, 0};
    }
}

static uint32_t *row_of(Wave *w, Operand o, int r) { return w->vgpr[o.code - VGPR0 + r]; }

static void addresses(Wave *w, const Insn *i, uint32_t offset, uint32_t out[LANES])
{
    if (i->op == OP_ds_read_addtid_b32 || i->op == OP_ds_write_addtid_b32) {
        for (uint32_t l = 0; l < LANES; l++)
            out[l] = (w->sgpr[M0] & 0xffff) + offset + 4 * l;
        return;
    }
    const uint32_t *base = row_of(w, i->src[0], 0);
    for (uint32_t l = 0; l < LANES; l++)
        out[l] = base[l] + offset;
}

/* Lanes that may access `bytes` at their addresses; the request is counted. */
static uint64_t permitted(Group *g, Wave *w, const Insn *i, const uint32_t at[LANES], uint32_t bytes, bool store,
                          uint32_t align, const LdsData *data)
{
    uint64_t mask = exec_mask(w);
    count_lds(g, i, at, mask, bytes);
    for (uint64_t rest = align > 1 ? mask : 0; rest; rest &= rest - 1) {
        uint32_t l = (uint32_t)__builtin_ctzll(rest);
        if (at[l] % align) {
            report(g, w, i, FIND_MISALIGNED, l, at[l], align);
            mask &= ~(1ull << l);
        }
    }
    return lds_request(g, w, i, at, mask, bytes, store, data);
}

/* To the destination from its register `first` on. */
static void read_lds(Group *g, Wave *w, const Insn *i, Access a, const uint32_t at[LANES], int first)
{
    uint64_t mask = exec_mask(w);
    uint64_t good = permitted(g, w, i, at, a.bytes, false, 1, NULL);
    if (a.bytes >= 4) {
        for (uint32_t r = 0; r < a.bytes / 4u; r++) {
            uint32_t *row = row_of(w, i->dst, first + (int)r);
            if (good == UINT64_MAX) {
                for (uint32_t l = 0; l < LANES; l++)
                    memcpy(&row[l], g->lds + at[l] + 4 * r, 4);
                continue;
            }
            for (uint32_t l = 0; l < LANES; l++) {
                uint32_t value = 0;
                if (good >> l & 1)
                    memcpy(&value, g->lds + at[l] + 4 * r, 4);
                if (mask >> l & 1)
                    row[l] = value;
            }
        }
        return;
    }
    uint32_t *row = row_of(w, i->dst, 0);
    for (uint32_t l = 0; l < LANES; l++) {
        if (!(mask >> l & 1))
            continue;
        uint32_t value = 0;
        if (good >> l & 1)
            value = a.bytes == 1 ? g->lds[at[l]] : g->lds[at[l]] | (uint32_t)g->lds[at[l] + 1] << 8;
        if (a.sign)
            value = a.bytes == 1 ? (uint32_t)(int8_t)value : (uint32_t)(int16_t)value;
        if (a.place == LOW)
            value = (row[l] & 0xffff0000) | (value & 0xffff);
        else if (a.place == HIGH)
            value = (row[l] & 0xffff) | value << 16;
        row[l] = value;
    }
}

static void write_lds(Group *g, Wave *w, const Insn *i, Access a, uint32_t offset, int data)
{
    uint32_t at[LANES], bytes = a.bytes < 4 ? a.bytes : 4, shift = a.place == HIGH ? 16 : 0;
    addresses(w, i, offset, at);
    LdsData stored = {(const uint32_t (*)[LANES])row_of(w, i->src[data], 0), shift};
    uint64_t good = permitted(g, w, i, at, a.bytes, true, 1, &stored);
    for (uint32_t r = 0; r < (a.bytes + 3u) / 4; r++) { /* lanes of one address: the highest wins, register by register */
        const uint32_t *row = row_of(w, i->src[data], (int)r);
        if (good == UINT64_MAX && bytes == 4) {
            for (uint32_t l = 0; l < LANES; l++)
                memcpy(g->lds + at[l] + 4 * r, &row[l], 4);
            continue;
        }
        for (uint32_t l = 0; l < LANES; l++) {
            uint32_t value = row[l] >> shift;
            if (!(good >> l & 1))
                continue;
            if (bytes == 4)
                memcpy(g->lds + at[l] + 4 * r, &value, 4);
            else if (bytes == 2)
                memcpy(g->lds + at[l], &value, 2);
            else
                g->lds[at[l]] = (uint8_t)value;
        }
    }
}

static uint64_t operand(Wave *w, Operand o, uint32_t l, uint32_t bytes)
{
    uint64_t value = row_of(w, o, 0)[l];
    return bytes == 8 ? value | (uint64_t)row_of(w, o, 1)[l] << 32 : value;
}

/* Lane by lane in lane order; the old values go to `old`. */
static void atomic(Group *g, Wave *w, const Insn *i, Access a, uint32_t offset, int data, uint64_t old[LANES])
{
    uint32_t at[LANES];
    addresses(w, i, offset, at);
    uint64_t good = permitted(g, w, i, at, a.bytes, true, a.bytes, NULL);
    enum Rmw rmw = a.place;
    bool compares = rmw == RMW_CMPSWAP || rmw == RMW_FCMPSWAP, two = compares || rmw == RMW_MSKOR || rmw == RMW_WRAP;
    for (uint32_t l = 0; l < LANES; l++) {
        old[l] = 0;
        if (!(good >> l & 1))
            continue;
        memcpy(&old[l], g->lds + at[l], a.bytes);
        uint64_t value = operand(w, i->src[data], l, a.bytes), other = two ? operand(w, i->src[data + 1], l, a.bytes) : 0;
        /* data0 of a compare is the comparand, data1 the new value */
        uint64_t fresh = compares ? apply_rmw(rmw, a.bytes, old[l], other, value, w->mode)
                                  : apply_rmw(rmw, a.bytes, old[l], value, other, w->mode);
        memcpy(g->lds + at[l], &fresh, a.bytes);
    }
}

static void write_old(Wave *w, const Insn *i, Access a, int first, const uint64_t old[LANES])
{
    uint64_t mask = exec_mask(w);
    for (int r = 0; r < a.bytes / 4; r++) {
        uint32_t *row = row_of(w, i->dst, first + r);
        for (uint32_t l = 0; l < LANES; l++)
            if (mask >> l & 1)
                row[l] = (uint32_t)(old[l] >> (32 * r));
    }
}

static inline uint32_t element(const uint32_t data[3], uint32_t n, uint32_t bits)
{
    uint32_t at = n * bits, word = at / 32;
    uint64_t pair = data[word] | (word < 2 ? (uint64_t)data[word + 1] << 32 : 0);
    return (uint32_t)(pair >> at % 32) & ((1u << bits) - 1);
}

/* 16 lanes hold a matrix of 16 columns: lane j of them reads elements j*n, j*n + 1, … in row order (n elements per lane). Lane c
   receives column c, row 0 in its lowest bits. That is element c % n of lane r * 16/n + c/n for row r. Inlined, so that the
   divisions are by constants. */
static inline __attribute__((always_inline)) void transpose(Wave *w, const Insn *i, uint32_t data[LANES][3], uint32_t bits,
                                                            uint32_t words)
{
    uint32_t n = 32 * words / bits;
    for (uint32_t l = 0; l < LANES; l++) {
        uint32_t column = l % 16, from = l / 16 * 16 + column / n;
        uint32_t packed[4] = {0};
        for (uint32_t r = 0; r < n; r++) {
            uint64_t value = (uint64_t)element(data[from + r * 16 / n], column % n, bits) << r * bits % 32;
            packed[r * bits / 32] |= (uint32_t)value;
            packed[r * bits / 32 + 1] |= (uint32_t)(value >> 32);
        }
        for (uint32_t r = 0; r < words; r++)
            row_of(w, i->dst, (int)r)[l] = packed[r];
    }
}

static bool read_transposed(Group *g, Wave *w, const Insn *i, Access a)
{
    if (exec_mask(w) != UINT64_MAX) /* undefined in hardware */
        return false;
    uint32_t at[LANES], data[LANES][3] = {{0}};
    addresses(w, i, i->offset & 0xffff, at);
    uint64_t good = permitted(g, w, i, at, a.bytes, false, a.bytes == 12 ? 16 : 8, NULL);
    for (uint32_t l = 0; l < LANES; l++)
        if (good >> l & 1)
            memcpy(data[l], g->lds + at[l], a.bytes);
    switch (a.place) {
    case 16: transpose(w, i, data, 16, 2); break;
    case 8: transpose(w, i, data, 8, 2); break;
    case 6: transpose(w, i, data, 6, 3); break;
    default: transpose(w, i, data, 4, 2); break;
    }
    return true;
}

/* Lane that lane l reads, or -1 in a mode that is not modelled (FFT, from 0xe000 on). */
static int swizzle_source(uint32_t offset, uint32_t l)
{
    if (offset >= 0xe000)
        return -1;
    if (offset >= 0xc000) { /* rotate: bit 10 backwards, 9:5 distance, 4:0 bits of the lane that stay */
        uint32_t keep = offset & 31, distance = offset >> 5 & 31;
        uint32_t turned = offset >> 10 & 1 ? l - distance : l + distance;
        return (int)((l & 32) | (l & keep) | (turned & 31 & ~keep));
    }
    if (offset & 0x8000) /* four lanes: 2 bits each */
        return (int)((l & ~3u) | (offset >> 2 * (l & 3) & 3));
    return (int)((l & 32) | ((((l & 31 & offset) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)) & 31));
}

/* Disabled source lanes give 0. permute pushes (the highest source lane wins), bpermute and swizzle pull. */
static bool permute_lanes(Wave *w, const Insn *i)
{
    uint32_t moved[LANES] = {0}, offset = i->offset & 0xffff;
    uint64_t mask = exec_mask(w);
    const uint32_t *address = row_of(w, i->src[0], 0);
    const uint32_t *data = i->op == OP_ds_swizzle_b32 ? address : row_of(w, i->src[1], 0);
    for (uint32_t l = 0; l < LANES; l++) {
        int other = i->op == OP_ds_swizzle_b32 ? swizzle_source(offset, l) : (int)((address[l] + offset) / 4 % LANES);
        if (other < 0)
            return false;
        if (i->op == OP_ds_permute_b32) {
            if (mask >> l & 1)
                moved[other] = data[l];
        } else if (mask >> other & 1)
            moved[l] = data[other];
    }
    uint32_t *row = row_of(w, i->dst, 0);
    for (uint32_t l = 0; l < LANES; l++)
        if (mask >> l & 1)
            row[l] = moved[l];
    return true;
}

bool exec_lds(Group *g, Wave *w, const Insn *i)
{
    if (i->flags & F_GDS)
        return false;
    Access a = access_of(i->op);
    uint32_t offset = i->offset & 0xffff, offset0 = (i->offset & 0xff) * a.stride, offset1 = (i->offset >> 8 & 0xff) * a.stride;
    uint32_t at[LANES], at2[LANES];
    uint64_t old[LANES], old2[LANES];
    int words = a.bytes / 4;
    switch (a.kind) {
    case READ:
        addresses(w, i, offset, at);
        read_lds(g, w, i, a, at, 0);
        return true;
    case READ2: /* the destination may hold the address */
        addresses(w, i, offset0, at);
        addresses(w, i, offset1, at2);
        read_lds(g, w, i, a, at, 0);
        read_lds(g, w, i, a, at2, words);
        return true;
    case WRITE: write_lds(g, w, i, a, offset, 1); return true;
    case WRITE2:
        write_lds(g, w, i, a, offset0, 1);
        write_lds(g, w, i, a, offset1, 2);
        return true;
    case ATOMIC:
        atomic(g, w, i, a, offset, 1, old);
        if (a.returns)
            write_old(w, i, a, 0, old);
        return true;
    case SWAP2:
        atomic(g, w, i, a, offset0, 1, old);
        atomic(g, w, i, a, offset1, 2, old2);
        write_old(w, i, a, 0, old);
        write_old(w, i, a, words, old2);
        return true;
    case TRANSPOSED: return read_transposed(g, w, i, a);
    default:
        if (i->op == OP_ds_nop)
            return true;
        if (i->op == OP_ds_swizzle_b32 || i->op == OP_ds_permute_b32 || i->op == OP_ds_bpermute_b32)
            return permute_lanes(w, i);
        return false;
    }
}
