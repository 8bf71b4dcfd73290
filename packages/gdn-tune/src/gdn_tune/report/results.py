"""What stands in benchmarks/results: runs side by side with other implementations, the fast path, paged decode, the
emulator's counters, first calls."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..bench.profile import FUSED_PREPARE, K5, K6, TRANSFER, WHOLE, stage_of
from .benches import device_name
from .data import BarRow, Data, Decode, Origin, Shape, Time
from .fields import Fields

RAGGED33 = (
    1, 63, 65, 58, 1149, 556, 51, 1034, 44, 766, 57, 70, 735, 2683, 97, 231, 1561, 3513, 1327, 647, 3725, 47, 2889, 363,
    119, 92, 406, 2615, 165, 1347, 1617, 575, 1199,
)  # fmt: skip
"""Lengths of the shape of that name in benchmarks/fast_prefill.py."""
OURS = "gdn_runtime"
STAGED = {"prepare_us": FUSED_PREPARE, "state_scan_us": K5, "output_us": K6}
FAST = {"prepare_us": FUSED_PREPARE, "transfer_us": TRANSFER, "combine_us": "segment combine", "scan_us": WHOLE}
GRAPHS = "replays of a captured call over rotated inputs"
ATTENTION = {"attention_us": "attention alone", "copies_only_us": "copies only"}


def origin_of(values: Fields, file: str, kind: str, **more: object) -> Origin:
    """The run that a file is of."""
    line = values.text("device", "")
    known = {
        "device": device_name(line),
        "hardware": line,
        "versions": values.versions(),
        "commit": values.text("commit", ""),
        "date": values.text("date", ""),
        "command": values.text("command", ""),
    }
    return Origin(file=file, kind=kind, **(known | more))  # type: ignore[arg-type]


def side_by_side(values: Fields, file: str) -> Data:
    """Times of the block of several implementations, the stages of ours, kernels of all."""
    data = Data()
    found = values.object("side_by_side")
    command = found.text("command", "")
    origin = origin_of(values, file, "block", command=command, method=f"{GRAPHS}; (e): single calls between events")
    data.origins.append(origin)
    for entry in found.objects("rows", empty=False):
        shape = parse_shape(entry, entry.text("shape"))
        graphs, events = entry.numbers("graph_us"), entry.numbers("event_us")
        for backend in dict.fromkeys((*graphs, *events)):
            how, where = ("in a graph", "graph_us") if backend in graphs else ("events", "event_us")
            data.times.append(Time(origin, "block", shape, backend, entry.object(where).number(backend), how))
    if "kernels" in found:
        profiled = origin_of(values, file, "stages", command=command, method="device time of kernels by the profiler")
        data.origins.append(profiled)
        for entry in found.objects("kernels"):
            stages: dict[str, float] = {}
            for kernel, us in entry.numbers("us").items():
                stages[stage_of(kernel)] = stages.get(stage_of(kernel), 0.0) + us
            shape = parse_shape(entry, entry.text("shape"))
            name = entry.text("implementation")
            data.times.append(
                Time(profiled, "block", shape, name, sum(stages.values()), "profiler", stages=stages)  # kernels alone
            )
    if "block" in values:
        _ours(values.object("block"), origin_of(values, file, "stages"), data, OURS, STAGED)
    return data


def fast_path(values: Fields, file: str) -> Data:
    """Times of our block on one path, and of its kernels."""
    data = Data()
    path = values.text("path")
    _ours(values, origin_of(values, file, "block"), data, f"{OURS} {path} path", FAST if path == "fast" else STAGED)
    return data


def _ours(values: Fields, origin: Origin, data: Data, backend: str, stages: dict[str, str]) -> None:
    known = {**origin.__dict__, "method": f"{GRAPHS}; stages by the profiler"}
    if "command" in values:
        known["command"] = values.text("command")
    mine = Origin(**known)
    data.origins.append(mine)
    for entry in values.objects("rows", empty=False):
        parts = {stage: entry.number(name) for name, stage in stages.items() if name in entry}
        shape = parse_shape(entry, entry.text("shape"))
        time = Time(mine, "block", shape, backend, entry.number("graph_us"), "in a graph", stages=parts)
        data.times.append(time)


def parse_shape(entry: Fields, text: str) -> Shape:
    """ "H/Hg" and lengths: "8kx4", "8192x4", "8192", "dense2500", "ragged33", "7,9x2". Raises InputError for others."""
    heads = re.fullmatch(r"(\d+)/(\d+)[ :](.+)", text)
    if heads is None:
        raise entry.fault("shape", "H/Hg and lengths")
    num_heads, num_key_heads, rest = int(heads[1]), int(heads[2]), heads[3]
    dense = rest.startswith("dense")
    lengths: list[int] = []
    if rest == "ragged33":
        lengths = list(RAGGED33)
    else:
        for part in rest.removeprefix("dense").split(","):
            piece = re.fullmatch(r"(\d+)(k?)(?:x(\d+))?", part)
            if piece is None:
                raise entry.fault("shape", "H/Hg and lengths")
            lengths += [int(piece[1]) * (1024 if piece[2] else 1)] * int(piece[3] or 1)
    if not num_key_heads or not lengths or len(lengths) > 100_000:
        raise entry.fault("shape", "H/Hg and lengths")
    return Shape(rest, num_heads, num_key_heads, tuple(lengths), dense)


def decode(values: Fields, file: str) -> Data:
    """Paged decode: whole calls (benchmarks/paged_decode.py) or kernels at stages of their making."""
    data = Data()
    origin = origin_of(values, file, "pa", method=values.text("what", GRAPHS))
    data.origins.append(origin)
    prose = values.text("shape", "16 query heads, 2 KV heads of 256")  # of benchmarks/paged_decode.py
    heads = re.search(r"(\d+) query heads, (\d+) KV heads of (\d+)", prose)
    options = values.object("options") if "options" in values else Fields({}, file)
    for entry in values.objects("rows", empty=False):
        base = {
            "origin": origin,
            "batch": entry.whole("batch"),
            "context": entry.whole("context"),
            "page": entry.whole("page"),
            "query_length": entry.whole("query_length"),
            "window": options.whole("window", least=0) if "window" in options else 0,
            "scales": entry.text("scales", "token" if options.flag("token") else "tensor"),
            "v_form": entry.text("v", "plain" if options.flag("plain") else "packed"),
        }
        if heads is not None:
            base |= {"num_heads": int(heads[1]), "num_kv_heads": int(heads[2]), "head_dim": int(heads[3])}
        kernel = values.text("kernel", "hopper" if "copies_only_us" in entry else "triton")
        found = {f"{kernel}, {label}": entry.medians(name) for name, label in ATTENTION.items()}
        found |= {kernel: entry.optional("us"), "plain read": entry.optional("read_us")}
        for backend, value in found.items():
            if value is not None:
                data.decodes.append(Decode(backend=backend, value=value, **base))  # type: ignore[arg-type]
    return data


def counters(values: Fields, file: str) -> Data:
    """The emulator's counters, with their bars."""
    data = Data()
    arch = ", ".join(dict.fromkeys(entry.object("spec").text("arch") for entry in values.objects("rows", empty=False)))
    note = values.text("note", "counted on the emulator; cycles are a model")
    origin = origin_of(values, file, "counters", hardware=f"emulator of {arch}", arch=arch, method=note, modelled=True)
    data.origins.append(origin)
    for entry in values.objects("rows"):
        arch = entry.object("spec").text("arch")
        name = entry.text("name") if "name" in entry else f"{entry.text('kernel')} {arch} {entry.text('variant')}"
        bars = list(entry.objects("bars"))
        if not bars:
            data.missing.append((origin, f"{name}: no bar holds for it"))
        for bar in bars:
            got, limit = bar.number("got", positive=False), bar.number("limit", positive=False)
            item = " ".join(word for word in name.split() if word != arch)
            data.bars.append(BarRow(origin, arch, item, bar.text("name"), got, limit))
    return data


def first_call(values: Fields, file: str) -> Data:
    """The first call from a bundle, against its bar."""
    origin = origin_of(values, file, "host", host=True, method="best of the rounds, each a process of its own")
    got, bar = values.number("first_call_s"), values.number("bar_s")
    return Data(bars=[BarRow(origin, "host", "first call from a bundle", "first call", got, bar, "s")],
                origins=[origin])  # fmt: skip


def reader_of(values: Fields) -> Callable[[Fields, str], Data] | None:
    """What reads a file of this layout; None if it is none of ours."""
    if "side_by_side" in values:
        return side_by_side
    if "first_call_s" in values:
        return first_call
    rows = values.values.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    if "bars" in first:
        return counters
    if "graph_us" in first and "path" in values:
        return fast_path
    if "context" in first and ("attention_us" in first or "us" in first):
        return decode
    return None
