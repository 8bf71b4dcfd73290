"""Sources and destinations of vector instructions: DPP, SDWA, constants, the lanes written."""

import itertools

import numpy as np
import pytest
from asm import assemble

from cdna_emu.native import run_instruction

ARCHS = ("gfx942", "gfx950")
ALL = (1 << 64) - 1
SOME_LANES = 0xF0F0_3C3C_FFFF_8001
LANE = np.arange(64)
VALUES = (LANE * 0x01030507 + 0x80).astype(np.uint32)
OLD = (0xA0000000 + LANE).astype(np.uint32)


def rotated(lane: int, row: int, by: int) -> int:
    return lane // row * row + (lane % row + by) % row


# Control: the lane that a lane reads, None if there is none.
CONTROLS = {
    "quad_perm:[0,1,2,3]": lambda n: n,
    "quad_perm:[3,2,1,0]": lambda n: n ^ 3,
    "quad_perm:[1,1,3,2]": lambda n: n // 4 * 4 + (1, 1, 3, 2)[n % 4],
    **{f"row_shl:{k}": lambda n, k=k: n + k if n % 16 + k < 16 else None for k in (1, 2, 8, 15)},
    **{f"row_shr:{k}": lambda n, k=k: n - k if n % 16 >= k else None for k in (1, 3, 8, 15)},
    **{f"row_ror:{k}": lambda n, k=k: rotated(n, 16, -k) for k in (1, 4, 8, 15)},
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_rol:1": lambda n: rotated(n, 64, 1),
    "wave_shr:1": lambda n: n - 1 if n else None,
    "wave_ror:1": lambda n: rotated(n, 64, -1),
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
    **{f"row_newbcast:{k}": lambda n, k=k: n // 16 * 16 + k for k in (0, 5, 15)},
}


def on(mask: int, lane: int) -> bool:
    return bool(mask >> lane & 1)


def dpp_expected(control: str, exec_mask: int, rows: int, banks: int, bound_ctrl: bool, values, old) -> np.ndarray:
    """A lane without a source (out of its row, or off) gets 0 with bound_ctrl, else it is not written."""
    out = old.copy()
    for lane in range(64):
        if not on(exec_mask, lane) or not on(rows, lane // 16) or not on(banks, lane % 16 // 4):
            continue
        source = CONTROLS[control](lane)
        if source is not None and on(exec_mask, source):
            out[lane] = values[source]
        elif bound_ctrl:
            out[lane] = 0
    return out


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("control", CONTROLS)
def test_dpp(arch, control):
    masks = ((0xF, 0xF), (0xA, 0xF), (0xF, 0x3), (0x5, 0xE))
    for exec_mask, (rows, banks), bound_ctrl in itertools.product((ALL, SOME_LANES), masks, (False, True)):
        text = f"v_mov_b32_dpp v1, v0 {control} row_mask:{rows:#x} bank_mask:{banks:#x}"
        code = assemble(text + " bound_ctrl:0" * bound_ctrl, arch)
        state = run_instruction(arch, code, vgpr={0: VALUES, 1: OLD}, exec_mask=exec_mask)
        expected = dpp_expected(control, exec_mask, rows, banks, bound_ctrl, VALUES, OLD)
        np.testing.assert_array_equal(state.vgpr(1), expected, err_msg=f"{text}, exec {exec_mask:#x}")


@pytest.mark.parametrize("control", CONTROLS)
def test_dpp_in_place(control):
    """All lanes read what the register held before."""
    code = assemble(f"v_mov_b32_dpp v0, v0 {control} row_mask:0xf bank_mask:0xf", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: VALUES})
    np.testing.assert_array_equal(state.vgpr(0), dpp_expected(control, ALL, 15, 15, False, VALUES, VALUES))


def test_dpp_reads_the_first_source():
    code = assemble("v_sub_u32_dpp v0, v0, v1 row_shr:1 row_mask:0xf bank_mask:0xf", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: VALUES, 1: OLD})
    shifted = np.roll(VALUES, 1) - OLD
    np.testing.assert_array_equal(state.vgpr(0), np.where(LANE % 16 == 0, VALUES, shifted))


def test_wave_sum_by_dpp():
    """The usual reduction: row shifts, then row broadcasts into the rows that a mask names."""
    steps = [f"v_add_u32_dpp v0, v0, v0 row_shr:{k} row_mask:0xf bank_mask:0xf bound_ctrl:0" for k in (1, 2, 4, 8)]
    steps += [f"v_add_u32_dpp v0, v0, v0 row_bcast:{k} row_mask:{mask}" for k, mask in ((15, "0xa"), (31, "0xc"))]
    state = run_instruction("gfx942", assemble("\n".join(steps), "gfx942"), vgpr={0: VALUES})
    np.testing.assert_array_equal(state.vgpr(0), np.cumsum(VALUES, dtype=np.uint32))


