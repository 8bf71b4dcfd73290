"""The cached route from cu_seqlens alone: reads, uploads, staleness, bounds, threads, streams."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from gdn_runtime import metadata as M
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.metadata import ChunkSchedule, build_prefill_metadata, clear_caches, schedule_for


def cu_of(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def tensors_of(schedule: ChunkSchedule) -> list[Tensor]:
    return [schedule.sequence_ids, schedule.chunk_ids, schedule.chunk_offsets, schedule.kernel_cu_seqlens]


def check_like_built(schedule: ChunkSchedule, lengths: list[int], num_decodes: int = 0) -> None:
    decode_tokens = sum(lengths[:num_decodes])
    built = build_prefill_metadata(
        lengths, cu_seqlens=cu_of(lengths), num_decodes=num_decodes, num_decode_tokens=decode_tokens
    ).schedule
    assert [t.tolist() for t in tensors_of(schedule)] == [t.tolist() for t in tensors_of(built)]
    assert schedule.grid.chunk_counts == built.grid.chunk_counts
    assert schedule.total_prefill_tokens == built.total_prefill_tokens
    assert (schedule.num_decodes, schedule.num_decode_tokens) == (num_decodes, decode_tokens)


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


class Reads:
    """Counts the host reads of tensors, by any of the ways to read one, and the uploads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.uploads = 0
        for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__index__"):
            monkeypatch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))
        upload = M._upload

        def counted(*args: object) -> object:
            self.uploads += 1
            return upload(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(M, "_upload", counted)

    def _counted(self, read: object) -> object:
        def counted(tensor: Tensor) -> object:
            self.reads += 1
            return read(tensor)  # type: ignore[operator]

        return counted


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths", "num_decodes"),
    [([1], 0), ([0], 0), ([0, 0], 0), ([0, 70, 0, 0, 65, 0], 0), ([7] * 300, 0), ([1, 1, 3, 66], 1), ([300, 0, 9], 1)],
)
def test_schedule_equals_the_built_one(lengths: list[int], num_decodes: int, dtype: torch.dtype) -> None:
    decode_tokens = sum(lengths[:num_decodes])
    for _ in range(2):
        schedule = schedule_for(
            cu_of(lengths, dtype),
            total_tokens=sum(lengths) - decode_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=decode_tokens,
        )
        check_like_built(schedule, lengths, num_decodes)
        assert [t.data_ptr() % 16 for t in tensors_of(schedule)] == [0] * 4


def test_first_sight_reads_once_and_repeats_read_nothing(count: Reads) -> None:
    cu = cu_of([100, 156])
    first = schedule_for(cu, total_tokens=256)
    assert (count.reads, count.uploads) == (1, 1)
    # Every layer, by any spelling of the call, and whatever the spare rows.
    assert schedule_for(cu, total_tokens=256) is first
    assert schedule_for(cu, total_tokens=300, num_decodes=0, num_decode_tokens=0, chunk_size=64) is first
    assert (count.reads, count.uploads) == (1, 1)


def test_num_decode_tokens_beyond_the_small_int_cache_hit(count: Reads) -> None:
    cu = cu_of([1000, 70])
    for text in ("1000", "1000", "1000"):
        schedule_for(cu, total_tokens=70, num_decodes=1, num_decode_tokens=int(text))  # a new int object each time
    assert (count.reads, count.uploads) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("inference", [False, True])
