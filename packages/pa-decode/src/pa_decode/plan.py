"""Plans: which workgroup takes which tiles of which sequence, on the device; and the scratch memory of their calls.

Everything that a graph freezes (capacity, partitions, window, query length) is a Python value; what the context lengths
decide is in two tensors that ``refresh`` writes again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gdn_runtime.codeobject.source import capturing
from gdn_runtime.errors import CaptureError, type_error, value_error
from gdn_runtime.ops.checks import check_apart
from gdn_runtime.ops.library import register, traced
from gdn_runtime.spec import Backend

from .geometry import DecodeGeometry
from .launch import kernels
from .layouts import PACK, check_seq_lens
from .planner import make_plan, partition_bound
from .schedule import PaDecodeSchedule, planner_of
from .select import choose_target
from .spec import PlannerSpec
from .tables import tuned_budget as budget_of_table
from .traits import is_single_tile, require_packed_k

PLAN_NUMBERS = ("batch", "num_kv_heads", "budget", "max_partitions", "capacity", "window", "query_length")
"""The fields of a plan that are Python integers."""

MAX_WARM = 256
"""Kinds of calls, and caches (one per layer), that a plan knows."""
QUERY_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """A plan of ``capacity`` slots per KV head for ``batch`` sequences.

    ``work_info`` int32 [capacity, 4] = sequence, first tile, end tile, ctx, zero where unused; ``reduce_info`` int32
    [batch, 2] = first slot, number of tasks. ``budget`` and ``max_partitions`` are what the plan was made with. A plan
    with window 0 serves every query length. ``planner`` writes the tasks, on ``backend``; on "reference" the host does.
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
    backend: Backend
    planner: PlannerSpec = field(repr=False)
    warm: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # a copy has its own
    """What the first call of a kind over this plan worked out, for the others: see ops.warm."""
    seen: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    """The last call with each cache, by identity."""

    @property
    def single_tile(self) -> bool:
        """Whether every task is one tile, whatever the lengths."""
        return is_single_tile(self.window, self.query_length, self.batch, self.max_partitions, self.capacity)

    def numbers(self) -> list[int]:
        """The fields ``PLAN_NUMBERS``, for an op."""
        return [getattr(self, name) for name in PLAN_NUMBERS]

    @staticmethod
    def keep(known: dict[Any, Any], key: Any, value: Any) -> None:
        """Put ``value`` into ``known``, which holds so many and starts anew then."""
        if len(known) >= MAX_WARM:
            known.clear()
        known[key] = value

    def refresh(self, seq_lens: Tensor) -> None:
        """Write the tasks of other lengths, int32 [batch] on the plan's device, into the same tensors.

        It launches one kernel on the current stream and waits for nothing, unless the plan is of the reference.
        TypeError or ValueError for other lengths and for those in the memory of the plan, before anything is written.
        """
        check_seq_lens(seq_lens, batch=self.batch, device=self.work_info.device)
        write = _write_op if traced() else _write
        write(
            seq_lens,
            self.work_info,
            self.reduce_info,
            self.max_partitions,
            self.window,
            self.query_length,
            self.backend,
            self.planner.arch,
        )

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
        return workspace_shapes(self.capacity, geometry)


def _write(
    seq_lens: Tensor,
    work_info: Tensor,
    reduce_info: Tensor,
    max_partitions: int,
    window: int,
    query_length: int,
    backend: str,
    arch: str,
) -> None:
    """pa_decode::write_plan, for lengths of the right form: by the planner kernel, or on the host."""
    check_apart("seq_lens", seq_lens, {"work_info of the plan": work_info, "reduce_info of the plan": reduce_info})
    batch, capacity = seq_lens.shape[0], work_info.shape[0]
    if backend != "reference":
        spec = planner_of(arch, batch)
        numbers = batch, capacity, max_partitions, window, query_length
        kernel = kernels(cast(Backend, backend))(spec, seq_lens.device)
        kernel(spec.grid(), (seq_lens, work_info, reduce_info, *numbers))
        return
    if seq_lens.device.type != "cpu" and capturing():
        raise CaptureError("planning on the host", advice="plan with a backend that has kernels")
    made = make_plan(
        seq_lens.tolist(),
        capacity=capacity,
        max_partitions=max_partitions,
        window=window,
        query_length=query_length,
    )
    tasks = [(task.sequence, task.first_tile, task.end_tile, task.context) for task in made.tasks]
    work_info.zero_()
    if tasks:
        work_info[: len(tasks)] = torch.tensor(tasks, dtype=torch.int32)
    reduce_info.copy_(torch.tensor(made.reduce, dtype=torch.int32))


