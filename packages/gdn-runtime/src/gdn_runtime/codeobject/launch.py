"""Launching a code object: one interface for every launcher, and the packing of kernel arguments."""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

from torch import Tensor

from ..errors import type_error, value_error
from ..spec import ArgumentKind, KernelSpec
from .facts import CodeObject, LaunchFacts
from .source import code_object

Grid: TypeAlias = tuple[int, int, int]
Value: TypeAlias = Tensor | int | float | None
"""Pointers take a tensor (its first element), None (null) or an address; numbers an int, a bool or a float."""

_FORMAT: dict[ArgumentKind, str] = {"pointer": "Q", "i32": "i", "i64": "q", "f32": "f"}
_EXPECTED: dict[ArgumentKind, str] = {
    "pointer": "a tensor, None or an address",
    "i32": "an int that fits 32 bits",
    "i64": "an int that fits 64 bits",
    "f32": "a float or an int",
}
_NUMBERS = frozenset((int, float, bool))
_ALLOWED: dict[ArgumentKind, tuple[type, ...]] = {
    "pointer": (int,),
    "i32": (int, bool),
    "i64": (int, bool),
    "f32": (int, bool, float),
}


class Packer:
    """Packs the arguments of one kernel into its kernarg segment; what follows the arguments is zero.

    TypeError or ValueError with name, got and expected for arguments that do not fit.
    """

    def __init__(self, facts: LaunchFacts) -> None:
        self._facts = facts
        form, end = "<", 0
        for argument in facts.arguments:
            form += f"{argument.offset - end}x" * (argument.offset > end) + _FORMAT[argument.kind]
            end = argument.offset + argument.size
        self._struct = struct.Struct(form + f"{facts.kernarg_bytes - end}x" * (facts.kernarg_bytes > end))
        assert self._struct.size == facts.kernarg_bytes
        self.pointers = sum(argument.kind == "pointer" for argument in facts.arguments)

    def __call__(self, args: Sequence[Value]) -> bytes:
        """The bytes of the segment."""
        # Most of the time is data_ptr(). No isinstance: of anything but a tensor it costs more than data_ptr().
        count = self.pointers
        numbers = args[count:]
        try:
            pointers = [0 if x is None else x.data_ptr() for x in args[:count]]  # type: ignore[union-attr]
            # struct takes all that has __index__, a tensor too, by copying it to the host.
            if _NUMBERS.issuperset(map(type, numbers)):
                return self._struct.pack(*pointers, *numbers)
        except (AttributeError, OverflowError, struct.error):
            pass
        return self._struct.pack(*self._checked(args))

    def numbers(self, numbers: Sequence[int | float]) -> bytes:
        """The bytes of the segment from behind the pointers on, for calls whose numbers do not change: the addresses, 8
        bytes each, go before them."""
        return self([*(None,) * self.pointers, *numbers])[8 * self.pointers :]

    def _checked(self, args: Sequence[Any]) -> list[int | float]:
        """The values to pack, one by one, addresses among them; the error if one does not fit."""
        symbol, arguments = self._facts.symbol, self._facts.arguments
        if len(args) != len(arguments):
            names = ", ".join(argument.name for argument in arguments)
            raise value_error(f"arguments of {symbol}", len(args), f"{len(arguments)}: {names}")
        values: list[int | float] = []
        for argument, given in zip(arguments, args, strict=True):
            name, expected, value = f"{symbol}: {argument.name}", _EXPECTED[argument.kind], given
            if argument.kind == "pointer":
                value = 0 if given is None else given.data_ptr() if isinstance(given, Tensor) else given
            if type(value) not in _ALLOWED[argument.kind]:
                raise type_error(name, repr(given)[:80], expected)
            try:
                struct.pack("<" + _FORMAT[argument.kind], value)
            except (struct.error, OverflowError):
                raise value_error(name, repr(value), expected) from None
            values.append(value)
        return values


class LoadedKernel(ABC):
    """A kernel that is ready to launch."""

    def __init__(self, code: CodeObject) -> None:
        self.code = code
        self.pack = Packer(code.facts)

    def __call__(self, grid: Grid, args: Sequence[Value]) -> None:
        """Launch ``grid`` workgroups (x, y, z; none of them 0) with the arguments of the spec, in their order."""
        self.launch(grid, self.pack(args), args)

    @abstractmethod
    def launch(self, grid: Grid, kernarg: bytes, args: Sequence[Value]) -> None:
        """``__call__`` with arguments that ``pack`` packed; the tensors behind them are in ``args``."""


class Launcher(ABC):
    """Loads and launches code objects of one architecture on one device. Thread safe."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._lock = threading.RLock()
        self._by_code: dict[CodeObject, LoadedKernel] = {}
        self._by_spec: dict[KernelSpec, LoadedKernel] = {}

    def kernel(self, spec: KernelSpec) -> LoadedKernel:
        """The kernel of ``spec``: found, made or refused as ``code_object`` does, and loaded once."""
        kernel = self._by_spec.get(spec)
        if kernel is None:
            kernel = self._by_spec[spec] = self.load(code_object(spec))
        return kernel

    def load(self, code: CodeObject) -> LoadedKernel:
        """The kernel of ``code``, loaded once. ValueError for code of another architecture."""
        if code.facts.arch != self.arch:
            raise value_error(f"code object of {code.spec.kernel}", code.facts.arch, f"code for {self.arch}")
        with self._lock:
            kernel = self._by_code.get(code)
            if kernel is None:
                kernel = self._by_code[code] = self._load(code)
            return kernel

    @abstractmethod
    def _load(self, code: CodeObject) -> LoadedKernel:
        """Load ``code``, for the first time; the lock is held."""

    def close(self) -> None:
        """Forget what was loaded; a kernel must not be launched afterwards."""
        with self._lock:
            self._by_code.clear()
            self._by_spec.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_grid(grid: Grid, symbol: str) -> None:
    """ValueError unless there are three positive extents."""
    x, y, z = grid
    if x <= 0 or y <= 0 or z <= 0:
        raise value_error(f"grid of {symbol}", grid, "three positive extents: launch nothing for nothing")
