"""What a call writes is nobody else's memory: cold, warm and through the op. Kernels are oracles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pa_decode import explain, pa_decode
from pa_testing import OracleKernels, arguments_of
from pa_testing.oracle_calls import EMULATE, close, op_arguments, planned, problem


@pytest.mark.parametrize("name", ["partial_out", "partial_max", "partial_sum", "work_info", "reduce_info"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_output_in_the_memory_of_plan_or_workspace(oracle: OracleKernels, name: str, warm: bool) -> None:
    """Cold and warm, and through the op; one element in common is enough."""
    inputs = problem()
    plan, workspace = planned(inputs)
    of_plan = name.endswith("info")
    part = getattr(plan if of_plan else workspace, name)
    size, behind = part.numel() * part.element_size(), inputs.query.numel() * 2
    memory = torch.zeros(size + behind + 16, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    moved = memory[start : start + size].view(part.dtype).view(part.shape).copy_(part)
    if of_plan:
        plan = replace(plan, **{name: moved})
    else:
        workspace = replace(workspace, **{name: moved})
    at = start + (size - 1) // 16 * 16  # as aligned as the output of a warm call
    out = memory[at : at + behind].view(inputs.query.dtype).view(inputs.query.shape)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace)
    if warm:
        own = torch.empty_like(inputs.query)
        assert pa_decode(**given, out=own) is own and pa_decode(**given, out=own) is own
    oracle.launches.clear()
    before = memory.clone()
    where = f"{name} of the {'plan' if of_plan else 'workspace'}"
    for call in (pa_decode, explain):
        with pytest.raises(ValueError, match=f"out: got memory shared with {where}, expected memory of its own"):
            call(**given, out=out)
    with pytest.raises(ValueError, match=f"out: got memory shared with {where}"):
        arguments = op_arguments(inputs, plan, workspace)
        torch.ops.pa_decode.decode_out.default(*arguments[:15], out, *arguments[16:])
    assert not oracle.launches and torch.equal(memory, before)
    beside = memory[start + size : start + size + behind].view(out.dtype).view(out.shape)
    assert close(pa_decode(**given, out=beside), inputs)


INPUTS = ("query", "k_cache", "v_cache", "block_tables", "seq_lens", "k_scale", "v_scale", "sinks")


@pytest.mark.parametrize("name", [*INPUTS, "work_info", "reduce_info"])
@pytest.mark.parametrize("part", ["partial_out", "partial_max", "partial_sum"])
def test_a_workspace_in_the_memory_of_something_else(oracle: OracleKernels, name: str, part: str) -> None:
    """A kernel would write what it reads. Cold and warm, and through the op; a few bytes in common are enough."""
    inputs = problem(sinks=True, scale_mode="token")
    plan, good = planned(inputs)
    out = torch.empty_like(inputs.query)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=good)
    for _ in range(3):
        assert close(pa_decode(**given), inputs) and pa_decode(**given, out=out) is out
    scratch = getattr(good, part)
    read = getattr(plan, name) if name.endswith("info") else given[name]
    size = scratch.numel() * scratch.element_size()
    behind = read.untyped_storage().nbytes()
    memory = torch.zeros(size + behind + 32, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    of_scratch = memory[start : start + size].view(scratch.dtype).view(scratch.shape)
    workspace = replace(good, **{part: of_scratch.fill_(torch.nan)})
    assert close(pa_decode(**(given | {"workspace": workspace})), inputs)

    def place(at: int) -> dict[str, Any]:
        flat = memory[at : at + behind].view(read.dtype)
        moved = flat[read.storage_offset() :].as_strided(read.shape, read.stride())
        moved.view(torch.uint8).copy_(read.view(torch.uint8)) if read.is_contiguous() else moved.copy_(read)
        return {"plan": replace(plan, **{name: moved})} if name.endswith("info") else {name: moved}

    end = start + size
    beside = place(-(-end // 16) * 16)
    assert close(pa_decode(**(given | {"workspace": workspace} | beside)), inputs)
    over = given | {"workspace": workspace} | place((end - 1) // 16 * 16 - 16)
    oracle.launches.clear()
    before = memory.clone()
    where = f"{name} of the plan" if name.endswith("info") else name
    message = f"{part} of the workspace: got memory shared with {where}, expected memory of its own"
    for call in (pa_decode, explain):
        with pytest.raises(ValueError, match=message):
            call(**over)
        with pytest.raises(ValueError, match=message):
            call(**over, out=out)
    moved = replace(inputs, **{key: over[key] for key in INPUTS})
    with pytest.raises(ValueError, match=message):
        torch.ops.pa_decode.decode_out.default(*op_arguments(moved, over["plan"], workspace))
    assert not oracle.launches and torch.equal(memory, before)


def test_parts_of_a_workspace_are_apart(oracle: OracleKernels) -> None:
    _, workspace = planned(problem())
    count = workspace.partial_max.numel()
    both = torch.empty(2 * count)
    shape = workspace.partial_max.shape
    apart = replace(workspace, partial_max=both[:count].view(shape), partial_sum=both[count:].view(shape))
    with pytest.raises(ValueError, match="partial_sum: got memory shared with partial_max, expected memory of its own"):
        replace(apart, partial_sum=both[4 : count + 4].view(shape))
