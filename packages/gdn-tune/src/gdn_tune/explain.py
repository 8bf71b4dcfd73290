"""Why a call gets what it gets: the row that matches it, or the rule with its inputs and the rows that almost match."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from gdn_runtime import env, tables
from gdn_runtime.arch import parse_arch
from gdn_runtime.plan import cdiv
from gdn_runtime.select import Request, select
from gdn_runtime.spec import AMD_ARCHS, CHUNK, HEAD_DIM, TUNED_ARCHS
from gdn_runtime.tables import Located, Provenance, ScanRow
from pa_decode import tables as pa_tables

from .formats import OPT, PA, Choice, LaunchTableRow, TableFormat, choice_text, launch_problem, of_op, problem_of
from .records import Op
from .tablefile import Fields

MAX_SEQS = 1 << 20
NEAREST = 3
"""Rows to name that almost match."""

_GDN_SHAPE = "H Hg lens|dense snapshot state h0 fs"
SHAPES = {
    "k5": _GDN_SHAPE,
    "prepare": _GDN_SHAPE,
    "block": _GDN_SHAPE,
    "pa": "B Hq Hkv D page QL query_dtype scale_mode v_packed sink_dtype window",
}
"""Names that a shape of an op may have."""


@dataclass(frozen=True)
class Explanation:
    """``choice`` for ``call`` (the columns of the key), ``by`` "row" or "rule". ``row`` is where it stands and
    ``provenance`` where it is from; ``rule`` and ``inputs`` are what the rule says, with or without a row. ``nearest``:
    rows of the same architecture that differ in the fewest columns, where no row matches. ``reasons``: of a whole call
    of the block, in words."""

    op: Op
    call: Fields
    choice: Choice
    by: str
    row: str | None
    provenance: dict[str, Any] | None
    rule: Choice
    inputs: str
    nearest: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op} {choice_text(self.call)}"]
        if self.row is not None:
            origin = ", ".join(f"{name}={value}" for name, value in (self.provenance or {}).items() if value)
            same = "gives the same" if self.rule == self.choice else f"would give {choice_text(self.rule)}"
            lines.append(f"{choice_text(self.choice)} from {self.row} ({origin})")
            lines.append(f"the rule {same}: {self.inputs}")
        else:
            lines.append(f"{choice_text(self.choice)} by the rule: {self.inputs}")
            lines += [f"no row matches; nearest is {text}" for text in self.nearest] or ["the tables have no such rows"]
        return "\n".join([*lines, *self.reasons])


def explain(op: Op, arch: str, shape: str, compute_units: int | None = None, paths: Iterable[Path] = ()) -> Explanation:
    """What decides for a call of ``op`` on ``arch``, whose usual part is meant if ``compute_units`` is None.

    ``shape``: NAME=VALUE apart by spaces, names as in ``SHAPES``; ``lens=8192x4,17`` are packed sequences,
    ``dense=B,T`` is a batch. ``paths``: tables that override the packaged ones and those of GDN_TABLES. Raises
    ValueError for a shape that is none, UnsupportedError where no table is looked up.
    """
    values = parse_shape(op, shape)
    facts = parse_arch(arch)
    units = compute_units or facts.nominal_compute_units or 1
    named = [env.settings().tables, *map(str, paths)]
    with env.override(tables=os.pathsep.join(entry for entry in named if entry)):
        pa_tables.forget()
        if op == "pa":
            return _pa(facts.name, units, values)
        if facts.name in TUNED_ARCHS:
            return _launch(op, facts.name, units, values)
        return _scan(op, facts.name, units, values)


def parse_shape(op: Op, text: str) -> dict[str, str]:
    """The values in ``text``. Raises ValueError for names that a shape of ``op`` does not have."""
    if op not in SHAPES:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(SHAPES)}")
    names = SHAPES[op].replace("|", " ").split()
    values = {}
    for item in text.split():
        name, equals, value = item.partition("=")
        if name not in names or not equals or not value or name in values:
            raise ValueError(f"shape: got {item!r}, expected each of {SHAPES[op]} at most once, as NAME=VALUE")
        values[name] = value
    return values


# ------------------------------------------------------------------------------------------------ K5 and the block


def _scan(op: Op, arch: str, units: int, values: Mapping[str, str]) -> Explanation:
    if arch not in AMD_ARCHS or op == "prepare":
        archs = (*AMD_ARCHS, *TUNED_ARCHS) if op != "prepare" else TUNED_ARCHS
        raise ValueError(f"arch: got {arch!r}, tables of {op} are looked up on {', '.join(archs)}")
    fields = {**_fields(arch, units, values), "block_v": 16}  # any: the row is one for its key
    asked: ScanRow = OPT.parse(fields, arch, {})
    in_force = tables.table()
    rows = [(str(found), _scan_fields(found.row)) for found in in_force.rows()]
    found = in_force.get(asked.key)
    place = None if found is None else (str(found), {"block_v": found.row.block_v}, found.row.provenance)
    reasons: tuple[str, ...] = ()
    if op == "block":
        reasons = tuple(str(select(problem_of(asked), torch.device("cuda"), Request(arch=arch))).splitlines())
    return _explanation(op, OPT, fields, asked, place, rows, reasons)


def _fields(arch: str, units: int, values: Mapping[str, str]) -> Fields:
    """The columns of a table of K5 `opt` that describe a call."""
    if ("lens" in values) == ("dense" in values):
        raise ValueError("shape: expected lens=... or dense=B,T")
    is_varlen = "lens" in values
    lengths = _lengths(values["lens"]) if is_varlen else _batch(values["dense"])
    chunks = [cdiv(length, CHUNK) for length in lengths]
    heads = _read(values, "H", _integer, None)
    return {
        "gfx": arch,
        "cu_num": units,
        "H": heads,
        "Hg": _read(values, "Hg", _integer, heads),
        "V": HEAD_DIM,
        "is_varlen": is_varlen,
        "use_h0": _read(values, "h0", _flag, True),
        "store_fs": _read(values, "fs", _flag, True),
        "snapshot_bf16": _read(values, "snapshot", _dtype, "bf16") == "bf16",
        "state_bf16": _read(values, "state", _dtype, "fp32") == "bf16",
        "T_flat": sum(lengths),
        "N": len(lengths),
        "total_chunks": sum(chunks),
        "max_seq_chunks": max(chunks),
    }


def _launch(op: Op, arch: str, units: int, values: Mapping[str, str]) -> Explanation:
    """A call whose launch configuration a table may name."""
    form = of_op(op, arch)
    assert form is not None
    known = {**_fields(arch, units, values), "gated": True}
    fields = {name: value for name, value in known.items() if name in form.columns}
    kernel = cast(tables.LaunchKernel, form.kernel)
    problem = launch_problem(kernel, fields)
    form.parse({**fields, **form.rule(LaunchTableRow(problem))[0]}, arch, {})  # or it is no call
    call = problem.launch_call()
    assert call is not None, "tables are for bf16 data"
    in_force = tables.launch_table(env.settings().tables)
    rows = [
        (str(each), {**tables.key_fields(kernel, each.row.call), "V": HEAD_DIM})
        for each in in_force.rows()
        if each.row.kernel == kernel
    ]
    found = in_force.get(kernel, call)
    place = None
    if found is not None:
        place = str(found), tables.config_fields(found.row.config, kernel), found.row.provenance
    reasons = str(select(problem, torch.device("cuda"), Request(arch=arch))).splitlines() if op == "block" else []
    return _explanation(op, form, fields, LaunchTableRow(problem), place, rows, tuple(reasons))


def _scan_fields(row: ScanRow) -> Fields:
    key = row.key
    values = (
        key.arch, key.compute_units, key.num_heads, key.num_key_heads, HEAD_DIM, key.is_varlen, key.use_initial_state,
        key.store_final_state, key.snapshot_dtype == "bf16", key.state_dtype == "bf16", key.total_chunks,
        key.max_seq_chunks,
    )  # fmt: skip
    return dict(zip(OPT.key, values, strict=True))


# ------------------------------------------------------------------------------------------------ paged decode


def _pa(arch: str, units: int, values: Mapping[str, str]) -> Explanation:
    fields: Fields = {
        "gfx": arch,
        "cu_num": units,
        **{name: _read(values, name, _integer, None) for name in ("B", "Hq", "Hkv")},
        **{name: _read(values, name, _integer, usual) for name, usual in (("D", 256), ("page", 16), ("QL", 1))},
        "window": _read(values, "window", int, 0),
        "query_dtype": values.get("query_dtype", "bf16"),
        "scale_mode": values.get("scale_mode", "tensor"),
        "v_packed": _read(values, "v_packed", _flag, True),
        "sink_dtype": values.get("sink_dtype", "none"),
    }
    nobody = Provenance("gdn-tune")
    asked = PA.parse({**fields, "budget": 1, "provenance": "asked"}, arch, {"asked": nobody})
    paths = [Path(entry).expanduser() for entry in env.settings().tables.split(os.pathsep) if entry.strip()]
    located = list(pa_tables.rows([pa_tables.PACKAGED, *paths]))
    budget = pa_tables.tuned_budget(asked.geometry)
    place: tuple[str, Choice, Provenance] | None = None
    for found in located:
        if found.row.geometry == asked.geometry and found.row.budget == budget:
            place = _name(found), {"budget": budget}, found.row.provenance
    rows = [(_name(found), _pa_fields(found.row)) for found in located]
    return _explanation("pa", PA, fields, asked, place, rows, ())


def _name(found: Located[Any]) -> str:
    try:
        file = found.file.relative_to(pa_tables.PACKAGED)
    except ValueError:
        file = found.file
    return f"{file.as_posix()} row {found.index}"


def _pa_fields(row: pa_tables.BudgetRow) -> Fields:
    geometry = row.geometry
    columns = {**pa_tables.COUNTS, **{name: name for name in (*pa_tables.TEXTS, "v_packed", "window")}}
    return {"gfx": geometry.arch, **{column: getattr(geometry, name) for column, name in columns.items()}}


# ------------------------------------------------------------------------------------------------ both


def _explanation(
    op: Op,
    form: TableFormat,
    fields: Fields,
    asked: Any,
    place: tuple[str, Choice, Provenance] | None,
    rows: list[tuple[str, Fields]],
    reasons: tuple[str, ...],
) -> Explanation:
    ruled, inputs = form.rule(asked)
    call = {name: fields[name] for name in form.key}
    if place is not None:
        where, choice, origin = place
        return Explanation(op, call, choice, "row", where, _origin(origin), ruled, inputs, (), reasons)
    ranked = []
    for where, row in rows:
        differ = [name for name in form.key if row[name] != call[name]]
        if "gfx" not in differ:
            gap = sum(abs(row[name] - call[name]) for name in differ if isinstance(call[name], int))
            text = f"{where}, which has {', '.join(f'{name}={row[name]}' for name in differ)}"
            ranked.append((len(differ), gap, text))
    nearest = tuple(text for *_, text in sorted(ranked, key=lambda each: each[:2])[:NEAREST])
    return Explanation(op, call, ruled, "rule", None, None, ruled, inputs, nearest, reasons)


def _origin(provenance: Provenance) -> dict[str, Any]:
    return {
        **{name: value for name, value in vars(provenance).items() if name != "details"},
        **dict(provenance.details),
    }


def _read(values: Mapping[str, str], name: str, read: Callable[[str], Any], default: Any) -> Any:
    if name not in values:
        if default is None:
            raise ValueError(f"shape: lacks {name}")
        return default
    try:
        return read(values[name])
    except ValueError as error:
        raise ValueError(f"shape: {name}: {error}") from error


def _integer(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"got {text!r}, expected a positive integer")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"got {text!r}, expected yes or no")
    return text == "yes"


def _dtype(text: str) -> str:
    if text not in ("bf16", "fp32"):
        raise ValueError(f"got {text!r}, expected bf16 or fp32")
    return text


def _lengths(text: str) -> list[int]:
    lengths: list[int] = []
    for item in text.split(","):
        length, times, count = item.partition("x")
        if not length.isdecimal() or (times and not count.isdecimal()):
            raise ValueError(f"shape: lens: got {item!r}, expected LENGTH or LENGTHxCOUNT")
        repeat = int(count) if times else 1
        if not 0 < repeat <= MAX_SEQS - len(lengths):
            raise ValueError(f"shape: lens: got {item!r}, expected 1 to {MAX_SEQS} sequences")
        lengths += [int(length)] * repeat
    return lengths


def _batch(text: str) -> list[int]:
    numbers = [_integer(part) for part in text.split(",")]
    if len(numbers) != 2 or numbers[0] > MAX_SEQS:
        raise ValueError(f"shape: dense: got {text!r}, expected B,T")
    return [numbers[1]] * numbers[0]
