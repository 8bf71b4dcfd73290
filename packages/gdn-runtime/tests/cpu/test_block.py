"""The block as its callers see it, on the reference backend, against the recurrence in fp64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, make_inputs, rel_l2
from gdn_testing import poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")

TOL = {BF16: 5e-3, FP16: 6e-4}
"""Relative L2 error of o and final_state against fp64. Measured worst over this file: bf16 0.0038 and 0.0030 (several
chunks), fp16 0.00047 and 0.00038."""

ONE_TOKEN = 2.0
"""Allowance for a call of one token: the errors of 512 values do not average out. Measured 0.0051 in bf16."""

Result = tuple[Tensor, Tensor]


def run(x: GdnInputs, **options: Any) -> Result:
    """(o, final states) of the block; by default the states go in and come out and lengths come from cu_seqlens."""
    defaults = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens}
    o, final_state = chunk_gated_delta_rule(*x.tensors, **(defaults | options))
    assert final_state is not None
    return o, final_state


def exact(x: GdnInputs, **options: Any) -> Result:
    return recurrent_gated_delta_rule(*x.tensors, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, **options)


def close(got: Result, expected: Result, dtype: torch.dtype = BF16, factor: float = 1.0) -> None:
    for actual, right, what in zip(got, expected, ("o", "final_state"), strict=True):
        assert_close_rel(actual, right, TOL[dtype] * factor, what)


def same(got: Result, expected: Result, what: str = "") -> None:
    for actual, right, name in zip(got, expected, ("o", "final_state"), strict=True):
        assert_bitwise_equal(actual, right, f"{what} {name}".strip())


# ------------------------------------------------------------------------------------------------ layouts

LAYOUTS: dict[str, Any] = {
    "dense": (2, 130),
    "dense one chunk": (3, 64),
    "tails": [1, 15, 16, 17, 63, 64, 65, 127, 128],
    "one sequence": [200],
    "one token": [1],
    "empty first": [0, 70, 65],
    "empty middle": [70, 0, 0, 65],
    "empty last": [70, 65, 0],
    "300 tiny": [(7 * n) % 5 for n in range(300)],
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("state", ["none", "random"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, state: Any) -> None:
    heads = (2, 1) if name == "300 tiny" else (4, 2)
    x = make_inputs(LAYOUTS[name], *heads, state=state, spare_rows=3)
    result = run(x)
    assert result[0].shape == x.v.shape and result[0].dtype is BF16 and result[0].is_contiguous()
    assert result[1].shape == (x.num_seqs, x.num_heads, 128, 128) and result[1].dtype is FP32
    close(result, exact(x), factor=ONE_TOKEN if name == "one token" else 1.0)
    assert not result[0][:, x.num_tokens :].any(), "spare rows of our own o are zero"
    empty = [n for n, length in enumerate(x.seq_lens) if length == 0]
    if empty:
        before = torch.zeros_like(result[1]) if x.initial_state is None else x.initial_state
        assert_bitwise_equal(result[1][empty], before[empty], "states of empty sequences")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("state", ["none", "random"])
@pytest.mark.parametrize("spare_rows", [0, 3])
@pytest.mark.parametrize("lens", [[0], [0, 0, 0]])
def test_all_sequences_empty(lens: list[int], spare_rows: int, state: Any) -> None:
    x = make_inputs(lens, state=state, spare_rows=spare_rows)
    states = torch.zeros(len(lens), 4, 128, 128) if x.initial_state is None else x.initial_state
    for options in lengths(x).values():
        same(run(x, **options), (torch.zeros_like(x.v), states))


@pytest.mark.parametrize("state", ["none", "random"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 70), (0, 0)])
def test_dense_without_tokens_or_rows(shape: tuple[int, int], state: Any) -> None:
    x = make_inputs(shape, state=state)
    states = torch.zeros(shape[0], 4, 128, 128) if x.initial_state is None else x.initial_state
    same(run(x), (torch.empty(*shape, 4, 128, dtype=BF16), states))


def lengths(x: GdnInputs, num_decodes: int = 0, decode_tokens: int = 0, prefix: tuple[int, ...] = ()) -> dict[str, Any]:
    """Every way to tell the block the lengths of x, behind a decode prefix if asked."""
    seq_lens = [*prefix, *x.seq_lens]
    cu = torch.tensor([0, *torch.tensor(seq_lens).cumsum(0).tolist()])
    cu32 = cu.int()
    skip = {"num_decodes": num_decodes, "num_decode_tokens": decode_tokens}
    return {
        "int32": {"cu_seqlens": cu32, **skip},
        "int64": {"cu_seqlens": cu, **skip},
        "strided": {"cu_seqlens": torch.stack((cu32, cu32), 1)[:, 0], **skip},
        "host list": {"cu_seqlens": cu32, "seq_lens_cpu": seq_lens, **skip},
        "host tensor": {"cu_seqlens": cu, "seq_lens_cpu": torch.tensor(seq_lens), **skip},
        "metadata": {
            "cu_seqlens": cu32,
            "prefill_metadata": build_prefill_metadata(seq_lens, cu_seqlens=cu32, **skip),
            **skip,
        },
        "metadata wins": {
            "cu_seqlens": cu,
            "prefill_metadata": build_prefill_metadata(seq_lens, cu_seqlens=cu, **skip),
            "seq_lens_cpu": [1, 2, 3],
            **skip,
        },
    }


@pytest.mark.parametrize("lens", [[10, 130, 65], [0, 70, 0, 0, 5, 0], [64]])
def test_every_source_of_lengths_gives_the_same(lens: list[int]) -> None:
    x = make_inputs(lens, state="random", spare_rows=1)
    expected = run(x)
    close(expected, exact(x))
    for source, options in lengths(x).items():
        same(run(x, **options), expected, source)


@pytest.mark.parametrize("prefix", [(1,), (1,) * 300, (2, 1, 0, 1)])
def test_decode_prefix_only_shifts_the_offsets(prefix: tuple[int, ...]) -> None:
    x = make_inputs([66, 0, 3], state="random")
    expected = run(x)
    for source, options in lengths(x, len(prefix), sum(prefix), prefix).items():
        same(run(x, **options), expected, source)


@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(1, 1), (4, 4), (4, 1), (6, 2)])
def test_value_heads_share_key_heads(num_heads: int, num_key_heads: int) -> None:
    x = make_inputs([65, 30], num_heads, num_key_heads, state="random")
    result = run(x)
    close(result, exact(x))
    group = num_heads // num_key_heads
    repeated = x.with_(q=x.q.repeat_interleave(group, 2), k=x.k.repeat_interleave(group, 2))
    # Equal bits here, but products for a group of heads may be summed in another order elsewhere.
    for actual, expected in zip(result, run(repeated), strict=True):
        assert rel_l2(actual, expected) < 1e-3


# ------------------------------------------------------------------------------------------------ memory


def test_views_of_fused_rows_equal_copies() -> None:
    x = make_inputs((2, 70), state="random")
    rows = torch.cat([y.flatten(2) for y in (x.q, x.k, x.v)], dim=-1)
    rows = torch.cat((rows, torch.full((2, 70, 64), NAN, dtype=BF16)), dim=-1)
    q, k, v = (y.unflatten(-1, (-1, 128)) for y in rows[..., :1024].split((256, 256, 512), dim=-1))
    gates = torch.stack((x.g, x.beta), dim=-1)
    views = x.with_(q=q, k=k, v=v, g=gates[..., 0], beta=gates[..., 1])
    same(run(views), run(x))
    # Head-major and token-major memory: strides in every order but along the rows.
    orders = x.with_(q=swapped(x.q, 1, 2), k=swapped(x.k, 0, 1), v=swapped(x.v, 1, 2), g=swapped(x.g, 1, 2))
    same(run(orders), run(x))


def swapped(x: Tensor, a: int, b: int) -> Tensor:
    """x with the memory order of two dimensions exchanged."""
    return x.transpose(a, b).contiguous().transpose(a, b)


@pytest.mark.parametrize("shape", [[10, 65], (2, 70)])
def test_o_of_the_caller(shape: Any) -> None:
    x = make_inputs(shape, spare_rows=4)
    expected = run(x)
    wide = torch.full((*x.v.shape[:2], 6, 128), 7.0, dtype=BF16)
    o = wide[:, :, 1:5]
    result, final_state = run(x, o=o)
    assert result is o
    assert_bitwise_equal(o[:, : x.num_tokens], expected[0][:, : x.num_tokens], "o")
    assert_bitwise_equal(final_state, expected[1], "final_state")
    assert (o[:, x.num_tokens :] == 7).all(), "spare rows of a caller's o are left alone"
    assert (wide[:, :, [0, 5]] == 7).all(), "what lies between the rows is left alone"


def test_o_that_holds_nan() -> None:
    x = make_inputs([10, 65])
    o = poisoned(*x.v.shape, dtype=BF16)
    run(x, o=o)
    assert_bitwise_equal(o, run(x)[0], "o")


def test_inputs_are_not_written() -> None:
    x = make_inputs([10, 65], state="random", spare_rows=2)
    before = [y.clone() for y in (*x.tensors, x.initial_state, x.cu_seqlens)]  # type: ignore[union-attr]
    run(x, use_qk_l2norm_in_kernel=True)
    for y, was in zip((*x.tensors, x.initial_state, x.cu_seqlens), before, strict=True):
        assert_bitwise_equal(y, was, "an input")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("beta_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_dtypes_of_data_and_beta(dtype: torch.dtype, beta_dtype: torch.dtype) -> None:
    x = make_inputs([10, 130], dtype=dtype, beta_dtype=beta_dtype, state="random")
    result = run(x)
    assert result[0].dtype is dtype
    close(result, exact(x), dtype)
    same(result, run(x.with_(beta=x.beta.float())), "beta is widened first")


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_l2norm(dtype: torch.dtype) -> None:
    x = make_inputs([10, 130], dtype=dtype, normalize=False, state="random", spare_rows=2)
    # One more rounding, of q and k to their dtype: measured 0.0044 (o) in bf16.
    close(run(x, use_qk_l2norm_in_kernel=True), exact(x, use_qk_l2norm=True), dtype, factor=1.6)


@pytest.mark.parametrize("gate", ["weak", "mixed", "strong", "closed"])
def test_unit_of_the_gates_changes_nothing_but_rounding(gate: Any) -> None:
    x = make_inputs([10, 130], gate=gate, state="random")
    log2, natural = run(x, use_exp2=True), run(x, use_exp2=False)
    close(natural, exact(x))
    # An fp32 gate that differs in its last bit flips the bf16 rounding of some operands: measured 2.5e-4 ("closed").
    for actual, expected in zip(natural, log2, strict=True):
        assert rel_l2(actual, expected) < 6e-4


@pytest.mark.parametrize("scale", [0.5, 1, 0.0, -2.0])
def test_scale(scale: float) -> None:
    x = make_inputs((1, 70))
    o = run(x, scale=scale)[0]
    assert_close_rel(o, exact(x, scale=scale)[0], TOL[BF16], "o")
    assert_bitwise_equal(run(x, scale=128**-0.5)[0], run(x)[0], "the default scale")


@pytest.mark.parametrize(
    ("initial", "asked", "final"),
    [
        (None, None, FP32),
        (None, FP32, FP32),
        (None, BF16, BF16),
        (FP32, None, FP32),
        (BF16, None, BF16),
        (BF16, BF16, BF16),
    ],
)
def test_dtype_of_the_final_state(initial: torch.dtype | None, asked: torch.dtype | None, final: torch.dtype) -> None:
    x = make_inputs([10, 130], state="none" if initial is None else "random", state_dtype=initial or FP32)
    o, state = run(x, state_dtype=asked)
    assert state.dtype is final
    wide = x if x.initial_state is None else x.with_(initial_state=x.initial_state.float())
    same((o, state), (run(wide)[0], run(wide)[1].to(final)), "the state is rounded once, at the end")


@pytest.mark.parametrize("snapshot_dtype", [BF16, FP32])
@pytest.mark.parametrize("state_dtype", [BF16, FP32])
def test_state_and_snapshot_dtypes_are_independent(state_dtype: torch.dtype, snapshot_dtype: torch.dtype) -> None:
    x = make_inputs([10, 130], gate="weak", state="random", state_dtype=state_dtype)
    o, state = run(x, snapshot_dtype=snapshot_dtype)
    assert o.dtype is BF16 and state.dtype is state_dtype
    # K6 rounds an fp32 snapshot to bf16 for its product, as K5 rounds a bf16 one: the same bits.
    same((o, state), run(x))
    close((o, state.float()), exact(x))


def test_without_final_state() -> None:
    x = make_inputs([10, 130], state="random")
    o, state = chunk_gated_delta_rule(*x.tensors, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)
    assert state is None
    assert_bitwise_equal(o, run(x)[0], "o")


def test_dense_rows_equal_calls_of_one_row() -> None:
    x = make_inputs((3, 70), state="random")
    o, state = run(x)
    for n in range(3):
        same(run(x.sequence(n)), (o[n : n + 1], state[n : n + 1]), f"row {n}")


# ------------------------------------------------------------------------------------------------ modes and threads


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_requires_grad_is_legal(mode: Any) -> None:
    x = make_inputs([10, 65], state="random")
    expected = run(x)
    leaf = x.with_(q=x.q.clone().requires_grad_(), v=x.v.clone().requires_grad_())
    with mode():
        got = run(leaf)
    assert not got[0].requires_grad
    same(got, expected)


def test_inference_tensors() -> None:
    expected = run(make_inputs([10, 65], state="random"))
    with torch.inference_mode():
        x = make_inputs([10, 65], state="random")
    assert x.cu_seqlens is not None and x.cu_seqlens.is_inference()
    same(run(x), expected, "outside")
    with torch.inference_mode():
        same(run(x), expected, "inside")


def test_threads_do_not_disturb_each_other() -> None:
    inputs = [make_inputs([n, 70 - n, 5], state="random", seed=n) for n in range(8)]
    expected = [run(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, right in zip(pool.map(run, inputs * 3), expected * 3, strict=True):
            same(got, right)
