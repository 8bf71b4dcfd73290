"""Vocabulary shared by the Triton kernels of the block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ... import spec

if TYPE_CHECKING:
    from torch import Tensor

    from ...spec import Dtype

LOG2E = tl.constexpr(spec.LOG2E)
GATE_MIN = tl.constexpr(spec.GATE_MIN)
CHUNK = tl.constexpr(spec.CHUNK)
HEAD_DIM = tl.constexpr(spec.HEAD_DIM)


@triton.jit
def _probe():
    pass


# Not isinstance of InterpretedFunction: importing that module needs numpy, which a server need not have.
INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))
"""True when these kernels run under Triton's interpreter (TRITON_INTERPRET=1 when this module was imported)."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round an fp32 tile to ``dtype``, to nearest even. The interpreter (3.6 to 3.9) truncates to bf16, subnormal
    numbers wrongly, so there the bits are rounded first; NaN keeps its own bits."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        carried = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, carried, x).to(tl.bfloat16)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b):
    """fp32 product of two 16-bit tiles. The interpreter multiplies the raw integers of bf16 operands, so there they are
    widened first: the same values, the same accumulation type."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def dot_add(a, b, acc):
    """acc + a b in fp32, accumulated by the matrix unit where there is one (see ``dot``)."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def exp2_gate(x, GATE_LOG2: tl.constexpr):
    """exp of a gate: x is in log2 units if GATE_LOG2, else a natural logarithm."""
    if GATE_LOG2:
        return tl.exp2(x)
    else:
        return tl.exp2(x * LOG2E)


def row_strides(x: Tensor) -> tuple[int, tuple[int, int, int]]:
    """(unit, (batch, token, head) strides in that unit) of rows x [B, T, heads, 128]: units of 8 elements if all
    strides and the address allow 16-byte accesses to 16-bit elements, else of 1. Strides grow with lengths, so a kernel
    must not be specialised on them; the unit keeps the one fact that its code depends on. The batch stride of
    a single batch row is never used and reads 0."""
    batch, token, head, _ = x.stride()
    if x.shape[0] <= 1:
        batch = 0
    if x.data_ptr() & 15 or (batch | token | head) & 7:
        return 1, (batch, token, head)
    return 8, (batch // 8, token // 8, head // 8)


TRITON_DTYPE: dict[Dtype, str] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""Triton's names of element types in a signature."""


@dataclass(frozen=True)
class CompileJob:
    """One code object: a kernel, the types of its run-time arguments, the values of its constants, its launch options.

    ``aligned`` lists the positions of the pointers that a launch finds on 16-byte addresses, as torch allocates.
    """

    fn: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    num_warps: int
    num_stages: int

    @staticmethod
    def of(
        fn: Any, types: Mapping[str, str], constants: Mapping[str, Any], num_warps: int, num_stages: int
    ) -> CompileJob:
        """The job of ``fn``. ``types`` gives its arguments without an annotation, ``constants`` its constexprs; both
        may name arguments of sibling kernels. Raises KeyError for an argument that neither knows."""
        signature: dict[str, str] = {}
        aligned = []
        for position, parameter in enumerate(fn.params):
            name = parameter.name
            if parameter.is_constexpr:
                signature[name] = "constexpr"
            else:
                signature[name] = parameter.annotation_type or types[name]
                if signature[name].startswith("*") and not parameter.do_not_specialize_on_alignment:
                    aligned.append(position)
        values = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
        return CompileJob(fn, signature, values, tuple(aligned), num_warps, num_stages)
