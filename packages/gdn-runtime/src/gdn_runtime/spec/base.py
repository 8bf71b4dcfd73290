"""What all specs share: constants of the kernels, names of types and backends, kernel arguments, legality helpers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from ..errors import UnsupportedError

KERNEL_ABI = 1
"""Raised whenever the arguments or the meaning of a kernel of this package, or how code objects are launched, change; a
code object of another ABI is refused. Other packages have a number of their own, a field of their specs."""

HEAD_DIM = 128
"""K = V, the only head size of the GDN kernels."""

CHUNK = 64
"""Tokens per chunk (BT), the only chunk size of the kernels."""

GATE_MIN = -128.0
"""Least log gate of a token, natural logarithm. exp(-128) is 0 beside anything that fp32 holds to 1e-7, and a finite
floor keeps a gate of -inf from giving (-inf) - (-inf) inside its chunk."""

LOG2E = 1.4426950408889634
"""log2(e): gates in log2 units are natural ones times this."""

Backend = Literal["reference", "triton", "flydsl", "emulate"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""Implementations of the stages; ``ops.backends`` knows the module of each."""
CODE_OBJECT_BACKENDS: frozenset[Backend] = frozenset(("flydsl", "emulate"))
"""Those that launch AMD code objects: on a GPU, or on CPU tensors through cdna-emu."""

Dtype = Literal["bf16", "fp16", "fp32"]

ArgumentKind = Literal["pointer", "i32", "i64", "f32"]
ARGUMENT_BYTES: dict[ArgumentKind, int] = {"pointer": 8, "i32": 4, "i64": 8, "f32": 4}


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in the order in which the code object takes them."""

    name: str
    kind: ArgumentKind


Language = Literal["flydsl", "triton", "gluon"]
"""What a kernel is written in. Code objects for AMD GPUs come from the first two."""


class KernelSpec(Protocol):
    """A spec that is the key of one code object: a frozen dataclass of plain fields, in any package.

    Its kernel is found by name: module ``kernels.<language>.<kernel>`` of the package of its class, with
    ``build(spec)`` -> (``@flyc.jit`` launcher, example arguments) for FlyDSL, ``compile_jobs(spec)`` -> one CompileJob
    for Triton. The kernel's parameters are ``ARGUMENTS``.
    """

    @property
    def language(self) -> Language:
        """Where its source is: the module of ``kernel`` in ``kernels.<language>`` of the package of the spec."""

    @property
    def kernel(self) -> str:
        """Name of the kernel and of the module that builds it."""

    @property
    def arch(self) -> str:
        """gfx942 or gfx950."""

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of a workgroup."""

    @property
    def ARGUMENTS(self) -> tuple[Argument, ...]:
        """What a launch passes, in the order of the kernarg segment."""

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""


def arguments(*, pointers: str = "", i64: str = "", i32: str = "", f32: str = "") -> tuple[Argument, ...]:
    """Arguments by kind, names apart by spaces; wide kinds first, so that the segment has no holes."""
    kinds: tuple[tuple[ArgumentKind, str], ...] = (("pointer", pointers), ("i64", i64), ("i32", i32), ("f32", f32))
    return tuple(Argument(name, kind) for kind, names in kinds for name in names.split())


def check_heads(num_heads: int, num_key_heads: int) -> None:
    """UnsupportedError unless H is a positive multiple of Hg."""
    if num_key_heads <= 0 or num_heads <= 0 or num_heads % num_key_heads:
        got = f"H={num_heads} value heads, Hg={num_key_heads} key heads"
        raise UnsupportedError("heads", got=got, supported=["H a positive multiple of Hg"])


def check_member(name: str, got: object, supported: tuple[object, ...]) -> None:
    """UnsupportedError that lists ``supported`` unless ``got`` is one of them."""
    if got not in supported:
        raise UnsupportedError(name, got=got, supported=supported)
