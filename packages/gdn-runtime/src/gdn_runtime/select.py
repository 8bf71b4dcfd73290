"""Pure choice of backend and launch configuration for one call, with the reasons, and nothing from a device but facts.

Order of choice for each setting: argument of the call, environment variable, rule.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

import torch

from . import env
from .arch import ArchFacts, arch_of, compute_units, parse_arch
from .errors import UnsupportedError
from .log import logger
from .plan import cdiv
from .spec import (
    CHUNK,
    HEAD_DIM,
    Backend,
    Dtype,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareMode,
    PrepareSpec,
    StateScanConfig,
    StateScanSpec,
)

C = TypeVar("C")

DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class BackendStatus:
    """Whether ``name`` can run on a device, and why (not)."""

    name: Backend
    available: bool
    reason: str


@dataclass(frozen=True)
class Problem:
    """What selection may look at: the shape of one call and the facts of its device."""

    arch: ArchFacts
    compute_units: int
    num_heads: int
    num_key_heads: int
    num_seqs: int
    total_chunks: int
    max_seq_chunks: int
    dtype: Dtype
    beta_dtype: Dtype
    state_dtype: Dtype
    snapshot_dtype: Dtype
    is_varlen: bool
    use_exp2: bool = True
    use_g: bool = True
    use_gk: bool = False
    use_initial_state: bool = True
    store_final_state: bool = True
    save_new_value: bool = True
    use_state_indices: bool = False
    use_state_mask: bool = False
    g_head_major: bool = True


@dataclass(frozen=True)
class Selection:
    """What a call will run, stage by stage, and why. ``str()`` is the text of ``explain``."""

    arch: str
    prepare_backend: Backend
    backend: Backend
    prepare: PrepareConfig
    state_scan: StateScanConfig
    output: OutputConfig
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts, strings and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("arch", self.arch),
            ("K1..K4 prepare", f"{self.prepare_backend}  {_config_text(self.prepare_backend, self.prepare)}"),
            ("K5 state scan", f"{self.backend}  {_config_text(self.backend, self.state_scan)}"),
            ("K6 output", f"{self.backend}  {_config_text(self.backend, self.output)}"),
        ]
        lines = [f"{name:<16}{value.rstrip()}" for name, value in rows]
        return "\n".join([*lines, *(f"- {reason}" for reason in self.reasons)])


Explanation = Selection


def _config_text(backend: Backend, config: PrepareConfig | StateScanConfig | OutputConfig) -> str:
    if backend == "reference":
        return ""
    return " ".join(f"{key}={value}" for key, value in asdict(config).items())


# ------------------------------------------------------------------------------------------------ backends


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def backends_for(device: torch.device, facts: ArchFacts | None = None) -> list[BackendStatus]:
    """Every backend and whether it can run on ``device``, whose arch is asked for unless ``facts`` are given. Raises
    UnsupportedError for an unknown device or arch."""
    facts = facts or arch_of(device)
    if not _has_triton():
        reason = "the package triton is not installed (pip install 'gdn-runtime[triton]')"
        triton = BackendStatus("triton", False, reason)
    elif facts.vendor == "cpu" and env.third_party().get("TRITON_INTERPRET") != "1":
        triton = BackendStatus("triton", False, "runs on a CPU only under Triton's interpreter (TRITON_INTERPRET=1)")
    elif facts.vendor == "cpu":
        triton = BackendStatus("triton", True, "Triton's interpreter, for tests: slow")
    else:
        triton = BackendStatus("triton", True, f"Triton compiles for {facts.name} at the first call")
    return [BackendStatus("reference", True, "torch, any device, for checking and for CPUs"), triton]


def choose_backend(
    device: torch.device, requested: str, *, facts: ArchFacts | None = None, name: str = "backend"
) -> tuple[Backend, str]:
    """Backend for ``device`` and the reason. ``requested`` is "auto" or a backend's name.

    "auto" is Triton on a GPU and the reference on a CPU; on a GPU it never becomes the reference by itself. Raises
    ValueError-derived UnsupportedError that lists what is available and why the rest is not.
    """
    statuses = backends_for(device, facts)
    reason = f'{name}="{requested}" was asked for'
    if requested == "auto":
        requested = "reference" if device.type == "cpu" else "triton"
        reason = f"the {requested} backend is the default on {device.type}"
    for status in statuses:
        if status.name == requested and status.available:
            return status.name, reason
    raise UnsupportedError(
        f"{name} on {device}",
        got=repr(requested),
        supported=[f"{s.name} ({'available' if s.available else 'not available'}: {s.reason})" for s in statuses],
    )


# ------------------------------------------------------------------------------------------------ configurations


def prepare_config(problem: Problem) -> tuple[PrepareConfig, str]:
    """Rule for K1..K4: fused with 4 warps, the fastest of {fused, split} x {2, 4, 8 warps} at every shape measured.

    H200, H/Hg = 32/16, 8/2, 64/16, one and four sequences of 8192; for example 107 us against 144 (split) and 139
    (2 warps) at 32/16, 1 x 8192.
    """
    return PrepareConfig("fused", num_warps=4, num_stages=1), "one fused kernel, w and u are formed from registers"


def state_scan_config(problem: Problem) -> tuple[StateScanConfig, str]:
    """Rule for K5: 32 value rows per program while two such programs per compute unit hold all scans, else 64.

    H * total_chunks / max_seq_chunks is the mean number of (sequence, head) scans that run at a time; each is split
    into 128 / block_v programs. H200, 132 SMs, us with 32 / 64 rows: 16 scans 187 / 274, 32 scans 207 / 288, 64 scans
    299 / 333, 96 scans 567 / 411, 128 scans 591 / 451 (8192 tokens each; 16 and 128 rows win nowhere).
    """
    scans = problem.num_heads * problem.total_chunks / max(problem.max_seq_chunks, 1)
    narrow = scans * (HEAD_DIM // 32) <= 2 * problem.compute_units
    why = f"{scans:.0f} scans at a time on {problem.compute_units} compute units"
    if problem.arch.vendor == "amd":
        return StateScanConfig(32 if narrow else 64, num_warps=4, num_stages=1), why
    block_v, num_stages = (32, 3) if narrow else (64, 2)
    return StateScanConfig(block_v, num_warps=4, num_stages=num_stages), why


def output_config(problem: Problem) -> tuple[OutputConfig, str]:
    """Rule for K6. 64 columns with 4 warps beat 128 by 3 % and 32 by a factor of 2 on an H200 at every shape measured
    for ``prepare_config``."""
    return OutputConfig(64, num_warps=4, num_stages=1), "two programs per chunk and value head"


# ------------------------------------------------------------------------------------------------ selection


def select(
    problem: Problem,
    device: torch.device,
    *,
    backend: str = "auto",
    prepare_backend: str | None = None,
    arch: str | None = None,
) -> Selection:
    """Backends and configurations of a call. Raises UnsupportedError if nothing can serve it as asked."""
    settings = env.settings()
    return _select(
        problem, device, backend, prepare_backend, arch, settings.backend, settings.prepare_mode, settings.k5_block_v
    )


@functools.lru_cache(maxsize=4096)
def _select(
    problem: Problem,
    device: torch.device,
    backend: str,
    prepare_backend: str | None,
    arch: str | None,
    env_backend: str,
    env_prepare_mode: str,
    env_block_v: int | None,
) -> Selection:
    if arch is not None and parse_arch(arch).name != problem.arch.name:
        raise UnsupportedError(f"arch for tensors on {device}", got=repr(arch), supported=[problem.arch.name])
    reasons: list[str] = []
    if backend == "auto" and env_backend != "auto":
        chosen, why = choose_backend(device, env_backend, facts=problem.arch, name="GDN_BACKEND")
    else:
        chosen, why = choose_backend(device, backend, facts=problem.arch)
    reasons.append(why)
    chosen_prepare = chosen
    if prepare_backend not in (None, "auto"):
        chosen_prepare, why = choose_backend(device, prepare_backend, facts=problem.arch, name="prepare_backend")
        reasons.append(why)

    prepare = _ruled(prepare_config, problem, reasons, "prepare", chosen_prepare)
    scan = _ruled(state_scan_config, problem, reasons, "state scan", chosen)
    output = _ruled(output_config, problem, reasons, "output", chosen)
    if chosen_prepare != "reference" and env_prepare_mode != "auto":
        prepare = replace(prepare, mode=cast(PrepareMode, env_prepare_mode))
        reasons.append(f"prepare: mode={env_prepare_mode} from GDN_PREPARE_MODE")
    if chosen != "reference" and env_block_v is not None:
        scan = replace(scan, block_v=env_block_v)
        reasons.append(f"state scan: block_v={env_block_v} from GDN_K5_BLOCK_V")
    prepare_spec(problem, prepare).check()
    state_scan_spec(problem, scan).check()
    output_spec(problem, output).check()
    selection = Selection(problem.arch.name, chosen_prepare, chosen, prepare, scan, output, tuple(reasons))
    logger.info("selected for %s:\n%s", device, selection)
    return selection


def _ruled(
    rule: Callable[[Problem], tuple[C, str]], problem: Problem, reasons: list[str], stage: str, backend: Backend
) -> C:
    config, why = rule(problem)
    if backend != "reference":
        reasons.append(f"{stage}: {why}")
    return config


def prepare_spec(problem: Problem, config: PrepareConfig) -> PrepareSpec:
    """The spec of K1..K4 of ``problem``."""
    p = problem
    return PrepareSpec(
        p.arch.name, p.dtype, p.beta_dtype, p.num_heads, p.num_key_heads, p.is_varlen, p.use_exp2, config
    )


def state_scan_spec(problem: Problem, config: StateScanConfig) -> StateScanSpec:
    """The spec of K5 of ``problem``."""
    p = problem
    return StateScanSpec(
        arch=p.arch.name,
        dtype=p.dtype,
        state_dtype=p.state_dtype,
        snapshot_dtype=p.snapshot_dtype,
        num_heads=p.num_heads,
        num_key_heads=p.num_key_heads,
        is_varlen=p.is_varlen,
        use_g=p.use_g,
        use_gk=p.use_gk,
        use_initial_state=p.use_initial_state,
        store_final_state=p.store_final_state,
        save_new_value=p.save_new_value,
        use_state_indices=p.use_state_indices,
        use_state_mask=p.use_state_mask,
        g_head_major=p.g_head_major,
        use_exp2=p.use_exp2,
        config=config,
    )


def output_spec(problem: Problem, config: OutputConfig) -> OutputSpec:
    """The spec of K6 of ``problem``."""
    p = problem
    return OutputSpec(
        p.arch.name, p.dtype, p.snapshot_dtype, p.num_heads, p.num_key_heads, p.is_varlen, p.use_exp2, config
    )


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
) -> Explanation:
    """What a call of this shape would run and why, without tensors. Dense calls pass equal ``seq_lens``, one per row.

    ``arch`` together with a GPU that is not there explains for the usual part of that arch. Raises UnsupportedError as
    the call would.
    """
    chunks = [cdiv(length, CHUNK) for length in seq_lens]
    absent = arch is not None and device.type == "cuda" and not torch.cuda.is_available()
    facts = parse_arch(arch) if arch is not None and absent else arch_of(device)
    units = facts.nominal_compute_units if absent else compute_units(device)
    problem = Problem(
        arch=facts,
        compute_units=units or 1,
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
    )
    return select(problem, device, backend=backend, prepare_backend=prepare_backend, arch=arch)
