"""One tile of a wave: scores, their exponentials, and the output they add to.

Per row a wave keeps a reference exponent m (an integer, log2 units), O and the sum of P = 2^(score - m), both times
2^UNIT. m is raised lazily, when some P would pass 2^(UNIT + HEADROOM): P in FP8 then never does, and a tile in which no
row needs it pays one comparison. With scales per token P is multiplied by v_scale / top before it is rounded, ``top`` a
power of two that is raised in the same way.

Sums match what is added to O. Per tensor: the rounded P, summed by a product with ones. Per token: rounded weights over
their share of ``top``, summed by a product with the inverses of the shares, each the sum of three FP8 numbers in three
rows of an operand: 12 bits. A tile with a share below MIN_SHARE, whose weights may be too small for FP8, adds the sum
of P as it is.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from gdn_runtime.kernels.common import lanes, numeric

from ...traits import FP8_FACTS
from . import pipe_flow as flow
from .pipe_lanes import (
    PIECE,
    across_groups,
    fma,
    fp8_words,
    largest,
    magnitude,
    product,
    reciprocal,
    rows_doubled,
    runs_of,
    scaled_by_lane,
    settled,
    zeros,
)
from .pipe_memory import unsigned_divmod
from .pipe_query import limits_of

HEADROOM = 1
"""Powers of two by which a score may pass its reference before that is raised. One costs few raises more than two (a
task of 39 tiles: 6 to 9 for 2 to 4) and leaves P one bit more of FP8's range."""

SHARE_UNIT = 2
"""Shares are kept times 2^-2, their inverses times 2^2: as large as FP8 takes those of ``MIN_SHARE``, so
that few bits of the smaller parts are lost below its normal numbers."""

MIN_SHARE = 2.0**-5
"""Least share of ``top`` that is summed by a product: its inverse is 128, FNUZ ends at 240."""

FIRST_TOP = 2.0**-64
"""``top`` before any token: V scales below it count as nothing."""

BELOW_ALL = -3.0e38
"""What a masked product counts as when the largest is looked for; any score is more."""

NOWHERE = -1.0e30
"""Score of a masked token, and m of a row that has seen nothing."""

ROTATE = 0x120
"""DPP: lanes of a row of 16 take what is so many lanes before them, in a circle."""

ONES = {"fn": 0x38383838, "fnuz": 0x40404040}


def unit_of(spec):
    """log2 of what P is multiplied by."""
    unit = FP8_FACTS[spec.fp8].probability_exponent - HEADROOM
    return unit + SHARE_UNIT if spec.scale_mode == "token" else unit


class Mask:
    """Which tokens of a wave's tile are seen, by lanes; ``first``: the first token of the wave in the tile."""

    def __init__(self, spec, shape, task, first):
        self.spec, self.shape = spec, shape
        # Anew: made of the lane that the kernel began with, all this would be kept in registers beside the loop.
        lane = fx.lane_id()
        group, _ = unsigned_divmod(lane, shape.side)
        low, high = limits_of(spec, shape, task, lane)
        runs = [first + (group + fx.Int32(2 * j)) * fx.Int32(PIECE) for j in range(shape.runs)]
        self.high = [high - run for run in runs]
        self.low = [low - run for run in runs] if spec.windowed else None
        self.end = [task.context - run for run in runs]
        self.begin = [task.low - run for run in runs] if spec.windowed else None
        _, self.of_row = unsigned_divmod(lane, PIECE)

    def sees(self, run, token):
        """Whether the lane's row sees token ``token`` (Python int) of a run."""
        seen = fx.Int32(token) < self.high[run]
        return seen if self.low is None else seen & (fx.Int32(token) >= self.low[run])

    def forget(self):
        """Make the compiler compare anew from here on: the results for all tokens are more than the scalar registers
        hold beside the rest."""
        self.high = [flow.opaque(x) for x in self.high]
        self.low = self.low and [flow.opaque(x) for x in self.low]

    def scales(self, values):
        """Scales per token by runs, 0 where no row sees the token; and whether some row does."""
        seen = []
        for j in range(self.shape.runs):
            valid = self.of_row < self.end[j]
            seen.append(valid if self.begin is None else valid & (self.of_row >= self.begin[j]))
        return [valid.select(x, fx.Float32(0.0)) for valid, x in zip(seen, values, strict=True)], seen

    def words(self, run):
        """Masks of the four words of V of a run: 0 for the bytes of tokens that no row sees."""
        words = []
        for i in range(4):
            word = _low_bytes(self.end[run] - fx.Int32(4 * i))
            if self.begin is not None:
                word = word & ~_low_bytes(self.begin[run] - fx.Int32(4 * i))
            words.append(word)
        return lanes.words(*words)


