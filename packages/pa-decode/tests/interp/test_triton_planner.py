"""The device planner against the integer oracle, bit for bit, on Triton's interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_decode.traits import MAX_LENGTH
from pa_testing.triton_kernels import interpret, plan_by, plan_of, same_plan

LENGTH = st.one_of(
    st.integers(-3, 3),
    st.integers(0, 1100),
    st.integers(0, 200_000),
    st.sampled_from([255, 256, 257, MAX_LENGTH, MAX_LENGTH - 255, -MAX_LENGTH]),
)
WINDOW = st.sampled_from([0, 1, 17, 255, 256, 257, 8193, MAX_LENGTH])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, int]]:
    batch = draw(st.integers(1, 9))
    lengths, others = (draw(st.lists(LENGTH, min_size=batch, max_size=batch)) for _ in range(2))
    options = {
        "capacity": batch + draw(st.integers(0, 70)),
        "max_partitions": draw(st.integers(1, 40)),
        "window": draw(WINDOW),
        "query_length": draw(st.integers(1, 8)),
    }
    return lengths, others, options


@settings(max_examples=15, deadline=None)
@given(problem=problems())
def test_made_and_refreshed_plans_are_the_oracles(problem: tuple[list[int], list[int], dict[str, int]]) -> None:
    """A refresh writes into what another plan left behind."""
    lengths, others, options = problem
    made = plan_by(interpret, others, "sm90", **options)
    assert same_plan(made, plan_of(others, **options))
    refreshed = plan_by(interpret, lengths, "sm90", into=made, **options)
    assert same_plan(refreshed, plan_of(lengths, **options))


CASES: dict[str, tuple[list[int], dict[str, int]]] = {
    "ragged": ([200_000] + [1024] * 199, {"capacity": 256, "max_partitions": 256}),
    "one slot each": ([200_000] + [1024] * 199, {"capacity": 200, "max_partitions": 256}),
    "one sequence": ([131_072], {"capacity": 256, "max_partitions": 256}),
    "longest": ([MAX_LENGTH] * 300, {"capacity": 1200, "max_partitions": 7}),
    "empty": ([0, -5] * 70, {"capacity": 256, "max_partitions": 4}),
    "largest batch": ([k * 37 % 3000 - 40 for k in range(4096)], {"capacity": 4200, "max_partitions": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_worked_batches(case: str) -> None:
    """More sequences than are planned at a time, more tasks than are written at a time, sums beyond 32 bits."""
    lengths, options = CASES[case]
    assert same_plan(plan_by(interpret, lengths, "sm90", **options), plan_of(lengths, **options))
