"""The public block on Triton's kernels under the interpreter: every stage together, against the recurrence in fp64."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, env, explain
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.spec import PREPARE_MODES, PrepareMode
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, assert_finite, make_inputs, max_rel
from gdn_testing import KEY_SETS, poison_empty

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEP = torch.finfo(BF16).eps  # 2^-7, the largest step between neighbours relative to the value

# Relative L2 against the recurrence on the same 16-bit inputs. Measured, worst of this file: o 3.9e-3, states 3.4e-3 in
# bf16; with the normalisation, which rounds q and k once more, o 4.4e-3 in bf16 and 5.6e-4 in fp16.
ROUNDING = {BF16: 5e-3, FP16: 7e-4}
# Against the torch backend, the roundoff of bf16 (2^-9): it rounds at the same places, but the kernel's inverse comes
# from products of fp16 operands, whose error of 2^-11 moves many a rounding of C beta to bf16 by a step. Measured: o
# 1.3e-3, states 1.0e-3.
SAME = STEP / 4


def run(x: GdnInputs, **options: Any) -> tuple[Tensor, Tensor]:
    """o and final states on Triton, on memory poisoned before every use."""
    arguments = {"initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens, "backend": "triton"} | options
    with poison_empty(), env.override(k5_block_v=128):  # one tile of the state per program: the interpreter is slow
        o, final = chunk_gated_delta_rule(*x.tensors, output_final_state=True, **arguments)
    return o, cast(Tensor, final)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_bitwise_equal(actual[0], expected[0], "o")
    assert_bitwise_equal(actual[1], expected[1], "final_state")


def check(x: GdnInputs, tol: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Run, and compare with the recurrence."""
    o, final = run(x, **options)
    exact_o, exact_final = recurrent_gated_delta_rule(
        *x.tensors,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm=bool(options.get("use_qk_l2norm_in_kernel")),
    )
    n = x.num_tokens
    tol = ROUNDING[x.q.dtype] if tol is None else tol
    assert_close_rel(o[:, :n], exact_o[:, :n], tol, "o")
    assert_close_rel(final, exact_final, tol, "final_state")
    return o, final


