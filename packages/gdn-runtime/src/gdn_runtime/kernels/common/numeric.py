"""Numbers of the FlyDSL kernels: conversions by pairs, exponentials, byte permutations, fp16 products.

A pair is an Int32 that holds two 16-bit numbers, the first in the low half. ``arch`` is "gfx942" or "gfx950".
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import T, Vector

from .lanes import pack_truncated

HIGH_HALVES, LOW_HALVES = 0x07060302, 0x05040100
"""Selectors of ``permute``: the high (low) halves of both words, that of ``low`` in the low half."""


def exp2(x: fx.Float32) -> fx.Float32:
    """2^x: one ``v_exp_f32``; below -126 the result is denormal or 0."""
    return fx.Float32(rocdl.exp2(T.f32, fx.Float32(x).ir_value()))


def permute(high: fx.Int32, low: fx.Int32, selector: int) -> fx.Int32:
    """``v_perm_b32``: each byte of ``selector`` picks one of the bytes 0..3 of ``low`` or 4..7 of ``high``."""
    return fx.Int32(rocdl.perm_b32(fx.Int32(high), fx.Int32(low), fx.Int32(selector)))


def bits(x: fx.Float32) -> fx.Int32:
    """The bit pattern of an fp32."""
    return fx.Float32(x).bitcast(fx.Int32)


def bf16_pair_nearest(first: fx.Float32, second: fx.Float32) -> fx.Int32:
    """Both to nearest even, NaN kept: ``v_cvt_pk_bf16_f32`` on gfx950, about ten instructions on gfx942."""
    pair = Vector.from_elements([first, second], fx.Float32)
    rounded = arith.truncf(ir.VectorType.get([2], ir.BF16Type.get()), pair)
    return fx.Int32(llvm.bitcast(T.i32, rounded))


def half_up_words(values: Vector) -> Vector:
    """Bits of an even number of fp32 plus half a unit of bf16, so that their high halves are rounded to nearest, halves
    away from zero: one 64-bit addition per two registers side by side, on gfx942 (``v_lshl_add_u64``).

    A NaN whose upper mantissa bits are all ones turns to zero, and the carry of a negative one reaches its neighbour;
    MFMA and VALU return such a NaN only for such an operand.
    """
    pairs = values.bitcast(fx.Int64)
    return (pairs + Vector.filled(pairs.numel, 0x0000_8000_0000_8000, fx.Int64)).bitcast(fx.Int32)


def bf16_pair_half_up(first: fx.Float32, second: fx.Float32) -> fx.Int32:
    """Both to nearest, halves away from zero: two instructions on gfx942."""
    rounded = half_up_words(Vector.from_elements([first, second], fx.Float32))
    return permute(rounded[1], rounded[0], HIGH_HALVES)


def bf16_pair(first: fx.Float32, second: fx.Float32, rounding: str, arch: str) -> fx.Int32:
    """Both by the ``rounding`` of a spec, "truncate" or "nearest"; or "near", the cheapest rounding to nearest: one
    instruction on gfx950 (to even), two on gfx942 (halves up)."""
    if rounding == "truncate":
        return pack_truncated(first, second)
    if rounding == "near" and arch == "gfx942":
        return bf16_pair_half_up(first, second)
    return bf16_pair_nearest(first, second)


def fp16_pair(first: fx.Float32, second: fx.Float32) -> fx.Int32:
    """Both to fp16 toward zero, saturating below infinity: ``v_cvt_pkrtz_f16_f32``."""
    kind = ir.VectorType.get([2], ir.F16Type.get())
    pair = rocdl.cvt_pkrtz(kind, fx.Float32(first).ir_value(), fx.Float32(second).ir_value())
    return fx.Int32(llvm.bitcast(T.i32, pair))


def bf16_to_fp32(half: fx.Uint32) -> fx.Float32:
    """fp32 of a bf16 in the low half of a word whose high half may hold anything."""
    return fx.Float32((fx.Uint32(half) << fx.Uint32(16)).bitcast(fx.Float32))


def fp16_to_fp32(half: fx.Uint32) -> fx.Float32:
    """fp32 of an fp16 in the low half of a word."""
    narrow = fx.Uint16(fx.Uint32(half)).ir_value()
    return fx.Float32(arith.extf(T.f32, arith.bitcast(ir.F16Type.get(), narrow)))


def mfma_fp16(a: Vector, b: Vector, c: Vector) -> Vector:
    """c + a @ b, 16x16 fp32, of fp16: K = 16 for operands of 2 words (both architectures), K = 32 for operands of 4
    words (gfx950 only). Lane maps as in ``lanes``."""
    multiply = rocdl.mfma_f32_16x16x32_f16 if a.numel == 4 else rocdl.mfma_f32_16x16x16f16
    out = multiply(T.f32x4, [a.bitcast(fx.Float16).ir_value(), b.bitcast(fx.Float16).ir_value(), c.ir_value()])
    return Vector(out, (4,), fx.Float32)
