"""K5 by the FlyDSL kernels `opt` and `vk`."""

from __future__ import annotations

from torch import Tensor

from ...plan import ChunkPlan
from ...spec import OptStateScanSpec, VkStateScanSpec
from .kernels import Kernels, rows


def state_scan(
    kernels: Kernels,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    g: Tensor | None,
    gk: Tensor | None,
    h: Tensor,
    v_new: Tensor | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    plan: ChunkPlan,
    use_exp2: bool,
    g_head_major: bool,
    spec: OptStateScanSpec | VkStateScanSpec,
) -> None:
    """Launch K5 (see ``ops.backends.Stages``); k, w, u and v_new bf16. Without chunks it still copies the states."""
    del use_exp2, g_head_major  # facts of the spec
    if plan.num_seqs == 0:
        return
    k, k_batch, k_token, k_head = rows(k)
    if type(spec) is VkStateScanSpec:
        assert state_indices is None and has_initial_state is None
        args = (
            k,
            w,
            u,
            g,
            gk,
            h,
            v_new,
            initial_state,
            final_state,
            plan.cu_seqlens,
            plan.chunk_offsets,
            k_batch,
            k_head,
            plan.seq_len,
            k_token,
        )
        kernels(spec, k.device)(spec.grid(plan.num_seqs), args)
        return
    pool = final_state if initial_state is None else initial_state
    kernels(spec, k.device)(
        spec.grid(plan.num_seqs),
        (
            k,
            w,
            u,
            g,
            gk,
            h,
            v_new,
            initial_state,
            final_state,
            state_indices,
            has_initial_state,
            plan.cu_seqlens,
            plan.chunk_offsets,
            k_batch,
            k_head,
            0 if initial_state is None else initial_state.stride(0) * initial_state.element_size(),
            0 if final_state is None else final_state.stride(0) * final_state.element_size(),
            plan.seq_len,
            k_token,
            0 if pool is None else pool.shape[0],
            4 if state_indices is None else state_indices.element_size(),
        ),
    )
