"""K5 `opt`: the state scan over the chunks of a sequence, for gfx942 and gfx950.

Per chunk of 64 tokens, S [V, K] fp32, from the snapshot h = S on (products of bf16 operands, sums in fp32):
    v_new = u - w @ bf16(S)^T                                       stored as bf16, not gated
    S = exp(G_L) * S [* exp(gk_L[k])] + bf16(v_new * exp(G_L - G))^T @ k
G: cumulated log gate of the chunk's tokens, G_L and gk_L those of its last valid token.

A workgroup has BV columns of v of one (sequence, value head); its four waves split the rows of both products: wave w
computes v_new of tokens 16w..16w+15 and rows 32w..32w+31 (k) of S^T, which stays in its registers, lane = v. So rows of
w, and the columns of k that a wave needs, are its own: they come from global memory straight into its registers. Only
bf16(S) (256*BV bytes) and the gated v_new (128*BV bytes) go through LDS, between two barriers per chunk:
    write S | barrier | w @ S^T, gate, write gated v_new | barrier | v_new^T @ k
What changes lanes for registers is multiplied by -I (``lanes.minus_transposed``, exact): u (as it is subtracted), k,
and v_new before its store. The signs cancel: the sums hold -v_new, and k^T is -k^T.

Loads run two chunks ahead, in two sets of registers: one in-order counter holds loads and stores of a wave, so a load
that is waited for two chunks later never waits for a recent store. The loop's turn is two chunks; an odd last chunk
follows it.

Infinities and NaN: 0 * inf and 0 * NaN are NaN, so the products with -I spread one such element over 16 of its
neighbours, always of the same sequence and head: of u over the 16 columns of its tile of v, of k over the 16 rows of
its tile of k, of v_new over the 16 tokens of its tile. Rows past the end of a sequence are never read.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Vector as Vec

from ...spec.base import LOG2E
from ...spec.flydsl import OptStateScanSpec
from ..common import lanes, lds, numeric
from .state_scan_memory import Arguments, Traffic

S_TILE = 1024
"""Bytes of LDS of one k group of 32 rows and one tile of v of bf16(S): 16 bytes per lane."""

GATED_TILE = 512
"""Bytes of LDS of 16 tokens and one tile of v of the gated v_new: 8 bytes per lane."""


class Scan:
    """The arithmetic of one workgroup: what registers and LDS hold, and the steps of a chunk.

    bf16(S) in LDS: the 8 k of group q in rows 32p.. of column n of a tile lie at 16-byte slot 16*q + (n ^ (4p + q)) of
    the (p, tile) part. In that order the writes, the reads as B operand (lane = q, n) and the reads by rows of v
    (lane = p, q: 256 contiguous bytes of h per 16 lanes) are all without bank conflicts.
    """

    def __init__(self, spec: OptStateScanSpec, args: Arguments):
        self.spec = spec
        self.wide = spec.arch == "gfx950"
        # gfx950 always keeps the steps of the first product apart; gfx942 if the spec says so.
        self.between_steps = 0 if self.wide or spec.sched_barrier else lds.ALU
        self.tiles = spec.block_v // lanes.TILE
        wave, lane = lanes.wave_and_lane()
        group, column = lane // fx.Int32(16), lane % fx.Int32(16)
        self.traffic = Traffic(spec, args, wave, lane)
        self.minus_one = lanes.minus_identity(lane)
        self.odd = (lane & fx.Int32(1)) == fx.Int32(1)
        panel, gated = lds.regions(4 * S_TILE * self.tiles, 4 * GATED_TILE * self.tiles)

        def slot(p, q, n):
            unit = q * fx.Int32(16) + (n ^ (p * fx.Int32(4) + q))
            return p * fx.Int32(S_TILE * self.tiles) + unit * fx.Int32(16)

        self.panel_write = panel.at(slot(wave, group, column))
        self.panel_read = [panel.at(slot(fx.Int32(p), group, column)) for p in range(4)]
        self.rows_read = panel.at(slot(column // fx.Int32(4), column % fx.Int32(4), wave * fx.Int32(4) + group))
        self.gated_write = gated.at(wave * fx.Int32(GATED_TILE) + lane * fx.Int32(8))
        self.gated_read = gated.at(lane * fx.Int32(8))

    def begin(self):
        """What the loop carries: windows, state, data of the next two chunks. bf16(S) is in LDS."""
        traffic, state, first, second = self.traffic.start()
        for i in range(self.tiles):
            self.publish(state, i)
        return {"traffic": traffic, "state": state, "first": first, "second": second}

    def chunk(self, state, data, half, *, more):
        """One chunk: (next state, data of the chunk after the next); no such data, nor bf16(S) in LDS, unless ``more``.

        The fences keep what is needed next ahead of the rest, and stores behind loads.
        """
        lds.sched_fence()
        self.traffic.wait_fetched()
        lds.barrier()
        lds.sched_fence()
        keys, delta, following = self.first_product(data, half, more)
        decays, gates = self.decays(data), self.gates(data)
        lds.sched_fence()
        rows = self.snapshot_rows()
        for i in range(self.tiles):
            gated = delta[i] * gates if self.spec.use_g else delta[i]
            lds.write(self.packed(gated), self.gated_write, 4 * GATED_TILE * i)
        lds.sched_fence()
        if more:
            following |= self.traffic.fetch_gates(half)
        lds.sched_fence()
        lds.barrier()
        lds.sched_fence()
        values = [self.gated_values(0)]
        new = [lanes.minus_transposed(self.packed(x), self.minus_one) for x in delta]
        lds.sched_fence()
        state = [list(x) for x in state]
        for i in range(self.tiles):
            if i + 1 < self.tiles:
                values.append(self.gated_values(i + 1))
            self.store_snapshot(rows, state[i], i, half)
            state[i] = [part if by is None else part * by for part, by in zip(state[i], decays, strict=True)]
            for step in range(2):
                for part in range(2):
                    key = lanes.joined(*(keys[2 * step + j][part] for j in range(2)))
                    state[i][part] = lanes.mfma_k32(key, values[i][step], state[i][part], wide=self.wide)
            if self.spec.save_new_value and i == 0:
                self.traffic.store_new([self.exact(x) for x in new], half)
            if more and i:
                self.publish(state, i - 1)
            lds.sched_fence()
        if more:
            self.publish(state, self.tiles - 1)
        return state, following

    def pair(self, low, high):
        return numeric.bf16_pair(low, high, self.spec.rounding, self.spec.arch)

    def packed(self, tile):
        """A C tile, rounded, as an operand of K = 16."""
        return lanes.words(*(self.pair(tile[r], tile[r + 1]) for r in (0, 2)))

    def exact(self, tile):
        """``packed`` of a tile of bf16 numbers."""
        return lanes.words(*(lanes.pack_truncated(tile[r], tile[r + 1]) for r in (0, 2)))

    def publish(self, state, i):
        """Tile ``i`` of bf16(S) to LDS."""
        words = lanes.joined(*(self.packed(part) for part in state[i]))
        lds.write(words, self.panel_write, S_TILE * i)

    def minus_keys(self, rows):
        """-k^T of 16 tokens and the wave's 32 k, by tiles of k; ``rows``: lane = token."""
        return [lanes.minus_transposed(part, self.minus_one) for part in lanes.halves(rows)]

    def first_product(self, data, half, more):
        """(-k^T as A operands by 16 tokens and tiles of k, -v_new = w @ S^T - u by tiles of v, not rounded, data of the
        chunk after the next but for its gates, if there are ``more``).

        What needs no LDS goes where the first reads from it are waited for. Loads go where the registers that they
        load have just been read for the last time: earlier ones would need copies.
        """
        traffic, tiles, ahead = self.traffic, range(self.tiles), 4 if self.tiles == 1 else 2
        panels = [self.panels(p) for p in range(ahead)]
        lds.sched_fence()
        raw, keys = [self.minus_keys(data["k"][0])], []
        delta = [lanes.mfma_k16(traffic.values_of(data["u"], i), self.minus_one, lanes.zeros()) for i in tiles]
        following = {"w": [], "k": [], "u": []}
        lds.sched_fence()
        if more:
            following["k"].append(traffic.fetch_k(half, 0))
            following["u"] = traffic.fetch_u(half)
        for p in range(4):
            if p < 3:
                raw.append(self.minus_keys(data["k"][p + 1]))
            if p + ahead < 4:
                panels.append(self.panels(p + ahead))
            keys.append([self.exact(tile) for tile in raw[p]])
            delta = [lanes.mfma_k32(data["w"][p], panels[p][i], delta[i], wide=self.wide) for i in tiles]
            lds.sched_fence(self.between_steps)
            if more:
                if p < 3:
                    following["k"].append(traffic.fetch_k(half, p + 1))
                following["w"].append(traffic.fetch_w(half, p))
        return keys, delta, following

    def panels(self, p):
        """bf16(S) of k rows 32p.. by tiles of v as B operands."""
        return [lds.read(self.panel_read[p], 4, S_TILE * i) for i in range(self.tiles)]

    def gated_values(self, i):
        """The gated v_new of tile ``i`` as B operands of 32 tokens each."""
        at = [4 * GATED_TILE * i + GATED_TILE * t for t in range(4)]
        parts = [lds.read(self.gated_read, 2, x) for x in at]
        return [lanes.joined(parts[0], parts[1]), lanes.joined(parts[2], parts[3])]

    def gates(self, data):
        """exp(G_L - G) of the 4 tokens of a lane's rows; one exponential per lane, moved among groups of 4 lanes."""
        if not self.spec.use_g:
            return None
        gate = numeric.exp2(self.log2(data["g_last"] - data["g"]))
        return Vec.from_elements([lanes.of_quad(gate, r) for r in range(4)], fx.Float32)

    def decays(self, data):
        """What both halves of the state's k are multiplied by, or None; per key one exponential per lane, moved among
        its group of 16."""
        exponent = self.log2(data["g_last"]) if self.spec.use_g else None
        if self.spec.use_gk:
            channel = data["gk"] * fx.Float32(LOG2E)
            decay = numeric.exp2(channel if exponent is None else channel + exponent)
            return [Vec.from_elements([lanes.of_group(decay, 4 * j + r) for r in range(4)], fx.Float32) for j in (0, 1)]
        return [None if exponent is None else numeric.exp2(exponent)] * 2

    def log2(self, gate):
        """A log gate in log2 units."""
        return gate if self.spec.use_exp2 else gate * fx.Float32(LOG2E)

    def snapshot_rows(self):
        """Rows of bf16(S) for the snapshot, by tiles of v; None for fp32."""
        if self.spec.snapshot_dtype == "fp32":
            return None
        return [lds.read(self.rows_read, 4, S_TILE * i) for i in range(self.tiles)]

    def store_snapshot(self, rows, state, i, half):
        """Store tile ``i`` of S in whole 128-byte lines: bf16 by rows from LDS; fp32 from registers, after neighbour
        lanes have exchanged halves, so that 8 lanes have 128 contiguous bytes of a row."""
        if rows is not None:
            self.traffic.store_snapshot(rows[i], i, half)
            return
        low, high = (part.bitcast(fx.Int32) for part in state)
        both = [lanes.exchanged(low[r], high[r], self.odd) for r in range(4)]
        for row in range(2):
            self.traffic.store_snapshot(lanes.words(*(x[row] for x in both)), i, half, row)


