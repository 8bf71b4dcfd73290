"""The chunked block in torch, stage by stage, rounding where the kernels round.

Notation: C chunks, R = H // Hg value heads per key head, dt = dtype of k. Products of two dt operands are formed in
fp32 from the widened operands, which is what a tensor core does up to the order of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import ChunkPlan
from ..spec import CHUNK, GATE_MIN, LOG2E, L2NormSpec, OutputSpec, PrepareSpec, StateScanSpec
from .chunks import ChunkTable


def l2norm(q: Tensor, k: Tensor, *, q_out: Tensor, k_out: Tensor, spec: L2NormSpec | None = None) -> None:
    """q_out, k_out <- x * rsqrt(sum(x^2) + 1e-6) over the last axis, in fp32, rounded once. All [B, T, Hg, K]."""
    del spec
    for x, out in ((q, q_out), (k, k_out)):
        wide = x.float()
        out.copy_(wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt())


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
    spec: PrepareSpec | None = None,
) -> None:
    """K1..K4: chunk-local cumulative gate, and w, u of the WY form.

    Reads k [B, T, Hg, K], v [B, T, H, V], g [B, T, H] fp32 natural log, beta [B, T, H]; writes w [B, H, T, K] and
    u [B, H, T, V] (dtype of k), g_cumsum [B, H, T] fp32, times log2(e) iff ``use_exp2``. With G the cumulative gate of
    the chunk and A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j) for i > j: C = (I + A)^-1, u = dt(C beta_j) v and
    w = dt(C beta_j exp(G_j)) k. Rows outside every sequence are neither read nor written.
    """
    del spec
    num_heads = v.shape[2]
    eye = torch.eye(CHUNK, device=k.device)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril(-1)
    for chunks in ChunkTable(plan).blocks(num_heads, k.device):
        gate = chunks.gather(g.float()).transpose(1, 2)
        gate = torch.where(gate < GATE_MIN, GATE_MIN, gate).cumsum(-1)
        gains = chunks.gather(beta).float().transpose(1, 2)
        keys = _head_major(chunks.gather(k))
        values = _head_major(chunks.gather(v))

        kk = keys @ keys.transpose(-1, -2)
        a = _repeat_heads(kk, num_heads) * _decay(gate, gate, lower) * gains[..., None]
        inverse = torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
        t_u = inverse * gains[..., None, :]
        t_w = t_u * gate.exp()[..., None, :]
        chunks.scatter(u.transpose(1, 2), (_round(t_u, k.dtype) @ values).transpose(1, 2))
        chunks.scatter(w.transpose(1, 2), _per_key_head(_round(t_w, k.dtype), keys).transpose(1, 2))
        chunks.scatter(g_cumsum.transpose(1, 2), (gate * LOG2E if use_exp2 else gate).transpose(1, 2))


def state_scan(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    g: Tensor | None,
    gk: Tensor | None,
    h: Tensor,
    v_new: Tensor | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    plan: ChunkPlan,
    use_exp2: bool,
    g_head_major: bool,
    spec: StateScanSpec | None = None,
) -> None:
    """K5: the serial pass over chunks. Per sequence, head and chunk c, with S [V, K] in fp32::

        h[c] = S;  Vn = u - w dt(S)^T;  v_new = dt(Vn);  S <- exp(G_L) S + dt(Vn exp(G_L - G))^T k

    G_L is the cumulative gate of the chunk's last token; with ``gk``, column i of S is also scaled by exp(gk_L[i]).

    Reads k [B, T, Hg, K], w [B, H, T, K], u [B, H, T, V]; g fp32 [B, H, T] if ``g_head_major`` else [B, T, H], in log2
    units iff ``use_exp2``, or None (no decay); gk fp32 [B, T, H, K] natural log or None. Writes h [1, total_chunks, H,
    V, K] or dense [B, NT, H, V, K], v_new [B, H, T, V] unless None, and final_state unless None.
    States are [N, H, V, K], or a pool [slots, H, V, K] when ``state_indices`` [N] (int32 or int64) is given; sequence n
    reads and writes slot ``state_indices[n]``. A slot outside [0, slots) starts from zeros and is not written.
    Sequences whose ``has_initial_state`` [N] is False start from zeros whatever the slot holds. ``final_state`` may be
    ``initial_state``: every read comes before the first write.
    """
    del spec
    num_seqs, num_heads, head_v, head_k = plan.num_seqs, u.shape[1], u.shape[3], k.shape[3]
    dt = k.dtype
    table = ChunkTable(plan)
    # Longest sequences first: the sequences that still have a chunk c are then a prefix of the state.
    counts, by_length = table.counts.sort(descending=True, stable=True)
    first = table.first[by_length]
    order = by_length.to(k.device)
    slots = order if state_indices is None else state_indices.long()[order]
    state = _load_states(initial_state, slots, (num_seqs, num_heads, head_v, head_k), k.device)
    if has_initial_state is not None:
        state[~has_initial_state[order]] = 0.0

    snapshots = h.view(plan.total_chunks, num_heads, head_v, head_k)
    if g is not None and g_head_major:
        g = g.transpose(1, 2)
    for c in range(plan.max_seq_chunks):
        active = int((counts > c).sum())
        chunks = table.select(first[:active] + c, k.device)
        s = state[:active]
        snapshots[chunks.index] = s.to(h.dtype)

        vn = _head_major(chunks.gather(u.transpose(1, 2)))
        vn = vn - _head_major(chunks.gather(w.transpose(1, 2))) @ _round(s, dt).transpose(-1, -2)
        if v_new is not None:
            chunks.scatter(v_new.transpose(1, 2), vn.to(v_new.dtype).transpose(1, 2))
        if g is not None:
            gate = chunks.gather(g).transpose(1, 2)
            last = gate.gather(-1, (chunks.lengths - 1)[:, None, None].expand(-1, num_heads, 1))
            rest = (last - gate).masked_fill(~chunks.valid[:, None], float("-inf"))
            vn = vn * _exp(rest, use_exp2)[..., None]
            s.mul_(_exp(last, use_exp2)[..., None])
        if gk is not None:
            batch, rows = chunks.last_rows()
            s.mul_(gk[batch, rows].exp()[:, :, None, :])
        keys = _head_major(chunks.gather(k))
        s += _per_key_head(_round(vn, dt).transpose(-1, -2), keys)
    if final_state is not None:
        _store_states(final_state, slots, state)


def output(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    g_cumsum: Tensor,
    *,
    o: Tensor,
    scale: float,
    plan: ChunkPlan,
    use_exp2: bool,
    spec: OutputSpec | None = None,
) -> None:
    """K6: o = scale * (exp(G_i) (q_i dt(h)^T) + dt(tril(exp(G_i - G_j) q_i . k_j)) v_new).

    Reads q, k [B, T, Hg, K], v_new [B, H, T, V], h [1, total_chunks, H, V, K] or [B, NT, H, V, K], g_cumsum [B, H, T]
    (log2 units iff ``use_exp2``); writes o [B, T, H, V] for every token of a sequence and no other row.
    """
    del spec
    num_heads, head_v = v_new.shape[1], v_new.shape[3]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril()
    snapshots = h.view(plan.total_chunks, *h.shape[2:])
    for chunks in ChunkTable(plan).blocks(num_heads, k.device):
        queries, keys = _head_major(chunks.gather(q)), _head_major(chunks.gather(k))
        gate = chunks.gather(g_cumsum.transpose(1, 2)).transpose(1, 2)
        states = _round(snapshots[chunks.index], k.dtype)
        # [C, Hg, 64, K] x [C, Hg, K, R * V]: the R value heads of a key head share its queries.
        inter = queries @ states.reshape(*queries.shape[:2], -1, queries.shape[-1]).transpose(-1, -2)
        inter = inter.reshape(*queries.shape[:3], -1, head_v).transpose(2, 3).flatten(1, 2)
        attention = _repeat_heads(queries @ keys.transpose(-1, -2), num_heads)
        # Rows past a sequence's end may turn NaN here (their gate is 0): no other row sees them, none is written.
        attention = attention * _decay(gate, gate, lower, use_exp2)
        intra = _round(attention, k.dtype) @ _head_major(chunks.gather(v_new.transpose(1, 2)))
        chunks.scatter(o, (scale * (_exp(gate, use_exp2)[..., None] * inter + intra)).transpose(1, 2))


def _load_states(source: Tensor | None, slots: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    state = torch.zeros(shape, device=device)
    if source is not None:
        owned = (slots >= 0) & (slots < source.shape[0])
        state[owned] = source[slots[owned]].float()
    return state


def _store_states(target: Tensor, slots: Tensor, state: Tensor) -> None:
    owned = (slots >= 0) & (slots < target.shape[0])
    target[slots[owned]] = state[owned].to(target.dtype)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to ``dtype`` (nearest even) and widened to fp32 again: a matrix operand."""
    return x.to(dtype).float()


