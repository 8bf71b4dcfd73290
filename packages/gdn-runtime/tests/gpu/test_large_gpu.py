"""Long prompts, and tensors of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gdn_runtime import chunk_gated_delta_rule, env
from gdn_runtime.testing import CASES, Case, GdnInputs
from gdn_testing.device import assert_close_on_device, assert_equal_on_device, device_inputs

LONG = [case for case in CASES.values() if max(case.seq_lens) >= 60000]
GIB = 1 << 30
INT32 = 2**31


def need(gib: int) -> None:
    """Skip unless so much memory can be had."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free device memory, has {free / GIB:.0f}")


def run(x: GdnInputs, **options: object) -> tuple[Tensor, Tensor]:
    options = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens} | options
    return chunk_gated_delta_rule(*x.tensors, **options)


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.id)
def test_long_prompts_against_the_torch_backend(case: Case) -> None:
    """The recurrence would take a minute each; the torch backend is held to it at 8192 tokens elsewhere.

    The gate keeps a state alive for hundreds of tokens, so the two differ by as much as either is off (see
    ``assert_backends_agree`` in test_block_gpu.py): o by 3.5e-3, measured.
    """
    need(40)
    x = device_inputs((1, case.seq_lens[0]), case.num_heads, case.num_key_heads, rate=0.005)
    with env.override(prefill="staged"):  # the torch backend rounds where the stages do
        o, final = run(x)
    ref_o, ref_final = run(x, backend="reference")
    step = torch.finfo(torch.bfloat16).eps
    assert_close_on_device(o, ref_o, 5e-3, step, "o")
    assert_close_on_device(final, ref_final, 5e-3, step, "final_state")


@pytest.mark.parametrize(
    ("shape", "past"),
    [
        ([90000] * 3, "packed: h, w, u, v_new, v and o"),
        ((3, 90000), "dense batch: h, w, u, v_new, v and o"),
        ([45000] * 3, "packed: h"),
        ((1, 134400), "one row: h"),
    ],
    ids=["3x90000-packed", "3x90000-dense", "3x45000-packed", "134400-dense"],
)
@pytest.mark.parametrize("snapshot_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_offsets_past_2_to_the_31(shape: list[int] | tuple[int, int], past: str, snapshot_dtype: torch.dtype) -> None:
    """The part behind element 2^31 against a run of its own, whose tensors are small."""
    num_heads, num_key_heads = 64, 16
    tokens = sum(shape) if isinstance(shape, list) else shape[0] * shape[1]
    chunks = sum(-(-n // 64) for n in shape) if isinstance(shape, list) else shape[0] * -(-shape[1] // 64)
    assert chunks * num_heads * 128 * 128 > INT32
    if "w" in past.split(":")[1]:
        assert tokens * num_heads * 128 > INT32
    need(64 if tokens > 200000 else 36)
    x = device_inputs(shape, num_heads, num_key_heads, rate=0.005)
    o, final = run(x, snapshot_dtype=snapshot_dtype)
    if isinstance(shape, list) or shape[0] > 1:
        last = x.num_seqs - 1
        alone = x.sequence(last)
        rows = o[:, -shape[-1] :] if isinstance(shape, list) else o[last:]
        if isinstance(shape, list):
            cu = torch.tensor([0, shape[-1]], dtype=torch.int32, device="cuda")
            alone = alone.with_(cu_seqlens=cu)
        solo_o, solo_final = run(alone, snapshot_dtype=snapshot_dtype)
        step = torch.finfo(torch.bfloat16).eps
        # Not bit for bit: the rule for K5 may choose another tile width for one sequence.
        assert_close_on_device(rows, solo_o, step / 4, step, "o of the last sequence")
        assert_close_on_device(final[last:], solo_final, 1e-3, step, "final state of the last sequence")
        return
    # One row: resume its last chunks from the state that the tokens in front of them leave.
    cut = 130048
    assert (cut // 64) * num_heads * 128 * 128 < INT32 < chunks * num_heads * 128 * 128
    _, middle = run(x.tokens(0, cut, x.initial_state), snapshot_dtype=snapshot_dtype)
    tail_o, tail_final = run(x.tokens(cut, tokens, middle), snapshot_dtype=snapshot_dtype)
    assert_equal_on_device(o[:, cut:], tail_o, "o behind the cut")
    assert_equal_on_device(final, tail_final, "final state")
