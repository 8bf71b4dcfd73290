"""The Gated DeltaNet prefill block, K1..K6."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..metadata import PrefillMetadata
from ..plan import ChunkPlan
from ..select import Explanation, Request, Selection, select
from ..spec import (
    HEAD_DIM,
    T_ELEMENTS,
    FusedPrepareSpec,
    OptStateScanSpec,
    PrepareSpec,
    StateScanSpec,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from . import checks
from .backends import bind_state_scan, fast_prefill, make_ready, stages, tprime_stages
from .library import register, traced
from .problem import make_problem
from .sequences import Sequences, check_sequences, plan_from_op_arguments
from .states import StateArguments, check_states, wants_index_check
from .warm import WarmBlock, find_block


@dataclass(frozen=True)
class BlockCall:
    """The checked arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    o: Tensor | None
    states: StateArguments
    scale: float
    snapshot_dtype: torch.dtype
    use_qk_l2norm: bool
    use_exp2: bool
    check_indices: bool
    request: Request


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    o: Tensor | None = None,
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
    backend: str = "auto",
    prepare_backend: str | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet over whole prompts: S <- exp(g) S (I - beta k k^T) + beta v k^T and o = scale S q, token by token,
    computed in chunks of 64.

    Args:
        q, k: [B,T,Hg,128] bf16 or fp16. Rows contiguous, other strides free (views of a fused projection are honoured).
        v: [B,T,H,128], dtype of q. H is a multiple of Hg; value head h reads key head h // (H / Hg).
        g: [B,T,H] fp32, natural logarithm of the decay of each token, not cumulated, normally <= 0; -inf resets the
            state (values below -128 act as -128: exp(-128) is 0 beside anything that fp32 holds to 1e-7).
        beta: [B,T,H] fp32, bf16 or fp16, the gain of each token.
        scale: factor of q, default 128 ** -0.5.
        initial_state: fp32 or bf16 states S [N,H,V,K] (value rows, key columns), one per sequence, or with
            ``initial_state_indices`` a pool [slots,H,V,K] whose slots may be apart in memory. None starts from zero.
        output_final_state: whether to return the states after the last token.
        use_qk_l2norm_in_kernel: l2-normalise q and k first (x * rsqrt(sum x^2 + 1e-6)).
        cu_seqlens: [sequences + 1] int32 or int64 offsets of sequences packed along T (then B == 1), decode prefix
            included. None: B sequences of T tokens.
        o: buffer for the output, [B,T,H,128] of v.dtype, written in place and returned. Rows past the last sequence are
            left as they are in it; without it they are zero.
        state_dtype: dtype of the final states; None is that of ``initial_state``, else fp32.
        snapshot_dtype: dtype of the states kept at chunk starts between K5 and K6: v.dtype (None) or fp32.
        use_exp2: unit of the gates inside (log2 or natural); the results are equal to rounding.
        num_decodes, num_decode_tokens: leading sequences of ``cu_seqlens``, and their tokens, that the data tensors and
            states leave out because a decode kernel serves them.
        seq_lens_cpu: host lengths of all sequences; spares the read of ``cu_seqlens`` but uploads on each call.
            Convenience: build ``prefill_metadata`` once per forward pass instead. Compiled code reads ``cu_seqlens``.
        prefill_metadata: from ``build_prefill_metadata``, shared by all layers; wins over ``seq_lens_cpu``. The only
            way without any host work on lengths, and the only one inside a CUDA graph capture.
        initial_state_indices: [N] int32 or int64 pool slots, N without the decode prefix. The pool is updated in place
            and returned. -1 is a pad: it starts from zero and stores nothing, as does any slot outside the pool; two
            sequences with one slot race. ``check_indices=True`` refuses both, at the price of a synchronisation.
        has_initial_state: [N] bool; False starts from exact zero whatever the state holds (NaN included).
        inplace_final_state: write the final states into ``initial_state`` and return it. None: True iff indices are
            given.
        check_indices: None means GDN_CHECK_INDICES.
        backend, prepare_backend: "auto", "reference", "triton", "flydsl" (AMD GPUs, bf16) or "emulate" (the code
            objects of flydsl on CPU tensors, for tests), for all stages and for K1..K4 alone.
        arch: architecture of the kernels: the device's own, or with "emulate" gfx942 or gfx950 (None: GDN_ARCH).

    Returns:
        (o [B,T,H,128] of v.dtype, final states [N,H,V,K] or the pool, or None).

    Raises:
        TypeError, ValueError, UnsupportedError: before anything but the schedule of ``cu_seqlens`` is allocated and
            before anything is launched; nothing of the caller's is changed. RuntimeError for varlen calls without
            metadata during CUDA graph capture.
    """
    as_op = traced()
    plan = key = None
    # As in chunk_gated_delta_rule_fwd_h: 1 == True, and values of other types go through the checks.
    if (
        not as_op
        and type(output_final_state) is type(use_qk_l2norm_in_kernel) is type(use_exp2) is bool
        and type(num_decodes) is type(num_decode_tokens) is int
        and (scale is None or type(scale) is float)
        and (inplace_final_state is None or type(inplace_final_state) is bool)
        and (check_indices is None or type(check_indices) is bool)
    ):
        plan, key, warm = find_block(
            q, k, v, g, beta, o, initial_state, cu_seqlens, prefill_metadata, seq_lens_cpu, num_decodes,
            num_decode_tokens,
            (
                scale, output_final_state, use_qk_l2norm_in_kernel, state_dtype, snapshot_dtype, use_exp2,
                inplace_final_state, check_indices, backend, prepare_backend, arch,
                initial_state_indices is None, has_initial_state is None,
            ),
        )  # fmt: skip
        if plan is not None and warm is not None and warm.fits(initial_state_indices, has_initial_state):
            states = StateArguments(initial_state, initial_state_indices, has_initial_state, *warm.states)
            call = BlockCall(q, k, v, g, beta, o, states, *warm.options)
            _check_output(call, cu_seqlens)
            return _run(call, plan, warm)
    call, sequences = _check(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        o=o,
        state_dtype=state_dtype,
        snapshot_dtype=snapshot_dtype,
        use_exp2=use_exp2,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        seq_lens_cpu=seq_lens_cpu,
        prefill_metadata=prefill_metadata,
        initial_state_indices=initial_state_indices,
        has_initial_state=has_initial_state,
        inplace_final_state=inplace_final_state,
        check_indices=check_indices,
        backend=backend,
        prepare_backend=prepare_backend,
        arch=arch,
    )
    if as_op:
        return _call_op(call, sequences)
    plan = sequences.plan()
    warm = _make_warm(call, plan)
    if call.check_indices:
        call.states.check_index_values()
    elif key is not None:
        plan.remember(key, warm)
    return _run(call, plan, warm)


def explain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Explanation:
    """Backends and configurations that ``chunk_gated_delta_rule`` would use for these arguments, and why. Launches and
    allocates nothing; raises what the call would raise."""
    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"explain: got {sorted(unknown)}, expected arguments of chunk_gated_delta_rule")
    call, sequences = _check(q, k, v, g, beta, **{**_DEFAULTS, **options})
    return _select(call, sequences.plan())


_DEFAULTS: dict[str, Any] = chunk_gated_delta_rule.__kwdefaults__ or {}


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    o: Tensor | None,
    state_dtype: torch.dtype | None,
    snapshot_dtype: torch.dtype | None,
    use_exp2: bool,
    num_decodes: int,
    num_decode_tokens: int,
    seq_lens_cpu: Sequence[int] | Tensor | None,
    prefill_metadata: PrefillMetadata | None,
    initial_state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    inplace_final_state: bool | None,
    check_indices: bool | None,
    backend: str,
    prepare_backend: str | None,
    arch: str | None,
) -> tuple[BlockCall, Sequences]:
    checks.check_rank("q", q, "B,T,Hg,K")
    checks.check_rank("k", k, "B,T,Hg,K")
    checks.check_rank("v", v, "B,T,H,V")
    device = q.device
    checks.check_tensor("q", q, dtypes=checks.DATA_DTYPES, device=device)
    batch, seq_len, num_key_heads, key_dim = q.shape
    num_heads = v.shape[2]
    checks.check_tensor("k", k, shape=(batch, seq_len, num_key_heads, key_dim), dtypes=(q.dtype,), device=device)
    checks.check_tensor("v", v, shape=(batch, seq_len, num_heads, v.shape[3]), dtypes=(q.dtype,), device=device)
    checks.check_head_dim(key_dim, v.shape[3])
    checks.check_heads(num_heads, num_key_heads)
    gates = (batch, seq_len, num_heads)
    checks.check_tensor("g", g, shape=gates, dtypes=(torch.float32,), device=device)
    checks.check_tensor("beta", beta, shape=gates, dtypes=checks.BETA_DTYPES, device=device)
    checks.check_rows("q", q)
    checks.check_rows("k", k)
    checks.check_rows("v", v)
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
    call = BlockCall(
        q,
        k,
        v,
        g,
        beta,
        o,
        states,
        checks.check_scale(scale),
        checks.check_snapshot_dtype(snapshot_dtype, q.dtype),
        checks.check_flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        checks.check_flag("use_exp2", use_exp2),
        wants_index_check(check_indices),
        Request(
            checks.check_text("backend", backend),
            None if prepare_backend is None else checks.check_text("prepare_backend", prepare_backend),
            None if arch is None else checks.check_text("arch", arch),
            stages=_stages(use_qk_l2norm_in_kernel),
        ),
    )
    _check_output(call, cu_seqlens)
    checks.check_no_grad(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, o=o)
    return call, sequences


def _check_output(call: BlockCall, cu_seqlens: Tensor | None) -> None:
    """A caller's ``o``, by addresses too, so for every call anew."""
    if call.o is None:
        return
    states = call.states
    inputs = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "g": call.g,
        "beta": call.beta,
        "cu_seqlens": cu_seqlens,
        "initial_state": states.initial_state,
        "initial_state_indices": states.indices,
        "has_initial_state": states.has_initial_state,
    }
    checks.check_output_buffer(call.o, call.v, inputs)


