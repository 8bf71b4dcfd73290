"""Commands that a script runs one after the other, each with a log, a limit of time and an outcome; then a table."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from monorepo import ROOT

Status = Literal["ok", "failed", "out of time", "skipped"]
GRACE = 10.0
"""Seconds between asking a step to end and killing it."""
DETAIL = 90
"""Characters of the last line of a log that the table shows."""
TAIL = 25
"""Lines of a log that are shown when a step went wrong."""


@dataclass(frozen=True)
class Step:
    """A command, run in the root of the repository with ``env`` over the environment, for at most ``budget`` seconds.

    ``group`` names it with others on the command line. ``packages`` that are not installed, and files of ``reads`` that
    are not there when its turn comes, make it a skipped one. Those of ``some`` that are there are further words of the
    command; without any it is skipped too.
    """

    name: str
    group: str
    command: tuple[str, ...]
    budget: float
    env: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    reads: tuple[Path, ...] = ()
    some: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a step. ``detail``: the last words of its log, or why it was skipped. ``command`` and ``sources``
    tell whether a later run may take the outcome for its own."""

    name: str
    status: Status
    seconds: float
    detail: str
    command: tuple[str, ...] = ()
    sources: str = ""
    earlier: bool = False

    @property
    def bad(self) -> bool:
        """Whether the step was run and did not do what it should."""
        return self.status in ("failed", "out of time")


def run_all(
    steps: Iterable[Step],
    folder: Path,
    *,
    resume: bool = False,
    stop: bool = False,
    echo: bool = False,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Run ``steps`` in their order; logs and the outcomes are in ``folder``, the latter after every step.

    ``resume``: what an earlier run in ``folder`` did from the same sources is not done again. ``stop``: nothing follows
    a step that went wrong. ``echo``: logs are printed whole, not only the ends of those that went wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, digest = folder / "outcomes.json", sources()
    known = {outcome.name: outcome for outcome in _read(file)}
    done: list[Outcome] = []
    for step in steps:
        before = known.get(step.name)
        if resume and before and (before.status, before.command, before.sources) == ("ok", step.command, digest):
            outcome = Outcome(**{**asdict(before), "earlier": True})
            say(f"== {step.name}: done in an earlier run")
        else:
            say(f"== {step.name}: {' '.join(step.command)}")
            outcome = _run(step, folder / f"{step.name.replace(' ', '-')}.log", digest)
            _show(step, outcome, folder, echo=echo, say=say)
        done.append(outcome)
        known[step.name] = outcome
        file.write_text(json.dumps([asdict(each) for each in known.values()], indent=1) + "\n")
        if stop and outcome.status != "ok":
            break
    return done


def _read(file: Path) -> list[Outcome]:
    """Outcomes of an earlier run; none if the file is not there or is no such file."""
    try:
        return [Outcome(**{**each, "command": tuple(each["command"])}) for each in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _run(step: Step, log: Path, digest: str) -> Outcome:
    missing = [name for name in step.packages if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(step.name, "skipped", 0.0, f"not installed: {', '.join(missing)}")
    given = [path for path in step.some if path.exists()]
    absent = [path for path in step.reads if not path.exists()] or ([] if given else step.some)
    if absent:
        return Outcome(step.name, "skipped", 0.0, f"there is no {', '.join(map(_short, absent))}")
    begun = time.monotonic()
    with log.open("w") as out:
        # A session of its own: whatever it starts ends with it.
        process = subprocess.Popen(
            [*step.command, *map(str, given)],
            cwd=ROOT,
            env={**os.environ, **step.env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(step.budget)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    seconds = time.monotonic() - begun
    status: Status = "out of time" if code is None else "ok" if code == 0 else "failed"
    detail = _last_line(log)
    if code is None:
        detail = f"ended after {step.budget:g} s; {detail}"
    elif code:
        detail = f"{f'signal {-code}' if code < 0 else f'exit status {code}'}; {detail}"
    return Outcome(step.name, status, round(seconds, 1), detail, step.command, digest)


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all of its session: by asking, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _last_line(log: Path) -> str:
    """Of the lines that are no table's."""
    text = log.read_text(errors="replace").replace(f"{ROOT}/", "")
    lines = [stripped for line in text.splitlines() if (stripped := line.strip(" =-")) and stripped[0] != "|"]
    return lines[-1][:DETAIL] if lines else ""


def _show(step: Step, outcome: Outcome, folder: Path, *, echo: bool, say: Callable[[str], None]) -> None:
    log = folder / f"{step.name.replace(' ', '-')}.log"
    if outcome.command and (echo or outcome.bad):
        lines = log.read_text(errors="replace").splitlines()
        say("\n".join(lines if echo else lines[-TAIL:]))
    say(
        f"== {step.name}: {outcome.status}, {outcome.seconds:.1f} s"
        + f" ({outcome.detail})" * (outcome.status == "skipped")
    )


def table(outcomes: Sequence[Outcome], head: str) -> str:
    """The outcomes as Markdown, under a line that says what of."""
    rows = [("step", "outcome", "s", "")]
    rows += [
        (each.name, each.status + ", earlier" * each.earlier, f"{each.seconds:.1f}", each.detail) for each in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([head, "", *lines])


def sources(root: Path = ROOT) -> str:
    """sha256 over the files that steps run: Python and C of packages and ci. With or without git."""
    digest = hashlib.sha256()
    for top in ("packages", "ci"):
        for path in sorted((root / top).rglob("*.[pc]*")):
            if path.suffix in (".py", ".c") and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
