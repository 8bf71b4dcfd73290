"""Global memory of the V-split K5: what each lane loads and stores, through windows that end with the sequence.

As of `opt` (``state_scan_memory``) there is no code for a short last chunk: rows past the end of the sequence read as 0
and are not written. Windows move by one chunk. Rows of k and of v are less than 2^24 bytes apart, and at least ``ROW``
or not at all.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from ...spec.base import CHUNK, HEAD_DIM
from ...spec.tprime import VSplitScanSpec
from ..common import lanes, memory
from .state_scan_views import ROW, UNBOUNDED, States, larger, load, locate, moved, smaller, store, window
from .t_layout import T_BYTES, T_PLACES, lane_bytes

BLOCKS = CHUNK // lanes.TILE
"""Tiles of tokens of a chunk."""

PARTS = HEAD_DIM // 32
"""Parts of 32 k of a row of S."""


class Traffic:
    """Windows and lane offsets of one workgroup: BV columns of v of one value head of one sequence.

    A lane l of wave w is (n, q) = (l % 16, l // 16). The wave owns BV / 4 columns of v, from w * BV / 4 on, as one tile
    or two: column n of the first of two is v = 8 * (n // 4) + n % 4, of the second 4 more, so that a lane's values of a
    row of v or v_new are neighbours. Of k it loads 16 tokens for the whole workgroup: ``key_rows``, one per load.
    """

    def __init__(self, spec: VSplitScanSpec, args: Any, wave, lane, key_rows):
        self.spec, self.args = spec, args
        self.tiles = spec.block_v // 64
        self.bf16 = spec.snapshot_dtype == "bf16"
        self._snapshot_row = HEAD_DIM * (2 if self.bf16 else 4)
        self.snapshot_stores = self.tiles * (4 if self.bf16 else 8)
        self.new_stores = BLOCKS
        place = locate(spec, args)
        self._place, self.length, self.chunks = place, place.length, place.chunks
        heads, tokens, first_v = fx.Int64(spec.num_heads), fx.Int64(args.seq_len), fx.Int64(place.first_v)
        by_head = (place.batch * heads + place.head) * tokens + fx.Int64(place.start)
        snapshot = place.first_chunk * heads + place.head
        key = place.batch * args.k_stride_b + place.key_head * args.k_stride_h
        value = place.batch * args.v_stride_b + place.head * args.v_stride_h
        self._roots = {
            "k": args.k + key + memory.offset64(place.start, args.k_stride_t),
            "v": args.v + value + memory.offset64(place.start, args.v_stride_t) + first_v * fx.Int64(2),
            "t": args.t + snapshot * fx.Int64(T_BYTES),
            "g": args.g + by_head * fx.Int64(4),
            "h": args.h + (snapshot * fx.Int64(HEAD_DIM) + first_v) * fx.Int64(self._snapshot_row),
            "v_new": args.v_new + by_head * fx.Int64(ROW) + first_v * fx.Int64(2),
        }
        self._steps = {
            "k": fx.Int64(args.k_stride_t) * fx.Int64(CHUNK),
            "v": fx.Int64(args.v_stride_t) * fx.Int64(CHUNK),
            "t": fx.Int64(spec.num_heads * T_BYTES),
            "g": fx.Int64(4 * CHUNK),
            "v_new": fx.Int64(CHUNK * ROW),
            "h": fx.Int64(spec.num_heads * HEAD_DIM * self._snapshot_row),
        }
        # Bytes of one token in a window.
        self._spans = {
            "k": larger(args.k_stride_t, fx.Int32(ROW)),
            "v": larger(args.v_stride_t, fx.Int32(ROW)),
            "g": fx.Int32(4),
            "v_new": fx.Int32(ROW),
        }
        self._place_lanes(wave, lane, key_rows)

    def _place_lanes(self, wave, lane, key_rows):
        n, q = lane % fx.Int32(16), lane // fx.Int32(16)
        first = wave * fx.Int32(16 * self.tiles)
        values = first * fx.Int32(2) + q * fx.Int32(8 * self.tiles)
        self._v_at = [(n + fx.Int32(16 * i)) * self.args.v_stride_t + values for i in range(BLOCKS)]
        self._new_at = n * fx.Int32(ROW) + values
        self._k_at = [row * self.args.k_stride_t + n * fx.Int32(16) for row in key_rows]
        self._t_at = {blocks: lane * fx.Int32(lane_bytes(blocks)) for _, blocks in T_PLACES}
        self._g_at = lane * fx.Int32(4)
        if self.bf16:
            row, at = first + q, n * fx.Int32(16)
        else:
            row = first + self._column_of(n // fx.Int32(2) * fx.Int32(2))
            at = q * fx.Int32(32) + n % fx.Int32(2) * fx.Int32(16)
        self._h_at = row * fx.Int32(self._snapshot_row) + at
        self._state_lane = first + self._column_of(n), q

    def _column_of(self, n):
        """v of column n of the first tile."""
        return n if self.tiles == 1 else n // fx.Int32(4) * fx.Int32(8) + n % fx.Int32(4)

    def start(self):
        """Windows of the first chunk."""
        rows = smaller(self.length, fx.Int32(CHUNK))
        views = {name: window(address, self._size(name, rows)) for name, address in self._roots.items() if name != "h"}
        return views | {"h": window(self._roots["h"], fx.Int32(UNBOUNDED))}

    def advance(self, views, names, rows=None):
        """The named windows one chunk further on, where there are ``rows`` tokens (h: any)."""
        for name in names:
            size = None if name == "h" else self._size(name, rows)
            views[name] = moved(views[name], self._steps[name], size)

    def _size(self, name, rows):
        if name == "t":
            return (rows > fx.Int32(0)).select(fx.Int32(T_BYTES), fx.Int32(0))
        return rows * self._spans[name]

    def fetch_k(self, views):
        """128 k of a token per 16 lanes."""
        return [load(views["k"], 4, x) for x in self._k_at]

    def fetch_v(self, views):
        """The wave's columns of token n of each tile."""
        return [load(views["v"], 2 * self.tiles, x) for x in self._v_at]

    def fetch_t(self, views):
        """Operands of T', by ``T_PLACES``."""
        loads = {}
        for (row, blocks), at in T_PLACES.items():
            loads[row, blocks] = load(views["t"], lane_bytes(blocks) // 4, self._t_at[blocks], at)
        return loads

    def fetch_g(self, views, rows):
        """(of the lane's token, of the chunk's last one)."""
        last = larger(rows * fx.Int32(4) - fx.Int32(4), fx.Int32(0))
        return [load(views["g"], 1, self._g_at).bitcast(fx.Float32), load(views["g"], 1, 0, last).bitcast(fx.Float32)]

    def store_rows(self, views, rows):
        """bf16 snapshot by tiles, 4 rows of v each: 256 bytes per 16 lanes."""
        for c in range(self.tiles):
            for i in range(4):
                row = 8 * i + 4 * c if self.tiles == 2 else 4 * i
                store(rows[c][i], views["h"], self._h_at, row * self._snapshot_row)

    def store_exchanged(self, views, state, part, odd):
        """fp32 snapshot of one part of k: neighbour lanes have exchanged halves, so that 8 lanes have 128 contiguous
        bytes of a row."""
        for c in range(self.tiles):
            low, high = (tile.bitcast(fx.Int32) for tile in state[c][part])
            both = [lanes.exchanged(low[r], high[r], odd) for r in range(4)]
            for row in range(2):
                words = lanes.words(*(x[row] for x in both))
                store(words, views["h"], self._h_at + fx.Int32(128 * part), (row + 4 * c) * self._snapshot_row)

    def store_new(self, views, i, tiles):
        """v_new of a tile of tokens, packed by tiles of v; lane = token."""
        words = tiles[0] if self.tiles == 1 else lanes.joined(*tiles)
        store(words, views["v_new"], self._new_at + fx.Int32(16 * ROW * i))

    def initial(self):
        """The state of the sequence's start, [tile of v][part of k] of two tiles: lane = v, registers = k."""
        self._states = States(self.spec, self.args, self._place)
        flat = self._states.load(self._state_places())
        return [flat[PARTS * c : PARTS * (c + 1)] for c in range(self.tiles)]

    def finish(self, state, packed):
        """Store the last state; ``packed`` rounds a tile to bf16."""
        self._states.store(self._state_places(), [part for tile in state for part in tile], packed)

    def _state_places(self):
        row, size = self._states.row, self._states.row // HEAD_DIM
        v, q = self._state_lane
        at = v * fx.Int32(row) + q * fx.Int32(8 * size)
        return [at + fx.Int32(4 * c * row + 32 * p * size) for c in range(self.tiles) for p in range(PARTS)]
