"""T' = (I + A)^-1 diag(beta), G, exp(G) and exp(G_last - G) for the scan, four chunks and value heads per program.

Keys come through the copy engine, k k^T is formed once per chunk and key head, and from then on one warp owns one chunk
and value head: its 64 x 64 matrix is a grid of 16 x 16 blocks in registers, multiplied by warp-sized products, so that
no step of the inverse waits for another warp. The method is that of ``triton.prepare``: inverses of diagonal blocks are
doubled in size, 2 -> 64, with fp16 operands and fp32 sums.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ... import spec
from .common import CHUNK, HEAD_DIM, sequence_coordinates

PAIRS = gl.constexpr(4)
"""Chunks and value heads per program, one per warp."""
KEY_BYTES = gl.constexpr(64 * 128 * 2)
GATE_MIN = gl.constexpr(spec.GATE_MIN)
LOG2E = gl.constexpr(spec.LOG2E)

BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _turn(x):
    """[.., 16, 16] with each of its four 8 x 8 tiles transposed; the lane that holds a pair of elements stays."""
    x = x.reshape([PAIRS, 2, 8, 2, 8])
    return x.permute([0, 1, 4, 3, 2]).reshape([PAIRS, 16, 16])


@gluon.jit
def _exchange(x):
    """The 8 x 8 tiles of fp16 ``x``, layout BLOCK, transposed between the lanes."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _right(x):
    """fp16 ``x`` as the right operand of a product."""
    return gl.convert_layout(_turn(_exchange(x)), RIGHT, assert_trivial=True)


@gluon.jit
def _left(x):
    """fp32 ``x`` as the left operand of a product."""
    return gl.convert_layout(x.to(gl.float16), LEFT, assert_trivial=True)


@gluon.jit
def _quarters(x):
    """The four [PAIRS, n, m] quarters (00, 01, 10, 11) of [PAIRS, 2n, 2m]."""
    half: gl.constexpr = x.shape[1] // 2
    x = x.reshape([PAIRS, 2, half, 2, half]).permute([0, 2, 4, 3, 1])
    upper, lower = x.split()
    x00, x01 = upper.split()
    x10, x11 = lower.split()
    return x00, x01, x10, x11


@gluon.jit
def _whole(x00, x01, x10, x11):
    """Inverse of ``_quarters``."""
    half: gl.constexpr = x00.shape[1]
    x = gl.join(gl.join(x00, x01), gl.join(x10, x11))
    return x.permute([0, 4, 1, 3, 2]).reshape([PAIRS, 2 * half, 2 * half])


@gluon.jit
def _product(a, b):
    return mma_v2(a, b, gl.zeros([PAIRS, 16, 16], gl.float32, BLOCK))


@gluon.jit
def _couples(SIZE: gl.constexpr):
    """Where a 16 x 16 block couples two neighbouring diagonal blocks of SIZE. Single bits of lane numbers, so that the
    compiler sees which of a lane's elements share a predicate and which have none."""
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :]
    return (((i ^ j) & (16 - 2 * SIZE)) == 0) & ((i & SIZE) != 0) & ((j & SIZE) == 0)


@gluon.jit
def _double(x, minus_a, SIZE: gl.constexpr):
    """As ``triton.prepare._double`` on one 16 x 16 block: ``x`` fp32, ``minus_a`` a right operand."""
    y = gl.where(_couples(SIZE), _product(_left(x), minus_a), 0.0)
    return mma_v2(_left(y), _right(x.to(gl.float16)), x)


@gluon.jit
def _diagonal(minus_a):
    """Inverse of I + A of one 16 x 16 block, fp32, from -A as a right operand."""
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :]
    block = _exchange(gl.convert_layout(_turn(minus_a), BLOCK, assert_trivial=True)).to(gl.float32)
    x = gl.where((i ^ j) == 0, 1.0, gl.where(_couples(1), block, 0.0))
    x = _double(x, minus_a, 2)
    x = _double(x, minus_a, 4)
    return _double(x, minus_a, 8)


@gluon.jit
def _gained(x, gains, FIRST: gl.constexpr, dtype: gl.constexpr):
    """Columns of ``x`` times the gains of tokens FIRST.."""
    gain = gains.slice(FIRST, 16, dim=1).load(gl.SliceLayout(1, BLOCK))
    return (x * gain[:, None, :]).to(dtype)


