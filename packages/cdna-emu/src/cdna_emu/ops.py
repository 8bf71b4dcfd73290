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
_LINE = re.compile(
    r'^\s*(?:OP\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)\s*\)|MATRIX\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)|#include\s+"([^"]+)")',
    re.MULTILINE,
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Op:
    """An opcode of the core."""

    name: str
    number: int  # enum Op
    unit: str  # enum Unit
    archs: int
    passes: tuple[int, int] = (0, 0)  # of a matrix instruction, on gfx942 and gfx950

    def on(self, arch: str) -> bool:
        return bool(self.archs & ARCHS[arch])


def _entries(folder: Traversable, name: str) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    text = _COMMENT.sub("", folder.joinpath(name).read_text(encoding="utf-8"))
    for match in _LINE.finditer(text):
        op, unit, archs, matrix, old, new, include = match.groups()
        if include is not None:
            yield from _entries(folder, include)
        elif matrix is not None:
            yield matrix, "MFMA", (int(old) > 0) | (int(new) > 0) << 1, (int(old), int(new))
        else:
            yield op, unit, _ON[archs], (0, 0)


@functools.cache
def table() -> dict[str, Op]:
    """Opcodes by mnemonic (no encoding suffix). FileNotFoundError if a part of the table is not installed."""
    ops: dict[str, Op] = {}
    for number, (name, unit, archs, passes) in enumerate(_entries(files(__package__) / "core", "ops.def")):
        if name in ops:
            raise ValueError(f"ops.def: {name} is defined twice")
        ops[name] = Op(name, number, unit, archs, passes)
    return ops


def fingerprint() -> int:
    """Of names and order, as the core makes it (FNV-1a, 32 bits): a core of other opcodes must not be used."""
    value = 0x811C9DC5
    for name in table():
        for byte in name.encode() + b"\0":
            value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
