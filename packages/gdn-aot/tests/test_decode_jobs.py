"""Jobs of paged decode: what a call with the heads of a row asks for is among them, and every kind of them runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from gdn_aot import jobs, smoke
from gdn_aot.decode import DecodeKernel
from gdn_runtime import UnsupportedError, env
from gdn_runtime.codeobject.emulate import EmulatorLauncher
from gdn_runtime.kernels.compile import compile_spec
from gdn_runtime.spec import KernelSpec
from pa_decode import PaDecodeSchedule, tables
from pa_decode.schedule import planner_of, specs_of

ARCHS = ("gfx942", "gfx950")


def asked(schedule: PaDecodeSchedule) -> set[KernelSpec]:
    return {schedule.attention, schedule.reduce, schedule.planner}


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_of_a_row(arch: str) -> None:
    """With the batch of the row and any smaller one."""
    found = set(jobs(arch, ["pa"]))
    rows = [located.row for located in tables.rows(tables.COMPILED) if located.row.geometry.arch == arch]
    assert rows
    for row in rows:
        for batch in {1, row.geometry.batch}:
            geometry = replace(row.geometry, batch=batch)
            assert asked(PaDecodeSchedule.select(geometry, tuned_budget=row.budget)) <= found


@pytest.mark.parametrize("arch", ARCHS)
def test_complete_is_any_call_with_the_heads_of_a_row(arch: str) -> None:
    found = set(jobs(arch, ["pa"], complete=True))
    row = next(located.row for located in tables.rows() if located.row.geometry.arch == arch)
    dtypes, sinks, windows = ("bf16", "fp16"), ("none", "bf16", "fp16", "fp32"), (0, 1, 257, 8193, 2**31 - 1)
    for dtype, sink, window, batch in product(dtypes, sinks, windows, (1, 81, 4096)):
        geometry = replace(row.geometry, query_dtype=dtype, sink_dtype=sink, window=window, batch=batch)  # type: ignore[arg-type]
        for mode, packed, budget in product(("tensor", "token"), (True, False), (1, None, 10**6)):
            shape = replace(geometry, scale_mode=mode, v_packed=packed)  # type: ignore[arg-type]
            assert asked(PaDecodeSchedule.select(shape, budget=budget)) <= found


def test_rows_of_both_architectures_count(tmp_path: Path) -> None:
    assert len(DecodeKernel().shapes()) == len(list(tables.rows(tables.COMPILED))) == 96
    (tmp_path / "other.json").write_text('{"format": 1, "kernel": "state_scan_opt", "arch": "gfx950", "rows": []}')
    assert DecodeKernel().shapes([tmp_path]) == ()
    assert len(jobs("gfx950", ["pa"], tables=[tables.PACKAGED / "gfx942.json"])) == 16
    with pytest.raises(UnsupportedError, match="arch of kernel pa: got 'sm90'"):
        DecodeKernel().jobs(DecodeKernel().shapes(), "sm90")


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_run(arch: str) -> None:
    """One of each kind; attention of head size 64, by the Triton kernel, which compiles soonest."""
    row = next(located.row for located in tables.rows() if located.row.geometry.arch == arch)
    geometry = replace(row.geometry, head_dim=64, num_heads=4, scale_mode="token", window=40, sink_dtype="bf16")
    specs = *specs_of(geometry, single_tile=True, max_partitions=4), planner_of(arch, 1)
    with env.override(jit=True):
        for spec in specs:
            smoke.launch(compile_spec(spec), EmulatorLauncher(arch))
