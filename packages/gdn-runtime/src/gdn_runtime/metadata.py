"""Prefill metadata: how the sequences of a packed batch are cut into chunks, worked out on the host.

Two routes give a :class:`ChunkSchedule`:

* :func:`build_prefill_metadata` from lengths that the host knows: no device read, one upload. Build it once per forward
  pass and hand the same object to every layer. It is the only route into a captured CUDA graph.
* :func:`schedule_for` from ``cu_seqlens`` alone: reads the offsets (one device synchronisation) the first time it sees
  a tensor or a new version of it, and answers from a cache afterwards.

Both copy what kernels read into int32 tensors of their own on the device of ``cu_seqlens``. The caller's ``cu_seqlens``
may therefore be int32 or int64 and of any stride.
"""

from __future__ import annotations

import operator
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from .errors import UnsupportedError, type_error, value_error
from .plan import ChunkPlan, cdiv
from .spec import CHUNK

_Entry = TypeVar("_Entry")

INT32_MAX = 2**31 - 1
CACHE_ENTRIES = 16
"""Bound of each level of the cache behind :func:`schedule_for`."""

_ALIGN = 4  # int32 elements, 16 bytes: Triton compiles a second kernel for a pointer that is not a multiple of 16


@dataclass(frozen=True, eq=False)
class PrefillBatchLayout:
    """The full batch, decode prefix included.

    ``seq_lens_cpu``: N lengths in tokens. ``cu_seqlens``: the caller's tensor object [N + 1].
    ``cu_seqlens_version``: its version counter when the metadata was built; None for an inference tensor, which has no
    counter and is trusted not to change. ``kernel_cu_seqlens``: int32 [N + 1], the same offsets on the same device.
    """

    seq_lens_cpu: tuple[int, ...]
    cu_seqlens: Tensor
    cu_seqlens_version: int | None
    kernel_cu_seqlens: Tensor


@dataclass(frozen=True, eq=False)
class ChunkGrid:
    """The chunks of the prefill sequences, flattened.

    Chunk c of the grid is chunk ``chunk_ids[c]`` of prefill sequence ``sequence_ids[c]`` (both int32 [total_chunks],
    sequences counted from the first prefill sequence, empty ones included). ``chunk_counts``: chunks per sequence;
    ``max_seq_chunks``: the largest of them; ``block_size``: tokens per chunk.
    """

    block_size: int
    total_chunks: int
    max_seq_chunks: int
    chunk_counts: tuple[int, ...]
    sequence_ids: Tensor
    chunk_ids: Tensor


