"""Fused prepare: products with the rows of k and v.

k k^T takes k by token: lane (n, q) loads 16 bytes of token n, which is the operand of either side. u = T v and w = T k
need columns in the lanes: lane (n, q) loads 8 bytes, columns 4n..4n+3 of half a row, of tokens 4q + r; byte
permutations give the operands of four tiles, tile j holding columns 4n + j. So a lane ends with columns 4n..4n+3 of
tokens 4q + r and stores 8 bytes, 128 in a row of 16 lanes, without any exchange.
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


def load_by_token(rows: Rows, block, lane):
    """k of a block by token: 4 operands of 4 words, 32 columns each (in one order for all blocks)."""
    # In units of 16 bytes and 24 bits: from the plain form the compiler makes v_mad_u64_u32, whose addend has a high
    # half that nobody set. If a load is to land in that register, all loads after it wait for a memory latency.
    units = (rows.stride >> fx.Int32(4)) & fx.Int32(0xFFFFFF)
    offset = ((lane % fx.Int32(TILE)) * units + lane // fx.Int32(TILE)) << fx.Int32(4)
    return [rows.load(block, [offset], 64 * part, 4)[0] for part in range(SLICES)]


def key_product(left, right, wide: bool):
    """Tile k_i . k_j of two blocks loaded by token."""
    tile = zeros()
    for a, b in zip(left, right, strict=True):
        tile = mfma_k32(a, b, tile, wide=wide)
    return tile


class Columns:
    """A half of the rows of a chunk, by column. ``half``: 0 or 1, an int or an Int32."""

    def __init__(self, rows: Rows, half, lane) -> None:
        n, first = lane % fx.Int32(TILE), (lane // fx.Int32(TILE)) * fx.Int32(4)
        column, distance = n * fx.Int32(8), 0
        if isinstance(half, int):
            distance = HALF_BYTES * half
        else:
            column = column + half * fx.Int32(HALF_BYTES)
        offsets = [(first + fx.Int32(r)) * rows.stride + column for r in range(4)]
        self._loaded = [rows.load(block, offsets, distance, 2) for block in range(BLOCKS)]

    def operands(self, block: int):
        """Right operands (2 words) of the four tiles of a block."""
        rows = self._loaded[block]
        tiles = []
        for tile in range(4):
            word, selector = tile // 2, HIGH_HALVES if tile % 2 else LOW_HALVES
            low = permute(rows[1][word], rows[0][word], selector)
            tiles.append(words(low, permute(rows[3][word], rows[2][word], selector)))
        return tiles


def left_operands(row: int):
    """Which left operands of block ``row`` of T there are: pairs (J, J + 1), and (row,) where one is left over."""
    pairs = [(j, j + 1) for j in range(0, row, 2)]
    return pairs if row % 2 else [*pairs, (row,)]


def multiply(t, columns, row: int, wide: bool):
    """Four tiles of block ``row`` of T x: t[row, blocks] per entry of ``left_operands``, 2 words per block; columns[J]
    right operands."""
    tiles = [zeros() for _ in range(4)]
    for blocks in left_operands(row):
        left = t[row, blocks]
        for i in range(4):
            if len(blocks) == 1:
                tiles[i] = mfma_k16(left, columns[row][i], tiles[i])
            else:
                right = joined(*(columns[block][i] for block in blocks))
                tiles[i] = mfma_k32(left, right, tiles[i], wide=wide)
    return tiles


def store_rows(out: Outputs, tiles, row: int, half, lane, arch: str) -> None:
    """Round and store a block of rows. ``half``: 0 or 1, an int or an Int32."""
    n, q = lane % fx.Int32(TILE), lane // fx.Int32(TILE)
    offset = q * fx.Int32(4 * ROW_BYTES) + n * fx.Int32(8) + fx.Int32(half) * fx.Int32(HALF_BYTES)
    offset = offset + fx.Int32(TILE * ROW_BYTES * row)
    if arch == "gfx942":
        # Registers of a tile lie side by side, so the half unit is added there and the pairs are taken across tiles.
        rounded = [half_up_words(tile) for tile in tiles]
    for r in range(4):
        if arch == "gfx942":
            pairs = [permute(rounded[i + 1][r], rounded[i][r], HIGH_HALVES) for i in (0, 2)]
        else:
            pairs = [bf16_pair(tiles[i][r], tiles[i + 1][r], "near", arch) for i in (0, 2)]
        out.buffer.store(words(*pairs), offset + fx.Int32(r * ROW_BYTES))


def t_operands(row: int, tiles, factors, arch: str):
    """Left operands of block ``row`` of T = C f by ``left_operands``: 2 words of bf16 per block, from the tiles Y_JI =
    C_IJ^T (``tiles[J]``) and the factors f_J of their columns, by register."""
    words_of = [_scaled(tiles[j], factors[j], arch) for j in range(row + 1)]
    return {(row, blocks): words(*(word for j in blocks for word in words_of[j])) for blocks in left_operands(row)}


def _scaled(tile, factor, arch: str):
    scaled = tile * factor
    return [bf16_pair(scaled[i], scaled[i + 1], "near", arch) for i in (0, 2)]
