"""Sparse matrix instructions: A has two of every four k, told by an index; D is added to.

A, its index, and B in four registers, as AMD's matrix instruction calculator prints them. B in eight registers is two
runs, K / 2 apart, as public one-hot probes of 16x16x64 f16 and 16x16x128 fp8 on a gfx950 found.
"""

import itertools

import numpy as np
import numpy.typing as npt

from twin import mfma
from twin.mfma import BOTH, GFX950, U32, Op


def _ops() -> dict[str, Op]:
    ops = {}
    for kinds, shapes, archs, result in (
        ("f16 bf16", "16x16x32 32x32x16", BOTH, "f32"),
        ("f16 bf16", "16x16x64 32x32x32", GFX950, "f32"),
        ("i8", "16x16x64 32x32x32", BOTH, "i32"),
        ("i8", "16x16x128 32x32x64", GFX950, "i32"),
        ("fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8", "16x16x64 32x32x32", BOTH, "f32"),
        ("fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8", "16x16x128 32x32x64", GFX950, "f32"),
    ):
        for kind, shape in itertools.product(kinds.split(), shapes.split()):
            a, b = kind.split("_") if "_" in kind else (kind, kind)
            m, _, k = (int(n) for n in shape.split("x"))
            ops[f"v_smfmac_{result}_{shape}_{kind}"] = Op(a, b, m, k, 1, archs)
    return ops


OPS = _ops()


def index_sets(op: Op) -> int:
    """How many sets of indices one register holds."""
    return 32 // (op.m * op.k // 64)


def run(name: str, arch: str, a: U32, b: U32, index: U32, d: U32, *, cbsz: int = 0, abid: int = 0) -> U32:
    """D, uint32 [registers][64]; `a` is half as many registers as `b`, `index` is one."""
    op = OPS[name]
    per_lane = op.m * op.k // 64
    first = 0 if cbsz else abid * per_lane
    stored = mfma._values(mfma.fields(a, mfma.WIDTH[op.a]), op.a, arch)
    left: npt.NDArray = np.zeros((1, op.m, op.k), stored.dtype)
    for row, group in itertools.product(range(op.m), range(op.k // 4)):
        lane, within = op.m * (4 * group // per_lane) + row, 4 * group % per_lane // 4
        for n in range(2):
            place = int(index[lane]) >> (first + 4 * within + 2 * n) & 3
            left[0, row, 4 * group + place] = stored[2 * within + n, lane]
    dense = mfma._values(mfma.fields(b, mfma.WIDTH[op.b]), op.b, arch)
    right = np.stack([[dense[e, lane] for e, lane in (place_b(op, k, j) for k in range(op.k))] for j in range(op.m)])
    return mfma._multiply(op, left, right[None], d, 0)


def place_b(op: Op, k: int, column: int) -> tuple[int, int]:
    """Element of a lane, and the lane, of B[k][column]."""
    per_lane = op.m * op.k // 64
    if per_lane * mfma.WIDTH[op.b] == 128:
        return k % per_lane, op.m * (k // per_lane) + column
    half, rest = divmod(k, op.k // 2)
    return per_lane // 2 * half + rest % (per_lane // 2), op.m * (rest // (per_lane // 2)) + column
