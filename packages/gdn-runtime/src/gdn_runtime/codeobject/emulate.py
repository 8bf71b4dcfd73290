"""Launches code objects on a CPU, with cdna-emu: for tests, and for looking at what a kernel does."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import EmulatedFaultError, value_error
from .facts import CodeObject
from .launch import Grid, Launcher, LoadedKernel, Value, check_grid

FINDINGS_SHOWN = 5

_collectors: list[list[Any]] = []


class EmulatorLauncher(Launcher):
    """Runs kernels of ``arch`` on tensors in CPU memory, every check of the emulator on.

    A kernel may touch the elements of the tensors that it is given and nothing else. ``options`` go to
    ``cdna_emu.launch``: order, seed, threads, budget. ImportError if cdna-emu is not installed.
    """

    def __init__(self, arch: str, **options: Any) -> None:
        super().__init__(arch)
        self._emulator = emulator()
        self._options = options

    def _load(self, code: CodeObject) -> LoadedKernel:
        return _EmulatedKernel(code, self._emulator, self._options)


class _EmulatedKernel(LoadedKernel):
    def __init__(self, code: CodeObject, emulator: Any, options: dict[str, Any]) -> None:
        super().__init__(code)
        self._emulator, self._options = emulator, options

    def launch(self, grid: Grid, kernarg: bytes, args: Sequence[Value]) -> None:
        """Run the kernel to its end. EmulatedFaultError if the emulator finds anything wrong."""
        facts = self.code.facts
        check_grid(grid, facts.symbol)
        result = self._emulator.launch(
            self.code.elf,
            kernel=facts.symbol,
            grid=grid,
            block=facts.block,
            kernarg=kernarg,
            ranges=[memory_range(arg) for arg in args if isinstance(arg, Tensor) and arg.numel()],
            dynamic_lds=facts.dynamic_lds,
            arch=facts.arch,
            **self._options,
        )
        for collector in _collectors:
            collector.append(result)
        if result.report:
            shown = "\n".join(str(finding) for finding in result.report[:FINDINGS_SHOWN])
            raise EmulatedFaultError(facts.symbol, len(result.report) + result.report.dropped, shown, result.report)


@contextmanager
def collect_results() -> Iterator[list[Any]]:
    """While this is open, the ``cdna_emu.Result`` of every launch of this process is appended to the list."""
    results: list[Any] = []
    _collectors.append(results)
    try:
        yield results
    finally:
        del _collectors[next(k for k, entry in enumerate(_collectors) if entry is results)]


def memory_range(tensor: Tensor) -> tuple[int, int, bool]:
    """(address, bytes, writable) from the first to the last element of a tensor that has elements."""
    if tensor.device.type != "cpu":
        raise value_error("argument of an emulated kernel", f"a tensor on {tensor.device}", "one on the CPU")
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), True


@functools.cache
def emulator() -> Any:
    """The module ``cdna_emu``. ImportError that says what to install if there is none."""
    # By name: production has no emulator, and must not look for one.
    try:
        return importlib.import_module("cdna_emu")
    except ModuleNotFoundError as error:
        if error.name != "cdna_emu":
            raise
        raise ImportError(
            "the emulator is not installed: pip install cdna-emu, or gdn-runtime[emulate]", name="cdna_emu"
        ) from error
