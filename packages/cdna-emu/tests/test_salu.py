"""Scalar instructions against formulas written by hand from the CDNA3 ISA document."""

import itertools
from collections.abc import Callable

import pytest
from asm import assemble

from cdna_emu.native import run_instruction

ARCHS = ("gfx942", "gfx950")
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
WORDS = (0, 1, 31, 33, 0x8000, 0x00051234, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, M32)
LONGS = (0, 1, 0x80000000, M32, 0xFEDCBA9876543210, 1 << 63, (1 << 63) - 1, M64)

Scc = int | None  # None: SCC keeps its value


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def truth(value: int) -> tuple[int, Scc]:
    """A result whose SCC says that it is not zero."""
    return value, int(value != 0)


def wide(operation: Callable[[int, int], int], bits: int) -> Callable[[int, int, int], tuple[int, Scc]]:
    return lambda a, b, scc: truth(operation(a, b) & ((1 << bits) - 1))


def add_u32(a: int, b: int, carry: int = 0) -> tuple[int, Scc]:
    return (a + b + carry) & M32, int(a + b + carry > M32)


def signed_sum(a: int, b: int) -> tuple[int, Scc]:
    exact = signed(a) + signed(b)
    return exact & M32, int(not -(1 << 31) <= exact < 1 << 31)


def signed_difference(a: int, b: int) -> tuple[int, Scc]:
    exact = signed(a) - signed(b)
    return exact & M32, int(not -(1 << 31) <= exact < 1 << 31)


def bit_field(a: int, control: int, bits: int, sign: bool) -> tuple[int, Scc]:
    offset, count = control & (bits - 1), control >> 16 & 127
    field = (signed(a, bits) if sign else a) >> offset & ((1 << count) - 1)
    if sign and count:
        field = signed(field, count)
    return truth(field & ((1 << bits) - 1))


def absolute_difference(a: int, b: int) -> int:
    difference = signed(a - b)
    return (-difference if difference < 0 else difference) & M32


BITWISE = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}

# (a, b, scc) -> result, SCC
SOP2_32: dict[str, Callable[[int, int, int], tuple[int, Scc]]] = {
    "s_add_u32": lambda a, b, c: add_u32(a, b),
    "s_addc_u32": lambda a, b, c: add_u32(a, b, c),
    "s_sub_u32": lambda a, b, c: ((a - b) & M32, int(b > a)),
    "s_subb_u32": lambda a, b, c: ((a - b - c) & M32, int(b + c > a)),
    "s_add_i32": lambda a, b, c: signed_sum(a, b),
    "s_sub_i32": lambda a, b, c: signed_difference(a, b),
    "s_min_i32": lambda a, b, c: (min(signed(a), signed(b)) & M32, int(signed(a) < signed(b))),
    "s_max_i32": lambda a, b, c: (max(signed(a), signed(b)) & M32, int(signed(a) >= signed(b))),
    "s_min_u32": lambda a, b, c: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b, c: (max(a, b), int(a >= b)),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
    "s_lshl_b32": wide(lambda a, b: a << (b & 31), 32),
    "s_lshr_b32": wide(lambda a, b: a >> (b & 31), 32),
    "s_ashr_i32": wide(lambda a, b: signed(a) >> (b & 31), 32),
    "s_bfm_b32": lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31) & M32, None),
    "s_bfe_u32": lambda a, b, c: bit_field(a, b, 32, False),
    "s_bfe_i32": lambda a, b, c: bit_field(a, b, 32, True),
    "s_mul_i32": lambda a, b, c: (a * b & M32, None),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c: (signed(a) * signed(b) >> 32 & M32, None),
    "s_lshl1_add_u32": lambda a, b, c: (((a << 1) + b) & M32, int((a << 1) + b > M32)),
    "s_lshl2_add_u32": lambda a, b, c: (((a << 2) + b) & M32, int((a << 2) + b > M32)),
    "s_lshl3_add_u32": lambda a, b, c: (((a << 3) + b) & M32, int((a << 3) + b > M32)),
    "s_lshl4_add_u32": lambda a, b, c: (((a << 4) + b) & M32, int((a << 4) + b > M32)),
    "s_pack_ll_b32_b16": lambda a, b, c: ((b & 0xFFFF) << 16 | (a & 0xFFFF), None),
    "s_pack_lh_b32_b16": lambda a, b, c: (b >> 16 << 16 | (a & 0xFFFF), None),
    "s_pack_hh_b32_b16": lambda a, b, c: (b >> 16 << 16 | a >> 16, None),
    "s_absdiff_i32": lambda a, b, c: truth(absolute_difference(a, b)),
    **{f"s_{name}_b32": wide(operation, 32) for name, operation in BITWISE.items()},
}
# Second operand 64 bits wide, or a 32-bit count.
SOP2_64 = {
    **{f"s_{name}_b64": wide(operation, 64) for name, operation in BITWISE.items()},
    "s_cselect_b64": lambda a, b, c: (a if c else b, None),
}
SHIFTS_64: dict[str, Callable[[int, int, int], tuple[int, Scc]]] = {
    "s_lshl_b64": wide(lambda a, b: a << (b & 63), 64),
    "s_lshr_b64": wide(lambda a, b: a >> (b & 63), 64),
    "s_ashr_i64": wide(lambda a, b: signed(a, 64) >> (b & 63), 64),
    "s_bfe_u64": lambda a, b, c: bit_field(a, b, 64, False),
    "s_bfe_i64": lambda a, b, c: bit_field(a, b, 64, True),
}


