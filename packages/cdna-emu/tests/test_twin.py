"""Vector instructions of the core against the twin: random inputs with special values, both architectures."""

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from asm import assemble
from twin import exact, formats, rare
from twin import valu as twin

from cdna_emu.native import run_instruction

OPS = twin.OPS | rare.OPS
CASES = [(arch, name) for name, op in OPS.items() for arch in op.archs]
MODE = 0x3F0  # round to nearest, keep denormals, IEEE
SPECIAL = {
    "u": [
        0,
        1,
        2,
        15,
        31,
        32,
        0x7F,
        0x80,
        0x7FFF,
        0x8000,
        0xFFFF,
        0xFFFFFF,
        0x800000,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
    ],
    "f": [
        0,
        1,
        0x007FFFFF,
        0x00800000,
        0x3F000000,
        0x3F800000,
        0x40200000,
        0x4F000000,
        0x7F7FFFFF,
        0x7F800000,
        0x7FC00000,
    ],
    "h": [0, 1, 0x03FF, 0x0400, 0x3800, 0x3C00, 0x4100, 0x7BFF, 0x7C00, 0x7E00],
    "d": [
        0,
        1,
        0x000FFFFFFFFFFFFF,
        0x3FE << 52,
        0x3FF << 52,
        0x4004 << 48,
        0x7FEFFFFFFFFFFFFF,
        0x7FF << 52,
        0x7FF8 << 48,
    ],
    "q": [0, 1, 63, 64, 0x7FFFFFFFFFFFFFFF, 1 << 63, (1 << 64) - 1, 0xFFFFFFFF, 1 << 32],
}
NAN = {
    "f": (0x7F800000, 0x7FFFFFFF, 32),
    "d": (0x7FF << 52, (1 << 63) - 1, 64),
    "h": (0x7C00, 0x7FFF, 16),
    "b": (0x7F80, 0x7FFF, 16),
}
SIGN = {"f": 31, "h": 15, "d": 63}


def numbers(rng: np.random.Generator, letter: str) -> list[int]:
    """64 random values of a type, a third of them special."""
    if letter in "pP":
        part, bits = ("h", 16) if letter == "p" else ("f", 32)
        return [low | high << bits for low, high in zip(numbers(rng, part), numbers(rng, part), strict=True)]
    value = rng.normal(size=64) * np.exp2(rng.integers(-12, 12, 64))
    random: npt.NDArray[Any] = {
        "f": value.astype(np.float32).view(np.uint32),
        "h": value.astype(np.float16).view(np.uint16),
        "d": value.view(np.uint64),
        "u": rng.integers(0, 1 << 32, 64, dtype=np.uint64),
        "q": rng.integers(0, 1 << 64, 64, dtype=np.uint64),
    }[letter]
    out = [int(bits) for bits in random]
    for lane in range(64):
        if rng.random() < 1 / 3:
            out[lane] = int(rng.choice(np.array(SPECIAL[letter], np.uint64))) | int(rng.integers(2)) << SIGN.get(
                letter, 0
            )
        elif letter == "u" and rng.random() < 0.3:
            out[lane] &= 63
    return out


