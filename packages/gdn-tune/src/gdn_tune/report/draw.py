"""Figures by matplotlib: the same content gives the same bytes. Importing this module imports matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .content import Bars, Dots, Figure, Lines, sources

WIDTH = 6.2
"""Inches. Two figures stand side by side on a wide page, one keeps letters of 9 pixels on a narrow one."""
DPI = 160
FONT = 9.5
SMALL = 8.2
CHAR = 0.0089 * SMALL
"""Width of a letter of that size, inches, on average."""
NOTE = 6.5
ROW = 0.21
"""Height of a row of bars or dots, inches."""
MARKERS = "osD^vPX*"
HATCHES = ("", "---", "|||")
"""Of bars whose colour another part has already. Lines: dots make an SVG twenty times as large."""
SALT = "gdn-tune report"
"""Of the ids in SVG files, which are random otherwise."""


@dataclass(frozen=True)
class Theme:
    """Colours: ``ink`` of words and axes, ``quiet`` of what is beside the point, ``cycle`` of series: those of Okabe
    and Ito, which the colour-blind tell apart, a little lighter on dark paper."""

    paper: str
    ink: str
    quiet: str
    grid: str
    cycle: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1b1f24", "#5b6470", "#e3e6ea",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00", "#4b4b4b"),
)  # fmt: skip
DARK = Theme(
    "#14171c", "#e6e9ee", "#9aa4b2", "#2b313a",
    ("#4fa8dd", "#f08a45", "#35c49a", "#e3a0c6", "#f0b93d", "#9bd6f7", "#d6c25a", "#c4c4c4"),
)  # fmt: skip


def png(figure: Figure) -> bytes:
    """``figure`` on white paper, with a note of where it is from: it may stand alone."""
    return _save(figure, LIGHT, "png", footnote=True)


def svg(figure: Figure, theme: Theme) -> bytes:
    """``figure`` for a page that has a caption of its own."""
    return _save(figure, theme, "svg", footnote=False)


def _save(figure: Figure, theme: Theme, kind: str, *, footnote: bool) -> bytes:
    out = io.BytesIO()
    with settings(theme):
        canvas = draw(figure, theme, footnote=footnote)
        # Else files hold the version of matplotlib and the date.
        metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        canvas.savefig(out, format=kind, dpi=DPI, metadata=metadata)
    return out.getvalue()


@contextmanager
def settings(theme: Theme) -> Iterator[None]:
    """matplotlib's defaults, whatever the user's own settings are, with colours of ``theme``."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.size": FONT,
                "font.family": ["DejaVu Sans"],  # matplotlib brings it
                "axes.facecolor": theme.paper,
                "figure.facecolor": theme.paper,
                "savefig.facecolor": theme.paper,
                "text.color": theme.ink,
                "axes.labelcolor": theme.ink,
                "axes.edgecolor": theme.quiet,
                "xtick.color": theme.quiet,
                "ytick.color": theme.quiet,
                "xtick.labelcolor": theme.ink,
                "ytick.labelcolor": theme.ink,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "grid.color": theme.grid,
                "svg.hashsalt": SALT,
                "svg.fonttype": "path",
            }
        )
        yield


def draw(figure: Figure, theme: Theme, *, footnote: bool = True) -> Canvas:
    """The matplotlib figure. Raises TypeError for a kind that is not known."""
    if isinstance(figure, Lines):
        return _lines(figure, theme, footnote)
    if isinstance(figure, Bars):
        return _bars(figure, theme, footnote)
    if isinstance(figure, Dots):
        return _dots(figure, theme, footnote)
    raise TypeError(f"figure: got {type(figure).__name__}, expected Lines, Bars or Dots")


