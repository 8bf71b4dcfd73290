"""Paged FP8 decode attention at head size 256, for gfx942 and gfx950: one task and KV head per workgroup.

Four waves share a task by tokens, 64 of every tile each, and never meet before its end: a wave has its own reference,
sum and output per query row, and all of a row's numbers in the lanes of that row. S^T = K q^T leaves the query rows on
lanes, so that maxima, exponentials and limits of rows need no exchange, and what it leaves there, rounded to FP8, is
the operand of O^T = V^T P^T (``pipe_lanes``). There is no LDS and no barrier before the end (``pipe_merge``).

K and V of a tile are in registers, loaded a tile ahead into the registers that the last products have read: K behind
the products with K, V behind those with V, and before V the scales of its tile and the page ids of the next, so that a
tile of both is always on its way. Loads return in order, so a wait before each product, and one for scales and ids, are
all that a tile takes.

A wave takes only tiles in which some row sees some of its tokens. Its last is peeled off the loop and masked, with a
window its first too: all between are seen whole by every row (``Steps``).
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from gdn_runtime.kernels.common import lanes, lds, memory

from ...spec import AttentionSpec
from ...traits import TILE
from . import pipe_flow as flow
from .pipe_lanes import WAVE_TOKENS, Shape, wait_for_products
from .pipe_memory import at_least, at_most, make_pages
from .pipe_merge import Merge, lds_bytes
from .pipe_query import Rows
from .pipe_tile import Mask, Tile


class Steps:
    """The tiles of a wave, and the steps that it takes through them."""

    def __init__(self, spec, args, shape, task, wave, lane):
        self.spec, self.args, self.shape, self.task = spec, args, shape, task
        self.wave = wave
        start = wave * fx.Int32(WAVE_TOKENS)
        # Tiles that hold tokens of the wave before the context's end and, with a window, behind its beginning.
        self.end = at_most(task.end, ((task.context - start - fx.Int32(1)) >> fx.Int32(8)) + fx.Int32(1))
        self.first = task.first
        if spec.windowed:
            behind = (task.low - start + fx.Int32(TILE - WAVE_TOKENS)) >> fx.Int32(8)
            self.first = at_least(task.first, behind)
        self.count = self.end - self.first
        self.start_token = start
        self.rows = Rows(spec, args, shape, task, lane)
        self.pages = make_pages(spec, args, shape, task, wave, lane)

    def run(self, tile):
        """All tiles: (state of ``tile`` at the end). The query's loads go first, then the first tile's."""
        spec, pages = self.spec, self.pages
        last = self.end - fx.Int32(1)
        fetched = self.rows.fetch()
        scale = self._tensor_scale(self.args.k_scale) * self.args.softmax_scale
        lds.sched_fence()
        cursor, page = pages.start(self.first, last)
        cursor, keys = pages.load_keys(cursor, page)
        lds.sched_fence()
        carry = {"cursor": cursor, "keys": keys, **self._behind_keys(cursor, page, more=not spec.single_tile)}
        tile.query, unit = self.rows.quantise(fetched, scale)
        if self.shape.side == 32:
            tile.query = [flow.in_accumulators(piece) for piece in tile.query]
        carry["state"] = tile.start(unit)
        lds.sched_fence()
        if not spec.single_tile:
            more = flow.opaque_scalar(self.count - fx.Int32(1))
            if spec.windowed:
                carry = flow.when(
                    more > fx.Int32(0), carry, lambda x: self._step(tile, x, self._mask(self.first), more=True)
                )
                more = at_least(more - fx.Int32(1), fx.Int32(0))
            carry = flow.repeat(more, carry, lambda x: self._step(tile, x, None, more=True))
        return self._step(tile, carry, self._mask(last), more=False)["state"]

    def _mask(self, index):
        first = index * fx.Int32(TILE) + self.start_token
        return Mask(self.spec, self.shape, self.task, first)

    def _tensor_scale(self, address):
        """The scale of a tensor, 1 for a null pointer and in "token" mode."""
        if self.spec.scale_mode == "token":
            return fx.Float32(1.0)
        absent = address == fx.Int64(0)
        value = memory.Buffer(address, absent.select(fx.Int32(0), fx.Int32(4))).load(fx.Int32(0))
        return absent.select(fx.Float32(1.0), value.bitcast(fx.Float32))

    def value_scale(self, state):
        """What the O of a state is multiplied by to be in the units of its sum."""
        if self.spec.scale_mode == "token":
            return fx.Float32(rocdl.rcp(fx.Float32.ir_type, state["inverse_top"].ir_value()))
        return self._tensor_scale(self.args.v_scale)

    def _behind_keys(self, cursor, page, *, more):
        """What is loaded behind K of a tile: its scales, the ids of the next tile if there may be ``more``, its V."""
        pages, behind = self.pages, {"scales": self.pages.load_scales(page)}
        lds.sched_fence()
        if more:
            cursor, behind["ids"] = pages.ahead(cursor)
            lds.sched_fence()
        behind["cursor"], behind["values"] = pages.load_values(cursor, page)
        lds.sched_fence()
        return behind

    def _step(self, tile, carry, mask, *, more):
        """One tile; ``more``: the next one's loads are issued."""
        pages = self.pages
        few = pages.scale_loads + (pages.id_loads if not self.spec.single_tile else 0)
        lds.sched_fence()
        rocdl.s_waitcnt(vmcnt=few + pages.value_loads)  # K is there
        lds.sched_fence()
        scores = tile.scores(carry["keys"])
        lds.sched_fence()
        if few:
            rocdl.s_waitcnt(vmcnt=pages.value_loads)  # scales and ids are there
            lds.sched_fence()
        if more:
            page = pages.page(carry["ids"])
            cursor, keys = pages.load_keys(carry["cursor"], page)
        elif carry["scales"]:
            wait_for_products()
        lds.sched_fence()
        state, weights, inverses = tile.weights(carry["state"], scores, carry["scales"], mask)
        lds.sched_fence()
        rocdl.s_waitcnt(vmcnt=pages.key_loads if more else 0)  # V is there
        lds.sched_fence()
        state = tile.add(state, weights, inverses, carry["values"], mask)
        lds.sched_fence()
        if not more:
            return {"state": state}
        behind = self._behind_keys(cursor, page, more=True)
        return {name: ({"keys": keys, "state": state} | behind)[name] for name in carry}


