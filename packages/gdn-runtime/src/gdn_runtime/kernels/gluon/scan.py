"""The serial scan over chunks with the output formed on the way.

A program owns 64 value rows of one state S [V, K], fp32, as the accumulator of a wgmma. Every product that touches the
state takes its state-side operand from registers (an accumulator rounded to 16 bits keeps its lane layout) and its
token-side operand from the tile that the copy engine left in shared memory, so that S, x, v_new and o never pass
through shared memory on the serial chain. With G the chunk-local sum of the gates and T' = (I + A)^-1 diag(beta)::

    x = v^T - exp(G) (S k^T)          v_new^T = x T'^T
    S <- exp(G_last) S + (exp(G_last - G) v_new^T) k
    o^T = scale exp(G) (S_old q^T) + v_new^T P^T,   P = scale tril(exp(G_i - G_j) q k^T)

Rows past a sequence's end are zero in every tile (see ``common.RAGGED``), also in T' and P.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import CHUNK, HEAD_DIM, sequence_coordinates

ROWS = gl.constexpr(64)
"""Value rows of the state per program: the least that a wgmma takes."""

TILE_BYTES = gl.constexpr(64 * 64 * 2)
KEY_BYTES = gl.constexpr(64 * 128 * 2)
GATE_BYTES = gl.constexpr(64 * 4)


@gluon.jit
def _opaque(x):
    """``x``, of which the compiler knows nothing: it would keep comparisons with constants as bits over the loop, and
    take twice as many instructions to unpack them as to compare again."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _state_slot(sequence, state_indices, num_slots, USE_INDICES: gl.constexpr):
    """(slot, whether the sequence owns it)."""
    if USE_INDICES:
        slot = gl.load(state_indices + sequence).to(gl.int64)
        owned = (slot >= 0) & (slot < num_slots)
        return gl.where(owned, slot, 0), owned
    else:
        slot = sequence.to(gl.int64)
        return slot, slot >= 0


@gluon.jit
def _expect_gates(gate_bars, decay_bars, last_bars, stage, pred):
    mbarrier.expect(gate_bars.index(stage), GATE_BYTES, pred=pred)
    mbarrier.expect(decay_bars.index(stage), GATE_BYTES, pred=pred)
    mbarrier.expect(last_bars.index(stage), GATE_BYTES, pred=pred)


@gluon.jit
def _fetch_gates(g_desc, tile, gate_bars, decay_bars, last_bars, gate_rows, decay_rows, last_rows, stage, pred):
    """G, exp(G) and exp(G_last - G) of the chunk and head whose tiles start at row ``tile``."""
    at = 3 * tile
    tma.async_copy_global_to_shared(g_desc, [at], gate_bars.index(stage), gate_rows.index(stage), pred=pred)
    at += CHUNK
    tma.async_copy_global_to_shared(g_desc, [at], decay_bars.index(stage), decay_rows.index(stage), pred=pred)
    at += CHUNK
    tma.async_copy_global_to_shared(g_desc, [at], last_bars.index(stage), last_rows.index(stage), pred=pred)


@gluon.jit
def _await_gates(gate_bars, decay_bars, last_bars, stage, phase, pred):
    mbarrier.wait(gate_bars.index(stage), phase, pred=pred)
    mbarrier.wait(decay_bars.index(stage), phase, pred=pred)
    mbarrier.wait(last_bars.index(stage), phase, pred=pred)


@gluon.jit
def _scores(q_tile, k_tile, zero):
    """q k^T of a chunk, in flight."""
    k_t = k_tile.reshape([CHUNK, HEAD_DIM]).permute([1, 0])
    return warpgroup_mma(q_tile.reshape([CHUNK, HEAD_DIM]), k_t, zero, use_acc=False, is_async=True)


@gluon.jit
def _start(s, k_tile, zero):
    """(S as a left operand, S k^T in flight)."""
    left: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
    s16 = gl.convert_layout(s.to(k_tile.dtype), left)
    k_t = k_tile.reshape([CHUNK, HEAD_DIM]).permute([1, 0])
    return s16, warpgroup_mma(s16, k_t, zero, use_acc=False, is_async=True)


