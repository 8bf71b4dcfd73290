"""Sections about the block and K5: time against tokens, what fp32 snapshots cost, stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..bench.profile import K5, K6, STAGES, WHOLE
from .content import Bars, Column, Figure, Lines, Section, Series, Table, Value, digits, slug, unique
from .data import Decode, Shape, Time, labels_of
from .roofline import Roof, least_us

HOW_HOLLOW = "events"


def split(times: Iterable[Time]) -> list[tuple[str, list[Time]]]:
    """(unit, times) of what was timed and of what was modelled, if there is any: the two share no table and no plot."""
    found: dict[str, list[Time]] = {"us": [], "cycles": []}
    for time in times:
        found[time.unit].append(time)
    return [(unit, rows) for unit, rows in found.items() if rows]


def grouped(times: Iterable[Time]) -> list[tuple[tuple[int, int, str], list[Time]]]:
    """((H, Hg, dtype of snapshots), times), the largest first."""
    found: dict[tuple[int, int, str], list[Time]] = defaultdict(list)
    for time in times:
        found[time.shape.num_heads, time.shape.num_key_heads, time.shape.snapshot].append(time)
    return sorted(found.items(), key=lambda item: (-item[0][0], -item[0][1], item[0][2]))


def heads_text(key: tuple[int, int, str]) -> str:
    """In words."""
    return f"H={key[0]}, Hg={key[1]}" + (f", {key[2]} snapshots" if key[2] else "")


def baseline_of(times: Sequence[Time], name: str) -> dict[str, str]:
    """The backend that the others of each file are compared with: ``name``, else aiter, else the first. Raises
    ValueError for a ``name`` that no file has."""
    found: dict[str, list[str]] = defaultdict(list)
    for time in times:
        found[time.origin.file].append(time.backend)
    if name and not any(name in backends for backends in found.values()):
        known = dict.fromkeys(time.backend for time in times)
        raise ValueError(f"baseline: got {name!r}, expected one of {', '.join(known)}")
    return {
        file: name or ("aiter" if "aiter" in backends else backends[0])
        for file, backends in found.items()
        if not name or name in backends
    }


def ratio(times: Sequence[Time], of: Time, baseline: str) -> float | None:
    """Time of ``baseline`` over that of ``of``: same run, shape, variant and way of timing, else None."""
    if of.backend == baseline:
        return None
    same = (time for time in times if replace(time, backend=of.backend, value=of.value, stages=of.stages, gap=of.gap)
            == of and time.backend == baseline)  # fmt: skip
    other = next(same, None)
    return None if other is None else other.value / of.value


def times_section(
    times: Sequence[Time], what: str, name: str, title: str, roof: Roof | None, baselines: dict[str, str]
) -> Section:
    """Time against tokens per backend, with the least time."""
    section = Section(name, title)
    if not times:
        section.text.append(f"No times of {what}: none of the inputs has some.")
        return section
    section.origins = list(unique([time.origin for time in times]))
    for unit, rows in split(times):
        timed = unit == "us"
        tag = "" if timed else "modelled"
        lead = ("H", "Hg", "shape", "snapshots", "backend", "variant", "taken")
        columns = [Column(word, "number" if word in ("H", "Hg") else "text") for word in lead]
        columns.insert(3, Column("tokens"))
        columns.append(Column(unit if timed else "cycles (modelled)"))
        if timed:
            columns += [Column("roofline us"), Column("x roofline", "ratio"), Column("baseline", "text"),
                        Column("baseline / time", "ratio")]  # fmt: skip
        columns.append(Column("file", "text"))
        cells: list[tuple[Value, ...]] = []
        label = labels_of(rows)
        order = tuple(dict.fromkeys(map(label, rows)))
        for key, group in grouped(rows):
            for time in group:
                shape = time.shape
                row: list[Value] = [*key[:2], shape.text, shape.tokens or None, shape.snapshot, time.backend]
                row += [time.variant, time.how, time.value]
                if timed:
                    least, base = least_us(roof, time), baselines.get(time.origin.file, "")
                    row += [least, None if least is None else time.value / least]
                    row += [base, ratio(times, time, base)]
                cells.append((*row, time.origin.file))
            figure = lines_of(key, group, slug(name, tag, *key), title, unit, roof, order, label)
            if figure is not None:
                section.figures.append(figure)
        section.tables.append(
            Table(slug(name, tag), f"{title}{'' if timed else ', modelled'}", tuple(columns), tuple(cells))
        )
        if timed:
            section.text.append(roof_text(roof, what))
            section.text.append("Baseline / time above 1 is faster than the baseline, in the same file, shape and way "
                                "of timing.")  # fmt: skip
        else:
            section.text.append("Cycles are of the emulator's model: nothing of them was timed.")
    return section


def roof_text(roof: Roof | None, what: str) -> str:
    """What the roofline is."""
    if roof is None:
        return "No roofline: no bandwidth and rate are known of this device; --bandwidth and --rate give them."
    return (
        f"Roofline of {'the block' if what == 'block' else what}: {roof.text}. Inputs, outputs and states count once."
    )


def lines_of(
    key: tuple[int, int, str],
    times: Sequence[Time],
    name: str,
    title: str,
    unit: str,
    roof: Roof | None,
    order: tuple[str, ...],
    label: Callable[[Time | Decode], str],
) -> Figure | None:
    """A plot of the times of calls whose lengths are known, bars if all are of one shape; None without."""
    known = [time for time in times if time.shape.lengths]
    if not known:
        return None
    if len({time.shape.tokens for time in known}) == 1:
        return bars_of(key, known, name, title, unit, roof, order, label)
    series = [each for name_of in dict.fromkeys(map(label, known))
              for each in series_of(name_of, [time for time in known if label(time) == name_of])]  # fmt: skip
    least = {time.shape: least_us(roof, time) for time in known}
    floor = [replace(time, value=value, how="") for time in known if (value := least[time.shape]) is not None]
    if floor:
        series += [
            replace(each, roof=True) for each in series_of("roofline", list({t.shape: t for t in floor}.values()))
        ]
    values = [time.value for time in known]
    slow, fast = max(known, key=lambda time: time.value), min(known, key=lambda time: time.value)
    alt = (
        f"{title} at {heads_text(key)} against tokens, {len(series)} series: from {digits(fast.value)} {unit} "
        f"({fast.label}, {fast.shape.text}) to {digits(slow.value)} {unit} ({slow.label}, {slow.shape.text})."
    )
    joined = [layout for layout, tokens in layouts(known).items() if len(tokens) > 1]
    notes = [f"Lines join calls of one layout: {', '.join(joined)}."] if joined else []
    if any(each.hollow for each in series):
        notes.append("Hollow: a single call between events, which could not be captured in a graph.")
    return Lines(
        name,
        f"{title}: {heads_text(key)}",
        alt,
        unique([time.origin for time in known]),
        "tokens of the call",
        "us" if unit == "us" else "cycles (modelled)",
        tuple(series),
        log=max(values) > 3 * min([*values, *(time.value for time in floor)]),
        marks=marks_of(known),
        note=" ".join(notes),
        order=order,
    )


def bars_of(
    key: tuple[int, int, str],
    times: Sequence[Time],
    name: str,
    title: str,
    unit: str,
    roof: Roof | None,
    order: tuple[str, ...],
    label: Callable[[Time | Decode], str],
) -> Bars:
    """Times of calls that all have as many tokens, a bar for each."""
    rows = []
    for shape in dict.fromkeys(time.shape for time in times):
        mine = [time for time in times if time.shape == shape]
        rows += [(shape.text, label(time), ((unit, time.value),), digits(round(time.value, 1))) for time in mine]
        least = least_us(roof, mine[0])
        if least is not None:
            rows.append((shape.text, "roofline", ((unit, least),), digits(round(least, 1))))
    slow, fast = max(times, key=lambda time: time.value), min(times, key=lambda time: time.value)
    alt = f"{title} at {heads_text(key)}, {times[0].shape.tokens} tokens, {len(rows)} bars: from {digits(fast.value)} "
    alt += f"{unit} ({fast.label}) to {digits(slow.value)} {unit} ({slow.label})."
    x = "us" if unit == "us" else "cycles (modelled)"
    full = f"{title}: {heads_text(key)}, {times[0].shape.tokens} tokens"
    return Bars(name, full, alt, unique([time.origin for time in times]), x, tuple(rows), by_label=True,
                order=(*order, "roofline"))  # fmt: skip


def layouts(times: Iterable[Time]) -> dict[str, set[int]]:
    """Tokens by layout."""
    found: dict[str, set[int]] = defaultdict(set)
    for time in times:
        found[time.shape.layout].add(time.shape.tokens)
    return found


def marks_of(times: Sequence[Time]) -> tuple[tuple[float, str], ...]:
    """Layouts that stand at one number of tokens, where others are lines."""
    found = layouts(times)
    if len(found) < 2:
        return ()
    alone = [(float(next(iter(tokens))), name) for name, tokens in found.items() if len(tokens) == 1]
    return tuple(sorted(alone))


def series_of(label: str, times: Sequence[Time]) -> list[Series]:
    """A line per layout that has several numbers of tokens, points of the rest."""
    found: list[Series] = []
    rest: list[Time] = []
    for layout in dict.fromkeys(time.shape.layout for time in times):
        group = sorted((t for t in times if t.shape.layout == layout), key=lambda t: (t.shape.tokens, t.value))
        if len({time.shape.tokens for time in group}) > 1:
            found.append(_series(label, group, line=True))
        else:
            rest += group
    if rest:
        found.append(_series(label, sorted(rest, key=lambda t: (t.shape.tokens, t.value)), line=False))
    return found


def _series(label: str, times: Sequence[Time], *, line: bool) -> Series:
    hollow = frozenset(index for index, time in enumerate(times) if time.how == HOW_HOLLOW)
    return Series(label, tuple((float(t.shape.tokens), t.value) for t in times), line, hollow)


# ------------------------------------------------------------------------------------------------ snapshots


def snapshot_section(times: Sequence[Time]) -> Section:
    """Time with fp32 snapshots over that with bf16 ones, of the same run, shape, backend and variant."""
    section = Section("snapshots", "What fp32 snapshots cost")
    pairs = snapshot_pairs(times)
    if not pairs:
        section.text.append("No input has the same call with both dtypes of snapshots.")
        return section
    section.origins = list(unique([first.origin for _, first, _ in pairs]))
    section.text.append("Overhead: time with fp32 snapshots over that with bf16, less one.")
    for unit in ("us", "cycles"):
        mine = [(part, bf16, fp32) for part, bf16, fp32 in pairs if bf16.unit == unit]
        if not mine:
            continue
        tag = "" if unit == "us" else "modelled"
        names = ("H", "Hg", "shape", "tokens", "backend", "variant", "part", "taken", f"bf16 {unit}", f"fp32 {unit}")
        texts = ("shape", "backend", "variant", "part", "taken")
        columns = [Column(word, "text" if word in texts else "number") for word in names]
        columns += [Column("overhead", "percent"), Column("file", "text")]
        rows = []
        label = labels_of([bf16 for _, bf16, _ in mine])
        lines: dict[tuple[int, int, str], dict[str, list[Time]]] = defaultdict(lambda: defaultdict(list))
        for part, bf16, fp32 in mine:
            shape, over = bf16.shape, fp32.value / bf16.value - 1
            rows.append((shape.num_heads, shape.num_key_heads, shape.text, shape.tokens or None, bf16.backend,
                         bf16.variant, part, bf16.how, bf16.value, fp32.value, over, bf16.origin.file))  # fmt: skip
            if shape.lengths:
                place = (-shape.num_heads, -shape.num_key_heads, part)
                lines[place][label(bf16)].append(replace(bf16, value=100 * over, how=""))
        order = tuple(dict.fromkeys(label(bf16) for _, bf16, _ in mine))
        title = f"fp32 snapshots over bf16{', modelled' if tag else ''}"
        section.tables.append(Table(slug("snapshots", tag), title, tuple(columns), tuple(rows)))
        for (heads, key_heads, part), labels in sorted(lines.items()):
            what = f"{part}, H={-heads}, Hg={-key_heads}"
            known = [time for group in labels.values() for time in group]
            if len({time.shape.tokens for time in known}) < 2:
                continue  # the table says it all
            series = tuple(each for name, group in labels.items() for each in series_of(name, group))
            alt = f"Overhead of fp32 snapshots, {what}: {min(t.value for t in known):.1f} to "
            alt += f"{max(t.value for t in known):.1f} % over {len(layouts(known))} layouts."
            section.figures.append(
                Lines(slug("snapshots", tag, -heads, -key_heads, part), f"{title}: {what}", alt,
                      unique([time.origin for time in known]), "tokens of the call", "overhead, %", series, log=False,
                      marks=marks_of(known), order=order)
            )  # fmt: skip
    return section


def snapshot_pairs(times: Sequence[Time]) -> list[tuple[str, Time, Time]]:
    """(part, with bf16, with fp32): the call as a whole and, of a block, K5, K6 and a scan that is both."""
    found: dict[tuple[object, ...], dict[str, Time]] = {}
    for time in times:
        parts = {f"{time.what} alone" if time.how == "alone" else str(time.what): time.value}
        if time.what == "block":
            parts |= {name: time.stages[name] for name in (K5, K6, WHOLE) if name in time.stages}
        for part, value in parts.items():
            key = (part, time.origin, call_of(time.shape), time.backend, time.variant, time.how, time.unit)
            found.setdefault(key, {})[time.shape.snapshot] = replace(time, value=value)
    return [(str(key[0]), each["bf16"], each["fp32"]) for key, each in found.items() if {"bf16", "fp32"} <= each.keys()]


def call_of(shape: Shape) -> Shape:
    """A shape without the dtype, which ids of cases have at their end."""
    return replace(shape, name=shape.name.removesuffix(f"-{shape.snapshot}"), snapshot="")


# ------------------------------------------------------------------------------------------------ stages


def stages_section(times: Sequence[Time]) -> Section:
    """Time per stage of the block, stacked."""
    section = Section("stages", "Stages of the block")
    staged = [time for time in times if time.stages]
    if not staged:
        section.text.append("No times of stages: none of the inputs has some.")
        return section
    section.origins = list(unique([time.origin for time in staged]))
    section.text.append("Device time of each stage, one after the other; launches and the gaps between them are not in "
                        "the sum.")  # fmt: skip
    for unit, rows in split(staged):
        tag = "" if unit == "us" else "modelled"
        names = sorted({name for time in rows for name in time.stages}, key=rank)
        texts = [Column(word, "text") for word in ("shape", "snapshots", "backend", "variant", "taken")]
        columns = [Column("H"), Column("Hg"), *texts, *map(Column, names), Column(f"sum, {unit}"),
                   Column("host gap, us"), Column("file", "text")]  # fmt: skip
        cells: list[tuple[Value, ...]] = []
        for key, group in grouped(rows):
            group = sorted(group, key=lambda time: (time.shape.tokens, time.shape.text))
            for time in group:
                shape = time.shape
                lead: list[Value] = [*key[:2], shape.text, shape.snapshot, time.backend, time.variant, time.how]
                parts = [time.stages.get(name) for name in names]
                cells.append((*lead, *parts, sum(time.stages.values()), time.gap, time.origin.file))
            section.figures.append(stacks_of(key, group, slug("stages", tag, *key), unit, tuple(names)))
        title = f"Stages{', modelled' if tag else ''}, {unit}"
        section.tables.append(Table(slug("stages", tag), title, tuple(columns), tuple(cells)))
    return section


def rank(name: str) -> tuple[int, str]:
    """Place of a stage: as the block runs them."""
    order = [*STAGES[: STAGES.index(K5)], "segment combine", *STAGES[STAGES.index(K5) :]]
    return (order.index(name) if name in order else len(order)), name


def stacks_of(key: tuple[int, int, str], times: Sequence[Time], name: str, unit: str, order: tuple[str, ...]) -> Bars:
    """A bar per shape and backend."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    label = labels_of(times)
    for time in times:
        counts[time.shape.text, label(time)] += 1
    rows = []
    for time in times:
        same = counts[time.shape.text, label(time)] > 1
        parts = tuple((stage, time.stages[stage]) for stage in sorted(time.stages, key=rank))
        total = sum(time.stages.values())
        rows.append(
            (time.shape.text, f"{label(time)} ({time.how})" if same else label(time), parts, digits(round(total, 1)))
        )
    largest = max(times, key=lambda time: max(time.stages.values()))
    stage = max(largest.stages, key=lambda each: largest.stages[each])
    alt = f"Stages of the block at {heads_text(key)}, {len(rows)} bars; the longest stage is {stage} of {largest.label}"
    alt += f", {largest.shape.text}, {digits(largest.stages[stage])} {unit}."
    x = "us" if unit == "us" else "cycles (modelled)"
    title = f"Stages of the block: {heads_text(key)}"
    return Bars(name, title, alt, unique([time.origin for time in times]), x, tuple(rows), order=order)
