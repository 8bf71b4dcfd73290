/* LDS: bounds, races between waves, reads of bytes that nobody wrote, copies from memory that are still under way.

   A workgroup's time is cut into epochs by its barriers. Two accesses to one byte by different waves in one epoch, one of them
   a write, are a race whatever order the waves ran in; atomics do not race with atomics, and a write does not race with a
   write of the same bytes (compilers let several waves store the same value). A copy from memory to LDS counts as
   a write from its request on: until its wave waits for it, any access is a finding, and after that an access by
   another wave needs a barrier behind the wait. */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

/* Half a cache line. */
typedef struct {
    uint64_t readers;       /* bits of waves, 16 for each byte */
    uint32_t write_epoch, read_epoch;
    uint32_t writer;        /* bits of Writer */
    uint32_t read_insn[2];  /* of the last two different waves that read */
    uint16_t writers;       /* wave of each byte, 4 bits for each */
    uint8_t written;        /* bits of bytes */
    uint8_t reader;         /* waves of read_insn, 4 bits for each */
} Word;

/* Instruction that wrote last, or with BY_COPY its index in copies; the bytes that hold a value. */
enum Writer { WRITER = (1 << 25) - 1, INIT_SHIFT = 25, INIT = 15 << INIT_SHIFT, BY_ATOMIC = 1 << 29, BY_COPY = 1 << 30 };

typedef struct { uint32_t wave, insn, ticket, done_epoch, next; } Copy; /* done_epoch 0: under way */

struct LdsChecks {
    uint32_t words, epoch;
    Word *word;
    Copy *copies;
    uint32_t copy_count, copy_room;
};

/* By a mask of bytes: the bits of wave 0 in Word.readers, and all bits of Word.writers. */
static const uint64_t READERS[16] = {
    0x0000000000000000, 0x0000000000000001, 0x0000000000010000, 0x0000000000010001,
    0x0000000100000000, 0x0000000100000001, 0x0000000100010000, 0x0000000100010001,
    0x0001000000000000, 0x0001000000000001, 0x0001000000010000, 0x0001000000010001,
    0x0001000100000000, 0x0001000100000001, 0x0001000100010000, 0x0001000100010001
};
static const uint16_t WRITERS[16] = {
    0x0000, 0x000f, 0x00f0, 0x00ff, 0x0f00, 0x0f0f, 0x0ff0, 0x0fff, 0xf000, 0xf00f, 0xf0f0, 0xf0ff, 0xff00, 0xff0f, 0xfff0, 0xffff
};

/* Waves other than `me` that read one of the bytes of `mask` in this epoch: their bits in Word.readers. */
static inline uint64_t other_readers(const Word *e, uint32_t epoch, uint32_t me, uint32_t mask)
{
    return e->read_epoch == epoch ? e->readers & READERS[mask] * 0xffff & ~(READERS[15] << me) : 0;
}

