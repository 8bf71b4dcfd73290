"""Faults that other implementations of the block have had, by the number of the case."""

from __future__ import annotations

import gc
import struct
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, metadata, reference
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, assert_finite, make_inputs
from gdn_testing import StageResult, run_stages

BF16, FP32 = torch.bfloat16, torch.float32
INT32, INT64 = torch.int32, torch.int64
NAN = float("nan")

TOL = 5e-3
"""Relative L2 error of o and final_state in bf16 against fp64 (see test_block): measured worst 0.0047 and 0.0042."""

Result = tuple[Tensor, Tensor]


def run(x: GdnInputs, **options: Any) -> Result:
    defaults = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens}
    o, final_state = chunk_gated_delta_rule(*x.tensors, **(defaults | options))
    assert final_state is not None
    return o, final_state


def close_to_recurrence(x: GdnInputs, got: Result) -> None:
    right = recurrent_gated_delta_rule(*x.tensors, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)
    for actual, expected, what in zip(got, right, ("o", "final_state"), strict=True):
        assert_close_rel(actual, expected, TOL, what)


def same(got: Result, expected: Result, what: str = "") -> None:
    for actual, right, name in zip(got, expected, ("o", "final_state"), strict=True):
        assert_bitwise_equal(actual, right, f"{what} {name}".strip())


# ------------------------------------------------------------------------------------------------ C01, C03


@pytest.mark.parametrize("tokens", [1, 63, 65, 127, 1000])
def test_c01_short_last_chunk_behind_nan_rows(tokens: int) -> None:
    x = make_inputs((1, tokens), gate="zero", state="random", spare_rows=64)
    got = run(x)
    close_to_recurrence(x, got)
    tight = x.with_(**{name: getattr(x, name).clone() for name in ("q", "k", "v", "g", "beta")})
    same(got, run(tight), "without spare rows")


def test_c01_dense_batch_reads_its_own_gates() -> None:
    x = make_inputs((3, 96), 4, 2, state="random")  # "mixed" gates: another mean per batch row and per head
    means = x.g.mean(1)
    assert (means.flatten().sort().values.diff() > 0.005).all()
    got = run(x)
    close_to_recurrence(x, got)
    for n in range(3):
        same(run(x.sequence(n)), (got[0][n : n + 1], got[1][n : n + 1]), f"row {n}")


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("beta", ["uniform", "one"])
@pytest.mark.parametrize("gate", ["zero", "alternating", "minus100"])
@pytest.mark.parametrize("tokens", [7, 50, 256])
def test_c03_gate_extremes(tokens: int, gate: Any, beta: Any, state_dtype: torch.dtype) -> None:
    x = make_inputs((1, tokens), 2, 2, gate=gate, beta=beta, state="random", state_dtype=state_dtype)
    close_to_recurrence(x, run(x))
    all_finite(x, state_dtype)


def test_c03_zero_gate_over_many_chunks_is_the_ungated_rule() -> None:
    x = make_inputs((1, 1024), 2, 2, gate="zero", beta="one", state="random")
    q, k, v, _, beta = x.tensors
    ungated = recurrent_gated_delta_rule(q, k, v, None, beta, initial_state=x.initial_state)
    for actual, expected in zip(run(x), ungated, strict=True):
        assert_close_rel(actual, expected, TOL, "no drift")


@pytest.mark.parametrize("tokens", [7, 50, 256])
def test_c03_closed_gate_restarts_from_zero(tokens: int) -> None:
    """-inf in even heads and -1e4 in odd ones at tokens 0, 63, 64 and the last."""
    x = make_inputs((1, tokens), 2, 2, gate="closed", state="random")
    got = run(x)
    close_to_recurrence(x, got)
    all_finite(x, FP32)
    for token in sorted({t for t in (0, 63, 64) if t < tokens} | {tokens - 1}):
        alone = run(x.tokens(token, tokens, None))
        # From a chunk border on, the sums are the same ones. Elsewhere both runs round differently: measured 0.0038.
        if token % 64 == 0:
            same((got[0][:, token:], got[1]), alone, f"after the gate of token {token}")
        else:
            for actual, expected in zip((got[0][:, token:], got[1]), alone, strict=True):
                assert_close_rel(actual, expected, 1.5 * TOL, f"after the gate of token {token}")
    restarted = run(x.with_(initial_state=torch.full_like(got[1], 1e30)))
    same(restarted, got, "whatever the state was")


def all_finite(x: GdnInputs, state_dtype: torch.dtype) -> StageResult:
    result = run_stages(reference, x, state_dtype=state_dtype)
    for name, value in vars(result).items():
        assert_finite(value, name)
    return result


# ------------------------------------------------------------------------------------------------ C04, C05


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", ["cu_seqlens", "metadata", "seq_lens_cpu"])
def test_c04_token_axis_longer_than_the_sequences(route: str) -> None:
    x = make_inputs([100, 90], state="random", spare_rows=66)
    assert x.k.shape[1] == 256 and x.cu_seqlens is not None
    for tensor in x.tensors:
        assert tensor[:, 190:].isnan().all()
    tight = x.with_(**{name: getattr(x, name)[:, :190].clone() for name in ("q", "k", "v", "g", "beta")})
    expected = run(tight)
    options: dict[str, Any] = {}
    if route == "metadata":
        options["prefill_metadata"] = build_prefill_metadata([100, 90], cu_seqlens=x.cu_seqlens)
    elif route == "seq_lens_cpu":
        options["seq_lens_cpu"] = [100, 90]
    for more in ({}, {"use_qk_l2norm_in_kernel": True}):
        o, state = run(x, **options, **more)
        same((o[:, :190], state), expected if not more else run(tight, **more))
        assert not o[:, 190:].any(), "spare rows of our own o are zero"
        own = torch.full_like(x.v, 7.0)
        run(x, o=own, **options, **more)
        assert (own[:, 190:] == 7).all(), "spare rows of a caller's o are left alone"


