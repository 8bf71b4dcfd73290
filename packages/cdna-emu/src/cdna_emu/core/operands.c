/* Sources and destinations: constants, DPP, SDWA, and the lanes that an instruction writes. */
#include <string.h>

#include "core.h"

static uint32_t float32_constant(uint16_t code) {
    static const uint32_t bits[] = {0x3f000000, 0xbf000000, 0x3f800000, 0xbf800000, 0x40000000,
                                    0xc0000000, 0x40800000, 0xc0800000, 0x3e22f983};
    return bits[code - FLOAT_HALF];
}

static uint32_t float16_constant(uint16_t code) {
    static const uint16_t bits[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118};
    return bits[code - FLOAT_HALF];
}

static uint64_t float64_constant(uint16_t code) {
    static const uint64_t bits[] = {0x3fe0000000000000, 0xbfe0000000000000, 0x3ff0000000000000,
                                    0xbff0000000000000, 0x4000000000000000, 0xc000000000000000,
                                    0x4010000000000000, 0xc010000000000000, 0x3fc45f306dc9c882};
    return bits[code - FLOAT_HALF];
}

static bool is_inline_int(uint16_t code) { return code >= INT_0 && code <= INT_MINUS_16; }
static bool is_inline_float(uint16_t code) { return code >= FLOAT_HALF && code <= FLOAT_INV_2PI; }

static uint32_t inline_int(uint16_t code) {
    return code <= INT_64 ? (uint32_t)(code - INT_0) : (uint32_t)(INT_64 - code);
}

/* Operands of one 32-bit value that are the same in all lanes. */
static uint32_t uniform32(const Wave *w, const Insn *i, uint16_t code) {
    if (code < SGPRS) return w->sgpr[code];
    if (is_inline_int(code)) return inline_int(code);
    if (is_inline_float(code)) return float32_constant(code);
    switch (code) {
    case SRC_VCCZ: return vcc_mask(w) == 0;
    case SRC_EXECZ: return exec_mask(w) == 0;
    case SRC_SCC: return w->scc;
    default: return i->literal;
    }
}

static uint64_t uniform64(const Wave *w, const Insn *i, uint16_t code, bool is_float) {
    if (code < SGPRS - 1) return w->sgpr[code] | (uint64_t)w->sgpr[code + 1] << 32;
    if (is_inline_float(code)) return float64_constant(code);
    if (code == SRC_SHARED_BASE) return (uint64_t)SHARED_APERTURE << 32;
    if (code == SRC_PRIVATE_BASE) return (uint64_t)PRIVATE_APERTURE << 32;
    if (code == LITERAL) return is_float ? (uint64_t)i->literal << 32 : i->literal;
    uint32_t value = uniform32(w, i, code);
    return is_inline_int(code) ? (uint64_t)(int64_t)(int32_t)value : value;
}

bool scalar_source_known(Operand o) {
    uint16_t code = o.code;
    if (code == SRC_SHARED_BASE || code == SRC_PRIVATE_BASE) return o.count == 2; /* of 32 bits: undocumented */
    return code < SGPRS || is_inline_int(code) || is_inline_float(code) || code == SRC_VCCZ || code == SRC_EXECZ ||
           code == SRC_SCC || code == LITERAL;
}

uint32_t scalar32(const Wave *w, const Insn *i, int k) { return uniform32(w, i, i->src[k].code); }
uint64_t scalar64(const Wave *w, const Insn *i, int k) { return uniform64(w, i, i->src[k].code, false); }

