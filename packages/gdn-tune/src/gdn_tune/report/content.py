"""What a report consists of, before it is drawn or written: sections with tables and figures of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .data import Origin

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """``kind`` says how values are written for people: numbers to five digits, ratios to two decimals, percentages of
    a value near 1 to a decimal. CSV and JSON have them whole, shares and ratios as they are."""

    name: str
    kind: Literal["text", "number", "ratio", "percent"] = "number"


@dataclass(frozen=True)
class Table:
    """``name`` is that of its CSV. ``data_only``: too long for a page, in CSV and JSON alone."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    data_only: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one label over numbers. ``hollow``: indices of points that were taken in another way. ``roof``:
    the least time."""

    label: str
    points: tuple[tuple[float, float], ...]
    line: bool = True
    hollow: frozenset[int] = frozenset()
    roof: bool = False


@dataclass(frozen=True)
class Figure:
    """``name`` is that of its PNG, ``alt`` says in words what it shows. ``order``: what is coloured, in the order of
    the colours, so that figures of a section have the same ones."""

    name: str
    title: str
    alt: str
    origins: tuple[Origin, ...]
    note: str = field(default="", kw_only=True)
    order: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def modelled(self) -> bool:
        """Whether nothing was timed; figures do not mix."""
        return any(origin.modelled for origin in self.origins)


@dataclass(frozen=True)
class Lines(Figure):
    """Values over tokens (log 2). ``log``: values too. ``marks``: (x, words) of what stands there."""

    x: str
    y: str
    series: tuple[Series, ...]
    log: bool = True
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Bars(Figure):
    """Horizontal bars of parts. ``rows``: (group, label, (part, value) from left to right, words at the end); rows of
    equal groups stand together. ``line``: (value, words) of a limit. ``by_label``: bars are coloured by their label,
    not by parts."""

    x: str
    rows: tuple[tuple[str, str, tuple[tuple[str, float], ...], str], ...]
    line: tuple[float, str] | None = None
    by_label: bool = False


@dataclass(frozen=True)
class Dots(Figure):
    """Dots on a line per row. ``rows``: (label, (series, value), words at the right). ``line``: value of a
    limit. ``percent``: values are shares."""

    x: str
    rows: tuple[tuple[str, tuple[tuple[str, float], ...], str], ...]
    line: float
    percent: bool = False


@dataclass
class Section:
    """``text``: paragraphs. Without tables there is nothing to show, and ``text`` says what is missing."""

    name: str
    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)


def unique(origins: Sequence[Origin]) -> tuple[Origin, ...]:
    """Without repetitions."""
    return tuple(found for i, found in enumerate(origins) if found not in origins[:i])


def sources(figure: Figure) -> list[str]:
    """Where the figure is from, a line for each run."""
    return list(dict.fromkeys(f"{origin.file}: {origin.where}" for origin in figure.origins))


def trimmed(table: Table) -> Table:
    """Without the columns that are empty in all rows, for people."""
    kept = [index for index in range(len(table.columns)) if any(row[index] not in (None, "") for row in table.rows)]
    columns = tuple(table.columns[index] for index in kept)
    return replace(table, columns=columns, rows=tuple(tuple(row[index] for index in kept) for row in table.rows))


def shown(value: Value, column: Column) -> str:
    """A value for people; "-" where there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value or "-"
    if column.kind == "ratio":
        return f"{value:.2f}"
    if column.kind == "percent":
        return f"{100 * value:.1f} %"
    return digits(value)


def digits(value: float) -> str:
    """A number to five digits, never in powers of ten."""
    if isinstance(value, int) or value == int(value):
        return str(int(value))
    text = f"{value:.5g}"
    return f"{value:.0f}" if "e+" in text else f"{value:.8f}".rstrip("0") if "e-" in text else text


def slug(*words: object) -> str:
    """A name of a file."""
    text = "-".join(str(word) for word in words if str(word)).lower()
    return "-".join(part for part in "".join(c if c.isascii() and c.isalnum() else " " for c in text).split())
