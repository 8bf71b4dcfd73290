"""Matrix instructions against the numpy twin: every one, both architectures, random inputs with special values."""

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from asm import assemble
from twin import mfma as twin

from cdna_emu.mfma_passes import PASSES, mfma_cycles, mfma_passes
from cdna_emu.native import run_instruction

U32 = npt.NDArray[np.uint32]
CASES = [(arch, name) for name, op in twin.OPS.items() for arch in op.archs]
SPECIAL = {
    "f32": (0, 0x80000000, 1, 0x807FFFFF, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001),
    "f16": (0, 0x8000, 1, 0x83FF, 0x0200, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01),
    "bf16": (0, 0x8000, 1, 0x807F, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x0080),
    "f64": (
        0,
        1 << 63,
        1,
        0x3FF0000000000000,
        0x7FEFFFFFFFFFFFFF,
        0x7FF0000000000000,
        0xFFF0000000000000,
        0x7FF8 << 48,
    ),
}
A0, B0, C0, D0 = 0, 32, 64, 128  # first registers


def group(first: int, count: int, bank: str = "v") -> str:
    """Text of a register range."""
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


def spread(registers: U32, first: int) -> dict[int, U32]:
    """Registers by number."""
    return dict(enumerate(registers, first))


def ordinary(rng: np.random.Generator, kind: str, count: int) -> npt.NDArray[np.uint64]:
    """Codes of values near 1 and of many magnitudes, without infinity or NaN."""
    value = rng.normal(size=count) * np.exp2(rng.integers(-8, 4, count))
    if kind == "f64":
        return value.view(np.uint64)
    if kind in ("f32", "xf32", "bf16"):
        bits = value.astype(np.float32).view(np.uint32)
        return (bits >> 16 if kind == "bf16" else bits).astype(np.uint64)
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16).astype(np.uint64)
    bits = rng.integers(0, 1 << twin.WIDTH[kind], count, dtype=np.uint64)
    return np.where(bits & 0x7C == 0x7C, bits & 0x83, bits) if kind in ("fp8", "bf8") else bits


def registers_of(codes: npt.NDArray[np.uint64], width: int, count: int) -> U32:
    """Codes [elements * 64] packed into registers [count][64]."""
    bits = np.unpackbits(codes.astype("<u8").view(np.uint8).reshape(64, -1, 8), axis=2, bitorder="little")[:, :, :width]
    packed = np.packbits(bits.reshape(64, -1), axis=1, bitorder="little").view("<u4")
    return np.ascontiguousarray(packed[:, :count].T)


def inputs(rng: np.random.Generator, kind: str, count: int, special: float = 0.0) -> U32:
    """Random registers [count][64] of a format; a share of the elements are special values."""
    width = twin.WIDTH[kind]
    number = count * 64 * 32 // width
    codes = ordinary(rng, kind, number)
    if special:
        if kind in SPECIAL or kind == "xf32":
            values = np.array(SPECIAL["f32" if kind == "xf32" else kind], np.uint64)
        else:
            values = np.arange(1 << width, dtype=np.uint64)
        codes = np.where(rng.random(number) < special, rng.choice(values, number), codes)
    return registers_of(codes, width, count)


def accumulator(rng: np.random.Generator, op: twin.Op, special: float = 0.0) -> U32:
    """Random C."""
    if op.result == "i32":
        return rng.integers(0, 1 << 32, (op.result_registers, 64), dtype=np.uint64).astype(np.uint32)
    return inputs(rng, op.result, op.result_registers, special)


def same(got: U32, expected: U32, result: str) -> bool:
    """Equal bits; any NaN equals any other."""
    if result == "i32":
        return np.array_equal(got, expected)
    if result == "f64":
        got, expected = (
            np.ascontiguousarray(x.reshape(-1, 2, 64).transpose(0, 2, 1)).view(np.float64) for x in (got, expected)
        )
        bits = np.uint64
    else:
        got, expected, bits = got.view(np.float32), expected.view(np.float32), np.uint32
    nan = np.isnan(got)
    return np.array_equal(nan, np.isnan(expected)) and np.array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def modifiers(op: twin.Op) -> Iterator[dict[str, int]]:
    """CBSZ, ABID and BLGP that mean something."""
    if op.a in ("f32", "f16", "bf16", "i8"):
        steps = op.blocks.bit_length()
        for cbsz in range(1, steps):
            yield {"cbsz": cbsz, "abid": (1 << cbsz) - 1}
            yield {"cbsz": cbsz, "blgp": 1 + cbsz}
        if op.blocks > 1 or op.a == "f32":
            yield from ({"blgp": blgp} for blgp in range(1, 8))


