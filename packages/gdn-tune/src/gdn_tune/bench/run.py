"""What the benches of K5 and of the block share: every case by every backend and variant, then the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gdn_runtime.errors import UnsupportedError
from gdn_runtime.testing import Case

from ..console import err, say
from . import emulated
from .backends import EMULATE, faults
from .cases import facts_of
from .inputs import BlockInputs, block_inputs, variants
from .options import device_line, run_facts, write_json, write_text
from .results import DEFAULT_METRICS, METRICS, Measurement, print_case, print_summary, to_csv, to_json
from .timing import Call, Protocol, measure


@dataclass(frozen=True)
class Plan:
    """What a bench is asked for."""

    cases: list[Case]
    backends: list[str]
    device: torch.device
    protocol: Protocol
    pool: bool = False
    cold_pool: bool = False
    without_metadata: bool = False
    seed: int = 0
    arch: str = emulated.DEFAULT_ARCH
    compute_units: int = 0
    scan_alone: bool = False

    @property
    def timed(self) -> list[str]:
        """Backends that run."""
        return [name for name in self.backends if name != EMULATE]


CallMaker = Callable[[str, BlockInputs], Call]


def measurements(plan: Plan, make: CallMaker) -> Iterator[tuple[Case, list[Measurement]]]:
    """Case by case; ``make(backend, inputs)`` gives the call. What a backend does not support is a failure of its own,
    and so is memory that does not suffice."""
    for case in plan.cases:
        yield case, list(_of_case(plan, case, make))
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()


def _of_case(plan: Plan, case: Case, make: CallMaker) -> Iterator[Measurement]:
    lengths = case.seq_lens * (case.batch or 1)
    base = Measurement(case.id, case.snapshot_dtype, "", facts=facts_of(case), lengths=lengths)
    chosen: dict[str, BlockInputs] = {}
    if plan.timed:
        try:
            chosen = _variants(plan, case)
        except torch.cuda.OutOfMemoryError as error:
            yield from (failed(replace(base, backend=backend), error) for backend in plan.timed)
    for backend in plan.backends:
        if backend == EMULATE:  # variants run the same chunks
            this = replace(base, backend=backend, unit="cycles")
            try:
                yield _counted(plan, case, this)
            except faults(backend) as error:
                yield failed(this, error)
            continue
        for variant, inputs in chosen.items():
            this = replace(base, backend=backend, variant=variant)
            try:
                metrics, kernels = measure(make(backend, inputs), plan.device, plan.protocol)
                yield replace(this, metrics=metrics, kernels=kernels)
            except faults(backend) as error:
                yield failed(this, error)


def _variants(plan: Plan, case: Case) -> dict[str, BlockInputs]:
    block = block_inputs(case, plan.device, plan.seed)
    chosen, left_out = variants(
        block, pool=plan.pool, cold=plan.cold_pool, without_metadata=plan.without_metadata, seed=plan.seed
    )
    for line in left_out:
        err.print(f"{case.id}: left out {line}", markup=False, highlight=False)
    return chosen


def failed(this: Measurement, error: Exception) -> Measurement:
    """``this`` ended by ``error``."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return replace(this, failure=text, unsupported=isinstance(error, UnsupportedError))


def _counted(plan: Plan, case: Case, this: Measurement) -> Measurement:
    call = emulated.problem(case, plan.arch, plan.compute_units or None)
    cycles, counters = emulated.count(call, scan_alone=plan.scan_alone)
    return replace(this, metrics=cycles, counters=counters)


def baseline_of(name: str, backends: Sequence[str]) -> str:
    """The backend that others are compared with. Raises ValueError if it is not timed."""
    if not name:
        return "aiter" if "aiter" in backends else backends[0]
    if name not in backends:
        raise ValueError(f"baseline: got {name!r}, expected one of {', '.join(backends)}")
    return name


def check_metrics(names: Sequence[str]) -> list[str]:
    """Metrics of the summary, by any unambiguous beginning. Raises ValueError for others."""
    found = []
    for name in names or DEFAULT_METRICS:
        fits = [metric for metric in METRICS if metric.lower().startswith(name.lower())]
        exact = [metric for metric in fits if metric.lower() == name.lower()]
        if len(exact or fits) != 1:
            raise ValueError(f"summary-metrics: got {name!r}, expected some of {', '.join(METRICS)}")
        found += exact or fits
    return found


def report(
    plan: Plan,
    make: CallMaker,
    *,
    title: str,
    metrics: Sequence[str],
    baseline: str,
    show_kernels: bool,
    summary_only: bool,
    csv: Path | None,
    json: Path | None,
) -> list[Measurement]:
    """Measure and print; after each case the files hold what there is, so that an interrupted run leaves it."""
    head = [device_line(plan.device)] if plan.timed else []
    if EMULATE in plan.backends:
        head.append(f"emulate: cycles of a model of {plan.arch}, counted on the emulator; nothing is timed")
    say("; ".join(head))
    found: list[Measurement] = []
    facts: dict[str, Any] = {"bench": title, **run_facts(plan.device), "seed": plan.seed}
    facts["protocol"] = asdict(plan.protocol)
    if EMULATE in plan.backends:
        facts["emulated_arch"] = plan.arch
    for case, measured in measurements(plan, make):
        found += measured
        write_text(csv, to_csv(found))
        write_json(json, to_json(found, **facts))
        if not summary_only:
            print_case(str(case), measured, show_kernels=show_kernels)
    if summary_only or len(plan.cases) > 1:
        used = {name for each in found for name in each.metrics}
        print_summary(found, [name for name in metrics if name in used], baseline)
    return found
