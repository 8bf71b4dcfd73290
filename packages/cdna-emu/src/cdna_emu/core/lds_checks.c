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
    uint32_t new_copy;         /* the instruction that runs: index + 1 */
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
    c->copy_count = c->new_copy = 0;
}

void lds_checks_barrier(struct LdsChecks *c) { c->epoch++; }

/* The copy of the running instruction, made when its first lane writes. */
static uint32_t running_copy(Group *g, Wave *w, const Insn *i)
{
    struct LdsChecks *c = g->lds_checks;
    if (c->new_copy)
        return c->new_copy;
    if (c->copy_count == c->copy_room) {
        uint32_t room = c->copy_room ? 2 * c->copy_room : 256;
        Copy *grown = realloc(c->copies, room * sizeof *grown);
        if (!grown)
            return 0; /* out of memory: this copy is checked like a plain write */
        c->copies = grown;
        c->copy_room = room;
    }
    c->copies[c->copy_count++] = (Copy){w->id, (uint32_t)(i - g->launch->code), w->checks->vm.issued + 1, 0, 0};
    return c->new_copy = c->copy_count;
}

void copies_issued(Group *g, Wave *w)
{
    struct LdsChecks *c = g->lds_checks;
    struct WaveChecks *k = w->checks;
    if (!c || !c->new_copy)
        return;
    if (k->copy_head)
        c->copies[k->copy_tail - 1].next = c->new_copy;
    else
        k->copy_head = c->new_copy;
    k->copy_tail = c->new_copy;
    c->new_copy = 0;
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

typedef struct {
    Group *g;
    Wave *w;
    const Insn *i;
    uint32_t lane, copy;
    bool store, atomic, same;
} Access;

static void race(const Access *a, uint32_t address, uint32_t insn, uint32_t wave)
{
    report_other(a->g, a->w, a->i, FIND_RACE, a->lane, address, insn, wave);
}

/* The bytes of `mask` in one word. */
static inline void check_word(const Access *a, uint32_t index, uint32_t mask)
{
    struct LdsChecks *c = a->g->lds_checks;
    Word *e = &c->word[index];
    uint32_t me = a->w->id, address = index * 4 + (uint32_t)__builtin_ctz(mask), insn = (uint32_t)(a->i - a->g->launch->code);
    if (__builtin_expect(e->copy != 0, 0) && (e->written & mask)) {
        const Copy *y = &c->copies[e->copy - 1];
        if (!y->done_epoch && a->copy != e->copy)
            report_other(a->g, a->w, a->i, FIND_MISSING_WAIT, a->lane, address, y->insn, y->wave);
        else if (y->done_epoch == c->epoch && y->wave != me)
            race(a, address, y->insn, y->wave);
    }
    if (e->write_epoch == c->epoch) {
        uint32_t other = (e->writers ^ me * 0x01010101u) & BYTES[mask & e->written];
        if (__builtin_expect(other != 0, 0) && !(a->atomic && e->atomic) && !a->same)
            race(a, address, e->write_insn, e->writers >> (__builtin_ctz(other) & 24) & 0xff);
    }
    if (!a->store || a->atomic) {
        if (__builtin_expect((mask & ~e->init) != 0, 0)) {
            report(a->g, a->w, a->i, FIND_UNINIT_LDS, a->lane, address, 0);
            e->init |= mask;
        }
    }
    if (!a->store && !a->atomic) {
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
    if (!a->store)
        return;
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

bool lds_ok(Group *g, Wave *w, const Insn *i, uint32_t lane, uint32_t address, uint32_t bytes, bool store)
{
    if (__builtin_expect(address > g->launch->lds_bytes || bytes > g->launch->lds_bytes - address, 0)) {
        report(g, w, i, FIND_LDS_BOUNDS, lane, address, bytes);
        return false;
    }
    if (!g->lds_checks)
        return true;
    bool atomic = op_infos[i->op].traits & IS_ATOMIC;
    bool same = store && !atomic && !(i->flags & F_TO_LDS) && (w->checks->same_lanes >> lane & 1);
    Access a = {g, w, i, lane, 0, store || atomic, atomic, same};
    if (i->flags & F_TO_LDS)
        a.copy = running_copy(g, w, i);
    if (!((address | bytes) & 3)) {
        for (uint32_t word = address >> 2, end = word + (bytes >> 2); word < end; word++)
            check_word(&a, word, 15);
        return true;
    }
    while (bytes) {
        uint32_t first = address & 3, n = 4 - first < bytes ? 4 - first : bytes;
        check_word(&a, address >> 2, ((1u << n) - 1) << first);
        address += n;
        bytes -= n;
    }
    return true;
}
