/* State and vocabulary of the emulator core. A wave executes decoded instructions (see decode.py) on 64 lanes. */
#ifndef CDNA_EMU_CORE_H
#define CDNA_EMU_CORE_H

#include <stdbool.h>
#include <stdint.h>

enum { LANES = 64, SGPRS = 128, VGPRS = 512, MAX_WAVES = 16 };

/* Operand codes: the 9-bit source space of the ISA, with accumulation registers behind it. */
enum {
    VCC_LO = 106, VCC_HI = 107, M0 = 124, EXEC_LO = 126, EXEC_HI = 127,
    INT_0 = 128, INT_64 = 192, INT_MINUS_16 = 208, FLOAT_HALF = 240, FLOAT_INV_2PI = 248,
    SRC_SHARED_BASE = 235, SRC_PRIVATE_BASE = 237,
    SRC_VCCZ = 251, SRC_EXECZ = 252, SRC_SCC = 253, LITERAL = 255, VGPR0 = 256, AGPR0 = 512, NO_OPERAND = 0xffff
};

enum { MOD_NEG = 1, MOD_ABS = 2 }; /* Operand.mods; bit 2 and up are free */

typedef struct {
    uint16_t code;  /* first register, inline constant, LITERAL, or NO_OPERAND */
    uint8_t count;  /* 32-bit registers, 1..32 */
    uint8_t mods;
} Operand;

/* Insn.flags */
enum {
    F_CLAMP = 1u << 0,
    F_OMOD_SHIFT = 1, F_OMOD_MASK = 3u << 1,         /* 1: *2, 2: *4, 3: /2 */
    F_OPSEL_SHIFT = 3, F_OPSEL_MASK = 15u << 3,      /* bit k: source k, bit 3: destination */
    F_OPSEL_HI_SHIFT = 7, F_OPSEL_HI_MASK = 7u << 7, /* VOP3P */
    F_NEG_HI_SHIFT = 10, F_NEG_HI_MASK = 7u << 10,   /* VOP3P */
    F_OFFEN = 1u << 13, F_IDXEN = 1u << 14, F_SC0 = 1u << 15, F_SC1 = 1u << 16, F_NT = 1u << 17, F_TO_LDS = 1u << 18,
    F_DPP = 1u << 19, F_SDWA = 1u << 20,
    F_CBSZ_SHIFT = 21, F_CBSZ_MASK = 7u << 21, F_ABID_SHIFT = 24, F_ABID_MASK = 15u << 24,
    F_BLGP_SHIFT = 28, F_BLGP_MASK = 7u << 28,
    F_GDS = 1u << 31
};

/* Insn.sub of a DPP instruction. */
enum {
    DPP_CTRL_MASK = 0x1ff, DPP_BOUND_CTRL = 1u << 9, DPP_BANK_MASK_SHIFT = 10, DPP_ROW_MASK_SHIFT = 14
};
/* Insn.sub of an SDWA instruction: selects are 0..3 BYTE, 4..5 WORD, 6 DWORD; unused 0 pad, 1 sign extend, 2 preserve. */
enum {
    SDWA_SRC0_SEL_SHIFT = 0, SDWA_SRC1_SEL_SHIFT = 3, SDWA_DST_SEL_SHIFT = 6, SDWA_DST_UNUSED_SHIFT = 9,
    SDWA_SRC0_SEXT = 1u << 11, SDWA_SRC1_SEXT = 1u << 12
};

typedef struct {
    uint32_t address;  /* bytes from the start of the kernel's section */
    uint16_t op;       /* enum Op */
    uint8_t size;      /* bytes */
    uint8_t sources;   /* operands in src that are used */
    Operand dst;       /* vector or scalar destination; of stores and compares too where they have one */
    Operand sdst;      /* second, scalar destination (carry out, VOP3 compare goes to dst) */
    Operand src[4];    /* ALU: src0, src1, src2, carry in. Memory: 0 address, 1 data, 2 scalar base or resource, 3 scalar
                          offset. DS: 0 address, 1 data0, 2 data1 */
    uint32_t literal;
    int32_t offset;    /* signed immediate: memory offset, SIMM16; DS: offset0 | offset1 << 8 */
    uint32_t flags;
    uint32_t sub;      /* DPP or SDWA control, else 0 */
} Insn;

enum Arch { GFX942 = 0, GFX950 = 1 };

/* enum Op: OP_v_add_f32 and so on; ops.py reads the same files in the same order. */
enum Unit { SALU, SMEM, VALU, VMEM, LDS_UNIT, MFMA, CTRL };
enum { ON_942 = 1, ON_950 = 2, ON_BOTH = 3 };
enum Op {
#define OP(name, unit, archs) OP_##name,
#include "ops.def"
#undef OP
    OP_COUNT
};

/* High halves of the flat addresses of LDS and of private memory (src_shared_base, src_private_base). */
enum { SHARED_APERTURE = 0x10000, PRIVATE_APERTURE = 0x20000 };

enum WaveStatus { RUNNING = 0, AT_BARRIER = 1, ENDED = 2, FAILED = 3 };

