"""The end of a task: the four waves' rows become one, through LDS, and are stored."""

from __future__ import annotations

import math

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from gdn_runtime.kernels.common import lds, memory, numeric

from .pipe_lanes import HEAD_DIM, largest, reciprocal
from .pipe_memory import times, unsigned_divmod
from .pipe_tile import NOWHERE, unit_of

WAVES, THREADS = 4, 256
PAD = 16
"""Bytes behind a row in LDS, so that rows begin in different banks."""

ROUND_BYTES = {"gfx942": 36 << 10, "gfx950": 72 << 10}
"""LDS for outputs in flight: what lets as many workgroups share a compute unit as registers do (two for up to 16 rows,
one for 32), of 64 and 160 KB."""


def rounds_of(spec, shape):
    """In how many parts of the head O passes through LDS."""
    rounds = 1
    while WAVES * shape.side * (HEAD_DIM * 4 // rounds + PAD) > ROUND_BYTES[spec.arch] // (
        3 - shape.runs if spec.arch == "gfx942" else 1
    ):
        rounds *= 2
    return rounds


def lds_bytes(spec, shape):
    """Sizes of the two regions of ``Merge``: m and l of the waves, and their outputs."""
    row = HEAD_DIM * 4 // rounds_of(spec, shape) + PAD
    return 2 * WAVES * shape.side * 4, WAVES * shape.side * row


class Merge:
    """One merge of four waves."""

    def __init__(self, spec, args, shape, task, wave, lane, regions):
        self.spec, self.args, self.shape, self.task = spec, args, shape, task
        self.wave = wave
        self.group, self.row = unsigned_divmod(lane, shape.side)
        self.thread = wave * fx.Int32(64) + lane
        self.statistics, self.outputs = regions
        slot = times(task.head, args.capacity) + fx.Int64(fx.Uint32(task.slot))
        self.first_row = slot * fx.Int64(spec.rows)

    def finish(self, reference, total, out, scale):
        """Store the rows; ``scale``: what O is multiplied by to be in the units of ``total`` (fp32 of the lane)."""
        reference = (total > fx.Float32(0.0)).select(reference, fx.Float32(NOWHERE))
        own = lds_words(reference, total)
        at = (self.wave * fx.Int32(self.shape.side) + self.row) * fx.Int32(8)
        lds.write(own, self.statistics.at(at))
        lds.barrier()
        place = self.statistics.at(self.row * fx.Int32(8))
        all_waves = [lds.read(place, 2, 8 * self.shape.side * w).bitcast(fx.Float32) for w in range(WAVES)]
        top = largest([x[0] for x in all_waves])
        parts = [x[1] * numeric.exp2(x[0] - top) for x in all_waves]
        whole = parts[0] + parts[1] + parts[2] + parts[3]
        some = whole > fx.Float32(0.0)
        factor = numeric.exp2(reference - top) * scale * reciprocal(whole)
        self._store_statistics(top, whole, some)
        self._store_rows([tile * some.select(factor, fx.Float32(0.0)) for tile in out])

    def _store_statistics(self, top, whole, some):
        offset, size = self.first_row * fx.Int64(4), fx.Int32(4 * self.spec.rows)
        at = self.thread * fx.Int32(4)  # the first threads have the rows, the others are behind the end
        natural = some.select(top * fx.Float32(math.log(2.0)), fx.Float32(-math.inf))
        memory.Buffer(self.args.partial_max + offset, size).store(natural, at)
        memory.Buffer(self.args.partial_sum + offset, size).store(whole * fx.Float32(2.0 ** -unit_of(self.spec)), at)

    def _store_rows(self, out):
        spec, shape, rounds = self.spec, self.shape, rounds_of(self.spec, self.shape)
        columns, tiles = HEAD_DIM // rounds, len(out) // rounds
        stride = columns * 4 + PAD
        size = fx.Int32(spec.rows * HEAD_DIM * 2)
        view = memory.Buffer(self.args.partial_out + self.first_row * fx.Int64(HEAD_DIM * 2), size)
        wave_bytes = shape.side * stride
        write = self.outputs.at(
            (self.wave * fx.Int32(shape.side) + self.row) * fx.Int32(stride) + self.group * fx.Int32(16)
        )
        # Four neighbours of a row per thread and step.
        units = columns // 4
        row, unit = unsigned_divmod(self.thread, units)
        read = self.outputs.at(row * fx.Int32(stride) + unit * fx.Int32(16))
        store = row * fx.Int32(HEAD_DIM * 2) + unit * fx.Int32(8)
        rows_per_step = THREADS // units
        for part in range(rounds):
            if part:
                lds.barrier()
            for i, tile in enumerate(out[part * tiles : (part + 1) * tiles]):
                for four in range(shape.tile_words // 4):
                    words = tile.shuffle(tile, [4 * four + r for r in range(4)]).bitcast(fx.Int32)
                    lds.write(words, write, i * shape.side * 4 + four * 32)
            lds.barrier()
            for step in range(shape.side // rows_per_step):
                if step * rows_per_step >= spec.rows:
                    break
                places = [step * rows_per_step * stride + w * wave_bytes for w in range(WAVES)]
                values = [lds.read(read, 4, x).bitcast(fx.Float32) for x in places]
                value = values[0] + values[1] + values[2] + values[3]
                words = [self._pair(value[i], value[i + 1]) for i in (0, 2)]
                at = store + fx.Int32(step * rows_per_step * HEAD_DIM * 2 + part * columns * 2)
                view.store(Vec.from_elements(words, fx.Int32), at)

    def _pair(self, first, second):
        if self.spec.query_dtype == "bf16":
            return numeric.bf16_pair_nearest(first, second)
        pair = Vec.from_elements([first, second], fx.Float32)
        rounded = arith.truncf(ir.VectorType.get([2], ir.F16Type.get()), pair.ir_value())
        return fx.Int32(llvm.bitcast(T.i32, rounded))


def lds_words(*values):
    """Vec of words of fp32 values."""
    return Vec.from_elements(values, fx.Float32).bitcast(fx.Int32)
