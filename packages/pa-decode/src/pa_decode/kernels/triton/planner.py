"""The planner: one workgroup turns context lengths into tasks, bit for bit as ``pa_decode.planner.make_plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from gdn_runtime.kernels.triton.common import CompileJob

from .common import TILE_TOKENS

if TYPE_CHECKING:
    from ...spec import PlannerSpec

BLOCK = 128
"""Most sequences that are planned at a time."""
SLOTS = 32
"""Slots that are written at a time."""


@triton.jit
def _tiles(length, window, query_length):
    """(first tile, tiles) that the query tokens see; see traits.visible_tile_range."""
    context = tl.maximum(length, 0).to(tl.int64)
    start = tl.where(window > 0, tl.maximum(context - query_length - window + 1, 0), 0)
    first = start // TILE_TOKENS
    return first, (context + (TILE_TOKENS - 1)) // TILE_TOKENS - first


_INTS = ["batch", "capacity", "max_partitions", "window", "query_length"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=["seq_lens"])
def kernel(
    seq_lens,
    work_info,
    reduce_info,
    batch: tl.int32,
    capacity: tl.int32,
    max_partitions: tl.int32,
    window: tl.int32,
    query_length: tl.int32,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((), tl.int64)
    busy = tl.zeros((), tl.int32)
    for start in range(0, batch, BLOCK):
        length = tl.load(seq_lens + start + lane, mask=start + lane < batch, other=0)
        _, count = _tiles(length, window, query_length)
        total += tl.sum(count, axis=0)
        busy += tl.sum((count > 0).to(tl.int32), axis=0)
    spare = (capacity - busy).to(tl.int64)
    total = tl.maximum(total, 1)

    before = tl.zeros((), tl.int64)
    used = tl.zeros((), tl.int32)
    slot_lane = tl.arange(0, SLOTS)
    for start in range(0, batch, BLOCK):
        sequence = start + lane
        length = tl.load(seq_lens + sequence, mask=sequence < batch, other=0)
        _, count = _tiles(length, window, query_length)
        upto = before + tl.cumsum(count, axis=0)
        extra = upto * spare // total - (upto - count) * spare // total
        parts = tl.minimum(tl.minimum(extra + 1, count), max_partitions).to(tl.int32)
        begin = used + tl.cumsum(parts, axis=0) - parts
        info = reduce_info + sequence * 2
        tl.store(info, tl.where(parts > 0, begin, 0), mask=sequence < batch)
        tl.store(info + 1, parts, mask=sequence < batch)
        before += tl.sum(count, axis=0)
        end = used + tl.sum(parts, axis=0)
        for slot_start in range(used, end, SLOTS):
            slot = slot_start + slot_lane
            # Compared, not scattered: nothing that this workgroup wrote is read again.
            inside = (slot[:, None] >= begin[None, :]) & (slot[:, None] < (begin + parts)[None, :])
            owner = start + tl.sum(tl.where(inside, lane[None, :], 0), axis=1)
            of_parts = tl.maximum(tl.sum(tl.where(inside, parts[None, :], 0), axis=1), 1)
            part = (slot - tl.sum(tl.where(inside, begin[None, :], 0), axis=1)).to(tl.int64)
            mask = slot < end
            context = tl.load(seq_lens + owner, mask=mask, other=0)
            first, tiles = _tiles(context, window, query_length)
            work = work_info + slot * 4
            tl.store(work, owner, mask=mask)
            tl.store(work + 1, (first + part * tiles // of_parts).to(tl.int32), mask=mask)
            tl.store(work + 2, (first + (part + 1) * tiles // of_parts).to(tl.int32), mask=mask)
            tl.store(work + 3, context, mask=mask)
        used = end
    zero = tl.zeros((BLOCK,), tl.int32)
    for start in range(used * 4, capacity * 4, BLOCK):
        tl.store(work_info + start + lane, zero, mask=start + lane < capacity * 4)


def constants(spec: PlannerSpec) -> dict[str, Any]:
    """The values of ``kernel``'s constexprs."""
    return {"BLOCK": min(spec.max_batch, BLOCK), "SLOTS": SLOTS}


def compile_jobs(spec: PlannerSpec) -> list[CompileJob]:
    """The one kernel of ``spec``. Raises as ``spec.check``."""
    spec.check()
    pointers = dict.fromkeys(("seq_lens", "work_info", "reduce_info"), "*i32")
    return [CompileJob.of(kernel, pointers, constants(spec), spec.num_warps, 1)]
