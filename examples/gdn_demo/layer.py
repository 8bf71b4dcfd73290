"""The front of one Gated DeltaNet layer: from the bytes of a text to q, k, v, the gate g and the gain beta.

As in Qwen3.5: one projection of the hidden state gives the q, k and v channels, a causal convolution of width 4 and
SiLU follow, and two small projections give g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b). The weights
are random, the text is not, so keys repeat and cluster as those of real prompts do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = 256
HEAD_DIM = 128
CONV_WIDTH = 4
GROUP = 2  # value heads per key head, as in Qwen3.5 (32 and 16)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k [1, T, Hg, 128], v [1, T, H, 128], g, beta [1, T, H]: the first five arguments of the block."""


@dataclass(frozen=True)
class Rows:
    """One sequence of T tokens: fused ``qkv`` [T, (2 Hg + H) * 128] bf16, ``g`` and ``beta`` [T, H] fp32."""

    qkv: Tensor
    g: Tensor
    beta: Tensor

    def __len__(self) -> int:
        return len(self.g)

    def __getitem__(self, tokens: slice) -> Rows:
        return Rows(self.qkv[tokens], self.g[tokens], self.beta[tokens])


class Layer:
    """Random weights, fixed by ``seed``, of a layer with ``num_heads`` value heads."""

    def __init__(self, num_heads: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        channels = (2 * num_heads // GROUP + num_heads) * HEAD_DIM

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(*shape, generator=random)

        self.embedding = normal(256, HIDDEN)  # one row per byte
        self.to_qkv = normal(HIDDEN, channels) * HIDDEN**-0.5
        self.to_a = normal(HIDDEN, num_heads) * HIDDEN**-0.5
        self.to_b = normal(HIDDEN, num_heads) * HIDDEN**-0.5
        self.conv = uniform(-0.5, 0.5, channels, 1, CONV_WIDTH)
        # The initialisation that Mamba-2 and Gated DeltaNet use: decay rates of 0 to 16, time steps of 0.001 to 0.1.
        self.A_log = uniform(0.01, 16.0, num_heads).log()
        self.dt_bias = torch.special.expm1(uniform(-6.9, -2.3, num_heads).exp()).log()  # inverse of softplus

    def __call__(self, text: bytes) -> Rows:
        """The activations of one text, a token per byte."""
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.zeros(0).long()
        hidden = self.embedding[tokens]
        padded = F.pad((hidden @ self.to_qkv).T, (CONV_WIDTH - 1, 0))
        qkv = F.silu(F.conv1d(padded, self.conv, groups=len(self.conv))).T if text else padded.T[:0]
        g = -self.A_log.exp() * F.softplus(hidden @ self.to_a + self.dt_bias)
        return Rows(qkv.bfloat16(), g, (hidden @ self.to_b).sigmoid())


def pack(sequences: list[Rows], device: torch.device) -> Inputs:
    """The sequences one after the other, in a batch of one row. q, k and v are views of the fused rows: not copied."""
    qkv, g, beta = (
        torch.cat([getattr(rows, name) for rows in sequences])[None].to(device) for name in ("qkv", "g", "beta")
    )
    num_heads = g.shape[2]
    q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split((num_heads // GROUP, num_heads // GROUP, num_heads), dim=2)
    return q, k, v, g, beta
