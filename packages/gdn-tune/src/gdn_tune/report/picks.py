"""What a store of the tuner says: for each call the candidate that a table takes, and by how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdn_runtime.tables import parse_provenance

from ..export import Candidate, ExportError, best_run, export, tied
from ..formats import choice_text, of_op
from ..records import Key, Op, Sample
from ..store import Store, StoreError
from .benches import device_name
from .data import Data, InputError, Origin, Pick


def read(path: Path, file: str) -> Data:
    """The picks of a store. Raises InputError for one that cannot be read or holds nothing."""
    try:
        with Store(path, create=False) as store:
            samples = list(store.samples())
    except StoreError as error:
        raise InputError(str(error).replace(str(path), file)) from error
    if not samples:
        raise InputError(f"{file}: there is nothing in it")
    return picks(samples, file)


def picks(samples: Iterable[Sample], file: str) -> Data:
    """The pick of every call of ``samples``, by op, architecture, case and problem. Raises InputError for facts that
    are no call of a table."""
    calls: dict[tuple[Any, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        key = sample.key
        context = key.protocol.get("context") or 0
        calls[key.op, key.arch, key.compute_units, key.case, key.facts.text, context].append(sample)
    data, origins = Data(), dict[tuple[str, ...], Origin]()
    for (op, arch, units, case, _, _), group in sorted(calls.items()):
        found = best_run(group)
        if not found:
            bad = ", ".join(sorted({f"{choice_text(sample.key.config)} {sample.status}" for sample in group}))
            data.missing.append(
                (_origin(group[0], file, group), f"{op} {case} on {arch}: no candidate was right: {bad}")
            )
            continue
        first = found[0].samples[-1]
        mine = _origin(first, file, [sample for each in found for sample in each.samples])
        origin = origins.setdefault((op, first.key.device, first.key.toolchain, mine.method), mine)
        best, ruled = _winner(op, arch, found, file)
        data.picks.append(
            Pick(
                origin=origin,
                op=op,
                case=case,
                arch=arch,
                compute_units=units,
                choice=choice_text(best.key.config),
                value=best.spread.median,
                unit="cycles" if best.key.modelled else "us",
                n=sum(sample.n for sample in best.samples),
                others=tuple((choice_text(each.key.config), each.spread.median) for each in found),
                tied=not best.key.modelled and len(tied(found)) > 1 and best in tied(found),
                ruled=ruled,
            )
        )
    data.origins += list(dict.fromkeys(origins.values()))
    return data


def _winner(op: Op, arch: str, found: list[Candidate], file: str) -> tuple[Candidate, str]:
    """(the candidate that ``export`` takes, the rule's choice in words)."""
    form = of_op(op, arch)
    if form is None:
        return found[0], ""
    try:
        (made,) = export([sample for each in found for sample in each.samples])
        if not made.table.rows:  # columns that no table has: the fastest
            return found[0], ""
        (row,) = made.table.rows
        provenances = {name: parse_provenance(entry) for name, entry in made.table.provenance.items()}
        rule = form.rule(form.parse(row, arch, provenances))[0]
    except ExportError as error:
        raise InputError(f"{file}: {error}") from error
    chosen = {name: row[name] for name in form.choice if name in row}
    by_config = (each for each in found if dict(each.key.config) == chosen)
    ruled = next((each for each in found if dict(each.key.config) == rule), None)
    return next(by_config, found[0]), choice_text(ruled.key.config if ruled is not None else rule)


def _origin(sample: Sample, file: str, samples: Iterable[Sample]) -> Origin:
    key: Key = sample.key
    commits = sorted({each.commit for each in samples if each.commit})
    dates = sorted({each.started[:10] for each in samples if each.started})
    protocol = ", ".join(f"{name} {value}" for name, value in key.protocol.items() if name not in ("method", "context"))
    method = "cycles of a model" if key.modelled else f"timed by {key.protocol['method']}, candidates in turns"
    return Origin(
        file=file,
        kind="store",
        device="" if key.modelled else device_name(key.device),
        hardware=f"{key.device} of {key.arch}" if key.modelled else f"{key.device}: {key.arch}",
        arch=key.arch,
        versions=_versions(key.toolchain),
        commit=", ".join(commits),
        date=" to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        method=f"{method}: {protocol}" if protocol else method,
        modelled=key.modelled,
    )


def _versions(toolchain: str) -> dict[str, str]:
    """Of "name version, name version"."""
    pairs = [part.strip().partition(" ") for part in toolchain.split(",") if part.strip()]
    return {name: version for name, _, version in pairs}
