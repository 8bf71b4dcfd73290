"""FlyDSL probes of one instruction family each, compiled here and run on the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.compiled import ARCHS, Compiled
from torch import Tensor

pytest.importorskip("flydsl")
from kernels.flydsl_compile import compile_probes

FLOAT8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


@pytest.fixture(scope="session", params=ARCHS)
def probes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    return compile_probes(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def run(probes: dict[str, Compiled]) -> Callable[..., None]:
    def launch(name: str, *args: Tensor | int, blocks: int = 1) -> None:
        import cdna_emu

        if name not in probes:
            pytest.skip(f"{name}: gfx950 only")
        compiled = probes[name]
        result = cdna_emu.launch(
            compiled.elf,
            kernel=compiled.name,
            grid=(blocks, 1, 1),
            block=(compiled.threads, 1, 1),
            args=args,
            dynamic_lds=compiled.dynamic_lds,
        )
        assert result.report.ok, str(result.report)

    return launch


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_buffer_copy_stops_at_the_resource(run: Callable[..., None]) -> None:
    """4000 of 8192 bytes are in the resource: 250 whole rows of 16 bytes; the rest reads as zero."""
    src, dst = normal(2048), torch.full((2048,), -1.0)
    run("buffer_copy", src, dst, 4000, blocks=2)
    assert torch.equal(dst, torch.where(torch.arange(2048) < 1000, src, 0.0))


def test_short_access_beside_the_end_of_the_resource(run: Callable[..., None]) -> None:
    """301 bytes hold 150 whole elements; the 151st is out of range on both sides, so its target keeps its value."""
    src, dst = normal(256, dtype=torch.bfloat16), torch.full((256,), 7.0, dtype=torch.bfloat16)
    run("buffer_short", src, dst, 301)
    assert torch.equal(dst, torch.where(torch.arange(256) < 150, src, 7.0).to(torch.bfloat16))


@pytest.mark.parametrize("name", ["lds_reverse", "lds_direct"])
def test_lds_round_trip(run: Callable[..., None], name: str) -> None:
    src, dst = normal(256), torch.zeros(256)
    run(name, src, dst)
    assert torch.equal(dst, src.flip(0))


@pytest.mark.parametrize(("name", "k"), [("mfma_bf16_k16", 16), ("mfma_bf16_k32", 32)])
def test_mfma_bf16(run: Callable[..., None], name: str, k: int) -> None:
    a, b = normal(16, k, dtype=torch.bfloat16), normal(16, k, seed=1, dtype=torch.bfloat16)
    c = torch.zeros(16, 16)
    run(name, a, b, c)
    torch.testing.assert_close(c, (a.double() @ b.double().T).float(), rtol=1e-5, atol=1e-5)


def test_mfma_fp8_reads_the_format_of_the_architecture(run: Callable[..., None], probes: dict[str, Compiled]) -> None:
    dtype = FLOAT8[probes["mfma_fp8"].arch]
    a, b = normal(16, 32).to(dtype), normal(16, 32, seed=1).to(dtype)
    c = torch.zeros(16, 16)
    run("mfma_fp8", a, b, c)
    torch.testing.assert_close(c, (a.double() @ b.double().T).float(), rtol=1e-5, atol=1e-5)


def test_transposed_lds_read(run: Callable[..., None]) -> None:
    """Sixteen lanes point at the rows of a [4, 16] tile, four elements each, and lane l gets its column l."""
    src, dst = torch.arange(256).to(torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
    run("lds_transpose", src, dst)
    tiles = src.reshape(4, 4, 16)  # group of lanes, row, column: the 16 lanes of a group point at 64 adjacent elements
    assert torch.equal(dst.reshape(4, 16, 4), tiles.transpose(1, 2))


def test_shuffles(run: Callable[..., None]) -> None:
    src, dst = normal(64), torch.zeros(9, 64)
    run("shuffles", src, dst)
    lane = torch.arange(64)
    for row, offset in enumerate((1, 2, 4, 8, 16, 32)):
        assert torch.equal(dst[row], src[lane ^ offset]), f"xor {offset}"
    assert torch.equal(dst[6, 3:], src[:-3])
    assert torch.equal(dst[7, :-5], src[5:])
    assert torch.equal(dst[8], src[9].expand(64))


def test_dpp(run: Callable[..., None]) -> None:
    """Every control of gfx9, with lanes that have no source keeping the old value."""
    src, dst = torch.arange(64, dtype=torch.int32), torch.zeros(10, 64, dtype=torch.int32)
    run("dpp", src, dst)
    lane = torch.arange(64)
    row, place = lane // 16, lane % 16
    sources = [
        lane // 4 * 4 + (3 - lane % 4),
        torch.where(place + 1 < 16, lane + 1, -1),
        torch.where(place >= 3, lane - 3, -1),
        row * 16 + (place + 1) % 16,
        torch.where(lane + 1 < 64, lane + 1, -1),
        lane - 1,
        row * 16 + 15 - place,
        lane // 8 * 8 + 7 - lane % 8,
        torch.where(row > 0, row * 16 - 1, -1),
        torch.where(row > 1, 31, -1),
    ]
    for k, source in enumerate(sources):
        assert torch.equal(dst[k], source.int()), f"control {k}: {dst[k]}"


def test_bf16_conversion_rounds_to_even(run: Callable[..., None]) -> None:
    src = normal(256)
    src[:6] = torch.tensor([float("nan"), float("inf"), -0.0, 1.00390625, 1.01171875, 3.4e38])
    dst = torch.zeros(256, dtype=torch.bfloat16)
    run("to_bf16", src, dst)
    assert dst[0].isnan()
    assert torch.equal(dst[1:], src[1:].to(torch.bfloat16))


def test_fp8_conversion(run: Callable[..., None], probes: dict[str, Compiled]) -> None:
    dtype = FLOAT8[probes["to_fp8"].arch]
    src, dst = normal(64, 4) * 30, torch.zeros(64, dtype=torch.int32)
    run("to_fp8", src, dst)
    assert torch.equal(dst.view(dtype).reshape(64, 4).float(), src.to(dtype).float())
