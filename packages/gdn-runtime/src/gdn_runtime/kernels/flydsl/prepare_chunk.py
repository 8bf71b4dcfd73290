"""Fused prepare: where a chunk lives, its gates and gains, and the memory of its rows.

Throughout the prepare modules a lane l of a wave is (n, q) = (l % 16, l // 16), a chunk has four blocks of 16 tokens,
and a 16x16 tile X has X[4q + r][n] in register r of lane (n, q). What belongs to a token comes in two forms:
"by lane", one number for token 16*block + n, and "by register", four numbers for tokens 16*block + 4q + r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from ...spec.base import CHUNK, GATE_MIN, HEAD_DIM, LOG2E
from ...spec.flydsl import FusedPrepareSpec
from ...spec.tprime import TPrepareSpec
from ..common import lds
from ..common.lanes import TILE
from ..common.memory import Buffer, offset64, scalar_load
from ..common.numeric import bf16_to_fp32, exp2, fp16_to_fp32

Spec: TypeAlias = FusedPrepareSpec | TPrepareSpec

BLOCKS = CHUNK // TILE
ROW_BYTES = 2 * HEAD_DIM
"""A row of k, v, w or u in bf16."""

UNBOUNDED = 0x7FFFFFFF
"""Bytes of a buffer whose lanes are masked by their offset."""

SPREAD_BYTES = 4 * 4 * CHUNK
"""LDS of a wave: four fp32 per token."""


@dataclass(frozen=True)
class Place:
    """A chunk: batch row (Int32; None if all tokens are one row), its first token there, its valid tokens (1..64)."""

    batch: object
    token: object
    left: object


def locate(spec: Spec, a) -> Place:
    """The chunk of this workgroup. Grid x: chunk; dense: grid z: batch row."""
    chunk = fx.Int32(fx.block_idx.x)
    if spec.is_varlen:
        sequence = scalar_load(a.sequence_ids, offset64(chunk, 4))
        start = scalar_load(a.chunk_ids, offset64(chunk, 4)) * fx.Int32(CHUNK)
        offsets = a.cu_seqlens + offset64(sequence, 4)
        token = scalar_load(offsets) + start
        left = scalar_load(offsets, 4) - token
        return Place(None, token, fx.min(left, fx.Int32(CHUNK)))
    token = chunk * fx.Int32(CHUNK)
    return Place(fx.Int32(fx.block_idx.z), token, fx.min(a.seq_len - token, fx.Int32(CHUNK)))


def root(place: Place, pointer, head, stride_b, stride_t, stride_h):
    """Address of the chunk's first token of a [B, T, heads, ...] tensor, in 64 bits."""
    address = pointer + offset64(place.token, stride_t) + offset64(head, stride_h)
    return address if place.batch is None else address + offset64(place.batch, stride_b)


