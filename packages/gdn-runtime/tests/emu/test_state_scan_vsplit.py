"""The V-split K5 on the emulator, all checks on: values, pools of states, what holds bit for bit, registers and LDS."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gdn_runtime.spec import AMD_ARCHS
from gdn_runtime.testing import assert_bitwise_equal
from gdn_testing import KEY_SETS, poisoned
from gdn_testing.scans import (
    ORDERS,
    ScanProblem,
    ScanResult,
    assert_as_expected,
    emulate_scan,
    far_arguments,
    reserved,
    scan_code,
    tprime_problem,
    vsplit_spec,
    without_states,
)

LENGTHS = [70, 0, 128, 1]
SLOTS = 7
ORDERED = [6, 0, 3, 2]
"""Slots of the sequences of ``LENGTHS``: the last and the first, not in order."""

BF16 = {"snapshot_dtype": "bf16"}
POOL = {**BF16, "use_state_indices": True}

each_arch = pytest.mark.parametrize("arch", AMD_ARCHS)


def emulate(
    problem: ScanProblem, arch: str, block_v: int = 128, order: str = "forward", **changes: object
) -> ScanResult:
    return emulate_scan(vsplit_spec(problem, arch, block_v, **changes), problem, order=order)


def assert_same(actual: ScanResult, expected: ScanResult, used: int) -> None:
    """Equal bits of v_new and final states."""
    assert_bitwise_equal(actual.v_new[:, :, :used], expected.v_new[:, :, :used], "v_new")
    assert_bitwise_equal(actual.final_state, expected.final_state, "final_state")


# ------------------------------------------------------------------------------------------------ values


@each_arch
@pytest.mark.parametrize("key_set", KEY_SETS)
def test_values_on_every_set_of_keys(arch: str, key_set: str) -> None:
    """Weak gates: states live through the chunks. Rows past the last sequence are NaN, and stay what they were."""
    kind = KEY_SETS[key_set]
    problem = tprime_problem(LENGTHS, keys=kind.keys, beta=kind.beta)
    spec = vsplit_spec(problem, arch, 128, **BF16)
    assert_as_expected(spec, problem, emulate_scan(spec, problem, order="random"))


@each_arch
@pytest.mark.parametrize("gate", ["mixed", "closed", "alternating"])
def test_gates(arch: str, gate: str) -> None:
    problem = tprime_problem([130], gate=gate)
    spec = vsplit_spec(problem, arch, 128, **BF16)
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


@each_arch
@pytest.mark.parametrize(("block_v", "tokens"), [(64, 100), (64, 128), (128, 100)])
def test_a_dense_batch(arch: str, block_v: int, tokens: int) -> None:
    """Two rows; fp32 snapshots, to nearest, natural units. Half a head per workgroup and bf16 states; a whole head and
    no states at either end."""
    problem = tprime_problem((2, tokens), 4, 2, use_exp2=False, state_dtype=torch.bfloat16)
    problem = without_states(problem) if block_v == 128 else problem
    spec = vsplit_spec(problem, arch, block_v, rounding="nearest", store_final_state=block_v == 64)
    assert_as_expected(spec, problem, emulate_scan(spec, problem, order="reverse"))


@each_arch
def test_any_number_of_chunks(arch: str) -> None:
    """Loads run ahead of the chunks: 0 to 4 of them, whole and short last ones."""
    problem = tprime_problem([64 * n - m for n in range(1, 5) for m in (0, 1)] + [0])
    spec = vsplit_spec(problem, arch, 128)
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


@each_arch
def test_one_key_and_one_value_for_all_tokens(arch: str) -> None:
    """k and v expanded over tokens: rows 0 bytes apart."""
    problem = tprime_problem([70, 5])
    k, v = (x[:, :1].clone().expand(-1, x.shape[1], -1, -1) for x in (problem.inputs.k, problem.inputs.v))
    problem = replace(problem, inputs=problem.inputs.with_(k=k, v=v))
    spec = vsplit_spec(problem, arch, 128, **BF16)
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


@each_arch
def test_rows_more_than_2_to_the_31_elements_away(arch: str) -> None:
    problem = tprime_problem([130], spare_rows=0)
    spec = vsplit_spec(problem, arch, 128, **BF16)
    near = emulate_scan(spec, problem)
    changes, begin, chunk = far_arguments(spec, problem)
    far = emulate_scan(spec, problem, changes=changes)
    assert_bitwise_equal(changes["h"][:, chunk:], near.h, "h")
    assert_bitwise_equal(far.v_new[:, :, begin:], near.v_new, "v_new")
    assert_bitwise_equal(far.final_state, near.final_state, "final_state")


# ------------------------------------------------------------------------------------------------ bit for bit


@each_arch
def test_fp32_snapshots_cut_are_the_bf16_ones(arch: str) -> None:
    problem = tprime_problem(LENGTHS)
    wide, narrow = (emulate(problem, arch, snapshot_dtype=dtype) for dtype in ("fp32", "bf16"))
    cut = (wide.h.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert_bitwise_equal(cut, narrow.h, "h")
    assert_same(narrow, wide, problem.inputs.num_tokens)


@each_arch
@pytest.mark.parametrize("snapshot", ["bf16", "fp32"])
def test_the_order_of_waves_is_nothing(arch: str, snapshot: str) -> None:
    problem = tprime_problem(LENGTHS)
    first, *others = (emulate(problem, arch, order=order, snapshot_dtype=snapshot) for order in ORDERS)
    for other in others:
        assert_bitwise_equal(other.h, first.h, "h")
        assert_same(other, first, problem.inputs.num_tokens)


@each_arch
def test_infinity_in_v_stays_in_its_tile(arch: str) -> None:
    """v @ I and T' x make NaN of the 16 columns of its tile of v; the other head and columns see nothing."""
    problem = tprime_problem([128], spare_rows=0)
    v = problem.inputs.v.clone()
    v[0, 70, 1, 33] = torch.inf
    problem = replace(problem, inputs=problem.inputs.with_(v=v))
    result = emulate(problem, arch, **BF16)
    bad = ~result.v_new[0].isfinite()
    assert not bad[0].any() and result.final_state[:, 0].isfinite().all()
    assert not bad[1, :64].any(), "tokens of the chunk before"
    columns = bad[1].any(0)
    assert columns[33] and int(columns.sum()) == 16 and not columns[:32].any() and not columns[64:].any()
    assert torch.equal(~result.final_state[0, 1].isfinite().all(-1), columns)


