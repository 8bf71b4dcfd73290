"""Steps that fail, hang, miss what they need and are taken up again; and what the card's command makes of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import on_card
import roundtrip
import steps
from monorepo import ROOT
from steps import Outcome, Step


def step(name: str, code: str, **changes: object) -> Step:
    fields = {"group": name.split()[0], "command": (sys.executable, "-c", code), "budget": 60.0, **changes}
    return Step(name, **fields)  # type: ignore[arg-type]


def run(todo: Sequence[Step], folder: Path, **options: object) -> tuple[dict[str, str], str, list[Outcome]]:
    """(outcome by step, what was said, outcomes)"""
    said: list[str] = []
    done = steps.run_all(todo, folder, say=said.append, **options)  # type: ignore[arg-type]
    return {each.name: each.status for each in done}, "\n".join(said), done


def test_all_run_in_order_and_a_failure_ends_no_other(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    note = f"open({str(trace)!r}, 'a').write"
    todo = [
        step("a one", f"{note}('1'); print('fine')"),
        step("b", f"{note}('2'); print('last words'); raise SystemExit(3)"),
        step("c", f"{note}('3'); import os; os.kill(os.getpid(), 11)"),
        step("d", f"{note}('4')"),
    ]
    status, said, done = run(todo, tmp_path / "out")
    assert trace.read_text() == "1234"
    assert status == {"a one": "ok", "b": "failed", "c": "failed", "d": "ok"}
    assert [each.detail for each in done] == ["fine", "exit status 3; last words", "signal 11; ", ""]
    assert [each.bad for each in done] == [False, True, True, False]
    assert (tmp_path / "out" / "a-one.log").read_text() == "fine\n"
    assert "last words" in said and "fine" not in said.splitlines()
    status, said, _ = run(todo, tmp_path / "out", stop=True, echo=True)
    assert status == {"a one": "ok", "b": "failed"} and "fine" in said.splitlines()


def test_a_step_out_of_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    child = f"import time\nwhile True: open({str(beat)!r}, 'a').write('x'); time.sleep(0.02)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    hangs = f"import subprocess, sys, time; print('working', flush=True); {start}; time.sleep(60)"
    begun = time.monotonic()
    status, _, done = run([step("hangs", hangs, budget=1.5), step("next", "pass")], tmp_path / "out")
    assert status == {"hangs": "out of time", "next": "ok"} and time.monotonic() - begun < 30
    assert done[0].detail == "ended after 1.5 s; working" and done[0].bad
    size = beat.stat().st_size
    time.sleep(0.2)
    assert 0 < size == beat.stat().st_size


def test_a_step_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GRACE", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    begun = time.monotonic()
    status, _, _ = run([step("deaf", deaf, budget=1.0)], tmp_path)
    assert status == {"deaf": "out of time"} and time.monotonic() - begun < 20


def test_what_is_missing_skips_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    made, never = tmp_path / "made", tmp_path / "never"
    todo = [
        step("lacks", "raise SystemExit(1)", packages=("sys", "no_such_package")),
        step("early", "raise SystemExit(1)", reads=(made,)),
        step("makes", f"open({str(made)!r}, 'w')"),
        step("reads", "pass", reads=(made,)),
        step("takes", "import sys; print(*sys.argv[1:])", some=(made, never)),
        step("takes none", "raise SystemExit(1)", some=(never,)),
    ]
    status, _, done = run(todo, tmp_path / "out")
    assert list(status.values()) == ["skipped", "skipped", "ok", "ok", "ok", "skipped"]
    details = [each.detail for each in done]
    assert details[:2] == ["not installed: no_such_package", "there is no made"]
    assert details[4:] == ["made", "there is no never"]


def test_a_second_run_does_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, flag = tmp_path / "trace", tmp_path / "flag"
    note = f"open({str(trace)!r}, 'a').write"
    todo = [
        step("good", f"{note}('g')"),
        step("bad", f"{note}('b'); import os, sys; sys.exit(not os.path.exists({str(flag)!r}))"),
        step("lacks", f"{note}('l')", reads=(flag,)),
    ]
    run(todo, tmp_path / "out")
    flag.touch()
    status, said, done = run(todo, tmp_path / "out", resume=True)
    assert set(status.values()) == {"ok"} and trace.read_text() == "gbbl"
    assert [each.earlier for each in done] == [True, False, False] and "good: done in an earlier run" in said
    assert "| good  | ok, earlier |" in steps.table(done, "head")
    # Another command, and other sources, are another step; without --resume everything is.
    other = [step("good", f"{note}('o')")]
    run(other, tmp_path / "out", resume=True)
    monkeypatch.setattr(steps, "sources", lambda: "edited")
    run(other, tmp_path / "out", resume=True)
    run(other, tmp_path / "out")
    assert trace.read_text() == "gbbl" + "ooo"
    assert {each["name"] for each in json.loads((tmp_path / "out" / "outcomes.json").read_text())} == {
        "good", "bad", "lacks",
    }  # fmt: skip
    (tmp_path / "out" / "outcomes.json").write_text('[{"half"')
    assert run(other, tmp_path / "out", resume=True)[0] == {"good": "ok"}


def test_sources_are_what_steps_run(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "ci").mkdir()
    before = steps.sources(tmp_path)
    (tmp_path / "packages" / "a.py").write_text("x")
    after = steps.sources(tmp_path)
    (tmp_path / "packages" / "notes.md").write_text("x")
    assert before != after == steps.sources(tmp_path)


# ------------------------------------------------------------------------------------------------ the card's command


def fake_plan(arch: str, folder: Path) -> list[Step]:
    return [
        step("tests one", "print('3 passed')"),
        step("bench k5", "raise SystemExit(1)"),
        step("report", "pass", packages=("no_such_package",)),
    ]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_card, "card_of", lambda arch: f"1 x a {arch}")
    monkeypatch.setattr(on_card, "plan", fake_plan)


@pytest.mark.usefixtures("card")
def test_the_summary_names_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        on_card.main(["sm90", "--out", str(tmp_path)])
    assert ended.value.code == 1
    summary = (tmp_path / "summary.md").read_text()
    assert summary in capsys.readouterr().out and summary.startswith("sm90: 1 x a sm90\n")
    for row in ("| tests one | ok ", "| bench k5  | failed ", "| report    | skipped "):
        assert row in summary
    assert "3 passed" in summary and "not installed: no_such_package" in summary


@pytest.mark.usefixtures("card")
def test_chosen_steps_and_limits(tmp_path: Path) -> None:
    on_card.main(["sm90", "--out", str(tmp_path), "--only", "tests,report"])  # what is skipped is no failure
    with pytest.raises(SystemExit):
        on_card.main(["sm90", "--out", str(tmp_path), "--only", "report"])  # nothing was done
    limited = on_card.choose(fake_plan("", tmp_path), ["bench k5", "tests"], ["7", "tests=9.5"])
    assert [(each.name, each.budget) for each in limited] == [("tests one", 9.5), ("bench k5", 7.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "benches"], "step: got 'benches', expected tests, run-only, bench, tune, tables, report"),
        (["--budget", "bench=-3"], "--budget: got bench=-3, expected SECONDS or STEP=SECONDS"),
        (["--budget", "soon"], "--budget: got soon"),
        (["--budget", "nothing=3"], "step: got 'nothing'"),
    ],
)
def test_wrong_words(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        on_card.main(["gfx950", *arguments])
    assert ended.value.code == 1 and message in capsys.readouterr().err


@pytest.mark.parametrize("arch", on_card.ARCHS)
def test_without_the_card_nothing_begins(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        on_card.main([arch, "--out", str(tmp_path / "out")])
    assert ended.value.code == 1 and not (tmp_path / "out").exists()
    assert f"needs a {arch} card, and torch finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("arch", on_card.ARCHS)
def test_the_steps_of_a_card(arch: str, tmp_path: Path) -> None:
    found = on_card.plan(arch, tmp_path)
    names = [each.name for each in found]
    assert len(set(names)) == len(names) and ("run-only smoke" in names) == (arch != "sm90") == ("tables run" in names)
    groups = list(dict.fromkeys(each.group for each in found))
    assert groups == ["tests", *["run-only"] * (arch != "sm90"), "bench", "tune", "tables", "report"]
    for each in found:
        if each.group in ("bench", "tune", "report") or "export" in each.name:
            assert {"typer", "rich"} <= set(each.packages), each.name
        assert (each.env["GDN_JIT"] == "0") == (each.name in ("run-only smoke", "tables run")), each.name
    for folder in {word for each in found for word in each.command if word.startswith("packages/")}:
        assert (ROOT / folder).exists(), folder


def test_words_of_the_command_lines_are_known(tmp_path: Path) -> None:
    """Of gdn-tune, by its own parser: options exist and cases match."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from gdn_tune.calls import DECODE_CASES, GDN_CASES, pick
    from gdn_tune.cli import app

    for patterns in (on_card.SHAPES, on_card.TUNED):
        assert pick(GDN_CASES, patterns)
    assert set(roundtrip.CASES.values()) <= {*GDN_CASES, *DECODE_CASES}
    for each in on_card.plan("gfx950", tmp_path):
        if "gdn_tune" not in each.command:
            continue
        words = list(each.command[each.command.index("gdn_tune") + 1 :])
        result = CliRunner().invoke(app, [*words[: 2 if words[0] in ("bench", "tune") else 1], "--help"])
        assert result.exit_code == 0, words
        for word in words:
            assert not word.startswith("--") or word in result.output, (words, word)


# ------------------------------------------------------------------------------------------------ the round trip


def test_a_store_takes_the_place_of_tuning(tmp_path: Path) -> None:
    names = [each.name for each in roundtrip.plan(None, "gfx942")]
    assert names[:4] == ["tune k5", "tune prepare", "tune block", "tune pa"]
    assert [each.name for each in roundtrip.plan(tmp_path / "store", "gfx942")] == names[4:]
    assert names[4:] == ["export", "check", "compile", "verify", "coverage", "run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["gfx942", "gfx950"], "expected at most a store and one of"), (["no-such.sqlite"], "store: there is no")],
)
def test_wrong_arguments_of_the_round_trip(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["roundtrip.py", *words])
    with pytest.raises(SystemExit):
        roundtrip.main()
    assert message in capsys.readouterr().err
