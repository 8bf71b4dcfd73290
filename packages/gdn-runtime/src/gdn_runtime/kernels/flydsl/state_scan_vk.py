"""K5 `vk`, the baseline: the serial pass over chunks on gfx950, bf16, with w, k, the state and the gated v in LDS.

A workgroup of four waves owns one sequence, one value head and ``block_v`` rows of its state S [V, K], which stays in
the accumulators. Per chunk of 64 tokens, in two steps with a barrier after each::

    1. snapshot = bf16(S);  Vn = u - w bf16(S)^T, by 16 tokens per wave, as a tile [v, token];  k goes to LDS
    2. S <- decay * S + bf16(Vn * gate)^T k, by 32 k per wave, as tiles [k, v];  w and S of the next chunk go to LDS

LDS holds one chunk: each region is written in the step that does not read it. Rows past a sequence's end are cut by the
bounds of the buffers: their stores are dropped, their loads give zeros, which add nothing to S, with gates or without.
(A row v of S that holds infinity or NaN turns into NaN at the next chunk by that chunk's own tokens already.)

Lane maps are those of ``common.lanes``: lane l has ``column`` l % 16 and ``group`` l // 16. Tokens of an operand of the
second product are contracted in the order 4*group + j, 16 + 4*group + j (j < 4) of each 32, on both sides.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Vector as Vec

from ...spec import CHUNK, HEAD_DIM, LOG2E, VkStateScanSpec
from ..common import lanes, lds, numeric
from ..common.memory import Buffer, offset64, scalar_load

ROW = 2 * HEAD_DIM
"""Bytes of a bf16 row of w, k, u, v_new, the snapshot: 16 lanes of 16 bytes."""

PASSES = CHUNK // 16
"""A workgroup moves 16 rows at a time."""

K_TILES = 2
"""Tiles of 16 k that a wave owns."""


def build(spec: VkStateScanSpec):
    """The launcher of ``spec`` for ``_compile_only``, and example arguments; both of kernel and launcher are
    ``spec.ARGUMENTS``."""
    spec.check()

    @flyc.kernel(name=spec.kernel, known_block_size=list(spec.block))
    def state_scan_vk(
        k: fx.Int64,
        w: fx.Int64,
        u: fx.Int64,
        g: fx.Int64,
        gk: fx.Int64,
        h: fx.Int64,
        v_new: fx.Int64,
        initial_state: fx.Int64,
        final_state: fx.Int64,
        cu_seqlens: fx.Int64,
        chunk_offsets: fx.Int64,
        k_stride_b: fx.Int64,
        k_stride_h: fx.Int64,
        seq_len: fx.Int32,
        k_stride_t: fx.Int32,
    ):
        scan = _Scan(spec, cu_seqlens, chunk_offsets, seq_len)
        scan.find_tensors(k, w, u, g, gk, h, v_new, initial_state, final_state, k_stride_b, k_stride_h, k_stride_t)
        state = scan.load_state()
        scan.publish_state(state)
        scan.publish_w(scan.load_w(fx.Int32(0)))
        ahead = scan.load_ahead(fx.Int32(0))
        lds.barrier()
        for chunk in range(fx.Int32(0), scan.num_chunks, fx.Int32(1), unroll=1):
            state, ahead = _step(scan, chunk, state, ahead)
        scan.store_state(state)

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
        cu_seqlens: fx.Int64,
        chunk_offsets: fx.Int64,
        k_stride_b: fx.Int64,
        k_stride_h: fx.Int64,
        seq_len: fx.Int32,
        k_stride_t: fx.Int32,
    ):
        state_scan_vk(
            k,
            w,
            u,
            g,
            gk,
            h,
            v_new,
            initial_state,
            final_state,
            cu_seqlens,
            chunk_offsets,
            k_stride_b,
            k_stride_h,
            seq_len,
            k_stride_t,
        ).launch(grid=spec.grid(1), block=spec.block)

    kinds = {"pointer": fx.Int64, "i64": fx.Int64, "i32": fx.Int32}
    return launch, tuple(kinds[argument.kind](0) for argument in spec.ARGUMENTS)


def _step(scan, chunk, state, ahead):
    """One chunk, whose state and w are in LDS: (state after it, operands of the next one).

    It ends with the first use of the new state and a barrier, for LLVM errs over the end of a loop (flydsl 0.5.0; the
    emulator found both): it drops the wait for LDS before a barrier that comes first in the loop, and counts a branch
    that is not taken among the wait states between an MFMA and the first use of its result.
    """
    next_w = scan.load_w(chunk + fx.Int32(1))
    scan.publish_k(ahead.k)
    product = scan.state_product()
    v_new = [[u[r].to(fx.Float32) - x[r] for r in range(4)] for u, x in zip(ahead.u, product, strict=True)]
    rest, decay = scan.decays(ahead)
    # The next chunk waits for its loads in their order: they go before the stores, which nothing waits for.
    after = scan.load_ahead(chunk + fx.Int32(1))
    scan.store_v_new(chunk, v_new)
    scan.publish_gated(v_new, rest)
    scan.store_snapshot(chunk)
    state = [[scan.decayed(tile, decay[b]) for b, tile in enumerate(row)] for row in state]
    lds.barrier()
    scan.publish_w(next_w)
    state = scan.updated(state)
    scan.publish_state(state)
    lds.barrier()
    return state, after


def _bf16(values):
    """Four fp32 as two words of bf16, to nearest even."""
    return lanes.words(*(numeric.bf16_pair_nearest(values[r], values[r + 1]) for r in (0, 2)))


class _Scan:
    """What one workgroup works on, where its lanes find it, and the parts of a chunk's step."""

    def __init__(self, spec, cu_seqlens, chunk_offsets, seq_len):
        self.spec = spec
        self.tiles = spec.block_v // lanes.TILE
        self.seq, self.head = (f(fx.block_idx.y, fx.Int32(spec.num_heads)) for f in (_quotient, _remainder))
        self.seq_len = seq_len
        if spec.is_varlen:
            place = offset64(self.seq, 4)
            self.batch = fx.Int32(0)
            self.begin = scalar_load(cu_seqlens, place)
            self.length = scalar_load(cu_seqlens, place + fx.Int64(4)) - self.begin
            self.first_chunk = scalar_load(chunk_offsets, place)
            self.num_chunks = _chunks(self.length)
        else:
            self.batch, self.begin, self.length = self.seq, fx.Int32(0), seq_len
            self.num_chunks = _chunks(self.length)
            self.first_chunk = self.seq * self.num_chunks
        self._place_lanes()

    def _place_lanes(self):
        """Byte offsets of this lane in LDS and in rows of global memory."""
        thread = fx.thread_idx.x
        self.wave, lane = lanes.wave_and_lane()
        self.column, self.group = (f(lane, fx.Int32(lanes.TILE)) for f in (_remainder, _quotient))
        self.token = self.wave * fx.Int32(16) + self.column
        # Workgroup-wide copies: 16 lanes a row.
        self.row, piece = (f(thread, fx.Int32(16)) for f in (_quotient, _remainder))
        self.piece = piece * fx.Int32(16)

        spec, column, group, wave = self.spec, self.column, self.group, self.wave
        w, k, state, gated = lds.regions(CHUNK * ROW, CHUNK * ROW, spec.block_v * ROW, spec.block_v * 2 * CHUNK)
        # w and the state: the 16-byte unit of a row is exchanged by the row's low 4 bits; reads of 16 rows and writes
        # of whole rows meet no bank twice.
        in_row = self.row * fx.Int32(ROW) + ((piece ^ self.row) * fx.Int32(16))
        operands = [column * fx.Int32(ROW) + (fx.Int32(4 * s) + group ^ column) * fx.Int32(16) for s in range(4)]
        self.w_in = w.at(in_row)
        self.w_out = [w.at(x + wave * fx.Int32(16 * ROW)) for x in operands]
        self.snapshot_out = state.at(in_row)
        self.state_out = [state.at(x) for x in operands]
        half, unit = (f(group, fx.Int32(2)) for f in (_remainder, _quotient))
        self.state_in = [
            state.at(
                column * fx.Int32(ROW)
                + ((wave * fx.Int32(4) + fx.Int32(2 * b) + unit) ^ column) * fx.Int32(16)
                + half * fx.Int32(8)
            )
            for b in range(K_TILES)
        ]
        # k: a transposed read takes 32 bytes of each of 8 rows at once, so units of 32 bytes are exchanged by 3 bits.
        swap = _remainder(self.row, fx.Int32(8)) * fx.Int32(2)
        self.k_in = k.at(self.row * fx.Int32(ROW) + (piece ^ swap) * fx.Int32(16))
        row = group * fx.Int32(4) + _quotient(column, fx.Int32(4))
        part = _remainder(column, fx.Int32(4)) * fx.Int32(8)
        self.k_out = [
            k.at(
                row * fx.Int32(ROW)
                + ((wave * fx.Int32(K_TILES) + fx.Int32(b)) ^ _remainder(row, fx.Int32(8))) * fx.Int32(32)
                + part
            )
            for b in range(K_TILES)
        ]
        # Gated v: [tile of v][token][16 v], so that any 8 rows lie side by side.
        self.gated_in = gated.at(self.token * fx.Int32(32) + group * fx.Int32(8))
        self.gated_out = gated.at(row * fx.Int32(32) + part)

    def find_tensors(self, k, w, u, g, gk, h, v_new, initial_state, final_state, k_stride_b, k_stride_h, k_stride_t):
        """Addresses of the first byte that this workgroup may touch, in 64 bits."""
        spec, tile = self.spec, fx.block_idx.x
        heads = spec.num_heads
        data = offset64(
            fx.Int64(self.batch * fx.Int32(heads) + self.head) * fx.Int64(self.seq_len) + fx.Int64(self.begin), ROW
        )
        columns = offset64(tile, 2 * spec.block_v)
        self.w, self.u, self.v_new = w + data, u + data + columns, v_new + data + columns
        key_head = _quotient(self.head, fx.Int32(heads // spec.num_key_heads))
        self.k = (
            k + offset64(self.batch, k_stride_b) + offset64(key_head, k_stride_h) + offset64(self.begin, k_stride_t)
        )
        self.k_stride_t = k_stride_t
        token_head = (offset64(self.batch, self.seq_len) + fx.Int64(self.begin)) * fx.Int64(heads) + fx.Int64(self.head)
        self.g, self.gk = g + offset64(token_head, 4), gk + offset64(token_head, 4 * HEAD_DIM)
        rows = offset64(tile, spec.block_v * ROW)
        self.h = h + offset64(offset64(self.first_chunk, heads) + fx.Int64(self.head), HEAD_DIM * ROW) + rows
        self.state_bytes = 4 if spec.state_dtype == "fp32" else 2
        state = offset64(fx.block_idx.y, HEAD_DIM) + offset64(tile, spec.block_v)
        state = offset64(state, HEAD_DIM * self.state_bytes)
        self.initial_state, self.final_state = initial_state + state, final_state + state

    # Global memory

    def _rows(self, address, stride, chunk):
        """The rows of a chunk, as many as the sequence has; a chunk past its end has none."""
        left = self.length - chunk * fx.Int32(CHUNK)
        rows = (left < fx.Int32(CHUNK)).select(left, fx.Int32(CHUNK))
        # Not a clamp of the rows: that becomes v_med3, and a size in a vector register a loop around every access.
        size = (left > fx.Int32(0)).select(rows * fx.Int32(stride), fx.Int32(0))
        return Buffer(address + offset64(chunk, CHUNK) * fx.Int64(stride), size), rows

    def load_w(self, chunk):
        source, _ = self._rows(self.w, ROW, chunk)
        return [source.load(self.row * fx.Int32(ROW) + self.piece + fx.Int32(16 * ROW * i), 4) for i in range(PASSES)]

    def load_ahead(self, chunk):
        """k, u and gates of a chunk, in registers."""
        spec = self.spec
        source, _ = self._rows(self.k, self.k_stride_t, chunk)
        k = [source.load((self.row + fx.Int32(16 * i)) * self.k_stride_t + self.piece, 4) for i in range(PASSES)]
        source, rows = self._rows(self.u, ROW, chunk)
        u = [source.load(self._v_place(n), 2).bitcast(fx.BFloat16) for n in range(self.tiles)]
        ahead = SimpleNamespace(k=k, u=u, g=[], gk=[])
        last = rows - fx.Int32(1)
        if spec.use_g:
            stride = 4 * spec.num_heads
            source, _ = self._rows(self.g, stride, chunk)
            ahead.g = [source.load(row * fx.Int32(stride)).bitcast(fx.Float32) for row in (last, self.token)]
        if spec.use_gk:
            stride = 4 * HEAD_DIM * spec.num_heads
            source, _ = self._rows(self.gk, stride, chunk)
            first = last * fx.Int32(stride) + self._k_place(4)
            ahead.gk = [source.load(first + fx.Int32(4 * 16 * b), 4).bitcast(fx.Float32) for b in range(K_TILES)]
        return ahead

    def store_v_new(self, chunk, v_new):
        if not self.spec.save_new_value:
            return
        target, _ = self._rows(self.v_new, ROW, chunk)
        for n in range(self.tiles):
            target.store(_bf16(v_new[n]), self._v_place(n))

    def store_snapshot(self, chunk):
        """Whole rows of 256 bytes, out of LDS."""
        target = Buffer(
            self.h + offset64(chunk, self.spec.num_heads * HEAD_DIM * ROW), fx.Int32(self.spec.block_v * ROW)
        )
        for i in range(self.tiles):
            offset = self.row * fx.Int32(ROW) + self.piece + fx.Int32(16 * ROW * i)
            target.store(lds.read(self.snapshot_out, 4, 16 * ROW * i), offset)

    def load_state(self):
        """S [v, k] as tiles [k, v]: per 16 v, K_TILES tiles."""
        if not self.spec.use_initial_state:
            return [[lanes.zeros() for _ in range(K_TILES)] for _ in range(self.tiles)]
        source = self._state_buffer(self.initial_state)
        kind = fx.Float32 if self.state_bytes == 4 else fx.BFloat16
        return [
            [
                source.load(self._state_place(n, b), self.state_bytes).bitcast(kind).to(fx.Float32)
                for b in range(K_TILES)
            ]
            for n in range(self.tiles)
        ]

    def store_state(self, state):
        if not self.spec.store_final_state:
            return
        target = self._state_buffer(self.final_state)
        for n in range(self.tiles):
            for b in range(K_TILES):
                tile = state[n][b]
                target.store(tile if self.state_bytes == 4 else _bf16(tile), self._state_place(n, b))

    def _state_buffer(self, address):
        return Buffer(address, fx.Int32(self.spec.block_v * HEAD_DIM * self.state_bytes))

    def _state_place(self, n, b):
        row = (self.column + fx.Int32(16 * n)) * fx.Int32(HEAD_DIM * self.state_bytes)
        return row + self._k_place(self.state_bytes) + fx.Int32(16 * b * self.state_bytes)

    def _k_place(self, width):
        """Bytes to the first k of this lane in a row of ``width``-byte elements."""
        return (self.wave * fx.Int32(16 * K_TILES) + self.group * fx.Int32(4)) * fx.Int32(width)

    def _v_place(self, n):
        """Bytes to the four v of this lane's token in tile ``n``, from the first row of a chunk."""
        return self.token * fx.Int32(ROW) + self.group * fx.Int32(8) + fx.Int32(32 * n)

    # LDS

    def publish_w(self, w):
        for i in range(PASSES):
            lds.write(w[i], self.w_in, 16 * ROW * i)

    def publish_k(self, k):
        for i in range(PASSES):
            lds.write(k[i], self.k_in, 16 * ROW * i)

    def publish_state(self, state):
        for n in range(self.tiles):
            for b in range(K_TILES):
                lds.write(_bf16(state[n][b]), self.state_in[b], 16 * ROW * n)

    def publish_gated(self, v_new, rest):
        """bf16(Vn * exp(G_L - G)) of this lane's token."""
        for n in range(self.tiles):
            values = v_new[n] if rest is None else [x * rest for x in v_new[n]]
            lds.write(_bf16(values), self.gated_in, 2 * 16 * CHUNK * n)

    # Arithmetic

    def state_product(self):
        """Tiles [v, token] of bf16(S) w^T."""
        sums = [lanes.zeros() for _ in range(self.tiles)]
        for s in range(HEAD_DIM // 32):
            w = lds.read(self.w_out[s], 4)
            for n in range(self.tiles):
                state = lds.read(self.state_out[s], 4, 16 * ROW * n)
                sums[n] = lanes.mfma_k32(state, w, sums[n], wide=True)
        return sums

    def updated(self, state):
        """State + gated v^T k, tiles [k, v]."""
        for s in range(CHUNK // 32):
            k = [self._transposed(place, 32 * ROW * s, 16 * ROW) for place in self.k_out]
            for n in range(self.tiles):
                gated = self._transposed(self.gated_out, 2 * 16 * (CHUNK * n + 32 * s), 2 * 16 * 16)
                state[n] = [lanes.mfma_k32(k[b], gated, state[n][b], wide=True) for b in range(K_TILES)]
        return state

    @staticmethod
    def _transposed(place, distance, step):
        """A column of 2 x 16 rows, this lane's four of each."""
        return lanes.joined(*(lds.read_transposed(place, distance + step * i) for i in range(2)))

    def decays(self, ahead):
        """exp(G_L - G) of this lane's token or None; factors of S per tile of k, numbers, vectors or None."""
        rest, all_k = None, None
        if self.spec.use_g:
            last, own = ahead.g
            rest, all_k = self._exp(last - own, self.spec.use_exp2), self._exp(last, self.spec.use_exp2)
        factors = [all_k] * K_TILES
        if self.spec.use_gk:
            per_k = [[self._exp(x[r], False) for r in range(4)] for x in ahead.gk]
            factors = [[x if all_k is None else x * all_k for x in row] for row in per_k]
        return rest, factors

    @staticmethod
    def _exp(x, log2_units):
        return numeric.exp2(x if log2_units else x * fx.Float32(LOG2E))

    @staticmethod
    def decayed(tile, factor):
        if factor is None:
            return tile
        factors = factor if isinstance(factor, list) else [factor] * 4
        return Vec.from_elements([tile[r] * factors[r] for r in range(4)], fx.Float32)


def _quotient(a, b):
    return fx.Int32(fx.Uint32(a) // fx.Uint32(b))


def _remainder(a, b):
    return fx.Int32(fx.Uint32(a) % fx.Uint32(b))


def _chunks(tokens):
    return _quotient(tokens + fx.Int32(CHUNK - 1), fx.Int32(CHUNK))
