"""Lane permutation through the LDS crossbar, and the transposed reads of gfx950."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from accesses import ARCHS, LANES, U8, U32, kinds, registers, run
from asm import assemble

from cdna_emu.errors import EmulationError
from cdna_emu.native import run_instruction

MASK = 0xF0F0_FFFF_0000_AAAA
ON = (MASK >> LANES.astype(object) & 1).astype(bool)


def permuted(arch: str, text: str, mask: int = -1, **vgpr: Any) -> U32:
    registers = {int(name[1:]): value for name, value in vgpr.items()}
    return run(arch, text, vgpr=registers, exec_mask=mask).vgpr(4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", [-1, MASK])
def test_swizzle(arch: str, mask: int) -> None:
    data = LANES + 100
    on = np.ones(64, bool) if mask == -1 else ON
    low, group = LANES % 32, LANES // 32 * 32
    cases = {
        'swizzle(BITMASK_PERM,"01pip")': group + (low & 0b00111 ^ 0b00010 | 0b01000),
        "swizzle(SWAP,16)": LANES ^ 16,
        "swizzle(SWAP,1)": LANES ^ 1,
        "swizzle(REVERSE,8)": LANES ^ 7,
        "swizzle(BROADCAST,8,3)": LANES // 8 * 8 + 3,
        "swizzle(QUAD_PERM,3,0,0,2)": LANES // 4 * 4 + np.array([3, 0, 0, 2])[LANES % 4],
        "swizzle(ROTATE,0,5)": group + (low + 5) % 32,
        "swizzle(ROTATE,1,5)": group + (low - 5) % 32,
    }
    for swizzle, source in cases.items():
        got = permuted(arch, f"ds_swizzle_b32 v4, v1 offset:{swizzle}", mask, v1=data, v4=7)
        want = np.where(on, np.where(on[source], data[source], 0), 7)
        np.testing.assert_array_equal(got, want, swizzle)


@pytest.mark.parametrize("arch", ARCHS)
def test_fft_swizzle_is_unsupported(arch: str) -> None:
    assert kinds(run(arch, "ds_swizzle_b32 v4, v1 offset:swizzle(FFT,12)")) == {"unsupported"}


@pytest.mark.parametrize("arch", ARCHS)
def test_swizzle_in_place(arch: str) -> None:
    np.testing.assert_array_equal(permuted(arch, "ds_swizzle_b32 v4, v4 offset:swizzle(SWAP,2)", v4=LANES), LANES ^ 2)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", [-1, MASK])
def test_bpermute(arch: str, mask: int) -> None:
    on = np.ones(64, bool) if mask == -1 else ON
    source = np.random.default_rng(0).integers(0, 64, 64)
    data = LANES + 100
    address = 4 * source - 8 + 256 * (LANES % 3) + LANES % 4  # the two low bits and what exceeds the wave are dropped
    got = permuted(arch, "ds_bpermute_b32 v4, v1, v2 offset:8", mask, v1=address.astype(np.uint32), v2=data, v4=7)
    np.testing.assert_array_equal(got, np.where(on, np.where(on[source], data[source], 0), 7))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mask", [-1, MASK])
def test_permute(arch: str, mask: int) -> None:
    target = np.random.default_rng(1).integers(0, 64, 64)
    data = LANES + 100
    got = permuted(arch, "ds_permute_b32 v4, v1, v2", mask, v1=4 * target, v2=data, v4=7)
    want = np.zeros(64, np.int64)
    for lane in LANES:
        if mask >> int(lane) & 1:
            want[target[lane]] = data[lane]
    on = np.ones(64, bool) if mask == -1 else ON
    np.testing.assert_array_equal(got, np.where(on, want, 7))


# ---- transposed reads of gfx950


def pack(values: npt.NDArray[np.int64], bits: int) -> U8:
    """Elements of `bits` bits, the first in the lowest; last axis."""
    digits = values[..., None] >> np.arange(bits) & 1
    return np.packbits(digits.reshape(*values.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


@pytest.mark.parametrize(
    ("text", "bits", "rows"), [("b64_tr_b16", 16, 4), ("b64_tr_b8", 8, 8), ("b96_tr_b6", 6, 16), ("b64_tr_b4", 4, 16)]
)
def test_transposed_reads(text: str, bits: int, rows: int) -> None:
    rng = np.random.default_rng(bits)
    matrix = rng.integers(0, 1 << bits, (4, rows, 16))  # one matrix of 16 columns per 16 lanes
    each = 12 if bits == 6 else 8  # bytes per lane
    place = 16 if bits == 6 else 8  # LDS bytes that they take
    lanes_per_row = 16 // rows
    lds = np.zeros(4096, np.uint8)
    chunks = pack(matrix.reshape(64, -1), bits)  # lane order: rows, then parts of a row
    where = rng.permutation(64) * 2 * place  # rows need not be next to each other
    for lane in LANES:
        lds[64 + where[lane] : 64 + where[lane] + each] = chunks[lane]
    assert lanes_per_row * each * 8 == 16 * bits
    words = each // 4
    got = run("gfx950", f"ds_read_{text} {registers(words)}, v1 offset:64", vgpr={1: where}, lds=lds)
    want = pack(np.swapaxes(matrix, 1, 2), bits).view(np.uint32).reshape(64, words)  # lane c: column c
    for r in range(words):
        np.testing.assert_array_equal(got.vgpr(4 + r), want[:, r])
    assert not got.findings


def test_transposed_read_gives_mfma_operands() -> None:
    """A 16-bit matrix [k][n], row major: lane n of a group gets k = 4 * group … + 3: the B operand of 16x16x16."""
    matrix = np.random.default_rng(0).integers(0, 1 << 16, (16, 16), np.uint16)
    group, lane = LANES // 16, LANES % 16
    address = 32 * (4 * group + lane // 4) + 8 * (lane % 4)
    got = run("gfx950", "ds_read_b64_tr_b16 v[4:5], v1", vgpr={1: address}, lds=matrix)
    for k in range(4):
        half = got.vgpr(4 + k // 2) >> np.uint32(16 * (k % 2)) & np.uint32(0xFFFF)
        np.testing.assert_array_equal(half, matrix[4 * group + k, lane])


def test_transposed_reads_need_gfx950_alignment_and_all_lanes() -> None:
    code = assemble("ds_read_b64_tr_b16 v[4:5], v1", "gfx950")
    with pytest.raises(ValueError, match="gfx942"):
        assemble("ds_read_b64_tr_b16 v[4:5], v1", "gfx942")
    lds = np.zeros(1024, np.uint8)
    try:
        assert kinds(run_instruction("gfx942", code, lds=lds)) == {"unsupported"}
    except EmulationError as error:
        assert "ds_read_b64_tr_b16" in str(error)
    assert kinds(run_instruction("gfx950", code, lds=lds, vgpr={1: 4})) == {"misaligned"}
    assert kinds(run_instruction("gfx950", code, lds=lds, exec_mask=MASK)) == {"unsupported"}
