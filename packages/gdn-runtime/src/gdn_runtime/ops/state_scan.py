"""K5 alone: the state scan over chunks, from prepared w and u to snapshots, new values and final states."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..errors import UnsupportedError, value_error
from ..metadata import PrefillMetadata
from ..plan import ChunkPlan, cdiv
from ..select import Request, Selection, select
from ..spec import (
    CHUNK,
    HEAD_DIM,
    Backend,
    OptStateScanSpec,
    Rounding,
    StateScanSpec,
    VkStateScanSpec,
)
from . import checks
from .backends import Launch, bind_state_scan, make_ready, stages
from .library import register, traced
from .problem import make_problem
from .sequences import check_sequences, plan_from_op_arguments
from .states import StateArguments, check_states, wants_index_check
from .warm import WarmScan, find_scan


@dataclass(frozen=True)
class ScanCall:
    """The checked arguments of one call."""

    k: Tensor
    w: Tensor
    u: Tensor
    g: Tensor | None
    gk: Tensor | None
    states: StateArguments
    use_exp2: bool
    g_head_major: bool
    request: Request


def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK,
    save_new_value: bool = True,
    cu_seqlens: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    snapshot_dtype: torch.dtype | None = None,
    use_exp2: bool = True,
    num_decodes: int = 0,
    num_decode_tokens: int = 0,
    seq_lens_cpu: Sequence[int] | Tensor | None = None,
    prefill_metadata: PrefillMetadata | None = None,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    inplace_final_state: bool | None = None,
    check_indices: bool | None = None,
    g_head_major: bool = False,
    backend: str = "auto",
    arch: str | None = None,
    kernel: str = "opt",
    rounding: Rounding | None = None,
    block_v: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """K5: for every chunk, keep the state at its start, form v_new = u - w S^T, and carry
    S <- exp(G_L) S exp(gk_L) + (v_new exp(G_L - G))^T k, L being the last token of the chunk that exists.

    Args:
        k: [B,T,Hg,128] bf16 or fp16, rows contiguous. w, u: [B,H,T,128] contiguous, dtype of k.
        g: chunk-local cumulated gate, fp32, contiguous: [B,T,H], or [B,H,T] with ``g_head_major``. In log2 units if
            ``use_exp2``, else natural: a natural gate with ``use_exp2=True`` silently means exp2 of it. Must be finite.
            None: no decay.
        gk: per-key gate, cumulated within the chunk, fp32 natural logarithm whatever ``use_exp2``, contiguous
            [B,T,H,128] or flat [B*T,H,128]; read at the last token of each chunk. None: none.
        save_new_value: whether to return v_new.
        kernel, rounding, block_v: of the backends "flydsl" and "emulate" alone. "opt" (also called "mfma16_hip") or the
            baseline "vk" (gfx950, no indices and no has_initial_state, bf16 snapshots, token-major g, rounds to
            nearest); how "opt" makes bf16 of fp32, "truncate" (the high 16 bits; None) or "nearest" (even); value rows
            of the state per workgroup, 16, 32 or 64 (None: GDN_K5_BLOCK_V, else the tuned table, else the rule).
        The rest as in ``chunk_gated_delta_rule``.

    Returns:
        (h, v_new or None, final states or None): h [B,ceil(T/64),H,V,K], varlen [1,total_chunks,H,V,K], of
        ``snapshot_dtype`` (None: dtype of k); v_new [B,H,T,V], not gated, spare rows unwritten.

    Raises:
        As ``chunk_gated_delta_rule``. While torch.compile traces, varlen calls need ``prefill_metadata``: the number of
        snapshots is not known otherwise.
    """
    as_op = traced()
    plan = key = None
    # 1 == True and 64.0 == 64: values of other types go through the checks.
    if (
        not as_op
        and type(output_final_state) is type(save_new_value) is type(use_exp2) is type(g_head_major) is bool
        and type(num_decodes) is type(num_decode_tokens) is type(chunk_size) is int
        and (inplace_final_state is None or type(inplace_final_state) is bool)
        and (check_indices is None or type(check_indices) is bool)
        and (block_v is None or type(block_v) is int)
    ):
        plan, key, warm = find_scan(
            k, w, u, g, gk, initial_state, cu_seqlens, prefill_metadata, seq_lens_cpu, num_decodes, num_decode_tokens,
            (
                output_final_state, chunk_size, save_new_value, state_dtype, snapshot_dtype, use_exp2,
                inplace_final_state, check_indices, g_head_major, backend, arch, kernel, rounding, block_v,
                initial_state_indices is None, has_initial_state is None,
            ),
        )  # fmt: skip
        if plan is not None and warm is not None and warm.fits(initial_state_indices, has_initial_state):
            h, v_new, final_state = warm.allocate(u, initial_state)
            warm.launch(
                plan, k, w, u, g, gk, h, v_new, initial_state, final_state, initial_state_indices, has_initial_state
            )
            return h, v_new, final_state

    checks.check_rank("k", k, "B,T,Hg,K")
    checks.check_rank("w", w, "B,H,T,K")
    checks.check_rank("u", u, "B,H,T,V")
    device = k.device
    checks.check_tensor("k", k, dtypes=checks.DATA_DTYPES, device=device)
    batch, seq_len, num_key_heads, key_dim = k.shape
    num_heads = u.shape[1]
    checks.check_head_dim(key_dim, u.shape[3])
    checks.check_tensor("w", w, shape=(batch, num_heads, seq_len, key_dim), dtypes=(k.dtype,), device=device)
    checks.check_tensor("u", u, shape=(batch, num_heads, seq_len, HEAD_DIM), dtypes=(k.dtype,), device=device)
    checks.check_heads(num_heads, num_key_heads)
    checks.check_rows("k", k)
    checks.check_contiguous("w", w)
    checks.check_contiguous("u", u)
    checks.check_chunk_size(chunk_size)
    checks.check_flag("g_head_major", g_head_major)
    if g is not None:
        layout = (batch, num_heads, seq_len) if g_head_major else (batch, seq_len, num_heads)
        checks.check_tensor("g", g, shape=layout, dtypes=(torch.float32,), device=device)
        checks.check_contiguous("g", g)
    if gk is not None:
        checks.check_tensor("gk", gk, dtypes=(torch.float32,), device=device)
        shapes = ((batch, seq_len, num_heads, HEAD_DIM), (batch * seq_len, num_heads, HEAD_DIM))
        if tuple(gk.shape) not in shapes:
            raise value_error("gk.shape", list(gk.shape), " or ".join(str(list(shape)) for shape in shapes))
        checks.check_contiguous("gk", gk)
    sequences = check_sequences(
        batch=batch,
        seq_len=seq_len,
        device=device,
        cu_seqlens=cu_seqlens,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        seq_lens_cpu=seq_lens_cpu,
        prefill_metadata=prefill_metadata,
    )
    states = check_states(
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_dtype=state_dtype,
        initial_state_indices=initial_state_indices,
        has_initial_state=has_initial_state,
        inplace_final_state=inplace_final_state,
        num_seqs=sequences.num_seqs,
        num_heads=num_heads,
        device=device,
    )
    checks.check_no_grad(k=k, w=w, u=u, g=g, gk=gk, initial_state=initial_state)
    snapshots = checks.check_snapshot_dtype(snapshot_dtype, k.dtype)
    checks.check_flag("save_new_value", save_new_value)
    checks.check_flag("use_exp2", use_exp2)
    check = wants_index_check(check_indices)
    request = _check_request(backend, arch, kernel, rounding, block_v)
    call = ScanCall(k, w, u, g, gk, states, use_exp2, g_head_major, request)

    if as_op:
        if sequences.cu_seqlens is not None and sequences.schedule is None:
            raise UnsupportedError(
                "varlen chunk_gated_delta_rule_fwd_h without prefill_metadata while tracing (torch.compile)",
                got="cu_seqlens alone",
                supported=["prefill_metadata"],
            )
        per_row = cdiv(seq_len, CHUNK) if sequences.schedule is None else sequences.schedule.total_chunks
        h = k.new_empty(batch, per_row, num_heads, HEAD_DIM, HEAD_DIM, dtype=snapshots)
        v_new = torch.empty_like(u) if save_new_value else None
        final_state = states.allocate_final(sequences.num_seqs, num_heads, device)
        _op(
            k,
            w,
            u,
            g,
            gk,
            None if states.in_place else states.initial_state,
            states.indices,
            states.has_initial_state,
            *sequences.op_arguments(),
            h,
            v_new,
            final_state,
            states.in_place,
            use_exp2,
            g_head_major,
            check,
            backend,
            arch,
            kernel,
            rounding,
            block_v,
        )
        return h, v_new, final_state

    plan = sequences.plan()
    selection = _select(call, plan, snapshots, save_new_value)
    make_ready(selection, device, "state_scan")
    if check:
        states.check_index_values()
    new_final = states.store_final and not states.in_place
    per_row = plan.total_chunks if plan.is_varlen else cdiv(seq_len, CHUNK)
    warm = WarmScan(
        device,
        (batch, per_row, num_heads, HEAD_DIM, HEAD_DIM),
        snapshots,
        save_new_value,
        (plan.num_seqs, num_heads, HEAD_DIM, HEAD_DIM) if new_final else None,
        states.dtype,
        states.in_place,
        _launch_of(call, plan, selection),
        states.indices,
        states.has_initial_state,
    )
    if key is not None and not check:
        plan.remember(key, warm)
    h, v_new, final_state = warm.allocate(u, states.initial_state)
    _launch_call(warm.launch, call, plan, h, v_new, final_state)
    return h, v_new, final_state


def _check_request(backend: object, arch: object, kernel: object, rounding: object, block_v: object) -> Request:
    if block_v is not None:
        checks.check_count("block_v", block_v)
    return Request(
        backend=checks.check_text("backend", backend),
        arch=None if arch is None else checks.check_text("arch", arch),
        kernel=checks.check_text("kernel", kernel),
        rounding=None if rounding is None else cast(Rounding, checks.check_text("rounding", rounding)),
        block_v=cast(int | None, block_v),
        stages=("state_scan",),
    )


def _select(call: ScanCall, plan: ChunkPlan, snapshot_dtype: torch.dtype, save_new_value: bool) -> Selection:
    problem = make_problem(
        plan,
        call.states,
        device=call.k.device,
        request=call.request,
        num_heads=call.u.shape[1],
        num_key_heads=call.k.shape[2],
        dtype=call.k.dtype,
        beta_dtype=torch.float32,
        snapshot_dtype=snapshot_dtype,
        use_exp2=call.use_exp2,
        use_g=call.g is not None,
        use_gk=call.gk is not None,
        save_new_value=save_new_value,
        g_head_major=call.g_head_major,
    )
    return select(problem, call.k.device, call.request)


def _launch_of(call: ScanCall, plan: ChunkPlan, selection: Selection) -> Launch:
    """How to launch calls like this one."""
    spec = selection.state_scan
    if isinstance(spec, OptStateScanSpec | VkStateScanSpec):
        return bind_state_scan(selection.backend, spec, plan, call.k, call.states)
    assert isinstance(spec, StateScanSpec)
    return functools.partial(_launch_stage, selection.backend, spec, call.use_exp2, call.g_head_major)


def _launch_stage(
    backend: Backend,
    spec: StateScanSpec,
    use_exp2: bool,
    g_head_major: bool,
    plan: ChunkPlan,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    h: Tensor,
    v_new: Tensor | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
) -> None:
    with torch.cuda.device(k.device) if k.is_cuda else nullcontext():
        stages(backend).state_scan(
            k,
            w,
            u,
            g=g,
            gk=None if gk is None else gk.view(k.shape[0], k.shape[1], u.shape[1], HEAD_DIM),
            h=h,
            v_new=v_new,
            initial_state=initial_state,
            final_state=final_state,
            state_indices=state_indices,
            has_initial_state=has_initial_state,
            plan=plan,
            use_exp2=use_exp2,
            g_head_major=g_head_major,
            spec=spec,
        )


def _launch_call(
    launch: Launch, call: ScanCall, plan: ChunkPlan, h: Tensor, v_new: Tensor | None, final_state: Tensor | None
) -> None:
    states = call.states
    launch(
        plan, call.k, call.w, call.u, call.g, call.gk, h, v_new, states.initial_state, final_state, states.indices,
        states.has_initial_state,
    )  # fmt: skip


def _run_op(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    kernel_cu_seqlens: Tensor | None,
    chunk_offsets: Tensor | None,
    sequence_ids: Tensor | None,
    chunk_ids: Tensor | None,
    max_seq_chunks: int,
    num_tokens: int,
    num_decodes: int,
    num_decode_tokens: int,
    h: Tensor,
    v_new: Tensor | None,
    final_state: Tensor | None,
    in_place: bool,
    use_exp2: bool,
    g_head_major: bool,
    check_indices: bool,
    backend: str,
    arch: str | None,
    kernel: str,
    rounding: str | None,
    block_v: int | None,
) -> None:
    """gdn::chunk_gated_delta_rule_fwd_h_out; the state arguments are those of gdn::chunk_gated_delta_rule_out."""
    plan = plan_from_op_arguments(
        k.shape[0],
        k.shape[1],
        cu_seqlens,
        kernel_cu_seqlens,
        chunk_offsets,
        sequence_ids,
        chunk_ids,
        max_seq_chunks,
        num_tokens,
        num_decodes,
        num_decode_tokens,
    )
    states = StateArguments.of_op(initial_state, final_state, in_place, state_indices, has_initial_state)
    request = _check_request(backend, arch, kernel, rounding, block_v)
    call = ScanCall(k, w, u, g, gk, states, use_exp2, g_head_major, request)
    selection = _select(call, plan, h.dtype, v_new is not None)
    make_ready(selection, k.device, "state_scan")
    if check_indices:
        states.check_index_values()
    _launch_call(_launch_of(call, plan, selection), call, plan, h, v_new, final_state)


_op = register("chunk_gated_delta_rule_fwd_h_out", _run_op, mutates_args=("h", "v_new", "final_state"))
