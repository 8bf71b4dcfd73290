"""The compile pool: order, retries, what is kept, executors that break. Codes are fakes, but where it says real."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gdn_aot import pool
from gdn_aot.pool import Outcome, compile_all, compile_job, default_workers
from gdn_runtime.codeobject import CodeObject
from gdn_runtime.codeobject.facts import canonical_json, spec_json
from gdn_runtime.errors import CompileError
from gdn_runtime.kernels import jit
from gdn_runtime.spec import KernelSpec, L2NormSpec
from gdn_testing.bundles import fake_code
from gdn_testing.probe import ProbeSpec

SPECS = [L2NormSpec(arch, "bf16", heads) for heads in (2, 4, 8) for arch in ("gfx950", "gfx942")]


def codes(outcomes: list[Outcome]) -> list[CodeObject]:
    assert not any(outcome.error for outcome in outcomes)
    return [outcome.code for outcome in outcomes if outcome.code is not None]


def job_text(spec: KernelSpec, **changes: object) -> str:
    job = {
        "spec": spec_json(spec),
        "versions": pool.versions(),
        "sources": jit.source_digest(spec),
        "timeout": 60,
        "flydsl_entries": False,
    }
    return canonical_json({**job, **changes})


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_outcomes_come_in_the_order_of_the_specs(compiler: Any, workers: int) -> None:
    def late(spec: KernelSpec) -> CodeObject:
        time.sleep(0.02 * (len(SPECS) - SPECS.index(spec)))
        return fake_code(spec)

    compiler.behave = late
    seen: list[Outcome] = []
    outcomes = compile_all(SPECS, workers=workers, done=seen.append)
    assert [outcome.spec for outcome in outcomes] == SPECS
    assert codes(outcomes) == [fake_code(spec) for spec in SPECS]
    assert len(seen) == len(SPECS) and {id(outcome) for outcome in seen} == {id(outcome) for outcome in outcomes}
    assert all(outcome.attempts == 1 and outcome.seconds >= 0.02 for outcome in outcomes)
    assert compiler.servers <= workers


def test_servers_serve_the_next_build(compiler: Any) -> None:
    for _ in range(3):
        compile_all(SPECS, workers=1)
    assert compiler.servers == 1 and len(compiler.asked) == 3 * len(SPECS)


def test_no_specs_no_workers(compiler: Any) -> None:
    assert compile_all([]) == [] and compiler.servers == 0


def test_a_crash_is_tried_again_and_an_error_is_not(compiler: Any) -> None:
    """Of three kernels one dies twice, one dies always, one does not compile: only the first has code."""
    lucky, doomed, wrong = SPECS[:3]

    def behave(spec: KernelSpec) -> CodeObject:
        if spec == wrong:
            raise CompileError("a kernel", "it is wrong", "error: line 3")
        if spec == doomed or compiler.asked.count(spec) <= 2:
            raise CompileError("a kernel", "the compiler died of SIGABRT", crashed=True)
        return fake_code(spec)

    compiler.behave = behave
    good, dead, bad = compile_all([lucky, doomed, wrong], workers=2, retries=2)
    assert good.code == fake_code(lucky) and good.attempts == 3 and not good.error
    assert dead.code is None and dead.attempts == 3 and "SIGABRT" in dead.error
    assert bad.code is None and bad.attempts == 1 and "error: line 3" in bad.error


def test_what_is_kept_is_not_compiled_again(compiler: Any, tmp_path: Path) -> None:
    first = compile_all(SPECS[:4], kept=tmp_path)
    assert not any(outcome.kept for outcome in first)
    outcomes = compile_all(SPECS, kept=tmp_path)
    assert [outcome.kept for outcome in outcomes] == [True] * 4 + [False] * 2
    assert [outcome.attempts for outcome in outcomes] == [0] * 4 + [1] * 2
    assert codes(outcomes) == [fake_code(spec) for spec in SPECS] and len(compiler.asked) == len(SPECS)
    assert {path.suffix for path in tmp_path.iterdir()} == {".hsaco", ".json"}


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"\x80\x04N."])
@pytest.mark.parametrize("suffix", ["hsaco", "json"])
def test_a_damaged_entry_is_compiled_anew(compiler: Any, tmp_path: Path, suffix: str, damage: bytes) -> None:
    compile_all(SPECS[:1], kept=tmp_path)
    (entry,) = tmp_path.glob(f"*.{suffix}")
    entry.write_bytes(damage)
    (outcome,) = compile_all(SPECS[:1], kept=tmp_path)
    assert not outcome.kept and outcome.code == fake_code(SPECS[0])
    (outcome,) = compile_all(SPECS[:1], kept=tmp_path)
    assert outcome.kept


def test_entries_of_other_sources_or_compilers_are_not_found(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_all(SPECS[:1], kept=tmp_path)
    for name, change in (
        ("source_digest", lambda spec: "another"),
        ("KERNEL_ABI", jit.KERNEL_ABI + 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(jit, name, change)
            (outcome,) = compile_all(SPECS[:1], kept=tmp_path)
            assert not outcome.kept
    with monkeypatch.context() as patch:
        patch.setattr(jit.toolchain, "versions", lambda: {"flydsl": "0.0"})
        (outcome,) = compile_all(SPECS[:1], kept=tmp_path)
        assert not outcome.kept


# ------------------------------------------------------------------------------------------------ executors


class Inline(Executor):
    """Runs a job when it is submitted, and keeps what crossed."""

    def __init__(self) -> None:
        self.jobs: list[str] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        (text,) = args
        assert fn is compile_job and type(text) is str and not kwargs
        self.jobs.append(text)
        future: Future[Any] = Future()
        future.set_result(fn(text))
        return future


def test_any_executor_will_do_and_only_text_crosses(compiler: Any) -> None:
    inline = Inline()
    expected = [fake_code(spec) for spec in SPECS]
    assert codes(compile_all(SPECS, executor=inline)) == expected
    assert [json.loads(job)["spec"] for job in inline.jobs] == [spec_json(spec) for spec in SPECS]
    with ThreadPoolExecutor(2) as threads:
        assert codes(compile_all(SPECS, executor=threads)) == expected
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as processes:
        assert codes(compile_all(SPECS, executor=processes)) == expected


def test_an_executor_that_breaks_fails_its_jobs(compiler: Any) -> None:
    compiler.behave = lambda spec: os._exit(9)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as processes:
        outcomes = compile_all(SPECS, executor=processes, retries=1)
    assert [outcome.spec for outcome in outcomes] == SPECS
    assert all(outcome.code is None and "BrokenProcessPool" in outcome.error for outcome in outcomes)
    assert all(outcome.attempts == 2 for outcome in outcomes)


def test_an_executor_that_was_shut_down_or_cancels_fails_its_jobs(compiler: Any) -> None:
    threads = ThreadPoolExecutor(1)
    threads.shutdown()
    (outcome,) = compile_all(SPECS[:1], executor=threads, retries=0)
    assert outcome.code is None and "shutdown" in outcome.error

    class Cancels(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    (outcome,) = compile_all(SPECS[:1], executor=Cancels(), retries=0)
    assert outcome.code is None and "CancelledError" in outcome.error


def test_jobs_that_wait_are_cancelled_when_the_build_is_interrupted(compiler: Any) -> None:
    """The second job runs until the interruption has come through: nothing after it begins."""
    interrupted = threading.Event()

    def behave(spec: KernelSpec) -> CodeObject:
        if spec != SPECS[0]:
            assert interrupted.wait(60)
        return fake_code(spec)

    def interrupt(_: Outcome) -> None:
        threading.Timer(0.5, interrupted.set).start()
        raise KeyboardInterrupt

    compiler.behave = behave
    with pytest.raises(KeyboardInterrupt):
        compile_all(SPECS, workers=1, done=interrupt)
    assert len(compiler.asked) <= 2


# ------------------------------------------------------------------------------------------------ workers


def test_a_worker_with_other_compilers_or_sources_compiles_nothing(compiler: Any) -> None:
    answer = json.loads(compile_job(job_text(SPECS[0], versions={"flydsl": "9.9"})))
    assert "versions on the worker" in answer["error"] and "9.9" in answer["error"] and not answer["crashed"]
    answer = json.loads(compile_job(job_text(SPECS[0], sources="0" * 64)))
    assert "sources of the kernels on the worker" in answer["error"] and not answer["crashed"]
    assert len(compiler.asked) == 1  # sources are compared when it is done
    assert "elf" in json.loads(compile_job(job_text(SPECS[0])))


def test_sources_that_change_during_a_job_fail_it(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = job_text(SPECS[0])

    def edited(spec: KernelSpec) -> CodeObject:
        monkeypatch.setattr(jit, "source_digest", lambda spec: "edited")
        return fake_code(spec)

    compiler.behave = edited
    answer = json.loads(compile_job(text))
    assert "got edited" in answer["error"] and "elf" not in answer


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "gdn_runtime.spec:nothing", "no_such_package:Spec", ""])
def test_a_job_names_a_spec_and_nothing_else(compiler: Any, name: str) -> None:
    answer = json.loads(compile_job(job_text(SPECS[0]).replace("gdn_runtime.spec.triton:L2NormSpec", name)))
    assert answer["error"] and not answer["crashed"] and not compiler.asked


def test_code_that_is_not_of_the_spec_is_an_error(compiler: Any) -> None:
    compiler.behave = lambda spec: fake_code(L2NormSpec("gfx942", "bf16", 2))
    (outcome,) = compile_all([L2NormSpec("gfx950", "bf16", 2)])
    assert outcome.code is None and "arch: got gfx942, expected gfx950" in outcome.error


def test_workers_fit_the_cores_and_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100)), raising=False)
    monkeypatch.setattr(pool, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(pool, "CGROUP", tmp_path)
    assert default_workers() == pool.MAX_WORKERS
    (tmp_path / "meminfo").write_text("MemTotal: 999999999 kB\nMemAvailable: 14680064 kB\n")  # 14 GiB
    assert default_workers() == 7
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1073741824\n")
    assert default_workers() == 7
    (tmp_path / "memory.max").write_text(str(7 << 30))  # 6 GiB left
    assert default_workers() == 3
    (tmp_path / "memory.max").write_text(str(1 << 30))
    assert default_workers() == 1


# ------------------------------------------------------------------------------------------------ real compilers


MACHINE = {"gfx942": 0x4C, "gfx950": 0x4F}
"""EF_AMDGPU_MACH, byte 48 of the ELF header."""


def test_failures_are_those_of_their_jobs_in_one_process_for_both_architectures(tmp_path: Path) -> None:
    """An error that LLVM only prints, an abort, an exception and too much memory, among jobs that are sound."""
    sound = [ProbeSpec(arch, variant=n) for n in (0, 1) for arch in MACHINE]
    faulty = {
        ProbeSpec("gfx942", "lds over the limit"): (1, "exceeds limit"),
        ProbeSpec("gfx950", "wrong arch"): (2, "SIGABRT"),
        ProbeSpec("gfx942", "raise"): (1, "the probe was told to raise"),
        ProbeSpec("gfx950", "take 3 GiB"): (1, "MemoryError"),
    }
    specs: list[KernelSpec] = [sound[0], *faulty, *sound[1:]]
    outcomes = {outcome.spec: outcome for outcome in compile_all(specs, workers=2, retries=1, kept=tmp_path)}
    for spec, (attempts, text) in faulty.items():
        assert outcomes[spec].code is None and text in outcomes[spec].error and outcomes[spec].attempts == attempts
    for spec in sound:
        code = outcomes[spec].code
        assert code is not None and code.elf[48] == MACHINE[spec.arch]
    first = {spec: outcomes[spec].code for spec in sound}
    again = {outcome.spec: outcome.code for outcome in compile_all(sound[::-1], workers=1)}
    assert again == first  # whatever came before
    assert len(list(tmp_path.glob("*.json"))) == len(sound)  # no failure is kept


def test_a_job_without_end_is_killed() -> None:
    (late,) = compile_all([ProbeSpec("gfx942", "sleep")], timeout=0.5)
    assert late.code is None and "not done after 0.5 s" in late.error and late.attempts == 1


def test_the_environment_changes_no_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the architecture that it names, nor a ROCm that is broken, nor a PATH without tools (cases C26, C27)."""
    specs: list[KernelSpec] = [ProbeSpec("gfx950"), L2NormSpec("gfx950", "bf16", 2)]
    pool.close_servers()
    expected = codes(compile_all(specs, workers=1))
    pool.close_servers()
    for name, value in {
        "ARCH": "gfx942",
        "FLYDSL_GPU_ARCH": "gfx90a",
        "HSA_OVERRIDE_GFX_VERSION": "9.4.2",
        "FLYDSL_COMPILE_OPT_LEVEL": "0",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "ROCM_PATH": str(tmp_path / "nothing"),
        "PATH": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    assert codes(compile_all(specs, workers=1)) == expected
    pool.close_servers()