def _low_bytes(count):
    """A word whose lowest ``count`` (Int32, held to 0..4) bytes are ones."""
    some = ~(fx.Int32(-1) << (count * fx.Int32(8)))
    some = (count > fx.Int32(0)).select(some, fx.Int32(0))
    return (count > fx.Int32(3)).select(fx.Int32(-1), some)


class Tile:
    """The arithmetic of a wave. States are trees of ``start``."""

    def __init__(self, spec, shape, lane):
        self.spec, self.shape = spec, shape
        self.tokens = spec.scale_mode == "token"
        self.bound = float(FP8_FACTS[spec.fp8].probability_exponent + (SHARE_UNIT if self.tokens else 0))
        self.lane = lane
        if self.tokens:
            self.selectors = self._selectors()
            even = (lane & fx.Int32(PIECE)) == fx.Int32(0)
            self.even_row = even.select(fx.Int32(-1), fx.Int32(0))

    def start(self, unit):
        """The state before the first tile; ``unit`` makes a score in log2 units of a product, ``bias`` is log2 of the
        unit of P less m."""
        shape = self.shape
        out = [zeros(shape) for _ in range(shape.value_tiles)]
        state = {"bias": fx.Float32(-NOWHERE), "unit": unit, "sum": zeros(shape), "out": out}
        if self.tokens:
            inverse_top = fx.Float32(2.0**-SHARE_UNIT / FIRST_TOP)
            state |= {"exact": fx.Float32(0.0), "inverse_top": inverse_top}
        return state

    def scores(self, keys):
        """Products of the query with K by runs: lists of 4 Vec of 4 fp32."""
        shape = self.shape
        return runs_of(shape, [product(shape, key, self.query, zeros(shape)) for key in keys])

    def weights(self, state, scores, scales, mask):
        """(state, weights of V as pieces of FP8 by runs, pieces that they are multiplied by for their sum).

        ``mask`` is a ``Mask``, or None where all is seen."""
        # Known to none before the loop: else it is kept there four times over, for products of pairs.
        state = state | {"unit": flow.opaque(state["unit"])}
        if self.tokens:
            scores = [
                [
                    Vec.from_elements([scaled_by_lane(four[r], scale, 4 * i + r) for r in range(4)], fx.Float32)
                    for i, four in enumerate(run)
                ]
                for run, scale in zip(scores, scales[0], strict=True)
            ]
        if mask is None:
            reach = scores
        else:
            reach = [
                [self._masked(four, mask, j, i, BELOW_ALL) for i, four in enumerate(run)]
                for j, run in enumerate(scores)
            ]
        reach = largest([x for run in reach for four in run for x in four])
        shares = seen = None
        if self.tokens:
            shares = scales[1]
            if mask is not None:
                shares, seen = mask.scales(shares)
        state, shares = self._raised(state, reach, shares)
        if mask is not None:
            mask.forget()
        bias, unit = self._spread(state["bias"]), self._spread(state["unit"])
        powers = []
        for j, run in enumerate(scores):
            raised = [fma(four, unit, bias) for four in run]
            if mask is not None:
                raised = [self._masked(four, mask, j, i, NOWHERE) for i, four in enumerate(raised)]
            powers.append([Vec.from_elements([numeric.exp2(x) for x in four], fx.Float32) for four in raised])
        if not self.tokens:
            weights = [lanes.words(*(fp8_words(four) for four in run)) for run in powers]
            return state, weights, [lanes.words(*[fx.Int32(ONES[self.spec.fp8])] * 4)] * len(weights)
        exact, divisor = self._exact_where_small(state["exact"], powers, shares, seen)
        shares = [settled(share) for share in shares]
        weights = []
        for run, share in zip(powers, shares, strict=True):
            fours = [[scaled_by_lane(four[r], share, 4 * i + r) for r in range(4)] for i, four in enumerate(run)]
            weights.append(lanes.words(*(fp8_words(four) for four in fours)))
        return state | {"exact": exact}, weights, self._inverse_words(divisor)

    def _exact_where_small(self, exact, powers, shares, seen):
        """(sum of P that no product makes, what P's share of it is divided by): if some share is too small for that, P
        of the whole tile and infinity."""
        share = self._of_token(shares)
        small = share < fx.Float32(MIN_SHARE * 2.0**-SHARE_UNIT)
        if seen is not None:
            small = small & self._of_token(seen)
        divisor = largest([share, fx.Float32(MIN_SHARE * 2.0**-SHARE_UNIT)])

        def added(old):
            total = old["exact"]
            for run in powers:
                for four in run:
                    total = total + (four[0] + four[1] + four[2] + four[3])
            # Known to the compiler it would become a choice that every tile makes.
            return {"exact": total, "divisor": flow.opaque(fx.Float32(float("inf")))}

        changed = flow.when(flow.any_lane(small), {"exact": exact, "divisor": divisor}, added)
        return changed["exact"], changed["divisor"]

    def _masked(self, four, mask, run, i, value):
        hidden = fx.Float32(value)
        return Vec.from_elements([mask.sees(run, 4 * i + r).select(four[r], hidden) for r in range(4)], fx.Float32)

    def _spread(self, value):
        return Vec.from_elements([value] * 4, fx.Float32)

    def _raised(self, state, reach, scales):
        """(state with references high enough for this tile, shares of ``top``)."""
        high = [fma(reach, state["unit"], state["bias"]) > fx.Float32(self.bound)]
        shares = None
        if self.tokens:
            shares = [scale * state["inverse_top"] for scale in scales]
            high.append(self._of_token(shares) > fx.Float32(2.0**-SHARE_UNIT))

        def raised(old):
            state = dict(old["state"])
            row = across_groups(self.shape, reach * state["unit"], lambda x, y: largest([x, y]))
            passes = row + state["bias"] > fx.Float32(self.bound)
            # A rounding unit more: a score beyond 2^24 must not pass its own reference for having been rounded twice.
            top = _ceil(fma(magnitude(row), fx.Float32(2.0**-23), row))
            bias = passes.select(fx.Float32(unit_of(self.spec)) - top, state["bias"])
            decay = numeric.exp2(bias - state["bias"])
            new = {"bias": bias, "unit": state["unit"], "sum": state["sum"] * decay}
            if self.tokens:
                new["exact"] = state["exact"] * decay
                scale = largest(scales)
                for distance in (1, 2, 4, 8, 16, 32):
                    scale = largest([scale, fx.Float32(fx.gpu.shuffle_xor(scale, distance, 64))])
                inverse = _inverse_power_above(scale) * fx.Float32(2.0**-SHARE_UNIT)
                inverse = (inverse < state["inverse_top"]).select(inverse, state["inverse_top"])
                inverse = lanes.uniform(inverse.bitcast(fx.Int32)).bitcast(fx.Float32)
                decay = decay * (inverse * reciprocal(state["inverse_top"]))
                new["inverse_top"] = inverse
                result = {"shares": [x * inverse for x in scales]}
            else:
                result = {}
            new["out"] = [x * decay for x in state["out"]]
            return result | {"state": {name: new[name] for name in old["state"]}}

        old = {"shares": shares} if self.tokens else {}
        changed = flow.when(flow.any_lane(*high), old | {"state": state}, raised)
        return changed["state"], changed.get("shares")

    def _inverse_words(self, divisor):
        """Pieces by runs. Rows 0, 1, 2 of an operand are the parts of 1 / share of the tokens; where a lane cannot have
        both runs (gfx942), those of the second are in rows 16, 17, 18, and zero where the other run has its rows. What
        else there is are parts of other tokens, and their results are not used.

        A lane makes the parts for its token; the words of a quad are transposed, so that its lanes have one part of its
        four tokens each, and the quads of a row of 16 lanes are moved into its first.
        """
        rest = reciprocal(divisor)
        blank, none = llvm.mlir_undef(T.i32), fx.Float32(0.0)
        first = rest - self._decoded(self._pair(rest, rest, blank, False), 0)
        word = self._pair(rest, first, blank, False)
        second = first - self._decoded(word, 1)
        word = fx.Int32(self._pair(second, none, word, True))
        for control, selector in zip((lanes.SWAP_1, lanes.SWAP_2), self.selectors, strict=True):
            word = fx.Int32(rocdl.perm_b32(lanes.moved(word, control), word, selector))
        if self.shape.runs == 1:
            return [self._rotated(word)]
        if self.shape.wide:
            return [self._rotated(x) for x in rows_doubled(word)]
        piece = self._rotated(word)
        return [lanes.words(*(x & mask for x in piece)) for mask in (self.even_row, ~self.even_row)]

    def _rotated(self, word):
        return lanes.words(word, *(lanes.moved(word, ROTATE + 16 - 4 * i) for i in range(1, 4)))

    def _of_token(self, by_run):
        """Of values per run those of one token a lane, all 64 of the wave: of the second run in odd rows of lanes."""
        return by_run[0] if len(by_run) == 1 else (self.even_row != fx.Int32(0)).select(*by_run)

    def _pair(self, low, high, word, upper):
        return rocdl.cvt_pk_fp8_f32(T.i32, low.ir_value(), high.ir_value(), word, upper)

    def _decoded(self, word, byte):
        return fx.Float32(rocdl.cvt_f32_fp8(T.f32, word, byte))

    def _selectors(self):
        """v_perm selectors of the two steps of a transpose of 4 x 4 bytes between the lanes of a quad."""
        odd, second = ((self.lane & fx.Int32(bit)) == fx.Int32(bit) for bit in (1, 2))
        steps = ((odd, 0x03070105, 0x06020400), (second, 0x03020706, 0x05040100))
        return [bit.select(fx.Int32(yes), fx.Int32(no)) for bit, yes, no in steps]

    def add(self, state, weights, inverses, values, mask):
        """The state with the weighted V of a tile, and its weights times ``inverses``, added."""
        shape = self.shape
        total = product(shape, inverses, weights, state["sum"])
        if mask is not None:
            words = [mask.words(j) for j in range(shape.runs)]
            values = [[value & word for value, word in zip(tile, words, strict=True)] for tile in values]
        tiles = zip(values, state["out"], strict=True)
        return state | {"sum": total, "out": [product(shape, tile, weights, out) for tile, out in tiles]}

    def reference(self, state):
        """m of the lane's row."""
        return fx.Float32(float(unit_of(self.spec))) - state["bias"]

    def total(self, state):
        """The row's sum of P, times 2^UNIT, in all its lanes."""
        total = state["sum"]
        if not self.tokens:
            return total[0]
        apart = self.shape.runs == 2 and not self.shape.wide
        parts = [total[8 * j + i] for j in range(2 if apart else 1) for i in range(3)]
        first_group = fx.lane_id() < fx.Int32(self.shape.side)
        value = first_group.select(sum(parts[1:], parts[0]), fx.Float32(0.0)) + state["exact"]
        return across_groups(self.shape, value, lambda x, y: x + y)


def _ceil(value):
    # Assembly, for FlyDSL takes a ceiling from the device bitcode.
    return fx.Float32(llvm.inline_asm(T.f32, [value.ir_value()], "v_ceil_f32 $0, $1", "=v,v", has_side_effects=False))


def _inverse_power_above(value):
    """1 over the least power of two that is not below ``value`` > 0; 2^127 for 0."""
    power = (value.bitcast(fx.Int32) + fx.Int32(0x007FFFFF)) & fx.Int32(0x7F800000)
    return (fx.Int32(254 << 23) - power).bitcast(fx.Float32)
