"""The arithmetic of the V-split K5: registers, LDS, and the steps of a chunk on either architecture."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import Vector as Vec

from ...spec.base import CHUNK, LOG2E
from ...spec.tprime import VSplitScanSpec
from ..common import lanes, lds, numeric
from .prepare_rows import left_operands
from .state_scan_views import ROW, larger, smaller, store_nothing
from .state_scan_vsplit_memory import BLOCKS, PARTS, Traffic

KEY_BYTES = CHUNK * ROW
"""LDS of the rows of k of a chunk."""

OWN_BYTES = 16 * ROW
"""LDS of 16 rows: of a wave's tokens of k, or of one of its tiles of bf16(S)."""

GATE_BYTES = 2 * 4 * CHUNK
"""LDS of a wave: -exp(G) and exp(G_L - G) of all tokens."""


class Scan:
    """What both architectures have in common.

    Rows of 256 bytes in LDS (k by token, bf16(S) by v) are 16 units of 16 bytes; ``at`` xors the number of a unit with
    a function of the row, so that accesses by rows and by columns are without bank conflicts.
    """

    wide: bool

    def __init__(self, spec: VSplitScanSpec, args: Any, key_row):
        """``key_row(q, i)``: which of the wave's 16 tokens of k load ``i`` of the lanes (., q) takes."""
        self.spec = spec
        self.wave, self.lane = lanes.wave_and_lane()
        self.n, self.q = self.lane % fx.Int32(16), self.lane // fx.Int32(16)
        self.key_rows = [key_row(self.q, i) for i in range(4)]
        first = self.wave * fx.Int32(16)
        self.traffic = Traffic(spec, args, self.wave, self.lane, [first + row for row in self.key_rows])
        self.tiles = range(self.traffic.tiles)
        self.bf16 = self.traffic.bf16
        self.identity = lanes.words(*(x & fx.Int32(0x7FFF7FFF) for x in lanes.minus_identity(self.lane)))
        self.odd = (self.lane & fx.Int32(1)) == fx.Int32(1)

    def at(self, row, unit):
        """Byte offset of a unit of a row below 16."""
        return row * fx.Int32(ROW) + ((unit ^ self.swizzle(row)) << fx.Int32(4))

    def pair(self, low, high, rounding=None):
        return numeric.bf16_pair(low, high, rounding or self.spec.rounding, self.spec.arch)

    def packed(self, tile, rounding=None):
        """A C tile, rounded, as an operand of K = 16."""
        return lanes.words(*(self.pair(tile[r], tile[r + 1], rounding) for r in (0, 2)))

    def panel(self, state, part):
        """bf16(S) of one part of k by tiles of v."""
        return [lanes.joined(*(self.packed(tile) for tile in state[c][part])) for c in self.tiles]

    def spread_gates(self, g, g_last):
        """exp(G_L), and into the wave's LDS -exp(G) and exp(G_L - G), one exponential per lane."""
        if not self.spec.use_exp2:
            g, g_last = g * fx.Float32(LOG2E), g_last * fx.Float32(LOG2E)
        for number, value in enumerate((-numeric.exp2(g), numeric.exp2(g_last - g))):
            lds.write(Vec.from_elements([value.bitcast(fx.Int32)], fx.Int32), self.gate_write, 4 * CHUNK * number)
        return numeric.exp2(g_last)

    def gates(self, number):
        """What ``spread_gates`` wrote, by tiles of tokens: numbers of tokens 4q..4q+3."""
        return [lds.read(self.gate_read, 4, 4 * CHUNK * number + 64 * i).bitcast(fx.Float32) for i in range(BLOCKS)]

    def reduced(self, products, factor, values):
        """bf16(x) of a tile of tokens, x = v - exp(G) k S^T, as right operands: v is added as v @ I."""
        row = []
        for c in self.tiles:
            part = values if self.traffic.tiles == 1 else lanes.halves(values)[c]
            row.append(self.packed(lanes.mfma_k16(part, self.identity, products[c] * factor), "near"))
        return row

    def new_values(self, t, operands):
        """v_new = T' x by tiles of tokens and of v, not rounded; lane = v."""
        new = []
        for i in range(BLOCKS):
            row = []
            for c in self.tiles:
                tile = lanes.zeros()
                for blocks in left_operands(i):
                    if len(blocks) == 1:
                        tile = lanes.mfma_k16(t[i, blocks], operands[blocks[0]][c], tile)
                    else:
                        right = lanes.joined(*(operands[block][c] for block in blocks))
                        tile = lanes.mfma_k32(t[i, blocks], right, tile, wide=self.wide)
                row.append(tile)
            new.append(row)
        return new

    def finish(self, carry):
        self.traffic.finish(carry["state"], self.packed)


