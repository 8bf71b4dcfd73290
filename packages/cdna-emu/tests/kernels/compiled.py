"""Code objects of Triton kernels for an AMD GPU, made without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WAVE = 64
ARCHS = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Compiled:
    """A code object: its bytes, its assembly, the LDS that a launch adds to the static one, threads per block."""

    name: str
    arch: str
    elf: bytes
    assembly: str
    dynamic_lds: int
    threads: int


def compile_kernel(
    fn: Any,
    arch: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: tuple[int, ...] | None = None,
    small: tuple[int, ...] = (),
    num_warps: int = 4,
    num_stages: int = 2,
    **options: Any,
) -> Compiled:
    """Compile ``fn`` once per process. ``signature`` gives the types of the run-time arguments by name; ``aligned``
    lists the positions of arguments divisible by 16 (default: the pointers), ``small`` those of pointers to less than
    2 GiB, which Triton reaches through buffer resources."""
    full = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    if aligned is None:
        aligned = tuple(k for k, kind in enumerate(full.values()) if kind.startswith("*"))
    return _compile(
        fn,
        arch,
        tuple(full.items()),
        tuple(sorted(constants.items())),
        aligned,
        small,
        tuple(sorted({"num_warps": num_warps, "num_stages": num_stages, **options}.items())),
    )


@cache
def _compile(
    fn: Any,
    arch: str,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    aligned: tuple[int, ...],
    small: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
) -> Compiled:
    attributes: dict[tuple[int, ...], list[list[Any]]] = {
        (position,): [["tt.divisibility", 16]] for position in aligned
    }
    for position in small:
        attributes.setdefault((position,), []).append(["tt.pointer_range", 32])
    source = ASTSource(
        fn=fn,
        signature=dict(signature),
        constexprs={(fn.arg_names.index(name),): value for name, value in constants},
        attrs=attributes,
    )
    binary = triton.compile(source, target=GPUTarget("hip", arch, WAVE), options=dict(options))
    assembly = binary.asm["amdgcn"]
    static_lds = re.search(r"\.group_segment_fixed_size:\s+(\d+)", assembly)
    if static_lds is None:
        raise RuntimeError(
            f"assembly of {fn.__name__}: got no .group_segment_fixed_size, expected the metadata of one kernel"
        )
    return Compiled(
        name=binary.metadata.name,
        arch=arch,
        elf=binary.asm["hsaco"],
        assembly=assembly,
        dynamic_lds=binary.metadata.shared - int(static_lds[1]),
        threads=binary.metadata.num_warps * WAVE,
    )
