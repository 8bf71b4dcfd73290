"""The states that the segments of a sequence start from: S <- S M + N, segment by segment.

A segment of chunks acts on the state as an affine map, whose parts the scan forms for all segments at a time: N is what
it makes of zero, M of the unit matrix with its values left out. Rows of S are independent of each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import spec

HEAD_DIM = tl.constexpr(spec.HEAD_DIM)
CHUNK = tl.constexpr(spec.CHUNK)


@triton.jit(
    do_not_specialize=["seq_len", "segments", "num_slots", "stride_in"],
    do_not_specialize_on_alignment=["state_indices", "has_initial_state", "cu_seqlens"],
)
def combine_kernel(
    maps,
    starts,
    initial_state,
    state_indices,
    has_initial_state,
    cu_seqlens,
    seq_len: tl.int32,
    segments: tl.int32,
    num_slots: tl.int64,
    stride_in: tl.int64,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    USE_INDICES: tl.constexpr,
    USE_STATE_MASK: tl.constexpr,
):
    """``maps`` [N, segments, H, 256, 128] fp32 (N above M) -> ``starts`` [N, segments, H, 128, 128] fp32. One program
    per sequence, value head and ROWS rows."""
    PARTS: tl.constexpr = HEAD_DIM // ROWS
    pid = tl.program_id(0)
    part = pid % PARTS
    head = pid // PARTS % H
    sequence = pid // (PARTS * H)
    if IS_VARLEN:
        seq_len = tl.load(cu_seqlens + sequence + 1) - tl.load(cu_seqlens + sequence)
    mine = tl.cdiv(tl.cdiv(seq_len, CHUNK), SEGMENT)
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    tile = (part * ROWS + rows) * HEAD_DIM + columns
    if USE_INITIAL_STATE:
        slot = sequence.to(tl.int64)
        readable = slot >= 0
        if USE_INDICES:
            slot = tl.load(state_indices + sequence).to(tl.int64)
            readable = (slot >= 0) & (slot < num_slots)
            slot = tl.where(readable, slot, 0)
        if USE_STATE_MASK:
            readable = readable & (tl.load(has_initial_state + sequence) != 0)
        initial_state += slot * stride_in * STATE_UNIT + head * (HEAD_DIM * HEAD_DIM)
        s = tl.load(initial_state + tile, mask=(rows >= 0) & readable, other=0.0).to(tl.float32)
    else:
        s = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    item = (sequence * segments).to(tl.int64) * H + head
    starts += item * (HEAD_DIM * HEAD_DIM)
    maps += item * (2 * HEAD_DIM * HEAD_DIM)
    unit = tl.arange(0, HEAD_DIM)[:, None] * HEAD_DIM + columns
    tl.store(starts + tile, s)
    for _ in range(1, mine):
        n = tl.load(maps + tile)
        m = tl.load(maps + HEAD_DIM * HEAD_DIM + unit)
        s = tl.dot(s, m, n, input_precision="tf32")
        starts += H * HEAD_DIM * HEAD_DIM
        maps += H * 2 * HEAD_DIM * HEAD_DIM
        tl.store(starts + tile, s)
