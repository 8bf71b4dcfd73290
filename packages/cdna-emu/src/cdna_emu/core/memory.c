/* Scalar, buffer, global and flat memory, and vector loads to LDS.

   Alignment: plain accesses may have any (amdhsa runs in unaligned access mode); atomics must be aligned to their size, else
   FIND_MISALIGNED, and nothing is accessed. The parts of scalar addresses lose their two low bits, as in hardware.

   Buffers: with IDXEN and a stride the index is compared with num_records; in all other cases bytes are: component c of an
   access is in range if inst offset + VGPR offset + SGPR offset + 4 c + its size <= num_records, without wrapping. Atomics are
   in or out as a whole. Swizzled buffers and add-thread-id are unsupported.

   Scratch: each lane has memory of its own, addressed from 0. It is kept lane by lane; the counters see it where the hardware has
   it, dwords of the lanes side by side. Flat instructions reach LDS and scratch through their apertures, else global memory.
   Buffer instructions do not reach scratch: on these architectures no compiler lets them. */
#include "atomics.h"
#include "checks.h"

enum Kind { NOT_VECTOR = 0, LOAD, STORE, ATOMIC, NOTHING };
enum Space { BUFFER, GLOBAL, FLAT, SCRATCH };
enum Place { WHOLE, LOW, HIGH }; /* of a sub-dword access: the register, its low or its high half */

typedef struct {
    uint8_t kind, space, bytes, place; /* of atomics: place is enum Rmw */
    bool sign, to_lds;
} Access;

#define LOADS(name, bytes, place, sign)                                        \
    case OP_buffer_load_##name: return (Access){LOAD, BUFFER, bytes, place, sign, false}; \
    case OP_global_load_##name: return (Access){LOAD, GLOBAL, bytes, place, sign, false}; \
    case OP_flat_load_##name: return (Access){LOAD, FLAT, bytes, place, sign, false}; \
    case OP_scratch_load_##name: return (Access){LOAD, SCRATCH, bytes, place, sign, false};
#define STORES(name, bytes, place)                                              \
    case OP_buffer_store_##name: return (Access){STORE, BUFFER, bytes, place, false, false}; \
    case OP_global_store_##name: return (Access){STORE, GLOBAL, bytes, place, false, false}; \
    case OP_flat_store_##name: return (Access){STORE, FLAT, bytes, place, false, false}; \
    case OP_scratch_store_##name: return (Access){STORE, SCRATCH, bytes, place, false, false};
#define ATOMICS(name, bytes, rmw)                                                  \
    case OP_buffer_atomic_##name: return (Access){ATOMIC, BUFFER, bytes, rmw, false, false}; \
    case OP_global_atomic_##name: return (Access){ATOMIC, GLOBAL, bytes, rmw, false, false}; \
    case OP_flat_atomic_##name: return (Access){ATOMIC, FLAT, bytes, rmw, false, false};
#define ATOMICS_BOTH(name, rmw) ATOMICS(name, 4, rmw) ATOMICS(name##_x2, 8, rmw)
#define LDS_LOAD(name, bytes, sign) \
    case OP_global_load_lds_##name: return (Access){LOAD, GLOBAL, bytes, WHOLE, sign, true};

