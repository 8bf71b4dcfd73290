"""Compiling: every kind of failure is that of its own job, results are the same bytes everywhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gdn_testing
from gdn_runtime.codeobject.emulate import EmulatorLauncher, collect_results
from gdn_runtime.errors import CompileError, EmulatedFaultError, UnsupportedError
from gdn_runtime.kernels.compile import CompileServer
from gdn_runtime.spec import (
    L2NormSpec,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareSpec,
    StateScanConfig,
    StateScanSpec,
)
from gdn_testing.probe import ProbeSpec

SOURCE = Path(gdn_testing.__file__).parents[3] / "src" / "gdn_runtime"


@pytest.fixture(scope="module")
def server() -> Iterator[CompileServer]:
    server = CompileServer()
    yield server
    server.close()


def process_of(server: CompileServer) -> int:
    assert server._process is not None and server._process.poll() is None
    return server._process.pid


def test_a_kernel_is_compiled_and_runs(server: CompileServer, arch: str) -> None:
    code = server.compile(ProbeSpec(arch))
    facts = code.facts
    assert (facts.arch, facts.block, facts.kernarg_bytes, facts.lds_bytes) == (arch, (64, 1, 1), 32, 0)
    assert (facts.scratch_bytes, facts.vgpr_spills, facts.sgpr_spills) == (0, 0, 0) and 0 < facts.vgprs <= 16
    source, target = torch.arange(200.0), torch.full((130,), float("nan"))
    kernel = EmulatorLauncher(arch).load(code)
    with collect_results() as results:
        kernel((2, 1, 1), [source, target, 3, 128, 2.0])
    assert torch.equal(target[:128], source[3:131] * 2) and target[128:].isnan().all()
    assert len(results) == 1 and not results[0].report and results[0].kernel == facts.symbol
    kernel((1, 1, 1), [source, target, 0, 1, 2.0])
    assert len(results) == 1  # the collector is closed


def test_what_the_emulator_finds_is_an_error_that_shows_it(server: CompileServer, arch: str) -> None:
    kernel = EmulatorLauncher(arch).load(server.compile(ProbeSpec(arch)))
    source, target = torch.zeros(128), torch.zeros(128)
    with pytest.raises(
        EmulatedFaultError, match=r"(?s)probe_0: 1 finding .*outside every argument.*global_load"
    ) as caught:
        kernel((2, 1, 1), [source[:127], target, 0, 128, 1.0])
    assert len(caught.value.report) == 1
    with pytest.raises(EmulatedFaultError):
        kernel((1, 1, 1), [None, target, 0, 1, 1.0])
    strided = torch.zeros(64, 2)[:, 0]  # spans 127 elements
    kernel((2, 1, 1), [strided, target, 0, 127, 1.0])
    with pytest.raises(ValueError, match="three positive extents"):
        kernel((0, 1, 1), [source, target, 0, 128, 1.0])


@pytest.mark.parametrize(
    ("deed", "reason", "said"),
    [
        ("lds over the limit", "the compiler reported an error and went on", r"local memory \(\d+\) exceeds limit"),
        ("wrong arch", "the compiler died of SIGABRT", "LLVM ERROR: Cannot select"),
        ("raise", "KeyError: 'the probe was told to raise'", "Traceback"),
    ],
)
def test_a_failure_is_that_of_its_job_alone(
    server: CompileServer, arch: str, deed: str, reason: str, said: str
) -> None:
    server.compile(ProbeSpec(arch))
    process = process_of(server)
    with pytest.raises(CompileError, match=rf"(?s)compiling probe \(arch={arch} deed={deed}.*{said}") as caught:
        server.compile(ProbeSpec(arch, deed))  # type: ignore[arg-type]
    assert caught.value.reason == reason
    assert server.compile(ProbeSpec(arch)).facts.arch == arch
    assert process_of(server) == process


def test_a_job_that_takes_too_long_is_killed(server: CompileServer) -> None:
    server.compile(ProbeSpec("gfx942"))
    process = process_of(server)
    with pytest.raises(CompileError, match=r"not done after 0\.5 s, killed"):
        server.compile(ProbeSpec("gfx942", "sleep"), timeout=0.5)
    assert children_of(process) == []
    assert server.compile(ProbeSpec("gfx942")) and process_of(server) == process


def test_a_server_that_dies_is_replaced(server: CompileServer) -> None:
    server.compile(ProbeSpec("gfx942"))
    process = process_of(server)
    killer = threading.Timer(1.0, os.kill, (process, signal.SIGKILL))
    killer.start()
    with pytest.raises(CompileError, match="the compile server ended"):
        server.compile(ProbeSpec("gfx942", "sleep"), timeout=60)
    killer.join()
    assert server.compile(ProbeSpec("gfx942")) and process_of(server) != process


def test_jobs_end_with_their_server_and_servers_with_their_client(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import threading, time\n"
        "from gdn_runtime.kernels.compile import CompileServer\n"
        "from gdn_testing.probe import ProbeSpec\n"
        "server = CompileServer()\n"
        "server.compile(ProbeSpec('gfx942'))\n"
        "threading.Thread(target=server.compile, args=(ProbeSpec('gfx942', 'sleep'),), daemon=True).start()\n"
        "time.sleep(1)\n"
        "print(server._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as client:
        assert client.stdout is not None
        process = int(client.stdout.readline())
        (job,) = children_of(process)
        client.kill()
    for pid in (process, job):
        assert wait_for_end(pid), f"{pid} is still alive"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_end(pid: int) -> bool:
    waiter = threading.Event()
    for _ in range(200):
        status = Path(f"/proc/{pid}/status")
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        waiter.wait(0.1)
    return False


def test_an_illegal_spec_starts_nothing() -> None:
    server = CompileServer()
    with pytest.raises(UnsupportedError, match="q dtype"):
        server.compile(L2NormSpec("gfx942", "fp32", 4))
    assert server._process is None


def test_triton_kernels_go_the_same_way(server: CompileServer, arch: str) -> None:
    norm = server.compile(L2NormSpec(arch, "bf16", 2))
    assert norm.facts.kernarg_bytes == 8 * (len(norm.facts.arguments) + 2)  # two null pointers at the end
    output = server.compile(OutputSpec(arch, "bf16", "bf16", 4, 2, True, True, OutputConfig(64, 4, 1)))
    assert output.facts.dynamic_lds > 0 and output.facts.block == (256, 1, 1) and output.facts.scratch_bytes == 0
    for spec in (
        PrepareSpec(arch, "bf16", "fp32", 4, 2, True, True, PrepareConfig("fused", 4, 1)),
        StateScanSpec(arch, "bf16", "fp32", "bf16", 4, 2, *(True,) * 10, StateScanConfig(32, 4, 1)),
    ):
        assert server.compile(spec).facts.dynamic_lds > 0
    with pytest.raises(CompileError, match="kernels of the spec: got 2, expected 1"):
        server.compile(PrepareSpec(arch, "bf16", "fp32", 4, 2, True, True, PrepareConfig("split", 4, 1)))
    q, k = torch.randn(2, 1, 5, 2, 128).to(torch.bfloat16)
    q_out, k_out = torch.full_like(q, float("nan")), torch.full_like(k, float("nan"))
    strides = (0, 32, 16)  # in units of 8 elements
    EmulatorLauncher(arch).load(norm)(norm.spec.grid(10), [q, k, q_out, k_out, 10, 5, *strides, *strides])  # type: ignore[attr-defined]
    expected = torch.nn.functional.normalize(q.double(), dim=-1)
    assert (q_out.double() - expected).abs().max() < 2e-3


def test_equal_specs_give_equal_bytes_in_other_processes_and_places(server: CompileServer, tmp_path: Path) -> None:
    specs = [spec for arch in ("gfx942", "gfx950") for spec in (ProbeSpec(arch), L2NormSpec(arch, "bf16", 2))]
    copy = tmp_path / "another" / "place"
    shutil.copytree(SOURCE, copy / "gdn_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(gdn_testing.__file__).parent, copy / "gdn_testing")
    script = tmp_path / "other.py"
    script.write_text(
        "from gdn_runtime.kernels import compile\n"
        "from gdn_runtime.spec import L2NormSpec\n"
        "from gdn_testing.probe import ProbeSpec\n"
        f"assert compile.__file__.startswith({str(copy)!r})\n"
        f"for spec in {specs[::-1]!r}:\n"
        "    print(compile.compile_spec(spec).digest)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": str(copy)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [server.compile(spec).digest for spec in specs[::-1]]


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flydsl").mkdir()
    (tmp_path / "flydsl" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'flydsl'\")")
    monkeypatch.syspath_prepend(tmp_path)
    server = CompileServer()
    try:
        with pytest.raises(CompileError, match=r"No module named 'flydsl' .*gdn-runtime\[jit\]"):
            server.compile(ProbeSpec("gfx942"))
    finally:
        server.close()
