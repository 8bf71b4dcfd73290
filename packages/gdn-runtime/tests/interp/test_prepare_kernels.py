"""K1..K4 and the normalisation in Triton, under the interpreter (TRITON_INTERPRET=1), against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gdn_runtime.kernels.triton.l2norm import l2norm
from gdn_runtime.kernels.triton.prepare import prepare
from gdn_runtime.spec import PREPARE_MODES, L2NormSpec, PrepareConfig
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, make_inputs
from gdn_testing import KEY_SETS, exact_prepare, plan_for, poisoned, problem_of, triton_specs

LOG2E = 1.0 / math.log(2.0)
modes = pytest.mark.parametrize("mode", PREPARE_MODES)


def run(inputs: GdnInputs, mode: str = "fused", use_exp2: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(w, u, g_cumsum) of the kernels, into poisoned outputs."""
    batch, tokens, heads = inputs.g.shape
    w, u = (poisoned(batch, heads, tokens, 128, dtype=inputs.k.dtype) for _ in range(2))
    g_cumsum = poisoned(batch, heads, tokens)
    prepare(
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        w=w,
        u=u,
        g_cumsum=g_cumsum,
        plan=plan_for(inputs),
        use_exp2=use_exp2,
        spec=triton_specs(problem_of(inputs), prepare=PrepareConfig(mode=mode)).prepare,
    )
    return w, u, g_cumsum


def check(
    inputs: GdnInputs,
    mode: str = "fused",
    use_exp2: bool = True,
    w_bound: float = 0.003,
    u_bound: float = 0.003,
) -> None:
    """Values of the rows of sequences, and that no other row was written."""
    w, u, g_cumsum = run(inputs, mode, use_exp2)
    exact_w, exact_u, _ = exact_prepare(inputs)
    gates = clamped_cumsum(inputs) * (LOG2E if use_exp2 else 1.0)
    n = inputs.num_tokens
    assert_close_rel(u[:, :, :n], exact_u[:, :, :n], u_bound, f"u, {mode}")
    assert_close_rel(flushed(w[:, :, :n]), flushed(exact_w[:, :, :n]), w_bound, f"w, {mode}")
    assert_close_rel(g_cumsum[:, :, :n], gates[:, :, :n], 1e-6, f"g_cumsum, {mode}")
    for name, out in (("w", w), ("u", u), ("g_cumsum", g_cumsum)):
        assert out[:, :, n:].isnan().all(), f"{name}: rows past the last sequence were written"


def flushed(x: Tensor) -> Tensor:
    """x without values below 1e-30. Behind a closed gate all of w is that small, and the interpreter garbles bf16
    denormals when it widens them."""
    return x.masked_fill(x.abs() < 1e-30, 0.0)


def clamped_cumsum(inputs: GdnInputs) -> Tensor:
    """Chunk-local cumulative gates [B, H, T], fp64, with a token's gate not below -128."""
    g = inputs.g.double().transpose(1, 2).clamp(min=-128.0)
    out = torch.zeros_like(g)
    begin = 0
    for length in inputs.seq_lens if inputs.cu_seqlens is not None else (g.shape[2],):
        for start in range(begin, begin + length, 64):
            rows = slice(start, min(start + 64, begin + length))
            out[:, :, rows] = g[:, :, rows].cumsum(-1)
        begin += length
    return out


@modes
@pytest.mark.parametrize("gate", ["weak", "zero"])
@pytest.mark.parametrize("key_set", KEY_SETS)
def test_similar_keys_stay_at_the_rounding_floor(key_set: str, gate: str, mode: str) -> None:
    kind = KEY_SETS[key_set]
    inputs = make_inputs((1, 128), 1, 1, keys=kind.keys, beta=kind.beta, gate=gate)
    check(inputs, mode, u_bound=kind.u_bound, w_bound=kind.w_bound)


@modes
@pytest.mark.parametrize("key_set", KEY_SETS)
def test_fp16_stays_at_its_own_floor(key_set: str, mode: str) -> None:
    kind = KEY_SETS[key_set]
    inputs = make_inputs((1, 100), 1, 1, keys=kind.keys, beta=kind.beta, gate="weak", dtype=torch.float16)
    u_bound, w_bound = kind.bounds(torch.float16)
    check(inputs, mode, u_bound=u_bound, w_bound=w_bound)


def with_keys(inputs: GdnInputs, change: Tensor | float) -> GdnInputs:
    return inputs.with_(k=(inputs.k.float() * change).to(inputs.k.dtype))


@pytest.mark.parametrize("gate", ["weak", "zero"])
def test_keys_of_alternating_sign(gate: str) -> None:
    signs = torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)[None, :, None, None]
    for keys in ("equal", "cos0.99"):
        check(with_keys(make_inputs((1, 128), 1, 1, keys=keys, beta="one", gate=gate), signs), w_bound=0.015)


def test_keys_of_length_two() -> None:
    check(with_keys(make_inputs((1, 128), 2, 1, beta="near_one", gate="weak"), 2.0))


@modes
@pytest.mark.parametrize("keys", ["random", "cos0.5", "cos0.99", "equal"])
def test_beta_of_two_loses_digits_but_stays_sane(keys: str, mode: str) -> None:
    """I + A is badly conditioned there: fp16 operands leave 1 to 5 % on equal keys, bf16 ones 10 to 25 %."""
    inputs = make_inputs((1, 64), 2, 1, keys=keys, beta="one", gate="weak")
    inputs = inputs.with_(beta=2.0 * inputs.beta)
    bound = 0.004 if keys == "random" else 0.06
    check(inputs, mode, w_bound=bound, u_bound=bound)


