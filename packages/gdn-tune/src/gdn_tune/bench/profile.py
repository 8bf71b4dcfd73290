"""Kernels that a profiler saw, and which stage of the block each of them is.

One table of names for all libraries: the profiler knows kernels by name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

K12 = "K1+K2 cumsum/KKT"
K3 = "K3 solve_tril"
K4 = "K4 W/U"
K5 = "K5 state scan"
K6 = "K6 output"
FUSED_PREPARE = "K1-K4 prepare"
FUSED_INVERSE = "K1-K3 inverse"
L2NORM = "l2norm"
TRANSFER = "segment transfer"
WHOLE = "K5+K6 scan"
OTHER = "other"

STAGES = (L2NORM, K12, K3, FUSED_INVERSE, K4, FUSED_PREPARE, TRANSFER, K5, WHOLE, K6, OTHER)
"""Rows of a stage table, in the order in which the block runs them."""

NAMES: tuple[tuple[str, str], ...] = (
    ("l2norm", L2NORM),
    # One kernel for K1..K4 (ours), for K1..K3 (ours, FLA), and K1 with K2 (aiter).
    ("prepare_fused_kernel", FUSED_PREPARE),
    ("prepare_inverse_kernel", FUSED_INVERSE),
    ("prepare_wy_kernel", K4),
    ("gdn_prepare", FUSED_PREPARE),
    ("kkt_solve", FUSED_INVERSE),
    ("cumsum", K12),
    ("kkt", K12),
    ("solve_tril_recompute_w_u", K4),
    ("solve_tril", K3),
    ("merge_16x16_to_64x64_inverse", K3),
    ("merge_16x16_to_32x32_inverse", K3),
    ("recompute_w_u", K4),
    # K5, by the names of aiter (HIP and FlyDSL), FLA and ours.
    ("chunk_gdn_fwd_h", K5),
    ("chunk_gated_delta_rule_fwd_kernel_h", K5),
    ("chunk_gated_delta_rule_fwd_h", K5),
    ("state_scan", K5),
    ("chunk_fwd_kernel_o", K6),
    ("chunk_fwd_o", K6),
    ("output_kernel", K6),
    # The fast path of sm90 has short names. Its scan runs twice where sequences are cut into segments.
    ("combine_kernel", TRANSFER),
    ("inverse_kernel", FUSED_PREPARE),
    ("prepare_kernel", FUSED_PREPARE),
    ("scan_kernel", WHOLE),
    ("delta_rule", WHOLE),
)
"""(part of a name, stage); the first that fits decides."""


@dataclass(frozen=True)
class KernelTime:
    """Device time of a kernel in one call, us, all its launches together; ``launches`` per call."""

    name: str
    us: float
    launches: float = 1.0


def stage_of(name: str) -> str:
    """The stage that a kernel belongs to, "other" if nothing is known of its name."""
    lowered = name.lower()
    return next((stage for part, stage in NAMES if part in lowered), OTHER)


def by_stage(kernels: Iterable[KernelTime]) -> dict[str, float]:
    """Device time per stage, us, in the order of ``STAGES``, stages without any left out."""
    found: dict[str, float] = {}
    for kernel in kernels:
        stage = stage_of(kernel.name)
        found[stage] = found.get(stage, 0.0) + kernel.us
    return {stage: found[stage] for stage in STAGES if found.get(stage)}


def profiled(call: Callable[[], Any], iterations: int) -> list[KernelTime]:
    """Kernels, copies and fills of a warm ``call`` on the GPU, the longest first, by the profiler's self time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(iterations):
            call()
        torch.cuda.synchronize()
    return from_averages(record.key_averages(), iterations)


def from_averages(averages: Iterable[Any], iterations: int) -> list[KernelTime]:
    """What ``key_averages()`` of a profile of so many calls says."""
    found = [
        KernelTime(str(entry.key), float(entry.self_device_time_total) / iterations, entry.count / iterations)
        for entry in averages
        if entry.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.us)