def execute(
    arch: str,
    name: str,
    a: U32,
    b: U32,
    c: U32,
    *,
    bank: str = "v",
    in_place: bool = False,
    suffix: str = "",
    exec_mask: int = -1,
) -> U32:
    """D of one instruction by the core; C and D in `bank`, registers that must not change checked."""
    op = twin.OPS[name]
    d = C0 if in_place else D0
    text = (
        f"{name} {group(d, len(c), bank)}, {group(A0, len(a))}, {group(B0, len(b))}, {group(C0, len(c), bank)} {suffix}"
    )
    vgpr = {**spread(a, A0), **spread(b, B0)}
    third = spread(c, C0)
    state = run_instruction(
        arch,
        assemble(text, arch),
        vgpr={**vgpr, **third} if bank == "v" else vgpr,
        agpr=None if bank == "v" else third,
        exec_mask=exec_mask,
    )
    assert not state.findings
    read = state.vgpr if bank == "v" else state.agpr
    if not in_place:
        assert all(np.array_equal(read(n), value) for n, value in third.items())
    assert not np.any(read(d + len(c)))
    return np.stack([read(d + n) for n in range(op.result_registers)])


def operands(name: str, special: float, seed: int = 0, kinds: tuple[str, str] | None = None) -> tuple[U32, U32, U32]:
    """Random A, B and C of an instruction."""
    op = twin.OPS[name]
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    a, b = kinds or (op.a, op.b)
    return (
        inputs(rng, a, op.input_registers(a), special),
        inputs(rng, b, op.input_registers(b), special),
        accumulator(rng, op, special),
    )


DENSE = [(arch, name) for arch, name in CASES if "f8f6f4" not in name]


@pytest.mark.parametrize(("arch", "name"), DENSE)
def test_agrees_with_twin(arch: str, name: str) -> None:
    result = twin.OPS[name].result
    for seed, special in enumerate((0.0, 0.002, 0.3)):
        a, b, c = operands(name, special, seed)
        got = execute(arch, name, a, b, c, in_place=seed == 1)
        assert same(got, twin.run(name, arch, a, b, c), result)


@pytest.mark.parametrize(("arch", "name"), DENSE)
def test_accumulation_registers_and_exec(arch: str, name: str) -> None:
    a, b, c = operands(name, 0.0)
    assert same(
        execute(arch, name, a, b, c, bank="a", exec_mask=0), twin.run(name, arch, a, b, c), twin.OPS[name].result
    )


