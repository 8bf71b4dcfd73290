"""The command ``gdn-aot``. Exit status: 0 done and sound, 1 something failed or differs, 2 wrong use."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gdn_runtime.codeobject.bundle import Artifact, Bundle
from gdn_runtime.codeobject.facts import spec_from_json, spec_text
from gdn_runtime.errors import BundleError
from gdn_runtime.spec import AMD_ARCHS
from gdn_runtime.tables import PACKAGED

from . import inspect
from .__about__ import __version__
from .bundle import kept_folder, write_bundle
from .jobs import KERNELS, jobs, kernel_of
from .pool import JOB_SECONDS, RETRIES, Outcome, compile_all, default_workers

app = typer.Typer(
    help="Compile the AMD kernels of gdn-runtime ahead of time, into bundles that a server loads as they are.",
    epilog="Exit status: 0 done and sound, 1 something failed or differs, 2 wrong use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

ALL = "all"
Archs = Annotated[list[str], typer.Option("--arch", help=f"{' or '.join(AMD_ARCHS)}; may be repeated.")]
Kernels = Annotated[list[str], typer.Option("--kernel", help=f"{', '.join(KERNELS)} or all; may be repeated.")]
Tables = Annotated[
    list[Path] | None,
    typer.Option(
        "--table", help="Tuned table, or folder of them; may be repeated. Default: the packaged ones.", exists=True
    ),
]
Complete = Annotated[
    bool, typer.Option("--complete", help="Also what no row asks for but calls with its shape may: see docs/aot.md.")
]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A bundle, or a folder of bundles by architecture.", exists=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what went wrong.")]


def show_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=show_version)] = False,
) -> None:
    """Compile the AMD kernels of gdn-runtime ahead of time, into bundles that a server loads as they are."""


# ------------------------------------------------------------------------------------------------ build


@app.command()
def build(
    arch: Archs,
    kernel: Kernels = [ALL],  # noqa: B006  # typer copies it
    table: Tables = None,
    complete: Complete = False,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Bundles are DIR/ARCH.")] = Path("bundles"),
    workers: Annotated[int | None, typer.Option(min=1, help="Compiles at a time; default: cores, by memory.")] = None,
    executor: Annotated[
        str, typer.Option(help="Where jobs run: local, or dask:ADDRESS of a scheduler (needs gdn-aot[dask]).")
    ] = "local",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one job may take.")] = JOB_SECONDS,
    retries: Annotated[int, typer.Option(min=0, help="Further attempts for a job of which a process died.")] = RETRIES,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile what the tables ask for and write it as bundles.

    What is compiled is kept in DIR/.gdn-aot, so that a build that was interrupted goes on where it was. A bundle
    appears when all of its jobs are done; if one fails there is none, and what was there before stays.
    """
    tables = tuple(table or (PACKAGED,))
    report: dict[str, Any] = {}
    failed = 0
    with ExitStack() as stack:
        pool = open_executor(executor, stack)
        for name in dict.fromkeys(arch):
            specs = usage(lambda name=name: jobs(name, names(kernel, name), tables=tables, complete=complete))
            start = time.monotonic()
            with progress(name, len(specs), hidden=quiet or as_json) as advance:
                outcomes = compile_all(
                    specs, executor=pool, workers=workers, kept=kept_folder(folder), timeout=timeout, retries=retries,
                    done=advance,
                )  # fmt: skip
            bad = [outcome for outcome in outcomes if outcome.code is None]
            failed += len(bad)
            for outcome in bad:
                err.print(f"failed: {spec_text(outcome.spec)}: {outcome.error}", style="red", markup=False)
            place = None
            if not bad:
                codes = [outcome.code for outcome in outcomes if outcome.code is not None]
                place = write_bundle(folder, name, codes, tables)
            report[name] = summary(outcomes, place, time.monotonic() - start, workers or default_workers())
    if as_json:
        print_json(report)
    elif not quiet:
        out.print(built_table(report))
    raise typer.Exit(1 if failed else 0)


