"""Fused prepare: products with the rows of k and v.

k k^T takes k by token: lane (n, q) loads 16 bytes of token n, which is the operand of either side. u = T v and w = T k
need columns in the lanes: lane (n, q) loads 8 bytes, columns 4n..4n+3 of half a row, of tokens 4q + r; byte permutations
give the operands of four tiles, tile j holding columns 4n + j. So a lane ends with columns 4n..4n+3 of tokens 4q + r
and stores 8 bytes, 128 in a row of 16 lanes, without any exchange.
"""

from __future__ import annotations

import flydsl.expr as fx

from ..common.lanes import TILE, joined, mfma_k16, mfma_k32, words, zeros
from ..common.numeric import HIGH_HALVES, LOW_HALVES, bf16_pair, half_up_words, permute
from .prepare_chunk import BLOCKS, ROW_BYTES, Outputs, Rows

HALVES = 2
HALF_BYTES = ROW_BYTES // HALVES
SLICES = 4
"""Loads of a row of k by token, 64 bytes of it each."""


def load_by_token(rows: Rows, block: int, lane):
    """k of a block by token: 4 operands of 4 words, 32 columns each (in one order for all blocks)."""
    offset = (lane % fx.Int32(TILE)) * rows.stride + (lane // fx.Int32(TILE)) * fx.Int32(16)
    return [rows.blocks[block].load(offset + fx.Int32(64 * part), 4) for part in range(SLICES)]


def key_product(left, right, wide: bool):
    """Tile k_i . k_j of two blocks loaded by token."""
    tile = zeros()
    for a, b in zip(left, right, strict=True):
        tile = mfma_k32(a, b, tile, wide=wide)
    return tile


class Columns:
    """A half of the rows of a chunk, by column."""

    def __init__(self, rows: Rows, half: int, lane) -> None:
        n, first = lane % fx.Int32(TILE), (lane // fx.Int32(TILE)) * fx.Int32(4)
        offsets = [(first + fx.Int32(r)) * rows.stride + n * fx.Int32(8) for r in range(4)]
        self.loaded = [
            [buffer.load(offset + fx.Int32(HALF_BYTES * half), 2) for offset in offsets] for buffer in rows.blocks
        ]

    def operands(self, block: int):
        """Right operands (2 words) of the four tiles of a block."""
        rows = self.loaded[block]
        tiles = []
        for tile in range(4):
            word, selector = tile // 2, HIGH_HALVES if tile % 2 else LOW_HALVES
            low = permute(rows[1][word], rows[0][word], selector)
            tiles.append(words(low, permute(rows[3][word], rows[2][word], selector)))
        return tiles


def multiply(t, columns, row: int, wide: bool):
    """Four tiles of block ``row`` of T x: t[I, J] left operands (J <= I), columns[J] right operands."""
    tiles = [zeros() for _ in range(4)]
    blocks = list(range(row + 1))
    while blocks:
        if wide and len(blocks) > 1:
            a, b = blocks[:2]
            left = joined(t[row, a], t[row, b])
            tiles = [
                mfma_k32(left, joined(columns[a][i], columns[b][i]), tiles[i], wide=True) for i in range(4)
            ]
            blocks = blocks[2:]
        else:
            a = blocks.pop(0)
            tiles = [mfma_k16(t[row, a], columns[a][i], tiles[i]) for i in range(4)]
    return tiles


def store_rows(out: Outputs, tiles, row: int, half: int, lane, arch: str) -> None:
    n, q = lane % fx.Int32(TILE), lane // fx.Int32(TILE)
    offset = q * fx.Int32(4 * ROW_BYTES) + n * fx.Int32(8) + fx.Int32(TILE * ROW_BYTES * row)
    if arch == "gfx942":
        # Registers of a tile lie side by side, so the half unit is added there and the pairs are taken across tiles.
        rounded = [half_up_words(tile) for tile in tiles]
    for r in range(4):
        if arch == "gfx942":
            pairs = [permute(rounded[i + 1][r], rounded[i][r], HIGH_HALVES) for i in (0, 2)]
        else:
            pairs = [bf16_pair(tiles[i][r], tiles[i + 1][r], "near", arch) for i in (0, 2)]
        out.buffer.store(words(*pairs), offset + fx.Int32(r * ROW_BYTES + HALF_BYTES * half))


def scaled_operand(tile, factor, arch: str):
    """Left operand T_IJ, 2 words of bf16, from the tile Y_JI = C_IJ^T and the factor of column j, by register."""
    scaled = tile * factor
    return words(*(bf16_pair(scaled[i], scaled[i + 1], "near", arch) for i in (0, 2)))


def lower_blocks():
    return [(i, j) for i in range(BLOCKS) for j in range(i + 1)]