static Access access_of(uint16_t op)
{
    switch (op) {
    LOADS(ubyte, 1, WHOLE, false)
    LOADS(sbyte, 1, WHOLE, true)
    LOADS(ushort, 2, WHOLE, false)
    LOADS(sshort, 2, WHOLE, true)
    LOADS(dword, 4, WHOLE, false)
    LOADS(dwordx2, 8, WHOLE, false)
    LOADS(dwordx3, 12, WHOLE, false)
    LOADS(dwordx4, 16, WHOLE, false)
    LOADS(ubyte_d16, 1, LOW, false)
    LOADS(ubyte_d16_hi, 1, HIGH, false)
    LOADS(sbyte_d16, 1, LOW, true)
    LOADS(sbyte_d16_hi, 1, HIGH, true)
    LOADS(short_d16, 2, LOW, false)
    LOADS(short_d16_hi, 2, HIGH, false)
    STORES(byte, 1, WHOLE)
    STORES(byte_d16_hi, 1, HIGH)
    STORES(short, 2, WHOLE)
    STORES(short_d16_hi, 2, HIGH)
    STORES(dword, 4, WHOLE)
    STORES(dwordx2, 8, WHOLE)
    STORES(dwordx3, 12, WHOLE)
    STORES(dwordx4, 16, WHOLE)
    ATOMICS_BOTH(swap, RMW_SWAP)
    ATOMICS_BOTH(cmpswap, RMW_CMPSWAP)
    ATOMICS_BOTH(add, RMW_ADD)
    ATOMICS_BOTH(sub, RMW_SUB)
    ATOMICS_BOTH(smin, RMW_SMIN)
    ATOMICS_BOTH(umin, RMW_UMIN)
    ATOMICS_BOTH(smax, RMW_SMAX)
    ATOMICS_BOTH(umax, RMW_UMAX)
    ATOMICS_BOTH(and, RMW_AND)
    ATOMICS_BOTH(or, RMW_OR)
    ATOMICS_BOTH(xor, RMW_XOR)
    ATOMICS_BOTH(inc, RMW_INC)
    ATOMICS_BOTH(dec, RMW_DEC)
    ATOMICS(add_f32, 4, RMW_FADD)
    ATOMICS(pk_add_f16, 4, RMW_PK_F16)
    ATOMICS(pk_add_bf16, 4, RMW_PK_BF16)
    ATOMICS(add_f64, 8, RMW_FADD)
    ATOMICS(min_f64, 8, RMW_FMIN)
    ATOMICS(max_f64, 8, RMW_FMAX)
    LDS_LOAD(ubyte, 1, false)
    LDS_LOAD(sbyte, 1, true)
    LDS_LOAD(ushort, 2, false)
    LDS_LOAD(sshort, 2, true)
    LDS_LOAD(dword, 4, false)
    LDS_LOAD(dwordx3, 12, false)
    LDS_LOAD(dwordx4, 16, false)
    case OP_buffer_wbl2:
    case OP_buffer_inv:
    case OP_s_dcache_inv:
    case OP_s_dcache_wb:
    case OP_s_dcache_inv_vol:
    case OP_s_dcache_wb_vol:
        return (Access){NOTHING, GLOBAL, 0, WHOLE, false, false};
    default:
        return (Access){NOT_VECTOR, GLOBAL, 0, WHOLE, false, false};
    }
}

/* What the lanes of a vector instruction ask for. reach[l]: bytes of lane l that may be accessed, from address[l] on;
   `whole` lanes reach all of their bytes. Lanes that are off have any address and no reach. */
typedef struct {
    uint64_t address[LANES];
    uint8_t reach[LANES];
    uint64_t mask, whole;
} Request;

static inline bool on(uint64_t mask, uint32_t lane) { return mask >> lane & 1; }

static uint32_t *row_of(Wave *w, Operand o, int r) { return w->vgpr[o.code - VGPR0 + r]; }

static uint8_t *host(uint64_t address) { return (uint8_t *)(uintptr_t)address; }

static uint32_t scalar_or_zero(const Wave *w, const Insn *i, int k)
{
    return i->src[k].code == NO_OPERAND ? 0 : scalar32(w, i, k);
}

typedef struct {
    uint64_t base;
    uint32_t stride, records;
    bool special; /* swizzled or add-thread-id */
} Buffer;

static Buffer buffer_of(const Wave *w, const Insn *i)
{
    const uint32_t *word = &w->sgpr[i->src[2].code];
    uint32_t stride = word[1] >> 16 & 0x3fff;
    bool swizzle = word[1] >> 31 && stride, add_lane = word[3] >> 23 & 1;
    return (Buffer){word[0] | (uint64_t)(word[1] & 0xffff) << 32, stride, word[2], swizzle || add_lane};
}

static bool buffer_request(Group *g, Wave *w, const Insn *i, Access a, Request *q)
{
    Buffer b = buffer_of(w, i);
    if (b.special)
        return false;
    bool indexed = i->flags & F_IDXEN, structured = indexed && b.stride;
    uint64_t fixed = (uint64_t)(uint32_t)i->offset + scalar_or_zero(w, i, 3);
    const uint32_t *index = structured ? row_of(w, i->src[0], 0) : 0;
    const uint32_t *offset = i->flags & F_OFFEN ? row_of(w, i->src[0], indexed) : 0;
    uint32_t part = a.bytes < 4 || a.kind == ATOMIC ? a.bytes : 4;
    if (structured) {
        for (uint32_t l = 0; l < LANES; l++) {
            q->reach[l] = index[l] < b.records ? a.bytes : 0;
            q->address[l] = b.base + fixed + (offset ? offset[l] : 0) + (uint64_t)b.stride * index[l];
        }
    } else {
        static const uint32_t none[LANES];
        uint64_t last = b.records >= a.bytes ? b.records - a.bytes + 1u : 0; /* from here on some component is out */
        if (!offset)
            offset = none;
        for (uint32_t l = 0; l < LANES; l++) {
            q->reach[l] = fixed + offset[l] < last ? a.bytes : 0;
            q->address[l] = b.base + fixed + offset[l];
        }
        for (uint32_t l = 0; l < LANES; l++) {
            uint64_t at = fixed + offset[l];
            if (at >= last && at < b.records)
                q->reach[l] = (uint8_t)((b.records - at) / part * part);
        }
    }
    if (g->launch->report_buffer_bounds)
        for (uint32_t l = 0; l < LANES; l++)
            if (on(q->mask, l) && q->reach[l] != a.bytes)
                report(g, w, i, FIND_BUFFER_BOUNDS, l, q->address[l] + q->reach[l], a.bytes);
    return true;
}

