"""From a spec, a backend and a device to a kernel that is ready to launch; loaded by name, on first use."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol, cast

import torch

from gdn_runtime.codeobject import Grid, Value
from gdn_runtime.spec import Backend, KernelSpec

_WHERE: dict[Backend, str] = {
    "triton": "pa_decode.kernels.nvidia:KERNELS",
    "flydsl": "gdn_runtime.codeobject.stages.backend:FLYDSL.kernels",
    "emulate": "gdn_runtime.codeobject.stages.backend:EMULATE.kernels",
}


class Kernel(Protocol):
    """A kernel that is ready to launch."""

    def __call__(self, grid: Grid, args: Sequence[Value]) -> None:
        """Launch on the current stream with the values of ``ARGUMENTS`` of the spec, in their order."""


class Kernels(Protocol):
    """The kernels of a backend."""

    def __call__(self, spec: KernelSpec, device: torch.device) -> Kernel:
        """The kernel of ``spec`` for tensors on ``device``: found, compiled or refused."""


@functools.cache
def kernels(backend: Backend) -> Kernels:
    """The kernels of "triton", "flydsl" or "emulate"."""
    module, _, attribute = _WHERE[backend].partition(":")
    return cast(Kernels, attrgetter(attribute)(importlib.import_module(module)))