class Sheet:
    """A figure whose margins are set in inches: what stands in them is known, and a layout engine would have to guess
    what direct labels need."""

    def __init__(self, figure: Figure, theme: Theme, height: float, *, left: float, right: float, legend: int,
                 footnote: bool) -> None:  # fmt: skip
        title = textwrap.wrap(figure.title, 48 if figure.modelled else 64)
        notes = [figure.note, *sources(figure)] if footnote else []
        self.notes = [line for note in notes for line in textwrap.wrap(note, 120)]
        top, bottom = 0.14 + 0.19 * len(title) + 0.19 * legend + 0.08, 0.5 + 0.14 * len(self.notes)
        self.size = (WIDTH, top + height + bottom)
        self.canvas = Canvas(figsize=self.size)
        box = (left / WIDTH, bottom / self.size[1], (WIDTH - left - right) / WIDTH, height / self.size[1])
        self.axes: Axes = self.canvas.add_axes(box)
        self.theme = theme
        self.place = 0.14 + 0.19 * len(title)
        self.canvas.text(0.1 / WIDTH, 1 - 0.1 / self.size[1], "\n".join(title), va="top", weight="bold")
        if figure.modelled:
            self.canvas.text(1 - 0.1 / WIDTH, 1 - 0.1 / self.size[1], "MODELLED, NOT TIMED", va="top", ha="right",
                             size=SMALL, color=theme.cycle[1], weight="bold")  # fmt: skip
        if self.notes:
            self.canvas.text(0.1 / WIDTH, 0.06 / self.size[1], "\n".join(self.notes), size=NOTE, va="bottom",
                             color=theme.quiet, linespacing=1.25)  # fmt: skip

    def legend(self, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
        """A legend between title and axes."""
        at = (0.02 / WIDTH, 1 - self.place / self.size[1])
        self.canvas.legend(handles, labels, loc="upper left", bbox_to_anchor=at, ncols=columns, frameon=False,
                           fontsize=SMALL, columnspacing=1.2, handletextpad=0.4, borderpad=0.2,
                           handlelength=2.0)  # fmt: skip


def looks(figure: Figure, labels: Sequence[str], theme: Theme) -> dict[str, tuple[str, str, str]]:
    """(colour, marker, hatch) of each of ``labels``, in order: by the place among all that the section colours."""
    order = list(dict.fromkeys((*figure.order, *labels)))
    found = {}
    for at, label in enumerate(order):
        turn, colour = divmod(at, len(theme.cycle))
        if label in labels:
            found[label] = (theme.cycle[colour], MARKERS[(at + turn) % len(MARKERS)], HATCHES[turn % len(HATCHES)])
    return found


def columns_for(labels: Sequence[str]) -> int:
    """Columns of a legend that fit."""
    widest = max((len(label) for label in labels), default=1)
    return max(1, min(len(labels), int((WIDTH - 0.2) / (0.42 + 1.02 * CHAR * widest))))


# ------------------------------------------------------------------------------------------------ lines


def _lines(figure: Lines, theme: Theme, footnote: bool) -> Canvas:
    look = looks(figure, list(dict.fromkeys(each.label for each in figure.series if not each.roof)), theme)
    names = [*look, *dict.fromkeys(each.label for each in figure.series if each.roof)]
    ends = _ends(figure)
    direct = len(ends) == len(names) <= 9
    columns = columns_for(names)
    legend = 0 if direct else math.ceil(len(names) / columns)
    right = min(2.3, 0.35 + CHAR * max(map(len, names))) if direct else 0.25
    above = sorted({row for *_, row in _places(figure, WIDTH - 0.72 - right)})
    sheet = Sheet(figure, theme, 2.9, left=0.72, right=right, legend=legend + len(above), footnote=footnote)
    axes = sheet.axes
    handles: dict[str, Any] = {}
    for each in figure.series:
        xs, ys = zip(*each.points, strict=True)
        if each.roof:
            style = {"color": theme.quiet, "linestyle": (0, (5, 3)) if each.line else "", "linewidth": 1.2}
            (handle,) = axes.plot(xs, ys, marker="" if each.line else "_", markersize=11, zorder=1, **style)  # type: ignore[arg-type]
        else:
            colour, marker, _ = look[each.label]
            style = {"color": colour, "linestyle": "-" if each.line else "", "linewidth": 1.6, "marker": marker}
            (handle,) = axes.plot(xs, ys, markersize=5, zorder=3, **style)  # type: ignore[arg-type]
            for index in each.hollow:
                axes.plot([xs[index]], [ys[index]], marker=marker, markersize=5, zorder=4, color=colour,
                          markerfacecolor=theme.paper)  # fmt: skip
        if each.line or each.label not in handles:
            handles[each.label] = handle
    _scales(axes, figure)
    axes.set_xlabel(figure.x)
    axes.set_ylabel(figure.y)
    axes.grid(True, linewidth=0.7)
    for x, words, row in _places(figure, WIDTH - 0.72 - right):
        axes.annotate(words, (x, 1.0), (0, 2 + 11 * row), xycoords=axes.get_xaxis_transform(), size=SMALL,
                      textcoords="offset points", ha="center", va="bottom", color=theme.quiet)  # fmt: skip
        axes.axvline(x, color=theme.grid, linewidth=1.2, zorder=0)
    if direct:
        _label(axes, {name: ends[name] for name in names}, handles, theme)
    else:
        sheet.legend([handles[name] for name in names], names, columns)
    return sheet.canvas


def _ends(figure: Lines) -> dict[str, float]:
    """Values of the labels at the right end, if they have one there."""
    last = max(x for each in figure.series for x, _ in each.points)
    return {each.label: y for each in figure.series for x, y in each.points if x == last}


def _label(axes: Axes, ends: dict[str, float], handles: dict[str, Any], theme: Theme) -> None:
    """Labels at the ends of lines, apart from each other."""
    fraction = axes.transAxes.inverted()
    places = {name: float(fraction.transform(axes.transData.transform((1.0, y)))[1]) for name, y in ends.items()}
    gap = 0.052
    order = sorted(places, key=lambda name: places[name])
    at = [places[name] for name in order]
    for index in range(1, len(at)):
        at[index] = max(at[index], at[index - 1] + gap)
    at[-1] = min(at[-1], 1.0)
    for index in reversed(range(len(at) - 1)):
        at[index] = min(at[index], at[index + 1] - gap)
    for name, y in zip(order, at, strict=True):
        handle = handles[name]
        marker = handle.get_marker() if handle.get_marker() not in ("", "None", "_") else "_"
        axes.plot([1.02], [y], transform=axes.transAxes, clip_on=False, marker=marker, markersize=5,
                  color=handle.get_color(), linestyle="")  # fmt: skip
        axes.annotate(name, (1.02, y), (7, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                      size=SMALL, color=theme.ink)  # fmt: skip


def _places(figure: Lines, inches: float) -> list[tuple[float, str, int]]:
    """(x, words, row) of the marks above the axes, as many as do not run into each other in two rows."""
    xs = [x for each in figure.series for x, _ in each.points]
    low, wide = math.log2(min(xs)), math.log2(max(xs)) - math.log2(min(xs)) or 1.0
    taken: list[list[tuple[float, float]]] = [[], []]
    found = []
    for x, words in figure.marks:
        middle, half = (math.log2(x) - low) / wide * inches, 0.55 * CHAR * len(words) + 0.05
        for row, spans in enumerate(taken):
            if all(middle + half < left or middle - half > right for left, right in spans):
                spans.append((middle - half, middle + half))
                found.append((x, words, row))
                break
    return found


def _scales(axes: Axes, figure: Lines) -> None:
    """Tokens in powers of two, at ticks that people know; values by the decade, with some between."""
    xs = sorted({x for each in figure.series for x, _ in each.points})
    axes.set_xscale("log", base=2)
    ticks: list[float] = []
    least = math.log2(xs[-1] / xs[0]) / 9 if xs[-1] > xs[0] else 0
    for x in sorted(xs, key=lambda x: (x % 1024 != 0, -x)):  # those that are whole come first
        if all(abs(math.log2(x / other)) > max(least, 0.2) for other in ticks):
            ticks.append(x)
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tokens(x)))
    pad = 2 ** max(0.25, 0.04 * math.log2(xs[-1] / xs[0]))
    axes.set_xlim(xs[0] / pad, xs[-1] * pad)
    values = [y for each in figure.series for _, y in each.points]
    if figure.log:
        axes.set_yscale("log")
        low, high = min(values) / 1.35, max(values) * 1.35
        axes.set_ylim(low, high)
        subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _short(y)))
    else:
        low, high = min(values), max(values)
        room = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(min(0.0, low - room), max(0.0, high + room))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _short(y)))


