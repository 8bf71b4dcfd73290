"""K6: o = scale * (exp(G) q h^T + tril(exp(G_i - G_j) q k^T) v_new), one program per chunk, value head and V tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .common import CHUNK, HEAD_DIM, TRITON_DTYPE, CompileJob, dot, dot_add, exp2_gate, narrow, row_strides

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import ChunkPlan
    from ...spec import OutputSpec


_RUNTIME_INTS = [
    "T", "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_ob", "stride_ot", "stride_oh",
]  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME_INTS)
def output_kernel(
    q,
    k,
    v_new,
    h,
    g,
    o,
    cu_seqlens,
    sequence_ids,
    chunk_ids,
    scale,
    T: tl.int32,
    stride_qb: tl.int64,
    stride_qt: tl.int32,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kt: tl.int32,
    stride_kh: tl.int64,
    stride_ob: tl.int64,
    stride_ot: tl.int32,
    stride_oh: tl.int64,
    H: tl.constexpr,
    HG: tl.constexpr,
    BV: tl.constexpr,
    Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    O_UNIT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    GATE_LOG2: tl.constexpr,
):
    NV: tl.constexpr = HEAD_DIM // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_chunk = pid // (NV * H)
    if IS_VARLEN:
        i_n = tl.load(sequence_ids + i_chunk)
        start = tl.load(chunk_ids + i_chunk) * CHUNK
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        seq_len = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
        token = bos + start
        row = i_h.to(tl.int64) * T + token
        q += token * stride_qt * Q_UNIT
        k += token * stride_kt * K_UNIT
        o += token * stride_ot * O_UNIT
    else:
        per_seq = tl.cdiv(T, CHUNK)
        i_n = (i_chunk // per_seq).to(tl.int64)
        start = (i_chunk % per_seq) * CHUNK
        seq_len = T
        row = (i_n * H + i_h) * T + start
        q += (i_n * stride_qb + start.to(tl.int64) * stride_qt) * Q_UNIT
        k += (i_n * stride_kb + start.to(tl.int64) * stride_kt) * K_UNIT
        o += (i_n * stride_ob + start.to(tl.int64) * stride_ot) * O_UNIT
    i_hg = i_h // (H // HG)
    q += i_hg * stride_qh * Q_UNIT
    k += i_hg * stride_kh * K_UNIT
    o += i_h * stride_oh * O_UNIT + i_v * BV
    v_new += row * HEAD_DIM + i_v * BV
    h += (i_chunk.to(tl.int64) * H + i_h) * HEAD_DIM * HEAD_DIM + i_v * BV * HEAD_DIM
    g += row

    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, BV)
    valid = offs_t < seq_len - start
    q_tile = tl.load(q + (offs_t[:, None] * stride_qt) * Q_UNIT + offs_k[None, :], mask=valid[:, None], other=0.0)
    k_tile = tl.load(k + (offs_t[:, None] * stride_kt) * K_UNIT + offs_k[None, :], mask=valid[:, None], other=0.0)
    h_tile = tl.load(h + offs_v[:, None] * HEAD_DIM + offs_k[None, :])
    if h.dtype.element_ty == tl.float32:
        h_tile = narrow(h_tile, q.dtype.element_ty)
    v_tile = tl.load(v_new + offs_t[:, None] * HEAD_DIM + offs_v[None, :], mask=valid[:, None], other=0.0)
    gate = tl.load(g + offs_t, mask=valid, other=0.0)

    acc = dot(q_tile, tl.trans(h_tile)) * exp2_gate(gate, GATE_LOG2)[:, None]
    causal = (offs_t[:, None] >= offs_t[None, :]) & valid[:, None]
    decay = exp2_gate(tl.where(causal, gate[:, None] - gate[None, :], float("-inf")), GATE_LOG2)
    attention = dot(q_tile, tl.trans(k_tile)) * decay
    acc = dot_add(narrow(attention, v_new.dtype.element_ty), v_tile, acc) * scale
    o += (offs_t[:, None] * stride_ot) * O_UNIT + offs_v[None, :]
    tl.store(o, narrow(acc, o.dtype.element_ty), mask=valid[:, None])


def compile_jobs(spec: OutputSpec) -> list[CompileJob]:
    """What ``output`` compiles for ``spec`` and rows of q, k and o on 16-byte addresses. Raises UnsupportedError as
    ``spec.check``."""
    spec.check()
    data = f"*{TRITON_DTYPE[spec.dtype]}"
    types = dict.fromkeys(("q", "k", "v_new", "o"), data)
    types |= {"h": f"*{TRITON_DTYPE[spec.snapshot_dtype]}", "g": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("cu_seqlens", "sequence_ids", "chunk_ids"), "*i32" if spec.is_varlen else data)
    constants = {
        "H": spec.num_heads,
        "HG": spec.num_key_heads,
        "BV": spec.config.block_v,
        "Q_UNIT": 8,
        "K_UNIT": 8,
        "O_UNIT": 8,
        "IS_VARLEN": spec.is_varlen,
        "GATE_LOG2": spec.use_exp2,
    }
    return [CompileJob.of(output_kernel, types, constants, spec.config.num_warps, spec.config.num_stages)]


def output(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    g_cumsum: Tensor,
    *,
    o: Tensor,
    scale: float,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: OutputSpec,
) -> None:
    """Launch K6 over all chunks of the plan: q, k [B,T,Hg,128], v_new [B,H,T,128], h snapshots, g_cumsum [B,H,T] fp32,
    o [B,T,H,128] preallocated. Rows of ``o`` outside the sequences are not written."""
    config = spec.config
    if plan.total_chunks == 0:
        return
    num_heads = v_new.shape[1]
    placeholder = q
    q_unit, q_strides = row_strides(q)
    k_unit, k_strides = row_strides(k)
    o_unit, o_strides = row_strides(o)
    output_kernel[(HEAD_DIM.value // config.block_v * plan.total_chunks * num_heads,)](
        q,
        k,
        v_new,
        h,
        g_cumsum,
        o,
        placeholder if plan.cu_seqlens is None else plan.cu_seqlens,
        placeholder if plan.sequence_ids is None else plan.sequence_ids,
        placeholder if plan.chunk_ids is None else plan.chunk_ids,
        scale,
        plan.seq_len,
        *q_strides,
        *k_strides,
        *o_strides,
        H=num_heads,
        HG=k.shape[2],
        BV=config.block_v,
        Q_UNIT=q_unit,
        K_UNIT=k_unit,
        O_UNIT=o_unit,
        IS_VARLEN=plan.is_varlen,
        GATE_LOG2=use_exp2,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