def _select(call: BlockCall, plan: ChunkPlan) -> Selection:
    problem = make_problem(
        plan,
        call.states,
        device=call.q.device,
        request=call.request,
        num_heads=call.v.shape[2],
        num_key_heads=call.k.shape[2],
        dtype=call.q.dtype,
        beta_dtype=call.beta.dtype,
        snapshot_dtype=call.snapshot_dtype,
        use_exp2=call.use_exp2,
    )
    return select(problem, call.q.device, call.request)


def _make_warm(call: BlockCall, plan: ChunkPlan) -> WarmBlock:
    """What this call and others like it need: the selection, its code objects loaded."""
    selection = _select(call, plan)
    make_ready(selection, call.q.device, *call.request.stages)
    options = (
        call.scale, call.snapshot_dtype, call.use_qk_l2norm, call.use_exp2, call.check_indices, call.request
    )  # fmt: skip
    return WarmBlock(selection, call.states, options)


def _stages(use_qk_l2norm: bool) -> tuple[str, ...]:
    return ("l2norm", *Request.stages) if use_qk_l2norm else Request.stages


def _run(call: BlockCall, plan: ChunkPlan, warm: WarmBlock) -> tuple[Tensor, Tensor | None]:
    out, final_state = _allocate(call, plan.num_seqs)
    _launch(call, plan, warm, out, final_state)
    return out, final_state


