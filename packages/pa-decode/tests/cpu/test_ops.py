"""The call: what it hands to kernels, plans, workspaces, explain, backends. Kernels are oracles or torch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn_runtime import env
from gdn_runtime.errors import UnsupportedError
from pa_decode import explain, make_workspace, pa_decode, plan_decode, reference, tables
from pa_decode.plan import workspace_bytes
from pa_decode.quantise import FN, FNUZ
from pa_testing import OracleKernels, arguments_of, geometry_of, make_inputs
from pa_testing.oracle_calls import EMULATE, close, other_plan, planned, problem

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


# ------------------------------------------------------------------------------------------------ explain


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
        explain(**arguments_of(inputs, **EMULATE, plan=other_plan(inputs)[0], workspace=workspace))
    assert [spec.kernel for spec, _, _ in oracle.launches] == ["planner", "planner"]


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
