"""Bounds of windows and tiles, by brute force over contexts."""

from __future__ import annotations

import itertools

import pytest

from pa_decode import traits
from pa_decode.traits import TILE, visible_tile_range, window_tiles


def touched(context: int, window: int, query_length: int) -> int:
    """Tiles with a token that some query token sees, token by token from the definition."""
    seen = set()
    for position in range(context - query_length, context):
        first = max(0, position - window + 1) if window else 0
        if position >= 0:
            seen.update(range(first // TILE, position // TILE + 1))
    return len(seen)


@pytest.mark.parametrize("query_length", [1, 2, 3, 4, 5, 8])
def test_window_tiles_is_attained_and_never_exceeded(query_length: int) -> None:
    for window in (1, 2, 16, 17, 18, *range(250, 262), 511, 512, 513, 8191, 8192, 8193, 8194):
        most = 0
        # Every offset of the start within its tile, and the contexts shorter than the window.
        for context in (*range(1, 40), *range(window + query_length, window + query_length + TILE)):
            first, end = visible_tile_range(context, window, query_length)
            most = max(most, end - first)
        assert most == window_tiles(window, query_length), window


@pytest.mark.parametrize("window", [0, 1, 2, 17, 255, 256, 257, 300])
@pytest.mark.parametrize("query_length", [1, 3, 8])
def test_visible_tile_range_holds_every_visible_token(window: int, query_length: int) -> None:
    for context in (*range(20), *range(250, 262), *range(508, 518), 770, 1024, 1025):
        first, end = visible_tile_range(context, window, query_length)
        assert end - first == touched(context, window, query_length), context


@pytest.mark.parametrize(
    ("context", "window", "query_length", "first", "tiles", "bound"),
    [
        (1024, 1, 1, 3, 1, 1),
        (1028, 1, 4, 4, 1, 2),
        (1025, 1, 4, 3, 2, 2),
        (512, 17, 1, 1, 1, 2),
        (520, 17, 4, 1, 2, 2),
        (1024, 257, 1, 2, 2, 2),
        (1026, 257, 2, 3, 2, 3),
        (770, 257, 4, 1, 3, 3),
        (8449, 8193, 1, 1, 33, 33),
        (131073, 8193, 4, 479, 34, 34),
    ],
)
def test_worked_boundaries(context: int, window: int, query_length: int, first: int, tiles: int, bound: int) -> None:
    assert visible_tile_range(context, window, query_length) == (first, first + tiles)
    assert window_tiles(window, query_length) == bound


@pytest.mark.parametrize(
    ("window", "tiles"),
    [
        (1, [1, 2, 2, 2, 2]),
        (17, [2, 2, 2, 2, 2]),
        (255, [2, 2, 2, 3, 3]),
        (256, [2, 2, 3, 3, 3]),
        (257, [2, 3, 3, 3, 3]),
        (8192, [33, 33, 34, 34, 34]),
        (8193, [33, 34, 34, 34, 34]),
    ],
)
def test_table_of_bounds(window: int, tiles: list[int]) -> None:
    assert [window_tiles(window, query_length) for query_length in (1, 2, 3, 4, 8)] == tiles
    for page, query_length, bound in itertools.product((16, 64), (1, 4), (None, 1 << 20)):
        expected = window_tiles(window, query_length) * 256 // page
        assert traits.task_pages_bound(window, query_length, page, bound) == expected
        assert traits.task_pages_bound(window, query_length, page, bound, single_tile=True) == 256 // page


def test_bounds_without_a_window_or_with_a_longest_context() -> None:
    assert traits.visible_tiles_bound(0, 4, None) is None
    assert traits.task_pages_bound(0, 4, 16, None) is None
    assert traits.visible_tiles_bound(0, 4, 1000) == 4
    assert traits.visible_tiles_bound(8193, 4, 1000) == 4
    assert traits.visible_tiles_bound(257, 4, 1 << 20) == 3
    assert traits.visible_tiles_bound(257, 4, 0) == 0


def test_huge_windows_and_lengths_do_not_wrap() -> None:
    longest = traits.MAX_LENGTH
    assert visible_tile_range(longest, 0, 1) == (0, 1 << 23)
    assert visible_tile_range(longest, longest, 8) == (0, 1 << 23)
    assert visible_tile_range(longest, 1, 1) == ((1 << 23) - 1, 1 << 23)
    assert visible_tile_range(-5, 0, 1) == visible_tile_range(-5, 3, 2) == (0, 0)
    assert window_tiles(1 << 40, 1) == window_tiles(longest, 1) == (1 << 23) + 1


def test_window_tiles_refuses_no_window() -> None:
    with pytest.raises(AssertionError):
        window_tiles(0, 1)


def test_d256_pipe_is_the_conjunction_of_its_arguments() -> None:
    for is_gfx950, head_dim, page, query_length, group, trans_k in itertools.product(
        (True, False), (64, 128, 256), (16, 64, 128), (1, 4, 8), (1, 4, 8, 16, 33), (True, False)
    ):
        expected = is_gfx950 and head_dim == 256 and page in (16, 64) and query_length * group <= 32 and trans_k
        assert traits.d256_pipe(is_gfx950, head_dim, page, query_length, group, trans_k) is expected
    assert traits.d256_pipe(True, 256, 16, 1, 32, True)
    assert not traits.d256_pipe(True, 256, 16, 1, 33, True)


def test_require_packed_k() -> None:
    traits.require_packed_k(True)
    with pytest.raises(NotImplementedError, match="trans_k=False"):
        traits.require_packed_k(False)


@pytest.mark.parametrize(
    ("sliding_window", "window_left", "expected"),
    [
        (0, None, 0),
        (-1, None, 0),
        (1, None, 1),
        (257, None, 257),
        (1 << 40, None, 2**31 - 1),
        (0, -1, 0),
        (-1, 0, 1),
        (0, 127, 128),
        (0, 2**31 - 1, 2**31 - 1),
    ],
)
def test_normalise_window(sliding_window: int, window_left: int | None, expected: int) -> None:
    assert traits.normalise_window(sliding_window, window_left) == expected


def test_normalise_window_refuses() -> None:
    with pytest.raises(ValueError, match=r"window_left: got 3 beside sliding_window=4"):
        traits.normalise_window(4, 3)
    with pytest.raises(ValueError, match=r"sliding_window: got -2"):
        traits.normalise_window(-2)
    with pytest.raises(ValueError, match=r"window_left: got -2"):
        traits.normalise_window(0, -2)
    with pytest.raises(TypeError, match=r"sliding_window: got bool"):
        traits.normalise_window(True)
    with pytest.raises(TypeError, match=r"window_left: got float"):
        traits.normalise_window(0, 1.0)  # type: ignore[arg-type]


def test_power_of_two_at_least() -> None:
    assert [traits.power_of_two_at_least(n) for n in (1, 2, 3, 4, 5, 256, 257)] == [1, 2, 4, 4, 8, 256, 512]