@dataclass(frozen=True, eq=False)
class ChunkSchedule:
    """What the kernels of one prefill call need to know about ``n_prefill`` sequences.

    ``chunk_offsets``: int32 [n_prefill + 1], exclusive prefix sum of chunks per sequence. ``kernel_cu_seqlens``: int32
    [n_prefill + 1], token offsets rebased to start at 0 behind the ``num_decodes`` sequences (``num_decode_tokens``
    tokens) of the decode prefix; the last one is ``total_prefill_tokens``.
    """

    chunk_size: int
    num_decodes: int
    num_decode_tokens: int
    n_prefill: int
    total_prefill_tokens: int
    grid: ChunkGrid
    chunk_offsets: Tensor
    kernel_cu_seqlens: Tensor
    _plans: dict[int, ChunkPlan] = field(default_factory=dict, init=False, repr=False)

    def plan(self, seq_len: int) -> ChunkPlan:
        """The plan over a packed token axis of ``seq_len`` rows, spare rows included. One object for equal lengths."""
        plan = self._plans.get(seq_len)
        if plan is None:
            plan = self._plans.setdefault(seq_len, ChunkPlan.varlen(self, seq_len))
        return plan

    @property
    def total_chunks(self) -> int:
        """Chunks of all prefill sequences together."""
        return self.grid.total_chunks

    @property
    def max_seq_chunks(self) -> int:
        """Chunks of the longest prefill sequence."""
        return self.grid.max_seq_chunks

    @property
    def sequence_ids(self) -> Tensor:
        """int32 [total_chunks], the prefill sequence of each chunk."""
        return self.grid.sequence_ids

    @property
    def chunk_ids(self) -> Tensor:
        """int32 [total_chunks], the number of each chunk within its sequence."""
        return self.grid.chunk_ids


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """Layout and schedule of one batch, built by :func:`build_prefill_metadata` and shared by all layers.

    CUDA graphs: build before the capture, then call ops with the metadata inside it. Keep the metadata alive as long as
    the graph, and leave the content of ``cu_seqlens`` alone between capture and replays: the graph holds the addresses
    and the grid sizes of this schedule, and a replay checks nothing.

    Streams: the tensors were uploaded on the stream that was current at build time and follow torch's usual rule: a
    caller that uses them on another stream orders it first (``wait_stream``) and, before dropping the metadata, makes
    sure that the other stream is done with it. (An event query per layer would cost more than the check itself and is
    illegal during capture.)
    """

    layout: PrefillBatchLayout
    schedule: ChunkSchedule

    def get_chunk_schedule(self, chunk_size: int, num_decodes: int, num_decode_tokens: int) -> ChunkSchedule:
        """The schedule, if it was built for these arguments; ValueError otherwise."""
        schedule = self.schedule
        if chunk_size != schedule.chunk_size:
            raise value_error("chunk_size", chunk_size, f"{schedule.chunk_size} as in prefill_metadata")
        if num_decodes != schedule.num_decodes:
            raise value_error("num_decodes", num_decodes, f"{schedule.num_decodes} as in prefill_metadata")
        if num_decode_tokens != schedule.num_decode_tokens:
            expected = f"{schedule.num_decode_tokens} as in prefill_metadata"
            raise value_error("num_decode_tokens", num_decode_tokens, expected)
        return schedule

    def validate(
        self,
        cu_seqlens: Tensor,
        *,
        num_decodes: int,
        num_decode_tokens: int,
        total_tokens: int,
        chunk_size: int = CHUNK,
    ) -> None:
        """Check that this metadata describes the call: host work only, allowed during CUDA graph capture.

        ``cu_seqlens`` must be the tensor object the metadata was built from, not edited in place since (an inference
        tensor is trusted here), and ``total_tokens``, the allocated length of the token axis, must hold all prefill
        tokens. Raises ValueError. The version counter sees torch's own in-place ops; a write that torch does not count
        (``.data``, a hand-written kernel, the replay of a graph) is not noticed. While torch.compile traces, object
        identity and version mean nothing and only the numbers are checked.
        """
        layout = self.layout
        if not torch.compiler.is_compiling():
            if cu_seqlens is not layout.cu_seqlens:
                raise value_error("cu_seqlens", "another tensor object", "the one prefill_metadata was built from")
            if layout.cu_seqlens_version is not None and cu_seqlens._version != layout.cu_seqlens_version:
                expected = f"{layout.cu_seqlens_version} (edited in place since prefill_metadata was built)"
                raise value_error("cu_seqlens._version", cu_seqlens._version, expected)
        # Not len(seq_lens_cpu): torch.compile would guard on it and recompile for every number of sequences.
        if cu_seqlens.numel() != layout.kernel_cu_seqlens.numel():
            expected = f"{layout.kernel_cu_seqlens.numel()} as in prefill_metadata"
            raise value_error("cu_seqlens.numel()", cu_seqlens.numel(), expected)
        schedule = self.get_chunk_schedule(chunk_size, num_decodes, num_decode_tokens)
        if total_tokens < schedule.total_prefill_tokens:
            raise _short_token_axis(total_tokens, schedule.total_prefill_tokens)

    def plan_if_valid(
        self, cu_seqlens: object, num_decodes: int, num_decode_tokens: int, total_tokens: int
    ) -> ChunkPlan | None:
        """The plan of an eager call that ``validate`` passes, None for another; in a third of the time."""
        layout, schedule = self.layout, self.schedule
        version = layout.cu_seqlens_version
        if (
            cu_seqlens is not layout.cu_seqlens
            or (version is not None and layout.cu_seqlens._version != version)
            or num_decodes != schedule.num_decodes
            or num_decode_tokens != schedule.num_decode_tokens
            or total_tokens < schedule.total_prefill_tokens
        ):
            return None
        return schedule.plan(total_tokens)


