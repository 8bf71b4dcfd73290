"""K5 as compiled, against the chunked torch backend on the same w and u: model shapes, every switch, every tail."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gdn_runtime import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd_h, env
from gdn_runtime.ops.backends import stages
from gdn_runtime.testing import CASES, TORCH_DTYPE, Case, GdnInputs
from gdn_testing import plan_for, poisoned, problem_of, triton_specs
from gdn_testing.device import (
    assert_close_on_device,
    assert_equal_on_device,
    compilations,
    device_inputs,
    finish_within,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TAILS = [1, 15, 16, 17, 63, 64, 65, 127]
MODEL_CASES = [case for case in CASES.values() if case.num_tokens <= 65536 and max(case.seq_lens) < 60000]


@dataclass(frozen=True)
class ScanInputs:
    """Arguments of K5: those of a block and its w, u and cumulative gate (token-major, log2 units)."""

    block: GdnInputs
    w: Tensor
    u: Tensor
    g_cumsum: Tensor
    g: Tensor


def scan_inputs(block: GdnInputs) -> ScanInputs:
    """w, u and the cumulative gate of K1..K4, which tests of their own cover."""
    _, k, v, g, beta = block.tensors
    batch, tokens, num_heads, _ = v.shape
    w = poisoned(batch, num_heads, tokens, 128, dtype=k.dtype, device=k.device)
    u, g_cumsum = poisoned(*w.shape, dtype=k.dtype, device=k.device), poisoned(*w.shape[:3], device=k.device)
    spec = triton_specs(problem_of(block)).prepare
    stages("triton").prepare(k, v, g, beta, w=w, u=u, g_cumsum=g_cumsum, plan=plan_for(block), use_exp2=True, spec=spec)
    return ScanInputs(block, w, u, g_cumsum, g_cumsum.transpose(1, 2).contiguous())


def scan(x: ScanInputs, backend: str, *, gated: bool = True, g_head_major: bool = False, **options: object):
    """The public op: (h, v_new, final_state)."""
    g = (x.g_cumsum if g_head_major else x.g) if gated else None
    options = {"initial_state": x.block.initial_state, "output_final_state": True} | options
    return chunk_gated_delta_rule_fwd_h(
        x.block.k,
        x.w,
        x.u,
        g,
        cu_seqlens=x.block.cu_seqlens,
        g_head_major=g_head_major,
        backend=backend,
        **options,
    )


def assert_scans_agree(x: ScanInputs, *, what: str = "", **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """Triton against the torch backend. Both round at the same places; only the order of fp32 sums differs, which now
    and then moves a rounding by one bf16 step: v_new and 16-bit snapshots within one step of the largest value (2^-7)
    and 2^-9 in relative L2; states in fp32 within 1e-3."""
    h, v_new, final = scan(x, "triton", **options)
    ref_h, ref_v, ref_final = scan(x, "reference", **options)
    step = torch.finfo(x.block.k.dtype).eps
    n = x.block.num_tokens
    assert_close_on_device(v_new[:, :, :n], ref_v[:, :, :n], step / 4, step, f"{what} v_new")
    assert_close_on_device(h, ref_h, step / 4, step, f"{what} h")
    if final is not None:
        bound = 1e-3 if final.dtype is FP32 else torch.finfo(BF16).eps / 4
        assert_close_on_device(final, ref_final, bound, torch.finfo(BF16).eps, f"{what} final_state")
    return h, v_new, final


@functools.lru_cache(maxsize=1)
def model_inputs(
    shape: tuple[int, ...], batch: int | None, heads: tuple[int, int], state_dtype: torch.dtype
) -> ScanInputs:
    layout = list(shape) if batch is None else (batch, shape[0])
    return scan_inputs(device_inputs(layout, *heads, state_dtype=state_dtype))


@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.id)
def test_model_shapes(case: Case) -> None:
    x = model_inputs(case.seq_lens, case.batch, (case.num_heads, case.num_key_heads), TORCH_DTYPE[case.state_dtype])
    assert_scans_agree(
        x,
        gated=case.gated,
        g_head_major=case.g_head_major,
        output_final_state=case.final_state,
        snapshot_dtype=TORCH_DTYPE[case.snapshot_dtype],
    )


VARIANTS = {
    "default": {},
    "token-major-exp": {"g_head_major": False, "use_exp2": False},
    "no-gate": {"gated": False},
    "key-gate": {"gk": True},
    "key-gate-only": {"gk": True, "gated": False},
    "fp32-snapshots": {"snapshot_dtype": FP32},
    "bf16-state": {"state_dtype": BF16},
    "no-state": {"initial_state": None},
    "fp16": {"dtype": FP16},
    "fp16-fp32-snapshots": {"dtype": FP16, "snapshot_dtype": FP32, "state_dtype": BF16},
}


# Each pair is a kernel to compile: the widths of the rule take every variant, the others those that change tile code.
PAIRS = [(variant, block_v) for block_v in (32, 64) for variant in VARIANTS]
PAIRS += [(variant, block_v) for block_v in (16, 128) for variant in ("default", "no-gate", "fp32-snapshots", "fp16")]


@pytest.mark.parametrize(("variant", "block_v"), PAIRS)
def test_switches_and_tails(variant: str, block_v: int) -> None:
    options = dict(VARIANTS[variant])
    dtype, state_dtype = options.pop("dtype", BF16), options.pop("state_dtype", FP32)
    block = device_inputs([0, *TAILS, 0, 200, 0], 4, 2, dtype=dtype, state_dtype=state_dtype)
    x = scan_inputs(block)
    if not options.get("use_exp2", True):
        x = ScanInputs(block, x.w, x.u, x.g_cumsum * math.log(2.0), x.g * math.log(2.0))
    if options.pop("gk", False):
        options["gk"] = -torch.rand(1, block.num_tokens, 4, 128, device="cuda")
    with env.override(k5_block_v=block_v):
        _, _, final = assert_scans_agree(x, what=variant, **{"g_head_major": True} | options)
    for n, length in enumerate(block.seq_lens):
        if length == 0:
            start = block.initial_state[n] if "initial_state" not in options else torch.zeros_like(final[n])
            assert_equal_on_device(final[n], start, f"final_state of empty sequence {n}")


@pytest.mark.parametrize("dense", [False, True])
def test_rows_past_the_end_are_neither_read_nor_written(dense: bool) -> None:
    for length in TAILS:
        x = scan_inputs(device_inputs((2, length) if dense else [length, length], 4, 2))
        expected = scan(x, "triton", g_head_major=True)
        if dense:
            # [:length] of a longer, poisoned token axis; w and u must be contiguous, so only k can show it.
            k = poisoned(2, length + 64, 2, 128, dtype=BF16, device="cuda")
            k[:, :length] = x.block.k
            padded = ScanInputs(x.block.with_(k=k[:, :length]), x.w, x.u, x.g_cumsum, x.g)
        else:
            padded = padded_by(x, 64)
        h, v_new, final = scan(padded, "triton", g_head_major=True)
        assert_equal_on_device(h, expected[0], "h")
        assert_equal_on_device(v_new[:, :, : x.w.shape[2]], expected[1], "v_new")
        assert_equal_on_device(final, expected[2], "final_state")


def padded_by(x: ScanInputs, rows: int) -> ScanInputs:
    """A varlen call whose token axis has poisoned rows behind the last sequence."""

    def pad(t: Tensor, dim: int) -> Tensor:
        spare = list(t.shape)
        spare[dim] = rows
        return torch.cat([t, poisoned(*spare, dtype=t.dtype, device=t.device)], dim=dim)

    block = x.block.with_(k=pad(x.block.k, 1), v=pad(x.block.v, 1))
    return ScanInputs(block, pad(x.w, 2), pad(x.u, 2), pad(x.g_cumsum, 2), pad(x.g, 1))


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_snapshot_dtype_changes_nothing_but_the_snapshots(state_dtype: torch.dtype) -> None:
    for seed in range(3):
        x = scan_inputs(device_inputs([0, 130, 64, 1, 500], 4, 2, state_dtype=state_dtype, seed=seed))
        wide, narrow = scan(x, "triton", snapshot_dtype=FP32), scan(x, "triton")
        assert_equal_on_device(wide[0].to(BF16), narrow[0], "fp32 snapshots rounded to nearest even")
        assert_equal_on_device(wide[1], narrow[1], "v_new")
        assert_equal_on_device(wide[2], narrow[2], "final_state")


def test_pool_equals_dense_states() -> None:
    block = device_inputs([70, 0, 64, 5, 200], 4, 2)
    x = scan_inputs(block)
    expected = scan(x, "triton")
    for dtype in (torch.int32, torch.int64):
        pool = poisoned(9, 4, 128, 128, device="cuda")
        indices = torch.tensor([8, 0, 3, 5, 1], dtype=dtype, device="cuda")
        pool[indices.long()] = block.initial_state
        h, v_new, final = scan(x, "triton", initial_state=pool, initial_state_indices=indices)
        assert final is pool
        assert_equal_on_device(h, expected[0], "h")
        assert_equal_on_device(v_new, expected[1], "v_new")
        assert_equal_on_device(pool[indices.long()], expected[2], "final_state")
        others = [slot for slot in range(9) if slot not in indices.tolist()]
        assert pool[others].isnan().all()


def test_dense_batch_equals_single_rows() -> None:
    block = device_inputs((3, 200), 4, 2, rate=0.3)
    x = scan_inputs(block)
    together = scan(x, "triton")
    for n in range(3):
        alone = scan(scan_inputs(block.sequence(n)), "triton")
        for got, expected, what in zip(together, alone, ("h", "v_new", "final_state"), strict=True):
            assert_equal_on_device(got[n : n + 1], expected, f"{what} of row {n}")


def test_repeats_are_bit_identical() -> None:
    for layout, heads in (((2, 1500), (4, 2)), ([63], (1, 1)), ([1238, 1199, 0, 519], (32, 16))):
        x = scan_inputs(device_inputs(layout, *heads))
        first = scan(x, "triton")
        for _ in range(20):
            for got, expected, what in zip(scan(x, "triton"), first, ("h", "v_new", "final_state"), strict=True):
                assert_equal_on_device(got, expected, what)


def test_unit_of_the_gate_is_that_of_use_exp2() -> None:
    k = torch.zeros(1, 1, 1, 128, dtype=BF16, device="cuda")
    rows = torch.zeros(1, 1, 1, 128, dtype=BF16, device="cuda")
    g = torch.full((1, 1, 1), -1.0, device="cuda")
    ones = torch.ones(1, 1, 128, 128, device="cuda")
    for use_exp2, factor in ((True, 0.5), (False, math.exp(-1.0))):
        _, _, final = chunk_gated_delta_rule_fwd_h(
            k, rows, rows, g, initial_state=ones, output_final_state=True, use_exp2=use_exp2
        )
        torch.testing.assert_close(final, ones * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("state", ["none", "zeros", "random"])
@pytest.mark.parametrize(
    "layout",
    [[1238, 1199, 1240, 1216, 1187, 1203, 519], [8192] + [1] * 31, [0, 64, 0, 1, 0], [0, 0]],
    ids=["seven", "long-and-ones", "with-empty", "all-empty"],
)
def test_no_hang_and_no_drift_in_100_launches(layout: list[int], state: str) -> None:
    """The shapes of a hang that was reported for another library."""
    x = device_inputs(layout, 48, 16)
    initial = {"none": None, "zeros": torch.zeros_like(x.initial_state), "random": x.initial_state}[state]
    options = {"cu_seqlens": x.cu_seqlens, "initial_state": initial, "output_final_state": True}
    o, final = chunk_gated_delta_rule(*x.tensors, **options)
    with compilations() as compiled:
        for _ in range(100):
            again = chunk_gated_delta_rule(*x.tensors, **options)
        finish_within(60)
    assert compiled == []
    assert_equal_on_device(again[0], o, "o")
    assert_equal_on_device(again[1], final, "final_state")
    begin = 0
    for n, length in enumerate(layout):
        start = torch.zeros_like(final[n]) if initial is None else initial[n]
        if length == 0:
            assert_equal_on_device(final[n], start, f"final_state of empty sequence {n}")
        elif n < 3:
            cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
            alone = [t[:, begin : begin + length].contiguous() for t in x.tensors]
            solo = chunk_gated_delta_rule(*alone, **options | {"cu_seqlens": cu, "initial_state": start[None]})
            step = torch.finfo(BF16).eps
            assert_close_on_device(o[:, begin : begin + length], solo[0], step / 4, step, f"o of sequence {n}")
            assert_close_on_device(final[n : n + 1], solo[1], 1e-3, step, f"final_state of sequence {n}")
        begin += length