typedef struct Wave {
    uint32_t sgpr[SGPRS];          /* by operand code: SGPRs, VCC, TTMP, M0, EXEC */
    uint32_t vgpr[VGPRS][LANES];   /* VGPRs, then AGPRs: operand code - VGPR0 */
    uint64_t vgpr_init[VGPRS];     /* lanes that hold a value */
    uint64_t sgpr_init[2];
    uint32_t scc;
    uint32_t pc;                   /* index of the next instruction */
    uint32_t mode;                 /* MODE: 0-1 round32, 2-3 round16/64, 4-5 denorm32, 6-7 denorm16/64, 8 DX10 clamp, 9 IEEE, 23 FP16_OVFL */
    uint32_t status;
    uint32_t id;                   /* within the workgroup */
    uint32_t scratch_bytes;        /* private memory of a lane */
    uint64_t executed;
    uint8_t *scratch;              /* [LANES][scratch_bytes] */
    uint8_t *scratch_init;         /* as scratch, 1: the byte holds a value; NULL: not tracked */
    struct WaveChecks *checks;     /* owned by checks.c; NULL when checks are off */
} Wave;

typedef struct { uint64_t start, end; uint32_t writable; uint32_t argument; } Range;

enum Finding_ {
    FIND_RACE = 1, FIND_LDS_BOUNDS, FIND_GLOBAL_BOUNDS, FIND_READ_ONLY, FIND_BUFFER_BOUNDS, FIND_UNINIT_VGPR, FIND_UNINIT_SGPR,
    FIND_UNINIT_LDS, FIND_MISSING_WAIT, FIND_LDS_AT_BARRIER, FIND_MFMA_HAZARD, FIND_BARRIER, FIND_BUDGET, FIND_UNSUPPORTED,
    FIND_MISALIGNED, FIND_SCRATCH_BOUNDS
};

typedef struct {
    uint32_t kind, insn, wave, lane;
    uint32_t group[3], other_insn, other_wave, detail;
    uint64_t address;
} Finding;

/* Per instruction of the kernel, summed over waves. */
typedef struct {
    uint64_t executed, lanes, bytes, lines64, lines128, lines64_min, lds_cycles, lds_cycles_min;
} Count;

/* One executed instruction, and where the lanes of a global access went: what a trace holds. */
typedef struct {
    uint32_t insn, wave;
    uint32_t access;               /* 1 + index in Trace.access; 0: none */
    uint32_t lds_cycles;
} TraceEvent;

typedef struct {
    uint64_t address[LANES], mask;
    uint64_t bytes;                /* of each lane in mask */
} TraceAccess;

/* Filled in the order of execution; the counts go on where the limits end. */
typedef struct {
    TraceEvent *event;
    TraceAccess *access;
    uint64_t event_limit, access_limit, events, accesses;
} Trace;

/* One launch; shared by the threads that run its workgroups, but for what Group holds. */
typedef struct {
    const Insn *code;
    uint32_t code_count, arch;
    const Range *ranges;           /* sorted by start */
    uint32_t range_count;
    uint32_t lds_bytes, waves, checks, report_buffer_bounds;
    uint32_t order;                /* wave order: 0 forward, 1 reverse, 2 random */
    uint32_t seed;
    uint64_t budget;               /* instructions per wave */
    Trace *trace;                  /* NULL: none; else one thread */
} Launch;

/* Addresses of an LDS access, and what they cost. The banks' loads stay the same when all addresses move by 16 bytes. */
typedef struct {
    uint64_t mask;
    uint32_t step[LANES];          /* address of the lane less that of lane 0 */
    uint32_t start;                /* address of lane 0 modulo 16 */
    uint32_t bytes;                /* 0: nothing is known */
    uint32_t cycles, cycles_min;
} BankCost;

enum { BANK_COSTS = 64 };          /* by instruction, the last access of each */

/* One workgroup while it runs. */
typedef struct Group {
    const Launch *launch;
    uint32_t id[3];
    Wave *waves;
    uint8_t *lds;                  /* launch->lds_bytes, zero padded to 16 bytes behind */
    struct LdsChecks *lds_checks;  /* NULL when checks are off */
    Count *counts;                 /* [code_count], this thread's */
    BankCost *bank_costs;          /* [BANK_COSTS]; NULL: none are kept */
    Finding *findings;
    uint32_t finding_count, finding_limit;
} Group;

/* ---- operands (operands.c) */
/* 64 lanes of 32-bit source k, register r of it: a pointer into the wave, or tmp filled with a broadcast constant. Applies
   DPP and SDWA selection to sources, never neg or abs. */
