"""Fused prepare: A and (I + A)^-1 of a chunk from 16x16 tiles, without LDS.

A tile X packed to fp16, p(X), is the MFMA operand X^T on the left and X on the right: ``product(p(S), p(T))`` = S^T T,
and swapping the arguments gives the transpose of that. M = -A throughout, so C = (I + A)^-1 = (I - M)^-1.

A diagonal block is inverted on two levels. B: its 4x4 diagonal blocks; E: the rest. Then
    N = (I - B)^-1 = (I + B)(I + B^2), F = N E, C = (I - F)^-1 N = (I + F^2)(N + F N),
as B^4 = 0 and F^4 = 0. No power of the whole 16x16 block is formed: its entries would reach C(14, 7) = 3432 for similar
keys and cancel. Operands are fp16 (toward zero); the error of C stays below that of its rounding to bf16 for beta <= 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx
from flydsl.expr.typing import Vector as Vec

from ..common.lanes import TILE, joined, words, zeros
from ..common.numeric import exp2, fp16_pair, mfma_fp16
from .prepare_chunk import Gates

ONE = 0x3C00
"""1.0 in fp16."""


def pack(tile):
    """Operand of a tile, 2 words of fp16."""
    return words(fp16_pair(tile[0], tile[1]), fp16_pair(tile[2], tile[3]))


def product(left, right, start=None):
    return mfma_fp16(left, right, zeros() if start is None else start)


@dataclass(frozen=True)
class Masks:
    """Words to AND with, or to OR with, a packed tile: the strictly lower part of the 4x4 diagonal blocks, the 4x4
    blocks below them, and the identity."""

    near: object
    far: object
    identity: object


def masks(lane) -> Masks:
    n, q = lane % fx.Int32(TILE), lane // fx.Int32(TILE)
    home, column = n // fx.Int32(4), fx.Int64((n % fx.Int32(4)) * fx.Int32(16))
    near, far = q == home, (q > home).select(fx.Int32(-1), fx.Int32(0))
    # A lane's four elements of a column in 64 bits: those below the diagonal, and the one on it.
    below, on = (
        [near.select(word, fx.Int32(0)) for word in _words(fx.Int64(bits) << column)] for bits in (-0x10000, ONE)
    )
    return Masks(words(*below), words(far, far), words(*on))


def _words(value):
    return Vec.from_elements([value], fx.Int64).bitcast(fx.Int32)


def exp2_tile(tile):
    return Vec.from_elements([exp2(tile[r]) for r in range(4)], fx.Float32)


def diagonal_m(keys, gates: Gates, block: int):
    """p(M) of a diagonal block from its k k^T, right below the diagonal and anything above it."""
    decay = exp2_tile(gates.gate(block) - gates.gate_by_lane(block))
    return pack(-(keys * decay * gates.gain(block)))


def column_factor(before, gate_by_lane):
    """exp(R - G_j), R the gate before block I and j in a block J < I; by lane. With the row factor of block I that is
    exp(G_i - G_j): both are at most 1 for gates that are not positive, so the product is as good, 0 included."""
    return exp2(before - gate_by_lane)


@dataclass(frozen=True)
class Diagonal:
    """Inverse of a diagonal block: the tile C^T, p(C^T), and p(C) (None where nobody needs it)."""

    tile: object
    transposed: object
    natural: object


def invert_diagonal(blocks, mask: Masks) -> list[Diagonal]:
    """``blocks``: (p(M), whether p(C) is needed). Ten products each, six of them in a row, so the blocks go in step:
    the products of the others fill the time until one has its result."""

    def each(function, *lists):
        return [function(*items) for items in zip(*lists, strict=True)]

    def packed(lefts, rights):
        return [pack(tile) for tile in each(product, lefts, rights)]

    near = [m & mask.near for m, _ in blocks]
    far = [m & mask.far for m, _ in blocks]
    identity = [mask.identity for _ in blocks]
    near_t = packed(near, identity)
    square = [x | mask.identity for x in packed(near_t, near)]
    near_t = [x | mask.identity for x in near_t]
    inner = each(product, near_t, square)
    inner_t = packed(square, near_t)
    inner_p = [pack(tile) for tile in inner]
    f_t = packed(far, inner_t)
    f = packed(inner_t, far)
    f_square_t = [x | mask.identity for x in packed(f, f_t)]
    last = [pack(tile) for tile in each(product, f_t, inner_p, inner)]
    tiles = each(product, last, f_square_t)
    naturals = [
        pack(product(left, right)) if needed else None
        for left, right, (_, needed) in zip(f_square_t, last, blocks, strict=True)
    ]
    return [Diagonal(tile, pack(tile), natural) for tile, natural in zip(tiles, naturals, strict=True)]


def pair_product(first, second, wide: bool):
    """first[0]^T first[1] + second[0]^T second[1]: one product of K = 32 where there is one."""
    if wide:
        return product(joined(first[0], second[0]), joined(first[1], second[1]))
    return product(*second, product(*first))


def merge(lower, diagonal: list[Diagonal], wide: bool):
    """Tiles of Y = C^T on and above the diagonal, {(J, I): tile}, from p(M_IJ) below it (``lower[I, J]``) and the
    inverses of the diagonal blocks: pairs of blocks first, then the pair of pairs."""
    y = {(i, i): block.tile for i, block in enumerate(diagonal)}
    p_y, p_c = [block.transposed for block in diagonal], [block.natural for block in diagonal]
    inner = pack(product(lower[1, 0], p_y[1]))
    y[0, 1] = product(p_c[0], inner)
    c_10 = pack(product(inner, p_c[0]))
    y[2, 3] = product(p_c[2], pack(product(lower[3, 2], p_y[3])))
    y_23 = pack(y[2, 3])
    for column in (2, 3):
        x = []
        for row in (0, 1):
            if column == 2:
                tile = product(lower[2, row], p_y[2])
            else:
                tile = pair_product((lower[2, row], y_23), (lower[3, row], p_y[3]), wide)
            x.append(pack(tile))
        y[1, column] = product(p_c[1], x[1])
        y[0, column] = pair_product((p_c[0], x[0]), (c_10, x[1]), wide)
    return y


def column(lower, naturals, diagonal: Diagonal, block: int, wide: bool):
    """Tiles Y_JI of one column I = ``block`` of Y = C^T, J = 0..I: Y_JI = Y_JJ sum of M^T_JK Y_KI over J < K <= I, from
    p(M_KJ) (``lower[K, J]``), p(C_JJ) (``naturals[J]``) and the inverse of the column's own diagonal block."""
    tiles, packed = {block: diagonal.tile}, {block: diagonal.transposed}
    for row in reversed(range(block)):
        terms = [(lower[k, row], packed[k]) for k in range(block, row, -1)]
        total = None
        while terms:
            if wide and len(terms) > 1:
                first, second = terms.pop(0), terms.pop(0)
                total = product(joined(first[0], second[0]), joined(first[1], second[1]), total)
            else:
                total = product(*terms.pop(0), total)
        tiles[row] = product(naturals[row], pack(total))
        if row:
            packed[row] = pack(tiles[row])
    return tiles
