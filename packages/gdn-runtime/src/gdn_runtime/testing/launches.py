"""A launcher that launches nothing and needs no code: what would be launched, and what it costs to get there."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..codeobject.facts import CodeObject, KernelArgument, LaunchFacts
from ..codeobject.launch import Grid, Launcher, LoadedKernel, Value
from ..codeobject.stages.backend import EMULATE
from ..spec import ARGUMENT_BYTES, KernelSpec

_FORMAT = {"pointer": "Q", "i32": "i", "i64": "q", "f32": "f"}


def facts_of(spec: KernelSpec) -> LaunchFacts:
    """Facts with the arguments and the block of ``spec`` and nothing else of interest."""
    arguments, end = [], 0
    for argument in spec.ARGUMENTS:
        size = ARGUMENT_BYTES[argument.kind]
        start = -(-end // size) * size
        arguments.append(KernelArgument(argument.name, argument.kind, start))
        end = start + size
    return LaunchFacts(
        symbol=spec.kernel,
        arch=spec.arch,
        kernarg_bytes=-(-end // 8) * 8,
        arguments=tuple(arguments),
        block=spec.block,
        lds_bytes=0,
        dynamic_lds=0,
        scratch_bytes=0,
        vgprs=1,
        agprs=0,
        sgprs=16,
        vgpr_spills=0,
        sgpr_spills=0,
    )


@dataclass(frozen=True)
class Launch:
    """One launch that did not happen."""

    spec: KernelSpec
    grid: Grid
    kernarg: bytes

    def values(self) -> dict[str, int | float]:
        """Arguments by name, pointers as addresses."""
        return {
            argument.name: struct.unpack_from("<" + _FORMAT[argument.kind], self.kernarg, argument.offset)[0]
            for argument in facts_of(self.spec).arguments
        }


class NoLauncher(Launcher):
    """``launches`` holds what was asked for, if it is to be kept."""

    def __init__(self, arch: str, launches: list[Launch] | None = None) -> None:
        super().__init__(arch)
        self.launches = launches

    def kernel(self, spec: KernelSpec) -> LoadedKernel:
        return self.load(CodeObject(spec, facts_of(spec), b""))

    def _load(self, code: CodeObject) -> LoadedKernel:
        return NoKernel(code) if self.launches is None else RecordedKernel(code, self.launches)


class NoKernel(LoadedKernel):
    """Does nothing."""

    def launch(self, grid: Grid, kernarg: bytes, args: Sequence[Value]) -> None:
        """Nothing."""


class RecordedKernel(LoadedKernel):
    """Does nothing but say so."""

    def __init__(self, code: CodeObject, launches: list[Launch]) -> None:
        super().__init__(code)
        self._launches = launches

    def launch(self, grid: Grid, kernarg: bytes, args: Sequence[Value]) -> None:
        """Appends to the list."""
        self._launches.append(Launch(self.code.spec, grid, kernarg))


@contextmanager
def launching_nothing(*, record: bool = True) -> Iterator[list[Launch]]:
    """While this is open, the backend "emulate" launches nothing, and says what it would have launched."""
    launches: list[Launch] = []
    kernels = EMULATE.kernels
    before = kernels.launcher_for
    kernels.clear()
    kernels.launcher_for = lambda spec, device: NoLauncher(spec.arch, launches if record else None)
    try:
        yield launches
    finally:
        kernels.launcher_for = before
        kernels.clear()
