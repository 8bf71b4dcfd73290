"""Calls of paged decode for a bench: random pages in random order, plans and workspaces made outside of the call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from gdn_runtime.arch import KNOWN, arch_of
from gdn_runtime.codeobject.stages.backend import EMULATE
from gdn_runtime.errors import UnsupportedError
from pa_decode import explain, make_workspace, pa_decode, plan_decode, reference, unpack_k, unpack_v
from pa_decode.ops.check import check_call

from ..calls import DecodeCase
from .timing import Call

PIECE = 1 << 27
"""Elements of a cache that are drawn. The rest repeats them, rotated: 64 GiB take longer than the bench."""
FP8 = {"fn": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}
TILE = 256
"""Tokens of a step of the attention kernels."""
TILES, LESS = 6, 4
FLASHINFER_WORKSPACE = 512 << 20


def decode_inputs(case: DecodeCase, device: torch.device, seed: int, arch: str) -> reference.DecodeInputs:
    """One problem on ``device``: bf16 queries, caches in the FP8 of ``arch``, K and V in the layouts of the kernels."""
    draw = torch.Generator(device=device).manual_seed(seed)
    page, dim, kv_heads = case.page_size, case.head_dim, case.num_kv_heads
    pages = -(-case.context // page)
    blocks = case.batch * pages
    k, v = (_cache(blocks * kv_heads * page * dim, FP8[KNOWN[arch].fp8 or "fn"], draw) for _ in range(2))
    if case.scale_mode == "token":
        scales = torch.rand(2, blocks, kv_heads, page, generator=draw, device=device) + 0.1
    else:
        scales = torch.tensor([[0.5], [0.25]], device=device)
    query = torch.randn(case.batch * case.query_length, case.num_heads, dim, generator=draw, device=device)
    return reference.DecodeInputs(
        query=query.bfloat16(),
        k_cache=k.view(blocks, kv_heads, dim // 16, page, 16),
        v_cache=v.view(blocks, kv_heads, *((page // 16, dim, 16) if case.v_packed else (dim, page))),
        block_tables=torch.randperm(blocks, generator=draw, device=device).int().view(case.batch, pages),
        seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        softmax_scale=dim**-0.5,
        query_length=case.query_length,
        k_scale=scales[0],
        v_scale=scales[1],
        window=case.window,
    )


def _cache(size: int, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    piece = torch.randn(min(PIECE, size), generator=draw, device=draw.device, dtype=torch.bfloat16).to(dtype)
    whole = torch.empty(size, dtype=torch.uint8, device=draw.device)
    for start in range(0, size, PIECE):
        part = whole[start : start + PIECE]
        part.copy_(piece.view(torch.uint8)[: part.shape[0]].roll(start >> 20))
    return whole.view(dtype)


def arch_for(device: torch.device, backend: str, arch: str) -> str:
    """The architecture that a plan is for: the device's own; of the emulator and on a CPU, ``arch``."""
    return arch if backend == "emulate" or device.type == "cpu" else arch_of(device).name


def arguments(inputs: reference.DecodeInputs) -> dict[str, Any]:
    """The arguments of the public call."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return given | {"sliding_window": given.pop("window")}


def decode_call(
    inputs: reference.DecodeInputs,
    backend: str,
    arch: str | None,
    budget: int | None = None,
    partitions: int | None = None,
) -> tuple[Call, Tensor, Any]:
    """(a call over a plan and a workspace of its own, its output, the plan). Raises UnsupportedError for what the
    backend does not take."""
    given: dict[str, Any] = {**arguments(inputs), "backend": backend, "arch": arch}
    defaults: dict[str, Any] = {"cu_seqlens_q": None, "window_left": None, "out": None, "kernel": "auto"}
    geometry = check_call(**defaults, **given).geometry
    assert geometry is not None, "a batch of decode queries"
    planner = "reference" if backend == "emulate" else backend
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, max_partitions=partitions, backend=planner)
    workspace, out = make_workspace(plan, geometry), torch.empty_like(inputs.query)
    return lambda: pa_decode(**given, plan=plan, workspace=workspace, out=out), out, plan


def _flashinfer(inputs: reference.DecodeInputs) -> tuple[Call, Tensor]:
    """FlashInfer's FA2 kernel for tensor cores over the same cache, unpacked to [pages, page, heads, D]."""
    if isinstance(inputs.k_scale, Tensor) and inputs.k_scale.dim() > 1:
        raise UnsupportedError("scales of flashinfer", got="per token", supported=["per tensor"])
    wrapper = importlib.import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
    query, table, lengths = inputs.query, inputs.block_tables, inputs.seq_lens
    k, v = unpack_k(inputs.k_cache).contiguous(), unpack_v(inputs.v_cache).contiguous()
    page, kv_heads, dim = k.shape[1:]
    counts = (lengths + page - 1) // page
    if bool((counts != table.shape[1]).any()):
        raise UnsupportedError("tables of flashinfer", got="rows with unused entries", supported=["full rows"])
    buffer = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
    offsets = torch.arange(0, table.numel() + 1, table.shape[1], dtype=torch.int32)
    decode = wrapper(buffer, "NHD", use_tensor_cores=True, backend="fa2")
    options: dict[str, Any] = {"q_data_type": query.dtype, "kv_data_type": k.dtype, "sm_scale": inputs.softmax_scale}
    if inputs.query_length > 1:
        options["q_len_per_req"] = inputs.query_length
    if inputs.window:
        options["window_left"] = inputs.window - 1
    last = ((lengths - 1) % page + 1).cpu()
    decode.plan(offsets, table.reshape(-1), last, query.shape[1], kv_heads, dim, page, **options)
    k_scale, v_scale = (1.0 if scale is None else float(scale) for scale in (inputs.k_scale, inputs.v_scale))
    out = torch.empty_like(query)
    return lambda: decode.run(query, (k, v), k_scale=k_scale, v_scale=v_scale, out=out), out


