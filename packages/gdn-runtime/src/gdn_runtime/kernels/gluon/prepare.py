"""T' = (I + A)^-1 diag(beta), P = scale tril(exp(G_i - G_j) q k^T), G, exp(G) and exp(G_last - G) of a chunk and head.

For what ``inverse`` does not take, and where P is better formed by programs of its own than by the scan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.common import CHUNK, LOG2E, dot, dot_add, narrow
from ..triton.prepare import (
    HALF,
    _cumulate,
    _inverse,
    _load_gain,
    _load_half,
    _locate,
    _minus_a,
)


@triton.jit(
    do_not_specialize=[
        "seq_len", "seq_chunks", "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
        "stride_gb", "stride_gt", "stride_gh", "stride_bb", "stride_bt", "stride_bh",
    ],
    do_not_specialize_on_alignment=["g", "beta", "cu_seqlens", "sequence_ids", "chunk_ids"],
)  # fmt: skip
def prepare_kernel(
    q,
    k,
    g,
    beta,
    t_out,
    p_out,
    g_out,
    cu_seqlens,
    sequence_ids,
    chunk_ids,
    seq_len: tl.int32,
    seq_chunks: tl.int32,
    stride_qb: tl.int64,
    stride_qt: tl.int32,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kt: tl.int32,
    stride_kh: tl.int64,
    stride_gb: tl.int64,
    stride_gt: tl.int32,
    stride_gh: tl.int64,
    stride_bb: tl.int64,
    stride_bt: tl.int32,
    stride_bh: tl.int64,
    scale: tl.float32,
    H: tl.constexpr,
    HG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """One chunk and value head."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    batch, token, left = _locate(pid // H, cu_seqlens, sequence_ids, chunk_ids, seq_len, seq_chunks, IS_VARLEN)
    key_head = head // (H // HG)
    k += (batch * stride_kb + token * stride_kt + key_head * stride_kh) * 8
    q += (batch * stride_qb + token * stride_qt + key_head * stride_qh) * 8
    key0 = _load_half(k, left, stride_kt, 8)
    key1 = _load_half(k + HALF, left, stride_kt, 8)
    query0 = _load_half(q, left, stride_qt, 8)
    query1 = _load_half(q + HALF, left, stride_qt, 8)
    gain = _load_gain(beta + batch * stride_bb + token * stride_bt + head * stride_bh, left, stride_bt)
    gate = _cumulate(g + batch * stride_gb + token * stride_gt + head * stride_gh, left, stride_gt) * LOG2E
    i = tl.arange(0, CHUNK)
    g_out += pid * (3 * CHUNK) + i
    tl.store(g_out, gate)
    tl.store(g_out + CHUNK, tl.exp2(gate))
    tl.store(g_out + 2 * CHUNK, tl.exp2(tl.sum(tl.where(i == CHUNK - 1, gate, 0.0), 0) - gate))
    tile = i[:, None] * CHUNK + i[None, :]
    lower = i[:, None] >= i[None, :]
    p = dot_add(query1, tl.trans(key1), dot(query0, tl.trans(key0)))
    p *= tl.exp2(tl.where(lower, gate[:, None] - gate[None, :], 0.0)) * scale
    tl.store(p_out + pid * (CHUNK * CHUNK) + tile, narrow(tl.where(lower, p, 0.0), p_out.dtype.element_ty))
    inverse = _inverse(_minus_a(key0, key1, gate, gain), k.dtype.element_ty)
    tl.store(t_out + pid * (CHUNK * CHUNK) + tile, narrow(inverse * gain[None, :], t_out.dtype.element_ty))
