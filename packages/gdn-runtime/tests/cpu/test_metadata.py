"""Building and validating prefill metadata, against a plain enumeration of the chunks."""

from __future__ import annotations

import dataclasses
import re
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gdn_runtime.errors import UnsupportedError
from gdn_runtime.metadata import (
    ChunkSchedule,
    GatedDeltaRuleChunkSchedule,
    GatedDeltaRulePrefillMetadata,
    PrefillMetadata,
    build_prefill_metadata,
)
from gdn_runtime.plan import ChunkPlan


def cu_of(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def build(lengths: list[int], num_decodes: int = 0, dtype: torch.dtype = torch.int32) -> PrefillMetadata:
    return build_prefill_metadata(
        lengths,
        cu_seqlens=cu_of(lengths, dtype),
        num_decodes=num_decodes,
        num_decode_tokens=sum(lengths[:num_decodes]),
    )


def enumerate_chunks(prefill: list[int]) -> list[tuple[int, int]]:
    return [(n, c) for n, length in enumerate(prefill) for c, _ in enumerate(range(0, length, 64))]


def check_schedule(schedule: ChunkSchedule, lengths: list[int], num_decodes: int) -> None:
    prefill = lengths[num_decodes:]
    chunks = enumerate_chunks(prefill)
    counts = [sum(1 for n, _ in chunks if n == sequence) for sequence in range(len(prefill))]
    assert schedule.sequence_ids.tolist() == [n for n, _ in chunks]
    assert schedule.chunk_ids.tolist() == [c for _, c in chunks]
    assert schedule.chunk_offsets.tolist() == [0, *accumulate(counts)]
    assert schedule.kernel_cu_seqlens.tolist() == [0, *accumulate(prefill)]
    assert schedule.grid.chunk_counts == tuple(counts)
    assert (schedule.total_chunks, schedule.max_seq_chunks) == (len(chunks), max(counts))
    assert (schedule.chunk_size, schedule.grid.block_size) == (64, 64)
    assert (schedule.n_prefill, schedule.total_prefill_tokens) == (len(prefill), sum(prefill))
    assert (schedule.num_decodes, schedule.num_decode_tokens) == (num_decodes, sum(lengths[:num_decodes]))
    for tensor in device_tensors(schedule):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert not tensor.is_inference()


def device_tensors(schedule: ChunkSchedule) -> list[Tensor]:
    return [schedule.sequence_ids, schedule.chunk_ids, schedule.chunk_offsets, schedule.kernel_cu_seqlens]


BATCHES = [
    ([1], 0),
    ([64], 0),
    ([65], 0),
    ([0], 0),
    ([0, 0], 0),
    ([0, 0, 64, 64, 65, 65], 0),
    ([0, 130, 5], 0),
    ([130, 0, 0, 5], 0),
    ([130, 5, 0], 0),
    ([1238, 1199, 1240, 1216, 1187, 1203, 519], 0),
    ([8192] + [1] * 31, 0),
    ([(37 * i) % 200 for i in range(300)], 0),
    ([1, 1, 3, 66], 1),
    ([1, 1, 64, 65], 2),
    ([0, 300, 0, 70, 0], 2),
    ([1] * 299 + [4], 299),
]


@pytest.mark.parametrize(("lengths", "num_decodes"), BATCHES)
def test_schedule_equals_enumeration(lengths: list[int], num_decodes: int) -> None:
    for dtype in (torch.int32, torch.int64):
        metadata = build(lengths, num_decodes, dtype)
        check_schedule(metadata.schedule, lengths, num_decodes)
        assert metadata.layout.seq_lens_cpu == tuple(lengths)
        assert metadata.layout.kernel_cu_seqlens.tolist() == [0, *accumulate(lengths)]
        assert metadata.layout.kernel_cu_seqlens.dtype == torch.int32


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_batch_equals_enumeration(data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.integers(0, 300) | st.sampled_from([0, 1, 63, 64, 65, 128]), min_size=1, max_size=20)
    )
    num_decodes = data.draw(st.integers(0, len(lengths) - 1))
    check_schedule(build(lengths, num_decodes).schedule, lengths, num_decodes)


