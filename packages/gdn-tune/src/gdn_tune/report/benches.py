"""What ``gdn-tune bench ... --json`` wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..bench.profile import K5, STAGES
from ..bench.results import GAP, GRAPH, WALL
from .data import BarRow, Data, Decode, InputError, Origin, Shape, Time
from .fields import Fields

SCHEMA = 1
"""Of the files; those without one are read as this one."""
HOWS = {GRAPH: "in a graph", WALL: "wall", K5: "device"}
CYCLES_PER_TILE = "cycles per tile"


def read(values: Fields, file: str) -> Data:
    """Figures of a bench. Raises InputError for what no bench writes."""
    kind = values.text("bench")
    schema = values.whole("schema") if "schema" in values else SCHEMA
    if schema != SCHEMA:
        raise InputError(f"{file}: schema: got {schema}, expected {SCHEMA}; use the gdn-tune that wrote it")
    if kind not in READERS:
        raise InputError(f"{file}: bench: got {kind!r}, expected one of {', '.join(READERS)}")
    data = Data()
    READERS[kind](values, _origin(values, file, kind), data)
    return data


def device_name(line: str) -> str:
    """The card's name at the beginning of a line about it."""
    return line.split(":")[0].split(" (")[0].split(",")[0].strip()


def _origin(values: Fields, file: str, kind: str) -> Origin:
    versions = values.versions()
    if "version" in values:
        versions = {"gdn_runtime": values.text("version")} | versions
    line = values.text("device", "")
    return Origin(
        file=file,
        kind=kind,
        device=device_name(line),
        hardware=line,
        arch=values.text("arch", ""),
        versions=versions,
        commit=values.text("commit", ""),
        date=values.text("date", ""),
        command=values.text("command", ""),
        method=_method(values, kind),
        host=kind == "host",
    )


def _method(values: Fields, kind: str) -> str:
    words = {
        "block": "stages by the profiler, wall between events",
        "k5": "device time by the profiler",
        "snapshot": "medians of single calls between events",
        "pa": "replays between events, in alternating sweeps",
        "host": "best median of the rounds, launches left out",
    }
    if "protocol" not in values:
        return words.get(kind, "")
    inner = values.object("protocol")
    given = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in inner.values.items())
    return f"{words.get(kind, kind)}: {given}"


def _counted(origin: Origin, values: Fields) -> Origin:
    """The origin of what the emulator counted in the same run."""
    arch = values.text("emulated_arch", "")
    note = "counted on the emulator; cycles are of its model, nothing was timed"
    return replace(origin, device="", hardware=f"emulator of {arch}" if arch else "emulator", arch=arch, method=note,
                   modelled=True)  # fmt: skip


def _note(origin: Origin, data: Data) -> Origin:
    if origin not in data.origins:
        data.origins.append(origin)
    return origin


def _measurements(values: Fields, origin: Origin, data: Data) -> Any:
    """(entry, origin, case in words, metrics) of what did not fail."""
    emulated = _counted(origin, values)
    for entry in values.objects("measurements", empty=False):
        unit = entry.text("unit", "us")
        if unit not in ("us", "cycles"):
            raise entry.fault("unit", "us or cycles")
        mine = _note(emulated if unit == "cycles" else origin, data)
        words = (entry.text("case"), entry.text("snapshot", ""), entry.text("backend"), entry.text("variant", ""))
        failure = entry.text("failure", "")
        if failure:
            data.missing.append((mine, f"{' '.join(word for word in words if word)}: {failure}"))
        else:
            yield entry, mine, unit, entry.numbers("metrics")


