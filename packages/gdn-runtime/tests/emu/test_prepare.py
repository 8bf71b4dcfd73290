"""The fused prepare on the emulator, all checks on: values against fp64, tails, gates, strides, untouched memory."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from gdn_runtime.codeobject.emulate import EmulatorLauncher
from gdn_runtime.codeobject.stages.kernels import Kernels
from gdn_runtime.codeobject.stages.prepare import prepare
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.spec import FusedPrepareSpec
from gdn_runtime.testing import GdnInputs, assert_close_rel, make_inputs
from gdn_testing import KEY_SETS, exact_prepare, plan_for, poison, poisoned
from gdn_testing.scans import ORDERS, reserved

LOG2E = 1.0 / math.log(2.0)
NAN = float("nan")
BETA = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

variants = pytest.mark.parametrize("variant", ["wave", "group"])
pytestmark = variants


@functools.cache
def kernels_of(arch: str, order: str) -> Kernels:
    launcher = EmulatorLauncher(arch, order=order, threads=1)
    return Kernels(lambda *_: launcher)


def run(
    inputs: GdnInputs,
    arch: str,
    variant: str,
    *,
    use_exp2: bool = True,
    order: str = "forward",
    plan: ChunkPlan | None = None,
    outputs: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(w, u, g_cumsum), poisoned before the launch. EmulatedFaultError for any finding."""
    batch, tokens, heads = inputs.g.shape
    plan = plan_for(inputs) if plan is None else plan
    if outputs is None:
        w, u = (poisoned(batch, heads, tokens, 128, dtype=torch.bfloat16) for _ in range(2))
        outputs = w, u, poisoned(batch, heads, tokens)
    w, u, g_cumsum = outputs
    spec = FusedPrepareSpec(
        arch=arch,
        variant=variant,
        num_heads=heads,
        num_key_heads=inputs.num_key_heads,
        is_varlen=plan.is_varlen,
        use_exp2=use_exp2,
        beta_dtype=BETA[inputs.beta.dtype],
    )
    prepare(
        kernels_of(arch, order),
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        w=w,
        u=u,
        g_cumsum=g_cumsum,
        plan=plan,
        use_exp2=use_exp2,
        spec=spec,
    )
    return w, u, g_cumsum


def check(
    inputs: GdnInputs,
    arch: str,
    variant: str,
    *,
    u_bound: float = 0.003,
    w_bound: float = 0.003,
    use_exp2: bool = True,
    order: str = "forward",
) -> None:
    """Values of the rows of sequences, and that no other row was written."""
    w, u, g_cumsum = run(inputs, arch, variant, use_exp2=use_exp2, order=order)
    exact_w, exact_u, _ = exact_prepare(inputs)
    gates = clamped_cumsum(inputs) * (LOG2E if use_exp2 else 1.0)
    n = inputs.num_tokens
    assert_close_rel(u[:, :, :n], exact_u[:, :, :n], u_bound, f"u, {variant}")
    assert_close_rel(flushed(w[:, :, :n]), flushed(exact_w[:, :, :n]), w_bound, f"w, {variant}")
    assert_close_rel(g_cumsum[:, :, :n], gates[:, :, :n], 1e-6, f"g_cumsum, {variant}")
    for name, out in (("w", w), ("u", u), ("g_cumsum", g_cumsum)):
        assert out[:, :, n:].isnan().all(), f"{name}: rows past the last sequence were written"


def flushed(x: Tensor) -> Tensor:
    """x without values below 1e-37: exponentials and products flush what fp32 cannot hold."""
    return x.masked_fill(x.abs() < 1e-37, 0.0)


def clamped_cumsum(inputs: GdnInputs) -> Tensor:
    """Chunk-local cumulative gates [B, H, T], fp64, a token's gate not below -128."""
    g = inputs.g.double().transpose(1, 2)
    g = torch.where(g < -128.0, -128.0, g)
    out, begin = torch.zeros_like(g), 0
    for length in inputs.seq_lens if inputs.cu_seqlens is not None else (g.shape[2],):
        for start in range(begin, begin + length, 64):
            rows = slice(start, min(start + 64, begin + length))
            out[:, :, rows] = g[:, :, rows].cumsum(-1)
        begin += length
    return out


