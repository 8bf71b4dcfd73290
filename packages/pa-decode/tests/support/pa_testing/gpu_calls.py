"""Problems on a GPU, and plans and scratch memory of their calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pa_decode import DecodePlan, DecodeWorkspace, make_workspace, plan_decode
from pa_decode.ops.check import check_call
from pa_decode.reference import DecodeInputs

from .inputs import arguments_of


def on_gpu(inputs: DecodeInputs) -> DecodeInputs:
    """The problem on the GPU; rows of the table start at odd entries."""
    moved = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    table = moved["block_tables"]
    wide = torch.full((table.shape[0], table.shape[1] + 1), -1, dtype=torch.int32, device="cuda")
    wide[:, 1:] = table
    return replace(inputs, **(moved | {"block_tables": wide[:, 1:]}))


def planned(inputs: DecodeInputs, budget: int | None = None, **changes: Any) -> tuple[DecodePlan, DecodeWorkspace]:
    """A plan of a call, and a workspace full of NaN."""
    options: dict[str, Any] = {"cu_seqlens_q": None, "window_left": None, "out": None, "backend": "auto"}
    options |= {"kernel": "auto", "arch": None}
    geometry = check_call(**(options | arguments_of(inputs, **changes))).geometry
    assert geometry is not None
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget)
    workspace = make_workspace(plan, geometry)
    for part in workspace.parts.values():
        part.fill_(torch.nan)
    return plan, workspace
