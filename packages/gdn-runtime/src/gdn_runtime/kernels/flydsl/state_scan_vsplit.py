"""K5 with T' and v in place of w and u: the waves of a workgroup split the columns of v.

Per chunk of 64 tokens, S [V, K] fp32, from the snapshot h = S on (products of bf16 operands, sums in fp32):
    x = v - exp(G) * (k @ bf16(S)^T)
    v_new = T' @ bf16(x)                                            stored as bf16, not gated
    S = exp(G_L) * S + bf16(v_new * exp(G_L - G))^T @ k
T' = (I + A)^-1 diag(beta) of ``prepare_t``, G: cumulated log gate of the chunk's tokens, G_L that of its last one.

A workgroup has BV columns of v of one (sequence, value head), a wave a quarter of them: its part of S, x and v_new
never leaves its registers, for a sum tile, packed, is the right operand of the next product. k is what the waves share,
through LDS, as rows for the first product and as columns for the last. One workgroup of BV = 128 has a whole head, so
this is for grids with at least one head per compute unit; BV = 64 for those in between (gfx942).

x is rounded to nearest whatever ``rounding`` says: 64 instructions of a chunk on gfx942, for an error of the final
state of 0.0045 instead of 0.0069 (random keys, 300 tokens, the rest truncated).

Infinities and NaN: v is added as a product with I, and T' x is a product over 16 tokens, so one such element of v
spreads over the 16 columns of its tile of v and the tokens of its tile of tokens and of later ones; one of k, through
the state, over all. Always of the same sequence and head; rows past the end of a sequence are never read.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from ...spec.tprime import VSplitScanSpec
from .state_scan_vsplit_steps import NarrowScan, WideScan


def one_chunk(scan, carry):
    """A turn of the loop. A function, for FlyDSL rewrites what stands in a kernel."""
    return scan.chunk(carry)


def build(spec: VSplitScanSpec):
    """(launcher to compile, example arguments) of a spec. Raises UnsupportedError as ``spec.check``."""
    spec.check()

    @flyc.kernel(name=spec.kernel, known_block_size=list(spec.block))
    def kernel(
        k: fx.Int64, v: fx.Int64, t: fx.Int64, g: fx.Int64, h: fx.Int64, v_new: fx.Int64, initial_state: fx.Int64,
        final_state: fx.Int64, state_indices: fx.Int64, has_initial_state: fx.Int64, cu_seqlens: fx.Int64,
        chunk_offsets: fx.Int64, k_stride_b: fx.Int64, k_stride_h: fx.Int64, v_stride_b: fx.Int64,
        v_stride_h: fx.Int64, initial_stride: fx.Int64, final_stride: fx.Int64, seq_len: fx.Int32,
        k_stride_t: fx.Int32, v_stride_t: fx.Int32, num_slots: fx.Int32, index_bytes: fx.Int32,
    ):  # fmt: skip
        args = SimpleNamespace(
            k=k, v=v, t=t, g=g, h=h, v_new=v_new, initial_state=initial_state, final_state=final_state,
            state_indices=state_indices, has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
            chunk_offsets=chunk_offsets, k_stride_b=k_stride_b, k_stride_h=k_stride_h, v_stride_b=v_stride_b,
            v_stride_h=v_stride_h, initial_stride=initial_stride, final_stride=final_stride, seq_len=seq_len,
            k_stride_t=k_stride_t, v_stride_t=v_stride_t, num_slots=num_slots, index_bytes=index_bytes,
        )  # fmt: skip
        scan = (WideScan if spec.arch == "gfx950" else NarrowScan)(spec, args)
        chunks = scan.traffic.chunks
        carry = scan.begin()
        for _ in range(fx.Int32(0), chunks, fx.Int32(1), unroll=1):
            carry = one_chunk(scan, carry)
        scan.finish(carry)

    @flyc.jit
    def launch(
        k: fx.Int64, v: fx.Int64, t: fx.Int64, g: fx.Int64, h: fx.Int64, v_new: fx.Int64, initial_state: fx.Int64,
        final_state: fx.Int64, state_indices: fx.Int64, has_initial_state: fx.Int64, cu_seqlens: fx.Int64,
        chunk_offsets: fx.Int64, k_stride_b: fx.Int64, k_stride_h: fx.Int64, v_stride_b: fx.Int64,
        v_stride_h: fx.Int64, initial_stride: fx.Int64, final_stride: fx.Int64, seq_len: fx.Int32,
        k_stride_t: fx.Int32, v_stride_t: fx.Int32, num_slots: fx.Int32, index_bytes: fx.Int32,
    ):  # fmt: skip
        kernel(
            k, v, t, g, h, v_new, initial_state, final_state, state_indices, has_initial_state, cu_seqlens,
            chunk_offsets, k_stride_b, k_stride_h, v_stride_b, v_stride_h, initial_stride, final_stride, seq_len,
            k_stride_t, v_stride_t, num_slots, index_bytes,
        ).launch(grid=(1, 1, 1), block=spec.block)  # fmt: skip

    # A range: given a minimum only, the scheduler goes for more waves and takes the products' pipelines apart.
    launch.compile_hints["waves_per_eu"] = "2,2"
    kinds = {"pointer": fx.Int64, "i64": fx.Int64, "i32": fx.Int32}
    return launch, tuple(kinds[argument.kind](0) for argument in spec.ARGUMENTS)
