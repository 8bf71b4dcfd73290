"""The commands that look at bundles: verify, list, coverage, diff, run."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from gdn_runtime.codeobject.bundle import Artifact, Bundle
from gdn_runtime.codeobject.emulate import EmulatorLauncher
from gdn_runtime.codeobject.facts import LaunchFacts, spec_text
from gdn_runtime.errors import BundleError, EmulatedFaultError

from . import inspect, smoke
from .console import (
    Bar,
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
from .jobs import KERNELS, TABLES


def verify(folder: Folder, as_json: Json = False, quiet: Quiet = False) -> None:
    """Check every file of bundles.

    Manifests, every payload against its sha256 and its facts, and that nothing else is there.
    """
    sound, found = usage(lambda: inspect.faults(folder))
    if as_json:
        bundles = [
            {"folder": str(b.folder), "arch": b.arch, "digest": b.digest, "artifacts": len(b.artifacts)} for b in sound
        ]
        print_json({"bundles": bundles, "faults": [{"path": str(f.path), "error": str(f)} for f in found]})
    else:
        for fault in found:
            failed(f"{type(fault).__name__}: {fault}")
        if not quiet and not found:
            for bundle in sound:
                say(f"{bundle.arch}: {len(bundle.artifacts)} artifacts sound, manifest sha256 {bundle.digest}")
    raise typer.Exit(1 if found else 0)


def list_(
    folder: Folder,
    every: Annotated[bool, typer.Option("--all", help="Every artifact, not only counts.")] = False,
    as_json: Json = False,
) -> None:
    """Show kernels, sizes, registers, LDS."""
    bundles = opened(folder)
    if as_json:
        print_json({bundle.arch: listing(bundle) for bundle in bundles})
        return
    for bundle in bundles:
        tools = ", ".join(f"{name} {version}" for name, version in bundle.toolchain.items())
        say(f"{bundle.arch}: KERNEL_ABI {bundle.kernel_abi}; {tools}; manifest sha256 {bundle.digest}")
        if every:
            read = [(bundle.spec(a), costs(bundle.facts(a), a.size)) for a in bundle.artifacts.values()]
            for name, kernel in KERNELS.items():
                rows = [(*kernel.cells(spec), *cost) for spec, cost in read if isinstance(spec, kernel.kinds)]
                if rows:
                    print_table(f"{bundle.arch} {name}", (*kernel.columns, *COSTS), sorted(rows, key=by_number))
        else:
            print_table("", ("kernel", "artifacts", "KiB", "most VGPRs", "most LDS"), counts(bundle))


def by_number(row: Iterable[str]) -> list[tuple[int, str]]:
    """Key that orders rows of texts, numbers by value."""
    return [(int(cell) if cell.isdecimal() else -1, cell) for cell in row]


COSTS = ("VGPR", "SGPR", "LDS", "scratch", "bytes")


def costs(facts: LaunchFacts, size: int) -> tuple[str, ...]:
    """What an artifact of ``size`` bytes takes, for ``COSTS``."""
    lds = facts.lds_bytes + facts.dynamic_lds
    return tuple(map(str, (facts.vgprs, facts.sgprs, lds, facts.scratch_bytes, size)))


def counts(bundle: Bundle) -> list[tuple[str, ...]]:
    """One row per kernel."""
    rows: list[tuple[str, ...]] = []
    for name, kernel in KERNELS.items():
        found = [a for a in bundle.artifacts.values() if isinstance(bundle.spec(a), kernel.kinds)]
        if found:
            facts = [bundle.facts(a) for a in found]
            vgprs, lds = max(f.vgprs for f in facts), max(f.lds_bytes + f.dynamic_lds for f in facts)
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


def coverage(folder: Folder, table: Tables = None, complete: Complete = False, as_json: Json = False) -> None:
    """Compare bundles with what tables ask for.

    Both ways: jobs without an artifact, and artifacts that no row asks for, not even completely.
    """
    tables = tuple(table or TABLES)
    results = [inspect.coverage(bundle, tables, complete=complete) for bundle in opened(folder)]
    if not all(c.asked for c in results):
        raise typer.BadParameter(
            f"{', '.join(map(str, tables))}: got no row that asks for a kernel", param_hint="--table"
        )
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
                failed(f"{c.arch}: missing: {spec_text(spec)}")
            for artifact in c.unasked:
                failed(f"{c.arch}: no row asks for {artifact}")
            served = c.asked - len(c.missing)
            say(f"{c.arch}: {served} of {c.asked} jobs covered ({c.percent:.4g} %), {len(c.unasked)} unasked")
    raise typer.Exit(0 if all(c.ok for c in results) else 1)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", exists=True)],
    after: Annotated[Path, typer.Argument(metavar="B", exists=True)],
    as_json: Json = False,
) -> None:
    """Show what changes from bundles A to B.

    Specs that appear, vanish, or whose code changes, with registers, LDS, scratch and size. Status 1 if any does.
    """
    old, new = ({bundle.arch: bundle for bundle in opened(path)} for path in (before, after))
    alone = sorted(old.keys() ^ new.keys())
    results = [inspect.difference(old[arch], new[arch]) for arch in sorted(old.keys() & new.keys())]
    if as_json:
        print_json({"only_in_one": alone, **{d.arch: difference_values(d) for d in results}})
    else:
        for arch in alone:
            say(f"{arch}: only in {before if arch in old else after}")
        for d in results:
            for sign, artifacts in (("+", d.added), ("-", d.removed)):
                for artifact in artifacts:
                    say(f"{d.arch} {sign} {described(artifact)}")
            for change in d.changed:
                facts = ", ".join(f"{name} {low} -> {high}" for name, (low, high) in change.facts.items())
                say(f"{d.arch} ~ {described(change.artifact)}: {facts or 'other instructions'}")
            say(f"{d.arch}: {len(d.added)} appear, {len(d.removed)} vanish, {len(d.changed)} change, {d.equal} equal")
    raise typer.Exit(0 if not alone and all(d.same for d in results) else 1)


def described(artifact: Artifact) -> str:
    """The kernel of an artifact and the fields of its spec, which this release may not know."""
    fields = " ".join(f"{name}={value}" for name, value in artifact.spec.items() if name != "spec")
    return f"{artifact.file.rpartition('-')[0]} ({fields})"


def difference_values(d: inspect.Difference) -> dict[str, Any]:
    """A difference as plain values."""
    return {
        "added": [artifact.spec for artifact in d.added],
        "removed": [artifact.spec for artifact in d.removed],
        "changed": [{"spec": change.artifact.spec, "facts": change.facts} for change in d.changed],
        "equal": d.equal,
    }


# ------------------------------------------------------------------------------------------------ run


def run(
    folder: Folder,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="On cdna-emu, every check on; the only way there is.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Launch every artifact once, on an emulator.

    On a small problem. It must end, trip no check of the emulator, and write finite values.
    """
    if not emulate:
        raise typer.BadParameter("got nothing, expected --emulate", param_hint="--emulate")

    report: dict[str, Any] = {}
    for bundle in opened(folder):
        launcher = usage(functools.partial(EmulatorLauncher, bundle.arch))
        problems: list[str] = []
        start = time.monotonic()
        with Bar(bundle.arch, len(bundle.artifacts), hidden=quiet or as_json) as advance:
            for artifact in bundle.artifacts.values():
                try:
                    smoke.launch(bundle.load(artifact, bundle.spec(artifact)), launcher)
                except (BundleError, EmulatedFaultError, ValueError) as error:
                    problems.append(f"{artifact}: {error}")
                    failed(f"failed: {problems[-1]}")
                advance()
        seconds = round(time.monotonic() - start, 1)
        report[bundle.arch] = {"launched": len(bundle.artifacts), "failed": problems, "seconds": seconds}
    if as_json:
        print_json(report)
    elif not quiet:
        for arch, row in report.items():
            say(f"{arch}: {row['launched']} artifacts launched, {len(row['failed'])} failed, {row['seconds']} s")
    raise typer.Exit(1 if any(row["failed"] for row in report.values()) else 0)