@pytest.mark.parametrize(("arch", "name"), [case for case in DENSE if any(modifiers(twin.OPS[case[1]]))])
def test_modifiers(arch: str, name: str) -> None:
    a, b, c = operands(name, 0.001)
    for chosen in modifiers(twin.OPS[name]):
        suffix = " ".join(f"{key}:{value}" for key, value in chosen.items())
        got = execute(arch, name, a, b, c, suffix=suffix)
        assert same(got, twin.run(name, arch, a, b, c, **chosen), twin.OPS[name].result), chosen


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["v_mfma_f64_16x16x4_f64", "v_mfma_f64_4x4x4_4b_f64"])
def test_f64_negation_and_constant(arch: str, name: str) -> None:
    a, b, c = operands(name, 0.01)
    for negate in range(8):
        suffix = f"neg:[{negate & 1},{negate >> 1 & 1},{negate >> 2}]"
        got = execute(arch, name, a, b, c, suffix=suffix)
        assert same(got, twin.run(name, arch, a, b, c, blgp=negate), "f64")
    for text, bits in (("1.0", 0x3FF << 52), ("0", 0), ("-4.0", 0xC010 << 48)):
        code = assemble(f"{name} {group(D0, len(c))}, {group(A0, 2)}, {group(B0, 2)}, {text}", arch)
        state = run_instruction(arch, code, vgpr={**spread(a, A0), **spread(b, B0)})
        constant = np.tile(np.array([[bits & 0xFFFFFFFF], [bits >> 32]], np.uint32), (len(c) // 2, 64))
        assert same(np.stack([state.vgpr(D0 + n) for n in range(len(c))]), twin.run(name, arch, a, b, constant), "f64")


@pytest.mark.parametrize("name", ["v_mfma_f32_32x32x8_f16", "v_mfma_f32_4x4x1_16b_f32", "v_mfma_i32_16x16x32_i8"])
@pytest.mark.parametrize(("text", "bits"), [("0", 0), ("1.0", 0x3F800000), ("-1", 0xFFFFFFFF), ("64", 64)])
def test_inline_constants(name: str, text: str, bits: int) -> None:
    a, b, c = operands(name, 0.0)
    code = assemble(f"{name} {group(D0, len(c))}, {group(A0, len(a))}, {group(B0, len(b))}, {text}", "gfx942")
    state = run_instruction("gfx942", code, vgpr={**spread(a, A0), **spread(b, B0)})
    expected = twin.run(name, "gfx942", a, b, np.full_like(c, bits))
    assert same(np.stack([state.vgpr(D0 + n) for n in range(len(c))]), expected, twin.OPS[name].result)


def test_accumulator_rows_of_32x32() -> None:
    """A = e_k, B = e_k: D[i][j] is visible as i in lane and register."""
    rows = np.zeros((16, 64), np.uint32)
    a = np.zeros((1, 64), np.float32)
    a[0, :32] = np.arange(32)
    b = np.zeros((1, 64), np.float32)
    b[0, :32] = 1
    got = execute("gfx942", "v_mfma_f32_32x32x2_f32", a.view(np.uint32), b.view(np.uint32), rows).view(np.float32)
    lane, r = np.meshgrid(np.arange(64), np.arange(16))
    np.testing.assert_array_equal(got, 8 * (r // 4) + 4 * (lane // 32) + r % 4)


def test_fp8_is_fnuz_on_gfx942_and_ocp_on_gfx950() -> None:
    name = "v_mfma_f32_16x16x32_fp8_fp8"
    a = np.zeros((2, 64), np.uint32)
    b = np.zeros((2, 64), np.uint32)
    a[0, :16], b[0, :16] = 0x38, 0x40
    zero = np.zeros((4, 64), np.uint32)
    assert np.all(execute("gfx942", name, a, b, zero).view(np.float32) == 0.5)
    assert np.all(execute("gfx950", name, a, b, zero).view(np.float32) == 2.0)


def test_f16_denormals_and_infinities() -> None:
    name = "v_mfma_f32_16x16x16_f16"
    a, b = np.zeros((2, 64), np.uint32), np.zeros((2, 64), np.uint32)
    a[0, :16], b[0, :16] = 0x0001, 0x3C00
    zero = np.zeros((4, 64), np.uint32)
    assert np.all(execute("gfx942", name, a, b, zero).view(np.float32) == 2.0**-24)
    a[0, :16] = 0xFC00
    assert np.all(execute("gfx942", name, a, b, zero).view(np.float32) == -np.inf)


@pytest.mark.parametrize("overlap", ["a", "b"])
def test_result_over_an_input(overlap: str) -> None:
    name = "v_mfma_f32_32x32x16_bf16"
    a, b, c = operands(name, 0.0)
    d = {"a": A0, "b": B0}[overlap]
    code = assemble(f"{name} {group(d, 16)}, {group(A0, 4)}, {group(B0, 4)}, {group(C0, 16)}", "gfx950")
    state = run_instruction("gfx950", code, vgpr={**spread(a, A0), **spread(b, B0), **spread(c, C0)})
    assert same(np.stack([state.vgpr(d + n) for n in range(16)]), twin.run(name, "gfx950", a, b, c), "f32")


@pytest.mark.parametrize("shift", [-2, 2])
def test_result_over_other_rows_of_c(shift: int) -> None:
    name = "v_mfma_f32_16x16x16_f16"
    a, b, c = operands(name, 0.0)
    d = C0 + shift
    code = assemble(f"{name} {group(d, 4)}, {group(A0, 2)}, {group(B0, 2)}, {group(C0, 4)}", "gfx942")
    state = run_instruction("gfx942", code, vgpr={**spread(a, A0), **spread(b, B0), **spread(c, C0)})
    assert same(np.stack([state.vgpr(d + n) for n in range(4)]), twin.run(name, "gfx942", a, b, c), "f32")


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize("kind_a", twin.F8F6F4)
@pytest.mark.parametrize("kind_b", twin.F8F6F4)
def test_f8f6f4(shape: str, kind_a: str, kind_b: str) -> None:
    name = f"v_mfma_f32_{shape}_f8f6f4"
    formats = {"cbsz": twin.F8F6F4.index(kind_a), "blgp": twin.F8F6F4.index(kind_b)}
    suffix = " ".join(f"{key}:{value}" for key, value in formats.items())
    for seed, special in enumerate((0.0, 0.01)):
        a, b, c = operands(name, special, seed, (kind_a, kind_b))
        got = execute("gfx950", name, a, b, c, suffix=suffix)
        assert same(got, twin.run(name, "gfx950", a, b, c, **formats), "f32")


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize("kinds", [("fp8", "bf8"), ("fp4", "fp8"), ("fp6", "bf6"), ("fp4", "fp4")])
def test_scaled_f8f6f4(shape: str, kinds: tuple[str, str]) -> None:
    name = f"v_mfma_scale_f32_{shape}_f8f6f4"
    formats = {"cbsz": twin.F8F6F4.index(kinds[0]), "blgp": twin.F8F6F4.index(kinds[1])}
    a, b, c = operands(name, 0.0, 0, kinds)
    rng = np.random.default_rng(5)
    scales = rng.integers(100, 150, (2, 64, 4), dtype=np.uint8)
    scales[0, 7] = 255
    for byte_a, byte_b in ((0, 0), (1, 2), (3, 1)):
        text = (
            f"{name} {group(D0, len(c))}, {group(A0, len(a))}, {group(B0, len(b))}, {group(C0, len(c))}, v250, v251 "
            f"op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0] "
            f"cbsz:{formats['cbsz']} blgp:{formats['blgp']}"
        )
        vgpr = {**spread(a, A0), **spread(b, B0), **spread(c, C0)}
        vgpr |= {250: scales[0].view(np.uint32)[:, 0], 251: scales[1].view(np.uint32)[:, 0]}
        state = run_instruction("gfx950", assemble(text, "gfx950"), vgpr=vgpr)
        chosen = (scales[0, :, byte_a], scales[1, :, byte_b])
        expected = twin.run(name, "gfx950", a, b, c, **formats, scales=chosen)
        assert same(np.stack([state.vgpr(D0 + n) for n in range(len(c))]), expected, "f32")


@pytest.mark.parametrize("suffix", ["cbsz:1", "blgp:1"])
def test_modifiers_without_meaning_are_unsupported(suffix: str) -> None:
    code = assemble(f"v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], v[4:7] {suffix}", "gfx942")
    state = run_instruction("gfx942", code, vgpr={n: np.ones(64, np.float32) for n in range(8)})
    assert [finding.kind for finding in state.findings] == ["unsupported"]
    assert not np.any(state.vgpr(8))


def test_passes_cover_every_instruction() -> None:
    assert {name for name in PASSES if name.startswith("v_mfma")} == set(twin.OPS)
    assert all(set(PASSES[name]) == set(op.archs) for name, op in twin.OPS.items())


def test_passes_give_the_peak_rates() -> None:
    """Dense peaks of the data sheets, FLOP per cycle and compute unit (four SIMDs)."""

    def rate(name: str, arch: str, **formats: int) -> float:
        op = twin.OPS[name]
        return 4 * 2 * op.m * op.m * op.k * op.blocks / mfma_cycles(name, arch, **formats)

    assert rate("v_mfma_f32_32x32x8_f16", "gfx942") == 2048
    assert rate("v_mfma_f32_32x32x16_fp8_fp8", "gfx942") == 4096
    assert rate("v_mfma_f32_32x32x2_f32", "gfx942") == 256
    assert rate("v_mfma_f64_16x16x4_f64", "gfx942") == 256
    assert rate("v_mfma_f64_16x16x4_f64", "gfx950") == 128
    assert rate("v_mfma_f32_16x16x32_bf16", "gfx950") == 4096
    assert rate("v_mfma_f32_16x16x128_f8f6f4", "gfx950") == 8192
    assert rate("v_mfma_f32_16x16x128_f8f6f4", "gfx950", cbsz=4, blgp=4) == 16384


def test_passes_of_unknown_instructions() -> None:
    with pytest.raises(ValueError, match="mnemonic: got 'v_add_f32'"):
        mfma_passes("v_add_f32", "gfx942")
    with pytest.raises(ValueError, match="expected one of gfx950"):
        mfma_cycles("v_mfma_f32_16x16x32_f16", "gfx942")
