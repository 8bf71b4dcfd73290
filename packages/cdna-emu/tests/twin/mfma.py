"""Matrix instructions: lane, register and bits of every element of A, B, C and D, then sums in order of k.

The maps are those that AMD's matrix instruction calculator prints as "matrix element to register mapping"; those of the
gfx950 forms with twice the K continue them; the f8f6f4 ones follow AMD's article on matrix core programming (CDNA4).
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twin import exact, formats

U32 = npt.NDArray[np.uint32]
BOTH, GFX942, GFX950 = ("gfx942", "gfx950"), ("gfx942",), ("gfx950",)
WIDTH = {
    "f64": 64,
    "f32": 32,
    "xf32": 32,
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}
F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")


@dataclass(frozen=True)
class Op:
    """One matrix instruction; n equals m. a, b: input formats, "f8f6f4" if modifiers choose them."""

    a: str
    b: str
    m: int
    k: int
    blocks: int
    archs: tuple[str, ...]

    @property
    def result(self) -> str:
        """Type of C and D."""
        return {"f64": "f64", "i8": "i32"}.get(self.a, "f32")

    @property
    def result_registers(self) -> int:
        """32-bit registers of C and D."""
        return self.m * self.m * self.blocks // 64 * (2 if self.result == "f64" else 1)

    def input_registers(self, kind: str) -> int:
        """32-bit registers of an input in a format."""
        return self.m * self.k * self.blocks // 64 * WIDTH[kind] // 32


def _ops() -> dict[str, Op]:
    ops = {}

    def add(kinds: str, shapes: str, archs: tuple[str, ...], prefix: str = "v_mfma_f32") -> None:
        for kind, shape in itertools.product(kinds.split(), shapes.split()):
            a, b = kind.split("_") if "_" in kind else (kind, kind)
            size, _, blocks = shape.partition("_")
            m, _, k = (int(n) for n in size.split("x"))
            ops[f"{prefix}_{shape}_{kind}"] = Op(a, b, m, k, int(blocks[:-1] or 1), archs)

    add("f32", "32x32x1_2b 16x16x1_4b 4x4x1_16b 32x32x2 16x16x4", BOTH)
    add("xf32", "16x16x8 32x32x4", GFX942)
    add("f16 bf16", "32x32x4_2b 16x16x4_4b 4x4x4_16b 32x32x8 16x16x16", BOTH)
    add("f16 bf16", "32x32x16 16x16x32", GFX950)
    add("i8", "32x32x4_2b 16x16x4_4b 4x4x4_16b 32x32x16 16x16x32", BOTH, "v_mfma_i32")
    add("i8", "16x16x64 32x32x32", GFX950, "v_mfma_i32")
    add("f64", "16x16x4 4x4x4_4b", BOTH, "v_mfma_f64")
    add("fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8", "16x16x32 32x32x16", BOTH)
    for prefix in ("v_mfma_f32", "v_mfma_scale_f32"):
        add("f8f6f4", "16x16x128 32x32x64", GFX950, prefix)
    return ops


OPS = _ops()


def input_place(op: Op, kind: str, row: int, k: int, block: int) -> tuple[int, int]:
    """Lane and element number within its registers of A[row][k] (or B[k][column]) of a block."""
    if op.k >= 64 and kind in F8F6F4 and op.a == "f8f6f4":
        if WIDTH[kind] == 8:
            half, rest = divmod(k, op.k // 2)
            group, element = divmod(rest, 16)
            return op.m * group + row, 16 * half + element
        return op.m * (k // 32) + row, k % 32
    if op.blocks > 1 and op.a != "f64":
        return op.m * block + row, k
    per_lane = op.k * op.m * op.blocks // 64
    return op.m * op.blocks * (k // per_lane) + op.m * block + row, k % per_lane


def result_place(op: Op, i: int, j: int, block: int) -> tuple[int, int]:
    """Lane and register (pair) of D[i][j] of a block."""
    if op.result == "f64":
        return (16 * (i % 4) + j, i // 4) if op.m == 16 else (16 * i + 4 * block + j, 0)
    if op.m == 4:
        return 4 * block + j, i
    if op.m == 16:
        return 16 * (i // 4) + j, 4 * block + i % 4
    return 32 * (i // 4 % 2) + j, 16 * block + 4 * (i // 8) + i % 4


def _elements(op: Op) -> Iterator[tuple[int, int, int]]:
    return itertools.product(range(op.blocks), range(op.m), range(op.k))


@functools.cache
def _input_map(op: Op, kind: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    places = np.array([input_place(op, kind, row, k, block) for block, row, k in _elements(op)])
    shape = (op.blocks, op.m, op.k)
    return places[:, 0].reshape(shape), places[:, 1].reshape(shape)


@functools.cache
def _result_map(op: Op) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    places = np.array(
        [result_place(op, i, j, block) for block, i, j in itertools.product(range(op.blocks), range(op.m), range(op.m))]
    )
    shape = (op.blocks, op.m, op.m)
    return places[:, 0].reshape(shape), places[:, 1].reshape(shape)


def fields(registers: U32, width: int) -> npt.NDArray[np.int64]:
    """Registers [n][64] as elements [n * 32 / width][64] of `width` bits, from bit 0 of register 0 up."""
    words = np.ascontiguousarray(registers.T, "<u4").view(np.uint8)  # [64][4 * n]
    bits = np.unpackbits(words, axis=1, bitorder="little")
    count = bits.shape[1] // width
    padded = np.zeros((64, count, 64), np.uint8)
    padded[:, :, :width] = bits[:, : count * width].reshape(64, count, width)
    return np.packbits(padded, axis=2, bitorder="little").view("<i8")[:, :, 0].T


def _values(raw: npt.NDArray[np.int64], kind: str, arch: str) -> npt.NDArray[np.float64] | npt.NDArray[np.int64]:
    if kind == "i8":
        return np.where(raw > 127, raw - 256, raw)
    if kind == "f64":
        return raw.view(np.float64)
    if kind in ("f32", "xf32"):
        bits = raw.astype(np.uint32)
        if kind == "xf32":
            bits = np.where(np.isnan(bits.view(np.float32)), bits, bits & 0xFFFFE000).astype(np.uint32)
        with np.errstate(invalid="ignore"):  # signalling NaN
            return bits.view(np.float32).astype(np.float64)
    if kind in ("f16", "bf16"):
        return (formats.F16 if kind == "f16" else formats.BF16).decode(raw)
    if kind in ("fp8", "bf8"):
        return (formats.fp8_of if kind == "fp8" else formats.bf8_of)(arch).decode(raw)
    return {"fp6": formats.FP6, "bf6": formats.BF6, "fp4": formats.FP4}[kind].decode(raw)


def _blgp(registers: U32, blgp: int) -> U32:
    lanes = np.arange(64)
    source = [lanes, lanes % 32, 32 + lanes % 32, (lanes + 16) % 64, *(16 * n + lanes % 16 for n in range(4))][blgp]
    return registers[:, source]


def run(
    name: str,
    arch: str,
    a: U32,
    b: U32,
    c: U32,
    *,
    cbsz: int = 0,
    abid: int = 0,
    blgp: int = 0,
    scales: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None = None,
) -> U32:
    """D of a matrix instruction, uint32 [registers][64], from registers of the same form.

    scales: the E8M0 byte of each lane for A and for B.
    """
    op = OPS[name]
    if arch not in op.archs:
        raise ValueError(f"{name} is not an instruction of {arch}")
    kind_a, kind_b = (F8F6F4[cbsz], F8F6F4[blgp]) if op.a == "f8f6f4" else (op.a, op.b)
    if op.a == "f8f6f4":
        cbsz = blgp = 0
    negate = blgp if op.a == "f64" else 0
    right = b if op.a == "f64" else _blgp(b, blgp)
    operands = []
    for registers, kind, scale in ((a, kind_a, scales and scales[0]), (right, kind_b, scales and scales[1])):
        lane, element = _input_map(op, kind)
        matrix = _values(fields(registers, WIDTH[kind])[element, lane], kind, arch)
        if scale is not None:
            index = np.arange(op.k)[None, :] // 32 * op.m + np.arange(op.m)[:, None]
            factor = np.where(scale == 255, np.nan, np.exp2(scale.astype(np.float64) - 127))[index]
            with np.errstate(all="ignore"):
                matrix = (matrix * factor[None]).astype(np.float32).astype(np.float64)
        operands.append(matrix)  # [block][row or column][k]
    left = operands[0][[block >> cbsz << cbsz | (abid if cbsz else 0) for block in range(op.blocks)]]
    return _multiply(op, left, operands[1], c, negate)


def _multiply(op: Op, left: npt.NDArray, right: npt.NDArray, c: U32, negate: int) -> U32:
    lane, register = _result_map(op)
    out = np.zeros((op.result_registers, 64), np.uint32)
    if op.result == "f64":
        total = fields(c, 64).view(np.float64)[register, lane]
        left, right, total = (-x if negate >> n & 1 else x for n, x in enumerate((left, right, total)))
        for k in range(op.k):
            total = exact.fma64(left[:, :, None, k], right[:, None, :, k], total)
        bits = total.view(np.uint64)
        out[2 * register, lane] = bits & 0xFFFFFFFF
        out[2 * register + 1, lane] = bits >> 32
        return out
    if op.result == "i32":
        products = np.einsum("bik,bjk->bij", left, right)
        out[register, lane] = (products + c[register, lane].astype(np.int64)) & 0xFFFFFFFF
        return out
    total = c.view(np.float32)[register, lane]
    for k in range(op.k):
        total = exact.fma32(left[:, :, None, k], right[:, None, :, k], total)
    out[register, lane] = total.view(np.uint32)
    return out
