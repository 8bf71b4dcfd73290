"""The tuner on a GPU: times of graphs, one small case of each op, and a fault that poisons the context of its child."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gdn_runtime.arch import arch_of
from gdn_tune import pool
from gdn_tune.measure import Limits, backlog_cycles, graph_timer, input_sets, race, verdict
from gdn_tune.search import jobs, search
from gdn_tune.store import Store
from gdn_tune.tune_command import local_devices

SUPPORT = str(Path(__file__).parents[1] / "support")
QUICK = Limits(block=10, first=10, most=10)
CASES = {"k5": "grid-dense-35b-tp8-1024-bf16", "prepare": "grid-dense-35b-tp8-1024-bf16",
         "block": "grid-dense-35b-tp8-1024-bf16", "pa": "pa-h8x1-p64-q1-b1-ctx8192"}  # fmt: skip


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = os.pathsep.join(path for path in (SUPPORT, os.environ.get("PYTHONPATH", "")) if path)
    monkeypatch.setenv("PYTHONPATH", known)
    yield
    pool.close_children()


def test_times_of_a_graph_are_those_of_its_calls() -> None:
    """Twice the work takes twice the time, on inputs that no cache holds; the clock is that of the device."""
    size = 64 * 2**20
    x = [torch.ones(size, device="cuda") for _ in range(4)]

    def once() -> None:
        x[0].mul_(1.0)

    def twice() -> None:
        x[1].mul_(1.0)
        x[2].mul_(1.0)

    once(), twice()
    times = race([graph_timer([once, once]), graph_timer([twice, twice])], QUICK)
    one, two = map(statistics.median, times)
    assert 1.8 < two / one < 2.2 and verdict(times) == (0, [])
    assert 8 * size / (one * 1e-6) < 20e12  # bytes/s of a read and a write: no memory is that fast
    assert backlog_cycles() > 0 and input_sets(2**20, torch.device("cuda", 0)) >= 2


@pytest.mark.parametrize("op", CASES)
def test_a_small_case(op: str, tmp_path: Path) -> None:
    """Most candidates are right, whatever is refused says why, and a second run has nothing to do."""
    arch = arch_of(torch.device("cuda", torch.cuda.current_device())).name
    devices = local_devices(1, model=False)
    with Store(tmp_path / "store") as store:
        given = jobs(store, op, [CASES[op]], arch, limits=QUICK)  # type: ignore[arg-type]
        (answer,) = search(store, given, devices=devices)
        assert not answer.error
        found = {sample.key.config.text: sample for sample in answer.samples}
        bad = {text: sample.detail for text, sample in found.items() if sample.status in ("wrong", "crashed")}
        assert not bad
        good = [sample for sample in found.values() if sample.status == "ok"]
        assert len(good) >= 2 and all(sample.n == len(sample.times_us) == QUICK.first for sample in good)
        assert all(sample.detail for sample in found.values() if sample.status == "skipped")
        again = jobs(store, op, [CASES[op]], arch, limits=QUICK)  # type: ignore[arg-type]
        assert not search(store, again, devices=devices)[0].samples


def test_a_fault_of_the_device_ends_its_candidate_alone(tmp_path: Path) -> None:
    """The context of the child is lost: it dies, its candidate is marked, and a new child does the rest."""
    with Store(tmp_path / "store") as store:
        given = jobs(store, "k5", ["fault-32"], "gfx942", runner="tune_testing.runners:run", timeout=120)
        (answer,) = search(store, given, devices=local_devices(1, model=False))
        status = {sample.key.config["block_v"]: sample.status for sample in answer.samples}
        assert not answer.error and status == {16: "ok", 32: "crashed", 64: "ok"}
    assert torch.ones(2, device="cuda").sum().item() == 2  # ours is another context