static void global_request(Wave *w, const Insn *i, Access a, Request *q)
{
    const uint32_t *low = i->src[0].code == NO_OPERAND ? 0 : row_of(w, i->src[0], 0);
    bool scalar_base = i->src[2].code != NO_OPERAND;
    const uint32_t *high = scalar_base ? 0 : row_of(w, i->src[0], 1);
    uint64_t fixed = (uint64_t)(int64_t)i->offset + (scalar_base ? scalar64(w, i, 2) : 0);
    for (uint32_t l = 0; l < LANES; l++)
        q->reach[l] = a.bytes;
    if (high)
        for (uint32_t l = 0; l < LANES; l++)
            q->address[l] = fixed + (low[l] | (uint64_t)high[l] << 32);
    else
        for (uint32_t l = 0; l < LANES; l++)
            q->address[l] = fixed + (low ? low[l] : 0);
}

/* Offsets into the lanes' private memory. */
static void scratch_request(Wave *w, const Insn *i, Request *q)
{
    const uint32_t *offset = i->src[0].code == NO_OPERAND ? 0 : row_of(w, i->src[0], 0);
    uint32_t fixed = (uint32_t)i->offset + scalar_or_zero(w, i, 2);
    for (uint32_t l = 0; l < LANES; l++)
        q->address[l] = fixed + (offset ? offset[l] : 0);
}

/* True if all of [start, end) is in one known range: then no lane needs a search of its own. */
static bool all_inside(const Launch *launch, uint64_t start, uint64_t end, bool store)
{
    uint32_t low = 0, high = launch->range_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (launch->ranges[middle].start <= start)
            low = middle + 1;
        else
            high = middle;
    }
    return low && launch->ranges[low - 1].end >= end && (!store || launch->ranges[low - 1].writable);
}

/* Lanes `local` of a request, whose addresses are offsets into LDS: where that is in this process, or nowhere. */
static void reach_lds(Group *g, Wave *w, const Insn *i, Access a, Request *q, uint64_t local)
{
    uint32_t at[LANES];
    for (uint32_t l = 0; l < LANES; l++)
        at[l] = on(local, l) ? (uint32_t)q->address[l] : 0;
    count_lds(g, i, at, local, a.bytes);
    uint64_t inside = lds_request(g, w, i, at, local, a.bytes, a.kind != LOAD, NULL);
    for (uint32_t l = 0; l < LANES; l++)
        if (on(local, l)) {
            q->address[l] = (uint64_t)(uintptr_t)(g->lds + at[l]);
            q->reach[l] = on(inside, l) ? a.bytes : 0;
        }
}

