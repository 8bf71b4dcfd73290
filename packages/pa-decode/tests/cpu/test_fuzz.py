"""Any geometry and any lengths: a plan, the partials of its tasks and their merge are the undivided decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_decode import plan_decode, reference
from pa_decode.quantise import FN, FNUZ
from pa_testing import geometry_of, make_inputs

WINDOW = st.sampled_from([0, 1, 2, 3, 16, 17, 255, 256, 257, 258, 2**31 - 1])
CONTEXT = st.one_of(st.integers(-2, 20), st.integers(250, 262), st.integers(0, 900))

PROBLEM = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 5, 8]),
        "head_dim": st.sampled_from([16, 32, 48]),
        "page": st.sampled_from([16, 64, 128]),
        "query_length": st.integers(1, 8),
        "window": WINDOW,
        "scale_mode": st.sampled_from(["tensor", "token"]),
        "v_packed": st.booleans(),
        "flavour": st.sampled_from([FN, FNUZ]),
        "sinks": st.booleans(),
        "extra_width": st.integers(0, 3),
        "scale_spread": st.sampled_from([1.0, 4.0]),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(CONTEXT, min_size=1, max_size=4),
    options=PROBLEM,
    budget=st.integers(1, 40),
    partitions=st.integers(1, 12),
)
def test_tasks_and_their_merge_are_the_whole(
    contexts: list[int], options: dict[str, Any], budget: int, partitions: int
) -> None:
    inputs = make_inputs(contexts, dtype=torch.float32, **options)
    geometry = geometry_of(inputs, compute_units=12, head_dim=256, query_dtype="bf16")
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, max_partitions=partitions)
    tasks = plan.work_info[:, 2] > plan.work_info[:, 1]
    assert int(tasks.sum()) == int(plan.reduce_info[:, 1].sum()) <= plan.capacity
    assert not plan.single_tile or bool((plan.work_info[:, 2] - plan.work_info[:, 1] <= 1).all())
    # Flat scores for the rounded one: P depends on the split only where it is below the normal numbers of FP8.
    flat = replace(inputs, softmax_scale=inputs.softmax_scale / 8)
    for problem, rounding, whole in (
        (inputs, None, reference.decode(inputs)),
        (flat, "matched", reference.decode_quantised(flat)),
    ):
        parts = reference.partials(problem, plan.work_info, denominator=rounding)  # type: ignore[arg-type]
        out = reference.reduce(*parts, plan.reduce_info, query_length=inputs.query_length, sinks=inputs.sinks)
        torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-5)