/* Waves other than `me` that wrote one of the bytes of `mask` in this epoch: bits in these bytes' parts of Word.writers. */
static inline uint32_t other_writers(const Word *e, uint32_t epoch, uint32_t me, uint32_t mask)
{
    return e->write_epoch == epoch ? (e->writers ^ me * 0x1111u) & WRITERS[mask & e->written] : 0;
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

/* A copy that the running instruction starts: index + 1 in copies, or 0 if memory is short: then it is checked as a write. */
static uint32_t new_copy(Group *g, Wave *w, const Insn *i)
{
    struct LdsChecks *c = g->lds_checks;
    struct WaveChecks *k = w->checks;
    if (c->copy_count == WRITER)
        return 0;
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
    uint32_t insn, lane, bytes;
    uint32_t writer;           /* of a store, as Word.writer */
    bool store, atomic;
} Access;

static void race(const Access *a, uint32_t address, uint32_t insn, uint32_t wave)
{
    report_other(a->g, a->w, a->i, FIND_RACE, a->lane, address, insn, wave);
}

/* The lane is about to store what those bytes of a word hold already that others wrote, as other_writers gives them. */
static inline bool stores_same(const Access *a, uint32_t lane, uint32_t index, uint32_t others)
{
    uint32_t held, value;
    int32_t from = (int32_t)(index * 4 - a->at[lane]); /* of the word, in what is stored */
    if (!a->data)
        return false;
    const uint32_t (*rows)[LANES] = a->data->rows;
    if (from <= 0) {
        value = rows[0][lane] >> a->data->shift << -8 * from;
    } else {
        uint32_t row = (uint32_t)from / 4, bits = (uint32_t)from % 4 * 8;
        value = rows[row][lane] >> (a->data->shift + bits);
        if (bits && 4 * (row + 1) < a->bytes)
            value |= rows[row + 1][lane] << (32 - bits);
    }
    memcpy(&held, a->g->lds + index * 4, 4);
    for (held ^= value; others; others >>= 4, held >>= 8)
        if (others & 15 && held & 0xff)
            return false;
    return true;
}

static inline void note_read(Word *e, uint32_t epoch, uint32_t me, uint32_t insn, uint32_t mask)
{
    uint64_t mine = READERS[mask] << me;
    if (e->read_epoch != epoch) {
        e->read_epoch = epoch;
        e->readers = mine;
        e->reader = (uint8_t)me;
    } else {
        e->readers |= mine;
        if ((e->reader & 15) != me) {
            e->reader = (uint8_t)(e->reader << 4 | me);
            e->read_insn[1] = e->read_insn[0];
        }
    }
    e->read_insn[0] = insn;
}

static inline void note_write(Word *e, uint32_t epoch, uint32_t me, uint32_t writer, uint32_t mask)
{
    e->written = (uint8_t)(e->write_epoch == epoch ? e->written | mask : mask);
    e->write_epoch = epoch;
    e->writers = (uint16_t)((e->writers & ~WRITERS[mask]) | (me * 0x1111 & WRITERS[mask]));
    e->writer = writer | (e->writer & INIT) | mask << INIT_SHIFT;
}

static uint32_t writing_insn(const struct LdsChecks *c, const Word *e)
{
    return e->writer & BY_COPY ? c->copies[e->writer & WRITER].insn : e->writer & WRITER;
}

/* The bytes of `mask` in one word. */
static void check_word(const Access *a, uint32_t index, uint32_t mask)
{
    struct LdsChecks *c = a->g->lds_checks;
    Word *e = &c->word[index];
    uint32_t me = a->w->id, address = index * 4 + (uint32_t)__builtin_ctz(mask);
    if (__builtin_expect(e->writer & BY_COPY, 0) && (e->written & mask)) {
        const Copy *y = &c->copies[e->writer & WRITER];
        if (!y->done_epoch && a->writer != (e->writer & ~INIT))
            report_other(a->g, a->w, a->i, FIND_MISSING_WAIT, a->lane, address, y->insn, y->wave);
        else if (y->done_epoch == c->epoch && y->wave != me)
            race(a, address, y->insn, y->wave);
    }
    uint32_t writers = other_writers(e, c->epoch, me, mask);
    if (__builtin_expect(writers != 0, 0) && !(a->atomic && e->writer & BY_ATOMIC) && !stores_same(a, a->lane, index, writers))
        race(a, address, writing_insn(c, e), e->writers >> (__builtin_ctz(writers) & 12) & 15);
    if ((!a->store || a->atomic) && __builtin_expect(mask << INIT_SHIFT & ~e->writer, 0)) {
        report(a->g, a->w, a->i, FIND_UNINIT_LDS, a->lane, address, 0);
        e->writer |= mask << INIT_SHIFT;
    }
    if (!a->store) {
        note_read(e, c->epoch, me, a->insn, mask);
        return;
    }
    if (__builtin_expect(other_readers(e, c->epoch, me, mask) != 0, 0)) {
        bool mine = (e->reader & 15) == me;
        race(a, address, e->read_insn[mine], mine ? e->reader >> 4 : e->reader & 15);
    }
    note_write(e, c->epoch, me, a->writer, mask);
}

/* check_word where nothing is to be reported, the usual case; false: nothing was done. */
static inline bool read_quickly(Word *e, uint32_t epoch, uint32_t me, uint32_t insn, uint32_t mask)
{
    if (__builtin_expect((e->writer ^ INIT) & (BY_COPY | mask << INIT_SHIFT) || other_writers(e, epoch, me, mask), 0))
        return false;
    note_read(e, epoch, me, insn, mask);
    return true;
}

static inline bool write_quickly(const Access *a, uint32_t lane, uint32_t index, uint32_t epoch, uint32_t me, uint32_t insn,
                                 uint32_t mask)
{
    Word *e = &a->g->lds_checks->word[index];
    if (__builtin_expect(e->writer & BY_COPY || other_readers(e, epoch, me, mask), 0))
        return false;
    uint32_t writers = other_writers(e, epoch, me, mask);
    if (writers && !stores_same(a, lane, index, writers))
        return false;
    note_write(e, epoch, me, insn, mask);
    return true;
}

enum Way { READING, WRITING, OTHER }; /* OTHER: atomics and copies */
enum Shape { WORDS, IN_WORD, ANY_SHAPE }; /* whole words; inside one word; neither is known */

static inline __attribute__((always_inline)) void check_lanes(Access *a, uint64_t lanes, uint32_t bytes, enum Shape shape,
                                                              enum Way way)
{
    Word *const word = a->g->lds_checks->word;
    const uint32_t *const at = a->at;
    const uint32_t epoch = a->g->lds_checks->epoch, me = a->w->id, insn = a->insn;
    for (; lanes; lanes &= lanes - 1) {
        uint32_t lane = (uint32_t)__builtin_ctzll(lanes);
        for (uint32_t address = at[lane], end = address + bytes; address < end;) {
            uint32_t first = shape == WORDS ? 0 : address & 3;
            uint32_t n = shape == WORDS ? 4 : shape == IN_WORD || 4 - first > end - address ? end - address : 4 - first;
            uint32_t index = address >> 2, mask = ((1u << n) - 1) << first;
            if (way == READING ? !read_quickly(&word[index], epoch, me, insn, mask)
                               : way == OTHER || !write_quickly(a, lane, index, epoch, me, insn, mask)) {
                a->lane = lane;
                check_word(a, index, mask);
            }
            if (shape == IN_WORD)
                break;
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
    uint32_t insn = (uint32_t)(i - g->launch->code);
    Access a = {.g = g, .w = w, .i = i, .data = data, .at = at, .insn = insn, .bytes = bytes,
                .writer = insn | (atomic ? BY_ATOMIC : 0), .store = store || atomic, .atomic = atomic};
    uint32_t copy = i->flags & F_TO_LDS ? new_copy(g, w, i) : 0;
    if (copy)
        a.writer = (copy - 1) | BY_COPY;
    if (atomic || copy)
        check_lanes(&a, mask, bytes, ANY_SHAPE, OTHER);
    else if (!(low & 3) && store)
        check_lanes(&a, mask, bytes, WORDS, WRITING);
    else if (!(low & 3))
        check_lanes(&a, mask, bytes, WORDS, READING);
    else if (bytes == 1 || (bytes == 2 && !(low & 1)))
        check_lanes(&a, mask, bytes, IN_WORD, store ? WRITING : READING);
    else
        check_lanes(&a, mask, bytes, ANY_SHAPE, store ? WRITING : READING);
    return mask;
}
