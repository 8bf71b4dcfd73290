"""Run the four stages of a backend on poisoned outputs, without the public op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn_runtime.plan import ChunkPlan, cdiv
from gdn_runtime.testing import GdnInputs

from .poison import poisoned
from .specs import Specs, problem_of, triton_specs


@dataclass(frozen=True)
class StageResult:
    """Every tensor that the stages wrote. Rows outside the sequences are poison."""

    w: Tensor
    u: Tensor
    g_cumsum: Tensor
    h: Tensor
    v_new: Tensor
    final_state: Tensor
    o: Tensor


def plan_for(inputs: GdnInputs) -> ChunkPlan:
    """The plan of a call, with every table that a kernel may read."""
    tokens, device = inputs.k.shape[1], inputs.k.device
    if inputs.cu_seqlens is None:
        return ChunkPlan.dense(inputs.num_seqs, tokens)
    counts = [cdiv(length, 64) for length in inputs.seq_lens]
    owners = [(n, c) for n, count in enumerate(counts) for c in range(count)]

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ChunkPlan(
        is_varlen=True,
        num_seqs=len(counts),
        seq_len=tokens,
        num_tokens=inputs.num_tokens,
        total_chunks=len(owners),
        max_seq_chunks=max(counts, default=0),
        cu_seqlens=inputs.cu_seqlens.to(torch.int32),
        chunk_offsets=table([sum(counts[:n]) for n in range(len(counts) + 1)]),
        sequence_ids=table([n for n, _ in owners]),
        chunk_ids=table([c for _, c in owners]),
    )


def snapshots_for(inputs: GdnInputs, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
    """Poisoned h: [1, total_chunks, H, V, K], or dense [B, NT, H, V, K]."""
    lead = (1, plan.total_chunks) if plan.is_varlen else (plan.num_seqs, plan.max_seq_chunks)
    return poisoned(*lead, inputs.num_heads, inputs.v.shape[3], inputs.k.shape[3], dtype=dtype, device=inputs.k.device)


def run_stages(
    backend: Any,
    inputs: GdnInputs,
    *,
    scale: float | None = None,
    use_exp2: bool = True,
    snapshot_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    specs: Specs | None = None,
) -> StageResult:
    """Run prepare, state_scan and output of ``backend`` (a module with the backend interface).

    With ``pool`` [slots, H, V, K] (and ``state_indices`` [N]) the states are read from and written to it in place;
    otherwise the initial states are the inputs' own and the final ones new, of ``state_dtype`` (that of the initial
    states, else fp32). ``specs`` is by default that of the reference and Triton with default configurations.
    """
    plan = plan_for(inputs)
    q, k, v, g, beta = inputs.tensors
    (batch, tokens, num_heads, head_v), head_k, device = v.shape, k.shape[3], k.device
    w = poisoned(batch, num_heads, tokens, head_k, dtype=k.dtype, device=device)
    u = poisoned(batch, num_heads, tokens, head_v, dtype=k.dtype, device=device)
    g_cumsum = poisoned(batch, num_heads, tokens, device=device)
    v_new = poisoned(batch, num_heads, tokens, head_v, dtype=k.dtype, device=device)
    o = poisoned(batch, tokens, num_heads, head_v, dtype=v.dtype, device=device)
    h = snapshots_for(inputs, plan, snapshot_dtype or k.dtype)
    initial = inputs.initial_state if pool is None else pool
    if pool is not None:
        final = pool
    else:
        dtype = state_dtype or (torch.float32 if initial is None else initial.dtype)
        final = poisoned(plan.num_seqs, num_heads, head_v, head_k, dtype=dtype, device=device)
    if specs is None:
        problem = problem_of(
            inputs,
            snapshot_dtype=h.dtype,
            state_dtype=final.dtype,
            use_exp2=use_exp2,
            use_initial_state=initial is not None,
            use_state_indices=state_indices is not None,
            use_state_mask=has_initial_state is not None,
        )
        specs = triton_specs(problem)
    backend.prepare(
        k,
        v,
        g,
        beta,
        w=w,
        u=u,
        g_cumsum=g_cumsum,
        plan=plan,
        use_exp2=use_exp2,
        spec=specs.prepare,
    )
    backend.state_scan(
        k,
        w,
        u,
        g=g_cumsum,
        gk=None,
        h=h,
        v_new=v_new,
        initial_state=initial,
        final_state=final,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        plan=plan,
        use_exp2=use_exp2,
        g_head_major=True,
        spec=specs.state_scan,
    )
    backend.output(
        q,
        k,
        v_new,
        h,
        g_cumsum,
        o=o,
        scale=head_k**-0.5 if scale is None else scale,
        plan=plan,
        use_exp2=use_exp2,
        spec=specs.output,
    )
    return StageResult(w, u, g_cumsum, h, v_new, final, o)
