"""What a launch needs to know about a kernel's code, and the code itself.

The compile step reads the facts out of the ELF note once and keeps them as JSON, so that a launch parses no ELF.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from ..arch import parse_arch
from ..errors import value_error
from ..spec import ARGUMENT_BYTES, ArgumentKind, KernelSpec

WAVE = 64
MAX_BLOCK = 1024
NULL_POINTERS = 2
"""Triton ends the arguments of every kernel with this many pointers to scratch memory that these kernels do not use."""

_SPEC_MEMBERS = ("ARGUMENTS", "block", "check", "kernel", "language")
_COUNTS = ("lds_bytes", "dynamic_lds", "scratch_bytes", "vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills")


@dataclass(frozen=True)
class KernelArgument:
    """One argument in the kernarg segment: where it lies (bytes from the start), and its kind."""

    name: str
    kind: ArgumentKind
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return ARGUMENT_BYTES[self.kind]


@dataclass(frozen=True)
class LaunchFacts:
    """How to launch one kernel, and what it takes of a compute unit.

    ``symbol`` names the kernel in its code object. ``arguments`` fill the ``kernarg_bytes`` of the segment from the
    start, pointers first; two null pointers may follow. ``block`` is in work-items. ``lds_bytes`` is the LDS that the
    kernel declares and ``dynamic_lds`` what a launch adds, both per workgroup; ``scratch_bytes`` is per lane. ``vgprs``
    counts the unified file, of which ``agprs`` are accumulation registers; VGPR spills go to scratch, SGPR spills to
    lanes of a VGPR.
    """

    symbol: str
    arch: str
    kernarg_bytes: int
    arguments: tuple[KernelArgument, ...]
    block: tuple[int, int, int]
    lds_bytes: int
    dynamic_lds: int
    scratch_bytes: int
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int

    def __post_init__(self) -> None:
        """ValueError, with the field, what it holds and what it may hold, for facts that no kernel has."""
        if not self.symbol:
            raise value_error("facts.symbol", repr(self.symbol), "the name of a kernel")
        facts = parse_arch(self.arch, name="facts.arch")
        if facts.vendor != "amd":
            raise value_error("facts.arch", self.arch, "an AMD architecture")
        if len(self.block) != 3 or min(self.block) < 1 or self.threads > MAX_BLOCK:
            raise value_error("facts.block", self.block, f"three positive sizes, {MAX_BLOCK} work-items at most")
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise value_error(f"facts.{name}", getattr(self, name), "0 or more")
        if self.lds_bytes + self.dynamic_lds > facts.lds_bytes:
            got = f"{self.lds_bytes + self.dynamic_lds} bytes in {self.symbol}"
            raise value_error("LDS", got, f"at most the {facts.lds_bytes} bytes of {self.arch}")
        kinds = [argument.kind == "pointer" for argument in self.arguments]
        if kinds != sorted(kinds, reverse=True):
            got = ", ".join(f"{argument.name} {argument.kind}" for argument in self.arguments)
            raise value_error("facts.arguments", got, "pointers first")
        end = 0
        for argument in self.arguments:
            start = -(-end // argument.size) * argument.size
            if argument.offset != start:
                raise value_error(f"facts.arguments: offset of {argument.name}", argument.offset, str(start))
            end = start + argument.size
        even = -(-end // 8) * 8
        sizes = sorted({end, even, even + 8 * NULL_POINTERS})
        if self.kernarg_bytes not in sizes:
            raise value_error("facts.kernarg_bytes", self.kernarg_bytes, " or ".join(map(str, sizes)))

    @property
    def threads(self) -> int:
        """Work-items of a workgroup."""
        x, y, z = self.block
        return x * y * z

    def check(self, spec: KernelSpec) -> None:
        """Raise ValueError unless these are facts of a kernel for ``spec``: its architecture, block and arguments."""
        if self.arch != spec.arch:
            raise value_error(f"facts of {spec.kernel}: arch", self.arch, spec.arch)
        if self.block != spec.block:
            raise value_error(f"facts of {spec.kernel}: block", self.block, str(spec.block))
        got = [(argument.name, argument.kind) for argument in self.arguments]
        expected = [(argument.name, argument.kind) for argument in spec.ARGUMENTS]
        if got != expected:
            place, left, right = next(
                (k, left, right)
                for k, (left, right) in enumerate(zip([*got, None], [*expected, None], strict=False))
                if left != right
            )
            raise value_error(f"facts of {spec.kernel}: argument {place}", left or "none", str(right or "none"))

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``canonical_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The facts that ``to_json`` gave. ValueError for a missing, unknown or mistyped field."""
        expected = {f.name for f in fields(cls)}
        if set(values) != expected:
            raise value_error("facts", sorted(values), f"the fields {', '.join(sorted(expected))}")
        for name in ("kernarg_bytes", *_COUNTS):
            _require(values[name], int, f"facts.{name}")
        for name in ("symbol", "arch"):
            _require(values[name], str, f"facts.{name}")
        for name in ("arguments", "block"):
            _require(values[name], (list, tuple), f"facts.{name}")
        block = tuple(_require(size, int, "facts.block") for size in values["block"])
        arguments = tuple(map(_argument, values["arguments"]))
        return cls(**{**values, "arguments": arguments, "block": block})


