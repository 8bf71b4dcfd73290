"""The Triton code objects of gdn-runtime, launched by its own wrappers on the emulator, against the fp64 recurrence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.compiled import ARCHS
from kernels.gdn import CONFIGS, Configs, Device, run_block

from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.spec import OutputConfig, PrepareConfig, StateScanConfig
from gdn_runtime.testing import GdnInputs, assert_close_rel, make_inputs

LENS = [70, 0, 64, 1]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Relative L2 error of the output and the final states: the rounding of 16-bit operands."""


def check_block(device: Device, inputs: GdnInputs, **options: Any) -> None:
    o, final_state = run_block(device, inputs, **options)
    for launched in device.launches:
        assert launched.result.report.ok, f"{launched.compiled.name}: {launched.result.report}"
    expected_o, expected_state = recurrent_gated_delta_rule(
        *inputs.tensors,
        initial_state=inputs.initial_state,
        cu_seqlens=inputs.cu_seqlens,
        use_qk_l2norm=options.get("use_qk_l2norm", False),
    )
    tolerance = TOLERANCE[inputs.v.dtype]
    assert_close_rel(o, expected_o, tolerance, "o")
    assert_close_rel(final_state, expected_state, tolerance, "final_state")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("buffers", [False, True], ids=["global", "buffer"])
def test_varlen_block(arch: str, buffers: bool) -> None:
    """K1..K6 of a packed batch with an empty sequence; rows past the last sequence are NaN and must not be read."""
    inputs = make_inputs(LENS, 2, 1, state="random", spare_rows=3)
    check_block(Device(arch, small=buffers), inputs)


@pytest.mark.parametrize("arch", ARCHS)
def test_split_prepare_with_normalisation(arch: str) -> None:
    """fp16, l2norm, and K1..K3 apart from K4."""
    inputs = make_inputs((1, 100), 2, 1, dtype=torch.float16, normalize=False, state="random")
    configs = replace(CONFIGS, prepare=PrepareConfig("split", 4, 1))
    check_block(Device(arch), inputs, use_qk_l2norm=True, configs=configs)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["reverse", "random"])
@pytest.mark.parametrize("arch", ARCHS)
def test_other_wave_orders_and_tiles(arch: str, order: str) -> None:
    inputs = make_inputs(LENS, 2, 1, state="random", seed=1)
    configs = Configs(PrepareConfig("fused", 4, 2), StateScanConfig(16, 4, 1), OutputConfig(128, 8, 1))
    check_block(Device(arch, options={"order": order}), inputs, configs=configs)
