"""What can be chosen for a call: every candidate of an op that has a kernel, the rule's choice first.

A config is the choice alone; with the call's ``Problem`` or geometry it gives the specs of the kernels (``specs_of``).
Whether a kernel exists, the ``check`` of its spec decides and nothing here; what tables may hold on NVIDIA,
``gdn_runtime.spec.config_refusal``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast, get_args

from gdn_runtime import rules, tables
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.rules import Problem
from gdn_runtime.spec import (
    BLOCK_V,
    PREPARE_MODES,
    SCAN_BLOCK_V,
    VSPLIT_BLOCK_V,
    FastConfig,
    FastPrefillSpec,
    FusedPrepareSpec,
    OptStateScanSpec,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareSpec,
    PrepareVariant,
    StateScanConfig,
    StateScanSpec,
    TPrepareSpec,
    VSplitScanSpec,
    config_refusal,
)
from pa_decode import DecodeGeometry, PaDecodeSchedule

Config = dict[str, Any]

NUM_WARPS = (1, 2, 4, 8)
NUM_STAGES = (1, 2, 3, 4)
"""Depths of the software pipeline of K5. The other kernels have no loop over memory, and one depth."""
SEGMENTS = (0, 16, 32, 64)
"""Chunks per segment of the fast path, 0 for whole sequences."""
BUDGETS = tuple(1 << power for power in range(7, 13))
"""Tasks over all KV heads, besides the default."""


@dataclass(frozen=True)
class Specs:
    """What a candidate runs: the stages that its op has, or the fast path in place of all of them."""

    prepare: PrepareSpec | FusedPrepareSpec | TPrepareSpec | None = None
    state_scan: StateScanSpec | OptStateScanSpec | VSplitScanSpec | None = None
    output: OutputSpec | None = None
    fast: FastPrefillSpec | None = None

    def kernels(self) -> tuple[Any, ...]:
        """The specs that are there, in the order in which they run."""
        return tuple(spec for spec in vars(self).values() if spec is not None)


def of_problem(op: str, problem: Problem) -> list[Config]:
    """Candidates of ``op``, "k5", "prepare" or "block", for a call of the GDN block.

    k5: ``block_v`` of `opt` on AMD; ``block_v``, ``num_warps`` and ``num_stages`` of the Triton kernel elsewhere.
    prepare: ``variant`` on AMD; ``mode``, ``num_warps`` and ``num_stages`` elsewhere. block: on AMD the ``route`` with
    what it leaves to choose ("staged": ``variant`` and ``block_v``; "tprime": ``block_v``), elsewhere the ``path``:
    "staged" with the three of K6, K1..K5 being the rule's, and on sm90 "fast" with ``p_in_scan`` and
    ``segment_chunks``.
    """
    amd = problem.arch.vendor == "amd"
    found: Iterable[Config]
    if op == "k5":
        found = ({"block_v": width} for width in SCAN_BLOCK_V) if amd else _grid(NUM_STAGES, block_v=BLOCK_V)
    elif op == "prepare":
        found = ({"variant": name} for name in get_args(PrepareVariant)) if amd else _grid((1,), mode=PREPARE_MODES)
    elif op == "block":
        found = _amd_routes() if amd else _paths()
    else:
        raise ValueError(f"op: got {op!r}, expected k5, prepare or block")
    return _default_first(default(op, problem), (config for config in found if is_legal(op, problem, config)))


def of_geometry(geometry: DecodeGeometry) -> list[Config]:
    """Budgets of a decode problem: the default, then ``BUDGETS``; of those that give plans of equal size, the first."""
    budgets = [PaDecodeSchedule.select(geometry).budget, *BUDGETS]
    by_capacity: dict[int, int] = {}
    for budget in budgets:
        by_capacity.setdefault(PaDecodeSchedule.select(geometry, budget=budget).capacity, budget)
    return [{"budget": budget} for budget in by_capacity.values()]


def default(op: str, problem: Problem) -> Config:
    """What the rules choose, whatever tables say."""
    if problem.arch.vendor == "amd":
        if op == "k5":
            return {"block_v": _rule_block_v(problem)}
        variant = rules.prepare_variant(problem)[0]
        if op == "prepare":
            return {"variant": variant}
        width = rules.tprime_block_v(problem)[0] if rules.tprime_refusal(problem) is None else None
        if width is not None:
            return {"route": "tprime", "block_v": width}
        return {"route": "staged", "variant": variant, "block_v": _rule_block_v(problem)}
    if op == "k5":
        return asdict(rules.state_scan_config(problem)[0])
    if op == "prepare":
        return asdict(rules.prepare_config(problem)[0])
    if rules.fast_refusal(problem, _triton_version()) is None:
        return {"path": "fast", **asdict(rules.fast_config(problem)[0])}
    return {"path": "staged", **asdict(rules.output_config(problem)[0])}


def specs_of(op: str, problem: Problem, config: Config) -> Specs:
    """The specs of a candidate. Raises UnsupportedError for one without a kernel."""
    specs = _amd_specs(op, problem, config) if problem.arch.vendor == "amd" else _triton_specs(op, problem, config)
    for spec in specs.kernels():
        spec.check()
    return specs


def is_legal(op: str, problem: Problem, config: Config) -> bool:
    """Whether there is a kernel for a candidate, and on NVIDIA a table may hold it."""
    try:
        specs = specs_of(op, problem, config)
    except UnsupportedError:
        return False
    tuned: dict[str, PrepareSpec | StateScanSpec | OutputSpec | None] = {}
    if problem.arch.vendor == "nvidia":
        tuned = {"prepare": specs.prepare, "k5": specs.state_scan, "block": specs.output}  # type: ignore[dict-item]
    spec = tuned.get(op)
    return spec is None or config_refusal(spec) is None


def _amd_specs(op: str, problem: Problem, config: Config) -> Specs:
    rules.check_code_objects(problem, "flydsl")
    rounding = rules.opt_rounding(problem.arch.name, block=True)
    if op == "k5":
        return Specs(state_scan=rules.opt_spec(problem, config["block_v"], rounding))
    if op == "prepare":
        return Specs(prepare=rules.fused_prepare_spec(problem, config["variant"]))
    output = rules.output_spec(problem, rules.output_config(problem)[0])
    if config["route"] == "tprime":
        scan = rules.vsplit_spec(problem, config["block_v"], rounding)
        return Specs(rules.tprime_prepare_spec(problem), scan, output)
    prepare = rules.fused_prepare_spec(problem, config["variant"])
    return Specs(prepare, rules.opt_spec(problem, config["block_v"], rounding), output)


def _triton_specs(op: str, problem: Problem, config: Config) -> Specs:
    if op == "k5":
        return Specs(state_scan=rules.state_scan_spec(problem, StateScanConfig(**config)))
    if op == "prepare":
        return Specs(prepare=rules.prepare_spec(problem, PrepareConfig(**config)))
    rest = {name: value for name, value in config.items() if name != "path"}
    if config["path"] == "fast":
        return Specs(fast=_fast_spec(problem, FastConfig(**rest)))
    prepare = rules.prepare_spec(problem, rules.prepare_config(problem)[0])
    scan = rules.state_scan_spec(problem, rules.state_scan_config(problem)[0])
    return Specs(prepare, scan, rules.output_spec(problem, OutputConfig(**rest)))


def _fast_spec(problem: Problem, config: FastConfig) -> FastPrefillSpec:
    refusal = rules.fast_refusal(problem, _triton_version()) or config.refusal(
        num_heads=problem.num_heads, num_seqs=problem.num_seqs, max_seq_chunks=problem.max_seq_chunks
    )
    if refusal is not None:
        raise UnsupportedError("fast path", got=refusal, supported=["the stages"])
    return rules.fast_prefill_spec(problem, config)


def _grid(depths: tuple[int, ...], **first: tuple[Any, ...]) -> Iterator[Config]:
    ((name, values),) = first.items()
    for value, warps, stages in itertools.product(values, NUM_WARPS, depths):
        yield {name: value, "num_warps": warps, "num_stages": stages}


def _amd_routes() -> Iterator[Config]:
    for variant, width in itertools.product(get_args(PrepareVariant), SCAN_BLOCK_V):
        yield {"route": "staged", "variant": variant, "block_v": width}
    for width in VSPLIT_BLOCK_V:
        yield {"route": "tprime", "block_v": width}


def _paths() -> Iterator[Config]:
    for config in _grid((1,), block_v=BLOCK_V):
        yield {"path": "staged", **config}
    for in_scan, segment in itertools.product((False, True), SEGMENTS):
        yield {"path": "fast", "p_in_scan": in_scan, "segment_chunks": segment}


def _default_first(first: Config, found: Iterable[Config]) -> list[Config]:
    return [first, *(config for config in found if config != first)]


def _rule_block_v(problem: Problem) -> int:
    return tables.rule_block_v(
        "gdn",
        arch=problem.arch.name,
        compute_units=problem.compute_units,
        num_heads=problem.num_heads,
        total_chunks=problem.total_chunks,
        max_seq_chunks=problem.max_seq_chunks,
    )[0]


def _triton_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


def small_heads(problem: Problem) -> Problem:
    """``problem`` with as few heads as a workgroup of every kernel has work for, and the same ratio of them."""
    ratio = problem.num_heads // problem.num_key_heads
    key_heads = -(-4 // ratio)
    return replace(problem, num_heads=ratio * key_heads, num_key_heads=key_heads)


def of_call(op: str, call: Problem | DecodeGeometry) -> list[Config]:
    """Candidates of ``op`` for either kind of call."""
    return of_geometry(cast(DecodeGeometry, call)) if op == "pa" else of_problem(op, cast(Problem, call))
