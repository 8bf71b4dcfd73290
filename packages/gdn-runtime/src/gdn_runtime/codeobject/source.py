"""Where code objects come from: this process, or the compiler if it is allowed to run."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch

from ..env import settings
from ..errors import CaptureError, MissingCodeObjectError
from ..spec import KernelSpec
from .facts import CodeObject, spec_text

_JIT = "gdn_runtime.kernels.jit"

_codes: dict[KernelSpec, CodeObject] = {}
_lock = threading.Lock()
_making: dict[KernelSpec, threading.Lock] = {}


def code_object(spec: KernelSpec) -> CodeObject:
    """The code object of ``spec``, made once per process whatever the number of threads that ask.

    Raises UnsupportedError as ``spec.check``; MissingCodeObjectError if it would have to be compiled and GDN_JIT is 0
    or FLYDSL_RUNTIME_RUN_ONLY is 1, CaptureError if a stream is being captured; CompileError as the compiler.
    """
    code = _codes.get(spec)
    if code is not None:
        return code
    with _lock:
        making = _making.setdefault(spec, threading.Lock())
    with making:
        code = _codes.get(spec)
        if code is None:
            code = _codes[spec] = _find(spec)
    return code


def _find(spec: KernelSpec) -> CodeObject:
    spec.check()
    current = settings()
    if not current.jit:
        raise MissingCodeObjectError(spec_text(spec), "set GDN_JIT=1 to compile it at the first call")
    # By name: the serving path imports neither kernels nor compilers.
    jit: Any = importlib.import_module(_JIT)
    kept: CodeObject | None = jit.find(spec, current.jit_cache_dir)
    if kept is not None:
        return kept
    if current.flydsl_runtime_run_only:
        raise MissingCodeObjectError(spec_text(spec), "FLYDSL_RUNTIME_RUN_ONLY=1 forbids compiling it; unset it")
    if capturing():
        raise CaptureError(f"compiling {spec_text(spec)}")
    made: CodeObject = jit.make(spec, current.jit_cache_dir)
    return made


def capturing() -> bool:
    """Whether the current stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
