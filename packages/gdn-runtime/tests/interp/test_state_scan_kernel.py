"""K5 under Triton's interpreter, against the torch backend, the formula in fp64, and itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from gdn_runtime import chunk_gated_delta_rule_fwd_h, reference
from gdn_runtime.ops.backends import stages
from gdn_runtime.spec import StateScanConfig
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, assert_finite, make_inputs
from gdn_testing import plan_for, poisoned, problem_of, snapshots_for, triton_specs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TAILS = [1, 15, 16, 17, 63, 64, 65, 127]
EMPTIES = [0, 65, 0, 1, 0]
Gate = Literal["head", "token", "none"]

# Relative L2. Against the torch backend, which rounds at the same places: fp32 sums in another order move a rounding
# now and then. Measured, worst of this file: 6e-6. The roundoff of bf16 is 2^-9 = 2e-3.
SAME_ROUNDING = 1e-4
# Against the formula in fp64: dt(S) and dt(gated v_new) are rounded, and 16-bit outputs themselves. Measured: 1.9e-3.
FORMULA = 3e-3


@dataclass(frozen=True)
class Scan:
    """What K5 reads. Rows outside the sequences are NaN in every tensor that has rows. ``g`` is [B, H, T], log2."""

    inputs: GdnInputs
    w: Tensor
    u: Tensor
    g: Tensor
    gk: Tensor | None = None

    @property
    def k(self) -> Tensor:
        return self.inputs.k

    def gate(self, kind: Gate, use_exp2: bool) -> Tensor | None:
        if kind == "none":
            return None
        g = self.g if use_exp2 else self.g * math.log(2.0)
        return g.contiguous() if kind == "head" else g.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Result:
    h: Tensor
    v_new: Tensor | None
    final_state: Tensor | None


def scan_of(inputs: GdnInputs, *, key_gate: bool = False) -> Scan:
    """w, u and the cumulative gate of the torch backend, on poisoned memory."""
    _, k, v, g, beta = inputs.tensors
    batch, tokens, num_heads, _ = v.shape
    w, u = (poisoned(batch, num_heads, tokens, 128, dtype=k.dtype) for _ in range(2))
    g_cumsum = poisoned(batch, num_heads, tokens)
    reference.prepare(
        k,
        v,
        g,
        beta,
        w=w,
        u=u,
        g_cumsum=g_cumsum,
        plan=plan_for(inputs),
        use_exp2=True,
    )
    gk = None
    if key_gate:
        gk = poisoned(batch, tokens, num_heads, 128)
        n = inputs.num_tokens
        gk[:, :n] = -torch.rand(batch, n, num_heads, 128, generator=torch.Generator().manual_seed(5))
    return Scan(inputs, w, u, g_cumsum, gk)


def launch(
    backend: Any,
    x: Scan,
    *,
    gate: Gate = "head",
    use_exp2: bool = True,
    block_v: int = 128,
    snapshot_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    v_new: Literal["own", "none", "u"] = "own",
) -> Result:
    plan = plan_for(x.inputs)
    h = snapshots_for(x.inputs, plan, snapshot_dtype or x.k.dtype)
    u = x.u.clone()
    new = {"own": poisoned(*u.shape, dtype=u.dtype), "none": None, "u": u}[v_new]
    backend.state_scan(
        x.k,
        x.w,
        u,
        g=x.gate(gate, use_exp2),
        gk=x.gk,
        h=h,
        v_new=new,
        initial_state=initial_state,
        final_state=final_state,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        plan=plan,
        use_exp2=use_exp2,
        g_head_major=gate == "head",
        spec=triton_specs(problem_of(x.inputs), state_scan=StateScanConfig(block_v)).state_scan,
    )
    return Result(h, new, final_state)


def run(x: Scan, *, state_dtype: torch.dtype = FP32, backend: ModuleType | None = None, **options: Any) -> Result:
    """Dense states: those of the inputs, and new final ones of ``state_dtype``."""
    states = (x.inputs.num_seqs, x.inputs.num_heads, 128, 128)
    return launch(
        stages("triton") if backend is None else backend,
        x,
        initial_state=x.inputs.initial_state,
        final_state=poisoned(*states, dtype=state_dtype),
        **options,
    )


def assert_rows(x: Scan, v_new: Tensor) -> None:
    """Rows of sequences are written, no others."""
    n = x.inputs.num_tokens
    assert_finite(v_new[:, :, :n], "v_new")
    assert v_new[:, :, n:].isnan().all(), "v_new: a spare row was written"


def check(x: Scan, **options: Any) -> Result:
    """Run and compare with the torch backend; no NaN may get in or be left."""
    result = run(x, **options)
    expected = run(x, backend=reference, **options)
    n = x.inputs.num_tokens
    assert_close_rel(result.h, expected.h, SAME_ROUNDING, "h")
    if result.v_new is not None and expected.v_new is not None:
        assert_rows(x, result.v_new)
        assert_close_rel(result.v_new[:, :, :n], expected.v_new[:, :, :n], SAME_ROUNDING, "v_new")
    assert result.final_state is not None and expected.final_state is not None
    assert_close_rel(result.final_state, expected.final_state, SAME_ROUNDING, "final_state")
    return result


def assert_same(actual: Result, expected: Result) -> None:
    for name, value in vars(expected).items():
        assert_bitwise_equal(getattr(actual, name), value, name)


def formula(x: Scan, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    """h [chunks, H, V, K], v_new [B, H, T, V] and final states, fp64, from nothing but section K5 of the definition."""
    inputs = x.inputs
    group = inputs.num_heads // inputs.num_key_heads
    snapshots, finals = [], []
    v_new = torch.zeros(x.u.shape, dtype=torch.float64)
    packed = inputs.cu_seqlens is not None
    begin = 0
    for n, length in enumerate(inputs.seq_lens):
        row, first = (0, begin) if packed else (n, 0)
        state = torch.zeros(inputs.num_heads, 128, 128, dtype=torch.float64)
        if inputs.initial_state is not None:
            state = inputs.initial_state[n].double()
        for start in range(first, first + length, 64):
            tokens = slice(start, min(start + 64, first + length))
            snapshots.append(state)
            keys = x.k[row, tokens].double().repeat_interleave(group, dim=1).transpose(0, 1)
            new = x.u[row, :, tokens].double() - x.w[row, :, tokens].double() @ state.transpose(1, 2)
            v_new[row, :, tokens] = new
            decay = torch.zeros(inputs.num_heads, tokens.stop - tokens.start, dtype=torch.float64)
            if gate != "none":
                decay = x.g[row, :, tokens].double() * math.log(2.0)
            state = decay[:, -1, None, None].exp() * state
            if x.gk is not None:
                state = state * x.gk[row, tokens.stop - 1].double().exp()[:, None, :]
            state = state + ((decay[:, -1:] - decay).exp()[..., None] * new).transpose(1, 2) @ keys
        finals.append(state)
        begin += length
    return torch.stack(snapshots), v_new, torch.stack(finals)


@pytest.mark.parametrize("key_gate", [False, True])
@pytest.mark.parametrize("gate", ["head", "none"])
def test_formula(gate: Gate, key_gate: bool) -> None:
    inputs = make_inputs([150, 0, 64], 1, 1, gate="weak", state="random", spare_rows=64)
    x = scan_of(inputs, key_gate=key_gate)
    result = check(x, gate=gate, snapshot_dtype=FP32)
    h, v_new, final_state = formula(x, gate)
    n = inputs.num_tokens
    assert result.v_new is not None and result.final_state is not None
    assert_close_rel(result.h[0], h, FORMULA, "h")
    assert_close_rel(result.v_new[:, :, :n], v_new[:, :, :n], FORMULA, "v_new")
    assert_close_rel(result.final_state, final_state, FORMULA, "final_state")


@pytest.mark.parametrize(
    ("block_v", "gate", "use_exp2", "snapshot_dtype"),
    [
        (16, "head", True, BF16),
        (32, "token", False, BF16),
        (64, "none", True, FP32),
        (64, "head", False, BF16),
        (128, "token", True, FP32),
        (128, "none", False, BF16),
    ],
)
def test_tails(block_v: int, gate: Gate, use_exp2: bool, snapshot_dtype: torch.dtype) -> None:
    x = scan_of(make_inputs(TAILS, 1, 1, gate="weak", state="random", spare_rows=64))
    check(x, block_v=block_v, gate=gate, use_exp2=use_exp2, snapshot_dtype=snapshot_dtype)


@pytest.mark.parametrize("gate", ["head", "token", "none"])
@pytest.mark.parametrize("key_gate", [False, True])
def test_dense_batch_reads_its_own_rows(gate: Gate, key_gate: bool) -> None:
    """Gates differ by row and head; the rows behind a sequence in w, u and g are those of the next head."""
    inputs = make_inputs((2, 70), 2, 1, gate="mixed", state="random", spare_rows=64)
    x = scan_of(inputs, key_gate=key_gate)
    together = check(x, gate=gate)
    for n in range(2):
        alone = Scan(inputs.sequence(n), x.w[n : n + 1], x.u[n : n + 1], x.g[n : n + 1])
        if x.gk is not None:
            alone = replace(alone, gk=x.gk[n : n + 1])
        row = {name: value[n : n + 1] for name, value in vars(together).items()}
        assert_same(Result(**row), run(alone, gate=gate))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (3, 3)], ids=str)
def test_value_heads_share_key_heads(heads: tuple[int, int]) -> None:
    check(scan_of(make_inputs([65], *heads, state="random", spare_rows=64)))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_keys_as_a_view_of_fused_rows(offset: int, dense: bool) -> None:
    """Offset 3 leaves rows that no 16-byte access may touch."""
    x = scan_of(make_inputs((2, 65) if dense else [65, 3], 2, 1, state="random"))
    fused = poisoned(*x.k.shape[:2], 3 * 128 + 8, dtype=BF16)
    view = fused[..., offset : offset + 128].unflatten(-1, (1, 128))
    view.copy_(x.k)
    assert_same(run(replace(x, inputs=x.inputs.with_(k=view))), run(x))
    heads_first = x.k.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same(run(replace(x, inputs=x.inputs.with_(k=heads_first))), run(x))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("snapshot_dtype", [None, FP32])
@pytest.mark.parametrize(("state", "state_dtype"), [("none", FP32), ("random", FP32), ("random", BF16)])
def test_dtypes_and_empty_sequences(
    dtype: torch.dtype, snapshot_dtype: torch.dtype | None, state: Any, state_dtype: torch.dtype
) -> None:
    inputs = make_inputs(EMPTIES, 1, 1, dtype=dtype, state=state, state_dtype=state_dtype, spare_rows=64)
    result = check(scan_of(inputs), snapshot_dtype=snapshot_dtype, state_dtype=state_dtype)
    assert result.h.dtype is (snapshot_dtype or dtype)
    assert result.final_state is not None
    start = inputs.initial_state if inputs.initial_state is not None else torch.zeros_like(result.final_state)
    for n in (0, 2, 4):
        assert_bitwise_equal(result.final_state[n], start[n], f"final_state of empty sequence {n}")


def test_bf16_start_and_fp32_end() -> None:
    check(scan_of(make_inputs([65], 1, 1, state="random", state_dtype=BF16)), state_dtype=FP32)


@pytest.mark.parametrize("state", ["none", "random"])
def test_nothing_but_empty_sequences(state: Any) -> None:
    inputs = make_inputs([0, 0], 2, 1, state=state, spare_rows=3)
    result = run(scan_of(inputs))
    assert result.h.shape == (1, 0, 2, 128, 128)
    assert result.final_state is not None
    start = torch.zeros_like(result.final_state) if inputs.initial_state is None else inputs.initial_state
    assert_bitwise_equal(result.final_state, start, "final_state")


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_snapshot_dtype_changes_nothing_but_the_snapshots(state_dtype: torch.dtype) -> None:
    x = scan_of(make_inputs([130, 1], 1, 1, gate="weak", state="random", state_dtype=state_dtype))
    wide = run(x, snapshot_dtype=FP32, state_dtype=state_dtype)
    narrow = run(x, state_dtype=state_dtype)
    assert_bitwise_equal(wide.h.to(BF16), narrow.h, "fp32 snapshots rounded to nearest even")
    assert (narrow.h.float() != wide.h).any()
    assert_same(replace(wide, h=narrow.h), narrow)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [0, 8, 5])
def test_pool_equals_dense_states(index_dtype: torch.dtype, gap: int) -> None:
    """Slots may be apart in memory by any number of elements."""
    inputs = make_inputs(EMPTIES, 1, 1, state="random", spare_rows=64)
    x = scan_of(inputs)
    dense = run(x)
    memory = poisoned(8, 128 * 128 + gap)
    pool = memory[:, : 128 * 128].view(8, 1, 128, 128)
    indices = torch.tensor([7, 0, 3, 5, 1], dtype=index_dtype)
    pool[indices.long()] = cast(Tensor, inputs.initial_state)
    result = launch(stages("triton"), x, initial_state=pool, final_state=pool, state_indices=indices)
    assert_same(replace(result, final_state=pool[indices.long()]), dense)
    assert pool[[2, 4, 6]].isnan().all() and memory[:, 128 * 128 :].isnan().all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_pads_and_slots_outside_the_pool(index_dtype: torch.dtype) -> None:
    """They start from zero and store nothing. The pool is the middle of a tensor whose ends must survive."""
    inputs = make_inputs([1, 66, 3, 2, 5], 1, 1)
    x = scan_of(inputs)
    memory = torch.full((9, 1, 128, 128), 7.0)
    pool = memory[3:6]
    before = memory.clone()
    far = 2**31 - 1 if index_dtype is torch.int32 else 2**32  # the latter is 0 once narrowed to int32
    indices = torch.tensor([-1, 3, 1, -2, far], dtype=index_dtype)
    result = launch(stages("triton"), x, initial_state=pool, final_state=pool, state_indices=indices)
    start = torch.zeros(5, 1, 128, 128)
    start[2] = 7.0
    dense = run(replace(x, inputs=inputs.with_(initial_state=start)))
    assert_bitwise_equal(result.h, dense.h, "h")
    assert_bitwise_equal(cast(Tensor, result.v_new), cast(Tensor, dense.v_new), "v_new")
    before[4] = cast(Tensor, dense.final_state)[2]
    assert_bitwise_equal(memory, before, "pool and what lies around it")


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("stale", [math.nan, math.inf, 1e30])
def test_flag_of_a_fresh_sequence_beats_what_its_slot_holds(pooled: bool, stale: float) -> None:
    inputs = make_inputs([0, 66, 2], 1, 1, state="random")
    x = scan_of(inputs)
    initial = cast(Tensor, inputs.initial_state)
    flags = torch.tensor([False, False, True])
    zeroed = initial.masked_fill(~flags[:, None, None, None], 0.0)
    expected = run(replace(x, inputs=inputs.with_(initial_state=zeroed)))
    states = initial.clone()
    states[:2] = stale
    indices = torch.tensor([0, 1, 2]) if pooled else None
    result = launch(
        stages("triton"),
        x,
        initial_state=states,
        final_state=states,
        state_indices=indices,
        has_initial_state=flags,
    )
    assert_same(result, expected)


def test_in_place_without_a_pool() -> None:
    inputs = make_inputs(EMPTIES, 2, 1, state="random")
    x = scan_of(inputs)
    states = cast(Tensor, inputs.initial_state).clone()
    result = launch(stages("triton"), x, block_v=64, initial_state=states, final_state=states)
    assert_same(result, run(x, block_v=64))


def test_new_values_may_replace_u_or_be_dropped() -> None:
    x = scan_of(make_inputs([66, 3], 1, 1, state="random", spare_rows=8))
    own, aliased, dropped = (run(x, block_v=64, v_new=kind) for kind in ("own", "u", "none"))
    assert_same(aliased, own)
    assert dropped.v_new is None
    assert_same(replace(dropped, v_new=own.v_new), own)


def test_no_final_state_wanted() -> None:
    x = scan_of(make_inputs([66], 1, 1, state="random"))
    result = launch(stages("triton"), x, initial_state=x.inputs.initial_state)
    assert_same(replace(result, final_state=run(x).final_state), run(x))


@pytest.mark.parametrize(("use_exp2", "factor"), [(True, 0.5), (False, math.exp(-1.0))])
def test_unit_of_the_gate_is_that_of_use_exp2(use_exp2: bool, factor: float) -> None:
    rows = torch.zeros(1, 1, 1, 128, dtype=BF16)
    ones = torch.ones(1, 1, 128, 128)
    _, _, final = chunk_gated_delta_rule_fwd_h(
        rows,
        rows,
        rows,
        torch.full((1, 1, 1), -1.0),
        initial_state=ones,
        output_final_state=True,
        use_exp2=use_exp2,
        backend="triton",
    )
    torch.testing.assert_close(final, ones * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dense", [False, True])
def test_public_op_launches_the_same_kernel(dense: bool) -> None:
    inputs = make_inputs((1, 70) if dense else [66, 3], 2, 1, state="random")
    x = scan_of(inputs, key_gate=True)
    h, v_new, final = chunk_gated_delta_rule_fwd_h(
        x.k,
        x.w,
        x.u,
        x.gate("token", True),
        cast(Tensor, x.gk).flatten(0, 1),
        initial_state=inputs.initial_state,
        output_final_state=True,
        cu_seqlens=inputs.cu_seqlens,
        backend="triton",
    )
    assert_same(Result(h, v_new, final), run(x, gate="token", block_v=64))
