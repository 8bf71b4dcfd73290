"""Warm calls of K5: what the first call of a signature worked out, for the others to find with one lookup.

Checks, selection and the numbers of a launch depend on nothing but shapes, strides, dtypes, devices, options and plan,
so calls that agree on those pass or fail together and run the same kernel with the same numbers. They are looked up in
the plan, which lives as long as the metadata of its batch.
"""

from __future__ import annotations

import weakref
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


def _template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one element that ``torch.empty_like`` makes contiguous tensors of: in half the time of torch.empty,
    which parses its arguments."""
    with torch.inference_mode(False):
        template = torch.zeros((), dtype=dtype, device=device).expand(shape)
    assert torch.empty_like(template).is_contiguous()
    return template


class WarmScan:
    """What calls of one signature over one plan need.

    ``final_shape`` None: the final states go into ``initial_state`` if ``in_place``, else nobody wants them.
    ``indices`` and ``mask`` are those of the last call, which all layers of a model share: seen again, they are not
    looked into. They are not kept alive, for plans of dense calls live on.
    """

    __slots__ = (
        "final",
        "h",
        "in_place",
        "indices",
        "indices_facts",
        "launch",
        "mask",
        "mask_facts",
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
        indices: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        self.settings = settings
        self.h = _template(h_shape, h_dtype, device)
        self.save_new_value = save_new_value
        self.final = None if final_shape is None else _template(final_shape, final_dtype, device)
        self.in_place = in_place
        self.launch = launch
        self.indices, self.indices_facts = _reference(indices), _facts(indices)
        self.mask, self.mask_facts = _reference(mask), _facts(mask)

    def fits(self, indices: Tensor | None, mask: Tensor | None) -> bool:
        """Whether the slots and the mask of a call are like those of the first one; what the signature leaves out."""
        if indices is not self.indices():
            if _facts(indices) != self.indices_facts:
                return False
            self.indices = _reference(indices)
        if mask is not self.mask():
            if _facts(mask) != self.mask_facts:
                return False
            self.mask = _reference(mask)
        return self.settings is env.settings()

    def allocate(self, u: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(h, v_new, final states) of a call."""
        h = torch.empty_like(self.h)
        v_new = torch.empty_like(u) if self.save_new_value else None
        if self.final is not None:
            return h, v_new, torch.empty_like(self.final)
        return h, v_new, initial_state if self.in_place else None


def _nothing() -> None:
    return None


def _reference(x: Tensor | None) -> Callable[[], Tensor | None]:
    """What gives ``x`` while somebody else holds it."""
    return _nothing if x is None else weakref.ref(x)


def _facts(x: Tensor | None) -> Signature | None:
    return None if x is None else (x.shape, x.dtype, x.is_contiguous(), x.device)


def signature(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    metadata: PrefillMetadata | None,
    seq_lens_cpu: object,
    num_decodes: int,
    num_decode_tokens: int,
    options: Signature,
) -> tuple[ChunkPlan | None, Signature | None]:
    """The plan of an eager call, and all else of it that its checks and its selection look at, but for slots and mask.

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
            options,
        )
    except (AttributeError, TypeError):
        return None, None