/* lane[n]: the lane that lane n reads, or -1 where there is none. */
static void dpp_lanes(uint32_t control, int8_t lane[LANES]) {
    int count = (int)(control & 15);
    /* The switch is outside the loops: DPP is in the reductions, the hottest code there is. */
#define EACH_LANE(expression) for (int n = 0; n < LANES; n++) lane[n] = (int8_t)(expression); return
#define ROW (n & 48)
#define IN_ROW (n & 15)
    if (control < 0x100) { EACH_LANE((n & ~3) | (int)(control >> 2 * (n & 3) & 3)); }
    switch (control >> 4) {
    case 0x10: EACH_LANE(IN_ROW + count < 16 ? n + count : -1);
    case 0x11: EACH_LANE(IN_ROW >= count ? n - count : -1);
    case 0x12: EACH_LANE(ROW | ((IN_ROW - count) & 15));
    case 0x15: EACH_LANE(ROW | count); /* row_newbcast */
    }
    switch (control) {
    case 0x130: EACH_LANE(n < 63 ? n + 1 : -1);
    case 0x134: EACH_LANE((n + 1) & 63);
    case 0x138: EACH_LANE(n - 1);
    case 0x13c: EACH_LANE((n - 1) & 63);
    case 0x140: EACH_LANE(ROW | (15 - IN_ROW));
    case 0x141: EACH_LANE(n ^ 7);
    case 0x142: EACH_LANE(ROW - 1); /* row_bcast:15; the first row has no source */
    case 0x143: EACH_LANE(n < 32 ? -1 : 31);
    default: EACH_LANE(-1);
    }
#undef EACH_LANE
#undef ROW
#undef IN_ROW
}

bool dpp_known(const Insn *i) {
    uint32_t control = i->sub & DPP_CTRL_MASK;
    if (control < 0x100 || (control >> 4 == 0x15)) return true;
    if (control >> 4 <= 0x12) return (control & 15) != 0;
    return control == 0x130 || control == 0x134 || control == 0x138 || control == 0x13c ||
           (control >= 0x140 && control <= 0x143);
}

/* A lane that EXEC switches off is as little a source as one beyond the row. */
static bool dpp_valid(uint64_t exec, int lane) { return lane >= 0 && (exec >> lane & 1); }

static const uint32_t *dpp_source(const Wave *w, const Insn *i, const uint32_t *from, uint32_t tmp[LANES]) {
    int8_t lane[LANES];
    uint64_t exec = exec_mask(w);
    dpp_lanes(i->sub & DPP_CTRL_MASK, lane);
    for (int n = 0; n < LANES; n++) tmp[n] = dpp_valid(exec, lane[n]) ? from[lane[n]] : 0;
    return tmp;
}

static const uint32_t *sdwa_source(const Insn *i, int k, const uint32_t *from, uint32_t tmp[LANES]) {
    uint32_t select = i->sub >> (k ? SDWA_SRC1_SEL_SHIFT : SDWA_SRC0_SEL_SHIFT) & 7;
    bool sign = i->sub & (k ? SDWA_SRC1_SEXT : SDWA_SRC0_SEXT);
    if (select == 6) return from;
    uint32_t width = select < 4 ? 8 : 16, shift = select < 4 ? 8 * select : 16 * (select - 4);
    for (int n = 0; n < LANES; n++) {
        uint32_t top = from[n] << (32 - width - shift);
        tmp[n] = sign ? (uint32_t)((int32_t)top >> (32 - width)) : top >> (32 - width);
    }
    return tmp;
}

static const uint32_t *broadcast(uint32_t value, uint32_t tmp[LANES]) {
    for (int n = 0; n < LANES; n++) tmp[n] = value;
    return tmp;
}

static const uint32_t *select_lanes(const Wave *w, const Insn *i, int k, const uint32_t *from, uint32_t tmp[LANES]) {
    if ((i->flags & F_DPP) && k == 0) return dpp_source(w, i, from, tmp);
    if ((i->flags & F_SDWA) && k < 2) return sdwa_source(i, k, from, tmp);
    return from;
}

const uint32_t *source32(const Wave *w, const Insn *i, int k, int r, uint32_t tmp[LANES]) {
    Operand s = i->src[k];
    if (s.code >= VGPR0) return select_lanes(w, i, k, w->vgpr[s.code - VGPR0 + r], tmp);
    uint32_t value;
    if (s.code < SGPRS) value = w->sgpr[s.code + r];
    else if (r == 1 && s.count == 2 && !is_inline_float(s.code)) value = uniform64(w, i, s.code, false) >> 32;
    else value = uniform32(w, i, s.code);
    return select_lanes(w, i, k, broadcast(value, tmp), tmp);
}

const uint32_t *source16f(const Wave *w, const Insn *i, int k, uint32_t tmp[LANES]) {
    uint16_t code = i->src[k].code;
    return is_inline_float(code) ? broadcast(float16_constant(code), tmp) : source32(w, i, k, 0, tmp);
}

