/* Registers: read before they are written, used before the wait for them; findings. The other checks are in lds_checks.c,
   hazards.c and counters.c.

   Waits follow the gfx9 counters. VMEM requests, loads and stores alike, complete in order (vmcnt); LDS requests complete in
   order (lgkmcnt), scalar loads in any order: only lgkmcnt(0) waits for them. A flat access counts in both. A register is
   pending from the request to the wait that covers it; reading it is a finding, and so is overwriting it from another unit.
   Two requests of one counter may write one register: they complete in order.

   A partial write (16-bit halves, bytes of a packed conversion) counts as a write of the register. Compilers let some
   undefined values be: v_writelane, v_readlane and v_accvgpr_* hand them on, and the high half of a 64-bit sum, product or
   left shift is undefined if that of a source is. So do spills: a byte of scratch that nobody
   wrote, or that was written from an undefined register, makes what loads it undefined. Those are reported where they are used. */
#include <pthread.h>
#include <string.h>

#include "checks.h"

OpInfo op_infos[] = {
#define OP(name, unit, archs) {#name, 0, {0, 0}, unit, archs},
#define MATRIX(name, passes942, passes950) \
    {#name, 0, {passes942, passes950}, MFMA, ((passes942) != 0) | ((passes950) != 0) << 1},
#include "ops.def"
#undef OP
    {0}
};

static bool starts(const char *name, const char *prefix) { return strncmp(name, prefix, strlen(prefix)) == 0; }
static bool has(const char *name, const char *part) { return strstr(name, part) != NULL; }

static bool f32_inputs(const char *name) { return strcmp(name + strlen(name) - 4, "_f32") == 0; }

static void fill_table(void)
{
    for (OpInfo *o = op_infos; o->name; o++) {
        const char *n = o->name;
        uint16_t t = 0;
        if (o->unit == LDS_UNIT && !starts(n, "ds_read") && !starts(n, "ds_write") && !has(n, "permute") && !has(n, "swizzle"))
            t |= IS_ATOMIC;
        if (has(n, "_atomic_"))
            t |= IS_ATOMIC;
        if (starts(n, "v_swap") || (starts(n, "v_permlane") && has(n, "_swap")))
            t |= IS_SWAP;
        if (starts(n, "v_dot"))
            t |= IS_DOT;
        if (starts(n, "v_readlane") || starts(n, "v_readfirstlane") || starts(n, "v_writelane"))
            t |= ONE_LANE;
        if (starts(n, "v_readlane") || starts(n, "v_writelane") || starts(n, "v_accvgpr"))
            t |= MOVES;
        if (starts(n, "v_mad_u64_u32") || starts(n, "v_mad_i64_i32") || starts(n, "v_lshl_add_u64") || starts(n, "v_lshlrev_b64"))
            t |= LOW_FROM_LOW;
        if (starts(n, "v_pk_mov_b32") || (starts(n, "v_pk_") && f32_inputs(n)))
            t |= PICKS;
        if (starts(n, "flat_"))
            t |= IS_FLAT;
        if (starts(n, "scratch_"))
            t |= IS_SCRATCH;
        if (starts(n, "buffer_inv") || starts(n, "buffer_wb") || starts(n, "s_dcache"))
            t |= NO_COUNTER;
        if (o->unit == MFMA) {
            if (has(n, "_f64_"))
                t |= IS_F64_MFMA;
            else if (!f32_inputs(n))
                t |= IS_XDL;
            if (has(n, "f8f6f4"))
                t |= IS_F8F6F4;
            if (has(n, "smfmac"))
                t |= IS_SPARSE;
            if (has(n, "_scale_"))
                t |= HAS_SCALES;
        }
        o->traits = t;
    }
}

void op_table(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_table);
}

void wave_checks_start(struct WaveChecks *c)
{
    c->clock += 64; /* beyond any rule about the wave that used this memory before */
    c->mfma_until = c->war_until = 0;
    c->vm.done = c->vm.issued;
    c->lds.done = c->lds.issued;
    c->smem.done = c->smem.issued;
    c->copy_head = c->copy_tail = 0;
    c->exec_clock = 0;
}

static void add_finding(Group *g, const Wave *w, const Insn *i, const Finding *in)
{
    Finding f = *in;
    f.insn = (uint32_t)(i - g->launch->code);
    f.wave = w->id;
    memcpy(f.group, g->id, sizeof f.group);
    uint32_t kept = g->finding_count < g->finding_limit ? g->finding_count : g->finding_limit;
    for (uint32_t k = 0; k < kept; k++)
        if (g->findings[k].kind == f.kind && g->findings[k].insn == f.insn && g->findings[k].other_insn == f.other_insn)
            return;
    if (kept < g->finding_limit)
        g->findings[kept] = f;
    g->finding_count++;
}

