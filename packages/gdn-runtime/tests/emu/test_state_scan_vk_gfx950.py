"""K5 vk on the emulator, all checks on: values, what it may not touch, facts of its code objects."""

from __future__ import annotations

import pytest
import torch

from gdn_runtime.errors import UnsupportedError
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.spec import SCAN_BLOCK_V
from gdn_runtime.testing import assert_bitwise_equal, assert_close_rel
from gdn_testing.scans import (
    ORDERS,
    ScanProblem,
    assert_as_expected,
    emulate_scan,
    far_arguments,
    scan_code,
    scan_problem,
    vk_spec,
    without_states,
)

TAILS = [1, 15, 16, 17, 63, 64, 65, 127]
each_block_v = pytest.mark.parametrize("block_v", SCAN_BLOCK_V)


@each_block_v
@pytest.mark.parametrize("order", ORDERS)
def test_tails(block_v: int, order: str) -> None:
    problem = scan_problem(TAILS)
    spec = vk_spec(problem, block_v)
    assert_as_expected(spec, problem, emulate_scan(spec, problem, order=order))


@each_block_v
def test_state_carries_over_chunks(block_v: int) -> None:
    """Against the recurrence by token in fp64: gates of about -0.01 leave half of a state after a chunk."""
    problem = scan_problem([330, 64])
    spec = vk_spec(problem, block_v)
    result = emulate_scan(spec, problem)
    assert_as_expected(spec, problem, result)
    inputs = problem.inputs
    _, exact = recurrent_gated_delta_rule(
        *inputs.tensors, initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens
    )
    # Measured: 3e-3, from the bf16 of w, u and the operands.
    assert_close_rel(result.final_state, exact, 6e-3, "final_state against the recurrence")


@each_block_v
@pytest.mark.parametrize("order", ORDERS)
def test_dense_batch_reads_its_own_gates(block_v: int, order: str) -> None:
    """Gates of other rates in every batch row and head, in natural units; strides of k that no contiguous tensor has;
    per-key gates; no initial state."""
    problem = scan_problem((3, 96), 4, 2, gate="mixed", use_gk=True, use_exp2=False, state="none")
    inputs = problem.inputs
    fused = torch.full((3, 98, 2 * 2 * 128 + 64), float("nan"), dtype=torch.bfloat16)
    k = fused[:, :96, 32 : 32 + 512].unflatten(2, (2, 256))[..., :128].copy_(inputs.k)
    problem = ScanProblem(inputs.with_(k=k), *(getattr(problem, x) for x in ("plan", "w", "u", "g", "gk", "use_exp2")))
    spec = vk_spec(problem, block_v)
    assert_as_expected(spec, problem, emulate_scan(spec, problem, order=order))


@each_block_v
def test_without_gates_nothing_past_the_end_counts(block_v: int) -> None:
    """NaN in the rows after each sequence's end and after the last sequence; bf16 states."""
    problem = scan_problem([65, 17, 64], use_g=False, state_dtype=torch.bfloat16)
    spec = vk_spec(problem, block_v)
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


