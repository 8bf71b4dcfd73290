"""Where code objects come from: this process, a bundle, or the compiler if it is allowed to run."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..env import settings
from ..errors import CaptureError, MissingCodeObjectError
from ..log import logger
from ..spec import KernelSpec
from .bundle import Artifact, Bundle, bundles
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
    return _once(spec, _find)


def code_of_artifact(bundle: Bundle, artifact: Artifact) -> CodeObject:
    """The code object of an artifact, for every later call that asks for its spec; read from ``bundle`` unless this
    process has one already. CorruptBundleError as ``Bundle.load``."""
    return _once(bundle.spec(artifact), functools.partial(bundle.load, artifact))


def _once(spec: KernelSpec, find: Callable[[KernelSpec], CodeObject]) -> CodeObject:
    code = _codes.get(spec)
    if code is not None:
        return code
    with _lock:
        making = _making.setdefault(spec, threading.Lock())
    with making:
        code = _codes.get(spec)
        if code is None:
            code = _codes[spec] = find(spec)
    return code


def _find(spec: KernelSpec) -> CodeObject:
    spec.check()
    searched = bundles(spec.arch)
    for bundle in searched:
        found = bundle.code_object(spec)
        if found is not None:
            return found
    current = settings()
    if not current.jit:
        raise missing(spec_text(spec), spec.arch, searched, "set GDN_JIT=1 to compile it at the first call")
    # By name: the serving path imports neither kernels nor compilers.
    jit: Any = importlib.import_module(_JIT)
    kept: CodeObject | None = jit.find(spec, current.jit_cache_dir)
    if kept is not None:
        return kept
    if current.flydsl_runtime_run_only:
        ways_out = "unset FLYDSL_RUNTIME_RUN_ONLY, which forbids compiling it"
        raise missing(spec_text(spec), spec.arch, searched, ways_out)
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


def missing(what: str, arch: str, searched: tuple[Bundle, ...], otherwise: str = "") -> MissingCodeObjectError:
    """The error that says where ``what`` was looked for and which commands help; ``otherwise`` is one more way."""
    reason = (
        f"{_searched(arch, searched)}. Build a bundle that has it and name it: `gdn-aot build --arch {arch} --complete "
        "--out DIR`, with `--table FILE` if no packaged table has its heads, then GDN_BUNDLE=DIR"
    )
    return MissingCodeObjectError(what, f"{reason}; or {otherwise}" if otherwise else reason)


def capturing() -> bool:
    """Whether the current stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
