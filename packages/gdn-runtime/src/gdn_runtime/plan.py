"""How the tokens of one call are split into sequences and chunks, for dense and varlen calls alike."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .spec import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from .metadata import ChunkSchedule


MAX_WARM = 64
"""Bound of ``ChunkPlan.warm``: layers of a model share a signature, but plans of dense calls live as long as the
process, and a caller may hand in a pool of another size each time."""


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for b > 0."""
    return -(-a // b)


@dataclass(frozen=True)
class ChunkPlan:
    """Sequences and chunks of one call.

    Dense calls have ``num_seqs`` = B sequences of ``seq_len`` = T tokens and no tensors. Varlen calls have B == 1,
    ``seq_len`` = the allocated length of the token axis, and four int32 tensors on the data's device:
    ``cu_seqlens`` [num_seqs + 1] (offsets of the prefill sequences, starting at 0), ``chunk_offsets`` [num_seqs + 1]
    (exclusive prefix sum of chunks per sequence), ``sequence_ids`` and ``chunk_ids`` [total_chunks]. ``num_tokens``
    rows of every batch row belong to a sequence, the rest are spare. ``warm`` holds what an op has worked out about its
    calls over this plan, as long as the plan lives.
    """

    is_varlen: bool
    num_seqs: int
    seq_len: int
    num_tokens: int
    total_chunks: int
    max_seq_chunks: int
    cu_seqlens: Tensor | None = None
    chunk_offsets: Tensor | None = None
    sequence_ids: Tensor | None = None
    chunk_ids: Tensor | None = None
    warm: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def remember(self, key: Hashable, value: object) -> None:
        """Put ``value`` into ``warm``, emptied before if it is full."""
        if len(self.warm) >= MAX_WARM:
            self.warm.clear()
        self.warm[key] = value

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def dense(batch: int, seq_len: int) -> ChunkPlan:
        """Plan of ``batch`` sequences of ``seq_len`` tokens each, every one cut into chunks of 64. One object for
        equal sizes."""
        per_seq = cdiv(seq_len, CHUNK)
        return ChunkPlan(False, batch, seq_len, seq_len, batch * per_seq, per_seq if batch else 0)

    @staticmethod
    def varlen(schedule: ChunkSchedule, seq_len: int) -> ChunkPlan:
        """Plan of a prefill schedule over a packed token axis of ``seq_len`` rows (spare rows included)."""
        return ChunkPlan(
            True,
            schedule.n_prefill,
            seq_len,
            schedule.total_prefill_tokens,
            schedule.total_chunks,
            schedule.max_seq_chunks,
            schedule.kernel_cu_seqlens,
            schedule.chunk_offsets,
            schedule.sequence_ids,
            schedule.chunk_ids,
        )
