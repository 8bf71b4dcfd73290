"""From the sequence arguments of a call to a ChunkPlan: metadata first, then host lengths, then cu_seqlens itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import type_error, value_error
from ..metadata import ChunkSchedule, PrefillMetadata, build_prefill_metadata, schedule_for
from ..plan import ChunkPlan
from .checks import check_count, check_cu_seqlens, check_no_varlen_arguments


@dataclass(frozen=True)
class Sequences:
    """Checked sequence arguments: how many prefill sequences there are, and their schedule if metadata came along.

    Without metadata the schedule is looked up by ``plan``, after all arguments are checked or, in a traced call, when
    the op runs.
    """

    num_seqs: int
    seq_len: int
    cu_seqlens: Tensor | None
    num_decodes: int
    num_decode_tokens: int
    schedule: ChunkSchedule | None = None
    seq_lens_cpu: Sequence[int] | Tensor | None = None

    def plan(self) -> ChunkPlan:
        """The plan of the call: from metadata, else from host lengths, else from ``cu_seqlens``.

        The last two may upload, and raise ValueError for lengths or offsets that do not fit the call.
        """
        if self.cu_seqlens is None:
            return ChunkPlan.dense(self.num_seqs, self.seq_len)
        return (self.schedule or self._look_up(self.cu_seqlens)).plan(self.seq_len)

    def _look_up(self, cu_seqlens: Tensor) -> ChunkSchedule:
        decodes, tokens = self.num_decodes, self.num_decode_tokens
        if self.seq_lens_cpu is None:
            return schedule_for(cu_seqlens, total_tokens=self.seq_len, num_decodes=decodes, num_decode_tokens=tokens)
        metadata = build_prefill_metadata(
            self.seq_lens_cpu, cu_seqlens=cu_seqlens, num_decodes=decodes, num_decode_tokens=tokens
        )
        metadata.validate(cu_seqlens, num_decodes=decodes, num_decode_tokens=tokens, total_tokens=self.seq_len)
        return metadata.schedule

    def op_arguments(self) -> tuple[Tensor | int | None, ...]:
        """The sequence arguments of an op, as ``plan_from_op_arguments`` takes them."""
        schedule = self.schedule
        if schedule is None:
            return self.cu_seqlens, None, None, None, None, 0, 0, self.num_decodes, self.num_decode_tokens
        return (
            None,
            schedule.kernel_cu_seqlens,
            schedule.chunk_offsets,
            schedule.sequence_ids,
            schedule.chunk_ids,
            schedule.max_seq_chunks,
            schedule.total_prefill_tokens,
            self.num_decodes,
            self.num_decode_tokens,
        )


def plan_from_op_arguments(
    batch: int,
    seq_len: int,
    cu_seqlens: Tensor | None,
    kernel_cu_seqlens: Tensor | None,
    chunk_offsets: Tensor | None,
    sequence_ids: Tensor | None,
    chunk_ids: Tensor | None,
    max_seq_chunks: int,
    num_tokens: int,
    num_decodes: int,
    num_decode_tokens: int,
) -> ChunkPlan:
    """The plan of an op call: from the schedule's tensors, else from ``cu_seqlens``, else dense."""
    if chunk_offsets is not None and sequence_ids is not None:
        return ChunkPlan(
            True,
            chunk_offsets.shape[0] - 1,
            seq_len,
            num_tokens,
            sequence_ids.shape[0],
            max_seq_chunks,
            kernel_cu_seqlens,
            chunk_offsets,
            sequence_ids,
            chunk_ids,
        )
    return Sequences(batch, seq_len, cu_seqlens, num_decodes, num_decode_tokens).plan()


def check_sequences(
    *,
    batch: int,
    seq_len: int,
    device: torch.device,
    cu_seqlens: object,
    num_decodes: int,
    num_decode_tokens: int,
    seq_lens_cpu: Sequence[int] | Tensor | None,
    prefill_metadata: PrefillMetadata | None,
) -> Sequences:
    """Check the sequence arguments of a call over [batch, seq_len] tokens (gdn_runtime.chunk_gated_delta_rule).

    Reads no tensor; ``Sequences.plan`` checks the values.
    """
    check_count("num_decodes", num_decodes)
    check_count("num_decode_tokens", num_decode_tokens)
    if cu_seqlens is None:
        check_no_varlen_arguments(
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            seq_lens_cpu=seq_lens_cpu,
            prefill_metadata=prefill_metadata,
        )
        return Sequences(batch, seq_len, None, 0, 0)
    offsets = check_cu_seqlens(cu_seqlens, batch=batch, device=device)
    num_seqs = offsets.shape[0] - 1 - num_decodes
    if num_seqs < 1:
        raise value_error("num_decodes", num_decodes, f"0 to {offsets.shape[0] - 2} (at least one prefill sequence)")
    schedule = None
    if prefill_metadata is not None:
        if not isinstance(prefill_metadata, PrefillMetadata):
            raise type_error("prefill_metadata", type(prefill_metadata).__name__, "PrefillMetadata")
        prefill_metadata.validate(
            offsets, num_decodes=num_decodes, num_decode_tokens=num_decode_tokens, total_tokens=seq_len
        )
        schedule = prefill_metadata.schedule
    return Sequences(num_seqs, seq_len, offsets, num_decodes, num_decode_tokens, schedule, seq_lens_cpu)
