"""The process that compiles: ``python -m gdn_runtime.kernels.compile_server``, one JSON line per job and per answer.

It imports a compiler once and forks for every job, because a compiler may abort the process, and may say that it failed
in nothing but a line on file descriptor 2: each job has a process and a descriptor of its own.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .. import env
from ..codeobject.facts import LaunchFacts
from ..spec import ArgumentKind, KernelSpec
from . import note, toolchain

ERROR_LINE = re.compile(r"^(?:\S+:\d+(?::\d+)?: )?error:", re.MULTILINE)
PR_SET_PDEATHSIG = 1
JOB_BYTES = 2 << 30
"""Most memory of its own that a job may have; one of K5 takes a fifth. More is a failure of that job alone, before the
kernel of the machine picks a process to end."""
ROCM = "/opt/rocm"
"""Where FlyDSL looks for ROCm if ROCM_PATH does not say."""
TRITON_KINDS: dict[str, ArgumentKind] = {"i32": "i32", "i64": "i64", "fp32": "f32"}


def build(spec: KernelSpec) -> tuple[bytes, LaunchFacts]:
    """Compile ``spec`` in this process."""
    env.set_in_process(toolchain.target(spec.arch))
    module = kernel_module(spec)
    if spec.language == "flydsl":
        elf, dynamic_lds = toolchain.compile_flydsl(*module.build(spec))
    else:
        jobs = module.compile_jobs(spec)
        if len(jobs) != 1:
            raise ValueError(f"kernels of the spec: got {len(jobs)}, expected 1")
        parameters = {name: kind for name, kind in jobs[0].signature.items() if kind != "constexpr"}
        got = [(x, "pointer" if kind[0] == "*" else TRITON_KINDS.get(kind, kind)) for x, kind in parameters.items()]
        expected = [(argument.name, argument.kind) for argument in spec.ARGUMENTS]
        if got != expected:
            raise ValueError(f"parameters of the kernel: got {got}, expected {expected} of the spec")
        binary = toolchain.compile_triton(jobs[0], spec.arch)
        elf = binary.asm["hsaco"]
        # Triton declares LDS that its launcher gives; what is static already is in the note.
        dynamic_lds = binary.metadata.shared - note.read_facts(elf, spec, 0).lds_bytes
    return elf, note.read_facts(elf, spec, dynamic_lds)


def kernel_module(spec: KernelSpec) -> Any:
    """The module of the kernel, found by name: ``kernels.<language>.<kernel>`` of the package of the spec. It has
    ``build(spec)`` (FlyDSL) or ``compile_jobs(spec)`` (Triton)."""
    package = type(spec).__module__.partition(".")[0]
    return importlib.import_module(f"{package}.kernels.{spec.language}.{spec.kernel}")


def spec_from_json(values: dict[str, Any]) -> KernelSpec:
    """The spec that ``spec_json`` described."""
    module, _, name = values["spec"].partition(":")
    kind = getattr(importlib.import_module(module), name)
    return _construct(kind, {key: value for key, value in values.items() if key != "spec"})


def _construct(kind: Any, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    nested = {f.name for f in fields(kind) if is_dataclass(hints[f.name])}
    return kind(**{key: _construct(hints[key], value) if key in nested else value for key, value in values.items()})


def run_job(request: dict[str, Any], requests: BinaryIO) -> dict[str, Any]:
    """Fork, compile, collect: the answer to one request. Exits if the other side has gone."""
    try:
        toolchain.preload(request["language"])
    except ImportError as error:
        return {"error": f"{error} (pip install 'gdn-runtime[jit]' or '[triton]')", "stderr": ""}
    with tempfile.TemporaryFile() as stderr:
        result, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(result)
            _child(request, sender, stderr.fileno())
        os.close(sender)
        output, timed_out = _collect(result, requests, request["timeout"])
        os.close(result)
        if timed_out or output is None:
            _kill(pid)
        _, status = os.waitpid(pid, 0)
        if output is None:
            sys.exit(0)
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    answer: dict[str, Any] = {"stderr": said}
    if timed_out:
        return answer | {"error": f"not done after {request['timeout']} s, killed"}
    if os.WIFSIGNALED(status):
        return answer | {"error": f"the compiler died of {signal.Signals(os.WTERMSIG(status)).name}", "crashed": True}
    if ERROR_LINE.search(said):
        return answer | {"error": "the compiler reported an error and went on"}
    if os.WEXITSTATUS(status) or not output:
        return answer | {"error": f"the job ended with exit status {os.WEXITSTATUS(status)}"}
    return answer | json.loads(output)


def _collect(result: int, requests: BinaryIO, timeout: float) -> tuple[bytes | None, bool]:
    """What the job wrote, and whether its time was up; None if the other side has gone."""
    output = b""
    deadline = time.monotonic() + timeout
    while True:
        ready, _, _ = select.select([result, requests], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return output, True
        if requests in ready:
            return None, False  # no request comes before the answer: this is the end of the file
        part = os.read(result, 1 << 16)
        if not part:
            return output, False
        output += part


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # before its setpgid
        os.kill(pid, signal.SIGKILL)


def _do(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that succeeds; raises whatever a compiler does."""
    spec = spec_from_json(request["spec"])
    if "flydsl_cache" in request:
        rocm = request["rocm"]
        env.set_in_process(toolchain.run_only_environment(request["flydsl_cache"], rocm) | toolchain.target(spec.arch))
        return {"elf": encoded(toolchain.load_flydsl(*kernel_module(spec).build(spec)))}
    if not request.get("flydsl_entry"):
        elf, facts = build(spec)
        return {"elf": encoded(elf), "facts": facts.to_json()}
    # In a folder of its own: an entry counts when nothing went wrong, and nothing is read that others wrote.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env.set_in_process(toolchain.cache_environment(folder, request["rocm"]))
        elf, facts = build(spec)
        (path,) = folder.glob("entries/*/*.pkl")
        entry = {"path": path.relative_to(folder / "entries").as_posix(), "content": encoded(path.read_bytes())}
    return {"elf": encoded(elf), "facts": facts.to_json(), "entry": entry}


def encoded(content: bytes) -> str:
    """``content`` as text for JSON."""
    return base64.b64encode(content).decode()


def _child(request: dict[str, Any], sender: int, stderr: int) -> typing.NoReturn:
    """The job. Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = JOB_BYTES if most == resource.RLIM_INFINITY else min(JOB_BYTES, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        for descriptor in (1, 2):
            os.dup2(stderr, descriptor)
        try:
            answer = _do(request)
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises goes to whoever asked
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stderr.flush()
        with open(sender, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Serve until standard input ends. Answers go where standard output went; prints go to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    rocm = env.third_party().get("ROCM_PATH", ROCM)
    with tempfile.TemporaryDirectory(prefix="gdn-compile-") as folder:
        env.set_in_process(toolchain.environment(Path(folder)))
        requests = sys.stdin.buffer
        for line in requests:
            answers.write(json.dumps(run_job({**json.loads(line), "rocm": rocm}, requests)).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
