"""Sums in less than fp32, as Hopper's matrix unit makes them of FP8: what they do to a decode is within its bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pa_decode import reference
from pa_testing import make_inputs
from pa_testing.tensor_core import BITS, CUT, product, slack


def test_terms_are_cut_below_the_largest() -> None:
    """13 bits below it, towards zero, in each instruction of 32; past 256 elements the sum is taken in fp32."""
    ones = torch.ones(1, 512)
    a = ones.clone()
    a[0, 1:] = 0.0
    a[0, 1], a[0, 40], a[0, 300] = 2.0**-BITS, 2.0 ** -(BITS + 1), 2.0 ** -(BITS + 1)
    assert product(a, ones.T).item() == 1.0 + 2.0**-BITS + 2.0 ** -(BITS + 1)
    assert product(-a, ones.T).item() == -(1.0 + 2.0**-BITS + 2.0 ** -(BITS + 1))
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=draw).to(torch.float8_e4m3fn).float() for shape in ((3, 5, 256), (3, 256, 4)))
    error = (product(a, b).double() - a.double() @ b.double()).abs()
    largest = (a.unsqueeze(-1) * b.unsqueeze(-3)).abs().amax(-2)
    assert error.max() > 0 and (error <= CUT * torch.maximum(largest, (a @ b).abs())).all()


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, 5e-4),
        ({"scale_mode": "token", "page": 64, "scale_spread": 8.0}, 5e-3),
        ({"window": 17, "v_packed": False}, 1e-3),
        ({"sinks": True, "window": 40, "dtype": torch.float16}, 5e-4),
    ],
)
def test_a_decode_stays_within_its_slack(options: dict[str, Any], moved: float) -> None:
    """And is moved by more than fp32 would: some weight rounds to another FP8 number, much in a row of few tokens."""
    largest = 0.0
    for seed in range(2):
        inputs = make_inputs([3, 40, 16], head_dim=256, group=8, query_length=4, seed=seed, **options)
        difference = (reference.decode_quantised(inputs, multiply=product) - reference.decode_quantised(inputs)).abs()
        assert (difference <= slack(inputs) + 1e-6).all()
        largest = max(largest, float(difference.max()))
    assert largest > moved


def test_rows_of_one_token_move_by_nothing() -> None:
    inputs = make_inputs([300, 1, 0], head_dim=256, group=4, query_length=2, window=1, scale_mode="token")
    expected = reference.decode_quantised(inputs)
    assert torch.equal(reference.decode_quantised(inputs, multiply=product), expected)
    bound = slack(inputs)
    assert not bound[2].any() and not bound[4:].any()  # which see nothing
    # Of the products with V alone, over a sum that may be one FP8 step less.
    assert (bound <= 1.25 * CUT * expected.abs() + 1e-7).all()
