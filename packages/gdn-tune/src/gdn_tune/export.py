"""Tables from samples. Equal samples give equal bytes, whatever the order in which they were taken."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdn_runtime.tables import parse_provenance

from .formats import Choice, TableFormat, choice_text, of_kernel, of_op
from .records import Facts, Key, Op, Sample
from .spread import SURE, Spread
from .tablefile import Fields, Table

SOURCE = "gdn-tune"
MODEL_GAP = 0.05
"""Modelled cycles of two candidates are apart only beyond this share of them: 64 rows of the state for 32 scans on 80
compute units, which were timed (with another kernel) as faster than 32, are 5 % behind in the model."""


class ExportError(ValueError):
    """What cannot become a row: facts that lack a column of it, or a choice that no kernel has."""


@dataclass(frozen=True)
class Row:
    """A row of a table with its provenance, not the name of it. ``tied``: choices that could not be told apart from its
    own, its own included, if there are any."""

    fields: Fields
    entry: Fields
    tied: tuple[str, ...] = ()

    @property
    def modelled(self) -> bool:
        """Whether nothing was timed. A row that does not say where it is from counts as timed."""
        return bool(self.entry.get("modelled", False))


@dataclass
class Export:
    """``table``, and what happened: rows that are new, tied, kept from the base, left out; ``notes`` say the rest in
    words."""

    table: Table
    new: int = 0
    modelled: int = 0
    tied: int = 0
    kept: int = 0
    left_out: int = 0
    notes: list[str] = field(default_factory=list)


def export(samples: Iterable[Sample], base: Sequence[Table] = (), without: Sequence[Table] = ()) -> list[Export]:
    """Tables of ``samples``, one for each kernel and architecture that has some, by name.

    For each call the run with the most candidates counts, timed ones before modelled ones, later ones before earlier:
    times of different devices, toolchains or protocols are never compared. Of its candidates that were right the one
    with the smallest median wins; where the rule's choice cannot be told apart from that, the rule's wins, and the
    provenance names all that are tied. Rows of ``base`` stay where the samples have nothing better: a modelled row does
    not replace a measured one. Calls that a table of ``without`` has get no row: whoever reads both reads theirs.

    Raises ExportError for facts that are no row of the table, TableError's ValueError for a base that is not sound.
    """
    groups: dict[tuple[str, Op], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.key.arch, sample.key.op].append(sample)
    found = []
    for (arch, op), group in sorted(groups.items()):
        form = of_op(op, arch)
        if form is None:
            found.append(Export(Table(op, arch), notes=[f"{arch} {op}: no call looks up a table, the rule stays"]))
            continue
        bases, others = (
            [table for table in tables if (table.kernel, table.arch) == (form.kernel, arch)]
            for tables in (base, without)
        )
        found.append(_export(form, arch, group, bases, others))
    return found


def _export(form: TableFormat, arch: str, samples: list[Sample], bases: list[Table], others: list[Table]) -> Export:
    result = Export(Table(form.kernel, arch))
    elsewhere = {form.key_of(row.fields) for table in others for row in rows_of(table)}
    rows: dict[tuple[Any, ...], Row] = {}
    for table in bases:
        for row in rows_of(table):
            rows.setdefault(form.key_of(row.fields), row)
    result.kept = len(rows)
    calls: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        key = sample.key
        strange = {name: key.facts[name] for name, value in form.assumes.items() if key.facts.get(name, value) != value}
        strange |= {name: value for name, value in key.config.items() if name not in form.choice}
        if strange:
            result.notes.append(f"{_what(key)}: no column for {choice_text(strange)}")
        else:
            calls[_call(form, key)].append(sample)
    for _, group in sorted(calls.items()):
        what = min(_what(sample.key) for sample in group)
        new = _best(form, group)
        if new is None:
            result.notes.append(f"{what}: no candidate was right")
            continue
        place = form.key_of(new.fields)
        if place in elsewhere:
            result.left_out += 1
            continue
        old = rows.get(place)
        if old is not None and new.modelled and not old.modelled:
            result.notes.append(f"{what}: measured in the base, modelled here: the base's row stays")
            continue
        result.kept -= old is not None
        result.new += 1
        result.modelled += new.modelled
        result.tied += bool(new.tied)
        rows[place] = new
    result.notes = sorted(set(result.notes))
    result.table = assemble(form, arch, (row for _, row in sorted(rows.items())))
    return result


def rows_of(table: Table) -> list[Row]:
    """The rows of ``table``, each checked. Raises ValueError that names the row."""
    form = of_kernel(table.kernel)
    provenances = {name: parse_provenance(entry) for name, entry in table.provenance.items()}
    rows = []
    for index, fields in enumerate(table.rows):
        try:
            form.parse(fields, table.arch, provenances)
        except ValueError as error:
            raise ValueError(f"{table.kernel} for {table.arch}, row {index}: {error}") from error
        plain = {name: fields[name] for name in form.columns if name in fields}
        rows.append(Row(plain, table.provenance.get(fields.get("provenance", ""), {})))
    return rows


def assemble(form: TableFormat, arch: str, rows: Iterable[Row]) -> Table:
    """The table of ``rows``; provenances that are equal become one entry, named by their order."""
    names: dict[str, str] = {}
    table = Table(form.kernel, arch)
    for row in rows:
        fields = dict(row.fields)
        if row.entry:
            text = json.dumps(row.entry, sort_keys=True)
            name = names.setdefault(text, f"{row.entry['source']}-{len(names) + 1}")
            table.provenance[name] = row.entry
            fields["provenance"] = name
        table.rows.append(fields)
    return table


def _call(form: TableFormat, key: Key) -> str:
    missing = [name for name in form.facts if name not in key.facts]
    if missing:
        raise ExportError(f"{_what(key)}: the facts lack {', '.join(missing)}")
    return json.dumps([key.compute_units, *(key.facts[name] for name in form.facts if name in form.key)])


def _what(key: Key) -> str:
    return f"{key.op} {key.case} on {key.arch} with {key.compute_units} compute units"


# ------------------------------------------------------------------------------------------------ one call


@dataclass(frozen=True)
class Candidate:
    """What is known of one choice: time in us, or cycles if it was modelled."""

    samples: tuple[Sample, ...]
    spread: Spread

    @property
    def key(self) -> Key:
        """Of the newest sample."""
        return self.samples[-1].key


def candidates(samples: Iterable[Sample]) -> list[Candidate]:
    """What ``samples`` of one call and one run say of each config, fastest first.

    The newest sample of a config decides whether it counts, and which code is meant: samples of code that was changed
    since do not.
    """
    by_config: dict[Facts, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=_order):
        by_config[sample.key.config].append(sample)
    found = []
    for group in by_config.values():
        last = group[-1]
        same = tuple(s for s in group if s.key.kernel_digest == last.key.kernel_digest and s.status == "ok")
        if last.status != "ok":
            continue
        if last.key.modelled:
            assert last.cycles is not None, "an ok sample that was modelled has cycles"
            error = last.cycles * MODEL_GAP / (SURE * math.sqrt(2))  # that of each, of which two make the gap
            found.append(Candidate(same, Spread(last.cycles, error, 1)))
        else:
            found.append(Candidate(same, Spread.of([time for s in same for time in s.times_us])))
    return sorted(found, key=lambda each: (each.spread.median, each.key.config.text))


def best_run(samples: Iterable[Sample]) -> list[Candidate]:
    """The candidates of the run that counts; none if none was right in any."""
    runs: dict[tuple[Any, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        key = sample.key
        runs[not key.modelled, key.device, key.toolchain, key.protocol.text].append(sample)
    ranked = []
    for (timed, *names), group in runs.items():
        found = candidates(group)
        if found:
            newest = max(sample.started for sample in group)
            ranked.append(((timed, len(found), newest, *names), found))
    return max(ranked, key=lambda each: each[0])[1] if ranked else []


def tied(found: Sequence[Candidate]) -> list[Candidate]:
    """Those of ``found`` (fastest first) that cannot be told apart from the first, itself included."""
    first = found[0].spread
    return [each for each in found if each is found[0] or not first.apart(each.spread)]


def _best(form: TableFormat, samples: list[Sample]) -> Row | None:
    found = best_run(samples)
    if not found:
        return None
    equals = tied(found)
    ruled = _rule(form, found[0])
    best = next((each for each in equals if dict(each.key.config) == ruled), equals[0])
    texts = tuple(choice_text(each.key.config) for each in equals) if len(equals) > 1 else ()
    return Row(_fields(form, best), _entry(best, texts), texts)


def _rule(form: TableFormat, candidate: Candidate) -> Choice:
    fields = _fields(form, candidate)
    try:
        row = form.parse({**fields, "provenance": SOURCE}, candidate.key.arch, {SOURCE: _NOBODY})
    except ValueError as error:
        raise ExportError(f"{_what(candidate.key)}: {error}") from error
    for fault in form.faults(row):
        raise ExportError(f"{_what(candidate.key)}: {fault}")
    return form.rule(row)[0]


_NOBODY = parse_provenance({"source": SOURCE})


def _fields(form: TableFormat, candidate: Candidate) -> Fields:
    key = candidate.key
    values = {**key.facts, **key.config, "arch": key.arch, "gfx": key.arch, "cu_num": key.compute_units}
    if form.timed and not key.modelled:
        values["us"] = float(f"{candidate.spread.median:.4g}")
    return {name: values[name] for name in form.columns if name in values}


def _entry(candidate: Candidate, equals: tuple[str, ...]) -> Fields:
    key = candidate.key
    iterations = sum(sample.n for sample in candidate.samples)
    entry: Fields = {
        "source": SOURCE,
        "device": key.device,
        "date": max(sample.started for sample in candidate.samples)[:10],
        "n": iterations,
        "modelled": key.modelled,
        "toolchain": key.toolchain,
        "kernel_digest": key.kernel_digest,
        "protocol": key.protocol.text,
        "tied": f"{'; '.join(equals)} cannot be told apart" if equals else "",
    }
    return {name: value for name, value in entry.items() if value}


def _order(sample: Sample) -> tuple[str, ...]:
    """Oldest first; samples of one second in an order that does not depend on the store's."""
    return sample.started, sample.status, json.dumps(sample.times_us), sample.key.kernel_digest, str(sample.cycles)
