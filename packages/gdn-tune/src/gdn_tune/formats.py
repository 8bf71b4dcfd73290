"""The kinds of tuned tables: their columns, which of them are the key, what a row must satisfy, and the rule that
serves a call for which there is no row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gdn_runtime import rules, tables
from gdn_runtime.arch import parse_arch
from gdn_runtime.rules import Problem, opt_rounding, opt_spec, vk_spec, vk_tile
from gdn_runtime.spec import AMD_ARCHS, CHUNK, HEAD_DIM, TUNED_ARCHS, OptStateScanSpec, VkStateScanSpec
from gdn_runtime.tables import Provenance, ScanRow
from pa_decode import tables as pa_tables
from pa_decode.schedule import PaDecodeSchedule, budget_by_rule
from pa_decode.spec import FP8_ARCHS

from .records import Op
from .tablefile import Fields

Choice = dict[str, Any]


@dataclass(frozen=True)
class TableFormat:
    """A kind of table.

    ``columns`` in the order of a file, without ``provenance``; of these ``key`` decides whether a row matches a call,
    ``choice`` is what it says (``parse`` knows which of them a row must have), and the rest describes what was timed.
    ``parse`` is what reads a row in the runtime: it raises ValueError. ``faults`` are further reasons why a parsed row
    cannot be right. ``rule`` gives the choice without the row, and its inputs in words. ``op``: whose samples become
    such rows, None for a list of shapes to compile that no call looks up. ``assumes``: facts that have no column and
    hold for every row.
    """

    kernel: str
    op: Op | None
    archs: tuple[str, ...]
    columns: tuple[str, ...]
    key: tuple[str, ...]
    choice: tuple[str, ...]
    parse: Callable[[Mapping[str, object], str, Mapping[str, Provenance]], Any]
    faults: Callable[[Any], Iterator[str]]
    rule: Callable[[Any], tuple[Choice, str]]
    assumes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether rows have a time."""
        return "us" in self.columns

    @property
    def facts(self) -> tuple[str, ...]:
        """Columns that the facts of a sample fill."""
        return tuple(name for name in self.columns if name not in ("arch", "gfx", "cu_num", "us", *self.choice))

    def key_of(self, fields: Fields) -> tuple[Any, ...]:
        """What makes two rows rows of the same call."""
        return tuple(fields[name] for name in self.key)

    def choice_of(self, fields: Fields) -> Choice:
        """What a row says."""
        return {name: fields[name] for name in self.choice if name in fields}


def of_kernel(kernel: str) -> TableFormat:
    """The format of tables of ``kernel``. Raises ValueError if nothing reads such tables."""
    for found in FORMATS:
        if found.kernel == kernel:
            return found
    raise ValueError(f"kernel: got {kernel!r}, expected one of {', '.join(each.kernel for each in FORMATS)}")


def of_op(op: Op, arch: str) -> TableFormat | None:
    """The format of what samples of ``op`` on ``arch`` become; None where no call looks a row up."""
    return next((found for found in FORMATS if found.op == op and arch in found.archs), None)


def choice_text(choice: Mapping[str, Any]) -> str:
    """A choice in words."""
    return ", ".join(f"{name}={value}" for name, value in choice.items())


# ------------------------------------------------------------------------------------------------ K5 opt


def problem_of(row: ScanRow) -> Problem:
    """The call of the block that a row of K5 `opt` is for."""
    key = row.key
    return Problem(
        arch=parse_arch(key.arch),
        compute_units=key.compute_units,
        num_heads=key.num_heads,
        num_key_heads=key.num_key_heads,
        num_seqs=row.num_seqs or 1,
        total_chunks=key.total_chunks,
        max_seq_chunks=key.max_seq_chunks,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype=key.state_dtype,
        snapshot_dtype=key.snapshot_dtype,
        is_varlen=key.is_varlen,
        use_initial_state=key.use_initial_state,
        store_final_state=key.store_final_state,
    )