DECODERS: dict[str, Callable[[reference.DecodeInputs], tuple[Call, Tensor]]] = {"flashinfer": _flashinfer}
"""Paged decode of other libraries: (a call, its output). Signatures of flashinfer 0.7.2."""


def error_of(inputs: reference.DecodeInputs, out: Tensor) -> float:
    """|out - oracle| / |oracle| over the first and the last sequence; infinite for NaN."""
    length, worst = inputs.query_length, 0.0
    for sequence in {0, inputs.seq_lens.shape[0] - 1}:
        rows = slice(sequence * length, (sequence + 1) * length)
        one = replace(
            inputs,
            query=inputs.query[rows],
            block_tables=inputs.block_tables[sequence : sequence + 1],
            seq_lens=inputs.seq_lens[sequence : sequence + 1],
        )
        expected = reference.decode(one).float()
        share = float((out[rows].float() - expected).norm() / expected.norm())
        worst = max(worst, share if share == share else float("inf"))
    return worst


def bytes_of(case: DecodeCase) -> int:
    """Keys, values and per-token scales of visible tokens, queries and outputs, each once."""
    visible = min(case.context, case.window + case.query_length - 1) if case.window else case.context
    token = 2 * case.head_dim + (8 if case.scale_mode == "token" else 0)
    queries = 4 * case.batch * case.query_length * case.num_heads * case.head_dim
    return case.batch * visible * case.num_kv_heads * token + queries


def count_tile(case: DecodeCase, arch: str) -> tuple[float, dict[str, float]]:
    """(cycles of the model, counters) of one workgroup of the attention kernel and a steady tile of 256 tokens: the
    difference of two traces. ImportError without cdna-emu and a compiler."""
    (cycles, counters), (fewer, before) = (trace_tiles(case, arch, tiles) for tiles in (TILES, LESS))
    steady = TILES - LESS
    return (cycles - fewer) / steady, {name: (value - before[name]) / steady for name, value in counters.items()}


def trace_tiles(case: DecodeCase, arch: str, tiles: int) -> tuple[float, dict[str, float]]:
    """(cycles of the model, counters) of one workgroup of the attention kernel that takes so many tiles."""
    import cdna_emu
    from gdn_runtime import env
    from gdn_runtime.testing.tracing import TracingLauncher

    from ..model import CLASSES  # needs the extra

    small = replace(case, batch=1, context=tiles * TILE, window=0)
    inputs = decode_inputs(small, torch.device("cpu"), 0, arch)
    launcher, kernels = TracingLauncher(arch, (0, 0, 0)), EMULATE.kernels
    before = kernels.launcher_for
    kernels.clear()
    kernels.launcher_for = lambda spec, device: launcher
    try:
        with env.override(jit=True):
            call, _, plan = decode_call(inputs, "emulate", arch, partitions=1)
            call()
            spec = explain(**arguments(inputs), backend="emulate", arch=arch, plan=plan).attention
            assert spec is not None, "the emulator runs kernels"
            trace = launcher.kernel(spec).trace  # type: ignore[attr-defined]
    finally:
        kernels.launcher_for = before
        kernels.clear()
    counts = {name: float(trace.counters[name]) for name in CLASSES}
    return float(cdna_emu.simulate(trace).cycles), {**counts, "mfma_cycles": float(trace.counters.mfma_cycles)}
