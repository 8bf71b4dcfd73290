"""Launches of the attention kernels alone on the emulator, and what their partials must be."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.arch import KNOWN, Fp8
from gdn_runtime.codeobject.emulate import EmulatorLauncher
from pa_decode import reference
from pa_decode.layouts import scale_mode
from pa_decode.planner import make_plan
from pa_decode.quantise import FLAVOURS, Flavour
from pa_decode.reference import DecodeInputs
from pa_decode.spec import AttentionKernel, AttentionSpec

TOLERANCE = 0.005
"""Absolute and relative, of an output whose values are of amplitude 1/16."""


@dataclass(frozen=True)
class Partials:
    """``out`` [Hkv, capacity, R, D], ``reference`` (natural logarithm) and ``total`` [Hkv, capacity, R]."""

    out: Tensor
    reference: Tensor
    total: Tensor

    def same_as(self, other: Partials) -> bool:
        """Whether all bits agree."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def flavour(arch: str) -> Flavour:
    """FP8 of an architecture."""
    name: Fp8 | None = KNOWN[arch].fp8
    assert name is not None
    return FLAVOURS[name]


def spec_of(
    inputs: DecodeInputs, arch: str, *, kernel: AttentionKernel = "d256_pipe", single_tile: bool = False
) -> AttentionSpec:
    """The spec of the attention kernel for a problem."""
    return AttentionSpec(
        arch=arch,
        head_dim=inputs.query.shape[2],
        page_size=inputs.k_cache.shape[3],
        group_size=inputs.query.shape[1] // inputs.num_kv_heads,
        query_length=inputs.query_length,
        query_dtype="bf16" if inputs.query.dtype == torch.bfloat16 else "fp16",
        scale_mode=scale_mode("k_scale", inputs.k_scale),
        v_packed=inputs.v_cache.dim() == 5,
        windowed=inputs.window > 0,
        single_tile=single_tile,
        kernel=kernel,
    )


def work_of(inputs: DecodeInputs, capacity: int, max_partitions: int = 64) -> Tensor:
    """``work_info`` of a plan of ``capacity`` slots."""
    plan = make_plan(
        inputs.seq_lens.tolist(),
        capacity=capacity,
        max_partitions=max_partitions,
        window=inputs.window,
        query_length=inputs.query_length,
    )
    work = torch.zeros((capacity, 4), dtype=torch.int32)
    for slot, task in enumerate(plan.tasks):
        work[slot] = torch.tensor([task.sequence, task.first_tile, task.end_tile, task.context])
    return work


@functools.cache
def _launcher(arch: str, order: str) -> EmulatorLauncher:
    return EmulatorLauncher(arch, order=order)


def arguments(inputs: DecodeInputs, work: Tensor, partials: Partials) -> list[Any]:
    """``AttentionSpec.ARGUMENTS`` of a problem."""
    table, query, scale = inputs.block_tables, inputs.query, inputs.k_scale
    by_token = isinstance(scale, Tensor) and scale.dim() > 1
    assert isinstance(scale, Tensor) or scale is None
    return [
        query,
        inputs.k_cache,
        inputs.v_cache,
        table,
        scale,
        inputs.v_scale,
        work,
        partials.out,
        partials.reference,
        partials.total,
        query.stride(0) * query.element_size(),
        query.stride(1) * query.element_size(),
        4 * scale.stride(0) if by_token else 0,
        4 * scale.stride(1) if by_token else 0,
        4 * table.stride(0),
        inputs.num_kv_heads,
        table.shape[1],
        inputs.k_cache.shape[0],
        inputs.v_cache.shape[0],
        min(inputs.window, 2**31 - 1),
        work.shape[0],
        inputs.softmax_scale,
    ]


def empty_partials(inputs: DecodeInputs, capacity: int) -> Partials:
    """Partials full of NaN."""
    group = inputs.query.shape[1] // inputs.num_kv_heads
    shape = inputs.num_kv_heads, capacity, inputs.query_length * group
    return Partials(
        inputs.query.new_full((*shape, inputs.query.shape[2]), math.nan),
        torch.full(shape, math.nan),
        torch.full(shape, math.nan),
    )


def attend(inputs: DecodeInputs, spec: AttentionSpec, work: Tensor, *, order: str = "forward") -> Partials:
    """One launch with every check of the emulator on; EmulatedFaultError if it finds anything."""
    partials = empty_partials(inputs, work.shape[0])
    with env.override(jit=True):
        kernel = _launcher(spec.arch, order).kernel(spec)
    kernel(spec.grid(work.shape[0], inputs.num_kv_heads), arguments(inputs, work, partials))
    return partials


def check_partials(
    inputs: DecodeInputs, work: Tensor, got: Partials, *, sums: float = 0.004, tolerance: float = TOLERANCE
) -> None:
    """Against the oracle that rounds as the kernels do: outputs to ``tolerance`` (absolute and relative), sums to
    ``sums`` (relative); unused slots still NaN, rows that see nothing -inf, 0 and zeros."""
    used = work[:, 1] < work[:, 2]
    for part in vars(got).values():
        assert part[:, ~used].isnan().all()
    if not used.any():
        return
    out, reference_, total = (part[:, used].float() for part in vars(got).values())
    expected = reference.partials(inputs, work, denominator="matched")
    want, want_reference, want_total = (part[:, used].float() for part in expected)
    empty = want_reference == -math.inf
    assert torch.equal(reference_ == -math.inf, empty)
    assert not total[empty].any() and not out[empty].any()
    error = (out - want).abs() - tolerance * want.abs()
    assert float(error.max()) <= tolerance, f"output wrong by {float(error.max())}"
    total = total * torch.exp(torch.where(empty, 0.0, reference_ - want_reference))
    wrong = ((total - want_total).abs() / want_total.clamp(min=1e-30)).max()
    assert float(wrong) <= sums, f"sum wrong by {float(wrong)}"
