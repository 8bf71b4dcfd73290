"""States in a pool and in place: who reads and writes which slot, on the reference backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, env, reference
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, assert_finite, make_inputs
from gdn_testing import run_stages

BF16, FP32 = torch.bfloat16, torch.float32
INT32, INT64 = torch.int32, torch.int64
NAN = float("nan")
LENS = [10, 130, 0, 65]


def inputs(lens: list[int] = LENS, **options: Any) -> GdnInputs:
    return make_inputs(lens, 4, 2, gate="weak", **options)


def pool_of(slots: int, dtype: torch.dtype = FP32, seed: int = 7) -> Tensor:
    return (0.1 * torch.randn(slots, 4, 128, 128, generator=torch.Generator().manual_seed(seed))).to(dtype)


def indices(*slots: int, dtype: torch.dtype = INT32) -> Tensor:
    return torch.tensor(slots, dtype=dtype)


def dense(x: GdnInputs, states: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """The same call with states of its own, one per sequence."""
    o, final = chunk_gated_delta_rule(
        *x.tensors, cu_seqlens=x.cu_seqlens, initial_state=states, output_final_state=True, **options
    )
    assert final is not None
    return o, final


def pooled(x: GdnInputs, pool: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """o of a pooled call; checks that the returned object is the pool."""
    o, final = chunk_gated_delta_rule(
        *x.tensors,
        cu_seqlens=x.cu_seqlens,
        initial_state=pool,
        initial_state_indices=slots,
        output_final_state=True,
        **options,
    )
    assert final is pool
    return o


def check_pool(
    x: GdnInputs, pool: Tensor, slots: list[int], index_dtype: torch.dtype = INT32, **options: Any
) -> Tensor:
    """Run in the pool, compare with the dense call bit for bit, and see that no other slot changed."""
    before = pool.clone()
    own = [s for s in slots if 0 <= s < len(pool)]
    states = torch.stack([before[s] if s in own else torch.zeros_like(before[0]) for s in slots])
    o, final = dense(x, states, **options)
    got = pooled(x, pool, indices(*slots, dtype=index_dtype), **options)
    assert_bitwise_equal(got, o, "o")
    expected = before
    for n, slot in enumerate(slots):
        if slot in own:
            expected[slot] = final[n]
    assert_bitwise_equal(pool, expected, "pool")
    return got


# ------------------------------------------------------------------------------------------------ who owns what


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("index_dtype", [INT32, INT64])
@pytest.mark.parametrize(
    ("size", "slots"),
    [(9, [5, 1, 8, 3]), (4, [3, 2, 1, 0]), (4, [0, 1, 2, 3]), (40, [0, 39, 20, 1]), (2, [1, -1, -1, 0])],
    ids=["scattered", "reversed", "identity", "first and last", "smaller than N"],
)
def test_gather_and_write_back(size: int, slots: list[int], index_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    check_pool(inputs(), pool_of(size, state_dtype), slots, index_dtype)


@pytest.mark.parametrize("snapshot_dtype", [BF16, FP32])
@pytest.mark.parametrize("state_dtype", [BF16, FP32])
def test_pool_and_snapshot_dtypes_are_independent(state_dtype: torch.dtype, snapshot_dtype: torch.dtype) -> None:
    pool = pool_of(6, state_dtype)
    before = pool.clone()
    check_pool(inputs(), pool, [5, 0, 2, 1], snapshot_dtype=snapshot_dtype)
    assert pool.dtype is state_dtype and not torch.equal(pool[5], before[5]), "the pool itself is updated"


@pytest.mark.usefixtures("poisoned_memory")
def test_slots_of_nobody_may_hold_nan() -> None:
    pool = pool_of(8)
    pool[[0, 2, 4, 7]] = NAN
    assert_finite(check_pool(inputs(), pool, [5, 1, 3, 6]), "o")


def test_batch_of_dense_rows_in_a_pool() -> None:
    x = make_inputs((3, 70), gate="weak")
    check_pool(x, pool_of(6), [5, 0, 3])


def test_decode_prefix_counts_no_slots() -> None:
    x = inputs()
    cu = torch.tensor([0, 1, 3, 13, 143, 143, 208], dtype=INT32)
    prefix = {"num_decodes": 2, "num_decode_tokens": 3}
    metadata = build_prefill_metadata([1, 2, *LENS], cu_seqlens=cu, **prefix)
    expected = pool_of(6)
    o = pooled(x, expected, indices(5, 1, 0, 3))
    for more in ({}, {"prefill_metadata": metadata}):
        pool = pool_of(6)
        got = pooled(x.with_(cu_seqlens=cu), pool, indices(5, 1, 0, 3), **prefix, **more)
        assert_bitwise_equal(got, o, "o")
        assert_bitwise_equal(pool, expected, "pool")


def test_indices_may_be_rewritten_in_place_between_calls() -> None:
    x, pool, slots = inputs(), pool_of(9), indices(5, 1, 8, 3)
    expected = pool.clone()
    for new in ([5, 1, 8, 3], [0, 2, 4, 6], [8, 7, 6, 5]):
        slots.copy_(indices(*new))
        pooled(x, pool, slots)
        pooled(x, expected, indices(*new))
        assert_bitwise_equal(pool, expected, f"pool after {new}")


def test_pool_whose_slots_are_apart() -> None:
    whole = pool_of(12)
    before = whole.clone()
    check_pool(inputs(), whole[::2], [5, 1, 0, 3])
    assert_bitwise_equal(whole[1::2], before[1::2], "what lies between the slots")
    pages = torch.full((6, 4 * 128 * 128 + 64), NAN)  # slots that share a page with other caches
    pool = pages[:, 64:].unflatten(1, (4, 128, 128))
    pool.copy_(pool_of(6))
    check_pool(inputs(), pool, [5, 1, 0, 3])
    assert pages[:, :64].isnan().all()


@pytest.mark.parametrize("chunk", [64, 128])
def test_chained_calls_equal_one_call(chunk: int) -> None:
    x = make_inputs((2, 256), gate="weak")
    once, chained = pool_of(4), pool_of(4)
    o = pooled(x, once, indices(3, 0))
    parts = [pooled(x.tokens(n, n + chunk, None), chained, indices(3, 0)) for n in range(0, 256, chunk)]
    assert_bitwise_equal(torch.cat(parts, dim=1), o, "o")
    assert_bitwise_equal(chained, once, "pool")


# ------------------------------------------------------------------------------------------------ dense in place


@pytest.mark.parametrize("shape", [LENS, (4, 70), [0, 0, 0, 0]])
def test_dense_states_in_place(shape: Any) -> None:
    x = make_inputs(shape, gate="weak")
    states = pool_of(4)
    o, final = dense(x, states.clone())
    got, returned = dense(x, states, inplace_final_state=True)
    assert returned is states
    assert_bitwise_equal(got, o, "o")
    assert_bitwise_equal(states, final, "states")


def test_dense_states_are_not_written_otherwise() -> None:
    states = pool_of(4)
    before = states.clone()
    for flag in (None, False):
        _, final = dense(inputs(), states, inplace_final_state=flag)
        assert final is not states and final.data_ptr() != states.data_ptr()
        assert_bitwise_equal(states, before, "initial_state")


# ------------------------------------------------------------------------------------------------ pads and bad slots

BAD = {
    "negative": ([0, -2, 1, 3], "initial_state_indices[1]: got -2, expected -1 (pad) or a slot in [0, 5)"),
    "too large": ([0, 1, 5, 3], "initial_state_indices[2]: got 5, expected -1 (pad) or a slot in [0, 5)"),
    "twice": ([4, 1, 4, 1], "initial_state_indices: got slots [1, 4] more than once, expected each slot at most once"),
}


@pytest.mark.parametrize("index_dtype", [INT32, INT64])
@pytest.mark.parametrize("slots", [[0, -1, 1, 3], [-1, -1, -1, -1], [3, 2, 1, 0]])
def test_checked_indices_that_are_right(slots: list[int], index_dtype: torch.dtype) -> None:
    check_pool(inputs(), pool_of(5), slots, index_dtype)
    pooled(inputs(), pool_of(5), indices(*slots, dtype=index_dtype), check_indices=True)


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("index_dtype", [INT32, INT64])
@pytest.mark.parametrize("name", BAD)
def test_checked_indices_that_are_wrong(name: str, index_dtype: torch.dtype, how: str) -> None:
    slots, message = BAD[name]
    refuse_indices(indices(*slots, dtype=index_dtype), message, how)


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("slot", [2**32, 2**32 + 1, -(2**32), 2**63 - 1])
def test_an_index_that_wraps_in_int32_is_not_a_slot(slot: int, how: str) -> None:
    refuse_indices(indices(0, slot, 2, 3, dtype=INT64), f"initial_state_indices[1]: got {slot}, expected", how)
    check_pool(inputs(), pool_of(5), [0, slot, 2, 3], INT64)


def refuse_indices(slots: Tensor, message: str, how: str) -> None:
    x, pool = inputs(), pool_of(5)
    o = torch.full_like(x.v, 7.0)
    before = pool.clone()
    with env.override(check_indices=how == "environment"), pytest.raises(ValueError) as caught:
        pooled(x, pool, slots, o=o, check_indices=True if how == "argument" else None)
    assert str(caught.value).startswith(message)
    assert_bitwise_equal(pool, before, "pool")
    assert (o == 7).all()


def test_the_argument_wins_over_the_environment() -> None:
    with env.override(check_indices=True):
        pooled(inputs(), pool_of(5), indices(0, 9, 2, 3), check_indices=False)


@pytest.mark.parametrize("slot", [-1, -2, 5, 2**31 - 1, -(2**31)])
def test_unchecked_slots_outside_the_pool_are_pads(slot: int) -> None:
    check_pool(inputs(), pool_of(5), [slot, 2, 0, slot])


# ------------------------------------------------------------------------------------------------ C06, C07, C09, C10


@pytest.mark.parametrize("index_dtype", [INT32, INT64])
def test_c06_pad_and_edge_slots(index_dtype: torch.dtype) -> None:
    x = make_inputs([1, 70, 64, 5], 4, 4)

    def constants() -> Tensor:
        pool = torch.stack([torch.full((4, 128, 128), 0.01 * (n + 1)) for n in range(4)])
        pool[1] = NAN
        return pool

    pool = constants()
    o = check_pool(x, pool, [-1, 0, 3, -1], index_dtype)
    assert_finite(o, "o, pad sequences included")
    assert_bitwise_equal(pool[1:3], constants()[1:3], "slots of nobody")
    fresh, _ = dense(x, None)
    for rows in (slice(0, 1), slice(135, 140)):
        assert_bitwise_equal(o[:, rows], fresh[:, rows], "a pad sequence starts from zero")
    pool = constants()
    assert_finite(check_pool(x, pool, [-1, -1, -1, -1], index_dtype), "o")
    assert_bitwise_equal(pool, constants(), "a pool of pads only")
    for slots in ([2, 2, 0, 3], [0, 4, 1, 2]):
        with pytest.raises(ValueError, match="initial_state_indices"):
            pooled(x, constants(), indices(*slots, dtype=index_dtype), check_indices=True)
    check_pool(x, constants(), [0, 4, 3, 2], index_dtype)


@pytest.mark.parametrize("route", ["cu_seqlens", "metadata"])
@pytest.mark.parametrize("stale", [NAN, 1e30, float("inf")])
def test_c07_stateless_sequences_after_a_decode_prefix(stale: float, route: str) -> None:
    """Lengths [1, 1, 3, 66]; the first is a decode, the next two start anew in slots that hold rubbish."""
    cu = torch.tensor([0, 1, 2, 5, 71], dtype=INT32)
    x = make_inputs([1, 3, 66], gate="weak").with_(cu_seqlens=cu)
    prefix: dict[str, Any] = {"num_decodes": 1, "num_decode_tokens": 1}
    if route == "metadata":
        prefix["prefill_metadata"] = build_prefill_metadata([1, 1, 3, 66], cu_seqlens=cu, **prefix)
    pool, zeroed = pool_of(6), pool_of(6)
    pool[[2, 4]], zeroed[[2, 4]] = stale, 0.0
    before = pool.clone()
    mask = torch.tensor([False, False, True])
    o = pooled(x, pool, indices(2, 4, 1), has_initial_state=mask, **prefix)
    expected = pooled(x, zeroed, indices(2, 4, 1), **prefix)
    assert_bitwise_equal(o, expected, "o")
    assert_bitwise_equal(pool, zeroed, "pool")
    assert_finite(pool, "pool")
    assert_bitwise_equal(pool[[0, 3, 5]], before[[0, 3, 5]], "slots of decodes and of nobody")
    with pytest.raises(ValueError, match="num_decode_tokens: got 2, expected 1"):
        pooled(x, pool, indices(2, 4, 1), **(prefix | {"num_decode_tokens": 2}))


def test_has_initial_state_with_dense_states() -> None:
    x, states = inputs(), pool_of(4)
    mask = torch.tensor([True, False, False, True])
    o, final = dense(x, torch.where(mask[:, None, None, None], states, 0.0))
    states[~mask] = NAN
    for options in ({}, {"inplace_final_state": True}):
        got, state = dense(x, states.clone(), has_initial_state=mask, **options)
        assert_bitwise_equal(got, o, "o")
        assert_bitwise_equal(state, final, "final_state")
    assert not final[2].any(), "an empty sequence without a state ends at zero"


def test_c09_tail_only_and_pool_repeat_bit_for_bit() -> None:
    tail = make_inputs((1, 63), 1, 1, state="random")
    first = dense(tail, tail.initial_state)
    x = inputs([70, 0, 33])
    pool = pool_of(6)
    o = check_pool(x, pool, [5, 0, 3])
    for _ in range(19):
        for got, expected in zip(dense(tail, tail.initial_state), first, strict=True):
            assert_bitwise_equal(got, expected, "tail")
        again = pool_of(6)
        assert_bitwise_equal(pooled(x, again, indices(5, 0, 3)), o, "o")
        assert_bitwise_equal(again, pool, "pool")


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("snapshot_dtype", [FP32, BF16])
def test_c10_resume_from_a_snapshot(state_dtype: torch.dtype, snapshot_dtype: torch.dtype) -> None:
    """The snapshot at token 960 of 1000, then the last 40 tokens from it."""
    x = make_inputs((1, 1000), gate="weak", state="random", state_dtype=state_dtype)
    h = run_stages(reference, x, snapshot_dtype=snapshot_dtype).h[:, 960 // 64]
    wide = run_stages(reference, x, snapshot_dtype=FP32).h[:, 960 // 64]
    assert_bitwise_equal(h, wide.to(snapshot_dtype), "the snapshot is the fp32 state, rounded once")
    pool = pool_of(3, state_dtype)
    pool[2] = x.initial_state[0]  # type: ignore[index]
    o = pooled(x, pool, indices(2), snapshot_dtype=snapshot_dtype)
    resumed, state = dense(x.tokens(960, 1000, None), h, snapshot_dtype=snapshot_dtype)
    # An fp32 snapshot carries the whole state (measured: equal bits). A bf16 one costs two roundings of 2^-9, at the
    # snapshot and at the end: measured 0.0020 in the state; o reads the state in bf16 either way.
    tol = 1e-5 if snapshot_dtype is FP32 else 4e-3
    assert_close_rel(resumed, o[:, 960:], tol, "o")
    assert_close_rel(state[0].to(state_dtype), pool[2], tol, "final_state")


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_c10_chained_drift(state_dtype: torch.dtype) -> None:
    """64 chained calls of 64 tokens against one call of 4096."""
    x = make_inputs((1, 4096), 2, 1, gate="weak")
    once, chained = torch.zeros(2, 2, 128, 128, dtype=state_dtype), torch.zeros(2, 2, 128, 128, dtype=state_dtype)
    o = pooled(x, once, indices(1))
    parts = [pooled(x.tokens(n, n + 64, None), chained, indices(1)) for n in range(0, 4096, 64)]
    got = torch.cat(parts, dim=1)
    if state_dtype is FP32:
        assert_bitwise_equal(got, o, "o")
        assert_bitwise_equal(chained, once, "pool")
    else:
        # 64 roundings of the state, old ones decaying by exp(-0.64) per call: measured 0.0028 and 0.0026.
        assert_close_rel(got, o, 6e-3, "o")
        assert_close_rel(chained[1], once[1], 6e-3, "pool")


def test_pool_against_the_recurrence() -> None:
    x, pool = inputs(), pool_of(6)
    slots = [5, 1, 0, 3]
    o_exact, state_exact = recurrent_gated_delta_rule(*x.tensors, initial_state=pool[slots], cu_seqlens=x.cu_seqlens)
    o = pooled(x, pool, indices(*slots))
    # As in test_block: measured 0.0038 and 0.0030.
    assert_close_rel(o, o_exact, 5e-3, "o")
    assert_close_rel(pool[slots], state_exact, 5e-3, "pool")
