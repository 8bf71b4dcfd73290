/* Workgroups, waves, barriers: what a compute unit does around the instructions.

   Waves run one after the other from barrier to barrier. A barrier opens when every wave of the workgroup that has not ended
   waits at one; which s_barrier each of them waits at does not matter to the hardware, and neither does it here. A wave
   that ended while others still wait at a barrier is legal to the hardware too, but no kernel language allows it:
   it is reported (FIND_BARRIER) and the others go on. */
#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum {
    POISON = 0x7fc17fc1 /* NaN as f32, f16 and bf16: what registers and LDS hold before a program writes them */
};

static bool exec_control(Group *g, Wave *w, const Insn *i)
{
    (void)g;
    if (i->op == OP_s_barrier)
        w->status = AT_BARRIER;
    else if (i->op == OP_s_endpgm)
        w->status = ENDED;
    return true; /* the others do nothing that a program could see */
}

static bool (*const UNITS[])(Group *, Wave *, const Insn *) = {
    [SALU] = exec_salu, [SMEM] = exec_memory, [VALU] = exec_valu, [VMEM] = exec_memory,
    [LDS_UNIT] = exec_lds, [MFMA] = exec_mfma, [CTRL] = exec_control
};

static bool fail(Group *g, Wave *w, const Insn *i, uint32_t kind)
{
    report(g, w, i, kind, WHOLE_WAVE, 0, NO_OPERAND);
    w->status = FAILED;
    return false;
}

/* One instruction; false: the wave failed. */
static inline bool execute(Group *g, Wave *w, const Insn *i, Count *n)
{
    uint64_t active = exec_mask(w);
    n->executed++;
    n->lanes += active == ~0ull ? 64 : (uint32_t)__builtin_popcountll(active);
    w->executed++;
    w->pc++;
    if (__builtin_expect(i->op >= OP_COUNT || !(op_infos[i->op].archs & 1u << g->launch->arch), 0))
        return fail(g, w, i, FIND_UNSUPPORTED);
    if (w->checks) {
        before_insn(g, w, i);
        if (__builtin_expect(!UNITS[op_infos[i->op].unit](g, w, i), 0))
            return fail(g, w, i, FIND_UNSUPPORTED);
        after_insn(g, w, i);
        return true;
    }
    return UNITS[op_infos[i->op].unit](g, w, i) || fail(g, w, i, FIND_UNSUPPORTED);
}

static void execute_traced(Group *g, Wave *w, const Insn *i, Count *n)
{
    Trace *t = g->launch->trace;
    uint64_t cycles = n->lds_cycles, accesses = t->accesses;
    execute(g, w, i, n);
    if (t->events < t->event_limit)
        t->event[t->events] = (TraceEvent){(uint32_t)(i - g->launch->code), w->id,
                                           t->accesses > accesses ? (uint32_t)accesses + 1 : 0, (uint32_t)(n->lds_cycles - cycles)};
    t->events++;
}

/* Until the next barrier, the end, or a failure. */
static void run_wave(Group *g, Wave *w)
{
    const Launch *launch = g->launch;
    while (w->status == RUNNING) {
        if (w->pc >= launch->code_count) { /* ran off the end, or branched to where no instruction is */
            fail(g, w, &launch->code[launch->code_count - 1], FIND_UNSUPPORTED);
            return;
        }
        if (w->executed >= launch->budget) {
            fail(g, w, &launch->code[w->pc], FIND_BUDGET);
            return;
        }
        if (__builtin_expect(launch->trace != NULL, 0))
            execute_traced(g, w, &launch->code[w->pc], &g->counts[w->pc]);
        else
            execute(g, w, &launch->code[w->pc], &g->counts[w->pc]);
    }
}

typedef struct { uint32_t vgprs, agprs; } Used;

static void use(Used *u, const Operand *o)
{
    if (o->code == NO_OPERAND || o->code < VGPR0)
        return;
    uint32_t end = (uint32_t)o->code + o->count, *most = o->code < AGPR0 ? &u->vgprs : &u->agprs;
    end -= o->code < AGPR0 ? VGPR0 : AGPR0;
    if (end > VGPRS / 2)
        end = VGPRS / 2;
    if (end > *most)
        *most = end;
}

/* Vector registers that the code names: only they need to be set before a workgroup. */
static Used registers_used(const Launch *launch)
{
    Used u = {1, 0};
    for (uint32_t k = 0; k < launch->code_count; k++) {
        const Insn *i = &launch->code[k];
        use(&u, &i->dst);
        for (int s = 0; s < i->sources && s < 4; s++)
            use(&u, &i->src[s]);
    }
    return u;
}

static void poison(uint32_t *values, size_t count)
{
    for (size_t k = 0; k < count; k++)
        values[k] = POISON;
}