def _allocate(call: BlockCall, num_seqs: int) -> tuple[Tensor, Tensor | None]:
    v = call.v
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if call.o is None else call.o
    return out, call.states.allocate_final(num_seqs, v.shape[2], v.device)


def _launch(call: BlockCall, plan: ChunkPlan, warm: WarmBlock, out: Tensor, final_state: Tensor | None) -> None:
    """Allocate the workspaces and launch the stages on the current stream of the data's device."""
    selection = warm.selection
    q, k, v, states = call.q, call.k, call.v, call.states
    batch, seq_len, num_heads = v.shape[0], v.shape[1], v.shape[2]
    backend = stages(selection.backend)
    with torch.cuda.device(v.device) if v.is_cuda else nullcontext():
        if call.o is None and plan.num_tokens < seq_len:
            out[:, plan.num_tokens :].zero_()
        if call.use_qk_l2norm:
            q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
            backend.l2norm(q, k, q_out=q_out, k_out=k_out, spec=selection.l2norm)
            q, k = q_out, k_out
        if selection.fast is not None:
            fast_prefill()(
                q,
                k,
                v,
                call.g,
                call.beta,
                o=out,
                initial_state=states.initial_state,
                final_state=final_state,
                state_indices=states.indices,
                has_initial_state=states.has_initial_state,
                scale=call.scale,
                plan=plan,
                spec=selection.fast,
            )
            return
        g_cumsum = v.new_empty(batch, num_heads, seq_len, dtype=torch.float32)
        h = v.new_empty(
            1 if plan.is_varlen else batch,
            plan.total_chunks if plan.is_varlen else plan.max_seq_chunks,
            num_heads,
            HEAD_DIM,
            HEAD_DIM,
            dtype=call.snapshot_dtype,
        )
        through = _through_t if isinstance(selection.prepare, TPrepareSpec) else _through_w_and_u
        v_new = through(call, plan, warm, k, g_cumsum, h, final_state)
        backend.output(
            q,
            k,
            v_new,
            h,
            g_cumsum,
            o=out,
            scale=call.scale,
            plan=plan,
            use_exp2=call.use_exp2,
            spec=selection.output,
        )