def key_head(spec: Spec, head):
    """Key head of a value head. Unsigned: a signed division takes seven instructions more."""
    return fx.Int32(fx.Uint32(head) // fx.Uint32(spec.num_heads // spec.num_key_heads))


def head_major_row(spec: Spec, place: Place, head, seq_len):
    """Number of the chunk's first row in [B, H, T], Int64."""
    outer = head if place.batch is None else place.batch * fx.Int32(spec.num_heads) + head
    return offset64(outer, seq_len) + fx.Int64(fx.Uint32(place.token))


class Rows:
    """Rows of k or v, read by blocks of 16 tokens: those past the sequence's end give 0.

    ``by_block``: each block has a descriptor of its own, so that the offsets of a lane serve all four; else one
    descriptor, and the block adds to the offset. Either way no scalar offset takes part in the bounds check.
    64 * stride_t must stay below 2^31 bytes.
    """

    def __init__(self, place: Place, address, stride_t, by_block: bool) -> None:
        self.stride = stride_t
        last = (place.left - fx.Int32(1)) * stride_t + fx.Int32(ROW_BYTES)
        self._buffers = [Buffer(address, last)]
        for block in range(1, BLOCKS if by_block else 1):
            skipped = stride_t * fx.Int32(block * TILE)
            rest = fx.max(last - skipped, fx.Int32(0))
            self._buffers.append(Buffer(address + fx.Int64(fx.Uint32(skipped)), rest))

    def load(self, block, offsets, distance: int, dwords: int) -> list:
        """``dwords`` at ``distance`` bytes after each of the lane's offsets from the first row of a block, which is an
        int or, with one descriptor, an Int32."""
        if len(self._buffers) > 1:
            buffer = self._buffers[block]
        else:
            buffer, start = self._buffers[0], self.stride * (fx.Int32(block) * fx.Int32(TILE))
            offsets = [offset + start for offset in offsets]
        return [buffer.load(offset + fx.Int32(distance), dwords) for offset in offsets]


class Outputs:
    """Rows of w or u, contiguous: stores past the sequence's end are dropped."""

    def __init__(self, place: Place, pointer, row) -> None:
        self.buffer = Buffer(pointer + row * fx.Int64(ROW_BYTES), place.left * fx.Int32(ROW_BYTES))


def load_gate(place: Place, address, stride_t, token):
    """Gate of token ``token`` of the chunk as it is in memory; 0 past the sequence's end."""
    return Buffer(address, UNBOUNDED).load(_masked(place, stride_t, token))


def load_gain(spec: Spec, place: Place, address, stride_t, token):
    """beta of token ``token`` of the chunk as it is in memory; 0 past the sequence's end."""
    buffer, offset = Buffer(address, UNBOUNDED), _masked(place, stride_t, token)
    return buffer.load(offset) if spec.beta_dtype == "fp32" else buffer.load_half(offset)


def floored(word):
    """A loaded gate in fp32, natural logarithm, not below GATE_MIN; NaN is kept.

    Apart from the load, as is ``widened``: what uses a load among other loads makes those wait.
    """
    gate = word.bitcast(fx.Float32)
    return (gate < fx.Float32(GATE_MIN)).select(fx.Float32(GATE_MIN), gate)


def widened(spec: Spec, word):
    """A loaded beta in fp32."""
    if spec.beta_dtype == "fp32":
        return word.bitcast(fx.Float32)
    return (bf16_to_fp32 if spec.beta_dtype == "bf16" else fp16_to_fp32)(word)


def _masked(place: Place, stride_t, token):
    """Strides of g and beta are free, 0 included, so the lane's offset is what tells the end."""
    return (token < place.left).select(token * stride_t, fx.Int32(-0x80000000))


def cumulate(gate):
    """(sum over the 64 lanes up to this one, sum over its 16 lanes up to this one)."""
    zero = fx.Int32(0).ir_value()

    def add(total, control, rows):
        moved = rocdl.update_dpp(T.i32, zero, total.bitcast(fx.Int32).ir_value(), control, rows, 0xF, False)
        return total + fx.Int32(moved).bitcast(fx.Float32)

    for control in (0x111, 0x112, 0x114, 0x118):  # row_shr by 1, 2, 4, 8
        gate = add(gate, control, 0xF)
    # row_bcast15 to rows 1 and 3, then row_bcast31 to rows 2 and 3.
    return add(add(gate, 0x142, 0xA), 0x143, 0xC), gate


class Gates:
    """Gates (log2 units) and gains of a chunk, where the lanes of one wave want them.

    The exponentials that need one token only are taken here, one per lane, and then spread like the rest through
    SPREAD_BYTES of LDS at ``place`` that belong to this wave alone: no barrier.
    """

    def __init__(self, gate2, in_block2, gain, lane, place) -> None:
        self._gate2 = gate2
        own = place + lane
        factor = -(gain * exp2(in_block2))
        for number, value in enumerate((gate2, gain, gain * exp2(gate2), factor)):
            lds.write(Vec.from_elements([value.bitcast(fx.Int32)], fx.Int32), own, 4 * CHUNK * number)
        self._by_lane = place + lane % fx.Int32(TILE)
        self._by_register = place + (lane // fx.Int32(TILE)) * fx.Int32(4)

    def gate_by_lane(self, block: int):
        """G."""
        return lds.read(self._by_lane, 1, 4 * TILE * block).bitcast(fx.Float32)[0]

    def gate(self, block: int):
        """G, by register."""
        return self._registers(0, block)

    def gain(self, block: int):
        """beta, by register."""
        return self._registers(1, block)

    def decayed_gain(self, block: int):
        """beta exp(G), by register."""
        return self._registers(2, block)

    def row_factor(self, block: int):
        """-beta_i exp(G_i - R), R the gate before the block; by register."""
        return self._registers(3, block)

    def before(self, block: int):
        """G of the last token before a block, a scalar."""
        bits = rocdl.readlane(T.i32, self._gate2.bitcast(fx.Int32).ir_value(), fx.Int32(TILE * block - 1))
        return fx.Int32(bits).bitcast(fx.Float32)

    def _registers(self, number: int, block: int):
        return lds.read(self._by_register, 4, 4 * (CHUNK * number + TILE * block)).bitcast(fx.Float32)


def in_log2(gate):
    return gate * fx.Float32(LOG2E)
