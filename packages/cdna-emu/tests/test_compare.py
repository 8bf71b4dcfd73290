"""v_cmp_* and v_cmpx_*: every type and relation on all pairs of eight special values, against comparisons in numpy."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from asm import assemble

from cdna_emu.native import run_instruction

ARCHS = ("gfx942", "gfx950")
LANES = 64
SOME_LANES = 0xF0F0_3C3C_FFFF_8001
FLOATS = ("f16", "f32", "f64")
INTS = ("i16", "u16", "i32", "u32", "i64", "u64")
FLOAT_TYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
SPECIAL = {
    "f16": (0, 0x8000, 0x0001, 0x83FF, 0x3C00, 0xBC01, 0x7C00, 0x7E00),
    "f32": (0, 0x80000000, 0x00000001, 0x807FFFFF, 0x3F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00001),
    "f64": (
        0,
        1 << 63,
        1,
        0x800FFFFFFFFFFFFF,
        0x3FF0000000000000,
        0x3FF0000000000001,
        0xFFF0000000000000,
        0x7FF0000000000001,
    ),
    "16": (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF),
    "32": (0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF),
    "64": (0, 1, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1),
}


def bits_of(kind: str) -> int:
    return int(kind[1:])


def special_pairs(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [64] each: all pairs of the eight values of the type."""
    values = SPECIAL[kind if kind in FLOATS else kind[1:]]
    a, b = zip(*itertools.product(values, values), strict=True)
    return np.array(a, np.uint64), np.array(b, np.uint64)


def typed(raw: np.ndarray, kind: str) -> np.ndarray:
    unsigned = raw.astype(f"u{bits_of(kind) // 8}")
    return unsigned if kind[0] == "u" else unsigned.view(f"{kind[0]}{bits_of(kind) // 8}")


def registers(first: int, raw: np.ndarray, kind: str) -> dict[int, np.ndarray]:
    """Values in VGPRs; what a 16-bit operand does not read is filled."""
    if bits_of(kind) == 64:
        return {first: (raw & 0xFFFFFFFF).astype(np.uint32), first + 1: (raw >> 32).astype(np.uint32)}
    filler = 0xABCD0000 if bits_of(kind) == 16 else 0
    return {first: raw.astype(np.uint32) | np.uint32(filler)}


def operand(first: int, kind: str) -> str:
    return f"v[{first}:{first + 1}]" if bits_of(kind) == 64 else f"v{first}"


def mask_of(hits: Sequence[bool] | np.ndarray) -> int:
    return sum(1 << n for n, hit in enumerate(hits) if hit)


