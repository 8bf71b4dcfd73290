"""Inputs of the block, drawn on the CPU so that every device gets the same values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Gate = Literal["weak", "mixed", "strong", "zero", "closed", "minus100", "alternating"]
Keys = Literal["random", "cos0.5", "cos0.8", "cos0.99", "equal"]
Beta = Literal["uniform", "near_one", "one"]
State = Literal["none", "random", "zeros"]

KEY_NOISE: dict[Keys, float] = {"cos0.5": 1.0, "cos0.8": 0.5, "cos0.99": 0.1, "equal": 0.0}
"""s of k = normalize(b + s * noise) with |b| = |noise| = 1: the cosine of two keys is about 1 / (1 + s^2)."""

CLOSED_TOKENS = (0, 63, 64, -1)
"""Tokens of each sequence (where it has them) at which the "closed" gate is -inf, and -1e4 in odd heads."""


@dataclass(frozen=True)
class GdnInputs:
    """Arguments of one call: q, k [B, T, Hg, K], v [B, T, H, V], g, beta [B, T, H], initial_state [N, H, V, K] or None.

    ``cu_seqlens`` is None for a dense batch. ``seq_lens`` has one length per sequence either way.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    seq_lens: tuple[int, ...]

    @property
    def num_seqs(self) -> int:
        """N: sequences of a varlen call, rows of a dense one."""
        return len(self.seq_lens)

    @property
    def num_heads(self) -> int:
        """H, value heads."""
        return self.v.shape[2]

    @property
    def num_key_heads(self) -> int:
        """Hg, heads of q and k."""
        return self.k.shape[2]

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a sequence, per batch row."""
        return sum(self.seq_lens) if self.cu_seqlens is not None else self.k.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, g, beta), the positional arguments of the block."""
        return self.q, self.k, self.v, self.g, self.beta

    def sequence(self, n: int) -> GdnInputs:
        """Sequence n alone, as a dense call of batch 1 (views of the same memory)."""
        state = None if self.initial_state is None else self.initial_state[n : n + 1]
        if self.cu_seqlens is None:
            return self._slice(slice(n, n + 1), slice(None), state)
        begin = sum(self.seq_lens[:n])
        return self._slice(slice(None), slice(begin, begin + self.seq_lens[n]), state)

    def tokens(self, begin: int, end: int, initial_state: Tensor | None) -> GdnInputs:
        """Tokens [begin, end) of a dense call, starting from ``initial_state``."""
        if self.cu_seqlens is not None:
            raise ValueError("cu_seqlens: got a varlen call, expected a dense one")
        return self._slice(slice(None), slice(begin, end), initial_state)

    def _slice(self, rows: slice, tokens: slice, initial_state: Tensor | None) -> GdnInputs:
        q, k, v, g, beta = (x[rows, tokens] for x in self.tensors)
        return GdnInputs(q, k, v, g, beta, initial_state, None, (q.shape[1],) * q.shape[0])

    def with_(self, **changes: object) -> GdnInputs:
        """A copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]


def make_inputs(
    shape: Sequence[int],
    num_heads: int = 4,
    num_key_heads: int = 2,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gate: Gate = "mixed",
    keys: Keys = "random",
    beta: Beta = "uniform",
    beta_dtype: torch.dtype = torch.float32,
    normalize: bool = True,
    state: State = "none",
    state_dtype: torch.dtype = torch.float32,
    spare_rows: int = 0,
    cu_dtype: torch.dtype = torch.int32,
    head_dim: int = 128,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> GdnInputs:
    """Draw the inputs of one call.

    Args:
        shape: a list of sequence lengths (varlen, B = 1), or a tuple (batch, tokens) (dense).
        num_heads, num_key_heads: H and Hg.
        gate: log gates per token: "weak" about -0.01 (a state lives for several chunks), "mixed" a soft-plus of a
            normal variable times a rate per head from 0.02 to 2, "strong" -2..-8, "zero" 0, "closed" weak with
            ``CLOSED_TOKENS`` shut, "minus100" -100 everywhere, "alternating" 0, -5, 0, -5, ...
        keys: "random", or clusters of the cosine named ("equal" = one key per head for all tokens).
        beta: "uniform" in (0, 1), "near_one" in (0.95, 1), or "one".
        normalize: scale q and k to length 1 before rounding to ``dtype``.
        state: initial states: none, normal variables of deviation 0.1, or zeros; [N, H, V, K] of ``state_dtype``.
        spare_rows: NaN rows after the last token: inside the tensors of a varlen call, outside the views of a dense
            one.
        cu_dtype: int32 or int64.
    """
    if not isinstance(shape, (list, tuple)):
        raise TypeError(f"shape: got {type(shape).__name__}, expected a list of lengths or a tuple (batch, tokens)")
    if isinstance(shape, list):
        batch, tokens, seq_lens = 1, sum(shape), tuple(shape)
    else:
        batch, tokens = shape
        seq_lens = (tokens,) * batch
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=gen)

    q = normal(batch, tokens, num_key_heads, head_dim)
    k = normal(batch, tokens, num_key_heads, head_dim)
    if keys != "random":
        k = _unit(normal(1, 1, num_key_heads, head_dim)) + KEY_NOISE[keys] * _unit(k)
    if normalize:
        q, k = _unit(q), _unit(k)
    v = normal(batch, tokens, num_heads, head_dim)
    size = (batch, tokens, num_heads)
    g = _gates(gate, normal(*size), uniform(*size), list(seq_lens) if isinstance(shape, list) else [tokens])
    gains = torch.ones(size) if beta == "one" else uniform(*size)
    if beta == "near_one":
        gains = 0.95 + 0.05 * gains
    states = None
    if state != "none":
        states = torch.zeros(len(seq_lens), num_heads, head_dim, head_dim)
        if state == "random":
            states = 0.1 * normal(*states.shape)
        states = states.to(device, state_dtype)

    def place(x: Tensor, to: torch.dtype) -> Tensor:
        padded = torch.full((batch, tokens + spare_rows, *x.shape[2:]), float("nan"), dtype=to)
        padded[:, :tokens] = x.to(to)
        return padded.to(device) if isinstance(shape, list) else padded.to(device)[:, :tokens]

    cu_seqlens = None
    if isinstance(shape, list):
        cu_seqlens = torch.tensor([0, *torch.tensor(shape).cumsum(0).tolist()], dtype=cu_dtype, device=device)
    return GdnInputs(
        q=place(q, dtype),
        k=place(k, dtype),
        v=place(v, dtype),
        g=place(g, torch.float32),
        beta=place(gains, beta_dtype),
        initial_state=states,
        cu_seqlens=cu_seqlens,
        seq_lens=seq_lens,
    )


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _gates(gate: Gate, normal: Tensor, uniform: Tensor, seq_lens: list[int]) -> Tensor:
    """Log gates [B, T, H] of one of the patterns of ``make_inputs``."""
    if gate == "zero":
        return torch.zeros_like(normal)
    if gate == "minus100":
        return torch.full_like(normal, -100.0)
    if gate == "strong":
        return -2.0 - 6.0 * uniform
    if gate == "mixed":
        # Rates differ per head and batch row, so a gate read from the wrong place shows.
        batch, _, heads = normal.shape
        rate = torch.logspace(-1.7, 0.3, batch * heads).reshape(batch, 1, heads)
        return -rate * torch.nn.functional.softplus(normal)
    if gate == "alternating":
        return torch.where(torch.arange(normal.shape[1]) % 2 == 0, 0.0, -5.0)[None, :, None].expand_as(normal).clone()
    g = -0.005 - 0.01 * uniform
    if gate == "closed":
        begin = 0
        for length in seq_lens:
            for token in CLOSED_TOKENS:
                if token < length and length:
                    row = begin + (token if token >= 0 else length - 1)
                    g[:, row, 0::2] = float("-inf")
                    g[:, row, 1::2] = -1e4
            begin += length
    return g
