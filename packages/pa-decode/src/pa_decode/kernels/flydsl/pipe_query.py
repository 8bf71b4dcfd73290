"""The query of the D256 pipe: rows quantised to FP8 where their products want them, with their scales.

Every wave quantises all rows, in the lanes' pieces of 16 elements, so that nothing passes between waves. Lanes of rows
that do not exist hold the last row: finite numbers that are never stored.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr.typing import Vector as Vec

from gdn_runtime.kernels.common import lanes, numeric
from gdn_runtime.spec import LOG2E

from ...traits import FP8_FACTS, MIN_SCALE
from . import pipe_flow as flow
from .pipe_lanes import across_groups, fma, fp8_words, largest, magnitude, reciprocal
from .pipe_memory import at_most, load_at, unsigned_divmod

ROW_PIECE = 32
"""Bytes of 16 elements."""


def row_of(spec, shape, lane):
    """(query token, head of the group) of the row of a lane."""
    _, column = unsigned_divmod(lane, shape.side)
    row = at_most(column, fx.Int32(spec.rows - 1))
    return unsigned_divmod(row, spec.group_size)


def limits_of(spec, shape, task, lane):
    """(low, high): the row of a lane sees tokens low .. high - 1. Without a window low is None, 0."""
    token, _ = row_of(spec, shape, lane)
    high = task.context - fx.Int32(spec.query_length - 1) + token
    return high - task.window if spec.windowed else None, high


class Rows:
    """The lane's row of the query."""

    def __init__(self, spec, args, shape, task, lane):
        self.spec, self.args, self.shape, self.task = spec, args, shape, task
        self.group, _ = unsigned_divmod(lane, shape.side)
        self.token, self.head = row_of(spec, shape, lane)

    def fetch(self):
        """The lane's pieces of its row, two Vec of 4 words each."""
        args, task = self.args, self.task
        first_row = fx.Int64(task.sequence * fx.Int32(self.spec.query_length))
        first_head = fx.Int64(task.head * fx.Int32(self.spec.group_size))
        address = args.query + first_row * args.q_stride_row + first_head * args.q_stride_head
        address = address + fx.Int64(self.token) * args.q_stride_row + fx.Int64(self.head) * args.q_stride_head
        address = address + fx.Int64(self.group * fx.Int32(ROW_PIECE))
        step = ROW_PIECE * self.shape.groups
        return [[load_at(address, 4, step * c + 16 * i) for i in range(2)] for c in range(self.shape.key_pieces)]

    def quantise(self, fetched, scale):
        """(pieces of FP8, what a product with K is multiplied by to be a score in log2 units); ``scale``: softmax scale
        and the K scale of the tensor, if there is one."""
        largest_fp8 = FP8_FACTS[self.spec.fp8].max
        words = [word for piece in fetched for part in piece for word in part]
        magnitudes = [magnitude(x) for word in words for x in self._widened(word)]
        greatest = across_groups(self.shape, largest(magnitudes), lambda x, y: largest([x, y]))
        unit = divided(greatest, fx.Float32(largest_fp8), fx.Float32(1 / largest_fp8))
        divisor = largest([unit, fx.Float32(MIN_SCALE)])
        inverse = reciprocal(divisor)
        inverse = fma(fma(-divisor, inverse, fx.Float32(1.0)), inverse, inverse)
        spread = [Vec.from_elements([x] * 4, fx.Float32) for x in (divisor, inverse)]
        quantised = []
        for i in range(0, len(words), 8):
            # Words of which the compiler knows nothing: else it keeps what it widened for the magnitudes, in twice as
            # many registers, beside all of K and V.
            piece = [x for word in words[i : i + 8] for x in self._widened(flow.opaque(word))]
            fours = [divided(Vec.from_elements(piece[j : j + 4], fx.Float32), *spread) for j in range(0, 16, 4)]
            quantised.append(lanes.words(*(fp8_words(four) for four in fours)))
        return quantised, unit * scale * fx.Float32(LOG2E)

    def _widened(self, word):
        low, high = fx.Uint32(word), fx.Uint32(word) >> fx.Uint32(16)
        if self.spec.query_dtype == "fp16":
            return numeric.fp16_to_fp32(low), numeric.fp16_to_fp32(high)
        return numeric.bf16_to_fp32(low), (word & fx.Int32(-1 << 16)).bitcast(fx.Float32)


def divided(x, divisor, inverse):
    """x / divisor, rounded once; ``inverse``: 1 / divisor, rounded.

    A product with the inverse would not do: of a 16-bit query many a quotient lies half-way between two FP8 numbers.
    """
    quotient = x * inverse
    return fma(fma(-quotient, divisor, x), inverse, quotient)
