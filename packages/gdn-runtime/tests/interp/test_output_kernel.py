"""K6 under Triton's interpreter, against the torch backend and the formula in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import reference
from gdn_runtime.ops.backends import stages
from gdn_runtime.spec import OutputConfig
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, assert_finite, make_inputs
from gdn_testing import plan_for, poisoned, problem_of, run_stages, triton_specs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TAILS = [1, 15, 16, 17, 63, 64, 65, 127]
SCALE = 128**-0.5

# Relative L2. Against the torch backend, which rounds at the same places.
SAME_ROUNDING = 1e-4
# Against the formula in fp64: the attention is rounded, and o itself. Measured: 2.4e-3 in bf16, an eighth in fp16.
FORMULA = {BF16: 3e-3, FP16: 4e-4}


@dataclass(frozen=True)
class Outputs:
    """What K6 reads. Rows outside the sequences are NaN in every tensor that has rows. ``g`` is [B, H, T], log2."""

    inputs: GdnInputs
    v_new: Tensor
    h: Tensor
    g: Tensor


def outputs_of(inputs: GdnInputs, snapshot_dtype: torch.dtype | None = None) -> Outputs:
    """v_new, snapshots and gates of the torch backend."""
    result = run_stages(reference, inputs, snapshot_dtype=snapshot_dtype)
    return Outputs(inputs, result.v_new, result.h, result.g_cumsum)


def run(
    x: Outputs, *, backend: Any = None, block_v: int = 128, use_exp2: bool = True, o: Tensor | None = None
) -> Tensor:
    q, k, v, _, _ = x.inputs.tensors
    o = poisoned(*v.shape, dtype=v.dtype) if o is None else o
    (backend or stages("triton")).output(
        q,
        k,
        x.v_new,
        x.h,
        x.g if use_exp2 else x.g * math.log(2.0),
        o=o,
        scale=SCALE,
        plan=plan_for(x.inputs),
        use_exp2=use_exp2,
        spec=triton_specs(problem_of(x.inputs), output=OutputConfig(block_v)).output,
    )
    return o


def formula(x: Outputs) -> Tensor:
    """o [B, T, H, V] in fp64; zero outside the sequences."""
    inputs = x.inputs
    group = inputs.num_heads // inputs.num_key_heads
    o = torch.zeros(inputs.v.shape, dtype=torch.float64)
    packed = inputs.cu_seqlens is not None
    snapshots = x.h.flatten(0, 1).to(inputs.q.dtype).double()
    begin = chunk = 0
    for n, length in enumerate(inputs.seq_lens):
        row, first = (0, begin) if packed else (n, 0)
        for start in range(first, first + length, 64):
            tokens = slice(start, min(start + 64, first + length))
            q, k = (
                t[row, tokens].double().repeat_interleave(group, dim=1).transpose(0, 1) for t in (inputs.q, inputs.k)
            )
            gate = x.g[row, :, tokens].double() * math.log(2.0)
            decay = (gate[:, :, None] - gate[:, None, :]).exp().tril()
            inter = gate.exp()[..., None] * (q @ snapshots[chunk].transpose(1, 2))
            intra = (q @ k.transpose(1, 2) * decay) @ x.v_new[row, :, tokens].double()
            o[row, tokens] = (SCALE * (inter + intra)).transpose(0, 1)
            chunk += 1
        begin += length
    return o


def check(x: Outputs, **options: Any) -> Tensor:
    o = run(x, **options)
    n = x.inputs.num_tokens
    assert_finite(o[:, :n], "o")
    assert o[:, n:].isnan().all(), "o: a spare row was written"
    assert_close_rel(o[:, :n], run(x, backend=reference, **options)[:, :n], SAME_ROUNDING, "o")
    assert_close_rel(o[:, :n], formula(x)[:, :n], FORMULA[x.inputs.q.dtype], "o by the formula")
    return o


@pytest.mark.parametrize(
    ("block_v", "lens", "use_exp2"),
    [
        (16, [1, 17, 65], True),
        (32, [15, 63, 127], False),
        (64, TAILS, True),
        (128, TAILS, False),
    ],
)
def test_tails(block_v: int, lens: list[int], use_exp2: bool) -> None:
    inputs = make_inputs(lens, 1, 1, gate="weak", state="random", spare_rows=64)
    check(outputs_of(inputs), block_v=block_v, use_exp2=use_exp2)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("snapshot_dtype", [None, FP32])
def test_dtypes_and_empty_sequences(dtype: torch.dtype, snapshot_dtype: torch.dtype | None) -> None:
    inputs = make_inputs([0, 65, 0, 1, 0], 1, 1, dtype=dtype, state="random", spare_rows=64)
    check(outputs_of(inputs, snapshot_dtype))


def test_fp32_snapshots_are_rounded_to_nearest_even() -> None:
    x = outputs_of(make_inputs([65], 1, 1, state="random"), FP32)
    assert_bitwise_equal(run(x), run(replace(x, h=x.h.to(BF16))), "o")


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_heads_and_batch_rows(heads: tuple[int, int], dense: bool) -> None:
    """Gates differ by row and head; the rows behind a sequence in v_new and g are those of the next head."""
    inputs = make_inputs((2, 65) if dense else [65], *heads, gate="mixed", state="random", spare_rows=64)
    x = outputs_of(inputs)
    o = check(x)
    if dense:
        for n in range(2):
            alone = Outputs(inputs.sequence(n), x.v_new[n : n + 1], x.h[n : n + 1], x.g[n : n + 1])
            assert_bitwise_equal(o[n : n + 1], run(alone), f"o of row {n}")


@pytest.mark.parametrize("gate", ["zero", "closed", "minus100", "alternating"])
def test_gate_extremes(gate: Any) -> None:
    check(outputs_of(make_inputs([128, 7], 2, 1, gate=gate, state="random", spare_rows=3)))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_strided_views(offset: int, dense: bool) -> None:
    """q and k share rows with something else, o is a part of wider rows; offset 3 forbids 16-byte accesses."""
    inputs = make_inputs((2, 65) if dense else [65, 3], 2, 1, state="random")
    x = outputs_of(inputs)
    batch, tokens = inputs.q.shape[:2]
    fused = poisoned(batch, tokens, 3 * 128 + 8, dtype=BF16)
    q, k = (fused[..., offset + at : offset + at + 128].unflatten(-1, (1, 128)) for at in (0, 128))
    q.copy_(inputs.q)
    k.copy_(inputs.k)
    wide = poisoned(batch, tokens, 2, 160, dtype=BF16)
    o = run(replace(x, inputs=inputs.with_(q=q, k=k)), o=wide[..., 8 + offset : 136 + offset])
    assert_bitwise_equal(o, run(x), "o")
    assert wide[..., : 8 + offset].isnan().all() and wide[..., 136 + offset :].isnan().all()


def test_no_chunk_no_launch() -> None:
    x = outputs_of(make_inputs([0, 0], 1, 1, spare_rows=5))
    assert run(x).isnan().all()
