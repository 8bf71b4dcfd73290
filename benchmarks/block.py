"""Times of the GDN prefill block on one GPU: wall, per stage, and host time of a warm call.

    PYTHONPATH=packages/gdn-runtime/src python benchmarks/block.py [--json FILE] [--shape 32/16:8192x4 ...]

Method: input sets are rotated so that a rotation is larger than the L2 cache; every figure is the median of CUDA-event
times of single calls behind a spin kernel (the host is ahead, so launch gaps do not enter), except "graph", the median
time of one call inside a replayed CUDA graph, and "host", the median host time of one call that is not waited for.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from gdn_runtime import __version__, build_prefill_metadata, chunk_gated_delta_rule, explain
from gdn_runtime.ops import block as block_module
from gdn_runtime.ops.backends import stages
from gdn_runtime.spec import HEAD_DIM

SHAPES = (
    "32/16:8192",
    "32/16:8192x4",
    "32/16:8192x8",
    "8/2:8192",
    "8/2:8192x4",
    "8/2:8192x8",
    "64/16:8192x4",
    "16/4:8192",
    "16/4:8192x4",
    "32/16:dense2500",
)
STAGES = ("prepare", "state_scan", "output")


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


def stage_times(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median device time of each stage of ``call``, us, from events around the backend's stage functions."""
    times: dict[str, list[float]] = {name: [] for name in STAGES}
    backend = stages("triton")

    class Timed:
        def __getattr__(self, name: str) -> Callable[..., None]:
            stage = getattr(backend, name)

            def run(*args: Any, **kwargs: Any) -> None:
                pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                pair[0].record()
                stage(*args, **kwargs)
                pair[1].record()
                marks.append((name, pair))

            return run

    with patch.object(block_module, "stages", lambda name: Timed()):
        for _ in range(repeats):
            marks: list[tuple[str, tuple[torch.cuda.Event, torch.cuda.Event]]] = []
            torch.cuda._sleep(2_000_000)
            call()
            torch.cuda.synchronize()
            for name, (start, end) in marks:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(text: str, repeats: int) -> dict[str, Any]:
    """All figures of one shape."""
    num_heads, num_key_heads, lengths, dense = parse_shape(text)
    size = 4 * sum(lengths) * HEAD_DIM * (num_heads + num_key_heads)
    sets = min(6, max(2, -(-200_000_000 // size)))
    calls = [make_call(num_heads, num_key_heads, lengths, dense, seed) for seed in range(sets)]
    selection = calls[0].explain()  # type: ignore[attr-defined]
    return {
        "shape": text,
        "wall_us": statistics.median(event_times(calls, repeats)),
        "graph_us": graph_time(calls, max(7, repeats // 4)),
        "host_us": host_time(calls[0], repeats),
        **{f"{name}_us": value for name, value in stage_times(calls[0], repeats).items()},
        "block_v": selection.state_scan.block_v,
    }


def main() -> None:
    """Print the table; with --json also write it, with commit, device and command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", action="append", help="H/Hg:LENxN, H/Hg:L1,L2,... or H/Hg:denseT (default: a fixed list)"
    )
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    rows = []
    columns = ("wall_us", "graph_us", "prepare_us", "state_scan_us", "output_us", "host_us", "block_v")
    print(f"{'shape':<20}" + "".join(f"{name:>15}" for name in columns))
    for text in args.shape or SHAPES:
        row = measure(text, args.repeats)
        rows.append(row)
        print(f"{text:<20}" + "".join(f"{row[name]:>15.1f}" for name in columns), flush=True)
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
            "command": "benchmarks/block.py",
            "rows": rows,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