@pytest.mark.parametrize(("lengths", "num_decodes"), BATCHES)
def test_every_slice_of_the_upload_is_16_byte_aligned(lengths: list[int], num_decodes: int) -> None:
    metadata = build(lengths, num_decodes)
    tensors = [*device_tensors(metadata.schedule), metadata.layout.kernel_cu_seqlens]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 5
    spans = sorted((t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors if t.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_fields_keep_the_callers_tensor_and_its_version() -> None:
    cu = cu_of([3, 4])
    cu.add_(0)
    layout = build_prefill_metadata([3, 4], cu_seqlens=cu).layout
    assert layout.cu_seqlens is cu
    assert layout.cu_seqlens_version == cu._version == 1
    assert layout.kernel_cu_seqlens.data_ptr() != cu.data_ptr()


def test_lengths_may_be_a_cpu_tensor_a_tuple_or_index_like() -> None:
    class Index:
        def __index__(self) -> int:
            return 70

    for lengths in (torch.tensor([70, 3]), torch.tensor([70, 3], dtype=torch.int32), (70, 3), [Index(), 3]):
        metadata = build_prefill_metadata(lengths, cu_seqlens=cu_of([70, 3]))
        check_schedule(metadata.schedule, [70, 3], 0)
        assert all(type(length) is int for length in metadata.layout.seq_lens_cpu)


def test_strided_cu_seqlens_is_handled() -> None:
    strided = torch.stack([cu_of([70, 3]), torch.full((3,), 99, dtype=torch.int32)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    metadata = build_prefill_metadata([70, 3], cu_seqlens=strided)
    check_schedule(metadata.schedule, [70, 3], 0)


def test_default_device_of_the_caller_does_not_matter() -> None:
    cu = cu_of([70, 3])
    with torch.device("meta"):
        metadata = build_prefill_metadata([70, 3], cu_seqlens=cu)
    check_schedule(metadata.schedule, [70, 3], 0)


def test_schedule_feeds_a_chunk_plan() -> None:
    schedule = build([1, 70, 0], 1).schedule
    plan = ChunkPlan.varlen(schedule, 100)
    assert (plan.num_seqs, plan.total_chunks, plan.max_seq_chunks, plan.seq_len) == (2, 2, 2, 100)
    assert plan.cu_seqlens is schedule.kernel_cu_seqlens


def test_metadata_is_frozen_and_compares_by_identity() -> None:
    first, second = build([70]), build([70])
    assert first != second
    assert first == first
    for frozen in (first, first.layout, first.schedule, first.schedule.grid):
        name = dataclasses.fields(frozen)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)
    assert GatedDeltaRulePrefillMetadata is PrefillMetadata
    assert GatedDeltaRuleChunkSchedule is ChunkSchedule


CU = cu_of([5, 70])
BAD_CALLS = [
    ({"seq_lens_cpu": []}, ValueError, "seq_lens_cpu: got no sequence, expected at least one"),
    ({"seq_lens_cpu": [5, -70]}, ValueError, "seq_lens_cpu[1]: got -70, expected >= 0"),
    ({"seq_lens_cpu": [5, 70.0]}, TypeError, "seq_lens_cpu[1]: got 70.0, expected an int"),
    ({"seq_lens_cpu": [5, True]}, TypeError, "seq_lens_cpu[1]: got True, expected an int"),
    ({"seq_lens_cpu": [5, None]}, TypeError, "seq_lens_cpu[1]: got NoneType, expected an int"),
    ({"seq_lens_cpu": [5, torch.tensor(70)]}, TypeError, "seq_lens_cpu[1]: got Tensor, expected an int"),
    ({"seq_lens_cpu": 75}, TypeError, "seq_lens_cpu: got int, expected a sequence of ints or a CPU integer tensor"),
    ({"seq_lens_cpu": torch.tensor([5.0, 70.0])}, TypeError, "seq_lens_cpu.dtype: got torch.float32"),
    ({"seq_lens_cpu": torch.tensor([True, True])}, TypeError, "seq_lens_cpu.dtype: got torch.bool"),
    ({"seq_lens_cpu": torch.tensor([[5, 70]])}, ValueError, "seq_lens_cpu: got 2 dimensions, expected 1"),
    ({"seq_lens_cpu": torch.empty(2, device="meta")}, ValueError, "seq_lens_cpu: got a tensor on meta"),
    ({"seq_lens_cpu": [2**31 - 1, 1]}, ValueError, "sum of seq_lens_cpu: got 2147483648, expected at most 2147483647"),
    ({"seq_lens_cpu": [5]}, ValueError, "cu_seqlens.numel(): got 3, expected 2"),
    ({"seq_lens_cpu": [6, 69]}, ValueError, "cu_seqlens[1]: got 5, expected 6"),
    ({"seq_lens_cpu": [5, 71]}, ValueError, "cu_seqlens[2]: got 75, expected 76"),
    ({"cu_seqlens": CU + 1}, ValueError, "cu_seqlens[0]: got 1, expected 0"),
    ({"cu_seqlens": CU.long() + 2**32}, ValueError, "cu_seqlens[0]: got 4294967296, expected 0"),
    ({"cu_seqlens": [0, 5, 75]}, TypeError, "cu_seqlens: got list, expected a tensor"),
    ({"cu_seqlens": CU.float()}, TypeError, "cu_seqlens.dtype: got torch.float32, expected torch.int32 or torch.int64"),
    ({"cu_seqlens": CU.short()}, TypeError, "cu_seqlens.dtype: got torch.int16"),
    ({"cu_seqlens": CU[None]}, ValueError, "cu_seqlens: got 2 dimensions, expected 1"),
    ({"cu_seqlens": CU.to("meta")}, UnsupportedError, "cu_seqlens.device: got meta, supported: cpu, cuda"),
    ({"num_decodes": -1}, ValueError, "num_decodes: got -1, expected 0 to 1"),
    ({"num_decodes": 2, "num_decode_tokens": 75}, ValueError, "num_decodes: got 2, expected 0 to 1"),
    ({"num_decodes": 1.0}, TypeError, "num_decodes: got 1.0, expected an int"),
    ({"num_decodes": 1}, ValueError, "num_decode_tokens: got 0, expected 5"),
    ({"num_decode_tokens": 5}, ValueError, "num_decode_tokens: got 5, expected 0"),
    ({"num_decodes": 1, "num_decode_tokens": 6}, ValueError, "num_decode_tokens: got 6, expected 5"),
    ({"chunk_size": 0}, ValueError, "chunk_size: got 0, expected 64"),
    ({"chunk_size": -64}, ValueError, "chunk_size: got -64, expected 64"),
    ({"chunk_size": 32}, UnsupportedError, "chunk_size: got 32, supported: 64"),
    ({"chunk_size": 64.0}, TypeError, "chunk_size: got 64.0, expected an int"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CALLS, ids=[str(call[2])[:40] for call in BAD_CALLS])
def test_bad_arguments_are_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"seq_lens_cpu": [5, 70], "cu_seqlens": CU, **changes}
    with pytest.raises(error, match=re.escape(message)) as raised:
        build_prefill_metadata(**arguments)  # type: ignore[arg-type]
    assert raised.type is error


def test_totals_at_the_int32_limit_are_computed_exactly() -> None:
    lengths = [2**31 - 1 - 64, 64]
    schedule = build_prefill_metadata(
        lengths, cu_seqlens=cu_of(lengths, torch.int64), num_decodes=1, num_decode_tokens=lengths[0]
    ).schedule
    assert (schedule.total_prefill_tokens, schedule.kernel_cu_seqlens.tolist()) == (64, [0, 64])


def test_build_is_refused_during_capture_and_validate_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cu = cu_of([5, 70])
    metadata = build_prefill_metadata([5, 70], cu_seqlens=cu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="build_prefill_metadata: got a call during CUDA graph capture"):
        build_prefill_metadata([5, 70], cu_seqlens=cu)
    metadata.validate(cu, num_decodes=0, num_decode_tokens=0, total_tokens=75)


def call_of(metadata: PrefillMetadata, **changes: object) -> None:
    schedule = metadata.schedule
    arguments: dict[str, object] = {
        "cu_seqlens": metadata.layout.cu_seqlens,
        "num_decodes": schedule.num_decodes,
        "num_decode_tokens": schedule.num_decode_tokens,
        "total_tokens": schedule.total_prefill_tokens,
        **changes,
    }
    metadata.validate(arguments.pop("cu_seqlens"), **arguments)  # type: ignore[arg-type]


def test_validate_accepts_its_own_call_with_and_without_spare_rows() -> None:
    metadata = build([1, 5, 70], 1)
    call_of(metadata)
    call_of(metadata, total_tokens=256, chunk_size=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_decodes": 0}, "num_decodes: got 0, expected 1 as in prefill_metadata"),
        ({"num_decode_tokens": 2}, "num_decode_tokens: got 2, expected 1 as in prefill_metadata"),
        ({"total_tokens": 74}, "length of the token axis: got 74, expected at least 75 prefill tokens"),
        ({"chunk_size": 32}, "chunk_size: got 32, expected 64 as in prefill_metadata"),
        ({"cu_seqlens": cu_of([1, 5, 70])}, "cu_seqlens: got another tensor object, expected the one"),
    ],
)
def test_validate_refuses_another_call(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call_of(build([1, 5, 70], 1), **changes)


def test_validate_refuses_a_view_of_the_same_memory() -> None:
    metadata = build([5, 70])
    with pytest.raises(ValueError, match="another tensor object"):
        call_of(metadata, cu_seqlens=metadata.layout.cu_seqlens[:])


def test_validate_refuses_an_edited_tensor_also_when_edited_in_inference_mode_or_through_a_view() -> None:
    def through_a_view(cu: Tensor) -> None:
        cu[1:2].add_(1)

    def in_inference_mode(cu: Tensor) -> None:
        with torch.inference_mode():
            cu.copy_(torch.tensor([0, 64, 75]))

    for edit in (lambda cu: cu.add_(0), through_a_view, in_inference_mode):
        metadata = build([5, 70])
        edit(metadata.layout.cu_seqlens)
        with pytest.raises(ValueError, match=re.escape("cu_seqlens._version: got 1, expected 0 (edited in place")):
            call_of(metadata)


def test_validate_refuses_a_resized_inference_tensor() -> None:
    with torch.inference_mode():
        metadata = build([5, 70])
        metadata.layout.cu_seqlens.resize_(2)
        with pytest.raises(ValueError, match=re.escape("cu_seqlens.numel(): got 2, expected 3 as in prefill_metadata")):
            call_of(metadata)


def test_inference_tensor_is_trusted_and_metadata_is_usable_outside() -> None:
    with torch.inference_mode():
        metadata = build([5, 70])
        assert metadata.layout.cu_seqlens_version is None
        metadata.layout.cu_seqlens.add_(0)
        call_of(metadata)
    check_schedule(metadata.schedule, [5, 70], 0)
    metadata.schedule.chunk_offsets.add_(0)  # an inference tensor would refuse this here


def test_get_chunk_schedule_raises_on_any_mismatch() -> None:
    metadata = build([1, 5, 70], 1)
    assert metadata.get_chunk_schedule(64, 1, 1) is metadata.schedule
    for arguments, name in (((32, 1, 1), "chunk_size"), ((64, 0, 1), "num_decodes"), ((64, 1, 2), "num_decode_tokens")):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            metadata.get_chunk_schedule(*arguments)


def test_using_metadata_reads_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = build([1, 5, 70], 1)

    def forbidden(*_: object) -> None:
        raise AssertionError("a tensor was read")

    for name in ("tolist", "item", "cpu", "numpy", "to", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(Tensor, name, forbidden)
    call_of(metadata)
    schedule = metadata.get_chunk_schedule(64, 1, 1)
    plan = ChunkPlan.varlen(schedule, 75)
    assert (plan.total_chunks, plan.max_seq_chunks, schedule.grid.chunk_counts) == (3, 2, (1, 2))


def test_validate_is_traceable_and_compiles_once_for_all_batch_sizes() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def layer(x: Tensor, cu_seqlens: Tensor, metadata: PrefillMetadata) -> tuple[Tensor, int]:
        metadata.validate(cu_seqlens, num_decodes=0, num_decode_tokens=0, total_tokens=x.shape[0])
        return metadata.schedule.chunk_offsets + 1, metadata.schedule.total_chunks

    for count in range(2, 14):
        lengths = [40 * count + i for i in range(count)]
        metadata = build(lengths)
        offsets, chunks = layer(torch.ones(sum(lengths) + count), metadata.layout.cu_seqlens, metadata)
        assert torch.equal(offsets, metadata.schedule.chunk_offsets + 1)
        assert chunks == metadata.schedule.total_chunks
    assert len(graphs) == 2  # one of fixed sizes, then one for all sizes


def test_traced_validate_still_checks_the_numbers() -> None:
    metadata = build([5, 70])

    @torch.compile(backend="eager", fullgraph=True)
    def layer(x: Tensor, cu_seqlens: Tensor, metadata: PrefillMetadata) -> Tensor:
        metadata.validate(cu_seqlens, num_decodes=0, num_decode_tokens=0, total_tokens=x.shape[0])
        return metadata.schedule.chunk_offsets

    assert torch.equal(layer(torch.ones(75), metadata.layout.cu_seqlens, metadata), metadata.schedule.chunk_offsets)
    with pytest.raises(RuntimeError, match="ValueError"):  # the tracer reports what the traced code raised
        layer(torch.ones(74), metadata.layout.cu_seqlens, metadata)
