"""Global memory of K5 `opt`: where the sequence and head of a workgroup lie, and what each lane loads and stores.

There is no code for a short last chunk. Every tensor is seen through a window that begins at the workgroup's sequence
and head and ends with the sequence: rows past the end read as 0 and are not written. Windows move by two chunks, so
that neither an offset nor a window's size needs more than 32 bits however long the sequence is. No access that must be
cut uses the scalar offset of the instruction, whose part in the range check manuals do not agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from flydsl.expr import rocdl

from ...spec.base import CHUNK, HEAD_DIM
from ...spec.flydsl import OptStateScanSpec
from ..common import lanes, lds, memory
from .state_scan_views import ROW, UNBOUNDED, States, larger, load, locate, moved, smaller, store, store_nothing, window

PAIR = 2 * CHUNK
"""Tokens of a turn of the loop, by which windows move."""


@dataclass(frozen=True)
class Arguments:
    """The kernel's arguments, in the order of ``OptStateScanSpec.ARGUMENTS``."""

    k: Any
    w: Any
    u: Any
    g: Any
    gk: Any
    h: Any
    v_new: Any
    initial_state: Any
    final_state: Any
    state_indices: Any
    has_initial_state: Any
    cu_seqlens: Any
    chunk_offsets: Any
    k_stride_b: Any
    k_stride_h: Any
    initial_stride: Any
    final_stride: Any
    seq_len: Any
    k_stride_t: Any
    num_slots: Any
    index_bytes: Any


