"""One case on one device: every candidate checked against what is right, then those that are, timed in turns.

Runs in a process of its own (``pool``), for a candidate may take the process with it. ``run`` reports as it goes:
{"start": key} before a candidate touches the device, {"start": None} when none does, {"sample": sample} for what is
settled.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import torch

import gdn_runtime
from gdn_runtime import env
from gdn_runtime.arch import arch_of, compute_units, parse_arch
from gdn_runtime.errors import CompileError, UnsupportedError
from gdn_runtime.kernels import jit, toolchain
from gdn_runtime.ops.backends import stages
from gdn_runtime.rules import Problem
from gdn_runtime.spec import AMD_ARCHS
from gdn_runtime.testing import Case
from pa_decode import DecodeGeometry, PaDecodeSchedule

from . import measure
from .calls import DecodeCase, cases_of, decode_facts, gdn_facts, problem_of
from .candidates import Config, of_call, specs_of
from .records import MODEL, Facts, Key, Op, Sample
from .wire import key_values, parse_key, sample_values
from .workload import GdnWorkload, Outputs, deviation

Report = Callable[[dict[str, Any]], None]

EMULATOR = "emulator"
"""``Key.device`` of what was modelled."""


class Runnable(Protocol):
    """What a workload has: a candidate run on outputs, and the outputs that are right."""

    @property
    def bytes(self) -> int:
        """Of the inputs and buffers."""

    def copy(self) -> Self:
        """The same in other memory."""

    def outputs(self) -> Outputs:
        """Outputs that hold NaN."""

    def expected(self) -> Outputs:
        """What is right."""

    def run(self, choice: Any, out: Outputs) -> None:
        """Launch ``choice``."""


@dataclass(frozen=True)
class Trial:
    """A case on a device. ``device`` None: modelled for the usual part of ``arch``, or for ``units`` of it."""

    op: Op
    case: Case | DecodeCase
    arch: str
    units: int
    device: torch.device | None

    @property
    def call(self) -> Problem | DecodeGeometry:
        """The Problem or DecodeGeometry."""
        if isinstance(self.case, DecodeCase):
            return self.case.geometry(self.arch, self.units)
        return problem_of(self.case, self.arch, self.units)

    @property
    def configs(self) -> list[Config]:
        """Candidates, the default first."""
        return of_call(self.op, self.call)

    def key(self, config: Config, sets: int = 0) -> Key:
        """The key of a candidate that is timed on ``sets`` of inputs, or modelled."""
        case = self.case
        if isinstance(case, DecodeCase):
            facts, extra = decode_facts(case.geometry(self.arch, self.units)), {"context": case.context}
        else:
            facts, extra = gdn_facts(case, problem_of(case, self.arch, self.units)), {}
        timed = {"method": "graph", "cache": "rotated", "sets": sets}
        method: dict[str, Any] = {"method": MODEL} if self.device is None else timed
        return Key(
            op=self.op,
            case=case.id,
            facts=facts,
            config=Facts(config),
            arch=self.arch,
            compute_units=self.units,
            device=EMULATOR if self.device is None else torch.cuda.get_device_name(self.device),
            toolchain=toolchain_text(),
            kernel_digest=self.digest(config),
            protocol=Facts(method, **extra),
        )

    def digest(self, config: Config) -> str:
        """sha256 over the sources of the candidate's kernels."""
        digest = hashlib.sha256()
        for spec in self.kernels(config):
            digest.update(_sources(spec).encode())
        return digest.hexdigest()

    def kernels(self, config: Config) -> Sequence[Any]:
        """The specs of a candidate."""
        call = self.call
        if isinstance(call, DecodeGeometry):
            schedule = PaDecodeSchedule.select(call, budget=config["budget"])
            return schedule.attention, schedule.reduce
        return specs_of(self.op, call, config).kernels()

    @property
    def runs(self) -> Case | DecodeCase:
        """What is run: the case, or a small one of its kind on the emulator."""
        return self.case if self.device is not None else self.case.small(2, 2)

    def workload(self) -> Runnable:
        """Inputs of ``runs``."""
        backend = "triton" if self.arch not in AMD_ARCHS else "emulate" if self.device is None else "flydsl"
        device, case = self.device or torch.device("cpu"), self.runs
        if isinstance(case, DecodeCase):
            from .decoding import DecodeWorkload

            return DecodeWorkload(case, case.geometry(self.arch, self.units), backend, device)
        problem = problem_of(case, self.arch, self.units)
        return GdnWorkload(self.op, case, problem, stages(cast(Any, backend)), device)

    def choice(self, config: Config) -> Any:
        """What ``workload().run`` takes."""
        case = self.runs
        if isinstance(case, DecodeCase):
            return config["budget"]
        return specs_of(self.op, problem_of(case, self.arch, self.units), config)

    def modelled(self, config: Config) -> tuple[float, dict[str, float]]:
        """Cycles and counters of a candidate. ImportError without the extra ``model``."""
        call = self.call
        if isinstance(call, DecodeGeometry):
            from .decoding import modelled as decode_modelled

            return decode_modelled(cast(DecodeCase, self.case), call, config["budget"])
        from .model import modelled

        return modelled(call, specs_of(self.op, call, config))


