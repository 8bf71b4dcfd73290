"""Pure choice of backend and specs for one call, with the reasons, and nothing from a device but facts.

Order of choice for each setting: argument of the call, environment variable, tuned table, rule.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast, get_args

import torch

from . import env, tables
from .arch import ArchFacts, arch_of, compute_units, parse_arch
from .codeobject.bundle import Bundle, bundles
from .codeobject.facts import spec_text
from .errors import BundleError, UnsupportedError, value_error
from .log import logger
from .plan import cdiv
from .rules import (
    TPRIME_BLOCK_V,
    Problem,
    check_code_objects,
    fast_config,
    fast_prefill_spec,
    fast_refusal,
    fused_prepare_spec,
    l2norm_spec,
    opt_rounding,
    opt_spec,
    output_config,
    output_spec,
    prepare_config,
    prepare_spec,
    prepare_variant,
    state_scan_config,
    state_scan_spec,
    tprime_block_v,
    tprime_prepare_spec,
    tprime_refusal,
    vk_spec,
    vk_tile,
    vsplit_spec,
)
from .spec import (
    AMD_ARCHS,
    CHUNK,
    CODE_OBJECT_BACKENDS,
    SCAN_BLOCK_V,
    TUNED_ARCHS,
    Backend,
    Dtype,
    FastConfig,
    FastPrefillSpec,
    FusedPrepareSpec,
    KernelSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareMode,
    PrepareSpec,
    Rounding,
    ScanKernel,
    StateScanConfig,
    StateScanSpec,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from .tables import LaunchRow, Located

C = TypeVar("C")
Rows: TypeAlias = tables.ScanTable | tables.LaunchTable | None
"""The tables that selection looks into on an architecture."""

DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SCAN_KERNELS: dict[str, ScanKernel] = {"opt": "opt", "mfma16_hip": "opt", "vk": "vk"}
"""K5 kernels of the code-object backends, by every name that a call may use."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether ``name`` can run on a device, and why (not)."""

    name: Backend
    available: bool
    reason: str


@dataclass(frozen=True)
class Request:
    """What a call asks for. ``kernel``, ``rounding`` (None: ``opt_rounding``) and ``block_v`` are of K5 on the
    code-object backends; ``stages`` (fields of ``Selection``) are those that it runs."""

    backend: str = "auto"
    prepare_backend: str | None = None
    arch: str | None = None
    kernel: str = "opt"
    rounding: Rounding | None = None
    block_v: int | None = None
    stages: tuple[str, ...] = ("prepare", "state_scan", "output")


@dataclass(frozen=True)
class Selection:
    """What a call will run, stage by stage, and why. ``str()`` is the text of ``explain``.

    ``fast``: the whole block in its place, None for the stages.
    """

    arch: str
    prepare_backend: Backend
    backend: Backend
    l2norm: L2NormSpec
    prepare: PrepareSpec | FusedPrepareSpec | TPrepareSpec
    state_scan: StateScanSpec | OptStateScanSpec | VkStateScanSpec | VSplitScanSpec
    output: OutputSpec
    reasons: tuple[str, ...]
    fast: FastPrefillSpec | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts, strings and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("arch", self.arch)]
        if self.fast is not None:
            cut = f"segments of {self.fast.segment_chunks} chunks" if self.fast.segment_chunks else "whole sequences"
            rows.append(("K1..K6 fast", f"{self.backend}  {cut}"))
        else:
            rows += self._stage_rows()
        lines = [f"{name:<16}{value.rstrip()}" for name, value in rows]
        return "\n".join([*lines, *(f"- {reason}" for reason in self.reasons)])

    def _stage_rows(self) -> list[tuple[str, str]]:
        return [
            ("K1..K4 prepare", f"{self.prepare_backend}  {_words(self.prepare_backend, self.prepare)}"),
            ("K5 state scan", f"{self.backend}  {_words(self.backend, self.state_scan)}"),
            ("K6 output", f"{self.backend}  {_words(self.backend, self.output)}"),
        ]


