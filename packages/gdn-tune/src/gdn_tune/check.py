"""What is wrong with tuned tables: everything that the runtime would warn of, and what it cannot see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gdn_runtime.tables import Provenance, parse_provenance, table_files

from .formats import TableFormat, choice_text, of_kernel
from .tablefile import Table, TableError, read

Level = Literal["error", "note", "fact"]


@dataclass(frozen=True)
class Finding:
    """Something about ``row`` (counted from 0; None: the whole) of ``file``. A "note" is worth knowing, not wrong; a
    "fact" is as it should be.

    ``kind``: "file", "schema", "illegal", "conflict", "duplicate", "override", "rule" or "provenance".
    """

    level: Level
    kind: str
    file: str
    row: int | None
    text: str

    def __str__(self) -> str:
        place = self.file if self.row is None else f"{self.file} row {self.row}"
        return f"{place}: {self.kind}: {self.text}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Seen:
    file: Path
    row: int
    choice: dict[str, Any]
    modelled: bool


def check(paths: Iterable[Path]) -> tuple[list[Finding], dict[str, int]]:
    """Findings about the tables in ``paths`` (files, and folders of ``*.json``), and the number of rows of each file.

    Files are taken in the order in which the runtime reads them. Raises OSError for a file that cannot be read.
    """
    findings: list[Finding] = []
    counts: dict[str, int] = {}
    seen: dict[tuple[Any, ...], _Seen] = {}
    for path in paths:
        files = table_files(path)
        if not files:
            findings.append(Finding("error", "file", str(path), None, "got a folder without *.json files"))
        for file in files:
            try:
                table = read(file)
                form = of_kernel(table.kernel)
            except ValueError as error:
                text = str(error).removeprefix(f"{file}: ")
                kind = "file" if isinstance(error, TableError) else "schema"
                findings.append(Finding("error", kind, str(file), None, text))
                continue
            counts[str(file)] = len(table.rows)
            findings += _check_table(form, table, file, seen)
    return findings, counts


def _check_table(form: TableFormat, table: Table, file: Path, seen: dict[tuple[Any, ...], _Seen]) -> Iterator[Finding]:
    def finding(level: Level, kind: str, row: int | None, text: str) -> Finding:
        return Finding(level, kind, str(file), row, text)

    if table.arch not in form.archs:
        yield finding("error", "schema", None, f"arch: got {table.arch!r}, expected one of {', '.join(form.archs)}")
    provenances: dict[str, Provenance] = {}
    for name, entry in table.provenance.items():
        try:
            provenances[name] = parse_provenance(entry)
        except ValueError as error:
            yield finding("error", "provenance", None, f"{name}: {error}")
    named = set()
    for index, fields in enumerate(table.rows):
        try:
            row = form.parse(fields, table.arch, provenances)
        except (ValueError, TypeError) as error:
            yield finding("error", "schema", index, str(error))
            continue
        named.add(fields.get("provenance"))
        for fault in form.faults(row):
            yield finding("error", "illegal", index, fault)
        if fields.get("provenance") is None:
            yield finding("note", "provenance", index, "does not say where it is from")
        elif provenances[fields["provenance"]].modelled and fields.get("us") is not None:
            yield finding("error", "provenance", index, "has a time, and its provenance says that nothing was timed")
        new = _Seen(file, index, form.choice_of(fields), row.provenance.modelled)
        # Python's True is 1: a row with a flag in place of a count was refused above.
        yield from _compare(finding, seen.setdefault((form.kernel, *form.key_of(fields)), new), new)
        if form.op is not None:
            ruled, inputs = form.rule(row)
            if ruled == new.choice:
                # A modelled row is there for its shape, which ahead-of-time compilation reads, whatever it says.
                level: Level = "fact" if new.modelled else "note"
                yield finding(level, "rule", index, f"the rule gives {choice_text(ruled)} without it: {inputs}")
    for name in provenances.keys() - named:
        yield finding("note", "provenance", None, f"{name}: no row is from there")


def _compare(finding: Any, old: _Seen, new: _Seen) -> Iterator[Finding]:
    if old is new:
        return
    place = f"row {old.row}" if old.file == new.file else f"{old.file} row {old.row}"
    equal = old.choice == new.choice
    both = f"{choice_text(new.choice)} here, {choice_text(old.choice)} in {place}"
    if old.file != new.file:
        yield finding("note", "override", new.row, f"the same call as {place}: {both}")
    elif equal:
        yield finding("note", "duplicate", new.row, f"the same call and choice as {place}")
    else:
        yield finding("error", "conflict", new.row, f"the same call, another choice: {both}")