def names(kernels: list[str], arch: str) -> list[str] | None:
    """The kernels that were asked for; None for all that ``arch`` has."""
    return None if ALL in kernels else list(dict.fromkeys(kernels))


def open_executor(text: str, stack: ExitStack) -> Executor | None:
    """The executor that ``text`` names, closed with ``stack``; None: threads of this process."""
    if text == "local":
        return None
    kind, _, address = text.partition(":")
    if kind != "dask" or not address:
        raise typer.BadParameter(f"got {text!r}, expected local or dask:ADDRESS", param_hint="--executor")
    try:
        from distributed import Client
    except ImportError as error:
        raise typer.BadParameter(f"{error}: pip install 'gdn-aot[dask]'", param_hint="--executor") from error
    connect: Any = Client
    client = stack.enter_context(connect(address, set_as_default=False))
    # pure=False: a job that is tried again is another task.
    executor: Executor = stack.enter_context(client.get_executor(pure=False, retries=0))
    return executor


class progress:
    """A bar on a terminal that counts outcomes, and nothing elsewhere."""

    def __init__(self, arch: str, total: int, *, hidden: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=err, disable=hidden or not err.is_terminal)
        self._task = self._bar.add_task(arch, total=total)

    def __enter__(self) -> progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, outcome: Outcome) -> None:
        self._bar.advance(self._task)


def summary(outcomes: list[Outcome], place: Path | None, seconds: float, workers: int) -> dict[str, Any]:
    """Figures of one build, as plain values."""
    times = [outcome.seconds for outcome in outcomes if outcome.attempts]
    return {
        "bundle": None if place is None else str(place),
        "jobs": dict(Counter(kernel_of(outcome.spec).name for outcome in outcomes)),
        "kept": sum(outcome.kept for outcome in outcomes),
        "failed": sum(outcome.code is None for outcome in outcomes),
        "bytes": sum(len(outcome.code.elf) for outcome in outcomes if outcome.code is not None),
        "workers": workers,
        "seconds": round(seconds, 1),
        "seconds_per_job": round(statistics.median(times), 2) if times else 0.0,
    }


def built_table(report: dict[str, Any]) -> Table:
    """The summaries as a table."""
    columns = ("arch", *KERNELS, "kept", "failed", "MiB", "s", "median s/job", "bundle")
    table = Table(*columns)
    for arch, row in report.items():
        counts = [str(row["jobs"].get(name, "-")) for name in KERNELS]
        size, bundle = f"{row['bytes'] / 2**20:.1f}", row["bundle"] or "not written"
        figures = [str(row["kept"]), str(row["failed"]), size, str(row["seconds"]), str(row["seconds_per_job"]), bundle]
        table.add_row(arch, *counts, *figures)
    return table


# ------------------------------------------------------------------------------------------------ look


@app.command()
def verify(folder: Folder, as_json: Json = False, quiet: Quiet = False) -> None:
    """Check everything about bundles: manifests, every payload against its sha256 and facts, and that nothing else is
    there."""
    sound, found = usage(lambda: inspect.faults(folder))
    if as_json:
        bundles = [
            {"folder": str(b.folder), "arch": b.arch, "digest": b.digest, "artifacts": len(b.artifacts)} for b in sound
        ]
        print_json({"bundles": bundles, "faults": [{"path": str(f.path), "error": str(f)} for f in found]})
    else:
        for fault in found:
            err.print(f"{type(fault).__name__}: {fault}", style="red", markup=False)
        if not quiet and not found:
            for bundle in sound:
                out.print(f"{bundle.arch}: {len(bundle.artifacts)} artifacts sound, manifest sha256 {bundle.digest}")
    raise typer.Exit(1 if found else 0)


