"""T' of a chunk and value head in memory, on its way from the prepare to K5.

T' = (I + A)^-1 diag(beta) in bf16 is lower triangular: ten tiles of 16x16, kept as left operands of the products with
it (``prepare_rows.left_operands``), the words of a lane side by side. Pairs of tiles come first, 16 bytes per lane,
then the tiles left over, 8 bytes, so that each load and store is of whole lines.
"""

from __future__ import annotations

from ...spec.tprime import T_ELEMENTS
from ..common.lanes import WAVE
from .prepare_chunk import BLOCKS
from .prepare_rows import left_operands

T_BYTES = 2 * T_ELEMENTS


def _places() -> dict[tuple[int, tuple[int, ...]], int]:
    operands = [(row, blocks) for row in range(BLOCKS) for blocks in left_operands(row)]
    places, at = {}, 0
    for row, blocks in sorted(operands, key=lambda operand: -len(operand[1])):
        places[row, blocks] = at
        at += lane_bytes(blocks) * WAVE
    return places


def lane_bytes(blocks: tuple[int, ...]) -> int:
    """Bytes of an operand that a lane holds: four bf16 of each of its blocks."""
    return 8 * len(blocks)


T_PLACES = _places()
"""Byte offset of each operand (row, blocks)."""