class WideScan(Scan):
    """gfx950: one barrier per chunk, k in two buffers of LDS, read by rows and transposed.

    LDS: the buffers of k, per wave its rows of bf16(S) (also where v_new is turned), per wave the gates. Waits are
    explicit, one per step: left to the compiler, there is one per operand (1920 instructions per chunk instead of
    1788). ``vmcnt`` counts what a turn issues, in order: 2 loads of g, 4 of k, the stores of h, 4 loads of v, 6 of T',
    4 stores of v_new.
    """

    wide = True

    def __init__(self, spec: VSplitScanSpec, args: Any):
        super().__init__(spec, args, lambda q, i: fx.Int32(4 * i) + q)
        n, q, i32 = self.n, self.q, fx.Int32
        keys, rows, gates = lds.regions(2 * KEY_BYTES, 4 * OWN_BYTES * len(self.tiles), 4 * GATE_BYTES)
        own = self.wave * i32(OWN_BYTES)
        self.key_write = [keys.at(own + self.at(row, n)) for row in self.key_rows]
        self.key_read = [keys.at(self.at(n, i32(4 * p) + q)) for p in range(PARTS)]
        token = q * i32(4) + n // i32(4)
        self.key_turned = [keys.at(self.at(token, i32(4 * p) + self.lane % i32(4))) for p in range(PARTS)]
        own = self.wave * i32(OWN_BYTES * len(self.tiles))
        self.panel_write = [rows.at(own + self.at(n, i32(4 * p) + q)) for p in range(PARTS)]
        self.panel_read = [rows.at(own + self.at(i32(4 * i) + q, n)) for i in range(4)]
        self.turn_write = rows.at(own + n * i32(32) + q * i32(8))
        self.turn_read = rows.at(own + self.lane * i32(8))
        self.gate_write = gates.at(self.wave * i32(GATE_BYTES) + self.lane * i32(4))
        self.gate_read = gates.at(self.wave * i32(GATE_BYTES) + q * i32(16))

    def swizzle(self, row):
        return ((row & fx.Int32(7)) << fx.Int32(1)) | ((row >> fx.Int32(3)) & fx.Int32(1))

    def begin(self):
        """What the loop carries: windows, state, data of the first chunk, k of the second. k of the first is in LDS."""
        traffic = self.traffic
        views, rows = traffic.start(), smaller(traffic.length, fx.Int32(CHUNK))
        lds.sched_fence()
        first = traffic.fetch_k(views)
        state = traffic.initial()
        left = larger(traffic.length, fx.Int32(CHUNK)) - fx.Int32(CHUNK)
        traffic.advance(views, ["k"], smaller(left, fx.Int32(CHUNK)))
        for words, place in zip(first, self.key_write, strict=True):
            lds.write(words, place)
        lds.sched_fence()
        g = traffic.fetch_g(views, rows)
        lds.sched_fence()
        k = traffic.fetch_k(views)
        lds.sched_fence()
        store_nothing(traffic.snapshot_stores)
        lds.sched_fence()
        v, t = traffic.fetch_v(views), traffic.fetch_t(views)
        lds.sched_fence()
        store_nothing(traffic.new_stores)
        lds.sched_fence()
        rocdl.s_waitcnt(lgkmcnt=0)  # see NarrowScan.chunk
        data = {"k": k, "v": v, "t": t, "g": g}
        return {"views": views, "left": left, "state": state, "buffer": fx.Int32(0), **data}

    def chunk(self, carry):
        """One chunk. ``left``: tokens from the next one on."""
        traffic, views = self.traffic, dict(carry["views"])
        state, buffer, other = carry["state"], carry["buffer"], carry["buffer"] ^ fx.Int32(KEY_BYTES // 4)
        lds.sched_fence()
        lds.barrier()
        lds.sched_fence()
        next_rows = smaller(carry["left"], fx.Int32(CHUNK))
        # Not a clamp on both sides, which becomes v_med3_i32 and takes the windows out of the scalar registers.
        left = larger(carry["left"], fx.Int32(CHUNK)) - fx.Int32(CHUNK)
        traffic.advance(views, ["k"], smaller(left, fx.Int32(CHUNK)))
        traffic.advance(views, ["v", "t", "g"], next_rows)

        keys = self.keys(buffer, 0)
        decay = self.spread_gates(*carry["g"])
        lds.sched_fence()
        g = traffic.fetch_g(views, next_rows)
        lds.sched_fence()
        products, factors = self.first_product(state, keys, buffer)
        rocdl.s_waitcnt(vmcnt=16 + traffic.snapshot_stores)
        lds.sched_fence()
        for words, place in zip(carry["k"], self.key_write, strict=True):
            lds.write(words, place + other)
        lds.sched_fence()
        k = traffic.fetch_k(views)
        rows = None
        if self.bf16:
            rows = [[lds.read(place, 4, OWN_BYTES * c) for place in self.panel_read] for c in self.tiles]
        lds.sched_fence()
        rocdl.s_waitcnt(vmcnt=16, lgkmcnt=8 if self.bf16 else 4)
        lds.sched_fence()
        operands = []
        for i in range(BLOCKS):
            operands.append(self.reduced(products[i], factors[i], carry["v"][i]))
            if not self.bf16:
                traffic.store_exchanged(views, state, i, self.odd)
        lds.sched_fence()
        rocdl.s_waitcnt(lgkmcnt=0)
        lds.sched_fence()
        if self.bf16:
            traffic.store_rows(views, rows)
        lds.sched_fence()
        v = traffic.fetch_v(views)
        rocdl.s_waitcnt(vmcnt=14 + traffic.snapshot_stores)
        lds.sched_fence()
        gates = self.gates(1)
        new = self.new_values(carry["t"], operands)
        lds.sched_fence()
        t = traffic.fetch_t(views)
        rows = self.turned(new)
        keys = self.turned_keys(buffer, 0)
        lds.sched_fence(lds.ALU)
        gated = [[self.packed(tile * gates[i]) for tile in new[i]] for i in range(BLOCKS)]
        lds.sched_fence()
        rocdl.s_waitcnt(lgkmcnt=8)
        lds.sched_fence()
        for i in range(BLOCKS):
            traffic.store_new(views, i, rows[i])
        lds.sched_fence()
        state = self.second_product(state, gated, decay, keys, buffer)
        traffic.advance(views, ["v_new", "h"], next_rows)
        data = {"k": k, "v": v, "t": t, "g": g}
        return {"views": views, "left": left, "state": state, "buffer": other, **data}

    def keys(self, buffer, part):
        """Rows of k by tiles of tokens, as left operands."""
        return [lds.read(self.key_read[part] + buffer, 4, OWN_BYTES * i) for i in range(BLOCKS)]

    def first_product(self, state, keys, buffer):
        """(k S^T by tiles of tokens and of v, -exp(G)); bf16(S) goes to LDS on the way. ``keys``: of the first part."""
        products = [[lanes.zeros() for _ in self.tiles] for _ in range(BLOCKS)]
        factors = None
        for part in range(PARTS):
            left = keys
            if part + 1 < PARTS:
                keys = self.keys(buffer, part + 1)
            else:
                factors = self.gates(0)
            panel = self.panel(state, part)
            lds.sched_fence()
            # What was issued before this part's reads; the gates' write is younger than the first.
            rocdl.s_waitcnt(lgkmcnt=5 if part == 0 else 4 + len(self.tiles) * self.bf16)
            lds.sched_fence()
            for c in self.tiles if self.bf16 else ():
                lds.write(panel[c], self.panel_write[part], OWN_BYTES * c)
            for i in range(BLOCKS):
                for c in self.tiles:
                    products[i][c] = lanes.mfma_k32(left[i], panel[c], products[i][c], wide=True)
            lds.sched_fence()
        return products, factors

    def turned(self, new):
        """v_new, rounded, by tiles of tokens and of v; lane = token."""
        for i in range(BLOCKS):
            for c in self.tiles:
                lds.write(self.packed(new[i][c]), self.turn_write, 2048 * c + 512 * i)
        return [[lds.read_transposed(self.turn_read, 2048 * c + 512 * i) for c in self.tiles] for i in range(BLOCKS)]

    def turned_keys(self, buffer, part):
        """k^T of one part as left operands: [half of the part][pair of tiles of tokens]."""
        place = self.key_turned[part] + buffer

        def operand(half, pair):
            tokens = [OWN_BYTES * (2 * pair + j) for j in range(2)]
            return lanes.joined(*(lds.read_transposed(place, x + 8 * half) for x in tokens))

        return [[operand(half, pair) for pair in range(2)] for half in range(2)]

    def second_product(self, state, gated, decay, keys, buffer):
        """exp(G_L) S + gated^T k. Each part is decayed behind the products of the one before: 4320 to 4253 cycles for
        two workgroups of BV = 128 in the emulator's model."""
        state = [[list(part) for part in tile] for tile in state]
        for part in range(PARTS):
            left = keys
            if part + 1 < PARTS:
                keys = self.turned_keys(buffer, part + 1)
            lds.sched_fence(lds.ALU)
            lds.sched_fence()
            rocdl.s_waitcnt(lgkmcnt=8 if part + 1 < PARTS else 0)
            lds.sched_fence()
            if part == 0:
                self.decay(state, 0, decay)
            for pair in range(2):
                for half in range(2):
                    for c in self.tiles:
                        right = lanes.joined(gated[2 * pair][c], gated[2 * pair + 1][c])
                        tile = state[c][part][half]
                        state[c][part][half] = lanes.mfma_k32(left[half][pair], right, tile, wide=True)
            if part + 1 < PARTS:
                self.decay(state, part + 1, decay)
            lds.sched_fence()
        return state

    def decay(self, state, part, decay):
        for half in range(2):
            for c in self.tiles:
                state[c][part][half] = state[c][part][half] * decay


class NarrowScan(Scan):
    """gfx942: two barriers per chunk and 32 KB of LDS, half the memory of a compute unit.

    LDS: rows of k, and k^T as operands by tiles of tokens. Until the second barrier a wave's part of the latter holds
    its rows of bf16(S), one tile after the other; after it the wave's own rows of k hold its gates.
    """

    wide = False

    def __init__(self, spec: VSplitScanSpec, args: Any):
        super().__init__(spec, args, lambda q, i: q * fx.Int32(4) + fx.Int32(i))
        n, q, i32 = self.n, self.q, fx.Int32
        (area,) = lds.regions(2 * KEY_BYTES)
        own = self.wave * i32(OWN_BYTES)
        turned = i32(KEY_BYTES) + own
        self.key_write = [area.at(own + self.at(row, n)) for row in self.key_rows]
        self.key_read = [area.at(self.at(n, i32(4 * p) + q)) for p in range(PARTS)]
        self.panel_write = [area.at(turned + self.at(n, i32(4 * p) + q)) for p in range(PARTS)]
        self.panel_read = [area.at(turned + self.at(i32(4 * i) + q, n)) for i in range(4)]
        # A lane has 8 k of 4 tokens: those of part p = n // 4, at 4 * (n % 4) in either half of it.
        part, first = n // i32(4), q * i32(16) + n % i32(4) * i32(4)
        self.turn_write = [area.at(turned + part * i32(1024) + (first + (i32(k) ^ part)) * i32(8)) for k in range(4)]
        self.key_turned = [
            area.at(i32(KEY_BYTES + 1024 * p) + (q * i32(16) + (n ^ i32(p))) * i32(8)) for p in range(PARTS)
        ]
        self.gate_write = area.at(own + self.lane * i32(4))
        self.gate_read = area.at(own + q * i32(16))

    def swizzle(self, row):
        return row

    def begin(self):
        """What the loop carries: windows, state, data of the first chunk. Its rows of k are in LDS too."""
        traffic = self.traffic
        views, rows = traffic.start(), smaller(traffic.length, fx.Int32(CHUNK))
        lds.sched_fence()
        k = traffic.fetch_k(views)
        state = traffic.initial()
        self.publish(k)
        lds.sched_fence()
        store_nothing(traffic.snapshot_stores)
        lds.sched_fence()
        v, g, t = traffic.fetch_v(views), traffic.fetch_g(views, rows), traffic.fetch_t(views)
        lds.sched_fence()
        store_nothing(traffic.new_stores)
        lds.sched_fence()
        return {"views": views, "left": traffic.length, "state": state, "k": k, "v": v, "t": t, "g": g}

    def publish(self, k):
        """Rows of k to LDS."""
        for words, place in zip(k, self.key_write, strict=True):
            lds.write(words, place)

    def chunk(self, carry):
        """One chunk. ``left``: tokens from this one on."""
        traffic, views, state = self.traffic, dict(carry["views"]), carry["state"]
        lds.sched_fence()
        # The compiler's own wait is lost where a barrier comes first in a loop that ends with LDS writes.
        rocdl.s_waitcnt(lgkmcnt=0)
        lds.barrier()
        lds.sched_fence()
        # Not a clamp on both sides, which becomes v_med3_i32 and takes the windows out of the scalar registers.
        left = larger(carry["left"], fx.Int32(CHUNK)) - fx.Int32(CHUNK)
        next_rows = smaller(left, fx.Int32(CHUNK))
        traffic.advance(views, ["k", "v", "t", "g"], next_rows)
        products, panels = self.first_product(state)
        rows = self.snapshot_rows(panels)
        lds.sched_fence()
        self.turn_keys(carry["k"])
        lds.sched_fence()
        lds.barrier()
        lds.sched_fence()
        k = traffic.fetch_k(views)
        decay = self.spread_gates(*carry["g"])
        factors = self.gates(0)
        lds.sched_fence()
        if self.bf16:
            traffic.store_rows(views, rows)
        lds.sched_fence()
        operands = []
        for i in range(BLOCKS):
            operands.append(self.reduced(products[i], factors[i], carry["v"][i]))
            if not self.bf16:
                traffic.store_exchanged(views, state, i, self.odd)
        lds.sched_fence()
        v, g = traffic.fetch_v(views), traffic.fetch_g(views, next_rows)
        gates = self.gates(1)
        new = self.new_values(carry["t"], operands)
        lds.sched_fence()
        t = traffic.fetch_t(views)
        lds.sched_fence()
        keys = self.turned_keys(0)
        lds.sched_fence(lds.ALU)
        gated = [[self.packed(tile * gates[i]) for tile in new[i]] for i in range(BLOCKS)]
        plain = [[self.packed(tile) for tile in row] for row in new]
        lds.sched_fence()
        for i in range(BLOCKS):
            traffic.store_new(views, i, [self.turned(tile) for tile in plain[i]])
        lds.sched_fence()
        state = self.second_product(state, gated, decay, keys)
        self.publish(k)
        traffic.advance(views, ["v_new", "h"], next_rows)
        return {"views": views, "left": left, "state": state, "k": k, "v": v, "t": t, "g": g}

    def keys(self, part):
        """Rows of k by tiles of tokens, as left operands."""
        return [lds.read(self.key_read[part], 4, OWN_BYTES * i) for i in range(BLOCKS)]

    def first_product(self, state):
        """(k S^T by tiles of tokens and of v, bf16(S) by parts of k and tiles of v); the first tile of it is in LDS."""
        keys, panels = self.keys(0), []
        lds.sched_fence()
        products = [[lanes.zeros() for _ in self.tiles] for _ in range(BLOCKS)]
        for part in range(PARTS):
            left = keys
            if part + 1 < PARTS:
                keys = self.keys(part + 1)
            panel = self.panel(state, part)
            panels.append(panel)
            lds.sched_fence()
            rocdl.s_waitcnt(lgkmcnt=4 + (part > 0) * self.bf16 if part + 1 < PARTS else 0)
            lds.sched_fence()
            if self.bf16:
                lds.write(panel[0], self.panel_write[part])
            for i in range(BLOCKS):
                for c in self.tiles:
                    products[i][c] = lanes.mfma_k32(left[i], panel[c], products[i][c], wide=False)
            lds.sched_fence()
        return products, panels

    def snapshot_rows(self, panels):
        """bf16(S) by rows of v, by tiles of v; None for fp32."""
        if not self.bf16:
            return None
        rows = []
        for c in self.tiles:
            if c:
                for panel, place in zip(panels, self.panel_write, strict=True):
                    lds.write(panel[c], place)
            rows.append([lds.read(place, 4) for place in self.panel_read])
        return rows

    def turn_keys(self, k):
        """k^T of the wave's tokens to LDS, from rows of four tokens."""
        for word in range(4):
            for high in range(2):
                selector = numeric.HIGH_HALVES if high else numeric.LOW_HALVES
                pairs = [numeric.permute(k[j + 1][word], k[j][word], selector) for j in (0, 2)]
                half, column = divmod(2 * word + high, 4)
                lds.write(lanes.words(*pairs), self.turn_write[column], 512 * half)

    def turned(self, operand):
        """A tile of bf16 numbers transposed: lane = token."""
        return self.packed(lanes.mfma_k16(operand, self.identity, lanes.zeros()), "truncate")

    def turned_keys(self, part):
        """k^T of one part as left operands: [half of the part][tile of tokens]."""
        place = self.key_turned[part]
        return [[lds.read(place, 2, 512 * half + OWN_BYTES * i) for i in range(BLOCKS)] for half in range(2)]

    def second_product(self, state, gated, decay, keys):
        """exp(G_L) S + gated^T k."""
        state = [[list(part) for part in tile] for tile in state]
        for part in range(PARTS):
            left = keys
            if part + 1 < PARTS:
                keys = self.turned_keys(part + 1)
            for half in range(2):
                for c in self.tiles:
                    state[c][part][half] = state[c][part][half] * decay
            lds.sched_fence(lds.ALU)
            rocdl.s_waitcnt(lgkmcnt=4 if part + 1 < PARTS else 0)
            lds.sched_fence(lds.ALU)
            for i in range(BLOCKS):
                for half in range(2):
                    for c in self.tiles:
                        tile = state[c][part][half]
                        state[c][part][half] = lanes.mfma_k16(left[half][i], gated[i][c], tile)
            lds.sched_fence(lds.ALU)
        lds.sched_fence()
        return state
