"""K5 by the FlyDSL kernel that takes T' and v in place of w and u."""

from __future__ import annotations

from torch import Tensor

from ...plan import ChunkPlan
from ...spec import VSplitScanSpec
from .kernels import Kernels, rows, slot_bytes


def state_scan_vsplit(
    kernels: Kernels,
    k: Tensor,
    v: Tensor,
    t: Tensor,
    *,
    g: Tensor,
    h: Tensor,
    v_new: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: VSplitScanSpec,
) -> None:
    """Launch K5 (see ``ops.backends.TPrimeStages``); k, v and v_new bf16. Without chunks it still copies the states."""
    del use_exp2  # facts of the spec
    if plan.num_seqs == 0:
        return
    k, k_batch, k_token, k_head = rows(k)
    v, v_batch, v_token, v_head = rows(v)
    args = (
        k,
        v,
        t,
        g,
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
        v_batch,
        v_head,
        slot_bytes(initial_state),
        slot_bytes(final_state),
        plan.seq_len,
        k_token,
        v_token,
        0 if initial_state is None else initial_state.shape[0],
        4 if state_indices is None else state_indices.element_size(),
    )
    kernels(spec, k.device)(spec.grid(plan.num_seqs), args)
