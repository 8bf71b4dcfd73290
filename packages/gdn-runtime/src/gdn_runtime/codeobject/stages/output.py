"""K6 by the code object of the Triton kernel."""

from __future__ import annotations

from torch import Tensor

from ...plan import ChunkPlan
from ...spec import OutputSpec
from .kernels import Kernels, row_units


def output(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    g_cumsum: Tensor,
    *,
    o: Tensor,
    scale: float,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: OutputSpec,
) -> None:
    """Launch K6 (see ``ops.backends.Stages``); bf16 data. Rows of ``o`` off 16-byte addresses get a detour through a
    contiguous tensor."""
    del use_exp2  # facts of the spec
    if plan.total_chunks == 0:
        return
    q, *q_strides = row_units(q)
    k, *k_strides = row_units(k)
    written, *o_strides = row_units(o)
    args = (
        q,
        k,
        v_new,
        h,
        g_cumsum,
        written,
        plan.cu_seqlens,
        plan.sequence_ids,
        plan.chunk_ids,
        scale,
        plan.seq_len,
        *q_strides,
        *k_strides,
        *o_strides,
    )
    kernels(spec, q.device)(spec.grid(plan.total_chunks), args)
    if written is not o:
        o[:, : plan.num_tokens] = written[:, : plan.num_tokens]