@gluon.jit
def _form_p(pending, gate, p_tile, log2_scale):
    """scale P from q k^T, which is done when all but the youngest product are, into ``p_tile``."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    per_token: gl.constexpr = gl.SliceLayout(0, acc)
    per_row: gl.constexpr = gl.SliceLayout(1, acc)
    p = warpgroup_mma_wait(1, [pending])
    lower = _opaque(gl.arange(0, CHUNK, per_row))[:, None] >= gl.arange(0, CHUNK, per_token)[None, :]
    row_gate = gate.load(per_row) + log2_scale
    exponent = gl.where(lower, row_gate[:, None] - gate.load(per_token)[None, :], float("-inf"))
    p_tile.store((p * gl.exp2(exponent)).to(p_tile.dtype))


@gluon.jit
def _finish(sk, v_tile, decay, to_last, part, TRANSFER: gl.constexpr):
    """(x as a left operand, exp(G), exp(G_last - G), exp(G_last)) once S k^T in ``sk`` is there."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    per_token: gl.constexpr = gl.SliceLayout(0, acc)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    v_t = v_tile.reshape([CHUNK, ROWS]).permute([1, 0]).load(acc).to(gl.float32)
    if TRANSFER:
        v_t = gl.where(part < 2, v_t, 0.0)
    decay_all = gl.max(decay.slice(CHUNK - 1, 1).load(one), 0)
    decay = decay.load(per_token)
    to_last = to_last.load(per_token)
    sk = warpgroup_mma_wait(0, [sk])
    x = gl.convert_layout((v_t - decay[None, :] * sk).to(v_tile.dtype), gl.DotOperandLayout(0, acc, 2))
    return x, decay, to_last, decay_all


