"""The public call, its fast path over a plan, and its op."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.codeobject.source import capturing
from gdn_runtime.errors import CaptureError
from gdn_runtime.ops.library import register, traced

from .. import reference
from ..launch import kernels
from ..layouts import Scale
from ..plan import MAKE_A_PLAN, PLAN_NUMBERS, DecodePlan, DecodeWorkspace, new_plan, new_workspace
from ..schedule import PaDecodeSchedule, planner_of
from .check import CuSeqlens, DecodeCall, check_call, check_made
from .selection import Choice, Explanation, choose, explanation
from .warm import WarmDecode, find, on_16_bytes


def pa_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    query_length: int | None = None,
    cu_seqlens_q: CuSeqlens = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
    window_left: int | None = None,
    plan: DecodePlan | None = None,
    workspace: DecodeWorkspace | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    kernel: str = "auto",
    arch: str | None = None,
) -> Tensor:
    """Attention of the last query tokens of each sequence over a paged FP8 cache.

    Query token i of QL of a sequence of ctx tokens is at p = ctx - QL + i and sees token t iff 0 <= t <= p and, with a
    window of W tokens, p - W < t. Its output is sum_t exp(s_t) v_scale_t V_t / (sum_t exp(s_t) + exp(sink)) with
    s_t = softmax_scale k_scale_t <q, K_t>; exact zeros where nothing is visible.

    Args:
        query: [B QL, Hq, D] bf16 or fp16, row b QL + i; D contiguous, rows and heads strided (rows off 16-byte
            addresses are copied first). Not FP8: the kernels quantise it.
        k_cache: [N, Hkv, D/16, page, 16] FP8 of the flavour of the architecture; see ``pack_k``.
        v_cache: packed [N, Hkv, page/16, D, 16] or plain [N, Hkv, D, page]; see ``pack_v``. At most N blocks.
        block_tables: [B, max_blocks] int32, any row stride. Entries behind the last token of a sequence may be
            anything, with a window also those of pages wholly before it.
        seq_lens: [B] int32, tokens of each sequence, its query tokens included; negative is 0. With a plan the lengths
            in the plan count: ``plan.refresh`` for others.
        softmax_scale: factor of the scores.
        query_length: QL, 1 by default.
        cu_seqlens_q: [B + 1] offsets of the query rows, as engines have them, of equal lengths QL. Values on the host
            are checked; those on a device are not read, and QL is rows / B.
        k_scale, v_scale: both None, both per tensor (a float, or fp32 [1] or []), or both per token: fp32
            [N, Hkv, page] or [N, Hkv, page, 1], tokens adjacent, strides equal.
        sinks: [Hq] bf16, fp16 or fp32: natural logarithms, not multiplied by ``softmax_scale``.
        sliding_window: W, tokens that a query token sees, its own included; 0 and -1 are off.
        window_left: the same as tokens before the own one, -1 is off; instead of ``sliding_window``.
        plan: from ``plan_decode``. None makes one for this call.
        workspace: from ``make_workspace``. None allocates one for this call.
        out: [B QL, Hq, D] of the query's dtype, written and returned. Its memory, and that of the workspace, is nobody
            else's: no input's, and not that of the plan.
        backend: "auto", "reference" (torch, any device), "triton" (NVIDIA), "flydsl" (AMD), "emulate" (AMD's code on
            CPU tensors, for tests).
        kernel: "auto" or the name of an attention kernel: "d256_pipe", "hopper", "attention".
        arch: with CPU tensors, the architecture that is emulated.

    Returns:
        [B QL, Hq, D] of the query's dtype.

    Raises:
        NotImplementedError: K is not packed. TypeError, ValueError, UnsupportedError: before anything is allocated or
        launched; nothing of the caller's is changed. CaptureError: a stream is being captured and something would have
        to be made: plan and workspace are needed, scales must be tensors, kernels loaded. MissingCodeObjectError,
        CompileError, HipError as from gdn_runtime.
    """
    if traced():
        return _call_op(
            query, k_cache, v_cache, block_tables, seq_lens, softmax_scale, query_length, cu_seqlens_q, k_scale,
            v_scale, sinks, sliding_window, window_left, plan, workspace, out, backend, kernel, arch,
        )  # fmt: skip
    key = None
    if type(plan) is DecodePlan and type(workspace) is DecodeWorkspace:
        numbers = softmax_scale, query_length, sliding_window, window_left
        # With their types: 2.0 and True are found where 2 and 1 are.
        options = *numbers, *map(type, numbers), backend, kernel, arch
        tensors = query, k_cache, v_cache, block_tables, k_scale, v_scale, sinks, seq_lens, out
        key, warm = find(plan, workspace, tensors, cu_seqlens_q, options)
        if (
            warm is not None
            and warm.settings is env.settings()
            # Without a key all but the query are the very tensors of a call before.
            and warm.apart(tensors, plan, workspace, same=key is None and out is None)
        ):
            if out is None:
                out = torch.empty_like(warm.out)
            warm(query, k_cache, v_cache, block_tables, k_scale, v_scale, sinks, plan, workspace, out)
            return out
    call = check_call(
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        softmax_scale=softmax_scale,
        query_length=query_length,
        cu_seqlens_q=cu_seqlens_q,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        sliding_window=sliding_window,
        window_left=window_left,
        out=out,
        backend=backend,
        kernel=kernel,
        arch=arch,
    )
    return _run(call, plan, workspace, key)


def explain(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, **options: Any
) -> Explanation:
    """What ``pa_decode`` would run for these arguments, and why. Launches and allocates nothing; raises what the call
    would raise."""
    unknown = options.keys() - _DEFAULTS.keys() - {"softmax_scale"}
    if unknown:
        raise TypeError(f"explain: got {sorted(unknown)}, expected arguments of pa_decode")
    given = {"softmax_scale": 1.0, **_DEFAULTS, **options}
    plan, workspace = given.pop("plan"), given.pop("workspace")
    call = check_call(query, k_cache, v_cache, block_tables, seq_lens, **given)
    check_made(call.inputs, call.out, plan, workspace)
    found = explanation(call, plan)
    if workspace is not None and plan is not None and call.geometry is not None:
        workspace.check(plan.capacity, call.geometry, call.query.device)
    return found


_DEFAULTS: dict[str, Any] = pa_decode.__kwdefaults__ or {}


def _run(call: DecodeCall, plan: DecodePlan | None, workspace: DecodeWorkspace | None, key: Any = None) -> Tensor:
    """Select, allocate and launch a checked call; keep what it worked out under ``key`` of the plan."""
    check_made(call.inputs, call.out, plan, workspace)
    query, device = call.query, call.query.device
    if call.geometry is None:
        return torch.empty_like(query) if call.out is None else call.out
    choice = choose(call, plan)
    if choice is None:
        return _run_reference(call)
    capacity = plan.capacity if plan is not None else _schedule(choice).capacity
    if workspace is not None:
        workspace.check(capacity, call.geometry, device)
    if device.type != "cpu" and capturing():
        _check_capture(call, plan, workspace)
    load = kernels(call.target.backend)
    attention, reduce = load(choice.attention, device), load(choice.reduce, device)
    if plan is None:
        plan = new_plan(_schedule(choice), call.geometry, device, call.target.backend)
        plan.refresh(call.seq_lens)
    if workspace is None:
        workspace = new_workspace(capacity, call.geometry, device)
    rows = query if on_16_bytes(query) else query.clone(memory_format=torch.contiguous_format)
    out = torch.empty(query.shape, dtype=query.dtype, device=device) if call.out is None else call.out
    written = out if on_16_bytes(out) else torch.empty(query.shape, dtype=query.dtype, device=device)
    launch = WarmDecode(call, choice, plan, workspace, rows, written, attention, reduce)
    scales = _tensor(call.k_scale, device), _tensor(call.v_scale, device)
    launch(rows, call.k_cache, call.v_cache, call.block_tables, *scales, call.sinks, plan, workspace, written)
    if written is not out:
        out.copy_(written)
    elif key is not None and rows is query:
        plan.keep(plan.warm, key, launch)
    return out


def _schedule(choice: Choice) -> PaDecodeSchedule:
    assert choice.schedule is not None, "a call without a plan"
    return choice.schedule


def _check_capture(call: DecodeCall, plan: DecodePlan | None, workspace: DecodeWorkspace | None) -> None:
    """CaptureError for what a graph must not hold: plan or scratch memory of one call, scales copied from the host."""
    if plan is None:
        raise CaptureError("making a plan", advice=MAKE_A_PLAN)
    if workspace is None:
        raise CaptureError("allocating a workspace", advice=MAKE_A_PLAN)
    if isinstance(call.k_scale, float | int) or isinstance(call.v_scale, float | int):
        raise CaptureError("copying a scale from the host", advice="pass k_scale and v_scale as tensors")


def _tensor(scale: Scale, device: torch.device) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.full((1,), scale, dtype=torch.float32, device=device)


def _run_reference(call: DecodeCall) -> Tensor:
    query = call.query
    if query.device.type != "cpu" and capturing():
        raise CaptureError("the reference, which reads seq_lens,", advice="take a backend that has kernels")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if call.out is None else call.out
    inputs = reference.DecodeInputs(
        query=query,
        k_cache=call.k_cache,
        v_cache=call.v_cache,
        block_tables=call.block_tables,
        seq_lens=call.seq_lens,
        softmax_scale=call.softmax_scale,
        query_length=call.query_length,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        sinks=call.sinks,
        window=call.window,
    )
    return out.copy_(reference.decode(inputs))


# ------------------------------------------------------------------------------------------------ torch.library


def _call_op(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    query_length: int | None,
    cu_seqlens_q: CuSeqlens,
    k_scale: Scale,
    v_scale: Scale,
    sinks: Tensor | None,
    sliding_window: int,
    window_left: int | None,
    plan: DecodePlan | None,
    workspace: DecodeWorkspace | None,
    out: Tensor | None,
    backend: str,
    kernel: str,
    arch: str | None,
) -> Tensor:
    """The call as one op of a traced graph, which checks its arguments when it runs."""
    check_made({}, out, plan, workspace)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scales = (_tensor(k_scale, query.device), _tensor(v_scale, query.device))
    offsets = cu_seqlens_q if cu_seqlens_q is None or isinstance(cu_seqlens_q, Tensor) else list(cu_seqlens_q)
    _op(
        query, k_cache, v_cache, block_tables, seq_lens, *scales, sinks,
        offsets if isinstance(offsets, Tensor) else None, None if isinstance(offsets, Tensor) else offsets,
        None if plan is None else plan.work_info,
        None if plan is None else plan.reduce_info,
        None if workspace is None else workspace.partial_out,
        None if workspace is None else workspace.partial_max,
        None if workspace is None else workspace.partial_sum,
        out,
        None if plan is None else plan.numbers(),
        softmax_scale, query_length, sliding_window, window_left, backend, kernel, arch,
    )  # fmt: skip
    return out


def _run_op(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_q_host: list[int] | None,
    work_info: Tensor | None,
    reduce_info: Tensor | None,
    partial_out: Tensor | None,
    partial_max: Tensor | None,
    partial_sum: Tensor | None,
    out: Tensor,
    plan_numbers: list[int] | None,
    softmax_scale: float,
    query_length: int | None,
    sliding_window: int,
    window_left: int | None,
    backend: str,
    kernel: str,
    arch: str | None,
) -> None:
    """pa_decode::decode_out."""
    call = check_call(
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        softmax_scale=softmax_scale,
        query_length=query_length,
        cu_seqlens_q=cu_seqlens_q if cu_seqlens_q is not None else cu_seqlens_q_host,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        sliding_window=sliding_window,
        window_left=window_left,
        out=out,
        backend=backend,
        kernel=kernel,
        arch=arch,
    )
    plan = workspace = None
    if work_info is not None and reduce_info is not None and plan_numbers is not None:
        numbers = dict(zip(PLAN_NUMBERS, plan_numbers, strict=True))
        planner = planner_of(call.target.arch, numbers["batch"])
        plan = DecodePlan(
            **cast(Any, numbers),
            work_info=work_info,
            reduce_info=reduce_info,
            backend=call.target.backend,
            planner=planner,
        )
    if partial_out is not None and partial_max is not None and partial_sum is not None:
        workspace = DecodeWorkspace(partial_out, partial_max, partial_sum)
    _run(call, plan, workspace)


_op = register(
    "decode_out",
    _run_op,
    mutates_args=("partial_out", "partial_max", "partial_sum", "out"),
    namespace="pa_decode",
)
