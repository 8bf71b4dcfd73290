"""The device planner as a code object, against the integer oracle."""

from __future__ import annotations

import pytest

from pa_decode.traits import MAX_LENGTH
from pa_testing.triton_kernels import emulate, plan_by, plan_of, same_plan

LENGTHS = [200_000, 0, -7, 1, MAX_LENGTH, 256, 257] + [k * 37 % 1500 for k in range(150)]
"""More than are planned at a time."""


@pytest.mark.parametrize("window", [0, 257, MAX_LENGTH])
def test_plans_of_a_ragged_batch(arch: str, window: int) -> None:
    """Sums and products beyond 32 bits, more tasks than are written at a time; then the lengths all change."""
    options = {"capacity": 400, "max_partitions": 256, "window": window, "query_length": 4}
    made = plan_by(emulate(), LENGTHS, arch, **options)
    assert same_plan(made, plan_of(LENGTHS, **options))
    others = [length % 700 - 20 for length in LENGTHS]
    assert same_plan(plan_by(emulate("random"), others, arch, into=made, **options), plan_of(others, **options))
    nothing = [0] * len(LENGTHS)
    work, info = plan_by(emulate(), nothing, arch, into=made, **options)
    assert not work.any() and not info.any()
