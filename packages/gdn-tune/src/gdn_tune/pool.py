"""Trials on processes of their own, one for each GPU: here, or wherever a ``concurrent.futures`` executor has workers.

A job is JSON text and so is its answer. On a worker a child process runs it. What kills the child, or holds it up for
too long, is put down to the candidate that it had begun: that one is marked ``crashed``, and the job goes on in a new
child with the rest. What kills a worker fails the executor's future, and the job is given to another one.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from gdn_runtime import env

from .records import Sample
from .wire import parse_key, parse_sample, sample_values

RUNNER = "gdn_tune.trial:run"
TIMEOUT = 600.0
"""Seconds without a report: a candidate is compiled and run once, or timed for one block, in far less."""
RETRIES = 2
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
NO_GPU = "-"
LAST_WORDS = 400
"""Characters of a dead child's standard error that are kept."""

Job = dict[str, Any]


class ChildError(Exception):
    """The child died, or said nothing for too long. The message says which, with its last words."""


class Child:
    """A process that runs trials on ``device``: a GPU as ``VISIBLE`` names it, or if it starts with ``NO_GPU`` what the
    environment shows."""

    def __init__(self, device: str = NO_GPU) -> None:
        shown = {} if device.startswith(NO_GPU) else dict.fromkeys(VISIBLE, device)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gdn_tune.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=env.child_environment(shown),
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def run(self, job: Mapping[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """Reports of ``job`` as they come. Raises ChildError; the child is then of no more use."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        except OSError:  # it died: reading says how
            pass
        for line in self._lines(timeout):
            report = json.loads(line)
            if "end" in report:
                return
            yield report

    def _lines(self, timeout: float) -> Iterator[bytes]:
        stdout = self._process.stdout
        assert stdout is not None
        kept = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout):
                    self.close()
                    raise ChildError(f"no report for {timeout:g} s; killed")
                piece = os.read(stdout.fileno(), 1 << 16)
                if not piece:
                    raise ChildError(self._death())
                *lines, kept = (kept + piece).split(b"\n")
                yield from lines

    def _death(self) -> str:
        code = self._process.wait()
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - LAST_WORDS))
        words = " ".join(self._words.read().decode(errors="replace").split())
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return f"the process ended with {how}" + (f": {words}" if words else "")

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._words.close()


# ------------------------------------------------------------------------------------------------ on a worker


_here = threading.local()
"""``device``: the GPU that a thread of ``run_all`` has taken."""
_children: dict[str, Child] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def run_job(text: str) -> str:
    """Run the job in ``text``; what became of it as JSON: {"samples": [...], "error": ...}. One job at a time and
    device, whatever threads the worker has. Never raises for what a child does."""
    job = json.loads(text)
    device: str = getattr(_here, "device", NO_GPU)
    samples: list[dict[str, Any]] = []
    with _guard:
        lock = _locks.setdefault(device, threading.Lock())
    with lock:
        error = _until_done(job, device, samples)
    return json.dumps({"samples": samples, "error": error})


def _until_done(job: Job, device: str, samples: list[dict[str, Any]]) -> str:
    """Add the samples of ``job`` to ``samples``; what stopped it, or nothing."""
    while True:
        begun: Any = None
        error = ""
        try:
            for report in _child(device).run(job, job["timeout"]):
                begun = report.get("start", begun)
                error = report.get("error", error)
                if "sample" in report:
                    sample, begun = report["sample"], None
                    samples.append(sample)
                    job["done"].append({"key": sample["key"], "status": sample["status"], "us": None})
        except ChildError as death:
            _children.pop(device).close()
            if begun is None:
                return str(death)  # of no candidate
            samples.append(sample_values(Sample(parse_key(begun), "crashed", detail=str(death), commit=job["commit"])))
            job["done"].append({"key": begun, "status": "crashed", "us": None})
            continue
        return error


def _child(device: str) -> Child:
    found = _children.get(device)
    if found is None:
        found = _children[device] = Child(device)
    return found


@atexit.register
def close_children() -> None:
    """End the children of this process; the next job starts another."""
    while _children:
        _children.popitem()[1].close()


# ------------------------------------------------------------------------------------------------ giving out


@dataclass(frozen=True)
class Answer:
    """What became of a job: its samples, and what stopped it if anything did."""

    job: Job
    samples: tuple[Sample, ...] = ()
    error: str = ""


@dataclass
class _Run:
    executor: Executor
    retries: int
    running: dict[Future[str], tuple[Job, int]] = field(default_factory=dict)

    def submit(self, job: Job, attempt: int) -> None:
        try:
            future = self.executor.submit(run_job, json.dumps(job))
        except RuntimeError as error:  # BrokenExecutor, or it was shut down
            future = Future()
            future.set_exception(error)
        self.running[future] = job, attempt

    def answers(self) -> Iterator[Answer]:
        while self.running:
            ready, _ = wait(self.running, return_when=FIRST_COMPLETED)
            for future in ready:
                job, attempt = self.running.pop(future)
                failure = CancelledError() if future.cancelled() else future.exception()
                if failure is None:
                    answer = json.loads(future.result())
                    yield Answer(job, tuple(map(parse_sample, answer["samples"])), answer["error"])
                elif attempt <= self.retries:
                    self.submit(job, attempt + 1)
                else:
                    yield Answer(job, error=f"{type(failure).__name__}: {failure}")


def run_all(
    jobs: Iterable[Job],
    *,
    executor: Executor | None = None,
    devices: Sequence[str] = (NO_GPU,),
    retries: int = RETRIES,
    done: Callable[[Answer], None] = lambda _: None,
) -> None:
    """Run ``jobs`` and give what becomes of each to ``done``, in this thread, as it comes.

    executor: where jobs run; each of its workers has one card, and shows its children no other. None: on ``devices``
    of this machine, numbers of GPUs, each with a thread and a child.
    """
    if executor is not None:
        _give_out(_Run(executor, retries), jobs, done)
        return
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for device in devices:
        free.put(device)
    with ThreadPoolExecutor(len(devices), initializer=_take_device, initargs=(free,)) as threads:
        _give_out(_Run(threads, retries), jobs, done)


def _take_device(free: queue.SimpleQueue[str]) -> None:
    _here.device = free.get()


def _give_out(run: _Run, jobs: Iterable[Job], done: Callable[[Answer], None]) -> None:
    try:
        for job in jobs:
            run.submit(job, 1)
        for answer in run.answers():
            done(answer)
    finally:
        for future in run.running:
            future.cancel()