def _prefill(values: Fields, origin: Origin, data: Data) -> None:
    """The bench of the block, and that of K5."""
    kept = list(_measurements(values, origin, data))
    timed = [metrics for _, _, unit, metrics in kept if unit == "us"]
    block = origin.kind == "block"
    # One way of timing for all: times in a graph have no host in them.
    metric = (GRAPH if all(GRAPH in each for each in timed) else WALL) if block else K5
    for entry, mine, unit, metrics in kept:
        stages = {name: metrics[name] for name in STAGES if metrics.get(name, 0) > 0}
        name = metric if metric in metrics or unit == "cycles" else WALL
        value = sum(stages.values()) if unit == "cycles" else metrics.get(name)
        words = f"{entry.text('case')} {entry.text('backend')}"
        if not value or value <= 0:
            data.missing.append((mine, f"{words}: no {metric}"))
            continue
        data.times.append(
            Time(
                origin=mine,
                what="block" if block else "K5",
                shape=_shape(entry),
                backend=entry.text("backend"),
                variant=entry.text("variant", ""),
                value=value,
                unit=unit,
                how="model" if unit == "cycles" else HOWS[name],
                stages=stages if block else {},
                gap=metrics.get(GAP) if block else None,
            )
        )


def _shape(entry: Fields) -> Shape:
    facts = entry.object("facts")
    lengths = entry.wholes("lengths")
    varlen = facts.flag("varlen", default=True)
    if not lengths and not varlen:
        rows = facts.whole("T") // facts.whole("SeqLen")
        lengths = (facts.whole("SeqLen"),) * rows
    return Shape(entry.text("case"), facts.whole("H"), facts.whole("Hg"), lengths, not varlen, entry.text("snapshot"))


def _snapshot(values: Fields, origin: Origin, data: Data) -> None:
    """The microbench of the snapshots' dtype: K5 and K6 alone."""
    given = values.object("shape")
    batch, tokens = given.whole("batch_size"), given.whole("sequence_length")
    heads = given.whole("num_heads"), given.whole("num_key_heads")
    emulated = _counted(origin, values)
    for entry in values.objects("rows", empty=False):
        unit = entry.text("unit", "us")
        mine = _note(emulated if unit == "cycles" else origin, data)
        shape = Shape(f"b{batch}-t{tokens}", *heads, (tokens,) * batch, True, entry.text("snapshot_dtype"))
        for what, name in (("K5", "k5"), ("K6", "k6")):
            value = entry.optional(name)
            if value is not None:
                how = "model" if unit == "cycles" else "alone"
                data.times.append(Time(mine, what, shape, entry.text("backend"), value, how, unit=unit))  # type: ignore[arg-type]


def _pa(values: Fields, origin: Origin, data: Data) -> None:
    """Paged decode."""
    for entry, mine, unit, metrics in _measurements(values, origin, data):
        facts = entry.object("facts")
        name = "us" if unit == "us" else CYCLES_PER_TILE
        if not metrics.get(name, 0) > 0:
            data.missing.append((mine, f"{entry.text('case')} {entry.text('backend')}: no {name}"))
            continue
        data.decodes.append(
            Decode(
                origin=mine,
                backend=entry.text("backend"),
                variant=entry.text("variant", ""),
                value=metrics[name],
                unit=unit,
                batch=facts.whole("B"),
                num_heads=facts.whole("Hq"),
                num_kv_heads=facts.whole("Hkv"),
                head_dim=facts.whole("D") if "D" in facts else 256,
                page=facts.whole("page"),
                query_length=facts.whole("QL"),
                context=facts.whole("context"),
                window=facts.whole("window", least=0),
                scales=facts.text("scales"),
                v_form=facts.text("V"),
                spread=metrics.get("p90-p10"),
            )
        )


def _host(values: Fields, origin: Origin, data: Data) -> None:
    """What a warm call costs on the host, against its bars."""
    _note(origin, data)
    times, bars = values.numbers("us"), values.numbers("bars")
    if not times:
        raise values.fault("us", "an object of times")
    data.bars += [
        BarRow(origin, "host", "warm call", name, times[name], bar, "us") for name, bar in bars.items() if name in times
    ]


READERS = {"block": _prefill, "k5": _prefill, "snapshot": _snapshot, "pa": _pa, "host": _host}
