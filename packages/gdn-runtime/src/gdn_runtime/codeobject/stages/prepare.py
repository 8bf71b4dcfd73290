"""K1..K4 by the fused FlyDSL kernels."""

from __future__ import annotations

from torch import Tensor

from ...plan import ChunkPlan
from ...spec import FusedPrepareSpec, TPrepareSpec
from .kernels import Kernels, gates, rows


def prepare(
    kernels: Kernels,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    w: Tensor,
    u: Tensor,
    g_cumsum: Tensor,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: FusedPrepareSpec,
) -> None:
    """Launch K1..K4 (see ``ops.backends.Stages``); k and v bf16. g and beta may have any strides."""
    del use_exp2  # facts of the spec
    if plan.total_chunks == 0:
        return
    k, k_batch, k_token, k_head = rows(k)
    v, v_batch, v_token, v_head = rows(v)
    g, g_batch, g_token, g_head = gates(g)
    beta, beta_batch, beta_token, beta_head = gates(beta)
    args = (
        k,
        v,
        g,
        beta,
        w,
        u,
        g_cumsum,
        plan.cu_seqlens,
        plan.sequence_ids,
        plan.chunk_ids,
        k_batch,
        k_head,
        v_batch,
        v_head,
        g_batch,
        g_head,
        beta_batch,
        beta_head,
        plan.seq_len,
        k_token,
        v_token,
        g_token,
        beta_token,
    )
    kernels(spec, k.device)(spec.grid(plan.num_seqs, plan.total_chunks, plan.max_seq_chunks), args)


def prepare_t(
    kernels: Kernels,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    t: Tensor,
    g_cumsum: Tensor,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: TPrepareSpec,
) -> None:
    """Launch K1..K4 up to T' (see ``ops.backends.TPrimeStages``); k bf16. g and beta may have any strides."""
    del use_exp2  # facts of the spec
    if plan.total_chunks == 0:
        return
    k, k_batch, k_token, k_head = rows(k)
    g, g_batch, g_token, g_head = gates(g)
    beta, beta_batch, beta_token, beta_head = gates(beta)
    args = (
        k,
        g,
        beta,
        t,
        g_cumsum,
        plan.cu_seqlens,
        plan.sequence_ids,
        plan.chunk_ids,
        k_batch,
        k_head,
        g_batch,
        g_head,
        beta_batch,
        beta_head,
        plan.seq_len,
        k_token,
        g_token,
        beta_token,
    )
    kernels(spec, k.device)(spec.grid(plan.num_seqs, plan.total_chunks, plan.max_seq_chunks), args)