@app.command("list")
def list_(
    folder: Folder,
    every: Annotated[bool, typer.Option("--all", help="Every artifact, not only counts.")] = False,
    as_json: Json = False,
) -> None:
    """Show what bundles hold: kernels, sizes, registers, LDS."""
    bundles = opened(folder)
    if as_json:
        print_json({bundle.arch: listing(bundle) for bundle in bundles})
        return
    for bundle in bundles:
        tools = ", ".join(f"{name} {version}" for name, version in bundle.toolchain.items())
        out.print(
            f"{bundle.arch}: KERNEL_ABI {bundle.kernel_abi}; {tools}; manifest sha256 {bundle.digest}", markup=False
        )
        if every:
            for name, kernel in KERNELS.items():
                artifacts = [a for a in bundle.artifacts.values() if isinstance(spec_from_json(a.spec), kernel.kinds)]
                if artifacts:
                    rows = [(*kernel.cells(spec_from_json(a.spec)), *costs(a)) for a in artifacts]
                    out.print(rows_table(f"{bundle.arch} {name}", (*kernel.columns, *COSTS), sorted(rows)))
        else:
            out.print(rows_table("", ("kernel", "artifacts", "KiB", "most VGPRs", "most LDS"), counts(bundle)))


COSTS = ("VGPR", "SGPR", "LDS", "scratch", "bytes")


def costs(artifact: Artifact) -> tuple[str, ...]:
    """What an artifact takes, for ``COSTS``."""
    facts = artifact.facts
    lds = facts["lds_bytes"] + facts["dynamic_lds"]
    return tuple(map(str, (facts["vgprs"], facts["sgprs"], lds, facts["scratch_bytes"], artifact.size)))


def counts(bundle: Bundle) -> list[tuple[str, ...]]:
    """One row per kernel."""
    rows: list[tuple[str, ...]] = []
    for name, kernel in KERNELS.items():
        found = [a for a in bundle.artifacts.values() if isinstance(spec_from_json(a.spec), kernel.kinds)]
        if found:
            vgprs = max(a.facts["vgprs"] for a in found)
            lds = max(a.facts["lds_bytes"] + a.facts["dynamic_lds"] for a in found)
            size = sum(a.size for a in found) / 1024
            rows.append((name, str(len(found)), f"{size:.0f}", str(vgprs), str(lds)))
    return rows


def listing(bundle: Bundle) -> dict[str, Any]:
    """A bundle as plain values."""
    artifacts = [
        {"key": a.key, "file": a.file, "bytes": a.size, "sha256": a.sha256, "spec": a.spec, "facts": a.facts}
        for a in bundle.artifacts.values()
    ]
    return {
        "folder": str(bundle.folder),
        "kernel_abi": bundle.kernel_abi,
        "toolchain": bundle.toolchain,
        "source_digest": bundle.source_digest,
        "tables": [{"file": file, "sha256": digest} for file, digest in bundle.tables],
        "digest": bundle.digest,
        "artifacts": artifacts,
    }


