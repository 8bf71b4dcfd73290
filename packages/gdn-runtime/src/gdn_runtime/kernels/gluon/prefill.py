"""The fast path of the block on sm90: prepare, and a scan that writes the output itself."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import torch
from triton.runtime import driver

from ...errors import CaptureError
from ...spec import CHUNK, HEAD_DIM
from .common import RAGGED
from .inverse import PAIRS
from .launch import COMBINE_ROWS, Kernels, Tiles, load

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import ChunkPlan
    from ...spec import FastPrefillSpec

_MAX_OFFSET = 0x7FFF0000
"""Bound of the first two coordinates of a varlen descriptor."""


class _Loaded:
    """Kernels by spec, device and what else their code depends on. Thread safe."""

    def __init__(self) -> None:
        # By identity of the spec: its hash takes 2 us. The spec is kept beside its kernels, so no other has its id.
        self._known: dict[tuple[int, int, bool, int], tuple[FastPrefillSpec, Kernels]] = {}
        self._lock = threading.Lock()

    def __call__(
        self, spec: FastPrefillSpec, device: torch.device, states_on_16_bytes: bool, indices: Tensor | None
    ) -> Kernels:
        """The kernels of ``spec``, compiled and loaded at the first call. ``device`` is current. CaptureError if they
        are not there and a stream is being captured."""
        index_bytes = 0 if indices is None else indices.element_size()
        key = (id(spec), device.index, states_on_16_bytes, index_bytes)
        found = self._known.get(key)
        if found is None:
            with self._lock:
                found = self._known.get(key)
                if found is None:
                    if torch.cuda.is_current_stream_capturing():
                        raise CaptureError("compiling the kernels of the fast path")
                    index_type = "*i64" if index_bytes == 8 else "*i32"
                    found = spec, load(spec, states_on_16_bytes=states_on_16_bytes, index_type=index_type)
                    self._known[key] = found
        return found[1]

    def __len__(self) -> int:
        return len(self._known)


LOADED = _Loaded()


def _strides(x: Tensor) -> tuple[int, int, int] | None:
    """(batch, token, head) strides in elements of rows x [B, T, heads, 128] that the copy engine can address, axes of
    one element set to something harmless; None if it cannot."""
    batch, token, head, _ = x.stride()
    batches, tokens, heads, _ = x.shape
    if heads == 1:
        head = HEAD_DIM
    if tokens == 1:
        token = heads * head
    if batches == 1:
        batch = tokens * token
    if x.data_ptr() & 15 or (batch | token | head) & 7 or min(batch, token, head) < HEAD_DIM:
        return None
    return batch, token, head


def _rows(x: Tensor, is_varlen: bool) -> tuple[Tensor, Tiles]:
    """``x`` [B, T, heads, 128], or a contiguous copy of it if the copy engine cannot address its rows, and the
    descriptor of its tiles of rows (see ``common.sequence_coordinates``)."""
    strides = _strides(x)
    if strides is None:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = _strides(x)
        assert strides is not None, "a contiguous tensor of 128-element rows"
    batch, token, head = strides
    batches, tokens, heads, _ = x.shape
    if is_varlen:
        shape = (_MAX_OFFSET, _MAX_OFFSET, RAGGED.value, heads, HEAD_DIM)
        return x, Tiles(x, shape, (2**34 - token, token, token, head, 1))
    return x, Tiles(x, (1, batches, tokens, heads, HEAD_DIM), (batch, batch, token, head, 1))


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    o: Tensor,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    scale: float,
    plan: ChunkPlan,
    spec: FastPrefillSpec,
) -> None:
    """Launch the block on the current stream of the current device, that of the data: q, k [B,T,Hg,128], v [B,T,H,128],
    g fp32 and beta [B,T,H] -> o [B,T,H,128] and ``final_state``. Rows past a sequence are neither read into a result
    nor written. ``final_state`` may be ``initial_state``: all of it is read before any of it is written. Raises
    CaptureError, before anything is allocated, if a stream is being captured and the kernels are not loaded."""
    num_heads, chunks, is_varlen = spec.num_heads, plan.total_chunks, plan.is_varlen
    in_stride, out_stride = (0 if x is None else x.stride(0) for x in (initial_state, final_state))
    on_16_bytes = not (in_stride | out_stride) & 7 and not any(
        x.data_ptr() & 15 for x in (initial_state, final_state) if x is not None
    )
    kernels = LOADED(spec, v.device, on_16_bytes, state_indices)
    if scale < 0:  # the scan takes its logarithm
        q, scale = -q, -scale
    factors = (scale, math.log2(scale) if scale else -math.inf)
    q, q_tiles = _rows(q, is_varlen)
    k, k_tiles = _rows(k, is_varlen)
    _, v_tiles = _rows(v, is_varlen)
    out = o if _strides(o) is not None else torch.empty_like(o, memory_format=torch.contiguous_format)
    _, o_tiles = _rows(out, is_varlen)
    size = chunks * num_heads * CHUNK
    t = v.new_empty(size, CHUNK)
    p = t if spec.p_in_scan else torch.empty_like(t)
    gates = v.new_empty(3 * size, dtype=torch.float32)
    t_tiles, p_tiles = (Tiles(x, (size, CHUNK), (CHUNK, 1)) for x in (t, p))

    pool = initial_state if initial_state is not None else final_state
    slots = 0 if pool is None else pool.shape[0]
    unit = 8 if on_16_bytes else 1
    in_stride, out_stride = in_stride // unit, out_stride // unit
    initial, final, indices, mask, cu_seqlens, chunk_offsets, sequence_ids, chunk_ids = (
        gates if x is None else x
        for x in (
            initial_state,
            final_state,
            state_indices,
            has_initial_state,
            plan.cu_seqlens,
            plan.chunk_offsets,
            plan.sequence_ids,
            plan.chunk_ids,
        )
    )
    stream = driver.active.get_current_stream(v.device.index)
    lengths = (plan.seq_len, plan.max_seq_chunks)

    tables = (cu_seqlens, sequence_ids, chunk_ids)
    if spec.p_in_scan:
        heads = spec.heads_per_program
        programs = -(-chunks * heads // PAIRS.value) * (num_heads // heads)
        kernels.prepare(
            programs, stream, k_tiles, t_tiles, g, beta, gates, *tables, chunks, *lengths, *g.stride(), *beta.stride()
        )
    else:
        strides = (*(stride // 8 for x in (q, k) for stride in _strides(x)), *g.stride(), *beta.stride())
        kernels.prepare(chunks * num_heads, stream, q, k, g, beta, t, p, gates, *tables, *lengths, *strides, scale)

    tiles = (q_tiles, k_tiles, v_tiles, o_tiles, t_tiles, p_tiles, Tiles(gates, (3 * size,), (1,)))
    offsets = (cu_seqlens, chunk_offsets)
    scans = plan.num_seqs * num_heads
    if kernels.transfer is None or kernels.combine is None:
        numbers = (*lengths, 1, slots, in_stride, out_stride, *factors)
        kernels.scan(2 * scans, stream, *tiles, initial, final, indices, mask, *offsets, *numbers)
    else:
        segments = -(-plan.max_seq_chunks // spec.segment_chunks)
        state = num_heads * HEAD_DIM * HEAD_DIM
        starts = gates.new_empty(plan.num_seqs * segments * state)
        maps = gates.new_empty(2 * plan.num_seqs * segments * state)
        numbers = (*lengths, segments, slots, 0, 2 * state // 8, *factors)
        kernels.transfer(4 * scans * segments, stream, *tiles, starts, maps, gates, gates, *offsets, *numbers)
        numbers = (plan.seq_len, segments, slots, in_stride)
        kernels.combine(
            HEAD_DIM // COMBINE_ROWS * scans, stream, maps, starts, initial, indices, mask, cu_seqlens, *numbers
        )
        numbers = (*lengths, segments, slots, state // unit, out_stride, *factors)
        kernels.scan(2 * scans * segments, stream, *tiles, starts, final, indices, gates, *offsets, *numbers)
    if out is not o:
        o[:, : plan.num_tokens] = out[:, : plan.num_tokens]
