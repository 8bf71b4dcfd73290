"""Sections about bars that figures must not pass: the emulator's counters, and the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .content import Column, Dots, Section, Table, Value, digits, slug, unique
from .data import BarRow


def counters_section(rows: Sequence[BarRow]) -> Section:
    """The emulator's counters."""
    text = "Counted on the emulator, a workgroup and a steady step of the kernel at a time; cycles are of its model. "
    text += "Nothing of it was timed."
    return _section("counters", "Emulator counters against their bars", text, rows)


def host_section(rows: Sequence[BarRow]) -> Section:
    """Times of the host."""
    text = "Times of the host alone, no device has a part in them; they depend on the machine, shares of bars less so."
    return _section("host", "Host time against its bars", text, rows)


def _section(name: str, title: str, text: str, rows: Sequence[BarRow]) -> Section:
    section = Section(name, title)
    if not rows:
        section.text.append("No bars: none of the inputs has some.")
        return section
    section.origins = list(unique([row.origin for row in rows]))
    missed = [row for row in rows if not row.met]
    section.text += [text, f"{len(rows) - len(missed)} of {len(rows)} bars are met."]
    if missed:
        lines = (f"{row.item} ({row.group}) {row.name}: {digits(row.got)} of {digits(row.limit)}" for row in missed)
        section.text.append(f"Missed: {'; '.join(lines)}.")
    groups: dict[tuple[str, str], list[BarRow]] = defaultdict(list)
    for row in rows:
        groups[row.origin.file, row.group].append(row)
    drawn: dict[tuple[str, str], list[str]] = {}
    for (file, group), mine in groups.items():
        names = drawn[file, group] = telling(mine)
        if names:
            section.figures.append(dots_of(name, title, file, group, mine, names))
    section.tables.append(summary(name, title, groups, drawn))
    columns = (Column("group", "text"), Column("what", "text"), Column("bar", "text"), Column("got"), Column("limit"),
               Column("unit", "text"), Column("share of bar", "percent"), Column("met", "text"),
               Column("file", "text"))  # fmt: skip
    cells = tuple((r.group, r.item, r.name, r.got, r.limit, r.unit, r.share, r.met, r.origin.file) for r in rows)
    section.tables.append(Table(f"{name}-bars", f"{title}: every bar", columns, cells, data_only=True))
    return section


def telling(rows: Sequence[BarRow]) -> list[str]:
    """Bars that are not just met to the last unit everywhere: those that a plot says something of."""
    names = dict.fromkeys(row.name for row in rows if row.limit)
    return [name for name in names if any(row.name == name and row.got != row.limit for row in rows)]


def items(rows: Sequence[BarRow]) -> dict[str, list[BarRow]]:
    """Rows by what they are of."""
    found: dict[str, list[BarRow]] = defaultdict(list)
    for row in rows:
        found[row.item].append(row)
    return found


def dots_of(name: str, title: str, file: str, group: str, rows: Sequence[BarRow], names: Sequence[str]) -> Dots:
    """Shares of the bars, a line per kernel."""
    lines = []
    for item, mine in items(rows).items():
        points = tuple((row.name, row.share) for row in mine if row.name in names and row.share is not None)
        met = sum(row.met for row in mine)
        lines.append((item, points, f"{met}/{len(mine)}"))
    others = len(dict.fromkeys(row.name for row in rows)) - len(names)
    most = max((row for row in rows if row.name in names and row.share is not None), key=lambda row: row.share or 0)
    alt = f"Shares of {', '.join(names)} in their bars, {group}, {len(lines)} lines; the most is {most.name} of "
    alt += f"{most.item}, {100 * (most.share or 0):.0f} %."
    note = "At the right: bars met, of how many." + (f" {others} bars are met exactly everywhere: in the table alone."
                                                     if others else "")  # fmt: skip
    stem = file.removesuffix(".json")
    return Dots(slug(name, stem, group), f"{title}: {group}", alt, unique([row.origin for row in rows]),
                "share of the bar, %", tuple(lines), 1.0, True, note=note)  # fmt: skip


def summary(
    name: str, title: str, groups: dict[tuple[str, str], list[BarRow]], drawn: dict[tuple[str, str], list[str]]
) -> Table:
    """A row per kernel: bars met, and the share of each bar that is drawn; the largest where it holds twice."""
    names = list(dict.fromkeys(each for found in drawn.values() for each in found))
    columns = [Column("group", "text"), Column("what", "text"), Column("bars"), Column("met")]
    for each in names:
        columns += [Column(each), Column(f"{each}: limit"), Column(f"{each}: share", "percent")]
    cells: list[tuple[Value, ...]] = []
    for (file, group), rows in groups.items():
        for item, mine in items(rows).items():
            cell: list[Value] = [group, item, len(mine), sum(row.met for row in mine)]
            for each in names:
                found = [row for row in mine if row.name == each]
                worst = max(found, key=lambda row: (row.share or 0, row.got), default=None)
                cell += [None] * 3 if worst is None else [worst.got, worst.limit, worst.share]
            cells.append((*cell, file))
    return Table(name, title, (*columns, Column("file", "text")), tuple(cells))