/* The same of offsets into the lanes' private memory. */
static void reach_scratch(Group *g, Wave *w, const Insn *i, Access a, Request *q, uint64_t local)
{
    uint32_t size = w->scratch_bytes;
    uint64_t row[LANES], inside = 0;
    for (uint32_t l = 0; l < LANES; l++) {
        if (!on(local, l))
            continue;
        uint32_t at = (uint32_t)q->address[l];
        bool ok = at <= size && a.bytes <= size - at;
        if (!ok)
            report(g, w, i, FIND_SCRATCH_BOUNDS, l, at, a.bytes);
        q->reach[l] = ok ? a.bytes : 0;
        q->address[l] = (uint64_t)(uintptr_t)(w->scratch + (size_t)l * size + at);
        inside |= (uint64_t)ok << l;
        row[l] = ((uint64_t)w->id << 40) + (uint64_t)(at / 4) * 4 * LANES + 4 * l + at % 4;
    }
    for (uint32_t done = 0; done < a.bytes; done += 4) {
        count_global(g, i, row, inside, a.bytes < 4 ? a.bytes : 4);
        for (uint32_t l = 0; l < LANES; l++)
            row[l] += 4 * LANES;
    }
    if (!w->scratch_init || !w->checks)
        return;
    for (uint32_t r = 0; r < 4; r++)
        w->checks->scratch_undefined[r] = 0;
    for (uint64_t rest = inside; rest; rest &= rest - 1) {
        uint32_t l = (uint32_t)__builtin_ctzll(rest);
        uint8_t *init = w->scratch_init + (host(q->address[l]) - w->scratch);
        for (uint32_t b = 0; b < a.bytes; b++)
            if (a.kind == LOAD)
                w->checks->scratch_undefined[b / 4] |= (uint64_t)!init[b] << l;
            else
                init[b] = w->vgpr_init[i->src[1].code - VGPR0 + b / 4] >> l & 1;
    }
}

/* Lanes of a flat request that are not in global memory. */
static uint64_t apertures(Group *g, Wave *w, const Insn *i, Access a, Request *q)
{
    uint64_t shared = 0, private = 0;
    for (uint32_t l = 0; l < LANES; l++) {
        shared |= (uint64_t)(q->address[l] >> 32 == SHARED_APERTURE) << l;
        private |= (uint64_t)(q->address[l] >> 32 == PRIVATE_APERTURE) << l;
    }
    if (shared & q->mask)
        reach_lds(g, w, i, a, q, shared & q->mask);
    if (private & q->mask)
        reach_scratch(g, w, i, a, q, private & q->mask);
    return (shared | private) & q->mask;
}

/* Take the reach of lanes that must not access memory away; count the request. Lanes `local` are checked already. */
static void check_request(Group *g, Wave *w, const Insn *i, Access a, Request *q, uint64_t local)
{
    bool store = a.kind != LOAD;
    uint64_t live = 0, start = UINT64_MAX, end = 0;
    for (uint32_t l = 0; l < LANES; l++) {
        uint64_t bit = (uint64_t)1 << l;
        if (!(q->mask & bit))
            q->reach[l] = 0;
        if (!q->reach[l])
            continue;
        if (__builtin_expect((local & bit) != 0, 0)) {
            if (q->reach[l] == a.bytes)
                q->whole |= bit;
            continue;
        }
        live |= bit;
        if (q->reach[l] == a.bytes)
            q->whole |= bit;
        uint64_t first = q->address[l], last = first + q->reach[l];
        start = first < start ? first : start;
        end = last > end ? last : end;
    }
    count_global(g, i, q->address, live, a.bytes);
    if (a.kind == ATOMIC)
        for (uint32_t l = 0; l < LANES; l++)
            if (q->reach[l] && q->address[l] % a.bytes) {
                report(g, w, i, FIND_MISALIGNED, l, q->address[l], a.bytes);
                q->reach[l] = 0;
            }
    if (!live || (end > start && all_inside(g->launch, start, end, store)))
        return;
    for (uint32_t l = 0; l < LANES; l++)
        if (on(live, l) && q->reach[l] && !global_ok(g, w, i, l, q->address[l], q->reach[l], store)) {
            q->reach[l] = 0;
            q->whole &= ~((uint64_t)1 << l);
        }
}

static uint32_t extend(uint32_t value, Access a)
{
    if (a.sign)
        value = a.bytes == 1 ? (uint32_t)(int8_t)value : (uint32_t)(int16_t)value;
    return value;
}

/* Up to a dword at `address`, extended; 0 where `reach` does not include all of it. */
static uint32_t load_part(uint64_t address, uint32_t reach, Access a)
{
    uint32_t value = 0, bytes = a.bytes < 4 ? a.bytes : 4;
    if (reach < bytes)
        return 0;
    if (bytes == 4)
        memcpy(&value, host(address), 4);
    else if (bytes == 2)
        memcpy(&value, host(address), 2);
    else
        value = *host(address);
    return extend(value, a);
}

