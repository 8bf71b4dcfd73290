"""Files of tuned tables as they stand: read strictly, written so that equal tables are equal bytes.

``gdn_runtime.tables`` reads the same files leniently, since nothing in one may stop a server; whoever makes them wants
to know.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdn_runtime.tables.files import FORMAT

HEADER = {"format": int, "kernel": str, "arch": str, "provenance": dict, "rows": list}

Fields = dict[str, Any]


class TableError(ValueError):
    """The file is no table. The message names it and says why."""


@dataclass(frozen=True)
class Table:
    """The table of one ``kernel`` for one ``arch``: entries of ``provenance`` by name, ``rows`` of column -> value."""

    kernel: str
    arch: str
    provenance: dict[str, Fields] = field(default_factory=dict)
    rows: list[Fields] = field(default_factory=list)

    def text(self) -> str:
        """The content of its file: one line for each entry and row, in the order that they have."""
        entries = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.provenance.items()]
        provenance = "{\n    " + ",\n    ".join(entries) + "\n  }" if entries else "{}"
        rows = "[\n    " + ",\n    ".join(map(json.dumps, self.rows)) + "\n  ]" if self.rows else "[]"
        header = f'  "format": {FORMAT},\n  "kernel": {json.dumps(self.kernel)},\n  "arch": {json.dumps(self.arch)},\n'
        return f'{{\n{header}  "provenance": {provenance},\n  "rows": {rows}\n}}\n'


def read(path: Path) -> Table:
    """The table in ``path``. Raises TableError for a file that is none, OSError for one that cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        return _table(content)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path}: {error}") from error


def write(path: Path, text: str) -> None:
    """Put ``text`` into ``path``: the whole of it, or what was there stays. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} stands twice in one object")
    return found


def _table(content: object) -> Table:
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__}, expected an object")
    content = {"provenance": {}, **content}
    unknown = content.keys() - HEADER
    if unknown:
        raise ValueError(f"has unknown field {', '.join(sorted(unknown))}")
    for name, kind in HEADER.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{name}: got {type(content.get(name)).__name__}, expected {kind.__name__}")
    if content["format"] != FORMAT:
        raise ValueError(f"format: got {content['format']}, expected {FORMAT}")
    for name in ("rows", "provenance"):
        entries = content[name] if name == "rows" else content[name].values()
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise ValueError(f"{name} {index}: got {type(entry).__name__}, expected an object")
    return Table(content["kernel"], content["arch"], content["provenance"], content["rows"])
