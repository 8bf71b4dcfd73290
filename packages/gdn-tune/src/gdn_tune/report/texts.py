"""A report as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .content import Column, Section, Table, Value, shown, trimmed
from .data import Data, Origin

SCHEMA = 1


def markdown(title: str, sections: Sequence[Section], data: Data, images: Mapping[str, str]) -> str:
    """The report; ``images``: name of a figure -> its file, if there are any."""
    lines = [f"# {escape(title)}", ""]
    for section in told(sections):
        lines += [f"## {section.title}", ""]
        for text in section.text:
            lines += [escape(text), ""]
        for figure in section.figures:
            if figure.name in images:
                lines += [f"![{escape(figure.alt)}]({images[figure.name]})", ""]
        for table in section.tables:
            if not table.data_only:
                lines += [f"**{escape(table.title)}**", "", *rows_of(trimmed(table)), ""]
        if section.origins:
            lines += ["From:", "", *(f"- {escape(origin.line)}" for origin in section.origins), ""]
    absent = missing(sections, data)
    if absent:
        lines += ["## Without figures", "", *(f"- {escape(text)}" for text in absent), ""]
    return "\n".join(lines).rstrip() + "\n"


def told(sections: Sequence[Section]) -> list[Section]:
    """Sections that have something."""
    return [section for section in sections if section.tables]


def missing(sections: Sequence[Section], data: Data) -> list[str]:
    """What has no figure, and why."""
    empty = [f"{section.title}: {' '.join(section.text)}" for section in sections if not section.tables]
    return empty + [f"{origin.file}: {text}" for origin, text in data.missing]


def rows_of(table: Table) -> list[str]:
    """A table in Markdown: numbers to the right."""
    rule = [":--" if column.kind == "text" else "--:" for column in table.columns]
    cells = [[shown(value, column) for value, column in zip(row, table.columns, strict=True)] for row in table.rows]
    heads = [column.name for column in table.columns]
    return [f"| {' | '.join(map(escape, row))} |" for row in (heads, rule, *cells)]


def escape(text: str) -> str:
    """``text`` on one line that ends no cell and opens no tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def to_csv(table: Table) -> str:
    """A table with its numbers whole: shares and ratios as they are."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([[plain(value) for value in row] for row in table.rows])
    return out.getvalue()


def plain(value: Value) -> str:
    """A value that reads back as it was."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return shown(value, Column(""))
    return value if isinstance(value, str) else repr(value)


def to_json(title: str, sections: Sequence[Section], data: Data) -> str:
    """Everything, with the points of the figures."""
    values = {
        "schema": SCHEMA,
        "title": title,
        "sections": [_section(section) for section in sections],
        "missing": missing(sections, data),
    }
    return json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _section(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "title": section.title,
        "text": section.text,
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "columns": [column.name for column in table.columns],
                "rows": table.rows,
            }
            for table in section.tables
        ],
        "figures": [
            {"name": each.name, "title": each.title, "alt": each.alt, "modelled": each.modelled, "note": each.note}
            for each in section.figures
        ],
        "origins": [_origin(origin) for origin in section.origins],
    }


def _origin(origin: Origin) -> dict[str, Any]:
    names = ("file", "device", "hardware", "arch", "versions", "commit", "date", "command", "method", "modelled")
    return {name: getattr(origin, name) for name in names}