static void set_sgpr(Wave *w, uint32_t code, uint32_t value)
{
    w->sgpr[code] = value;
    w->sgpr_init[code >> 6] |= 1ull << (code & 63);
}

static void start_wave(const Group *g, Wave *w, uint32_t id, const Setup *setup, Used used)
{
    poison(w->sgpr, SGPRS);
    poison(w->vgpr[0], (size_t)used.vgprs * LANES);
    poison(w->vgpr[VGPRS / 2], (size_t)used.agprs * LANES);
    memset(w->vgpr_init, 0, sizeof w->vgpr_init);
    memset(w->sgpr_init, 0, sizeof w->sgpr_init);
    w->scc = w->pc = w->status = 0;
    w->executed = 0;
    w->mode = setup->mode;
    w->id = id;
    uint32_t code = 0;
    for (; code < setup->user_sgprs; code++)
        set_sgpr(w, code, setup->user_sgpr[code]);
    for (int d = 0; d < 3; d++)
        if (setup->workgroup_id[d])
            set_sgpr(w, code++, g->id[d]);
    uint32_t bx = setup->block[0], by = setup->block[1], threads = bx * by * setup->block[2];
    uint64_t lanes = 0;
    for (uint32_t l = 0; l < LANES; l++) {
        uint32_t n = id * LANES + l;
        if (n >= threads)
            break;
        uint32_t x = n % bx, y = n / bx % by, z = n / bx / by;
        w->vgpr[0][l] = x | (setup->workitem_id > 0 ? y << 10 : 0) | (setup->workitem_id > 1 ? z << 20 : 0);
        lanes |= 1ull << l;
    }
    w->vgpr_init[0] = lanes;
    set_sgpr(w, EXEC_LO, (uint32_t)lanes);
    set_sgpr(w, EXEC_HI, (uint32_t)(lanes >> 32));
    if (w->checks)
        wave_checks_start(w->checks);
}

static uint32_t random_below(uint64_t *state, uint32_t bound)
{
    *state += 0x9e3779b97f4a7c15ull; /* splitmix64 */
    uint64_t z = *state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (uint32_t)((z ^ z >> 31) % bound);
}

static void wave_order(const Launch *launch, uint64_t *state, uint32_t order[MAX_WAVES])
{
    uint32_t n = launch->waves;
    for (uint32_t k = 0; k < n; k++)
        order[k] = launch->order == 1 ? n - 1 - k : k;
    if (launch->order == 2)
        for (uint32_t k = n; k > 1; k--) {
            uint32_t other = random_below(state, k), swap = order[k - 1];
            order[k - 1] = order[other];
            order[other] = swap;
        }
}

/* All waves of the workgroup to their ends. */
static bool run_group(Group *g, uint64_t number)
{
    const Launch *launch = g->launch;
    uint64_t state = launch->seed + number * 0x632be59bd9b4e019ull;
    for (;;) {
        uint32_t order[MAX_WAVES];
        wave_order(launch, &state, order);
        for (uint32_t k = 0; k < launch->waves; k++) {
            Wave *w = &g->waves[order[k]];
            if (w->status == RUNNING)
                run_wave(g, w);
            if (w->status == FAILED)
                return false;
        }
        Wave *waiting = NULL, *ended = NULL;
        for (uint32_t k = 0; k < launch->waves; k++) {
            Wave *w = &g->waves[k];
            if (w->status == ENDED)
                ended = w;
            else if (!waiting)
                waiting = w;
        }
        if (!waiting)
            return true;
        if (ended && launch->checks)
            report_other(g, waiting, &launch->code[waiting->pc - 1], FIND_BARRIER, WHOLE_WAVE, 0, ended->pc - 1, ended->id);
        for (uint32_t k = 0; k < launch->waves; k++)
            if (g->waves[k].status == AT_BARRIER)
                g->waves[k].status = RUNNING;
        if (g->lds_checks)
            lds_checks_barrier(g->lds_checks);
    }
}

/* Memory of one call, used by one workgroup after the other. */
typedef struct {
    Wave *waves;
    struct WaveChecks *checks;
    uint8_t *lds, *scratch, *scratch_init;
    BankCost *bank_costs;
    struct LdsChecks *lds_checks;
} Memory;

static void release(Memory *m)
{
    free(m->waves);
    free(m->checks);
    free(m->lds);
    free(m->scratch);
    free(m->scratch_init);
    free(m->bank_costs);
    lds_checks_free(m->lds_checks);
}