void report(Group *g, const Wave *w, const Insn *i, uint32_t kind, uint32_t lane, uint64_t address, uint32_t detail)
{
    add_finding(g, w, i, &(Finding){.kind = kind, .lane = lane, .address = address, .detail = detail,
                                    .other_insn = NO_INSN, .other_wave = WHOLE_WAVE});
}

void report_other(Group *g, const Wave *w, const Insn *i, uint32_t kind, uint32_t lane, uint64_t address, uint32_t other_insn,
                  uint32_t other_wave)
{
    add_finding(g, w, i, &(Finding){.kind = kind, .lane = lane, .address = address, .detail = NO_OPERAND,
                                    .other_insn = other_insn, .other_wave = other_wave});
}

void report_register(Group *g, const Wave *w, const Insn *i, uint32_t kind, uint32_t code, uint32_t other)
{
    add_finding(g, w, i, &(Finding){.kind = kind, .lane = WHOLE_WAVE, .detail = code, .other_insn = other, .other_wave = w->id});
}

static bool open_ticket(const Tickets *t, uint32_t ticket) { return (int32_t)(ticket - t->done) > 0; }

static bool pending(const struct WaveChecks *c, uint32_t r, uint64_t lanes, bool vm, bool lds)
{
    return ((vm && open_ticket(&c->vm, c->vm_ticket[r])) || (lds && open_ticket(&c->lds, c->lds_ticket[r])))
        && (c->pending_lanes[r] & lanes);
}

static bool known_sgpr(uint32_t code) { return code <= 101 || code == VCC_LO || code == VCC_HI || code == M0; }

/* Whether source k reads the register of its pair. v_pk_mov_b32 has one result per source. */
static bool picked(const Insn *i, const OpInfo *op, int k, bool second)
{
    bool low = i->flags >> (F_OPSEL_SHIFT + k) & 1, high = i->flags >> (F_OPSEL_HI_SHIFT + k) & 1;
    return low == second || (!starts(op->name, "v_pk_mov") && high == second);
}

static void read_sgprs(Group *g, Wave *w, const Insn *i, const OpInfo *op, int k)
{
    struct WaveChecks *c = w->checks;
    const Operand *o = &i->src[k];
    for (uint32_t code = o->code; code < SGPRS && code < o->code + (uint32_t)o->count; code++) {
        uint64_t bit = 1ull << (code & 63);
        if ((op->traits & PICKS) && o->count == 2 && !picked(i, op, k, code > o->code))
            continue;
        if (!(w->sgpr_init[code >> 6] & bit) && known_sgpr(code)) {
            if ((op->traits & MOVES) && k == 0) {
                c->undefined = ~0ull;
                continue;
            }
            report(g, w, i, FIND_UNINIT_SGPR, WHOLE_WAVE, 0, code);
            w->sgpr_init[code >> 6] |= bit;
        }
        if (open_ticket(&c->smem, c->smem_ticket[code])) {
            report_register(g, w, i, FIND_MISSING_WAIT, code, c->smem_producer[code]);
            c->smem_ticket[code] = c->smem.done;
        }
    }
}

/* Lanes of the first source that the active lanes read through DPP; lanes that are switched off give nothing. */
static uint64_t dpp_reads(const Wave *w, const Insn *i)
{
    uint64_t active = exec_mask(w), lanes = 0;
    uint32_t ctrl = i->sub & DPP_CTRL_MASK;
    for (int l = 0; l < LANES; l++) {
        int row = l & ~15, s = l;
        if (!(active >> l & 1))
            continue;
        if (ctrl < 0x100)
            s = (l & ~3) | (int)(ctrl >> 2 * (l & 3) & 3);
        else if (ctrl < 0x110)
            s = l + (int)(ctrl & 15) < row + 16 ? l + (int)(ctrl & 15) : -1;
        else if (ctrl < 0x120)
            s = l - (int)(ctrl & 15) >= row ? l - (int)(ctrl & 15) : -1;
        else if (ctrl < 0x130)
            s = row | ((l - (int)(ctrl & 15)) & 15);
        else if (ctrl == 0x130)
            s = l + 1 < LANES ? l + 1 : -1;
        else if (ctrl == 0x138)
            s = l - 1;
        else if (ctrl == 0x134 || ctrl == 0x13c)
            s = (l + (ctrl == 0x134 ? 1 : 63)) & 63;
        else if (ctrl == 0x140)
            s = row | (15 - (l & 15));
        else if (ctrl == 0x141)
            s = (l & ~7) | (7 - (l & 7));
        else if (ctrl == 0x142)
            s = row - 1;
        else if (ctrl == 0x143)
            s = l < 32 ? -1 : 31;
        else if (ctrl >= 0x150 && ctrl < 0x160)
            s = row | (int)(ctrl & 15);
        if (s >= 0)
            lanes |= 1ull << s;
    }
    return lanes & active;
}

