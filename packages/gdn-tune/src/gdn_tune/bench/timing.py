"""Times of single calls: on a GPU by events and the profiler, on a CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..measure import graph_timer
from .profile import KernelTime, by_stage, profiled
from .results import GRAPH, LAUNCH, WALL, totals

Call = Callable[[], Any]


@dataclass(frozen=True)
class Protocol:
    """How often a call runs: to warm up, for its wall and launch times, under the profiler. ``graph``: whether it is
    captured too."""

    warmup: int = 10
    wall: int = 50
    profiled: int = 20
    graph: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for counts that give no figure."""
        for name, least in (("warmup", 0), ("wall", 1), ("profiled", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least {least}")


def clock_us(call: Call, repeats: int) -> float:
    """Median time of ``call`` on the host, us; whatever it launches is not waited for within the time."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def launch_us(call: Call, repeats: int) -> float:
    """Median host time of one call that starts on an idle device and is not waited for, us."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) / 1e3


def event_us(calls: Sequence[Call], repeats: int, before: Call | None = None) -> list[float]:
    """Times of single calls between two events, us, ``calls`` in turn; ``before`` runs ahead of each, untimed.

    The host is not kept ahead: a call that waits for the host, or makes the device wait, shows it.
    """
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for index, (start, end) in enumerate(pairs):
        if before is not None:
            before()
        start.record()
        calls[index % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def measure(call: Call, device: torch.device, protocol: Protocol) -> tuple[dict[str, float], tuple[KernelTime, ...]]:
    """Metrics of a call, and its kernels. On a CPU there is nothing but the wall."""
    for _ in range(protocol.warmup):
        call()
    if device.type != "cuda":
        return {WALL: clock_us(call, protocol.wall)}, ()
    torch.cuda.synchronize()
    wall = statistics.median(event_us([call], protocol.wall))
    launch = launch_us(call, protocol.wall)
    kernels = tuple(profiled(call, protocol.profiled))
    # Profilers are known to drop the events of a whole session: no total then, in place of none.
    metrics = totals(by_stage(kernels), wall=wall, launch=launch) if kernels else {LAUNCH: launch, WALL: wall}
    return metrics | (in_a_graph(call, protocol.wall) if protocol.graph else {}), kernels


def in_a_graph(call: Call, repeats: int) -> dict[str, float]:
    """Median time of a replay, as a server has that captures its forward pass; nothing for a call that waits for the
    device, which cannot be captured."""
    try:
        return {GRAPH: statistics.median(graph_timer([call])(repeats))}
    except RuntimeError:
        torch.cuda.synchronize()
        return {}


class Flush:
    """Reads ``size`` bytes, so that nothing else stays in a cache."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)
        self._sum = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self) -> None:
        """Queue the read."""
        torch.sum(self._buffer, dim=0, out=self._sum)