@pytest.mark.parametrize("gate", ["weak", "zero", "strong"])
@pytest.mark.parametrize("key_set", KEY_SETS)
def test_similar_keys_stay_at_the_rounding_floor(key_set: str, gate: str, arch: str, variant: str) -> None:
    kind = KEY_SETS[key_set]
    inputs = make_inputs((1, 64), 4, 2, keys=kind.keys, beta=kind.beta, gate=gate)
    check(inputs, arch, variant, u_bound=kind.u_bound, w_bound=kind.w_bound)


def test_keys_between_the_sets(arch: str, variant: str) -> None:
    """normalize(b + 0.3 noise): cosine 0.92; beta of one."""
    inputs = make_inputs((1, 64), 4, 2, keys="random", beta="one", gate="weak")
    k = inputs.k.float()
    k = torch.nn.functional.normalize(k[:, :1] + 0.3 * k, dim=-1)
    check(inputs.with_(k=k.bfloat16()), arch, variant, w_bound=0.015)


@pytest.mark.parametrize("keys", ["equal", "cos0.99"])
def test_keys_of_alternating_sign(keys: str, arch: str, variant: str) -> None:
    signs = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[None, :, None, None]
    inputs = make_inputs((1, 64), 4, 2, keys=keys, beta="one", gate="zero")
    check(inputs.with_(k=(inputs.k.float() * signs).bfloat16()), arch, variant, w_bound=0.015)


def test_beta_of_two_loses_digits_but_stays_sane(arch: str, variant: str) -> None:
    inputs = make_inputs((1, 64), 4, 2, keys="equal", beta="one", gate="weak")
    check(inputs.with_(beta=2.0 * inputs.beta), arch, variant, u_bound=0.06, w_bound=0.06)


@pytest.mark.parametrize("gate", ["mixed", "closed", "minus100", "alternating"])
@pytest.mark.parametrize("keys", ["random", "equal"])
def test_gates(gate: str, keys: str, arch: str, variant: str) -> None:
    """Down to the floor of -128 per token, -8192 in a chunk."""
    check(make_inputs((1, 128), 4, 2, gate=gate, keys=keys), arch, variant, w_bound=KEY_SETS[keys].w_bound)


def test_gates_that_grow(arch: str, variant: str) -> None:
    inputs = make_inputs((1, 64), 4, 2, gate="weak")
    check(inputs.with_(g=-5.0 * inputs.g), arch, variant)


def test_a_nan_gate_stays_in_its_chunk_and_after_its_token(arch: str, variant: str) -> None:
    inputs = make_inputs((1, 128), 4, 2, gate="weak")
    g = inputs.g.clone()
    g[0, 70, 1] = NAN
    w, u, g_cumsum = run(inputs.with_(g=g), arch, variant)
    spoiled = torch.zeros(4, 128, dtype=torch.bool)
    spoiled[1, 70:] = True
    assert torch.equal(g_cumsum[0].isnan(), spoiled)
    assert w[0, 1, 70:].isnan().any() and not w[0, 1, :64].isnan().any() and not u[0, [0, 2, 3]].isnan().any()