@app.command()
def coverage(folder: Folder, table: Tables = None, complete: Complete = False, as_json: Json = False) -> None:
    """Compare bundles with what tables ask for, both ways: jobs without an artifact, artifacts without a job."""
    results = [inspect.coverage(bundle, table or (PACKAGED,), complete=complete) for bundle in opened(folder)]
    if as_json:
        print_json(
            {
                c.arch: {
                    "asked": c.asked,
                    "percent": c.percent,
                    "missing": [spec_text(spec) for spec in c.missing],
                    "unasked": [artifact.file for artifact in c.unasked],
                }
                for c in results
            }
        )
    else:
        for c in results:
            for spec in c.missing:
                err.print(f"{c.arch}: missing: {spec_text(spec)}", style="red", markup=False)
            for artifact in c.unasked:
                err.print(f"{c.arch}: no row asks for {artifact}", style="red", markup=False)
            served = c.asked - len(c.missing)
            out.print(f"{c.arch}: {served} of {c.asked} jobs covered ({c.percent:.4g} %), {len(c.unasked)} unasked")
    raise typer.Exit(0 if all(c.ok for c in results) else 1)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", exists=True)],
    after: Annotated[Path, typer.Argument(metavar="B", exists=True)],
    as_json: Json = False,
) -> None:
    """Show which specs appear, vanish, or change in registers, LDS, scratch and size, from A to B. Status 1 if any."""
    old, new = ({bundle.arch: bundle for bundle in opened(path)} for path in (before, after))
    alone = sorted(old.keys() ^ new.keys())
    results = [inspect.difference(old[arch], new[arch]) for arch in sorted(old.keys() & new.keys())]
    if as_json:
        print_json({"only_in_one": alone, **{d.arch: difference_values(d) for d in results}})
    else:
        for arch in alone:
            out.print(f"{arch}: only in {before if arch in old else after}", markup=False)
        for d in results:
            for sign, artifacts in (("+", d.added), ("-", d.removed)):
                for artifact in artifacts:
                    out.print(f"{d.arch} {sign} {spec_text(spec_from_json(artifact.spec))}", markup=False)
            for change in d.changed:
                facts = ", ".join(f"{name} {low} -> {high}" for name, (low, high) in change.facts.items())
                text = spec_text(spec_from_json(change.artifact.spec))
                out.print(f"{d.arch} ~ {text}: {facts or 'other instructions'}", markup=False)
            out.print(
                f"{d.arch}: {len(d.added)} appear, {len(d.removed)} vanish, {len(d.changed)} change, {d.equal} equal"
            )
    raise typer.Exit(0 if not alone and all(d.same for d in results) else 1)


def difference_values(d: inspect.Difference) -> dict[str, Any]:
    """A difference as plain values."""
    return {
        "added": [artifact.spec for artifact in d.added],
        "removed": [artifact.spec for artifact in d.removed],
        "changed": [{"spec": change.artifact.spec, "facts": change.facts} for change in d.changed],
        "equal": d.equal,
    }


# ------------------------------------------------------------------------------------------------ run


@app.command()
def run(
    folder: Folder,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="On cdna-emu, every check on; the only way there is.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Launch every artifact once, on a small problem: it must end, trip no check, and write finite values."""
    if not emulate:
        raise typer.BadParameter("got nothing, expected --emulate", param_hint="--emulate")
    from gdn_runtime.codeobject.emulate import EmulatorLauncher
    from gdn_runtime.errors import EmulatedFaultError

    from . import smoke

    report: dict[str, Any] = {}
    for bundle in opened(folder):
        launcher = usage(lambda bundle=bundle: EmulatorLauncher(bundle.arch))
        problems: list[str] = []
        start = time.monotonic()
        for artifact in bundle.artifacts.values():
            try:
                smoke.launch(bundle.load(artifact, bundle.spec(artifact)), launcher)
            except (BundleError, EmulatedFaultError, ValueError) as error:
                problems.append(f"{artifact}: {error}")
                err.print(f"failed: {problems[-1]}", style="red", markup=False)
        seconds = round(time.monotonic() - start, 1)
        report[bundle.arch] = {"launched": len(bundle.artifacts), "failed": problems, "seconds": seconds}
    if as_json:
        print_json(report)
    elif not quiet:
        for arch, row in report.items():
            out.print(f"{arch}: {row['launched']} artifacts launched, {len(row['failed'])} failed, {row['seconds']} s")
    raise typer.Exit(1 if any(row["failed"] for row in report.values()) else 0)


# ------------------------------------------------------------------------------------------------ helpers


def usage(action: Any) -> Any:
    """What ``action`` gives; its ValueError or ImportError is a wrong use of the command."""
    try:
        return action()
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


def opened(folder: Path) -> list[Bundle]:
    """The bundles in ``folder``; ends the command if one cannot be read."""
    try:
        bundles: list[Bundle] = usage(lambda: inspect.open_bundles(folder))
    except BundleError as error:
        err.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    return bundles


def rows_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of texts."""
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*row)
    return table


def print_json(values: Any) -> None:
    """Print ``values``, whatever the width of the terminal."""
    sys.stdout.write(json.dumps(values, indent=1, sort_keys=True) + "\n")
