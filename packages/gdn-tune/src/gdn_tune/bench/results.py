"""What a bench says: a measurement per case, backend and variant, tables of stages, a summary across cases, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..console import print_table, say
from .profile import STAGES, KernelTime, stage_of

KERNELS = "kernel total"
LAUNCH = "launch only"
GRAPH = "in a graph"
WALL = "wall total"
GAP = "host gap"
TOTALS = (KERNELS, GRAPH, LAUNCH, WALL, GAP)
METRICS = (*STAGES, *TOTALS)
DEFAULT_METRICS = (WALL, "K5 state scan", GAP)
MISSING = "-"


@dataclass(frozen=True)
class Measurement:
    """One backend and variant on one case. ``failure``: why there are no figures; ``unsupported``: the backend has no
    such call, which is nothing that went wrong.

    ``lengths``: tokens of each sequence, or of each row of a dense batch. ``metrics``: by the names of ``METRICS``,
    and others that a bench has, in ``unit`` ("us", or "cycles" of the emulator's model: counted, not timed).
    ``facts``: of the call. ``counters``: of the emulator.
    """

    case: str
    snapshot: str
    backend: str
    variant: str = ""
    unit: str = "us"
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    kernels: tuple[KernelTime, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    failure: str = ""
    unsupported: bool = False

    @property
    def label(self) -> str:
        """Head of its column."""
        name = f"{self.backend} {self.variant}".rstrip()
        return name if self.unit == "us" else f"{name} ({self.unit})"


def totals(stages: Mapping[str, float], *, wall: float, launch: float) -> dict[str, float]:
    """The metrics of a call: its stages, their sum, the wall time, the time to launch it, and the gap between wall and
    kernels. A launch-only near the wall is a call that waits for the host; one that jumps to the wall is a stall."""
    kernels = sum(stages.values())
    return {**stages, KERNELS: kernels, LAUNCH: launch, WALL: wall, GAP: wall - kernels}


def number(value: float | None) -> str:
    """A figure in a table."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if abs(value) >= 100_000 else f"{value:.1f}"


def ratio_text(value: float | None) -> str:
    """A ratio in a table."""
    return MISSING if value is None else f"{value:.2f}x"


def ratio(measurements: Iterable[Measurement], of: Measurement, metric: str, baseline: str) -> float | None:
    """``metric`` of ``baseline`` over that of ``of``, both of the same case, snapshots and variant: above 1 is faster
    than the baseline. None where either is missing or is counted in another unit."""
    own = of.metrics.get(metric)
    for other in measurements:
        same = (other.case, other.snapshot, other.variant, other.unit) == (of.case, of.snapshot, of.variant, of.unit)
        if same and other.backend == baseline:
            base = other.metrics.get(metric)
            return base / own if own and base is not None else None
    return None


def columns_of(measurements: Iterable[Measurement]) -> list[tuple[str, str, str]]:
    """(backend, variant, label) in the order in which they come."""
    return list(dict.fromkeys((each.backend, each.variant, each.label) for each in measurements))


def rows_of(measurements: Iterable[Measurement]) -> list[tuple[str, str]]:
    """(case, snapshot dtype) in the order in which they come."""
    return list(dict.fromkeys((each.case, each.snapshot) for each in measurements))


def summary(measurements: Sequence[Measurement], metric: str, baseline: str) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of the summary of one metric: a row per case and snapshot dtype, a column per backend and variant,
    then the ratios of ``baseline`` over every other backend, variant by variant; "-" where there is nothing."""
    columns = columns_of(measurements)
    others = [column for column in columns if column[0] != baseline]
    compared = others if any(column[0] == baseline for column in columns) else []
    found = {(each.case, each.snapshot, each.label): each for each in measurements}
    rows = []
    for case, snapshot in rows_of(measurements):
        cells = [found.get((case, snapshot, label)) for _, _, label in columns]
        figures = [number(None if each is None else each.metrics.get(metric)) for each in cells]
        pairs = [found.get((case, snapshot, label)) for _, _, label in compared]
        ratios = [ratio_text(None if each is None else ratio(measurements, each, metric, baseline)) for each in pairs]
        rows.append([case, snapshot, *figures, *ratios])
    heads = ["case", "snapshots", *(label for _, _, label in columns)]
    return heads + [f"{baseline}/{label}" for _, _, label in compared], rows


def stage_table(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of one case: its stages, those that nobody has left out, a rule, the totals."""
    measured = [each for each in measurements if not each.failure]

    def row(name: str) -> list[str]:
        return [name, *(number(each.metrics.get(name)) for each in measured)]

    def there(names: Sequence[str]) -> list[str]:
        return [name for name in names if any(each.metrics.get(name) for each in measured)]

    stages, sums = there(STAGES), there(TOTALS)
    heads = ["stage", *(each.label for each in measured)]
    rule = [["---"] * len(heads)] if stages and sums else []
    return heads, [*map(row, stages), *rule, *map(row, sums)]


def print_case(title: str, measurements: Sequence[Measurement], *, show_kernels: bool) -> None:
    """The stage table of one case, what failed, and the kernels if they are wanted."""
    heads, rows = stage_table(measurements)
    if rows:
        print_table(title, heads, rows)
    else:
        say(title)
    for each in measurements:
        if each.failure:
            say(f"{each.label}: {each.failure}")
        if show_kernels and each.kernels:
            lines = [[k.name[:100], stage_of(k.name), number(k.us), f"{k.launches:g}"] for k in each.kernels]
            print_table(f"kernels of {each.label}", ["kernel", "stage", "us", "launches"], lines)
        if show_kernels and each.counters:
            lines = [[name, number(value)] for name, value in each.counters.items()]
            print_table(f"counters of {each.label}, per workgroup", ["counter", "value"], lines)


def print_summary(measurements: Sequence[Measurement], metrics: Sequence[str], baseline: str) -> None:
    """A table per metric."""
    for metric in metrics:
        heads, rows = summary(measurements, metric, baseline)
        print_table(f"{metric} ({baseline}/x above 1: faster than {baseline})", heads, rows)


def any_failed(measurements: Iterable[Measurement]) -> bool:
    """Whether anything went wrong."""
    return any(each.failure and not each.unsupported for each in measurements)


def to_csv(measurements: Sequence[Measurement]) -> str:
    """A line per measurement: the facts of the call, who ran it, every metric that any of them has, what failed."""
    facts = list(dict.fromkeys(name for each in measurements for name in each.facts))
    used = {name for each in measurements for name in each.metrics}
    metrics = [name for name in METRICS if name in used]
    metrics += [name for name in dict.fromkeys(n for each in measurements for n in each.metrics) if name not in METRICS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", *facts, "snapshot", "backend", "variant", "unit", *metrics, "failure"])
    for each in measurements:
        own = [each.facts.get(name, "") for name in facts]
        figures = [f"{each.metrics[name]:.3f}" if name in each.metrics else "" for name in metrics]
        writer.writerow([each.case, *own, each.snapshot, each.backend, each.variant, each.unit, *figures, each.failure])
    return text.getvalue()


def to_json(measurements: Iterable[Measurement], **facts: Any) -> dict[str, Any]:
    """``facts`` of the run and its measurements, for JSON."""
    return {**facts, "measurements": [asdict(each) for each in measurements]}
