"""The integer oracle of the planner, over random and worked batches."""

from __future__ import annotations

import random

import pytest

from pa_decode.planner import Task, WorkPlan, default_budget, make_plan, partition_bound, plan_capacity
from pa_decode.traits import TILE, is_single_tile, task_pages_bound, visible_tile_range, window_tiles

WINDOWS = (0, 1, 2, 17, 255, 256, 257, 300, 1000, 8193)


def check(plan: WorkPlan, contexts: list[int], capacity: int, partitions: int, window: int, query_length: int) -> None:
    """Every visible tile in exactly one task, tasks in order and even, within capacity and partitions."""
    assert len(plan.tasks) <= capacity and len(plan.reduce) == len(contexts)
    slot = 0
    for sequence, (context, (first_slot, count)) in enumerate(zip(contexts, plan.reduce, strict=True)):
        first, end = visible_tile_range(context, window, query_length)
        if first == end:
            assert (first_slot, count) == (0, 0)
            continue
        assert first_slot == slot and 1 <= count <= min(partitions, end - first)
        tasks = plan.tasks[slot : slot + count]
        assert [tile for task in tasks for tile in range(task.first_tile, task.end_tile)] == list(range(first, end))
        sizes = {task.end_tile - task.first_tile for task in tasks}
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
        assert all(task.sequence == sequence and task.context == context for task in tasks)
        slot += count
    assert slot == len(plan.tasks)


def test_random_batches() -> None:
    draw = random.Random(1)
    for _ in range(400):
        batch = draw.randint(1, 9)
        contexts = [draw.choice([0, -3, 1, draw.randint(0, 60_000)]) for _ in range(batch)]
        window, query_length = draw.choice(WINDOWS), draw.randint(1, 8)
        capacity, partitions = draw.randint(batch, 200), draw.randint(1, 64)
        plan = make_plan(
            contexts, capacity=capacity, max_partitions=partitions, window=window, query_length=query_length
        )
        check(plan, contexts, capacity, partitions, window, query_length)


def test_single_tile_guarantee() -> None:
    draw = random.Random(2)
    for _ in range(600):
        batch = draw.randint(1, 9)
        window, query_length = draw.choice(WINDOWS[1:]), draw.randint(1, 8)
        bound = window_tiles(window, query_length)
        capacity, partitions = batch * bound + draw.choice([0, 0, 1, 5]), bound + draw.choice([0, 3])
        assert is_single_tile(window, query_length, batch, partitions, capacity)
        contexts = [draw.choice([0, 1, draw.randint(0, 20_000)]) for _ in range(batch)]
        plan = make_plan(
            contexts, capacity=capacity, max_partitions=partitions, window=window, query_length=query_length
        )
        assert all(task.end_tile - task.first_tile == 1 for task in plan.tasks)
        check(plan, contexts, capacity, partitions, window, query_length)


@pytest.mark.parametrize(("window", "query_length"), [(1, 4), (257, 4), (8193, 1)])
def test_single_tile_needs_both_bounds(window: int, query_length: int) -> None:
    bound, batch = window_tiles(window, query_length), 3
    assert is_single_tile(window, query_length, batch, bound, batch * bound)
    assert not is_single_tile(window, query_length, batch, bound - 1, batch * bound)
    assert not is_single_tile(window, query_length, batch, bound, batch * bound - 1)
    assert not is_single_tile(0, query_length, batch, 1 << 20, 1 << 20)
    # And with one slot less some batch does get a task of two tiles.
    longest = next(c for c in range(1, 9000) if len(range(*visible_tile_range(c, window, query_length))) == bound)
    plan = make_plan(
        [longest] * batch,
        capacity=batch * bound - 1,
        max_partitions=bound,
        window=window,
        query_length=query_length,
    )
    assert max(task.end_tile - task.first_tile for task in plan.tasks) == 2


