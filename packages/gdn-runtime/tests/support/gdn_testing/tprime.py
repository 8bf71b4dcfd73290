"""T' = (I + A)^-1 diag(beta) in fp64 from its definition, and its layout between the kernels of the T' route."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_runtime.testing import GdnInputs

OPERANDS = ((1, (0, 1)), (2, (0, 1)), (3, (0, 1)), (3, (2, 3)), (0, (0,)), (2, (2,)))
"""Tiles of 16x16 in memory: (row, columns). A lane (n, q) = (l % 16, l // 16) holds the elements 4q..4q+3 of row n of
each, tile after tile."""


def exact_t(inputs: GdnInputs) -> Tensor:
    """T' of every chunk [chunks, H, 64, 64], fp64; zero in rows and columns past the end of a sequence.

    Gates below -128 of a token count as -128.
    """
    k, beta = inputs.k.double(), inputs.beta.double().transpose(1, 2)
    k = k.repeat_interleave(inputs.num_heads // inputs.num_key_heads, dim=2).transpose(1, 2)
    g = inputs.g.double().transpose(1, 2)
    g = torch.where(g < -128.0, -128.0, g)
    chunks = []
    begin = 0
    for n, length in enumerate(inputs.seq_lens):
        batch, begin = (0, begin) if inputs.cu_seqlens is not None else (n, 0)
        for start in range(begin, begin + length, 64):
            rows = slice(start, min(start + 64, begin + length))
            gate, ks, gain = g[batch, :, rows].cumsum(-1), k[batch, :, rows], beta[batch, :, rows]
            a = gain[..., None] * (ks @ ks.transpose(-1, -2)) * (gate[..., :, None] - gate[..., None, :]).tril(-1).exp()
            system = a.tril(-1) + torch.eye(a.shape[-1], dtype=a.dtype)
            chunk = torch.zeros(inputs.num_heads, 64, 64, dtype=torch.float64)
            size = a.shape[-1]
            chunk[:, :size, :size] = torch.linalg.solve_triangular(
                system, torch.diag_embed(gain), upper=False, unitriangular=True
            )
            chunks.append(chunk)
        begin += length if inputs.cu_seqlens is not None else 0
    return torch.stack(chunks) if chunks else torch.zeros(0, inputs.num_heads, 64, 64, dtype=torch.float64)


def packed(t: Tensor) -> Tensor:
    """[..., 64, 64] -> [..., 2560]: the tiles on and below the diagonal, as the kernels lay them out."""
    parts = []
    for row, columns in OPERANDS:
        tiles = t[..., 16 * row : 16 * row + 16, 16 * columns[0] : 16 * columns[-1] + 16]
        by_lane = tiles.unflatten(-1, (len(columns), 4, 4)).movedim(-2, -4)  # q, n, tile, element
        parts.append(by_lane.flatten(-4))
    return torch.cat(parts, dim=-1)


def unpacked(t: Tensor) -> Tensor:
    """The inverse of ``packed``; zero above the diagonal tiles."""
    whole = torch.zeros(*t.shape[:-1], 64, 64, dtype=t.dtype)
    at = 0
    for row, columns in OPERANDS:
        size = 256 * len(columns)
        by_lane = t[..., at : at + size].unflatten(-1, (4, 16, len(columns), 4))
        tiles = by_lane.movedim(-4, -2).flatten(-3)
        whole[..., 16 * row : 16 * row + 16, 16 * columns[0] : 16 * columns[-1] + 16] = tiles
        at += size
    return whole
