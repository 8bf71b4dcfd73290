"""Warm calls of K5: what the first call of a signature worked out, for the others to find with one lookup.

Checks, selection and the numbers of a launch depend on nothing but shapes, strides, dtypes, devices, options and plan,
so calls that agree on those pass or fail together and run the same kernel with the same numbers. They are looked up in
the plan, which lives as long as the metadata of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import env
from ..metadata import PrefillMetadata
from ..plan import ChunkPlan

Signature: TypeAlias = tuple[Any, ...]
Launch: TypeAlias = Callable[..., None]
"""launch(plan, k, w, u, g, gk, h, v_new, initial_state, final_state, state_indices, has_initial_state)"""


class WarmScan:
    """What calls of one signature over one plan need.

    ``final_shape`` None: the final states go into ``initial_state`` if ``in_place``, else nobody wants them.
    """

    __slots__ = (
        "device",
        "final_dtype",
        "final_shape",
        "h_dtype",
        "h_shape",
        "in_place",
        "launch",
        "save_new_value",
        "settings",
    )

    def __init__(
        self,
        settings: env.Settings,
        device: torch.device,
        h_shape: tuple[int, ...],
        h_dtype: torch.dtype,
        save_new_value: bool,
        final_shape: tuple[int, ...] | None,
        final_dtype: torch.dtype,
        in_place: bool,
        launch: Launch,
    ) -> None:
        self.settings = settings
        self.device = device
        self.h_shape = h_shape
        self.h_dtype = h_dtype
        self.save_new_value = save_new_value
        self.final_shape = final_shape
        self.final_dtype = final_dtype
        self.in_place = in_place
        self.launch = launch

    def allocate(self, u: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(h, v_new, final states) of a call."""
        device = self.device
        h = torch.empty(self.h_shape, dtype=self.h_dtype, device=device)
        v_new = torch.empty_like(u) if self.save_new_value else None
        if self.final_shape is not None:
            return h, v_new, torch.empty(self.final_shape, dtype=self.final_dtype, device=device)
        return h, v_new, initial_state if self.in_place else None


def signature(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    state: Tensor | None,
    indices: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    metadata: PrefillMetadata | None,
    seq_lens_cpu: object,
    num_decodes: int,
    num_decode_tokens: int,
    options: Signature,
) -> tuple[ChunkPlan | None, Signature | None]:
    """The plan of an eager call, and everything else of it that its checks and its selection look at.

    (None, None) for a call that has to be checked each time: one whose lengths come from ``cu_seqlens`` or
    ``seq_lens_cpu``, that may lose a gradient, or that has something else for a tensor.
    """
    try:
        shape = k.shape
        if cu_seqlens is None:
            if metadata is not None or seq_lens_cpu is not None or num_decodes or num_decode_tokens:
                return None, None
            plan: ChunkPlan | None = ChunkPlan.dense(shape[0], shape[1])
        elif type(metadata) is PrefillMetadata:
            plan = metadata.plan_if_valid(cu_seqlens, num_decodes, num_decode_tokens, shape[1])
        else:
            return None, None
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k, w, u, g, gk, state)):
            return None, None
        device = k.device
        return plan, (
            shape,
            k.stride(),
            k.dtype,
            device,
            w.shape,
            w.dtype,
            w.is_contiguous() and w.device == device,
            u.shape,
            u.dtype,
            u.is_contiguous() and u.device == device,
            g if g is None else (g.shape, g.dtype, g.is_contiguous() and g.device == device),
            gk if gk is None else (gk.shape, gk.dtype, gk.is_contiguous() and gk.device == device),
            state if state is None else (state.shape, state.stride(), state.dtype, state.device == device),
            indices
            if indices is None
            else (indices.shape, indices.dtype, indices.is_contiguous() and indices.device == device),
            mask if mask is None else (mask.shape, mask.dtype, mask.is_contiguous() and mask.device == device),
            options,
        )
    except (AttributeError, TypeError):
        return None, None