def canonical(value: int, letter: str) -> int:
    """Bits with every NaN made one."""
    if letter in "pP":
        part, width = ("h", 16) if letter == "p" else ("f", 32)
        return canonical(value & (1 << width) - 1, part) | canonical(value >> width, part) << width
    if letter == "b":
        return sum((0x7FC0 if (half := value >> s & 0xFFFF) & 0x7FFF > 0x7F80 else half) << s for s in (0, 16))
    if letter in NAN:
        infinity, magnitude, width = NAN[letter]
        value &= (1 << width) - 1
        return -1 if value & magnitude > infinity else value
    return value


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_vector_instruction(arch: str, name: str) -> None:
    op = OPS[name]
    wide = [letter in "qdP" for letter in op.sources]
    registers = [f"v[{2 * n}:{2 * n + 1}]" if pair else f"v{2 * n}" for n, pair in enumerate(wide)]
    target = {"m": "vcc", "q": "v[10:11]", "d": "v[10:11]", "P": "v[10:11]"}.get(op.result, "v10")
    code = assemble(f"{name} {target}, {', '.join(registers)}", arch)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for _ in range(4):
        sources = [numbers(rng, letter) for letter in op.sources]
        vgpr = {}
        for n, values in enumerate(sources):
            vgpr[2 * n] = np.array([value & twin.MASK for value in values], np.uint32)
            vgpr[2 * n + 1] = np.array([value >> 32 & twin.MASK for value in values], np.uint32)
        state = run_instruction(arch, code, vgpr=vgpr, mode=MODE)
        assert not state.findings
        low, high = state.vgpr(10), state.vgpr(11)
        for lane, inputs in enumerate(zip(*sources, strict=True)):
            expected = twin.run(op, inputs)
            got = int(low[lane]) | (int(high[lane]) << 32 if target == "v[10:11]" else 0)
            if op.result == "m":
                got = state.vcc >> lane & 1
            assert canonical(got, op.result) == canonical(expected, op.result), [
                hex(bits) for bits in (*inputs, got, expected)
            ]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_eight_bit_conversions(arch: str, kind: str) -> None:
    fmt = formats.fp8_of(arch) if kind == "fp8" else formats.bf8_of(arch)
    rng = np.random.default_rng(3)
    codes = np.arange(256, dtype=np.uint32).reshape(4, 64)
    for chunk in codes:
        state = run_instruction(arch, assemble(f"v_cvt_f32_{kind} v1, v0", arch), vgpr={0: chunk}, mode=MODE)
        np.testing.assert_array_equal(state.vgpr(1).view(np.float32).astype(np.float64), fmt.decode(chunk))
    for scale in (1e-3, 1.0, 100.0):
        low, high = (rng.normal(size=(2, 64)) * scale).astype(np.float32)
        low[:4] = [np.inf, -np.inf, np.nan, 1e9]
        text = f"v_cvt_pk_{kind}_f32 v2, v0, v1\nv_cvt_pk_{kind}_f32 v2, v1, v0 op_sel:[0,0,1]"
        state = run_instruction(arch, assemble(text, arch), vgpr={0: low, 1: high}, mode=MODE)
        got = fmt.decode(state.vgpr(2)[:, None] >> np.array([0, 8, 16, 24], np.uint32) & 0xFF)
        expected = fmt.decode(fmt.encode(np.stack([low, high, high, low], 1).astype(np.float64)))
        np.testing.assert_array_equal(got, expected)


def test_fused_multiply_add_of_the_twin() -> None:
    """Two ways to the same rounding: rounding to odd in float64, and rational numbers."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=(3, 500)) * np.exp2(rng.integers(-60, 60, (3, 500)))).astype(np.float32)
    c[::2] = -(a * b)[::2]
    got = exact.fma32(a, b, c)
    expected = [twin.bits32(twin.fma_f32(float(x), float(y), float(z))) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got.view(np.uint32), np.array(expected, np.uint32))
    wide = rng.normal(size=(3, 200)) * np.exp2(rng.integers(-40, 40, (3, 200)))
    expected64 = [twin.fma_f64(float(x), float(y), float(z)) for x, y, z in wide.T]
    np.testing.assert_array_equal(exact.fma64(*wide), expected64)


@pytest.mark.parametrize(
    "fmt", [formats.FP8, formats.FP8_FNUZ, formats.BF8, formats.BF8_FNUZ, formats.FP6, formats.BF6, formats.FP4]
)
def test_formats_of_the_twin_round_trip(fmt: formats.Format) -> None:
    codes = np.arange(1 << fmt.bits)
    values = fmt.decode(codes)
    number = ~np.isnan(values)
    again = fmt.encode(values[number])
    np.testing.assert_array_equal(again, codes[number])
    largest = {"fp8": 448, "fp8_fnuz": 240, "bf8": 57344, "bf8_fnuz": 57344, "fp6": 7.5, "bf6": 28, "fp4": 6}[fmt.name]
    assert np.max(values[np.isfinite(values)]) == largest
