"""The two backends that launch code objects: FLYDSL on AMD GPUs, EMULATE on CPU tensors."""

from __future__ import annotations

import functools

import torch

from ...spec import KernelSpec
from ..launch import Launcher
from .kernels import Kernels, LauncherFor, slot_bytes
from .l2norm import l2norm
from .output import output
from .prepare import prepare, prepare_t
from .state_scan import bind_state_scan, new_state_stride, state_scan
from .state_scan_vsplit import state_scan_vsplit


class CodeObjectStages:
    """``ops.backends.TPrimeStages`` by launches of code objects; ``bind_state_scan`` is for calls of K5 that repeat."""

    def __init__(self, launcher_for: LauncherFor) -> None:
        self.kernels = Kernels(launcher_for)
        self.l2norm = functools.partial(l2norm, self.kernels)
        self.prepare = functools.partial(prepare, self.kernels)
        self.prepare_t = functools.partial(prepare_t, self.kernels)
        self.state_scan = functools.partial(state_scan, self.kernels)
        self.state_scan_vsplit = functools.partial(state_scan_vsplit, self.kernels)
        self.bind_state_scan = functools.partial(bind_state_scan, self.kernels)
        self.new_state_stride = new_state_stride
        self.slot_bytes = slot_bytes
        self.output = functools.partial(output, self.kernels)

    def ready(self, device: torch.device, *specs: KernelSpec) -> None:
        """Have the kernels of ``specs`` at hand, or raise as ``codeobject.code_object`` and the launcher do."""
        for spec in specs:
            self.kernels(spec, device)


@functools.cache
def _emulator(arch: str) -> Launcher:
    # Here: whoever launches on a GPU has no emulator.
    from ..emulate import EmulatorLauncher

    return EmulatorLauncher(arch)


@functools.cache
def _hip(arch: str, device: torch.device) -> Launcher:
    from ..hip import HipLauncher

    return HipLauncher(device, arch=arch)


EMULATE = CodeObjectStages(lambda spec, device: _emulator(spec.arch))
FLYDSL = CodeObjectStages(lambda spec, device: _hip(spec.arch, device))
