"""Times of paged FP8 decode on one GPU: whole calls, against a plain read of the same pages.

    PYTHONPATH=packages/gdn-runtime/src:packages/pa-decode/src python benchmarks/paged_decode.py [--json FILE]

16 query heads over 2 KV heads of 256, packed FP8 caches, pages in random order, bf16 queries. Correctness first: every
row is compared with the fp32 oracle on some of its sequences. Times are medians of replayed CUDA graphs that hold a
call over each of several input sets, so that a replay is larger than the L2 cache. "read" is a kernel that adds up the
words of the same pages through the same table; "share" is its time over that of the call. GB/s count keys, values,
scales, queries and outputs, each once.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import triton
import triton.language as tl

from pa_decode import __version__, explain, make_workspace, pa_decode, plan_decode, reference
from pa_decode.ops.check import check_call

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256
ROWS = tuple((batch, context) for context, batches in ((8192, (1, 16, 128)), (131072, (64,))) for batch in batches)
ROTATION = 200e6
"""Bytes of a rotation of inputs: more than three times the L2 cache."""
CHUNK = 1 << 27
WORDS = 1024
"""32-bit words of K and of V that a step of the plain read takes: a page of 16 tokens, a quarter of one of 64."""


def make_inputs(
    batch: int, context: int, page: int, query_length: int, seed: int, options: dict[str, Any]
) -> reference.DecodeInputs:
    """One problem on the GPU. The cache repeats normal values, rotated so that no two pieces are equal."""
    draw = torch.Generator(device="cuda").manual_seed(seed)
    pages = -(-context // page)
    blocks = batch * pages
    size = blocks * KV_HEADS * page * HEAD_DIM
    caches = []
    for _ in range(2):
        values = torch.randn(min(CHUNK, size), generator=draw, device="cuda", dtype=torch.bfloat16)
        piece = (2 * values).to(torch.float8_e4m3fn).view(torch.uint8)
        flat = torch.empty(size, dtype=torch.uint8, device="cuda")
        for start in range(0, size, CHUNK):
            part = flat[start : start + CHUNK]
            part.copy_(piece[: part.shape[0]].roll(start >> 20))
        caches.append(flat.view(torch.float8_e4m3fn))
    k = caches[0].view(blocks, KV_HEADS, HEAD_DIM // 16, page, 16)
    plain = options["plain"]
    v = caches[1].view(blocks, KV_HEADS, *((HEAD_DIM, page) if plain else (page // 16, HEAD_DIM, 16)))
    if options["token"]:
        scales = torch.rand(2, blocks, KV_HEADS, page, generator=draw, device="cuda") + 0.1
    else:
        scales = torch.tensor([[0.5], [0.25]], device="cuda")
    return reference.DecodeInputs(
        query=torch.randn(batch * query_length, HEADS, HEAD_DIM, generator=draw, device="cuda").bfloat16(),
        k_cache=k,
        v_cache=v,
        block_tables=torch.randperm(blocks, generator=draw, device="cuda").int().view(batch, pages),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        softmax_scale=HEAD_DIM**-0.5,
        query_length=query_length,
        k_scale=scales[0],
        v_scale=scales[1],
        sinks=torch.randn(HEADS, generator=draw, device="cuda") if options["sinks"] else None,
        window=options["window"],
    )


def arguments(inputs: reference.DecodeInputs) -> dict[str, Any]:
    """The arguments of the public call."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return given | {"sliding_window": given.pop("window")}


def make_call(
    inputs: reference.DecodeInputs, budget: int | None, kernel: str
) -> tuple[Callable[[], Any], torch.Tensor, int]:
    """(a call over a plan and a workspace of its own, its output, tasks of the plan)."""
    given = arguments(inputs)
    defaults: dict[str, Any] = {"cu_seqlens_q": None, "window_left": None, "out": None, "backend": "auto", "arch": None}
    geometry = check_call(**defaults, **given, kernel=kernel).geometry
    assert geometry is not None
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget)
    workspace = make_workspace(plan, geometry)
    out = torch.empty_like(inputs.query)
    call = lambda: pa_decode(**given, plan=plan, workspace=workspace, out=out, kernel=kernel)  # noqa: E731
    return call, out, int(plan.reduce_info[:, 1].sum())


def error(inputs: reference.DecodeInputs, out: torch.Tensor) -> float:
    """|out - oracle| / |oracle| over the first and the last sequence."""
    length, worst = inputs.query_length, 0.0
    for sequence in {0, inputs.seq_lens.shape[0] - 1}:
        rows = slice(sequence * length, (sequence + 1) * length)
        one = replace(
            inputs,
            query=inputs.query[rows],
            block_tables=inputs.block_tables[sequence : sequence + 1],
            seq_lens=inputs.seq_lens[sequence : sequence + 1],
        )
        expected = reference.decode(one)
        worst = max(worst, float((out[rows].float() - expected).norm() / expected.norm()))
    return worst


