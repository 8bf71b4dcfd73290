"""Normalisation of q and k by the code object of the Triton kernel."""

from __future__ import annotations

from torch import Tensor

from ...spec import L2NormSpec
from .kernels import Kernels, row_units


def l2norm(kernels: Kernels, q: Tensor, k: Tensor, *, q_out: Tensor, k_out: Tensor, spec: L2NormSpec) -> None:
    """Launch the normalisation of q, k [B,T,Hg,128] bf16 into contiguous outputs (see ``ops.backends.Stages``)."""
    batch, seq_len, num_heads, _ = q.shape
    num_rows = batch * seq_len * num_heads
    if num_rows == 0:
        return
    q, *q_strides = row_units(q)
    k, *k_strides = row_units(k)
    numbers = (num_rows, seq_len, *q_strides, *k_strides)
    kernels(spec, q.device)(spec.grid(num_rows), (q, k, q_out, k_out, *numbers))
