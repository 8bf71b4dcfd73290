"""How often candidates are timed, and which are told apart: on times that are drawn, with a spread that is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gdn_tune.measure import BLOCK, FIRST, MOST, Limits, Timer, race, ratio_interval, verdict
from gdn_tune.spread import Spread


def scattered(seed: int, median: float, spread: float = 0.05, calls: list[int] | None = None, name: int = 0) -> Timer:
    draw = random.Random(seed)

    def timed(count: int) -> Sequence[float]:
        if calls is not None:
            calls.append(name)
        return [draw.gauss(median, spread * median) for _ in range(count)]

    return timed


def test_a_gap_of_20_percent_takes_the_least() -> None:
    times = race([scattered(1, 100), scattered(2, 120)])
    assert [len(each) for each in times] == [FIRST, FIRST]
    assert verdict(times) == (0, [])


@pytest.mark.parametrize("seed", range(20))
def test_a_gap_of_2_percent_takes_hundreds_and_is_found(seed: int) -> None:
    times = race([scattered(seed, 102), scattered(1000 + seed, 100)])
    assert len(times[0]) == len(times[1]) >= 2 * FIRST or seed_is_lucky(times)
    assert verdict(times) == (1, [])


def seed_is_lucky(times: Sequence[Sequence[float]]) -> bool:
    """Whether the first look told them apart by more than three standard errors."""
    low, _ = ratio_interval(Spread.of(times[0]), Spread.of(times[1]))
    return len(times[0]) == FIRST and low > 1


def test_equal_ones_are_timed_to_the_limit_and_mostly_cannot_be_told_apart() -> None:
    apart = 0
    for seed in range(40):
        times = race([scattered(seed, 100), scattered(1000 + seed, 100)])
        assert len(times[0]) == len(times[1])
        apart += verdict(times)[1] == []
    assert apart <= 5  # at two standard errors one in twenty, and more looks than one


def test_equal_ones_without_scatter_end_at_once() -> None:
    times = race([scattered(1, 100, 0.001), scattered(2, 100.05, 0.001)])
    assert [len(each) for each in times] == [FIRST, FIRST]
    assert verdict(times) == (0, [1])  # 0.05 %: less than clocks drift


def test_the_slow_one_leaves_and_the_others_go_on() -> None:
    times = race([scattered(1, 150), scattered(2, 100), scattered(3, 100.2)])
    assert len(times[0]) == FIRST and len(times[1]) == len(times[2]) > FIRST
    assert verdict(times)[1] in ([1], [2])


def test_turns_alternate_so_that_a_drift_favours_nobody() -> None:
    calls: list[int] = []
    race(
        [scattered(seed, 100, 0.0, calls, seed) for seed in range(3)],
        Limits(block=BLOCK, first=2 * BLOCK, most=2 * BLOCK),
    )
    assert calls == [0, 1, 2, 2, 1, 0]
    # A clock that slows down by 10 % over a race of two equal candidates.
    clock = iter(range(10**6))

    def drifting(count: int) -> list[float]:
        return [100 * (1 + 0.1 * next(clock) / (2 * MOST)) for _ in range(count)]

    assert verdict(race([drifting, drifting]))[1] != []


def test_one_candidate_and_none() -> None:
    assert [len(each) for each in race([scattered(1, 100)])] == [FIRST]
    assert race([]) == []


def test_the_interval_of_a_ratio_holds_it() -> None:
    low, high = ratio_interval(Spread(110, 1, 100), Spread(100, 1, 100))
    assert low == pytest.approx(1.1 - 3 * 1.1 * (1 / 110**2 + 1 / 100**2) ** 0.5) and high - 1.1 == pytest.approx(
        1.1 - low
    )
    misses = 0
    for seed in range(200):
        a, b = (Spread.of(scattered(seed + part, mean)(100)) for part, mean in ((0, 105), (5000, 100)))
        low, high = ratio_interval(a, b)
        misses += not low <= 1.05 <= high
    assert misses <= 4


def test_limits_that_no_race_ends_with() -> None:
    with pytest.raises(ValueError, match="expected 1 <= block <= first <= most"):
        Limits(first=100, most=50)