_digests: dict[tuple[str, str], str] = {}


def _sources(spec: Any) -> str:
    """``jit.source_digest``, which depends on no more than this."""
    kind = spec.language, type(spec).__module__.partition(".")[0]
    if kind not in _digests:
        _digests[kind] = jit.source_digest(spec)
    return _digests[kind]


@functools.cache
def toolchain_text() -> str:
    """Versions that made and ran the kernels."""
    versions = {**toolchain.versions(), "torch": torch.__version__, "gdn-runtime": gdn_runtime.__version__}
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def trial_of(job: Mapping[str, Any]) -> Trial:
    """The trial that ``job`` asks for. Raises ValueError for a device that is not there or another than it says."""
    op, arch = job["op"], parse_arch(job["arch"])
    case: Any = cases_of(op)[job["case"]]
    if job["model"]:
        if arch.name not in AMD_ARCHS:
            raise ValueError(f"arch: got {arch.name!r}, the emulator has {', '.join(AMD_ARCHS)}")
        return Trial(op, case, arch.name, job["units"] or arch.nominal_compute_units or 1, None)
    if not torch.cuda.is_available():
        raise ValueError("no GPU: --model ranks candidates without one")
    device = torch.device("cuda", 0)
    found, units = arch_of(device), compute_units(device)
    if found.name != arch.name or (job["units"] and job["units"] != units):
        asked = f"{arch.name} with {job['units'] or 'any'} compute units"
        raise ValueError(f"device: got {found.name} with {units} compute units, expected {asked}")
    return Trial(op, case, arch.name, units or 1, device)


def run(job: Mapping[str, Any], report: Report) -> None:
    """Do ``job``: op, case, arch, units, model, limits, commit, and done: what the store has, as {key, status, us}."""
    trial = trial_of(job)
    with env.override(jit=True):
        if trial.device is None:
            _model(trial, job, report)
        else:
            _time(trial, job, report)


# ------------------------------------------------------------------------------------------------ both ways