def test_edit_in_place_is_noticed(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        cu = cu_of([100, 156], dtype)
        check_like_built(schedule_for(cu, total_tokens=256), [100, 156])
        cu.copy_(torch.tensor([0, 64, 256]))
        check_like_built(schedule_for(cu, total_tokens=256), [64, 192])


def test_edit_of_a_normal_tensor_inside_inference_mode_is_noticed() -> None:
    cu = cu_of([100, 156])
    schedule_for(cu, total_tokens=256)
    with torch.inference_mode():
        cu[1:].copy_(torch.tensor([64, 256]))
        check_like_built(schedule_for(cu, total_tokens=256), [64, 192])


def test_inference_tensor_is_read_on_every_call_and_uploaded_once(count: Reads) -> None:
    with torch.inference_mode():
        cu = cu_of([100, 156])
        schedules = {id(schedule_for(cu, total_tokens=256)) for _ in range(3)}
    assert (count.reads, count.uploads, len(schedules)) == (3, 1, 1)
    assert not M._cache._seen


def test_schedule_first_built_in_inference_mode_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        schedule_for(cu_of([100, 156]), total_tokens=256)
    schedule = schedule_for(cu_of([100, 156]), total_tokens=256)
    assert not any(tensor.is_inference() for tensor in tensors_of(schedule))


def test_same_values_in_a_new_tensor_upload_nothing(count: Reads) -> None:
    first = schedule_for(cu_of([100, 156]), total_tokens=256)
    second = schedule_for(cu_of([100, 156], torch.int64), total_tokens=256)
    assert second is first
    assert (count.reads, count.uploads) == (2, 1)


def test_alternating_layouts_and_prefixes_keep_their_entries(count: Reads) -> None:
    left, right = cu_of([100, 156]), cu_of([1, 255])
    for _ in range(4):
        check_a = schedule_for(left, total_tokens=256)
        check_b = schedule_for(right, total_tokens=256)
        check_c = schedule_for(right, total_tokens=256, num_decodes=1, num_decode_tokens=1)
    assert (count.reads, count.uploads) == (3, 3)
    check_like_built(check_a, [100, 156])
    check_like_built(check_b, [1, 255])
    check_like_built(check_c, [1, 255], 1)


def test_new_tensor_under_a_freed_id_is_not_taken_for_the_old_one() -> None:
    ids = set()
    for length in range(1, 200):
        cu = cu_of([length, 300 - length])
        ids.add(id(cu))
        check_like_built(schedule_for(cu, total_tokens=300), [length, 300 - length])
        del cu
    assert len(ids) < 199  # or the test met no reuse at all


def test_a_stale_entry_under_a_reused_id_is_refused(count: Reads) -> None:
    # As if the tensor had died and its id been taken before the entry was dropped.
    dead, alive = cu_of([100, 156]), cu_of([64, 192])
    schedule_for(dead, total_tokens=256)
    (key,) = M._cache._seen
    M._cache._seen[(id(alive), *key[1:])] = M._cache._seen[key]
    check_like_built(schedule_for(alive, total_tokens=256), [64, 192])


def test_dropping_the_tensor_drops_its_entry() -> None:
    cu = cu_of([100, 156])
    schedule_for(cu, total_tokens=256)
    schedule_for(cu, total_tokens=156, num_decodes=1, num_decode_tokens=100)
    assert len(M._cache._seen) == 2
    del cu
    gc.collect()
    assert len(M._cache._seen) == 0


def test_both_levels_are_bounded_and_forget_the_oldest(count: Reads) -> None:
    tensors = [cu_of([length]) for length in range(1, 41)]
    schedules = [weakref.ref(schedule_for(cu, total_tokens=40)) for cu in tensors]
    gc.collect()
    assert len(M._cache._seen) == len(M._cache._by_value) == M.CACHE_ENTRIES == 16
    assert [ref() is not None for ref in schedules] == [False] * 24 + [True] * 16
    schedule_for(tensors[24], total_tokens=40)  # the oldest kept: now the newest
    schedule_for(cu_of([41]), total_tokens=41)
    before = count.reads
    schedule_for(tensors[24], total_tokens=40)
    assert count.reads == before
    schedule_for(tensors[25], total_tokens=40)
    assert count.reads == before + 1


def test_clear_caches_frees_everything() -> None:
    cu = cu_of([100, 156])
    schedule = weakref.ref(schedule_for(cu, total_tokens=256))
    clear_caches()
    gc.collect()
    assert schedule() is None
    check_like_built(schedule_for(cu, total_tokens=256), [100, 156])


@pytest.mark.parametrize("hit", [False, True])
def test_capture_is_refused(monkeypatch: pytest.MonkeyPatch, hit: bool) -> None:
    # Also on a hit: the graph would keep the address of tensors that the cache may drop.
    cu = cu_of([100, 156])
    if hit:
        schedule_for(cu, total_tokens=256)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="schedule_for: got a call during CUDA graph capture, expected prefill_meta"):
        schedule_for(cu, total_tokens=256)


