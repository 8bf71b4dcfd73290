"""Times of the fast path of the block on one sm90 GPU: in a graph, and kernel by kernel.

    PYTHONPATH=packages/gdn-runtime/src python benchmarks/fast_prefill.py [--json FILE] [--shape 32/16:8192x4 ...]

Method: input sets are rotated so that a rotation is larger than the L2 cache; "graph" is the median time of one call
inside a replayed CUDA graph of all input sets behind a spin kernel (the host is ahead, so launch gaps do not enter),
"host" the median host time of one call that is not waited for; the kernels' times are means of profiled calls. The
floor is max(bytes / 4.3 TB/s, FLOP / 790 TFLOP/s), see docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from gdn_runtime import __version__, build_prefill_metadata, chunk_gated_delta_rule, env, explain, select
from gdn_runtime.spec import CHUNK, HEAD_DIM

BANDWIDTH, FLOPS = 4.3e12, 790e12
KERNELS = {"prepare_kernel": "prepare", "inverse_kernel": "prepare", "scan_kernel": "scan", "combine_kernel": "combine"}


def ragged33(total: int = 32000, count: int = 33, seed: int = 7) -> list[int]:
    """33 lengths that sum to 29.9 k tokens, three of them 1, 63 and 65."""
    source = random.Random(seed)
    weights = [source.random() ** 2 + 0.01 for _ in range(count)]
    lengths = [max(1, int(total * weight / sum(weights))) for weight in weights]
    lengths[:3] = 1, 63, 65
    while sum(lengths) > total:
        lengths[lengths.index(max(lengths))] -= sum(lengths) - total
    return lengths


RAGGED = ",".join(map(str, ragged33()))
SHAPES = (
    *(f"32/16:{lengths}" for lengths in ("8192", "8192x4", "8192x8", "dense2500", RAGGED)),
    *(f"{heads}:8192{times}" for heads in ("8/2", "64/16", "16/4") for times in ("", "x4", "x8")),
)


def floor_us(num_heads: int, num_key_heads: int, lengths: list[int]) -> float:
    """The least time of q, k, v, o, g, beta and fp32 states once each, or of the least arithmetic, us."""
    tokens = sum(lengths)
    size = 4 * tokens * HEAD_DIM * (num_key_heads + num_heads) + 8 * tokens * num_heads
    size += 8 * len(lengths) * num_heads * HEAD_DIM * HEAD_DIM
    work = 0.0
    for length in lengths:
        for rows in [CHUNK] * (length // CHUNK) + [length % CHUNK]:
            square, state = rows * rows * HEAD_DIM, rows * HEAD_DIM * HEAD_DIM
            work += num_key_heads * 4 * square + num_heads * (2 * rows**3 / 3 + 6 * state + 4 * square)
    return max(size / BANDWIDTH, work / FLOPS) * 1e6


def parse_shape(text: str) -> tuple[int, int, list[int], bool]:
    """(H, Hg, lengths, dense) of "H/Hg:LENxN", "H/Hg:L1,L2,..." or "H/Hg:denseT"."""
    heads, _, lengths = text.partition(":")
    num_heads, num_key_heads = (int(part) for part in heads.split("/"))
    if lengths.startswith("dense"):
        return num_heads, num_key_heads, [int(lengths.removeprefix("dense"))], True
    parsed: list[int] = []
    for part in lengths.split(","):
        length, _, times = part.partition("x")
        parsed += [int(length)] * int(times or 1)
    return num_heads, num_key_heads, parsed, False


def make_call(num_heads: int, num_key_heads: int, lengths: list[int], dense: bool, seed: int) -> Callable[[], Any]:
    """A zero-argument warm call over fresh inputs: normalised keys, weak gates, fp32 states in and out."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    tokens = sum(lengths)
    q = F.normalize(random(1, tokens, num_key_heads, HEAD_DIM), dim=-1).bfloat16()
    k = F.normalize(random(1, tokens, num_key_heads, HEAD_DIM), dim=-1).bfloat16()
    v = random(1, tokens, num_heads, HEAD_DIM).bfloat16()
    g = F.logsigmoid(random(1, tokens, num_heads)) / 16
    beta = random(1, tokens, num_heads).sigmoid()
    state = random(len(lengths), num_heads, HEAD_DIM, HEAD_DIM) * 0.1
    options: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    if not dense:
        offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        options |= {"cu_seqlens": offsets, "prefill_metadata": build_prefill_metadata(lengths, cu_seqlens=offsets)}
    call = lambda: chunk_gated_delta_rule(q, k, v, g, beta, **options)  # noqa: E731  # carries its explanation
    call.explain = lambda: explain(q, k, v, g, beta, **options)  # type: ignore[attr-defined]
    return call