GatedDeltaRuleChunkSchedule = ChunkSchedule
GatedDeltaRulePrefillMetadata = PrefillMetadata


def build_prefill_metadata(
    seq_lens_cpu: Sequence[int] | Tensor,
    *,
    cu_seqlens: Tensor,
    chunk_size: int = CHUNK,
    num_decodes: int = 0,
    num_decode_tokens: int = 0,
) -> PrefillMetadata:
    """Build the metadata of one packed batch from host lengths, without reading the device.

    ``seq_lens_cpu``: N >= 1 lengths in tokens, as host integers or a CPU integer tensor, decode prefix included.
    ``cu_seqlens``: int32 or int64 [N + 1] on the device of the data, any stride; kernels read our int32 copy.
    ``num_decodes``, ``num_decode_tokens``: leading sequences, and their tokens, that the data tensors leave out.

    That ``cu_seqlens`` holds the prefix sums of ``seq_lens_cpu`` is checked on its device: a ValueError on CPU, an
    asynchronous device assert on a GPU (a wrong batch then fails at the next synchronisation; ROCm builds of torch
    leave device asserts out by default, and the lengths are trusted there).

    Raises TypeError or ValueError for bad arguments, UnsupportedError for a chunk size or a device without kernels and
    RuntimeError during CUDA graph capture.
    """
    _refuse_capture("build_prefill_metadata", cu_seqlens)
    _check_cu_seqlens(cu_seqlens)
    lengths = _host_lengths(seq_lens_cpu)
    if cu_seqlens.numel() != len(lengths) + 1:
        raise value_error("cu_seqlens.numel()", cu_seqlens.numel(), f"{len(lengths) + 1} (len(seq_lens_cpu) + 1)")
    num_decodes, num_decode_tokens = _check_partition(lengths, chunk_size, num_decodes, num_decode_tokens)
    schedule, offsets = _upload(lengths, num_decodes, num_decode_tokens, cu_seqlens.device)
    if cu_seqlens.is_cuda:
        torch._assert_async((cu_seqlens == offsets).all(), "cu_seqlens differs from the prefix sums of seq_lens_cpu")
    elif not bool((cu_seqlens == offsets).all()):
        at = int((cu_seqlens != offsets).nonzero()[0])
        raise value_error(f"cu_seqlens[{at}]", int(cu_seqlens[at]), f"{int(offsets[at])}, the sum of seq_lens_cpu")
    return PrefillMetadata(PrefillBatchLayout(lengths, cu_seqlens, _version(cu_seqlens), offsets), schedule)


