"""The kernel of ``gdn_testing.probe.ProbeSpec``."""

import time

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import T

from gdn_testing.probe import ProbeSpec

LDS_FLOATS = {"gfx942": 20 * 1024, "gfx950": 45 * 1024}
"""More than a workgroup may have, but no more than the compiler accepts without an exception."""


def build(spec: ProbeSpec):
    if spec.deed == "sleep":
        time.sleep(600)
    if spec.deed == "raise":
        raise KeyError("the probe was told to raise")
    if spec.deed == "take 3 GiB":
        bytearray(3 << 30)

    @fx.struct
    class Shared:
        values: fx.Array[fx.Float32, LDS_FLOATS[spec.arch], 16]

    @flyc.kernel(known_block_size=list(spec.block))
    def probe(source: fx.Int64, target: fx.Int64, shift: fx.Int64, count: fx.Int32, factor: fx.Float32):
        lane = fx.thread_idx.x + fx.block_idx.x * fx.Int32(64)
        if lane < count:
            kind = fx.PointerType.get(T.f32, fx.AddressSpace.Global, 4)
            loads = fx.inttoptr(kind, source + (fx.Int64(lane) + shift) * fx.Int64(4))
            stores = fx.inttoptr(kind, target + fx.Int64(lane) * fx.Int64(4))
            value = fx.ptr_load(loads) * factor
            if fx.const_expr(spec.deed == "lds over the limit"):
                shared = fx.SharedAllocator().allocate(Shared).peek()
                cell = shared.values.view(fx.make_layout(LDS_FLOATS[spec.arch], 1))
                cell[lane] = value
                fx.gpu.barrier()
                value = cell[fx.Int32(LDS_FLOATS[spec.arch] - 1) - lane]
            if fx.const_expr(spec.deed == "wrong arch"):
                value = value + fx.Float32(fx.Int32(rocdl.wave_id()))
            fx.ptr_store(value, stores)

    @flyc.jit
    def launch(source: fx.Int64, target: fx.Int64, shift: fx.Int64, count: fx.Int32, factor: fx.Float32):
        probe(source, target, shift, count, factor).launch(grid=(1, 1, 1), block=spec.block)

    return launch, (fx.Int64(0), fx.Int64(0), fx.Int64(0), fx.Int32(0), fx.Float32(0.0))
