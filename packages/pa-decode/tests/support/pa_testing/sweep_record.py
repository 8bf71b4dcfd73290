"""What has passed of a sweep, kept in a file, so that a run goes on where another ended; and its summary.

A test counts as passed as long as the code objects that it launches and every source that it runs are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gdn_runtime import env
from gdn_runtime.codeobject.source import code_object
from gdn_runtime.spec import KernelSpec

FILE = "passed.jsonl"
BEFORE = "passed before, with the same kernels and sources"
"""Why a test is skipped that need not run again."""


def digest_of_sources(folders: Iterable[Path], without: str) -> str:
    """sha256 over the Python and C files below the folders, but for folders called ``without``."""
    digest = hashlib.sha256()
    for folder in folders:
        files = (path for path in folder.rglob("*") if path.suffix in {".py", ".c", ".h", ".def"})
        for path in sorted(files):
            name = path.relative_to(folder)
            if without not in name.parts:
                content = path.read_bytes()
                digest.update(f"{folder.name}/{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@dataclasses.dataclass
class Record:
    """The tests that have passed, by name: {"key": .., and what the test noted}."""

    folder: Path

    def __post_init__(self) -> None:
        self.passed: dict[str, dict[str, Any]] = {}
        path = self.folder / FILE
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:  # of a run that was killed while it wrote
                continue
            self.passed[entry["test"]] = entry

    def add(self, test: str, noted: dict[str, Any]) -> None:
        """Keep that ``test`` passed."""
        self.passed[test] = {"test": test, **noted}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / FILE).open("a") as file:
            file.write("\n" + json.dumps(self.passed[test]) + "\n")  # an unfinished line before it stays alone

    def clear(self) -> None:
        """Forget everything."""
        self.passed = {}
        (self.folder / FILE).unlink(missing_ok=True)


@dataclasses.dataclass
class Run:
    """One test of a sweep: its kernels, and what it noted."""

    test: str
    record: Record
    sources: str
    noted: dict[str, Any] = dataclasses.field(default_factory=dict)

    def begin(self, specs: Sequence[KernelSpec]) -> dict[str, Any] | None:
        """Find or compile the kernels. What the record has of this test, if it passed with these and these sources."""
        start = time.perf_counter()
        with env.override(jit=True):
            codes = [code_object(spec).digest for spec in specs]
        key = hashlib.sha256(json.dumps([self.sources, *codes]).encode()).hexdigest()
        self.noted |= {"key": key, "compiling": time.perf_counter() - start}
        before = self.record.passed.get(self.test)
        return before if before is not None and before["key"] == key else None
