"""A build over a cluster of dask.distributed, on this machine: the bytes of a local one, also if a worker is killed."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn_aot import pool
from gdn_aot.cli import app, open_executor
from gdn_aot.pool import Outcome, compile_all
from gdn_testing.probe import ProbeSpec

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

SPECS = [ProbeSpec(arch, variant=n) for n in range(3) for arch in ("gfx942", "gfx950")]


def test_a_cluster_gives_the_bytes_of_a_local_build_though_a_worker_is_killed(tmp_path: Path) -> None:
    local = [outcome.code for outcome in compile_all(SPECS, workers=1)]
    pool.close_servers()
    killed: list[int] = []
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    ) as cluster:

        def kill_one(_: Outcome) -> None:
            if not killed:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        with ExitStack() as stack:
            executor = open_executor(f"dask:{cluster.scheduler_address}", stack)
            outcomes = compile_all(SPECS, executor=executor, kept=tmp_path, done=kill_one)
    assert len(killed) == 1
    assert [outcome.error for outcome in outcomes] == [""] * len(SPECS)
    assert [outcome.code for outcome in outcomes] == local and None not in local
    assert all(outcome.kept for outcome in compile_all(SPECS, kept=tmp_path))


def test_no_scheduler_there(tmp_path: Path, compiler: Any) -> None:
    build = ["build", "--arch", "gfx950", "--kernel", "triton", "--out", str(tmp_path / "out")]
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        result = CliRunner().invoke(app, [*build, "--executor", "dask:tcp://127.0.0.1:9"])
    assert result.exit_code == 2 and "no scheduler at tcp://127.0.0.1:9" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists() and not compiler.asked
