"""Plans on CPU tensors: what they hold, refresh, reuse with another problem, workspaces."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime.errors import UnsupportedError
from pa_decode import DecodeGeometry, DecodePlan, plan_decode
from pa_decode.planner import make_plan


def geometry(**changes: Any) -> DecodeGeometry:
    fields: dict[str, Any] = {
        "arch": "gfx950",
        "compute_units": 16,
        "batch": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 256,
        "page_size": 16,
        "query_length": 2,
    }
    return DecodeGeometry(**(fields | changes))


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(plan: DecodePlan, seq_lens: Tensor) -> None:
    made = make_plan(
        seq_lens.tolist(),
        capacity=plan.capacity,
        max_partitions=plan.max_partitions,
        window=plan.window,
        query_length=plan.query_length,
    )
    rows = [[t.sequence, t.first_tile, t.end_tile, t.context] for t in made.tasks]
    assert plan.work_info.tolist() == rows + [[0, 0, 0, 0]] * (plan.capacity - len(rows))
    assert plan.reduce_info.tolist() == [list(pair) for pair in made.reduce]


def test_a_plan_in_full() -> None:
    plan = plan_decode(lengths(600, 0, 257, -3), geometry(), budget=10)
    assert plan.capacity == 5 and plan.work_info.dtype == plan.reduce_info.dtype == torch.int32
    assert plan.work_info.tolist() == [[0, 0, 1, 600], [0, 1, 3, 600], [2, 0, 1, 257], [2, 1, 2, 257], [0, 0, 0, 0]]
    assert plan.reduce_info.tolist() == [[0, 2], [0, 0], [2, 2], [0, 0]]


def test_refresh_writes_the_same_tensors() -> None:
    draw = random.Random(1)
    for window in (0, 257):
        plan = plan_decode(lengths(1, 2, 3, 4), geometry(window=window), budget=40)
        pointers = plan.work_info.data_ptr(), plan.reduce_info.data_ptr()
        for _ in range(20):
            values = lengths(*(draw.choice([0, -1, 255, 256, 257, draw.randint(0, 5000)]) for _ in range(4)))
            plan.refresh(values)
            check(plan, values)
        assert pointers == (plan.work_info.data_ptr(), plan.reduce_info.data_ptr())
        plan.refresh(lengths(0, 0, 0, 0))
        assert not plan.work_info.any() and not plan.reduce_info.any()


def test_refresh_checks_lengths() -> None:
    plan = plan_decode(lengths(1, 2, 3, 4), geometry())
    with pytest.raises(ValueError, match=r"seq_lens.shape: got \[3\], expected \[4\]"):
        plan.refresh(lengths(1, 2, 3))
    with pytest.raises(TypeError, match=r"seq_lens.dtype: got torch.int64"):
        plan.refresh(lengths(1, 2, 3, 4).long())
    check(plan, lengths(1, 2, 3, 4))


@pytest.mark.parametrize("name", ["work_info", "reduce_info"])
def test_refresh_refuses_lengths_in_the_memory_of_the_plan(name: str) -> None:
    """It would read what it writes."""
    plan = plan_decode(lengths(1, 2, 3, 4), geometry())
    own = getattr(plan, name).flatten()
    message = f"seq_lens: got memory shared with {name} of the plan, expected memory of its own"
    for given in (own[:4], own[-4:]):
        with pytest.raises(ValueError, match=message):
            plan.refresh(given)
        numbers = plan.max_partitions, plan.window, plan.query_length, plan.backend, plan.planner.arch
        with pytest.raises(ValueError, match=message):
            torch.ops.pa_decode.write_plan.default(given, plan.work_info, plan.reduce_info, *numbers)
    check(plan, lengths(1, 2, 3, 4))
    memory = torch.zeros(own.numel() + 4, dtype=torch.int32)  # beside it is not in it
    beside = replace(plan, **{name: memory[:-4].view(getattr(plan, name).shape)})
    beside.refresh(memory[-4:].copy_(lengths(9, 0, 1, 300)))
    check(beside, lengths(9, 0, 1, 300))


def test_single_tile_plans_say_so() -> None:
    wide = plan_decode(lengths(9000, 5, 300, 8192), geometry(window=257))
    assert not wide.single_tile
    wide = plan_decode(lengths(9000, 5, 300, 8192), geometry(window=257), budget=24)
    assert wide.single_tile and wide.capacity == 12
    tasks = wide.work_info
    assert (tasks[:, 2] - tasks[:, 1]).max() == 1
    assert not plan_decode(lengths(9000, 5, 300, 8192), geometry(), budget=24).single_tile


def test_reuse_for_its_own_problem() -> None:
    problem = geometry(window=257)
    plan = plan_decode(lengths(1, 2, 3, 4), problem, budget=20, max_partitions=8)
    plan.check(problem)
    plan.check(problem, budget=20, max_partitions=8)
    # A dense plan does not depend on the query length, nor a plan on what only kernels look at.
    dense = plan_decode(lengths(1, 2, 3, 4), geometry())
    dense.check(geometry(query_length=4))
    dense.check(geometry(query_dtype="fp16", v_packed=False, scale_mode="token", page_size=64))


@pytest.mark.parametrize(
    ("name", "changes", "arguments"),
    [
        ("batch", {"batch": 3}, {}),
        ("num_kv_heads", {"num_kv_heads": 4}, {}),
        ("window", {"window": 256}, {}),
        ("window", {"window": 0}, {}),
        ("query_length", {"query_length": 1}, {}),
        ("budget", {}, {"budget": 21}),
        ("max_partitions", {}, {"max_partitions": 1}),
    ],
)
def test_reuse_for_another_problem(name: str, changes: dict[str, Any], arguments: dict[str, int]) -> None:
    plan = plan_decode(lengths(1, 2, 3, 4), geometry(window=257), budget=20)
    with pytest.raises(ValueError, match=f"{name} of the plan: got .*, expected .*, as in the call"):
        plan.check(geometry(**({"window": 257} | changes)), **arguments)


def test_workspaces() -> None:
    problem = geometry(query_dtype="fp16")
    shapes = plan_decode(lengths(1, 2, 3, 4), problem, budget=20).workspace_shapes(problem)
    assert shapes == {
        "partial_out": ((2, 10, 8, 256), torch.float16),
        "partial_max": ((2, 10, 8), torch.float32),
        "partial_sum": ((2, 10, 8), torch.float32),
    }


def test_devices_without_a_planner() -> None:
    with pytest.raises(UnsupportedError, match="device type: got meta, supported: cpu, cuda"):
        plan_decode(lengths(1, 2, 3, 4).to("meta"), geometry())
    for backend in ("triton", "flydsl"):
        with pytest.raises(
            UnsupportedError, match=rf"backend on cpu: got '{backend}', supported: reference \(available"
        ):
            plan_decode(lengths(1, 2, 3, 4), geometry(), backend=backend)


def test_plan_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="budget: got 0"):
        plan_decode(lengths(1, 2, 3, 4), geometry(), budget=0)
    with pytest.raises(ValueError, match="max_partitions: got 17, expected an int of 1 to 16"):
        plan_decode(lengths(1, 2, 3, 4), geometry(), max_partitions=17)
    with pytest.raises(ValueError, match=r"seq_lens.shape"):
        plan_decode(lengths(1), geometry())
    assert plan_decode(lengths(1, 2, 3, 4), geometry(), tuned_budget=6, budget=8).budget == 8