Explanation = Selection


def _words(
    backend: Backend,
    spec: PrepareSpec
    | FusedPrepareSpec
    | TPrepareSpec
    | StateScanSpec
    | OptStateScanSpec
    | VkStateScanSpec
    | VSplitScanSpec
    | OutputSpec,
) -> str:
    if backend == "reference":
        return ""
    if isinstance(spec, FusedPrepareSpec):
        return f"fused, one {spec.variant} per chunk and head"
    if isinstance(spec, TPrepareSpec):
        return "fused up to T', one wave per chunk and head"
    if isinstance(spec, VSplitScanSpec):
        return f"vsplit block_v={spec.block_v} rounding={spec.rounding}"
    if isinstance(spec, OptStateScanSpec):
        return f"opt block_v={spec.block_v} rounding={spec.rounding}"
    if isinstance(spec, VkStateScanSpec):
        return f"vk block_v={spec.block_v}"
    text = " ".join(f"{key}={value}" for key, value in asdict(spec.config).items())
    return f"Triton kernel, {text}" if backend in CODE_OBJECT_BACKENDS else text


# ------------------------------------------------------------------------------------------------ backends


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _triton_version() -> tuple[int, ...]:
    """Major and minor version of the installed Triton; () if there is none."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


@functools.cache
def _has_flydsl() -> bool:
    return importlib.util.find_spec("flydsl") is not None


@functools.cache
def _has_emulator() -> bool:
    return importlib.util.find_spec("cdna_emu") is not None


def backends_for(device: torch.device, facts: ArchFacts | None = None) -> list[BackendStatus]:
    """Every backend and whether it can run on ``device``, whose arch is asked for unless ``facts`` are given. Raises
    UnsupportedError for an unknown device or arch."""
    facts = facts or arch_of(device)
    on_cpu = device.type == "cpu"
    if not _has_triton():
        reason = "the package triton is not installed (pip install 'gdn-runtime[triton]')"
        triton = BackendStatus("triton", False, reason)
    elif on_cpu and env.third_party().get("TRITON_INTERPRET") != "1":
        triton = BackendStatus("triton", False, "runs on a CPU only under Triton's interpreter (TRITON_INTERPRET=1)")
    elif on_cpu:
        triton = BackendStatus("triton", True, "Triton's interpreter, for tests: slow")
    else:
        triton = BackendStatus("triton", True, f"Triton compiles for {facts.name} at the first call")
    archs = " and ".join(AMD_ARCHS)
    if on_cpu or facts.name not in AMD_ARCHS:
        flydsl = BackendStatus("flydsl", False, f"runs on {archs} GPUs only")
    else:
        flydsl = BackendStatus("flydsl", True, _code_objects(facts.name))
    if not on_cpu:
        emulate = BackendStatus("emulate", False, f"runs the code objects of {archs} on CPU tensors only")
    elif not _has_emulator():
        emulate = BackendStatus("emulate", False, "the package cdna-emu is not installed")
    else:
        emulate = BackendStatus("emulate", True, f"the code objects of {archs} on the CPU, for tests: slow")
    reference = BackendStatus("reference", True, "torch, any device, for checking and for CPUs")
    return [reference, triton, flydsl, emulate]


def _code_objects(arch: str) -> str:
    """Where the code objects of a call on ``arch`` would come from, in words."""
    refusal = _jit_refusal(env.settings())
    compiled = f"{refusal}: a call raises" if refusal else "compiled at the first call"
    try:
        found = bundles(arch)
    except (BundleError, OSError, ValueError) as error:
        return f"a call raises: {error}"
    if not found:
        return f"no bundle for {arch}, {compiled}"
    return (
        f"from {', '.join(map(str, found))}; what is missing there is {compiled}"
        if not refusal
        else (f"from {', '.join(map(str, found))}; a call that needs another raises")
    )


def _jit_refusal(settings: env.Settings) -> str | None:
    """Why no code object can be compiled in this process; None if it can."""
    if not settings.jit:
        return "GDN_JIT=0 forbids compiling its code objects"
    if settings.flydsl_runtime_run_only:
        return "FLYDSL_RUNTIME_RUN_ONLY=1 forbids compiling its code objects"
    if not _has_flydsl():
        return "the package flydsl, which compiles its code objects, is not installed (pip install 'gdn-runtime[jit]')"
    return None


def choose_backend(device: torch.device, requested: str, *, facts: ArchFacts, name: str = "backend") -> Backend:
    """``requested``, the name of a backend, if it can run on ``device``. Raises UnsupportedError that lists what is
    available and why the rest is not."""
    statuses = backends_for(device, facts)
    for status in statuses:
        if status.name == requested and status.available:
            return status.name
    raise UnsupportedError(
        f"{name} on {device}",
        got=repr(requested),
        supported=[f"{s.name} ({'available' if s.available else 'not available'}: {s.reason})" for s in statuses],
    )


def _auto(
    problem: Problem, device: torch.device, request: Request, settings: env.Settings, found: tuple[Bundle, ...]
) -> tuple[Backend, str]:
    """The backend that "auto" is for a call, and the reason.

    The reference on a CPU; on a GPU Triton or, where its code objects can be had and take the call, flydsl. On a GPU it
    never becomes the reference by itself. ``found`` are the bundles of the architecture.
    """
    if device.type == "cpu":
        return "reference", "the reference backend is the default on cpu"
    triton = f"the triton backend is the default on {device.type}"
    if problem.arch.name not in AMD_ARCHS:
        return "triton", triton
    arch = problem.arch.name
    refusal = _jit_refusal(settings)
    try:
        check_code_objects(problem, "flydsl")
        missing = _missing(_needed(problem, request, settings, found), found)
    except ValueError as error:
        if _scan_options(request):
            raise
        return "triton", f"{triton} where flydsl cannot serve: {error}"
    if found and not missing:
        return "flydsl", f"the flydsl backend is the default on {arch} where a bundle serves the call: {_names(found)}"
    if refusal is None:
        return "flydsl", f"the flydsl backend is the default on {arch} where code objects may be compiled"
    lacks = f"{_names(found)} lacks {spec_text(missing[0])}" if found else f"no bundle for {arch}"
    return "triton", f"{triton} where flydsl cannot serve: {lacks}, and {refusal}"


def _missing(specs: list[KernelSpec], found: tuple[Bundle, ...]) -> list[KernelSpec]:
    return [spec for spec in specs if not any(spec in bundle for bundle in found)]


def _needed(problem: Problem, request: Request, settings: env.Settings, found: tuple[Bundle, ...]) -> list[KernelSpec]:
    """Specs of the code objects that a call needs on the backend flydsl, given the bundles ``found``."""
    specs: list[KernelSpec] = []
    here = request.prepare_backend in (None, "auto", "flydsl")
    prepare: Backend = "flydsl" if here else cast(Backend, request.prepare_backend)
    vsplit = _route(problem, "flydsl", prepare, request, settings, found, [])
    for stage in request.stages:
        if stage == "prepare" and here:
            fused = fused_prepare_spec(problem, prepare_variant(problem)[0])
            specs.append(fused if vsplit is None else tprime_prepare_spec(problem))
        elif stage == "state_scan":
            specs.append(_code_object_scan(problem, request, settings, vsplit, []))
        elif stage == "output":
            specs.append(output_spec(problem, output_config(problem)[0]))
        elif stage == "l2norm":
            specs.append(l2norm_spec(problem))
    return specs


def _names(found: tuple[Bundle, ...]) -> str:
    return " or ".join(str(bundle.folder) for bundle in found)


def target(device: torch.device, request: Request) -> tuple[ArchFacts, int]:
    """Facts of the architecture that a call runs on, and its compute units: those of ``device``, or with the backend
    "emulate" those of the usual part of ``request.arch`` (else GDN_ARCH).

    Raises ValueError if nothing names the emulated architecture, and UnsupportedError for one that is not emulated or
    for a device whose architecture is unknown.
    """
    settings = env.settings()
    backend = settings.backend if request.backend == "auto" else request.backend
    if "emulate" not in (backend, request.prepare_backend) or device.type != "cpu":
        return arch_of(device), compute_units(device) or 1
    text, name = (settings.arch, "GDN_ARCH") if request.arch is None else (request.arch, "arch")
    if not text:
        raise value_error('arch with backend="emulate"', None, f"{' or '.join(AMD_ARCHS)} (or GDN_ARCH)")
    facts = parse_arch(text, name=name)
    if facts.name not in AMD_ARCHS:
        raise UnsupportedError(f'{name} with backend="emulate"', got=repr(text), supported=AMD_ARCHS)
    return facts, facts.nominal_compute_units or 1


# ------------------------------------------------------------------------------------------------ selection


def select(problem: Problem, device: torch.device, request: Request | None = None, **options: Any) -> Selection:
    """Backends and specs of a call; ``options`` are fields of ``Request``.

    Raises UnsupportedError if nothing can serve it as asked, BundleError where "auto" would look into a bundle that
    cannot be used: whoever installed it wants it used.
    """
    request = Request(**options) if request is None else request
    settings = env.settings()
    rows: Rows = None
    if problem.arch.vendor == "amd":
        rows = tables.table()
    elif problem.arch.name in TUNED_ARCHS:
        rows = tables.launch_table(settings.tables)
    found: tuple[Bundle, ...] = ()
    if request.backend == settings.backend == "auto" and device.type != "cpu" and problem.arch.name in AMD_ARCHS:
        found = bundles(problem.arch.name)
    return _select(problem, device, request, settings, rows, found)


@functools.lru_cache(maxsize=4096)
def _select(
    problem: Problem,
    device: torch.device,
    request: Request,
    settings: env.Settings,
    rows: Rows,
    found: tuple[Bundle, ...],
) -> Selection:
    # Rows of AMD are in the key only: choose_block_v looks them up.
    launches = rows if isinstance(rows, tables.LaunchTable) else None
    arch = request.arch
    if arch is not None and parse_arch(arch).name != problem.arch.name:
        raise UnsupportedError(f"arch for tensors on {device}", got=repr(arch), supported=[problem.arch.name])
    reasons: list[str] = []
    asked, name = request.backend, "backend"
    if asked == "auto" and settings.backend != "auto":
        asked, name = settings.backend, "GDN_BACKEND"
    why = f'{name}="{asked}" was asked for'
    if asked == "auto":
        asked, why = _auto(problem, device, request, settings, found)
    chosen = choose_backend(device, asked, facts=problem.arch, name=name)
    reasons.append(why)
    chosen_prepare = chosen
    if request.prepare_backend is not None and request.prepare_backend != "auto":
        chosen_prepare = choose_backend(device, request.prepare_backend, facts=problem.arch, name="prepare_backend")
        reasons.append(f'prepare_backend="{request.prepare_backend}" was asked for')
    for backend in {chosen, chosen_prepare} & CODE_OBJECT_BACKENDS:
        check_code_objects(problem, backend)

    fast = _fast(problem, chosen, request, settings, launches, reasons)
    # The stages' specs stand beside the fast path's, for whoever runs one of them alone; their reasons do not.
    why_stages = reasons if fast is None else []
    vsplit = _route(problem, chosen, chosen_prepare, request, settings, found, why_stages)
    prepare = _prepare(problem, chosen_prepare, settings, launches, vsplit is not None, why_stages)
    scan = _state_scan(problem, chosen, request, settings, launches, vsplit, why_stages)
    row = _row(launches, "block", problem, chosen)
    if row is not None and isinstance(row.row.config, OutputConfig):
        config = row.row.config
        why_stages.append(f"output: {_from_table(row)}")
    else:
        config = _ruled(output_config, problem, why_stages, "output", chosen)
    output = output_spec(problem, config)
    selection = Selection(
        arch=problem.arch.name,
        prepare_backend=chosen_prepare,
        backend=chosen,
        l2norm=_intern(l2norm_spec(problem)),
        prepare=_intern(prepare),
        state_scan=_intern(scan),
        output=_intern(output),
        reasons=tuple(reasons),
        fast=_intern(fast),
    )
    for spec in (selection.prepare, selection.state_scan, selection.output):
        spec.check()
    if fast is not None:
        fast.check()
    logger.info("selected for %s:\n%s", device, selection)
    return selection


def _route(
    problem: Problem,
    backend: Backend,
    prepare_backend: Backend,
    request: Request,
    settings: env.Settings,
    found: tuple[Bundle, ...],
    reasons: list[str],
) -> int | None:
    """What K1..K4 hand to K5 on a backend of code objects: columns of v per workgroup of the V-split K5 that takes T',
    or None for w and u.

    Raises UnsupportedError if GDN_AMD_ROUTE asks for T' in a call of the block that cannot take it.
    """
    if backend not in CODE_OBJECT_BACKENDS or not {"prepare", "state_scan"} <= set(request.stages):
        return None
    obstacle = tprime_refusal(problem)
    if backend != prepare_backend:
        obstacle = f"K1..K4 on {prepare_backend}"
    elif _scan_options(request):
        obstacle = f"{' and '.join(_scan_options(request))} of K5"
    block_v, why = tprime_block_v(problem)
    if settings.amd_route == "tprime":
        narrowest = TPRIME_BLOCK_V[problem.arch.name][0]
        if obstacle is not None:
            raise UnsupportedError(f"GDN_AMD_ROUTE with {obstacle}", got="'tprime'", supported=["staged"])
        block_v, why = settings.k5_block_v or block_v or narrowest, "GDN_AMD_ROUTE asks for it"
    elif settings.amd_route == "staged":
        block_v, why = None, "GDN_AMD_ROUTE asks for them"
    elif obstacle is not None or settings.k5_block_v is not None:
        block_v, why = None, obstacle or "GDN_K5_BLOCK_V is of another kernel"
    elif block_v is not None and found and _jit_refusal(settings) is not None:
        lacking = _missing([tprime_prepare_spec(problem), _vsplit(problem, request, block_v)], found)
        if lacking:
            block_v, why = None, f"{_names(found)} lacks {spec_text(lacking[0])}"
    what = "w and u" if block_v is None else "T'"
    reasons.append(f"route: {what}, {why}")
    return block_v


def _vsplit(problem: Problem, request: Request, block_v: int) -> VSplitScanSpec:
    return vsplit_spec(problem, block_v, request.rounding or opt_rounding(problem.arch.name, block=True))


def _row(
    launches: tables.LaunchTable | None, kernel: tables.LaunchKernel, problem: Problem, backend: Backend
) -> Located[LaunchRow] | None:
    """The row of the tables of launch configurations for a call, if there is one."""
    if launches is None or not len(launches) or backend != "triton":
        return None
    call = problem.launch_call()
    return None if call is None else launches.get(kernel, call)


def _from_table(found: Located[LaunchRow]) -> str:
    config = " ".join(f"{name}={value}" for name, value in asdict(found.row.config).items())
    return f"{config} from the tuned table, {tables.describe(found)}"


def _fast(
    problem: Problem,
    backend: Backend,
    request: Request,
    settings: env.Settings,
    launches: tables.LaunchTable | None,
    reasons: list[str],
) -> FastPrefillSpec | None:
    """The spec of the fast path if it serves the call; else None, with the reason if it was asked for."""
    if backend != "triton" or settings.prefill == "staged" or "output" not in request.stages:
        return None
    refusal = fast_refusal(problem, _triton_version())
    if request.prepare_backend not in (None, "auto"):
        refusal = "prepare_backend asks for stages"
    elif settings.prepare_mode != "auto" or settings.k5_block_v is not None:
        refusal = "GDN_PREPARE_MODE or GDN_K5_BLOCK_V asks for stages"
    if refusal is not None:
        reasons.append(f"stages K1..K6, not the fast path: {refusal}")
        return None
    row = _row(launches, "block", problem, backend)
    if row is not None and isinstance(row.row.config, FastConfig):
        config, why = row.row.config, _from_table(row)
    elif row is not None and settings.prefill == "auto":
        reasons.append(f"stages K1..K6, not the fast path: the tuned table says so, {tables.describe(row)}")
        return None
    else:
        config, why = fast_config(problem)
    reasons.append(f"fast path, no snapshots, w or u: {why}")
    return fast_prefill_spec(problem, config)


def _prepare(
    problem: Problem,
    backend: Backend,
    settings: env.Settings,
    launches: tables.LaunchTable | None,
    tprime: bool,
    reasons: list[str],
) -> PrepareSpec | FusedPrepareSpec | TPrepareSpec:
    if tprime:
        return tprime_prepare_spec(problem)
    if backend in CODE_OBJECT_BACKENDS:
        return fused_prepare_spec(problem, _ruled(prepare_variant, problem, reasons, "prepare", backend))
    row = _row(launches, "prepare", problem, backend)
    if row is not None:
        config = cast(PrepareConfig, row.row.config)
        reasons.append(f"prepare: {_from_table(row)}")
    else:
        config = _ruled(prepare_config, problem, reasons, "prepare", backend)
    if backend != "reference" and settings.prepare_mode != "auto":
        config = replace(config, mode=cast(PrepareMode, settings.prepare_mode))
        reasons.append(f"prepare: mode={settings.prepare_mode} from GDN_PREPARE_MODE")
    return prepare_spec(problem, config)


def _state_scan(
    problem: Problem,
    backend: Backend,
    request: Request,
    settings: env.Settings,
    launches: tables.LaunchTable | None,
    vsplit: int | None,
    reasons: list[str],
) -> StateScanSpec | OptStateScanSpec | VkStateScanSpec | VSplitScanSpec:
    if backend in CODE_OBJECT_BACKENDS:
        return _code_object_scan(problem, request, settings, vsplit, reasons)
    _refuse_scan_options(request, backend)
    row = _row(launches, "state_scan", problem, backend)
    if row is not None:
        config = cast(StateScanConfig, row.row.config)
        reasons.append(f"state scan: {_from_table(row)}")
    else:
        config = _ruled(state_scan_config, problem, reasons, "state scan", backend)
    if backend != "reference" and settings.k5_block_v is not None:
        config = replace(config, block_v=settings.k5_block_v)
        reasons.append(f"state scan: block_v={settings.k5_block_v} from GDN_K5_BLOCK_V")
    return state_scan_spec(problem, config)


def _refuse_scan_options(request: Request, backend: Backend) -> None:
    for name in _scan_options(request):
        supported = [
            f"{getattr(Request(), name)!r}",
            f"another with backend {' or '.join(sorted(CODE_OBJECT_BACKENDS))}",
        ]
        raise UnsupportedError(
            f'{name} with backend="{backend}"', got=repr(getattr(request, name)), supported=supported
        )


def _scan_options(request: Request) -> list[str]:
    """Those options of K5 that only the code-object backends have and that ``request`` does not leave at the
    default."""
    default = Request()
    kernel = SCAN_KERNELS.get(request.kernel, request.kernel)
    given = {"kernel": kernel, "rounding": request.rounding, "block_v": request.block_v}
    return [name for name, value in given.items() if value != getattr(default, name)]


def _code_object_scan(
    problem: Problem, request: Request, settings: env.Settings, vsplit: int | None, reasons: list[str]
) -> OptStateScanSpec | VkStateScanSpec | VSplitScanSpec:
    """``vsplit``: of ``_route``."""
    if vsplit is not None:
        reasons.append(f"state scan: block_v={vsplit} by the route")
        return _vsplit(problem, request, vsplit)
    if request.kernel not in SCAN_KERNELS:
        raise UnsupportedError("kernel", got=repr(request.kernel), supported=SCAN_KERNELS)
    if request.rounding is not None and request.rounding not in get_args(Rounding):
        raise UnsupportedError("rounding", got=repr(request.rounding), supported=get_args(Rounding))
    if request.block_v is not None and request.block_v not in SCAN_BLOCK_V:
        raise UnsupportedError("block_v", got=request.block_v, supported=SCAN_BLOCK_V)
    if SCAN_KERNELS[request.kernel] == "vk":
        if request.rounding == "truncate":
            raise UnsupportedError('rounding with kernel="vk"', got=repr(request.rounding), supported=["'nearest'"])
        block_v, why = vk_tile(problem)
        if settings.k5_block_v is not None:
            block_v, why = settings.k5_block_v, f"block_v={settings.k5_block_v} from GDN_K5_BLOCK_V"
    else:
        block_v, why = tables.choose_block_v(problem.scan_key(), override=settings.k5_block_v)
    if request.block_v is not None:
        block_v, why = request.block_v, f"block_v={request.block_v} was asked for"
    reasons.append(f"state scan: {why}")
    if SCAN_KERNELS[request.kernel] == "vk":
        return vk_spec(problem, block_v)
    rounding = request.rounding or opt_rounding(problem.arch.name, block="output" in request.stages)
    return opt_spec(problem, block_v, rounding)


def _ruled(
    rule: Callable[[Problem], tuple[C, str]], problem: Problem, reasons: list[str], stage: str, backend: Backend
) -> C:
    config, why = rule(problem)
    if backend != "reference":
        reasons.append(f"{stage}: {why}")
    return config


_specs: dict[Any, Any] = {}


def _intern(spec: C) -> C:
    """One object for equal specs, so that launchers find kernels by identity: hashing a spec takes 2 us."""
    return cast(C, _specs.setdefault(spec, spec))


def explain_shape(
    *,
    num_heads: int,
    num_key_heads: int,
    seq_lens: tuple[int, ...],
    is_varlen: bool,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    snapshot_dtype: torch.dtype,
    device: torch.device,
    backend: str = "auto",
    prepare_backend: str | None = None,
    arch: str | None = None,
    use_state_indices: bool = False,
) -> Explanation:
    """What a call of this shape would run and why, without tensors. Dense calls pass equal ``seq_lens``, one per row.

    ``arch`` together with a GPU that is not there explains for the usual part of that arch. Raises UnsupportedError as
    the call would.
    """
    chunks = [cdiv(length, CHUNK) for length in seq_lens]
    request = Request(backend, prepare_backend, arch)
    absent = arch is not None and device.type == "cuda" and not torch.cuda.is_available()
    if arch is not None and absent:
        facts = parse_arch(arch)
        units = facts.nominal_compute_units or 1
    else:
        facts, units = target(device, request)
    problem = Problem(
        arch=facts,
        compute_units=units,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        num_seqs=len(seq_lens),
        total_chunks=sum(chunks),
        max_seq_chunks=max(chunks, default=0),
        dtype=DTYPES[dtype],
        beta_dtype="fp32",
        state_dtype=DTYPES[state_dtype],
        snapshot_dtype=DTYPES[snapshot_dtype],
        is_varlen=is_varlen,
        use_state_indices=use_state_indices,
    )
    return select(problem, device, request)
