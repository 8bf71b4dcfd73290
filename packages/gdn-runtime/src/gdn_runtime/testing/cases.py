"""The table of model shapes and sequence layouts that tests and benchmarks share.

Heads are those of Qwen3.5-35B (32 value heads) and Qwen3.5-397B (64), both with 16 key heads, split over TP devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .inputs import GdnInputs, make_inputs

StateDtype = Literal["bf16", "fp32"]
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}
KEY_HEADS = 16
VALUE_HEADS = {"35b": 32, "397b": 64}
PACKED_TOKENS = 32768


@dataclass(frozen=True)
class Case:
    """One layout: varlen of ``seq_lens`` if ``batch`` is None, else ``batch`` rows of ``seq_lens[0]`` tokens."""

    id: str
    group: str
    num_heads: int
    num_key_heads: int
    seq_lens: tuple[int, ...]
    batch: int | None = None
    gated: bool = True
    g_head_major: bool = False
    final_state: bool = True
    state_dtype: StateDtype = "fp32"
    snapshot_dtype: StateDtype = "bf16"

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole call."""
        return sum(self.seq_lens) * (self.batch or 1)

    def inputs(self, **options: Any) -> GdnInputs:
        """``make_inputs`` of this layout; ``options`` go through (gate, keys, dtype, seed, device, ...)."""
        shape = list(self.seq_lens) if self.batch is None else (self.batch, self.seq_lens[0])
        defaults = {"state_dtype": TORCH_DTYPE[self.state_dtype]}
        return make_inputs(shape, self.num_heads, self.num_key_heads, **(defaults | options))

    def small(self, max_chunks: int = 3, max_seqs: int = 4) -> Case:
        """The same layout for a CPU: at most ``max_seqs`` sequences (the first ones and the last) of at most
        ``max_chunks`` full chunks and their own tail, one key head and its value heads."""
        kept = self.seq_lens if len(self.seq_lens) <= max_seqs else (*self.seq_lens[: max_seqs - 1], self.seq_lens[-1])
        lens = tuple(min(n // 64, max_chunks) * 64 + n % 64 for n in kept)
        return replace(self, num_heads=self.num_heads // self.num_key_heads, num_key_heads=1, seq_lens=lens)

    def __str__(self) -> str:
        lens = f"{self.batch} x {self.seq_lens[0]}" if self.batch is not None else _short(self.seq_lens)
        switches = [f"state {self.state_dtype}", f"snapshot {self.snapshot_dtype}"]
        switches += ["final state"] * self.final_state + ["no gate"] * (not self.gated)
        switches += ["head-major g"] * self.g_head_major
        return f"{self.id}: H={self.num_heads} Hg={self.num_key_heads} lens {lens}; {', '.join(switches)}"


def _short(lens: tuple[int, ...]) -> str:
    if len(lens) <= 4:
        return str(list(lens))
    return f"{len(lens)} sequences of {min(lens)}..{max(lens)}"


def _cut(total: int, piece: int) -> tuple[int, ...]:
    """Sequences of ``piece`` tokens, the last one takes what is left of ``total``."""
    return (piece,) * (total // piece) + ((total % piece,) if total % piece else ())


def _case(group: str, name: str, model: str, tp: int, seq_lens: Iterable[int], **switches: Any) -> Case:
    return Case(
        id=f"{group}-{name}",
        group=group,
        num_heads=VALUE_HEADS[model] // tp,
        num_key_heads=KEY_HEADS // tp,
        seq_lens=tuple(seq_lens),
        **switches,
    )


def _base_cases() -> Iterator[Case]:
    for model in VALUE_HEADS:
        for tp in (1, 2):
            for n in (2500, 60000, 128000):
                yield _case("dense", f"{model}-tp{tp}-{n}", model, tp, [n], batch=1, final_state=False)
    for n in (1024, 2048, 4096, 8192):
        yield _case("batch2", f"397b-tp8-{n}", "397b", 8, [n], batch=2, g_head_major=True, final_state=False)
    for tp in (4, 8):
        for n in (1024, 2048, 4096, 8192):
            yield _case("packed", f"397b-tp{tp}-{n}", "397b", tp, _cut(PACKED_TOKENS, n))
    for model, tp in (("35b", 1), ("397b", 8)):
        for total in range(8192, 65537, 8192):
            for dtype in TORCH_DTYPE:
                name = f"{model}-tp{tp}-{total}-{dtype}"
                yield _case("snapshot", name, model, tp, _cut(total, 8192), snapshot_dtype=dtype)
    for n in (100, 200, 300):
        yield _case("nogate", f"35b-tp1-{n}", "35b", 1, [n], gated=False)
    for n in (1000, 5000, 10000):
        yield _case("ragged", f"35b-tp1-{n}", "35b", 1, _cut(PACKED_TOKENS, n))
    for n in (5000, 10000):
        yield _case("single", f"35b-tp1-{n}", "35b", 1, [n])
    for head in (0, 10, 65, 704, 936, 1820, 4467, 5508):
        yield _case("three", f"35b-tp1-{head}", "35b", 1, [head, 10000, 6384 - head])
    for head in (4000, 6396, 8192, 9912, 10000):
        yield _case("two", f"35b-tp1-{head}", "35b", 1, [head, 16384 - head], g_head_major=True)
    yield _case("emptylast", "35b-tp1", "35b", 1, [6384, 10000, 0])
    for state, snapshot in (("bf16", "bf16"), ("fp32", "fp32")):
        switches = {"state_dtype": state, "snapshot_dtype": snapshot}
        name = f"state-{state}-snapshot-{snapshot}"
        yield _case("dtypes", f"35b-tp2-{name}", "35b", 2, [1024], batch=1, **switches)
        yield _case("dtypes", f"397b-tp4-{name}", "397b", 4, [1024] * 16, **switches)


def _grid_cases() -> Iterator[Case]:
    for model in VALUE_HEADS:
        for tp in (1, 2, 4, 8):
            for dtype in TORCH_DTYPE:
                for n in (1 << p for p in range(10, 17)):
                    name = f"dense-{model}-tp{tp}-{n}-{dtype}"
                    yield _case("grid", name, model, tp, [n], batch=1, snapshot_dtype=dtype)
                for total in (8192, 16384, 32768, 65536):
                    for n in (1024, 2048, 4096, 8192):
                        name = f"packed-{model}-tp{tp}-{n}-of-{total}-{dtype}"
                        yield _case("grid", name, model, tp, _cut(total, n), snapshot_dtype=dtype)


CASES: dict[str, Case] = {case.id: case for case in _base_cases()}
"""The layouts that correctness is tested on, by id."""

GRID: dict[str, Case] = {case.id: case for case in _grid_cases()}
"""The regular grid of lengths, models and snapshot dtypes that benchmarks sweep, by id."""


def list_cases(cases: dict[str, Case] | None = None) -> str:
    """One line per case, for ``--list-cases``."""
    return "\n".join(str(case) for case in (CASES if cases is None else cases).values())
