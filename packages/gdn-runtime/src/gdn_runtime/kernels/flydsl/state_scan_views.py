"""Global memory as K5 `opt` and the V-split K5 see it: windows, the place of a workgroup, the state of its sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from ...spec.base import CHUNK, HEAD_DIM
from ..common import lanes, memory

ROW = 2 * HEAD_DIM
"""Bytes of a bf16 row."""

UNBOUNDED = -1

_RAW_DWORDS = 0x27000


def window(address, size):
    """A buffer resource of ``size`` bytes (int32, unsigned) from ``address`` (int64) on, as four scalar words: loads
    past them give 0, stores are dropped."""
    low, high = Vec.from_elements([address], fx.Int64).bitcast(fx.Int32)
    return lanes.words(low, high, size, fx.Int32(_RAW_DWORDS))


def moved(view, step, size=None):
    """The window ``step`` bytes (int64) further on; its size stays if there is none given."""
    address = view.shuffle(view, [0, 1]).bitcast(fx.Int64)[0] + step
    low, high = Vec.from_elements([address], fx.Int64).bitcast(fx.Int32)
    return lanes.words(low, high, view[2] if size is None else size, view[3])


def load(view, count, offset, scalar=0):
    """``count`` words (1, 2, 4) at ``offset`` bytes of each lane plus ``scalar`` of all: Int32 or a Vec of them."""
    kind = T.i32 if count == 1 else Vec.make_type(count, fx.Int32)
    words = rocdl.raw_buffer_load(kind, view.ir_value(), fx.Int32(offset).ir_value(), fx.Int32(scalar).ir_value())
    return fx.Int32(words) if count == 1 else Vec(words, (count,), fx.Int32)


def store(value, view, offset, scalar=0):
    """Store what ``load`` would load."""
    rocdl.raw_buffer_store(value.ir_value(), view.ir_value(), fx.Int32(offset).ir_value(), fx.Int32(scalar).ir_value())


def store_nothing(count):
    """``count`` stores to a window of no bytes: so the waits of a loop's first turn may count on stores too, and those
    of all turns need not wait for any. Apart, since the compiler merges neighbours."""
    empty = window(fx.Int64(0), fx.Int32(0))
    for i in range(count):
        store(fx.Int32(0), empty, fx.Int32(32 * i))


def smaller(x, y):
    return (x < y).select(x, y)


def larger(x, y):
    return (x > y).select(x, y)


@dataclass(frozen=True)
class Place:
    """The workgroup's tile of V of one value head of one sequence: Int32 but for ``head``, ``key_head``, ``batch`` and
    ``first_chunk`` (Int64). ``start``: first token in batch row ``batch``; ``first_chunk``: among all snapshots."""

    sequence: Any
    head: Any
    key_head: Any
    first_v: Any
    batch: Any
    start: Any
    length: Any
    chunks: Any
    first_chunk: Any


def locate(spec, args) -> Place:
    """Grid x: tile of V; y: sequence * H + value head."""
    group = fx.Uint32(fx.block_idx.y)
    head, sequence = group % fx.Uint32(spec.num_heads), group // fx.Uint32(spec.num_heads)
    key_head = head // fx.Uint32(spec.num_heads // spec.num_key_heads)
    number, first_v = fx.Int32(sequence), fx.Int32(fx.block_idx.x) * fx.Int32(spec.block_v)
    wide_head = fx.Int64(head)
    if spec.is_varlen:
        at = fx.Int64(sequence) * fx.Int64(4)
        start = memory.scalar_load(args.cu_seqlens, at)
        length = memory.scalar_load(args.cu_seqlens, at + fx.Int64(4)) - start
        batch, first_chunk = fx.Int64(0), fx.Int64(memory.scalar_load(args.chunk_offsets, at))
    else:
        start, length, batch = fx.Int32(0), args.seq_len, fx.Int64(sequence)
    chunks = (length + fx.Int32(CHUNK - 1)) >> fx.Int32(6)
    if not spec.is_varlen:
        first_chunk = batch * fx.Int64(chunks)
    return Place(number, wide_head, fx.Int64(key_head), first_v, batch, start, length, chunks, first_chunk)


class States:
    """The state of a sequence, where it begins and where it ends: the workgroup's rows of V.

    ``size``: their bytes, 0 for a pad, a sequence whose slot is no slot of the pool.
    """

    def __init__(self, spec, args, place: Place):
        self._spec, self._args, self._place = spec, args, place
        self.row = HEAD_DIM * (2 if spec.state_dtype == "bf16" else 4)
        self._slot, self.size = fx.Int64(place.sequence), fx.Int32(spec.block_v * self.row)
        if spec.use_state_indices:
            at = self._slot * fx.Int64(args.index_bytes)
            low = memory.scalar_load(args.state_indices, at)
            # The upper word of an int64; of an int32 the same word again, so that nothing past its end is read.
            high = memory.scalar_load(args.state_indices, at + fx.Int64(args.index_bytes) - fx.Int64(4))
            high = (args.index_bytes == fx.Int32(8)).select(high, low >> fx.Int32(31))
            inside = (high == fx.Int32(0)) & (fx.Uint32(low) < fx.Uint32(args.num_slots))
            # Slot 0 in place of a pad: the address of any other number could reach into a window's flags.
            self._slot = fx.Int64(inside.select(low, fx.Int32(0)))
            self.size = inside.select(self.size, fx.Int32(0))

    def load(self, places):
        """The initial state, zero if there is none, by ``places``: byte offsets of 8 k of one v, two tiles each."""
        if not self._spec.use_initial_state:
            return [[lanes.zeros(), lanes.zeros()] for _ in places]
        size = self._is_known().select(self.size, fx.Int32(0))
        view = self._window(self._args.initial_state, self._args.initial_stride, size)
        state = []
        for at in places:
            if self._spec.state_dtype == "fp32":
                state.append([load(view, 4, at + fx.Int32(16 * part)).bitcast(fx.Float32) for part in range(2)])
                continue
            words = load(view, 4, at)
            numbers = [(x << fx.Int32(16), x & fx.Int32(-1 << 16)) for x in words]
            state.append([lanes.words(*numbers[i], *numbers[i + 1]).bitcast(fx.Float32) for i in (0, 2)])
        return state

    def store(self, places, state, packed):
        """Store the final state; ``packed`` rounds a tile to bf16."""
        if not self._spec.store_final_state:
            return
        view = self._window(self._args.final_state, self._args.final_stride, self.size)
        for tile, at in zip(state, places, strict=True):
            if self._spec.state_dtype == "fp32":
                for part in range(2):
                    store(tile[part], view, at + fx.Int32(16 * part))
            else:
                store(lanes.joined(*(packed(x) for x in tile)), view, at)

    def _window(self, address, stride, size):
        first = self._place.head * fx.Int64(HEAD_DIM) + fx.Int64(self._place.first_v)
        return window(address + self._slot * stride + first * fx.Int64(self.row), size)

    def _is_known(self):
        """Whether the sequence has a state to begin with; all have if there is no such tensor."""
        address, sequence = self._args.has_initial_state, self._place.sequence
        absent = address == fx.Int64(0)
        size = absent.select(fx.Int32(0), sequence + fx.Int32(1))
        view, zero = window(address, size), fx.Int32(0).ir_value()
        flag = fx.Uint8(rocdl.raw_buffer_load(T.i8, view.ir_value(), sequence.ir_value(), zero))
        return absent | (lanes.uniform(fx.Int32(flag)) != fx.Int32(0))
