"""Choice of kernels, budgets and their precedence, specialisation keys, unsupported layouts, specs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from gdn_runtime.codeobject import code_object
from gdn_runtime.codeobject.facts import spec_from_json, spec_json
from gdn_runtime.errors import UnsupportedError
from pa_decode import DecodeGeometry, PaDecodeSchedule, check_cache, pa_decode, pack_v, plan_decode
from pa_decode.ops.selection import kernel_passed_over
from pa_decode.planner import plan_capacity
from pa_decode.spec import AttentionSpec, PlannerSpec, ReduceSpec
from pa_decode.traits import window_tiles

select = PaDecodeSchedule.select


def geometry(**changes: Any) -> DecodeGeometry:
    fields: dict[str, Any] = {
        "arch": "gfx950",
        "compute_units": 256,
        "batch": 8,
        "num_heads": 16,
        "num_kv_heads": 2,
        "head_dim": 256,
        "page_size": 64,
        "query_length": 4,
    }
    return DecodeGeometry(**(fields | changes))


def test_kernels_by_name() -> None:
    assert select(geometry(), kernel="attention").attention.kernel == "attention"
    assert select(geometry(), kernel="attention").budget == select(geometry()).budget
    for kernel, message in (
        ("hopper", "arch of hopper: got gfx950, supported: sm90"),
        ("fast", "kernel: got fast, supported: d256_pipe, hopper, attention"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            select(geometry(), kernel=kernel)
    with pytest.raises(UnsupportedError, match="problem of d256_pipe: got head size 256, page 64, 36 rows"):
        select(geometry(num_heads=18), kernel="d256_pipe")


@pytest.mark.parametrize(
    ("changes", "pipe", "kernel"),
    [
        ({}, True, "d256_pipe"),
        ({"page_size": 16, "v_packed": False, "scale_mode": "token"}, True, "d256_pipe"),
        ({"query_dtype": "fp16", "sink_dtype": "fp32", "window": 257}, True, "d256_pipe"),
        ({"num_heads": 8, "query_length": 8}, True, "d256_pipe"),
        ({"num_heads": 18}, False, "attention"),
        ({"head_dim": 128}, False, "attention"),
        ({"page_size": 128}, False, "attention"),
        # gfx942 is never the pipe, with its budget; the kernel of these shapes is generated for it too.
        ({"arch": "gfx942"}, False, "d256_pipe"),
        ({"arch": "gfx942", "num_heads": 18}, False, "attention"),
        ({"arch": "sm90", "compute_units": 132}, False, "hopper"),
        ({"arch": "sm90", "compute_units": 132, "num_heads": 18}, False, "attention"),
        ({"arch": "sm100", "compute_units": 148}, False, "attention"),
    ],
)
def test_kernel_and_default_budget(changes: dict[str, Any], pipe: bool, kernel: str) -> None:
    problem = geometry(**changes)
    schedule = select(problem)
    assert problem.is_pipe is pipe and schedule.attention.kernel == kernel
    assert schedule.budget == problem.compute_units * (1 if pipe or kernel == "hopper" else 2)
    assert schedule.budget_source == "default"
    assert schedule.attention.language == {"d256_pipe": "flydsl", "hopper": "gluon", "attention": "triton"}[kernel]
    assert schedule.attention.fp8 == problem.fp8 == ("fnuz" if problem.arch == "gfx942" else "fn")
    for spec in (schedule.attention, schedule.reduce, schedule.planner):
        assert spec_from_json(spec_json(spec)) == spec


def test_the_kernel_that_was_passed_over_is_named() -> None:
    wide = {"num_heads": 18, "compute_units": 132}
    for arch, name in (("sm90", "hopper"), ("gfx950", "d256_pipe"), ("gfx942", "d256_pipe")):
        text = kernel_passed_over(select(geometry(arch=arch, **wide)).attention)
        assert text == (
            f"{name} takes head size 256, pages of 16 or 64 and at most 32 query rows per KV head; here 256, 64, 36"
        )
        assert kernel_passed_over(select(geometry(arch=arch)).attention) is None
    assert kernel_passed_over(select(geometry(arch="sm100", **wide)).attention) is None


def test_precedence_of_budgets() -> None:
    problem = geometry()
    assert (select(problem).budget, select(problem).capacity) == (256, 128)
    tuned = select(problem, tuned_budget=512)
    assert (tuned.budget, tuned.budget_source, tuned.capacity) == (512, "tuned", 256)
    both = select(problem, budget=64, tuned_budget=512)
    assert (both.budget, both.budget_source, both.capacity) == (64, "explicit", 32)
    # A tuned budget that equals the default of the other path is used as it is.
    assert select(geometry(arch="gfx942", compute_units=304), tuned_budget=304).budget == 304


@pytest.mark.parametrize("name", ["budget", "tuned_budget", "max_partitions"])
def test_bad_budgets(name: str) -> None:
    for value, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError), ("8", TypeError)):
        with pytest.raises(error, match=f"{name}: got"):
            select(geometry(), **{name: value})
    with pytest.raises(ValueError, match="max_partitions: got 257, expected an int of 1 to 256"):
        select(geometry(), max_partitions=257)


def test_the_grid_and_the_batch_make_no_kernel() -> None:
    for window in (0, 8193):
        keys = {
            select(
                geometry(batch=batch, num_kv_heads=heads, num_heads=8 * heads, compute_units=units, window=window),
                budget=budget,
            ).attention
            for batch, heads, units, budget in itertools.product((1, 3, 200, 4096), (1, 4), (80, 256), (1, 64))
            if not (batch == 1 and heads == 1)
        }
        assert len(keys) == 1
    assert select(geometry(window=257)).attention == select(geometry(window=258)).attention


def test_equal_schedules_are_one_object() -> None:
    assert select(geometry()) is select(geometry())
    assert select(geometry()).attention is select(geometry(batch=9), budget=7).attention


def test_single_tile_is_the_only_trace_of_the_budget() -> None:
    problem = geometry(window=257)
    tiles = window_tiles(257, 4)
    wide, narrow = select(problem, budget=2 * 8 * tiles), select(problem, budget=1)
    assert wide.attention.single_tile and not narrow.attention.single_tile
    assert dataclasses.replace(wide.attention, single_tile=False) == narrow.attention
    assert not select(problem, budget=2 * 8 * tiles, max_partitions=tiles - 1).attention.single_tile
    assert not select(geometry(window=0), budget=1 << 20).attention.single_tile


def test_partitions_are_bounded_by_the_window() -> None:
    schedule = select(geometry(window=257), budget=1 << 20)
    tiles = window_tiles(257, 4)
    assert schedule.max_partitions == tiles and schedule.capacity == 8 * tiles
    assert schedule.reduce.max_parts == 4
    dense = select(geometry(), budget=1 << 20, max_partitions=100)
    assert dense.max_partitions == 100 and dense.capacity == plan_capacity(8, 2, 1 << 20, 100) == 800
    assert dense.reduce.max_parts == 128


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch: got 0"),
        ({"batch": 4097}, ValueError, "batch: got 4097, expected an int of 1 to 4096"),
        ({"batch": True}, TypeError, "batch: got bool"),
        ({"num_heads": 15}, ValueError, "num_heads: got 15, expected a multiple of num_kv_heads = 2"),
        ({"window": -1}, ValueError, "window: got -1"),
        ({"query_dtype": "fp32"}, ValueError, "query_dtype: got 'fp32', expected one of bf16, fp16"),
        ({"scale_mode": "head"}, ValueError, "scale_mode: got 'head'"),
        ({"v_packed": 1}, TypeError, "v_packed: got int"),
        ({"arch": "gfx90a"}, UnsupportedError, "arch: got 'gfx90a'"),
        ({"arch": "sm80"}, UnsupportedError, "arch: got sm80, supported: gfx942"),
    ],
)
def test_geometry_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        geometry(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head size: got 96, supported: 64, 128, 256"),
        ({"page_size": 32}, "page size: got 32"),
        ({"query_length": 9}, "query rows per KV head: got query length 9 x 8"),
        ({"num_heads": 66}, "query rows per KV head: got query length 4 x 33"),
    ],
)
def test_select_lists_what_is_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        select(geometry(**changes))


def unchecked(problem: DecodeGeometry) -> DecodeGeometry:
    """A geometry of an unpacked K that never went through its own check."""
    other = copy.copy(problem)
    object.__setattr__(other, "trans_k", False)
    return other


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("v_packed", [True, False])
def test_an_unpacked_k_is_refused_at_every_entry(arch: str, v_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = geometry(arch=arch, v_packed=v_packed)
    x = torch.zeros(1, 16, 2, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    v_cache, lengths = pack_v(x, packed=v_packed), torch.zeros(8, dtype=torch.int32)
    spec = dataclasses.replace(select(problem).attention, trans_k=False)
    # The four dimensions of K are checked before anything about V, the scales or the lengths, and nothing is allocated.
    monkeypatch.setattr(torch, "empty", None)
    entries = {
        "call": lambda: pa_decode(None, x, v_cache, None, None, softmax_scale="none"),  # type: ignore[arg-type]
        "cache": lambda: check_cache(x, v_cache, k_scale="none", v_scale=1.0),  # type: ignore[arg-type]
        "schedule": lambda: select(unchecked(problem)),
        "compiler": lambda: code_object(spec),
        "plan": lambda: plan_decode(lengths, unchecked(problem)),
        "geometry": lambda: dataclasses.replace(problem, trans_k=False),
    }
    for enter in entries.values():
        with pytest.raises(NotImplementedError, match="trans_k=False"):
            enter()


def spec(**changes: Any) -> AttentionSpec:
    return dataclasses.replace(select(geometry()).attention, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm90"}, "arch of d256_pipe: got sm90"),
        ({"arch": "sm80"}, "arch: got sm80"),
        ({"head_dim": 128}, "problem of d256_pipe: got head size 128, page 64, 32 rows, supported: head size 256"),
        ({"group_size": 9}, "problem of d256_pipe: .* 36 rows"),
        ({"num_warps": 8}, "num_warps of d256_pipe: got 8"),
        ({"single_tile": True}, "windowed with single_tile: got False"),
        ({"kernel": "other"}, "kernel: got other"),
        ({"query_dtype": "fp32"}, "query dtype: got fp32"),
        ({"scale_mode": "head"}, "scale mode: got head"),
    ],
)
def test_attention_spec_refuses(changes: dict[str, Any], message: str) -> None:
    spec().check()
    with pytest.raises(UnsupportedError, match=message):
        spec(**changes).check()


def test_rows_grids_and_blocks() -> None:
    assert (spec().rows, spec().block, spec().grid(128, 2)) == (32, (256, 1, 1), (128, 2, 1))
    reduce = select(geometry()).reduce
    assert reduce.grid(8, 2) == (16, 2, 8)
    assert select(geometry(arch="sm90")).attention.block == (128, 1, 1)
    assert PlannerSpec.of("gfx950", 1).max_batch == 16
    assert PlannerSpec.of("gfx950", 4096).max_batch == 4096 and PlannerSpec("gfx950", 64).grid() == (1, 1, 1)
    kinds = [argument.kind for argument in AttentionSpec.ARGUMENTS]
    assert kinds == ["pointer"] * 10 + ["i64"] * 5 + ["i32"] * 6 + ["f32"]


def test_other_specs_refuse() -> None:
    for max_batch in (8, 24, 8192):
        with pytest.raises(UnsupportedError, match="max_batch: got"):
            PlannerSpec("gfx950", max_batch).check()
    reduce = ReduceSpec("gfx950", 256, 8, 4, "bf16", "none", 16)
    reduce.check()
    for changes in ({"max_parts": 12}, {"sink_dtype": "fp8"}, {"head_dim": 80}, {"arch": "cpu"}, {"group_size": 0}):
        with pytest.raises(UnsupportedError):
            dataclasses.replace(reduce, **changes).check()  # type: ignore[arg-type]
