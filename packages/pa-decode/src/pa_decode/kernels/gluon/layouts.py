"""Layouts of the Hopper kernel: how bytes of a page lie in shared memory, and where accumulators live in registers.

A bit basis says which (row, column) a bit of an address, register, lane or warp number stands for. FP8 wgmma without
swizzle takes core matrices of 8 rows x 16 bytes, 128 contiguous bytes, with one stride from one to the next along K and
one along M: the packed pages are made of such matrices, so that a page lands in shared memory as a wgmma operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...traits import PIPE_HEAD_DIM

TOKENS = 128
"""Of a step, what the consumers multiply at a time."""
HEAD_DIM = PIPE_HEAD_DIM


@gluon.constexpr_function
def _bits(extent, axis, first=0):
    """Bases of the bits of ``extent`` (a power of two) on one of two axes, from bit ``first`` on."""
    return [[1 << bit, 0] if axis == 0 else [0, 1 << bit] for bit in range(first, extent.bit_length() - 1)]


@gluon.constexpr_function
def k_operand(page):
    """[128 rows, 256 columns] of the K pages of a step.

    Page 64: row = token, column = element. Page 16: a page holds two core matrices per 16 elements and the rows of an
    instruction lie at one stride, so that row 64 b + 8 p + r is token 16 p + 8 b + r; columns are those of
    ``column_element``.
    """
    low, chunks = _bits(16, 1), _bits(HEAD_DIM, 1, 4)
    if page == 16:
        chunks = [chunks[0], chunks[3], chunks[1], chunks[2]]
        return gl.SharedLinearLayout(low + _bits(8, 0) + [[64, 0]] + chunks + [[8, 0], [16, 0], [32, 0]])
    return gl.SharedLinearLayout(low + _bits(64, 0) + chunks + [[64, 0]])


@gluon.jit
def column_element(column, PAGE: gl.constexpr):
    """Element of K and q at a column of the operands of S.

    Triton 3.6 puts bits 7 to 9 of the offset of an instruction within its operand into the base offset of its
    descriptor, which has to be 0 without swizzle: at page 16, where 32 elements are 512 bytes, the kernel then read
    outside of shared memory. So the elements with bit 5 are the second half of the columns, a view of its own that
    starts 512 bytes later, and the instructions of a half are 1024 bytes apart.
    """
    if PAGE == 16:
        return column % 32 + column // 32 % 4 * 64 + column // 128 * 32
    return column


@gluon.constexpr_function
def v_operand():
    """[256, 128 tokens] of packed V pages: 16-token groups of [256, 16] bytes, alike at page 16 and 64."""
    return gl.SharedLinearLayout(_bits(16, 1) + _bits(HEAD_DIM, 0) + _bits(TOKENS, 1, 4))


@gluon.constexpr_function
def v_group():
    """[256, 16 tokens] of one group of packed V."""
    return gl.SharedLinearLayout(_bits(16, 1) + _bits(HEAD_DIM, 0))


@gluon.constexpr_function
def _p_bases(columns, token_bits):
    """Bases of P [tokens, columns] as core matrices [token / 16][column][16 tokens]: ``token_bits`` name the rows."""
    return [[bit, 0] for bit in token_bits[:4]] + _bits(columns, 1) + [[bit, 0] for bit in token_bits[4:]]


@gluon.constexpr_function
def p_by_token(columns, tokens):
    """P [tokens, columns] in the order of V's tokens, as the second operand reads it."""
    return gl.SharedLinearLayout(_p_bases(columns, [1 << bit for bit in range(tokens.bit_length() - 1)]))


@gluon.constexpr_function
def p_by_row(columns, page):
    """The same bytes as ``p_by_token``, addressed by the rows of ``k_operand``: what the accumulators of S store to."""
    row_bits = [1, 2, 4, 64, 8, 16, 32] if page == 16 else [1 << bit for bit in range(7)]
    return gl.SharedLinearLayout(_p_bases(columns, row_bits))


@gluon.constexpr_function
def out_staging(rows):
    """[256, rows] of 16-bit elements, row major in the second axis; 16-byte pieces are spread over banks by row."""
    spread = [[8 << bit, 1 << bit] if bit < 2 else [0, 1 << bit] for bit in range(rows.bit_length() - 1)]
    return gl.SharedLinearLayout(_bits(HEAD_DIM, 0) + spread)


@gluon.constexpr_function
def accumulator(m, rows):
    """[m, rows]: an accumulator [m, 2 rows] of wgmma with its column pairs (the two parts of a row) added up."""
    registers = [[8, 0], *_bits(rows, 1, 2), *_bits(m, 0, 6)]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[m, rows],
    )
