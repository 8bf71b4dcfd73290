"""Split-KV attention of one task and KV head: the generic path of AMD, and of NVIDIA.

Tokens lie on the rows of both products and query rows on the columns, S^T = K q^T and O^T = V^T P^T: no row of the
matrix unit is wasted on few query rows, and packed pages are its first operand as they lie in memory.

The reference exponent of a row is an integer in log2 units and is never lower than the largest score, so that P's
rounding does not depend on how a sequence is split. With scales per token it is that of P times the V scale: then
the largest weight of V, not of P, is at the top of FP8, whatever the ratio of the scales.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from gdn_runtime.kernels.triton.common import TRITON_DTYPE, CompileJob, narrow
from gdn_runtime.spec import LOG2E

from ...traits import FP8_FACTS, MIN_SCALE, power_of_two_at_least
from .common import FP8_POINTER, TILE_TOKENS, fp8_dot, fp8_dot_add, fp8_round

if TYPE_CHECKING:
    from ...spec import AttentionSpec

LOG2_E = tl.constexpr(LOG2E)
LN_2 = tl.constexpr(math.log(2.0))
LEAST_SCALE = tl.constexpr(MIN_SCALE)
LEAST_V_SCALE = tl.constexpr(2.0**-64)
"""V scales below count as this in the reference exponent, so that P stays finite in fp32."""

TOKENS = 64
"""Tokens of a step. One page of 64: its 16 KB at D = 256 are one operand without a gap."""
CHUNK = 64
"""Elements of the head per load of K: lanes then cover 128 adjacent bytes of the packed page, and 32 with all of D."""
STAGES = {256: 3, 128: 4, 64: 6}
"""Steps that a workgroup holds in shared memory, by head size, so that two fit on a multiprocessor of ``ROOMY``, and 48
KB or more are in flight there. Elsewhere two: on AMD the next one waits in registers."""
ROOMY = ("sm90", "sm100")
LEAST_ROWS = 16
"""Columns of the narrowest product in FP8; with 8 Triton takes another instruction, on fp16."""
ACCUMULATORS = 8192
"""Elements of O^T that a workgroup holds, 64 registers a lane with 4 warps of 32; more rows are taken in turns."""


@triton.jit
def _load_query(query, rows, valid, aligned, d):
    """Elements ``d`` of the rows that start at ``rows``, in fp32 [ROWS, CHUNK]; zeros for rows that are not valid."""
    pointers = query + rows[:, None] + d[None, :]
    if aligned:
        x = tl.load(tl.multiple_of(pointers, [1, 16]), mask=valid[:, None], other=0.0)
    else:
        x = tl.load(pointers, mask=valid[:, None], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _largest(x):
    """Largest finite magnitude of each row."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis=1)


@triton.jit
def _quantise(x, divisor, dtype: tl.constexpr, FP8_MAX: tl.constexpr, SMALLEST: tl.constexpr):
    """The operand q^T [CHUNK, ROWS] in FP8. NaN stays, infinities become the largest finite numbers."""
    # x / divisor as rounded, which decides ties of FP8 (16-bit numbers hit them often), without a division each: a
    # rounded reciprocal and one correction.
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None]
    estimate = x * inverse
    scaled = tl.fma(tl.fma(-estimate, tl.broadcast_to(divisor[:, None], x.shape), x), inverse, estimate)
    scaled = tl.where(tl.abs(estimate) < float("inf"), scaled, estimate)
    clamped = tl.where(scaled > FP8_MAX, FP8_MAX, tl.where(scaled < -FP8_MAX, -FP8_MAX, scaled))
    return tl.trans(fp8_round(clamped, dtype, FP8_MAX, SMALLEST))


