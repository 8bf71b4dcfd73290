"""FP8 paged decode at head size 256 on Hopper: device code.

A producer warp brings one page after the other into a ring of shared memory, one bulk copy a page. Two groups of four
warps, each with half of the query rows, multiply straight on the packed pages, tokens on M and rows on N: S = K q^T
[128, rows], O^T = V^T P [256, rows]. They share the pages and nothing else, so that one computes weights while the
other multiplies. q and P are split into two FP8 parts, high and low, in neighbouring columns: both parts of a row meet
in one thread and are added there. A program walks over tasks, and the producer is ahead of the groups by the ring,
also from one task into the next.

Nothing that is masked reaches a result: pages without a visible token are copied from outside of the cache, which fills
zeros and reads no table entry; masked bytes of V become zero in shared memory before they are multiplied; masked scores
and scales are selected away.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_runtime.spec import LOG2E

from ...traits import FP8_FACTS, PIPE_HEAD_DIM, TILE
from . import layouts
from .layouts import (
    accumulator,
    column_element,
    k_operand,
    out_staging,
    p_by_row,
    p_by_token,
    v_group,
    v_operand,
)

TOKENS: gl.constexpr = gl.constexpr(layouts.TOKENS)  # of a step
PLAN_TILE: gl.constexpr = gl.constexpr(TILE)
D: gl.constexpr = gl.constexpr(PIPE_HEAD_DIM)
OUTSIDE: gl.constexpr = gl.constexpr(1 << 30)  # a row of the copies' tensors that no cache has
LOG2_E: gl.constexpr = gl.constexpr(LOG2E)
FP8_MAX: gl.constexpr = gl.constexpr(FP8_FACTS["fn"].max)
MIN_P_COLUMNS: gl.constexpr = gl.constexpr(32)  # 16 tokens of P are then 512 bytes; see layouts.column_element
P_BITS: gl.constexpr = gl.constexpr(float(FP8_FACTS["fn"].probability_exponent))  # P in [0, 1] is times 2^P_BITS
P_UNIT: gl.constexpr = gl.constexpr(0.5 ** FP8_FACTS["fn"].probability_exponent)

# Triton 3.6 has other names than 3.9.
copy_page = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
NAMED_REINTERPRET: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The bytes of ``memory`` under another type, shape and layout."""
    if NAMED_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def _task(work_info, slot, window, WINDOWED: gl.constexpr, QUERY_LENGTH: gl.constexpr):
    """Sequence, context, its window, its first visible token, first token of the first step, number of steps."""
    sequence = gl.load(work_info + slot * 4)
    first = gl.load(work_info + slot * 4 + 1)
    end = gl.load(work_info + slot * 4 + 2)
    context = gl.load(work_info + slot * 4 + 3)
    low = 0
    if WINDOWED:
        # A window as long as the context is none; so cut, no difference leaves 32 bits.
        window = gl.minimum(window, context)
        low = gl.maximum(context - QUERY_LENGTH - window + 1, 0)
    begin = gl.maximum(first * PLAN_TILE, low // TOKENS * TOKENS)
    stop = gl.minimum(end * PLAN_TILE, context)
    steps = gl.where(end > first, (stop - begin + TOKENS - 1) // TOKENS, 0)
    return sequence, context, window, low, begin, steps


@gluon.jit
def _produce(
    k_pages, v_pages, k_ring, v_ring, k_full, k_empty, v_full, v_empty, block_tables, work_info,
    table_stride, table_width, num_kv_heads, window, items,
    PAGE: gl.constexpr, V_ROWS: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
    QUERY_LENGTH: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = TOKENS // PAGE
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head = item % num_kv_heads
        sequence, context, _, low, begin, steps = _task(work_info, item // num_kv_heads, window, WINDOWED, QUERY_LENGTH)
        table = block_tables + sequence * table_stride
        last = gl.minimum((context - 1) // PAGE, table_width - 1)
        for i in range(steps):
            page = (begin + i * TOKENS) // PAGE
            blocks = ()
            for p in gl.static_range(PAGES):
                visible = (page + p >= low // PAGE) & (page + p <= last)
                blocks = blocks + (gl.load(table + page + p, mask=visible, other=-1),)  # noqa: RUF005
            stage = step % STAGES
            phase = step // STAGES % 2 ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), TOKENS * D)
            for p in gl.static_range(PAGES):
                row = gl.where(blocks[p] < 0, OUTSIDE, (blocks[p] * num_kv_heads + head) * PAGE)
                copy_page(k_pages, [row, 0], k_full.index(stage), k_ring.index(stage * PAGES + p))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), TOKENS * D)
            for p in gl.static_range(PAGES):
                row = gl.where(blocks[p] < 0, OUTSIDE, (blocks[p] * num_kv_heads + head) * V_ROWS)
                copy_page(v_pages, [row, 0], v_full.index(stage), v_ring.index(stage * PAGES + p))
            step += 1


@gluon.jit
def _rounded(x):
    """``x``, at most 448 in magnitude, rounded to E4M3, in fp32.

    In integers, since ptxas 12.8 loses half of the conversions back from FP8 where the bytes also go out as words.
    """
    bits = x.to(gl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(gl.float32, bitcast=True)
    # The last place of subnormal numbers is 2^-9; added to 1.5 2^23 places, what is below it is rounded away.
    subnormal = (x + 24576.0) - 24576.0
    return gl.where(gl.abs(x) < 0.015625, subnormal, normal)


@gluon.jit
def _load_query(
    query, row_stride, head_stride, sequence, head, first_row, q_parts,
    negative, PAGE: gl.constexpr, GROUP: gl.constexpr, QUERY_LENGTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store the query, or its negative, in two FP8 parts [2 rows, 256], rows 2 r and 2 r + 1 of row r; returns scales.

    q = (high + low) * scale: high is q / scale rounded, low is what that leaves, rounded too.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [4, 1], [1, 0])
    r = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    d = gl.max_contiguous(gl.multiple_of(column_element(column, PAGE), 16), 16)
    row = ((sequence * QUERY_LENGTH + r // GROUP) * row_stride + (head * GROUP + r % GROUP) * head_stride) * 8
    used = (r < QUERY_LENGTH * GROUP)[:, None]
    q = gl.load(query + row[:, None] + d[None, :], mask=used & (d >= 0)[None, :], other=0.0).to(gl.float32)
    scale = gl.max(gl.abs(q), 1) / FP8_MAX
    q = gl.where(negative, -q, q) / gl.maximum(scale, 1e-20)[:, None]
    high = _rounded(q)
    parts = gl.join(high, q - high).permute([0, 2, 1]).reshape([2 * ROWS, D])
    q_parts.store(parts.to(gl.float8e4nv))
    return scale


@gluon.jit
def _zero_masked_v(v_ring, stage, begin, low, context, PAGE: gl.constexpr, V_PACKED: gl.constexpr):
    """Zero the bytes of V of tokens before ``low`` and from ``context`` on.

    Both groups do it, each before it multiplies, and write the same.
    """
    if V_PACKED or PAGE == 16:
        GROUPS: gl.constexpr = TOKENS // 16
        groups = _view(v_ring, gl.uint8, [v_ring.shape[0] * PAGE // 16, D, 16], v_group())
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
        t = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
        for g in range(GROUPS):
            first = begin + g * 16
            if (first < low) | (first + 16 > context):
                group = groups.index(stage * GROUPS + g)
                seen = ((first + t >= low) & (first + t < context))[None, :]
                group.store(gl.where(seen, group.load(layout), 0))
    else:
        BLOCKS: gl.constexpr = v_ring.shape[0]
        pages = _view(v_ring, gl.uint8, [BLOCKS, D, PAGE], gl.NVMMASharedLayout(PAGE, 8, 2))
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
        t = gl.arange(0, PAGE, layout=gl.SliceLayout(0, layout))
        for p in range(TOKENS // PAGE):
            first = begin + p * PAGE
            if (first < low) | (first + PAGE > context):
                page = pages.index(stage * (TOKENS // PAGE) + p)
                seen = ((first + t >= low) & (first + t < context))[None, :]
                for d in gl.static_range(0, D, 64):  # in pieces that fit beside the accumulators
                    piece = page.slice(d, 64, dim=0)
                    piece.store(gl.where(seen, piece.load(layout), 0))


@gluon.jit
def _blocks_of(table, tokens, low, last, PAGE: gl.constexpr):
    """Blocks of ``tokens``, and which of them are visible: of the others the table is not read."""
    visible = (tokens >= low) & (tokens < last)
    return gl.load(table + tokens // PAGE, mask=visible, other=0), visible


@gluon.jit
def _multiply_half(k_rows, q_parts, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Start the products of 64 rows of K, each half of the columns a view of its own (layouts.column_element)."""
    products = gl.zeros([64, 2 * ROWS], gl.float32, MMA)
    for half in gl.static_range(2):
        products = warpgroup_mma(
            k_rows.slice(half * 128, 128, dim=1), q_parts.slice(half * 128, 128, dim=1).permute([1, 0]),
            products, use_acc=half > 0, is_async=True,
        )  # fmt: skip
    return products


@gluon.jit
def _scores(low, high, ROWS: gl.constexpr, S: gl.constexpr):
    """Scores [128, rows] of both halves of a step, the parts of q added."""
    a, b = gl.split(low.reshape([64, ROWS, 2]))
    c, d = gl.split(high.reshape([64, ROWS, 2]))
    scores = gl.join(a + b, c + d).permute([2, 0, 1]).reshape([TOKENS, ROWS])
    return gl.convert_layout(scores, S, assert_trivial=True)


@gluon.jit
def _multiply_k(k_stages, q_parts, stage, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Start K q^T of a step: [128, 2 rows], both parts of a row side by side."""
    low = _multiply_half(k_stages.index(stage).slice(0, 64, dim=0), q_parts, ROWS, MMA)
    high = _multiply_half(k_stages.index(stage).slice(64, 64, dim=0), q_parts, ROWS, MMA)
    return low, high


@gluon.jit
def _add_values(out, keep, values, ROWS: gl.constexpr, OUT: gl.constexpr):
    """out * keep + the sum of both parts of ``values`` [256, 2 rows]."""
    high, low_part = gl.split(values.reshape([D, ROWS, 2]))
    keep = gl.convert_layout(keep, gl.SliceLayout(0, OUT), assert_trivial=True)
    return out * keep[None, :] + gl.convert_layout(high + low_part, OUT, assert_trivial=True)


@gluon.jit
def _consume(
    k_ring, v_ring, q_parts, p_parts, k_full, k_empty, v_full, v_empty,
    query, block_tables, k_scale, v_scale, work_info, partial_out, partial_max, partial_sum,
    q_stride_row, q_stride_head, scale_stride_block, scale_stride_head, table_stride, table_width,
    num_kv_heads, window, capacity, softmax_scale, items,
    PAGE: gl.constexpr, GROUP: gl.constexpr, QUERY_LENGTH: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PER_TOKEN: gl.constexpr, V_PACKED: gl.constexpr, WINDOWED: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = QUERY_LENGTH * GROUP
    first_row: gl.constexpr = PART * ROWS
    P_COLUMNS: gl.constexpr = max(2 * ROWS, MIN_P_COLUMNS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 32])
    S: gl.constexpr = accumulator(128, ROWS)
    OUT: gl.constexpr = accumulator(256, ROWS)
    k_stages = _view(k_ring, gl.float8e4nv, [STAGES, TOKENS, D], k_operand(PAGE))
    if V_PACKED or PAGE == 16:
        V_DOTS: gl.constexpr = 1
        v_stages = _view(v_ring, gl.float8e4nv, [STAGES, D, TOKENS], v_operand())
        p_read = _view(p_parts, gl.float8e4nv, [1, TOKENS, P_COLUMNS], p_by_token(P_COLUMNS, 128))
    else:
        V_DOTS: gl.constexpr = TOKENS // PAGE
        v_stages = v_ring
        p_read = _view(p_parts, gl.float8e4nv, [TOKENS // PAGE, PAGE, P_COLUMNS], p_by_token(P_COLUMNS, PAGE))
    p_write = _view(p_parts, gl.float8e4nv, [TOKENS, P_COLUMNS], p_by_row(P_COLUMNS, PAGE))
    staging = _view(q_parts, partial_out.dtype.element_ty, [D, ROWS], out_staging(ROWS))

    # Token of a row of S, relative to the step; see layouts.k_operand.
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, S))
    if PAGE == 16:
        token = (token // 8 % 8) * 16 + token // 64 * 8 + token % 8
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))
    query_of_row = gl.minimum(row // GROUP, QUERY_LENGTH - 1)

    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = item // num_kv_heads
        head = item % num_kv_heads
        sequence, context, task_window, low, begin, steps = _task(work_info, slot, window, WINDOWED, QUERY_LENGTH)
        if steps > 0:
            factor = softmax_scale * LOG2_E
            v_unit = 1.0
            if not PER_TOKEN:
                factor *= gl.load(k_scale)
                v_unit = gl.load(v_scale)
            scale = _load_query(
                query, q_stride_row, q_stride_head, sequence, head, first_row, q_parts, factor < 0.0,
                PAGE, GROUP, QUERY_LENGTH, ROWS,
            )  # fmt: skip
            fence_async_shared()
            # Masked scores are -inf before they are multiplied: positive, also for queries and scales of zero.
            unit = gl.convert_layout(scale, gl.SliceLayout(0, S)) * gl.abs(factor)
            unit = gl.where(unit < 1e-30, 1e-30, unit)
            table = block_tables + sequence * table_stride
            last = gl.minimum(context, table_width * PAGE)
            if PER_TOKEN:
                # Scales of one step ahead, page ids of two: their latencies pass under a step each.
                at_head = head * scale_stride_head + token % PAGE
                k_scale_head = k_scale + at_head
                v_scale_head = v_scale + at_head
                blocks, known = _blocks_of(table, begin + token, low, last, PAGE)
                k_scales = gl.load(k_scale_head + blocks * scale_stride_block, mask=known, other=0.0)
                v_scales = gl.load(v_scale_head + blocks * scale_stride_block, mask=known, other=0.0)
                blocks, known = _blocks_of(table, begin + TOKENS + token, low, last, PAGE)
            # Row r sees tokens [seen_from, seen_to) of the sequence.
            seen_to = context - QUERY_LENGTH + 1 + query_of_row
            seen_from = gl.zeros_like(seen_to)
            if WINDOWED:
                seen_from = seen_to - task_window

            reference = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, S))
            total = gl.zeros([TOKENS, ROWS], gl.float32, S)
            out = gl.zeros([D, ROWS], gl.float32, OUT)

            for i in range(steps):
                stage = step % STAGES
                phase = step // STAGES % 2
                first = begin + i * TOKENS
                mbarrier.wait(k_full.index(stage), phase)
                products_low, products_high = _multiply_k(k_stages, q_parts, stage, ROWS, MMA)
                scores_low, scores_high = warpgroup_mma_wait(0, [products_low, products_high])
                mbarrier.arrive(k_empty.index(stage))
                s = _scores(scores_low, scores_high, ROWS, S)
                if PER_TOKEN:
                    s *= k_scales[:, None]
                whole = first + TOKENS <= context - QUERY_LENGTH + 1
                if WINDOWED:
                    whole &= first >= context - task_window
                if not whole:
                    here = (first + token)[:, None]
                    s = gl.where((here < seen_to[None, :]) & (here >= seen_from[None, :]), s, float("-inf"))
                if PER_TOKEN:
                    # The reference is that of the weights of V, so that the largest is 2^8 whatever the scales are.
                    scale_bits = gl.maximum(gl.log2(v_scales), -64.0)
                    scale_bits = gl.where(v_scales > 0, scale_bits, float("-inf"))
                    weight = s * unit[None, :] + scale_bits[:, None]
                    raised = gl.maximum(reference, gl.max(weight, 0))
                else:
                    raised = gl.maximum(reference, gl.max(s, 0) * unit)
                safe = gl.where(raised == float("-inf"), 0.0, raised) - P_BITS
                keep = gl.exp2(reference - P_BITS - safe)
                reference = raised
                p = gl.exp2(s * unit[None, :] - safe[None, :])
                if PER_TOKEN:
                    weight = gl.exp2(weight - safe[None, :])
                else:
                    weight = p
                total = total * keep[None, :] + p
                high = weight.to(gl.float8e4nv)
                low_part = (weight - high.to(gl.float32)).to(gl.float8e4nv)
                parts = gl.join(high, low_part).reshape([TOKENS, 2 * ROWS])
                if PER_TOKEN:
                    k_scales = gl.load(k_scale_head + blocks * scale_stride_block, mask=known, other=0.0)
                    v_scales = gl.load(v_scale_head + blocks * scale_stride_block, mask=known, other=0.0)
                    blocks, known = _blocks_of(table, first + 2 * TOKENS + token, low, last, PAGE)

                p_write.slice(0, 2 * ROWS, dim=1).store(parts)
                mbarrier.wait(v_full.index(stage), phase)
                if (first < low) | (first + TOKENS > context):
                    _zero_masked_v(v_ring, stage, first, low, context, PAGE, V_PACKED)
                fence_async_shared()
                values = gl.zeros([D, 2 * ROWS], gl.float32, MMA)
                for part in gl.static_range(V_DOTS):
                    values = warpgroup_mma(
                        v_stages.index(stage * V_DOTS + part), p_read.index(part).slice(0, 2 * ROWS, dim=1), values,
                        use_acc=part > 0, is_async=True,
                    )  # fmt: skip
                values = warpgroup_mma_wait(0, [values])
                mbarrier.arrive(v_empty.index(stage))
                out = _add_values(out, keep, values, ROWS, OUT)
                step += 1

            total = gl.sum(total, 0)
            share = gl.where(total > 0, v_unit / total, 0.0)
            out *= gl.convert_layout(share, gl.SliceLayout(0, OUT), assert_trivial=True)[None, :]
            base = (head * capacity + slot).to(gl.int64) * R
            gl.store(partial_max + base + row, reference / LOG2_E, mask=row < R)
            gl.store(partial_sum + base + row, total * P_UNIT, mask=row < R)
            staging.store(out.to(partial_out.dtype.element_ty))
            rows: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [1, 4], [0, 1])
            d = gl.arange(0, D, layout=gl.SliceLayout(1, rows))
            r = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, rows))
            at = partial_out + (base + r)[None, :] * D + d[:, None]
            gl.store(at, staging.load(rows), mask=(r < R)[None, :] & (d >= 0)[:, None])


@gluon.jit(do_not_specialize=["table_width", "num_kv_heads", "window", "capacity"])
def decode(
    query, k_pages, v_pages, block_tables, k_scale, v_scale, work_info, partial_out, partial_max, partial_sum,
    q_stride_row, q_stride_head, scale_stride_block, scale_stride_head, table_stride_row,
    num_kv_heads, table_width, window, capacity, softmax_scale,
    PAGE: gl.constexpr, GROUP: gl.constexpr, QUERY_LENGTH: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PER_TOKEN: gl.constexpr, V_PACKED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; tasks x KV heads are dealt out in turn. ROWS: of each group."""
    PAGES: gl.constexpr = TOKENS // PAGE
    P_COLUMNS: gl.constexpr = max(2 * ROWS, MIN_P_COLUMNS)
    V_ROWS: gl.constexpr = PAGE if V_PACKED or PAGE == 16 else D
    V_COLUMNS: gl.constexpr = PAGE * D // V_ROWS
    k_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PAGES, PAGE, D], k_pages.layout)
    v_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PAGES, V_ROWS, V_COLUMNS], v_pages.layout)
    q_parts = gl.allocate_shared_memory(gl.float8e4nv, [2, 2 * ROWS, D], gl.NVMMASharedLayout(128, 8, 2))
    p_parts = gl.allocate_shared_memory(gl.float8e4nv, [2, TOKENS, P_COLUMNS], p_by_token(P_COLUMNS, 128))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    items = capacity * num_kv_heads
    gl.warp_specialize(
        [
            (_consume, (
                k_ring, v_ring, q_parts.index(0), p_parts.index(0), k_full, k_empty, v_full, v_empty,
                query, block_tables, k_scale, v_scale, work_info, partial_out, partial_max, partial_sum,
                q_stride_row, q_stride_head, scale_stride_block, scale_stride_head, table_stride_row, table_width,
                num_kv_heads, window, capacity, softmax_scale, items,
                PAGE, GROUP, QUERY_LENGTH, ROWS, STAGES, PER_TOKEN, V_PACKED, WINDOWED, 0,
            )),
            (_consume, (
                k_ring, v_ring, q_parts.index(1), p_parts.index(1), k_full, k_empty, v_full, v_empty,
                query, block_tables, k_scale, v_scale, work_info, partial_out, partial_max, partial_sum,
                q_stride_row, q_stride_head, scale_stride_block, scale_stride_head, table_stride_row, table_width,
                num_kv_heads, window, capacity, softmax_scale, items,
                PAGE, GROUP, QUERY_LENGTH, ROWS, STAGES, PER_TOKEN, V_PACKED, WINDOWED, 1,
            )),
            (_produce, (
                k_pages, v_pages, k_ring, v_ring, k_full, k_empty, v_full, v_empty, block_tables, work_info,
                table_stride_row, table_width, num_kv_heads, window, items,
                PAGE, V_ROWS, STAGES, WINDOWED, QUERY_LENGTH,
            )),
        ],
        [4, 1],
        [224, 40],
    )  # fmt: skip
