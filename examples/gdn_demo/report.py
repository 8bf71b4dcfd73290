"""What one run of the demo found, and the same as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from typing import Any

import torch

import gdn_runtime

from .check import Row


@dataclass
class Report:
    """``batches`` say what was run, ``notes`` which backends did not run and why; ``explain`` is by device."""

    batches: list[str] = field(default_factory=list)
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
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "batches": self.batches,
            "rows": [row.as_dict() for row in self.rows],
            "notes": self.notes,
            "explain": self.explain,
            "ok": self.ok,
        }
        return json.dumps(data, indent=2)

    def add_json(self, text: str, prefix: str) -> None:
        """Take over the rows of another run, from what its ``as_json`` gave; ``prefix`` says where it ran."""
        data = json.loads(text)
        self.batches += [f"{prefix}: {batch}" for batch in data["batches"]]
        self.rows += [Row.of_dict(row) for row in data["rows"]]