def check_backends(x: GdnInputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Run, and compare with the torch backend."""
    o, final = run(x, **options)
    ref_o, ref_final = run(x, **options | {"backend": "reference"})
    assert_close_rel(o, ref_o, SAME, "o")
    assert max_rel(o, ref_o) <= STEP
    assert_close_rel(final, ref_final, SAME, "final_state")
    return o, final


@pytest.mark.parametrize("mode", PREPARE_MODES)
def test_ragged_batch(mode: PrepareMode) -> None:
    x = make_inputs([0, 65, 0, 1, 64, 0], 2, 1, state="random", spare_rows=9)
    with env.override(prepare_mode=mode):
        o, final = check(x)
        assert not o[:, x.num_tokens :].any()
        assert_same(run(x), (o, final))
    for n in (0, 2, 5):
        assert_bitwise_equal(final[n], cast(Tensor, x.initial_state)[n], f"final_state of empty sequence {n}")


def test_selection_says_triton() -> None:
    x = make_inputs([65], 2, 1)
    chosen = explain(*x.tensors, cu_seqlens=x.cu_seqlens, backend="triton")
    assert (chosen.backend, chosen.prepare_backend) == ("triton", "triton")


@pytest.mark.parametrize("mode", PREPARE_MODES)
def test_pool_behind_a_decode_prefix(mode: PrepareMode) -> None:
    """Two decode sequences of one token in front; slots and flags are those of the prefill sequences."""
    x = make_inputs([3, 66, 0], 2, 1)
    cu = torch.tensor([0, 1, 2, 5, 71, 71])
    metadata = build_prefill_metadata([1, 1, 3, 66, 0], cu_seqlens=cu, num_decodes=2, num_decode_tokens=2)
    pool = torch.full((6, 2, 128, 128), 0.25)
    pool[5] = float("nan")
    before = pool.clone()
    start = torch.zeros(3, 2, 128, 128)
    start[1:] = 0.25
    with env.override(prepare_mode=mode):
        o, final = run(
            x,
            initial_state=pool,
            initial_state_indices=torch.tensor([5, 2, 0], dtype=torch.int32),
            has_initial_state=torch.tensor([False, True, True]),
            cu_seqlens=cu,
            num_decodes=2,
            num_decode_tokens=2,
            prefill_metadata=metadata,
        )
        assert final is pool
        dense = check(x.with_(initial_state=start))
    assert_same((o, pool[[5, 2, 0]]), dense)
    assert_bitwise_equal(pool[[1, 3, 4]], before[[1, 3, 4]], "slots without an owner")


@pytest.mark.parametrize("keys", ["cos0.8", "equal"])
@pytest.mark.parametrize("gate", ["weak", "zero"])
@pytest.mark.parametrize("mode", PREPARE_MODES)
def test_similar_keys(keys: str, gate: Any, mode: PrepareMode) -> None:
    """What w loses to the rounding of its operand reaches o and the states (see KeySet): 1.5 times its bound."""
    case = KEY_SETS[keys]
    x = make_inputs([150], 1, 1, keys=case.keys, beta=case.beta, gate=gate)
    with env.override(prepare_mode=mode):
        check(x, tol=2.5 * case.w_bound)


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("length", [65, 128])
def test_closed_gates(length: int, state_dtype: torch.dtype) -> None:
    """-inf (head 0) and -1e4 (head 1) at tokens 0, 63, 64 and the last: the state restarts from zero there."""
    x = make_inputs((1, length), 2, 2, gate="closed", beta="one", state="random", state_dtype=state_dtype)
    o, final = check(x)
    _, restarted = run(x.tokens(length - 1, length, None), state_dtype=state_dtype)
    assert_finite(o, "o")
    assert_close_rel(final, restarted, STEP / 2, "final_state")


@pytest.mark.parametrize("gate", ["zero", "alternating", "minus100"])
def test_gate_extremes(gate: Any) -> None:
    check(make_inputs((1, 130), 1, 1, gate=gate, beta="one", state="random"))


def test_gates_of_minus_infinity_everywhere() -> None:
    """Every token starts from zero: o = scale * beta (q . k) v."""
    x = make_inputs([65, 2], 2, 1, state="random")
    x.g.fill_(float("-inf"))
    check(x)


@pytest.mark.parametrize("snapshot_dtype", [BF16, FP32])
def test_weak_gates_carry_the_state_over_chunks(snapshot_dtype: torch.dtype) -> None:
    x = make_inputs((1, 300), 1, 1, gate="weak", state="random")
    o, final = check(x, snapshot_dtype=snapshot_dtype)
    # Without what the first 256 tokens leave, the end would look otherwise.
    young, _ = recurrent_gated_delta_rule(*x.tokens(256, 300, None).tensors)
    assert float((o[:, 256:] - young).norm() / young.norm()) > 0.2
    halves = run(x.tokens(0, 128, x.initial_state), snapshot_dtype=snapshot_dtype)
    rest = run(x.tokens(128, 300, halves[1]), snapshot_dtype=snapshot_dtype)
    assert_same((torch.cat([halves[0], rest[0]], dim=1), rest[1]), (o, final))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_normalisation_in_the_kernel(dtype: torch.dtype) -> None:
    x = make_inputs([65, 3], 2, 1, dtype=dtype, normalize=False, state="random", spare_rows=5)
    check(x, use_qk_l2norm_in_kernel=True)


def test_units_of_the_gate_agree() -> None:
    x = make_inputs([65, 3], 2, 1, state="random")
    for actual, expected in zip(run(x, use_exp2=False), run(x), strict=True):
        assert_close_rel(actual, expected, SAME, "use_exp2")


def test_dense_batch_equals_single_rows() -> None:
    x = make_inputs((3, 70), 1, 1, gate="mixed", state="random", spare_rows=64)
    o, final = check(x)
    for n in range(3):
        assert_same((o[n : n + 1], final[n : n + 1]), run(x.sequence(n)))


def test_backends_agree_on_a_tail_alone() -> None:
    x = make_inputs((1, 63), 1, 1, state="random")
    result = check_backends(x)
    for _ in range(3):
        assert_same(run(x), result)


def test_backends_agree_and_change_the_same_slots() -> None:
    x = make_inputs([66, 0, 3], 2, 1)
    indices = torch.tensor([5, 0, 3], dtype=torch.int32)
    pools = {}
    for backend in ("triton", "reference"):
        pools[backend] = torch.linspace(-1, 1, 6)[:, None, None, None].expand(6, 2, 128, 128).clone()
        run(x, initial_state=pools[backend], initial_state_indices=indices, backend=backend)
    assert_close_rel(pools["triton"], pools["reference"], SAME, "pool")
    for slot in (0, 1, 2, 4):
        assert_bitwise_equal(pools["triton"][slot], pools["reference"][slot], f"slot {slot}")


def test_prepare_may_come_from_the_other_backend() -> None:
    x = make_inputs([66, 3], 2, 1, state="random")
    check(x, backend="reference", prepare_backend="triton")
    check(x, prepare_backend="reference")


def test_views_of_a_fused_projection() -> None:
    x = make_inputs([65, 3], 2, 1, state="random")
    fused = torch.cat([x.q.flatten(2), x.k.flatten(2), x.v.flatten(2)], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in fused.split([128, 128, 256], dim=-1))
    gates = torch.stack([x.g, x.beta], dim=-1)
    wide = torch.full((1, 68, 2, 160), 7.0, dtype=BF16)
    o, final = run(x.with_(q=q, k=k, v=v, g=gates[..., 0], beta=gates[..., 1]), o=wide[..., 16:144])
    assert_same((o, final), run(x))
    assert (wide[..., :16] == 7).all() and (wide[..., 144:] == 7).all()


def test_nothing_but_empty_sequences() -> None:
    x = make_inputs([0, 0], 2, 1, state="random")
    o, final = run(x)
    assert o.shape == (1, 0, 2, 128)
    assert_bitwise_equal(final, cast(Tensor, x.initial_state), "final_state")
