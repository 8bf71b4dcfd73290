"""Compiling many specs: on threads of this process, or on any ``concurrent.futures`` executor.

A job is JSON text and so is its result: nothing but text crosses to a worker, which may be on another host. On a worker
a compile server, a process, forks for every job, so that what dies is the job. Only jobs of which a process died are
tried again: an error of the compiler is the same the next time. A worker with other compilers or kernel sources than
this process fails its jobs, so a build has the same bytes wherever it ran.
"""

from __future__ import annotations

import atexit
import base64
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gdn_runtime
from gdn_runtime.codeobject.facts import CodeObject, LaunchFacts, canonical_json, spec_from_json, spec_json
from gdn_runtime.errors import CompileError, CorruptCodeObjectError, UnsupportedError
from gdn_runtime.kernels import compile as compiler
from gdn_runtime.kernels import jit, toolchain
from gdn_runtime.kernels.compile import FlyDslEntry
from gdn_runtime.kernels.compile_server import JOB_BYTES
from gdn_runtime.spec import KernelSpec

MAX_WORKERS = 64
BYTES_PER_WORKER = JOB_BYTES
"""Memory that one worker may need: a compile server shares most of its own with its job."""
RETRIES = 2
JOB_SECONDS = compiler.TIMEOUT
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Control group of this process, as a container sees it."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job. ``code`` or ``error`` is set; ``kept``: it was there from an earlier build.

    ``seconds`` are of the last attempt, where it ran. ``entry`` is for FlyDSL's cache, where that was asked for.
    """

    spec: KernelSpec
    code: CodeObject | None
    error: str = ""
    seconds: float = 0.0
    attempts: int = 0
    kept: bool = False
    entry: FlyDslEntry | None = None


def default_workers() -> int:
    """As many as this process has cores, as fit the memory that is available, 64 at most, 1 at least."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, MAX_WORKERS, available_memory() // BYTES_PER_WORKER))


