"""All that a card is for: correctness, the proof that nothing is compiled, benches, tuned tables, a report.

    python ci/on_card.py gfx950
    python ci/on_card.py sm90 --only tests bench --budget bench=600 --resume

Runs from source on the PyTorch and Triton of this interpreter, with or without nox (`nox -s gpu-gfx950`), and refuses
at once without such a card. Logs, samples, tables and the report are in build/gpu-ARCH; a step that fails or is out of
time ends no other, and the exit status is then 1. A step whose packages are not installed is skipped. The store of
samples is kept from run to run: tuning goes on where it was, and with --resume so does everything else, as long as the
sources are the same. sm90 compiles nothing ahead of time, so it has no run-only steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import steps
from monorepo import ROOT, fail
from steps import Step

ARCHS = ("gfx942", "gfx950", "sm90")
AMD = ("gfx942", "gfx950")
PYTHON = sys.executable
CLI = ("typer", "rich")
"""What the command lines of gdn-tune and gdn-aot are made with."""
SHAPES = ("snapshot-*", "ragged-*", "packed-*", "dense-*-2500")
"""Cases of the published figures of K5 and of the block."""
TUNED = ("snapshot-*", "ragged-*", "packed-*", "dense-*", "grid-*")
DECODED = (
    "--context 8192 131072 --page 16 64 --ql 1 4 --window 0 257 8193 --scale-mode tensor token --v-form packed plain"
)
"""Shapes of the published figures of decode, and pages of 16 tokens beside those of 64."""
MOST_TOKENS = 32768
"""Of the rows that are run from a bundle: the reference takes long for more."""
HOUR = 3600.0


def plan(arch: str, folder: Path) -> list[Step]:
    """The steps for ``arch``, their files in ``folder``."""
    store, tables, bundles = folder / "store.sqlite", folder / "tables", folder / "bundles"
    env = {"PYTHONPATH": _sources(), "GDN_JIT": "1", "GDN_JIT_CACHE_DIR": str(folder / "code-objects")}
    tune, aot = (PYTHON, "-m", "gdn_tune"), (PYTHON, "-m", "gdn_aot")
    found = [
        Step(f"tests {name}", "tests", _pytest(f"packages/{name}/tests/gpu"), HOUR, env, ("pytest",))
        for name in ("gdn-runtime", "pa-decode", "gdn-tune")
    ]
    if arch in AMD:
        build = (*aot, "build", "--arch", arch, "--out")
        compilers = (*CLI, "flydsl", "triton")
        nothing_compiled = {**env, "GDN_JIT": "0", "FLYDSL_RUNTIME_RUN_ONLY": "1", "GDN_BUNDLE": str(bundles)}
        smoke = _pytest(*(f"packages/{name}/tests/gpu/test_amd_gpu.py" for name in ("gdn-runtime", "pa-decode")))
        found += [
            Step("run-only compile", "run-only", (*build, str(bundles)), HOUR, env, compilers),
            Step("run-only verify", "run-only", (*aot, "verify", str(bundles)), 600, env, CLI, (bundles / arch,)),
            Step(
                "run-only smoke", "run-only", (*smoke, "-k", "smoke"), 600, nothing_compiled, ("pytest",),
                (bundles / arch,),
            ),
        ]  # fmt: skip
    benches = {
        "k5": ("--cases", *SHAPES),
        "block": ("--cases", *SHAPES, "--with-state-pool", "--without-metadata", "--graph"),
        "snapshot": (),
        "pa": tuple(DECODED.split()),
    }
    records = tuple(folder / f"bench-{name}.json" for name in benches)
    for (name, words), record in zip(benches.items(), records, strict=True):
        command = (*tune, "bench", name, *words, "--json", str(record))
        found.append(Step(f"bench {name}", "bench", command, HOUR, env, CLI))
    for op in ("k5", "prepare", "block", "pa"):
        cases = tuple(word for case in (("*",) if op == "pa" else TUNED) for word in ("--cases", case))
        command = (*tune, "tune", op, "--arch", arch, *cases, "--store", str(store), "--quiet")
        found.append(Step(f"tune {op}", "tune", command, 2 * HOUR, env, CLI))
    export = (*tune, "export", "--store", str(store), "--arch", arch, "--out", str(tables))
    found += [
        Step("tables export", "tables", export, 600, env, CLI, (store,)),
        Step("tables check", "tables", (*tune, "check", str(tables)), 600, env, CLI, (tables,)),
    ]
    if arch in AMD:
        tuned = folder / "tuned-bundles"
        command = (*build, str(tuned), "--table", str(tables))
        rows = (PYTHON, "ci/run_rows.py", str(tables), "--device", "cuda", "--most-tokens", str(MOST_TOKENS))
        served = {**nothing_compiled, "GDN_BUNDLE": str(tuned), "GDN_TABLES": str(tables)}
        found += [
            Step("tables compile", "tables", command, HOUR, env, compilers, (tables,)),
            Step("tables run", "tables", rows, HOUR, served, (), (tuned / arch,)),
        ]
    report = (*tune, "report", "--format", "md,csv,json,png,html", "--out", str(folder / "report"))
    found.append(Step("report", "report", report, 600, env, (*CLI, "matplotlib"), some=(*records, store)))
    return found


def _sources() -> str:
    """PYTHONPATH of the packages and of what their suites share."""
    parts = [*sorted(ROOT.glob("packages/*/src")), *sorted(ROOT.glob("packages/*/tests/support"))]
    return os.pathsep.join([*map(str, parts), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _pytest(*folders: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", *folders)


def choose(found: Sequence[Step], only: Sequence[str], budgets: Sequence[str]) -> list[Step]:
    """Those of ``found`` that ``only`` names, by group or in full, with their limits of time. Ends with the reason for
    what names nothing."""
    known = {name for step in found for name in (step.name, step.group)}
    limits: dict[str, float] = {}
    for text in budgets:
        name, _, seconds = text.rpartition("=")
        try:
            limits[name] = float(seconds)
        except ValueError:
            limits[name] = 0.0
        if not limits[name] > 0:
            fail([f"--budget: got {text}, expected SECONDS or STEP=SECONDS"])
    unknown = sorted({*only, *limits} - known - {""})
    if unknown:
        groups = ", ".join(dict.fromkeys(step.group for step in found))
        fail(
            [f"step: got {unknown[0]!r}, expected {groups}, or one of them in full: {', '.join(s.name for s in found)}"]
        )
    chosen = [step for step in found if not only or {step.name, step.group} & set(only)]
    return [
        replace(step, budget=limits.get(step.name, limits.get(step.group, limits.get("", step.budget))))
        for step in chosen
    ]


def card_of(arch: str) -> str:
    """What is there, in words; ends with the reason if that is no ``arch``."""
    command = [PYTHON, str(ROOT / "ci" / "require_gpu.py"), arch]
    env = {**os.environ, "PYTHONPATH": _sources()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        fail([(done.stderr or done.stdout).strip() or f"{command[1]}: exit status {done.returncode}"])
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=ARCHS)
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="STEP", help="groups, or steps in full"
    )
    parser.add_argument(
        "--budget", nargs="+", action="extend", default=[], metavar="[STEP=]SECONDS", help="limits of time"
    )
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run did from the same sources")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands, and leave")
    parser.add_argument("--out", type=Path, help="in place of build/gpu-ARCH")
    given = parser.parse_args(arguments)
    folder = (given.out or ROOT / "build" / f"gpu-{given.arch}").resolve()
    only = [name for word in given.only for name in word.split(",") if name]
    chosen = choose(plan(given.arch, folder), only, given.budget)
    if given.list:
        for step in chosen:
            print(f"{step.name} ({step.budget:g} s): {' '.join(step.command)}")
        return
    card = card_of(given.arch)
    print(card, flush=True)
    done = steps.run_all(chosen, folder, resume=given.resume)
    summary = steps.table(done, f"{given.arch}: {card}")
    (folder / "summary.md").write_text(summary + "\n")
    print(summary, flush=True)
    if any(outcome.bad for outcome in done) or all(outcome.status == "skipped" for outcome in done):
        sys.exit(1)


if __name__ == "__main__":
    main()