void source64(const Wave *w, const Insn *i, int k, bool is_float, uint64_t out[LANES]) {
    uint16_t code = i->src[k].code;
    if (code < VGPR0) {
        uint64_t value = uniform64(w, i, code, is_float);
        for (int n = 0; n < LANES; n++) out[n] = value;
        return;
    }
    uint32_t low_tmp[LANES], high_tmp[LANES];
    const uint32_t *low = source32(w, i, k, 0, low_tmp), *high = source32(w, i, k, 1, high_tmp);
    for (int n = 0; n < LANES; n++) out[n] = low[n] | (uint64_t)high[n] << 32;
}

/* Lanes of the rows or banks whose bit is on: first is the mask of number 0, the others are width lanes on. */
static uint64_t spread(uint32_t on, int width, uint64_t first) {
    uint64_t mask = 0;
    for (int n = 0; n < 4; n++) mask |= on >> n & 1 ? first << width * n : 0;
    return mask;
}

uint64_t lane_mask(const Wave *w, const Insn *i) {
    uint64_t exec = exec_mask(w);
    if (!(i->flags & F_DPP)) return exec;
    uint64_t mask = exec & spread(i->sub >> DPP_ROW_MASK_SHIFT, 16, 0xffff) &
                    spread(i->sub >> DPP_BANK_MASK_SHIFT, 4, 0x000f000f000f000f);
    if (i->sub & DPP_BOUND_CTRL) return mask;
    int8_t lane[LANES];
    uint64_t valid = 0;
    dpp_lanes(i->sub & DPP_CTRL_MASK, lane);
    for (int n = 0; n < LANES; n++) valid |= (uint64_t)dpp_valid(exec, lane[n]) << n;
    return mask & valid;
}

static void sdwa_merge(const Insn *i, uint32_t *to, const uint32_t *value, uint64_t mask) {
    uint32_t select = i->sub >> SDWA_DST_SEL_SHIFT & 7, unused = i->sub >> SDWA_DST_UNUSED_SHIFT & 3;
    uint32_t width = select < 4 ? 8 : 16, shift = select < 4 ? 8 * select : 16 * (select - 4);
    uint32_t field = (width == 8 ? 0xffu : 0xffffu) << shift;
    for (int n = 0; n < LANES; n++) {
        if (!(mask >> n & 1)) continue;
        uint32_t part = value[n] << shift & field;
        if (unused == 2) part |= to[n] & ~field;
        else if (unused == 1) part = (uint32_t)((int32_t)(part << (32 - width - shift)) >> (32 - width - shift));
        to[n] = part;
    }
}

#define BITS4(n) 1u << (n), 2u << (n), 4u << (n), 8u << (n)
static const uint32_t bit[32] = {BITS4(0), BITS4(4), BITS4(8), BITS4(12), BITS4(16), BITS4(20), BITS4(24), BITS4(28)};
#undef BITS4

void write32(Wave *w, const Insn *i, int r, const uint32_t value[LANES], uint64_t mask) {
    uint32_t *to = w->vgpr[i->dst.code - VGPR0 + r];
    if ((i->flags & F_SDWA) && (i->sub >> SDWA_DST_SEL_SHIFT & 7) != 6) {
        sdwa_merge(i, to, value, mask);
    } else if (mask == UINT64_MAX) {
        memmove(to, value, LANES * sizeof *to);
    } else {
        /* A table of bits, since vectors of SSE2 have no shift by lane. */
        for (int half = 0; half < 2; half++) {
            uint32_t on = (uint32_t)(mask >> 32 * half), *out = to + 32 * half;
            const uint32_t *in = value + 32 * half;
            for (int n = 0; n < 32; n++) {
                uint32_t take = 0u - ((on & bit[n]) != 0);
                out[n] = (in[n] & take) | (out[n] & ~take);
            }
        }
    }
}

void write_scalar32(Wave *w, uint16_t code, uint32_t value) {
    if (code < SGPRS) w->sgpr[code] = value;
}

void write_scalar64(Wave *w, uint16_t code, uint64_t value) {
    write_scalar32(w, code, (uint32_t)value);
    write_scalar32(w, code + 1, (uint32_t)(value >> 32));
}
