"""Launches of the Triton kernels alone, interpreted or on the emulator: planner, attention, reducer."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.codeobject.emulate import EmulatorLauncher
from gdn_runtime.spec import KernelSpec
from pa_decode.planner import make_plan
from pa_decode.reference import DecodeInputs
from pa_decode.spec import PlannerSpec, ReduceSpec, SinkDtype

from .attention import Partials, arguments, empty_partials, spec_of

Launch = Callable[[KernelSpec, tuple[int, int, int], Sequence[Any]], None]
"""Launches the kernel of a spec with its ``ARGUMENTS``."""

SINK_DTYPES: dict[torch.dtype, SinkDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def interpret(spec: KernelSpec, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
    """On Triton's interpreter, which has no null pointers: an absent scale is 1, an absent sink not read."""
    module = importlib.import_module(f"pa_decode.kernels.{spec.language}.{spec.kernel}")
    given = [torch.ones(1) if arg is None else arg for arg in args]
    module.kernel[grid](*given, **module.constants(spec))


def emulate(order: str = "forward") -> Launch:
    """On cdna-emu with every check on, workgroups in this order; EmulatedFaultError if it finds anything."""

    def launch(spec: KernelSpec, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        with env.override(jit=True):
            EmulatorLauncher(spec.arch, order=order).kernel(spec)(grid, args)

    return launch


def attend_by(launch: Launch, inputs: DecodeInputs, arch: str, work: Tensor) -> Partials:
    """Partials of the attention kernel; what it did not write is NaN."""
    spec = spec_of(inputs, arch, kernel="attention")
    partials = empty_partials(inputs, work.shape[0])
    launch(spec, spec.grid(work.shape[0], inputs.num_kv_heads), arguments(inputs, work, partials))
    return partials


def reduce_by(
    launch: Launch,
    partials: Partials,
    info: Tensor,
    arch: str,
    *,
    query_length: int,
    sinks: Tensor | None = None,
    max_parts: int = 64,
) -> Tensor:
    """Output [B*QL, Hq, D] of the reducer, in rows and heads that lie apart; what it did not write is NaN."""
    heads, capacity, rows, head_dim = partials.out.shape
    batch, group = info.shape[0], rows // query_length
    spec = ReduceSpec(
        arch,
        head_dim,
        group,
        query_length,
        "bf16" if partials.out.dtype == torch.bfloat16 else "fp16",
        "none" if sinks is None else SINK_DTYPES[sinks.dtype],
        max_parts,
    )
    wide = partials.out.new_full((batch * query_length, heads * group + 1, head_dim + 8), math.nan)
    out = wide[:, 1:, :head_dim]
    strides = (out.stride(0) * out.element_size(), out.stride(1) * out.element_size())
    pointers = [partials.out, partials.reference, partials.total, info, sinks, out]
    launch(spec, spec.grid(batch, heads), [*pointers, *strides, heads, capacity, batch])
    assert wide[:, 0].isnan().all() and wide[:, :, head_dim:].isnan().all()
    return out.clone()


def plan_by(
    launch: Launch,
    lengths: Sequence[int],
    arch: str,
    *,
    capacity: int,
    max_partitions: int,
    window: int = 0,
    query_length: int = 1,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(work_info, reduce_info) of the planner, written into tensors that held something else."""
    work, info = into or (
        torch.full((capacity, 4), -7, dtype=torch.int32),
        torch.full((len(lengths), 2), -7, dtype=torch.int32),
    )
    spec = PlannerSpec.of(arch, len(lengths))
    numbers = [len(lengths), capacity, max_partitions, window, query_length]
    launch(spec, spec.grid(), [torch.tensor(lengths, dtype=torch.int32), work, info, *numbers])
    return work, info


def plan_of(
    lengths: Sequence[int], *, capacity: int, max_partitions: int, window: int = 0, query_length: int = 1
) -> tuple[Tensor, Tensor]:
    """What ``plan_by`` must give: (work_info, reduce_info) of the integer oracle."""
    plan = make_plan(
        lengths, capacity=capacity, max_partitions=max_partitions, window=window, query_length=query_length
    )
    work = torch.zeros((capacity, 4), dtype=torch.int32)
    for slot, task in enumerate(plan.tasks):
        work[slot] = torch.tensor([task.sequence, task.first_tile, task.end_tile, task.context])
    return work, torch.tensor(plan.reduce, dtype=torch.int32)


def same_plan(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether all of both tensors agree."""
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def random_partials(
    heads: int, capacity: int, rows: int, head_dim: int, used: int, *, dtype: torch.dtype, seed: int = 0
) -> Partials:
    """Partials whose first ``used`` slots hold something, some rows of them nothing visible; the rest is NaN."""
    draw = torch.Generator().manual_seed(seed)
    out = torch.full((heads, capacity, rows, head_dim), math.nan)
    out[:, :used] = torch.randn((heads, used, rows, head_dim), generator=draw)
    reference = torch.full((heads, capacity, rows), math.nan)
    reference[:, :used] = torch.randn((heads, used, rows), generator=draw) * 4
    total = torch.full_like(reference, math.nan)
    total[:, :used] = torch.rand((heads, used, rows), generator=draw) * 50 + 0.5
    nothing = torch.zeros_like(reference, dtype=torch.bool)
    nothing[:, :used] = torch.rand((heads, used, rows), generator=draw) < 0.2
    reference[nothing], total[nothing], out[nothing] = -math.inf, 0.0, 0.0
    return Partials(out.to(dtype), reference, total)
