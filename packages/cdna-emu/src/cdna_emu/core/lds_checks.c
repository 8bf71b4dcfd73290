/* LDS: bounds, races between waves, reads of bytes that nobody wrote, copies from memory that are still under way.

   A workgroup's time is cut into epochs by its barriers. Two accesses to one byte by different waves in one epoch, one of them
   a write, are a race whatever order the waves ran in; atomics do not race with atomics, and a write does not race with a
   write of the same bytes (compilers let several waves store the same value). A copy from memory to LDS counts as
   a write from its request on: until its wave waits for it, any access is a finding, and after that an access by
   another wave needs a barrier behind the wait. */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

typedef struct {
    uint32_t write_epoch, read_epoch;
    uint32_t writers;          /* wave of each byte */
    uint32_t write_insn, copy; /* copy: index + 1 in copies, 0: none */
    uint64_t readers;          /* bits of waves, 16 for each byte */
    uint32_t read_insn[2];     /* of the last two different waves that read */
    uint8_t reader[2], written, init, atomic;
} Word;

typedef struct { uint32_t wave, insn, ticket, done_epoch, next; } Copy; /* done_epoch 0: under way */

struct LdsChecks {
    uint32_t words, epoch;
    Word *word;
    Copy *copies;
    uint32_t copy_count, copy_room;
};

static const uint32_t BYTES[16] = {
    0, 0xff, 0xff00, 0xffff, 0xff0000, 0xff00ff, 0xffff00, 0xffffff,
    0xff000000, 0xff0000ff, 0xff00ff00, 0xff00ffff, 0xffff0000, 0xffff00ff, 0xffffff00, 0xffffffff
};

static inline uint64_t halves(uint32_t mask) /* 16 bits for each byte of a 4-bit mask */
{
    uint64_t all = 0xffff;
    if (mask == 15)
        return ~0ull;
    return (mask & 1 ? all : 0) | (mask & 2 ? all << 16 : 0) | (mask & 4 ? all << 32 : 0) | (mask & 8 ? all << 48 : 0);
}

struct LdsChecks *lds_checks_new(uint32_t lds_bytes)
{
    struct LdsChecks *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->words = (lds_bytes + 3) / 4;
    c->word = calloc(c->words + 1, sizeof *c->word);
    if (!c->word) {
        free(c);
        return NULL;
    }
    return c;
}

void lds_checks_free(struct LdsChecks *c)
{
    if (!c)
        return;
    free(c->word);
    free(c->copies);
    free(c);
}

void lds_checks_start(struct LdsChecks *c)
{
    memset(c->word, 0, c->words * sizeof *c->word);
    c->epoch = 1;
    c->copy_count = 0;
}

void lds_checks_barrier(struct LdsChecks *c) { c->epoch++; }

/* A copy that the running instruction starts: 0 if memory is short, and it is checked like a plain write. */
static uint32_t new_copy(Group *g, Wave *w, const Insn *i)
{
    struct LdsChecks *c = g->lds_checks;
    struct WaveChecks *k = w->checks;
    if (c->copy_count == c->copy_room) {
        uint32_t room = c->copy_room ? 2 * c->copy_room : 256;
        Copy *grown = realloc(c->copies, room * sizeof *grown);
        if (!grown)
            return 0;
        c->copies = grown;
        c->copy_room = room;
    }
    c->copies[c->copy_count++] = (Copy){w->id, (uint32_t)(i - g->launch->code), k->vm.issued + 1, 0, 0};
    if (k->copy_head)
        c->copies[k->copy_tail - 1].next = c->copy_count;
    else
        k->copy_head = c->copy_count;
    return k->copy_tail = c->copy_count;
}

void copies_complete(Group *g, Wave *w)
{
    struct LdsChecks *c = g->lds_checks;
    struct WaveChecks *k = w->checks;
    while (k->copy_head && (int32_t)(k->vm.done - c->copies[k->copy_head - 1].ticket) >= 0) {
        c->copies[k->copy_head - 1].done_epoch = c->epoch;
        k->copy_head = c->copies[k->copy_head - 1].next;
    }
}

