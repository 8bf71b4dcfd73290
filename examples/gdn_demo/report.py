"""The report: a table for people (rich), or JSON for programs."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gdn_runtime

from .check import Row


@dataclass
class Report:
    """What one run of the demo found. ``notes`` say which backends did not run, and why; ``explain`` is by device."""

    batch: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explain: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether something ran and every error keeps to its bound."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def as_json(self) -> str:
        """The report for programs."""
        data: dict[str, Any] = {
            "gdn_runtime": gdn_runtime.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "batch": self.batch,
            "rows": [row.as_dict() for row in self.rows],
            "notes": self.notes,
            "explain": self.explain,
            "ok": self.ok,
        }
        return json.dumps(data, indent=2)

    def add_json(self, text: str) -> None:
        """Take over the rows of another run, from what its ``as_json`` gave."""
        data = json.loads(text)
        self.rows += [Row.of_dict(row) for row in data["rows"]]

    def show(self) -> None:
        """The report for people."""
        console = Console(highlight=False, markup=False)
        console.print(f"gdn-runtime {gdn_runtime.__version__}, torch {torch.__version__}")
        console.print(self.batch)
        console.print(self._table())
        for note in self.notes:
            console.print(f"not run: {note}")
        for label, text in self.explain.items():
            console.print(f"\nWhat explain says about the first prefill on {label}:", style="bold")
            console.print(text)
        console.print()
        console.print("All within bounds." if self.ok else "OUT OF BOUNDS, see the table.", style="bold")

    def _table(self) -> Table:
        table = Table(caption="error: RMS of the difference / RMS of the fp64 token recurrence")
        for name in ("backend", "device", "part"):
            table.add_column(name, overflow="fold")
        for name in ("error", "bound", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("ok", no_wrap=True)
        before = None
        for row in self.rows:
            who = (row.backend, row.device)
            if before not in (None, who):
                table.add_section()
            names = who if who != before else ("", "")
            seconds = "" if row.seconds is None else _duration(row.seconds)
            verdict = "yes" if row.ok else "NO"
            style = None if row.ok else "bold red"
            table.add_row(*names, row.part, _number(row.error), _number(row.bound), seconds, verdict, style=style)
            before = who
        return table


def _number(error: float) -> str:
    return f"{error:.4f}" if error else "0"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
