"""Vocabulary shared by the Triton kernels of paged decode."""

from __future__ import annotations

import triton
import triton.language as tl

from gdn_runtime.kernels.triton.common import INTERPRETED

from ...traits import TILE

TILE_TOKENS = tl.constexpr(TILE)

FP8_POINTER = {"fn": "*fp8e4nv", "fnuz": "*fp8e4b8"}
"""Triton's names of pointers to the flavours of E4M3."""


@triton.jit
def fp8_round(x, dtype: tl.constexpr, FP8_MAX: tl.constexpr, SMALLEST: tl.constexpr):
    """``x`` fp32, no larger in magnitude than rounds to ``FP8_MAX``, in FP8 to nearest even. The interpreter (3.6 to
    3.9) loses the carry of that rounding, so there the result is the rounded value in fp32; see ``fp8_dot``."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        # The last place of subnormal numbers is an eighth of the smallest normal one; 1.5 2^23 places are exact.
        anchor: tl.constexpr = SMALLEST / 8 * 1.5 * 2.0**23
        return tl.where(tl.abs(x) < SMALLEST, (x + anchor) - anchor, normal)
    else:
        return x.to(dtype)


@triton.jit
def fp8_dot(a, b):
    """fp32 product of two tiles of FP8, which the interpreter multiplies in fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def fp8_dot_add(a, b, acc):
    """acc + a b, by the matrix unit; see ``fp8_dot``."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
