"""Random decode problems over a shuffled paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pa_decode import DecodeGeometry, pack_k, pack_v, quantise_tensor, quantise_tokens
from pa_decode.quantise import FN, Flavour
from pa_decode.reference import DecodeInputs

STALE = 2**31 - 1
SINKS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def make_inputs(
    contexts: Sequence[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    page: int = 16,
    query_length: int = 1,
    window: int = 0,
    scale_mode: str = "tensor",
    v_packed: bool = True,
    flavour: Flavour = FN,
    sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    v_amplitude: float = 1 / 16,
    scale_spread: float = 1.0,
    extra_width: int = 1,
    seed: int = 0,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> DecodeInputs:
    """A problem with normal queries and K, V of ``v_amplitude``; tokens and physical pages in random order.

    ``k`` and ``v`` [blocks, page, kv_heads, head_dim] replace the random values, blocks in the order of the sequences.
    Table entries behind a sequence are ``STALE``, rows of the table start off 8-byte addresses. ``scale_spread``: ratio
    of the largest to the smallest scale of a token.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-max(context, 0) // page) for context in contexts]
    blocks = sum(counts) + 1
    shape = blocks, page, kv_heads, head_dim
    k = torch.randn(shape, generator=draw) if k is None else torch.cat([k, torch.zeros(1, *shape[1:])])
    v = torch.randn(shape, generator=draw) * v_amplitude if v is None else torch.cat([v, torch.zeros(1, *shape[1:])])
    order = torch.randperm(blocks, generator=draw)
    width = max([1, *counts]) + extra_width
    table = torch.full((len(contexts), width + 1), STALE, dtype=torch.int32)[:, 1:]
    used = 0
    for sequence, count in enumerate(counts):
        table[sequence, :count] = order[used : used + count].to(torch.int32)
        used += count
    if scale_mode == "token":
        spread = [scale_spread ** torch.rand((blocks, page, kv_heads, 1), generator=draw) for _ in range(2)]
        (k8, k_scale), (v8, v_scale) = (quantise_tokens(x * s, flavour) for x, s in zip((k, v), spread, strict=True))
    else:
        (k8, k_scale), (v8, v_scale) = (quantise_tensor(x, flavour) for x in (k, v))

    def place(x: Tensor) -> Tensor:
        placed = torch.empty_like(x)
        placed[order] = x
        return placed

    tokens = scale_mode == "token"
    query = torch.randn((len(contexts) * query_length, kv_heads * group, head_dim), generator=draw)
    return DecodeInputs(
        query=query.to(dtype),
        k_cache=pack_k(place(k8)),
        v_cache=pack_v(place(v8), packed=v_packed),
        block_tables=table,
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        softmax_scale=head_dim**-0.5,
        query_length=query_length,
        k_scale=place(k_scale) if tokens else k_scale,
        v_scale=place(v_scale) if tokens else v_scale,
        sinks=torch.randn(kv_heads * group, generator=draw) if sinks else None,
        window=window,
    )


def arguments_of(inputs: DecodeInputs, **changes: Any) -> dict[str, Any]:
    """The problem as arguments of ``pa_decode``, all by name, with some replaced."""
    names = ("query", "k_cache", "v_cache", "block_tables", "seq_lens", "softmax_scale", "query_length")
    names += ("k_scale", "v_scale", "sinks")
    return {name: getattr(inputs, name) for name in names} | {"sliding_window": inputs.window} | changes


def geometry_of(inputs: DecodeInputs, arch: str = "gfx950", compute_units: int = 8, **changes: Any) -> DecodeGeometry:
    """The geometry of a problem, with some fields replaced."""
    per_token = isinstance(inputs.k_scale, Tensor) and inputs.k_scale.dim() > 1
    fields: dict[str, Any] = {
        "arch": arch,
        "compute_units": compute_units,
        "batch": inputs.seq_lens.shape[0],
        "num_heads": inputs.query.shape[1],
        "num_kv_heads": inputs.num_kv_heads,
        "head_dim": inputs.query.shape[2],
        "page_size": inputs.k_cache.shape[3],
        "query_length": inputs.query_length,
        "query_dtype": "bf16" if inputs.query.dtype == torch.bfloat16 else "fp16",
        "scale_mode": "token" if per_token else "tensor",
        "v_packed": inputs.v_cache.dim() == 5,
        "sink_dtype": "none" if inputs.sinks is None else SINKS[inputs.sinks.dtype],
        "window": inputs.window,
    }
    return DecodeGeometry(**(fields | changes))