const uint32_t *source32(const Wave *w, const Insn *i, int k, int r, uint32_t tmp[LANES]);
uint32_t scalar32(const Wave *w, const Insn *i, int k);   /* scalar source: SGPR, constant, literal, special */
uint64_t scalar64(const Wave *w, const Insn *i, int k);
/* Constants in registers of a wider operand (r > 0): integers are sign extended when count is 2, all else is repeated. */
const uint32_t *source16f(const Wave *w, const Insn *i, int k, uint32_t tmp[LANES]); /* source32, inline floats as f16 */
/* 64-bit source k; inline floats are f64 patterns, a literal is the high half of a float, else zero extended. */
void source64(const Wave *w, const Insn *i, int k, bool is_float, uint64_t out[LANES]);
bool scalar_source_known(Operand o);      /* false: an operand below VGPR0 that is not modelled */
bool dpp_known(const Insn *i);            /* of an instruction with F_DPP: its control is modelled */
uint64_t lane_mask(const Wave *w, const Insn *i);         /* EXEC, less the lanes that DPP switches off */
/* Store to register r of the destination in the lanes of mask; SDWA destination select applies. */
void write32(Wave *w, const Insn *i, int r, const uint32_t value[LANES], uint64_t mask);
void write_scalar32(Wave *w, uint16_t code, uint32_t value);
void write_scalar64(Wave *w, uint16_t code, uint64_t value);

static inline uint64_t exec_mask(const Wave *w) { return w->sgpr[EXEC_LO] | (uint64_t)w->sgpr[EXEC_HI] << 32; }
static inline uint64_t vcc_mask(const Wave *w) { return w->sgpr[VCC_LO] | (uint64_t)w->sgpr[VCC_HI] << 32; }

/* ---- units: each a switch over its ops. False: not an op of this file (FIND_UNSUPPORTED). */
bool exec_salu(Group *g, Wave *w, const Insn *i);    /* salu.c, branches too: they set w->pc */
bool exec_valu(Group *g, Wave *w, const Insn *i);    /* valu.c: VOP1, VOP2, VOP3, VOP3P; compare.c: VOPC */
bool exec_compare(Group *g, Wave *w, const Insn *i); /* compare.c: v_cmp_*, v_cmpx_*; exec_valu calls it */
bool exec_mfma(Group *g, Wave *w, const Insn *i);    /* mfma.c */
bool exec_memory(Group *g, Wave *w, const Insn *i);  /* memory.c: SMEM, buffer, global, flat, scratch, loads to LDS */
bool exec_lds(Group *g, Wave *w, const Insn *i);     /* lds.c: ds_* */

/* ---- checks (checks.c); the callees return at once when checks are off */
void report(Group *g, const Wave *w, const Insn *i, uint32_t kind, uint32_t lane, uint64_t address, uint32_t detail);
void report_other(Group *g, const Wave *w, const Insn *i, uint32_t kind, uint32_t lane, uint64_t address, uint32_t other_insn,
                  uint32_t other_wave);
void before_insn(Group *g, Wave *w, const Insn *i);  /* uninitialised or pending sources, hazards */
void after_insn(Group *g, Wave *w, const Insn *i);   /* marks destinations initialised or pending */
/* Global or scalar access of a lane: true if [address, address + bytes) lies in a known range (writable for stores). */
bool global_ok(Group *g, const Wave *w, const Insn *i, uint32_t lane, uint64_t address, uint32_t bytes, bool store);
/* What a store to LDS writes: registers, and how far to shift them right. */
typedef struct { const uint32_t (*rows)[LANES]; uint32_t shift; } LdsData;
/* LDS request of a wave before it happens: bounds, races between waves, uninitialised reads. Lanes of the mask that are inside the
   workgroup's LDS. `data` of stores only: NULL if what they write is not known. */
uint64_t lds_request(Group *g, Wave *w, const Insn *i, const uint32_t at[LANES], uint64_t mask, uint32_t bytes, bool store,
                     const LdsData *data);
/* Requests of a whole wave, for the counters. address[l] counts where mask has the lane. */
void count_global(Group *g, const Insn *i, const uint64_t address[LANES], uint64_t mask, uint32_t bytes);
void count_lds(Group *g, const Insn *i, const uint32_t address[LANES], uint64_t mask, uint32_t bytes);

/* ---- run.c */
struct Setup;
/* Run workgroups first <= n < last (x fastest). 0: all ended; 1: a wave failed or ran out of budget (see findings). */
int cdna_run(const Launch *launch, const uint32_t grid[3], uint64_t first, uint64_t last, const struct Setup *setup,
             Count *counts, Finding *findings, uint32_t finding_limit, uint32_t *finding_count);
/* Execute one instruction on one wave, for tests of single instructions. */
int cdna_step(const Launch *launch, Wave *wave, uint8_t *lds, const Insn *insn, Count *count, Finding *findings,
              uint32_t finding_limit, uint32_t *finding_count);

/* Initial registers of every wave, from the kernel descriptor. */
typedef struct Setup {
    uint32_t block[3];
    uint32_t user_sgprs;              /* values of s0.. before the workgroup ids */
    uint32_t user_sgpr[16];
    uint32_t workgroup_id[3];         /* enabled x, y, z: appended in this order */
    uint32_t workitem_id;             /* 0: x, 1: x y, 2: x y z; gfx9 packs 10 bits each into v0 */
    uint32_t mode;
    uint32_t scratch_bytes;           /* per lane */
} Setup;

#endif
