"""FP8 products of a wave and what its lanes hold: 16 or 32 query rows on the columns, one row per lane.

``side`` S is 16 or 32, the rows that a wave's matrix tiles have room for; lane l is in group g = l // S and holds query
row l % S. Tokens and head elements are contracted in pieces of 16: 16 FP8 values, four words, of one lane. The order of
what is contracted is free as long as both operands agree, so pieces are taken as they lie in memory:
    scores S^T [token, row] = K q^T    lane: its row, tokens 32 j + 16 g + n (S = 16: 16 g + n), n < 16, j a *run*
    output O^T [d, row] = V^T P^T      lane: its row, the FP8 scores of its runs as they are
Row m of K's operand is not token m: ``token_of_operand_row`` makes the result come in runs of 16 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith as raw_arith
from flydsl._mlir.dialects import llvm, math
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from gdn_runtime.kernels.common import lanes

HEAD_DIM = 256
WAVE_TOKENS = 64
"""Tokens of a tile that one of the four waves takes."""

PIECE = 16


@dataclass(frozen=True)
class Shape:
    """How a wave's work is cut, for S = 16 or 32."""

    side: int
    arch: str

    @property
    def wide(self) -> bool:
        """Whether products of two pieces a lane are one instruction (gfx950: 16x16x128, 32x32x64)."""
        return self.arch == "gfx950"

    @property
    def groups(self) -> int:
        """Groups of lanes, pieces that a product contracts per instruction and operand register quad."""
        return 64 // self.side

    @property
    def runs(self) -> int:
        """Runs of 16 tokens per lane."""
        return self.side // 16

    @property
    def key_tiles(self) -> int:
        """Matrix tiles of tokens."""
        return WAVE_TOKENS // self.side

    @property
    def key_pieces(self) -> int:
        """Pieces of a lane's K row."""
        return HEAD_DIM // (PIECE * self.groups)

    @property
    def value_tiles(self) -> int:
        """Matrix tiles of head elements."""
        return HEAD_DIM // self.side

    @property
    def tile_words(self) -> int:
        """fp32 values of a matrix tile per lane."""
        return self.side * self.side // 64


def zeros(shape):
    """An empty matrix tile."""
    return Vec.filled(shape.tile_words, 0.0, fx.Float32)


def product(shape, a, b, c):
    """c + a @ b for lists of pieces (Vec of 4 words) of equal length."""
    if shape.wide and len(a) % 2 == 0:
        for i in range(0, len(a), 2):
            c = _wide_product(shape, _eight(a[i], a[i + 1]), _eight(b[i], b[i + 1]), c)
        return c
    for left, right in zip(a, b, strict=True):
        c = _narrow_product(shape, left, right, c)
    return c


def _narrow_product(shape, a, b, c):
    """One piece, in two instructions of half a piece (16x16x32, 32x32x16)."""
    kind = c.ir_value().type
    for halves in zip(lanes.halves(a), lanes.halves(b), strict=True):
        left, right = (half.bitcast(fx.Int64)[0].ir_value() for half in halves)
        if shape.side == 16:
            tile = rocdl.mfma_f32_16x16x32_fp8_fp8(kind, [left, right, c.ir_value()])
        else:
            none = ir.Attribute.parse("#rocdl<mfma_perm_b none>")
            tile = rocdl.mfma_f32_32x32x16_fp8_fp8_(kind, left, right, c.ir_value(), 0, 0, none)
        c = Vec(tile, c.shape, fx.Float32)
    return c


def _eight(low, high):
    return low.shuffle(high, list(range(8)))


def _wide_product(shape, a, b, c):
    multiply = rocdl.mfma_scale_f32_16x16x128_f8f6f4 if shape.side == 16 else rocdl.mfma_scale_f32_32x32x64_f8f6f4
    unit = fx.Int32(0)  # both scales the constant 0: the instruction without scales
    tile = multiply(
        c.ir_value().type, [a.ir_value(), b.ir_value(), c.ir_value(), 0, 0, 0, unit.ir_value(), 0, unit.ir_value()]
    )
    return Vec(tile, c.shape, fx.Float32)


