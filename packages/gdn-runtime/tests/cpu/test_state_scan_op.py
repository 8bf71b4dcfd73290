"""K5 as an op of its own: layouts of gates, snapshots, pools and refusals, on the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import (
    UnsupportedError,
    build_prefill_metadata,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_fwd_h,
    env,
    reference,
)
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, make_inputs
from gdn_testing import StageResult, run_stages
from gdn_testing.refusals import Args, Change, at, each, gap_in_rows, int32, meta, put, refuse

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOG2E = 1.4426950408889634
NAN = float("nan")
Result = tuple[Tensor, Tensor | None, Tensor | None]

TOL = 5e-3
"""Relative L2 error of h, v_new and final_state in bf16, S and v_new being rounded once per chunk. Measured worst:
0.0025 against the definition on the same w and u, 0.0039 against the recurrence."""


def by_definition(
    x: GdnInputs, w: Tensor, u: Tensor, g: Tensor | None, gk: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(h [total_chunks,H,V,K], v_new [B,H,T,V], final [N,H,V,K]) in fp64. g [B,T,H] and gk [B,T,H,K] natural."""
    group = x.num_heads // x.num_key_heads
    k = x.k.double().repeat_interleave(group, 2).transpose(1, 2)
    w, u = w.double(), u.double()
    v_new = torch.full_like(u, NAN)
    h: list[Tensor] = []
    final: list[Tensor] = []
    if x.cu_seqlens is None:
        spans = [(n, 0, length) for n, length in enumerate(x.seq_lens)]
    else:
        spans = [(0, *span) for span in pairwise(accumulate(x.seq_lens, initial=0))]
    for n, (row, begin, end) in enumerate(spans):
        s = torch.zeros(x.num_heads, 128, 128, dtype=FP64) if state is None else state[n].double()
        for start in range(begin, end, 64):
            at_ = slice(start, min(start + 64, end))
            h.append(s)
            vn = u[row, :, at_] - w[row, :, at_] @ s.mT
            v_new[row, :, at_] = vn
            gate = torch.zeros(1) if g is None else g[row, at_].double().T
            s = s * gate[..., -1:, None].exp()
            if gk is not None:
                s = s * gk[row, at_.stop - 1].double().exp()[:, None]
            s = s + (vn * (gate[..., -1:] - gate).exp()[..., None]).mT @ k[row, :, at_]
        final.append(s)
    return torch.stack(h) if h else torch.zeros(0, x.num_heads, 128, 128), v_new, torch.stack(final)


def prepared(x: GdnInputs, **options: Any) -> StageResult:
    return run_stages(reference, x, **options)


def scan(x: GdnInputs, stages: StageResult, g: Tensor | None, **options: Any) -> Result:
    defaults = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens}
    # Rows that the stages did not write are NaN in w, u and g: they must not matter.
    return chunk_gated_delta_rule_fwd_h(x.k, stages.w, stages.u, g, **(defaults | options))