static uint64_t source_lanes(const Wave *w, const Insn *i, const OpInfo *op, int k)
{
    if (op->unit == MFMA)
        return ~0ull; /* whatever EXEC says */
    if (op->traits & ONE_LANE) {
        uint64_t active = exec_mask(w);
        if (op->name[6] == 'f')
            return active ? active & -active : 1;
        return 1ull << (scalar32(w, i, 1) & 63);
    }
    if ((i->flags & F_DPP) && k == 0)
        return dpp_reads(w, i);
    return w->checks->active;
}

static void read_vgprs(Group *g, Wave *w, const Insn *i, const OpInfo *op, int k, const Operand *o)
{
    struct WaveChecks *c = w->checks;
    uint64_t lanes = op->unit == MFMA ? ~0ull : c->active;
    if ((op->traits & ONE_LANE) || ((i->flags & F_DPP) && k == 0))
        lanes = source_lanes(w, i, op, k);
    for (uint32_t r = o->code - VGPR0, end = r + o->count; r < end && r < VGPRS; r++) {
        if ((op->traits & PICKS) && o->count == 2 && !picked(i, op, k, r + 1 == end))
            continue;
        uint64_t missing = lanes & ~w->vgpr_init[r];
        bool high = (op->traits & LOW_FROM_LOW) && o->count == 2 && r + 1 == end;
        bool moved = k == 0 ? op->traits & MOVES : k == 1 && (op->traits & IS_SCRATCH);
        if (__builtin_expect(missing != 0, 0) && (high || moved))
            c->undefined |= missing;
        else if (__builtin_expect(missing != 0, 0)) {
            report(g, w, i, FIND_UNINIT_VGPR, (uint32_t)__builtin_ctzll(missing), 0, VGPR0 + r);
            w->vgpr_init[r] |= lanes;
        }
        if (__builtin_expect(pending(c, r, lanes, true, true), 0)) {
            report_register(g, w, i, FIND_MISSING_WAIT, VGPR0 + r, c->producer[r]);
            c->pending_lanes[r] = 0;
        }
    }
    mfma_source(g, w, i, k, o);
}

static void overwrite(Group *g, Wave *w, const Insn *i, const OpInfo *op, const Operand *o)
{
    struct WaveChecks *c = w->checks;
    if (o->code < SGPRS) {
        for (uint32_t code = o->code; code < SGPRS && code < o->code + (uint32_t)o->count; code++)
            if (open_ticket(&c->smem, c->smem_ticket[code])) {
                report_register(g, w, i, FIND_MISSING_WAIT, code, c->smem_producer[code]);
                c->smem_ticket[code] = c->smem.done;
            }
        return;
    }
    uint64_t lanes = op->unit == MFMA ? ~0ull : c->active;
    bool flat = op->traits & IS_FLAT;
    bool vm = op->unit != VMEM || flat, lds = op->unit != LDS_UNIT || flat;
    for (uint32_t r = o->code - VGPR0, end = r + o->count; r < end && r < VGPRS; r++)
        if (__builtin_expect(pending(c, r, lanes, vm, lds), 0)) {
            report_register(g, w, i, FIND_MISSING_WAIT, VGPR0 + r, c->producer[r]);
            c->pending_lanes[r] = 0;
        }
    if (op->unit != MFMA)
        mfma_overwrite(g, w, i, o->code);
}

static void wait(Tickets *t, uint32_t outstanding)
{
    uint32_t upto = t->issued - outstanding;
    if ((int32_t)(upto - t->done) > 0)
        t->done = upto;
}

static void wait_counters(Group *g, Wave *w, const Insn *i)
{
    struct WaveChecks *c = w->checks;
    uint32_t imm = (uint32_t)i->offset & 0xffff;
    uint32_t vm = (imm & 15) | (imm >> 14 & 3) << 4, lgkm = imm >> 8 & 15;
    /* 63 and 15 are the counters' maxima: no wait. */
    if (vm < 63) {
        wait(&c->vm, vm);
        if (c->copy_head)
            copies_complete(g, w);
    }
    if (lgkm < 15) {
        wait(&c->lds, lgkm);
        if (lgkm == 0)
            c->smem.done = c->smem.issued;
    }
}

