"""The reducer against the torch merge, on Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pa_decode import reference
from pa_testing.attention import Partials
from pa_testing.triton_kernels import interpret, random_partials, reduce_by

SINKS = torch.tensor([0.5, -2.0, math.inf, -math.inf, 40.0, -40.0])
INFO = torch.tensor([[0, 1], [1, 3], [0, 0], [4, 2], [6, 40]], dtype=torch.int32)
USED, CAPACITY = 46, 50


def merged(partials: Partials, query_length: int, sinks: Tensor | None) -> Tensor:
    return reference.reduce(
        partials.out, partials.reference, partials.total, INFO, query_length=query_length, sinks=sinks
    )


@pytest.mark.parametrize(
    ("dtype", "sink_dtype", "group", "query_length"),
    [
        (torch.bfloat16, torch.bfloat16, 3, 2),
        (torch.float16, torch.float16, 3, 1),
        (torch.float16, None, 1, 5),
    ],
)
def test_counts_and_sinks(dtype: torch.dtype, sink_dtype: torch.dtype | None, group: int, query_length: int) -> None:
    """One part, a few, none, and more than are read at a time; partials that see nothing; slots of nobody are NaN."""
    heads, rows = 2, group * query_length
    partials = random_partials(heads, CAPACITY, rows, 64, USED, dtype=dtype)
    sinks = None if sink_dtype is None else SINKS.to(sink_dtype)
    got = reduce_by(interpret, partials, INFO, "sm90", query_length=query_length, sinks=sinks)
    expected = merged(partials, query_length, sinks)
    assert torch.isfinite(got).all()
    assert torch.allclose(got.float(), expected.float(), atol=0.004, rtol=0.008)  # an ulp of bf16
    assert not got[2 * query_length : 3 * query_length].any()
    if sinks is not None:
        assert not got[:, sinks == math.inf].any()


@pytest.mark.parametrize("value", [None, 0.25, math.inf, -math.inf])
def test_a_row_that_nobody_sees_is_zero(value: float | None) -> None:
    partials = random_partials(1, CAPACITY, 2, 64, USED, dtype=torch.bfloat16)
    partials.reference[:, :USED, 1], partials.total[:, :USED, 1], partials.out[:, :USED, 1] = -math.inf, 0.0, 0.0
    sinks = None if value is None else torch.tensor([value, value])
    got = reduce_by(interpret, partials, INFO, "sm90", query_length=1, sinks=sinks)
    assert not got[:, 1].any() and got[0, 0].any() == (value != math.inf)


def test_far_references_and_a_sink_far_above() -> None:
    """exp of their difference is 0 or 1, never NaN."""
    partials = random_partials(1, CAPACITY, 1, 64, USED, dtype=torch.bfloat16)
    partials.reference[0, 1:4, 0] = torch.tensor([-7e6, 7e6, -math.inf])
    partials.total[0, 3], partials.out[0, 3] = 0.0, 0.0
    alone = reduce_by(interpret, partials, INFO, "sm90", query_length=1)
    assert torch.equal(alone[1, 0], partials.out[0, 2, 0])
    assert not reduce_by(interpret, partials, INFO, "sm90", query_length=1, sinks=torch.tensor([8e6]))[1].any()