static bool reserve(Memory *m, const Launch *launch, uint32_t scratch_bytes)
{
    uint32_t words = launch->lds_bytes / 4 + 8;
    size_t scratch = (size_t)launch->waves * LANES * scratch_bytes;
    m->waves = calloc(launch->waves, sizeof *m->waves);
    m->lds = calloc(words, 4);
    m->scratch = calloc(scratch + 16, 1);
    m->bank_costs = calloc(BANK_COSTS, sizeof *m->bank_costs);
    bool ok = m->waves && m->lds && m->scratch && m->bank_costs;
    if (launch->checks) {
        m->scratch_init = calloc(scratch + 1, 1);
        m->checks = calloc(launch->waves, sizeof *m->checks);
        m->lds_checks = lds_checks_new(launch->lds_bytes);
        ok = ok && m->checks && m->lds_checks && m->scratch_init;
    }
    return ok;
}

/* 2: out of memory, or more waves than a workgroup can have. */
int cdna_run(const Launch *launch, const uint32_t grid[3], uint64_t first, uint64_t last, const Setup *setup, Count *counts,
             Finding *findings, uint32_t finding_limit, uint32_t *finding_count)
{
    Memory m = {0};
    *finding_count = 0;
    op_table();
    if (launch->waves > MAX_WAVES || launch->code_count == 0 || !reserve(&m, launch, setup->scratch_bytes)) {
        release(&m);
        return 2;
    }
    Group g = {.launch = launch, .waves = m.waves, .lds = m.lds, .lds_checks = m.lds_checks, .counts = counts,
               .bank_costs = m.bank_costs, .findings = findings, .finding_limit = finding_limit};
    Used used = registers_used(launch);
    size_t scratch = (size_t)LANES * setup->scratch_bytes; /* of a wave */
    bool ok = true;
    for (uint64_t n = first; n < last && ok; n++) {
        g.id[0] = (uint32_t)(n % grid[0]);
        g.id[1] = (uint32_t)(n / grid[0] % grid[1]);
        g.id[2] = (uint32_t)(n / grid[0] / grid[1]);
        poison((uint32_t *)(void *)m.lds, launch->lds_bytes / 4);
        if (m.lds_checks)
            lds_checks_start(m.lds_checks);
        poison((uint32_t *)(void *)m.scratch, launch->waves * scratch / 4);
        if (m.scratch_init)
            memset(m.scratch_init, 0, launch->waves * scratch);
        for (uint32_t k = 0; k < launch->waves; k++) {
            Wave *w = &m.waves[k];
            w->checks = m.checks ? &m.checks[k] : NULL;
            w->scratch_bytes = setup->scratch_bytes;
            w->scratch = m.scratch + k * scratch;
            w->scratch_init = m.scratch_init ? m.scratch_init + k * scratch : NULL;
            start_wave(&g, &m.waves[k], k, setup, used);
        }
        ok = run_group(&g, n);
    }
    *finding_count = g.finding_count;
    release(&m);
    return ok ? 0 : 1;
}

/* A first call on a wave (executed == 0) starts its checks; one thread steps one wave at a time. */
int cdna_step(const Launch *launch, Wave *wave, uint8_t *lds, const Insn *insn, Count *count, Finding *findings,
              uint32_t finding_limit, uint32_t *finding_count)
{
    static _Thread_local struct WaveChecks *checks;
    op_table();
    if (launch->checks && !checks && !(checks = calloc(1, sizeof *checks)))
        return 2;
    if (launch->checks && wave->executed == 0)
        wave_checks_start(checks);
    Group g = {.launch = launch, .waves = wave, .lds = lds, .counts = count - (insn - launch->code), .findings = findings,
               .finding_count = *finding_count, .finding_limit = finding_limit};
    wave->checks = launch->checks ? checks : NULL;
    bool ok = execute(&g, wave, insn, count);
    wave->checks = NULL;
    if (wave->status == AT_BARRIER)
        wave->status = RUNNING; /* the only wave */
    *finding_count = g.finding_count;
    return ok ? 0 : 1;
}

/* For callers in other languages to compare their structures with ours. */
uint32_t cdna_sizeof(int which)
{
    static const uint32_t sizes[] = {sizeof(Insn), sizeof(Wave), sizeof(Launch), sizeof(Setup), sizeof(Count), sizeof(Finding),
                                     sizeof(Range), sizeof(TraceEvent), sizeof(TraceAccess), sizeof(Trace)};
    return which >= 0 && which < (int)(sizeof sizes / sizeof *sizes) ? sizes[which] : 0;
}

/* Of the table of opcodes, for callers to compare it with theirs (FNV-1a of the names). */
uint32_t cdna_opcodes(void)
{
    uint32_t value = 0x811c9dc5;
    for (uint32_t op = 0; op < OP_COUNT; op++)
        for (const char *c = op_infos[op].name;; c++) {
            value = (value ^ (uint8_t)*c) * 0x01000193;
            if (!*c)
                break;
        }
    return value;
}
