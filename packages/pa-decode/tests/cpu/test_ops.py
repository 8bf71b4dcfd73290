"""The call: what it hands to kernels, plans, workspaces, outputs, warm calls, explain. Kernels are oracles or torch."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.errors import UnsupportedError
from pa_decode import DecodePlan, DecodeWorkspace, explain, make_workspace, pa_decode, plan_decode, reference, tables
from pa_decode import plan as plan_module
from pa_decode.plan import workspace_bytes
from pa_decode.quantise import FN, FNUZ
from pa_testing import OracleKernels, arguments_of, geometry_of, make_inputs, oracle_kernels

CONTEXTS = [300, 0, 2, 700, 256]
EMULATE: dict[str, Any] = {"backend": "emulate", "arch": "gfx950"}


@pytest.fixture
def oracle() -> Iterator[OracleKernels]:
    with oracle_kernels() as kernels:
        yield kernels


def problem(**changes: Any) -> reference.DecodeInputs:
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
    return torch.allclose(got.float(), reference.decode_quantised(inputs), atol=2e-3, rtol=1e-2)


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("flavour", [FN, FNUZ])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "window": 17}, {"scale_mode": "token", "v_packed": False}])
def test_the_reference_is_the_default_on_a_cpu(flavour: Any, options: dict[str, Any]) -> None:
    inputs = problem(flavour=flavour, **options)
    out = pa_decode(**arguments_of(inputs))
    assert out.dtype == inputs.query.dtype and torch.equal(out, reference.decode(inputs).to(out.dtype))


@pytest.mark.parametrize("window", [0, 1, 257])
@pytest.mark.parametrize("options", [{"sinks": True}, {"scale_mode": "token", "v_packed": False, "page": 64}])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_get_the_problem(oracle: OracleKernels, arch: str, options: dict[str, Any], window: int) -> None:
    inputs = problem(window=window, dtype=torch.float16, flavour=FNUZ if arch == "gfx942" else FN, **options)
    out = pa_decode(**arguments_of(inputs, backend="emulate", arch=arch))
    assert close(out, inputs) and not out[4:8].any()
    planner, attention, reducer = (spec for spec, _, _ in oracle.launches)
    assert [planner.kernel, attention.kernel, reducer.kernel] == ["planner", "attention", "reducer"]
    assert {spec.arch for spec in (planner, attention, reducer)} == {arch} and attention.windowed is (window > 0)


def test_the_pipe_takes_head_size_256(oracle: OracleKernels) -> None:
    inputs = problem(head_dim=256, group=8)
    assert close(pa_decode(**arguments_of(inputs, **EMULATE)), inputs)
    assert oracle.launches[1][0].kernel == "d256_pipe"
    assert close(pa_decode(**arguments_of(inputs, **EMULATE, kernel="attention")), inputs)
    assert oracle.launches[4][0].kernel == "attention"


def test_views(oracle: OracleKernels) -> None:
    """Rows of a fused projection, a slice of a wider output, table rows and scales with strides of their own."""
    inputs = problem(scale_mode="token")
    fused = torch.full((inputs.query.shape[0], 20, 64), torch.nan, dtype=inputs.query.dtype)
    fused[:, 5:11] = inputs.query
    scales = {}
    for name in ("k_scale", "v_scale"):
        apart = torch.full((inputs.k_cache.shape[0], 3, 16), torch.nan)
        apart[:, :2] = getattr(inputs, name)
        scales[name] = apart[:, :2].unsqueeze(-1)
    wide = torch.full((inputs.query.shape[0], 9, 64), 7.0, dtype=inputs.query.dtype)
    expected = pa_decode(**arguments_of(inputs, **EMULATE))
    out = pa_decode(**arguments_of(inputs, **EMULATE, query=fused[:, 5:11], out=wide[:, 2:8], **scales))
    assert out.data_ptr() == wide[:, 2:8].data_ptr() and torch.equal(wide[:, 2:8], expected)
    assert (wide[:, :2] == 7).all() and (wide[:, 8:] == 7).all()
    named = oracle.launches[-2][2]
    assert named["q_stride_row"] == 20 * 64 * 2 and named["scale_stride_block"] == 3 * 16 * 4


def test_rows_off_16_byte_addresses(oracle: OracleKernels) -> None:
    inputs = problem()
    expected = pa_decode(**arguments_of(inputs, **EMULATE))
    odd = torch.empty(inputs.query.shape[0], 6, 65, dtype=inputs.query.dtype)[:, :, 1:]
    odd.copy_(inputs.query)
    target = torch.full((inputs.query.shape[0], 6, 65), 7.0, dtype=inputs.query.dtype)
    out = pa_decode(**arguments_of(inputs, **EMULATE, query=odd, out=target[:, :, :64]))
    assert torch.equal(out, expected) and (target[:, :, 64] == 7).all() and out.data_ptr() == target.data_ptr()


@pytest.mark.parametrize("scale", [0.01, torch.tensor(0.01), torch.tensor([0.01])])
def test_scales_per_tensor(oracle: OracleKernels, scale: Any) -> None:
    inputs = problem()
    out = pa_decode(**arguments_of(inputs, **EMULATE, k_scale=scale, v_scale=scale))
    assert close(out, replace(inputs, k_scale=0.01, v_scale=0.01))
    assert torch.equal(oracle.launches[1][2]["k_scale"].reshape(1), torch.tensor([0.01]))
    pa_decode(**arguments_of(inputs, **EMULATE, k_scale=None, v_scale=None))
    assert oracle.launches[-2][2]["k_scale"] is None and oracle.launches[-2][2]["v_scale"] is None
    one = pa_decode(**arguments_of(inputs, **EMULATE, k_scale=1, v_scale=1))
    assert torch.equal(one, pa_decode(**arguments_of(inputs, **EMULATE, k_scale=None, v_scale=None)))


def test_windows_in_both_conventions(oracle: OracleKernels) -> None:
    inputs = problem(window=17)
    expected = pa_decode(**arguments_of(inputs, **EMULATE))
    left = arguments_of(inputs, **EMULATE, window_left=16)
    del left["sliding_window"]
    assert torch.equal(pa_decode(**left), expected) and not torch.equal(
        pa_decode(**arguments_of(inputs, **EMULATE, sliding_window=-1)), expected
    )
    # Longer than any context is none.
    dense = pa_decode(**arguments_of(inputs, **EMULATE, sliding_window=0))
    assert torch.equal(pa_decode(**arguments_of(inputs, **EMULATE, sliding_window=2**40)), dense)


@pytest.mark.parametrize(
    "offsets", [range(0, 21, 4), torch.arange(0, 21, 4), torch.arange(0, 21, 4, dtype=torch.int32)]
)
def test_offsets_of_query_rows(offsets: Any) -> None:
    inputs = problem()
    expected = pa_decode(**arguments_of(inputs))
    for query_length in (4, None):
        given = arguments_of(inputs, cu_seqlens_q=offsets, query_length=query_length)
        assert torch.equal(pa_decode(**given), expected)


@pytest.mark.parametrize("options", [{}, EMULATE])
def test_an_empty_batch(oracle: OracleKernels, options: dict[str, Any]) -> None:
    inputs = problem()
    nothing = {"query": inputs.query[:0], "block_tables": inputs.block_tables[:0], "seq_lens": inputs.seq_lens[:0]}
    out = pa_decode(**arguments_of(inputs, **nothing, **options))
    assert out.shape == (0, 6, 64) and out.dtype == inputs.query.dtype and not oracle.launches
    given = torch.empty(0, 6, 64, dtype=inputs.query.dtype)
    assert pa_decode(**arguments_of(inputs, **nothing, **options, out=given)) is given
    assert "nothing is launched" in str(explain(**arguments_of(inputs, **nothing, **options)))


# ------------------------------------------------------------------------------------------------ plans and scratch


def test_a_plan_of_the_kernel_is_that_of_the_host(oracle: OracleKernels) -> None:
    inputs = problem(window=257)
    geometry = geometry_of(inputs)
    host, kernel = (plan_decode(inputs.seq_lens, geometry, backend=backend) for backend in ("auto", "emulate"))
    assert torch.equal(host.work_info, kernel.work_info) and torch.equal(host.reduce_info, kernel.reduce_info)
    spec, grid, named = oracle.launches.pop()
    assert (spec.kernel, spec.max_batch, grid) == ("planner", 16, (1, 1, 1)) and named["window"] == 257
    kernel.refresh(inputs.seq_lens + 100)
    assert [spec.kernel for spec, _, _ in oracle.launches] == ["planner"]
    host.refresh(inputs.seq_lens + 100)
    assert torch.equal(host.work_info, kernel.work_info)


def test_scratch_beyond_the_tasks_is_untouched(oracle: OracleKernels) -> None:
    inputs = problem()
    plan, workspace = planned(inputs)
    out = pa_decode(**arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace))
    used = int(plan.reduce_info[:, 1].sum())
    assert 0 < used < plan.capacity and close(out, inputs)
    for part in workspace.parts.values():
        assert part[:, used:].isnan().all() and not part[:, :used].isnan().any()


def test_a_plan_is_refreshed_for_other_lengths(oracle: OracleKernels) -> None:
    inputs = problem()
    plan, workspace = planned(inputs)
    shorter = inputs.seq_lens - torch.tensor([44, 0, 2, 300, 1], dtype=torch.int32)
    given = arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace, seq_lens=shorter)
    pa_decode(**given)
    plan.refresh(shorter)
    out = pa_decode(**given)
    assert torch.equal(out, pa_decode(**arguments_of(inputs, **EMULATE, seq_lens=shorter)))


def test_workspaces_in_a_buffer(oracle: OracleKernels) -> None:
    inputs = problem()
    geometry = geometry_of(inputs, compute_units=256)
    plan, _ = planned(inputs)
    size = workspace_bytes(plan, geometry)
    buffer = torch.full((size + 64,), 255, dtype=torch.uint8)
    start = -buffer.data_ptr() % 16
    workspace = make_workspace(plan, geometry, buffer=buffer[start : start + size])
    out = pa_decode(**arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace))
    assert torch.equal(out, pa_decode(**arguments_of(inputs, **EMULATE)))
    assert (buffer[:start] == 255).all() and (buffer[start + size :] == 255).all()
    parts = (workspace.partial_out, workspace.partial_max, workspace.partial_sum)
    assert all(buffer.data_ptr() <= part.data_ptr() < buffer.data_ptr() + size for part in parts)
    bad: list[Any] = [buffer[start : start + size - 1], buffer.view(torch.int8), buffer[start + 1 :], buffer[::2]]
    for other in bad:
        with pytest.raises(ValueError, match=rf"buffer: got .*, expected contiguous uint8 \[{size}\] or more"):
            make_workspace(plan, geometry, buffer=other)
    with pytest.raises(TypeError, match="buffer: got bytearray"):
        make_workspace(plan, geometry, buffer=bytearray(size))  # type: ignore[arg-type]


def test_budgets_come_from_the_tables(oracle: OracleKernels, tmp_path: Any) -> None:
    inputs = problem()
    geometry = geometry_of(inputs, arch="gfx950:sramecc+", compute_units=256)
    row = {"gfx": "gfx950", "cu_num": 256, "B": 5, "Hq": 6, "Hkv": 2, "D": 64, "page": 16, "QL": 4}
    row |= {"query_dtype": "bf16", "scale_mode": "tensor", "sink_dtype": "none", "v_packed": True, "window": 0}
    row |= {"budget": 14, "provenance": "here"}
    table = {"format": 1, "kernel": "pa_decode", "arch": "gfx950", "provenance": {"here": {"source": "test"}}}
    (tmp_path / "mine.json").write_text(json.dumps({**table, "rows": [row]}))
    assert tables.tuned_budget(geometry) is None
    with env.override(tables=str(tmp_path)):
        assert tables.tuned_budget(geometry) == 14
        assert plan_decode(inputs.seq_lens, geometry).budget == 14
        assert plan_decode(inputs.seq_lens, geometry, budget=20).budget == 20
        found = explain(**arguments_of(inputs, **EMULATE))
        assert (found.budget, found.capacity) == (14, 7) and "budget of 14 tasks: tuned" in found.reasons
    (tmp_path / "mine.json").write_text(json.dumps({**table, "rows": [{**row, "budget": -1}, {**row, "QL": None}]}))
    tables.forget()
    with env.override(tables=str(tmp_path)), pytest.warns(RuntimeWarning, match="row skipped"):
        assert tables.tuned_budget(geometry) is None
    tables.forget()


def test_the_packaged_tables_are_sound() -> None:
    found = list(tables.rows())
    assert {located.row.geometry.arch for located in found} == {"gfx942", "gfx950"}
    assert all(located.row.provenance.modelled for located in found)
    assert len({located.row.geometry for located in found}) == len(found) > 50
    for located in found:
        assert tables.tuned_budget(located.row.geometry) == located.row.budget


# ------------------------------------------------------------------------------------------------ warm calls


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
    other = make_workspace(*_other_plan(inputs))
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
        arguments = _op_arguments(inputs, plan, workspace)
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
        torch.ops.pa_decode.decode_out.default(*_op_arguments(moved, over["plan"], workspace))
    assert not oracle.launches and torch.equal(memory, before)


def test_parts_of_a_workspace_are_apart(oracle: OracleKernels) -> None:
    _, workspace = planned(problem())
    count = workspace.partial_max.numel()
    both = torch.empty(2 * count)
    shape = workspace.partial_max.shape
    apart = replace(workspace, partial_max=both[:count].view(shape), partial_sum=both[count:].view(shape))
    with pytest.raises(ValueError, match="partial_sum: got memory shared with partial_max, expected memory of its own"):
        replace(apart, partial_sum=both[4 : count + 4].view(shape))


def _other_plan(inputs: reference.DecodeInputs) -> tuple[DecodePlan, Any]:
    geometry = geometry_of(inputs, compute_units=256)
    return plan_decode(inputs.seq_lens, geometry, budget=12, backend="emulate"), geometry


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


# ------------------------------------------------------------------------------------------------ explain, ops


def test_explain(oracle: OracleKernels) -> None:
    inputs = make_inputs([300, 5], head_dim=256, group=8, query_length=4, window=257, scale_mode="token")
    found = explain(**arguments_of(inputs, **EMULATE))
    text = str(found)
    assert "d256_pipe in flydsl" in text and "single tile" in text and "windowed" in text and "V packed" in text
    assert found.capacity == 6 and found.max_partitions == 3 and json.loads(json.dumps(found.as_dict()))
    plan, workspace = planned(inputs, budget=4)
    given = explain(**arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace, kernel="attention"))
    assert given.capacity == 2 and given.attention is not None and given.attention.kernel == "attention"
    assert given.reasons[1:] == ('kernel="attention" was asked for', "the plan was given")
    assert explain(**arguments_of(inputs)).reasons == ("reference is the default on cpu",)
    with pytest.raises(TypeError, match=r"explain: got \['max_seq_len'\]"):
        explain(**arguments_of(inputs, max_seq_len=4))
    with pytest.raises(ValueError, match="partial_out of the workspace"):
        explain(**arguments_of(inputs, **EMULATE, plan=_other_plan(inputs)[0], workspace=workspace))
    assert [spec.kernel for spec, _, _ in oracle.launches] == ["planner", "planner"]


def _op_arguments(inputs: reference.DecodeInputs, plan: DecodePlan, workspace: DecodeWorkspace) -> tuple[Any, ...]:
    out = torch.zeros_like(inputs.query)
    data = (inputs.query, inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.seq_lens, inputs.k_scale)
    scratch = (workspace.partial_out, workspace.partial_max, workspace.partial_sum)
    numbers = (plan.numbers(), inputs.softmax_scale, inputs.query_length, inputs.window, None)
    plan_tensors = plan.work_info, plan.reduce_info
    rest = (*plan_tensors, *scratch, out, *numbers, "emulate", "auto", "gfx950")
    return (*data, inputs.v_scale, inputs.sinks, None, None, *rest)


def test_ops(oracle: OracleKernels) -> None:
    """Not test_schema: it compares FP8 tensors with torch.allclose, which has no FP8; the test below does its work."""
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs)
    for part in workspace.parts.values():
        part.zero_()
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    op: Any = torch.ops.pa_decode.decode_out.default
    torch.library.opcheck(op, _op_arguments(inputs, plan, workspace), test_utils=tests)
    before = [x.clone() for x in (inputs.query, inputs.block_tables, inputs.seq_lens, plan.work_info)]
    args = _op_arguments(inputs, plan, workspace)
    op(*args)
    assert close(args[15], inputs)
    for x, old in zip((inputs.query, inputs.block_tables, inputs.seq_lens, plan.work_info), before, strict=True):
        assert torch.equal(x, old)
    mutated = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == {"partial_out", "partial_max", "partial_sum", "out"}
    write = (inputs.seq_lens, plan.work_info, plan.reduce_info, 256, 0, 4, "emulate", "gfx950")
    torch.library.opcheck(torch.ops.pa_decode.write_plan.default, write)


@pytest.mark.parametrize("scale_mode", ["tensor", "token"])
def test_ops_write_what_their_schema_says(oracle: OracleKernels, scale_mode: str) -> None:
    """Bytes and versions of every argument, FP8 caches included."""
    inputs = problem(sinks=True, scale_mode=scale_mode, window=17)
    plan, workspace = planned(inputs)
    args = _op_arguments(inputs, plan, workspace)
    op: Any = torch.ops.pa_decode.decode_out.default
    names = [argument.name for argument in op._schema.arguments]
    written = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    tensors = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)}
    assert written <= tensors.keys() and not op._schema.returns
    before = {name: (_bytes(x), x._version) for name, x in tensors.items()}
    op(*args)
    for name, x in tensors.items():
        assert (_bytes(x) != before[name][0]) is (name in written), name
        assert name in written or x._version == before[name][1], name


def _bytes(x: Tensor) -> list[int]:
    flat: list[int] = x.contiguous().view(torch.uint8).flatten().tolist()
    return flat


@pytest.mark.parametrize("with_plan", [True, False])
def test_compiled_without_breaks(oracle: OracleKernels, with_plan: bool) -> None:
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs) if with_plan else (None, None)

    def call(query: Tensor, seq_lens: Tensor) -> Tensor:
        if plan is not None:
            plan.refresh(seq_lens)
        changed = {"query": query * 2, "seq_lens": seq_lens, "plan": plan, "workspace": workspace}
        return pa_decode(**arguments_of(inputs, **EMULATE, **changed)) + 1

    expected = call(inputs.query, inputs.seq_lens)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(inputs.query, inputs.seq_lens), expected)


# ------------------------------------------------------------------------------------------------ choice of a backend


def test_backends_by_device(oracle: OracleKernels) -> None:
    inputs = problem()
    with env.override(backend="emulate", arch="gfx950"):
        pa_decode(**arguments_of(inputs))
        assert len(oracle.launches) == 3 and "GDN_BACKEND" in str(explain(**arguments_of(inputs)))
    for backend in ("triton", "flydsl", "hip"):
        with pytest.raises(
            UnsupportedError, match=rf"backend on cpu: got '{backend}', supported: reference \(available"
        ):
            pa_decode(**arguments_of(inputs, backend=backend))
    with pytest.raises(ValueError, match='arch with backend="emulate": got None'):
        pa_decode(**arguments_of(inputs, backend="emulate"))
    with pytest.raises(UnsupportedError, match="got 'sm90', supported: gfx942, gfx950"):
        pa_decode(**arguments_of(inputs, backend="emulate", arch="sm90"))
    with pytest.raises(TypeError, match="float8_e4m3fnuz, the FP8 flavour of the architecture"):
        pa_decode(**arguments_of(inputs, backend="emulate", arch="gfx942"))
    with pytest.raises(UnsupportedError, match='kernel with backend="reference"'):
        pa_decode(**arguments_of(inputs, kernel="attention"))
    with pytest.raises(UnsupportedError, match="arch: got 'sm80'"):
        pa_decode(**arguments_of(inputs, arch="sm80"))
