"""What the 64 lanes of a wave hold: MFMA tiles, transposes by MFMA, moves between lanes.

Operands are packed: a ``Vec`` of int32 words, two bf16 each, the lower one at the lower index.

Lane maps of the 16x16 MFMA (row or column ``l % 16`` of lane l, group ``q = l // 16``):
    A [row, k] and B [k, col]: row or col = l % 16, k = W*q + j for j < W, W = 4 (K = 16) or 8 (K = 32).
    C [row, col]: col = l % 16, row = 4*q + r for r < 4.
So a C tile, packed to bf16, is the A or B operand of the next 16x16x16 MFMA if that contracts over its rows. The order
of the contracted index is free as long as A and B agree on it: two 16x16x16 operands side by side are one of 16x16x32.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

WAVE = 64
TILE = 16
"""Rows and columns of an MFMA tile."""

GROUPS = 4
"""Groups of 16 lanes, the ``q`` of the lane maps."""

MINUS_ONE = 0xBF80
"""-1.0 as bf16."""

SWAP_1, SWAP_2 = 0xB1, 0x4E
"""DPP: each lane takes the value of the lane whose number differs in bit 0 or bit 1."""

ROW_BROADCAST = 0x150
"""DPP: each lane takes the value of the lane of its group of 16 whose number is added to this (row_newbcast)."""


def uniform(value):
    """``value`` (int32), the same in all lanes of the wave, as a scalar register."""
    return fx.Int32(rocdl.readfirstlane(T.i32, value.ir_value()))


def wave_and_lane():
    """(wave of the workgroup as a scalar, lane in the wave) of a one-dimensional block."""
    thread = fx.thread_idx.x
    return uniform(thread // fx.Int32(WAVE)), thread % fx.Int32(WAVE)


def words(*values):
    """Vec of int32 from single words."""
    return Vec.from_elements(values, fx.Int32)


def halves(operand):
    """The two 16x16x16 operands (2 words each) of a 16x16x32 one (4 words)."""
    return operand.shuffle(operand, [0, 1]), operand.shuffle(operand, [2, 3])


def joined(low, high):
    """One 16x16x32 operand of two 16x16x16 ones."""
    return low.shuffle(high, [0, 1, 2, 3])


def zeros():
    """An empty C tile."""
    return Vec.filled(4, 0.0, fx.Float32)


def mfma_k16(a, b, c):
    """c + a @ b, 16x16x16 bf16; a, b: 2 words, c: 4 fp32. Both architectures; half the rate of K = 32 on gfx950."""
    operands = [x.bitcast(fx.Int16).ir_value() for x in (a, b)]
    tile = rocdl.mfma_f32_16x16x16bf16_1k(Vec.make_type(4, fx.Float32), [*operands, c.ir_value()])
    return Vec(tile, (4,), fx.Float32)


def mfma_k32(a, b, c, *, wide):
    """c + a @ b, 16x16x32 bf16; a, b: 4 words, c: 4 fp32. ``wide``: one instruction, gfx950; else two of K = 16."""
    if not wide:
        for half_a, half_b in zip(halves(a), halves(b), strict=True):
            c = mfma_k16(half_a, half_b, c)
        return c
    operands = [x.bitcast(fx.BFloat16).ir_value() for x in (a, b)]
    tile = rocdl.mfma_f32_16x16x32_bf16(Vec.make_type(4, fx.Float32), [*operands, c.ir_value()])
    return Vec(tile, (4,), fx.Float32)


def minus_identity(lane):
    """-I as B (or A) operand of K = 16, 2 words: ``transposed`` and subtraction of an A operand by MFMA."""
    column, first = lane % fx.Int32(TILE), (lane // fx.Int32(TILE)) * fx.Int32(4)
    pairs = []
    for j in (0, 2):
        low = (first + fx.Int32(j) == column).select(fx.Int32(MINUS_ONE), fx.Int32(0))
        high = (first + fx.Int32(j + 1) == column).select(fx.Int32(MINUS_ONE << 16), fx.Int32(0))
        pairs.append(low | high)
    return words(*pairs)


def minus_transposed(a, minus_one):
    """-A as a C tile (4 fp32, exact): lanes held a row of A, they hold a column now.

    A is an operand of K = 16, ``minus_one`` from ``minus_identity``. 0 * infinity is NaN: one infinite or NaN element
    makes NaN of its row of A, all 16 elements over k.
    """
    return mfma_k16(a, minus_one, zeros())


def moved(value, control):
    """``value`` (int32 or fp32) of the lane that DPP ``control`` names; every lane must have a source."""
    kind = type(value)
    source = value if kind is fx.Int32 else value.bitcast(fx.Int32)
    raw = source.ir_value()
    result = fx.Int32(rocdl.update_dpp(T.i32, raw, raw, control, 0xF, 0xF, True))
    return result if kind is fx.Int32 else result.bitcast(kind)


def of_quad(value, index):
    """``value`` of lane ``index`` of each lane's group of four."""
    return moved(value, index * 0x55)


def of_group(value, index):
    """``value`` of lane ``index`` of each lane's group of 16."""
    return moved(value, ROW_BROADCAST + index)


def pack_truncated(low, high):
    """Two fp32 as one word of two bf16, the 16 low bits cut off: one v_perm_b32."""
    raw = [x.bitcast(fx.Int32).ir_value() for x in (high, low)]
    return fx.Int32(rocdl.perm_b32(*raw, fx.Int32(0x07060302).ir_value()))


def exchanged(low, high, odd):
    """Pair exchange with the neighbour lane (bit 0 of the lane number; ``odd``: this lane's bit, a Boolean).

    ``low`` and ``high`` are words that both lanes hold. The even lane ends with its own ``low`` and its neighbour's,
    the odd lane with its neighbour's ``high`` and its own: (of the even lane, of the odd lane).
    """
    given = moved(odd.select(low, high), SWAP_1)
    return odd.select(given, low), odd.select(high, given)
