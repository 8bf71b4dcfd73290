"""The commands about tuned tables."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from . import compare as comparing
from . import csvfile, formats, tablefile
from .check import check as find_faults
from .console import STORE, Json, Quiet, StoreFile, failed, print_json, print_table, say, usage
from .explain import SHAPES
from .explain import explain as explain_call
from .export import Export
from .export import export as export_samples
from .records import OPS, Op
from .store import Store, StoreError

TableFile = Annotated[Path, typer.Argument(metavar="TABLE", help="A table.", exists=True, dir_okay=False)]
OutFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Tables are DIR/ARCH/KERNEL.json.")]
OUT = Path("tables")
Tables = Annotated[Path, typer.Argument(metavar="TABLE", help="A table, or a folder of them.", exists=True)]


def parse_ops(values: list[str]) -> list[Op]:
    """The ops that are named, all if none is."""
    unknown = set(values) - set(OPS)
    if unknown:
        raise typer.BadParameter(f"got {', '.join(sorted(unknown))}, expected {', '.join(OPS)}", param_hint="--op")
    return [cast(Op, value) for value in values] or list(OPS)


def export(
    store: StoreFile = STORE,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Tables are DIR/ARCH/KERNEL.json.")] = Path(
        "tables"
    ),
    op: Annotated[list[str], typer.Option("--op", help="Only these; may be repeated.")] = [],  # noqa: B006
    arch: Annotated[list[str], typer.Option("--arch", help="Only these; may be repeated.")] = [],  # noqa: B006
    base: Annotated[
        list[Path],
        typer.Option(
            "--base", metavar="TABLE", help="Keep rows of it that the store has nothing better for.", exists=True
        ),
    ] = [],  # noqa: B006
    without: Annotated[
        list[Path],
        typer.Option("--without", metavar="TABLE", help="Leave out calls that it has; may be repeated.", exists=True),
    ] = [],  # noqa: B006
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make tuned tables of what a store holds.

    Equal samples give equal files. For each call the fastest candidate that was right wins. Where candidates cannot be
    told apart the row's provenance says so, and the choice of the rule wins if it is one of them. What was modelled
    never replaces what was measured.
    """
    ops = parse_ops(op)
    try:
        with Store(store, create=False) as opened:
            samples = [s for s in opened.samples() if s.key.op in ops and (not arch or s.key.arch in arch)]
    except StoreError as error:
        failed(f"StoreError: {error}")
        raise typer.Exit(1) from error
    if not samples:
        failed(f"{store}: there are no such samples")
        raise typer.Exit(1)
    bases, others = ([usage(functools.partial(tablefile.read, path)) for path in paths] for paths in (base, without))
    try:
        found = export_samples(samples, bases, others)
    except ValueError as error:
        failed(f"{type(error).__name__}: {error}")
        raise typer.Exit(1) from error
    report = [write_export(each, out) for each in found]
    if as_json:
        print_json(report)
    elif not quiet:
        columns = ("kernel", "arch", "rows", "new", "modelled", "tied", "kept", "left_out", "file")
        print_table("", columns, ([str(row[name]) for name in columns] for row in report))
        for each in found:
            for note in each.notes:
                say(f"note: {note}")


def write_export(made: Export, out: Path) -> dict[str, Any]:
    """Write a table that has rows; figures of it."""
    table = made.table
    path = out / table.arch / f"{table.kernel}.json"
    if table.rows:
        tablefile.write(path, table.text())
    counts = {name: getattr(made, name) for name in ("new", "modelled", "tied", "kept", "left_out", "notes")}
    return {
        "kernel": table.kernel,
        "arch": table.arch,
        "rows": len(table.rows),
        "file": str(path) if table.rows else "none",
        **counts,
    }


