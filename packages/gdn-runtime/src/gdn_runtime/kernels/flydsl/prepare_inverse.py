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

from ..common.lanes import TILE, joined, words, zeros
from ..common.numeric import exp2, fp16_pair, mfma_fp16
from .prepare_chunk import BLOCKS, Gates

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
    home, near, identity = n // fx.Int32(4), [], []
    for pair in range(2):
        row = q * fx.Int32(4) + fx.Int32(2 * pair)
        same = q == home
        low = (same & (row > n)).select(fx.Int32(0xFFFF), fx.Int32(0))
        high = (same & (row + fx.Int32(1) > n)).select(fx.Int32(-0x10000), fx.Int32(0))
        near.append(low | high)
        low = (row == n).select(fx.Int32(ONE), fx.Int32(0))
        high = (row + fx.Int32(1) == n).select(fx.Int32(ONE << 16), fx.Int32(0))
        identity.append(low | high)
    far = (q > home).select(fx.Int32(-1), fx.Int32(0))
    return Masks(words(*near), words(far, far), words(*identity))


def exp2_tile(tile):
    return fx.Vector.from_elements([exp2(tile[r]) for r in range(4)], fx.Float32)


def diagonal_m(keys, gates: Gates, block: int):
    """p(M) of a diagonal block from its k k^T, right below the diagonal and anything above it."""
    decay = exp2_tile(gates.gate_by_register[block] - gates.gate_by_lane[block])
    return pack(-(keys * decay * gates.gain_by_register[block]))


def row_factor(gates: Gates, block: int):
    """-beta_i exp(G_i - R), R the gate before the block; by register."""
    return -(exp2_tile(gates.gate_by_register[block] - gates.before[block]) * gates.gain_by_register[block])


def column_factor(gates: Gates, row: int, column: int):
    """exp(R - G_j), R the gate before block ``row``, j in block ``column``; by lane. Both factors are at most 1 for
    gates that are not positive, so their product is as good as exp(G_i - G_j), 0 included."""
    return exp2(gates.before[row] - gates.gate_by_lane[column])


def invert_diagonal(m, mask: Masks, natural: bool):
    """(p(C^T), the tile C^T, p(C) if ``natural``) of one block; ten products, six of them in a row."""
    near, far = m & mask.near, m & mask.far
    near_t = pack(product(near, mask.identity))
    square = pack(product(near_t, near)) | mask.identity
    near_t = near_t | mask.identity
    inner = product(near_t, square)
    inner_p, inner_t = pack(inner), pack(product(square, near_t))
    f_t = pack(product(far, inner_t))
    f = pack(product(inner_t, far))
    f_square_t = pack(product(f, f_t)) | mask.identity
    last = pack(product(f_t, inner_p, inner))
    transposed = product(last, f_square_t)
    return transposed, pack(transposed), pack(product(f_square_t, last)) if natural else None


def pair_product(first, second, wide: bool):
    """first[0]^T first[1] + second[0]^T second[1]: one product of K = 32 where there is one."""
    if wide:
        return product(joined(first[0], second[0]), joined(first[1], second[1]))
    return product(*second, product(*first))


def merge(lower, diagonal, wide: bool):
    """Tiles of Y = C^T on and above the diagonal, {(J, I): tile}, from p(M_IJ) below it (``lower[I, J]``) and
    ``diagonal[I]`` = (tile Y_II, p(Y_II), p(C_II)): pairs of blocks first, then the pair of pairs."""
    y = {(block, block): diagonal[block][0] for block in range(BLOCKS)}
    p_y = [part[1] for part in diagonal]
    p_c = [part[2] for part in diagonal]
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