def graph_time(calls: list[Callable[[], Any]], budget_ms: float = 60.0) -> tuple[float, float]:
    """(median, spread from the 10th to the 90th percentile) in microseconds of one call of a replayed graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls * 2:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    while len(times) < 9 or (sum(times) * len(calls) < 1e3 * budget_ms and len(times) < 60):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    times = sorted(times[2:])
    return statistics.median(times), times[int(0.9 * len(times))] - times[int(0.1 * len(times))]


def _read_kernel(
    k: Any, v: Any, table: Any, out: Any, items: Any, heads: Any, pieces: Any, words: Any,
    WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Add up pieces of pages in the order of the table, one program taking every n-th."""
    word = tl.arange(0, WORDS)
    total = tl.zeros((WORDS,), tl.int32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        page, piece = item // pieces, item % pieces
        head, page = page % heads, page // heads
        block = tl.load(table + page).to(tl.int64)
        at = (block * heads + head) * words + piece * WORDS + word
        total += tl.load(k + at) ^ tl.load(v + at)
    tl.store(out + tl.program_id(0) * WORDS + word, total)


_read: Any = triton.jit(_read_kernel)


def make_read(inputs: reference.DecodeInputs) -> Callable[[], Any]:
    """A plain read of all pages of a problem, in the order of the table."""
    batch, pages = inputs.block_tables.shape
    words = inputs.k_cache[0, 0].numel() // 4
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs, WORDS, dtype=torch.int32, device="cuda")
    k, v = (x.view(torch.uint8).flatten().view(torch.int32) for x in (inputs.k_cache, inputs.v_cache))
    pieces = words // WORDS
    items = batch * pages * KV_HEADS * pieces
    grid = (min(programs, items),)
    table = inputs.block_tables
    return lambda: _read[grid](k, v, table, out, items, KV_HEADS, pieces, words, WORDS=WORDS, num_warps=8)


def bytes_of(inputs: reference.DecodeInputs) -> int:
    """Keys, values and per-token scales of visible tokens, queries and outputs, each once."""
    batch, context = inputs.seq_lens.shape[0], int(inputs.seq_lens[0])
    if inputs.window:
        context = min(context, inputs.window + inputs.query_length - 1)
    per_token = isinstance(inputs.k_scale, torch.Tensor) and inputs.k_scale.dim() > 1
    token = 2 * HEAD_DIM + (8 if per_token else 0)
    return batch * context * KV_HEADS * token + 2 * inputs.query.numel() * inputs.query.element_size()


def measure(batch: int, context: int, page: int, query_length: int, options: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    sets = min(6, max(2, math.ceil(ROTATION / (batch * context * KV_HEADS * 2 * HEAD_DIM))))
    problems = [make_inputs(batch, context, page, query_length, seed, options) for seed in range(sets)]
    calls, errors, tasks = [], [], 0
    for inputs in problems:
        call, out, tasks = make_call(inputs, options["budget"], options["kernel"])
        out.fill_(torch.nan)
        call()
        calls.append(call)
        errors.append(error(inputs, out))
    size = bytes_of(problems[0])
    row: dict[str, Any] = {
        "page": page,
        "query_length": query_length,
        "batch": batch,
        "context": context,
        "tasks": tasks,
        "error": max(errors),
    }
    row["us"], row["spread"] = graph_time(calls)
    row["gbs"] = size / row["us"] / 1e3
    if not options["window"]:
        row["read_us"], _ = graph_time([make_read(inputs) for inputs in problems])
        row["share"] = row["read_us"] / row["us"]
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--page", type=int, action="append", help="16 and 64 by default")
    parser.add_argument("--query-length", type=int, action="append", help="1 and 4 by default")
    parser.add_argument("--row", action="append", help="BATCHxCONTEXT, the rows of docs/performance.md by default")
    parser.add_argument("--budget", type=int, help="tasks over all KV heads")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--window", type=int, default=0)
    for flag, text in (("token", "scales per token"), ("plain", "plain V"), ("sinks", "sinks")):
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    options = vars(parser.parse_args())
    rows = [tuple(int(n) for n in row.split("x")) for row in options["row"] or ()] or ROWS
    torch.set_grad_enabled(False)
    probe = make_inputs(1, 64, 64, 1, 0, options)
    found = explain(**arguments(probe), kernel=options["kernel"])
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "pa_decode": __version__,
        "kernel": found.attention.kernel if found.attention is not None else None,
        "options": {key: value for key, value in options.items() if key != "json"},
    }
    print(json.dumps(facts))
    measured = []
    for page in options["page"] or (64, 16):
        for query_length in options["query_length"] or (1, 4):
            for batch, context in rows:
                row = measure(batch, context, page, query_length, options)
                measured.append(row)
                print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
                torch.cuda.empty_cache()
                if options["json"]:  # after each row, so that an interrupted run leaves what it has
                    with open(options["json"], "w", encoding="utf-8") as file:
                        json.dump(facts | {"rows": measured}, file, indent=1)


if __name__ == "__main__":
    main()
