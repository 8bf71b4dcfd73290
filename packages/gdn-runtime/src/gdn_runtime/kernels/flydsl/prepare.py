"""The fused prepare, K1..K4 in one kernel: chunk-local gates, C = (I + A)^-1, u = (C beta) v, w = (C beta e^G) k.

Two variants, the same blocks and rounding: "wave" (prepare_wave) for many chunks and heads, "group" (prepare_group) for
few. Spec, arguments and grid: ``FusedPrepareSpec``. k, v bf16 with rows of 256 contiguous bytes on 16-byte addresses,
64 token strides of each below 2^31 bytes; g fp32 natural logarithm, strides of g and beta free; u, w bf16 [B,H,T,128]
and g_cumsum fp32 [B,H,T] contiguous. Rows outside every sequence are neither read nor written.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from ...spec.flydsl import FusedPrepareSpec
from ..common import lds
from ..common.lanes import wave_and_lane
from .prepare_chunk import SPREAD_BYTES
from .prepare_group import GROUP_LDS, prepare_chunk
from .prepare_head import WAVES
from .prepare_wave import prepare_head


def build(spec: FusedPrepareSpec):
    """(launcher to compile, example arguments) of a spec. Raises UnsupportedError as ``spec.check``."""
    spec.check()
    threads = spec.block[0]

    @flyc.kernel(name=f"gdn_prepare_{spec.variant}", known_block_size=spec.block)
    def kernel(
        k: fx.Int64, v: fx.Int64, g: fx.Int64, beta: fx.Int64, w: fx.Int64, u: fx.Int64, g_cumsum: fx.Int64,
        cu_seqlens: fx.Int64, sequence_ids: fx.Int64, chunk_ids: fx.Int64,
        k_stride_b: fx.Int64, k_stride_h: fx.Int64, v_stride_b: fx.Int64, v_stride_h: fx.Int64,
        g_stride_b: fx.Int64, g_stride_h: fx.Int64, beta_stride_b: fx.Int64, beta_stride_h: fx.Int64,
        seq_len: fx.Int32, k_stride_t: fx.Int32, v_stride_t: fx.Int32, g_stride_t: fx.Int32, beta_stride_t: fx.Int32,
    ):  # fmt: skip
        a = SimpleNamespace(
            k=k, v=v, g=g, beta=beta, w=w, u=u, g_cumsum=g_cumsum,
            cu_seqlens=cu_seqlens, sequence_ids=sequence_ids, chunk_ids=chunk_ids,
            k_stride_b=k_stride_b, k_stride_h=k_stride_h, v_stride_b=v_stride_b, v_stride_h=v_stride_h,
            g_stride_b=g_stride_b, g_stride_h=g_stride_h, beta_stride_b=beta_stride_b, beta_stride_h=beta_stride_h,
            seq_len=seq_len, k_stride_t=k_stride_t, v_stride_t=v_stride_t, g_stride_t=g_stride_t,
            beta_stride_t=beta_stride_t,
        )  # fmt: skip
        wave, lane = wave_and_lane()
        if fx.const_expr(spec.variant == "group"):
            prepare_chunk(spec, a, fx.Int32(fx.block_idx.y), wave, lane, lds.regions(*GROUP_LDS))
        else:
            (region,) = lds.regions(WAVES * SPREAD_BYTES)
            head = fx.Int32(fx.block_idx.y) * fx.Int32(WAVES) + wave
            if fx.const_expr(spec.num_heads % WAVES == 0):
                prepare_head(spec, a, head, wave, lane, region)
            else:
                if head < fx.Int32(spec.num_heads):
                    prepare_head(spec, a, head, wave, lane, region)

    @flyc.jit
    def launch(
        k: fx.Int64, v: fx.Int64, g: fx.Int64, beta: fx.Int64, w: fx.Int64, u: fx.Int64, g_cumsum: fx.Int64,
        cu_seqlens: fx.Int64, sequence_ids: fx.Int64, chunk_ids: fx.Int64,
        k_stride_b: fx.Int64, k_stride_h: fx.Int64, v_stride_b: fx.Int64, v_stride_h: fx.Int64,
        g_stride_b: fx.Int64, g_stride_h: fx.Int64, beta_stride_b: fx.Int64, beta_stride_h: fx.Int64,
        seq_len: fx.Int32, k_stride_t: fx.Int32, v_stride_t: fx.Int32, g_stride_t: fx.Int32, beta_stride_t: fx.Int32,
    ):  # fmt: skip
        kernel(
            k, v, g, beta, w, u, g_cumsum, cu_seqlens, sequence_ids, chunk_ids,
            k_stride_b, k_stride_h, v_stride_b, v_stride_h, g_stride_b, g_stride_h, beta_stride_b, beta_stride_h,
            seq_len, k_stride_t, v_stride_t, g_stride_t, beta_stride_t,
        ).launch(grid=(1, 1, 1), block=(threads, 1, 1))  # fmt: skip

    # Registers for three waves per SIMD: four would spill.
    launch.compile_hints = {"waves_per_eu": "3,3"}
    kinds = {"pointer": fx.Int64, "i64": fx.Int64, "i32": fx.Int32}
    return launch, tuple(kinds[argument.kind](0) for argument in spec.ARGUMENTS)