@gluon.jit(
    do_not_specialize=[
        "total_chunks", "seq_len", "seq_chunks",
        "stride_gb", "stride_gt", "stride_gh", "stride_bb", "stride_bt", "stride_bh",
    ],
    do_not_specialize_on_alignment=["g", "beta", "cu_seqlens", "sequence_ids", "chunk_ids"],
)  # fmt: skip
def inverse_kernel(
    k_desc,
    t_desc,
    g,
    beta,
    g_out,
    cu_seqlens,
    sequence_ids,
    chunk_ids,
    total_chunks: tl.int32,
    seq_len: tl.int32,
    seq_chunks: tl.int32,
    stride_gb: tl.int64,
    stride_gt: tl.int32,
    stride_gh: tl.int64,
    stride_bb: tl.int64,
    stride_bt: tl.int32,
    stride_bh: tl.int64,
    H: gl.constexpr,
    HG: gl.constexpr,
    HEADS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """One program per ``HEADS`` value heads of one key head and PAIRS / HEADS consecutive chunks."""
    CHUNKS: gl.constexpr = PAIRS // HEADS
    dtype: gl.constexpr = k_desc.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.SliceLayout(1, acc)
    columns: gl.constexpr = gl.SliceLayout(0, acc)
    tokens: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])

    pid = gl.program_id(0)
    head = pid % (H // HEADS) * HEADS
    chunk = pid // (H // HEADS) * CHUNKS
    key_head = head // (H // HG)

    k_tiles = gl.allocate_shared_memory(dtype, [CHUNKS, 1, 1, CHUNK, 1, HEAD_DIM], k_desc.layout)
    tiles: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    minus_a_tiles = gl.allocate_shared_memory(gl.float16, [PAIRS, CHUNK, CHUNK], t_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    both: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gate_rows = gl.allocate_shared_memory(gl.float32, [PAIRS, CHUNK], plain)
    gain_rows = gl.allocate_shared_memory(gl.float32, [PAIRS, CHUNK], plain)
    gains = gain_rows._reinterpret(gl.float32, [PAIRS, CHUNK], both)
    bars = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CHUNKS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(CHUNKS):
        mbarrier.expect(bars.index(i), KEY_BYTES, pred=chunk + i < total_chunks)
    for i in gl.static_range(CHUNKS):
        exists = chunk + i < total_chunks
        if IS_VARLEN:
            sequence = gl.load(sequence_ids + chunk + i, mask=exists, other=0)
            first = gl.load(chunk_ids + chunk + i, mask=exists, other=0) * CHUNK
            bos = gl.load(cu_seqlens + sequence)
            length = gl.load(cu_seqlens + sequence + 1) - bos
        else:
            sequence = (chunk + i) // seq_chunks
            first = (chunk + i) % seq_chunks * CHUNK
            bos = sequence * 0
            length = seq_len
        c0, c1, row = sequence_coordinates(bos, length, sequence, IS_VARLEN)
        tma.async_copy_global_to_shared(
            k_desc, [c0, c1, row + first, key_head, 0], bars.index(i), k_tiles.index(i), pred=exists
        )

    # Gates and gains: a warp has the tokens of its own chunk and head.
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, tokens))
    mine = chunk + pair // HEADS
    exists = mine < total_chunks
    if IS_VARLEN:
        sequence = gl.load(sequence_ids + mine, mask=exists, other=0)
        first = gl.load(chunk_ids + mine, mask=exists, other=0) * CHUNK
        bos = gl.load(cu_seqlens + sequence)
        left = gl.load(cu_seqlens + sequence + 1) - bos - first
        batch = (sequence * 0).to(gl.int64)
        token = (bos + first).to(gl.int64)
    else:
        batch = (mine // seq_chunks).to(gl.int64)
        first = mine % seq_chunks * CHUNK
        left = seq_len - first
        token = first.to(gl.int64)
    row_head = head + pair % HEADS
    step = gl.arange(0, CHUNK, gl.SliceLayout(0, tokens))[None, :]
    valid = exists[:, None] & (step < left[:, None])
    g_rows = batch * stride_gb + token * stride_gt + row_head * stride_gh
    gate = gl.load(g + g_rows[:, None] + step * stride_gt, mask=valid, other=0.0)
    b_rows = batch * stride_bb + token * stride_bt + row_head * stride_bh
    gain = gl.load(beta + b_rows[:, None] + step * stride_bt, mask=valid, other=0.0).to(gl.float32)
    gate = gl.associative_scan(gl.where(gate < GATE_MIN, GATE_MIN, gate), 1, _add) * LOG2E
    gate_rows._reinterpret(gl.float32, [PAIRS, CHUNK], both).store(gate)
    gains.store(gain)
    out = g_out + ((mine.to(gl.int64) * H + row_head) * (3 * CHUNK))[:, None] + step
    gate_last = gl.max(gl.where(step == CHUNK - 1, gate, float("-inf")), 1)[:, None]
    written = exists[:, None] & (step < CHUNK)
    gl.store(out, gate, mask=written)
    gl.store(out + CHUNK, gl.exp2(gate), mask=written)
    gl.store(out + 2 * CHUNK, gl.exp2(gate_last - gate), mask=written)

    zero = gl.zeros([CHUNK, CHUNK], gl.float32, acc)
    strictly = gl.arange(0, CHUNK, rows)[:, None] > gl.arange(0, CHUNK, columns)[None, :]
    for i in gl.static_range(CHUNKS):
        mbarrier.wait(bars.index(i), 0, pred=chunk + i < total_chunks)
        key = k_tiles.index(i).reshape([CHUNK, HEAD_DIM])
        kk = warpgroup_mma(key, key.permute([1, 0]), zero, use_acc=False, is_async=True)
        kk = gl.where(strictly, warpgroup_mma_wait(0, [kk]), 0.0)
        for r in gl.static_range(HEADS):
            row_gain = gain_rows.index(i * HEADS + r).load(rows)[:, None]
            row_gate = gate_rows.index(i * HEADS + r).load(rows)[:, None]
            column_gate = gate_rows.index(i * HEADS + r).load(columns)[None, :]
            # At most 2^126, for above the diagonal, where k k^T is 0 now, the exponent has no bound.
            decay = gl.exp2(gl.minimum(row_gate - column_gate, 126.0))
            minus_a = (0.0 - row_gain) * kk * decay
            minus_a_tiles.index(i * HEADS + r).store(minus_a.to(gl.float16))

    wide: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2)
    a00, _, a10, a11 = _quarters(minus_a_tiles._reinterpret(gl.float16, [PAIRS, CHUNK, CHUNK], tiles).load(wide))
    b00, _, b10, b11 = _quarters(a00)
    b20, b21, b30, b31 = _quarters(a10)
    b22, _, b32, b33 = _quarters(a11)
    b00, b10, b11 = _operand(b00), _operand(b10), _operand(b11)
    b20, b21, b30, b31 = _operand(b20), _operand(b21), _operand(b30), _operand(b31)
    b22, b32, b33 = _operand(b22), _operand(b32), _operand(b33)

    x0 = _diagonal(b00)
    x1 = _diagonal(b11)
    x2 = _diagonal(b22)
    x3 = _diagonal(b33)
    right0 = _right(x0.to(gl.float16))
    right1 = _right(x1.to(gl.float16))
    left2 = _left(x2)
    left3 = _left(x3)
    x10 = _product(_left(_product(_left(x1), b10)), right0)
    x32 = _product(_left(_product(left3, b32)), _right(x2.to(gl.float16)))
    right10 = _right(x10.to(gl.float16))
    left32 = _left(x32)
    y20 = _left(_product(left2, b20))
    y21 = _left(_product(left2, b21))
    y30 = _left(mma_v2(left3, b30, _product(left32, b20)))
    y31 = _left(mma_v2(left3, b31, _product(left32, b21)))
    x20 = mma_v2(y20, right0, _product(y21, right10))
    x21 = _product(y21, right1)
    x30 = mma_v2(y30, right0, _product(y31, right10))
    x31 = _product(y31, right1)

    none = gl.zeros([PAIRS, 16, 16], dtype, BLOCK)
    upper = _whole(none, none, none, none)
    t00 = _whole(_gained(x0, gains, 0, dtype), none, _gained(x10, gains, 0, dtype), _gained(x1, gains, 16, dtype))
    t10 = _whole(
        _gained(x20, gains, 0, dtype),
        _gained(x21, gains, 16, dtype),
        _gained(x30, gains, 0, dtype),
        _gained(x31, gains, 16, dtype),
    )
    t11 = _whole(_gained(x2, gains, 32, dtype), none, _gained(x32, gains, 32, dtype), _gained(x3, gains, 48, dtype))
    minus_a_tiles._reinterpret(dtype, [PAIRS, CHUNK, CHUNK], tiles).store(_whole(t00, upper, t10, t11))
    t_tiles = minus_a_tiles._reinterpret(dtype, [PAIRS, CHUNK, CHUNK], t_desc.layout)
    fence_async_shared()
    for i in gl.static_range(PAIRS):
        # Tiles of chunks that do not exist lie past the end of the descriptor.
        tile = ((chunk + i // HEADS) * H + head + i % HEADS) * CHUNK
        tma.async_copy_shared_to_global(t_desc, [tile, 0], t_tiles.index(i))
    tma.store_wait(0)


@gluon.jit
def _operand(x):
    return gl.convert_layout(x, RIGHT, assert_trivial=True)
