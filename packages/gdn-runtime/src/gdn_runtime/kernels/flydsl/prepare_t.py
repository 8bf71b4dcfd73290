"""The fused prepare up to T' = (I + A)^-1 diag(beta), which stands for u = T' v and w = (T' e^G) k: no v, w or u here.

One wave per chunk and value head, four heads of a chunk per workgroup, no barrier. Spec, arguments and grid:
``TPrepareSpec``; k, g, beta and g_cumsum as of ``prepare``. t [chunks, H, T_ELEMENTS] bf16 in the order of
``t_layout``, chunks of a dense batch row after row; rows and columns of T' past the end of a sequence are 0.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from ...spec.base import CHUNK
from ...spec.tprime import TPrepareSpec
from ..common import lds
from ..common.lanes import wave_and_lane
from ..common.memory import Buffer, offset64
from .prepare_chunk import BLOCKS, SPREAD_BYTES, head_major_row
from .prepare_head import WAVES, form_system, invert, load_head
from .prepare_rows import t_operands
from .t_layout import T_BYTES, T_PLACES, lane_bytes


def prepare_head(spec: TPrepareSpec, a, head, wave, lane, region) -> None:
    """One chunk of value head ``head`` by one wave."""
    data = load_head(spec, a, head, lane)
    row = head_major_row(spec, data.place, head, a.seq_len)
    lds.sched_fence()
    system = form_system(spec, a, data, row, wave, lane, region)
    lds.sched_fence()
    y = invert(system, spec.arch == "gfx950")
    gains = [system.gates.gain(j) for j in range(BLOCKS)]
    t = {}
    for i in range(BLOCKS):
        t |= t_operands(i, [y[j, i] for j in range(i + 1)], gains, spec.arch)
    lds.sched_fence()
    chunk = fx.Int32(fx.block_idx.x)
    if not spec.is_varlen:
        chunk = chunk + fx.Int32(fx.block_idx.z) * ((a.seq_len + fx.Int32(CHUNK - 1)) >> fx.Int32(6))
    number = offset64(chunk, spec.num_heads) + fx.Int64(fx.Uint32(head))
    out = Buffer(a.t + number * fx.Int64(T_BYTES), fx.Int32(T_BYTES))
    for (row, blocks), at in T_PLACES.items():
        out.store(t[row, blocks], lane * fx.Int32(lane_bytes(blocks)) + fx.Int32(at))


def build(spec: TPrepareSpec):
    """(launcher to compile, example arguments) of a spec. Raises UnsupportedError as ``spec.check``."""
    spec.check()

    @flyc.kernel(name="gdn_prepare_t", known_block_size=spec.block)
    def kernel(
        k: fx.Int64, g: fx.Int64, beta: fx.Int64, t: fx.Int64, g_cumsum: fx.Int64,
        cu_seqlens: fx.Int64, sequence_ids: fx.Int64, chunk_ids: fx.Int64, k_stride_b: fx.Int64, k_stride_h: fx.Int64,
        g_stride_b: fx.Int64, g_stride_h: fx.Int64, beta_stride_b: fx.Int64, beta_stride_h: fx.Int64,
        seq_len: fx.Int32, k_stride_t: fx.Int32, g_stride_t: fx.Int32, beta_stride_t: fx.Int32,
    ):  # fmt: skip
        a = SimpleNamespace(
            k=k, g=g, beta=beta, t=t, g_cumsum=g_cumsum,
            cu_seqlens=cu_seqlens, sequence_ids=sequence_ids, chunk_ids=chunk_ids,
            k_stride_b=k_stride_b, k_stride_h=k_stride_h, g_stride_b=g_stride_b, g_stride_h=g_stride_h,
            beta_stride_b=beta_stride_b, beta_stride_h=beta_stride_h,
            seq_len=seq_len, k_stride_t=k_stride_t, g_stride_t=g_stride_t, beta_stride_t=beta_stride_t,
        )  # fmt: skip
        wave, lane = wave_and_lane()
        (region,) = lds.regions(WAVES * SPREAD_BYTES)
        head = fx.Int32(fx.block_idx.y) * fx.Int32(WAVES) + wave
        if fx.const_expr(spec.num_heads % WAVES == 0):
            prepare_head(spec, a, head, wave, lane, region)
        else:
            if head < fx.Int32(spec.num_heads):
                prepare_head(spec, a, head, wave, lane, region)

    @flyc.jit
    def launch(
        k: fx.Int64, g: fx.Int64, beta: fx.Int64, t: fx.Int64, g_cumsum: fx.Int64,
        cu_seqlens: fx.Int64, sequence_ids: fx.Int64, chunk_ids: fx.Int64, k_stride_b: fx.Int64, k_stride_h: fx.Int64,
        g_stride_b: fx.Int64, g_stride_h: fx.Int64, beta_stride_b: fx.Int64, beta_stride_h: fx.Int64,
        seq_len: fx.Int32, k_stride_t: fx.Int32, g_stride_t: fx.Int32, beta_stride_t: fx.Int32,
    ):  # fmt: skip
        kernel(
            k, g, beta, t, g_cumsum, cu_seqlens, sequence_ids, chunk_ids, k_stride_b, k_stride_h,
            g_stride_b, g_stride_h, beta_stride_b, beta_stride_h, seq_len, k_stride_t, g_stride_t, beta_stride_t,
        ).launch(grid=(1, 1, 1), block=spec.block)  # fmt: skip

    # 112 to 115 registers: four waves per SIMD.
    launch.compile_hints = {"waves_per_eu": "4,4"}
    kinds = {"pointer": fx.Int64, "i64": fx.Int64, "i32": fx.Int32}
    return launch, tuple(kinds[argument.kind](0) for argument in spec.ARGUMENTS)
