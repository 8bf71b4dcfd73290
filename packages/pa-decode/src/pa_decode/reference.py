"""Two oracles of decode in torch, and the merge of partials.

``decode``: fp32 on the dequantised cache and the query as it is. ``decode_quantised``: the same with the query and P
rounded to FP8 as the kernels do. Both loop over sequences and query tokens and slice what a token sees, so that nothing
behind a mask can reach a result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gdn_runtime.spec import LOG2E

from .layouts import Scale, scale_mode, unpack_k, unpack_v
from .quantise import Flavour, encode, flavour_of, quantise_rows
from .traits import TILE, cdiv

LN2 = math.log(2.0)

Denominator = Literal["matched", "rounded", "exact"]
"""What a row is divided by.

"exact": the sum of P before it is rounded. "rounded": the sum of P rounded to FP8. "matched": the sum of the rounded
weights of V over their V scale, or of P where a weight is below the normal numbers of FP8; then a row that sees one
token is that token.
"""


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of a decode call, see ``spec.AttentionSpec``; scales may be floats. ``sinks`` [Hq] are natural
    logarithms, not scaled. ``window``: 0 or the tokens that a query token sees, its own included."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    softmax_scale: float
    query_length: int = 1
    k_scale: Scale = None
    v_scale: Scale = None
    sinks: Tensor | None = None
    window: int = 0

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.k_cache.shape[1]

    def visible(self, context: int, query: int) -> tuple[int, int]:
        """First and end token that query token ``query`` of a sequence of ``context`` tokens sees."""
        end = max(context - self.query_length + query + 1, 0)
        return (max(0, end - self.window) if self.window else 0), end


@dataclass(frozen=True)
class _Tokens:
    """FP8 values as fp32 [Hkv, tokens, D] and scales [Hkv, tokens] of tokens [start, ..) of a sequence."""

    start: int
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor

    def cut(self, first: int, end: int) -> _Tokens:
        part = slice(first - self.start, end - self.start)
        return _Tokens(first, self.k[:, part], self.v[:, part], self.k_scale[:, part], self.v_scale[:, part])


def _gather(inputs: DecodeInputs, sequence: int, first: int, end: int) -> _Tokens:
    """Tokens [first, end), first < end; only their pages are looked up."""
    page = inputs.k_cache.shape[3]
    ids = inputs.block_tables[sequence, first // page : cdiv(end, page)].long()
    k = unpack_k(inputs.k_cache[ids]).float().flatten(0, 1).transpose(0, 1)
    v = unpack_v(inputs.v_cache[ids]).float().flatten(0, 1).transpose(0, 1)
    scales = [_token_scales(name, value, ids, k) for name, value in (("k", inputs.k_scale), ("v", inputs.v_scale))]
    return _Tokens(first // page * page, k, v, scales[0], scales[1]).cut(first, end)


def _token_scales(name: str, scale: Scale, ids: Tensor, like: Tensor) -> Tensor:
    if scale_mode(f"{name}_scale", scale) == "token":
        assert isinstance(scale, Tensor)
        return scale[ids].flatten(2).transpose(0, 1).flatten(1)
    value = 1.0 if scale is None else float(scale)
    return torch.full(like.shape[:2], value, dtype=torch.float32, device=like.device)


@dataclass(frozen=True)
class _Partial:
    """Rows of one query token: ``out`` [Hkv, G, D] normalised, ``reference`` (natural) and ``sum`` [Hkv, G]."""

    out: Tensor
    reference: Tensor
    sum: Tensor


Attend = Callable[[DecodeInputs, Tensor, _Tokens], _Partial]
Multiply = Callable[[Tensor, Tensor], Tensor]
"""Product of two batches of matrices of FP8 values, in fp32."""


def _attend(inputs: DecodeInputs, query: Tensor, tokens: _Tokens) -> _Partial:
    """``query`` [Hkv, G, D] fp32 on tokens that all its rows see, at least one."""
    scores = query @ tokens.k.transpose(1, 2) * (inputs.softmax_scale * tokens.k_scale).unsqueeze(1)
    reference = scores.amax(-1)
    weights = torch.exp(scores - reference.unsqueeze(-1))
    total = weights.sum(-1)
    out = weights @ (tokens.v * tokens.v_scale.unsqueeze(-1)) / total.unsqueeze(-1)
    return _Partial(out, reference, total)


def _attend_quantised(
    inputs: DecodeInputs, query: Tensor, tokens: _Tokens, *, denominator: Denominator, multiply: Multiply
) -> _Partial:
    """As ``_attend`` with the query rounded per row, and P per row and token.

    P is 2^(score - e) with the integer e = ceil(largest score in log2 units), times the power of two that takes 1 to
    the top of the flavour; per token, also times V scale / 2^f with f = ceil(log2 of the largest V scale). Powers of
    two do not move what rounding to 4 significant bits does, so that other references give the same P, but for what
    falls below the smallest normal number of FP8.
    """
    flavour = flavour_of("k_cache", inputs.k_cache.dtype)
    rounded, query_scale = quantise_rows(query, flavour)
    units = inputs.softmax_scale * LOG2E * query_scale.unsqueeze(-1) * tokens.k_scale.unsqueeze(1)
    scores = multiply(rounded.float(), tokens.k.transpose(1, 2)) * units
    reference = scores.amax(-1).ceil()
    p = torch.exp2(scores - reference.unsqueeze(-1))
    if scale_mode("v_scale", inputs.v_scale) == "token":
        largest = tokens.v_scale.amax(-1)
        top = torch.exp2(torch.where(largest > 0, largest, 1.0).log2().ceil())
    else:
        top = tokens.v_scale[:, 0]
    share = torch.where(top > 0, tokens.v_scale.T / top, 0.0).T.unsqueeze(1)
    weights = _round_p(p * share, flavour)
    if denominator == "exact":
        divided = p
    elif denominator == "rounded":
        divided = _round_p(p, flavour)
    else:
        normal = weights >= torch.finfo(flavour.dtype).smallest_normal / 2.0**flavour.probability_exponent
        divided = torch.where(normal, weights / share, p)
    total = divided.sum(-1)
    values = multiply(weights, tokens.v)
    return _Partial(values * top[:, None, None] / total.unsqueeze(-1), reference * LN2, total)


def _round_p(p: Tensor, flavour: Flavour) -> Tensor:
    unit = 2.0**flavour.probability_exponent
    return encode(p * unit, flavour).float() / unit


def _partials(
    inputs: DecodeInputs, sequence: int, context: int, first: int, end: int, attend: Attend
) -> Iterator[tuple[int, _Partial]]:
    """(query token, its rows) for those that see some of tokens [first, end) of a sequence."""
    flavour_of("k_cache", inputs.k_cache.dtype)  # bytes are no values
    ranges = [inputs.visible(context, query) for query in range(inputs.query_length)]
    ranges = [(max(low, first), min(high, end)) for low, high in ranges]
    used = [(low, high) for low, high in ranges if low < high]
    if not used:
        return
    tokens = _gather(inputs, sequence, min(low for low, _ in used), max(high for _, high in used))
    for query, (low, high) in enumerate(ranges):
        if low < high:
            rows = inputs.query[sequence * inputs.query_length + query].float()
            rows = rows.unflatten(0, (inputs.num_kv_heads, -1))
            yield query, attend(inputs, rows, tokens.cut(low, high))


def decode(inputs: DecodeInputs) -> Tensor:
    """Attention [B*QL, Hq, D] in fp32, the query not rounded. Rows that see nothing are zero."""
    return _decode(inputs, _attend)


def decode_quantised(
    inputs: DecodeInputs, *, denominator: Denominator = "matched", multiply: Multiply = torch.matmul
) -> Tensor:
    """As ``decode`` with the query and P rounded to the flavour of the cache; see ``_attend_quantised``. ``multiply``:
    the product of FP8 values, for matrix units that add in less than fp32."""
    return _decode(inputs, functools.partial(_attend_quantised, denominator=denominator, multiply=multiply))


def _decode(inputs: DecodeInputs, attend: Attend) -> Tensor:
    out = torch.zeros(inputs.query.shape, dtype=torch.float32, device=inputs.query.device)
    for sequence, context in enumerate(inputs.seq_lens.tolist()):
        for query, part in _partials(inputs, sequence, context, 0, context, attend):
            rows = merge_rows(part.out[None], part.reference[None], part.sum[None], _sinks(inputs.sinks, part))
            out[sequence * inputs.query_length + query] = rows.flatten(0, 1)
    return out


def _sinks(sinks: Tensor | None, part: _Partial) -> Tensor | None:
    return None if sinks is None else sinks.float().reshape(part.sum.shape)


def merge_rows(out: Tensor, reference: Tensor, total: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge partials over their first dimension: ``out`` [parts, .., D], ``reference`` and ``total`` [parts, ..].

    M = max(references, sink), w = total * exp(reference - M), result = sum(w out) / (sum(w) + exp(sink - M)); zero
    where that is 0 / 0, where nothing is visible (reference -inf), and for a sink of +inf.
    """
    out, total = out.float(), total.float()
    nothing = torch.full_like(total[0], -math.inf)
    sink = nothing if sinks is None else sinks.float().expand_as(nothing)
    largest = torch.maximum(reference.amax(0), sink)
    infinite = largest == math.inf
    safe = torch.where(largest.isfinite(), largest, 0.0)
    weights = torch.where(reference == -math.inf, 0.0, total * torch.exp(reference - safe))
    weights = torch.where(infinite, 0.0, weights)
    denominator = weights.sum(0) + torch.where(infinite, 1.0, torch.exp(sink - safe))
    share = torch.where(denominator == 0, 0.0, weights / denominator).unsqueeze(-1)
    return torch.where(share == 0, 0.0, share * out).sum(0)


