"""What the design of K5 opt has to hold beyond values: any number of chunks, where NaN goes, registers and LDS."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gdn_runtime.spec import AMD_ARCHS
from gdn_testing.scans import (
    ORDERS,
    ScanResult,
    assert_as_expected,
    emulate_scan,
    opt_spec,
    scan_code,
    scan_problem,
)

MAX_VGPRS = 256
"""Of a lane, for two waves on a SIMD."""

each_arch = pytest.mark.parametrize("arch", AMD_ARCHS)


@each_arch
@pytest.mark.parametrize("order", ORDERS)
def test_any_number_of_chunks(arch: str, order: str) -> None:
    """The loop takes two chunks a turn, and loads two ahead: 0 to 5 chunks, whole and short last ones."""
    problem = scan_problem([64 * n - m for n in range(1, 6) for m in (0, 1)] + [0])
    spec = opt_spec(problem, arch, 64)
    assert_as_expected(spec, problem, emulate_scan(spec, problem, order=order))


@each_arch
def test_one_key_for_all_tokens(arch: str) -> None:
    """k expanded over tokens: rows 0 bytes apart."""
    problem = scan_problem([70, 5])
    inputs = problem.inputs
    k = inputs.k[:, :1].clone().expand(-1, inputs.k.shape[1], -1, -1)
    problem = replace(problem, inputs=inputs.with_(k=k))
    spec = opt_spec(problem, arch, 16)
    assert spec.num_key_heads == 1
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


def scan_with(arch: str, block_v: int, name: str, token: int, column: int) -> ScanResult:
    """K5 over two chunks with one infinite element, of head 1, in ``name``."""
    problem = scan_problem([128], spare_rows=0)
    if name == "k":
        k = problem.inputs.k.clone()
        k[0, token, 0, column] = torch.inf
        problem = replace(problem, inputs=problem.inputs.with_(k=k))
    else:
        u = problem.u.clone()
        u[0, 1, token, column] = torch.inf
        problem = replace(problem, u=u)
    return emulate_scan(opt_spec(problem, arch, block_v), problem)


@each_arch
@pytest.mark.parametrize(("block_v", "others"), [(16, range(32, 48)), (64, (32, 33, 34, 35, 40, 41, 42, 43))])
def test_infinity_in_u_stays_in_its_tile(arch: str, block_v: int, others: range | tuple[int, ...]) -> None:
    """The product with -I makes NaN of the 16 columns of its tile; the other head and columns see nothing."""
    result = scan_with(arch, block_v, "u", 3, 33)
    bad = ~result.v_new[0].isfinite()
    assert not bad[0].any() and result.final_state[:, 0].isfinite().all()
    assert bad[1, :64, list(others)].any(0).all()
    columns = torch.zeros(128, dtype=torch.bool)
    columns[32 : 48 if block_v == 16 else 64] = True
    assert not bad[1][:, ~columns].any()
    assert int(bad[1, :64].any(0).sum()) == 16
    assert not bad[1, 16:64].any(), "tokens of the other waves, in the same chunk"
    assert result.h[0, 0].isfinite().all() and result.h[0, 1, 1][~columns].isfinite().all()


@each_arch
def test_infinity_in_k_stays_in_its_tile(arch: str) -> None:
    """NaN in the 16 rows of its tile of k of the next state of all heads of that key head, not in this chunk."""
    result = scan_with(arch, 32, "k", 20, 70)
    assert result.v_new[:, :, :64].isfinite().all() and result.h[:, 0].isfinite().all()
    rows = (~result.h[0, 1].isfinite()).any(0).any(0)
    assert rows[70] and int(rows.sum()) == 16 and not rows[:64].any() and not rows[96:].any()


@each_arch
@pytest.mark.parametrize("block_v", [16, 64])
def test_registers_and_lds(arch: str, block_v: int) -> None:
    """With all that takes registers: fp32 snapshots, gk, rounding to nearest, token-major tensors, a pool."""
    problem = scan_problem([64], use_gk=True)
    changes = {"rounding": "nearest", "wu_head_major": False, "g_head_major": False, "use_state_indices": True}
    facts = scan_code(opt_spec(problem, arch, block_v, sched_barrier=arch == "gfx942", **changes)).facts
    assert facts.vgprs <= MAX_VGPRS and not facts.agprs
    assert not facts.scratch_bytes and not facts.vgpr_spills and not facts.sgpr_spills
    assert facts.lds_bytes + facts.dynamic_lds == 384 * block_v
