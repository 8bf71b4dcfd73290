"""The command ``gdn-aot``. Exit status: 0 done and sound, 1 something failed or differs, 2 wrong use."""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from gdn_runtime.codeobject.facts import spec_text
from gdn_runtime.errors import BundleError, CompileError
from gdn_runtime.kernels.compile import CompileServer
from gdn_runtime.kernels.jit import write_file

from . import inspect, look, pack
from .__about__ import __version__
from .bundle import kept_folder, prepare_folder, write_bundle
from .console import (
    Archs,
    Bar,
    Commands,
    Complete,
    Folder,
    Json,
    Quiet,
    Tables,
    failed,
    opened,
    print_json,
    print_table,
    say,
    usage,
)
from .jobs import KERNELS, TABLES, Job, jobs, kernel_of
from .pool import JOB_SECONDS, RETRIES, Outcome, compile_all, default_workers

ALL = "all"
SUMMARY = "Compile the AMD kernels of gdn-runtime and pa-decode ahead of time, into bundles that a server loads."
Kernels = Annotated[list[str], typer.Option("--kernel", help=f"{', '.join(KERNELS)} or all; may be repeated.")]

app = typer.Typer(
    cls=Commands,
    help=SUMMARY,
    epilog="Exit status of every command: 0 done and sound, 1 something failed or differs, 2 wrong use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, in pipes too
)


