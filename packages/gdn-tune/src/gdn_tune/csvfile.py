"""Tables as CSV with the columns of the public tables, in both directions and without loss.

Lines that start with "#" are skipped by readers of such files. Two kinds of them mean something here: ``#: provenance
NAME JSON`` gives an entry, and ``#: rows NAME`` says that the rows below are from there.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gdn_runtime.tables import parse_provenance

from .formats import OPT, VK, TableFormat, of_kernel
from .tablefile import Fields, Table

TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")


@dataclass(frozen=True)
class CsvFormat:
    """Columns of a CSV in their order, ``name``: column of the table, or a value that all rows have."""

    form: TableFormat
    columns: dict[str, str | Fields]


def _same(*names: str) -> dict[str, str | Fields]:
    return {name: name for name in names}


_FIXED: dict[str, str | Fields] = {"dtype": {"dtype": "bf16"}, "K": {"K": 128}, "V": "V", "BT": {"BT": 64}}

OPT_CSV = CsvFormat(
    OPT,
    {
        **_same("gfx", "cu_num"),
        **_FIXED,
        **_same("H", "Hg", "is_varlen", "use_h0", "store_fs", "snapshot_bf16", "state_bf16", "T_flat", "N"),
        **_same("total_chunks", "max_seq_chunks"),
        "BV": "block_v",
        "us": "us",
    },
)
VK_CSV = CsvFormat(
    VK,
    {
        "arch": "gfx",
        **_same("dtype", "K", "V", "BT", "H", "Hg", "T_flat", "N", "use_g", "use_gk", "use_h0", "store_fs", "save_vn"),
        **_same("is_varlen", "wu_contig"),
        "BV": "block_v",
        "duration": "us",
    },
)
CSV_FORMATS = (OPT_CSV, VK_CSV)


class CsvError(ValueError):
    """Lines that are no rows; the message has one line for each."""


def dump(table: Table) -> str:
    """The CSV of ``table``. Raises ValueError for a table of a kernel that has no CSV."""
    form = of_kernel(table.kernel)
    found = next((each for each in CSV_FORMATS if each.form is form), None)
    if found is None:
        raise ValueError(f"kernel: got {table.kernel!r}, expected one of {', '.join(_kernels())}")
    out = io.StringIO()
    for name, entry in table.provenance.items():
        out.write(f"#: provenance {name} {json.dumps(entry)}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found.columns)
    said = ""
    for fields in table.rows:
        name = fields.get("provenance") or ""
        if name != said:
            out.write(f"#: rows {name}\n" if name else "#: rows\n")
            said = name
        writer.writerow([_spell(_value(fields, column)) for column in found.columns.values()])
    return out.getvalue()


def parse(text: str, entry: Fields | None = None) -> list[Table]:
    """The tables in a CSV, one for each architecture. ``entry``: provenance of rows above which no line says theirs.

    Raises CsvError for a header that is none of the known ones and for rows that are wrong, all of them at once.
    Of two rows for the same call with the same choice the first is kept.
    """
    tables: dict[str, Table] = {}
    entries: dict[str, Fields] = {}
    name = ""
    found: CsvFormat | None = None
    header: list[str] = []
    faults = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if not line.strip():
            continue
        try:
            if line.startswith("#"):
                name = _comment(line, entries, name)
                continue
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
            if found is None:
                header, found = cells, _format(cells)
                continue
            if len(cells) != len(header):
                raise ValueError(f"got {len(cells)} cells, expected {len(header)}")
            fields = _fields(found, dict(zip(header, cells, strict=True)))
            table = tables.setdefault(fields["gfx"], Table(found.form.kernel, fields["gfx"]))
            _add(found.form, table, fields, name, entries if name else {"import": entry or {}})
        except (ValueError, csv.Error) as error:
            faults.append(f"line {number}: {error}")
            if found is None:
                break
    if found is None and not faults:
        faults.append("got no header")
    if faults:
        raise CsvError("\n".join(faults))
    return [table for _, table in sorted(tables.items())]


def _kernels() -> Iterator[str]:
    return (each.form.kernel for each in CSV_FORMATS)


def _format(header: list[str]) -> CsvFormat:
    for found in CSV_FORMATS:
        if set(header) == found.columns.keys() and len(header) == len(found.columns):
            return found
    known = "; or ".join(",".join(found.columns) for found in CSV_FORMATS)
    raise ValueError(f"header: got {','.join(header)}, expected the columns {known}")


def _comment(line: str, entries: dict[str, Fields], name: str) -> str:
    """Take in a line of comment; the name of the provenance of the rows below it."""
    words = line[2:].strip().split(" ", 2)
    if not line.startswith("#:"):
        return name
    if words[0] == "provenance" and len(words) == 3:
        entry = json.loads(words[2])
        if not isinstance(entry, dict):
            raise ValueError(f"provenance {words[1]}: got {type(entry).__name__}, expected an object")
        entries[words[1]] = entry
    elif words[0] == "rows" and len(words) <= 2:
        name = "".join(words[1:])
        if name and name not in entries:
            raise ValueError(f"rows: got {name!r}, expected one of {', '.join(entries) or 'none'}")
    return name


def _fields(found: CsvFormat, cells: dict[str, str]) -> Fields:
    fields: Fields = {}
    for column, target in found.columns.items():
        if isinstance(target, dict):
            ((name, expected),) = target.items()
            if cells[column] != str(expected):
                raise ValueError(f"{name}: got {cells[column]!r}, expected {expected}")
        elif cells[column] or target not in ("us", "T_flat", "N"):
            fields[target] = _reader(target)(cells[column], column)
    return {name: fields[name] for name in found.form.columns if name in fields}


def _add(form: TableFormat, table: Table, fields: Fields, name: str, entries: dict[str, Fields]) -> None:
    name = name or next((key for key, entry in entries.items() if entry), "")
    if name:
        fields["provenance"] = name
        table.provenance[name] = entries[name]
    provenances = {key: parse_provenance(entry) for key, entry in table.provenance.items()}
    for fault in form.faults(form.parse(fields, table.arch, provenances)):
        raise ValueError(fault)
    key = form.key_of(fields)
    for index, old in enumerate(table.rows):
        if form.key_of(old) == key:
            if form.choice_of(old) != form.choice_of(fields):
                raise ValueError(f"the same call as row {index}, another choice")
            return
    table.rows.append(fields)


def _reader(column: str) -> Callable[[str, str], Any]:
    if column in ("gfx", "dtype"):
        return lambda text, name: text
    if column == "us":
        return _number
    is_flag = column.startswith(("is_", "use_", "store_", "save_")) or column.endswith(("_bf16", "_contig"))
    return _flag if is_flag else _count


def _flag(text: str, name: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"{name}: got {text!r}, expected True or False")
    return text.lower() in TRUE


def _count(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name}: got {text!r}, expected a whole number")
    return int(text)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: got {text!r}, expected a number") from None


def _value(fields: Fields, column: str | Fields) -> object:
    return next(iter(column.values())) if isinstance(column, dict) else fields.get(column)


def _spell(value: object) -> str:
    return "" if value is None else str(value)
