"""The gated delta rule as its definition: one state update per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    use_qk_l2norm: bool = False,
    gk: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token (Yang et al., "Gated Delta Networks", arXiv 2412.06464, eq. 10).

    Per sequence and value head, with the state S [V, K] and key head h // (H // Hg)::

        S <- exp(g_t) S;   S <- S + beta_t (v_t - S k_t) k_t^T;   o_t = scale * S q_t

    Args:
        q, k: [B, T, Hg, K], any floating dtype; taken as they are (widened to ``dtype``).
        v: [B, T, H, V], H a multiple of Hg.
        g: [B, T, H] log decay per token in natural units, or None for no decay. -inf clears the state.
        beta: [B, T, H] write strength.
        scale: factor of the output, K ** -0.5 if None.
        initial_state: [N, H, V, K] or None for zeros; N = B, or the number of sequences with ``cu_seqlens``.
        cu_seqlens: [N + 1] token offsets of packed sequences (then B == 1), a tensor or a list. Rows past the last
            offset are not read; their outputs are zero.
        use_qk_l2norm: replace x of q and k by x * rsqrt(sum(x^2) + 1e-6) first, without rounding.
        gk: [B, T, H, K] further log decay per token and key feature, natural units (columns of S), or None.
        dtype: dtype of the whole computation and of both results.

    Returns:
        o [B, T, H, V] and final_state [N, H, V, K], both of ``dtype``.
    """
    batch, tokens, num_key_heads, head_k = k.shape
    num_heads, head_v = v.shape[2:]
    scale = head_k**-0.5 if scale is None else scale
    if cu_seqlens is None:
        spans = [(slice(None), 0, tokens, slice(0, batch))]
        num_seqs = batch
    else:
        offsets = [int(x) for x in cu_seqlens]
        num_seqs = len(offsets) - 1
        spans = [(slice(0, 1), offsets[n], offsets[n + 1], slice(n, n + 1)) for n in range(num_seqs)]

    o = torch.zeros(batch, tokens, num_heads, head_v, dtype=dtype, device=v.device)
    state = torch.zeros(num_seqs, num_heads, head_v, head_k, dtype=dtype, device=v.device)
    if initial_state is not None:
        state.copy_(initial_state)
    group = num_heads // num_key_heads

    for rows, begin, end, seqs in spans:
        # One sequence (or the whole dense batch) as [T, sequences * H, ...].
        def steps(x: Tensor, rows: slice = rows, begin: int = begin, end: int = end) -> Tensor:
            return x[rows, begin:end].to(dtype).movedim(1, 0).flatten(1, 2)

        qs, ks = steps(q), steps(k)
        if use_qk_l2norm:
            qs, ks = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (qs, ks))
        qs, ks = (x.repeat_interleave(group, dim=1) for x in (qs, ks))
        vs, betas = steps(v), steps(beta)
        decay = None if g is None else steps(g).exp()[..., None]
        if gk is not None:
            decay_k = steps(gk).exp()
            decay = decay_k if decay is None else decay * decay_k
        s = state[seqs].flatten(0, 1)
        out = torch.empty_like(vs)
        for t in range(end - begin):
            if decay is not None:
                s.mul_(decay[t, :, None, :])
            error = vs[t] - torch.bmm(s, ks[t, :, :, None])[..., 0]
            s.baddbmm_((betas[t, :, None] * error)[..., None], ks[t, :, None, :])
            out[t] = torch.bmm(s, qs[t, :, :, None])[..., 0]
        o[rows, begin:end] = scale * out.reshape(end - begin, vs.shape[1] // num_heads, num_heads, head_v).movedim(0, 1)
    return o, state
