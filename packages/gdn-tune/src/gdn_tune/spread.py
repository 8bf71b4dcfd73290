"""What repeated times say: their median, how sure it is, and whether two can be told apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2), for many normal samples."""
SURE = 2.0
"""Standard errors of a difference beyond which two medians are apart: one wrong call in twenty."""
DRIFT = 0.002
"""Relative differences below this are never told apart: clocks drift by as much between the blocks of one run."""


@dataclass(frozen=True)
class Spread:
    """``median`` of ``n`` times and its standard ``error``, in their unit."""

    median: float
    error: float
    n: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """The spread of one or more ``times``. The error of a single one is not known: infinite."""
        median = statistics.median(times)
        if len(times) < 2:
            return cls(median, math.inf, len(times))
        deviation = statistics.median(abs(time - median) for time in times)
        return cls(median, MEDIAN_ERROR * NORMAL_MAD * deviation / math.sqrt(len(times)), len(times))

    def apart(self, other: Spread) -> bool:
        """Whether the two medians differ by more than chance and drift explain."""
        gap = abs(self.median - other.median)
        return gap > max(SURE * math.hypot(self.error, other.error), DRIFT * min(self.median, other.median))