SHAPES: list[Any] = [(2, 130), (1, 64), [1, 15, 64, 65, 127], [0, 70, 0, 65, 0], [3]]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("state", ["none", "random"])
@pytest.mark.parametrize("gates", ["none", "g", "gk", "g and gk"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definition(shape: Any, gates: str, state: Any) -> None:
    x = make_inputs(shape, gate="weak", state=state, spare_rows=2)
    stages = prepared(x, use_exp2=False)
    natural = stages.g_cumsum.transpose(1, 2).contiguous()
    batch, tokens = x.k.shape[:2]
    per_key = -0.01 * torch.rand(batch, tokens, 4, 128, generator=torch.Generator().manual_seed(1)).cumsum(1)
    g = natural if "g" in gates.split() else None
    gk = per_key if "gk" in gates else None
    h, v_new, final = scan(x, stages, g, gk=gk, use_exp2=False)
    right_h, right_v, right_final = by_definition(x, stages.w, stages.u, g, gk, x.initial_state)
    assert h.shape[:2] == ((1, len(right_h)) if x.cu_seqlens is not None else (batch, -(-tokens // 64)))
    assert h.dtype is BF16 and v_new is not None and final is not None and final.dtype is FP32
    assert_close_rel(h.flatten(0, 1), right_h, TOL, "h")
    assert_close_rel(v_new[:, :, : x.num_tokens], right_v[:, :, : x.num_tokens], TOL, "v_new")
    assert v_new[:, :, x.num_tokens :].isnan().all(), "spare rows of v_new are not written"
    assert_close_rel(final, right_final, TOL, "final_state")

    # The same call with other layouts and units of the same gates.
    variants: list[tuple[str, Tensor | None, dict[str, Any]]] = []
    if g is not None:
        variants.append(("head-major g", stages.g_cumsum, {"gk": gk, "use_exp2": False, "g_head_major": True}))
    if gk is not None:
        variants.append(("flat gk", g, {"gk": gk.flatten(0, 1), "use_exp2": False}))
    if g is None:
        variants.append(("log2 units without g", None, {"gk": gk, "use_exp2": True}))
    for what, gate, options in variants:
        for got, expected in zip(scan(x, stages, gate, **options), (h, v_new, final), strict=True):
            assert got is not None
            assert_bitwise_equal(got, expected, what)
    if g is not None:
        h2, _, final2 = scan(x, stages, g * LOG2E, gk=gk, use_exp2=True)
        assert final2 is not None
        # The last bit of a gate flips bf16 roundings: measured 2e-4.
        assert_close_rel(h2, h, 5e-4, "h in log2 units")
        assert_close_rel(final2, final, 5e-4, "final_state in log2 units")


def test_unit_of_g_is_the_callers_word() -> None:
    """exp(-1) = 0.368 against exp2(-1) = 0.5 for one and the same g."""
    k = torch.zeros(1, 1, 1, 128, dtype=BF16)
    w = torch.zeros(1, 1, 1, 128, dtype=BF16)
    options: dict[str, Any] = {"initial_state": torch.ones(1, 1, 128, 128), "output_final_state": True}
    for use_exp2, right in ((False, 0.36787944), (True, 0.5)):
        final = chunk_gated_delta_rule_fwd_h(k, w, w, torch.full((1, 1, 1), -1.0), use_exp2=use_exp2, **options)[2]
        assert final is not None
        torch.testing.assert_close(final, torch.full_like(final, right), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(2, 130), [70, 0, 65]], ids=str)
def test_it_is_the_k5_of_the_block(shape: Any) -> None:
    x = make_inputs(shape, gate="weak", state="random")
    stages = prepared(x)
    h, v_new, final = scan(x, stages, stages.g_cumsum, g_head_major=True)
    for got, expected in ((h, stages.h), (v_new, stages.v_new), (final, stages.final_state)):
        assert got is not None
        assert_bitwise_equal(got, expected, "a result of the stages")
    block = chunk_gated_delta_rule(
        *x.tensors, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens
    )[1]
    assert final is not None and block is not None
    assert_bitwise_equal(block, final, "final_state of the block")


def test_what_is_not_asked_for_is_none_and_changes_nothing() -> None:
    x = make_inputs([70, 0, 65], gate="weak", state="random")
    stages = prepared(x)
    h, v_new, final = scan(
        x, stages, stages.g_cumsum, g_head_major=True, save_new_value=False, output_final_state=False
    )
    assert v_new is None and final is None
    assert_bitwise_equal(h, stages.h, "h")


@pytest.mark.parametrize("snapshot_dtype", [None, BF16, FP32])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_dtypes_of_states_and_snapshots(state_dtype: torch.dtype, snapshot_dtype: torch.dtype | None) -> None:
    x = make_inputs([70, 0, 65], gate="weak", state="random", state_dtype=state_dtype)
    stages = prepared(x)
    h, v_new, final = scan(x, stages, stages.g_cumsum, g_head_major=True, snapshot_dtype=snapshot_dtype)
    assert v_new is not None and final is not None
    assert h.dtype is (snapshot_dtype or BF16) and final.dtype is state_dtype
    assert_bitwise_equal(h.to(BF16), stages.h, "snapshots, rounded to nearest even")
    assert_bitwise_equal(v_new, stages.v_new, "v_new")
    assert_bitwise_equal(final, stages.final_state, "final_state")


def test_fp32_snapshots_keep_what_bf16_cannot() -> None:
    special = torch.tensor([NAN, float("inf"), -float("inf"), 1 + 2**-9, 1 + 3 * 2**-9, 3e38, 0.0, -0.0])
    state = special.repeat(128 * 128 // 8).view(1, 1, 128, 128)
    zeros = torch.zeros(1, 1, 1, 128, dtype=BF16)
    for dtype in (FP32, BF16):
        h = chunk_gated_delta_rule_fwd_h(zeros, zeros, zeros, initial_state=state, snapshot_dtype=dtype)[0]
        assert_bitwise_equal(h[0, 0], state[0].to(dtype), "the snapshot of chunk 0 is the initial state")


@pytest.mark.parametrize("state", ["none", "random"])
def test_all_sequences_empty(state: Any) -> None:
    x = make_inputs([0, 0], state=state)
    w = torch.empty(1, 4, 0, 128, dtype=BF16)
    h, v_new, final = chunk_gated_delta_rule_fwd_h(
        x.k, w, w, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens
    )
    assert h.shape == (1, 0, 4, 128, 128) and v_new is not None and v_new.shape == w.shape and final is not None
    assert_bitwise_equal(final, torch.zeros_like(final) if x.initial_state is None else x.initial_state, "final_state")


def test_sources_of_lengths_and_decode_prefix() -> None:
    x = make_inputs([70, 0, 65], gate="weak", state="random")
    stages = prepared(x)
    cu = int32(0, 1, 3, 73, 73, 138)
    prefix: dict[str, Any] = {"num_decodes": 2, "num_decode_tokens": 3, "cu_seqlens": cu}
    metadata = build_prefill_metadata([1, 2, 70, 0, 65], num_decodes=2, num_decode_tokens=3, cu_seqlens=cu)
    for options in (prefix, prefix | {"seq_lens_cpu": [1, 2, 70, 0, 65]}, prefix | {"prefill_metadata": metadata}):
        h, _, final = scan(x, stages, stages.g_cumsum, g_head_major=True, **options)
        assert final is not None
        assert_bitwise_equal(h, stages.h, "h")
        assert_bitwise_equal(final, stages.final_state, "final_state")


def test_pool() -> None:
    x = make_inputs([70, 0, 65], gate="weak", state="random")
    stages = prepared(x)
    states = x.initial_state
    assert states is not None
    pool = torch.full((6, 4, 128, 128), NAN)
    slots = [5, 0, 2]
    pool[slots] = states
    options = {"initial_state": pool, "initial_state_indices": int32(*slots), "g_head_major": True}
    h, v_new, final = scan(x, stages, stages.g_cumsum, **options)
    assert final is pool and v_new is not None
    assert_bitwise_equal(h, stages.h, "h")
    assert_bitwise_equal(v_new, stages.v_new, "v_new")
    assert_bitwise_equal(pool[slots], stages.final_state, "slots")
    assert pool[[1, 3, 4]].isnan().all()
    options["initial_state_indices"] = int32(5, 0, 5)
    with env.override(check_indices=True), pytest.raises(ValueError, match=r"^initial_state_indices: got slots \[5\]"):
        scan(x, stages, stages.g_cumsum, **options)


@pytest.mark.parametrize("tokens", [1, 63, 65, 127, 1000])
def test_c01_no_gate_and_a_short_last_chunk(tokens: int) -> None:
    """g=None with 64 NaN rows behind the [:T] views: rows past the end never reach the state."""
    x = make_inputs((1, tokens), gate="zero", state="random", spare_rows=64)
    stages = prepared(x)
    h, v_new, final = scan(x, stages, None)
    assert v_new is not None and final is not None
    right_final = reference.recurrent_gated_delta_rule(*x.tensors, initial_state=x.initial_state)[1]
    assert_close_rel(final, right_final, TOL, "final_state")
    gated = scan(x, stages, torch.zeros(1, tokens, 4))
    for got, expected in zip((h, v_new, final), gated, strict=True):
        assert expected is not None
        assert_bitwise_equal(got, expected, "no gate and a gate of 0")


# ------------------------------------------------------------------------------------------------ refusals


def legal() -> Args:
    x = make_inputs((2, 70), state="random")
    w = torch.zeros(2, 4, 70, 128, dtype=BF16)
    gates = {"g": x.g, "gk": torch.zeros(2, 70, 4, 128)}
    return {"k": x.k, "w": w, "u": w.clone(), "initial_state": x.initial_state, "output_final_state": True} | gates


REFUSED: list[tuple[Change, type[Exception], str]] = [
    (put(k=None), TypeError, "k: got NoneType, expected a torch.Tensor"),
    (put(w=1), TypeError, "w: got int, expected a torch.Tensor"),
    (at("k", lambda x: x[0]), ValueError, "k.shape: got [70, 2, 128], expected [B,T,Hg,K]"),
    (at("w", lambda x: x[0]), ValueError, "w.shape: got [4, 70, 128], expected [B,H,T,K]"),
    (at("u", lambda x: x[0]), ValueError, "u.shape: got [4, 70, 128], expected [B,H,T,V]"),
    (at("w", lambda x: x.transpose(1, 2)), ValueError, "w.shape: got [2, 70, 4, 128], expected [2, 4, 70, 128]"),
    (each("wu", lambda x: x[:, :, :69]), ValueError, "w.shape: got [2, 4, 69, 128], expected [2, 4, 70, 128]"),
    (at("u", lambda x: x[:1]), ValueError, "u.shape: got [1, 4, 70, 128], expected [2, 4, 70, 128]"),
    (at("k", Tensor.float), TypeError, "k.dtype: got torch.float32, expected bfloat16 or float16"),
    (at("w", Tensor.half), TypeError, "w.dtype: got torch.float16, expected bfloat16"),
    (at("u", Tensor.float), TypeError, "u.dtype: got torch.float32, expected bfloat16"),
    *((at(n, meta), ValueError, f"{n}.device: got meta, expected cpu") for n in ("w", "u", "g", "gk", "initial_state")),
    (
        each("kwu", lambda x: x[..., :64].contiguous()),
        UnsupportedError,
        "head size: got K=64, V=64, supported: K=V=128",
    ),
    (at("k", lambda x: x[:, :, [0, 1, 1]]), ValueError, "heads: got H=4 value heads, Hg=3 key heads, expected H a pos"),
    (at("k", gap_in_rows), ValueError, "k.stride(-1): got 2, expected 1 (contiguous rows)"),
    (at("w", gap_in_rows), ValueError, "w.stride(): got [71680, 17920, 256, 2], expected a contiguous tensor"),
    (at("u", gap_in_rows), ValueError, "u.stride(): got [71680, 17920, 256, 2], expected a contiguous tensor"),
    (at("g", Tensor.bfloat16), TypeError, "g.dtype: got torch.bfloat16, expected float32"),
    (at("g", lambda x: x.mT.contiguous()), ValueError, "g.shape: got [2, 4, 70], expected [2, 70, 4]"),
    (put(g_head_major=True), ValueError, "g.shape: got [2, 70, 4], expected [2, 4, 70]"),
    (at("g", gap_in_rows), ValueError, "g.stride(): got [560, 8, 2], expected a contiguous tensor"),
    (put(g=0.0), TypeError, "g: got float, expected a torch.Tensor"),
    (at("gk", Tensor.double), TypeError, "gk.dtype: got torch.float64, expected float32"),
    (
        at("gk", lambda x: x[:, :69]),
        ValueError,
        "gk.shape: got [2, 69, 4, 128], expected [2, 70, 4, 128] or [140, 4, 128]",
    ),
    (at("gk", gap_in_rows), ValueError, "gk.stride(): got"),
    *(
        (put(chunk_size=n), UnsupportedError, f"chunk_size: got {n}, supported: 64")  # C01 (c)
        for n in (32, 128, 0)
    ),
    *(
        (put(chunk_size=n), TypeError, f"chunk_size: got {type(n).__name__}, expected int")
        for n in (64.0, True, torch.tensor([64, 64]), None)
    ),
    *(
        (put(**{flag: 1}), TypeError, f"{flag}: got int, expected bool")
        for flag in ("g_head_major", "save_new_value", "use_exp2", "output_final_state", "check_indices")
    ),
    (put(snapshot_dtype=FP16), ValueError, "snapshot_dtype: got torch.float16, expected float32 or bfloat16"),
    (
        put(state_dtype=BF16),
        ValueError,
        "state_dtype: got torch.bfloat16, expected torch.float32 (the dtype of initial_s",
    ),
    (
        put(num_decodes=1),
        ValueError,
        "num_decodes without cu_seqlens: got a value, expected cu_seqlens too, or neither",
    ),
    (put(cu_seqlens=int32(0, 70)), ValueError, "batch size with cu_seqlens: got 2, expected 1"),
    (
        put(inplace_final_state=True, output_final_state=False),
        ValueError,
        "output_final_state with inplace_final_state",
    ),
    (put(initial_state_indices=int32(0)), ValueError, "initial_state_indices.shape: got [1], expected [2]"),
    (put(backend="triton"), UnsupportedError, "backend on cpu: got 'triton', supported: reference (available: "),
    (put(backend=1), TypeError, "backend: got int, expected str"),
    (put(arch="gfx942"), UnsupportedError, "arch for tensors on cpu: got 'gfx942', supported: cpu"),
    (put(arch=1), TypeError, "arch: got int, expected str"),
    *(
        (at(n, lambda x: x.clone().requires_grad_()), UnsupportedError, f"{n}.requires_grad in grad mode")
        for n in ("k", "w", "u", "g", "gk", "initial_state")
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[case[2][:60] for case in REFUSED])
def test_refused(change: Callable[[Args], Args], error: type[Exception], message: str) -> None:
    args = legal()
    refuse(chunk_gated_delta_rule_fwd_h, args | change(args), error, message)
