"""What a checked call runs, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gdn_runtime.errors import UnsupportedError
from gdn_runtime.spec import Backend

from ..plan import DecodePlan
from ..schedule import PaDecodeSchedule, specs_of
from ..spec import PIPE_ARCHS, AttentionSpec, ReduceSpec
from ..tables import tuned_budget
from ..traits import PIPE_HEAD_DIM, PIPE_PAGES, PIPE_ROWS
from .check import DecodeCall


@dataclass(frozen=True)
class Explanation:
    """What a call runs: backend, kernels, size of its plan, and the reasons. ``str()`` is text for people.

    ``attention`` and ``reduce`` are None on the reference, which has no kernels and needs no plan.
    """

    arch: str
    backend: Backend
    attention: AttentionSpec | None
    reduce: ReduceSpec | None
    budget: int | None
    capacity: int | None
    max_partitions: int | None
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts, strings and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("arch", self.arch), ("backend", self.backend)]
        if self.attention is not None:
            spec = self.attention
            words = [f"{spec.kernel} in {spec.language}", f"D {spec.head_dim}", f"page {spec.page_size}"]
            words += [f"{spec.rows} rows", f"scales per {spec.scale_mode}", "V packed" if spec.v_packed else "V plain"]
            words += ["windowed"] * spec.windowed + ["single tile"] * spec.single_tile
            rows += [
                ("attention", ", ".join(words)),
                ("plan", f"{self.capacity} slots per KV head, at most {self.max_partitions} tasks per sequence"),
            ]
        return "\n".join([*(f"{name:<12}{value}" for name, value in rows), *(f"- {why}" for why in self.reasons)])


@dataclass(frozen=True)
class Choice:
    """The specs of a call with kernels, and what its plan is made by: ``schedule`` None where the plan is given."""

    attention: AttentionSpec
    reduce: ReduceSpec
    schedule: PaDecodeSchedule | None


def choose(call: DecodeCall, plan: DecodePlan | None) -> Choice | None:
    """The kernels of a call with sequences; None on the reference. A given ``plan`` is checked.

    Raises ValueError if the plan is not one for the call, UnsupportedError if no kernel takes the problem.
    """
    geometry = call.geometry
    assert geometry is not None
    if plan is not None:
        plan.check(geometry)
        if plan.work_info.device != call.query.device:
            raise UnsupportedError("device of the plan", got=plan.work_info.device, supported=[call.query.device])
    if call.target.backend == "reference":
        if call.kernel != "auto":
            raise UnsupportedError('kernel with backend="reference"', got=repr(call.kernel), supported=["'auto'"])
        return None
    if plan is None:
        schedule = PaDecodeSchedule.select(geometry, tuned_budget=tuned_budget(geometry), kernel=call.kernel)
        return Choice(schedule.attention, schedule.reduce, schedule)
    specs = specs_of(geometry, single_tile=plan.single_tile, max_partitions=plan.max_partitions, kernel=call.kernel)
    return Choice(*specs, None)


def kernel_passed_over(attention: AttentionSpec) -> str | None:
    """Why the generic kernel was chosen on an architecture that has another one."""
    names = [name for name, archs in PIPE_ARCHS.items() if attention.arch in archs]
    if attention.kernel != "attention" or not names:
        return None
    return (
        f"{names[0]} takes head size {PIPE_HEAD_DIM}, pages of {' or '.join(map(str, PIPE_PAGES))} and at most "
        f"{PIPE_ROWS} query rows per KV head; here {attention.head_dim}, {attention.page_size}, {attention.rows}"
    )


def explanation(call: DecodeCall, plan: DecodePlan | None) -> Explanation:
    """What a call runs. Raises as ``choose``."""
    reasons = [call.target.reason]
    choice = None if call.geometry is None else choose(call, plan)
    if call.geometry is None:
        reasons.append("the batch is empty: nothing is launched")
    if choice is None:
        return Explanation(call.target.arch, call.target.backend, None, None, None, None, None, tuple(reasons))
    made = choice.schedule
    budget, capacity, partitions = (
        (plan.budget, plan.capacity, plan.max_partitions)
        if made is None and plan is not None
        else (made.budget, made.capacity, made.max_partitions)  # type: ignore[union-attr]
    )
    if call.kernel != "auto":
        reasons.append(f'kernel="{call.kernel}" was asked for')
    elif (passed_over := kernel_passed_over(choice.attention)) is not None:
        reasons.append(passed_over)
    reasons.append("the plan was given" if made is None else f"budget of {budget} tasks: {made.budget_source}")
    return Explanation(
        call.target.arch,
        call.target.backend,
        choice.attention,
        choice.reduce,
        budget,
        capacity,
        partitions,
        tuple(reasons),
    )