void before_insn(Group *g, Wave *w, const Insn *i)
{
    struct WaveChecks *c = w->checks;
    if (!c)
        return;
    const OpInfo *op = &op_infos[i->op];
    c->active = exec_mask(w);
    c->undefined = 0;
    if (op->unit == CTRL) {
        if (i->op == OP_s_waitcnt)
            wait_counters(g, w, i);
        else if (i->op == OP_s_barrier && open_ticket(&c->lds, c->lds_write_ticket))
            report_register(g, w, i, FIND_LDS_AT_BARRIER, NO_OPERAND, c->lds_write_insn);
        return;
    }
    for (int k = 0; k < i->sources; k++) {
        uint16_t code = i->src[k].code;
        if (code >= VGPR0) {
            if (code != NO_OPERAND)
                read_vgprs(g, w, i, op, k, &i->src[k]);
        } else if (code < SGPRS)
            read_sgprs(g, w, i, op, k);
    }
    if (op->traits & HAS_SCALES) {
        Operand scale = {(uint16_t)i->sub, 1, 0}; /* of B; that of A is src[3] */
        if (scale.code >= VGPR0)
            read_vgprs(g, w, i, op, 1, &scale);
    }
    if (i->dst.code != NO_OPERAND)
        overwrite(g, w, i, op, &i->dst);
    if (i->sdst.code != NO_OPERAND)
        overwrite(g, w, i, op, &i->sdst);
}

static void wrote_sgprs(Wave *w, const Operand *o)
{
    for (uint32_t code = o->code; code < SGPRS && code < o->code + (uint32_t)o->count; code++)
        w->sgpr_init[code >> 6] |= 1ull << (code & 63);
}

void after_insn(Group *g, Wave *w, const Insn *i)
{
    struct WaveChecks *c = w->checks;
    if (!c)
        return;
    const OpInfo *op = &op_infos[i->op];
    uint32_t index = (uint32_t)(i - g->launch->code);
    c->clock++;
    if (op->unit == CTRL) {
        if (i->op == OP_s_nop)
            c->clock += (uint32_t)i->offset & 15;
        return;
    }
    bool counted = !(op->traits & NO_COUNTER);
    bool vm = counted && op->unit == VMEM, lds = op->unit == LDS_UNIT || (op->traits & IS_FLAT), smem = op->unit == SMEM;
    c->vm.issued += vm;
    c->lds.issued += lds;
    c->smem.issued += counted && smem;
    uint16_t code = i->dst.code;
    if (op->unit == LDS_UNIT && code == NO_OPERAND) {
        c->lds_write_ticket = c->lds.issued;
        c->lds_write_insn = index;
    }
    if (i->sdst.code < SGPRS) {
        wrote_sgprs(w, &i->sdst);
        if (i->sdst.code == EXEC_LO && op->unit == VALU) {
            c->exec_clock = c->clock;
            c->exec_insn = index;
        }
    }
    if (code < SGPRS) {
        wrote_sgprs(w, &i->dst);
        if (__builtin_expect(c->undefined != 0, 0)) /* v_readlane */
            w->sgpr_init[code >> 6] &= ~(1ull << (code & 63));
        if (smem)
            for (uint32_t s = code; s < SGPRS && s < code + (uint32_t)i->dst.count; s++) {
                c->smem_ticket[s] = c->smem.issued;
                c->smem_producer[s] = index;
            }
        return;
    }
    if (code == NO_OPERAND)
        return;
    uint64_t lanes = c->active;
    if (op->unit == MFMA)
        lanes = ~0ull;
    else if (i->flags & F_DPP)
        lanes = lane_mask(w, i);
    else if (op->traits & ONE_LANE)
        lanes = source_lanes(w, i, op, 0);
    for (uint32_t r = code - VGPR0, end = r + i->dst.count; r < end && r < VGPRS; r++) {
        w->vgpr_init[r] |= lanes;
        if (vm || lds) {
            bool still = pending(c, r, ~0ull, true, true);
            c->pending_lanes[r] = still ? c->pending_lanes[r] | lanes : lanes;
            if (vm)
                c->vm_ticket[r] = c->vm.issued;
            if (lds)
                c->lds_ticket[r] = c->lds.issued;
            c->producer[r] = index;
        } else if (!(op->traits & IS_DOT)) {
            c->valu_clock[r] = c->clock;
            c->valu_insn[r] = index;
        }
    }
    if (__builtin_expect(c->undefined != 0, 0)) {
        uint32_t r = code - VGPR0 + (op->traits & LOW_FROM_LOW ? 1 : 0);
        if (r < VGPRS)
            w->vgpr_init[r] &= ~(c->undefined & lanes);
    }
    for (uint32_t k = 0, r = code - VGPR0; (op->traits & IS_SCRATCH) && k < i->dst.count && k < 4; k++)
        if (r + k < VGPRS)
            w->vgpr_init[r + k] &= ~c->scratch_undefined[k];
    if (op->unit == MFMA)
        mfma_issue(g, w, i);
    if (op->traits & IS_SWAP) {
        uint32_t r = i->src[0].code - VGPR0;
        if (r < VGPRS) {
            c->valu_clock[r] = c->clock;
            c->valu_insn[r] = index;
        }
    }
}