def _opt_faults(row: ScanRow) -> Iterator[str]:
    try:
        opt_spec(problem_of(row), row.block_v, opt_rounding(row.key.arch, block=True)).check()
    except ValueError as error:
        yield str(error)
    total, longest, tokens, num_seqs = row.key.total_chunks, row.key.max_seq_chunks, row.num_tokens, row.num_seqs
    if num_seqs is not None and longest * num_seqs < total:
        yield f"total_chunks: got {total}, expected at most {num_seqs} sequences of max_seq_chunks={longest}"
    if tokens is not None and num_seqs is not None and row.key.is_varlen:
        least, most = -(-tokens // CHUNK), (tokens + (CHUNK - 1) * min(num_seqs, tokens)) // CHUNK
        if not least <= total <= most:
            yield f"total_chunks: got {total}, but {tokens} tokens in {num_seqs} sequences have {least} to {most}"


def _opt_rule(row: ScanRow) -> tuple[Choice, str]:
    key = row.key
    block_v, inputs = tables.rule_block_v(
        "gdn",
        arch=key.arch,
        compute_units=key.compute_units,
        num_heads=key.num_heads,
        total_chunks=key.total_chunks,
        max_seq_chunks=key.max_seq_chunks,
    )
    return {"block_v": block_v}, inputs


_OPT_KEY = (
    "gfx", "cu_num", "H", "Hg", "V", "is_varlen", "use_h0", "store_fs", "snapshot_bf16", "state_bf16",
    "total_chunks", "max_seq_chunks",
)  # fmt: skip

OPT = TableFormat(
    kernel=OptStateScanSpec.kernel,
    op="k5",
    archs=AMD_ARCHS,
    columns=(*_OPT_KEY[:10], "T_flat", "N", *_OPT_KEY[10:], "block_v", "us"),
    key=_OPT_KEY,
    choice=("block_v",),
    parse=tables.parse_row,
    faults=_opt_faults,
    rule=_opt_rule,
    assumes={"gated": True},
)


# ------------------------------------------------------------------------------------------------ K5 vk

_VK_COUNTS = ("H", "Hg", "T_flat", "N", "block_v")
_VK_FLAGS = ("use_g", "use_gk", "use_h0", "store_fs", "save_vn", "is_varlen")
_VK_FIXED = {"dtype": "bf16", "K": HEAD_DIM, "V": HEAD_DIM, "BT": CHUNK, "wu_contig": True}
_VK_COLUMNS = (
    "gfx", "dtype", "K", "V", "BT", "H", "Hg", "T_flat", "N", "use_g", "use_gk", "use_h0", "store_fs", "save_vn",
    "is_varlen", "wu_contig", "block_v", "us",
)  # fmt: skip


@dataclass(frozen=True)
class VkRow:
    """``block_v`` of K5 `vk` for a shape; ``problem`` is the shape."""

    problem: Problem
    block_v: int
    provenance: Provenance


def _parse_vk(fields: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]) -> VkRow:
    required = set(_VK_COLUMNS) - {"us"}
    if not required <= set(fields) <= required | {"us", "provenance"}:
        raise ValueError(f"columns: got {', '.join(sorted(fields))}, expected {', '.join(sorted(required))}")
    fixed: dict[str, object] = {"gfx": arch, **_VK_FIXED}
    for column, expected in fixed.items():
        if fields[column] != expected:
            raise ValueError(f"{column}: got {fields[column]!r}, expected {expected!r}")
    counts = {name: tables.count(fields, name) for name in _VK_COUNTS}
    flags = {name: tables.flag(fields, name) for name in _VK_FLAGS}
    name = fields.get("provenance")
    if name is not None and (not isinstance(name, str) or name not in provenances):
        raise ValueError(f"provenance: got {name!r}, expected one of {', '.join(provenances) or 'none'}")
    facts = parse_arch(arch)
    chunks = -(-counts["T_flat"] // CHUNK)
    problem = Problem(
        arch=facts,
        compute_units=facts.nominal_compute_units or 1,
        num_heads=counts["H"],
        num_key_heads=counts["Hg"],
        num_seqs=counts["N"],
        total_chunks=chunks,
        max_seq_chunks=chunks,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype="fp32",
        snapshot_dtype="bf16",
        is_varlen=flags["is_varlen"],
        use_g=flags["use_g"],
        use_gk=flags["use_gk"],
        use_initial_state=flags["use_h0"],
        store_final_state=flags["store_fs"],
        save_new_value=flags["save_vn"],
        g_head_major=False,
    )
    return VkRow(problem, counts["block_v"], tables.rows.UNKNOWN if name is None else provenances[name])


def _vk_faults(row: VkRow) -> Iterator[str]:
    try:
        vk_spec(row.problem, row.block_v).check()
    except ValueError as error:
        yield str(error)


def _vk_rule(row: VkRow) -> tuple[Choice, str]:
    block_v, inputs = vk_tile(row.problem)
    return {"block_v": block_v}, inputs


VK = TableFormat(
    kernel=VkStateScanSpec.kernel,
    op=None,
    archs=("gfx950",),
    columns=_VK_COLUMNS,
    key=tuple(name for name in _VK_COLUMNS if name not in ("block_v", "us")),
    choice=("block_v",),
    parse=_parse_vk,
    faults=_vk_faults,
    rule=_vk_rule,
)


# ------------------------------------------------------------------------------------------------ paged decode


def _pa_faults(row: pa_tables.BudgetRow) -> Iterator[str]:
    try:
        PaDecodeSchedule.select(row.geometry, tuned_budget=row.budget)
    except (ValueError, TypeError, NotImplementedError) as error:
        yield str(error)


def _pa_rule(row: pa_tables.BudgetRow) -> tuple[Choice, str]:
    geometry = row.geometry
    budget = budget_by_rule(geometry)
    kind = "one task" if budget == geometry.compute_units else "two tasks"
    return {"budget": budget}, f"{kind} per compute unit on {geometry.compute_units} compute units"


_PA_KEY = (
    "gfx", "cu_num", "B", "Hq", "Hkv", "D", "page", "QL", "query_dtype", "scale_mode", "v_packed", "sink_dtype",
    "window",
)  # fmt: skip

PA = TableFormat(
    kernel=pa_tables.KERNEL,
    op="pa",
    archs=tuple(FP8_ARCHS),
    columns=(*_PA_KEY, "budget"),
    key=_PA_KEY,
    choice=("budget",),
    parse=pa_tables.parse_row,
    faults=_pa_faults,
    rule=_pa_rule,
)

# ------------------------------------------------------------------------------------------------ NVIDIA


def launch_problem(kernel: tables.LaunchKernel, fields: Fields) -> Problem:
    """The call that the key columns of a table of launch configurations describe. What they lack changes nothing for
    ``kernel``."""
    total = fields["total_chunks"]
    return Problem(
        arch=parse_arch(fields["gfx"]),
        compute_units=fields["cu_num"],
        num_heads=fields["H"],
        num_key_heads=fields["Hg"],
        num_seqs=fields.get("N") or 1,
        total_chunks=total,
        max_seq_chunks=fields.get("max_seq_chunks") or total,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype="bf16" if fields.get("state_bf16") else "fp32",
        snapshot_dtype="bf16" if fields.get("snapshot_bf16", True) else "fp32",
        is_varlen=fields["is_varlen"],
        use_g=fields.get("gated", True),
        use_initial_state=fields.get("use_h0", True),
        store_final_state=fields.get("store_fs", True),
    )


@dataclass(frozen=True)
class LaunchTableRow:
    """A call whose launch configuration a table may name, and the row, if it is that of one."""

    problem: Problem
    row: tables.LaunchRow | None = None

    @property
    def provenance(self) -> Provenance:
        """Where the row is from."""
        return tables.rows.UNKNOWN if self.row is None else self.row.provenance


def _launch_format(kernel: tables.LaunchKernel, op: Op) -> TableFormat:
    described = ("T_flat",) if "N" in tables.KEY_COLUMNS[kernel] else ("T_flat", "N")

    def parse(fields: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]) -> LaunchTableRow:
        row = tables.parse_launch_row(kernel, fields, arch, provenances)
        return LaunchTableRow(launch_problem(kernel, dict(fields)), row)

    def faults(row: LaunchTableRow) -> Iterator[str]:
        problem = row.problem
        if problem.max_seq_chunks * problem.num_seqs < problem.total_chunks:
            most = f"{problem.num_seqs} sequences of max_seq_chunks={problem.max_seq_chunks}"
            yield f"total_chunks: got {problem.total_chunks}, expected at most {most}"

    def rule(row: LaunchTableRow) -> tuple[Choice, str]:
        problem = row.problem
        if kernel == "prepare":
            prepare, why = rules.prepare_config(problem)
            return tables.config_fields(prepare, kernel), why
        if kernel == "state_scan":
            scan, why = rules.state_scan_config(problem)
            return tables.config_fields(scan, kernel), why
        refusal = rules.fast_refusal(problem, rules.FAST_TRITON)
        if refusal is None:
            fast, why = rules.fast_config(problem)
            return tables.config_fields(fast, kernel), why
        return tables.config_fields(rules.output_config(problem)[0], kernel), f"not the fast path: {refusal}"

    key = (*tables.KEY_COLUMNS[kernel][:4], "V", *tables.KEY_COLUMNS[kernel][4:])
    return TableFormat(
        kernel=kernel,
        op=op,
        archs=TUNED_ARCHS,
        columns=(*key, *described, *tables.CONFIG_COLUMNS[kernel], "us"),
        key=key,
        choice=tables.CONFIG_COLUMNS[kernel],
        parse=parse,
        faults=faults,
        rule=rule,
    )


LAUNCHES = (_launch_format("state_scan", "k5"), _launch_format("prepare", "prepare"), _launch_format("block", "block"))
"""Launch configurations of the Triton and Gluon kernels."""

FORMATS: tuple[TableFormat, ...] = (OPT, VK, PA, *LAUNCHES)
"""Every kind of table that something reads."""
