"""What K5 opt keeps bit for bit, conversions of NaN and infinity, and opt beside vk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gdn_runtime.spec import AMD_ARCHS, SCAN_BLOCK_V
from gdn_runtime.testing import assert_bitwise_equal, assert_close_rel
from gdn_testing.scans import ORDERS, ScanProblem, ScanResult, emulate_scan, opt_spec, scan_code, scan_problem, vk_spec

LENGTHS = [130, 0, 65]

each_arch = pytest.mark.parametrize("arch", AMD_ARCHS)
each_block_v = pytest.mark.parametrize("block_v", SCAN_BLOCK_V)


def assert_same(actual: ScanResult, expected: ScanResult, rows: slice = slice(None)) -> None:
    """Equal bits of v_new (``rows``) and final states."""
    assert_bitwise_equal(actual.v_new[:, :, rows], expected.v_new[:, :, rows], "v_new")
    assert_bitwise_equal(actual.final_state, expected.final_state, "final_state")


def high_half(x: Tensor) -> Tensor:
    """The high 16 bits of fp32 as bf16."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@each_arch
@each_block_v
def test_fp32_snapshots_cut_are_the_bf16_ones(arch: str, block_v: int) -> None:
    problem = scan_problem(LENGTHS)
    wide, narrow = (
        emulate_scan(opt_spec(problem, arch, block_v, snapshot_dtype=dtype), problem) for dtype in ("fp32", "bf16")
    )
    assert_bitwise_equal(high_half(wide.h), narrow.h, "h")
    assert_same(narrow, wide, slice(problem.inputs.num_tokens))


@each_arch
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_fp32_snapshots_to_nearest_are_the_bf16_ones(arch: str, state: str) -> None:
    problem = scan_problem(LENGTHS, state_dtype=torch.bfloat16 if state == "bf16" else torch.float32)
    wide, narrow = (
        emulate_scan(opt_spec(problem, arch, 32, snapshot_dtype=dtype, rounding="nearest"), problem)
        for dtype in ("fp32", "bf16")
    )
    assert_bitwise_equal(wide.h.bfloat16(), narrow.h, "h")
    assert_same(narrow, wide, slice(problem.inputs.num_tokens))


@each_arch
@each_block_v
def test_the_order_of_waves_is_nothing(arch: str, block_v: int) -> None:
    problem = scan_problem(LENGTHS)
    spec = opt_spec(problem, arch, block_v)
    first, *others = (emulate_scan(spec, problem, order=order) for order in ORDERS)
    for other in others:
        assert_bitwise_equal(other.h, first.h, "h")
        assert_same(other, first, slice(problem.inputs.num_tokens))


@each_arch
@each_block_v
def test_a_sequence_does_not_see_its_neighbours(arch: str, block_v: int) -> None:
    problem = scan_problem([65, 130, 3])
    spec = opt_spec(problem, arch, block_v)
    together = emulate_scan(spec, problem)
    alone = emulate_scan(spec, middle_of(problem))
    assert_bitwise_equal(together.h[:, 2:5], alone.h, "h")
    assert_bitwise_equal(together.v_new[:, :, 65:195], alone.v_new, "v_new")
    assert_bitwise_equal(together.final_state[1:2], alone.final_state, "final_state")


def middle_of(problem: ScanProblem) -> ScanProblem:
    """The second of three sequences as a problem of its own, on the same numbers."""
    alone = scan_problem([problem.inputs.seq_lens[1]], spare_rows=0)
    begin = problem.inputs.seq_lens[0]
    rows = slice(begin, begin + problem.inputs.seq_lens[1])
    cut = {name: getattr(problem, name)[:, :, rows].contiguous() for name in ("w", "u", "g")}
    k, state = problem.inputs.k[:, rows].contiguous(), problem.initial_state[1:2]
    return replace(alone, inputs=alone.inputs.with_(k=k, initial_state=state), **cut)


SPECIAL = {
    "infinity": (0x7F800000, 0x7F80),
    "-infinity": (0xFF800000, 0xFF80),
    "largest": (0x7F7FFFFF, 0x7F80),
    "-largest": (0xFF7FFFFF, 0xFF80),
    "above half": (0x3F808001, 0x3F81),
    "below half": (0x3F807FFF, 0x3F80),
    "-0": (0x80000000, 0x8000),
    "denormal": (0x00018001, 0x0002),
}
"""fp32 and what it is as bf16, to nearest."""

