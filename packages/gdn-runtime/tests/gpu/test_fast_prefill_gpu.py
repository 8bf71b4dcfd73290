"""The fast path of sm90: every point of the block's contract, against the recurrence in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, env, explain, select
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import GdnInputs, make_inputs
from gdn_testing import KEY_SETS, poisoned
from gdn_testing.device import (
    assert_close_on_device,
    assert_equal_on_device,
    compilations,
    device_inputs,
    finish_within,
    syncs_are_errors,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 5e-3, FP16: 1e-3}
RAGGED = [0, 5, 300, 64, 0, 1, 129, 0]
SEGMENTED = [2600, 0, 700, 1, 2048, 1025]
"""Lengths of which some fill several segments, one ends with a segment, and one has a segment of one token."""


@pytest.fixture(autouse=True, params=["p_in_scan", "p_from_prepare"])
def fast_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both forms of the path, whatever the rule would choose (fp16 has one), and segments from 32 chunks on."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fast path is for sm90")
    wanted = request.param == "p_in_scan"
    monkeypatch.setattr(select, "p_in_scan", lambda problem: (wanted and problem.dtype == "bf16", "a test's choice"))
    short = (16, "segments in spite of few chunks")
    monkeypatch.setattr(select, "segment_chunks", lambda problem: short if problem.max_seq_chunks >= 32 else (0, ""))
    select._select.cache_clear()
    with env.override(prefill="fast"):
        yield
    select._select.cache_clear()


def run(x: GdnInputs, **options: object) -> tuple[Tensor, Tensor]:
    options = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens} | options
    assert explain(*x.tensors, **options).fast is not None
    result = chunk_gated_delta_rule(*x.tensors, **options)
    finish_within(20)
    return result


def poison_allocator() -> None:
    """Leave NaN in cached blocks that outputs and workspaces may get."""
    blocks = [poisoned(size, dtype=FP32, device="cuda") for size in (1 << 12, 1 << 16, 1 << 19, 1 << 22) for _ in "123"]
    torch.cuda.synchronize()
    del blocks


def assert_matches_recurrence(x: GdnInputs, tol: float | None = None, **options: object) -> tuple[Tensor, Tensor]:
    poison_allocator()
    o, final = run(x, **options)
    exact_o, exact_final = recurrent_gated_delta_rule(
        *x.tensors,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm=bool(options.get("use_qk_l2norm_in_kernel")),
    )
    tol = ROUNDING[x.q.dtype] if tol is None else tol
    n = x.num_tokens
    assert_close_on_device(o[:, :n], exact_o[:, :n], tol, 8 * tol, "o")
    final_tol = max(tol, 2.0**-9) if final.dtype is BF16 else tol
    assert_close_on_device(final, exact_final, final_tol, 8 * final_tol, "final_state")
    return o, final


@pytest.mark.parametrize("heads", [(32, 16), (8, 2), (64, 16), (4, 4), (1, 1), (6, 1), (12, 2)], ids=str)
def test_heads_and_ragged_lengths(heads: tuple[int, int]) -> None:
    x = device_inputs(RAGGED, *heads)
    o, final = assert_matches_recurrence(x)
    poison_allocator()
    again = run(x)
    assert_equal_on_device(again[0], o, "o of a second run")
    assert_equal_on_device(again[1], final, "final_state of a second run")
    for n in (0, 4, 7):
        assert_equal_on_device(final[n], x.initial_state[n], f"final_state of empty sequence {n}")


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_segments(state: bool, state_dtype: torch.dtype) -> None:
    x = device_inputs(SEGMENTED, 4, 2, rate=0.002, state=state, state_dtype=state_dtype)
    assert explain(*x.tensors, cu_seqlens=x.cu_seqlens, snapshot_dtype=None).fast.segment_chunks > 0
    o, final = assert_matches_recurrence(x, state_dtype=state_dtype)
    again = run(x, state_dtype=state_dtype)
    assert_equal_on_device(again[0], o, "o of a second run")
    assert_equal_on_device(again[1], final, "final_state of a second run")
    if state:
        assert_equal_on_device(final[1], x.initial_state[1], "final_state of the empty sequence")


def test_segments_of_a_dense_batch() -> None:
    x = device_inputs((2, 2500), 4, 2, rate=0.001)
    assert explain(*x.tensors).fast.segment_chunks > 0
    assert_matches_recurrence(x)


def test_state_is_carried_over_128_chunks() -> None:
    assert_matches_recurrence(device_inputs((1, 8192), 32, 16, rate=0.001))


def test_tails_dense_and_packed() -> None:
    tails = [1, 15, 16, 17, 63, 64, 65, 127]
    for length in tails:
        assert_matches_recurrence(device_inputs((2, length), 4, 2, seed=length))
    assert_matches_recurrence(device_inputs(tails, 4, 2))
    assert_matches_recurrence(device_inputs(tails[::-1], 4, 2), use_exp2=False)


@pytest.mark.parametrize(
    ("dtype", "beta_dtype", "state_dtype"),
    [(BF16, BF16, BF16), (BF16, FP16, FP32), (FP16, FP32, FP32), (FP16, FP16, BF16)],
    ids=str,
)
def test_dtypes(dtype: torch.dtype, beta_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    x = device_inputs([70, 0, 200, 1], 4, 2, dtype=dtype, state_dtype=state_dtype)
    x = x.with_(beta=x.beta.to(beta_dtype))
    o, final = assert_matches_recurrence(x)
    assert (o.dtype, final.dtype) == (dtype, state_dtype)


def test_normalised_in_the_kernel() -> None:
    x = device_inputs([300, 65], 4, 2)
    x = x.with_(q=x.q * 7, k=x.k * 0.3)
    assert_matches_recurrence(x, tol=1.5 * ROUNDING[BF16], use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_similar_keys(dtype: torch.dtype) -> None:
    for name, case in KEY_SETS.items():
        for gate in ("weak", "zero"):
            x = make_inputs([256, 100], 4, 2, keys=case.keys, beta=case.beta, gate=gate, dtype=dtype, device="cuda")
            print(name, gate)
            # The bound of the stages: what the rounding of the inverse to 16 bits loses reaches o and the states.
            assert_matches_recurrence(x, tol=max(ROUNDING[dtype], 2.5 * case.bounds(dtype)[1]))


@pytest.mark.parametrize("gate", ["zero", "alternating", "minus100", "closed", "strong", "mixed"])
def test_gate_extremes(gate: str) -> None:
    for length in (7, 50, 256):
        for beta in ("uniform", "one"):
            x = make_inputs((1, length), 4, 4, gate=gate, beta=beta, state="random", device="cuda")
            assert_matches_recurrence(x)
    x = make_inputs([2200, 65], 2, 2, gate=gate, state="random", device="cuda")
    assert_matches_recurrence(x)


@pytest.mark.parametrize("scale", [1.0, 0.3, -0.5, 0.0])
def test_scales(scale: float) -> None:
    x = device_inputs([130, 64, 7], 4, 2)
    o, _ = run(x, scale=scale)
    exact, _ = recurrent_gated_delta_rule(
        *x.tensors, scale=scale, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
    )
    assert_close_on_device(o, exact, ROUNDING[BF16], 8 * ROUNDING[BF16], "o")


def test_gates_in_both_units() -> None:
    x = device_inputs([100, 30], 4, 2)
    for a, b in zip(run(x), run(x, use_exp2=False), strict=True):
        assert_equal_on_device(a, b, "result")


@pytest.mark.parametrize("lens", [[100, 90, 70], [2100, 1100, 2600]], ids=["whole", "segments"])
def test_a_neighbour_full_of_nan_stays_alone(lens: list[int]) -> None:
    x = device_inputs(lens, 4, 2)
    expected = run(x)
    begin, end = lens[0], lens[0] + lens[1]
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, begin:end] = float("nan")
    x.initial_state[1] = float("nan")
    o, final = run(x)
    assert o[:, begin:end].isnan().any() and final[1].isnan().all()
    for rows in (slice(0, begin), slice(end, None)):
        assert_equal_on_device(o[:, rows].contiguous(), expected[0][:, rows].contiguous(), "o beside NaN")
    assert_equal_on_device(final[[0, 2]], expected[1][[0, 2]], "final_state beside NaN")


@pytest.mark.parametrize("length", [1, 63, 65, 1000])
def test_poisoned_rows_behind_a_dense_view(length: int) -> None:
    x = make_inputs((2, length), 4, 2, state="random", spare_rows=64, device="cuda")
    tight = x.with_(**{name: getattr(x, name).contiguous() for name in ("q", "k", "v", "g", "beta")})
    o, final = assert_matches_recurrence(x)
    exact = run(tight)
    assert_equal_on_device(o, exact[0], "o")
    assert_equal_on_device(final, exact[1], "final_state")


@pytest.mark.parametrize("own_buffer", [False, True])
def test_token_axis_longer_than_the_sequences(own_buffer: bool) -> None:
    x = make_inputs([100, 90], 4, 2, state="random", spare_rows=66, device="cuda")
    expected = run(make_inputs([100, 90], 4, 2, state="random", device="cuda"))
    poison_allocator()
    buffer = torch.full_like(x.v, 3.0) if own_buffer else None
    o, final = run(x, o=buffer)
    assert_equal_on_device(o[:, :190], expected[0], "o")
    assert_equal_on_device(final, expected[1], "final_state")
    assert (o[:, 190:] == (3.0 if own_buffer else 0.0)).all()


@pytest.mark.parametrize("lens", [[130, 0, 70, 64, 5], [2100, 0, 70, 1024, 1100]], ids=["whole", "segments"])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_pool(lens: list[int], state_dtype: torch.dtype) -> None:
    x = device_inputs(lens, 4, 2, state=False)
    indices = torch.tensor([5, 2, -1, 9, 0], device="cuda", dtype=torch.int32)  # -1 and 9 own no slot
    fresh = torch.tensor([True, True, True, True, False], device="cuda")
    memory = torch.full((10, 4 * 128 * 128 + 8), 7.0, device="cuda", dtype=state_dtype)
    pool = memory[2:9, : 4 * 128 * 128].view(7, 4, 128, 128)  # slots apart, guards before and behind
    pool.copy_(0.1 * torch.randn(pool.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"))
    pool[0] = float("nan")  # not to be read: its sequence starts from zero
    before = memory.clone()
    starts = torch.zeros(5, 4, 128, 128, device="cuda", dtype=state_dtype)
    starts[0], starts[1] = pool[5], pool[2]
    expected = run(x, initial_state=starts)
    o, final = run(x, initial_state=pool, initial_state_indices=indices, has_initial_state=fresh)
    assert final is pool
    assert_equal_on_device(o, expected[0], "o")
    assert_equal_on_device(pool[[5, 2, 0]], expected[1][[0, 1, 4]], "states of owned slots")
    untouched = torch.ones_like(before, dtype=torch.bool)
    for slot in (5, 0):
        untouched[2 + slot, : 4 * 128 * 128] = False
    assert_equal_on_device(memory[untouched], before[untouched], "memory of nobody")
    again = run(x, initial_state=starts, inplace_final_state=True)
    assert again[1] is starts
    assert_equal_on_device(again[1], expected[1], "final_state in place")


@pytest.mark.parametrize("lens", [[130, 70], [2100, 1030]], ids=["whole", "segments"])
def test_strided_views_of_a_fused_projection(lens: list[int]) -> None:
    x = make_inputs(lens, 4, 2, state="random", device="cuda")
    expected = run(x)
    tokens = sum(lens)
    fused = poisoned(1, tokens, 2 * 2 * 128 + 4 * 128 + 8, dtype=BF16, device="cuda")
    for offset in (0, 3, 8):  # whole 16-byte units and not
        rows = fused[..., offset : offset + 1024]
        rows.copy_(torch.cat([x.q.flatten(2), x.k.flatten(2), x.v.flatten(2)], dim=-1))
        q, k, v = rows.split([256, 256, 512], dim=-1)
        view = x.with_(q=q.unflatten(-1, (2, 128)), k=k.unflatten(-1, (2, 128)), v=v.unflatten(-1, (4, 128)))
        gates = torch.stack([x.g, x.beta], dim=-1)
        view = view.with_(g=gates[..., 0], beta=gates[..., 1])
        wide = poisoned(1, tokens, 4, 160, dtype=BF16, device="cuda")
        first = 16 + offset % 8
        o, final = run(view, o=wide[..., first : first + 128])
        assert_equal_on_device(o.contiguous(), expected[0], f"o at offset {offset}")
        assert_equal_on_device(final, expected[1], f"final_state at offset {offset}")
        assert wide[..., :first].isnan().all() and wide[..., first + 128 :].isnan().all()


def test_lengths_compile_nothing_new_and_nothing_waits() -> None:
    def call(lens: list[int]) -> None:
        x = device_inputs(lens, 4, 2)
        metadata = build_prefill_metadata(lens, cu_seqlens=x.cu_seqlens)
        with syncs_are_errors():
            chunk_gated_delta_rule(
                *x.tensors, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
                prefill_metadata=metadata,
            )  # fmt: skip

    for lens in ([100, 30], [2100]):
        call(lens)
    with compilations() as seen:
        for lens in ([1, 17], [1000], [1008, 64, 16], [2049, 7], [3000]):
            call(lens)
    assert not seen
    with compilations() as seen:
        run(device_inputs([5], 3, 1))
    assert len(seen) == 2, seen  # the counter counts


def test_graph_capture() -> None:
    lens = [300, 65]
    x = device_inputs(lens, 4, 2)
    metadata = build_prefill_metadata(lens, cu_seqlens=x.cu_seqlens)
    expected = run(x, prefill_metadata=metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = chunk_gated_delta_rule(
            *x.tensors, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
            prefill_metadata=metadata,
        )  # fmt: skip
    o.fill_(float("nan"))
    graph.replay()
    assert_equal_on_device(o, expected[0], "o")
    assert_equal_on_device(final, expected[1], "final_state")


def test_what_it_refuses_goes_through_the_stages() -> None:
    x = device_inputs([70], 4, 2)
    for options, reason in (({"snapshot_dtype": FP32}, "snapshots"), ({"prepare_backend": "triton"}, "stages")):
        selection = explain(*x.tensors, cu_seqlens=x.cu_seqlens, **options)
        assert selection.fast is None and reason in str(selection)
    empty = device_inputs([0, 0], 4, 2)
    assert "no tokens" in str(explain(*empty.tensors, cu_seqlens=empty.cu_seqlens))
    assert "K1..K6 fast" in str(explain(*x.tensors, cu_seqlens=x.cu_seqlens))
