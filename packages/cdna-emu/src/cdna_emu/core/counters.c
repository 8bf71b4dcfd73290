/* Known ranges of device memory, and what a request of a whole wave costs. */
#include <string.h>

#include "checks.h"

bool global_ok(Group *g, const Wave *w, const Insn *i, uint32_t lane, uint64_t address, uint32_t bytes, bool store)
{
    const Range *ranges = g->launch->ranges;
    uint32_t low = 0, high = g->launch->range_count; /* the last range that starts at or before the address is low - 1 */
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (ranges[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0 || address >= ranges[low - 1].end || bytes > ranges[low - 1].end - address) {
        report(g, w, i, FIND_GLOBAL_BOUNDS, lane, address, bytes);
        return false;
    }
    if (store && !ranges[low - 1].writable) {
        report(g, w, i, FIND_READ_ONLY, lane, address, bytes);
        return false;
    }
    return true;
}

enum { SLOTS = 512 }; /* 64 lanes of at most 64 bytes touch at most 128 lines */

/* A set of line numbers. */
typedef struct { uint64_t line[SLOTS]; uint32_t count; } Lines;

static void add_line(Lines *s, uint64_t line)
{
    uint32_t at = (uint32_t)((line * 0x9e3779b97f4a7c15ull) >> 55);
    while (s->line[at] != ~0ull) {
        if (s->line[at] == line)
            return;
        at = (at + 1) % SLOTS;
    }
    s->line[at] = line;
    s->count++;
}

static uint32_t scattered_lines(const uint64_t address[LANES], uint64_t mask, uint32_t bytes, int shift)
{
    Lines s;
    for (int k = 0; k < SLOTS; k++)
        s.line[k] = ~0ull;
    s.count = 0;
    for (; mask; mask &= mask - 1) {
        uint64_t at = address[__builtin_ctzll(mask)];
        for (uint64_t line = at >> shift; line <= (at + bytes - 1) >> shift; line++)
            add_line(&s, line);
    }
    return s.count;
}

static uint32_t new_lines(uint64_t first, uint64_t last, uint64_t *end)
{
    if (first < *end)
        first = *end;
    if (first > last)
        return 0;
    *end = last + 1;
    return (uint32_t)(last + 1 - first);
}

static void trace_access(Trace *t, const uint64_t address[LANES], uint64_t mask, uint32_t bytes)
{
    if (t->accesses < t->access_limit) {
        TraceAccess *a = &t->access[t->accesses];
        memcpy(a->address, address, sizeof a->address);
        a->mask = mask;
        a->bytes = bytes;
    }
    t->accesses++;
}

void count_global(Group *g, const Insn *i, const uint64_t address[LANES], uint64_t mask, uint32_t bytes)
{
    Count *n = &g->counts[i - g->launch->code];
    if (!mask || !bytes)
        return;
    if (__builtin_expect(g->launch->trace != NULL, 0))
        trace_access(g->launch->trace, address, mask, bytes);
    uint64_t total = (uint64_t)__builtin_popcountll(mask) * bytes;
    n->bytes += total;
    n->lines64_min += (total + 63) / 64;
    /* Ascending addresses, the usual case, need no set: what lies behind the last line so far is new. */
    uint64_t previous = 0, end64 = 0, end128 = 0; /* one past the last line */
    uint32_t lines64 = 0, lines128 = 0;
    for (uint64_t rest = mask; rest; rest &= rest - 1) {
        uint64_t from = address[__builtin_ctzll(rest)], to = from + bytes - 1;
        if (from < previous) {
            lines64 = scattered_lines(address, mask, bytes, 6);
            lines128 = scattered_lines(address, mask, bytes, 7);
            break;
        }
        previous = from;
        lines64 += new_lines(from >> 6, to >> 6, &end64);
        lines128 += new_lines(from >> 7, to >> 7, &end128);
    }
    n->lines64 += lines64;
    n->lines128 += lines128;
}

/* Lanes side by side, or each dword (`dwords` is 1) in a bank of its own: one cycle. False: it may be more. */
static bool conflict_free(const uint32_t *address, uint64_t part, uint32_t lanes, uint32_t bytes, uint32_t shift, uint32_t banks,
                          uint32_t dwords)
{
    uint32_t gaps = 0;
    for (uint32_t l = 0; l < lanes; l++)
        gaps |= address[l] ^ (address[0] + l * bytes);
    if (!gaps)
        return true;
    if (dwords != 1)
        return false;
    uint64_t seen = 0, again = 0;
    for (; part; part &= part - 1) {
        uint64_t bank = 1ull << (address[__builtin_ctzll(part)] >> shift & (banks - 1));
        again |= seen & bank;
        seen |= bank;
    }
    return !again;
}

/* Dwords that the busiest bank serves; lanes that read the same one count once. */
static uint32_t worst_bank(const uint32_t *address, uint64_t part, uint32_t shift, uint32_t banks, uint32_t dwords)
{
    /* Per bank a list of the dwords that it has served. */
    uint32_t word[64], load[64] = {0}, used = 0, worst = 0;
    uint8_t next[64], head[64];
    memset(head, 0xff, sizeof head);
    for (; part; part &= part - 1) {
        uint32_t at = address[__builtin_ctzll(part)] >> shift;
        for (uint32_t d = 0; d < dwords; d++) {
            uint32_t bank = (at + d) & (banks - 1), k = head[bank];
            while (k != 0xff && word[k] != at + d)
                k = next[k];
            if (k != 0xff)
                continue;
            word[used] = at + d;
            next[used] = head[bank];
            head[bank] = (uint8_t)used++;
            if (++load[bank] > worst)
                worst = load[bank];
        }
    }
    return worst;
}

static bool same_access(const BankCost *known, const uint32_t address[LANES], uint64_t mask, uint32_t bytes)
{
    uint32_t differs = known->start ^ (address[0] & 15);
    if (known->bytes != bytes || known->mask != mask)
        return false;
    for (uint32_t l = 0; l < LANES; l++)
        differs |= known->step[l] ^ (address[l] - address[0]);
    return !differs;
}

/* A cycle serves every bank once, one dword each, and lanes that read the same dword together. Lanes are taken in order, as
   many as fill the banks: 64 of 4 bytes, 32 of 8, 16 of 16 on gfx950 with its 64 banks, half of that on gfx942 with 32. The
   minimum is one cycle for each such group that has an active lane. */
static void bank_cost(BankCost *cost, enum Arch arch, const uint32_t address[LANES], uint64_t mask, uint32_t bytes)
{
    uint32_t banks = arch == GFX950 ? 64 : 32, dwords = bytes > 4 ? (bytes + 3) / 4 : 1;
    uint32_t lanes = banks / (dwords == 3 ? 4 : dwords); /* 12 bytes: as 16 */
    uint32_t shift = 2;
    if (dwords == 2 || dwords == 4) {
        uint32_t low = 0;
        for (uint64_t rest = mask; rest; rest &= rest - 1)
            low |= address[__builtin_ctzll(rest)];
        if (!(low & (4 * dwords - 1))) { /* aligned: as dwords over fewer, wider banks */
            shift = dwords == 2 ? 3 : 4;
            banks /= dwords;
            dwords = 1;
        }
    }
    *cost = (BankCost){.mask = mask, .start = address[0] & 15, .bytes = bytes};
    for (uint32_t l = 0; l < LANES; l++)
        cost->step[l] = address[l] - address[0];
    for (uint32_t first = 0; first < LANES; first += lanes) {
        uint64_t part = mask >> first & (lanes == 64 ? ~0ull : (1ull << lanes) - 1);
        if (!part)
            continue;
        cost->cycles += conflict_free(address + first, part, lanes, bytes, shift, banks, dwords)
                            ? 1 : worst_bank(address + first, part, shift, banks, dwords);
        cost->cycles_min++;
    }
}

void count_lds(Group *g, const Insn *i, const uint32_t address[LANES], uint64_t mask, uint32_t bytes)
{
    uint32_t index = (uint32_t)(i - g->launch->code);
    Count *n = &g->counts[index];
    BankCost fresh = {0}, *cost = g->bank_costs ? &g->bank_costs[index % BANK_COSTS] : &fresh;
    if (!same_access(cost, address, mask, bytes))
        bank_cost(cost, (enum Arch)g->launch->arch, address, mask, bytes);
    n->lds_cycles += cost->cycles;
    n->lds_cycles_min += cost->cycles_min;
    if (!(i->flags & F_TO_LDS)) /* those are counted where they come from */
        n->bytes += (uint64_t)__builtin_popcountll(mask) * bytes;
}