def partials(
    inputs: DecodeInputs, work_info: Tensor, *, denominator: Denominator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the attention kernels write for a plan: partial_out [Hkv, capacity, R, D] of the query's dtype, partial_max
    and partial_sum fp32 [Hkv, capacity, R]; of unused slots NaN. ``denominator`` None: nothing is rounded to FP8."""
    capacity, heads, group = work_info.shape[0], inputs.num_kv_heads, inputs.query.shape[1] // inputs.num_kv_heads
    shape = heads, capacity, inputs.query_length * group
    attend: Attend = _attend
    if denominator is not None:
        attend = functools.partial(_attend_quantised, denominator=denominator, multiply=torch.matmul)
    out = inputs.query.new_full((*shape, inputs.query.shape[2]), math.nan)
    reference, total = (inputs.query.new_full(shape, math.nan, dtype=torch.float32) for _ in range(2))
    for slot, (sequence, first, end, context) in enumerate(work_info.tolist()):
        if first == end:
            continue
        out[:, slot], reference[:, slot], total[:, slot] = 0.0, -math.inf, 0.0
        for query, part in _partials(inputs, sequence, context, first * TILE, min(end * TILE, context), attend):
            rows = slice(query * group, (query + 1) * group)
            out[:, slot, rows] = part.out.to(out.dtype)
            reference[:, slot, rows], total[:, slot, rows] = part.reference, part.sum
    return out, reference, total


def reduce(
    partial_out: Tensor,
    partial_max: Tensor,
    partial_sum: Tensor,
    reduce_info: Tensor,
    *,
    query_length: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the reducer writes: [B*QL, Hq, D] of the partials' dtype, merged in slot order in fp32."""
    heads, _, rows, head_dim = partial_out.shape
    group = rows // query_length
    out = partial_out.new_zeros((reduce_info.shape[0], query_length, heads, group, head_dim))
    sink = None if sinks is None else sinks.float().reshape(heads, 1, group).expand(-1, query_length, -1).flatten(1)
    for sequence, (first, count) in enumerate(reduce_info.tolist()):
        if count:
            part = slice(first, first + count)
            merged = merge_rows(
                partial_out[:, part].transpose(0, 1),
                partial_max[:, part].transpose(0, 1),
                partial_sum[:, part].transpose(0, 1),
                sink,
            )
            out[sequence] = merged.unflatten(1, (query_length, group)).transpose(0, 1).to(out.dtype)
    return out.flatten(0, 1).flatten(1, 2)
