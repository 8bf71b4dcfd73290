"""Compile a spec, in another process: ``compile_spec(spec)``."""

from __future__ import annotations

import atexit
import base64
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..codeobject.facts import CodeObject, LaunchFacts, spec_json, spec_text
from ..errors import CompileError, value_error
from ..spec import KernelSpec
from . import toolchain

SERVER = "gdn_runtime.kernels.compile_server"
TIMEOUT = 300.0
"""Seconds that a job may take: ten times the slowest kernel of the project on a busy machine."""
ENTRY_PATH = re.compile(r"\w+/[0-9a-f]{64}\.pkl")
GRACE = 60.0
"""Seconds on top for the server to start: importing torch and a compiler."""


@dataclass(frozen=True)
class FlyDslEntry:
    """A file of FlyDSL's own cache: its path below the folder of the cache, and what it holds."""

    path: str
    content: bytes

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return {"path": self.path, "content": base64.b64encode(self.content).decode()}

    @classmethod
    def from_json(cls, values: dict[str, str]) -> FlyDslEntry:
        """The entry that ``to_json`` gave. ValueError for a path that leaves the folder."""
        if not ENTRY_PATH.fullmatch(values["path"]):
            raise value_error("path of FlyDSL's entry", repr(values["path"]), "FUNCTION/SHA256.pkl")
        return cls(values["path"], base64.b64decode(values["content"]))


class CompileServer:
    """A process that compiles one spec at a time, started at the first. Thread safe; a fork of this process starts its
    own. For several at a time take several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def compile(self, spec: KernelSpec, timeout: float = TIMEOUT) -> CodeObject:
        """The code object of ``spec``. Raises UnsupportedError as ``spec.check``; CompileError, with what the compiler
        said, if it fails, dies, writes an error and goes on, or takes more than ``timeout`` seconds."""
        return _code_of(spec, self._answer(spec, timeout))

    def compile_with_entry(self, spec: KernelSpec, timeout: float = TIMEOUT) -> tuple[CodeObject, FlyDslEntry]:
        """As ``compile`` for a spec of FlyDSL, with the entry that makes FlyDSL itself find it: on machines with this
        FlyDSL, the kernels of this gdn-runtime and the device bitcode of this machine's ROCm, or likewise none."""
        answer = self._answer(spec, timeout, flydsl_entry=True)
        return _code_of(spec, answer), FlyDslEntry.from_json(answer["entry"])

    def code_in_flydsl_cache(self, spec: KernelSpec, folder: Path, timeout: float = TIMEOUT) -> bytes:
        """The ELF file that a launch of ``spec`` loads under FLYDSL_RUNTIME_RUN_ONLY=1, from FlyDSL's cache in
        ``folder``, in a process that has not traced it before. FlyDSL unpickles what it finds there. CompileError if it
        finds nothing."""
        answer = self._answer(spec, timeout, flydsl_cache=str(folder.resolve()))
        return base64.b64decode(answer["elf"])

    def _answer(self, spec: KernelSpec, timeout: float, **flags: object) -> dict:
        spec.check()
        request = {"spec": spec_json(spec), "language": spec.language, "timeout": timeout, **flags}
        with self._lock:
            answer = self._ask(json.dumps(request).encode() + b"\n", spec, timeout + GRACE)
        if "error" in answer:
            crashed = answer.get("crashed", False)
            raise CompileError(spec_text(spec), answer["error"], answer["stderr"], crashed=crashed)
        return answer

    def _ask(self, line: bytes, spec: KernelSpec, timeout: float) -> dict:
        process = self._running()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = _read_line(process, timeout)
        except BrokenPipeError:
            reply = b""
        if not reply.endswith(b"\n"):
            self._stop()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace")
            raise CompileError(spec_text(spec), "the compile server ended or did not answer", said, crashed=True)
        return json.loads(reply)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._owner = os.getpid()
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
            # The module path of this process: a server finds what its client found.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=env.child_environment({"PYTHONPATH": path}, without=toolchain.COMPILER_PREFIXES),
            )
        return self._process

    def close(self) -> None:
        """End the process; the next job starts another."""
        with self._lock:
            if self._owner == os.getpid():
                self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _code_of(spec: KernelSpec, answer: dict) -> CodeObject:
    try:
        return CodeObject(spec, LaunchFacts.from_json(answer["facts"]), base64.b64decode(answer["elf"]))
    except ValueError as error:
        raise CompileError(spec_text(spec), str(error), answer["stderr"]) from error


def _read_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    """A line, or what there was of it when the process ended or the time was up."""
    line = b""
    descriptor = process.stdout.fileno()
    deadline = time.monotonic() + timeout
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(descriptor, 1 << 20) if ready else b""
        if not part:
            break
        line += part
    return line


_server = CompileServer()
atexit.register(_server.close)


def compile_spec(spec: KernelSpec, timeout: float = TIMEOUT) -> CodeObject:
    """``CompileServer.compile`` of a server that lives as long as this process."""
    return _server.compile(spec, timeout)