def show_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        say(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=show_version)] = False,
) -> None:
    """Options of the command as a whole."""


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
    flydsl_cache: Annotated[
        Path | None, typer.Option(metavar="CACHE", help="Also fill this folder as a cache of FlyDSL.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile what tables ask for into bundles.

    What is compiled is kept in DIR/.gdn-aot, so that a build that was interrupted goes on where it was. A bundle
    appears when all of its jobs are done; if one fails there is none, and what was there before stays.
    """
    tables = tuple(table or TABLES)
    plans = {name: usage(functools.partial(plan, name, kernel, tables, complete)) for name in arch}
    report: dict[str, Any] = {}
    bad = 0
    with ExitStack() as stack:
        pool = open_executor(executor, stack)
        writable(folder)
        if flydsl_cache is not None:
            writable(flydsl_cache)
        for name, specs in plans.items():
            start = time.monotonic()
            with Bar(name, len(specs), hidden=quiet or as_json) as advance:
                outcomes = compile_all(
                    specs, executor=pool, workers=workers, kept=kept_folder(folder), timeout=timeout, retries=retries,
                    flydsl_entries=flydsl_cache is not None, done=advance,
                )  # fmt: skip
            codes = [outcome.code for outcome in outcomes if outcome.code is not None]
            for outcome in outcomes:
                if outcome.code is None:
                    failed(f"failed: {spec_text(outcome.spec)}: {outcome.error}")
                if outcome.entry is not None and flydsl_cache is not None:
                    write_file(flydsl_cache / outcome.entry.path, outcome.entry.content)
            bad += len(outcomes) - len(codes)
            place = write_bundle(folder, name, codes, tables) if len(codes) == len(outcomes) else None
            report[name] = summary(outcomes, place, time.monotonic() - start, executor, workers)
    if bad:
        failed(f"{bad} of {sum(map(len, plans.values()))} jobs failed")
    if as_json:
        print_json(report)
    elif not quiet:
        print_built(report)
    raise typer.Exit(1 if bad else 0)


def plan(arch: str, kernels: list[str], tables: tuple[Path, ...], complete: bool) -> tuple[Job, ...]:
    """The jobs of a build for ``arch``. ValueError for kernels that it does not have, and for none at all."""
    names = None if ALL in kernels else list(dict.fromkeys(kernels))
    specs = jobs(arch, names, tables=tables, complete=complete)
    if not specs:
        raise ValueError(f"tables {', '.join(map(str, tables))}: got no row that asks for a kernel, expected one")
    return specs


def writable(folder: Path) -> None:
    """Make ``folder``, or end the command: before anything is compiled."""
    try:
        prepare_folder(folder)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}") from error


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
    try:
        client = stack.enter_context(connect(address, set_as_default=False))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"no scheduler at {address}: {error}", param_hint="--executor") from error
    # pure=False: a job that is tried again is another task.
    executor: Executor = stack.enter_context(client.get_executor(pure=False, retries=0))
    return executor


def summary(
    outcomes: list[Outcome], place: Path | None, seconds: float, executor: str, workers: int | None
) -> dict[str, Any]:
    """Figures of one build, as plain values."""
    times = [outcome.seconds for outcome in outcomes if outcome.attempts]
    return {
        "bundle": None if place is None else str(place),
        "jobs": dict(Counter(kernel_of(outcome.spec).name for outcome in outcomes)),
        "kept": sum(outcome.kept for outcome in outcomes),
        "failed": sum(outcome.code is None for outcome in outcomes),
        "bytes": sum(len(outcome.code.elf) for outcome in outcomes if outcome.code is not None),
        "workers": (workers or default_workers()) if executor == "local" else executor,
        "seconds": round(seconds, 1),
        "seconds_per_job": round(statistics.median(times), 2) if times else 0.0,
        "flydsl_entries": sum(outcome.entry is not None for outcome in outcomes),
    }


def print_built(report: dict[str, Any]) -> None:
    """Print the summaries as a table."""
    rows = []
    for arch, row in report.items():
        counts = [str(row["jobs"].get(name, "-")) for name in KERNELS]
        size, bundle = f"{row['bytes'] / 2**20:.1f}", row["bundle"] or "not written"
        figures = [str(row["kept"]), str(row["failed"]), size, str(row["seconds"]), str(row["seconds_per_job"]), bundle]
        rows.append((arch, *counts, *figures))
    print_table("", ("arch", *KERNELS, "kept", "failed", "MiB", "s", "median s/job", "bundle"), rows)


app.command()(look.verify)
app.command("list")(look.list_)
app.command()(look.coverage)
app.command()(look.diff)
app.command()(look.run)


@app.command("flydsl-cache")
def flydsl_cache(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="What build --flydsl-cache filled.", exists=True)],
    folder: Folder,
    limit: Annotated[int | None, typer.Option(min=1, help="Look for so many of each bundle only.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a cache that build filled for FlyDSL.

    Each kernel of FlyDSL in the bundles is launched with FLYDSL_RUNTIME_RUN_ONLY=1 in a process that has not traced it
    before, with HIP replaced. What the launch loads must be the bytes of the bundle. FlyDSL unpickles the cache: check
    none that you do not trust.
    """
    report: dict[str, Any] = {}
    server = CompileServer()
    try:
        for bundle in opened(folder):
            artifacts = [a for a in bundle.artifacts.values() if bundle.spec(a).language == "flydsl"][:limit]
            problems = []
            with Bar(bundle.arch, len(artifacts), hidden=quiet or as_json) as advance:
                for artifact in artifacts:
                    try:
                        code = bundle.load(artifact, bundle.spec(artifact))
                        if server.code_in_flydsl_cache(code.spec, cache) != code.elf:
                            raise ValueError("the cache has other code than the bundle")
                    except (BundleError, CompileError, ValueError) as error:
                        problems.append(f"{artifact}: {error}")
                        failed(f"failed: {problems[-1]}")
                    advance()
            report[bundle.arch] = {"looked_for": len(artifacts), "failed": problems}
    finally:
        server.close()
    if as_json:
        print_json(report)
    elif not quiet:
        for arch, row in report.items():
            say(f"{arch}: {row['looked_for'] - len(row['failed'])} of {row['looked_for']} found, with equal bytes")
    raise typer.Exit(1 if any(row["failed"] for row in report.values()) else 0)


@app.command("pack")
def pack_(
    folder: Folder,
    archive: Annotated[Path | None, typer.Option(metavar="FILE", help="Write FILE, a tar archive.")] = None,
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="WHEEL", help="Wheel of gdn-runtime without bundles.", exists=True, dir_okay=False),
    ] = None,
    target: Annotated[
        Path, typer.Option("--out", metavar="OUT", help="Folder of the wheel with bundles that is made of WHEEL.")
    ] = Path("dist/bundled"),
) -> None:
    """Pack bundles as an archive or a wheel.

    A wheel of gdn-runtime that carries them needs no GDN_BUNDLE. Everything is verified first. Equal
    bundles give equal files.
    """
    if archive is None and wheel is None:
        raise typer.BadParameter("got neither, expected --archive FILE, --wheel WHEEL or both")
    sound, found = usage(lambda: inspect.faults(folder))
    for fault in found:
        failed(f"{type(fault).__name__}: {fault}")
    if found:
        raise typer.Exit(1)
    if archive is not None:
        say(f"{pack.pack_archive(sound, archive)}")
    if wheel is not None:
        say(f"{usage(lambda: pack.pack_wheel(sound, wheel, target))}")
