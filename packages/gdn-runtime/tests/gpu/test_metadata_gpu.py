"""Prefill metadata on a real device: no host reads, pinned uploads, the device assert, capture, streams."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from gdn_runtime import metadata as M
from gdn_runtime.metadata import ChunkSchedule, build_prefill_metadata, clear_caches, schedule_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]

BATCHES = [
    ([1], 0),
    ([17], 0),
    ([1000], 0),
    ([1008], 0),
    ([0, 0, 64, 64, 65, 65], 0),
    ([0, 0], 0),
    ([8192] + [1] * 31, 0),
    ([(37 * i) % 200 for i in range(300)], 0),
    ([1, 1, 3, 66], 1),
]


def cu_of(lengths: list[int], dtype: torch.dtype = torch.int32, device: str = "cuda") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype, device=device)


def tensors_of(schedule: ChunkSchedule) -> list[Tensor]:
    return [schedule.sequence_ids, schedule.chunk_ids, schedule.chunk_offsets, schedule.kernel_cu_seqlens]


def host_values(lengths: list[int], num_decodes: int = 0) -> list[list[int]]:
    """What the CPU suite checks against an enumeration."""
    schedule = build_prefill_metadata(
        lengths,
        cu_seqlens=cu_of(lengths, device="cpu"),
        num_decodes=num_decodes,
        num_decode_tokens=sum(lengths[:num_decodes]),
    ).schedule
    return [tensor.tolist() for tensor in tensors_of(schedule)]


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def test_sync_debug_mode_catches_a_read() -> None:
    cu = cu_of([5, 70])
    with syncs_are_errors(), pytest.raises(RuntimeError):
        cu.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("lengths", "num_decodes"), BATCHES)
def test_build_and_validate_do_not_sync(lengths: list[int], num_decodes: int, dtype: torch.dtype) -> None:
    cu = cu_of(lengths, dtype)
    decode_tokens = sum(lengths[:num_decodes])
    with syncs_are_errors():
        metadata = build_prefill_metadata(
            lengths, cu_seqlens=cu, num_decodes=num_decodes, num_decode_tokens=decode_tokens
        )
        metadata.validate(cu, num_decodes=num_decodes, num_decode_tokens=decode_tokens, total_tokens=sum(lengths))
    tensors = [*tensors_of(metadata.schedule), metadata.layout.kernel_cu_seqlens]
    assert {tensor.device for tensor in tensors} == {cu.device}
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {tensors[0].untyped_storage().data_ptr()}
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 5
    assert [tensor.tolist() for tensor in tensors_of(metadata.schedule)] == host_values(lengths, num_decodes)
    assert metadata.layout.kernel_cu_seqlens.tolist() == cu.tolist()


def test_strided_cu_seqlens_passes_the_device_check() -> None:
    strided = torch.stack([cu_of([5, 70]), cu_of([9, 9])], dim=1)[:, 0]
    metadata = build_prefill_metadata([5, 70], cu_seqlens=strided)
    torch.cuda.synchronize()
    assert [tensor.tolist() for tensor in tensors_of(metadata.schedule)] == host_values([5, 70])


def test_one_pinned_upload_per_build(monkeypatch: pytest.MonkeyPatch) -> None:
    cu = cu_of([5, 70])
    uploads: list[tuple[bool, object]] = []
    real = Tensor.to

    def spy(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if tensor.device.type == "cpu":
            uploads.append((tensor.is_pinned(), kwargs.get("non_blocking")))
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", spy)
    build_prefill_metadata([5, 70], cu_seqlens=cu)
    assert uploads == [(True, True)]


def test_staging_memory_is_not_recycled_before_its_copy_ran() -> None:
    batches = [[i + 1, 300 - i, 64 * i] for i in range(32)]
    offsets = [cu_of(lengths) for lengths in batches]
    build_prefill_metadata(batches[0], cu_seqlens=offsets[0])
    with syncs_are_errors():
        torch.cuda._sleep(200_000_000)  # about 0.1 s: no copy below has run when the last build returns
        built = [build_prefill_metadata(n, cu_seqlens=cu) for n, cu in zip(batches, offsets, strict=True)]
    for lengths, metadata in zip(batches, built, strict=True):
        assert [tensor.tolist() for tensor in tensors_of(metadata.schedule)] == host_values(lengths)


ASSERT_SCRIPT = """
import torch
from gdn_runtime.metadata import build_prefill_metadata
cu = torch.tensor([0, 5, 75], dtype=torch.{dtype}, device="cuda")
build_prefill_metadata({lengths}, cu_seqlens=cu)
print("built", flush=True)
try:
    torch.cuda.synchronize()
except RuntimeError:
    print("refused by the device", flush=True)
else:
    print("accepted", flush=True)
