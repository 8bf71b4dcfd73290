/* Wait states that software must leave around MFMA on gfx942 and gfx950; the hardware does not interlock them.

   Distances are counted as the compiler does: every instruction between the two is one wait state, s_nop n is n + 1. N is the
   number of passes of the first MFMA; XDL is every MFMA but those of f32 and f64. Modelled:
     VALU (not v_dot*) writes a VGPR, MFMA reads it                    2
     VALU writes EXEC (v_cmpx), MFMA                                   4
     MFMA writes, MFMA reads as A or B       XDL N + 3 (gfx950: + 1 for N = 4, 8), f32 N + 2, f64 6 (4x4), 11 (16x16)
     MFMA writes, MFMA reads part of it as C XDL N + 1 (gfx950: + 1), f32 N (0 into XDL), f64 4, 9
     MFMA writes, MFMA reads the same registers as C                   0, or 2 for N = 2, f64 4x4 into f64 4x4: 4
     MFMA writes, VALU, VMEM or LDS reads or overwrites it
                                             XDL N + 3 (gfx950: + 1 for N = 4, 8), f32 N + 2, f64 6, 11; 9, 18 where VMEM
                                             or LDS reads
     XDL reads C, VALU, VMEM or LDS overwrites it                      1, 3, 7, 15 for 2, 4, 8, 16 passes
   These are the distances that LLVM keeps, which bounds them at 19; gfx950 may want more after 16 passes and after f64.
   Not modelled: v_dot*, transcendental and v_permlane rules, VALU to SGPR rules, LDS direct loads, f64 FMA after f64 MFMA. */
#include "checks.h"

enum { LONGEST = 20 };

static bool is_4x4(const MfmaDef *d) { return (d->traits & IS_F64_MFMA) ? d->passes == 4 : d->passes == 2; }

static uint32_t later(const Group *g, const MfmaDef *d) { return g->launch->arch == GFX950 && (d->passes == 4 || d->passes == 8); }

static uint32_t need_read_ab(const Group *g, const MfmaDef *d)
{
    if (d->traits & IS_F64_MFMA)
        return is_4x4(d) ? 6 : 11;
    return d->traits & IS_XDL ? d->passes + 3u + later(g, d) : d->passes + 2u;
}

static uint32_t need_read_c(const Group *g, const MfmaDef *d, const Operand *o, const OpInfo *op)
{
    bool f64 = op->traits & IS_F64_MFMA;
    if (d->first == o->code && d->count == o->count) {
        if (f64 && (d->traits & IS_F64_MFMA) && is_4x4(d) && op->passes[g->launch->arch] == 4)
            return 4;
        return !(d->traits & IS_F64_MFMA) && d->passes == 2 ? 2 : 0;
    }
    if (d->traits & IS_F64_MFMA)
        return op->traits & IS_XDL ? 0 : is_4x4(d) ? 4 : 9;
    if (d->traits & IS_XDL)
        return d->passes + 1u + (g->launch->arch == GFX950);
    return op->traits & IS_XDL ? 0 : d->passes;
}

static uint32_t need_other(const Group *g, const MfmaDef *d, bool memory_reads)
{
    if (!(d->traits & IS_F64_MFMA))
        return need_read_ab(g, d);
    if (memory_reads)
        return is_4x4(d) ? 9 : 18;
    return is_4x4(d) ? 6 : 11;
}

static bool too_early(const struct WaveChecks *c, uint32_t from, uint32_t need) { return c->clock - from < need; }

