"""Problems whose results say which bytes, scales and page ids were read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from pa_decode import pack_k, pack_v, unpack_k, unpack_v
from pa_decode.quantise import flavour_of
from pa_decode.reference import DecodeInputs


def with_hidden(
    inputs: DecodeInputs, byte: int, scale: float, *, k: bool = True, v: bool = True, stale: int | None = None
) -> DecodeInputs:
    """The problem with ``byte`` in all elements of K and V that no row sees (behind a sequence, before its window, in
    pages of nobody) and ``scale`` as the scales there. ``stale``: id where no row sees a token of the page, by default
    that of a page of nobody."""
    blocks, page, dtype = inputs.k_cache.shape[0], inputs.k_cache.shape[3], inputs.k_cache.dtype
    seen = torch.zeros((blocks, page), dtype=torch.bool)
    table = torch.full_like(inputs.block_tables, -7)
    for row, new, context in zip(inputs.block_tables, table, inputs.seq_lens.tolist(), strict=True):
        token = torch.arange(inputs.visible(context, 0)[0], max(context, 0))
        new[token // page] = row[token // page]
        seen[row[token // page].long(), token % page] = True
    table[table == -7] = int((~seen.any(1)).nonzero()[0]) if stale is None else stale
    k8, v8 = (x.clone() for x in (unpack_k(inputs.k_cache), unpack_v(inputs.v_cache)))
    changes: dict[str, Any] = {}
    for name, x, wanted in (("k_scale", k8, k), ("v_scale", v8, v)):
        of_token = getattr(inputs, name)
        if not wanted:
            continue
        x.view(torch.uint8)[~seen] = byte
        if isinstance(of_token, Tensor) and of_token.dim() > 1:
            changes[name] = torch.where(seen.unsqueeze(1), of_token, scale)
    return dataclasses.replace(
        inputs,
        k_cache=pack_k(k8.view(dtype)),
        v_cache=pack_v(v8.view(dtype), packed=inputs.v_cache.dim() == 5),
        block_tables=at_the_end(table),
        **changes,
    )


def at_the_end(table: Tensor) -> Tensor:
    """The table as a view that ends where its memory does, in rows that are wider and off 8-byte addresses."""
    wide = torch.full((table.shape[0], table.shape[1] + 1 + table.shape[1] % 2), -7, dtype=torch.int32)
    return wide[:, -table.shape[1] :].copy_(table)


def scale_probe(inputs: DecodeInputs, *, seed: int = 0) -> tuple[DecodeInputs, Tensor]:
    """(problem, its result in fp32) in which an element of the output is one token's weight times its V scale.

    ``inputs`` has scales per token, D = 256 and contexts of at most 256 tokens. V of token t is 1 at element t; K and
    the query are 1, so that its score is K scale log 2. K scales are 1, 2 or 3 and V scales powers of two, drawn apart:
    the scale of another place is wrong by a factor of two in most places.
    """
    blocks, heads, _, page, _ = inputs.k_cache.shape
    draw = torch.Generator().manual_seed(seed)
    flavour = flavour_of("k_cache", inputs.k_cache.dtype)
    v = torch.zeros((blocks, page, heads, 256))
    for row, context in zip(inputs.block_tables, inputs.seq_lens.tolist(), strict=True):
        token = torch.arange(context)
        v[row[token // page].long(), token % page, :, token] = 1.0
    k_scale = torch.randint(1, 4, (blocks, heads, page), generator=draw).float()
    v_scale = torch.exp2(torch.randint(-3, 4, (blocks, heads, page), generator=draw).float())
    probe = dataclasses.replace(
        inputs,
        query=torch.ones_like(inputs.query),
        k_cache=torch.ones_like(inputs.k_cache, dtype=torch.float32).to(flavour.dtype),
        v_cache=pack_v(v.to(flavour.dtype), packed=inputs.v_cache.dim() == 5),
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=None,
        softmax_scale=math.log(2.0) / 256,
    )
    return probe, expected_of_probe(probe)


def expected_of_probe(probe: DecodeInputs) -> Tensor:
    """Result of a problem of ``scale_probe``, from its scales and its table alone."""
    assert isinstance(probe.k_scale, Tensor) and isinstance(probe.v_scale, Tensor)
    heads, page = probe.num_kv_heads, probe.k_cache.shape[3]
    group = probe.query.shape[1] // heads
    expected = torch.zeros(probe.query.shape)
    for sequence, context in enumerate(probe.seq_lens.tolist()):
        for query in range(probe.query_length):
            token = torch.arange(*probe.visible(context, query))
            block, slot = probe.block_tables[sequence, token // page].long(), token % page
            for head in range(heads if len(token) else 0):
                weight = torch.exp2(probe.k_scale[block, head, slot])
                row = expected[sequence * probe.query_length + query, head * group : (head + 1) * group]
                row[:, token] = probe.v_scale[block, head, slot] * weight / weight.sum()
    return expected
