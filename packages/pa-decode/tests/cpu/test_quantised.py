"""The oracle that rounds the query and P: its limits, and what its rounding does not depend on."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pa_decode import reference
from pa_decode.quantise import FN, FNUZ, Flavour
from pa_decode.reference import DecodeInputs
from pa_testing import make_inputs

BOTH = pytest.mark.parametrize("flavour", [FN, FNUZ], ids=["fn", "fnuz"])
ROUNDING = 1 / 17
"""Worst relative error of rounding to 4 significant bits: 1.0625 becomes 1 or 1.125."""


def error(inputs: DecodeInputs, denominator: reference.Denominator = "matched") -> tuple[Tensor, Tensor]:
    expected = reference.decode(inputs)
    return (reference.decode_quantised(inputs, denominator=denominator) - expected).abs(), expected


CASES = list(itertools.product(("tensor", "token"), (0, 1, 17, 257), (1, 4)))


@BOTH
@pytest.mark.parametrize("case", range(0, len(CASES), 2))
def test_small_values_meet_the_tolerance(case: int, flavour: Flavour) -> None:
    mode, window, query_length = CASES[(case + (flavour is FNUZ)) % len(CASES)]
    inputs = make_inputs(
        [0, 1, 3, 40, 256, 300],
        kv_heads=1,
        group=4,
        head_dim=256,
        query_length=query_length,
        window=window,
        scale_mode=mode,
        flavour=flavour,
        sinks=case % 4 == 0,
    )
    wrong, expected = error(inputs)
    assert (wrong <= 0.005 + 0.005 * expected.abs()).all()
    assert wrong.any() or window == 1


@pytest.mark.parametrize("mode", ["tensor", "token"])
@BOTH
def test_a_row_that_sees_one_token_is_that_token(mode: str, flavour: Flavour) -> None:
    inputs = make_inputs(
        [1, 40], query_length=3, window=1, scale_mode=mode, flavour=flavour, scale_spread=16.0, v_amplitude=1.0
    )
    wrong, expected = error(inputs)
    assert float(wrong.max()) <= 1e-6 * float(expected.abs().max())


def test_recorded_limit_of_a_window_of_17() -> None:
    """G = 16, QL = 2, W = 17: 0.0075 was recorded for values that were not scaled down, and that size needs values of
    1/8. It grows with the values, and at 1/16 meets the tolerance."""
    inputs = make_inputs([300, 40], kv_heads=1, group=16, head_dim=256, query_length=2, window=17, v_amplitude=1 / 8)
    wrong, expected = error(inputs)
    assert 0.005 < float(wrong.max()) < 0.01
    assert (wrong > 0.005 + 0.005 * expected.abs()).any()
    for factor in (8.0, 0.5):
        scaled = dataclasses.replace(inputs, v_scale=inputs.v_scale * factor)
        other, values = error(scaled)
        assert float(other.max()) == pytest.approx(float(wrong.max()) * factor, rel=1e-3)
        assert (other <= 0.005 + 0.005 * values.abs()).all() == (factor < 1)


def test_recorded_limit_of_a_window_of_1() -> None:
    """QL = 3, W = 1, scales per token: 3/256 was recorded. Over the exact sum, P V scale off the FP8 grid is wrong by
    up to 1/17 of the value."""
    inputs = make_inputs([300, 40], query_length=3, window=1, scale_mode="token", scale_spread=4.0, v_amplitude=1 / 8)
    wrong, expected = error(inputs, "exact")
    relative = (wrong / expected.abs().clamp(min=1e-9)).amax()
    assert 0.03 < float(relative) <= ROUNDING * 1.001
    assert 3 / 256 < float(wrong.max()) < 6 * 3 / 256


@pytest.mark.parametrize("mode", ["tensor", "token"])
def test_few_tokens_need_a_matched_denominator(mode: str) -> None:
    """With an integer exponent the largest P is 2^-1 to 1, rarely on the grid. Over the exact sum that misses the
    tolerance at V / 16 already; its error does not average out over one to three tokens."""
    inputs = make_inputs([1, 2, 3], kv_heads=1, group=8, head_dim=256, scale_mode=mode)
    exact, expected = error(inputs, "exact")
    assert float((exact / (0.005 + 0.005 * expected.abs())).max()) > 1.0
    matched, _ = error(inputs, "matched")
    assert float(matched.mean()) < 0.4 * float(exact.mean())
    assert float(matched[0].max()) < 1e-6


@settings(max_examples=60, deadline=None)
@given(p=st.floats(2.0**-6, 1.0, width=32), steps=st.integers(0, 7))
def test_rounding_does_not_depend_on_an_integer_reference(p: float, steps: int) -> None:
    for flavour in (FN, FNUZ):
        x = torch.tensor([p], dtype=torch.float32)
        shifted = reference._round_p(x * 2.0**-steps, flavour) * 2.0**steps
        assert torch.equal(shifted, reference._round_p(x, flavour))
        assert float((shifted - x).abs()) <= p * ROUNDING


def test_extreme_v_scales_keep_the_weight_of_small_ones() -> None:
    """Equal scores, V scales 1 and 2^-16: the second has half the weight, though its P V scale is below FP8."""
    inputs = make_inputs([2], group=1, scale_mode="token")
    assert isinstance(inputs.v_scale, Tensor)
    scale = inputs.v_scale.clone()
    block = int(inputs.block_tables[0, 0])
    scale[block, :, 0], scale[block, :, 1] = 2.0**-16, 1.0
    inputs = dataclasses.replace(inputs, query=torch.zeros_like(inputs.query), v_scale=scale)
    wrong, expected = error(inputs)
    assert float(wrong.max()) <= 1e-4 * float(expected.abs().max())


def test_no_v_scale_at_all() -> None:
    inputs = make_inputs([40], scale_mode="token")
    assert isinstance(inputs.v_scale, Tensor)
    zero = dataclasses.replace(inputs, v_scale=torch.zeros_like(inputs.v_scale))
    assert not reference.decode_quantised(zero).any() and not reference.decode(zero).any()


def test_one_huge_query_element_and_equal_scores() -> None:
    inputs = make_inputs([40], seed=2)
    query = inputs.query.clone()
    query[0, 0, 3] = 3e4
    out = reference.decode_quantised(dataclasses.replace(inputs, query=query))
    assert torch.isfinite(out).all()
    flat = make_inputs([40], k=torch.ones(3, 16, 2, 32))
    wrong, expected = error(flat)
    assert float(wrong.max()) <= 1e-6 + 1e-5 * float(expected.abs().max())