@gluon.jit(
    do_not_specialize=["seq_len", "seq_chunks", "segments", "num_slots", "stride_in", "stride_out"],
    do_not_specialize_on_alignment=["state_indices", "has_initial_state"],
)
def scan_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    t_desc,
    p_desc,
    g_desc,
    initial_state,
    final_state,
    state_indices,
    has_initial_state,
    cu_seqlens,
    chunk_offsets,
    seq_len: tl.int32,
    seq_chunks: tl.int32,
    segments: tl.int32,
    num_slots: tl.int64,
    stride_in: tl.int64,
    stride_out: tl.int64,
    scale: tl.float32,
    log2_scale: tl.float32,
    H: gl.constexpr,
    HG: gl.constexpr,
    STATE_UNIT: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    USE_INITIAL_STATE: gl.constexpr,
    STORE_FINAL_STATE: gl.constexpr,
    USE_INDICES: gl.constexpr,
    USE_STATE_MASK: gl.constexpr,
    SEGMENT: gl.constexpr,
    TRANSFER: gl.constexpr,
    FORM_P: gl.constexpr,
):
    """One program per sequence, value head and 64 value rows.

    SEGMENT > 0: per segment of that many chunks too, ``segments`` of them per sequence, some of which may not exist.
    The states that segments start from are in ``initial_state`` [N, segments, H, 128, 128] fp32 then; the last segment
    of a sequence stores its final state. TRANSFER: no output, and 256 rows per segment instead of 128, the states that
    it makes of zero (with its values) and of the unit matrix (without them), into ``final_state`` [N, segments, H, 256,
    128] fp32; nothing for the last segment of a sequence. FORM_P: P is formed here, ``p_desc`` is not used.
    """
    PARTS: gl.constexpr = 4 if TRANSFER else 2
    dtype: gl.constexpr = k_desc.dtype
    acc_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    left_s: gl.constexpr = gl.DotOperandLayout(0, acc_s, 2)
    LOAD_P: gl.constexpr = not (TRANSFER or FORM_P)

    pid = gl.program_id(0)
    part = pid % PARTS
    head = pid // PARTS % H
    item = pid // (PARTS * H)
    sequence = item
    if SEGMENT > 0:
        sequence = item // segments
    if IS_VARLEN:
        bos = gl.load(cu_seqlens + sequence)
        length = gl.load(cu_seqlens + sequence + 1) - bos
        first = gl.load(chunk_offsets + sequence)
    else:
        bos = sequence * 0
        length = seq_len
        first = sequence * seq_chunks
    c0, c1, row = sequence_coordinates(bos, length, sequence, IS_VARLEN)
    chunks = gl.cdiv(length, CHUNK)
    slot, owned = _state_slot(sequence, state_indices, num_slots, USE_INDICES)
    readable = owned
    if USE_STATE_MASK:
        readable = readable & (gl.load(has_initial_state + sequence) != 0)
    source = slot
    if SEGMENT > 0:
        begin = item % segments * SEGMENT
        last_segment = (begin < chunks) & (begin + SEGMENT >= chunks) | (begin == 0) & (chunks == 0)
        source = item.to(gl.int64)
        readable = (begin < chunks) | (begin == 0)
        if TRANSFER:
            slot = source
            chunks = gl.where(begin + SEGMENT < chunks, SEGMENT, 0)
            owned = chunks > 0
        else:
            owned = owned & last_segment
            chunks = gl.maximum(gl.minimum(chunks - begin, SEGMENT), 0)
        first += begin
        row += begin * CHUNK
    key_head = head // (H // HG)
    column = (part % 2) * ROWS
    tile_row = (first * H + head) * CHUNK

    k_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, 1, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, 1, ROWS], v_desc.layout)
    t_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, CHUNK], t_desc.layout)
    # With an output, two stages of gates would be 600 bytes more than two programs of an SM can have.
    G_STAGES: gl.constexpr = 2 if TRANSFER else 1
    # Allocations of their own, here and for the barriers of each kind of tile: the compiler puts a barrier of all warps
    # between two accesses to one allocation of which one writes.
    gate_rows = gl.allocate_shared_memory(gl.float32, [G_STAGES, CHUNK], g_desc.layout)
    decay_rows = gl.allocate_shared_memory(gl.float32, [G_STAGES, CHUNK], g_desc.layout)
    last_rows = gl.allocate_shared_memory(gl.float32, [G_STAGES, CHUNK], g_desc.layout)
    gate_bars = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    decay_bars = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    last_bars = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(G_STAGES):
        mbarrier.init(gate_bars.index(i), count=1)
        mbarrier.init(decay_bars.index(i), count=1)
        mbarrier.init(last_bars.index(i), count=1)
    k_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    t_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(k_bars.index(i), count=1)
        mbarrier.init(v_bars.index(i), count=1)
        mbarrier.init(t_bars.index(i), count=1)
    p_tile = t_tiles.index(0)  # a placeholder in the passes that have no output
    if not TRANSFER:
        q_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, 1, HEAD_DIM], q_desc.layout)
        p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], t_desc.layout)
        o_tile = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, 1, ROWS], o_desc.layout)
        q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        p_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(p_bar, count=1)
        for i in gl.static_range(2):
            mbarrier.init(q_bars.index(i), count=1)
    fence_async_shared()

    for i in gl.static_range(2):
        some = i < chunks
        mbarrier.expect(k_bars.index(i), KEY_BYTES, pred=some)
        mbarrier.expect(v_bars.index(i), TILE_BYTES, pred=some)
        if i < G_STAGES:
            _expect_gates(gate_bars, decay_bars, last_bars, i, some)
        mbarrier.expect(t_bars.index(i), TILE_BYTES, pred=some)
        if not TRANSFER:
            mbarrier.expect(q_bars.index(i), KEY_BYTES, pred=some)
    if LOAD_P:
        mbarrier.expect(p_bar, TILE_BYTES, pred=chunks > 0)
    for i in gl.static_range(2):
        some = i < chunks
        at = row + i * CHUNK
        tile = tile_row + i * (H * CHUNK)
        tma.async_copy_global_to_shared(k_desc, [c0, c1, at, key_head, 0], k_bars.index(i), k_tiles.index(i), pred=some)
        tma.async_copy_global_to_shared(
            v_desc, [c0, c1, at, head, column], v_bars.index(i), v_tiles.index(i), pred=some
        )
        if i < G_STAGES:
            _fetch_gates(g_desc, tile, gate_bars, decay_bars, last_bars, gate_rows, decay_rows, last_rows, i, some)
        tma.async_copy_global_to_shared(t_desc, [tile, 0], t_bars.index(i), t_tiles.index(i), pred=some)
        if not TRANSFER:
            tma.async_copy_global_to_shared(
                q_desc, [c0, c1, at, key_head, 0], q_bars.index(i), q_tiles.index(i), pred=some
            )
    if LOAD_P:
        tma.async_copy_global_to_shared(p_desc, [tile_row, 0], p_bar, p_tile, pred=chunks > 0)

    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc_s))[:, None]
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc_s))[None, :]
    if TRANSFER:
        s = gl.where((part >= 2) & (column + rows == columns), 1.0, gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_s))
    elif USE_INITIAL_STATE:
        initial_state += source * stride_in * STATE_UNIT + (head * HEAD_DIM + column) * HEAD_DIM
        s = gl.load(initial_state + rows * HEAD_DIM + columns, mask=(rows >= 0) & readable, other=0.0).to(gl.float32)
    else:
        s = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_s)

    zero = gl.zeros([ROWS, CHUNK], gl.float32, acc)
    if not TRANSFER:
        some = chunks > 0
        mbarrier.wait(k_bars.index(0), 0, pred=some)
        pending = zero
        mbarrier.wait(q_bars.index(0), 0, pred=some)
        if FORM_P:
            pending = _scores(q_tiles.index(0), k_tiles.index(0), zero)
        mbarrier.wait(v_bars.index(0), 0, pred=some)
        mbarrier.wait(t_bars.index(0), 0, pred=some)
        _await_gates(gate_bars, decay_bars, last_bars, 0, 0, some)
        s16, sk = _start(s, k_tiles.index(0), zero)
        if FORM_P:
            _form_p(pending, gate_rows.index(0), p_tile, log2_scale)
        x, decay, to_last, decay_all = _finish(
            sk, v_tiles.index(0), decay_rows.index(0), last_rows.index(0), part, TRANSFER
        )
    gl.thread_barrier()
    for c in range(chunks):
        stage = c & 1
        phase = (c >> 1) & 1
        k_tile = k_tiles.index(stage).reshape([CHUNK, HEAD_DIM])
        if TRANSFER:
            # At the top, not at the end of the turn before: ptxas would serialise the products of this form.
            mbarrier.wait(k_bars.index(stage), phase)
            mbarrier.wait(v_bars.index(stage), phase)
            mbarrier.wait(t_bars.index(stage), phase)
            _await_gates(gate_bars, decay_bars, last_bars, stage, phase, True)
            s16, sk = _start(s, k_tiles.index(stage), zero)
            x, decay, to_last, decay_all = _finish(
                sk, v_tiles.index(stage), decay_rows.index(stage), last_rows.index(stage), part, TRANSFER
            )
        vn = warpgroup_mma(x, t_tiles.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = s * decay_all
        if TRANSFER:
            vn = warpgroup_mma_wait(0, [vn])
        else:
            q_tile = q_tiles.index(stage).reshape([CHUNK, HEAD_DIM])
            sq = warpgroup_mma(s16, q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
            vn = warpgroup_mma_wait(1, [vn])
        gated = gl.convert_layout((vn * to_last[None, :]).to(dtype), left_s)
        s = warpgroup_mma(gated, k_tile, s, is_async=True)
        next_stage = stage ^ 1
        next_phase = (c + 1 >> 1) & 1
        some = c + 1 < chunks
        more = c + 2 < chunks
        at = row + (c + 2) * CHUNK
        tile = tile_row + (c + 2) * (H * CHUNK)
        if TRANSFER:
            s = warpgroup_mma_wait(0, [s])
        else:
            new = gl.convert_layout(vn.to(dtype), left)
            # The compiler keeps all warps in step (a barrier) between a wait and an expect of one kind of tile, between
            # an expect and the copy, and between a copy and a use of that kind of tile, whatever the stages. This order
            # makes that three barriers per turn: here, behind store_wait, and before o is stored.
            mbarrier.wait(k_bars.index(next_stage), next_phase, pred=some)
            mbarrier.wait(q_bars.index(next_stage), next_phase, pred=some)
            if LOAD_P:
                mbarrier.wait(p_bar, c & 1)
            mbarrier.expect(v_bars.index(stage), TILE_BYTES, pred=more)
            mbarrier.expect(t_bars.index(stage), TILE_BYTES, pred=more)
            _expect_gates(gate_bars, decay_bars, last_bars, 0, some)
            if FORM_P:
                fence_async_shared()  # P was stored long ago by now, so nobody waits
            tma.store_wait(0)
            tma.async_copy_global_to_shared(
                v_desc, [c0, c1, at, head, column], v_bars.index(stage), v_tiles.index(stage), pred=more
            )
            tma.async_copy_global_to_shared(t_desc, [tile, 0], t_bars.index(stage), t_tiles.index(stage), pred=more)
            at_g = tile - H * CHUNK
            _fetch_gates(g_desc, at_g, gate_bars, decay_bars, last_bars, gate_rows, decay_rows, last_rows, 0, some)
            sq = warpgroup_mma_wait(1, [sq])
            o = warpgroup_mma(new, p_tile.permute([1, 0]), sq * (decay * scale)[None, :], is_async=True)
            if FORM_P:
                # The next chunk's q k^T, where the tensor cores would wait for o to be stored.
                pending = _scores(q_tiles.index(next_stage), k_tiles.index(next_stage), zero)
                s, o = warpgroup_mma_wait(1, [s, o])
            else:
                s, o = warpgroup_mma_wait(0, [s, o])
            o_tile.reshape([CHUNK, ROWS]).permute([1, 0]).store(o.to(dtype))
            # Behind the last chunk this meets stale tiles; nobody looks at the result.
            s16, sk = _start(s, k_tiles.index(next_stage), zero)
            fence_async_shared()
        mbarrier.expect(k_bars.index(stage), KEY_BYTES, pred=more)
        if TRANSFER:
            mbarrier.expect(t_bars.index(stage), TILE_BYTES, pred=more)
            mbarrier.expect(v_bars.index(stage), TILE_BYTES, pred=more)
            _expect_gates(gate_bars, decay_bars, last_bars, stage, more)
        else:
            mbarrier.expect(q_bars.index(stage), KEY_BYTES, pred=more)
            if LOAD_P:
                mbarrier.expect(p_bar, TILE_BYTES, pred=some)
                tma.async_copy_global_to_shared(p_desc, [tile - H * CHUNK, 0], p_bar, p_tile, pred=some)
            tma.async_copy_shared_to_global(o_desc, [c0, c1, at - 2 * CHUNK, head, column], o_tile)
            tma.async_copy_global_to_shared(
                q_desc, [c0, c1, at, key_head, 0], q_bars.index(stage), q_tiles.index(stage), pred=more
            )
        tma.async_copy_global_to_shared(
            k_desc, [c0, c1, at, key_head, 0], k_bars.index(stage), k_tiles.index(stage), pred=more
        )
        if TRANSFER:
            tma.async_copy_global_to_shared(t_desc, [tile, 0], t_bars.index(stage), t_tiles.index(stage), pred=more)
            tma.async_copy_global_to_shared(
                v_desc, [c0, c1, at, head, column], v_bars.index(stage), v_tiles.index(stage), pred=more
            )
            _fetch_gates(g_desc, tile, gate_bars, decay_bars, last_bars, gate_rows, decay_rows, last_rows, stage, more)
        else:
            mbarrier.wait(v_bars.index(next_stage), next_phase, pred=some)
            mbarrier.wait(t_bars.index(next_stage), next_phase, pred=some)
            _await_gates(gate_bars, decay_bars, last_bars, 0, c + 1 & 1, some)
            if FORM_P:
                _form_p(pending, gate_rows.index(0), p_tile, log2_scale)
            x, decay, to_last, decay_all = _finish(
                sk, v_tiles.index(next_stage), decay_rows.index(0), last_rows.index(0), part, TRANSFER
            )
    if not TRANSFER:
        tma.store_wait(0)
    if STORE_FINAL_STATE:
        tile_rows = (head * (PARTS // 2) + part // 2) * HEAD_DIM + column
        final_state += slot * stride_out * STATE_UNIT + tile_rows * HEAD_DIM
        gl.store(final_state + rows * HEAD_DIM + columns, s.to(final_state.dtype.element_ty), mask=(rows >= 0) & owned)
