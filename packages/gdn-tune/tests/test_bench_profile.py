"""Buckets of kernels by name, on profiles that were recorded on an H200, and on the names of kernels for AMD."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdn_tune.bench.profile import (
    FUSED_INVERSE,
    FUSED_PREPARE,
    K3,
    K4,
    K5,
    K6,
    K12,
    L2NORM,
    OTHER,
    STAGES,
    TRANSFER,
    WHOLE,
    KernelTime,
    by_stage,
    from_averages,
    stage_of,
)

RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "h200-2026-11-30.json"
PROFILES = {
    (entry["implementation"], entry["shape"]): [KernelTime(name, us) for name, us in entry["us"].items()]
    for entry in json.loads(RECORDED.read_text())["side_by_side"]["kernels"]
}


@pytest.mark.parametrize("shape", ["32/16 8kx4", "8/2 8kx1"])
def test_a_recorded_profile_of_ours(shape: str) -> None:
    profile = PROFILES["gdn_runtime", shape]
    times = {kernel.name: kernel.us for kernel in profile}
    expected = {
        FUSED_PREPARE: times["prepare_fused_kernel"],
        K5: times["state_scan_kernel"],
        K6: times["output_kernel"],
    }
    assert by_stage(profile) == expected


@pytest.mark.parametrize("shape", ["32/16 8kx4", "8/2 8kx1"])
def test_a_recorded_profile_of_fla(shape: str) -> None:
    profile = PROFILES["FLA 0.6.0", shape]
    times = {kernel.name: kernel.us for kernel in profile}
    stages = by_stage(profile)
    assert list(stages) == [K12, FUSED_INVERSE, K4, K5, K6, OTHER]
    assert stages[K12] == times["chunk_local_cumsum_scalar_kernel"]
    assert stages[FUSED_INVERSE] == times["chunk_gated_delta_rule_fwd_kkt_solve_kernel"]
    assert stages[K4] == times["recompute_w_u_fwd_kernel"]
    assert stages[K5] == times["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"]
    assert stages[K6] == times["chunk_fwd_kernel_o"]
    fills = [us for name, us in times.items() if "FillFunc" in name]
    assert len(fills) == 2 and stages[OTHER] == pytest.approx(sum(fills))
    assert sum(stages.values()) == pytest.approx(sum(times.values()))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("l2norm_kernel", L2NORM),
        ("l2norm_fwd_kernel1", L2NORM),
        ("fused_chunk_local_cumsum_scaled_dot_kkt_fwd_kernel", K12),
        ("chunk_scaled_dot_kkt_fwd_kernel", K12),
        ("solve_tril_16x16_kernel", K3),
        ("merge_16x16_to_64x64_inverse_kernel", K3),
        ("fused_solve_tril_recompute_w_u_kernel", K4),
        ("prepare_inverse_kernel", FUSED_INVERSE),
        ("prepare_wy_kernel", K4),
        ("gdn_prepare_wave", FUSED_PREPARE),
        ("gdn_prepare_group", FUSED_PREPARE),
        ("gdn_prepare_t", FUSED_PREPARE),
        ("state_scan_opt", K5),
        ("state_scan_vk", K5),
        ("state_scan_vsplit", K5),
        ("chunk_gdn_fwd_h_flydsl_opt_0", K5),
        ("chunk_gdn_fwd_h_flydsl_vk_0", K5),
        ("void aiter::chunk_gated_delta_rule_fwd_h_hip_kernel<64>(Params)", K5),
        ("CHUNK_FWD_KERNEL_O", K6),
        ("prepare_kernel", FUSED_PREPARE),
        ("inverse_kernel", FUSED_PREPARE),
        ("scan_kernel", WHOLE),
        ("combine_kernel", TRANSFER),
        ("Memcpy DtoH (Device -> Pageable)", OTHER),
        ("void at::native::elementwise_kernel<128, 4>", OTHER),
    ],
)
def test_names(name: str, stage: str) -> None:
    assert stage_of(name) == stage and stage in STAGES


def test_stages_come_in_the_order_of_the_block_and_only_those_that_ran() -> None:
    profile = [KernelTime("output_kernel", 3), KernelTime("state_scan_kernel", 2), KernelTime("output_kernel", 1)]
    assert list(by_stage(profile).items()) == [(K5, 2), (K6, 4)]
    assert by_stage([]) == {}


def test_averages_of_a_profiler_are_per_call_and_sorted() -> None:
    entries = [
        SimpleNamespace(key="output_kernel", self_device_time_total=40.0, count=20),
        SimpleNamespace(key="scan_kernel", self_device_time_total=100.0, count=40),
        SimpleNamespace(key="cudaLaunchKernel", self_device_time_total=0.0, count=60),
    ]
    assert from_averages(entries, 20) == [KernelTime("scan_kernel", 5.0, 2.0), KernelTime("output_kernel", 2.0, 1.0)]
