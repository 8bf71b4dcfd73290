"""The section about paged decode: bytes per second and time against context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from .content import Bars, Column, Figure, Lines, Section, Series, Table, Value, digits, slug, unique
from .data import Decode, Time, labels_of
from .roofline import TERA, Roof, decode_least

GIGA = 1e9
Label = Callable[[Time | Decode], str]


def decode_section(rows: Sequence[Decode], roof: Roof | None) -> Section:
    """Everything of paged decode."""
    section = Section("decode", "Paged decode")
    if not rows:
        section.text.append("No times of paged decode: none of the inputs has some.")
        return section
    section.origins = list(unique([row.origin for row in rows]))
    timed = [row for row in rows if row.unit == "us"]
    if timed:
        section.text.append("GB/s count visible keys and values, their scales, queries and outputs once each.")
        if roof is None:
            section.text.append("No bandwidth is known of this device: --bandwidth gives it.")
        else:
            section.text.append(f"Roofline of paged decode: {roof.text}.")
            if any(roof.us(*least) > row.value for row in timed if (least := decode_least(row))):
                section.text.append(
                    "Shares above 100 %: what only reads can pass a bandwidth that was taken otherwise."
                )
        section.tables.append(table_of(timed, roof))
    label = labels_of(timed)
    order = tuple(dict.fromkeys(map(label, timed)))
    for problem, group in problems(timed).items():
        section.figures += figures_of(problem, group, roof, order, label)
    counted = [row for row in rows if row.unit != "us"]
    if counted:
        section.text.append(
            "Cycles are of the emulator's model, of a workgroup and a tile of 256 tokens; nothing was timed."
        )
        columns = (*(Column(name, "text") for name in ("problem", "arch", "backend")), Column("batch"),
                   Column("context"), Column("cycles per tile (modelled)"), Column("file", "text"))  # fmt: skip
        cells = tuple(
            (r.problem, r.origin.arch, r.backend, r.batch, r.context, r.value, r.origin.file) for r in counted
        )
        section.tables.append(Table("decode-modelled", "Paged decode, modelled", columns, cells))
    return section


def problems(rows: Sequence[Decode]) -> dict[str, list[Decode]]:
    """Rows by what they have in common."""
    found: dict[str, list[Decode]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (-row.page, row.query_length, row.problem)):
        found[row.problem].append(row)
    return found


def speed(row: Decode) -> float | None:
    """GB/s; None if heads are not known."""
    least = decode_least(row)
    return None if least is None else least[0] / row.value * 1e6 / GIGA


def table_of(rows: Sequence[Decode], roof: Roof | None) -> Table:
    """All figures."""
    columns = (
        Column("problem", "text"), Column("batch"), Column("context"), Column("backend", "text"),
        Column("caches", "text"), Column("us"), Column("p90-p10 us"), Column("GB/s"), Column("roofline us"),
        Column("share of roofline", "percent"), Column("file", "text"),
    )  # fmt: skip
    cells: list[tuple[Value, ...]] = []
    for problem, group in problems(rows).items():
        for row in sorted(group, key=lambda row: (row.batch, row.context)):
            least = decode_least(row)
            floor = roof.us(*least) if roof is not None and least is not None else None
            share = None if floor is None else floor / row.value
            cells.append((problem, row.batch, row.context, row.backend, row.variant, row.value, row.spread, speed(row),
                          floor, share, row.origin.file))  # fmt: skip
    return Table("decode", "Paged decode", columns, tuple(cells))


def name_of(kind: str, problem: str) -> str:
    """Of a figure: the words of the problem that tell it from others."""
    return slug(kind, *(word for word in problem.split() if word not in ("heads", "of", "scales,", "V")))


def figures_of(
    problem: str, rows: Sequence[Decode], roof: Roof | None, order: tuple[str, ...], label: Label
) -> list[Figure]:
    """Bytes per second of every batch and context; time against context of batches that have several."""
    found: list[Figure] = []
    known = [(row, value) for row in rows if (value := speed(row)) is not None]
    if known:
        ordered = sorted(known, key=lambda pair: (pair[0].batch, pair[0].context))
        bars = tuple(
            (
                f"B={row.batch}, {context_text(row.context)}",
                label(row),
                (("GB/s", value),),
                f"{value:.0f} ({digits(round(row.value, 1))} us)",
            )
            for row, value in ordered
        )
        best, most = max(known, key=lambda pair: pair[1])
        alt = f"GB/s of paged decode, {problem}: {len(bars)} bars, at most {most:.0f} GB/s "
        alt += f"({best.label}, batch {best.batch}, context {best.context})."
        line = None if roof is None else (roof.bandwidth * TERA / GIGA, f"{digits(roof.bandwidth * TERA / GIGA)} GB/s")
        origins = unique([row.origin for row, _ in known])
        title = f"Paged decode, {problem}"
        found.append(
            Bars(name_of("decode-gbs", problem), title, alt, origins, "GB/s (time of the call)", bars, line, True,
                 order=order)
        )  # fmt: skip
    for batch in sorted({row.batch for row in rows}):
        mine = [row for row in rows if row.batch == batch]
        figure = times_of(problem, batch, mine, roof, order, label)
        if figure is not None:
            found.append(figure)
    return found


def times_of(
    problem: str, batch: int, rows: Sequence[Decode], roof: Roof | None, order: tuple[str, ...], label: Label
) -> Lines | None:
    """Time against context; None if there is only one."""
    if len({row.context for row in rows}) < 2:
        return None
    series = []
    for name in dict.fromkeys(map(label, rows)):
        points = sorted((float(row.context), row.value) for row in rows if label(row) == name)
        series.append(Series(name, tuple(points), line=len({context for context, _ in points}) > 1))
    floor = {row.context: roof.us(*least) for row in rows if roof is not None and (least := decode_least(row))}
    if floor:
        points = sorted((float(context), value) for context, value in floor.items())
        series.append(Series("roofline", tuple(points), line=len(points) > 1, roof=True))
    slow, fast = max(rows, key=lambda row: row.value), min(rows, key=lambda row: row.value)
    alt = (
        f"Time of paged decode against context, batch {batch}, {problem}: from {digits(fast.value)} us ({fast.label}) "
    )
    alt += f"to {digits(slow.value)} us ({slow.label})."
    name, title = f"{name_of('decode-us', problem)}-b{batch}", f"Paged decode, batch {batch}, {problem}"
    return Lines(name, title, alt, unique([row.origin for row in rows]), "context, tokens", "us", tuple(series),
                 order=order)  # fmt: skip


def context_text(tokens: int) -> str:
    """Tokens, in K where they are whole."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