def test_dpp_negates_after_it_moves():
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    code = assemble("v_add_f32_dpp v1, -v0, |v0| quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: values})
    np.testing.assert_array_equal(state.vgpr(1).view(np.float32), -values[LANE ^ 1] + np.abs(values))


def selected(x: np.ndarray, select: str, sign: bool) -> np.ndarray:
    """int64 [64]"""
    if select == "DWORD":
        return x.astype(np.int64)
    kind, number = select.split("_")
    bits = 8 if kind == "BYTE" else 16
    part = x.astype(np.int64) >> bits * int(number) & ((1 << bits) - 1)
    return np.where(sign & (part >> (bits - 1) == 1), part - (1 << bits), part)


SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")


@pytest.mark.parametrize(("first", "second"), list(itertools.product(SELECTS, SELECTS)))
def test_sdwa_sources(first, second):
    a, b = np.random.default_rng(5).integers(0, 1 << 32, (2, 64), dtype=np.uint32)
    for sign in (False, True):
        x, y = ("sext(v0)", "v1") if sign else ("v0", "v1")
        text = f"v_add_u32_sdwa v2, {x}, {y} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{first} src1_sel:{second}"
        state = run_instruction("gfx942", assemble(text, "gfx942"), vgpr={0: a, 1: b, 2: OLD}, exec_mask=SOME_LANES)
        exact = (selected(a, first, sign) + selected(b, second, False)).astype(np.uint32)
        keep = np.array([on(SOME_LANES, lane) for lane in range(64)])
        np.testing.assert_array_equal(state.vgpr(2), np.where(keep, exact, OLD))


@pytest.mark.parametrize("unused", ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"))
@pytest.mark.parametrize("select", SELECTS)
def test_sdwa_destination(select, unused):
    """The result's low bits go to the selected part; sign extension fills the bits above it, zeros those below."""
    a = np.random.default_rng(6).integers(0, 1 << 32, 64, dtype=np.uint32)
    text = f"v_mov_b32_sdwa v1, v0 dst_sel:{select} dst_unused:{unused} src0_sel:DWORD"
    state = run_instruction("gfx942", assemble(text, "gfx942"), vgpr={0: a, 1: OLD})
    if select == "DWORD":
        expected = a
    else:
        kind, number = select.split("_")
        bits = 8 if kind == "BYTE" else 16
        field = ((1 << bits) - 1) << bits * int(number)
        part = selected(a, f"{kind}_0", unused == "UNUSED_SEXT") << bits * int(number)
        expected = (part & 0xFFFFFFFF).astype(np.uint32)
        if unused == "UNUSED_PRESERVE":
            expected = (expected & np.uint32(field)) | (OLD & np.uint32(~field & 0xFFFFFFFF))
    np.testing.assert_array_equal(state.vgpr(1), expected)


def test_sdwa_scalar_source():
    code = assemble(
        "v_add_u32_sdwa v1, s4, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_0", "gfx942"
    )
    state = run_instruction("gfx942", code, vgpr={0: VALUES}, sgpr={4: 0x12345678})
    np.testing.assert_array_equal(state.vgpr(1), (VALUES & 0xFF) + 0x1234)


@pytest.mark.parametrize(
    ("text", "bits"),
    (
        ("0", 0),
        ("64", 64),
        ("-16", 0xFFFFFFF0),
        ("0.5", 0x3F000000),
        ("-0.5", 0xBF000000),
        ("1.0", 0x3F800000),
        ("-1.0", 0xBF800000),
        ("2.0", 0x40000000),
        ("-2.0", 0xC0000000),
        ("4.0", 0x40800000),
        ("-4.0", 0xC0800000),
        ("0.15915494", 0x3E22F983),  # 1/(2*pi)
        ("0xdeadbeef", 0xDEADBEEF),
        ("s4", 44),
        ("m0", 55),
        ("vcc_lo", 66),
        ("exec_hi", 0xF0F03C3C),
        ("src_scc", 1),
        ("src_vccz", 0),
        ("src_execz", 0),
    ),
)
def test_constants(text, bits):
    code = assemble(f"v_mov_b32 v1, {text}", "gfx942")
    state = run_instruction("gfx942", code, vgpr={1: OLD}, sgpr={4: 44}, m0=55, vcc=66, scc=1, exec_mask=SOME_LANES)
    written = np.array([on(SOME_LANES, lane) for lane in range(64)])
    np.testing.assert_array_equal(state.vgpr(1), np.where(written, np.uint32(bits), OLD))


@pytest.mark.parametrize(
    ("text", "bits"),
    (
        ("-1", (1 << 64) - 1),
        ("-16", (1 << 64) - 16),
        ("64", 64),
        ("1.0", 0x3FF0000000000000),
        ("0.15915494309189532", 0x3FC45F306DC9C882),
        ("s[4:5]", 0x0000_0005_0000_0004),
        ("vcc", 7 << 32),
    ),
)
def test_constants_of_64_bits(text, bits):
    state = run_instruction("gfx942", assemble(f"v_mov_b64 v[2:3], {text}", "gfx942"), sgpr={4: 4, 5: 5}, vcc=7 << 32)
    np.testing.assert_array_equal(state.vgpr(2), np.full(64, bits & 0xFFFFFFFF, np.uint32))
    np.testing.assert_array_equal(state.vgpr(3), np.full(64, bits >> 32, np.uint32))


def test_constants_of_16_bits():
    code = assemble("v_add_f16 v1, 1.0, v0\nv_mul_f16 v2, 0.15915494, v3", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: 0x4000, 3: 0x3C00})
    assert set(state.vgpr(1)) == {0x4200}
    assert set(state.vgpr(2)) == {0x3118}


def test_no_lane_on():
    state = run_instruction("gfx942", assemble("v_mov_b32 v1, v0", "gfx942"), vgpr={0: VALUES, 1: OLD}, exec_mask=0)
    np.testing.assert_array_equal(state.vgpr(1), OLD)