def available_memory() -> int:
    """Bytes that new processes may take: what the kernel estimates (MemAvailable), and no more than the control group
    leaves; without either, enough."""
    free = [MAX_WORKERS * BYTES_PER_WORKER]
    try:
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        free.append(int(fields["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError):
        pass
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free.append(int(limit) - int(used))
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return min(free)


def compile_all(
    specs: Iterable[KernelSpec],
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    kept: Path | None = None,
    timeout: float = JOB_SECONDS,
    retries: int = RETRIES,
    flydsl_entries: bool = False,
    done: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Compile ``specs``; outcomes in their order. A job that fails does not stop the others.

    Args:
        executor: where jobs run, for instance of a cluster; None: ``workers`` threads here (None: ``default_workers``).
        kept: folder in which what is compiled is kept, and looked for first; entries of other sources or compilers are
            never found. A damaged entry is compiled anew.
        timeout: seconds that one job may take before it is killed. retries: for jobs of which a process died.
        flydsl_entries: give FlyDSL's specs an ``entry``; they are compiled even if ``kept`` has them.
        done: called with each outcome as it comes, in this thread.
    """
    ordered = list(specs)
    outcomes: dict[int, Outcome] = {}
    options = {"timeout": timeout, "flydsl_entries": flydsl_entries}

    def finish(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        done(outcome)

    waiting: list[int] = []
    for index, spec in enumerate(ordered):
        found = None if flydsl_entries and spec.language == "flydsl" else _kept(spec, kept)
        if found is None:
            waiting.append(index)
        else:
            finish(index, Outcome(spec, found, kept=True))
    if waiting and executor is None:
        with ThreadPoolExecutor(min(workers or default_workers(), len(waiting))) as threads:
            _run(threads, ordered, waiting, finish, kept, retries, options)
    elif waiting:
        assert executor is not None
        _run(executor, ordered, waiting, finish, kept, retries, options)
    return [outcomes[index] for index in range(len(ordered))]


def _run(
    executor: Executor,
    specs: list[KernelSpec],
    waiting: list[int],
    finish: Callable[[int, Outcome], None],
    kept: Path | None,
    retries: int,
    options: Mapping[str, Any],
) -> None:
    running: dict[Future[str], tuple[int, int]] = {}
    sources: dict[str, str] = {}

    def submit(index: int, attempt: int) -> None:
        spec = specs[index]
        origin = f"{type(spec).__module__} {spec.language}"
        if origin not in sources:
            sources[origin] = jit.source_digest(spec)
        job = {"spec": spec_json(spec), "versions": versions(), "sources": sources[origin], **options}
        try:
            future = executor.submit(compile_job, canonical_json(job))
        except RuntimeError as error:  # BrokenExecutor, or it was shut down
            future = Future()
            future.set_exception(error)
        running[future] = index, attempt

    try:
        for index in waiting:
            submit(index, 1)
        while running:
            ready, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                index, attempt = running.pop(future)
                outcome, crashed = _outcome(specs[index], future, attempt)
                if crashed and attempt <= retries:
                    submit(index, attempt + 1)
                    continue
                if outcome.code is not None and kept is not None:
                    jit.keep(outcome.code, str(kept))
                finish(index, outcome)
    finally:
        for future in running:
            future.cancel()


def _outcome(spec: KernelSpec, future: Future[str], attempt: int) -> tuple[Outcome, bool]:
    """The outcome of a finished attempt, and whether a process died."""
    # A job itself never raises: this is the executor, whose worker died or which was shut down.
    failure: BaseException | None = CancelledError() if future.cancelled() else future.exception()
    if failure is not None:
        return Outcome(spec, None, f"{type(failure).__name__}: {failure}", attempts=attempt), True
    answer = json.loads(future.result())
    if "error" in answer:
        return Outcome(spec, None, answer["error"], answer["seconds"], attempt), answer["crashed"]
    try:
        code = CodeObject(spec, LaunchFacts.from_json(answer["facts"]), base64.b64decode(answer["elf"]))
        entry = FlyDslEntry.from_json(answer["entry"]) if "entry" in answer else None
    except ValueError as error:
        return Outcome(spec, None, str(error), answer["seconds"], attempt), False
    return Outcome(spec, code, "", answer["seconds"], attempt, entry=entry), False


def _kept(spec: KernelSpec, folder: Path | None) -> CodeObject | None:
    if folder is None:
        return None
    try:
        return jit.find(spec, str(folder))
    except CorruptCodeObjectError:
        return None  # written over when it is compiled


# ------------------------------------------------------------------------------------------------ workers


_idle: list[compiler.CompileServer] = []
"""Compile servers of this process that no thread uses; they live as long as the process."""


@atexit.register
def close_servers() -> None:
    """End the idle compile servers; the next job starts another."""
    while _idle:
        _idle.pop().close()


@contextmanager
def _server() -> Iterator[compiler.CompileServer]:
    try:
        server = _idle.pop()
    except IndexError:
        server = compiler.CompileServer()
    try:
        yield server
    finally:
        _idle.append(server)


@functools.cache
def versions() -> dict[str, str]:
    """What must be equal on every host for a build to give the same bytes."""
    return {**toolchain.versions(), "gdn-runtime": gdn_runtime.__version__}


def compile_job(text: str) -> str:
    """Compile the job that ``text`` describes; runs on a worker. Never raises: what went wrong is in the result."""
    job = json.loads(text)
    start = time.monotonic()
    try:
        importlib.import_module(
            job["spec"]["spec"].partition(":")[0]
        )  # the package of the spec: a product's, or a test's
        spec = spec_from_json(job["spec"])
        _require("versions", versions(), job["versions"])
        with _server() as server:
            if job["flydsl_entries"] and spec.language == "flydsl":
                code, entry = server.compile_with_entry(spec, job["timeout"])
            else:
                code, entry = server.compile(spec, job["timeout"]), None
        # Now, for they may have been edited meanwhile.
        _require("sources of the kernels", jit.source_digest(spec), job["sources"])
        answer: dict[str, Any] = {"elf": base64.b64encode(code.elf).decode(), "facts": code.facts.to_json()}
        if entry is not None:
            answer["entry"] = entry.to_json()
    except CompileError as error:
        answer = {"error": str(error), "crashed": error.crashed}
    except (UnsupportedError, ValueError, ImportError) as error:
        answer = {"error": str(error), "crashed": False}
    return json.dumps({**answer, "seconds": round(time.monotonic() - start, 3)})


def _require(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ValueError(f"{what} on the worker: got {got}, expected {expected}")