def runs_of(shape, tiles):
    """Scores by runs of 16 tokens, from the matrix tiles of K: lists of 4 Vec of 4 fp32."""
    if shape.side == 16:
        return [tiles]
    return [[tile.shuffle(tile, [4 * i + r for r in range(4)]) for i in range(4)] for tile in tiles]


def fp8_words(values):
    """A word of four FP8 per Vec of 4 fp32, in the flavour of the architecture, rounded to nearest even. Not clamped:
    NaN beyond the largest finite value."""
    word = llvm.mlir_undef(T.i32)
    for i in (0, 2):
        word = rocdl.cvt_pk_fp8_f32(T.i32, values[i].ir_value(), values[i + 1].ir_value(), word, i == 2)
    return fx.Int32(word)


def scaled_by_lane(value, factors, lane):
    """``value`` times ``factors`` (fp32) of lane ``lane`` (Python int) of each row of 16 lanes: one instruction.

    What LLVM makes of a broadcast and a product are two, because it packs the products. It does not look into assembly
    for hazards: ``value`` must not come from a matrix instruction less than 20 instructions back, ``factors`` not from
    a vector instruction less than 3 back (``settled``).
    """
    text = f"v_mul_f32_dpp $0, $1, $2 row_newbcast:{lane} row_mask:0xf bank_mask:0xf"
    operands = [factors.ir_value(), value.ir_value()]
    return fx.Float32(llvm.inline_asm(T.f32, operands, text, "=v,v,v", has_side_effects=False))


def wait_for_products():
    """As many wait states as any matrix instruction needs before assembly reads what it wrote; where no loads that are
    issued behind it take that long."""
    llvm.inline_asm(None, [], "s_nop 15\ns_nop 3", "", has_side_effects=True)


def settled(value):
    """``value`` (fp32), two instructions later: what reads it by DPP may follow."""
    return fx.Float32(llvm.inline_asm(T.f32, [value.ir_value()], "s_nop 1", "=v,0", has_side_effects=False))


def largest(values):
    """The largest of fp32 values that are not NaN."""
    first, *rest = values
    no_nan = ir.Attribute.parse("#arith.fastmath<nnan>")  # else an instruction more to quieten each operand
    for value in rest:
        first = fx.Float32(raw_arith.maxnumf(first.ir_value(), value.ir_value(), fastmath=no_nan))
    return first


def magnitude(x):
    """The absolute value of an fp32."""
    return (x.bitcast(fx.Int32) & fx.Int32(0x7FFFFFFF)).bitcast(fx.Float32)


def fma(a, b, c):
    """a * b + c of Vec or fp32, rounded once."""
    kind = type(a)
    raw = math.fma(*(x.ir_value() for x in (a, b, c)))
    return Vec(raw, a.shape, fx.Float32) if kind is Vec else fx.Float32(raw)


def across_groups(shape, value, combine):
    """``combine`` of the values of all lanes of a row, in each of them."""
    for distance in (32,) if shape.side == 32 else (16, 32):
        value = combine(value, fx.Float32(fx.gpu.shuffle_xor(value, distance, 64)))
    return value


def rows_doubled(word):
    """Two words: what the even and what the odd rows of 16 lanes hold of ``word``, in both rows of a pair (gfx950)."""
    kind = ir.Type.parse("!llvm.struct<(i32, i32)>")
    both = rocdl.permlane16_swap(kind, word.ir_value(), word.ir_value(), False, False)
    return [fx.Int32(llvm.extractvalue(T.i32, both, [i])) for i in range(2)]


def reciprocal(value):
    """1 / value within one unit of the last place."""
    return fx.Float32(rocdl.rcp(T.f32, value.ir_value()))