def first(a: int, bits: int, what: int) -> int:
    """Lowest bit of that value; all ones if there is none."""
    return next((n for n in range(bits) if a >> n & 1 == what), M32)


def leading(a: int, bits: int) -> int:
    return next((n for n in range(bits) if a >> (bits - 1 - n) & 1), M32)


def leading_signs(a: int, bits: int) -> int:
    sign = a >> (bits - 1)
    return next((n for n in range(1, bits) if a >> (bits - 1 - n) & 1 != sign), M32)


def reversed_bits(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def quads(a: int, bits: int) -> int:
    return sum(1 << q for q in range(bits // 4) if a >> 4 * q & 15)


def whole_quads(a: int, bits: int) -> int:
    return sum(15 << 4 * q for q in range(bits // 4) if a >> 4 * q & 15)


# name: (source registers, destination registers, a -> result, SCC)
SOP1: dict[str, tuple[int, int, Callable[[int], tuple[int, Scc]]]] = {
    "s_mov_b32": (1, 1, lambda a: (a, None)),
    "s_mov_b64": (2, 2, lambda a: (a, None)),
    "s_not_b32": (1, 1, lambda a: truth(~a & M32)),
    "s_not_b64": (2, 2, lambda a: truth(~a & M64)),
    "s_wqm_b32": (1, 1, lambda a: truth(whole_quads(a, 32))),
    "s_wqm_b64": (2, 2, lambda a: truth(whole_quads(a, 64))),
    "s_quadmask_b32": (1, 1, lambda a: truth(quads(a, 32))),
    "s_quadmask_b64": (2, 2, lambda a: truth(quads(a, 64))),
    "s_brev_b32": (1, 1, lambda a: (reversed_bits(a, 32), None)),
    "s_brev_b64": (2, 2, lambda a: (reversed_bits(a, 64), None)),
    "s_bcnt0_i32_b32": (1, 1, lambda a: truth(32 - a.bit_count())),
    "s_bcnt0_i32_b64": (2, 1, lambda a: truth(64 - a.bit_count())),
    "s_bcnt1_i32_b32": (1, 1, lambda a: truth(a.bit_count())),
    "s_bcnt1_i32_b64": (2, 1, lambda a: truth(a.bit_count())),
    "s_ff0_i32_b32": (1, 1, lambda a: (first(a, 32, 0), None)),
    "s_ff0_i32_b64": (2, 1, lambda a: (first(a, 64, 0), None)),
    "s_ff1_i32_b32": (1, 1, lambda a: (first(a, 32, 1), None)),
    "s_ff1_i32_b64": (2, 1, lambda a: (first(a, 64, 1), None)),
    "s_flbit_i32_b32": (1, 1, lambda a: (leading(a, 32), None)),
    "s_flbit_i32_b64": (2, 1, lambda a: (leading(a, 64), None)),
    "s_flbit_i32": (1, 1, lambda a: (leading_signs(a, 32), None)),
    "s_flbit_i32_i64": (2, 1, lambda a: (leading_signs(a, 64), None)),
    "s_sext_i32_i8": (1, 1, lambda a: (signed(a, 8) & M32, None)),
    "s_sext_i32_i16": (1, 1, lambda a: (signed(a, 16) & M32, None)),
    "s_abs_i32": (1, 1, lambda a: truth(abs(signed(a)) & M32)),
    "s_bitreplicate_b64_b32": (1, 2, lambda a: (sum(3 << 2 * n for n in range(32) if a >> n & 1), None)),
}
SAVE_EXEC = {
    **BITWISE,
    "andn1": lambda a, exec_: ~a & exec_,
    "orn1": lambda a, exec_: ~a | exec_,
}
COMPARES = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def pair(state, n: int) -> int:
    return state.sgpr(n) | state.sgpr(n + 1) << 32


def registers(n: int, count: int) -> str:
    return f"s{n}" if count == 1 else f"s[{n}:{n + 1}]"


def pairs(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Operands and SCC: every pair, SCC alternating."""
    return [(x, y, n & 1) for n, (x, y) in enumerate(itertools.product(a, b))]


def check_sop2(arch: str, text: str, count: int, cases, expected) -> None:
    code = assemble(text, arch)
    for a, b, scc in cases:
        state = run_instruction(
            arch, code, sgpr={4: a, 5: a >> 32, 6: b & M32, 7: b >> 32} if count == 2 else {4: a, 6: b}, scc=scc
        )
        value, flag = expected(a, b, scc)
        got = pair(state, 2) if count == 2 else state.sgpr(2)
        assert (got, state.scc) == (value, scc if flag is None else flag), f"{text}: {a:#x}, {b:#x}, scc {scc}"
        assert not state.findings


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SOP2_32)
def test_sop2_32(arch, name):
    cases = pairs(WORDS, WORDS) if arch == "gfx942" else pairs(WORDS[::3], WORDS[::2])
    check_sop2(arch, f"{name} s2, s4, s6", 1, cases, SOP2_32[name])


@pytest.mark.parametrize("name", SOP2_64)
def test_sop2_64(name):
    check_sop2("gfx942", f"{name} s[2:3], s[4:5], s[6:7]", 2, pairs(LONGS, LONGS), SOP2_64[name])


@pytest.mark.parametrize("name", SHIFTS_64)
def test_shifts_of_64_bits(name):
    controls = (0, 1, 31, 32, 63, 64, 8 << 16 | 4, 40 << 16 | 30, 64 << 16, 100 << 16 | 3)
    check_sop2("gfx942", f"{name} s[2:3], s[4:5], s6", 2, pairs(LONGS, controls), SHIFTS_64[name])


def test_bit_fields_of_32_bits():
    controls = (0, 8 << 16, 8 << 16 | 28, 32 << 16, 33 << 16 | 1, 127 << 16 | 31, 1 << 16 | 31, 5)
    for name in ("s_bfe_u32", "s_bfe_i32"):
        check_sop2("gfx942", f"{name} s2, s4, s6", 1, pairs(WORDS, controls), SOP2_32[name])


def test_bit_masks_of_64_bits():
    code = assemble("s_bfm_b64 s[2:3], s4, s6", "gfx942")
    for a, b, _ in pairs((0, 1, 31, 32, 63, 64), (0, 1, 32, 63, 65)):
        state = run_instruction("gfx942", code, sgpr={4: a, 6: b})
        assert pair(state, 2) == ((1 << (a & 63)) - 1) << (b & 63) & M64


@pytest.mark.parametrize("name", SOP1)
@pytest.mark.parametrize("scc", (0, 1))
def test_sop1(name, scc):
    sources, results, formula = SOP1[name]
    code = assemble(f"{name} {registers(2, results)}, {registers(4, sources)}", "gfx942")
    for a in LONGS if sources == 2 else (*WORDS, 0x00F00010, 0x80, 0xFF7F):
        state = run_instruction("gfx942", code, sgpr={3: 0x5555, 4: a & M32, 5: a >> 32}, scc=scc)
        value, flag = formula(a)
        got = pair(state, 2) if results == 2 else state.sgpr(2)
        assert (got, state.scc) == (value, scc if flag is None else flag), f"{name} {a:#x}"
        assert results == 2 or state.sgpr(3) == 0x5555


@pytest.mark.parametrize("scc", (0, 1))
def test_conditional_moves(scc):
    code = assemble("s_cmov_b32 s2, s4\ns_cmov_b64 s[6:7], s[4:5]\ns_cmovk_i32 s8, 0xfffe", "gfx942")
    state = run_instruction("gfx942", code, sgpr={2: 1, 4: 40, 5: 50, 6: 6, 7: 7, 8: 8}, scc=scc)
    assert (state.sgpr(2), state.sgpr(6), state.sgpr(7), state.sgpr(8)) == (
        (40, 40, 50, M32 - 1) if scc else (1, 6, 7, 8)
    )


def test_bit_sets():
    code = assemble(
        "s_bitset1_b32 s2, s4\ns_bitset0_b32 s3, s4\ns_bitset1_b64 s[6:7], s5\ns_bitset0_b64 s[8:9], s5", "gfx942"
    )
    state = run_instruction("gfx942", code, sgpr={2: 1, 3: M32, 4: 32 + 7, 5: 64 + 40, 8: M64})
    assert (state.sgpr(2), state.sgpr(3)) == (0x81, M32 & ~0x80)
    assert (pair(state, 6), pair(state, 8)) == (1 << 40, M64 & ~(1 << 40))


@pytest.mark.parametrize("name", SAVE_EXEC)
def test_save_exec(name):
    code = assemble(f"s_{name}_saveexec_b64 s[2:3], s[4:5]", "gfx942")
    for a, exec_mask in itertools.product(LONGS, LONGS):
        state = run_instruction("gfx942", code, sgpr={4: a & M32, 5: a >> 32}, exec_mask=exec_mask)
        expected = SAVE_EXEC[name](a, exec_mask) & M64
        assert (state.exec_mask, pair(state, 2), state.scc) == (expected, exec_mask, int(expected != 0))


@pytest.mark.parametrize("name", ("andn1", "andn2"))
def test_write_exec(name):
    code = assemble(f"s_{name}_wrexec_b64 s[2:3], s[4:5]", "gfx942")
    for a, exec_mask in itertools.product(LONGS, LONGS):
        state = run_instruction("gfx942", code, sgpr={4: a & M32, 5: a >> 32}, exec_mask=exec_mask)
        expected = SAVE_EXEC[name](a, exec_mask) & M64
        assert (state.exec_mask, pair(state, 2), state.scc) == (expected, expected, int(expected != 0))


def test_save_exec_in_place():
    """The source may be the destination."""
    code = assemble("s_and_saveexec_b64 s[2:3], s[2:3]", "gfx942")
    state = run_instruction("gfx942", code, sgpr={2: 0xF0F0, 3: 1}, exec_mask=0xFF00)
    assert (state.exec_mask, pair(state, 2), state.scc) == (0xF000, 0xFF00, 1)


@pytest.mark.parametrize("name", COMPARES)
def test_compares(name):
    relation = COMPARES[name]
    for kind, convert in (("i32", signed), ("u32", int)):
        code = assemble(f"s_cmp_{name}_{kind} s4, s6", "gfx942")
        for a, b, scc in pairs(WORDS, WORDS):
            state = run_instruction("gfx942", code, sgpr={4: a, 6: b}, scc=scc)
            assert state.scc == relation(convert(a), convert(b)), f"{name} {kind} {a:#x} {b:#x}"
        for immediate in (0, 5, 0x7FFF, 0x8000, 0xFFFF):
            code = assemble(f"s_cmpk_{name}_{kind} s4, {immediate:#x}", "gfx942")
            number = signed(immediate, 16) if kind == "i32" else immediate
            for a in (*WORDS, immediate, number & M32):
                state = run_instruction("gfx942", code, sgpr={4: a})
                assert state.scc == relation(convert(a), number), f"{name} {kind} {a:#x} {immediate:#x}"


@pytest.mark.parametrize("name", ("eq", "lg"))
def test_compares_of_64_bits(name):
    code = assemble(f"s_cmp_{name}_u64 s[4:5], s[6:7]", "gfx942")
    for a, b in itertools.product(LONGS, LONGS):
        state = run_instruction("gfx942", code, sgpr={4: a & M32, 5: a >> 32, 6: b & M32, 7: b >> 32})
        assert state.scc == COMPARES[name](a, b)


def test_bit_compares():
    for bits, operand, position in ((32, "s4", 33), (64, "s[4:5]", 64 + 35)):
        for value in (0, 1 << position % bits, ((1 << bits) - 1) ^ 1 << position % bits):
            for what in (0, 1):
                code = assemble(f"s_bitcmp{what}_b{bits} {operand}, s6", "gfx942")
                state = run_instruction("gfx942", code, sgpr={4: value & M32, 5: value >> 32, 6: position})
                assert state.scc == (value >> position % bits & 1 == what)


@pytest.mark.parametrize("immediate", (0, 1, 0x7FFF, 0x8000, 0xFFFF))
def test_immediates(immediate):
    number = signed(immediate, 16)
    for a in WORDS:
        code = assemble(f"s_movk_i32 s2, {immediate:#x}\ns_addk_i32 s4, {immediate:#x}", "gfx942")
        state = run_instruction("gfx942", code, sgpr={4: a})
        exact = signed(a) + number
        assert (state.sgpr(2), state.sgpr(4)) == (number & M32, exact & M32)
        assert state.scc == (not -(1 << 31) <= exact < 1 << 31)
        state = run_instruction("gfx942", assemble(f"s_mulk_i32 s4, {immediate:#x}", "gfx942"), sgpr={4: a}, scc=1)
        assert (state.sgpr(4), state.scc) == (a * number & M32, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("64", 64),
        ("-1", M32),
        ("-16", M32 - 15),
        ("0.5", 0x3F000000),
        ("-4.0", 0xC0800000),
        ("0.15915494", 0x3E22F983),
        ("0x12345678", 0x12345678),
        ("m0", 77),
        ("vcc_hi", 0x80),
        ("exec_lo", 0xFFFF0000),
    ),
)
def test_constants_and_special_registers(text, expected):
    code = assemble(f"s_mov_b32 s2, {text}", "gfx942")
    state = run_instruction("gfx942", code, vcc=0x80 << 32, exec_mask=0xFFFF0000, m0=77)
    assert state.sgpr(2) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("64", 64),
        ("-1", M64),
        ("-16", M64 - 15),
        ("1.0", 0x3FF0000000000000),
        ("-0.5", 0xBFE0000000000000),
        ("0.15915494309189532", 0x3FC45F306DC9C882),
        ("0xffffff00", 0xFFFFFF00),
        ("vcc", 0x8000000000),
    ),
)
def test_constants_of_64_bits(text, expected):
    """Integers are sign extended, floats are doubles, literals are zero extended."""
    state = run_instruction("gfx942", assemble(f"s_mov_b64 s[2:3], {text}", "gfx942"), vcc=0x80 << 32)
    assert pair(state, 2) == expected


def test_flags_as_sources():
    code = assemble("s_mov_b32 s2, src_vccz\ns_mov_b32 s3, src_execz\ns_mov_b32 s4, src_scc", "gfx942")
    for vcc, exec_mask, scc in itertools.product((0, 1 << 40), (0, 1 << 63), (0, 1)):
        state = run_instruction("gfx942", code, vcc=vcc, exec_mask=exec_mask, scc=scc)
        assert (state.sgpr(2), state.sgpr(3), state.sgpr(4)) == (vcc == 0, exec_mask == 0, scc)


def test_writes_to_special_registers():
    code = assemble("s_mov_b64 exec, s[4:5]\ns_mov_b64 vcc, s[6:7]\ns_mov_b32 m0, s8", "gfx942")
    state = run_instruction("gfx942", code, sgpr={4: 1, 5: 2, 6: 3, 7: 4, 8: 5})
    assert (state.exec_mask, state.vcc, state.m0) == (1 | 2 << 32, 3 | 4 << 32, 5)


@pytest.mark.parametrize(
    ("branch", "given", "taken"),
    (
        ("s_branch", {}, True),
        ("s_cbranch_scc0", {"scc": 0}, True),
        ("s_cbranch_scc0", {"scc": 1}, False),
        ("s_cbranch_scc1", {"scc": 1}, True),
        ("s_cbranch_scc1", {"scc": 0}, False),
        ("s_cbranch_vccz", {"vcc": 0}, True),
        ("s_cbranch_vccz", {"vcc": 1 << 63}, False),
        ("s_cbranch_vccnz", {"vcc": 1 << 63}, True),
        ("s_cbranch_vccnz", {"vcc": 0}, False),
        ("s_cbranch_execz", {"exec_mask": 0}, True),
        ("s_cbranch_execz", {"exec_mask": 1 << 32}, False),
        ("s_cbranch_execnz", {"exec_mask": 1 << 32}, True),
        ("s_cbranch_execnz", {"exec_mask": 0}, False),
    ),
)
def test_branches(branch, given, taken):
    code = assemble(f"s_movk_i32 s2, 1\n{branch} over\ns_mov_b32 s2, 0x12345678\nover:\ns_movk_i32 s3, 3", "gfx942")
    state = run_instruction("gfx942", code, **given)
    assert (state.sgpr(2), state.sgpr(3)) == (1 if taken else 0x12345678, 3)


def test_backward_branch():
    """A loop of 5 rounds."""
    text = "s_movk_i32 s2, 5\nloop:\ns_addk_i32 s3, 7\ns_sub_u32 s2, s2, 1\ns_cmp_lg_u32 s2, 0\ns_cbranch_scc1 loop"
    state = run_instruction("gfx942", assemble(text, "gfx942"))
    assert (state.sgpr(2), state.sgpr(3)) == (0, 35)


def test_call_and_return():
    """s_swappc and s_setpc go by byte addresses; the literal makes instructions of two sizes."""
    text = """
        s_getpc_b64 s[4:5]
    base:
        s_add_u32 s4, s4, callee - base
        s_addc_u32 s5, s5, 0
        s_swappc_b64 s[30:31], s[4:5]
        s_add_u32 s2, s2, 1
        s_call_b64 s[28:29], other
        s_branch done
    callee:
        s_mov_b32 s2, 0x10000
        s_setpc_b64 s[30:31]
    other:
        s_lshl_b32 s2, s2, 1
        s_setpc_b64 s[28:29]
    done:
        s_movk_i32 s3, 9
    """
    state = run_instruction("gfx942", assemble(text, "gfx942"))
    assert (state.sgpr(2), state.sgpr(3)) == (0x20002, 9)
    assert not state.findings


def test_jump_into_the_middle_of_an_instruction_is_reported():
    code = assemble("s_mov_b32 s2, 0x12345678\ns_setpc_b64 s[4:5]\ns_movk_i32 s3, 9", "gfx942")
    state = run_instruction("gfx942", code, sgpr={4: 4, 5: 0})
    assert [finding.kind for finding in state.findings] == ["unsupported"]
    assert state.sgpr(3) == 0


def test_mode_register():
    """Reads and writes a field of MODE; the f32 denormal bits are 4 and 5."""
    text = """
        s_getreg_b32 s2, hwreg(HW_REG_MODE, 4, 4)
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0
        s_getreg_b32 s3, hwreg(HW_REG_MODE, 0, 8)
        s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s6
        s_getreg_b32 s4, hwreg(HW_REG_MODE, 0, 8)
    """
    state = run_instruction("gfx942", assemble(text, "gfx942"), sgpr={6: 0xF5}, mode=0xF0)
    assert (state.sgpr(2), state.sgpr(3), state.sgpr(4)) == (15, 0xC0, 0xC5)


@pytest.mark.parametrize(
    "text",
    [
        *("s_getreg_b32 s2, hwreg(HW_REG_HW_ID)", "s_setreg_b32 hwreg(HW_REG_TRAPSTS), s2", "s_trap 2", "s_sethalt 1"),
        *("s_mov_b64 s[2:3], src_shared_limit", "s_setvskip s2, s3", "s_sendmsg sendmsg(MSG_INTERRUPT)"),
        *("s_set_gpr_idx_on s2, gpr_idx(SRC0)", "s_set_gpr_idx_off", "s_set_gpr_idx_idx s2", "s_set_gpr_idx_mode 0"),
    ],
)
def test_what_is_not_modelled_is_reported(text):
    state = run_instruction("gfx942", assemble(text, "gfx942"), sgpr={2: 5})
    assert [finding.kind for finding in state.findings] == ["unsupported"]
    assert state.sgpr(2) == 5


def test_relative_moves():
    text = "s_movrels_b32 s2, s8\ns_movrels_b64 s[4:5], s[8:9]\ns_movreld_b32 s20, s6\ns_movreld_b64 s[30:31], s[6:7]"
    state = run_instruction("gfx942", assemble(text, "gfx942"), sgpr={6: 60, 7: 70, 10: 100, 11: 110}, m0=2)
    assert (state.sgpr(2), state.sgpr(4), state.sgpr(5)) == (100, 100, 110)
    assert (state.sgpr(22), state.sgpr(32), state.sgpr(33)) == (60, 60, 70)


@pytest.mark.parametrize(
    "text",
    [
        *("s_sleep 1", "s_setprio 2", "s_wakeup", "s_icache_inv", "s_incperflevel 1", "s_decperflevel 1"),
        *("s_ttracedata", "s_dcache_inv_vol", "s_dcache_wb_vol", "v_nop", "s_nop 3"),
    ],
)
def test_what_does_nothing_that_a_program_could_see(text):
    state = run_instruction("gfx942", assemble(text, "gfx942"), sgpr={2: 5}, vgpr={0: 7}, vcc=3, scc=1)
    assert not state.findings
    assert (state.pc, state.status, state.sgpr(2), state.vcc, state.scc) == (1, 0, 5, 3, 1)
    assert (state.vgpr(0) == 7).all()