def attend(spec, args, task, wave, lane, regions):
    """One task and KV head."""
    shape = Shape(16 if spec.rows <= 16 else 32, spec.arch)
    steps = Steps(spec, args, shape, task, wave, lane)
    tile = Tile(spec, shape, lane)
    state = flow.when(steps.count > fx.Int32(0), tile.start(fx.Float32(0.0)), lambda _: steps.run(tile))
    merge = Merge(spec, args, shape, task, wave, fx.lane_id(), regions)
    merge.finish(tile.reference(state), tile.total(state), state["out"], steps.value_scale(state))


def task_of(spec, args):
    """The workgroup's record of the plan, and the KV head."""
    slot = fx.Int32(fx.block_idx.x)
    base = args.work_info + fx.Int64(fx.Uint32(slot)) * fx.Int64(16)
    sequence, first, end, context = (memory.scalar_load(base, 4 * i) for i in range(4))
    task = SimpleNamespace(sequence=sequence, first=first, end=end, context=context, slot=slot)
    task.head = fx.Int32(fx.block_idx.y)
    task.low = fx.Int32(0)
    if spec.windowed:
        # A window as long as the context is none; so cut, no difference leaves 32 bits.
        task.window = at_most(args.window, context)
        task.low = at_least(context - fx.Int32(spec.query_length - 1) - task.window, fx.Int32(0))
    return task


def build(spec: AttentionSpec):
    """The launcher of ``spec`` for ``_compile_only``, and example arguments: both of ``spec.ARGUMENTS``."""
    spec.check()
    shape = Shape(16 if spec.rows <= 16 else 32, spec.arch)

    @flyc.kernel(name=spec.kernel, known_block_size=list(spec.block))
    def d256_pipe(
        query: fx.Int64, k_cache: fx.Int64, v_cache: fx.Int64, block_tables: fx.Int64, k_scale: fx.Int64,
        v_scale: fx.Int64, work_info: fx.Int64, partial_out: fx.Int64, partial_max: fx.Int64, partial_sum: fx.Int64,
        q_stride_row: fx.Int64, q_stride_head: fx.Int64, scale_stride_block: fx.Int64, scale_stride_head: fx.Int64,
        table_stride_row: fx.Int64, num_kv_heads: fx.Int32, table_width: fx.Int32, num_blocks_k: fx.Int32,
        num_blocks_v: fx.Int32, window: fx.Int32, capacity: fx.Int32, softmax_scale: fx.Float32,
    ):  # fmt: skip
        args = SimpleNamespace(
            query=query, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, k_scale=k_scale, v_scale=v_scale,
            work_info=work_info, partial_out=partial_out, partial_max=partial_max, partial_sum=partial_sum,
            q_stride_row=q_stride_row, q_stride_head=q_stride_head, scale_stride_block=scale_stride_block,
            scale_stride_head=scale_stride_head, table_stride_row=table_stride_row, num_kv_heads=num_kv_heads,
            table_width=table_width, window=window, capacity=capacity, softmax_scale=softmax_scale,
        )  # fmt: skip
        wave, lane = lanes.wave_and_lane()
        regions = lds.regions(*lds_bytes(spec, shape))
        task = task_of(spec, args)
        flow.only_when(task.first < task.end, lambda: attend(spec, args, task, wave, lane, regions))

    @flyc.jit
    def launch(
        query: fx.Int64, k_cache: fx.Int64, v_cache: fx.Int64, block_tables: fx.Int64, k_scale: fx.Int64,
        v_scale: fx.Int64, work_info: fx.Int64, partial_out: fx.Int64, partial_max: fx.Int64, partial_sum: fx.Int64,
        q_stride_row: fx.Int64, q_stride_head: fx.Int64, scale_stride_block: fx.Int64, scale_stride_head: fx.Int64,
        table_stride_row: fx.Int64, num_kv_heads: fx.Int32, table_width: fx.Int32, num_blocks_k: fx.Int32,
        num_blocks_v: fx.Int32, window: fx.Int32, capacity: fx.Int32, softmax_scale: fx.Float32,
    ):  # fmt: skip
        d256_pipe(
            query, k_cache, v_cache, block_tables, k_scale, v_scale, work_info, partial_out, partial_max, partial_sum,
            q_stride_row, q_stride_head, scale_stride_block, scale_stride_head, table_stride_row, num_kv_heads,
            table_width, num_blocks_k, num_blocks_v, window, capacity, softmax_scale,
        ).launch(grid=(1, 1, 1), block=spec.block)  # fmt: skip

    launch.compile_hints["waves_per_eu"] = "1,2"
    kinds = {"pointer": fx.Int64, "i64": fx.Int64, "i32": fx.Int32, "f32": fx.Float32}
    return launch, [kinds[argument.kind](0) for argument in spec.ARGUMENTS]
