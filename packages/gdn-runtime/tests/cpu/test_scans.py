"""The expected values of the K5 tests are those of the reference backend, which is another program."""

from __future__ import annotations

import pytest

from gdn_runtime import reference
from gdn_runtime.testing import assert_close_rel
from gdn_testing import poisoned, snapshots_for
from gdn_testing.scans import ScanProblem, expected_scan, opt_spec, scan_problem

PROBLEMS = {
    "packed": lambda: scan_problem([65, 0, 130], use_gk=True),
    "dense": lambda: scan_problem((2, 96), 4, 2, gate="mixed", use_exp2=False),
    "no gates": lambda: scan_problem([70], use_g=False, state="none"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_expected_scan_is_the_reference(name: str) -> None:
    problem: ScanProblem = PROBLEMS[name]()
    plan, inputs = problem.plan, problem.inputs
    spec = opt_spec(problem, "gfx950", 32, rounding="nearest", snapshot_dtype="bf16")
    expected = expected_scan(spec, problem)
    h, v_new = snapshots_for(inputs, plan, expected.h.dtype), poisoned(*problem.u.shape, dtype=problem.u.dtype)
    final = poisoned(*expected.final_state.shape)
    reference.state_scan(
        inputs.k,
        problem.w,
        problem.u,
        g=problem.g,
        gk=problem.gk,
        h=h,
        v_new=v_new,
        initial_state=problem.initial_state,
        final_state=final,
        state_indices=None,
        has_initial_state=None,
        plan=plan,
        use_exp2=problem.use_exp2,
        g_head_major=True,
    )
    used = inputs.num_tokens
    assert_close_rel(expected.h, h, 1e-4, "h")
    assert_close_rel(expected.v_new[:, :, :used], v_new[:, :, :used], 1e-4, "v_new")
    assert_close_rel(expected.final_state, final, 1e-4, "final_state")
