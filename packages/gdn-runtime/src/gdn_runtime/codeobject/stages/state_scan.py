"""K5 by the FlyDSL kernels `opt` and `vk`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from ...plan import ChunkPlan
from ...spec import HEAD_DIM, OptStateScanSpec, VkStateScanSpec
from .kernels import Kernels, rows, slot_bytes, strides_on_16_bytes

ScanSpec: TypeAlias = OptStateScanSpec | VkStateScanSpec
STATE_BYTES = {"fp32": 4, "bf16": 2}


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
    spec: ScanSpec,
) -> None:
    """Launch K5 (see ``ops.backends.Stages``); k, w, u and v_new bf16. Without chunks it still copies the states."""
    del use_exp2, g_head_major  # facts of the spec
    launch = bind_state_scan(
        kernels,
        plan,
        k,
        initial_state=initial_state,
        final_stride=slot_bytes(final_state),
        state_indices=state_indices,
        spec=spec,
    )
    launch(plan, k, w, u, g, gk, h, v_new, initial_state, final_state, state_indices, has_initial_state)


def new_state_stride(spec: ScanSpec) -> int:
    """Bytes between the states of two sequences in a new tensor of final states."""
    return spec.num_heads * HEAD_DIM * HEAD_DIM * STATE_BYTES[spec.state_dtype]


def bind_state_scan(
    kernels: Kernels,
    plan: ChunkPlan,
    k: Tensor,
    *,
    initial_state: Tensor | None,
    final_stride: int,
    state_indices: Tensor | None,
    spec: ScanSpec,
) -> Callable[..., None]:
    """K5 for calls over ``plan`` whose tensors have the shapes, strides and dtypes of these; none of them is kept.

    The result takes (plan, k, w, u, g, gk, h, v_new, initial_state, final_state, state_indices, has_initial_state), the
    plan being this one. ``final_stride``: bytes between two final states.
    """
    if plan.num_seqs == 0:
        return _launch_nothing
    kernel = kernels(spec, k.device)
    grid, seq_len = spec.grid(plan.num_seqs), plan.seq_len
    initial_stride = slot_bytes(initial_state)
    slots = 0 if initial_state is None else initial_state.shape[0]
    index_bytes = 4 if state_indices is None else state_indices.element_size()
    is_vk = isinstance(spec, VkStateScanSpec)

    def numbers(batch: int, token: int, head: int) -> tuple[int, ...]:
        if is_vk:
            return batch, head, seq_len, token
        return batch, head, initial_stride, final_stride, seq_len, token, slots, index_bytes

    fits = strides_on_16_bytes(k)
    # The plan's own tensors and the numbers are those of every call over it. The plan keeps the tensors.
    schedule = struct.pack("<2Q", *(0 if x is None else x.data_ptr() for x in (plan.cu_seqlens, plan.chunk_offsets)))
    packed = None if fits is None else schedule + kernel.pack.numbers(numbers(*fits))
    addresses = struct.Struct(f"<{kernel.pack.pointers - 2}Q").pack
    start = kernel.launch

    def launch(
        plan: ChunkPlan,
        k: Tensor,
        w: Tensor,
        u: Tensor,
        g: Tensor | None,
        gk: Tensor | None,
        h: Tensor,
        v_new: Tensor | None,
        initial: Tensor | None,
        final: Tensor | None,
        indices: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        address = k.data_ptr()
        if packed is None or address & 15:
            k, *strides = rows(k)
            pools = () if is_vk else (indices, mask)
            tensors = (k, w, u, g, gk, h, v_new, initial, final, *pools, plan.cu_seqlens, plan.chunk_offsets)
            kernel(grid, (*tensors, *numbers(*strides)))
            return
        kernarg = addresses(
            address,
            w.data_ptr(),
            u.data_ptr(),
            0 if g is None else g.data_ptr(),
            0 if gk is None else gk.data_ptr(),
            h.data_ptr(),
            0 if v_new is None else v_new.data_ptr(),
            0 if initial is None else initial.data_ptr(),
            0 if final is None else final.data_ptr(),
            *(() if is_vk else (0 if indices is None else indices.data_ptr(), 0 if mask is None else mask.data_ptr())),
        )
        tensors = (k, w, u, g, gk, h, v_new, initial, final, indices, mask, plan.cu_seqlens, plan.chunk_offsets)
        start(grid, kernarg + packed, tensors)

    return launch


def _launch_nothing(*args: object) -> None:
    pass