static void load(Wave *w, const Insn *i, Access a, const Request *q)
{
    for (uint32_t r = 0; r < (a.bytes + 3u) / 4; r++) {
        uint32_t *row = row_of(w, i->dst, (int)r);
        if (a.bytes >= 4 && q->whole == UINT64_MAX) {
            for (uint32_t l = 0; l < LANES; l++)
                memcpy(&row[l], host(q->address[l] + 4 * r), 4);
            continue;
        }
        for (uint32_t l = 0; l < LANES; l++) {
            if (!on(q->mask, l))
                continue;
            uint32_t reach = q->reach[l] > 4 * r ? q->reach[l] - 4 * r : 0;
            uint32_t value = load_part(q->address[l] + 4 * r, reach, a);
            if (a.place == LOW)
                value = (row[l] & 0xffff0000) | (value & 0xffff);
            else if (a.place == HIGH)
                value = (row[l] & 0xffff) | value << 16;
            row[l] = value;
        }
    }
}

/* LDS address: M0 + instruction offset + lane * size; bytes and shorts fill a dword. Lanes out of a buffer's range write 0. */
static void load_to_lds(Group *g, Wave *w, const Insn *i, Access a, const Request *q)
{
    uint32_t at[LANES], size = a.bytes < 4 ? 4 : a.bytes;
    for (uint32_t l = 0; l < LANES; l++)
        at[l] = w->sgpr[M0] + (uint32_t)i->offset + l * size;
    count_lds(g, i, at, q->mask, size);
    uint64_t inside = lds_request(g, w, i, at, q->mask, size, true, NULL);
    for (uint32_t l = 0; l < LANES; l++) {
        if (!on(inside, l))
            continue;
        for (uint32_t r = 0; r < size / 4; r++) {
            uint32_t reach = q->reach[l] > 4 * r ? q->reach[l] - 4 * r : 0;
            uint32_t value = load_part(q->address[l] + 4 * r, reach, a);
            memcpy(g->lds + at[l] + 4 * r, &value, 4);
        }
    }
}

static void store(Wave *w, const Insn *i, Access a, const Request *q)
{
    uint32_t bytes = a.bytes < 4 ? a.bytes : 4, shift = a.place == HIGH ? 16 : 0;
    for (uint32_t r = 0; r < (a.bytes + 3u) / 4; r++) {
        const uint32_t *row = row_of(w, i->src[1], (int)r);
        if (bytes == 4 && q->whole == UINT64_MAX) {
            for (uint32_t l = 0; l < LANES; l++)
                memcpy(host(q->address[l] + 4 * r), &row[l], 4);
            continue;
        }
        for (uint32_t l = 0; l < LANES; l++) {
            if (q->reach[l] < 4 * r + bytes)
                continue;
            uint32_t value = row[l] >> shift;
            uint8_t *to = host(q->address[l] + 4 * r);
            if (bytes == 4)
                memcpy(to, &value, 4);
            else if (bytes == 2)
                memcpy(to, &value, 2);
            else
                *to = (uint8_t)value;
        }
    }
}

