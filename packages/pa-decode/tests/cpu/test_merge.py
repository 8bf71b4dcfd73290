"""Partials of plans and their merge against the undivided oracles."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from pa_decode import plan_decode, reference
from pa_decode.reference import DecodeInputs
from pa_testing import geometry_of, make_inputs

CONTEXTS = [1, 0, 16, 1000, 517]


def problem(**changes: object) -> DecodeInputs:
    return make_inputs(CONTEXTS, **({"dtype": torch.float32, "query_length": 2} | changes))  # type: ignore[arg-type]


def merged(inputs: DecodeInputs, budget: int, denominator: reference.Denominator | None = None) -> Tensor:
    geometry = geometry_of(inputs, head_dim=256, query_dtype="bf16")
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget)
    parts = reference.partials(inputs, plan.work_info, denominator=denominator)
    used = plan.work_info[:, 2] > plan.work_info[:, 1]
    for part in parts:
        assert part[:, ~used].isnan().all() and not part[:, used].isnan().any()
    return reference.reduce(*parts, plan.reduce_info, query_length=inputs.query_length, sinks=inputs.sinks)


@pytest.mark.parametrize("budget", [1, 2, 16, 512])
@pytest.mark.parametrize(("window", "mode"), [(0, "tensor"), (0, "token"), (128, "tensor"), (257, "token")])
def test_every_split_gives_the_same(budget: int, window: int, mode: str) -> None:
    for sinks in (False, True):
        inputs = problem(window=window, scale_mode=mode, sinks=sinks)
        torch.testing.assert_close(merged(inputs, budget), reference.decode(inputs), rtol=1e-5, atol=1e-6)
        rounded = merged(inputs, budget, "matched")
        torch.testing.assert_close(rounded, reference.decode_quantised(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, -3e38, 3e38, 2.0])
def test_a_sink_is_counted_once(sink: float) -> None:
    inputs = dataclasses.replace(problem(), sinks=torch.full((4,), sink))
    out = merged(inputs, 512)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, reference.decode(inputs), rtol=1e-5, atol=1e-6)
    if sink == -math.inf:
        assert torch.equal(out, merged(dataclasses.replace(inputs, sinks=None), 512))
    if sink > 3e38:
        assert not out.any()


def test_splits_that_see_nothing() -> None:
    """A plan without the window's first tile: the early tasks are masked for all rows, or for some."""
    inputs = make_inputs([1500], dtype=torch.float32, query_length=4, window=128, sinks=True)
    work = torch.tensor([[0, tile, tile + 1, 1500] for tile in range(6)], dtype=torch.int32)
    out, largest, total = reference.partials(inputs, work)
    assert (largest[:, :5] == -math.inf).all() and not total[:, :5].any() and not out[:, :5].any()
    info = torch.tensor([[0, 6]], dtype=torch.int32)
    result = reference.reduce(out, largest, total, info, query_length=4, sinks=inputs.sinks)
    torch.testing.assert_close(result, reference.decode(inputs), rtol=1e-5, atol=1e-6)


def test_a_merge_of_nothing_is_zero() -> None:
    empty = torch.zeros(3, 2, 4), torch.full((3, 2), -math.inf), torch.zeros(3, 2)
    for sink in (None, torch.zeros(2), torch.full((2,), math.inf), torch.full((2,), -math.inf)):
        assert torch.equal(reference.merge_rows(*empty, sink), torch.zeros(2, 4))


def test_a_merge_does_not_depend_on_the_reference() -> None:
    draw = torch.Generator().manual_seed(1)
    out, total = torch.randn(5, 3, 4, generator=draw), torch.rand(5, 3, generator=draw) + 0.1
    largest = torch.randn(5, 3, generator=draw) * 20
    expected = reference.merge_rows(out, largest, total, torch.zeros(3))
    shift = torch.randn(5, 3, generator=draw)
    moved = reference.merge_rows(out, largest + shift, total * torch.exp(-shift), torch.zeros(3))
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)


def test_partials_keep_the_dtype_of_the_query() -> None:
    inputs = problem(dtype=torch.bfloat16)
    plan = plan_decode(inputs.seq_lens, geometry_of(inputs, head_dim=256), budget=16)
    parts = reference.partials(inputs, plan.work_info)
    assert [part.dtype for part in parts] == [torch.bfloat16, torch.float32, torch.float32]
    out = reference.reduce(*parts, plan.reduce_info, query_length=2)
    assert out.dtype == torch.bfloat16 and out.shape == inputs.query.shape
    expected = reference.decode(inputs)
    assert ((out.float() - expected).abs() <= 0.01 * expected.abs() + 1e-3).all()
