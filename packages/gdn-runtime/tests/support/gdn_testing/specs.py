"""The specs that a backend's stages get for some inputs, without selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gdn_runtime import rules
from gdn_runtime.arch import parse_arch
from gdn_runtime.plan import cdiv
from gdn_runtime.rules import Problem
from gdn_runtime.select import DTYPES
from gdn_runtime.spec import (
    FusedPrepareSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareSpec,
    PrepareVariant,
    Rounding,
    StateScanConfig,
    StateScanSpec,
)
from gdn_runtime.testing import GdnInputs


@dataclass(frozen=True)
class Specs:
    """One spec per stage."""

    l2norm: L2NormSpec
    prepare: PrepareSpec | FusedPrepareSpec
    state_scan: StateScanSpec | OptStateScanSpec
    output: OutputSpec


def problem_of(
    inputs: GdnInputs,
    *,
    arch: str = "cpu",
    snapshot_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    **changes: Any,
) -> Problem:
    """What selection would look at; ``changes`` are fields of ``Problem``."""
    facts = parse_arch(arch)
    chunks = [cdiv(length, 64) for length in inputs.seq_lens]
    initial = inputs.initial_state
    problem = Problem(
        arch=facts,
        compute_units=facts.nominal_compute_units or 1,
        num_heads=inputs.num_heads,
        num_key_heads=inputs.num_key_heads,
        num_seqs=inputs.num_seqs,
        total_chunks=sum(chunks),
        max_seq_chunks=max(chunks, default=0),
        dtype=DTYPES[inputs.k.dtype],
        beta_dtype=DTYPES[inputs.beta.dtype],
        state_dtype=DTYPES[state_dtype or (torch.float32 if initial is None else initial.dtype)],
        snapshot_dtype=DTYPES[snapshot_dtype or inputs.k.dtype],
        is_varlen=inputs.cu_seqlens is not None,
        use_initial_state=initial is not None,
    )
    return replace(problem, **changes)


def triton_specs(
    problem: Problem,
    *,
    prepare: PrepareConfig | None = None,
    state_scan: StateScanConfig | None = None,
    output: OutputConfig | None = None,
) -> Specs:
    """Specs of the Triton stages; the reference takes them too."""
    return Specs(
        rules.l2norm_spec(problem),
        rules.prepare_spec(problem, prepare or PrepareConfig()),
        rules.state_scan_spec(problem, state_scan or StateScanConfig()),
        rules.output_spec(problem, output or OutputConfig()),
    )


def code_object_specs(
    problem: Problem, *, variant: PrepareVariant = "group", block_v: int = 32, rounding: Rounding = "truncate"
) -> Specs:
    """Specs of the stages that launch AMD code objects."""
    return Specs(
        rules.l2norm_spec(problem),
        rules.fused_prepare_spec(problem, variant),
        rules.opt_spec(problem, block_v, rounding),
        rules.output_spec(problem, rules.output_config(problem)[0]),
    )


def usual_problem(arch: str, **changes: Any) -> Problem:
    """One packed sequence of 8192 tokens of Qwen3.5-35B on the usual part of ``arch``, but for ``changes``."""
    facts = parse_arch(arch)
    base = Problem(
        arch=facts,
        compute_units=facts.nominal_compute_units or 1,
        num_heads=32,
        num_key_heads=16,
        num_seqs=1,
        total_chunks=128,
        max_seq_chunks=128,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype="fp32",
        snapshot_dtype="bf16",
        is_varlen=True,
    )
    return replace(base, **changes)
