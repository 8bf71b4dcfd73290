"""FP8 products of Hopper's matrix unit, which add in less than fp32, and what that may do to a decode.

Of each instruction, 32 elements of the inner dimension, the products and the sum so far are cut, towards zero, below
2^-13 of the largest of them (DeepSeek-V3 technical report, 3.3.2, "about 14 bits"). Scores are then off by up to a few
per cent of their largest product; where that takes P over a boundary between two FP8 numbers, a weight is one FP8 step
off, 2^-3 to 2^-4 of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_runtime.spec import LOG2E
from pa_decode.layouts import scale_mode
from pa_decode.quantise import FN, encode, quantise_rows
from pa_decode.reference import DecodeInputs, _gather, _Tokens

BITS = 13
INSTRUCTION = 32
CHAIN = 256
"""Elements that are added up in the matrix unit before fp32 takes over: a head, or at most so many tokens."""
CUT = CHAIN // INSTRUCTION * (INSTRUCTION + 1) * 2.0**-BITS
"""Error of a chain over the largest product or sum in it: every term of every instruction cut by one place."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [.., M, K] times b [.., K, N], FP8 values in fp32, as the matrix unit adds them."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[-1], CHAIN):
        added = torch.zeros((), dtype=torch.float64, device=a.device)
        for first in range(start, min(start + CHAIN, a.shape[-1]), INSTRUCTION):
            inner = slice(first, min(first + INSTRUCTION, a.shape[-1]))
            terms = a[..., inner].double().unsqueeze(-1) * b[..., inner, :].double().unsqueeze(-3)
            largest = torch.maximum(terms.abs().amax(-2), added.abs())
            place = torch.exp2(largest.clamp(min=1e-30).log2().floor() - BITS)
            added = (terms / place.unsqueeze(-2)).trunc().sum(-2) * place + (added / place).trunc() * place
        total = total + added.float()
    return total.float()


def slack(inputs: DecodeInputs) -> Tensor:
    """What ``reference.decode_quantised`` and a kernel on the matrix unit may differ by, [B QL, Hq, D] in fp32: every
    weight that a score within its error rounds elsewhere is wrong by that, and products with V by their own error."""
    bound = torch.zeros(inputs.query.shape, dtype=torch.float32, device=inputs.query.device)
    for sequence, context in enumerate(inputs.seq_lens.tolist()):
        for query in range(inputs.query_length):
            first, end = inputs.visible(context, query)
            if first < end:
                row = sequence * inputs.query_length + query
                rows = inputs.query[row].float().unflatten(0, (inputs.num_kv_heads, -1))
                tokens = _gather(inputs, sequence, first, end)
                groups = [_slack(inputs, rows[:, g], tokens, g) for g in range(rows.shape[1])]
                bound[row] = torch.stack(groups, 1).flatten(0, 1)
    return bound


def _slack(inputs: DecodeInputs, query: Tensor, tokens: _Tokens, group: int) -> Tensor:
    """Of one row of each KV head, ``query`` [Hkv, D]: [Hkv, D]."""
    rounded, query_scale = quantise_rows(query, FN)
    units = inputs.softmax_scale * LOG2E * query_scale.unsqueeze(-1) * tokens.k_scale
    terms = tokens.k * rounded.float().unsqueeze(1)
    sums = terms.unflatten(-1, (-1, INSTRUCTION)).sum(-1).cumsum(-1)
    error = CUT * torch.maximum(terms.abs().amax(-1), sums.abs().amax(-1)) * units.abs()
    scores = sums[..., -1] * units
    exponent = scores.amax(-1, keepdim=True).ceil()
    share = torch.ones_like(scores)
    if scale_mode("v_scale", inputs.v_scale) == "token":
        share = tokens.v_scale / torch.exp2(tokens.v_scale.amax(-1, keepdim=True).clamp(min=1e-30).log2().ceil())
    share = share.clamp(min=1e-30)
    scale = tokens.v_scale / share

    def weighed(x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of V and what the row is divided by, times 2^8."""
        p = torch.exp2(x - exponent + FN.probability_exponent)
        weights = encode(p * share, FN).float()
        return weights, torch.where(weights >= torch.finfo(FN.dtype).smallest_normal, weights / share, p)

    weights, divided = weighed(scores)
    others = [weighed(scores + error), weighed(scores - error)]
    off = torch.stack([(other - weights).abs() for other, _ in others]).amax(0)
    off_divided = torch.stack([(other - divided).abs() for _, other in others]).amax(0)
    sink = torch.zeros_like(exponent)
    if inputs.sinks is not None:
        logit = inputs.sinks.float().view(query.shape[0], -1)[:, group, None] * LOG2E
        sink = torch.exp2(logit - exponent + FN.probability_exponent)
    values = tokens.v * scale.unsqueeze(-1)
    out = (weights.unsqueeze(-1) * values).sum(1) / (divided.sum(-1, keepdim=True) + sink)
    # A weight and its part of the sum move together.
    moved = off.unsqueeze(-1) * (values - out.unsqueeze(1) / share.unsqueeze(-1)).abs()
    alone = (off_divided - off / share).clamp(min=0).sum(-1, keepdim=True) * out.abs()
    added = CUT * (weights.unsqueeze(-1) * values.abs()).sum(1)
    least = torch.minimum(divided, torch.minimum(others[0][1], others[1][1])).sum(-1, keepdim=True) + sink
    return (moved.sum(1) + alone + added) / least
