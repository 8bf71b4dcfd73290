"""w, u and the cumulative gate in fp64, straight from their definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn_runtime.testing import Beta, GdnInputs, Keys


@dataclass(frozen=True)
class KeySet:
    """Keys and gains whose (I + A)^-1 is easy or hard, with bounds on the relative L2 error of w and u in bf16.

    A correct w carries two roundings: C beta exp(G) to bf16 (the operand), then w itself. The more alike the keys, the
    more the rows of that product cancel, and the larger is the part of w that the first rounding loses. Measured with
    an fp32 triangular solve (worst of 4 seeds, gates weak and zero): u 0.0022, w 0.0025, 0.0029, 0.0040, 0.0104, 0.0135
    in the order of ``KEY_SETS``; the bounds leave 1.1 to 1.5 times that. fp16 has 3 more bits: an eighth, measured too.
    An inverse by repeated squaring of whole 16 x 16 blocks in bf16 misses the last three by orders of magnitude.
    """

    keys: Keys
    beta: Beta
    u_bound: float
    w_bound: float

    def bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """(u, w) bounds for k and v of ``dtype``, bf16 or fp16."""
        part = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
        return self.u_bound * part, self.w_bound * part


KEY_SETS: dict[str, KeySet] = {
    "random": KeySet("random", "uniform", 0.003, 0.003),
    "cos0.5": KeySet("cos0.5", "near_one", 0.003, 0.0045),
    "cos0.8": KeySet("cos0.8", "near_one", 0.003, 0.006),
    "cos0.99": KeySet("cos0.99", "near_one", 0.003, 0.015),
    "equal": KeySet("equal", "near_one", 0.003, 0.015),
}


def exact_prepare(inputs: GdnInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(w [B, H, T, K], u [B, H, T, V], G [B, H, T] natural log), fp64; zero outside the sequences.

    Gates below -700 count as -700, whose exponential is 1e-304.
    """
    k, v, g, beta = (x.double() for x in (inputs.k, inputs.v, inputs.g, inputs.beta))
    tokens, num_heads = v.shape[1:3]
    k = k.repeat_interleave(num_heads // inputs.num_key_heads, dim=2).transpose(1, 2)
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2).clamp(min=-700.0), beta.transpose(1, 2)
    w, u = torch.zeros_like(k), torch.zeros_like(v)
    g_cumsum = torch.zeros_like(g)
    begin = 0
    for length in inputs.seq_lens if inputs.cu_seqlens is not None else (tokens,):
        for start in range(begin, begin + length, 64):
            rows = slice(start, min(start + 64, begin + length))
            gate = g[:, :, rows].cumsum(-1)
            ks, gain = k[:, :, rows], beta[:, :, rows, None]
            a = gain * (ks @ ks.transpose(-1, -2)) * (gate[..., :, None] - gate[..., None, :]).tril(-1).exp()
            system = a.tril(-1) + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
            sides = torch.cat((gain * v[:, :, rows], gain * gate.exp()[..., None] * ks), dim=-1)
            solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
            u[:, :, rows], w[:, :, rows] = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
            g_cumsum[:, :, rows] = gate
        begin += length
    return w, u, g_cumsum
