"""The report as a table for people."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import gdn_runtime

from .check import Row
from .report import Report


def show(report: Report) -> None:
    """Print the report."""
    console = Console(highlight=False, markup=False)
    console.print(f"gdn-runtime {gdn_runtime.__version__}, torch {torch.__version__}")
    for batch in report.batches:
        console.print(batch)
    console.print(table(report.rows))
    for note in report.notes:
        console.print(f"Not run: {note}.")
    for device, text in report.explain.items():
        console.print(f"\nWhat explain says about {device}:", style="bold")
        console.print(text)
    console.print("\nAll within bounds." if report.ok else "\nOUT OF BOUNDS, see the table.", style="bold")


def table(rows: list[Row]) -> Table:
    """One line per measurement, a section per backend and device."""
    what = "RMS of the difference / RMS of the definition in fp64, or of the oracle that rounds as FP8 kernels do"
    result = Table(caption=f"error: {what}")
    result.add_column("backend", no_wrap=True)
    result.add_column("device")
    result.add_column("part", no_wrap=True)
    for name in ("error", "bound", "time"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("ok", no_wrap=True)
    before: tuple[str, str] | None = None
    for row in rows:
        who = (row.backend, row.device)
        if before not in (None, who):
            result.add_section()
        names = who if who != before else ("", "")
        time = "" if row.seconds is None else _duration(row.seconds)
        style = None if row.ok else "bold red"
        result.add_row(
            *names, row.part, _number(row.error), _number(row.bound), time, "yes" if row.ok else "NO", style=style
        )
        before = who
    return result


def _number(error: float) -> str:
    return f"{error:.4f}" if error else "0"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
