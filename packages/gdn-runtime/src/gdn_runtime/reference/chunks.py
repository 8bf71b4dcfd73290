"""Where the tokens of the chunks of a plan live, and how to read and write them without touching other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..plan import ChunkPlan
from ..spec import CHUNK

_BLOCK_ROWS = 64 * CHUNK
"""Rows (chunk x head x token) per vectorised step: 4096 x 128 fp32 are 2 MiB a tensor, so a step stays in cache."""


@dataclass(frozen=True)
class Chunks:
    """Some chunks, on the data's device.

    ``index`` [C] flat chunk number, ``batch`` [C, 1], ``rows`` [C, 64] token row (rows past the sequence's end point at
    the chunk's first token, so that a gather reads nothing foreign), ``lengths`` [C], ``valid`` [C, 64]; ``full`` if no
    row is past an end.
    """

    index: Tensor
    batch: Tensor
    rows: Tensor
    lengths: Tensor
    valid: Tensor
    full: bool

    def gather(self, x: Tensor) -> Tensor:
        """Rows of x [B, T, ...] as [C, 64, ...]; rows past a sequence's end are zero."""
        taken = x[self.batch, self.rows]
        if self.full:
            return taken
        return taken.masked_fill_(~self.valid.view(*self.valid.shape, *(1,) * (x.dim() - 2)), 0)

    def scatter(self, out: Tensor, values: Tensor) -> None:
        """Write values [C, 64, ...] to rows of out [B, T, ...], rounded to its dtype; no other row is touched."""
        batch, rows = self.batch.expand_as(self.rows), self.rows
        if not self.full:
            batch, rows, values = batch[self.valid], rows[self.valid], values[self.valid]
        out[batch, rows] = values.to(out.dtype)

    def last_rows(self) -> tuple[Tensor, Tensor]:
        """Batch and row [C] of the last token of each chunk."""
        return self.batch[:, 0], self.rows[:, 0] + self.lengths - 1


class ChunkTable:
    """All chunks of a plan, on the host. ``first`` and ``counts`` [N] give the chunks of each sequence."""

    def __init__(self, plan: ChunkPlan) -> None:
        offsets = [0, plan.seq_len] if plan.cu_seqlens is None else plan.cu_seqlens.tolist()
        spans = torch.tensor(list(pairwise(offsets)), dtype=torch.int64).reshape(-1, 2)
        if plan.cu_seqlens is None:
            spans, seq_batch = spans.expand(plan.num_seqs, 2), torch.arange(plan.num_seqs)
        else:
            seq_batch = torch.zeros(plan.num_seqs, dtype=torch.int64)
        seq_len = spans[:, 1] - spans[:, 0]
        self.counts = (seq_len + CHUNK - 1) // CHUNK
        self.first = self.counts.cumsum(0) - self.counts
        owner = torch.repeat_interleave(torch.arange(plan.num_seqs), self.counts)
        assert owner.numel() == plan.total_chunks, "plan.total_chunks does not fit its sequences"
        begin = (torch.arange(plan.total_chunks) - self.first[owner]) * CHUNK
        self._batch = seq_batch[owner]
        self._start = spans[owner, 0] + begin
        self._lengths = (seq_len[owner] - begin).clamp(max=CHUNK)

    def select(self, index: Tensor, device: torch.device) -> Chunks:
        """The chunks with the flat numbers ``index``."""
        lengths, token = self._lengths[index], torch.arange(CHUNK)
        valid = token < lengths[:, None]
        rows = self._start[index, None] + torch.where(valid, token, 0)
        return Chunks(
            index=index.to(device),
            batch=self._batch[index, None].to(device),
            rows=rows.to(device),
            lengths=lengths.to(device),
            valid=valid.to(device),
            full=bool(valid.all()),
        )

    def blocks(self, num_heads: int, device: torch.device) -> Iterator[Chunks]:
        """Runs of consecutive chunks, small enough to be worked on at once."""
        total, step = self._lengths.numel(), max(1, _BLOCK_ROWS // (num_heads * CHUNK))
        for begin in range(0, total, step):
            yield self.select(torch.arange(begin, min(begin + step, total)), device)