/* What a request of a wave shares. */
typedef struct {
    Group *g;
    Wave *w;
    const Insn *i;
    const LdsData *data;       /* of a store */
    const uint32_t *at;
    uint32_t insn, lane, copy;
    bool store, atomic;
} Access;

static void race(const Access *a, uint32_t address, uint32_t insn, uint32_t wave)
{
    report_other(a->g, a->w, a->i, FIND_RACE, a->lane, address, insn, wave);
}

/* The lane is about to store what the bytes of `mask` hold already. */
static bool stores_same(const Access *a, uint32_t index, uint32_t mask)
{
    if (!a->data)
        return false;
    for (; mask; mask &= mask - 1) {
        uint32_t address = index * 4 + (uint32_t)__builtin_ctz(mask), byte = address - a->at[a->lane];
        uint32_t value = a->data->rows[byte / 4][a->lane] >> (a->data->shift + byte % 4 * 8);
        if (a->g->lds[address] != (uint8_t)value)
            return false;
    }
    return true;
}

/* The bytes of `mask` in one word. */
static void check_word(const Access *a, uint32_t index, uint32_t mask)
{
    struct LdsChecks *c = a->g->lds_checks;
    Word *e = &c->word[index];
    uint32_t me = a->w->id, address = index * 4 + (uint32_t)__builtin_ctz(mask), insn = a->insn;
    if (__builtin_expect(e->copy != 0, 0) && (e->written & mask)) {
        const Copy *y = &c->copies[e->copy - 1];
        if (!y->done_epoch && a->copy != e->copy)
            report_other(a->g, a->w, a->i, FIND_MISSING_WAIT, a->lane, address, y->insn, y->wave);
        else if (y->done_epoch == c->epoch && y->wave != me)
            race(a, address, y->insn, y->wave);
    }
    if (e->write_epoch == c->epoch) {
        uint32_t other = (e->writers ^ me * 0x01010101u) & BYTES[mask & e->written];
        if (__builtin_expect(other != 0, 0) && !(a->atomic && e->atomic) && !stores_same(a, index, mask & e->written))
            race(a, address, e->write_insn, e->writers >> (__builtin_ctz(other) & 24) & 0xff);
    }
    if (!a->store || a->atomic) {
        if (__builtin_expect((mask & ~e->init) != 0, 0)) {
            report(a->g, a->w, a->i, FIND_UNINIT_LDS, a->lane, address, 0);
            e->init |= mask;
        }
    }
    if (!a->store) {
        if (e->read_epoch != c->epoch) {
            e->read_epoch = c->epoch;
            e->readers = 0;
        } else if (e->reader[0] != me) {
            e->reader[1] = e->reader[0];
            e->read_insn[1] = e->read_insn[0];
        }
        e->readers |= halves(mask) & 0x0001000100010001ull << me;
        e->reader[0] = (uint8_t)me;
        e->read_insn[0] = insn;
        return;
    }
    if (e->read_epoch == c->epoch) {
        uint64_t others = e->readers & halves(mask) & ~(0x0001000100010001ull << me);
        if (__builtin_expect(others != 0, 0)) {
            int which = e->reader[0] == me;
            race(a, address, e->read_insn[which], e->reader[which]);
        }
    }
    if (e->write_epoch != c->epoch) {
        e->write_epoch = c->epoch;
        e->written = 0;
    }
    e->writers = (e->writers & ~BYTES[mask]) | (me * 0x01010101u & BYTES[mask]);
    e->written |= mask;
    e->init |= mask;
    e->write_insn = insn;
    e->atomic = a->atomic;
    e->copy = a->copy;
}