def two_chunks(scan, carry):
    """A turn of the loop."""
    traffic = scan.traffic
    traffic.resume(carry["traffic"])
    traffic.advance_loads()
    state, first = scan.chunk(carry["state"], carry["first"], 0, more=True)
    state, second = scan.chunk(state, carry["second"], 1, more=True)
    traffic.advance_stores()
    return {"traffic": traffic.carry(), "state": state, "first": first, "second": second}


def last_chunk(scan, carry):
    """The last of an odd number of chunks."""
    scan.traffic.resume(carry["traffic"])
    state, _ = scan.chunk(carry["state"], carry["first"], 0, more=False)
    return {**carry, "state": state}


def build(spec: OptStateScanSpec):
    """The launcher of ``spec`` for ``_compile_only``, and example arguments: both of ``spec.ARGUMENTS``."""
    spec.check()

    @flyc.kernel(name=spec.kernel, known_block_size=list(spec.block))
    def state_scan_opt(
        k: fx.Int64,
        w: fx.Int64,
        u: fx.Int64,
        g: fx.Int64,
        gk: fx.Int64,
        h: fx.Int64,
        v_new: fx.Int64,
        initial_state: fx.Int64,
        final_state: fx.Int64,
        state_indices: fx.Int64,
        has_initial_state: fx.Int64,
        cu_seqlens: fx.Int64,
        chunk_offsets: fx.Int64,
        k_stride_b: fx.Int64,
        k_stride_h: fx.Int64,
        initial_stride: fx.Int64,
        final_stride: fx.Int64,
        seq_len: fx.Int32,
        k_stride_t: fx.Int32,
        num_slots: fx.Int32,
        index_bytes: fx.Int32,
    ):
        args = Arguments(
            k,
            w,
            u,
            g,
            gk,
            h,
            v_new,
            initial_state,
            final_state,
            state_indices,
            has_initial_state,
            cu_seqlens,
            chunk_offsets,
            k_stride_b,
            k_stride_h,
            initial_stride,
            final_stride,
            seq_len,
            k_stride_t,
            num_slots,
            index_bytes,
        )
        scan = Scan(spec, args)
        chunks = scan.traffic.chunks
        carry = scan.begin()
        for _ in range(fx.Int32(0), chunks >> fx.Int32(1), fx.Int32(1), unroll=1):
            carry = two_chunks(scan, carry)
        if (chunks & fx.Int32(1)) == fx.Int32(1):
            carry = last_chunk(scan, carry)
        scan.traffic.finish(carry["state"], scan.packed)

    @flyc.jit
    def launch(
        k: fx.Int64,
        w: fx.Int64,
        u: fx.Int64,
        g: fx.Int64,
        gk: fx.Int64,
        h: fx.Int64,
        v_new: fx.Int64,
        initial_state: fx.Int64,
        final_state: fx.Int64,
        state_indices: fx.Int64,
        has_initial_state: fx.Int64,
        cu_seqlens: fx.Int64,
        chunk_offsets: fx.Int64,
        k_stride_b: fx.Int64,
        k_stride_h: fx.Int64,
        initial_stride: fx.Int64,
        final_stride: fx.Int64,
        seq_len: fx.Int32,
        k_stride_t: fx.Int32,
        num_slots: fx.Int32,
        index_bytes: fx.Int32,
    ):
        state_scan_opt(
            k,
            w,
            u,
            g,
            gk,
            h,
            v_new,
            initial_state,
            final_state,
            state_indices,
            has_initial_state,
            cu_seqlens,
            chunk_offsets,
            k_stride_b,
            k_stride_h,
            initial_stride,
            final_stride,
            seq_len,
            k_stride_t,
            num_slots,
            index_bytes,
        ).launch(grid=(1, 1, 1), block=spec.block)

    # A range: given a minimum only, the scheduler goes for more waves and takes the products' pipelines apart.
    launch.compile_hints["waves_per_eu"] = "1,2"
    return launch, [fx.Int64(0)] * 17 + [fx.Int32(0)] * 4
