"""Comparisons that fail on NaN and name the first place where two tensors differ."""

from __future__ import annotations

import torch
from torch import Tensor

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, in fp64; |actual| if expected is all zero."""
    a, b = _pair(actual, expected)
    return float((a - b).norm() / (b.norm() if b.any() else 1.0))


def max_rel(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|, in fp64; max |actual| if expected is all zero, 0 if empty."""
    a, b = _pair(actual, expected)
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / (b.abs().max() if b.any() else 1.0))


def assert_finite(x: Tensor, what: str) -> None:
    """Fail if x holds NaN or infinity, naming the first place."""
    bad = ~torch.isfinite(x)
    if bad.any():
        where = _first(bad)
        raise AssertionError(f"{what}: {int(bad.sum())} of {x.numel()} values not finite, first {x[where]} at {where}")


def assert_close_rel(actual: Tensor, expected: Tensor, tol: float, what: str) -> None:
    """Fail unless rel_l2(actual, expected) <= tol. NaN or infinity in either tensor fails."""
    assert_same_shape(actual, expected, what)
    assert_finite(expected, f"{what} (expected)")
    assert_finite(actual, what)
    error = rel_l2(actual, expected)
    if not error <= tol:
        a, b = _pair(actual, expected)
        where = _first((a - b).abs() == (a - b).abs().max())
        raise AssertionError(
            f"{what}: relative L2 error {error:.3e} > {tol:.3e}; "
            f"worst at {where}: got {a[where]:.6g}, expected {b[where]:.6g}"
        )


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Fail unless both tensors have equal dtype, shape and bits (NaN payloads and signs of zero included)."""
    assert_same_shape(actual, expected, what)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: got dtype {actual.dtype}, expected {expected.dtype}")
    a, b = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    as_int = _INT_OF_SIZE[a.element_size()]
    different = a.view(as_int) != b.view(as_int)
    if different.any():
        where = _first(different)
        raise AssertionError(
            f"{what}: {int(different.sum())} of {a.numel()} values differ, "
            f"first at {where}: got {a[where]}, expected {b[where]}"
        )


def assert_same_shape(actual: Tensor, expected: Tensor, what: str) -> None:
    """Fail unless the shapes are equal."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")


def _pair(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    return actual.detach().cpu().double(), expected.detach().cpu().double()


def _first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in mask.nonzero()[0])
