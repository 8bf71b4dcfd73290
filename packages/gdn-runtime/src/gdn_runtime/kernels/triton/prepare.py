"""K1..K4: chunk-local gates, the triangular inverse C = (I + A)^-1, and the WY operands u and w.

The inverse doubles the size of the inverted diagonal blocks five times, 2 -> 64, starting from I - A on 2x2 blocks.
With X = inverse of the diagonal blocks of size s and Y the blocks of -X A that couple two neighbours, X + Y X is the
inverse of the blocks of size 2s. No power of A is ever formed, so nothing cancels: for beta <= 1 the errors of u and w
stay those of the 16-bit rounding of C * beta whatever the keys (equal, alternating, cosine 0.5..0.99); see
tests/interp/test_prepare_kernels.py. Operands are fp16 (bf16 operands cost a factor 5 in u for similar keys), so |A|
must stay below 65504: keys of norm above 255 give inf or NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from .common import (
    CHUNK,
    GATE_MIN,
    HEAD_DIM,
    LOG2E,
    TRITON_DTYPE,
    CompileJob,
    dot,
    dot_add,
    exp2_gate,
    narrow,
    row_strides,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import ChunkPlan
    from ...spec import PrepareSpec

_RUNTIME_INTS = [
    "seq_len", "seq_chunks", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
    "stride_gb", "stride_gt", "stride_gh", "stride_bb", "stride_bt", "stride_bh",
]  # fmt: skip
"""Integers that must not enter the key of a code object: lengths, and strides that grow with lengths."""


_SLICES = ["g", "beta", "cu_seqlens", "sequence_ids", "chunk_ids"]
"""Read by the element and often slices, whose alignment depends on the decode tokens or chunks before them."""

HALF = tl.constexpr(64)
"""Columns of k, v, u and w per load, product and store: accumulators of 64 columns leave 4 programs per SM on sm90, of
128 columns 3."""


@triton.jit
def _locate(chunk, cu_seqlens, sequence_ids, chunk_ids, seq_len, seq_chunks, IS_VARLEN: tl.constexpr):
    """(batch row, first token of the chunk in that row, valid tokens from there on) of a flat chunk number."""
    if IS_VARLEN:
        sequence = tl.load(sequence_ids + chunk)
        start = tl.load(chunk_ids + chunk).to(tl.int64) * CHUNK
        bos = tl.load(cu_seqlens + sequence).to(tl.int64)
        left = tl.load(cu_seqlens + sequence + 1) - bos - start
        batch = chunk * 0
        token = bos + start
    else:
        batch = chunk // seq_chunks
        token = (chunk % seq_chunks) * CHUNK
        left = seq_len - token
    return batch, token, tl.minimum(left, CHUNK).to(tl.int32)


@triton.jit
def _double(x, minus_a16, i, j, SIZE: tl.constexpr):
    """Inverse of the diagonal blocks of size 2 * SIZE of I + A from the inverse ``x`` of those of size SIZE; i and j
    number the rows and columns of ``x``."""
    x16 = x.to(tl.float16)
    couples = (i // SIZE == j // SIZE + 1) & (i // SIZE % 2 == 1)
    y = tl.where(couples, dot(x16, minus_a16), 0.0)
    return dot_add(y.to(tl.float16), x16, x)


@triton.jit
def _inverse(minus_a, dtype: tl.constexpr):
    """(I + A)^-1 in fp32 from -A [64, 64], strictly lower triangular, good enough to be rounded to ``dtype``.

    Up to blocks of 16, the four diagonal blocks are a batch of small products: on NVIDIA one warp owns a block, in the
    very lanes that hold it in the 64 x 64 accumulator, so nothing passes through shared memory.
    """
    block_i = tl.arange(0, 4)[:, None, None, None]
    block_j = tl.arange(0, 4)[None, None, :, None]
    blocks = tl.reshape(minus_a, (4, 16, 4, 16))
    diagonal = tl.sum(tl.where(block_i == block_j, blocks, 0.0), axis=2)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, diagonal, 0.0))
    diagonal16 = diagonal.to(tl.float16)
    x = _double(x, diagonal16, i, j, 2)
    x = _double(x, diagonal16, i, j, 4)
    x = _double(x, diagonal16, i, j, 8)

    # Selecting between x and -A, although -A is then masked away, keeps the accumulator's layout: against a constant
    # Triton lays the tile out anew, through shared memory.
    x = tl.reshape(tl.where(block_i == block_j, tl.expand_dims(x, 2), blocks), (CHUNK, CHUNK))
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    x = tl.where(i // 16 == j // 16, x, 0.0)
    minus_a16 = minus_a.to(tl.float16)
    x = _double(x, minus_a16, i, j, 16)
    x = _double(x, minus_a16, i, j, 32)
    if dtype == tl.float16:
        # One Newton step, its residual I - (I + A) x from operands of 22 bits: similar keys leave x an error of 1e-3,
        # which is below the rounding of bf16 but not below that of fp16.
        x16 = x.to(tl.float16)
        residual = tl.where(i == j, 1.0, 0.0) - x
        residual = dot_add(minus_a16, x16, residual)
        residual = dot_add(minus_a16, (x - x16.to(tl.float32)).to(tl.float16), residual)
        residual = dot_add((minus_a - minus_a16.to(tl.float32)).to(tl.float16), x16, residual)
        x = dot_add(x16, residual.to(tl.float16), x)
    return x


@triton.jit
def _load_half(x, left, stride_t, UNIT: tl.constexpr):
    """[64, 64] of rows of 128, zero past the sequence; the stride counts UNIT elements (see ``row_strides``)."""
    i = tl.arange(0, CHUNK)[:, None]
    d = tl.arange(0, HALF)[None, :]
    return tl.load(x + (i * stride_t) * UNIT + d, mask=i < left, other=0.0)


@triton.jit
def _store_half(x, tile, left):
    i = tl.arange(0, CHUNK)[:, None]
    d = tl.arange(0, HALF)[None, :]
    tl.store(x + i * HEAD_DIM + d, narrow(tile, x.dtype.element_ty), mask=i < left)


@triton.jit
def _load_gain(beta, left, stride_t):
    i = tl.arange(0, CHUNK)
    return tl.load(beta + i * stride_t, mask=i < left, other=0.0).to(tl.float32)


@triton.jit
def _cumulate(g, left, stride_t):
    """Inclusive chunk-local sum of the gates, natural logarithm."""
    i = tl.arange(0, CHUNK)
    gate = tl.load(g + i * stride_t, mask=i < left, other=0.0)
    return tl.cumsum(tl.where(gate < GATE_MIN, GATE_MIN, gate), 0)


@triton.jit
def _minus_a(key0, key1, gate2, gain):
    """-A of one chunk from the two halves of its keys. The exponent is masked before the exponential, so that no inf
    meets a 0."""
    i = tl.arange(0, CHUNK)
    lower = i[:, None] > i[None, :]
    kk = dot_add(key1, tl.trans(key1), dot(key0, tl.trans(key0)))
    decay = tl.exp2(tl.where(lower, gate2[:, None] - gate2[None, :], 0.0))
    return tl.where(lower, -gain[:, None] * kk * decay, 0.0)


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=_SLICES)
def prepare_fused_kernel(
    k,
    v,
    g,
    beta,
    w,
    u,
    g_cumsum,
    cu_seqlens,
    sequence_ids,
    chunk_ids,
    seq_len: tl.int32,
    seq_chunks: tl.int32,
    stride_kb: tl.int64,
    stride_kt: tl.int32,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vt: tl.int32,
    stride_vh: tl.int64,
    stride_gb: tl.int64,
    stride_gt: tl.int32,
    stride_gh: tl.int64,
    stride_bb: tl.int64,
    stride_bt: tl.int32,
    stride_bh: tl.int64,
    H: tl.constexpr,
    HG: tl.constexpr,
    K_UNIT: tl.constexpr,
    V_UNIT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    GATE_LOG2: tl.constexpr,
):
    """K1..K4 of one chunk and value head. Consecutive programs share a chunk of k through the L2 cache."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    batch, token, left = _locate(pid // H, cu_seqlens, sequence_ids, chunk_ids, seq_len, seq_chunks, IS_VARLEN)
    row = (batch * H + head) * seq_len + token
    k += (batch * stride_kb + token * stride_kt + (head // (H // HG)) * stride_kh) * K_UNIT
    v += (batch * stride_vb + token * stride_vt + head * stride_vh) * V_UNIT
    u += row * HEAD_DIM
    w += row * HEAD_DIM

    key0 = _load_half(k, left, stride_kt, K_UNIT)
    key1 = _load_half(k + HALF, left, stride_kt, K_UNIT)
    gain = _load_gain(beta + batch * stride_bb + token * stride_bt + head * stride_bh, left, stride_bt)
    gate = _cumulate(g + batch * stride_gb + token * stride_gt + head * stride_gh, left, stride_gt)
    gate2 = gate * LOG2E
    i = tl.arange(0, CHUNK)
    tl.store(g_cumsum + row + i, gate2 if GATE_LOG2 else gate, mask=i < left)

    inverse = _inverse(_minus_a(key0, key1, gate2, gain), k.dtype.element_ty)
    value0 = _load_half(v, left, stride_vt, V_UNIT)
    value1 = _load_half(v + HALF, left, stride_vt, V_UNIT)
    t_value = narrow(inverse * gain[None, :], k.dtype.element_ty)
    t_key = narrow(inverse * (gain * tl.exp2(gate2))[None, :], k.dtype.element_ty)
    _store_half(u, dot(t_value, value0), left)
    _store_half(u + HALF, dot(t_value, value1), left)
    _store_half(w, dot(t_key, key0), left)
    _store_half(w + HALF, dot(t_key, key1), left)


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=_SLICES)
def prepare_inverse_kernel(
    k,
    g,
    beta,
    g_cumsum,
    inverse,
    cu_seqlens,
    sequence_ids,
    chunk_ids,
    seq_len: tl.int32,
    seq_chunks: tl.int32,
    stride_kb: tl.int64,
    stride_kt: tl.int32,
    stride_kh: tl.int64,
    stride_gb: tl.int64,
    stride_gt: tl.int32,
    stride_gh: tl.int64,
    stride_bb: tl.int64,
    stride_bt: tl.int32,
    stride_bh: tl.int64,
    H: tl.constexpr,
    HG: tl.constexpr,
    K_UNIT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    GATE_LOG2: tl.constexpr,
):
    """K1..K3 of one chunk and value head: g_cumsum and the tile (I + A)^-1 of ``inverse`` [chunks, H, 64, 64]."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    batch, token, left = _locate(pid // H, cu_seqlens, sequence_ids, chunk_ids, seq_len, seq_chunks, IS_VARLEN)
    k += (batch * stride_kb + token * stride_kt + (head // (H // HG)) * stride_kh) * K_UNIT

    key0 = _load_half(k, left, stride_kt, K_UNIT)
    key1 = _load_half(k + HALF, left, stride_kt, K_UNIT)
    gain = _load_gain(beta + batch * stride_bb + token * stride_bt + head * stride_bh, left, stride_bt)
    gate = _cumulate(g + batch * stride_gb + token * stride_gt + head * stride_gh, left, stride_gt)
    gate2 = gate * LOG2E
    i = tl.arange(0, CHUNK)
    tl.store(g_cumsum + (batch * H + head) * seq_len + token + i, gate2 if GATE_LOG2 else gate, mask=i < left)

    inverse += pid * (CHUNK * CHUNK)
    tile = _inverse(_minus_a(key0, key1, gate2, gain), k.dtype.element_ty)
    tl.store(inverse + i[:, None] * CHUNK + i[None, :], narrow(tile, inverse.dtype.element_ty))


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=_SLICES)
def prepare_wy_kernel(
    k,
    v,
    beta,
    w,
    u,
    g_cumsum,
    inverse,
    cu_seqlens,
    sequence_ids,
    chunk_ids,
    seq_len: tl.int32,
    seq_chunks: tl.int32,
    stride_kb: tl.int64,
    stride_kt: tl.int32,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vt: tl.int32,
    stride_vh: tl.int64,
    stride_bb: tl.int64,
    stride_bt: tl.int32,
    stride_bh: tl.int64,
    H: tl.constexpr,
    HG: tl.constexpr,
    K_UNIT: tl.constexpr,
    V_UNIT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    GATE_LOG2: tl.constexpr,
):
    """K4 of one chunk and value head, from the inverse of ``prepare_inverse_kernel``."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    batch, token, left = _locate(pid // H, cu_seqlens, sequence_ids, chunk_ids, seq_len, seq_chunks, IS_VARLEN)
    row = (batch * H + head) * seq_len + token
    k += (batch * stride_kb + token * stride_kt + (head // (H // HG)) * stride_kh) * K_UNIT
    v += (batch * stride_vb + token * stride_vt + head * stride_vh) * V_UNIT
    u += row * HEAD_DIM
    w += row * HEAD_DIM

    i = tl.arange(0, CHUNK)
    inverse += pid * (CHUNK * CHUNK)
    tile = tl.load(inverse + i[:, None] * CHUNK + i[None, :]).to(tl.float32)
    gain = _load_gain(beta + batch * stride_bb + token * stride_bt + head * stride_bh, left, stride_bt)
    gate = tl.load(g_cumsum + row + i, mask=i < left, other=0.0)
    value0 = _load_half(v, left, stride_vt, V_UNIT)
    value1 = _load_half(v + HALF, left, stride_vt, V_UNIT)
    key0 = _load_half(k, left, stride_kt, K_UNIT)
    key1 = _load_half(k + HALF, left, stride_kt, K_UNIT)
    t_value = narrow(tile * gain[None, :], k.dtype.element_ty)
    t_key = narrow(tile * (gain * exp2_gate(gate, GATE_LOG2))[None, :], k.dtype.element_ty)
    _store_half(u, dot(t_value, value0), left)
    _store_half(u + HALF, dot(t_value, value1), left)
    _store_half(w, dot(t_key, key0), left)
    _store_half(w + HALF, dot(t_key, key1), left)


def _constants(num_heads: int, num_key_heads: int, k_unit: int, is_varlen: bool, use_exp2: bool) -> dict[str, Any]:
    return {"H": num_heads, "HG": num_key_heads, "K_UNIT": k_unit, "IS_VARLEN": is_varlen, "GATE_LOG2": use_exp2}


def compile_jobs(spec: PrepareSpec) -> list[CompileJob]:
    """What ``prepare`` compiles for ``spec`` and rows of k and v on 16-byte addresses. Raises UnsupportedError as
    ``spec.check``."""
    spec.check()
    data, chunk_table = f"*{TRITON_DTYPE[spec.dtype]}", "*i32" if spec.is_varlen else "*fp32"
    pointers = dict.fromkeys(("k", "v", "w", "u"), data) | {"inverse": "*fp16"}
    pointers |= {"g": "*fp32", "beta": f"*{TRITON_DTYPE[spec.beta_dtype]}", "g_cumsum": "*fp32"}
    pointers |= dict.fromkeys(("cu_seqlens", "sequence_ids", "chunk_ids"), chunk_table)
    constants = _constants(spec.num_heads, spec.num_key_heads, 8, spec.is_varlen, spec.use_exp2) | {"V_UNIT": 8}
    kernels = (prepare_fused_kernel,) if spec.config.mode == "fused" else (prepare_inverse_kernel, prepare_wy_kernel)
    return [CompileJob.of(fn, pointers, constants, spec.config.num_warps, spec.config.num_stages) for fn in kernels]


def prepare(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    w: Tensor,
    u: Tensor,
    g_cumsum: Tensor,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: PrepareSpec,
) -> None:
    """Launch K1..K4: k [B,T,Hg,128], v [B,T,H,128] (bf16 or fp16, last axis contiguous), g fp32 [B,T,H] (natural log),
    beta [B,T,H] -> w, u [B,H,T,128] in k's dtype and g_cumsum fp32 [B,H,T], contiguous and preallocated. Rows past a
    sequence are neither read nor written. Mode "split" allocates its workspace, (I + A)^-1 [total_chunks,H,64,64]
    in fp16: rounded to bf16 there and once more with its gains, equal keys cost w an error of 0.016, not 0.012."""
    config = spec.config
    if plan.total_chunks == 0:
        return
    num_heads = v.shape[2]
    k_unit, k_strides = row_strides(k)
    v_unit, v_strides = row_strides(v)
    chunks = (
        g_cumsum if plan.cu_seqlens is None else plan.cu_seqlens,
        g_cumsum if plan.sequence_ids is None else plan.sequence_ids,
        g_cumsum if plan.chunk_ids is None else plan.chunk_ids,
        plan.seq_len,
        plan.max_seq_chunks,
    )
    common = {
        **_constants(num_heads, k.shape[2], k_unit, plan.is_varlen, use_exp2),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    grid = (plan.total_chunks * num_heads,)
    if config.mode == "fused":
        cuda = {"maxnreg": spec.max_registers} if spec.max_registers and k.is_cuda else {}
        prepare_fused_kernel[grid](
            k, v, g, beta, w, u, g_cumsum, *chunks, *k_strides, *v_strides, *g.stride(), *beta.stride(),
            V_UNIT=v_unit, **common, **cuda,
        )  # fmt: skip
        return
    inverse = torch.empty(
        (plan.total_chunks, num_heads, CHUNK.value, CHUNK.value), dtype=torch.float16, device=k.device
    )
    prepare_inverse_kernel[grid](
        k, g, beta, g_cumsum, inverse, *chunks, *k_strides, *g.stride(), *beta.stride(), **common
    )
    prepare_wy_kernel[grid](
        k, v, beta, w, u, g_cumsum, inverse, *chunks, *k_strides, *v_strides, *beta.stride(), V_UNIT=v_unit, **common
    )