def check(
    tables: Annotated[list[Path], typer.Argument(metavar="TABLE...", help="Tables, or folders of them.", exists=True)],
    strict: Annotated[bool, typer.Option("--strict", help="Notes are faults too.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what is wrong with tuned tables.

    Errors: no table, rows that the runtime skips, rows that no kernel can serve, two choices for one call. Notes: rows
    that repeat another, override one of another file, or were timed and say what the rule gives without them;
    provenances that no row has, and rows without one. Exit status 1 if there are errors, with --strict if there are
    notes. Modelled rows that say what the rule gives are counted and no more: they name shapes to compile.
    """
    findings, counts = find_faults(tables)
    bad = [finding for finding in findings if finding.level == "error" or (strict and finding.level == "note")]
    if as_json:
        print_json({"files": counts, "findings": [finding.as_dict() for finding in findings]})
    else:
        for finding in findings:
            if finding in bad:
                failed(f"{finding.level}: {finding}")
            elif not quiet and finding.kind != "rule":
                say(f"note: {finding}")
        if not quiet:
            for file, rows in counts.items():
                mine = [finding for finding in findings if finding.file == file]
                errors = sum(finding.level == "error" for finding in mine)
                ruled = sum(finding.kind == "rule" for finding in mine)
                notes = sum(finding.level == "note" for finding in mine)
                counted = f"{rows} rows, {errors} errors, {notes} notes"
                say(f"{file}: {counted}; {ruled} rows say what the rule gives")
    raise typer.Exit(1 if bad else 0)


def compare(old: Tables, new: Tables, as_json: Json = False, quiet: Quiet = False) -> None:
    """Say how two tables differ.

    Exit status 1 if calls appear or vanish, a choice changes, or a row is measured in one and modelled in the other.
    """
    found = usage(lambda: comparing.compare(old, new))
    if as_json:
        differences = [difference.as_dict() for difference in found.differences]
        print_json({"equal": found.equal, "differences": differences, "ratios": found.ratios})
    elif not quiet:
        rows = []
        for each in found.differences:
            ratio = "-" if each.ratio is None else f"{each.ratio:.3f}"
            rows.append((each.kind, each.kernel, formats.choice_text(each.call), side(each.old), side(each.new), ratio))
        if rows:
            print_table("", ("kind", "kernel", "call", "old", "new", "time new/old"), rows)
        say(f"{len(found.differences)} differences, {found.equal} equal rows")
        if found.ratios:
            say(f"time new/old: median {statistics.median(found.ratios):.3f} of {len(found.ratios)} rows")
    raise typer.Exit(1 if found.differences else 0)


def side(values: dict[str, Any] | None) -> str:
    """One side of a difference in words."""
    if values is None:
        return "-"
    choice = {name: value for name, value in values.items() if name not in ("us", "modelled", "source")}
    time = "" if values["us"] is None else f", {values['us']:g} us"
    return f"{formats.choice_text(choice)} ({values['source']}{', modelled' * values['modelled']}{time})"


def explain(
    arch: Annotated[str, typer.Option("--arch", help="Architecture, e.g. gfx950.")],
    shape: Annotated[
        str,
        typer.Option(
            "--shape",
            metavar="'NAME=VALUE ...'",
            help='E.g. "H=32 Hg=16 lens=8192x4,17" or "B=16 Hq=16 Hkv=2 page=64".',
        ),
    ],
    op: Annotated[str, typer.Option("--op", help=f"{', '.join(SHAPES)}.")] = "k5",
    compute_units: Annotated[
        int | None, typer.Option("--compute-units", min=1, help="Default: those of the usual part.")
    ] = None,
    table: Annotated[
        list[Path], typer.Option("--table", help="Overrides the packaged ones; may be repeated.", exists=True)
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say which row or rule decides for a call, and why.

    The row with its file and provenance, or the rule with its inputs and the rows that almost match. Shapes of k5 and
    block: H, Hg, lens=LENGTHxCOUNT,... or dense=B,T, snapshot and state (bf16 or fp32), h0 and fs (yes or no). Of pa:
    B, Hq, Hkv, D, page, QL, query_dtype, scale_mode, v_packed, sink_dtype, window.
    """
    found = usage(lambda: explain_call(cast(Op, op), arch, shape, compute_units, table))
    if as_json:
        print_json(found.as_dict())
    else:
        say(str(found))


def import_csv(
    file: Annotated[
        Path, typer.Argument(metavar="CSV", help="Columns as export-csv writes them.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Tables are DIR/ARCH/KERNEL.json.")] = Path(
        "tables"
    ),
    source: Annotated[str, typer.Option(help="Who found the rows out.")] = "import-csv",
    device: Annotated[str, typer.Option(help="The card that was timed.")] = "",
    date: Annotated[str, typer.Option(help="The day, YYYY-MM-DD.")] = "",
    iterations: Annotated[int | None, typer.Option("--n", min=1, help="Timed iterations.")] = None,
    modelled: Annotated[bool, typer.Option("--modelled", help="Nothing was timed.")] = False,
) -> None:
    """Make a tuned table of a CSV.

    Lines that start with # are skipped, but for those in which export-csv keeps provenances; the options are the
    provenance of rows that have none. If any row is wrong all that are are named, and nothing is written.
    """
    entry = {"source": source, "device": device, "date": date, "n": iterations, "modelled": modelled}
    text = usage(lambda: file.read_text(encoding="utf-8"))
    try:
        tables = csvfile.parse(text, {name: value for name, value in entry.items() if value})
    except csvfile.CsvError as error:
        for line in str(error).splitlines():
            failed(f"{file}: {line}")
        raise typer.Exit(1) from error
    for table in tables:
        path = out / table.arch / f"{table.kernel}.json"
        tablefile.write(path, table.text())
        say(f"{path}: {len(table.rows)} rows")


def export_csv(
    table: TableFile,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write FILE in place of printing.")] = None,
) -> None:
    """Print a tuned table as CSV.

    Columns are those of the public tables of K5. Provenances are kept in lines that start with "#:".
    """
    text = usage(lambda: csvfile.dump(tablefile.read(table)))
    if out is None:
        typer.echo(text, nl=False)
    else:
        tablefile.write(out, text)
