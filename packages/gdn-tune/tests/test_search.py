"""Children that run trials: what kills one marks its candidate, the rest goes on, a second run does what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from gdn_tune import pool
from gdn_tune.pool import Answer, run_job
from gdn_tune.records import Facts, Sample
from gdn_tune.search import jobs, newest, search
from gdn_tune.store import Store
from gdn_tune.wire import key_values, parse_key, parse_sample, sample_values
from tune_testing import make_key, make_sample

RUNNER = "tune_testing.runners:run"
SUPPORT = str(Path(__file__).parent / "support")


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children that find the runners, and are gone after a test."""
    known = os.pathsep.join(path for path in (SUPPORT, os.environ.get("PYTHONPATH", "")) if path)
    monkeypatch.setenv("PYTHONPATH", known)
    yield
    pool.close_children()


def run(store: Store, *cases: str, timeout: float = 20.0, **where: Any) -> list[Answer]:
    return search(store, jobs(store, "k5", cases, "gfx942", timeout=timeout, runner=RUNNER), **where)


def fates(samples: Any) -> dict[tuple[str, int], str]:
    return {(sample.key.case, sample.key.config["block_v"]): sample.status for sample in samples}


def test_whatever_ends_a_child_is_its_candidate_s_and_the_run_goes_on(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        answers = run(store, "killed-32", "hang-16", "exit-64", "sound", timeout=1.5)
        assert [answer.job["case"] for answer in answers] == ["killed-32", "hang-16", "exit-64", "sound"]
        assert not any(answer.error for answer in answers)
        samples = list(store.samples())
        crashed = {("killed-32", 32), ("hang-16", 16), ("exit-64", 64)}
        expected = {
            (name, width): "ok" for name in ("killed-32", "hang-16", "exit-64", "sound") for width in (16, 32, 64)
        }
        assert fates(samples) == expected | dict.fromkeys(crashed, "crashed")
        assert len(samples) == 12
        details = {sample.key.case: sample.detail for sample in samples if sample.status == "crashed"}
        assert details["killed-32"].startswith("the process ended with signal 11")
        assert details["hang-16"] == "no report for 1.5 s; killed"
        assert "exit status 1" in details["exit-64"] and "memory fault by GPU node-1" in details["exit-64"]
        # A second run has nothing to do: crashed candidates are not tried again.
        assert not any(answer.samples for answer in run(store, "killed-32", "hang-16", "exit-64", "sound"))
        assert len(store) == 12


def test_faults_that_are_no_candidate_s(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        wrong, dead, between, fine = run(store, "error-0", "idle-0", "settled-32", "sound")
        assert wrong.error == "ValueError: no such device" and not wrong.samples
        assert dead.error == "the process ended with signal 9" and not dead.samples
        # What was settled is kept as it was; the rest is for the next run.
        assert between.error.startswith(dead.error) and [sample.status for sample in between.samples] == ["ok", "ok"]
        assert not fine.error and len(store) == 5


def test_a_run_that_is_killed_is_taken_up_where_it_was(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from gdn_tune.search import jobs, search
from gdn_tune.store import Store
with Store(Path({str(tmp_path / "store")!r})) as store:
    given = jobs(store, "k5", ["sound", "slow-60000"], "gfx942", runner={RUNNER!r})
    search(store, given, done=lambda answer: print(flush=True))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # the first case is in the store, the second one runs
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with Store(tmp_path / "store") as store:
        before = [sample.host for sample in store.samples()]
        assert len(before) == 3
        first, second = run(store, "sound", "slow-1")
        assert not first.samples and len(second.samples) == 3
        assert [sample.host for sample in store.samples()][:3] == before


def test_a_child_serves_all_jobs_of_its_device_one_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        run(store, "sound", "sound-2", "sound-3", "sound-4", devices=("-0", "-1"))
        assert len({sample.host for sample in store.samples()}) == 2


def test_a_gpu_is_all_that_its_child_sees() -> None:
    child = pool.Child("5")
    try:
        environment = Path(f"/proc/{child._process.pid}/environ").read_bytes().split(b"\0")
        assert {b"HIP_VISIBLE_DEVICES=5", b"CUDA_VISIBLE_DEVICES=5"} <= set(environment)
    finally:
        child.close()


class DyingWorkers(Executor):
    """Fails so many times before it runs anything."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths

    def submit(self, function: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.deaths -= 1
        if self.deaths >= 0:
            future.set_exception(RuntimeError("a worker died"))
        else:
            future.set_result(function(*args))
        return future


def test_a_job_whose_worker_dies_is_given_to_another(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        (answer,) = run(store, "sound", executor=DyingWorkers(2))
        assert not answer.error and len(store) == 3
        (answer,) = run(store, "killed-16", executor=DyingWorkers(3))
        assert answer.error == "RuntimeError: a worker died" and len(store) == 3


def test_jobs_carry_what_the_store_knows(tmp_path: Path) -> None:
    ok, other = make_sample(32, 10.0, 30.0, 20.0), make_sample(32, 5.0, key={"arch": "gfx950"})
    wrong = Sample(make_key(64), "wrong", error=3.0)
    with Store(tmp_path / "store") as store:
        store.add(ok, wrong, other)
        first, second = jobs(store, "k5", ["varlen-640", "another"], "gfx942", compute_units=80)
        assert second["done"] == [] and first["units"] == 80
        known = {(parse_key(entry["key"]), entry["status"], entry["us"]) for entry in first["done"]}
        assert known == {(ok.key, "ok", 20.0), (wrong.key, "wrong", None)}
        assert newest([ok, Sample(ok.key, "crashed")])[ok.key] == ("crashed", None)


def test_what_crosses_is_text_that_comes_back_equal() -> None:
    sample = make_sample(32, 1.5, 2.0, error=0.25, counters=Facts(valu=3))
    assert parse_sample(json.loads(json.dumps(sample_values(sample)))) == sample
    assert parse_key(json.loads(json.dumps(key_values(sample.key)))) == sample.key


# ------------------------------------------------------------------------------------------------ dask


def test_a_cluster_fills_one_store_though_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("dask")
    distributed = pytest.importorskip("distributed")
    killed: list[int] = []
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        client.get_executor(pure=False, retries=0) as executor,
        Store(tmp_path / "store") as store,
    ):

        def kill_one(_: Answer) -> None:
            if not killed:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        names = ["sound", "slow-200", "killed-32", "slow-210", "slow-220"]
        answers = run(store, *names, executor=executor, done=kill_one)
        assert len(killed) == 1 and not any(answer.error for answer in answers)
        assert fates(store.samples()) == {
            (name, width): "crashed" if (name, width) == ("killed-32", 32) else "ok"
            for name in names
            for width in (16, 32, 64)
        }
    assert not orphans()


def orphans() -> list[int]:
    """Children of the tuner that outlive their worker."""
    for _ in range(50):
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
                line = (entry.parent / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"gdn_tune.child" in line and fields[1] == "1":
                found.append(int(entry.parent.name))
        if not found:
            break
        time.sleep(0.1)
    return found


def test_run_job_never_raises_for_a_child() -> None:
    job = {"runner": "nowhere:run", "case": "sound", "done": [], "timeout": 5.0, "commit": "", "arch": "gfx942"}
    answer = json.loads(run_job(json.dumps(job)))
    assert answer == {"samples": [], "error": "ModuleNotFoundError: No module named 'nowhere'"}
