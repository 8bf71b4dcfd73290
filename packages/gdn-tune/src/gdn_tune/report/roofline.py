"""The least time of a call on a device: max(bytes / bandwidth, FLOP / rate)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .data import Decode, Shape, Time

HEAD_DIM = 128
CHUNK = 64
TERA = 1e12


@dataclass(frozen=True)
class Roof:
    """``bandwidth`` in TB/s and ``rate`` in TFLOP/s (dense bf16), and where the two are from."""

    bandwidth: float
    rate: float
    source: str

    def us(self, size: float, work: float) -> float:
        """Least time of so many bytes and FLOP."""
        return max(size / (self.bandwidth * TERA), work / (self.rate * TERA)) * 1e6

    @property
    def text(self) -> str:
        """In words."""
        return f"max(bytes / {self.bandwidth:g} TB/s, FLOP / {self.rate:g} TFLOP/s): {self.source}"


ROOFS: tuple[tuple[str, Roof], ...] = (
    ("H200", Roof(4.3, 790.0, "copy bandwidth and dense bf16 rate measured on such a card, see docs/performance.md")),
    ("MI355X", Roof(8.0, 2516.6, "peaks: 256 compute units x 4096 bf16 FLOP a clock x 2.4 GHz")),
    ("MI300X", Roof(5.3, 1307.4, "peaks: 304 compute units x 2048 bf16 FLOP a clock x 2.1 GHz")),
)
"""(part of the device's name, its figures). Others have none: parts of one architecture differ in both."""


def roof_of(device: str, bandwidth: float | None, rate: float | None) -> Roof | None:
    """The roof of ``device`` (a name), each figure as given or by default; None without a default for what is not
    given. Raises ValueError for figures that are no positive numbers."""
    for name, value in (("bandwidth", bandwidth), ("rate", rate)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: got {value}, expected a positive number")
    known = next((roof for part, roof in ROOFS if part in device), None)
    if bandwidth is not None and rate is not None:
        return Roof(bandwidth, rate, "as given")
    if known is None or (bandwidth is None and rate is None):
        return known
    kept = "rate" if bandwidth is not None else "bandwidth"
    return Roof(bandwidth or known.bandwidth, rate or known.rate, f"as given, the {kept} by default: {known.source}")


def chunks_of(lengths: Iterable[int]) -> list[int]:
    """Tokens of every chunk."""
    return [min(CHUNK, length - start) for length in lengths for start in range(0, length, CHUNK)]


def block_least(shape: Shape) -> tuple[float, float]:
    """(bytes, FLOP) of the block: q, k, v, o (bf16), g, beta and states in and out (fp32) once each; the arithmetic of
    chunks of 64 tokens: k k^T and q k^T a key head; the inverse, six products with a state and two with the values a
    value head."""
    heads, key_heads, tokens = shape.num_heads, shape.num_key_heads, shape.tokens
    size = 4.0 * tokens * HEAD_DIM * (key_heads + heads) + 8 * tokens * heads
    size += 8 * len(shape.lengths) * heads * HEAD_DIM**2
    work = 0.0
    for rows in chunks_of(shape.lengths):
        square, state = rows * rows * HEAD_DIM, rows * HEAD_DIM * HEAD_DIM
        work += key_heads * 4 * square + heads * (2 * rows**3 / 3 + 6 * state + 4 * square)
    return size, work


def scan_least(shape: Shape) -> tuple[float, float]:
    """(bytes, FLOP) of K5: k, w, u and v_new (bf16), g and states (fp32) and the snapshots once each; two products
    with the state a chunk and value head."""
    heads, tokens, chunks = shape.num_heads, shape.tokens, chunks_of(shape.lengths)
    size = 2.0 * tokens * HEAD_DIM * (shape.num_key_heads + 3 * heads) + 4 * tokens * heads
    size += len(chunks) * heads * HEAD_DIM**2 * (2 if shape.snapshot == "bf16" else 4)
    size += 8 * len(shape.lengths) * heads * HEAD_DIM**2
    return size, 4.0 * tokens * heads * HEAD_DIM**2


def decode_least(row: Decode) -> tuple[float, float] | None:
    """(bytes, FLOP) of paged decode: FP8 keys and values of visible tokens, their scales, queries and outputs once
    each; two products. None if heads are not known."""
    if row.num_heads is None or row.num_kv_heads is None or row.head_dim is None:
        return None
    visible = min(row.context, row.window + row.query_length - 1) if row.window else row.context
    token = 2 * row.head_dim + (8 if row.scales == "token" else 0)
    queries = row.batch * row.query_length * row.num_heads * row.head_dim
    return float(row.batch * visible * row.num_kv_heads * token + 4 * queries), 4.0 * queries * visible


def least_us(roof: Roof | None, row: Time) -> float | None:
    """Least time of a call of the block or of K5; None if its shape, its roof or its unit says nothing."""
    if roof is None or row.unit != "us" or not row.shape.lengths or row.what == "K6":
        return None
    return roof.us(*(block_least if row.what == "block" else scan_least)(row.shape))
