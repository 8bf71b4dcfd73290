"""FlyDSL's own cache: what a build puts there is found under run-only, by processes that know nothing of this project's
compile server. Compilers are real."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn_aot import jobs, pool
from gdn_aot.bundle import write_bundle
from gdn_aot.cli import app
from gdn_runtime.codeobject import CodeObject
from gdn_runtime.errors import CompileError
from gdn_runtime.kernels.compile import CompileServer
from gdn_runtime.kernels.jit import write_file
from gdn_runtime.spec import FusedPrepareSpec, KernelSpec, OptStateScanSpec, VkStateScanSpec
from gdn_testing.probe import ProbeSpec

ARCH = "gfx950"


def first(kind: type, **values: object) -> KernelSpec:
    return next(
        spec
        for spec in jobs(ARCH)
        if isinstance(spec, kind) and all(getattr(spec, name) == value for name, value in values.items())
    )


SPECS = [
    first(OptStateScanSpec, block_v=16, is_varlen=True),
    first(VkStateScanSpec, block_v=16),
    first(FusedPrepareSpec, variant="wave"),
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, list[CodeObject]]]:
    """A cache, the bundle beside it, and the codes."""
    root = tmp_path_factory.mktemp("filled")
    outcomes = pool.compile_all(SPECS, workers=1, flydsl_entries=True, kept=root / "kept")
    assert not any(outcome.error for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.entry is not None
        write_file(root / "cache" / outcome.entry.path, outcome.entry.content)
    codes = [outcome.code for outcome in outcomes if outcome.code is not None]
    write_bundle(root / "out", ARCH, codes, [])
    yield root / "cache", root / "out", codes
    pool.close_servers()


CLIENT = """
import hashlib, sys
from gdn_runtime.kernels import toolchain
from gdn_runtime.kernels.flydsl import {kernel}
from gdn_runtime.spec import *
print(hashlib.sha256(toolchain.load_flydsl(*{kernel}.build({spec!r}))).hexdigest())
"""


def launch_in_fresh_process(spec: KernelSpec, cache: Path, arch: str = ARCH) -> subprocess.CompletedProcess[str]:
    """What a stack that loads through FlyDSL does: its variables, its call; HIP alone is replaced."""
    environment = {name: value for name, value in os.environ.items() if name not in ("ROCM_PATH", "ARCH")}
    environment |= {
        "FLYDSL_RUNTIME_RUN_ONLY": "1",
        "FLYDSL_RUNTIME_CACHE_DIR": str(cache),
        "FLYDSL_GPU_ARCH": arch,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    script = CLIENT.format(kernel=spec.kernel, spec=spec)
    return subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True, check=False)


def test_a_fresh_process_finds_them_under_run_only(filled: tuple[Path, Path, list[CodeObject]]) -> None:
    cache, _, codes = filled
    for code in codes[:2]:
        done = launch_in_fresh_process(code.spec, cache)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == hashlib.sha256(code.elf).hexdigest()


def test_what_is_not_there_is_an_error_that_says_so(
    filled: tuple[Path, Path, list[CodeObject]], tmp_path: Path
) -> None:
    done = launch_in_fresh_process(SPECS[0], tmp_path)
    assert done.returncode == 1 and "FLYDSL_RUNTIME_RUN_ONLY=1 but no usable AOT cache" in done.stderr


def test_the_command_checks_every_kernel_of_a_bundle(
    filled: tuple[Path, Path, list[CodeObject]], tmp_path: Path
) -> None:
    cache, out, _ = filled
    result = CliRunner().invoke(app, ["flydsl-cache", str(cache), str(out)])
    assert result.exit_code == 0 and f"{ARCH}: 3 of 3 found, with equal bytes" in result.stdout
    (tmp_path / "launch").mkdir()
    result = CliRunner().invoke(app, ["flydsl-cache", str(tmp_path), str(out), "--limit", "1", "--json"])
    assert result.exit_code == 1 and "no usable AOT cache" in result.stderr
    assert len(json.loads(result.stdout)[ARCH]["failed"]) == 1


def test_a_kernel_that_fails_leaves_no_entry(filled: Any) -> None:
    """FlyDSL itself keeps what LLVM reported to be wrong, and says nothing the next time."""
    server = CompileServer()
    try:
        for _ in range(2):
            with pytest.raises(CompileError, match="exceeds limit"):
                server.compile_with_entry(ProbeSpec("gfx942", "lds over the limit"))
        code, entry = server.compile_with_entry(ProbeSpec("gfx942"))
        assert entry.path.startswith("launch/") and code == server.compile(ProbeSpec("gfx942"))
    finally:
        server.close()


def test_entries_stay_in_their_folder() -> None:
    for path in ("../x.pkl", "/etc/x.pkl", "launch/../../x.pkl", "launch/abc.pkl", f"a/{'0' * 64}.py"):
        with pytest.raises(ValueError, match=r"expected FUNCTION/SHA256\.pkl"):
            pool.FlyDslEntry.from_json({"path": path, "content": ""})
