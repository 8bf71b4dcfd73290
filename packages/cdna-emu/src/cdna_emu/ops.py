"""The opcode table that the C core is compiled from: `core/ops.def` and what it includes, in the same order."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

ARCHS = {"gfx942": 1, "gfx950": 2}  # bits of ON_942, ON_950 in core.h
ARCH_NUMBERS = {"gfx942": 0, "gfx950": 1}  # enum Arch
UNKNOWN = 0xFFFF  # Insn.op of what the core cannot run

_ON = {"ON_942": 1, "ON_950": 2, "ON_BOTH": 3}
_LINE = re.compile(r'OP\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)\s*\)|#include\s+"([^"]+)"')
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Op:
    """An opcode of the core."""

    name: str
    number: int  # enum Op
    unit: str  # enum Unit
    archs: int

    def on(self, arch: str) -> bool:
        return bool(self.archs & ARCHS[arch])


def _entries(folder: Traversable, name: str) -> Iterator[tuple[str, str, str]]:
    text = _COMMENT.sub("", folder.joinpath(name).read_text(encoding="utf-8"))
    for match in _LINE.finditer(text):
        op, unit, archs, include = match.groups()
        if include is not None:
            yield from _entries(folder, include)
        else:
            yield op, unit, archs


@functools.cache
def table() -> dict[str, Op]:
    """Opcodes by mnemonic (no encoding suffix). FileNotFoundError if a part of the table is not installed."""
    ops: dict[str, Op] = {}
    for number, (name, unit, archs) in enumerate(_entries(files(__package__) / "core", "ops.def")):
        if name in ops:
            raise ValueError(f"ops.def: {name} is defined twice")
        ops[name] = Op(name, number, unit, _ON[archs])
    return ops
