"""The sweep is set up and skipped as the suite of AMD code objects. What passed is kept: a second run goes on."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pa_testing.configurations import AXES, Configuration
from pa_testing.sweep_record import BEFORE, Record, Run, digest_of_sources

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
SHARED = ROOT / "packages" / "gdn-runtime" / "tests" / "emu" / "conftest.py"
SOURCES = [
    HERE,
    HERE.parent / "support" / "pa_testing",
    ROOT / "packages" / "pa-decode" / "src" / "pa_decode",
    ROOT / "packages" / "gdn-runtime" / "src" / "gdn_runtime" / "codeobject",
    ROOT / "packages" / "cdna-emu" / "src" / "cdna_emu",
]
"""What a test runs beside the code objects. Sources of kernels are not in it: their code objects are."""

EVERY = 30.0
"""Seconds between two lines of progress."""

_spec = importlib.util.spec_from_file_location("sweep_setup_of_gdn_runtime", SHARED)
assert _spec is not None and _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sweep")
    group.addoption("--record", default=str(ROOT / "build" / "sweep"), help="folder that keeps what has passed")
    group.addoption("--fresh", action="store_true", help="forget what has passed, and run all of it again")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _shared.pytest_configure(config)
    if not hasattr(config, "workerinput"):
        record = Record(Path(config.getoption("--record")))
        if config.getoption("--fresh"):
            record.clear()
        config.pluginmanager.register(Progress(config, record), "sweep-progress")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _shared.skip_if_obstructed(items, HERE)


@pytest.fixture(scope="session")
def _record(request: pytest.FixtureRequest) -> tuple[Record, str]:
    return Record(Path(request.config.getoption("--record"))), digest_of_sources(SOURCES, without="kernels")


@pytest.fixture
def sweep(request: pytest.FixtureRequest, _record: tuple[Record, str], record_property: Any) -> Run:
    """The run of this test, whose ``begin`` says whether it has passed before."""
    run = Run(_name(request.node.nodeid), *_record)
    record_property("sweep", run.noted)  # which the test fills
    return run


def _name(nodeid: str) -> str:
    """Without the folder."""
    return nodeid.partition("::")[2]


def _configuration(name: str) -> Configuration | None:
    """Of which configuration a test is, if of one."""
    test, _, parameter = name.rstrip("]").partition("[")
    return Configuration.parse(parameter) if test in ("test_configuration", "test_sentinels") else None


def _group(nodeid: str) -> str:
    """Tests of one group run in one worker, which compiles their kernels once."""
    found = _configuration(_name(nodeid))
    return nodeid if found is None else f"{found.dtype}-{found.mode}-{found.length}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By groups. Not by pytest-xdist's own marks for them, which pytest 9 ignores."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


class Progress:
    """Keeps what passes, says how far the sweep is, and sums up."""

    def __init__(self, config: pytest.Config, record: Record) -> None:
        self.config, self.record = config, record
        self.tests: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.noted: list[dict[str, Any]] = []
        self.started = self.said = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests |= {_name(item.nodeid) for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.tests |= set(map(_name, ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        if report.failed:
            self.outcomes[name] = "failed"
        elif report.skipped:
            self.outcomes[name] = "before" if BEFORE in str(report.longrepr) else "skipped"
        elif report.when == "call":
            self.outcomes[name] = "passed"
        noted = dict(report.user_properties).get("sweep")
        if report.when != "call" or not noted:
            return
        if report.passed:
            self.record.add(name, noted | {"seconds": report.duration})
        if not report.skipped:
            self.noted.append(noted | {"seconds": report.duration})
        now = time.monotonic()
        if now - self.said >= EVERY:
            self.said = now
            self._say()

    def _say(self) -> None:
        ran, done = len(self.noted), len(self.outcomes)
        each = (self.said - self.started) / max(ran, 1)
        left = (len(self.tests) - done) * each / 60
        failed = sum(outcome == "failed" for outcome in self.outcomes.values())
        text = f"{done} of {len(self.tests)}, {failed} failed, {each:.2f} s each, at most {left:.0f} minutes left"
        self.config.get_terminal_writer().line(f"\n{text}", flush=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("sweep")
        line = terminalreporter.write_line
        configurations = {name for name in self.tests if name.startswith("test_configuration[")}
        for what, names in (("configurations", configurations), ("other tests", self.tests - configurations)):
            line(f"{what}: {self._counts(names)}")
        by_value: dict[tuple[str, Any], set[str]] = {}
        for name in configurations:
            configuration = _configuration(name)
            for axis in AXES:
                by_value.setdefault((axis, getattr(configuration, axis)), set()).add(name)
        for axis, values in AXES.items() if configurations else ():
            for value in values:
                line(f"  {axis:>6} {value:<6} {self._counts(by_value.get((axis, value), set()))}")
        if self.noted:
            compiling = sum(noted["compiling"] for noted in self.noted)
            rest = sum(noted["seconds"] for noted in self.noted) - compiling
            number = len(self.noted)
            line(f"{number} tests ran: {compiling:.0f} s for their kernels, {rest / number:.2f} s each for the rest")

    def _counts(self, names: set[str]) -> str:
        counts = Counter(self.outcomes.get(name, "left") for name in names)
        good = counts.pop("passed", 0), counts.pop("before", 0)
        rest = "".join(f", {count} {what}" for what, count in sorted(counts.items()))
        return f"{sum(good)} of {len(names)} passed ({good[1]} before){rest}"
