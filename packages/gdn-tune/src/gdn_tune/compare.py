"""How two tables differ: calls that only one lists, choices that changed, times, and how each was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdn_runtime.tables import replaces, table_files

from .export import Row, rows_of
from .formats import of_kernel
from .tablefile import read

Calls = dict[tuple[Any, ...], Row]


@dataclass(frozen=True)
class Difference:
    """A call that two tables treat differently. ``kind``: "added", "removed", "changed", or "evidence" for the same
    choice that was measured in one table and modelled in the other. ``ratio``: time of the new over that of the old
    row, None where one has none."""

    kind: str
    kernel: str
    call: dict[str, Any]
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """``differences`` of two tables, the number of ``equal`` rows, and of each of the times that both have, new over
    old."""

    differences: list[Difference]
    equal: int
    ratios: list[float]


def load(path: Path) -> dict[str, Calls]:
    """Rows of the tables in ``path`` by kernel and key; of two for the same call the one that the runtime takes.

    Raises ValueError for what is no table or no row: ``check`` says more.
    """
    found: dict[str, Calls] = {}
    for file in table_files(path):
        table = read(file)
        form = of_kernel(table.kernel)
        try:
            rows = rows_of(table)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        calls, here = found.setdefault(table.kernel, {}), set[tuple[Any, ...]]()
        for row in rows:
            key = form.key_of(row.fields)
            old = calls.get(key)
            if old is None or replaces(old_modelled=old.modelled, new_modelled=row.modelled, same_file=(key in here)):
                calls[key] = row
                here.add(key)
    return found


def compare(old: Path, new: Path) -> Comparison:
    """What changes from the tables in ``old`` to those in ``new``. Raises as ``load``."""
    before, after = load(old), load(new)
    result = Comparison([], 0, [])
    equal = 0
    for kernel in sorted(before.keys() | after.keys()):
        form = of_kernel(kernel)
        ours, theirs = before.get(kernel, {}), after.get(kernel, {})
        for key in sorted(ours.keys() | theirs.keys()):
            call = dict(zip(form.key, key, strict=True))
            a, b = ours.get(key), theirs.get(key)
            was, now = (None if row is None else {**form.choice_of(row.fields), **_origin(row)} for row in (a, b))
            if a is None or b is None:
                result.differences.append(Difference("added" if a is None else "removed", kernel, call, was, now))
                continue
            us = a.fields.get("us"), b.fields.get("us")
            ratio = us[1] / us[0] if us[0] is not None and us[1] is not None else None
            if ratio is not None:
                result.ratios.append(ratio)
            if form.choice_of(a.fields) != form.choice_of(b.fields):
                result.differences.append(Difference("changed", kernel, call, was, now, ratio))
            elif a.modelled != b.modelled:
                result.differences.append(Difference("evidence", kernel, call, was, now, ratio))
            else:
                equal += 1
    return Comparison(result.differences, equal, result.ratios)


def _origin(row: Row) -> dict[str, Any]:
    return {"us": row.fields.get("us"), "modelled": row.modelled, "source": row.entry.get("source", "not stated")}