def event_times(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Device time of single calls, us, input sets in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first in range(0, repeats, 8):
        torch.cuda._sleep(16_000_000)
        for index in range(first, min(first + 8, repeats)):
            pairs[index][0].record()
            calls[index % len(calls)]()
            pairs[index][1].record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def graph_time(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Median time of one call inside a replayed graph of all input sets, us."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return statistics.median(event_times([graph.replay], repeats)) / len(calls)


def host_time(call: Callable[[], Any], repeats: int) -> float:
    """Median host time of one warm call, us; the device queue is never waited for inside the interval."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def kernel_times(calls: list[Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Mean device time of each kernel per call, us; launches of one kernel within a call in their order."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in sorted(profiled.events() or [], key=lambda event: event.time_range.start):
        name = next((short for part, short in KERNELS.items() if part in event.name), None)
        if name is not None:
            found.setdefault(name, []).append(event.time_range.elapsed_us())
    count = rounds * len(calls)
    result = {}
    for name, times in found.items():
        per_call = len(times) // count
        for turn in range(per_call):
            label = {0: "transfer", 1: "scan"}[turn] if per_call == 2 else name
            result[label] = statistics.mean(times[turn::per_call])
    return result


def measure(text: str, repeats: int) -> dict[str, Any]:
    """All figures of one shape."""
    num_heads, num_key_heads, lengths, dense = parse_shape(text)
    size = 4 * sum(lengths) * HEAD_DIM * (num_heads + num_key_heads)
    sets = min(6, max(2, -(-200_000_000 // size)))
    calls = [make_call(num_heads, num_key_heads, lengths, dense, seed) for seed in range(sets)]
    selection = calls[0].explain()  # type: ignore[attr-defined]
    for call in calls:
        call()
    return {
        "shape": text,
        "sequences": len(lengths),
        "floor_us": floor_us(num_heads, num_key_heads, lengths),
        "segment_chunks": None if selection.fast is None else selection.fast.segment_chunks,
        "graph_us": graph_time(calls, repeats),
        "host_us": host_time(calls[0], 20),
        **{f"{name}_us": value for name, value in kernel_times(calls, 3).items()},
    }


def main() -> None:
    """Print the table; with --json also write it, with commit, device and command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", action="append", help="H/Hg:LENxN, H/Hg:L1,L2,... or H/Hg:denseT (default: a fixed list)"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--path", choices=("fast", "staged"), default="fast")
    parser.add_argument("--p-in-scan", type=int, choices=(0, 1), help="force where P is formed (default: the rule)")
    parser.add_argument("--segment", type=int, help="force the chunks per segment, 0 for whole sequences")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    forced: dict[str, Callable[[Any], tuple[Any, str]]] = {}
    if args.p_in_scan is not None:
        forced["p_in_scan"] = lambda problem: (bool(args.p_in_scan), "forced")
    if args.segment is not None:
        forced["segment_chunks"] = lambda problem: (args.segment, "forced")
    columns = ("floor_us", "graph_us", "prepare_us", "transfer_us", "combine_us", "scan_us", "host_us")
    print(f"{'shape':<18}" + "".join(f"{name:>13}" for name in columns))
    rows = []
    with ExitStack() as stack:
        stack.enter_context(env.override(prefill=args.path))
        for name, rule in forced.items():
            stack.enter_context(patch.object(select, name, rule))
        for text in args.shape or SHAPES:
            row = measure(text, args.repeats)
            rows.append(row)
            cells = "".join(f"{row[name]:>13.1f}" if name in row else f"{'-':>13}" for name in columns)
            print(f"{text[:17]:<18}{cells}", flush=True)
            torch.cuda.empty_cache()
    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        report = {
            "commit": commit or None,
            "version": __version__,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": "benchmarks/fast_prefill.py",
            "path": args.path,
            "rows": rows,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
