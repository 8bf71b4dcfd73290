"""Decode over a paged FP8 cache that one attention layer filled from the texts, checked against two oracles.

Head size 256 and the head ratio of Qwen3-Next (8 query heads per KV head). The last four tokens of every text are its
query, as when a draft of four tokens is verified; a text of one byte has fewer, one is empty. Attention sees all
tokens, or a window of them, and has sinks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn_runtime.arch import arch_of, parse_arch
from pa_decode import (
    FLAVOURS,
    DecodeGeometry,
    Explanation,
    Flavour,
    explain,
    make_workspace,
    pa_decode,
    pack_k,
    pack_v,
    plan_decode,
    quantise_tensor,
    quantise_tokens,
)
from pa_decode.reference import DecodeInputs, decode_quantised

from .check import Row, device_name, relative_error

HIDDEN, HEAD_DIM, KV_HEADS, GROUP, QUERY_LENGTH = 256, 256, 1, 8, 4
BOUND = 0.006
"""Of the output against the oracle whose rounding the backend shares: bf16 rounds the partial results of a task and
their sum, 0.0017 in the mean square each. Measured: 0.0016 to 0.0023."""
ROUNDING = 0.05
"""Between a backend that rounds the query and P to FP8, 2^-4 at most and 0.025 in the mean square each, and one that
does not. Measured: 0.026 to 0.030."""


@dataclass(frozen=True)
class Case:
    """A way to store the cache and to look at it."""

    name: str
    page: int
    per_token: bool
    v_packed: bool
    window: int


CASES = (Case("all tokens", 16, False, True, 0), Case("window", 64, True, False, 48))


class AttentionLayer:
    """Random weights, fixed by ``seed``: q, k and v of the bytes of a text, k normalised per head."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(256, HIDDEN, generator=random)
        heads = KV_HEADS * (GROUP + 2)
        self.to_qkv = torch.randn(HIDDEN, heads * HEAD_DIM, generator=random) * HIDDEN**-0.5
        self.sinks = torch.randn(KV_HEADS * GROUP, generator=random)

    def __call__(self, text: bytes) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, 256], k and v [T, Hkv, 256]."""
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.zeros(0).long()
        heads = (self.embedding[tokens] @ self.to_qkv).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((KV_HEADS * GROUP, KV_HEADS, KV_HEADS), dim=1)
        return q, k * HEAD_DIM**0.5 / k.norm(dim=-1, keepdim=True).clamp(min=1e-6), v


def cache_of(texts: list[bytes], layer: AttentionLayer, case: Case, flavour: Flavour) -> DecodeInputs:
    """The problem: pages handed out in random order, block 0 left empty, rows of the table that end with -1."""
    activations = [layer(text) for text in texts]
    counts = [-(-len(text) // case.page) for text in texts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.full((len(texts), max(counts) + 1), -1, dtype=torch.int32)
    k, v = torch.zeros(2, sum(counts) + 1, case.page, KV_HEADS, HEAD_DIM)
    query = torch.zeros(len(texts), QUERY_LENGTH, KV_HEADS * GROUP, HEAD_DIM)
    for index, ((q, keys, values), count, pages) in enumerate(
        zip(activations, counts, order.split(counts), strict=True)
    ):
        table[index, :count] = pages
        for cache, rows in ((k, keys), (v, values)):
            padded = torch.zeros(count * case.page, KV_HEADS, HEAD_DIM)
            padded[: len(rows)] = rows
            cache[pages] = padded.unflatten(0, (count, case.page))
        last = min(len(q), QUERY_LENGTH)
        query[index, QUERY_LENGTH - last :] = q[len(q) - last :]
    quantise = quantise_tokens if case.per_token else quantise_tensor
    (k8, k_scale), (v8, v_scale) = quantise(k, flavour), quantise(v, flavour)
    return DecodeInputs(
        query=query.flatten(0, 1).bfloat16(),
        k_cache=pack_k(k8),
        v_cache=pack_v(v8, packed=case.v_packed),
        block_tables=table,
        seq_lens=torch.tensor([len(text) for text in texts], dtype=torch.int32),
        softmax_scale=HEAD_DIM**-0.5,
        query_length=QUERY_LENGTH,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=layer.sinks,
        window=case.window,
    )


def definition(inputs: DecodeInputs) -> Tensor:
    """Attention [B QL, Hq, 256] in fp64 over the cache that its FP8 values and scales mean, from the formula."""
    page, out = inputs.k_cache.shape[3], torch.zeros(inputs.query.shape, dtype=torch.float64)
    assert inputs.sinks is not None
    z = inputs.sinks.double()
    for row in range(len(inputs.query)):
        index, query = divmod(row, inputs.query_length)
        first, end = inputs.visible(int(inputs.seq_lens[index]), query)
        scores, values = [], []
        for token in range(first, end):
            block, slot = int(inputs.block_tables[index, token // page]), token % page
            k = inputs.k_cache[block, 0, :, slot].float().flatten().double()
            if inputs.v_cache.dim() == 5:
                v = inputs.v_cache[block, 0, slot // 16, :, slot % 16].float().double()
            else:
                v = inputs.v_cache[block, 0, :, slot].float().double()
            k_scale, v_scale = (
                float(scale[block, 0, slot] if scale.dim() == 3 else scale)
                for scale in (inputs.k_scale, inputs.v_scale)
                if isinstance(scale, Tensor)
            )
            scores.append(inputs.softmax_scale * k_scale * (inputs.query[row].double() @ k))
            values.append(v_scale * v)
        if scores:
            weights = torch.cat([torch.stack(scores), z[None]]).softmax(0)[:-1]
            out[row] = weights.T @ torch.stack(values)
    return out


def measure(
    texts: list[bytes], backend: str, device: torch.device, arch: str | None, seed: int
) -> tuple[list[Row], Explanation]:
    """Decode in every case on one backend; errors against both oracles. Also what ``explain`` says of the last."""
    facts = arch_of(device) if arch is None else parse_arch(arch)
    flavour = FLAVOURS[facts.fp8 or "fn"]
    layer = AttentionLayer(seed)
    rows = []
    for case in CASES:
        inputs = cache_of(texts, layer, case, flavour)
        call, found = _call(inputs, backend, device, arch)
        call()  # compiles the kernels
        start = time.perf_counter()
        out = call().cpu()
        seconds = time.perf_counter() - start
        where = "cpu" if backend == "reference" else device_name(backend, found.arch, device)
        rounds = found.attention is not None and found.attention.kernel != "hopper"
        exact, rounded = (BOUND, ROUNDING) if not rounds else (ROUNDING, BOUND)
        errors = relative_error([out], [definition(inputs)]), relative_error([out], [decode_quantised(inputs)])
        rows += [
            Row(backend, where, f"decode, {case.name}", errors[0], exact, seconds),
            Row(backend, where, "  rounding as FP8", errors[1], rounded),
        ]
    return rows, found


def _call(
    inputs: DecodeInputs, backend: str, device: torch.device, arch: str | None
) -> tuple[Callable[[], Tensor], Explanation]:
    """A call as a server makes it, plan and workspace once for all layers, and what it runs."""

    def move(x: object) -> object:
        return x.to(device) if isinstance(x, Tensor) else x

    names = ("query", "k_cache", "v_cache", "block_tables", "seq_lens")
    tensors = [move(getattr(inputs, name)) for name in names]
    options = {name: move(getattr(inputs, name)) for name in ("k_scale", "v_scale", "sinks")}
    options |= {"softmax_scale": inputs.softmax_scale, "query_length": QUERY_LENGTH, "sliding_window": inputs.window}
    options |= {"backend": backend, "arch": arch}
    found = explain(*tensors, **options)  # type: ignore[arg-type]
    if found.attention is not None:
        geometry = DecodeGeometry(
            arch=found.arch,
            compute_units=256,
            batch=len(inputs.seq_lens),
            num_heads=KV_HEADS * GROUP,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=inputs.k_cache.shape[3],
            query_length=QUERY_LENGTH,
            scale_mode=found.attention.scale_mode,
            v_packed=found.attention.v_packed,
            sink_dtype="fp32",
            window=inputs.window,
        )
        plan = plan_decode(tensors[4], geometry, backend=backend)  # type: ignore[arg-type]
        options |= {"plan": plan, "workspace": make_workspace(plan, geometry)}
    return (lambda: pa_decode(*tensors, **options)), found  # type: ignore[arg-type]
