"""L2 normalisation of q and k over the head dimension, one launch for both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...spec import L2NORM_ROWS, L2NORM_WARPS
from .common import HEAD_DIM, TRITON_DTYPE, CompileJob, narrow, row_strides

if TYPE_CHECKING:
    from torch import Tensor

    from ...spec import L2NormSpec


@triton.jit
def _normalise(x, out, rows, num_rows, seq_len, HG: tl.constexpr, stride_b, stride_t, stride_h, UNIT: tl.constexpr):
    d = tl.arange(0, HEAD_DIM)[None, :]
    token = rows // HG
    offset = ((token // seq_len) * stride_b + (token % seq_len) * stride_t + (rows % HG) * stride_h)[:, None] * UNIT
    mask = (rows < num_rows)[:, None]
    tile = tl.load(x + offset + d, mask=mask, other=0.0).to(tl.float32)
    tile *= tl.rsqrt(tl.sum(tile * tile, axis=1) + 1e-6)[:, None]
    tl.store(out + rows[:, None] * HEAD_DIM + d, narrow(tile, out.dtype.element_ty), mask=mask)


_RUNTIME_INTS = [
    "num_rows", "seq_len", "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
]  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME_INTS)
def l2norm_kernel(
    q,
    k,
    q_out,
    k_out,
    num_rows: tl.int64,
    seq_len: tl.int64,
    stride_qb: tl.int64,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    HG: tl.constexpr,
    Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        _normalise(q, q_out, rows, num_rows, seq_len, HG, stride_qb, stride_qt, stride_qh, Q_UNIT)
    else:
        _normalise(k, k_out, rows, num_rows, seq_len, HG, stride_kb, stride_kt, stride_kh, K_UNIT)


def compile_jobs(spec: L2NormSpec) -> list[CompileJob]:
    """What ``l2norm`` compiles for ``spec``, rows being on 16-byte addresses. Raises as ``spec.check``."""
    spec.check()
    pointers = dict.fromkeys(("q", "k", "q_out", "k_out"), f"*{TRITON_DTYPE[spec.dtype]}")
    constants = {"HG": spec.num_key_heads, "Q_UNIT": 8, "K_UNIT": 8, "ROWS": L2NORM_ROWS}
    return [CompileJob.of(l2norm_kernel, pointers, constants, L2NORM_WARPS, 1)]


def l2norm(q: Tensor, k: Tensor, *, q_out: Tensor, k_out: Tensor, spec: L2NormSpec) -> None:
    """q_out, k_out = x * rsqrt(sum(x^2) + 1e-6) over the last axis of q, k [B, T, Hg, 128], in fp32, rounded once to
    the dtype of x. Outputs are contiguous. Rows do not mix: a NaN stays in its own row."""
    del spec
    batch, seq_len, num_heads, _ = q.shape
    num_rows = batch * seq_len * num_heads
    if num_rows == 0:
        return
    q_unit, q_strides = row_strides(q)
    k_unit, k_strides = row_strides(k)
    l2norm_kernel[(triton.cdiv(num_rows, L2NORM_ROWS), 2)](
        q,
        k,
        q_out,
        k_out,
        num_rows,
        seq_len,
        *q_strides,
        *k_strides,
        HG=num_heads,
        Q_UNIT=q_unit,
        K_UNIT=k_unit,
        ROWS=L2NORM_ROWS,
        num_warps=L2NORM_WARPS,
        num_stages=1,
    )
