"""Fused multiply-add with one rounding, without a fused multiply-add of the host."""

from fractions import Fraction

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def _odd_sum(x: F64, y: F64) -> F64:
    """x + y rounded to odd; rounded again, to at most 51 bits, it is the exact sum rounded once (Boldo, Melquiond)."""
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    even = total.view(np.int64) & 1 == 0
    inexact = np.isfinite(total) & (error != 0) & even
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def fma32(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """a * b + c in float32, rounded once. The product of two float32 is exact in float64."""
    with np.errstate(all="ignore"):
        x, y = np.asarray(a, np.float32).astype(np.float64), np.asarray(b, np.float32).astype(np.float64)
        product, addend = np.broadcast_arrays(x * y, np.asarray(c, np.float32).astype(np.float64))
        return _odd_sum(np.ascontiguousarray(product), np.ascontiguousarray(addend)).astype(np.float32)


def _fma64(a: float, b: float, c: float) -> float:
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        with np.errstate(all="ignore"):
            product = np.float64(a) * np.float64(b) if not (np.isfinite(a) and np.isfinite(b)) else np.float64(0)
            return float(product + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if a == 0 or b == 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


def fma64(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F64:
    """a * b + c in float64, rounded once, by rational numbers."""
    return np.asarray(np.vectorize(_fma64, otypes=[np.float64])(a, b, c), np.float64)
