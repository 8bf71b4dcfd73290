"""Warm calls: what the first call of a signature worked out, for the others to find with one lookup.

Checks, selection and the numbers of a launch depend on nothing but shapes, strides, dtypes, devices, options and plan,
so calls that agree on those pass or fail together and run the same kernels with the same numbers. They are looked up in
the plan, which lives as long as the metadata of its batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import env
from ..metadata import PrefillMetadata
from ..plan import ChunkPlan
from ..select import Selection
from .backends import Launch
from .states import StateArguments

Signature: TypeAlias = tuple[Any, ...]


class Warm:
    """What calls of one signature over one plan share.

    ``indices`` and ``mask`` are those of the last call, which all layers of a model share: seen again, they are not
    looked into. They are not kept alive, for plans of dense calls live on.
    """

    __slots__ = ("indices", "indices_facts", "mask", "mask_facts", "settings")

    def __init__(self, indices: Tensor | None, mask: Tensor | None) -> None:
        self.settings = env.settings()
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


class WarmScan(Warm):
    """What calls of K5 need. ``final_shape`` None: the final states go into ``initial_state`` if ``in_place``, else
    nobody wants them."""

    __slots__ = ("final", "h", "in_place", "launch", "save_new_value")

    def __init__(
        self,
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
        super().__init__(indices, mask)
        self.h = _element(h_dtype, device).expand(h_shape)
        self.save_new_value = save_new_value
        self.final = None if final_shape is None else _element(final_dtype, device).expand(final_shape)
        self.in_place = in_place
        self.launch = launch

    def allocate(self, u: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(h, v_new, final states) of a call."""
        h = torch.empty_like(self.h)
        v_new = torch.empty_like(u) if self.save_new_value else None
        if self.final is not None:
            return h, v_new, torch.empty_like(self.final)
        return h, v_new, initial_state if self.in_place else None


class WarmBlock(Warm):
    """What calls of the block need: ``selection``, its code objects loaded; ``states`` and ``options``, what
    ``StateArguments`` and ``BlockCall`` hold besides tensors; ``scan``, K5 of the first call (None: not bound)."""

    __slots__ = ("options", "scan", "selection", "states")

    def __init__(self, selection: Selection, states: StateArguments, options: Signature) -> None:
        super().__init__(states.indices, states.has_initial_state)
        self.selection = selection
        self.states = states.store_final, states.in_place, states.dtype
        self.options = options
        self.scan: Launch | None = None


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Expanded, a template that ``torch.empty_like`` makes contiguous tensors of, in half the time of torch.empty,
    which parses its arguments."""
    with torch.inference_mode(False):
        return torch.empty((), dtype=dtype, device=device)


def _nothing() -> None:
    return None


def _reference(x: Tensor | None) -> Callable[[], Tensor | None]:
    """What gives ``x`` while somebody else holds it."""
    return _nothing if x is None else weakref.ref(x)


def _facts(x: Tensor | None) -> Signature | None:
    return None if x is None else (x.shape, x.dtype, x.is_contiguous(), x.device)


def find_scan(
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
) -> tuple[ChunkPlan | None, Signature | None, WarmScan | None]:
    """The plan of an eager call of K5, its signature (all that its checks and its selection look at, but for slots and
    mask), and what is known for that.

    All None for a call that has to be checked each time: one whose lengths come from ``cu_seqlens`` or
    ``seq_lens_cpu``, that may lose a gradient, or that has something else for a tensor or an option.
    """
    try:
        shape = k.shape
        plan = _plan(shape, cu_seqlens, metadata, seq_lens_cpu, num_decodes, num_decode_tokens)
        if plan is None or _may_lose_gradient(k, w, u, g, gk, state):
            return None, None, None
        device = k.device
        key = (
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
        return plan, key, plan.warm.get(key)
    except (AttributeError, IndexError, TypeError):  # no tensor, too few dimensions, an option that cannot be hashed
        return None, None, None


def find_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    o: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    metadata: PrefillMetadata | None,
    seq_lens_cpu: object,
    num_decodes: int,
    num_decode_tokens: int,
    options: Signature,
) -> tuple[ChunkPlan | None, Signature | None, WarmBlock | None]:
    """``find_scan`` for calls of the block. ``o`` is not in the signature: what it shares memory with is not either."""
    try:
        shape = q.shape
        plan = _plan(shape, cu_seqlens, metadata, seq_lens_cpu, num_decodes, num_decode_tokens)
        if plan is None or _may_lose_gradient(q, k, v, g, beta, o, state):
            return None, None, None
        device = q.device
        key = (
            "block",
            shape,
            q.stride(),
            q.dtype,
            device,
            k.shape,
            k.stride(),
            k.dtype,
            k.device == device,
            v.shape,
            v.stride(),
            v.dtype,
            v.device == device,
            g.shape,
            g.dtype,
            g.device == device,
            beta.shape,
            beta.dtype,
            beta.device == device,
            state if state is None else (state.shape, state.stride(), state.dtype, state.device == device),
            options,
        )
        return plan, key, plan.warm.get(key)
    except (AttributeError, IndexError, TypeError):
        return None, None, None


def _plan(
    shape: torch.Size,
    cu_seqlens: Tensor | None,
    metadata: PrefillMetadata | None,
    seq_lens_cpu: object,
    num_decodes: int,
    num_decode_tokens: int,
) -> ChunkPlan | None:
    """The plan of a call over rows [B,T,..] if it is known without looking into lengths, and fits."""
    if cu_seqlens is None:
        if metadata is not None or seq_lens_cpu is not None or num_decodes or num_decode_tokens:
            return None
        return ChunkPlan.dense(shape[0], shape[1])
    if type(metadata) is not PrefillMetadata:
        return None
    return metadata.plan_if_valid(cu_seqlens, num_decodes, num_decode_tokens, shape[1])


def _may_lose_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