def _head_major(x: Tensor) -> Tensor:
    """[C, 64, heads, D] -> fp32 [C, heads, 64, D]."""
    return x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[C, Hg, ...] -> [C, H, ...]: value head i sees key head i // R."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _per_key_head(left: Tensor, right: Tensor) -> Tensor:
    """left [C, H, M, 64] @ right [C, Hg, 64, K] -> [C, H, M, K] without repeating ``right`` for its R value heads."""
    stacked = left.reshape(*right.shape[:2], -1, left.shape[-1])
    return (stacked @ right).reshape(*left.shape[:3], right.shape[-1])


def _exp(x: Tensor, use_exp2: bool) -> Tensor:
    """exp of a gate in natural or log2 units.

    Not torch.exp2: on a CPU it gives short tensors other bits than long ones (measured: 1 element in 16), so the result
    of a sequence would depend on its neighbours.
    """
    return torch.exp(x / LOG2E if use_exp2 else x)


def _decay(gate_i: Tensor, gate_j: Tensor, keep: Tensor, use_exp2: bool = False) -> Tensor:
    """exp(G_i - G_j) where ``keep``, else 0. Masked before the exponential: a masked difference may be positive."""
    difference = gate_i[..., :, None] - gate_j[..., None, :]
    return _exp(difference.masked_fill(~keep, float("-inf")), use_exp2)
