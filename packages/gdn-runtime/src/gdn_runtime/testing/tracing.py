"""A launcher that traces one workgroup of every launch on cdna-emu: for counts and for its timing model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..codeobject.emulate import emulator, memory_range
from ..codeobject.facts import CodeObject
from ..codeobject.launch import Grid, Launcher, LoadedKernel, Value


class TracingLauncher(Launcher):
    """Traces the workgroup ``group`` (x, y, z) of every launch for ``arch``, with every check on, in place of running
    all of them. ImportError if cdna-emu is not installed."""

    def __init__(self, arch: str, group: Sequence[int]) -> None:
        super().__init__(arch)
        self.group = group
        self._emulator = emulator()

    def _load(self, code: CodeObject) -> TracedKernel:
        return TracedKernel(code, self.group, self._emulator)


class TracedKernel(LoadedKernel):
    """``trace``: the ``cdna_emu`` trace of the last launch. ``spans``: its tensors' addresses, from the first byte to
    past the last, by name of the argument."""

    def __init__(self, code: CodeObject, group: Sequence[int], emulator: Any) -> None:
        super().__init__(code)
        self.group = group
        self.trace: Any = None
        self.spans: dict[str, tuple[int, int]] = {}
        self._emulator = emulator

    def launch(self, grid: Grid, kernarg: bytes, args: Sequence[Value]) -> None:
        """Trace the workgroup. AssertionError, with what they say, if a check of the emulator trips."""
        facts = self.code.facts
        # By address: what a launch is given beside the packed arguments need not be in their order.
        ranges = [memory_range(value) for value in args if isinstance(value, Tensor) and value.numel()]
        end = {start: start + size for start, size, _ in ranges}
        pointers = {a.name: int.from_bytes(kernarg[a.offset : a.offset + 8], "little") for a in facts.arguments}
        self.spans = {name: (start, end[start]) for name, start in pointers.items() if start in end}
        self.trace = self._emulator.trace_group(
            self.code.elf,
            kernel=facts.symbol,
            grid=grid,
            block=facts.block,
            kernarg=kernarg,
            ranges=ranges,
            dynamic_lds=facts.dynamic_lds,
            arch=facts.arch,
            group=self.group,
            checks=True,
        )
        if not self.trace.report.ok:
            raise AssertionError(str(self.trace.report))