@pytest.mark.parametrize(
    ("tokens", "order"),
    [(n, ORDERS[n % 3]) for n in (1, 15, 16, 17, 63, 64, 65, 127)] + [(165, order) for order in ORDERS],
)
def test_tails_of_a_dense_batch(tokens: int, order: str, arch: str, variant: str) -> None:
    """Two rows with gates of their own; the NaN rows behind them belong to somebody else."""
    check(make_inputs((2, tokens), 4, 2, spare_rows=3, seed=tokens), arch, variant, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_varlen(order: str, arch: str, variant: str) -> None:
    """Empty sequences, NaN in spare rows, heads that do not fill workgroups of four, beta in fp16, natural units."""
    inputs = make_inputs([0, 1, 0, 70, 64, 0, 33, 0], 5, 1, spare_rows=70, beta_dtype=torch.float16)
    check(inputs, arch, variant, use_exp2=False, order=order)


def test_beta_in_bf16_and_free_strides(variant: str) -> None:
    """k and v as slices of fused rows among NaN, g head-major, one beta for all tokens of a head (stride 0)."""
    arch = "gfx950" if variant == "wave" else "gfx942"
    batch, tokens, heads, key_heads = 2, 70, 4, 2
    inputs = make_inputs((batch, tokens), heads, key_heads)
    fused = torch.full((batch, tokens + 2, 8 + key_heads * 256 + heads * 136), NAN, dtype=torch.bfloat16)
    k = fused[:, :tokens, 8 : 8 + key_heads * 256].unflatten(2, (key_heads, 256))[..., 64:192]
    v = fused[:, :tokens, 8 + key_heads * 256 :].unflatten(2, (heads, 136))[..., 8:]
    k.copy_(inputs.k)
    v.copy_(inputs.v)
    g = torch.full((batch, heads, 3 * tokens), NAN)[..., ::3].transpose(1, 2)
    g.copy_(inputs.g)
    beta = inputs.beta[:, :1].bfloat16().expand(batch, tokens, heads)
    check(inputs.with_(k=k, v=v, g=g, beta=beta), arch, variant)


def test_a_sequence_does_not_see_its_neighbour(arch: str, variant: str) -> None:
    inputs = make_inputs([50, 60], 5, 1, beta_dtype=torch.float16)
    expected = run(inputs, arch, variant, use_exp2=False)
    for x in (inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, 50:] = NAN
    for out, alone in zip(run(inputs, arch, variant, use_exp2=False), expected, strict=True):
        assert torch.equal(out[:, :, :50], alone[:, :, :50])


def test_rows_more_than_2_to_the_31_elements_away(arch: str, variant: str) -> None:
    """A sequence at the end of a token axis of 2^22 rows, five heads: u and w hold 2.7e9 elements."""
    length, begin, heads = 70, 1 << 22, 5
    inputs = make_inputs([length], heads, 1, beta_dtype=torch.float16)
    tokens = begin + length
    far = {
        "k": reserved(1, tokens, 1, 128, dtype=torch.bfloat16),
        "v": reserved(1, tokens, heads, 128, dtype=torch.bfloat16),
        "g": reserved(1, tokens, heads, dtype=torch.float32),
        "beta": reserved(1, tokens, heads, dtype=torch.float16),
    }
    for name, x in far.items():
        x[:, begin:] = getattr(inputs, name)
    outputs = (
        reserved(1, heads, tokens, 128, dtype=torch.bfloat16),
        reserved(1, heads, tokens, 128, dtype=torch.bfloat16),
        reserved(1, heads, tokens, dtype=torch.float32),
    )
    for out in outputs:
        poison(out[:, :, begin:])
    plan = ChunkPlan(
        is_varlen=True,
        num_seqs=1,
        seq_len=tokens,
        num_tokens=tokens,
        total_chunks=2,
        max_seq_chunks=2,
        cu_seqlens=torch.tensor([begin, tokens], dtype=torch.int32),
        chunk_offsets=torch.tensor([0, 2], dtype=torch.int32),
        sequence_ids=torch.tensor([0, 0], dtype=torch.int32),
        chunk_ids=torch.tensor([0, 1], dtype=torch.int32),
    )
    run(inputs.with_(**far), arch, variant, use_exp2=False, plan=plan, outputs=outputs)
    for out, near in zip(outputs, run(inputs, arch, variant, use_exp2=False), strict=True):
        assert torch.equal(out[:, :, begin:], near)