TIES = {"even below": (0x3F808000, 0x3F80), "even above": (0x3F818000, 0x3F82), "-even above": (0xBF818000, 0xBF82)}
NANS = {
    "quiet": 0x7FC00000,
    "-quiet": 0xFFC00000,
    "low payload": 0x7F800001,
    "-low payload": 0xFF800001,
    "all ones": 0x7FFFFFFF,
    "-all ones": 0xFFFFFFFF,
}


@each_arch
def test_to_nearest_keeps_nan_and_infinity(arch: str) -> None:
    """Through a bf16 snapshot, each number in a row of its own."""
    problem = scan_problem([3, 0], state="zeros")
    exact = SPECIAL | TIES
    words = [given for given, _ in exact.values()] + list(NANS.values())
    rows = torch.arange(len(words)) * 7
    values = torch.tensor([x - (x >> 31 << 32) for x in words], dtype=torch.int32).view(torch.float32)
    for n in range(2):
        problem.initial_state[n, 1, rows, 5 * n + 3] = values
    spec = opt_spec(problem, arch, 32, snapshot_dtype="bf16", rounding="nearest")
    result = emulate_scan(spec, problem)
    got = result.h[0, 0, 1, rows, 3]
    halves = [x & 0xFFFF for x in got.view(torch.int16).tolist()]
    assert dict(zip(exact, halves, strict=False)) == {name: expected for name, (_, expected) in exact.items()}
    assert got[-len(NANS) :].isnan().all()
    assert_bitwise_equal(result.final_state[1], problem.initial_state[1], "state of an empty sequence")


@each_arch
@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
def test_bf16_states_pass_through_an_empty_sequence(arch: str, rounding: str) -> None:
    """All 65536 of them; a NaN may be another NaN then."""
    problem = scan_problem([0, 0], state_dtype=torch.bfloat16)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    problem.initial_state.view(-1).copy_(every)
    result = emulate_scan(opt_spec(problem, arch, 32, rounding=rounding), problem).final_state.view(-1)
    assert torch.equal(result.isnan(), every.isnan())
    numbers = ~every.isnan()
    assert_bitwise_equal(result[numbers], every[numbers], "states")


@each_block_v
def test_vk_is_opt_up_to_rounding_on_gfx950(block_v: int) -> None:
    problem = scan_problem(LENGTHS, use_gk=True)
    opt = emulate_scan(opt_spec(problem, "gfx950", block_v, snapshot_dtype="bf16", rounding="nearest"), problem)
    vk = emulate_scan(vk_spec(problem, block_v), problem)
    used = problem.inputs.num_tokens
    assert_close_rel(opt.h, vk.h, 1e-3, "h")
    assert_close_rel(opt.v_new[:, :, :used], vk.v_new[:, :, :used], 1e-3, "v_new")
    assert_close_rel(opt.final_state, vk.final_state, 1e-3, "final_state")


@each_arch
def test_units_of_the_gate_are_equal_up_to_rounding(arch: str) -> None:
    log2, natural = (scan_problem(LENGTHS, use_exp2=unit) for unit in (True, False))
    left, right = (emulate_scan(opt_spec(problem, arch, 32), problem) for problem in (log2, natural))
    assert_close_rel(left.h, right.h, 1e-3, "h")
    assert_close_rel(left.final_state, right.final_state, 1e-3, "final_state")
    wrong = emulate_scan(opt_spec(natural, arch, 32, use_exp2=True), natural)
    assert (wrong.final_state - right.final_state).norm() > 0.1 * right.final_state.norm()


@each_arch
def test_the_scheduling_barrier_is_code_of_gfx942_alone(arch: str) -> None:
    """It moves instructions there, and no number anywhere."""
    problem = scan_problem(LENGTHS)
    specs = [opt_spec(problem, arch, 32, sched_barrier=switch) for switch in (False, True)]
    without, with_it = (scan_code(spec).elf for spec in specs)
    assert (without == with_it) == (arch == "gfx950")
    left, right = (emulate_scan(spec, problem) for spec in specs)
    assert_bitwise_equal(left.h, right.h, "h")
    assert_same(left, right, slice(problem.inputs.num_tokens))
