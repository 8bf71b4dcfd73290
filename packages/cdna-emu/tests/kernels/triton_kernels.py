"""Small Triton kernels, one per family of instructions that Triton's AMD back end emits."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)


@triton.jit
def softmax_kernel(x, out, columns, stride, BLOCK: tl.constexpr):
    """One row per program; the row's maximum and sum cross the waves through LDS."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    row = tl.program_id(0) * stride
    values = tl.load(x + row + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    exponents = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row + offsets, (exponents / tl.sum(exponents, axis=0)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def layernorm_kernel(x, weight, bias, out, columns, stride, epsilon, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    row = tl.program_id(0) * stride
    values = tl.load(x + row + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / columns
    centred = tl.where(mask, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + epsilon)
    factor = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + offsets, (centred * scale * factor + shift).to(out.dtype.element_ty), mask=mask)


@triton.jit
def cumsum_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Inclusive sums along both axes: scans by DPP within a wave, through LDS across waves."""
    tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + tile, tl.cumsum(tl.cumsum(tl.load(x + tile), axis=1), axis=0))


@triton.jit
def transcendental_kernel(x, out, BLOCK: tl.constexpr):
    """exp, log, sin, cos, sqrt and a division of each value, one row of ``out`` per function."""
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + offsets)
    tl.store(out + offsets, tl.exp(value))
    tl.store(out + BLOCK + offsets, tl.log(value))
    tl.store(out + 2 * BLOCK + offsets, tl.sin(value))
    tl.store(out + 3 * BLOCK + offsets, tl.cos(value))
    tl.store(out + 4 * BLOCK + offsets, tl.sqrt(value))
    tl.store(out + 5 * BLOCK + offsets, 1.0 / value)


@triton.jit
def matmul_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """c [M, N] = a [M, K] @ b [K, N], row-major; with SPLIT_K > 1 the parts of K are added to c by atomics."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.program_id(2) * BK + tl.arange(0, BK)
    accumulator = tl.zeros((BM, BN), dtype=tl.int32 if c.dtype.element_ty == tl.int32 else tl.float32)
    for start in range(0, K, BK * SPLIT_K):
        left = inner[None, :] + start < K
        a_tile = tl.load(a + rows[:, None] * K + inner[None, :] + start, mask=(rows[:, None] < M) & left, other=0.0)
        right = inner[:, None] + start < K
        b_tile = tl.load(
            b + (inner[:, None] + start) * N + columns[None, :], mask=right & (columns[None, :] < N), other=0.0
        )
        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION, out_dtype=accumulator.dtype)
    out = c + rows[:, None] * N + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    if SPLIT_K == 1:
        tl.store(out, accumulator.to(c.dtype.element_ty), mask=inside)
    else:
        tl.atomic_add(out, accumulator, mask=inside)


@triton.jit
def scaled_matmul_kernel(
    a,
    a_scale,
    b,
    b_scale,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TYPE_A: tl.constexpr,
    TYPE_B: tl.constexpr,
):
    """c [M, N] = (a * 2^(a_scale - 127)) @ (b * 2^(b_scale - 127)): a [M, K] and b [K, N] of 8 bits or two 4-bit values
    along K, scales [M, K / 32] and [N, K / 32]."""
    PACK_A: tl.constexpr = 2 if TYPE_A == "e2m1" else 1
    PACK_B: tl.constexpr = 2 if TYPE_B == "e2m1" else 1
    rows, columns, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    left = tl.load(a + rows[:, None] * (K // PACK_A) + tl.arange(0, K // PACK_A)[None, :])
    right = tl.load(b + tl.arange(0, K // PACK_B)[:, None] * N + columns[None, :])
    left_scale = tl.load(a_scale + rows[:, None] * (K // 32) + groups[None, :])
    right_scale = tl.load(b_scale + columns[:, None] * (K // 32) + groups[None, :])
    product = tl.dot_scaled(left, left_scale, TYPE_A, right, right_scale, TYPE_B)
    tl.store(c + rows[:, None] * N + columns[None, :], product)