def _stamp(key: Key, status: Any, job: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    sample = Sample(key, status, started=started, host=platform.node(), commit=job["commit"], **fields)
    return {"sample": sample_values(sample)}


def _done(job: Mapping[str, Any]) -> dict[Key, tuple[str, float | None]]:
    return {parse_key(entry["key"]): (entry["status"], entry["us"]) for entry in job["done"]}


def _refusals() -> tuple[type[BaseException], ...]:
    """What a candidate raises that cannot be had: too much shared memory, code that does not compile."""
    try:
        errors = importlib.import_module("triton.errors")
    except ImportError:
        return CompileError, UnsupportedError
    return CompileError, UnsupportedError, errors.TritonError  # of its compiler, of ptxas, for want of resources


def _checked(trial: Trial, workload: Runnable, choice: Any, right: Outputs) -> float:
    out = workload.outputs()
    workload.run(choice, out)
    if trial.device is not None:
        torch.cuda.synchronize(trial.device)  # a fault is this candidate's
    return deviation(trial.op, out, right)


def _wrong(key: Key, error: float, job: Mapping[str, Any]) -> dict[str, Any]:
    """``error`` may be infinite, which no JSON is."""
    finite = error if error < float("inf") else None
    detail = "NaN or infinity" if finite is None else f"{error:.3g} times the allowed deviation from the reference"
    return _stamp(key, "wrong", job, error=finite, detail=detail)


# ------------------------------------------------------------------------------------------------ modelled


def _model(trial: Trial, job: Mapping[str, Any], report: Report) -> None:
    done = _done(job)
    todo = [(key, config) for config in trial.configs if (key := trial.key(config)) not in done]
    if not todo:
        return
    workload = trial.workload()
    right = workload.expected()
    for key, config in todo:
        report({"start": key_values(key)})
        try:
            error = _checked(trial, workload, trial.choice(config), right)
            if not error <= 1:
                report(_wrong(key, error, job))
                continue
            cycles, counters = trial.modelled(config)
        except _refusals() as refusal:
            report(_stamp(key, "skipped", job, detail=str(refusal)))
            continue
        report(_stamp(key, "ok", job, cycles=cycles, counters=Facts(counters), error=error))


# ------------------------------------------------------------------------------------------------ timed


def _time(trial: Trial, job: Mapping[str, Any], report: Report) -> None:
    assert trial.device is not None
    done = _done(job)
    first = trial.workload()
    sets = measure.input_sets(first.bytes, trial.device)
    keyed = {trial.key(config, sets): config for config in trial.configs}
    todo = [key for key in keyed if key not in done]
    if not todo:
        return
    # Times of two runs are not side by side: whoever is new meets the fastest of the old ones again.
    old = [(us, key.config.text, key) for key in keyed if key in done and (us := done[key][1]) is not None]
    if old:
        todo.append(min(old, key=lambda each: each[:2])[2])
    right = first.expected()
    sound: dict[Key, float] = {}
    for key in todo:
        report({"start": key_values(key)})
        try:
            error = _checked(trial, first, trial.choice(keyed[key]), right)
        except _refusals() as refusal:
            report(_stamp(key, "skipped", job, detail=str(refusal)))
            continue
        if error <= 1:
            sound[key] = error
        else:
            report(_wrong(key, error, job))
    # What fails from here to the first launch, for want of memory say, is no candidate's.
    report({"start": None})
    del right
    workloads = [first, *(first.copy() for _ in range(sets - 1))]
    outs = [workload.outputs() for workload in workloads]
    begun = time.monotonic()
    timers = [_timer(trial, key, keyed[key], workloads, outs, report) for key in sound]
    times = measure.race(timers, measure.Limits(**job["limits"])) if timers else []
    detail = f"{time.monotonic() - begun:.1f} s for all candidates"
    for (key, error), each in zip(sound.items(), times, strict=True):
        rounded = tuple(round(us, 4) for us in each)
        report(_stamp(key, "ok", job, times_us=rounded, n=len(rounded), error=error, detail=detail))


def _timer(
    trial: Trial, key: Key, config: Config, workloads: Sequence[Runnable], outs: Sequence[Outputs], report: Report
) -> measure.Timer:
    choice = trial.choice(config)
    calls = [functools.partial(load.run, choice, out) for load, out in zip(workloads, outs, strict=True)]
    report({"start": key_values(key)})
    for call in calls:
        call()
    torch.cuda.synchronize()
    timed = measure.graph_timer(calls)

    def in_turn(count: int) -> Sequence[float]:
        report({"start": key_values(key)})
        return timed(count)

    return in_turn
