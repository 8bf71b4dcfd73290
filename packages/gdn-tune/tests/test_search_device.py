"""What runs on a card, with a card that is made up: the order of replays and events, whose fault is whose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gdn_runtime.errors import UnsupportedError
from gdn_tune import measure, trial, tune_command
from gdn_tune.measure import Limits, graph_timer, input_sets
from gdn_tune.trial import Trial
from gdn_tune.wire import parse_key, parse_sample


class FakeCard:
    """``torch.cuda``: what is launched takes its time on the device, in the order in which it is queued."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_ms = 0.0
        self.capturing = False
        self.cycles_per_ms = 2_000_000.0

    def launch(self, name: str, ms: float) -> None:
        self.log.append(name)
        if not self.capturing:
            self.now_ms += ms

    def install(self, patch: pytest.MonkeyPatch) -> None:
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                card.log.append("event")
                self.at = card.now_ms

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.ms = 0.0

            def replay(self) -> None:
                card.launch("replay", self.ms)

        @contextlib.contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            card.capturing, first = True, len(card.log)
            yield
            card.capturing = False
            graph.ms = 0.5 * (len(card.log) - first)

        fakes: dict[str, Any] = {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": capture,
            "synchronize": lambda *_: card.log.append("wait"),
            "_sleep": lambda cycles: card.launch("sleep", cycles / card.cycles_per_ms),
            "get_device_name": lambda *_: "a card",
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        measure.backlog_cycles.cache_clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    fake = FakeCard()
    fake.install(monkeypatch)
    yield fake
    measure.backlog_cycles.cache_clear()


def test_replays_are_timed_one_by_one_behind_a_backlog(card: FakeCard) -> None:
    calls: list[Callable[[], None]] = [lambda: card.launch("call", 0.5), lambda: card.launch("call", 0.5)]
    timed = graph_timer(calls)
    assert card.log[:6] == ["call", "call", "replay", "replay", "replay", "wait"]
    card.log.clear()
    assert timed(3) == pytest.approx([500.0] * 3)  # 1 ms of two calls
    assert card.log == ["sleep", "replay", *["event", "replay", "event"] * 3, "wait"]


@pytest.mark.parametrize("cycles_per_ms", [2_000_000.0, 100_000.0])
def test_the_backlog_is_as_long_whatever_a_cycle_is(card: FakeCard, cycles_per_ms: float) -> None:
    """An SM's clock, and the counter of 100 MHz that AMD has."""
    card.cycles_per_ms = cycles_per_ms
    assert measure.backlog_cycles() / cycles_per_ms == pytest.approx(2.0)


@pytest.mark.parametrize(("hip", "cache"), [(None, 50 * 2**20), ("7.0", 256 * 2**20)])
def test_inputs_outgrow_the_last_cache(monkeypatch: pytest.MonkeyPatch, hip: str | None, cache: int) -> None:
    class Properties:
        L2_cache_size = 50 * 2**20 if hip is None else 4 * 2**20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    for size in (1, 10**6, 2**30):
        sets = input_sets(size, torch.device("cuda", 0))
        assert sets >= 2 and sets * size >= 3 * cache and (sets == 2 or (sets - 1) * size < 3 * cache)


@pytest.mark.parametrize(
    ("hip", "shown", "expected"),
    [
        (None, {}, ["0", "1"]),
        (None, {"CUDA_VISIBLE_DEVICES": "3, 5"}, ["3", "5"]),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b,9", "HIP_VISIBLE_DEVICES": "7"}, ["GPU-1a", "GPU-2b"]),
        ("7.0", {"CUDA_VISIBLE_DEVICES": "3,5", "HIP_VISIBLE_DEVICES": "2,6"}, ["2", "6"]),
        ("7.0", {"CUDA_VISIBLE_DEVICES": "3,5"}, ["3", "5"]),
    ],
)
def test_children_get_the_cards_that_the_environment_shows(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, shown: dict[str, str], expected: list[str]
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert tune_command.local_devices(None, model=False) == expected
    assert tune_command.local_devices(1, model=False) == expected[:1]
    with pytest.raises(ValueError, match="workers: got 3, expected at most 2"):
        tune_command.local_devices(3, model=False)


# ------------------------------------------------------------------------------------------------ a case on a card


class FakeLoad:
    """A call whose result is 1; candidates by the fate that ``fates`` has for their tile."""

    bytes = 1000

    def __init__(self, card: FakeCard, fates: dict[int, str], room: int = 9) -> None:
        self.card, self.fates, self.room = card, fates, room

    def copy(self) -> FakeLoad:
        if self.room < 2:
            raise torch.cuda.OutOfMemoryError("no room for a copy")
        return FakeLoad(self.card, self.fates, self.room - 1)

    def outputs(self) -> dict[str, torch.Tensor]:
        return {"o": torch.full((2, 2, 2), float("nan"))}

    def expected(self) -> dict[str, torch.Tensor]:
        return {"o": torch.ones(2, 2, 2)}

    def run(self, choice: Any, out: dict[str, torch.Tensor]) -> None:
        width = choice.state_scan.config.block_v
        fate = self.fates.get(width, "")
        if fate == "refused":
            raise UnsupportedError("shared memory", got=1 << 20, supported=["less"])
        if fate == "fault":
            raise RuntimeError("an illegal memory access was encountered")
        out["o"].fill_(2.0 if fate == "wrong" else 1.0)
        self.card.launch(f"run {width}", width / 100)


def run_case(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, fates: dict[int, str], *, room: int = 9, **job: Any
) -> list[dict[str, Any]]:
    """Reports of three candidates, the ways of tiles 16, 32 and 64; they end with what the trial raises."""
    reports: list[dict[str, Any]] = []
    found = Trial("k5", trial.cases_of("k5")["snapshot-35b-tp1-8192-bf16"], "sm90", 132, torch.device("cpu"))
    configs = [{"block_v": width, "num_warps": 4, "num_stages": 2} for width in (16, 32, 64)]
    monkeypatch.setattr(trial, "trial_of", lambda _: found)
    monkeypatch.setattr(Trial, "configs", property(lambda _: configs))
    monkeypatch.setattr(Trial, "workload", lambda _: FakeLoad(card, fates, room))
    monkeypatch.setattr(trial.measure, "input_sets", lambda *_: 3)
    limits = {"block": 10, "first": 20, "most": 20}
    given = {"limits": limits, "commit": "", "done": [], **job}
    try:
        trial.run(given, reports.append)
    except RuntimeError as error:
        reports.append({"raised": str(error)})
    return reports


def statuses(reports: list[dict[str, Any]]) -> dict[int, str]:
    samples = [parse_sample(report["sample"]) for report in reports if "sample" in report]
    return {sample.key.config["block_v"]: sample.status for sample in samples}


def test_candidates_that_are_right_are_timed(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = run_case(card, monkeypatch, {16: "wrong", 64: "refused"})
    assert statuses(reports) == {16: "wrong", 64: "skipped", 32: "ok"}
    (timed,) = (parse_sample(each["sample"]) for each in reports if each.get("sample", {}).get("status") == "ok")
    assert timed.n == len(timed.times_us) == Limits(10, 20, 20).first and timed.error == 0
    assert dict(timed.key.protocol) == {"method": "graph", "cache": "rotated", "sets": 3}
    assert timed.key.device == "a card"
    # Nothing is taken twice; whoever is new meets the fastest of the old ones again.
    known = [
        {"key": each["sample"]["key"], "status": each["sample"]["status"], "us": 5.0}
        for each in reports
        if "sample" in each
    ]
    assert run_case(card, monkeypatch, {}, done=known) == []
    assert statuses(run_case(card, monkeypatch, {}, done=known[-1:])) == {16: "ok", 32: "ok", 64: "ok"}


def test_a_fault_is_its_candidate_s(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child reported last before it ended is what is put down as crashed."""
    reports = run_case(card, monkeypatch, {32: "fault"})
    assert "illegal memory access" in reports[-1]["raised"]
    assert parse_key(reports[-2]["start"]).config["block_v"] == 32


def test_want_of_memory_for_the_copies_is_no_candidate_s(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = run_case(card, monkeypatch, {}, room=1)
    assert reports[-2:] == [{"start": None}, {"raised": "no room for a copy"}]