/* check_word where nothing is to be reported, the usual case; false: nothing was done. */
static inline bool read_quickly(Word *e, uint32_t epoch, uint32_t me, uint32_t insn, uint32_t mask)
{
    if (__builtin_expect(e->copy || (mask & ~e->init) || (e->write_epoch == epoch && e->writers != me * 0x01010101u), 0))
        return false;
    uint64_t mine = halves(mask) & 0x0001000100010001ull << me;
    if (e->read_epoch != epoch) {
        e->read_epoch = epoch;
        e->readers = mine;
    } else {
        e->readers |= mine;
        if (e->reader[0] != me) {
            e->reader[1] = e->reader[0];
            e->read_insn[1] = e->read_insn[0];
        }
    }
    e->reader[0] = (uint8_t)me;
    e->read_insn[0] = insn;
    return true;
}

static inline bool write_quickly(Word *e, uint32_t epoch, uint32_t me, uint32_t insn, uint32_t mask)
{
    uint32_t writers = me * 0x01010101u;
    if (__builtin_expect(e->copy || (e->write_epoch == epoch && e->writers != writers)
                             || (e->read_epoch == epoch && (e->readers & ~(0x0001000100010001ull << me))), 0))
        return false;
    e->written = (uint8_t)(e->write_epoch == epoch ? e->written | mask : mask);
    e->write_epoch = epoch;
    e->writers = writers; /* of the bytes that are not `written` too: nobody looks at those */
    e->init |= mask;
    e->write_insn = insn;
    e->atomic = false;
    return true;
}

enum Way { READING, WRITING, OTHER }; /* OTHER: atomics and copies */

static inline __attribute__((always_inline)) void check_lanes(Access *a, uint64_t lanes, uint32_t bytes, bool words, enum Way way)
{
    Word *const word = a->g->lds_checks->word;
    const uint32_t *const at = a->at;
    const uint32_t epoch = a->g->lds_checks->epoch, me = a->w->id, insn = a->insn;
    for (; lanes; lanes &= lanes - 1) {
        uint32_t lane = (uint32_t)__builtin_ctzll(lanes);
        for (uint32_t address = at[lane], end = address + bytes; address < end;) {
            uint32_t first = words ? 0 : address & 3, n = words ? 4 : 4 - first < end - address ? 4 - first : end - address;
            uint32_t index = address >> 2, mask = ((1u << n) - 1) << first;
            if (way == READING ? !read_quickly(&word[index], epoch, me, insn, mask)
                               : way == OTHER || !write_quickly(&word[index], epoch, me, insn, mask)) {
                a->lane = lane;
                check_word(a, index, mask);
            }
            address += n;
        }
    }
}

uint64_t lds_request(Group *g, Wave *w, const Insn *i, const uint32_t at[LANES], uint64_t mask, uint32_t bytes, bool store,
                     const LdsData *data)
{
    uint32_t limit = g->launch->lds_bytes, outside = 0, low = bytes;
    for (uint32_t l = 0; l < LANES; l++) { /* of the lanes that are off too: their addresses seldom mislead */
        outside |= at[l] > limit - bytes;
        low |= at[l];
    }
    if (__builtin_expect(outside || limit < bytes, 0))
        for (uint64_t rest = mask; rest; rest &= rest - 1) {
            uint32_t lane = (uint32_t)__builtin_ctzll(rest);
            if (limit < bytes || at[lane] > limit - bytes) {
                report(g, w, i, FIND_LDS_BOUNDS, lane, at[lane], bytes);
                mask &= ~(1ull << lane);
            }
        }
    if (!g->lds_checks || !mask)
        return mask;
    bool atomic = op_infos[i->op].traits & IS_ATOMIC;
    Access a = {.g = g, .w = w, .i = i, .data = data, .at = at,
                .insn = (uint32_t)(i - g->launch->code), .store = store || atomic, .atomic = atomic};
    if (i->flags & F_TO_LDS)
        a.copy = new_copy(g, w, i);
    if (atomic || a.copy)
        check_lanes(&a, mask, bytes, false, OTHER);
    else if (low & 3)
        check_lanes(&a, mask, bytes, false, store ? WRITING : READING);
    else if (store)
        check_lanes(&a, mask, bytes, true, WRITING);
    else
        check_lanes(&a, mask, bytes, true, READING);
    return mask;
}
