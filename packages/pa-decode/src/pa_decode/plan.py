"""Plans: which workgroup takes which tiles of which sequence, on the device.

Everything that a graph freezes (capacity, partitions, window, query length) is a Python value; what the context lengths
decide is in two tensors that ``refresh`` writes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from gdn_runtime.errors import UnsupportedError, value_error

from .geometry import DecodeGeometry
from .layouts import check_seq_lens
from .planner import make_plan, partition_bound
from .schedule import PaDecodeSchedule
from .traits import is_single_tile, require_packed_k

QUERY_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """A plan of ``capacity`` slots per KV head for ``batch`` sequences.

    ``work_info`` int32 [capacity, 4] = sequence, first tile, end tile, ctx, zero where unused; ``reduce_info`` int32
    [batch, 2] = first slot, number of tasks. ``budget`` and ``max_partitions`` are what the plan was made with. A plan
    with window 0 serves every query length.
    """

    batch: int
    num_kv_heads: int
    budget: int
    max_partitions: int
    capacity: int
    window: int
    query_length: int
    work_info: Tensor
    reduce_info: Tensor
    write: PlanWriter = field(repr=False)

    @property
    def single_tile(self) -> bool:
        """Whether every task is one tile, whatever the lengths."""
        return is_single_tile(self.window, self.query_length, self.batch, self.max_partitions, self.capacity)

    def refresh(self, seq_lens: Tensor) -> None:
        """Write the tasks of other lengths, int32 [batch] on the plan's device, into the same tensors.

        On a GPU it launches one kernel on the current stream and waits for nothing.
        """
        self.write(self, check_seq_lens(seq_lens, batch=self.batch, device=self.work_info.device))

    def check(self, geometry: DecodeGeometry, *, budget: int | None = None, max_partitions: int | None = None) -> None:
        """ValueError unless the plan fits a call of this geometry and, where given, budget and partitions."""
        partitions = self.max_partitions
        if max_partitions is not None:
            partitions = partition_bound(max_partitions, geometry.window, geometry.query_length)
        wanted = {
            "batch": (self.batch, geometry.batch),
            "num_kv_heads": (self.num_kv_heads, geometry.num_kv_heads),
            "window": (self.window, geometry.window),
            "budget": (self.budget, self.budget if budget is None else budget),
            "max_partitions": (self.max_partitions, partitions),
        }
        if self.window:
            wanted["query_length"] = (self.query_length, geometry.query_length)
        for name, (own, asked) in wanted.items():
            if own != asked:
                raise value_error(f"{name} of the plan", own, f"{asked}, as in the call; make a plan for it")

    def workspace_shapes(self, geometry: DecodeGeometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of partial_out [Hkv, capacity, R, D], partial_max and partial_sum [Hkv, capacity, R]."""
        rows = (self.num_kv_heads, self.capacity, geometry.rows)
        return {
            "partial_out": ((*rows, geometry.head_dim), QUERY_DTYPES[geometry.query_dtype]),
            "partial_max": (rows, torch.float32),
            "partial_sum": (rows, torch.float32),
        }


PlanWriter: TypeAlias = Callable[[DecodePlan, Tensor], None]
"""Writes ``work_info`` and ``reduce_info`` of a plan for checked lengths."""


def write_on_host(plan: DecodePlan, seq_lens: Tensor) -> None:
    """The plan of CPU tensors, by the integer oracle."""
    made = make_plan(
        seq_lens.tolist(),
        capacity=plan.capacity,
        max_partitions=plan.max_partitions,
        window=plan.window,
        query_length=plan.query_length,
    )
    tasks = [(task.sequence, task.first_tile, task.end_tile, task.context) for task in made.tasks]
    plan.work_info.zero_()
    if tasks:
        plan.work_info[: len(tasks)] = torch.tensor(tasks, dtype=torch.int32)
    plan.reduce_info.copy_(torch.tensor(made.reduce, dtype=torch.int32))


def plan_decode(
    seq_lens: Tensor,
    geometry: DecodeGeometry,
    *,
    budget: int | None = None,
    tuned_budget: int | None = None,
    max_partitions: int | None = None,
    write: PlanWriter | None = None,
) -> DecodePlan:
    """A plan for lengths ``seq_lens`` (int32 [batch], query tokens included), on their device.

    ``budget``, ``tuned_budget`` and ``max_partitions`` as in ``PaDecodeSchedule.select``. ``write`` replaces the writer
    of the device: CPU tensors are planned on the host.

    NotImplementedError for an unpacked K, before anything is allocated; UnsupportedError if no kernel takes the
    problem or no planner runs on the device.
    """
    require_packed_k(geometry.trans_k)
    lengths = check_seq_lens(seq_lens, batch=geometry.batch)
    schedule = PaDecodeSchedule.select(
        geometry, budget=budget, tuned_budget=tuned_budget, max_partitions=max_partitions
    )
    if write is None:
        if lengths.device.type != "cpu":
            raise UnsupportedError("planner on device", got=lengths.device, supported=["cpu", "a writer of your own"])
        write = write_on_host
    plan = DecodePlan(
        batch=geometry.batch,
        num_kv_heads=geometry.num_kv_heads,
        budget=schedule.budget,
        max_partitions=schedule.max_partitions,
        capacity=schedule.capacity,
        window=geometry.window,
        query_length=geometry.query_length,
        work_info=torch.empty((schedule.capacity, 4), dtype=torch.int32, device=lengths.device),
        reduce_info=torch.empty((geometry.batch, 2), dtype=torch.int32, device=lengths.device),
        write=write,
    )
    write(plan, lengths)
    return plan
