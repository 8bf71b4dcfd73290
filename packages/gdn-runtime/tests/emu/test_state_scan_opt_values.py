"""K5 opt on the emulator, all checks on: every switch of its specs beside every other, on tails and empty sequences."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.spec import AMD_ARCHS, SCAN_BLOCK_V, OptStateScanSpec
from gdn_runtime.testing import assert_bitwise_equal, assert_close_rel
from gdn_testing import poison
from gdn_testing.scans import (
    ORDERS,
    TORCH,
    ScanProblem,
    assert_as_expected,
    emulate_scan,
    far_arguments,
    opt_spec,
    scan_code,
    scan_problem,
)

PACKED = [0, 1, 15, 16, 17, 0, 63, 64, 65, 127, 0]
"""Lengths of one packed call: every kind of tail, and an empty sequence first, in the middle and last."""

DENSE = [(2, 1), (2, 17), (3, 96), (2, 127)]
"""(rows, tokens) of the dense calls."""

FACTORS = {
    "block_v": ("16", "32", "64"),
    "snapshot": ("bf16", "fp32"),
    "state": ("bf16", "fp32"),
    "gates": ("none", "head", "token"),
    "unit": ("log2", "natural"),
    "per_key": ("gk", "-"),
    "start": ("zero", "given", "pool"),
    "final": ("final", "-"),
    "new": ("v_new", "-"),
    "rounding": ("truncate", "nearest"),
    "layout": ("heads", "tokens"),
    "shape": ("packed", "dense"),
}
ROWS = """
16 bf16 bf16 none  natural -  pool  final v_new nearest  tokens packed
16 fp32 fp32 none  natural -  given final v_new truncate tokens packed
16 bf16 fp32 head  natural -  given -     v_new truncate tokens packed
16 fp32 bf16 head  log2    gk zero  final v_new truncate heads  packed
16 bf16 bf16 token natural gk given -     v_new nearest  tokens dense
16 fp32 fp32 token log2    -  zero  -     -     nearest  tokens packed
32 bf16 fp32 none  natural gk pool  final v_new nearest  tokens dense
32 fp32 bf16 none  log2    -  given final v_new nearest  heads  packed
32 bf16 bf16 head  log2    -  pool  final v_new truncate heads  packed
32 fp32 fp32 head  log2    -  pool  final v_new truncate heads  dense
32 bf16 fp32 token natural -  zero  -     v_new nearest  heads  packed
32 fp32 bf16 token log2    gk pool  final -     truncate tokens packed
64 bf16 bf16 none  log2    -  given final -     nearest  heads  packed
64 fp32 fp32 none  natural -  zero  -     v_new nearest  heads  packed
64 bf16 fp32 head  natural -  zero  final v_new nearest  heads  dense
64 fp32 bf16 head  log2    -  given final -     truncate tokens packed
64 bf16 bf16 token log2    -  pool  final v_new nearest  heads  packed
64 fp32 fp32 token natural gk given final -     nearest  heads  dense
"""
"""Specs, by a value of every factor. Each value of a factor meets each value of every other (a pool needs its final
states), and block_v, snapshot and gates meet in all their combinations."""

TABLE = [dict(zip(FACTORS, line.split(), strict=True)) for line in ROWS.strip().splitlines()]

each_arch = pytest.mark.parametrize("arch", AMD_ARCHS)
each_block_v = pytest.mark.parametrize("block_v", SCAN_BLOCK_V)


def test_the_table_pairs_everything() -> None:
    met = {pair for row in TABLE for pair in combinations(sorted(row.items()), 2)}
    for (a, left), (b, right) in combinations(sorted(FACTORS.items()), 2):
        for pair in product(((a, x) for x in left), ((b, y) for y in right)):
            assert pair in met or set(pair) == {("start", "pool"), ("final", "-")}, pair
    assert len({(row["block_v"], row["snapshot"], row["gates"]) for row in TABLE}) == len(TABLE) == 18


def table_problem(row: dict[str, str], shape: list[int] | tuple[int, int]) -> ScanProblem:
    heads = (2, 1) if row["shape"] == "packed" else (4, 2)
    return scan_problem(
        shape,
        *heads,
        # Dense: rates that differ by row and head. Packed: a state that lives.
        gate="weak" if row["shape"] == "packed" else "mixed",
        use_g=row["gates"] != "none",
        use_gk=row["per_key"] == "gk",
        use_exp2=row["unit"] == "log2",
        state="none" if row["start"] == "zero" else "random",
        state_dtype=TORCH[row["state"]],
    )


def table_spec(row: dict[str, str], problem: ScanProblem, arch: str) -> OptStateScanSpec:
    return opt_spec(
        problem,
        arch,
        int(row["block_v"]),
        g_head_major=row["gates"] != "token",
        state_dtype=row["state"],
        snapshot_dtype=row["snapshot"],
        use_initial_state=row["start"] != "zero",
        use_state_indices=row["start"] == "pool",
        store_final_state=row["final"] == "final",
        save_new_value=row["new"] == "v_new",
        rounding=row["rounding"],
        wu_head_major=row["layout"] == "heads",
        sched_barrier=arch == "gfx942",
    )


@each_arch
@pytest.mark.parametrize("row", TABLE, ids=["-".join(row.values()) for row in TABLE])
def test_table(arch: str, row: dict[str, str]) -> None:
    """Values, nothing found in any order of the waves, and what the code object takes."""
    shapes = [PACKED] if row["shape"] == "packed" else DENSE
    for shape, order in zip(shapes * 3 if len(shapes) == 1 else shapes, [*ORDERS, "forward"], strict=False):
        problem = table_problem(row, shape)
        spec = table_spec(row, problem, arch)
        if row["start"] != "pool":
            assert_as_expected(spec, problem, emulate_scan(spec, problem, order=order))
            continue
        # Slots in reverse, one sequence padded, one that starts from zeros though its slot holds NaN.
        count = problem.plan.num_seqs
        pool = torch.cat([problem.initial_state, poison(problem.initial_state[:1].clone())]).flip(0)
        indices = torch.arange(count, 0, -1, dtype=torch.int64 if order == "random" else torch.int32)
        indices[1] = -1
        known = torch.arange(count) % 4 != 3
        states = {"state_indices": indices, "has_initial_state": known}
        before = pool.clone()
        result = emulate_scan(spec, problem, order=order, pool=pool, **states)
        assert_as_expected(spec, problem, result, pool=before, **states)
    facts = scan_code(spec).facts
    assert facts.lds_bytes <= (32768 + 512 * spec.block_v if spec.snapshot_dtype == "bf16" else 65536)
    assert facts.vgprs <= 256, "two waves on a SIMD"
    assert not facts.scratch_bytes
    assert not facts.vgpr_spills
    assert not facts.sgpr_spills


@each_arch
@each_block_v
def test_state_carries_over_chunks(arch: str, block_v: int) -> None:
    """Against the recurrence by token in fp64, over odd and even numbers of chunks: gates of about -0.01 leave half of
    a state after a chunk."""
    problem = scan_problem([330, 64, 200])
    spec = opt_spec(problem, arch, block_v)
    result = emulate_scan(spec, problem)
    assert_as_expected(spec, problem, result)
    inputs = problem.inputs
    _, exact = recurrent_gated_delta_rule(
        *inputs.tensors, initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens
    )
    # Truncation; 3e-3 to nearest.
    assert_close_rel(result.final_state, exact, 2e-2, "final_state against the recurrence")


@each_arch
@pytest.mark.parametrize("gate", ["weak", "zero"])
def test_many_chunks(arch: str, gate: str) -> None:
    """Without decay the state of 66 chunks is the sum of them all."""
    problem = scan_problem([64 * 65 + 1], gate=gate)
    spec = opt_spec(problem, arch, 64)
    # Nothing forgets a rounding that fell the other way. Measured: 1.8e-3 for snapshots without decay.
    assert_as_expected(spec, problem, emulate_scan(spec, problem), tolerance=5e-3)


@each_arch
def test_many_sequences(arch: str) -> None:
    problem = scan_problem([n % 3 for n in range(300)])
    spec = opt_spec(problem, arch, 64)
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


@each_arch
@each_block_v
@pytest.mark.parametrize("shape", [[0, 0], [0], [70, 0], [0, 3, 0]], ids=str)
def test_empty_sequences(arch: str, block_v: int, shape: list[int]) -> None:
    """Without spare rows: an empty last sequence begins at the end of every tensor."""
    problem = scan_problem(shape, spare_rows=0)
    spec = opt_spec(problem, arch, block_v)
    result = emulate_scan(spec, problem)
    assert_as_expected(spec, problem, result)
    for n, length in enumerate(shape):
        if not length:
            assert_bitwise_equal(result.final_state[n], problem.initial_state[n], "state of an empty sequence")


@each_arch
def test_strides_of_k(arch: str) -> None:
    """k as a part of fused rows, heads apart by more than 128."""
    problem = scan_problem([100, 30], 4, 2)
    inputs = problem.inputs
    tokens = inputs.k.shape[1]
    fused = torch.full((1, tokens, 608), float("nan"), dtype=torch.bfloat16)
    k = fused[:, :, 32:544].unflatten(2, (2, 256))[..., :128].copy_(inputs.k)
    problem = replace(problem, inputs=inputs.with_(k=k))
    spec = opt_spec(problem, arch, 32)
    assert_as_expected(spec, problem, emulate_scan(spec, problem))


@each_arch
def test_outputs_may_be_their_inputs(arch: str) -> None:
    problem = scan_problem([100, 30])
    spec = opt_spec(problem, arch, 32)
    apart = emulate_scan(spec, problem)
    u, state = problem.u.clone(), problem.initial_state.clone()
    changes = {"u": u, "v_new": u, "initial_state": state, "final_state": state}
    together = emulate_scan(spec, problem, changes=changes)
    used = problem.inputs.num_tokens
    assert_bitwise_equal(together.h, apart.h, "h")
    assert_bitwise_equal(u[:, :, :used], apart.v_new[:, :, :used], "v_new in place of u")
    assert_bitwise_equal(state, apart.final_state, "final_state in place of initial_state")


@each_arch
def test_offsets_past_32_bits(arch: str) -> None:
    problem = scan_problem([70], spare_rows=0)
    spec = opt_spec(problem, arch, 64)
    near = emulate_scan(spec, problem)
    far, begin, chunk = far_arguments(spec, problem)
    result = emulate_scan(spec, problem, changes=far)
    assert_bitwise_equal(far["h"][:, chunk:], near.h, "h")
    assert_bitwise_equal(far["v_new"][:, :, begin:], near.v_new, "v_new")
    assert_bitwise_equal(result.final_state, near.final_state, "final_state")
