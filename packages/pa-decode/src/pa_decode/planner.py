"""How the tiles of a batch are cut into tasks: capacities and budgets, and the integer oracle of the device planner.

A plan of ``capacity`` slots is made for a geometry once; which slots do what follows from the context lengths alone and
is computed on the device at each refresh. Every sequence that is not empty gets one task; the slots that are left are
shared in proportion to the tiles of the sequences, no sequence getting more than it has tiles or than
``max_partitions``; a sequence's tiles are then cut evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .traits import cdiv, visible_tile_range, visible_tiles_bound


@dataclass(frozen=True)
class Task:
    """One slot in use: tiles [first_tile, end_tile) of a sequence of ``context`` tokens."""

    sequence: int
    first_tile: int
    end_tile: int
    context: int


@dataclass(frozen=True)
class WorkPlan:
    """``tasks`` in slot order; ``reduce`` holds (first slot, number of tasks) of each sequence, (0, 0) if empty."""

    tasks: tuple[Task, ...]
    reduce: tuple[tuple[int, int], ...]


def default_budget(compute_units: int, *, pipe: bool) -> int:
    """Tasks that fill a device, over all KV heads: one per compute unit for kernels that take all of one (``pipe``: the
    D256 pipe on gfx950, the Hopper kernel), else two."""
    return compute_units if pipe else 2 * compute_units


def partition_bound(max_partitions: int, window: int, query_length: int) -> int:
    """Most tasks of one sequence: ``max_partitions``, and no more than the tiles that a window can touch."""
    tiles = visible_tiles_bound(window, query_length, None)
    return max_partitions if tiles is None else min(max_partitions, tiles)


def plan_capacity(batch: int, num_kv_heads: int, budget: int, max_partitions: int) -> int:
    """Slots of a plan: the budget over the KV heads, at least one per sequence, at most ``max_partitions`` each."""
    return min(batch * max_partitions, max(batch, cdiv(budget, num_kv_heads)))


def make_plan(
    contexts: Sequence[int], *, capacity: int, max_partitions: int, window: int, query_length: int
) -> WorkPlan:
    """The tasks of a batch; what the device planner must compute, bit for bit.

    ``capacity`` is at least the batch. Spare slots go out by prefix sums: a sequence whose tiles are [p, p + t) of all
    n gets (p + t) * spare // n - p * spare // n more, which telescopes, so the capacity is never exceeded.
    """
    assert capacity >= len(contexts) and max_partitions >= 1
    ranges = [visible_tile_range(context, window, query_length) for context in contexts]
    tiles = [end - first for first, end in ranges]
    total = sum(tiles)
    spare = capacity - sum(1 for count in tiles if count)
    tasks: list[Task] = []
    reduce: list[tuple[int, int]] = []
    before = 0
    for sequence, (context, (first, _), count) in enumerate(zip(contexts, ranges, tiles, strict=True)):
        if not count:
            reduce.append((0, 0))
            continue
        extra = (before + count) * spare // total - before * spare // total
        before += count
        parts = min(1 + extra, count, max_partitions)
        reduce.append((len(tasks), parts))
        for part in range(parts):
            start, end = first + part * count // parts, first + (part + 1) * count // parts
            tasks.append(Task(sequence, start, end, max(context, 0)))
    return WorkPlan(tuple(tasks), tuple(reduce))
