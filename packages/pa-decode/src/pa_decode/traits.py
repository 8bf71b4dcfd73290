"""Facts and bounds of paged decode that host, planner, kernels and tests share: each is written here, once.

Token t of a sequence of ``ctx`` tokens (the query tokens included) is visible to query token i of QL, at position
p = ctx - QL + i, iff 0 <= t <= p and, with a sliding window of W > 0 tokens, p - W < t.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdn_runtime.arch import Fp8
from gdn_runtime.errors import value_error

TILE = 256
"""Tokens of a tile, the unit of planning: tile k holds tokens 256 k .. 256 k + 255."""

PIPE_HEAD_DIM = 256
PIPE_PAGES = (16, 64)
PIPE_ROWS = 32
"""Most query rows (query tokens x heads per KV head) that the D256 pipe takes: two matrix tiles of 16."""

MAX_LENGTH = 2**31 - 1
"""Longest context, and the window that stands for any longer one."""

MAX_BATCH = 4096
MAX_QUERY_LENGTH = 8
MAX_ROWS = 128
"""Most query rows per KV head that any kernel takes."""


@dataclass(frozen=True)
class Fp8Facts:
    """One flavour of E4M3. ``max``: its largest finite value; ``smallest_normal``. ``probability_exponent``: the power
    of two that P in [0, 1] is multiplied by before it is rounded, the largest that stays finite."""

    max: float
    smallest_normal: float
    probability_exponent: int


FP8_FACTS: dict[Fp8, Fp8Facts] = {"fn": Fp8Facts(448.0, 2.0**-6, 8), "fnuz": Fp8Facts(240.0, 2.0**-7, 7)}
"""OCP FP8 (gfx950, NVIDIA), and that of gfx942 (AMD "CDNA 3" instruction set reference)."""

MIN_SCALE = 1e-20
"""Values are divided by their FP8 scale, or by this if it is smaller: a row of zeros has scale 0."""


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def require_packed_k(trans_k: bool) -> None:
    """NotImplementedError unless K is packed, [blocks, kv_heads, D/16, page, 16]: the one layout of the kernels."""
    if not trans_k:
        raise NotImplementedError(
            "K cache: got an unpacked layout (trans_k=False, or a key tensor of 4 dimensions), expected K packed as "
            "[blocks, kv_heads, head_dim/16, page, 16]; pa_decode.pack_k repacks [blocks, page, kv_heads, head_dim]"
        )


def d256_pipe(
    is_gfx950: bool, head_dim: int, page_size: int, query_length: int, group_size: int, trans_k: bool
) -> bool:
    """Whether the D256 pipe takes a problem. Nothing else decides it: not the form of V, the scales, the window, sinks,
    the dtype of the query, the batch, the grid or the budget."""
    return (
        is_gfx950
        and head_dim == PIPE_HEAD_DIM
        and page_size in PIPE_PAGES
        and query_length * group_size <= PIPE_ROWS
        and trans_k
    )


def window_tiles(window: int, query_length: int) -> int:
    """Most tiles that the windows of QL query tokens together can touch.

    Their union is a run of W + QL - 1 tokens. A run of n >= 1 tokens that starts at offset o of its tile touches
    (o + n - 1) // 256 + 1 tiles, most for o = 255. Reached by some context for every W and QL.
    """
    assert window >= 1 and query_length >= 1
    return (min(window, MAX_LENGTH) + query_length - 2 + TILE - 1) // TILE + 1


def visible_tiles_bound(window: int, query_length: int, max_context: int | None) -> int | None:
    """Most tiles of one sequence that any query token sees: of ``max_context`` tokens, of the window, or the smaller of
    both. None if neither is known."""
    by_context = None if max_context is None else cdiv(max(max_context, 0), TILE)
    if window == 0:
        return by_context
    by_window = window_tiles(window, query_length)
    return by_window if by_context is None else min(by_window, by_context)


def visible_tile_range(context: int, window: int, query_length: int) -> tuple[int, int]:
    """First tile and end tile (exclusive) that the query tokens of a sequence see; equal if there is none."""
    context = max(context, 0)
    first = max(context - query_length - window + 1, 0) // TILE if window > 0 else 0
    return first, cdiv(context, TILE)


def task_pages_bound(
    window: int, query_length: int, page_size: int, max_context: int | None, *, single_tile: bool = False
) -> int | None:
    """Most page ids that one task reads; None if nothing bounds it.

    A bound of a single task: a plan may give all visible tiles of a sequence to one, so the number of partitions does
    not divide it.
    """
    tiles = 1 if single_tile else visible_tiles_bound(window, query_length, max_context)
    return None if tiles is None else tiles * (TILE // page_size)


def is_single_tile(window: int, query_length: int, batch: int, max_partitions: int, capacity: int) -> bool:
    """Whether every task of every plan of this capacity is one tile, whatever the contexts.

    With n sequences that are not empty there are at most n * window_tiles visible tiles; every sequence gets a slot and
    the spare slots, capacity - n, cover the rest.
    """
    if window == 0:
        return False
    tiles = window_tiles(window, query_length)
    return max_partitions >= tiles and capacity >= batch * tiles


def normalise_window(sliding_window: int, window_left: int | None = None) -> int:
    """The window W in tokens, own position included, 0 for none.

    ``sliding_window`` counts the own position, 0 and -1 are off. ``window_left`` (FlashAttention, FlashInfer, SGLang)
    counts the tokens before it, -1 is off; the two exclude each other. Longer than any context is cut to 2^31 - 1.
    TypeError for other types, ValueError for both at once or a number below -1.
    """
    for name, value in (("sliding_window", sliding_window), ("window_left", window_left)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name}: got {type(value).__name__}, expected int")
    if window_left is not None:
        if sliding_window not in (0, -1):
            raise value_error("window_left", f"{window_left} beside sliding_window={sliding_window}", "one of the two")
        if window_left < -1:
            raise value_error("window_left", window_left, "-1 (off) or a number of tokens >= 0")
        return min(window_left + 1, MAX_LENGTH)
    if sliding_window < -1:
        raise value_error("sliding_window", sliding_window, "-1 or 0 (off) or a number of tokens >= 1")
    return min(max(sliding_window, 0), MAX_LENGTH)