_write_op = register("write_plan", _write, ("work_info", "reduce_info"), namespace="pa_decode")


def plan_decode(
    seq_lens: Tensor,
    geometry: DecodeGeometry,
    *,
    budget: int | None = None,
    tuned_budget: int | None = None,
    max_partitions: int | None = None,
    backend: str = "auto",
) -> DecodePlan:
    """A plan for lengths ``seq_lens`` (int32 [batch], query tokens included), on their device.

    ``budget``, ``tuned_budget`` and ``max_partitions`` as in ``PaDecodeSchedule.select``; without ``tuned_budget`` the
    tables are asked. ``backend`` as in ``pa_decode``: "reference", the default on a CPU, plans on the host and so waits
    for a GPU; all others launch the planner kernel and wait for nothing.

    NotImplementedError for an unpacked K, before anything is allocated; UnsupportedError if no kernel takes the
    problem or the backend does not run on the device; CaptureError while a stream is being captured; what loading a
    kernel raises.
    """
    require_packed_k(geometry.trans_k)
    lengths = check_seq_lens(seq_lens, batch=geometry.batch)
    target = choose_target(lengths.device, backend, geometry.arch, fp8=geometry.fp8)
    if tuned_budget is None:
        tuned_budget = budget_of_table(geometry)
    schedule = PaDecodeSchedule.select(
        geometry, budget=budget, tuned_budget=tuned_budget, max_partitions=max_partitions
    )
    plan = new_plan(schedule, geometry, lengths.device, target.backend)
    plan.refresh(lengths)
    return plan


def new_plan(
    schedule: PaDecodeSchedule, geometry: DecodeGeometry, device: torch.device, backend: Backend
) -> DecodePlan:
    """A plan whose tasks are not yet written. Raises as ``plan_decode``."""
    if device.type != "cpu" and capturing():
        raise CaptureError("making a plan", advice=MAKE_A_PLAN)
    if backend != "reference":
        kernels(backend)(schedule.planner, device)  # before anything is allocated
    return DecodePlan(
        batch=geometry.batch,
        num_kv_heads=geometry.num_kv_heads,
        budget=schedule.budget,
        max_partitions=schedule.max_partitions,
        capacity=schedule.capacity,
        window=geometry.window,
        query_length=geometry.query_length,
        work_info=torch.empty((schedule.capacity, 4), dtype=torch.int32, device=device),
        reduce_info=torch.empty((geometry.batch, 2), dtype=torch.int32, device=device),
        backend=backend,
        planner=schedule.planner,
    )


MAKE_A_PLAN = "make a plan first (plan_decode) and a workspace (make_workspace), and pass both; refresh may be captured"


# ------------------------------------------------------------------------------------------------ scratch memory

ALIGNMENT = 256
"""Bytes: parts of a workspace in a caller's buffer start on multiples of it; kernels need 16."""


