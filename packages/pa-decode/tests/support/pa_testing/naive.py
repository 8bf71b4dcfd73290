"""Decode from its definition: one row and one token at a time, in fp64, cache elements by their byte offsets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pa_decode.reference import DecodeInputs


def naive_decode(inputs: DecodeInputs) -> Tensor:
    """[B*QL, Hq, D] in fp64."""
    out = torch.zeros(inputs.query.shape, dtype=torch.float64)
    k_flat = inputs.k_cache.reshape(-1).to(torch.float32)
    v_flat = inputs.v_cache.reshape(-1).to(torch.float32)
    _, heads, _, page, _ = inputs.k_cache.shape
    group, size = inputs.query.shape[1] // heads, inputs.query.shape[2]
    element = torch.arange(size)
    for row, head in ((r, h) for r in range(inputs.query.shape[0]) for h in range(inputs.query.shape[1])):
        sequence, query = divmod(row, inputs.query_length)
        position = int(inputs.seq_lens[sequence]) - inputs.query_length + query
        kv_head = head // group
        scores, values = [], []
        for token in range(position + 1):
            if inputs.window and token <= position - inputs.window:
                continue
            block, slot = int(inputs.block_tables[sequence, token // page]), token % page
            at = block * heads + kv_head
            k_at = ((at * (size // 16) + element // 16) * page + slot) * 16 + element % 16
            if inputs.v_cache.dim() == 4:
                v_at = (at * size + element) * page + slot
            else:
                v_at = ((at * (page // 16) + slot // 16) * size + element) * 16 + slot % 16
            k_scale, v_scale = (_scale(s, block, kv_head, slot) for s in (inputs.k_scale, inputs.v_scale))
            dot = float(inputs.query[row, head].double() @ k_flat[k_at].double())
            scores.append(inputs.softmax_scale * k_scale * dot)
            values.append(v_scale * v_flat[v_at].double())
        sink = -math.inf if inputs.sinks is None else float(inputs.sinks[head])
        if not scores or sink == math.inf:
            continue
        largest = max([*scores, sink])
        weights = [math.exp(score - largest) for score in scores]
        total = sum(weights) + math.exp(sink - largest)
        out[row, head] = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
    return out


def _scale(scale: object, block: int, head: int, slot: int) -> float:
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor):
        return float(scale[block, head, slot]) if scale.dim() > 1 else float(scale)
    assert isinstance(scale, float)
    return scale
