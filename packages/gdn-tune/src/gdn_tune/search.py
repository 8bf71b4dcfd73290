"""A search: one job for each case, answers into one store. What the store has is not done again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict

from .measure import Limits
from .pool import NO_GPU, RETRIES, RUNNER, TIMEOUT, Answer, Job, run_all
from .records import Key, Op, Sample
from .store import Store
from .wire import key_values


def newest(samples: Iterable[Sample]) -> dict[Key, tuple[str, float | None]]:
    """Of each key the status of its last sample, and the median of all its times if that one was right."""
    times: dict[Key, list[float]] = {}
    status: dict[Key, str] = {}
    for sample in samples:
        times.setdefault(sample.key, []).extend(sample.times_us)
        status[sample.key] = sample.status
    medians = {key: statistics.median(each) if each and status[key] == "ok" else None for key, each in times.items()}
    return {key: (status[key], us) for key, us in medians.items()}


def jobs(
    store: Store,
    op: Op,
    cases: Iterable[str],
    arch: str,
    *,
    compute_units: int | None = None,
    model: bool = False,
    limits: Limits | None = None,
    commit: str = "",
    timeout: float = TIMEOUT,
    runner: str = RUNNER,
) -> list[Job]:
    """A job for each of ``cases``, in their order, with what ``store`` knows of it.

    ``compute_units``: of the card that is modelled (None: the usual part), or that must be there.
    """
    known: dict[str, list[dict[str, object]]] = {}
    for key, (status, us) in newest(store.samples(op)).items():
        if key.arch == arch:
            known.setdefault(key.case, []).append({"key": key_values(key), "status": status, "us": us})
    return [
        {
            "runner": runner,
            "op": op,
            "case": case,
            "arch": arch,
            "units": compute_units,
            "model": model,
            "limits": asdict(limits or Limits()),
            "commit": commit,
            "timeout": timeout,
            "done": known.get(case, []),
        }
        for case in cases
    ]


def search(
    store: Store,
    given: Sequence[Mapping[str, object]],
    *,
    executor: Executor | None = None,
    devices: Sequence[str] = (NO_GPU,),
    retries: int = RETRIES,
    done: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Run ``given`` (``jobs``) and add their samples to ``store`` as they come; answers in the order of the jobs.

    ``executor``, ``devices``, ``retries``: of ``pool.run_all``. ``done``: called when an answer is in the store.
    """
    answers: dict[str, Answer] = {}

    def keep(answer: Answer) -> None:
        store.add(*answer.samples)
        answers[answer.job["case"]] = answer
        done(answer)

    run_all([dict(job) for job in given], executor=executor, devices=devices, retries=retries, done=keep)
    return [answers[str(job["case"])] for job in given]