/* Workgroups run in several host threads, so these are atomic on the host too. */
static uint64_t atomic_at(uint64_t address, Access a, uint64_t value, uint64_t other)
{
    if (a.bytes == 4) {
        uint32_t *at = (uint32_t *)(void *)host(address), old = __atomic_load_n(at, __ATOMIC_SEQ_CST), fresh;
        do
            fresh = (uint32_t)apply_rmw(a.place, 4, old, value, other, KEEP_DENORMALS);
        while (!__atomic_compare_exchange_n(at, &old, fresh, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        return old;
    }
    uint64_t *at = (uint64_t *)(void *)host(address), old = __atomic_load_n(at, __ATOMIC_SEQ_CST), fresh;
    do
        fresh = apply_rmw(a.place, 8, old, value, other, KEEP_DENORMALS);
    while (!__atomic_compare_exchange_n(at, &old, fresh, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

static uint64_t gather(Wave *w, Operand o, int r, uint32_t l, uint32_t bytes)
{
    uint64_t value = row_of(w, o, r)[l];
    return bytes == 8 ? value | (uint64_t)row_of(w, o, r + 1)[l] << 32 : value;
}

static void atomic(Wave *w, const Insn *i, Access a, const Request *q)
{
    bool wide = a.bytes == 8, returns = i->flags & F_SC0 && i->dst.code != NO_OPERAND;
    for (uint32_t l = 0; l < LANES; l++) {
        if (!on(q->mask, l))
            continue;
        uint64_t value = gather(w, i->src[1], 0, l, a.bytes);
        uint64_t other = a.place == RMW_CMPSWAP ? gather(w, i->src[1], wide ? 2 : 1, l, a.bytes) : 0;
        uint64_t old = q->reach[l] ? atomic_at(q->address[l], a, value, other) : 0;
        if (!returns)
            continue;
        row_of(w, i->dst, 0)[l] = (uint32_t)old;
        if (wide)
            row_of(w, i->dst, 1)[l] = (uint32_t)(old >> 32);
    }
}

static void scalar_load(Group *g, Wave *w, const Insn *i, uint64_t address, uint32_t dwords, uint32_t reach)
{
    uint64_t at[LANES] = {address};
    count_global(g, i, at, reach != 0, 4 * reach);
    bool ok = reach && (all_inside(g->launch, address, address + 4 * reach, false) ||
                        global_ok(g, w, i, 0, address, 4 * reach, false));
    for (uint32_t r = 0; r < dwords; r++) {
        uint32_t value = 0;
        if (ok && r < reach)
            memcpy(&value, host(address + 4 * r), 4);
        write_scalar32(w, (uint16_t)(i->dst.code + r), value);
    }
}

/* The two low bits of each part of a scalar address count as 0. */
static uint64_t scalar_offset(const Wave *w, const Insn *i)
{
    return ((uint64_t)(int64_t)i->offset & ~(uint64_t)3) + (scalar_or_zero(w, i, 3) & ~3u);
}

static bool scalar_buffer_load(Group *g, Wave *w, const Insn *i, uint32_t dwords)
{
    Buffer b = buffer_of(w, i);
    uint64_t size = b.stride ? (uint64_t)b.stride * b.records : b.records;
    uint64_t offset = scalar_offset(w, i);
    uint64_t room = offset < size ? (size - offset) / 4 : 0;
    uint32_t reach = room < dwords ? (uint32_t)room : dwords;
    uint64_t address = (b.base & ~(uint64_t)3) + offset;
    if (reach != dwords && g->launch->report_buffer_bounds)
        report(g, w, i, FIND_BUFFER_BOUNDS, 0, address + 4 * reach, 4 * dwords);
    scalar_load(g, w, i, address, dwords, reach);
    return true;
}

static bool scalar_memory(Group *g, Wave *w, const Insn *i)
{
    uint32_t dwords;
    switch (i->op) {
    case OP_s_load_dword: dwords = 1; break;
    case OP_s_load_dwordx2: dwords = 2; break;
    case OP_s_load_dwordx4: dwords = 4; break;
    case OP_s_load_dwordx8: dwords = 8; break;
    case OP_s_load_dwordx16: dwords = 16; break;
    case OP_s_buffer_load_dword: return scalar_buffer_load(g, w, i, 1);
    case OP_s_buffer_load_dwordx2: return scalar_buffer_load(g, w, i, 2);
    case OP_s_buffer_load_dwordx4: return scalar_buffer_load(g, w, i, 4);
    case OP_s_buffer_load_dwordx8: return scalar_buffer_load(g, w, i, 8);
    case OP_s_buffer_load_dwordx16: return scalar_buffer_load(g, w, i, 16);
    case OP_s_memtime: /* no clock: the wave's executed instructions, so that runs repeat */
    case OP_s_memrealtime: write_scalar64(w, i->dst.code, w->executed); return true;
    default: return false;
    }
    scalar_load(g, w, i, (scalar64(w, i, 2) & ~(uint64_t)3) + scalar_offset(w, i), dwords, dwords);
    return true;
}

bool exec_memory(Group *g, Wave *w, const Insn *i)
{
    Access a = access_of(i->op);
    if (a.kind == NOTHING)
        return true;
    if (a.kind == NOT_VECTOR)
        return scalar_memory(g, w, i);
    if (i->flags & F_TO_LDS) {
        if (a.kind != LOAD || a.place != WHOLE || (a.bytes > 4 && g->launch->arch != GFX950))
            return false;
        a.to_lds = true;
    }
    Request q = {.mask = exec_mask(w)};
    uint64_t local = 0;
    if (a.space == SCRATCH) {
        scratch_request(w, i, &q);
        local = q.mask;
        reach_scratch(g, w, i, a, &q, local);
    } else if (a.space != BUFFER) {
        global_request(w, i, a, &q);
        if (a.space == FLAT)
            local = apertures(g, w, i, a, &q);
    } else if (!buffer_request(g, w, i, a, &q))
        return false;
    check_request(g, w, i, a, &q, local);
    if (a.to_lds)
        load_to_lds(g, w, i, a, &q);
    else if (a.kind == LOAD)
        load(w, i, a, &q);
    else if (a.kind == STORE)
        store(w, i, a, &q);
    else
        atomic(w, i, a, &q);
    return true;
}
