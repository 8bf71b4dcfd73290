"""The call on an NVIDIA GPU: T1 to T6 of the kernels' requirements, graphs, and what must not change a bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime.errors import CaptureError
from pa_decode import (
    explain,
    pa_decode,
    pack_k,
    pack_v,
    reference,
    unpack_k,
    unpack_v,
)
from pa_testing import arguments_of, make_inputs
from pa_testing.gpu_calls import on_gpu, planned
from pa_testing.tensor_core import slack

TOLERANCE = 0.005
"""Absolute and relative, of every element, against fp32 on the dequantised cache and the query as it is: of a kernel
that rounds neither query nor P to FP8, and in rows that see ``MANY`` tokens, where rounding averages out. Elsewhere
against the oracle that rounds as the kernel does."""

MANY = 200

FEW = 0.02
"""Share of the rows in which the matrix unit may take a weight to the FP8 number beside that of the oracle by so much
that ``TOLERANCE`` does not hold; what holds there is the bound of that (pa_testing.tensor_core)."""

KERNELS = ("auto", "attention")
"""What this architecture takes for head size 256, and the kernel for everything."""

NAN_BYTE = 0x7F
CONTEXTS = [2049, 0, 3, 256, 1000, 16, 770]


def problem(contexts: Sequence[int] = CONTEXTS, **options: Any) -> reference.DecodeInputs:
    defaults = {"head_dim": 256, "kv_heads": 2, "group": 8, "query_length": 4}
    return on_gpu(make_inputs(contexts, **(defaults | options)))


def run(inputs: reference.DecodeInputs, budget: int | None = None, **changes: Any) -> Tensor:
    """One call over a plan of its own, into an output full of NaN."""
    plan, workspace = planned(inputs, budget, **changes)
    out = torch.full_like(inputs.query, torch.nan)
    pa_decode(**arguments_of(inputs, plan=plan, workspace=workspace, out=out, **changes))
    torch.cuda.synchronize()
    return out


def _attention(inputs: reference.DecodeInputs, kernel: str) -> str:
    """The attention kernel that a call with ``kernel`` runs."""
    attention = explain(**arguments_of(inputs, kernel=kernel)).attention
    assert attention is not None
    return attention.kernel


def near(out: Tensor, inputs: reference.DecodeInputs, kernel: str = "auto") -> bool:
    """Whether ``out`` is the result of ``kernel``."""
    close = torch.isclose(out.float(), reference.decode(inputs), atol=TOLERANCE, rtol=TOLERANCE).flatten(1).all(1)
    if _attention(inputs, kernel) == "hopper":
        return bool(close.all())
    tokens = [
        end - first
        for context in inputs.seq_lens.tolist()
        for first, end in (inputs.visible(context, query) for query in range(inputs.query_length))
    ]
    many = torch.tensor(tokens, device=out.device) >= MANY
    expected = reference.decode_quantised(inputs)
    difference = (out.float() - expected).abs() - TOLERANCE * expected.abs() - TOLERANCE
    moved = (difference > 0).any(-1).float().mean()
    return bool(close[many].all() and (difference <= slack(inputs)).all() and moved <= FEW)


# ------------------------------------------------------------------------------------------------ values

CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "T1": ({}, None),
    "T2": ({"scale_mode": "token", "page": 64}, 8),
    "T3": ({"scale_mode": "token"}, 1024),
    "T4": ({"scale_mode": "token", "window": 257, "sinks": True}, None),
    "T5": ({"scale_mode": "token", "window": 8193}, 1),
    "plain": ({"v_packed": False, "sinks": True, "dtype": torch.float16}, None),
    "plain page 64": ({"v_packed": False, "page": 64, "window": 17}, None),
    "one query": ({"query_length": 1, "page": 64, "sinks": True}, None),
    "wide groups": ({"query_length": 2, "group": 16, "page": 64}, None),
    "odd groups": ({"query_length": 3, "group": 5}, None),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_values(kernel: str, case: str) -> None:
    options, budget = CASES[case]
    contexts = [*CONTEXTS, 20000] if case == "T5" else CONTEXTS
    inputs = problem(contexts, **options)
    out = run(inputs, budget, kernel=kernel)
    assert near(out, inputs, kernel)
    rows = inputs.query_length
    assert not out[rows : 2 * rows].any()  # the empty sequence
    assert torch.equal(run(inputs, budget, kernel=kernel), out)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page", [16, 64])
def test_t6_tokens_outside_the_window_do_not_reach_a_scale(kernel: str, page: int) -> None:
    contexts = [513, 40, 256]
    inputs = problem(contexts, query_length=1, window=1, scale_mode="token", v_packed=False, page=page)
    poisoned = replace(inputs, k_scale=inputs.k_scale.clone(), v_scale=inputs.v_scale.clone())
    for sequence, context in enumerate(contexts):
        for token in range(context - 1):
            block = int(inputs.block_tables[sequence, token // page])
            poisoned.k_scale[block, :, token % page] = 1e9
            poisoned.v_scale[block, :, token % page] = 1e9
    out = run(poisoned, kernel=kernel)
    assert near(out, inputs, kernel) and torch.equal(out, run(inputs, kernel=kernel))


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 128, "group": 4, "page": 128},
        {"head_dim": 64, "group": 33, "query_length": 1, "scale_mode": "token"},
        {"group": 12, "window": 300, "v_packed": False},
    ],
)
def test_other_sizes(options: dict[str, Any]) -> None:
    inputs = problem(**options)
    assert near(run(inputs), inputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_and_equal_scores(kernel: str) -> None:
    inputs = problem(sinks=True)
    for value in (float("-inf"), float("inf")):
        sinks = torch.full_like(inputs.sinks, value)
        out = run(replace(inputs, sinks=sinks), kernel=kernel)
        expected = run(replace(inputs, sinks=None), kernel=kernel) if value < 0 else torch.zeros_like(out)
        assert torch.equal(out, expected)
    still = replace(inputs, query=torch.zeros_like(inputs.query), sinks=None, window=5)
    assert near(run(still, kernel=kernel), still, kernel)


# ------------------------------------------------------------------------------------------------ equal bits


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale_mode", ["tensor", "token"])
def test_bits_do_not_depend_on_where_things_are(kernel: str, scale_mode: str) -> None:
    """Physical pages in another order, padding and alignment of the table, the form of V."""
    inputs = problem(scale_mode=scale_mode, sinks=True, window=300)
    out = run(inputs, kernel=kernel)
    order = torch.randperm(inputs.k_cache.shape[0], device="cuda")

    def place(x: Tensor) -> Tensor:
        placed = torch.empty_like(x)
        placed.view(torch.uint8)[order] = x.view(torch.uint8)
        return placed

    scales = (inputs.k_scale, inputs.v_scale)
    if scale_mode == "token":
        scales = tuple(place(x) for x in scales)
    table = inputs.block_tables
    moved = torch.where(
        (table >= 0) & (table < order.shape[0]), order[table.clamp(0, order.shape[0] - 1).long()].int(), -1
    )
    permuted = replace(
        inputs, k_cache=place(inputs.k_cache), v_cache=place(inputs.v_cache), block_tables=moved.contiguous(),
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    assert torch.equal(run(permuted, kernel=kernel), out)
    for width in (1, 2, 3):
        padded = torch.full((table.shape[0], table.shape[1] + width), 2**31 - 1, dtype=torch.int32, device="cuda")
        padded[:, : table.shape[1]] = table
        assert torch.equal(run(replace(inputs, block_tables=padded), kernel=kernel), out)
    plain = replace(inputs, v_cache=pack_v(unpack_v(inputs.v_cache), packed=False))
    assert torch.equal(run(plain, kernel=kernel), out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_the_page_size(kernel: str) -> None:
    contexts = [700, 64, 130]
    draw = torch.Generator().manual_seed(3)
    counts = [-(-context // 64) for context in contexts]
    k, v = (torch.randn(sum(counts), 64, 2, 256, generator=draw) / 16 for _ in range(2))
    used = torch.cat([torch.arange(count * 64) < context for count, context in zip(counts, contexts, strict=True)])
    k, v = (x * used.view(-1, 64, 1, 1) for x in (k, v))
    small = [torch.cat([part[: -(-c // 16)] for part, c in _by_sequence(x, counts, contexts)]) for x in (k, v)]
    wide = problem(contexts, page=64, k=k, v=v)
    narrow = problem(contexts, page=16, k=small[0], v=small[1])
    narrow = replace(narrow, query=wide.query)
    assert torch.equal(wide.k_scale, narrow.k_scale)
    outs = [run(inputs, kernel=kernel) for inputs in (wide, narrow)]
    if _attention(wide, kernel) == "hopper":  # adds up the tokens of a tile in another order
        assert torch.allclose(*outs, atol=1e-4, rtol=2**-7)
    else:
        assert torch.equal(*outs)


def _by_sequence(x: Tensor, counts: list[int], contexts: list[int]) -> list[tuple[Tensor, int]]:
    return [(part.reshape(-1, 16, *x.shape[2:]), c) for part, c in zip(x.split(counts), contexts, strict=True)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_behind_the_last_token(kernel: str) -> None:
    """Bytes and scales of masked tokens, and blocks that stale ids name, may hold NaN."""
    contexts = [700, 3, 256, 130]
    inputs = problem(contexts, scale_mode="token", window=100)
    out = run(inputs, kernel=kernel)
    blocks, page = inputs.k_cache.shape[0], inputs.k_cache.shape[3]
    visible = torch.zeros(blocks, page, dtype=torch.bool, device="cuda")
    table = torch.full_like(inputs.block_tables, blocks - 1)
    for sequence, context in enumerate(contexts):
        first = max(context - inputs.query_length - inputs.window + 1, 0)
        owned = slice(first // page, -(-context // page))
        table[sequence, owned] = inputs.block_tables[sequence, owned]
        for token in range(first, context):
            visible[int(table[sequence, token // page]), token % page] = True
    of_heads = visible.unsqueeze(1)
    k, v = unpack_k(inputs.k_cache.view(torch.uint8)), unpack_v(inputs.v_cache.view(torch.uint8))
    k, v = (torch.where(visible[:, :, None, None], x, NAN_BYTE) for x in (k, v))
    nan = replace(
        inputs,
        k_cache=pack_k(k).view(inputs.k_cache.dtype),
        v_cache=pack_v(v).view(inputs.v_cache.dtype),
        k_scale=torch.where(of_heads, inputs.k_scale, torch.nan),
        v_scale=torch.where(of_heads, inputs.v_scale, torch.nan),
        block_tables=table,
    )
    assert torch.equal(run(nan, kernel=kernel), out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scratch_beyond_the_tasks_is_untouched(kernel: str) -> None:
    inputs = problem([300, 0, 5])
    plan, workspace = planned(inputs)
    pa_decode(**arguments_of(inputs, plan=plan, workspace=workspace, kernel=kernel))
    used = int(plan.reduce_info[:, 1].sum())
    assert 0 < used < plan.capacity
    for part in workspace.parts.values():
        assert part[:, used:].isnan().all() and not part[:, :used].isnan().any()


# ------------------------------------------------------------------------------------------------ graphs and streams


def test_plans_are_those_of_the_oracle() -> None:
    draw = random.Random(5)
    for batch, window in ((1, 0), (7, 257), (130, 0), (1000, 8193)):
        lengths = [draw.choice([0, -3, 1, 255, 256, 257, 2**31 - 1, draw.randint(0, 200000)]) for _ in range(batch)]
        inputs = problem([16] * batch, query_length=2, window=window, group=2)
        plan, _ = planned(inputs, 3 * batch)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        plan.refresh(seq_lens.cuda())
        host = replace(plan, work_info=plan.work_info.cpu(), reduce_info=plan.reduce_info.cpu(), backend="reference")
        host.refresh(seq_lens)
        assert torch.equal(plan.work_info.cpu(), host.work_info)
        assert torch.equal(plan.reduce_info.cpu(), host.reduce_info)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"window": 257, "sinks": True, "scale_mode": "token", "page": 64}])
def test_replay(kernel: str, options: dict[str, Any]) -> None:
    """Queries, cache, scales, sinks, tables and, with the refresh in the graph, lengths change between replays."""
    inputs = problem(**options)
    plan, workspace = planned(inputs)
    out = torch.empty_like(inputs.query)
    given = arguments_of(inputs, plan=plan, workspace=workspace, out=out, kernel=kernel)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan.refresh(inputs.seq_lens)
        pa_decode(**given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh(inputs.seq_lens)
        pa_decode(**given)
    for seed in range(3):
        contexts = [[*CONTEXTS], [0] * 7, [5, 2000, 257, 0, 256, 1023, 1]][seed]
        other = problem(contexts, seed=seed + 10, **options)
        pages = min(other.block_tables.shape[1], inputs.block_tables.shape[1])
        blocks = min(other.k_cache.shape[0], inputs.k_cache.shape[0])
        fits = other.block_tables[:, :pages].clamp(0, blocks - 1)
        inputs.block_tables.fill_(0)
        inputs.block_tables[:, :pages] = fits
        inputs.query.copy_(other.query)
        inputs.seq_lens.copy_(other.seq_lens)
        for name in ("k_cache", "v_cache"):
            getattr(inputs, name).view(torch.uint8)[:blocks] = getattr(other, name).view(torch.uint8)[:blocks]
        for name in ("k_scale", "v_scale"):
            own, new = getattr(inputs, name), getattr(other, name)
            own[: min(own.shape[0], new.shape[0])] = new[: own.shape[0]]
        if inputs.sinks is not None and other.sinks is not None:
            inputs.sinks.copy_(other.sinks)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        assert torch.equal(replayed, run(inputs, kernel=kernel)) and near(replayed, inputs, kernel)


def test_capture_refuses_what_a_graph_must_not_hold() -> None:
    inputs = problem()
    plan, workspace = planned(inputs)
    pa_decode(**arguments_of(inputs, plan=plan, workspace=workspace))
    torch.cuda.synchronize()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"workspace": workspace}, "making a plan while a stream is being captured: make a plan first"),
        ({"plan": plan}, "allocating a workspace while a stream is being captured"),
        ({"plan": plan, "workspace": workspace, "k_scale": 1.0, "v_scale": 1.0}, "copying a scale from the host"),
        ({"backend": "reference"}, "the reference, which reads seq_lens, while a stream is being captured"),
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for changes, message in bad:
            with pytest.raises(CaptureError, match=message):
                pa_decode(**arguments_of(inputs, **changes))
        out = pa_decode(**arguments_of(inputs, plan=plan, workspace=workspace))
    graph.replay()
    torch.cuda.synchronize()
    assert near(out, inputs)


def test_streams_of_their_own() -> None:
    problems = [problem(seed=seed, sinks=True) for seed in range(2)]
    expected = [run(inputs) for inputs in problems]
    plans = [planned(inputs) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            plan, workspace = plans[index]
            with torch.cuda.stream(stream):
                results[index].append(pa_decode(**arguments_of(problems[index], plan=plan, workspace=workspace)))
    torch.cuda.synchronize()
    for index, outs in enumerate(results):
        assert all(torch.equal(out, expected[index]) for out in outs)


def test_a_call_without_a_plan() -> None:
    inputs = problem(sinks=True, window=300)
    out = pa_decode(**arguments_of(inputs))
    assert torch.equal(out, run(inputs)) and near(out, inputs)
    exact = reference.decode(inputs).to(out.dtype)
    assert torch.equal(pa_decode(**arguments_of(inputs, backend="reference")), exact)


def test_compiled() -> None:
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs)

    def call(query: Tensor, seq_lens: Tensor) -> Tensor:
        plan.refresh(seq_lens)
        return pa_decode(**arguments_of(inputs, query=query, seq_lens=seq_lens, plan=plan, workspace=workspace)) * 2

    expected = call(inputs.query, inputs.seq_lens)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs.query, inputs.seq_lens), expected)