@triton.jit
def _pages(table, step, first_page, last_page, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """Page ids of the tokens of a step: one, or one per token. Only ids of pages [first_page, last_page] are read; the
    others, stale or behind the table, count as the nearest of those."""
    if PAGE >= TOKENS:
        page = step // (PAGE // TOKENS)
    else:
        page = step * (TOKENS // PAGE) + tl.arange(0, TOKENS) // PAGE
    return tl.load(table + tl.minimum(tl.maximum(page, first_page), last_page))


@triton.jit
def _bases(ids, block_stride, step, token_stride: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """Offsets of the pages, in 64 bits; within a page of several steps, of the step's first token."""
    base = ids.to(tl.int64) * block_stride
    if PAGE > TOKENS:
        base += (step % (PAGE // TOKENS)) * (TOKENS * token_stride)
    if PAGE < TOKENS:
        # A load is not known to give equal ids within a page; without it V is read byte by byte.
        base = tl.max_constancy(base, [PAGE])
    return base


@triton.jit
def _in_page(PAGE: tl.constexpr, TOKENS: tl.constexpr):
    if PAGE >= TOKENS:
        return tl.arange(0, TOKENS)
    return tl.arange(0, TOKENS) % PAGE


@triton.jit
def _scores(k_cache, base, q, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """K q^T [TOKENS, ROWS]; ``q`` in D / CHUNK parts."""
    d = tl.arange(0, CHUNK)
    inner = (d // 16) * (PAGE * 16) + d % 16
    token = _in_page(PAGE, TOKENS) * 16
    if PAGE < TOKENS:
        pointers = k_cache + (base + token)[:, None] + inner[None, :]
    else:
        pointers = k_cache + base + (token[:, None] + inner[None, :])
    s = fp8_dot(tl.load(pointers), q[0])
    for part in tl.static_range(1, D // CHUNK):
        s = fp8_dot_add(tl.load(pointers + part * (CHUNK * PAGE)), q[part], s)
    return s


@triton.jit
def _values(v_cache, base, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, V_PACKED: tl.constexpr):
    """V^T [D, TOKENS]."""
    d = tl.arange(0, D)[:, None]
    if PAGE < TOKENS:
        token = (tl.arange(0, TOKENS) % PAGE)[None, :]
        return tl.load(v_cache + base[None, :] + (token + d * PAGE))
    token = tl.arange(0, TOKENS)[None, :]
    if V_PACKED:
        return tl.load(v_cache + base + ((token // 16) * (D * 16) + token % 16 + d * 16))
    return tl.load(v_cache + base + (token + d * PAGE))


@triton.jit
def _step(step, ids, maximum, sums, acc, q, row_units, newest, eldest, start, end, k_head, v_head, k_scale, v_scale,
          block_stride, scale_block, D: tl.constexpr, PAGE: tl.constexpr, V_PACKED: tl.constexpr,
          PER_TOKEN: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, P_EXPONENT: tl.constexpr,
          FP8_MAX: tl.constexpr, SMALLEST: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The tokens of a step: (reference exponents [ROWS], what P sums to per token of a step [TOKENS, ROWS], O^T [D,
    ROWS]), P and O^T times 2 ** ``P_EXPONENT``. ``MASKED``: some row does not see some token."""
    dtype: tl.constexpr = k_head.dtype.element_ty
    base = _bases(ids, block_stride, step, 16, PAGE, TOKENS)
    s = _scores(k_head, base, q, D, PAGE, TOKENS, CHUNK) * row_units[None, :]
    position = step * TOKENS + tl.arange(0, TOKENS)
    some = (position >= start) & (position < end)
    if PER_TOKEN:
        at = _bases(ids, scale_block, step, 1, PAGE, TOKENS) + _in_page(PAGE, TOKENS)
        # Those of tokens that no row sees may be anything; they reach nothing that is kept.
        k_scales, v_scales = tl.load(k_scale + at), tl.load(v_scale + at)
        s *= k_scales[:, None]
        ranked = s + tl.log2(tl.maximum(v_scales, LEAST_V_SCALE))[:, None]
    else:
        ranked = s
    if MASKED:
        # After scaling: nothing may multiply an infinity.
        visible = some[:, None] & (position[:, None] <= newest[None, :]) & (position[:, None] >= eldest[None, :])
        s = tl.where(visible, s, float("-inf"))
        ranked = tl.where(visible, ranked, float("-inf"))
    raised = tl.maximum(maximum, tl.ceil(tl.max(ranked, axis=0)))
    # A row that has seen nothing keeps -inf; the exponents of its masked scores are taken from 0.
    reference = tl.where(raised == float("-inf"), 0.0, raised)
    alpha = tl.exp2(maximum - reference)
    p = tl.exp2(s - (reference - P_EXPONENT)[None, :])
    if PER_TOKEN:
        weight = p * v_scales[:, None]
        if MASKED:
            weight = tl.where(visible, weight, 0.0)
        rounded = fp8_round(weight, dtype, FP8_MAX, SMALLEST)
        exact = rounded.to(tl.float32)
        divisor = tl.where(v_scales > 0.0, v_scales, 1.0)
        matched = tl.where(exact >= SMALLEST, exact / divisor[:, None], p)
    else:
        rounded = fp8_round(p, dtype, FP8_MAX, SMALLEST)
        exact = rounded.to(tl.float32)
        matched = tl.where(exact >= SMALLEST, exact, p)
    base = _bases(ids, block_stride, step, D if V_PACKED else 1, PAGE, TOKENS)
    v = _values(v_head, base, D, PAGE, TOKENS, V_PACKED)
    if MASKED:
        # 0 NaN is NaN: bytes of tokens that no row sees are not what the cache holds there.
        v = tl.where(some[None, :], v.to(tl.int8, bitcast=True), 0).to(dtype, bitcast=True)
    # Added in fp32: FP8 accumulation of Hopper keeps about 14 bits.
    return raised, sums * alpha[None, :] + matched, acc * alpha[None, :] + fp8_dot(v, rounded)


_INTS = [
    "q_stride_row", "q_stride_head", "scale_stride_block", "scale_stride_head", "table_stride_row", "num_kv_heads",
    "table_width", "num_blocks_k", "num_blocks_v", "window", "capacity",
]  # fmt: skip
_UNALIGNED = ["query", "block_tables", "k_scale", "v_scale"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_UNALIGNED)
def kernel(
    query,
    k_cache,
    v_cache,
    block_tables,
    k_scale,
    v_scale,
    work_info,
    partial_out,
    partial_max,
    partial_sum,
    q_stride_row: tl.int64,
    q_stride_head: tl.int64,
    scale_stride_block: tl.int64,
    scale_stride_head: tl.int64,
    table_stride_row: tl.int64,
    num_kv_heads: tl.int32,
    table_width: tl.int32,
    num_blocks_k: tl.int32,
    num_blocks_v: tl.int32,
    window: tl.int32,
    capacity: tl.int32,
    softmax_scale: tl.float32,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    QL: tl.constexpr,
    ROWS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    V_PACKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    P_EXPONENT: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    slot, head = tl.program_id(0), tl.program_id(1)
    work = work_info + slot * 4
    sequence, context = tl.load(work), tl.load(work + 3)
    first_tile, end_tile = tl.load(work + 1), tl.load(work + 2)
    if first_tile == end_tile:
        return
    R: tl.constexpr = GROUP * QL
    dtype: tl.constexpr = k_cache.dtype.element_ty

    # Tokens [start, end): of the task, and in the window of some query token. Those of [low, high) every row sees.
    start = first_tile * TILE_TOKENS
    end = tl.minimum(end_tile.to(tl.int64) * TILE_TOKENS, context).to(tl.int32)
    oldest, low = 0, 0
    if WINDOWED:
        oldest = tl.maximum(context.to(tl.int64) - QL - window + 1, 0).to(tl.int32)
        low = tl.maximum(context - window, 0)
        start = tl.maximum(start, oldest)
    high = tl.maximum(context - QL + 1, 0)
    first_step, end_step = start // TOKENS, tl.cdiv(end, TOKENS)
    first_full = tl.maximum(first_step, tl.cdiv(low, TOKENS))
    end_full = tl.minimum(end_step, high // TOKENS)
    if first_full >= end_full:
        first_full, end_full = end_step, end_step

    last_page = tl.minimum((context - 1) // PAGE, table_width - 1)
    first_page = tl.minimum(oldest // PAGE, last_page)
    table = block_tables + sequence * (table_stride_row // 4)
    block_stride = num_kv_heads.to(tl.int64) * (D * PAGE)
    k_head, v_head = k_cache + head.to(tl.int64) * (D * PAGE), v_cache + head.to(tl.int64) * (D * PAGE)
    scale_block, scale_head = scale_stride_block // 4, head * (scale_stride_head // 4)
    k_scales, v_scales = k_scale + scale_head, v_scale + scale_head

    out_scale = 1.0
    units = softmax_scale * LOG2_E
    if not PER_TOKEN:
        units *= tl.load(k_scale, mask=k_scale.to(tl.uint64) != 0, other=1.0)
        out_scale = tl.load(v_scale, mask=v_scale.to(tl.uint64) != 0, other=1.0)
    aligned = (query.to(tl.uint64) % 16 == 0) & (q_stride_row % 16 == 0) & (q_stride_head % 16 == 0)

    for block in range(tl.cdiv(R, ROWS)):
        row = block * ROWS + tl.arange(0, ROWS)
        valid = row < R
        q_row = (sequence.to(tl.int64) * QL + row // GROUP) * q_stride_row + (
            head * GROUP + row % GROUP
        ) * q_stride_head
        q_row = q_row // 2
        largest = tl.zeros((ROWS,), tl.float32)
        x = ()
        for part in tl.static_range(D // CHUNK):
            x = x + (_load_query(query, q_row, valid, aligned, tl.arange(0, CHUNK) + part * CHUNK),)  # noqa: RUF005
            largest = tl.maximum(largest, _largest(x[part]))
        q_scale = tl.div_rn(largest, tl.full((ROWS,), FP8_MAX, tl.float32))
        divisor = tl.maximum(q_scale, LEAST_SCALE)
        q = ()
        for part in tl.static_range(D // CHUNK):
            q = q + (_quantise(x[part], divisor, dtype, FP8_MAX, SMALLEST),)  # noqa: RUF005
        row_units = q_scale * units
        # The last token that a row sees, and with a window the first.
        newest = context - QL + tl.minimum(row // GROUP, QL - 1)
        eldest = tl.zeros((ROWS,), tl.int32)
        if WINDOWED:
            eldest = tl.maximum(newest.to(tl.int64) - window + 1, 0).to(tl.int32)

        maximum = tl.full((ROWS,), float("-inf"), tl.float32)
        sums = tl.zeros((TOKENS, ROWS), tl.float32)
        acc = tl.zeros((D, ROWS), tl.float32)
        ids = _pages(table, first_full, first_page, last_page, PAGE, TOKENS)
        for step in range(first_full, end_full):
            # Carried: as a load of this step the ids would take a stage of the pipeline for themselves.
            next_ids = _pages(table, step + 1, first_page, last_page, PAGE, TOKENS)
            maximum, sums, acc = _step(
                step, ids, maximum, sums, acc, q, row_units, newest, eldest, start, end, k_head, v_head, k_scales,
                v_scales, block_stride, scale_block, D, PAGE, V_PACKED, PER_TOKEN, TOKENS, CHUNK, P_EXPONENT, FP8_MAX,
                SMALLEST, False,
            )  # fmt: skip
            ids = next_ids
        before = first_full - first_step
        for turn in tl.range(0, before + end_step - end_full, num_stages=1):
            step = tl.where(turn < before, first_step + turn, end_full + turn - before)
            ids = _pages(table, step, first_page, last_page, PAGE, TOKENS)
            maximum, sums, acc = _step(
                step, ids, maximum, sums, acc, q, row_units, newest, eldest, start, end, k_head, v_head, k_scales,
                v_scales, block_stride, scale_block, D, PAGE, V_PACKED, PER_TOKEN, TOKENS, CHUNK, P_EXPONENT, FP8_MAX,
                SMALLEST, True,
            )  # fmt: skip

        total = tl.sum(sums, axis=0)
        inverse = out_scale / tl.where(total == 0.0, 1.0, total)
        at = (head.to(tl.int64) * capacity + slot) * R + row
        tl.store(partial_max + at, maximum * LN_2, mask=valid)
        tl.store(partial_sum + at, total * 2.0**-P_EXPONENT, mask=valid)
        out = narrow(tl.trans(acc * inverse[None, :]), partial_out.dtype.element_ty)
        tl.store(partial_out + at[:, None] * D + tl.arange(0, D)[None, :], out, mask=valid[:, None])


def constants(spec: AttentionSpec) -> dict[str, Any]:
    """The values of ``kernel``'s constexprs."""
    facts = FP8_FACTS[spec.fp8]
    return {
        "D": spec.head_dim,
        "PAGE": spec.page_size,
        "GROUP": spec.group_size,
        "QL": spec.query_length,
        "ROWS": min(power_of_two_at_least(max(spec.rows, LEAST_ROWS)), ACCUMULATORS // spec.head_dim),
        "PER_TOKEN": spec.scale_mode == "token",
        "V_PACKED": spec.v_packed,
        "WINDOWED": spec.windowed,
        "TOKENS": TOKENS,
        "CHUNK": CHUNK,
        "P_EXPONENT": facts.probability_exponent,
        "FP8_MAX": facts.max,
        "SMALLEST": facts.smallest_normal,
    }


def compile_jobs(spec: AttentionSpec) -> list[CompileJob]:
    """The one kernel of ``spec``. Raises as ``spec.check``."""
    spec.check()
    query, cache = f"*{TRITON_DTYPE[spec.query_dtype]}", FP8_POINTER[spec.fp8]
    types = {"query": query, "k_cache": cache, "v_cache": cache, "partial_out": query}
    types |= dict.fromkeys(("block_tables", "work_info"), "*i32")
    types |= dict.fromkeys(("k_scale", "v_scale", "partial_max", "partial_sum"), "*fp32")
    stages = STAGES[spec.head_dim] if spec.arch in ROOMY else 2
    return [CompileJob.of(kernel, types, constants(spec), spec.num_warps, stages)]
