"""The reducer: merges the partials of a row in slot order, in fp32, with the sink of its head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from gdn_runtime.kernels.triton.common import TRITON_DTYPE, CompileJob, narrow
from gdn_runtime.spec import LOG2E

from ...spec import REDUCE_ROWS

if TYPE_CHECKING:
    from ...spec import ReduceSpec

LOG2_E = tl.constexpr(LOG2E)
PARTS = 8
"""Most parts that are merged at a time. With 16 fewer workgroups fit on a multiprocessor: on an H200 128 sequences of
8192 tokens, 32 rows per KV head, took 274 to 290 us and not 271 to 273, one sequence (32 parts) was as fast."""
FEW = tl.constexpr(2)
"""So many parts are merged without the rest of ``PARTS``: large batches have one or two."""


@triton.jit
def _load(partial_out, partial_max, partial_sum, base, row, valid, first, count,
          R: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Maxima and sums [PARTS, ROWS] and rows [PARTS, ROWS, D] of parts first .. first + PARTS - 1. Past ``count`` is
    another plan's, or nobody's: not read."""
    part = first + tl.arange(0, PARTS)
    at = base + part[:, None] * R + row[None, :]
    mask = (part < count)[:, None] & valid[None, :]
    maxima = tl.load(partial_max + at, mask=mask, other=float("-inf"))
    sums = tl.load(partial_sum + at, mask=mask, other=0.0)
    pointers = partial_out + (at[:, :, None] * D + tl.arange(0, D)[None, None, :])
    return maxima, sums, tl.load(pointers, mask=mask[:, :, None], other=0.0)


@triton.jit
def _merge(acc, total, largest, maxima, sums, values):
    """(acc [ROWS, D], total [ROWS], largest [ROWS]) with some more parts: the sums of exp(max - largest) sum times the
    rows, and without the rows."""
    raised = tl.maximum(largest, tl.max(maxima, axis=0))
    # Nothing visible yet: every exponential is 0, from whatever reference.
    reference = tl.where(raised == float("-inf"), 0.0, raised)
    # A sink of +inf stays the largest: beside it every weight is 0.
    kept = tl.where(largest == raised, 1.0, tl.exp2((largest - reference) * LOG2_E))
    weights = sums * tl.exp2((maxima - reference[None, :]) * LOG2_E)
    shared = tl.where((weights != 0.0)[:, :, None], weights[:, :, None] * values.to(tl.float32), 0.0)
    return acc * kept[:, None] + tl.sum(shared, axis=0), total * kept + tl.sum(weights, axis=0), raised


_INTS = ["out_stride_row", "out_stride_head", "num_kv_heads", "capacity", "batch"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=["sinks", "out"])
def kernel(
    partial_out,
    partial_max,
    partial_sum,
    reduce_info,
    sinks,
    out,
    out_stride_row: tl.int64,
    out_stride_head: tl.int64,
    num_kv_heads: tl.int32,
    capacity: tl.int32,
    batch: tl.int32,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    QL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    R: tl.constexpr = GROUP * QL
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < R
    head = kv_head * GROUP + row % GROUP
    first = tl.load(reduce_info + sequence * 2)
    count = tl.load(reduce_info + sequence * 2 + 1)
    base = (kv_head.to(tl.int64) * capacity + first) * R
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        # The sink is a part of value 0 whose sum is 1.
        largest = tl.load(sinks + head, mask=valid, other=float("-inf")).to(tl.float32)
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((ROWS, D), tl.float32)
    if count <= FEW:
        few = _load(partial_out, partial_max, partial_sum, base, row, valid, 0, count, R, D, FEW)
        acc, total, largest = _merge(acc, total, largest, few[0], few[1], few[2])
    else:
        some = _load(partial_out, partial_max, partial_sum, base, row, valid, 0, count, R, D, PARTS)
        maxima, sums, values = some[0], some[1], some[2]
        for start in range(PARTS, count + PARTS, PARTS):
            more = _load(partial_out, partial_max, partial_sum, base, row, valid, start, count, R, D, PARTS)
            acc, total, largest = _merge(acc, total, largest, maxima, sums, values)
            maxima, sums, values = more[0], more[1], more[2]
    # Without a sum the accumulator is 0.
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    element: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    out_row = ((sequence * QL + row // GROUP) * out_stride_row + head * out_stride_head) // element
    at = out_row[:, None] + tl.arange(0, D)[None, :]
    tl.store(out + at, narrow(acc, out.dtype.element_ty), mask=valid[:, None])


def constants(spec: ReduceSpec) -> dict[str, Any]:
    """The values of ``kernel``'s constexprs."""
    return {
        "D": spec.head_dim,
        "GROUP": spec.group_size,
        "QL": spec.query_length,
        "HAS_SINKS": spec.sink_dtype != "none",
        "ROWS": REDUCE_ROWS,
        "PARTS": min(spec.max_parts, PARTS),
    }


def compile_jobs(spec: ReduceSpec) -> list[CompileJob]:
    """The one kernel of ``spec``. Raises as ``spec.check``."""
    spec.check()
    query = f"*{TRITON_DTYPE[spec.query_dtype]}"
    types = {"partial_out": query, "partial_max": "*fp32", "partial_sum": "*fp32", "reduce_info": "*i32", "out": query}
    types["sinks"] = "*fp32" if spec.sink_dtype == "none" else f"*{TRITON_DTYPE[spec.sink_dtype]}"
    return [CompileJob.of(kernel, types, constants(spec), spec.num_warps, 1)]