BAD_CALLS = [
    ({"cu_seqlens": [0, 1]}, TypeError, "cu_seqlens: got list, expected a tensor"),
    ({"cu_seqlens": cu_of([5]).float()}, TypeError, "cu_seqlens.dtype: got torch.float32"),
    ({"cu_seqlens": cu_of([5])[None]}, ValueError, "cu_seqlens: got 2 dimensions, expected 1"),
    ({"cu_seqlens": cu_of([5]).to("meta")}, UnsupportedError, "cu_seqlens.device: got meta, supported: cpu, cuda"),
    ({"cu_seqlens": cu_of([])}, ValueError, "cu_seqlens.numel(): got 1, expected at least 2"),
    ({"cu_seqlens": cu_of([])[:0]}, ValueError, "cu_seqlens.numel(): got 0, expected at least 2"),
    ({"cu_seqlens": cu_of([5, 70]) + 1}, ValueError, "cu_seqlens[0]: got 1, expected 0"),
    ({"cu_seqlens": torch.tensor([0, 9, 5, 75])}, ValueError, "cu_seqlens[2]: got 5, expected at least cu_seqlens[1]"),
    ({"cu_seqlens": torch.tensor([0, 2**31])}, ValueError, "cu_seqlens[-1]: got 2147483648, expected at most"),
    ({"total_tokens": 74}, ValueError, "length of the token axis: got 74, expected at least 75"),
    ({"num_decodes": 2, "num_decode_tokens": 75}, ValueError, "num_decodes: got 2, expected 0 to 1"),
    ({"num_decodes": -1}, ValueError, "num_decodes: got -1, expected 0 to 1"),
    ({"num_decodes": 1, "num_decode_tokens": 4}, ValueError, "num_decode_tokens: got 4, expected 5"),
    ({"num_decode_tokens": 5}, ValueError, "num_decode_tokens: got 5, expected 0"),
    ({"num_decode_tokens": torch.tensor(0)}, TypeError, "num_decode_tokens: got Tensor, expected an int"),
    ({"chunk_size": 0}, ValueError, "chunk_size: got 0, expected 64"),
    ({"chunk_size": 128}, UnsupportedError, "chunk_size: got 128, supported: 64"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CALLS, ids=[str(call[2])[:40] for call in BAD_CALLS])
def test_bad_arguments_are_refused_every_time(changes: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"cu_seqlens": cu_of([5, 70]), "total_tokens": 75, **changes}
    for _ in range(2):
        with pytest.raises(error, match=re.escape(message)) as raised:
            schedule_for(**arguments)  # type: ignore[arg-type]
        assert raised.type is error


def test_token_axis_is_checked_on_a_hit_too() -> None:
    cu = cu_of([5, 70])
    schedule_for(cu, total_tokens=75)
    with pytest.raises(ValueError, match="length of the token axis: got 74"):
        schedule_for(cu, total_tokens=74)


def test_strided_cu_seqlens_is_handled() -> None:
    strided = torch.stack([cu_of([5, 70]), cu_of([9, 9])], dim=1)[:, 0]
    check_like_built(schedule_for(strided, total_tokens=75), [5, 70])


def test_threads_get_right_schedules_within_the_bounds() -> None:
    shared = [[length, 200 - length] for length in range(1, 25)]
    tensors = [cu_of(lengths) for lengths in shared]
    start = threading.Barrier(4)

    def work(seed: int) -> int:
        start.wait()
        done = 0
        for step in range(150):
            lengths = shared[(7 * step + seed) % len(shared)]
            # Own tensors die at once, shared ones are met by all threads.
            cu = cu_of(lengths) if step % 3 == 0 else tensors[shared.index(lengths)]
            schedule = schedule_for(cu, total_tokens=200)
            done += schedule.kernel_cu_seqlens.tolist() == [0, lengths[0], 200]
            done += schedule.total_chunks == -(-lengths[0] // 64) - (-lengths[1] // 64)
        return done

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [300] * 4
    assert len(M._cache._seen) <= 16
    assert len(M._cache._by_value) <= 16


class FakeStream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def record_event(self) -> str:
        return "uploaded"

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def test_another_stream_waits_once_and_keeps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = FakeStream(), FakeStream()
    recorded: list[object] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: recorded.append(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: home)
    schedule = build_prefill_metadata([5, 70], cu_seqlens=cu_of([5, 70])).schedule
    uploaded = M._Uploaded(schedule, torch.device("cuda", 0))
    assert uploaded.on_current_stream() is schedule
    assert (home.waited, recorded) == ([], [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: other)
    for _ in range(3):
        assert uploaded.on_current_stream() is schedule
    assert (other.waited, recorded) == (["uploaded"], [other])
