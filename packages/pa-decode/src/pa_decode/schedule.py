"""Which kernels serve a decode problem, and how many tasks it is cut into. Pure functions of the geometry."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from gdn_runtime.arch import parse_arch

from .geometry import DecodeGeometry, check_integer
from .planner import default_budget, partition_bound, plan_capacity
from .spec import PIPE_ARCHS, AttentionKernel, AttentionSpec, PlannerSpec, ReduceSpec
from .traits import d256_pipe, is_single_tile, power_of_two_at_least, require_packed_k

BudgetSource = Literal["explicit", "tuned", "default"]

Spec = TypeVar("Spec", AttentionSpec, ReduceSpec, PlannerSpec)
_specs: dict[Any, Any] = {}


@dataclass(frozen=True)
class PaDecodeSchedule:
    """The specs of a problem and the size of its plans.

    ``budget`` is the number of tasks over all KV heads that was asked for, ``capacity`` the slots of a plan per KV
    head, ``max_partitions`` the most tasks of one sequence. Batch, compute units and budget reach no spec but through
    ``attention.single_tile`` and the powers of two of ``planner`` and ``reduce``.
    """

    attention: AttentionSpec
    reduce: ReduceSpec
    planner: PlannerSpec
    budget: int
    budget_source: BudgetSource
    max_partitions: int
    capacity: int

    @staticmethod
    def select(
        geometry: DecodeGeometry,
        *,
        budget: int | None = None,
        tuned_budget: int | None = None,
        max_partitions: int | None = None,
        kernel: str = "auto",
    ) -> PaDecodeSchedule:
        """The schedule of a problem; one object for equal arguments.

        ``budget`` goes before ``tuned_budget``, that before the default: as many tasks as compute units where the D256
        pipe or the Hopper kernel runs, twice as many elsewhere. ``max_partitions`` is 1 to the compute units, which is
        the default. ``kernel`` is "auto" or a name of ``spec.AttentionKernel``.

        NotImplementedError for an unpacked K; UnsupportedError if no kernel, or not this one, takes the problem.
        """
        require_packed_k(geometry.trans_k)
        for name, value in (("budget", budget), ("tuned_budget", tuned_budget)):
            if value is not None:
                check_integer(name, value, 1)
        if max_partitions is not None:
            check_integer("max_partitions", max_partitions, 1, geometry.compute_units)
        return _select(geometry, budget, tuned_budget, max_partitions, kernel)


@functools.lru_cache(maxsize=1024)
def _select(
    geometry: DecodeGeometry, explicit: int | None, tuned: int | None, max_partitions: int | None, kernel: str
) -> PaDecodeSchedule:
    budget, source = _budget(geometry, explicit, tuned)
    partitions = partition_bound(max_partitions or geometry.compute_units, geometry.window, geometry.query_length)
    capacity = plan_capacity(geometry.batch, geometry.num_kv_heads, budget, partitions)
    single_tile = is_single_tile(geometry.window, geometry.query_length, geometry.batch, partitions, capacity)
    attention, reduce = specs_of(geometry, single_tile=single_tile, max_partitions=partitions, kernel=kernel)
    return PaDecodeSchedule(
        attention, reduce, planner_of(attention.arch, geometry.batch), budget, source, partitions, capacity
    )


@functools.lru_cache(maxsize=1024)
def specs_of(
    geometry: DecodeGeometry, *, single_tile: bool, max_partitions: int, kernel: str = "auto"
) -> tuple[AttentionSpec, ReduceSpec]:
    """The kernels of a call over a plan of which these two facts are known. UnsupportedError if there are none."""
    attention = _attention(parse_arch(geometry.arch).name, geometry, single_tile, kernel)
    reduce = ReduceSpec(
        attention.arch,
        geometry.head_dim,
        geometry.group_size,
        geometry.query_length,
        geometry.query_dtype,
        geometry.sink_dtype,
        power_of_two_at_least(max_partitions),
    )
    attention.check()
    reduce.check()
    return _one(attention), _one(reduce)


@functools.lru_cache(maxsize=1024)
def planner_of(arch: str, batch: int) -> PlannerSpec:
    """The planner of a batch. UnsupportedError for an architecture without one."""
    planner = PlannerSpec.of(parse_arch(arch).name, batch)
    planner.check()
    return _one(planner)


def budget_by_rule(geometry: DecodeGeometry) -> int:
    """The budget of a problem that nobody gives one: see ``PaDecodeSchedule.select``."""
    arch = parse_arch(geometry.arch).name
    one_each = geometry.is_pipe or _attention(arch, geometry, False, "auto").kernel == "hopper"
    return default_budget(geometry.compute_units, pipe=one_each)


def _budget(geometry: DecodeGeometry, explicit: int | None, tuned: int | None) -> tuple[int, BudgetSource]:
    if explicit is not None:
        return explicit, "explicit"
    if tuned is not None:
        return tuned, "tuned"
    return budget_by_rule(geometry), "default"


def _attention(arch: str, geometry: DecodeGeometry, single_tile: bool, kernel: str) -> AttentionSpec:
    if kernel == "auto":
        # The kernels of these shapes run off gfx950 too: there they are the generic path, with the budget of that path.
        shape = geometry.head_dim, geometry.page_size, geometry.query_length, geometry.group_size, geometry.trans_k
        taken = d256_pipe(True, *shape)
        kernel = next((name for name, archs in PIPE_ARCHS.items() if taken and arch in archs), "attention")
    return AttentionSpec(
        arch=arch,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        group_size=geometry.group_size,
        query_length=geometry.query_length,
        query_dtype=geometry.query_dtype,
        scale_mode=geometry.scale_mode,
        v_packed=geometry.v_packed,
        windowed=geometry.window > 0,
        single_tile=single_tile,
        kernel=cast(AttentionKernel, kernel),  # check() says if it is none
        trans_k=geometry.trans_k,
    )


def _one(spec: Spec) -> Spec:
    """One object for equal specs: loaded kernels are found by identity."""
    return cast(Spec, _specs.setdefault(spec, spec))