def schedule_for(
    cu_seqlens: Tensor,
    *,
    total_tokens: int,
    num_decodes: int = 0,
    num_decode_tokens: int = 0,
    chunk_size: int = CHUNK,
) -> ChunkSchedule:
    """The schedule of a packed batch known by ``cu_seqlens`` (int32 or int64 [N + 1], N >= 1) alone.

    The first call for a tensor object, and the first after an in-place edit of it, reads the offsets and so waits for
    the device; later calls with the same arguments do not. Equal offsets in another tensor reuse the uploaded schedule.
    An inference tensor has no version counter: its offsets are read on every call. On other tensors, a write that torch
    does not count (``.data``, a hand-written kernel, the replay of a graph) goes unnoticed: build metadata then.

    The cache is thread-safe, holds :data:`CACHE_ENTRIES` entries per level and drops the entry of a tensor with it. Its
    tensors are ordered behind their upload, and kept from reuse, on every stream that asks for them.

    ``total_tokens``: allocated length of the token axis of the data. Raises ValueError if the offsets do not start at
    0, decrease, do not fit int32 or ``total_tokens``, or contradict ``num_decodes`` and ``num_decode_tokens``;
    TypeError and UnsupportedError as :func:`build_prefill_metadata`; RuntimeError during CUDA graph capture even where
    the cache holds the schedule, since a later eviction would leave the graph with freed memory.
    """
    _refuse_capture("schedule_for", cu_seqlens)
    schedule = _cache.get(cu_seqlens, chunk_size, num_decodes, num_decode_tokens)
    if total_tokens < schedule.total_prefill_tokens:
        raise _short_token_axis(total_tokens, schedule.total_prefill_tokens)
    return schedule


def clear_caches() -> None:
    """Forget every schedule that :func:`schedule_for` holds."""
    _cache.clear()


class _Uploaded:
    """A cached schedule and the streams that are known to be ordered behind its upload."""

    def __init__(self, schedule: ChunkSchedule, device: torch.device) -> None:
        self._schedule = schedule
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._streams: set[torch.cuda.Stream] = set()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._event = stream.record_event()
            self._streams.add(stream)

    def on_current_stream(self) -> ChunkSchedule:
        """The schedule, safe to read on the current stream. One wait per new stream orders all that follows on it."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream not in self._streams:
                stream.wait_event(self._event)
                self._schedule.chunk_offsets.record_stream(stream)  # covers the one buffer that all fields share
                self._streams.add(stream)
        return self._schedule


@dataclass(frozen=True, eq=False)
class _Seen:
    ref: weakref.ref[Tensor]
    version: int
    uploaded: _Uploaded


class _ScheduleCache:
    """Level 1 by tensor object and version (costs no read), level 2 by the values (costs no upload)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[Hashable, ...], _Seen] = OrderedDict()
        self._by_value: OrderedDict[tuple[Hashable, ...], _Uploaded] = OrderedDict()

    def get(self, cu_seqlens: Tensor, chunk_size: int, num_decodes: int, num_decode_tokens: int) -> ChunkSchedule:
        key = (id(cu_seqlens), chunk_size, num_decodes, num_decode_tokens)
        with self._lock:
            seen = self._seen.get(key)
            if seen is not None and seen.ref() is cu_seqlens and seen.version == cu_seqlens._version:
                self._seen.move_to_end(key)
                return seen.uploaded.on_current_stream()
        _check_cu_seqlens(cu_seqlens)
        version = _version(cu_seqlens)  # before the read: an edit in between must miss next time
        lengths = _lengths_of(cu_seqlens.tolist())
        num_decodes, num_decode_tokens = _check_partition(lengths, chunk_size, num_decodes, num_decode_tokens)
        uploaded = self._get_by_value(lengths, num_decodes, num_decode_tokens, cu_seqlens.device)
        if version is not None:
            # The callback takes no lock: garbage collection may run it in a thread that holds the lock already.
            ref = weakref.ref(cu_seqlens, lambda _: self._seen.pop(key, None))
            with self._lock:
                _put(self._seen, key, _Seen(ref, version, uploaded))
        return uploaded.on_current_stream()

    def _get_by_value(
        self, lengths: tuple[int, ...], num_decodes: int, num_decode_tokens: int, device: torch.device
    ) -> _Uploaded:
        key = (lengths, num_decodes, num_decode_tokens, device)
        with self._lock:
            uploaded = self._by_value.get(key)
            if uploaded is not None:
                self._by_value.move_to_end(key)
                return uploaded
        schedule, _ = _upload(lengths, num_decodes, num_decode_tokens, device)
        uploaded = _Uploaded(schedule, device)
        with self._lock:
            _put(self._by_value, key, uploaded)
        return uploaded

    def clear(self) -> None:
        with self._lock:
            self._seen.clear()
            self._by_value.clear()


