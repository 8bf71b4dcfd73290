"""K5 opt on a pool of states: the same numbers as on dense states, and no slot touched that no sequence names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gdn_runtime.spec import AMD_ARCHS, OptStateScanSpec
from gdn_runtime.testing import assert_bitwise_equal
from gdn_testing import poisoned
from gdn_testing.scans import ScanProblem, assert_as_expected, emulate_scan, opt_spec, reserved, scan_problem

LENGTHS = [70, 0, 128, 65]
SLOTS = 7
ORDERED = [6, 0, 3, 2]
"""The last and the first slot, not in order."""

KINDS = [(16, "fp32", "bf16"), (32, "bf16", "fp32"), (64, "fp32", "bf16")]
"""block_v, dtype of the states, dtype of the snapshots."""

each_arch = pytest.mark.parametrize("arch", AMD_ARCHS)
each_index_dtype = pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


def pool_problem(
    arch: str, block_v: int = 16, state: str = "fp32", snapshot: str = "bf16"
) -> tuple[ScanProblem, OptStateScanSpec]:
    """A problem, and its spec with a pool."""
    problem = scan_problem(LENGTHS, state_dtype=torch.bfloat16 if state == "bf16" else torch.float32)
    return problem, opt_spec(problem, arch, block_v, use_state_indices=True, snapshot_dtype=snapshot)


def pool_of(states: Tensor, indices: list[int], slots: int = SLOTS) -> Tensor:
    """[slots, H, V, K]: the state of sequence n in slot ``indices[n]``, NaN everywhere else."""
    pool = poisoned(slots, *states.shape[1:], dtype=states.dtype)
    pool[indices] = states
    return pool


@each_arch
@pytest.mark.parametrize(("block_v", "state", "snapshot"), KINDS)
def test_pool_is_dense_bit_for_bit(arch: str, block_v: int, state: str, snapshot: str) -> None:
    problem, spec = pool_problem(arch, block_v, state, snapshot)
    dense = emulate_scan(opt_spec(problem, arch, block_v, snapshot_dtype=snapshot), problem)
    indices = torch.tensor(ORDERED, dtype=torch.int32)
    for slots in (ORDERED, ORDERED[::-1]):
        indices.copy_(torch.tensor(slots))  # in place: nothing may keep the indices of an earlier call
        pool = pool_of(problem.initial_state, slots)
        result = emulate_scan(spec, problem, pool=pool, state_indices=indices)
        used = problem.inputs.num_tokens
        assert_bitwise_equal(result.h, dense.h, "h")
        assert_bitwise_equal(result.v_new[:, :, :used], dense.v_new[:, :, :used], "v_new")
        assert_bitwise_equal(pool[slots], dense.final_state, "final states")
        assert_bitwise_equal(pool[[1, 4, 5]], pool_of(problem.initial_state, slots)[[1, 4, 5]], "other slots")


@each_arch
@each_index_dtype
def test_slots_outside_the_pool_read_zeros_and_are_not_written(arch: str, index_dtype: torch.dtype) -> None:
    """As an int32, 2^32 would be slot 0 and 2^32 + 3 slot 3. The pool has fewer slots than there are sequences."""
    problem, spec = pool_problem(arch)
    far = [(1 << 32) + 3, 1 << 32, -(1 << 32)] if index_dtype is torch.int64 else [2**31 - 1, -(2**31), -2]
    pool = pool_of(problem.initial_state[:1], [2], 3)
    before = pool.clone()
    for indices in ([-1, -1, 2, 3], [2, *far], [*far, 2]):
        pool.copy_(before)
        states = {"state_indices": torch.tensor(indices, dtype=index_dtype)}
        result = emulate_scan(spec, problem, pool=pool, **states)
        assert_as_expected(spec, problem, result, pool=before, **states)
        assert_bitwise_equal(pool[:2], before[:2], "slots of no sequence")


@each_arch
@each_index_dtype
def test_nothing_is_written_if_every_sequence_is_padded(arch: str, index_dtype: torch.dtype) -> None:
    problem, spec = pool_problem(arch)
    pool = pool_of(problem.initial_state, ORDERED)
    before = pool.clone()
    result = emulate_scan(spec, problem, pool=pool, state_indices=torch.full((4,), -1, dtype=index_dtype))
    assert_bitwise_equal(pool, before, "pool")
    assert not result.h[0, 0].any()


@each_arch
def test_a_sequence_without_initial_state_starts_from_zeros(arch: str) -> None:
    """Whatever its slot holds, NaN too; the slot is written."""
    problem, spec = pool_problem(arch)
    pool = pool_of(problem.initial_state[1:], ORDERED[1:])
    before = pool.clone()
    states = {
        "state_indices": torch.tensor(ORDERED, dtype=torch.int32),
        "has_initial_state": torch.tensor([False, False, True, True]),
    }
    result = emulate_scan(spec, problem, pool=pool, **states)
    assert_as_expected(spec, problem, result, pool=before, **states)
    assert not result.h[0, 0].any()
    assert not pool[ORDERED[1]].any()


@each_arch
def test_dense_states_take_the_mask_too(arch: str) -> None:
    problem = scan_problem(LENGTHS)
    spec = opt_spec(problem, arch, 32)
    known = torch.tensor([True, False, False, True])
    result = emulate_scan(spec, problem, has_initial_state=known)
    assert_as_expected(spec, problem, result, has_initial_state=known)


@each_arch
def test_slots_may_lie_apart(arch: str) -> None:
    """Each slot of a cache that keeps more than states in it."""
    problem, spec = pool_problem(arch)
    cache = poisoned(SLOTS, 3, 128, 128)
    pool = cache[:, :2]
    pool[ORDERED] = problem.initial_state
    before = pool.clone()
    states = {"state_indices": torch.tensor(ORDERED)}
    result = emulate_scan(spec, problem, pool=pool, **states)
    assert_as_expected(spec, problem, result, pool=before, **states)
    assert cache[:, 2:].isnan().all()


@each_arch
def test_slots_past_32_bits(arch: str) -> None:
    """A pool of 5 GB, of which only the pages of four slots are ever touched."""
    problem, spec = pool_problem(arch)
    dense = emulate_scan(opt_spec(problem, arch, spec.block_v, snapshot_dtype="bf16"), problem)
    pool, slots = reserved(40_000, 2, 128, 128, dtype=torch.float32), [39_999, 0, 39_000, 32_768]
    for slot, state in zip(slots, problem.initial_state, strict=True):
        pool[slot] = state
    result = emulate_scan(spec, problem, pool=pool, state_indices=torch.tensor(slots, dtype=torch.int32))
    assert_bitwise_equal(result.h, dense.h, "h")
    assert_bitwise_equal(torch.stack([pool[slot] for slot in slots]), dense.final_state, "final states")