def _short(value: float) -> str:
    """A number at an axis, no longer than its room."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def _tokens(x: float) -> str:
    return f"{x / 1024:g}K" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


# ------------------------------------------------------------------------------------------------ bars


def _bars(figure: Bars, theme: Theme, footnote: bool) -> Canvas:
    keys = [label if figure.by_label else part for _, label, parts, _ in figure.rows for part, _ in parts]
    look = looks(figure, keys, theme)
    columns = columns_for(list(look))
    places, heads = [], []
    at, last = 0.0, None
    for group, *_ in figure.rows:
        if group != last:
            at += 0.5 if last is not None else 0.0
            heads.append((at, group))
            at, last = at + 0.85, group
        places.append(at)
        at += 1.0
    names = [] if figure.by_label else [label for _, label, _, _ in figure.rows]
    left = 0.2 + (0.0 if figure.by_label else 1.02 * CHAR * max(map(len, names)))
    legend = math.ceil(len(look) / columns)
    sheet = Sheet(figure, theme, ROW * (at + 0.2), left=left, right=0.3, legend=legend, footnote=footnote)
    axes = sheet.axes
    most = max([sum(value for _, value in parts) for _, _, parts, _ in figure.rows])
    limit = 0.0 if figure.line is None else figure.line[0]
    longest = max(len(words) for *_, words in figure.rows)
    inches = WIDTH - left - 0.3
    # Words stand behind the longest bar.
    edge = max(most * inches / max(1.0, inches - 1.02 * CHAR * longest - 0.1), 1.04 * limit)
    handles: dict[str, Any] = {}
    for place, (_, label, parts, words) in zip(places, figure.rows, strict=True):
        start = 0.0
        for part, value in parts:
            key = label if figure.by_label else part
            colour, _, hatch = look[key]
            handles[key] = axes.barh(place, value, left=start, height=0.74, color=colour, linewidth=0.6,
                                     edgecolor=theme.paper, hatch=hatch + "//" * figure.modelled)  # fmt: skip
            start += value
        behind = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.6}
        axes.annotate(words, (start, place), (3, 0), textcoords="offset points", va="center", size=SMALL, bbox=behind)
    for place, group in heads:
        axes.annotate(group, (0, place), (2, 0), textcoords="offset points", va="center", size=SMALL, weight="bold")
    axes.set_ylim(at - 0.3, -0.5)
    axes.set_xlim(0, edge)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(x)))
    axes.set_yticks([] if figure.by_label else places, [] if figure.by_label else names, size=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(figure.x)
    axes.grid(True, axis="x", linewidth=0.7)
    if figure.line is not None:
        axes.axvline(limit, color=theme.quiet, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        axes.annotate(figure.line[1], (limit, 1.0), (-3, -1), xycoords=axes.get_xaxis_transform(), size=SMALL,
                      textcoords="offset points", ha="right", va="top", color=theme.quiet)  # fmt: skip
    sheet.legend([handles[key] for key in look], list(look), columns)
    return sheet.canvas


# ------------------------------------------------------------------------------------------------ dots


def _dots(figure: Dots, theme: Theme, footnote: bool) -> Canvas:
    scale = 100.0 if figure.percent else 1.0
    labels = list(dict.fromkeys(series for _, points, _ in figure.rows for series, _ in points))
    look = looks(figure, labels, theme)
    columns = columns_for(labels)
    left = 0.15 + CHAR * max(len(label) for label, *_ in figure.rows)
    right = 0.2 + CHAR * max(len(words) for *_, words in figure.rows)
    legend = math.ceil(len(labels) / columns)
    height = ROW * (len(figure.rows) + 0.6)
    sheet = Sheet(figure, theme, height, left=min(left, 3.0), right=min(right, 2.2), legend=legend, footnote=footnote)
    axes = sheet.axes
    values = [value * scale for _, points, _ in figure.rows for _, value in points]
    limit = figure.line * scale
    for index, (label, (colour, marker, _)) in enumerate(look.items()):
        xs, ys = [], []
        for row, (_, points, _) in enumerate(figure.rows):
            xs += [value * scale for series, value in points if series == label]
            ys += [row for series, _ in points if series == label]
        axes.plot(xs, ys, linestyle="", marker=marker, markersize=5.5, color=colour, label=label,
                  markeredgecolor=theme.paper, markeredgewidth=0.5, zorder=4 - 0.1 * index, clip_on=False)  # fmt: skip
    for row, (_, _, note) in enumerate(figure.rows):
        axes.annotate(note, (1.0, row), (6, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                      va="center", size=SMALL, color=theme.quiet)  # fmt: skip
    axes.set_yticks(range(len(figure.rows)), [label for label, *_ in figure.rows], size=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(figure.rows) - 0.4, -0.6)
    axes.grid(True, linewidth=0.7)
    axes.set_xlabel(figure.x)
    low, high = min([*values, limit]), max([*values, limit])
    if figure.percent:
        axes.set_xlim(0, 1.06 * high)
    elif high > 3:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlim(0.94 * low, 1.1 * high)
    else:
        room = 0.05 * (high - low) or 0.05
        axes.set_xlim(low - room, high + room)
    axes.axvline(limit, color=theme.quiet, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
    handles, names = axes.get_legend_handles_labels()
    sheet.legend(handles, names, columns)
    return sheet.canvas
