"""FP8 of both flavours: clamping, signed zero, NaN, scales."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pa_decode.quantise import FLAVOURS, FN, FNUZ, Flavour, encode, flavour_of, quantise_tensor, quantise_tokens

VALUES = torch.tensor([-1e-9, -1e-6, 0.0, -0.0, 1.0, 447.0, 449.0, 1e6, math.nan])
BOTH = pytest.mark.parametrize("flavour", list(FLAVOURS.values()), ids=list(FLAVOURS))


def is_nan(x: Tensor, flavour: Flavour) -> Tensor:
    return torch.isin(x.view(torch.uint8), torch.tensor(flavour.nan_bytes, dtype=torch.uint8))


def decoded(flavour: Flavour) -> dict[int, float]:
    """Every byte that is finite, from the definition of the format."""
    bias = 7 if flavour is FN else 8
    values = {}
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0 ** (1 - bias) if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
        if byte not in flavour.nan_bytes:
            values[byte] = -size if byte & 128 else size
    return values


@BOTH
def test_bytes_mean_what_the_format_says(flavour: Flavour) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(flavour.dtype)
    values = decoded(flavour)
    assert max(values.values()) == flavour.max
    for byte, value in enumerate(every.float().tolist()):
        assert math.isnan(value) if byte in flavour.nan_bytes else value == values[byte]
    assert 2.0**flavour.probability_exponent <= flavour.max < 2.0 ** (flavour.probability_exponent + 1)


@BOTH
def test_no_finite_value_becomes_nan(flavour: Flavour) -> None:
    finite = ~VALUES.isnan()
    quantised = encode(VALUES, flavour)
    assert torch.equal(is_nan(quantised, flavour), ~finite)
    assert quantised.float()[5:8].tolist() == ([448.0] * 3 if flavour is FN else [240.0] * 3)
    if flavour is FNUZ:
        assert quantised.view(torch.uint8)[:4].tolist() == [0, 0, 0, 0]
    assert encode(torch.tensor([math.inf, -math.inf]), flavour).float().tolist() == [flavour.max, -flavour.max]


@BOTH
def test_per_tensor(flavour: Flavour) -> None:
    quantised, scale = quantise_tensor(VALUES, flavour)
    assert scale.shape == (1,) and float(scale) == pytest.approx(1e6 / flavour.max)
    assert torch.equal(is_nan(quantised, flavour), VALUES.isnan())
    assert float(quantised.float()[7] * scale) == pytest.approx(1e6)
    if flavour is FNUZ:
        assert quantised.view(torch.uint8)[:4].tolist() == [0, 0, 0, 0]


@BOTH
def test_per_token(flavour: Flavour) -> None:
    x = torch.randn(3, 16, 2, 32) * torch.logspace(-3, 3, 16)[None, :, None, None]
    x[1, 4, 1] = 0.0
    x[2, 0, 0, :9] = VALUES
    quantised, scale = quantise_tokens(x, flavour)
    assert quantised.shape == x.shape and quantised.dtype == flavour.dtype
    assert scale.shape == (3, 2, 16) and scale.is_contiguous() and float(scale[1, 1, 4]) == 0.0
    assert torch.equal(is_nan(quantised, flavour), x.isnan())
    back = quantised.float() * scale.transpose(1, 2)[..., None]
    # Half a step of 3 mantissa bits, or half a subnormal step of the row's scale.
    step = x.abs() / 16 + scale.transpose(1, 2)[..., None] * 2.0**-10
    assert ((back - x).abs() <= step).logical_or(x.isnan()).all()
    assert float(scale[2, 0, 0]) == pytest.approx(1e6 / flavour.max)


@BOTH
def test_tiny_rows(flavour: Flavour) -> None:
    for size in (0.0, 2.0**-20, 1e-30, 1e-42):
        quantised, scale = quantise_tensor(torch.tensor([size, -size]), flavour)
        assert torch.isfinite(quantised.float() * scale).all()
        assert float(quantised.float()[0] * scale) == pytest.approx(size, abs=1e-20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_rounding_is_to_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    for flavour in FLAVOURS.values():
        quantised = encode(x, flavour)
        assert not is_nan(quantised, flavour).any()
        grid = torch.tensor(sorted(set(decoded(flavour).values())), dtype=torch.float64)
        clamped = x.double().clamp(-flavour.max, flavour.max)
        nearest = (grid[None] - clamped[:, None]).abs().amin(1)
        assert torch.equal((quantised.double() - clamped).abs(), nearest)


def test_flavour_comes_from_the_dtype() -> None:
    assert flavour_of("k", torch.float8_e4m3fn) is FN and flavour_of("k", torch.float8_e4m3fnuz) is FNUZ
    with pytest.raises(TypeError, match=r"k\.dtype: got torch\.uint8, expected torch\.float8_e4m3fn or"):
        flavour_of("k", torch.uint8)
