"""Paged decode for the tuner: calls with a budget over plans of their own, and budgets ranked without a card."""

from __future__ import annotations

import functools
import heapq
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pa_decode import DecodeGeometry, PaDecodeSchedule, make_workspace, pa_decode, plan_decode
from pa_decode.planner import make_plan

from .bench.decode import LESS, arguments, count_tile, decode_inputs, error_of, trace_tiles
from .bench.pa import TOLERANCE
from .calls import DecodeCase
from .workload import Outputs


class DecodeWorkload:
    """Inputs of ``case`` on ``device``. A choice is a budget, what is right is what the default budget gives."""

    def __init__(self, case: DecodeCase, geometry: DecodeGeometry, backend: str, device: torch.device) -> None:
        self.geometry, self.backend = geometry, backend
        self.inputs = decode_inputs(case, device, 0, geometry.arch)
        self._plans: dict[int, Any] = {}

    def copy(self) -> DecodeWorkload:
        """The same inputs in other memory, with plans of their own."""
        other = object.__new__(DecodeWorkload)
        other.geometry, other.backend, other._plans = self.geometry, self.backend, {}
        tensors = {field.name: getattr(self.inputs, field.name) for field in fields(self.inputs)}
        cloned: dict[str, Any] = {name: value.clone() for name, value in tensors.items() if isinstance(value, Tensor)}
        other.inputs = replace(self.inputs, **cloned)
        return other

    @property
    def bytes(self) -> int:
        """Of the inputs."""
        tensors = [getattr(self.inputs, field.name) for field in fields(self.inputs)]
        return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))

    def outputs(self) -> Outputs:
        """An output that holds NaN."""
        return {"out": torch.full_like(self.inputs.query, float("nan"))}

    def expected(self) -> Outputs:
        """What the default budget gives. Raises ValueError if that is not what the oracle gives."""
        found = self.outputs()
        self.run(PaDecodeSchedule.select(self.geometry).budget, found)
        error = error_of(self.inputs, found["out"])
        if not error <= TOLERANCE:
            raise ValueError(f"default budget: got an error of {error:.3g}, expected at most {TOLERANCE}")
        return found

    def run(self, choice: int, out: Outputs) -> None:
        """A call with a budget of ``choice`` tasks; plan and workspace are made at the first one."""
        if choice not in self._plans:
            planner = "reference" if self.backend == "emulate" else self.backend
            plan = plan_decode(self.inputs.seq_lens, self.geometry, budget=choice, backend=planner)
            self._plans[choice] = plan, make_workspace(plan, self.geometry)
        plan, workspace = self._plans[choice]
        arch = self.geometry.arch if self.backend == "emulate" else None
        given = {**arguments(self.inputs), "backend": self.backend, "arch": arch}
        pa_decode(**given, plan=plan, workspace=workspace, out=out["out"])


def modelled(case: DecodeCase, geometry: DecodeGeometry, budget: int) -> tuple[float, dict[str, float]]:
    """Cycles until the last workgroup of the attention kernel ends, and the counters of a tile.

    The tasks of the plan start in the order of their slots, each where a compute unit is free first: one at a time on a
    unit where the D256 pipe runs, two elsewhere. A task takes the model's cycles of its tiles, and those that are spent
    besides them. The reducer is left out.
    """
    schedule = PaDecodeSchedule.select(geometry, budget=budget)
    plan = make_plan(
        [case.context] * case.batch,
        capacity=schedule.capacity,
        max_partitions=schedule.max_partitions,
        window=geometry.window,
        query_length=geometry.query_length,
    )
    # Batch and context change no kernel but by single_tile.
    tile, around, counters = _tile(replace(case, id="", batch=1, context=0), geometry.arch)
    free = [0.0] * (geometry.compute_units * (1 if geometry.is_pipe else 2))
    for task in plan.tasks * geometry.num_kv_heads:
        start = heapq.heappop(free)
        heapq.heappush(free, start + around + tile * (task.end_tile - task.first_tile))
    return max(free), counters


@functools.cache
def _tile(case: DecodeCase, arch: str) -> tuple[float, float, dict[str, float]]:
    """Cycles of a steady tile, cycles of a task besides its tiles, counters of a tile."""
    cycles, counters = count_tile(case, arch)
    return cycles, max(0.0, trace_tiles(case, arch, LESS)[0] - LESS * cycles), counters
