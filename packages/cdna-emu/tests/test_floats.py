"""Conversions of core/floats.h: exhaustive where the format is narrow, against the twin and against PyTorch."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from twin import formats

from cdna_emu import build_core

PROBE = r"""
#include "floats.h"
#define LOOP(name, in, out, expression) \
    void name(const in *x, out *y, long n, int fnuz, int saturate, const uint32_t *random) \
    { \
        for (long i = 0; i < n; i++) \
            y[i] = (expression); \
        (void)fnuz, (void)saturate, (void)random; \
    }
LOOP(f16, float, uint16_t, f16_from_f32(x[i]))
LOOP(f16_rtz, float, uint16_t, f16_from_f32_rtz(x[i]))
LOOP(from_f16, uint16_t, float, f32_from_f16(x[i]))
LOOP(bf16, float, uint16_t, bf16_from_f32(x[i]))
LOOP(bf16_sr, float, uint16_t, bf16_from_f32_sr(x[i], random[i]))
LOOP(from_bf16, uint16_t, float, f32_from_bf16(x[i]))
LOOP(fp8, float, uint8_t, fp8_from_f32_mode(x[i], fnuz, saturate))
LOOP(bf8, float, uint8_t, bf8_from_f32_mode(x[i], fnuz, saturate))
LOOP(fp8_sr, float, uint8_t, fp8_from_f32_sr(x[i], random[i], fnuz, saturate))
LOOP(bf8_sr, float, uint8_t, bf8_from_f32_sr(x[i], random[i], fnuz, saturate))
LOOP(from_fp8, uint8_t, float, f32_from_fp8(x[i], fnuz))
LOOP(from_bf8, uint8_t, float, f32_from_bf8(x[i], fnuz))
"""
EIGHT_BIT = [
    (formats.FP8, torch.float8_e4m3fn),
    (formats.FP8_FNUZ, torch.float8_e4m3fnuz),
    (formats.BF8, torch.float8_e5m2),
    (formats.BF8_FNUZ, torch.float8_e5m2fnuz),
]
CORE = Path(build_core.__file__).parent / "core"


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """floats.h behind functions on arrays."""
    folder = tmp_path_factory.mktemp("floats")
    (folder / "probe.c").write_text(PROBE)
    command = [*build_core.compiler(), *build_core.FLAGS, "-shared", "-Wall", "-Wextra", "-Werror", f"-I{CORE}"]
    subprocess.run([*command, "-o", str(folder / "probe.so"), str(folder / "probe.c")], check=True)
    return ctypes.CDLL(str(folder / "probe.so"))


def call(
    probe: ctypes.CDLL,
    name: str,
    x: npt.NDArray[Any],
    dtype: Any,
    fmt: formats.Format = formats.FP8,
    *,
    saturate: bool = False,
    random: npt.NDArray[np.uint32] | None = None,
) -> npt.NDArray[Any]:
    """One conversion of an array; "e8" in a name stands for "fp8" or "bf8"."""
    source = np.ascontiguousarray(x)
    out = np.zeros(source.size, dtype)
    noise = np.zeros(source.size, np.uint32) if random is None else np.ascontiguousarray(random, np.uint32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (source, out, noise)]
    fnuz = fmt.specials == "fnuz"
    kind = "fp8" if fmt.mantissa == 3 else "bf8"
    getattr(probe, name.replace("e8", kind))(
        pointers[0], pointers[1], ctypes.c_long(source.size), fnuz, saturate, pointers[2]
    )
    return out


def samples(fmt: formats.Format) -> npt.NDArray[np.float32]:
    """Every value of a format, the midpoints between them and their float32 neighbours, both signs, and random bits."""
    with np.errstate(over="ignore"):  # what comes after the largest bfloat16
        table = fmt.magnitudes.astype(np.float32)
        middle = ((fmt.magnitudes[:-1] + fmt.magnitudes[1:]) / 2).astype(np.float32)
    base = np.concatenate(
        [table, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    )
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = (rng.normal(size=200_000) * np.exp2(rng.integers(-30, 20, 200_000))).astype(np.float32)
    return np.concatenate([base, -base, noise, near, np.array([np.inf, -np.inf, np.nan, -0.0], np.float32)])


def values(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Exact float64; signalling NaN without a warning."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


@pytest.mark.parametrize(("name", "rounding"), [("f16", "nearest"), ("f16_rtz", "zero")])
def test_to_f16(probe: ctypes.CDLL, name: str, rounding: str) -> None:
    x = samples(formats.F16)
    got, nan = call(probe, name, x, np.uint16), np.isnan(x)
    np.testing.assert_array_equal(got[~nan], formats.F16.encode(values(x[~nan]), rounding=rounding))
    assert np.isnan(got[nan].view(np.float16)).all()
    if rounding == "nearest":
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got[~nan], x[~nan].astype(np.float16).view(np.uint16))


def test_from_f16(probe: ctypes.CDLL) -> None:
    x = np.arange(1 << 16).astype(np.uint16)
    np.testing.assert_array_equal(values(call(probe, "from_f16", x, np.float32)), formats.F16.decode(x))


def test_bf16(probe: ctypes.CDLL) -> None:
    x = samples(formats.BF16)
    got, nan = call(probe, "bf16", x, np.uint16), np.isnan(x)
    np.testing.assert_array_equal(got[~nan], formats.BF16.encode(values(x[~nan])))
    assert np.isnan(formats.BF16.decode(got[nan])).all()
    torch_bits = torch.from_numpy(x[~nan]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got[~nan], torch_bits)
    codes = np.arange(1 << 16).astype(np.uint16)
    np.testing.assert_array_equal(values(call(probe, "from_bf16", codes, np.float32)), formats.BF16.decode(codes))


@pytest.mark.parametrize(("fmt", "dtype"), EIGHT_BIT)
def test_from_eight_bits(probe: ctypes.CDLL, fmt: formats.Format, dtype: torch.dtype) -> None:
    codes = np.arange(256).astype(np.uint8)
    got = call(probe, "from_e8", codes, np.float32, fmt)
    np.testing.assert_array_equal(values(got), fmt.decode(codes))
    np.testing.assert_array_equal(got, torch.from_numpy(codes).view(dtype).float().numpy())
    assert not np.signbit(got[0])
    assert np.signbit(got[128]) == (fmt.specials != "fnuz") or np.isnan(got[128])


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("fmt", "dtype"), EIGHT_BIT)
def test_to_eight_bits(probe: ctypes.CDLL, fmt: formats.Format, dtype: torch.dtype, saturate: bool) -> None:
    x = samples(fmt)
    got, nan = call(probe, "e8", x, np.uint8, fmt, saturate=saturate), np.isnan(x)
    expected = fmt.encode(values(x[~nan]), saturate=saturate)
    np.testing.assert_array_equal(got[~nan], expected)
    assert np.isnan(fmt.decode(got[nan])).all()
    inside = ~nan & (np.abs(values(np.nan_to_num(x))) <= fmt.magnitudes[fmt.largest])
    torch_codes = torch.from_numpy(x[inside]).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got[inside], torch_codes)


@pytest.mark.parametrize(("fmt", "dtype"), EIGHT_BIT)
def test_overflow_to_eight_bits(probe: ctypes.CDLL, fmt: formats.Format, dtype: torch.dtype) -> None:
    largest = fmt.magnitudes[fmt.largest]
    x = np.array([largest, 2 * largest, -2 * largest, np.inf, -np.inf, np.nan], np.float32)
    got = fmt.decode(call(probe, "e8", x, np.uint8, fmt))
    over = [np.inf, -np.inf] if fmt is formats.BF8 else [np.nan, np.nan]
    np.testing.assert_array_equal(got, [largest, *over, *over, np.nan])
    clamped = fmt.decode(call(probe, "e8", x, np.uint8, fmt, saturate=True))
    np.testing.assert_array_equal(clamped, [largest, largest, -largest, largest, -largest, np.nan])


@pytest.mark.parametrize(("fmt", "dtype"), EIGHT_BIT)
def test_stochastic_rounding_to_eight_bits(probe: ctypes.CDLL, fmt: formats.Format, dtype: torch.dtype) -> None:
    """No noise truncates, full noise rounds up what is inexact, and the mean is the value."""
    rng = np.random.default_rng(1)
    normal = float(fmt.magnitudes[1 << fmt.mantissa])
    x = (rng.uniform(1, 30, 20_000) * normal * rng.choice([-1, 1], 20_000)).astype(np.float32)
    code = fmt.encode(np.abs(values(x)), rounding="zero")
    low = call(probe, "e8_sr", np.abs(x), np.uint8, fmt)
    np.testing.assert_array_equal(low, code)
    high = call(probe, "e8_sr", np.abs(x), np.uint8, fmt, random=np.full(x.size, 0xFFFFFFFF))
    np.testing.assert_array_equal(high, code + (fmt.decode(code) != np.abs(values(x))))
    one = np.full(1 << 16, np.float32(normal * (1 + 0.3 / (1 << fmt.mantissa))))
    random = rng.integers(0, 1 << 32, one.size, dtype=np.uint64).astype(np.uint32)
    mean = fmt.decode(call(probe, "e8_sr", one, np.uint8, fmt, random=random)).mean()
    step = normal / (1 << fmt.mantissa)
    assert abs(mean - one[0]) < 5 * step / 256


def test_stochastic_rounding_to_bf16(probe: ctypes.CDLL) -> None:
    x = np.full(1 << 16, np.float32(1 + 0.3 / 128))
    got = call(probe, "bf16_sr", x, np.uint16, random=np.arange(1 << 16))
    assert set(got) == {0x3F80, 0x3F81}
    np.testing.assert_allclose(np.mean(got == 0x3F81), 0.3, atol=1e-4)
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    kept = formats.BF16.decode(call(probe, "bf16_sr", special, np.uint16, random=np.full(3, 0xFFFF)))
    np.testing.assert_array_equal(kept, values(special))
