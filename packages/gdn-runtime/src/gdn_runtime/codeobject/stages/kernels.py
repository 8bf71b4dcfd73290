"""From a spec and a device to a kernel that is ready to launch, and rows as the kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ...plan import ChunkPlan
from ...spec import HEAD_DIM, KernelSpec
from ..launch import Launcher, LoadedKernel

LauncherFor: TypeAlias = Callable[[KernelSpec, torch.device], Launcher]

MAX_KNOWN = 4096
"""Bound of the lookup by identity. Selection gives equal specs as one object, so that a server holds some dozens."""

MAX_TOKEN_STRIDE = 2**24 - 1
"""Bytes: the kernels multiply the stride of a token in 24 bits, and hold offsets within a chunk of 64 in 31."""
ROW_BYTES = 2 * HEAD_DIM


class Kernels:
    """Kernels of one backend. Thread safe."""

    def __init__(self, launcher_for: LauncherFor) -> None:
        self.launcher_for = launcher_for
        # By identity of the spec: its hash takes 2 us. The spec is kept beside its kernel, so that no other has its id.
        self._known: dict[tuple[int, int | None], tuple[KernelSpec, LoadedKernel]] = {}

    def __call__(self, spec: KernelSpec, device: torch.device) -> LoadedKernel:
        """The kernel of ``spec`` for tensors on ``device``: found, compiled or refused as ``codeobject.code_object``
        does."""
        key = (id(spec), device.index)
        found = self._known.get(key)
        if found is not None:
            return found[1]
        kernel = self.launcher_for(spec, device).kernel(spec)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = spec, kernel
        return kernel

    def clear(self) -> None:
        """Forget the kernels, for instance because their launcher was closed, and dense plans, in which warm calls keep
        some."""
        self._known.clear()
        ChunkPlan.dense.cache_clear()


def strides_on_16_bytes(x: Tensor) -> tuple[int, int, int] | None:
    """(batch, token, head) strides in bytes of 16-bit rows x [B, T, heads, 128]; None if the kernels cannot take them:
    some row would be off 16-byte addresses even if the first is not, rows overlap without being one, or tokens are
    16 MiB or more apart.

    The batch stride of a single batch row is never used and reads 0.
    """
    batch, token, head, _ = x.stride()
    if x.shape[0] == 1:
        batch = 0
    apart = token == 0 or ROW_BYTES <= 2 * token <= MAX_TOKEN_STRIDE
    if not apart or 2 * (batch | token | head) & 15:
        return None
    return 2 * batch, 2 * token, 2 * head


def rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, batch, token and head stride in bytes), where x is copied into a contiguous tensor first if its rows are off
    16-byte addresses or its strides do not fit (see ``strides_on_16_bytes``)."""
    strides = None if x.data_ptr() & 15 else strides_on_16_bytes(x)
    if strides is None:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = strides_on_16_bytes(x)
        assert strides is not None, "a contiguous tensor of 128-element rows"
    return x, *strides


def slot_bytes(states: Tensor | None) -> int:
    """Bytes between the states of two sequences, or between two slots of a pool; 0 without any."""
    return 0 if states is None else states.stride(0) * states.element_size()


def row_units(x: Tensor) -> tuple[Tensor, int, int, int]:
    """As ``rows``, strides in units of 8 elements, as the Triton kernels count them."""
    x, batch, token, head = rows(x)
    return x, batch // 16, token // 16, head // 16


def gates(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, batch, token and head stride in bytes) of x [B, T, H]; tokens 16 MiB or more apart are copied first."""
    size = x.element_size()
    if size * x.stride(1) > MAX_TOKEN_STRIDE:
        x = x.clone(memory_format=torch.contiguous_format)
    batch, token, head = x.stride()
    return x, size * batch, size * token, size * head
