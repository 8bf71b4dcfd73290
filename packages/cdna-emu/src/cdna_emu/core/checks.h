/* What the checks keep: shared by checks.c (registers), lds_checks.c, hazards.c and run.c. */
#ifndef CDNA_EMU_CHECKS_H
#define CDNA_EMU_CHECKS_H

#include "core.h"

enum { WHOLE_WAVE = 0xffffffffu, NO_INSN = 0xffffffffu };

/* Properties of an op that its operands do not tell, from its name. */
enum {
    IS_ATOMIC = 1,
    IS_SWAP = 2,        /* writes its first source as well */
    IS_DOT = 4,         /* the VALU to MFMA rule leaves v_dot* out */
    IS_XDL = 8, IS_F64_MFMA = 16,
    ONE_LANE = 32,      /* v_readlane, v_readfirstlane, v_writelane */
    NO_COUNTER = 64,    /* cache operations: counted neither by vmcnt nor by lgkmcnt here */
    IS_FLAT = 128,      /* counted by both */
    IS_F8F6F4 = 256,    /* 8-bit operands take twice the passes */
    HAS_SCALES = 512,
    IS_SPARSE = 1024,
    MOVES = 2048,       /* between register files, as spills do: an undefined value is passed on, not reported */
    LOW_FROM_LOW = 4096, /* 64-bit: the low half of the result does not depend on the high halves of the sources */
    IS_SCRATCH = 16384, /* a store passes undefined values on as MOVES does, a load finds them again */
    PICKS = 8192        /* v_pk_*_f32, v_pk_mov_b32: op_sel and op_sel_hi pick the registers of a pair that are read */
};

typedef struct {
    const char *name;
    uint16_t traits;
    uint8_t passes[2];  /* of a matrix instruction, by enum Arch */
    uint8_t unit, archs;
} OpInfo;

extern OpInfo op_infos[]; /* [OP_COUNT], complete after op_table() */
void op_table(void);

/* An MFMA result on its way; a register points back to the instruction that writes it. */
typedef struct {
    uint32_t ready_from; /* wait states executed when the instruction had issued */
    uint32_t insn;
    uint16_t first;
    uint8_t count, passes;
    uint16_t traits;
} MfmaDef;

/* A ticket is the number of the request in its counter; it is complete when the counter's `done` has reached it. Tickets and
   clocks only grow, so that nothing has to be cleared between workgroups. */
typedef struct { uint32_t issued, done; } Tickets;

struct WaveChecks {
    uint64_t active;    /* EXEC before the instruction */
    uint64_t undefined; /* MOVES: lanes of the source; LOW_FROM_LOW: lanes of a source's high half */
    uint32_t clock;     /* wait states so far: 1 per instruction, n + 1 for s_nop n */
    uint32_t mfma_until, war_until; /* clock from which no MFMA rule can be broken any more */
    uint64_t scratch_undefined[4]; /* lanes that a scratch load left undefined, by register of its destination */
    Tickets vm, lds, smem;
    uint32_t vm_ticket[VGPRS], lds_ticket[VGPRS], producer[VGPRS];
    uint64_t pending_lanes[VGPRS];
    uint32_t smem_ticket[SGPRS], smem_producer[SGPRS];
    uint32_t lds_write_ticket, lds_write_insn;
    uint32_t copy_head, copy_tail; /* copies to LDS under way: index + 1 in LdsChecks.copies */
    uint32_t valu_clock[VGPRS], valu_insn[VGPRS];
    uint32_t exec_clock, exec_insn;
    uint32_t war_clock[VGPRS];     /* clock until which a VALU may not overwrite src C of an MFMA */
    uint32_t war_insn[VGPRS];
    MfmaDef mfma[VGPRS];
};

void wave_checks_start(struct WaveChecks *c);
/* A finding about register `code` (NO_OPERAND: none), because of instruction `other` of the same wave. */
void report_register(Group *g, const Wave *w, const Insn *i, uint32_t kind, uint32_t code, uint32_t other);

/* ---- hazards.c */
void mfma_source(Group *g, Wave *w, const Insn *i, int k, const Operand *o);
void mfma_overwrite(Group *g, Wave *w, const Insn *i, uint16_t code);
void mfma_issue(Group *g, Wave *w, const Insn *i);

/* ---- lds_checks.c */
struct LdsChecks *lds_checks_new(uint32_t lds_bytes);
void lds_checks_free(struct LdsChecks *c);
void lds_checks_start(struct LdsChecks *c); /* a workgroup begins */
void lds_checks_barrier(struct LdsChecks *c);
void copies_complete(Group *g, Wave *w);     /* vm.done has moved */

#endif