C05_LENGTHS = {
    "a": [1238, 1199, 1240, 1216, 1187, 1203, 519],
    "b": [8192] + [1] * 31,
    "c": [0, 64, 0, 1, 0],
    "d": [0, 0],
}


@pytest.mark.parametrize("state", ["none", "zeros", "random"])
@pytest.mark.parametrize("name", C05_LENGTHS)
def test_c05_ragged_and_empty_sequences(name: str, state: Any) -> None:
    lens = [n // 4 for n in C05_LENGTHS[name]] if name in "ab" and state != "random" else C05_LENGTHS[name]
    x = make_inputs(lens, 3, 1, gate="weak", state=state)
    o, final = run(x)
    offsets = list(accumulate(lens, initial=0))
    alone = range(len(lens)) if len(lens) < 10 else (0, 1, 31)
    for n in alone:
        begin, end = offsets[n : n + 2]
        if begin == end:
            before = torch.zeros_like(final[n]) if x.initial_state is None else x.initial_state[n]
            assert_bitwise_equal(final[n], before, f"state of the empty sequence {n}")
            continue
        same(run(x.sequence(n)), (o[:, begin:end], final[n : n + 1]), f"sequence {n}")
    same(run(x), (o, final), "again")


# ------------------------------------------------------------------------------------------------ C13


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [INT32, INT64])
def test_c13_offsets_edited_in_place(dtype: torch.dtype, inference: bool) -> None:
    x = make_inputs((1, 256), state="none")
    with torch.inference_mode(inference):
        cu = torch.tensor([0, 100, 256], dtype=dtype)
        assert cu.is_inference() == inference
        first = run(x, cu_seqlens=cu)
        same(first, fresh(x, [0, 100, 256]), "first")
        for boundary in (64, 255, 1):
            cu.copy_(torch.tensor([0, boundary, 256], dtype=dtype))
            same(run(x, cu_seqlens=cu), fresh(x, [0, boundary, 256]), f"boundary {boundary}")
        cu.copy_(torch.tensor([0, 100, 256], dtype=dtype))
        same(run(x, cu_seqlens=cu), first, "and back")


def fresh(x: GdnInputs, offsets: list[int]) -> Result:
    """The call with offsets that no cache has seen."""
    metadata.clear_caches()
    try:
        return run(x, cu_seqlens=torch.tensor(offsets, dtype=INT32))
    finally:
        metadata.clear_caches()


def test_c13_a_new_tensor_at_an_old_address() -> None:
    x = make_inputs((1, 256))
    expected = {n: fresh(x, [0, n, 256]) for n in (100, 64)}
    seen: dict[tuple[int, int], set[int]] = {}
    memory = bytearray(12)
    for n in (100, 64) * 500:
        struct.pack_into("3i", memory, 0, 0, n, 256)
        cu = torch.frombuffer(memory, dtype=INT32)
        here = seen.setdefault((id(cu), cu.data_ptr()), set())
        here.add(n)
        same(run(x, cu_seqlens=cu), expected[n], f"boundary {n}")
        if len(here) == 2:
            return
        del cu
        gc.collect()
    pytest.fail("no tensor with other offsets came to lie at an old address")


def test_c13_a_stale_mirror_is_refused() -> None:
    x = make_inputs((1, 256))
    cu = torch.tensor([0, 100, 256], dtype=INT32)
    mirror = build_prefill_metadata([100, 156], cu_seqlens=cu)
    cu.copy_(torch.tensor([0, 64, 256], dtype=INT32))
    with pytest.raises(ValueError, match=r"^cu_seqlens\._version: got "):
        run(x, cu_seqlens=cu, prefill_metadata=mirror)
    with pytest.raises(ValueError, match=r"^cu_seqlens\[1\]: got 64, expected 100, the sum of seq_lens_cpu$"):
        run(x, cu_seqlens=cu, seq_lens_cpu=[100, 156])
    same(run(x, cu_seqlens=cu), fresh(x, [0, 64, 256]))


def test_c13_two_layouts_in_turn() -> None:
    x = make_inputs((1, 256))
    layouts = [torch.tensor([0, n, 256], dtype=INT32) for n in (100, 64, 256)]
    expected = [fresh(x, cu.tolist()) for cu in layouts]
    for _ in range(3):
        for cu, right in zip(layouts, expected, strict=True):
            same(run(x, cu_seqlens=cu), right)


# ------------------------------------------------------------------------------------------------ C14


@pytest.mark.parametrize("route", ["metadata", "cu_seqlens"])
def test_c14_a_warm_call_reads_no_tensor(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host part of the block, with stages that do nothing: what it would wait for on a GPU.

    With metadata the very first call is warm.
    """
    from gdn_runtime.ops import block

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    lens = [17, 0, 1000]
    x = make_inputs(lens, spare_rows=2)
    pool, slots = torch.zeros(4, 4, 128, 128), torch.tensor([3, -1, 0])
    options: dict[str, Any] = {"initial_state": pool, "initial_state_indices": slots}
    if route == "metadata":
        options["prefill_metadata"] = build_prefill_metadata(lens, cu_seqlens=x.cu_seqlens)  # type: ignore[arg-type]
    monkeypatch.setattr(block, "stages", lambda backend: Nothing())
    metadata.clear_caches()
    if route == "cu_seqlens":
        run(x, **options)

    def never(self: Tensor, *args: object) -> None:
        raise AssertionError("a warm call read a tensor")

    for name in ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__", "__float__", "to"):
        monkeypatch.setattr(Tensor, name, never)
    run(x, **options)