def _put(entries: OrderedDict[tuple[Hashable, ...], _Entry], key: tuple[Hashable, ...], value: _Entry) -> None:
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > CACHE_ENTRIES:
        entries.popitem(last=False)


_cache = _ScheduleCache()


def _upload(
    lengths: tuple[int, ...], num_decodes: int, num_decode_tokens: int, device: torch.device
) -> tuple[ChunkSchedule, Tensor]:
    """The schedule and the full offsets (int32 [N + 1]) of checked lengths, as slices of one uploaded tensor."""
    chunk_counts = tuple([(length + CHUNK - 1) // CHUNK for length in lengths[num_decodes:]])
    full = list(accumulate(lengths, initial=0))
    rows = (list(accumulate(chunk_counts, initial=0)), full, [at - num_decode_tokens for at in full[num_decodes:]])
    total_chunks, n_prefill = sum(chunk_counts), len(chunk_counts)
    sizes = (total_chunks, total_chunks, *map(len, rows))
    *starts, packed_size = accumulate((cdiv(size, _ALIGN) * _ALIGN for size in sizes), initial=0)
    parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    # A cached or shared schedule must not be an inference tensor because its first user ran in inference mode.
    # device="cpu": the caller may have set another default device.
    with torch.inference_mode(False):
        host = torch.zeros(packed_size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        for part, row in zip(parts[2:], rows, strict=True):
            host[part].copy_(torch.frombuffer(array("i", row), dtype=torch.int32))  # 10 times as fast as torch.tensor
        sequence_ids, chunk_ids, chunk_offsets = (host[part] for part in parts[:3])
        sequence_ids.copy_(torch.repeat_interleave(chunk_offsets.diff(), output_size=total_chunks))
        torch.arange(total_chunks, dtype=torch.int32, device="cpu", out=chunk_ids)
        chunk_ids.sub_(chunk_offsets.index_select(0, sequence_ids))
        # The pinned block may be dropped at once: torch's caching host allocator hands it out again only after the
        # event that a non-blocking copy records on its stream.
        packed = host.to(device, non_blocking=True)
        sequence_ids, chunk_ids, chunk_offsets, offsets, rebased = (packed[part] for part in parts)
    grid = ChunkGrid(CHUNK, total_chunks, max(chunk_counts), chunk_counts, sequence_ids, chunk_ids)
    total = full[-1] - num_decode_tokens
    schedule = ChunkSchedule(CHUNK, num_decodes, num_decode_tokens, n_prefill, total, grid, chunk_offsets, rebased)
    return schedule, offsets


def _refuse_capture(caller: str, cu_seqlens: Tensor) -> None:
    if _is_capturing(cu_seqlens):
        raise RuntimeError(
            f"{caller}: got a call during CUDA graph capture, expected prefill_metadata built before the capture "
            "(build_prefill_metadata) and handed to the captured call"
        )


def _is_capturing(cu_seqlens: Tensor) -> bool:
    if not torch.cuda.is_initialized():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    if not isinstance(cu_seqlens, Tensor) or not cu_seqlens.is_cuda:
        return False
    with torch.cuda.device(cu_seqlens.device):
        return torch.cuda.is_current_stream_capturing()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _check_cu_seqlens(cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise type_error("cu_seqlens", type(cu_seqlens).__name__, "a tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise type_error("cu_seqlens.dtype", cu_seqlens.dtype, "torch.int32 or torch.int64")
    if cu_seqlens.dim() != 1:
        raise value_error("cu_seqlens", f"{cu_seqlens.dim()} dimensions", "1")
    if cu_seqlens.device.type not in ("cpu", "cuda"):
        raise UnsupportedError("cu_seqlens.device", got=cu_seqlens.device, supported=("cpu", "cuda"))


def _host_lengths(seq_lens_cpu: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(seq_lens_cpu, Tensor):
        if seq_lens_cpu.device.type != "cpu":
            raise value_error("seq_lens_cpu", f"a tensor on {seq_lens_cpu.device}", "host lengths")
        if seq_lens_cpu.dtype.is_floating_point or seq_lens_cpu.dtype.is_complex or seq_lens_cpu.dtype == torch.bool:
            raise type_error("seq_lens_cpu.dtype", seq_lens_cpu.dtype, "an integer dtype")
        if seq_lens_cpu.dim() != 1:
            raise value_error("seq_lens_cpu", f"{seq_lens_cpu.dim()} dimensions", "1")
        seq_lens_cpu = seq_lens_cpu.tolist()
    if not hasattr(seq_lens_cpu, "__iter__"):
        raise type_error("seq_lens_cpu", type(seq_lens_cpu).__name__, "a sequence of ints or a CPU integer tensor")
    lengths = tuple(seq_lens_cpu)
    if not set(map(type, lengths)) <= {int}:
        lengths = tuple(_host_int(f"seq_lens_cpu[{i}]", length) for i, length in enumerate(lengths))
    if not lengths:
        raise value_error("seq_lens_cpu", "no sequence", "at least one")
    if min(lengths) < 0:
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise value_error(f"seq_lens_cpu[{at}]", lengths[at], ">= 0")
    if sum(lengths) > INT32_MAX:
        raise value_error("sum of seq_lens_cpu", sum(lengths), f"at most {INT32_MAX} (kernels count in int32)")
    return lengths


def _lengths_of(offsets: list[int]) -> tuple[int, ...]:
    if len(offsets) < 2:
        raise value_error("cu_seqlens.numel()", len(offsets), "at least 2")
    if offsets[0] != 0:
        raise value_error("cu_seqlens[0]", offsets[0], "0")
    lengths = tuple(end - start for start, end in pairwise(offsets))
    if min(lengths) < 0:
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise value_error(f"cu_seqlens[{at + 1}]", offsets[at + 1], f"at least cu_seqlens[{at}] = {offsets[at]}")
    if offsets[-1] > INT32_MAX:
        raise value_error("cu_seqlens[-1]", offsets[-1], f"at most {INT32_MAX} (kernels count in int32)")
    return lengths


def _check_partition(
    lengths: tuple[int, ...], chunk_size: int, num_decodes: int, num_decode_tokens: int
) -> tuple[int, int]:
    """The decode prefix as plain ints, if chunk size and prefix fit the lengths."""
    chunk_size = _host_int("chunk_size", chunk_size)
    if chunk_size <= 0:
        raise value_error("chunk_size", chunk_size, str(CHUNK))
    if chunk_size != CHUNK:
        raise UnsupportedError("chunk_size", got=chunk_size, supported=(CHUNK,))
    num_decodes = _host_int("num_decodes", num_decodes)
    if not 0 <= num_decodes < len(lengths):
        raise value_error("num_decodes", num_decodes, f"0 to {len(lengths) - 1} (at least one prefill sequence)")
    num_decode_tokens = _host_int("num_decode_tokens", num_decode_tokens)
    expected = sum(lengths[:num_decodes])
    if num_decode_tokens != expected:
        raise value_error(
            "num_decode_tokens", num_decode_tokens, f"{expected}, the tokens of the first {num_decodes} sequences"
        )
    return num_decodes, num_decode_tokens


def _host_int(name: str, value: object) -> int:
    if type(value) is int:
        return value
    # A bool is a mask in the wrong place, and int() of a device tensor would wait for the device.
    if isinstance(value, bool | Tensor) or not hasattr(value, "__index__"):
        raise type_error(name, value if isinstance(value, bool | float | str) else type(value).__name__, "an int")
    return operator.index(value)


def _short_token_axis(total_tokens: int, needed: int) -> ValueError:
    return value_error("length of the token axis", total_tokens, f"at least {needed} prefill tokens")
