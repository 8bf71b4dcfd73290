"""The call on the emulator, from the planner kernel to the reducer: values, refresh, what a graph would replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gdn_runtime.arch import KNOWN
from pa_decode import FLAVOURS, make_workspace, pa_decode, plan_decode, reference
from pa_testing import arguments_of, geometry_of, make_inputs

TOLERANCE = 0.005
"""Of the whole against fp32 on the dequantised cache, V being of amplitude 1/16 (absolute and relative)."""

PROBLEMS: dict[str, dict[str, Any]] = {
    "dense": {"page": 16, "query_length": 2, "sinks": True},
    "window": {"page": 64, "query_length": 2, "window": 257, "scale_mode": "token", "v_packed": False},
    "generic": {"head_dim": 64, "group": 3, "query_length": 2, "sinks": True, "dtype": torch.float16},
}


def problem(arch: str, case: str, contexts: list[int], **changes: Any) -> reference.DecodeInputs:
    fp8 = KNOWN[arch].fp8
    assert fp8 is not None
    options = {"head_dim": 256, "group": 8, "kv_heads": 1, **PROBLEMS[case], **changes}
    return make_inputs(contexts, flavour=FLAVOURS[fp8], **options)


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_ragged_batch(arch: str, case: str) -> None:
    """Empty, shorter than the query, ending on a tile; then a plan whose lengths have become 0."""
    inputs = problem(arch, case, [300, 0, 1, 256])
    given = arguments_of(inputs, backend="emulate", arch=arch)
    geometry = geometry_of(inputs, arch=arch, compute_units=KNOWN[arch].nominal_compute_units or 1)
    plan = plan_decode(inputs.seq_lens, geometry, budget=6, backend="emulate")
    workspace = make_workspace(plan, geometry)
    for part in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        part.fill_(torch.nan)
    out = torch.full_like(inputs.query, torch.nan)
    given |= {"plan": plan, "workspace": workspace, "out": out}
    assert pa_decode(**given) is out
    expected = reference.decode(inputs)
    assert torch.allclose(out.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert not out[inputs.query_length : 2 * inputs.query_length].any()
    used = int(plan.reduce_info[:, 1].sum())
    assert used < plan.capacity and workspace.partial_out[:, used:].isnan().all()
    host = plan_decode(inputs.seq_lens, geometry, budget=6)
    assert torch.equal(plan.work_info, host.work_info) and torch.equal(plan.reduce_info, host.reduce_info)

    plan.refresh(torch.tensor([0, 0, 0, 0], dtype=torch.int32))
    assert not pa_decode(**given).any() and not plan.work_info.any()