def relation(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [64]. The n-relations of floats are the negations, true for NaN."""
    unordered = (a != a) | (b != b)
    table = {
        "f": np.zeros(len(a), bool),
        "lt": a < b,
        "eq": a == b,
        "le": a <= b,
        "gt": a > b,
        "ge": a >= b,
        "lg": (a < b) | (a > b),
        "ne": a != b,
        "o": ~unordered,
        "u": unordered,
        "nge": ~(a >= b),
        "nlg": ~((a < b) | (a > b)),
        "ngt": ~(a > b),
        "nle": ~(a <= b),
        "neq": ~(a == b),
        "nlt": ~(a < b),
        "tru": np.ones(len(a), bool),
        "t": np.ones(len(a), bool),
    }
    return table[name]


FLOAT_RELATIONS = ("f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru")
INT_RELATIONS = ("f", "lt", "eq", "le", "gt", "ne", "ge", "t")
ALL = [(kind, name) for kind in FLOATS for name in FLOAT_RELATIONS]
ALL += [(kind, name) for kind in INTS for name in INT_RELATIONS]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_relations(arch, kind, name):
    a, b = special_pairs(kind)
    expected = mask_of(relation(name, typed(a, kind), typed(b, kind))) & SOME_LANES
    vgpr = {**registers(0, a, kind), **registers(2, b, kind)}
    x, y = operand(0, kind), operand(2, kind)

    short = run_instruction(
        arch, assemble(f"v_cmp_{name}_{kind}_e32 vcc, {x}, {y}", arch), vgpr=vgpr, exec_mask=SOME_LANES, vcc=~0
    )
    assert (short.vcc, short.exec_mask) == (expected, SOME_LANES)

    long = run_instruction(
        arch, assemble(f"v_cmpx_{name}_{kind}_e64 s[4:5], {x}, {y}", arch), vgpr=vgpr, exec_mask=SOME_LANES, vcc=7
    )
    assert (long.sgpr(4) | long.sgpr(5) << 32, long.exec_mask, long.vcc) == (expected, expected, 7)


@pytest.mark.parametrize("kind", FLOATS)
def test_cmpx_writes_vcc_and_exec(kind):
    a, b = special_pairs(kind)
    expected = mask_of(typed(a, kind) < typed(b, kind)) & SOME_LANES
    code = assemble(f"v_cmpx_lt_{kind}_e32 vcc, {operand(0, kind)}, {operand(2, kind)}", "gfx942")
    vgpr = {**registers(0, a, kind), **registers(2, b, kind)}
    state = run_instruction("gfx942", code, vgpr=vgpr, exec_mask=SOME_LANES)
    assert (state.vcc, state.exec_mask) == (expected, expected)


@pytest.mark.parametrize("kind", FLOATS)
def test_negative_and_absolute(kind):
    a, b = special_pairs(kind)
    x, y = operand(0, kind), operand(2, kind)
    vgpr = {**registers(0, a, kind), **registers(2, b, kind)}
    state = run_instruction("gfx942", assemble(f"v_cmp_lt_{kind}_e64 s[4:5], -|{x}|, -{y}", "gfx942"), vgpr=vgpr)
    expected = mask_of(-np.abs(typed(a, kind)) < -typed(b, kind))
    assert state.sgpr(4) | state.sgpr(5) << 32 == expected


@pytest.mark.parametrize(
    ("kind", "mode", "flushes"),
    (
        ("f32", 0xF0, False),
        ("f32", 0xD0, False),  # input denormals are kept, those of results are not
        ("f32", 0xE0, True),
        ("f32", 0xC0, True),
        ("f32", 0x30, False),
        ("f16", 0x30, True),
        ("f16", 0x70, False),
        ("f16", 0xC0, False),
        ("f64", 0xB0, True),
        ("f64", 0xC0, False),
    ),
)
def test_denormals_obey_the_mode(kind, mode, flushes):
    a, b = special_pairs(kind)
    least = np.finfo(FLOAT_TYPES[kind]).tiny
    x, y = typed(a, kind), typed(b, kind)
    if flushes:
        x, y = (np.where(np.abs(v) < least, v.dtype.type(0), v) for v in (x, y))
    code = assemble(f"v_cmp_lt_{kind}_e32 vcc, {operand(0, kind)}, {operand(2, kind)}", "gfx942")
    vgpr = {**registers(0, a, kind), **registers(2, b, kind)}
    assert run_instruction("gfx942", code, vgpr=vgpr, mode=mode).vcc == mask_of(x < y)


CLASSES = {  # signalling NaN, quiet NaN, -infinity, -normal, -denormal, -0, 0, denormal, normal, infinity
    "f16": (0x7C01, 0xFE00, 0xFC00, 0xBC00, 0x8001, 0x8000, 0, 0x03FF, 0x0400, 0x7C00),
    "f32": (0x7F800001, 0x7FC00000, 0xFF800000, 0x80800000, 0x807FFFFF, 0x80000000, 0, 1, 0x7F7FFFFF, 0x7F800000),
    "f64": (
        0xFFF0000000000001,
        0x7FF8000000000000,
        0xFFF0000000000000,
        0xC000000000000000,
        0x8000000000000001,
        1 << 63,
        0,
        0x000FFFFFFFFFFFFF,
        0x0010000000000000,
        0x7FF0000000000000,
    ),
}


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("mode", (0xF0, 0))
def test_classes(kind, mode):
    """Each value has one class, whatever the denormal mode; the mask may differ by lane."""
    raw = np.resize(np.array(CLASSES[kind], np.uint64), LANES)
    code = assemble(f"v_cmp_class_{kind}_e32 vcc, {operand(0, kind)}, v2", "gfx942")
    for bit in range(10):
        masks = np.full(LANES, 1 << bit, np.uint32)
        state = run_instruction("gfx942", code, vgpr={**registers(0, raw, kind), 2: masks}, mode=mode)
        assert state.vcc == mask_of([lane % 10 == bit for lane in range(LANES)])
    masks = np.arange(LANES, dtype=np.uint32) * 16
    state = run_instruction("gfx942", code, vgpr={**registers(0, raw, kind), 2: masks}, exec_mask=SOME_LANES)
    assert state.vcc == mask_of([lane * 16 >> lane % 10 & 1 for lane in range(LANES)]) & SOME_LANES


def test_class_sees_modifiers():
    raw = np.resize(np.array(CLASSES["f32"], np.uint32), LANES)
    code = assemble("v_cmp_class_f32_e64 s[4:5], -|v0|, v2", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: raw, 2: 0b0000111100})
    assert state.sgpr(4) | state.sgpr(5) << 32 == mask_of([lane % 10 >= 2 for lane in range(LANES)])


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    (
        ("v_cmp_eq_f16_e32 vcc, 1.0, v0", "f16", 0x3C00),
        ("v_cmp_eq_f16_e32 vcc, 0.15915494, v0", "f16", 0x3118),
        ("v_cmp_eq_f32_e32 vcc, 0.15915494, v0", "f32", 0x3E22F983),
        ("v_cmp_eq_f32_e32 vcc, -4.0, v0", "f32", 0xC0800000),
        ("v_cmp_eq_f64_e32 vcc, 0.5, v[0:1]", "f64", 0x3FE0000000000000),
        ("v_cmp_eq_f64_e32 vcc, 0.15915494309189532, v[0:1]", "f64", 0x3FC45F306DC9C882),
        ("v_cmp_eq_f64_e32 vcc, 0x40590000, v[0:1]", "f64", 0x4059000000000000),
        ("v_cmp_eq_i64_e32 vcc, -1, v[0:1]", "i64", (1 << 64) - 1),
        ("v_cmp_eq_i64_e32 vcc, -16, v[0:1]", "i64", (1 << 64) - 16),
        ("v_cmp_eq_u64_e32 vcc, 0x87654321, v[0:1]", "u64", 0x87654321),
        ("v_cmp_eq_i16_e32 vcc, -2, v0", "i16", 0xFFFE),
        ("v_cmp_eq_u16_e32 vcc, 64, v0", "u16", 64),
        ("v_cmp_eq_u32_e32 vcc, s6, v0", "u32", 0x600D),
        ("v_cmp_eq_u64_e32 vcc, s[6:7], v[0:1]", "u64", 0x7_0000_600D),
        ("v_cmp_eq_u32_e32 vcc, vcc_hi, v0", "u32", 0xFFFF0000),
    ),
)
def test_scalar_operands(text, kind, value):
    """Constants have the pattern of the type; lane 5 differs from it in the lowest bit, lane 6 in the highest."""
    raw = np.full(LANES, value, np.uint64)
    raw[5] ^= np.uint64(1)
    raw[6] ^= np.uint64(1 << (bits_of(kind) - 1))
    state = run_instruction(
        "gfx942", assemble(text, "gfx942"), vgpr=registers(0, raw, kind), sgpr={6: 0x600D, 7: 7}, vcc=0xFFFF0000 << 32
    )
    assert state.vcc == ((1 << LANES) - 1) & ~(1 << 5 | 1 << 6)


@pytest.mark.parametrize("destination", ("vcc", "s[4:5]"))
def test_sdwa(destination):
    random = np.random.default_rng(3)
    a, b = random.integers(0, 1 << 32, (2, LANES), dtype=np.uint32)
    code = assemble(f"v_cmp_lt_i32_sdwa {destination}, sext(v0), v1 src0_sel:BYTE_2 src1_sel:WORD_1", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: a, 1: b >> 9}, exec_mask=SOME_LANES)
    x = (a >> 16 & 0xFF).astype(np.uint8).view(np.int8).astype(int)
    got = state.vcc if destination == "vcc" else state.sgpr(4) | state.sgpr(5) << 32
    assert got == mask_of(x < (b >> 25).astype(int)) & SOME_LANES


def test_sdwa_floats():
    """The sign modifiers act on the selected half."""
    a, b = special_pairs("f16")
    code = assemble("v_cmp_gt_f16_sdwa vcc, -v0, |v1| src0_sel:WORD_1 src1_sel:WORD_0", "gfx942")
    vgpr = {0: (a << np.uint64(16)).astype(np.uint32), 1: b.astype(np.uint32)}
    x, y = typed(a, "f16"), typed(b, "f16")
    assert run_instruction("gfx942", code, vgpr=vgpr).vcc == mask_of(-x > np.abs(y))


def test_destination_may_be_exec():
    """Results are of the lanes that were on before."""
    code = assemble("v_cmp_gt_u32_e64 exec, 32, v0", "gfx942")
    state = run_instruction("gfx942", code, vgpr={0: np.arange(LANES, dtype=np.uint32)}, exec_mask=SOME_LANES)
    assert state.exec_mask == SOME_LANES & 0xFFFFFFFF
