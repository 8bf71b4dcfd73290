"""Global memory of the FlyDSL kernels: buffer resources with exact bounds, and scalar loads.

Addresses are 64-bit integers (``fx.Int64``), uniform over the wave: a descriptor lives in scalar registers. Offsets
within a buffer are 32-bit bytes. A constant below 4096 added to an offset becomes the immediate of the instruction.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import Vector

GLOBAL, CONSTANT, RESOURCE = 1, 4, 8
"""LLVM address spaces of AMDGPU."""

_RAW_DWORDS = (7 << 12) | (4 << 15)
"""Word 3 of a resource on gfx9: raw bytes, 32-bit data; swizzling off."""


def _value(x: object) -> ir.Value:
    return x.ir_value() if hasattr(x, "ir_value") else x


def pointer(address: fx.Int64, space: int = GLOBAL) -> ir.Value:
    """The LLVM pointer of an address."""
    return llvm.inttoptr(ir.Type.parse(f"!llvm.ptr<{space}>"), fx.Int64(address).ir_value())


def scalar_load(address: fx.Int64, byte_offset: object = 0, kind: type = fx.Int32) -> object:
    """One ``kind`` (Int32 or Int64) at a uniform address, which no kernel in flight writes: ``s_load``."""
    at = fx.Int64(address) + fx.Int64(byte_offset)
    loaded = llvm.load(kind.ir_type, pointer(at, CONSTANT), alignment=kind.width // 8, invariant=True)
    return kind(loaded)


def offset64(count: object, stride: object) -> fx.Int64:
    """``count * stride`` bytes in 64 bits. An Int32 counts as unsigned, which saves two scalar multiplications."""
    return _unsigned64(count) * _unsigned64(stride)


def _unsigned64(x: object) -> fx.Int64:
    return fx.Int64(fx.Uint32(x)) if isinstance(x, fx.Int32) else fx.Int64(x)


class Buffer:
    """``num_bytes`` (Int32, unsigned, uniform) from ``address`` on: loads past them give 0, stores are dropped.

    The check covers the per-lane offset and the immediate. Leave ``scalar`` at 0 where the check matters: compilers and
    manuals do not agree whether it counts. Every row or block that must be cut gets its own ``Buffer`` or its offset in
    ``offset``.
    """

    def __init__(self, address: fx.Int64, num_bytes: object) -> None:
        self.resource = rocdl.make_buffer_rsrc(
            ir.Type.parse(f"!llvm.ptr<{RESOURCE}>"),
            pointer(address),
            fx.Int16(0).ir_value(),
            fx.Int64(fx.Uint32(num_bytes)).ir_value(),
            fx.Int32(_RAW_DWORDS).ir_value(),
        )

    def load(self, offset: object, dwords: int = 1, *, scalar: object = 0, policy: int = 0) -> object:
        """``dwords`` (1, 2, 3, 4) at a byte offset: Int32 or a vector of them. ``policy``: cache bits of the ISA."""
        kind = ir.IntegerType.get_signless(32)
        loaded = self._load(kind if dwords == 1 else ir.VectorType.get([dwords], kind), offset, scalar, policy)
        return fx.Int32(loaded) if dwords == 1 else Vector(loaded, (dwords,), fx.Int32)

    def load_half(self, offset: object, *, scalar: object = 0, policy: int = 0) -> fx.Uint32:
        """16 bits at a byte offset, zero-extended: ``buffer_load_ushort``."""
        loaded = self._load(ir.IntegerType.get_signless(16), offset, scalar, policy)
        return fx.Uint32(fx.Uint16(loaded))

    def _load(self, kind: ir.Type, offset: object, scalar: object, policy: int) -> ir.Value:
        return rocdl.raw_ptr_buffer_load(
            kind, self.resource, fx.Int32(offset), fx.Int32(scalar), aux=policy if policy else None
        )

    def store(self, value: object, offset: object, *, scalar: object = 0, policy: int = 0) -> None:
        """Store a number (16 or 32 bits) or a vector (2, 3 or 4 dwords) at a byte offset."""
        bits = ir.IntegerType.get_signless(32)
        rocdl.raw_ptr_buffer_store(
            _value(value),
            self.resource,
            fx.Int32(offset).ir_value(),
            fx.Int32(scalar).ir_value(),
            aux=ir.IntegerAttr.get(bits, policy) if policy else None,
        )
