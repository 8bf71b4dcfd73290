"""LDS of a workgroup: regions, typed access by byte offset, barriers and the scheduler's fences."""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import Vector as Vec

ALIGNMENT = 16
"""Bytes; what lets an access of four words be one instruction."""

ALU, MFMA, VMEM_LOAD, VMEM_STORE, LDS_READ, LDS_WRITE = 0x006, 0x008, 0x020, 0x040, 0x100, 0x200
"""Classes of instructions of ``sched_fence`` and ``sched_group``; ALU: VALU and scalar."""


class Region:
    """A part of the workgroup's LDS. ``regions`` makes them."""

    def __init__(self, base):
        self._base = base

    def at(self, offset):
        """Where ``offset`` bytes (int32, a multiple of 4) into the region begin; kept in one register by accesses at
        constant distances from it."""
        return self._base + offset // fx.Int32(4)


def regions(*sizes):
    """One region per size in bytes (multiples of ``ALIGNMENT``), side by side. Once per kernel: FlyDSL takes one
    allocator of static LDS."""
    base = fx.SharedAllocator().allocate(sum(sizes), ALIGNMENT).peek().ptr
    base = fx.recast_iter(fx.Pointer[fx.Int32, fx.AddressSpace.Shared, ALIGNMENT].ir_type, base)
    return [Region(base + fx.Int32(sum(sizes[:i]) // 4)) for i in range(len(sizes))]


def read(place, count, distance=0):
    """``count`` words from ``distance`` bytes (Python ints) after ``place``, a Vec of int32. Aligned to their size."""
    return Vec(fx.ptr_load(_typed(place, count, distance), Vec.make_type(count, fx.Int32)), (count,), fx.Int32)


def write(value, place, distance=0):
    """Store the words of a Vec of int32 ``distance`` bytes after ``place``. Aligned to their size."""
    fx.ptr_store(value.ir_value(), _typed(place, value.numel, distance))


def _typed(place, count, distance):
    pointer = place + fx.Int32(distance // 4) if distance else place
    return fx.recast_iter(fx.Pointer[fx.Int32, fx.AddressSpace.Shared, 4 * count].ir_type, pointer)


def barrier():
    """All waves of the workgroup meet; their LDS accesses so far are done. Loads and stores of global memory are not
    waited for."""
    fx.gpu.barrier()


def sched_fence(crossing=0):
    """The compiler moves no instruction across this place, but for those of the class ``crossing``."""
    rocdl.sched_barrier(crossing)


def read_transposed(place, distance=0):
    """Four bf16 of a column, two words (gfx950). Lane i of a group of 16 names 8 bytes of row i // 4, columns from
    4 * (i % 4) on, and gets column i of these 4 x 16: its four rows in order."""
    kind = Vec.make_type(4, fx.BFloat16)
    loaded = rocdl.ds_read_tr16_b64(kind, fx.to_llvm_ptr(_typed(place, 2, distance))).result
    return Vec(loaded, (4,), fx.BFloat16).bitcast(fx.Int32)
