"""The section about the tuner's picks and their margins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .content import Column, Dots, Section, Table, Value, slug, unique
from .data import Pick

MOST = 32
"""Calls of a plot; the table has all."""
PICKED, RULED, OTHER = "pick", "the rule's choice", "other candidates"


def picks_section(picks: Sequence[Pick]) -> Section:
    """A row per call, and how far the other candidates are."""
    section = Section("picks", "Tuned picks")
    if not picks:
        section.text.append("No picks: no store of gdn-tune is among the inputs.")
        return section
    section.origins = list(unique([pick.origin for pick in picks]))
    ties, ruled = sum(pick.tied for pick in picks), sum(pick.choice == pick.ruled for pick in picks)
    section.text += [
        "Margin: time of the fastest other candidate over that of the pick, less one. Gain: that of the rule's choice.",
        "Tied: cannot be told apart from another candidate; of those the rule's choice is taken.",
        f"{ties} of {len(picks)} picks are tied; {ruled} are what the rule gives.",
    ]
    for modelled in (False, True):
        mine = [pick for pick in picks if pick.origin.modelled == modelled]
        if not mine:
            continue
        tag = "modelled" if modelled else ""
        texts = ("op", "case", "arch", "pick", "second", "rule", "tied", "file")
        names = ("op", "case", "arch", "CUs", "pick", "cycles (modelled)" if modelled else "us", "n", "candidates",
                 "second", "margin", "tied", "rule", "gain over rule", "file")  # fmt: skip
        kinds = {"margin": "percent", "gain over rule": "percent"} | dict.fromkeys(texts, "text")
        columns = tuple(Column(each, kinds.get(each, "number")) for each in names)  # type: ignore[arg-type]
        rows: list[tuple[Value, ...]] = []
        for pick in mine:
            second = next((choice for choice, _ in pick.others if choice != pick.choice), None)
            rows.append((pick.op, pick.case, pick.arch, pick.compute_units, pick.choice, pick.value, pick.n,
                         len(pick.others), second, pick.margin, pick.tied, pick.ruled or None, pick.gain,
                         pick.origin.file))  # fmt: skip
        title = f"Tuned picks{', modelled' if modelled else ''}"
        section.tables.append(Table(slug("picks", tag), title, columns, tuple(rows)))
        every = ("op", "case", "arch", "CUs", "candidate", "cycles (modelled)" if modelled else "us", "x pick", "file")
        columns = tuple(Column(each, "number" if each in ("CUs", every[5]) else "ratio" if each == "x pick" else "text")
                        for each in every)  # fmt: skip
        rows = [(pick.op, pick.case, pick.arch, pick.compute_units, choice, value, value / pick.value, pick.origin.file)
                for pick in mine for choice, value in pick.others]  # fmt: skip
        section.tables.append(Table(slug("picks", tag, "candidates"), f"{title}: every candidate", columns, tuple(rows),
                                    data_only=True))  # fmt: skip
        groups: dict[tuple[str, str, int], list[Pick]] = defaultdict(list)
        for pick in mine:
            if len(pick.others) > 1:
                groups[pick.op, pick.arch, pick.compute_units].append(pick)
        section.figures += [dots_of(key, group, tag) for key, group in groups.items()]
    return section


def dots_of(key: tuple[str, str, int], picks: Sequence[Pick], tag: str) -> Dots:
    """A line per call: every candidate over the pick."""
    op, arch, units = key
    shown = sorted(sorted(picks, key=lambda pick: -(pick.margin or 0))[:MOST], key=picks.index)
    rows = []
    for pick in shown:
        points = [(RULED if choice == pick.ruled else OTHER, value / pick.value)
                  for choice, value in pick.others if choice != pick.choice]  # fmt: skip
        words = f"{pick.choice}{' = rule' if pick.choice == pick.ruled else ''}{' (tied)' if pick.tied else ''}"
        rows.append((pick.case, ((PICKED, 1.0), *points), words))
    margins = [pick.margin or 0.0 for pick in shown]
    alt = f"Candidates of {op} on {arch} with {units} compute units over the pick of each of {len(shown)} calls; "
    alt += f"the next one is {100 * min(margins):.1f} to {100 * max(margins):.1f} % slower."
    note = "" if len(shown) == len(picks) else f"{len(shown)} calls of {len(picks)}: those with the largest margins."
    x = "modelled cycles over those of the pick" if tag else "time over that of the pick"
    return Dots(slug("picks", tag, op, arch, units), f"Picks of {op}: {arch}, {units} compute units", alt,
                unique([pick.origin for pick in picks]), x, tuple(rows), 1.0, note=note,
                order=(PICKED, RULED, OTHER))  # fmt: skip