# ------------------------------------------------------------------------------------------------ states


def pool_of(states: Tensor, indices: list[int], slots: int = SLOTS) -> Tensor:
    """[slots, H, V, K]: the state of sequence n in slot ``indices[n]``, NaN everywhere else."""
    pool = poisoned(slots, *states.shape[1:], dtype=states.dtype)
    pool[indices] = states
    return pool


@each_arch
def test_pool_is_dense_bit_for_bit(arch: str) -> None:
    problem = tprime_problem(LENGTHS)
    dense = emulate(problem, arch, **BF16)
    pool = pool_of(problem.initial_state, ORDERED)
    before = pool.clone()
    spec = vsplit_spec(problem, arch, 128, **POOL)
    result = emulate_scan(spec, problem, pool=pool, state_indices=torch.tensor(ORDERED, dtype=torch.int32))
    used = problem.inputs.num_tokens
    assert_bitwise_equal(result.h, dense.h, "h")
    assert_bitwise_equal(result.v_new[:, :, :used], dense.v_new[:, :, :used], "v_new")
    assert_bitwise_equal(pool[ORDERED], dense.final_state, "final states")
    assert_bitwise_equal(pool[[1, 4, 5]], before[[1, 4, 5]], "other slots")


@each_arch
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_pads_and_masked_states(arch: str, index_dtype: torch.dtype) -> None:
    """Slots outside a pool whose slots lie apart read zeros and are not written: as an int32, 2^32 + 3 would be slot 3.
    A sequence without a state starts from zeros whatever its slot holds, NaN too."""
    problem = tprime_problem(LENGTHS)
    spec = vsplit_spec(problem, arch, 128, **POOL)
    cache = poisoned(SLOTS, 3, 128, 128)
    pool = cache[:, :2]
    pool[3] = problem.initial_state[2]
    before = pool.clone()
    outside = (1 << 32) + 3 if index_dtype is torch.int64 else -(2**31)
    states = {
        "state_indices": torch.tensor([-1, outside, 3, 6], dtype=index_dtype),
        "has_initial_state": torch.tensor([True, True, True, False]),
    }
    result = emulate_scan(spec, problem, pool=pool, **states)
    assert_as_expected(spec, problem, result, pool=before, **states)
    assert cache[:, 2:].isnan().all() and pool[6].isfinite().all()


@each_arch
def test_slots_past_32_bits(arch: str) -> None:
    """A pool of 5 GB, of which only the pages of four slots are ever touched."""
    problem = tprime_problem(LENGTHS)
    dense = emulate(problem, arch, **BF16)
    pool, slots = reserved(40_000, 2, 128, 128, dtype=torch.float32), [39_999, 0, 39_000, 32_768]
    for slot, state in zip(slots, problem.initial_state, strict=True):
        pool[slot] = state
    spec = vsplit_spec(problem, arch, 128, **POOL)
    result = emulate_scan(spec, problem, pool=pool, state_indices=torch.tensor(slots, dtype=torch.int32))
    assert_bitwise_equal(result.h, dense.h, "h")
    assert_bitwise_equal(torch.stack([pool[slot] for slot in slots]), dense.final_state, "final states")


@each_arch
def test_states_in_place_without_a_pool(arch: str) -> None:
    problem = tprime_problem(LENGTHS)
    dense = emulate(problem, arch, **BF16)
    states = problem.initial_state.clone()
    spec = vsplit_spec(problem, arch, 128, **BF16)
    emulate_scan(spec, problem, changes={"initial_state": states, "final_state": states})
    assert_bitwise_equal(states, dense.final_state, "states")


# ------------------------------------------------------------------------------------------------ code objects


@each_arch
def test_registers_and_lds(arch: str) -> None:
    """Two waves on a SIMD; two workgroups on a compute unit (64 KB of LDS on gfx942, 160 KB on gfx950)."""
    problem = tprime_problem(LENGTHS)
    for changes in ({}, BF16, POOL):
        facts = scan_code(vsplit_spec(problem, arch, 128, **changes)).facts
        assert facts.vgprs <= 256 and not facts.agprs
        assert not facts.scratch_bytes and not facts.vgpr_spills and not facts.sgpr_spills
        assert facts.lds_bytes + facts.dynamic_lds == (32768 if arch == "gfx942" else 67584)