"""


@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm builds of torch leave device asserts out")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(("lengths", "verdict"), [([5, 70], "accepted"), ([6, 69], "refused by the device")])
def test_lengths_are_checked_on_the_device_without_a_read(dtype: str, lengths: list[int], verdict: str) -> None:
    # In a process of its own: a failed device assert leaves the CUDA context unusable.
    run = subprocess.run(
        [sys.executable, "-c", ASSERT_SCRIPT.format(dtype=dtype, lengths=lengths)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout.splitlines()[:2] == ["built", verdict], run.stderr


def test_capture_refuses_to_build_and_replays_with_metadata_built_before() -> None:
    lengths = [5, 70, 0, 130]
    cu = cu_of(lengths)
    metadata = build_prefill_metadata(lengths, cu_seqlens=cu)
    schedule_for(cu, total_tokens=205)
    x = torch.ones((), dtype=torch.int32, device="cuda")
    metadata.schedule.chunk_offsets * x  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="build_prefill_metadata: got a call during CUDA graph capture"):
            build_prefill_metadata(lengths, cu_seqlens=cu)
        for seen in (cu, cu.view(-1)):
            with pytest.raises(RuntimeError, match="schedule_for: got a call during CUDA graph capture"):
                schedule_for(seen, total_tokens=205)
        metadata.validate(cu, num_decodes=0, num_decode_tokens=0, total_tokens=205)
        out = metadata.schedule.chunk_offsets * x
    expected = torch.tensor(host_values(lengths)[2])
    for factor in (2, 3):
        x.fill_(factor)
        build_prefill_metadata([4000], cu_seqlens=cu_of([4000]))  # other uploads leave the graph's tensors alone
        graph.replay()
        assert torch.equal(out.cpu(), expected * factor)


def test_cached_route_syncs_on_first_sight_only() -> None:
    cu = cu_of([100, 156])
    moved = torch.tensor([0, 64, 256], dtype=torch.int32).pin_memory()
    first = schedule_for(cu, total_tokens=256)
    with syncs_are_errors():
        for _ in range(3):
            assert schedule_for(cu, total_tokens=256) is first
        cu.copy_(moved, non_blocking=True)
        with pytest.raises(RuntimeError):  # the edit forces a read
            schedule_for(cu, total_tokens=256)
    second = schedule_for(cu, total_tokens=256)
    assert [tensor.tolist() for tensor in tensors_of(second)] == host_values([64, 192])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("inference", [False, True])
def test_edits_and_reused_addresses_are_noticed(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        addresses = set()
        for length in range(1, 40):
            cu = cu_of([length, 256 - length], dtype)
            addresses.add(cu.data_ptr())
            for lengths in ([length, 256 - length], [256 - length, length]):
                cu.copy_(cu_of(lengths, dtype))
                schedule = schedule_for(cu, total_tokens=256)
                assert [tensor.tolist() for tensor in tensors_of(schedule)] == host_values(lengths)
            del cu
        assert len(addresses) < 39


def test_inference_tensor_is_read_on_every_call() -> None:
    with torch.inference_mode():
        cu = cu_of([100, 156])
        schedule_for(cu, total_tokens=256)
        with syncs_are_errors(), pytest.raises(RuntimeError):
            schedule_for(cu, total_tokens=256)


def test_use_on_another_stream_waits_for_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    cu = cu_of([100, 156])
    lengths_of = M._lengths_of

    def then_sleep(offsets: list[int]) -> tuple[int, ...]:
        torch.cuda._sleep(400_000_000)  # about 0.2 s on the uploading stream, in front of the upload
        return lengths_of(offsets)

    home, other = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (home, other):
        with torch.cuda.stream(stream):  # allocations of pinned and of device memory may wait for the device
            schedule = build_prefill_metadata([3, 253], cu_seqlens=cu_of([3, 253])).schedule
            copies = [tensor.clone() for tensor in tensors_of(schedule)]
    torch.cuda.synchronize()
    del schedule, copies
    monkeypatch.setattr(M, "_lengths_of", then_sleep)
    with torch.cuda.stream(home):
        schedule = schedule_for(cu, total_tokens=256)
    with torch.cuda.stream(other):
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert schedule_for(cu, total_tokens=256) is schedule
            copies = [tensor.clone() for tensor in tensors_of(schedule)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not home.query()  # or the upload was done anyway and the test shows nothing
        other.synchronize()
        assert [copy.tolist() for copy in copies] == host_values([100, 156])


def test_evicted_schedule_is_not_overwritten_under_another_stream() -> None:
    cu = cu_of([100, 156])
    home, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(home):
        schedule = schedule_for(cu, total_tokens=256)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        schedule = schedule_for(cu, total_tokens=256)
        size = schedule.chunk_offsets.untyped_storage().nbytes()
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        copies = [tensor.clone() for tensor in tensors_of(schedule)]
    del schedule
    clear_caches()
    with torch.cuda.stream(home):
        poison = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert len(poison) == 64
    assert [copy.tolist() for copy in copies] == host_values([100, 156])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_devices_keep_their_own_schedules() -> None:
    # The second device is never made current: everything follows cu_seqlens.
    tensors = [cu_of([100, 156], device=f"cuda:{index}") for index in range(2)]
    cached = [schedule_for(cu, total_tokens=256) for cu in tensors]
    built = [build_prefill_metadata([100, 156], cu_seqlens=cu).schedule for cu in tensors]
    for cu, *schedules in zip(tensors, cached, built, strict=True):
        for schedule in schedules:
            assert {tensor.device for tensor in tensors_of(schedule)} == {cu.device}
            assert [tensor.tolist() for tensor in tensors_of(schedule)] == host_values([100, 156])
