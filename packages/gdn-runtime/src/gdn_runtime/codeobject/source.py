"""Where code objects come from: this process, a bundle, or the compiler if it is allowed to run."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch

from ..env import settings
from ..errors import CaptureError, MissingCodeObjectError
from ..log import logger
from ..spec import KernelSpec
from .bundle import Bundle, bundles
from .facts import CodeObject, spec_text

_JIT = "gdn_runtime.kernels.jit"

_codes: dict[KernelSpec, CodeObject] = {}
_lock = threading.Lock()
_making: dict[KernelSpec, threading.Lock] = {}


def code_object(spec: KernelSpec) -> CodeObject:
    """The code object of ``spec``, read or made once per process whatever the number of threads that ask.

    Raises UnsupportedError as ``spec.check``; BundleError as ``bundles`` and ``Bundle.code_object``;
    MissingCodeObjectError if it would have to be compiled and GDN_JIT is 0 or FLYDSL_RUNTIME_RUN_ONLY is 1,
    CaptureError if a stream is being captured; CompileError as the compiler.
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


def keep(code: CodeObject) -> CodeObject:
    """Let this process find ``code`` for its spec; the one that is to be used, for another may have been first."""
    with _lock:
        return _codes.setdefault(code.spec, code)


def _find(spec: KernelSpec) -> CodeObject:
    spec.check()
    searched = bundles(spec.arch)
    for bundle in searched:
        found = bundle.code_object(spec)
        if found is not None:
            return found
    current = settings()
    if not current.jit:
        raise MissingCodeObjectError(
            spec_text(spec), _ways_out(spec, searched, "set GDN_JIT=1 to compile it at the first call")
        )
    # By name: the serving path imports neither kernels nor compilers.
    jit: Any = importlib.import_module(_JIT)
    kept: CodeObject | None = jit.find(spec, current.jit_cache_dir)
    if kept is not None:
        return kept
    if current.flydsl_runtime_run_only:
        raise MissingCodeObjectError(
            spec_text(spec), _ways_out(spec, searched, "unset FLYDSL_RUNTIME_RUN_ONLY, which forbids compiling it")
        )
    if capturing():
        raise CaptureError(f"compiling {spec_text(spec)}")
    logger.warning("compiling %s: %s", spec_text(spec), _searched(spec.arch, searched))
    made: CodeObject = jit.make(spec, current.jit_cache_dir)
    return made


def _searched(arch: str, searched: tuple[Bundle, ...]) -> str:
    if searched:
        return f"not in {' or '.join(map(str, searched))}"
    if settings().bundle:
        return f"GDN_BUNDLE names no bundle for {arch}"
    return f"GDN_BUNDLE is not set, and the package carries no bundle for {arch}"


def _ways_out(spec: KernelSpec, searched: tuple[Bundle, ...], compiling: str) -> str:
    """Where ``spec`` was looked for and what helps, for an error."""
    return (
        f"{_searched(spec.arch, searched)}. Build a bundle that has it and name it: `gdn-aot build --arch {spec.arch} "
        f"--complete --out DIR`, with `--table FILE` if no packaged table has its heads, then GDN_BUNDLE=DIR; or "
        f"{compiling}"
    )


def capturing() -> bool:
    """Whether the current stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
