"""Vocabulary shared by the Gluon kernels: tiles of rows through TMA, bounded by their sequence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import spec

CHUNK = gl.constexpr(spec.CHUNK)
HEAD_DIM = gl.constexpr(spec.HEAD_DIM)

RAGGED = gl.constexpr(2**30)
"""Rows of the token axis of a varlen descriptor. A sequence of length L that starts at row b is seen through
coordinates (RAGGED, b + L, RAGGED - L + row): the strides of the first two axes cancel the offset modulo 2^64, and rows
from L on are past the end of the third axis, so the copy engine fills them with zeros and does not store them."""


@gluon.jit
def sequence_coordinates(bos, length, batch, IS_VARLEN: gl.constexpr):
    """The first two coordinates and the token coordinate of row 0 of a sequence, for descriptors of ``tiles``."""
    if IS_VARLEN:
        return RAGGED + length * 0, (bos + length).to(gl.int32), RAGGED - length
    else:
        return batch * 0, batch, batch * 0
