"""The Hopper kernel as it is compiled, without a GPU: what Triton and ptxas got wrong before, registers, copies."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pa_decode.spec import AttentionSpec

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted", allow_module_level=True)

from pa_decode.kernels.gluon import hopper  # noqa: E402  # needs Triton

NO_SWIZZLE = 0


def spec(**changes: object) -> AttentionSpec:
    fields: dict[str, object] = {
        "arch": "sm90",
        "head_dim": 256,
        "page_size": 64,
        "group_size": 8,
        "query_length": 4,
        "query_dtype": "bf16",
        "scale_mode": "tensor",
        "v_packed": True,
        "windowed": False,
        "single_tile": False,
        "kernel": "hopper",
    }
    return AttentionSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "of_a_group"), [(1, 4), (8, 4), (9, 8), (15, 8), (16, 8), (17, 16), (32, 16)])
def test_rows_of_a_group(rows: int, of_a_group: int) -> None:
    assert hopper.group_rows(rows) == of_a_group
    assert 2 * of_a_group >= rows


def test_parameters_are_the_arguments_of_the_spec() -> None:
    """But for the caches, which are handed over as tensor maps with their numbers of blocks in them."""
    names = [argument.name for argument in AttentionSpec.ARGUMENTS]
    renamed = {"k_cache": "k_pages", "v_cache": "v_pages"}
    expected = [renamed.get(name, name) for name in names if not name.startswith("num_blocks")]
    signature = hopper.source(spec()).signature
    assert list(signature)[: len(expected)] == expected
    wide = {argument.name for argument in AttentionSpec.ARGUMENTS if argument.kind == "i64"}
    assert {name for name, kind in signature.items() if kind == "i64"} == wide


def matrix_descriptors(ptx: str) -> list[int]:
    """Constant parts of the shared-memory descriptors of wgmma, 64 bits each."""
    operands = set(re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (%rd\d+), (%rd\d+)", ptx))
    names = {name for pair in operands for name in pair}
    constants = re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), %rd\d+, (\d+);", ptx)
    return [int(value) for name, value in constants if name in names]


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({"v_packed": False, "windowed": True}, 2 * 2),
        ({"page_size": 16, "scale_mode": "token", "windowed": True, "query_length": 3, "group_size": 5}, 2 * 8),
    ],
)
def test_code(changes: dict[str, object], copies: int, tmp_path: Path) -> None:
    """About 5 s of CPU each."""
    one = spec(**changes)
    compiled = hopper.compile_spec(one)
    descriptors = matrix_descriptors(compiled.asm["ptx"])
    assert descriptors
    for value in descriptors:
        # Triton 3.6 lets bits of an offset run into the base offset, bits 49 to 51: page 16 then reads wild addresses.
        assert value >> 62 != NO_SWIZZLE or not (value >> 49) & 7
    assert compiled.metadata.shared <= 232448
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    run = subprocess.run([tool, "-res-usage", "-sass", cubin], capture_output=True, text=True, check=True)
    assert re.search(r"STACK:0\b", run.stdout) and not re.search(r"\b(LDL|STL)\b", run.stdout)
    rows = hopper.group_rows(one.rows)
    # Both groups: 8 of K over 2 halves, 4 of V over 4 parts of 64; both parts of q or P in one.
    assert len(re.findall(r"\bQGMMA\b", run.stdout)) == 2 * (2 * 8 + 4 * 4)
    assert len(re.findall(r"\bUTMALDG\b", run.stdout)) == copies
    # Back from FP8: the weights alone, in pairs. ptxas 12.8 lost half of such conversions of the query.
    assert len(re.findall(r"UNPACK_B\b", run.stdout)) == 2 * 128 * rows // 128 // 2