def _argument(values: Any) -> KernelArgument:
    _require(values, dict, "facts.arguments")
    kind = values.get("kind")
    if set(values) != {"name", "kind", "offset"} or not isinstance(kind, str) or kind not in ARGUMENT_BYTES:
        raise value_error("facts.arguments", values, f"name, offset and a kind of {', '.join(ARGUMENT_BYTES)}")
    return KernelArgument(
        _require(values["name"], str, "argument name"), values["kind"], _require(values["offset"], int, "offset")
    )


def _require(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    # bool is an int to Python, but no count.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise value_error(name, repr(value), "another type of value")
    return value


def canonical_json(values: Any) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces, one line, ASCII."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def spec_json(spec: KernelSpec) -> dict[str, Any]:
    """``spec`` as plain values: its class ("module:Name") and its fields. Equal specs give equal values."""
    assert is_dataclass(spec) and not isinstance(spec, type)
    kind = type(spec)
    return {"spec": f"{kind.__module__}:{kind.__qualname__}", **asdict(spec)}


def is_foreign(values: Mapping[str, Any]) -> bool:
    """Whether the spec that ``spec_json`` described is of a package that this process has not imported."""
    name = values.get("spec")
    return isinstance(name, str) and re.split("[.:]", name)[0] not in sys.modules


def spec_from_json(values: Mapping[str, Any]) -> KernelSpec:
    """The spec that ``spec_json`` described. Imports nothing: its class must be in a module that was imported.

    Raises ValueError for a class that is no spec of a code object, and for a missing, unknown or mistyped field. What
    kernels exist for, ``check`` says.
    """
    name = values.get("spec")
    module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    kind = getattr(sys.modules.get(module), attribute, None) if attribute else None
    if not isinstance(kind, type) or not is_dataclass(kind) or not all(hasattr(kind, x) for x in _SPEC_MEMBERS):
        raise value_error("class of a spec", repr(name), "module:Name of a spec of code objects that was imported")
    spec: KernelSpec = _construct(kind, {key: value for key, value in values.items() if key != "spec"})
    return spec


def _construct(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    if set(values) != set(hints):
        raise value_error(f"fields of {kind.__name__}", sorted(values), ", ".join(hints))
    found = {}
    for name, hint in hints.items():
        value = values[name]
        if is_dataclass(hint):
            found[name] = _construct(hint, _require(value, dict, f"{kind.__name__}.{name}"))
        elif get_origin(hint) is Literal:
            if not any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
                raise value_error(
                    f"{kind.__name__}.{name}", repr(value), f"one of {', '.join(map(str, get_args(hint)))}"
                )
            found[name] = value
        elif type(value) is not hint:
            raise value_error(f"{kind.__name__}.{name}", repr(value), f"a value of type {hint.__name__}")
        else:
            found[name] = value
    return kind(**found)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def spec_text(spec: KernelSpec) -> str:
    """``spec`` for a message: the kernel and its fields."""
    assert is_dataclass(spec) and not isinstance(spec, type)
    values = " ".join(f"{name}={value}" for name, value in asdict(spec).items())
    return f"{spec.kernel} ({values})"


@dataclass(frozen=True)
class CodeObject:
    """The code of one spec: the bytes of an AMD ELF file with one kernel, and the facts of that kernel.

    ``digest`` is the sha256 of the bytes, in hexadecimal. ValueError if the facts do not fit the spec.
    """

    spec: KernelSpec
    facts: LaunchFacts
    elf: bytes = field(repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.facts.check(self.spec)
        object.__setattr__(self, "digest", hashlib.sha256(self.elf).hexdigest())
