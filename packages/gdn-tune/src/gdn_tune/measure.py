"""Times that people can trust: candidates take turns, inputs rotate past the last cache, and the spread says how often.

The rule for n: every candidate is timed ``FIRST`` times, then twice as often, and so on up to ``MOST``. At each of
these looks the ratio of its median to the fastest one's has an interval of ``LOOK_ERRORS`` standard errors (of
medians, from the median absolute deviation). Whoever's interval is wholly above 1, by more than clocks drift, leaves;
whoever's lies within ``RESOLUTION`` of 1 is as fast as the fastest for all that matters. Timing ends when no candidate
is left between the two. With times that scatter by 5 %, a gap of 20 % takes 100 iterations and one of 2 % 400.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .spread import DRIFT, Spread

BLOCK = 10
"""Iterations of one candidate before the next one's turn."""
FIRST, MOST = 100, 800
LOOK_ERRORS = 3.0
"""Standard errors of the interval at a look. Four looks at two errors would call chance a difference too often."""
RESOLUTION = 0.005
ROTATION = 3
"""Times the size of the last cache that the inputs of one round of calls take at least."""
INFINITY_CACHE = 256 * 2**20
"""Bytes, behind the L2 caches of gfx942 and gfx950, of which alone the driver tells (AMD CDNA 3 white paper)."""
BACKLOG_US = 2000.0
"""Of the kernel that occupies the device while the host queues a block."""
SPIN = 100_000
"""Cycles that tell how long a cycle of ``torch.cuda._sleep`` is: that of the clock of an SM, or of a slower counter."""

Timer = Callable[[int], Sequence[float]]
"""n -> n times in microseconds."""


def ratio_interval(a: Spread, b: Spread, errors: float = LOOK_ERRORS) -> tuple[float, float]:
    """Where the ratio of the true medians of ``a`` and ``b`` lies: its estimate -+ ``errors`` standard errors."""
    ratio = a.median / b.median
    width = errors * ratio * math.hypot(a.error / a.median, b.error / b.median)
    return ratio - width, ratio + width


@dataclass(frozen=True)
class Limits:
    """How often candidates are timed; see the module."""

    block: int = BLOCK
    first: int = FIRST
    most: int = MOST

    def __post_init__(self) -> None:
        """Raise ValueError for limits that no race ends with."""
        if not 1 <= self.block <= self.first <= self.most:
            raise ValueError(f"limits: got {self}, expected 1 <= block <= first <= most")


def race(timers: Sequence[Timer], limits: Limits | None = None) -> list[list[float]]:
    """Times of every candidate, us, as many as tell them apart or as the limits allow."""
    limits = limits or Limits()
    times: list[list[float]] = [[] for _ in timers]
    running = list(range(len(timers)))
    target = limits.first
    while running:
        order = running
        while len(times[running[0]]) < target:
            for index in order:
                times[index] += timers[index](limits.block)
            order = order[::-1]  # a drift of the clock favours nobody
        spreads = {index: Spread.of(times[index]) for index in running}
        best = min(running, key=lambda index: (spreads[index].median, index))
        intervals = {index: ratio_interval(spreads[index], spreads[best]) for index in running}
        running = [index for index in running if index == best or intervals[index][0] <= 1 + DRIFT]
        open_ones = [i for i in running if i != best and max(abs(bound - 1) for bound in intervals[i]) > RESOLUTION]
        if not open_ones or target >= limits.most:
            break
        target = min(2 * target, limits.most)
    return times


def verdict(times: Sequence[Sequence[float]]) -> tuple[int, list[int]]:
    """(the fastest, those that cannot be told apart from it), by index. Empty times belong to nobody."""
    spreads = {index: Spread.of(each) for index, each in enumerate(times) if each}
    best = min(spreads, key=lambda index: (spreads[index].median, index))
    return best, [index for index in spreads if index != best and not spreads[index].apart(spreads[best])]


# ------------------------------------------------------------------------------------------------ on a device


def input_sets(call_bytes: int, device: torch.device) -> int:
    """Copies of the inputs of a call, of ``call_bytes``, that together outgrow the last cache of ``device``."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    if torch.version.hip is not None:
        cache = max(cache, INFINITY_CACHE)
    return max(2, -(-ROTATION * cache // call_bytes))


@functools.cache
def backlog_cycles() -> int:
    """``BACKLOG_US`` in the cycles of ``torch.cuda._sleep`` on the current device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN)  # the first launch loads the kernel
    start.record()
    torch.cuda._sleep(SPIN)
    end.record()
    torch.cuda.synchronize()
    return int(SPIN * BACKLOG_US / max(start.elapsed_time(end) * 1e3, 1.0))


def graph_timer(calls: Sequence[Callable[[], None]]) -> Timer:
    """Times of one call inside a replayed graph of ``calls``, which do the same on inputs of their own.

    A graph has no gaps that depend on the host, so that kernels of a few us are timed as those of milliseconds are;
    replays queue up behind a kernel that keeps the device busy. The calls have run before. RuntimeError if they cannot
    be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()

    backlog = backlog_cycles()

    def timed(count: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(backlog)
        graph.replay()  # not timed: the caches hold what the candidate before left
        for start, end in pairs:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / len(calls) for start, end in pairs]

    return timed