@dataclass(frozen=True, eq=False)
class DecodeWorkspace:
    """The partials of the calls over a plan: ``partial_out`` [Hkv, capacity, R, D] of the query's dtype,
    ``partial_max`` and ``partial_sum`` fp32 [Hkv, capacity, R]. One call at a time: two streams need two.

    ``facts``: shapes, dtypes and devices, for comparing. ``spans``: addresses and bytes, none while tracing.
    """

    partial_out: Tensor
    partial_max: Tensor
    partial_sum: Tensor
    facts: tuple[Any, ...] = field(init=False, repr=False)
    spans: tuple[tuple[int, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """TypeError or ValueError for what is no workspace of any plan."""
        facts: list[Any] = []
        before: dict[str, Tensor | None] = {}
        for name, tensor in self.parts.items():
            if not isinstance(tensor, Tensor):
                raise type_error(name, type(tensor).__name__, "a torch.Tensor")
            if not tensor.is_contiguous():
                raise value_error(f"{name}.stride()", list(tensor.stride()), "a contiguous tensor")
            if not traced() and tensor.data_ptr() % PACK:
                raise value_error(
                    f"{name}.data_ptr()", hex(tensor.data_ptr()), f"an address that is a multiple of {PACK}"
                )
            check_apart(name, tensor, before)
            before[name] = tensor
            facts.append((tuple(tensor.shape), tensor.dtype, tensor.device))
        spans = () if traced() else tuple((x.data_ptr(), x.numel() * x.element_size()) for x in self.parts.values())
        object.__setattr__(self, "facts", tuple(facts))
        object.__setattr__(self, "spans", spans)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: getattr(self, name) for name in ("partial_out", "partial_max", "partial_sum")}

    def check(self, capacity: int, geometry: DecodeGeometry, device: torch.device) -> None:
        """ValueError unless this fits calls of ``geometry`` over plans of ``capacity`` on ``device``."""
        shapes = workspace_shapes(capacity, geometry)
        for (name, (shape, dtype)), got in zip(shapes.items(), self.facts, strict=True):
            if got != (shape, dtype, device):
                raise value_error(
                    f"{name} of the workspace",
                    got,
                    f"{(shape, dtype, device)}, as make_workspace(plan, geometry) gives",
                )


def workspace_shapes(capacity: int, geometry: DecodeGeometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the parts of a workspace."""
    rows = (geometry.num_kv_heads, capacity, geometry.rows)
    return {
        "partial_out": ((*rows, geometry.head_dim), QUERY_DTYPES[geometry.query_dtype]),
        "partial_max": (rows, torch.float32),
        "partial_sum": (rows, torch.float32),
    }


def workspace_bytes(plan: DecodePlan, geometry: DecodeGeometry) -> int:
    """Bytes of a buffer for ``make_workspace``: its parts on multiples of ``ALIGNMENT``. Asks nothing of the device."""
    return sum(_bytes(shape, dtype) for shape, dtype in plan.workspace_shapes(geometry).values())


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def make_workspace(plan: DecodePlan, geometry: DecodeGeometry, *, buffer: Tensor | None = None) -> DecodeWorkspace:
    """A workspace on the plan's device, its memory not initialised; in ``buffer``, if given: uint8 on that device, one
    dimension, contiguous, on a 16-byte address, ``workspace_bytes`` at least.

    ValueError if the plan is for another problem than ``geometry`` or the buffer is none of these, TypeError if it is
    no tensor, CaptureError without one while a stream is being captured.
    """
    plan.check(geometry)
    return new_workspace(plan.capacity, geometry, plan.work_info.device, buffer)


def new_workspace(
    capacity: int, geometry: DecodeGeometry, device: torch.device, buffer: Tensor | None = None
) -> DecodeWorkspace:
    """``make_workspace`` for plans of ``capacity``."""
    shapes = workspace_shapes(capacity, geometry)
    if buffer is None:
        if device.type != "cpu" and capturing():
            raise CaptureError("allocating a workspace", advice=MAKE_A_PLAN)
        return DecodeWorkspace(**{n: torch.empty(s, dtype=t, device=device) for n, (s, t) in shapes.items()})
    if not isinstance(buffer, Tensor):
        raise type_error("buffer", type(buffer).__name__, "a torch.Tensor")
    needed = sum(_bytes(shape, dtype) for shape, dtype in shapes.values())
    form = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous() and buffer.device == device
    if not form or buffer.numel() < needed or buffer.data_ptr() % 16:
        got = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}, address {buffer.data_ptr():#x}"
        raise value_error("buffer", got, f"contiguous uint8 [{needed}] or more on {device}, on a 16-byte address")
    parts, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        parts[name] = buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _bytes(shape, dtype)
    return DecodeWorkspace(**parts)