def _through_w_and_u(
    call: BlockCall,
    plan: ChunkPlan,
    warm: WarmBlock,
    k: Tensor,
    g_cumsum: Tensor,
    h: Tensor,
    final_state: Tensor | None,
) -> Tensor:
    """K1..K5 with w and u between K4 and K5; v_new takes the place of u. ``k``: normalised if the call asks for it."""
    v, states, selection = call.v, call.states, warm.selection
    w = v.new_empty(v.shape[0], v.shape[2], v.shape[1], HEAD_DIM)
    u = torch.empty_like(w)
    stages(selection.prepare_backend).prepare(
        k,
        v,
        call.g,
        call.beta,
        w=w,
        u=u,
        g_cumsum=g_cumsum,
        plan=plan,
        use_exp2=call.use_exp2,
        spec=cast(PrepareSpec | FusedPrepareSpec, selection.prepare),
    )
    spec = selection.state_scan
    if isinstance(spec, OptStateScanSpec | VkStateScanSpec):
        if warm.scan is None:
            warm.scan = bind_state_scan(selection.backend, spec, plan, k, states)
        warm.scan(
            plan, k, w, u, g_cumsum, None, h, u, states.initial_state, final_state, states.indices,
            states.has_initial_state,
        )  # fmt: skip
        return u
    stages(selection.backend).state_scan(
        k,
        w,
        u,
        g=g_cumsum,
        gk=None,
        h=h,
        v_new=u,
        initial_state=states.initial_state,
        final_state=final_state,
        state_indices=states.indices,
        has_initial_state=states.has_initial_state,
        plan=plan,
        use_exp2=call.use_exp2,
        g_head_major=True,
        spec=cast(StateScanSpec, spec),
    )
    return u


def _through_t(
    call: BlockCall,
    plan: ChunkPlan,
    warm: WarmBlock,
    k: Tensor,
    g_cumsum: Tensor,
    h: Tensor,
    final_state: Tensor | None,
) -> Tensor:
    """K1..K5 with T' between K4 and K5: v_new. ``k``: normalised if the call asks for it."""
    v, states, selection = call.v, call.states, warm.selection
    t = v.new_empty(plan.total_chunks, v.shape[2], T_ELEMENTS)
    v_new = v.new_empty(v.shape[0], v.shape[2], v.shape[1], HEAD_DIM)
    backend = tprime_stages(selection.backend)
    backend.prepare_t(
        k,
        call.g,
        call.beta,
        t=t,
        g_cumsum=g_cumsum,
        plan=plan,
        use_exp2=call.use_exp2,
        spec=cast(TPrepareSpec, selection.prepare),
    )
    backend.state_scan_vsplit(
        k,
        v,
        t,
        g=g_cumsum,
        h=h,
        v_new=v_new,
        initial_state=states.initial_state,
        final_state=final_state,
        state_indices=states.indices,
        has_initial_state=states.has_initial_state,
        plan=plan,
        use_exp2=call.use_exp2,
        spec=cast(VSplitScanSpec, selection.state_scan),
    )
    return v_new


# ------------------------------------------------------------------------------------------------ torch.library


def _call_op(call: BlockCall, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
    """The call as one op of a traced graph."""
    out, final_state = _allocate(call, sequences.num_seqs)
    states = call.states
    _op(
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        None if states.in_place else states.initial_state,
        states.indices,
        states.has_initial_state,
        *sequences.op_arguments(),
        out,
        final_state,
        states.in_place,
        call.o is not None,
        call.scale,
        call.snapshot_dtype,
        call.use_qk_l2norm,
        call.use_exp2,
        call.check_indices,
        call.request.backend,
        call.request.prepare_backend,
        call.request.arch,
    )
    return out, final_state


def _run_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    o: Tensor,
    final_state: Tensor | None,
    in_place: bool,
    caller_owns_o: bool,
    scale: float,
    snapshot_dtype: torch.dtype,
    use_qk_l2norm: bool,
    use_exp2: bool,
    check_indices: bool,
    backend: str,
    prepare_backend: str | None,
    arch: str | None,
) -> None:
    """gdn::chunk_gated_delta_rule_out, for calls checked by ``chunk_gated_delta_rule``."""
    plan = plan_from_op_arguments(
        v.shape[0],
        v.shape[1],
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
    call = BlockCall(
        q,
        k,
        v,
        g,
        beta,
        o if caller_owns_o else None,
        states,
        scale,
        snapshot_dtype,
        use_qk_l2norm,
        use_exp2,
        check_indices,
        Request(backend, prepare_backend, arch, stages=_stages(use_qk_l2norm)),
    )
    warm = _make_warm(call, plan)
    if check_indices:
        states.check_index_values()
    _launch(call, plan, warm, o, final_state)


_op = register("chunk_gated_delta_rule_out", _run_op, mutates_args=("o", "final_state"))
