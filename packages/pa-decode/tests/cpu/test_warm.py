"""Calls after others: warm ones, those of other threads, those after a failed one. Kernels are oracles."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pa_decode import make_workspace, pa_decode
from pa_decode import plan as plan_module
from pa_testing import OracleKernels, arguments_of, geometry_of, make_inputs
from pa_testing.oracle_calls import CONTEXTS, EMULATE, close, other_plan, planned, problem


def test_warm_calls(oracle: OracleKernels) -> None:
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace)
    first = pa_decode(**given)
    assert len(plan.warm) == 1
    second = pa_decode(**given)
    assert len(plan.warm) == 1 and torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert len(plan.seen) == 1 and torch.equal(pa_decode(**given), first)
    assert second.is_contiguous() and not second.requires_grad
    # Other values at other addresses; other numbers are other calls.
    other = make_inputs(CONTEXTS, head_dim=64, group=3, query_length=4, sinks=True, seed=9)
    changed = arguments_of(other, **EMULATE, plan=plan, workspace=workspace, k_scale=inputs.k_scale)
    assert torch.equal(pa_decode(**changed), pa_decode(**arguments_of(other, **EMULATE, k_scale=inputs.k_scale)))
    assert len(plan.warm) == 1
    assert not torch.equal(pa_decode(**(given | {"softmax_scale": 0.5})), first) and len(plan.warm) == 2
    with mock.patch.object(plan_module, "MAX_WARM", 3):
        for k in range(4):
            pa_decode(**(given | {"softmax_scale": 1.0 + k}))
    assert len(plan.warm) <= 3 and torch.equal(pa_decode(**given), first)


def test_plans_keep_no_tensor_alive(oracle: OracleKernels) -> None:
    inputs = problem(sinks=True, scale_mode="token")
    plan, workspace = planned(inputs)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace, out=torch.empty_like(inputs.query))
    for _ in range(3):
        pa_decode(**given)
    assert plan.seen and plan.warm
    oracle.launches.clear()
    names = ("query", "k_cache", "v_cache", "block_tables", "seq_lens", "k_scale", "v_scale", "sinks", "out")
    alive = [weakref.ref(given[name]) for name in names] + [weakref.ref(workspace)]
    del inputs, given, workspace
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_warm_calls_are_checked_as_cold_ones(oracle: OracleKernels) -> None:
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs)
    out = torch.empty_like(inputs.query)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace, out=out)
    assert pa_decode(**given) is out and pa_decode(**given) is out
    other = make_workspace(*other_plan(inputs))
    launches = len(oracle.launches)
    bad: list[dict[str, Any]] = [
        {"out": inputs.query},
        {"query": inputs.query.float()},
        {"query": inputs.query[:-1]},
        {"seq_lens": inputs.seq_lens.long()},
        {"sinks": None, "k_scale": torch.ones(2)},
        {"k_cache": inputs.k_cache.view(torch.uint8)},
        {"workspace": other},
        {"query": inputs.query.clone().requires_grad_()},
        {"query": "query"},
    ]
    for change in bad:
        with pytest.raises((TypeError, ValueError)):
            pa_decode(**(given | change))
    assert len(oracle.launches) == launches
    assert close(pa_decode(**given), inputs)
    # An output that overlaps the cache, at another address than before.
    memory = torch.zeros(inputs.v_cache.numel() + out.numel() * 2 + 16, dtype=torch.uint8)
    v = memory[: inputs.v_cache.numel()].view(inputs.v_cache.dtype).view(inputs.v_cache.shape)
    v.copy_(inputs.v_cache)
    start = inputs.v_cache.numel() - 16
    over = memory[start : start + out.numel() * 2].view(out.dtype).view(out.shape)
    with pytest.raises(ValueError, match="out: got memory shared with v_cache"):
        pa_decode(**(given | {"v_cache": v, "out": over}))


def test_threads(oracle: OracleKernels) -> None:
    inputs = problem(sinks=True)
    expected = pa_decode(**arguments_of(inputs, **EMULATE))
    geometry = geometry_of(inputs, compute_units=256)
    plan, _ = planned(inputs)
    results: list[Tensor] = []

    def work() -> None:
        workspace = make_workspace(plan, geometry)
        given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace)
        results.extend(pa_decode(**given) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20 and all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("kernel", ["_plan", "_attention", "_reduce"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_call_after_one_that_failed(oracle: OracleKernels, kernel: str, warm: bool) -> None:
    """In a launch: nothing half made is kept, the next call is right."""
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace)
    if warm:
        assert close(pa_decode(**given), inputs)
    known = dict(plan.warm)
    failing = mock.Mock(side_effect=RuntimeError("out of resources"))
    with mock.patch.object(sys.modules[OracleKernels.__module__], kernel, failing):
        for changes in ({"plan": None, "workspace": None}, {} if kernel != "_plan" else {"plan": None}):
            with pytest.raises(RuntimeError, match="out of resources"):
                pa_decode(**(given | changes))
        with pytest.raises(RuntimeError) if kernel == "_plan" else nullcontext():
            plan.refresh(inputs.seq_lens)
    assert plan.warm == known
    plan.refresh(inputs.seq_lens)
    for _ in range(2):
        assert close(pa_decode(**given), inputs)
    assert close(pa_decode(**(given | {"plan": None, "workspace": None})), inputs)
