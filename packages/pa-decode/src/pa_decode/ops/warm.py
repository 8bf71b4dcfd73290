"""Warm calls: what the first call of a kind over a plan worked out, for the others to find.

Checks, selection and the numbers of a launch depend on nothing but shapes, strides, dtypes, devices, the alignment of
addresses, options and the plan, so calls that agree on those pass or fail together and launch alike. Tensors that were
seen before (the cache, its scales, the table, which a server passes again and again) are known by identity.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.codeobject import Grid, LoadedKernel

from ..launch import Kernel
from ..layouts import Scale
from ..plan import DecodePlan, DecodeWorkspace
from .check import CuSeqlens, DecodeCall
from .selection import Choice

Signature: TypeAlias = tuple[Any, ...]
SCALE_BYTES = 4


def _bound(kernel: Kernel, grid: Grid, numbers: Sequence[int | float]) -> Callable[..., None]:
    """A launch that takes the pointers alone; what a code object gets of numbers is packed once."""
    if not isinstance(kernel, LoadedKernel):
        return lambda *pointers: kernel(grid, (*pointers, *numbers))
    packed, start = kernel.pack.numbers(numbers), kernel.launch
    addresses = struct.Struct(f"<{kernel.pack.pointers}Q").pack

    def launch(*pointers: Tensor | None) -> None:
        start(grid, addresses(*[0 if x is None else x.data_ptr() for x in pointers]) + packed, pointers)

    return launch


class WarmDecode:
    """The launches of calls of one kind: ``(query, k_cache, v_cache, block_tables, k_scale, v_scale, sinks, plan,
    workspace, out)``, scales tensors, query and out on 16-byte addresses as those of the first call.

    It keeps no tensor but ``out``, which has one element and is what new outputs are made like.
    """

    __slots__ = ("_attention", "_out_span", "_reduce", "_spans", "out", "settings")

    def __init__(
        self,
        call: DecodeCall,
        choice: Choice,
        plan: DecodePlan,
        workspace: DecodeWorkspace,
        query: Tensor,
        out: Tensor,
        attention: Kernel,
        reduce: Kernel,
    ) -> None:
        facts, table, size = call.facts, call.block_tables, query.element_size()
        heads = facts.num_kv_heads
        self.settings = env.settings()
        numbers = (
            query.stride(0) * size,
            query.stride(1) * size,
            facts.scale_strides[0] * SCALE_BYTES,
            facts.scale_strides[1] * SCALE_BYTES,
            table.stride(0) * table.element_size(),
            heads,
            table.shape[1],
            facts.num_blocks_k,
            facts.num_blocks_v,
            call.window,
            plan.capacity,
            call.softmax_scale,
        )
        self._attention = _bound(attention, choice.attention.grid(plan.capacity, heads), numbers)
        strides = out.stride(0) * size, out.stride(1) * size
        self._reduce = _bound(
            reduce, choice.reduce.grid(plan.batch, heads), (*strides, heads, plan.capacity, plan.batch)
        )
        inputs = query, call.k_cache, call.v_cache, table, call.k_scale, call.v_scale, call.sinks, call.seq_lens
        self._spans = tuple(_span(x) for x in (*inputs, plan.work_info, plan.reduce_info))
        self._out_span = _span(out)
        with torch.inference_mode(False):
            self.out = torch.empty((), dtype=query.dtype, device=query.device).expand(query.shape)

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        k_scale: Scale,
        v_scale: Scale,
        sinks: Tensor | None,
        plan: DecodePlan,
        workspace: DecodeWorkspace,
        out: Tensor,
    ) -> None:
        o, m, s = workspace.partial_out, workspace.partial_max, workspace.partial_sum
        self._attention(query, k_cache, v_cache, block_tables, k_scale, v_scale, plan.work_info, o, m, s)
        self._reduce(o, m, s, plan.reduce_info, sinks, out)

    def apart(self, tensors: tuple[Any, ...], plan: DecodePlan, workspace: DecodeWorkspace, *, same: bool) -> bool:
        """Whether what a call writes, the workspace and an output of the caller's (the last of ``tensors``), shares no
        memory with anything else. ``same``: but for the query all is as in a call before, and there is no output."""
        *inputs, out = tensors
        scratch = workspace.spans
        if same:
            return _apart([(inputs[0].data_ptr(), self._spans[0])], scratch)
        read = [
            (x.data_ptr(), size)
            for x, size in zip((*inputs, plan.work_info, plan.reduce_info), self._spans, strict=True)
            if x is not None
        ]
        if out is None:
            return _apart(read, scratch)
        written = [(out.data_ptr(), self._out_span)]
        return _apart(read, scratch) and _apart(read, written) and _apart(scratch, written)


def _apart(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Whether none of ``some`` (address, bytes) overlaps one of ``others``."""
    for first, size in some:
        for start, length in others:
            if first < start + length and start < first + size:
                return False
    return True


class Seen:
    """The last call with a cache: ``warm`` serves the next one if its kept tensors are the very same and all else is
    alike. Keeps none of them alive."""

    __slots__ = ("_kept", "_like", "_options", "_workspace", "warm")

    def __init__(
        self, warm: WarmDecode, tensors: tuple[Any, ...], workspace: DecodeWorkspace, options: Signature
    ) -> None:
        self.warm = warm
        self._kept = tuple(_reference(x) for x in tensors[1:-1])
        self._like = _facts(tensors[0]), _facts(tensors[-1])
        self._workspace = weakref.ref(workspace)
        self._options = options

    def serves(self, tensors: tuple[Any, ...], workspace: DecodeWorkspace, options: Signature) -> bool:
        """Whether ``warm`` is for this call."""
        if workspace is not self._workspace() or options != self._options:
            return False
        for x, reference in zip(tensors[1:-1], self._kept, strict=True):
            if x is not reference():
                return False
        return (_facts(tensors[0]), _facts(tensors[-1])) == self._like


def _nothing() -> None:
    return None


def _reference(x: Tensor | None) -> Callable[[], Tensor | None]:
    return _nothing if x is None else weakref.ref(x)


def _facts(x: Any) -> Signature | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15)


def _span(x: object) -> int:
    """Bytes from the first to behind the last element."""
    if not isinstance(x, Tensor) or not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def on_16_bytes(x: Tensor) -> bool:
    """Whether each row of a head of x [rows, heads, D] of 16-bit elements is on a 16-byte address."""
    row, head, _ = x.stride()
    return not (2 * (row | head) | x.data_ptr()) & 15


def find(
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    tensors: tuple[Any, ...],
    cu_seqlens_q: CuSeqlens,
    options: Signature,
) -> tuple[Signature | None, WarmDecode | None]:
    """(key, what is kept under it) of an eager call over a plan; ``tensors`` are the query, those that are known by
    identity, and the output or None.

    No key for a call that has to be checked each time: one with offsets on the host or scales that are numbers, one
    that may lose a gradient, one that has something else for a tensor.
    """
    if cu_seqlens_q is not None:
        if not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.device.type == "cpu":
            return None, None
        options = *options, cu_seqlens_q.shape, cu_seqlens_q.dtype
    try:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return None, None
        seen: Seen | None = plan.seen.get(id(tensors[1]))
        if seen is not None and seen.serves(tensors, workspace, options):
            return None, seen.warm
        key = (*map(_facts, tensors), workspace.facts, options)
    except AttributeError:
        return None, None
    warm: WarmDecode | None = plan.warm.get(key)
    if warm is not None:
        plan.keep(plan.seen, id(tensors[1]), Seen(warm, tensors, workspace, options))
    return key, warm
