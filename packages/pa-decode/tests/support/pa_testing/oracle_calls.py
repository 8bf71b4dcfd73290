"""Calls of pa_decode over plans, whose kernels are oracles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pa_decode import DecodeGeometry, DecodePlan, DecodeWorkspace, make_workspace, plan_decode, reference

from .inputs import geometry_of, make_inputs

CONTEXTS = [300, 0, 2, 700, 256]
EMULATE: dict[str, Any] = {"backend": "emulate", "arch": "gfx950"}


def problem(**changes: Any) -> reference.DecodeInputs:
    """Sequences of ``CONTEXTS`` tokens, one empty and one shorter than the query."""
    return make_inputs(CONTEXTS, **({"head_dim": 64, "group": 3, "query_length": 4} | changes))


def planned(inputs: reference.DecodeInputs, **plan_options: Any) -> tuple[DecodePlan, DecodeWorkspace]:
    """A plan for the emulator, and a workspace full of NaN."""
    geometry = geometry_of(inputs, compute_units=256)
    plan = plan_decode(inputs.seq_lens, geometry, backend="emulate", **plan_options)
    workspace = make_workspace(plan, geometry)
    for part in workspace.parts.values():
        part.fill_(torch.nan)
    return plan, workspace


def close(got: Tensor, inputs: reference.DecodeInputs) -> bool:
    """Whether ``got`` is the result of the oracle that rounds, but for the rounding of partials."""
    return torch.allclose(got.float(), reference.decode_quantised(inputs), atol=2e-3, rtol=1e-2)


def other_plan(inputs: reference.DecodeInputs) -> tuple[DecodePlan, DecodeGeometry]:
    """A plan of another size, and the geometry of both."""
    geometry = geometry_of(inputs, compute_units=256)
    return plan_decode(inputs.seq_lens, geometry, budget=12, backend="emulate"), geometry


def op_arguments(inputs: reference.DecodeInputs, plan: DecodePlan, workspace: DecodeWorkspace) -> tuple[Any, ...]:
    """Those of ``torch.ops.pa_decode.decode_out``, the 16th a new output."""
    out = torch.zeros_like(inputs.query)
    data = (inputs.query, inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.seq_lens, inputs.k_scale)
    scratch = (workspace.partial_out, workspace.partial_max, workspace.partial_sum)
    numbers = (plan.numbers(), inputs.softmax_scale, inputs.query_length, inputs.window, None)
    plan_tensors = plan.work_info, plan.reduce_info
    rest = (*plan_tensors, *scratch, out, *numbers, "emulate", "auto", "gfx950")
    return (*data, inputs.v_scale, inputs.sinks, None, None, *rest)