/* Vector registers that are source k of any instruction. Accumulators are src[2]; src[3] of a sparse MFMA. */
void mfma_source(Group *g, Wave *w, const Insn *i, int k, const Operand *o)
{
    struct WaveChecks *c = w->checks;
    const OpInfo *op = &op_infos[i->op];
    bool mfma = op->unit == MFMA;
    uint32_t begin = o->code - VGPR0, end = begin + o->count;
    if (end > VGPRS)
        end = VGPRS;
    if (mfma) {
        if (too_early(c, c->exec_clock, 4) && k == 0)
            report_register(g, w, i, FIND_MFMA_HAZARD, EXEC_LO, c->exec_insn);
        for (uint32_t r = begin; r < end; r++)
            if (too_early(c, c->valu_clock[r], 2))
                report_register(g, w, i, FIND_MFMA_HAZARD, VGPR0 + r, c->valu_insn[r]);
    }
    if ((int32_t)(c->mfma_until - c->clock) <= 0)
        return;
    bool accumulates = mfma && (op->traits & IS_SPARSE ? k == 3 : k == 2);
    bool memory = op->unit == VMEM || op->unit == LDS_UNIT;
    for (uint32_t r = begin; r < end; r++) {
        const MfmaDef *d = &c->mfma[r];
        if (c->clock - d->ready_from >= LONGEST)
            continue;
        uint32_t need = !mfma ? need_other(g, d, memory) : accumulates ? need_read_c(g, d, o, op) : need_read_ab(g, d);
        if (too_early(c, d->ready_from, need)) {
            report_register(g, w, i, FIND_MFMA_HAZARD, VGPR0 + r, d->insn);
            return;
        }
    }
}

/* The destination of an instruction other than MFMA. */
void mfma_overwrite(Group *g, Wave *w, const Insn *i, uint16_t code)
{
    struct WaveChecks *c = w->checks;
    bool results = (int32_t)(c->mfma_until - c->clock) > 0, reads = (int32_t)(c->war_until - c->clock) > 0;
    if (!results && !reads)
        return;
    for (uint32_t r = code - VGPR0, end = r + i->dst.count; r < end && r < VGPRS; r++) {
        const MfmaDef *d = &c->mfma[r];
        if (results && c->clock - d->ready_from < LONGEST && too_early(c, d->ready_from, need_other(g, d, false))) {
            report_register(g, w, i, FIND_MFMA_HAZARD, VGPR0 + r, d->insn);
            return;
        }
        if (reads && (int32_t)(c->war_clock[r] - c->clock) > 0 && c->war_clock[r] - c->clock <= 16) {
            report_register(g, w, i, FIND_MFMA_HAZARD, VGPR0 + r, c->war_insn[r]);
            return;
        }
        if (results)
            c->mfma[r].ready_from = c->clock - LONGEST; /* what comes next meets the new value */
    }
}

/* After an MFMA: c->clock already counts it. */
void mfma_issue(Group *g, Wave *w, const Insn *i)
{
    struct WaveChecks *c = w->checks;
    const OpInfo *op = &op_infos[i->op];
    uint8_t passes = op->passes[g->launch->arch];
    if (op->traits & IS_F8F6F4) {
        uint32_t cbsz = (i->flags & F_CBSZ_MASK) >> F_CBSZ_SHIFT, blgp = (i->flags & F_BLGP_MASK) >> F_BLGP_SHIFT;
        if (cbsz < 2 || blgp < 2)
            passes *= 2;
    }
    uint32_t index = (uint32_t)(i - g->launch->code);
    MfmaDef d = {c->clock, index, i->dst.code, i->dst.count, passes, op->traits};
    for (uint32_t r = i->dst.code - VGPR0, end = r + i->dst.count; r < end && r < VGPRS; r++) {
        c->mfma[r] = d;
        c->valu_clock[r] = c->clock - 64;
    }
    c->mfma_until = c->clock + LONGEST;
    if ((op->traits & (IS_XDL | IS_SPARSE)) == IS_XDL && i->sources > 2 && i->src[2].code >= VGPR0 && i->src[2].code != i->dst.code
        && i->src[2].code != NO_OPERAND) {
        uint32_t wait = passes <= 2 ? 1 : passes <= 4 ? 3 : passes <= 8 ? 7 : 15;
        for (uint32_t r = i->src[2].code - VGPR0, end = r + i->src[2].count; r < end && r < VGPRS; r++) {
            c->war_clock[r] = c->clock + wait;
            c->war_insn[r] = index;
        }
        c->war_until = c->clock + wait;
    }
}