def test_ragged_examples() -> None:
    ragged = [200_000] + [1024] * 199
    plan = make_plan(ragged, capacity=256, max_partitions=256, window=0, query_length=1)
    assert plan.reduce[0] == (0, 28)
    assert max(task.end_tile - task.first_tile for task in plan.tasks[:28]) == 28
    check(plan, ragged, 256, 256, 0, 1)
    plan = make_plan(ragged, capacity=200, max_partitions=256, window=0, query_length=1)
    assert plan.tasks[0] == Task(0, 0, 782, 200_000)
    assert (plan.tasks[0].end_tile - plan.tasks[0].first_tile) * TILE // 16 == 12_512
    for slots, tiles in ((256, 2), (512, 1)):
        plan = make_plan([131_072], capacity=slots, max_partitions=slots, window=0, query_length=1)
        assert len(plan.tasks) == slots
        assert {task.end_tile - task.first_tile for task in plan.tasks} == {tiles}


def test_no_task_reads_more_pages_than_its_bound() -> None:
    draw = random.Random(3)
    for _ in range(200):
        window, query_length, page = draw.choice(WINDOWS), draw.randint(1, 8), draw.choice((16, 64))
        contexts = [draw.randint(0, 70_000) for _ in range(draw.randint(1, 6))]
        plan = make_plan(contexts, capacity=len(contexts), max_partitions=1, window=window, query_length=query_length)
        bound = task_pages_bound(window, query_length, page, max(contexts))
        assert bound is not None
        assert all((task.end_tile - task.first_tile) * TILE // page <= bound for task in plan.tasks)


def test_extreme_lengths() -> None:
    longest = 2**31 - 1
    plan = make_plan([longest, -7, longest, 0], capacity=4, max_partitions=3, window=0, query_length=4)
    assert plan.reduce == ((0, 2), (0, 0), (2, 2), (0, 0))
    halves = [(sequence, first, first + (1 << 22)) for sequence in (0, 2) for first in (0, 1 << 22)]
    assert [(task.sequence, task.first_tile, task.end_tile) for task in plan.tasks] == halves
    assert make_plan([0, -1, 0], capacity=8, max_partitions=4, window=0, query_length=1) == WorkPlan((), ((0, 0),) * 3)
    many = [0] * 4095 + [300]
    assert make_plan(many, capacity=4096, max_partitions=2, window=0, query_length=1).reduce[-1] == (0, 2)


def test_dense_plans_do_not_depend_on_the_query_length() -> None:
    plans = [make_plan([700, 5, 0], capacity=5, max_partitions=8, window=0, query_length=ql) for ql in (1, 4, 8)]
    assert plans[0] == plans[1] == plans[2]


def test_a_partition_bound_by_the_window_changes_no_plan() -> None:
    draw = random.Random(4)
    for _ in range(200):
        batch, window, query_length = draw.randint(1, 5), draw.choice(WINDOWS), draw.randint(1, 8)
        contexts = [draw.randint(0, 20_000) for _ in range(batch)]
        partitions, budget = draw.randint(1, 64), draw.randint(1, 300)
        bound = partition_bound(partitions, window, query_length)
        assert bound <= partitions
        plans = [
            make_plan(
                contexts,
                capacity=plan_capacity(batch, 1, budget, p),
                max_partitions=p,
                window=window,
                query_length=query_length,
            )
            for p in (partitions, bound)
        ]
        check(plans[1], contexts, plan_capacity(batch, 1, budget, bound), bound, window, query_length)
        assert plans[0] == plans[1]


def test_capacities_and_budgets() -> None:
    assert default_budget(256, pipe=True) == 256
    assert default_budget(304, pipe=False) == 608
    assert plan_capacity(1, 2, 256, 256) == 128
    assert plan_capacity(8, 3, 256, 256) == 86
    assert plan_capacity(200, 1, 1, 256) == 200
    assert plan_capacity(2, 1, 4096, 80) == 160