class Traffic:
    """Windows and lane offsets of one workgroup: BV columns of v of one value head of one sequence.

    Wave w of 4 owns tokens 16w..16w+15 of a chunk (w, u, v_new, g) and rows 32w..32w+31 of k (k, state), group q of 16
    lanes the k of 32w + 8q..+7. Tiles of 16 columns of v come in pairs of 32 columns: column n of the first tile of a
    pair is v = 8*(n // 4) + n % 4, of the second 4 more, so that a lane's 8 values of a row of u are neighbours.
    With BV = 16, column n is v = n.

    Rows of k are less than 2^24 bytes apart, and at least ``ROW`` or not at all (a k expanded over tokens).
    """

    def __init__(self, spec: OptStateScanSpec, args: Arguments, wave, lane):
        self.spec, self.args = spec, args
        self.tiles = spec.block_v // lanes.TILE
        self.row = ROW if spec.wu_head_major else ROW * spec.num_heads
        self.gate_row = 4 if spec.g_head_major else 4 * spec.num_heads
        self.channel_row = 4 * HEAD_DIM * spec.num_heads
        self.snapshot_row = HEAD_DIM * (2 if spec.snapshot_dtype == "bf16" else 4)
        self.state_row = HEAD_DIM * (2 if spec.state_dtype == "bf16" else 4)
        self.chunk_bytes = spec.num_heads * HEAD_DIM * self.snapshot_row
        self._place_group()
        self._place_lanes(wave, lane)

    def _place_group(self):
        """Sequence, head and the addresses where they begin."""
        spec, args = self.spec, self.args
        self.place = place = locate(spec, args)
        self.length, self.chunks = place.length, place.chunks
        heads, tokens = fx.Int64(spec.num_heads), fx.Int64(args.seq_len)
        by_head = (place.batch * heads + place.head) * tokens + fx.Int64(place.start)
        by_token = (place.batch * tokens + fx.Int64(place.start)) * heads + place.head
        first_row = (by_head if spec.wu_head_major else by_token) * fx.Int64(ROW)
        columns = fx.Int64(place.first_v)
        key_offset = place.batch * args.k_stride_b + place.key_head * args.k_stride_h
        snapshot = (place.first_chunk * heads + place.head) * fx.Int64(HEAD_DIM) + columns
        self.roots = {
            "w": args.w + first_row,
            "u": args.u + first_row + columns * fx.Int64(2),
            "k": args.k + key_offset + memory.offset64(place.start, args.k_stride_t),
            "h": args.h + snapshot * fx.Int64(self.snapshot_row),
        }
        if spec.save_new_value:
            self.roots["v_new"] = args.v_new + first_row + columns * fx.Int64(2)
        if spec.use_g:
            self.roots["g"] = args.g + (by_head if spec.g_head_major else by_token) * fx.Int64(4)
        if spec.use_gk:
            self.roots["gk"] = args.gk + by_token * fx.Int64(4 * HEAD_DIM)
        self.key_span = larger(args.k_stride_t, fx.Int32(ROW))

    def _place_lanes(self, wave, lane):
        """Byte offsets of each lane from the windows' beginnings, for both chunks of a turn."""
        group, column = lane // fx.Int32(16), lane % fx.Int32(16)
        chunks = [fx.Int32(0), fx.Int32(CHUNK)]
        token, unit = wave * fx.Int32(16) + column, group * fx.Int32(16)
        self.w_at = [(token + x) * fx.Int32(self.row) + unit for x in chunks]
        self.u_at = self.w_at
        if self.tiles == 1:
            self.u_at = [(token + x) * fx.Int32(self.row) + group * fx.Int32(8) for x in chunks]
        key = wave * fx.Int32(64) + unit
        self.k_at = [[(column + fx.Int32(16 * i) + x) * self.args.k_stride_t + key for i in range(4)] for x in chunks]
        gate_token = wave * fx.Int32(16) + group * fx.Int32(4) + lane % fx.Int32(4)
        self.g_at = [(gate_token + x) * fx.Int32(self.gate_row) for x in chunks]
        first_k = wave * fx.Int32(32) + group * fx.Int32(8)
        self.gk_at = (first_k + lane % fx.Int32(8)) * fx.Int32(4)
        if self.spec.snapshot_dtype == "bf16":
            row, at = self._column_of(wave * fx.Int32(4) + group), column * fx.Int32(16)
        else:
            row = self._column_of(column // fx.Int32(2) * fx.Int32(2))
            at = first_k * fx.Int32(4) + column % fx.Int32(2) * fx.Int32(16)
        self.h_at = row * fx.Int32(self.snapshot_row) + at
        self.state_at = self._column_of(column) * fx.Int32(self.state_row) + first_k * fx.Int32(
            self.state_row // HEAD_DIM
        )

    def _column_of(self, n):
        """v of column n of the first tile."""
        return n if self.tiles == 1 else n // fx.Int32(4) * fx.Int32(8) + n % fx.Int32(4)

    @property
    def loads(self):
        """Instructions of ``fetch``."""
        return 8 + max(1, self.tiles // 2) + 2 * self.spec.use_g + self.spec.use_gk

    @property
    def stores(self):
        """Store instructions of a chunk."""
        snapshot = self.tiles * (1 if self.spec.snapshot_dtype == "bf16" else 2)
        return snapshot + (max(1, self.tiles // 2) if self.spec.save_new_value else 0)

    def start(self):
        """The state of the sequence's start, and the loads of its first two chunks under way: (what ``resume`` takes,
        state, first chunk, second chunk)."""
        self.left = self.length
        rows = smaller(self.left, fx.Int32(PAIR))
        sizes = self._sizes(rows)
        self.stored = sizes["w"]
        sizes |= {"v_new": sizes["w"], "h": fx.Int32(UNBOUNDED)}
        self.views = {name: window(address, sizes[name]) for name, address in self.roots.items()}
        self._place_last(rows)
        state = self._initial()
        lds.sched_fence()
        data = []
        for half in range(2):
            data.append(self.fetch(half))
            lds.sched_fence()
            store_nothing(self.stores)
            lds.sched_fence()
        rocdl.s_waitcnt(vmcnt=2 * (self.loads + self.stores))
        lds.sched_fence()
        return self.carry(), state, *data

    def carry(self):
        """What a turn of the loop hands to the next."""
        return {"views": dict(self.views), "left": self.left, "stored": self.stored}

    def resume(self, carry):
        self.views, self.left, self.stored = dict(carry["views"]), carry["left"], carry["stored"]

    def _sizes(self, rows):
        sizes = {"w": rows * fx.Int32(self.row), "k": rows * self.key_span}
        sizes["u"] = sizes["w"]
        if self.spec.use_g:
            sizes["g"] = rows * fx.Int32(self.gate_row)
        if self.spec.use_gk:
            sizes["gk"] = rows * fx.Int32(self.channel_row)
        return sizes

    def _place_last(self, rows):
        """The last token of each chunk of the windows, 0 if there is none: in rows of g and gk."""
        last = larger(rows * fx.Int32(self.gate_row) - fx.Int32(self.gate_row), fx.Int32(0))
        self.last_gate = [smaller(last, fx.Int32((CHUNK - 1) * self.gate_row)), last]
        last = larger(rows - fx.Int32(1), fx.Int32(0))
        self.last_channel = [x * fx.Int32(self.channel_row) for x in (smaller(last, fx.Int32(CHUNK - 1)), last)]

    def advance_loads(self):
        """The windows of what is loaded move on by two chunks."""
        # Not a clamp on both sides, which becomes v_med3_i32 and takes the windows out of the scalar registers.
        self.left = larger(self.left, fx.Int32(PAIR)) - fx.Int32(PAIR)
        rows = smaller(self.left, fx.Int32(PAIR))
        sizes = self._sizes(rows)
        steps = {
            "w": fx.Int64(PAIR * self.row),
            "u": fx.Int64(PAIR * self.row),
            "k": fx.Int64(self.args.k_stride_t) * fx.Int64(PAIR),
            "g": fx.Int64(PAIR * self.gate_row),
            "gk": fx.Int64(PAIR * self.channel_row),
        }
        self.views |= {name: moved(self.views[name], steps[name], size) for name, size in sizes.items()}
        self._place_last(rows)
        self.stored = sizes["w"]

    def advance_stores(self):
        """The windows of what is stored move on by two chunks."""
        self.views["h"] = moved(self.views["h"], fx.Int64(2 * self.chunk_bytes))
        if self.spec.save_new_value:
            self.views["v_new"] = moved(self.views["v_new"], fx.Int64(PAIR * self.row), self.stored)

    def fetch(self, half):
        """Issue the loads of the first or second chunk of the windows, in the order in which a chunk issues them."""
        data = {"k": [self.fetch_k(half, 0)]}
        data["u"], data["w"] = self.fetch_u(half), []
        for p in range(4):
            if p < 3:
                data["k"].append(self.fetch_k(half, p + 1))
            data["w"].append(self.fetch_w(half, p))
        return data | self.fetch_gates(half)

    def fetch_w(self, half, p):
        """32 k of the wave's 16 tokens."""
        return load(self.views["w"], 4, self.w_at[half] + fx.Int32(64 * p))

    def fetch_k(self, half, i):
        """The wave's 32 k of 16 tokens."""
        return load(self.views["k"], 4, self.k_at[half][i])

    def fetch_u(self, half):
        """All columns of the wave's 16 tokens."""
        at = self.u_at[half]
        if self.tiles == 1:
            return [load(self.views["u"], 2, at)]
        return [load(self.views["u"], 4, at + fx.Int32(64 * i)) for i in range(self.tiles // 2)]

    def fetch_gates(self, half):
        """Gates of the wave's tokens and of the chunk's last one; gk of one of the group's k per lane."""
        data = {}
        if self.spec.use_g:
            data["g"] = load(self.views["g"], 1, self.g_at[half]).bitcast(fx.Float32)
            data["g_last"] = load(self.views["g"], 1, 0, self.last_gate[half]).bitcast(fx.Float32)
        if self.spec.use_gk:
            data["gk"] = load(self.views["gk"], 1, self.gk_at, self.last_channel[half]).bitcast(fx.Float32)
        return data

    def wait_fetched(self):
        """Until what was fetched two chunks ago is there: younger are one chunk's loads and two chunks' stores."""
        rocdl.s_waitcnt(vmcnt=self.loads + 2 * self.stores)

    def values_of(self, loaded, tile):
        """u of one tile of v as A operand of K = 16."""
        return loaded[0] if self.tiles == 1 else lanes.halves(loaded[tile // 2])[tile % 2]

    def store_new(self, tiles, half):
        """v_new, packed, by tiles of v; lane = token."""
        view, at = self.views["v_new"], self.u_at[half]
        if self.tiles == 1:
            store(tiles[0], view, at)
            return
        for i in range(self.tiles // 2):
            store(lanes.joined(tiles[2 * i], tiles[2 * i + 1]), view, at + fx.Int32(64 * i))

    def store_snapshot(self, words, tile, half, row=0):
        """4 words per lane of a tile's snapshot; ``row``: the first or second v of a pair of lanes (fp32)."""
        near, far = 4 * (tile % 2) + row, 32 * (tile // 2)
        scalar = half * self.chunk_bytes + far * self.snapshot_row
        store(words, self.views["h"], self.h_at + fx.Int32(near * self.snapshot_row), scalar)

    def _initial(self):
        """The state of the sequence's start, [tile][k half] of 4 fp32: lane = v, registers = k."""
        self._states = States(self.spec, self.args, self.place)
        return self._states.load(self._state_places())

    def finish(self, state, packed):
        """Store the last state; ``packed`` rounds a tile to bf16."""
        self._states.store(self._state_places(), state, packed)

    def _state_places(self):
        tiles = range(self.tiles)
        return [self.state_at + fx.Int32((32 * (i // 2) + 4 * (i % 2)) * self.state_row) for i in tiles]
