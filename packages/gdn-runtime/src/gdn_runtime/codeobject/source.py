"""Where code objects come from: this process, or the compiler if it is allowed to run."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch

from ..env import settings
from ..errors import MissingCodeObjectError
from .facts import CodeObject, KernelSpec, spec_text

_COMPILER = "gdn_runtime.kernels.compile"

_codes: dict[KernelSpec, CodeObject] = {}
_lock = threading.Lock()
_making: dict[KernelSpec, threading.Lock] = {}


def code_object(spec: KernelSpec) -> CodeObject:
    """The code object of ``spec``, made once per process whatever the number of threads that ask.

    Raises MissingCodeObjectError if it would have to be compiled and may not be: GDN_JIT is 0, FLYDSL_RUNTIME_RUN_ONLY
    is 1, or a stream is being captured. Raises UnsupportedError as ``spec.check`` and CompileError as the compiler.
    """
    code = _codes.get(spec)
    if code is not None:
        return code
    with _lock:
        making = _making.setdefault(spec, threading.Lock())
    with making:
        code = _codes.get(spec)
        if code is None:
            code = _codes[spec] = _make(spec)
    return code


def _make(spec: KernelSpec) -> CodeObject:
    spec.check()
    current = settings()
    if not current.jit:
        raise MissingCodeObjectError(spec_text(spec), "set GDN_JIT=1 to compile it now")
    if current.flydsl_runtime_run_only:
        raise MissingCodeObjectError(spec_text(spec), "FLYDSL_RUNTIME_RUN_ONLY=1 forbids compiling it, unset it")
    if capturing():
        raise MissingCodeObjectError(spec_text(spec), "a stream is being captured; warm up first: call once before it")
    compiler: Any = importlib.import_module(_COMPILER)
    code: CodeObject = compiler.compile_spec(spec)
    return code


def capturing() -> bool:
    """Whether the current stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