@modes
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 127])
def test_tails_of_a_dense_batch(tokens: int, mode: str) -> None:
    """Two rows with gates of their own; the NaN rows behind them belong to somebody else."""
    check(make_inputs((2, tokens), 2, 1, spare_rows=3, seed=tokens), mode)


@modes
@pytest.mark.parametrize("use_exp2", [True, False])
def test_varlen_with_empty_sequences_and_spare_rows(use_exp2: bool, mode: str) -> None:
    check(make_inputs([0, 1, 0, 70, 64, 0, 33, 0], 2, 1, spare_rows=70), mode, use_exp2)


def test_a_sequence_does_not_see_its_neighbour() -> None:
    inputs = make_inputs([50, 60], 2, 1)
    alone = run(inputs.sequence(0))
    inputs.k[:, 50:], inputs.v[:, 50:], inputs.g[:, 50:], inputs.beta[:, 50:] = (float("nan"),) * 4
    for name, out, expected in zip(("w", "u", "g_cumsum"), run(inputs), alone, strict=True):
        assert_bitwise_equal(out[:, :, :50].contiguous(), expected, name)


@modes
@pytest.mark.parametrize("gate", ["mixed", "strong", "closed", "minus100", "alternating"])
def test_gates(gate: str, mode: str) -> None:
    """ "closed" has open rows of w only in the last, short chunk."""
    check(make_inputs((1, 131), 2, 1, gate=gate, keys="cos0.5"), mode, w_bound=0.0045)


def test_nan_gate_stays_visible_in_its_chunk() -> None:
    inputs = make_inputs((1, 128), 1, 1)
    inputs.g[0, 70, 0] = float("nan")
    w, u, g_cumsum = run(inputs)
    assert g_cumsum[0, 0, 70:].isnan().all()
    assert w[0, 0, 70:].isnan().all()
    assert u[0, 0, 71:].isnan().all()
    for out in (w, u, g_cumsum):
        assert out[0, 0, :64].isfinite().all()


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2), (4, 1)])
def test_value_heads_read_their_key_head(heads: int, key_heads: int) -> None:
    check(make_inputs((1, 70), heads, key_heads))


@modes
@pytest.mark.parametrize("beta_dtype", [torch.bfloat16, torch.float16])
def test_beta_of_16_bits(beta_dtype: torch.dtype, mode: str) -> None:
    check(make_inputs((1, 70), 2, 1, beta_dtype=beta_dtype), mode)


@modes
@pytest.mark.parametrize("offset", [0, 3])
def test_views_of_fused_rows(offset: int, mode: str) -> None:
    """k, v, g and beta as slices of wider rows; an offset of 3 elements breaks 16-byte alignment."""
    inputs = make_inputs((2, 70), 2, 1)
    rows = poisoned(2, 70, 3 * 128 + 16, dtype=torch.bfloat16)
    k, v = rows[:, :, offset : offset + 128].unflatten(2, (1, 128)), rows[:, :, offset + 128 :][:, :, :256]
    v = v.unflatten(2, (2, 128))
    gates = poisoned(2, 2, 70, 2).permute(0, 2, 3, 1)
    k.copy_(inputs.k), v.copy_(inputs.v), gates[..., 0].copy_(inputs.g), gates[..., 1].copy_(inputs.beta)
    strided = run(inputs.with_(k=k, v=v, g=gates[..., 0], beta=gates[..., 1]), mode)
    for name, out, expected in zip(("w", "u", "g_cumsum"), strided, run(inputs, mode), strict=True):
        assert_bitwise_equal(out, expected, name)


def test_modes_differ_by_one_rounding_of_the_inverse() -> None:
    inputs = make_inputs([100, 65], 2, 1, keys="cos0.5", gate="weak", beta="near_one")
    fused, split = run(inputs, "fused"), run(inputs, "split")
    assert_bitwise_equal(split[2], fused[2], "g_cumsum")
    assert_close_rel(split[1], fused[1], 0.002, "u")
    assert_close_rel(split[0], fused[0], 0.003, "w")


@modes
def test_units_of_the_gate_change_nothing_but_g_cumsum(mode: str) -> None:
    inputs = make_inputs((1, 70), 2, 1)
    log2, natural = run(inputs, mode, True), run(inputs, mode, False)
    assert_close_rel(log2[2] / LOG2E, natural[2], 1e-6, "g_cumsum")
    assert_close_rel(log2[0], natural[0], 1e-3, "w")
    assert_close_rel(log2[1], natural[1], 1e-3, "u")


@modes
def test_no_chunks_is_no_launch(mode: str) -> None:
    w, u, g_cumsum = run(make_inputs([0, 0], 2, 1, spare_rows=5), mode)
    for out in (w, u, g_cumsum):
        assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_l2norm_of_views_with_a_nan_row(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 37, 5, 128, generator=gen).to(dtype)
    q, k = rows[:, :, :2], rows[:, :, 2:4]
    k[1, 3, 1] = float("nan")
    k[0, 0, 0] = 0.0
    q_out, k_out = (poisoned(2, 37, 2, 128, dtype=dtype) for _ in range(2))
    l2norm(q, k, q_out=q_out, k_out=k_out, spec=L2NormSpec("cpu", "bf16", q.shape[2]))
    for name, x, out in (("q", q, q_out), ("k", k, k_out)):
        exact = x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + 1e-6)
        spoilt = exact.isnan()
        assert torch.equal(out.isnan(), spoilt), name
        assert_close_rel(out.masked_fill(spoilt, 0.0), exact.masked_fill(spoilt, 0.0), torch.finfo(dtype).eps / 3, name)