@pytest.mark.parametrize("shape", [[0, 70, 5], [70, 0, 5], [70, 5, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("spare_rows", [0, 3])
def test_empty_sequences(shape: list[int], spare_rows: int) -> None:
    """Without spare rows an empty last sequence begins at the end of every tensor."""
    problem = scan_problem(shape, spare_rows=spare_rows)
    spec = vk_spec(problem, 32)
    result = emulate_scan(spec, problem)
    assert_as_expected(spec, problem, result)
    for n, length in enumerate(shape):
        if not length:
            assert_bitwise_equal(result.final_state[n], problem.initial_state[n], "state of an empty sequence")


def test_states_of_empty_sequences_are_zero_without_initial_ones() -> None:
    problem = without_states(scan_problem([0, 3]))
    spec = vk_spec(problem, 16, state_dtype="bf16")
    result = emulate_scan(spec, problem)
    assert_as_expected(spec, problem, result)
    assert not result.final_state[0].any()


@pytest.mark.parametrize("switch", ["save_new_value", "store_final_state"])
def test_what_is_switched_off_is_not_written(switch: str) -> None:
    problem = scan_problem([100, 30])
    spec = vk_spec(problem, 64, **{switch: False})
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


def test_outputs_may_be_their_inputs() -> None:
    problem = scan_problem([100, 30])
    spec = vk_spec(problem, 32)
    apart = emulate_scan(spec, problem)
    u, state = problem.u.clone(), problem.initial_state.clone()
    changes = {"u": u, "v_new": u, "initial_state": state, "final_state": state}
    together = emulate_scan(spec, problem, changes=changes)
    used = problem.inputs.num_tokens
    assert_bitwise_equal(together.h, apart.h, "h")
    assert_bitwise_equal(u[:, :, :used], apart.v_new[:, :, :used], "v_new in place of u")
    assert_bitwise_equal(state, apart.final_state, "final_state in place of initial_state")


def test_offsets_past_32_bits() -> None:
    problem = scan_problem([70], spare_rows=0)
    spec = vk_spec(problem, 64)
    near = emulate_scan(spec, problem)
    far, begin, chunk = far_arguments(spec, problem)
    result = emulate_scan(spec, problem, changes=far)
    assert_bitwise_equal(far["h"][:, chunk:], near.h, "h")
    assert_bitwise_equal(far["v_new"][:, :, begin:], near.v_new, "v_new")
    assert_bitwise_equal(result.final_state, near.final_state, "final_state")


def test_infinity_and_nan_stay_in_their_row() -> None:
    """S [v, k] with one infinity or NaN: row v of the snapshot keeps it, no other row of anything sees it."""
    problem = scan_problem([64, 64])
    clean = emulate_scan(vk_spec(problem, 16), problem)
    problem.initial_state[0, 0, 3, 5] = float("inf")
    problem.initial_state[1, 1, 90, 127] = float("nan")
    result = emulate_scan(vk_spec(problem, 16), problem)
    assert result.h[0, 0, 0, 3, 5] == float("inf")
    assert result.h[0, 1, 1, 90, 127].isnan()
    for n, head, row in ((0, 0, 3), (1, 1, 90)):
        others = torch.arange(128) != row
        assert_bitwise_equal(result.h[0, n, head, others], clean.h[0, n, head, others], "h")
        assert_bitwise_equal(result.final_state[n, head, others], clean.final_state[n, head, others], "final_state")
        assert not result.final_state[n, head, row].isfinite().any()


@each_block_v
def test_facts(block_v: int) -> None:
    """LDS holds w, k, the state and the gated v of one chunk; two barriers a chunk; 128-byte lines of the snapshot."""
    problems = [scan_problem([64 * chunks], spare_rows=0) for chunks in (1, 2)]
    spec = vk_spec(problems[0], block_v)
    facts = scan_code(spec).facts
    assert facts.lds_bytes == 32768 + 384 * block_v
    assert facts.lds_bytes <= 65536
    assert not facts.scratch_bytes
    assert not facts.vgpr_spills
    assert not facts.sgpr_spills
    assert facts.vgprs <= 256
    counters = [emulate_scan(spec, problem).emulated.counters for problem in problems]
    waves = 4 * counters[0].groups
    assert (counters[1]["barrier"] - counters[0]["barrier"]) / waves == 2
    stores = [
        (line, more)
        for line, more in zip(counters[0].lines, counters[1].lines, strict=True)
        if line.text.startswith("buffer_store_dwordx4") and more.executed == 2 * line.executed
    ]
    assert sum(line.executed for line, _ in stores) == waves * block_v // 16
    assert all(line.lines128 * 128 == line.bytes for line, _ in stores)


def test_gfx942_is_refused_by_name() -> None:
    problem = scan_problem([64])
    with pytest.raises(UnsupportedError, match="gfx942"):
        vk_spec(problem, 32, arch="gfx942").check()
