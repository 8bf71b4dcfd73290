"""What a call refuses: in words, before anything is allocated or launched, and with nothing of the caller's changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime.errors import UnsupportedError
from pa_decode import explain, make_workspace, pa_decode, plan_decode
from pa_testing import OracleKernels, arguments_of, geometry_of, make_inputs

INPUTS = make_inputs([40, 0, 3], head_dim=64, group=3, query_length=2, sinks=True)
TOKEN = make_inputs([40, 0, 3], head_dim=64, group=3, query_length=2, scale_mode="token")
GEOMETRY = geometry_of(INPUTS, compute_units=256)
Q, K, V, TABLE, LENGTHS = INPUTS.query, INPUTS.k_cache, INPUTS.v_cache, INPUTS.block_tables, INPUTS.seq_lens


def per_token(change: Any) -> dict[str, Any]:
    return {"k_scale": TOKEN.k_scale, "v_scale": change(TOKEN.v_scale)}


def offset(x: Tensor) -> Tensor:
    """``x`` at an address that is one byte off."""
    memory = torch.zeros(x.numel() + 1, dtype=torch.uint8)
    memory[1:] = x.view(torch.uint8).flatten()
    return memory[1:].view(x.dtype).view(x.shape)


@dataclass(frozen=True)
class Bad:
    changes: dict[str, Any]
    error: type[Exception]
    message: str


BAD: dict[str, Bad] = {
    # query
    "query type": Bad({"query": [1.0]}, TypeError, r"query: got list, expected a torch.Tensor"),
    "query fp32": Bad({"query": Q.float()}, TypeError, r"query.dtype: got torch.float32, expected torch.bfloat16 or"),
    "query fp8": Bad({"query": Q.to(torch.float8_e4m3fn)}, UnsupportedError, r"query.dtype: .*the kernels quantise it"),
    "query rank": Bad(
        {"query": Q.flatten(1)}, ValueError, r"query.shape: got \[6, 384\], expected \[batch \* query_len"
    ),
    "query head size": Bad({"query": Q[..., :32]}, ValueError, r"query.shape: got \[6, 6, 32\], expected .* 64\]"),
    "query heads": Bad({"query": Q[:, :5]}, ValueError, r"query.shape\[1\]: got 5, expected a multiple of the 2 KV"),
    "no query heads": Bad({"query": Q[:, :0]}, ValueError, r"query.shape\[1\]: got 0"),
    "query rows": Bad(
        {"query": Q[:5]}, ValueError, r"query.shape\[0\]: got 5, expected a multiple of query_length = 2"
    ),
    "query stride": Bad({"query": Q.repeat(1, 1, 2)[..., ::2]}, ValueError, r"query.stride\(-1\): got 2"),
    "query device": Bad({"query": Q.to("meta")}, ValueError, r"query.device: got meta, expected that of k_cache, cpu"),
    "query gradient": Bad({"query": Q.clone().requires_grad_()}, UnsupportedError, r"query.requires_grad"),
    # caches
    "k type": Bad({"k_cache": None}, TypeError, r"k_cache: got NoneType"),
    "k dtype": Bad(
        {"k_cache": K.float()}, TypeError, r"k_cache.dtype: got torch.float32, expected torch.float8_e4m3fn or"
    ),
    "k fnuz": Bad(
        {"k_cache": K.view(torch.float8_e4m3fnuz)}, TypeError, r"v_cache.dtype: got torch.float8_e4m3fn, exp"
    ),
    "flavour": Bad(
        {"k_cache": K.view(torch.float8_e4m3fnuz), "v_cache": V.view(torch.float8_e4m3fnuz)},
        TypeError,
        r"k_cache.dtype: got torch.float8_e4m3fnuz, expected torch.float8_e4m3fn, the FP8 flavour of the architecture",
    ),
    "k 4-D": Bad({"k_cache": K.flatten(3)}, NotImplementedError, r"pa_decode.pack_k repacks"),
    "k rank": Bad({"k_cache": K.flatten()}, ValueError, r"k_cache.shape"),
    "k strided": Bad({"k_cache": K.repeat(2, 1, 1, 1, 1)[::2]}, ValueError, r"k_cache.stride\(\)"),
    "k address": Bad({"k_cache": offset(K)}, ValueError, r"k_cache.data_ptr\(\): .*multiple of 16"),
    "v type": Bad({"v_cache": 3}, TypeError, r"v_cache: got int"),
    "v shape": Bad({"v_cache": V[:, :1]}, ValueError, r"v_cache.shape"),
    "v longer": Bad({"v_cache": V.repeat(2, 1, 1, 1, 1)}, ValueError, r"v_cache.shape\[0\]"),
    "page 32": Bad(
        {"k_cache": K.new_zeros(2, 2, 4, 32, 16), "v_cache": K.new_zeros(2, 2, 2, 64, 16)},
        UnsupportedError,
        r"page size: got 32, supported: 16, 64, 128",
    ),
    "head size 32": Bad(
        {
            "query": Q[..., :32].contiguous(),
            "k_cache": K[:, :, :2].contiguous(),
            "v_cache": V[..., :32, :].contiguous(),
        },
        UnsupportedError,
        r"head size: got 32, supported: 64, 128, 256",
    ),
    # table, lengths
    "table type": Bad({"block_tables": [[0]]}, TypeError, r"block_tables: got list"),
    "table int64": Bad({"block_tables": TABLE.long()}, TypeError, r"block_tables.dtype: got torch.int64"),
    "table rows": Bad({"block_tables": TABLE[:2]}, ValueError, r"block_tables.shape: got \[2, 4\], expected \[3, "),
    "table strided": Bad({"block_tables": TABLE[:, ::2]}, ValueError, r"block_tables.stride\(1\): got 2"),
    "lengths int64": Bad({"seq_lens": LENGTHS.long()}, TypeError, r"seq_lens.dtype: got torch.int64"),
    "lengths count": Bad({"seq_lens": LENGTHS[:2]}, ValueError, r"seq_lens.shape: got \[2\], expected \[3\]"),
    "lengths strided": Bad({"seq_lens": LENGTHS.repeat(2)[::2]}, ValueError, r"seq_lens.stride\(\)"),
    "lengths elsewhere": Bad({"seq_lens": LENGTHS.to("meta")}, ValueError, r"seq_lens.device: got meta"),
    # scales
    "one scale": Bad({"v_scale": None}, ValueError, r"scales: got k_scale per tensor, v_scale absent"),
    "mixed scales": Bad({"v_scale": TOKEN.v_scale}, ValueError, r"k_scale per tensor, v_scale per token"),
    "scale dtype": Bad({"k_scale": torch.ones(1).half()}, TypeError, r"k_scale.dtype: got torch.float16"),
    "scale text": Bad({"k_scale": "1"}, TypeError, r"k_scale: got str"),
    "scale elements": Bad({"k_scale": torch.ones(2)}, ValueError, r"k_scale.shape: got \[2\]"),
    "scale pages": Bad(per_token(lambda s: s[1:]), ValueError, r"v_scale.shape"),
    "scale strides": Bad(per_token(lambda s: s.repeat(1, 2, 1)[:, :2]), ValueError, r"v_scale: .*those of k_scale"),
    "scale tokens": Bad(per_token(lambda s: s.repeat(1, 1, 2)[..., ::2]), ValueError, r"v_scale.stride\(2\): got 2"),
    "scale elsewhere": Bad({"k_scale": torch.ones(1, device="meta")}, ValueError, r"k_scale.device: got meta"),
    # sinks
    "sinks type": Bad({"sinks": 0.0}, TypeError, r"sinks: got float"),
    "sinks dtype": Bad({"sinks": torch.zeros(6, dtype=torch.float64)}, TypeError, r"sinks.dtype: got torch.float64"),
    "sinks heads": Bad(
        {"sinks": torch.zeros(5)}, ValueError, r"sinks: got \[5\], .* expected \[6\], one per query head"
    ),
    "sinks strided": Bad({"sinks": torch.zeros(12)[::2]}, ValueError, r"sinks: got \[6\], strides \[2\]"),
    "sinks elsewhere": Bad({"sinks": torch.zeros(6, device="meta")}, ValueError, r"sinks.device: got meta"),
    # numbers
    "softmax_scale text": Bad({"softmax_scale": "1"}, TypeError, r"softmax_scale: got str"),
    "softmax_scale nan": Bad(
        {"softmax_scale": math.nan}, ValueError, r"softmax_scale: got nan, expected a finite float"
    ),
    "softmax_scale bool": Bad({"softmax_scale": True}, TypeError, r"softmax_scale: got bool"),
    "query_length 0": Bad({"query_length": 0}, ValueError, r"query_length: got 0, expected an int >= 1"),
    "query_length float": Bad({"query_length": 2.0}, TypeError, r"query_length: got float"),
    "rows": Bad(
        {"query": Q.repeat(3, 8, 1), "query_length": 6, "sinks": None},
        UnsupportedError,
        r"query rows per KV head: got query length 6 x 24 heads per KV head",
    ),
    "window": Bad({"sliding_window": -2}, ValueError, r"sliding_window: got -2"),
    "window bool": Bad({"sliding_window": True}, TypeError, r"sliding_window: got bool"),
    "window left": Bad({"window_left": -2}, ValueError, r"window_left: got -2"),
    "both windows": Bad(
        {"window_left": 3, "sliding_window": 4}, ValueError, r"window_left: got 3 beside sliding_window=4"
    ),
    # offsets
    "ragged offsets": Bad({"cu_seqlens_q": [0, 1, 4, 6]}, UnsupportedError, r"cu_seqlens_q: got \[0, 1, 4, 6\], supp"),
    "offsets from 1": Bad(
        {"cu_seqlens_q": torch.arange(1, 8, 2)}, UnsupportedError, r"cu_seqlens_q: got \[1, 3, 5, 7\]"
    ),
    "offsets count": Bad(
        {"cu_seqlens_q": [0, 2, 4]}, ValueError, r"cu_seqlens_q: got 2 sequences, expected 6 query rows"
    ),
    "offsets dtype": Bad({"cu_seqlens_q": torch.zeros(4)}, TypeError, r"cu_seqlens_q.dtype: got torch.float32"),
    "offsets rank": Bad({"cu_seqlens_q": torch.zeros(2, 2).int()}, ValueError, r"cu_seqlens_q.shape: got \[2, 2\]"),
    "offsets text": Bad({"cu_seqlens_q": "0246"}, TypeError, r"cu_seqlens_q: got str"),
    "offset type": Bad({"cu_seqlens_q": [0, 2.0, 4, 6]}, TypeError, r"cu_seqlens_q\[1\]: got float"),
    "no offsets": Bad({"cu_seqlens_q": []}, ValueError, r"cu_seqlens_q: got no entry"),
    # out
    "out shape": Bad({"out": torch.zeros(6, 6, 32).bfloat16()}, ValueError, r"out.shape: got \[6, 6, 32\]"),
    "out dtype": Bad(
        {"out": torch.zeros(6, 6, 64).half()}, TypeError, r"out.dtype: got torch.float16, expected bfloat16"
    ),
    "out is query": Bad({"out": Q}, ValueError, r"out: got memory shared with query"),
    "out overlaps itself": Bad({"out": Q[:1].clone().expand(6, 6, 64)}, ValueError, r"out.stride\(\)"),
    "out strided": Bad({"out": Q.repeat(1, 1, 2)[..., ::2]}, ValueError, r"out.stride\(-1\): got 2"),
    "out type": Bad({"out": "out"}, TypeError, r"out: got str"),
    # backends, plans
    "backend": Bad(
        {"backend": "hip"}, UnsupportedError, r"backend on cpu: got 'hip', supported: reference \(available\)"
    ),
    "backend type": Bad({"backend": None}, TypeError, r"backend: got NoneType, expected str"),
    "kernel": Bad({"kernel": "fast"}, UnsupportedError, r"kernel: got fast, supported: d256_pipe, hopper, attention"),
    "kernel type": Bad({"kernel": 1}, TypeError, r"kernel: got int"),
    "kernel of another arch": Bad(
        {"kernel": "hopper"}, UnsupportedError, r"arch of hopper: got gfx950, supported: sm90"
    ),
    "kernel of other shapes": Bad({"kernel": "d256_pipe"}, UnsupportedError, r"problem of d256_pipe: got head size 64"),
    "arch": Bad({"arch": "gfx1100"}, UnsupportedError, r"arch: got 'gfx1100', supported:"),
    "arch type": Bad({"arch": 950}, TypeError, r"arch: got int"),
    "plan type": Bad({"plan": (1, 2)}, TypeError, r"plan: got tuple, expected a DecodePlan or None"),
    "workspace type": Bad({"workspace": {}}, TypeError, r"workspace: got dict, expected a DecodeWorkspace or None"),
}


def tensors_of(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor) and x.device.type == "cpu"}


def bytes_of(given: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: bytes(x.detach().contiguous().view(torch.uint8).flatten().tolist())
        for name, x in tensors_of(given).items()
    }


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("with_plan", [False, True])
def test_refused(oracle: OracleKernels, monkeypatch: pytest.MonkeyPatch, case: str, with_plan: bool) -> None:
    bad = BAD[case]
    good = arguments_of(INPUTS, backend="emulate", arch="gfx950")
    if with_plan:
        plan = plan_decode(LENGTHS, GEOMETRY, backend="emulate")
        good |= {"plan": plan, "workspace": make_workspace(plan, GEOMETRY)}
        assert pa_decode(**good).isfinite().all()  # a warm call is refused as a cold one
        oracle.launches.clear()
    given = good | bad.changes
    before, versions = bytes_of(given), {name: x._version for name, x in tensors_of(given).items()}
    for name in ("empty", "empty_like", "full", "zeros"):
        monkeypatch.setattr(torch, name, None)
    with pytest.raises(bad.error, match=bad.message):
        pa_decode(**given)
    with pytest.raises(bad.error, match=bad.message):
        explain(**given)
    monkeypatch.undo()
    assert not oracle.launches and bytes_of(given) == before
    assert versions == {name: x._version for name, x in tensors_of(given).items()}


def test_extensions_that_do_not_exist() -> None:
    """Refused as Python refuses an unknown argument: nothing is ignored."""
    for name in ("alibi_slopes", "logits_soft_cap", "q_scale", "max_seq_len"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            pa_decode(**arguments_of(INPUTS, **{name: 1.0}))


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch": 2}, "batch of the plan: got 2, expected 3, as in the call"),
    "kv heads": ({"num_heads": 3, "num_kv_heads": 1}, "num_kv_heads of the plan: got 1, expected 2"),
    "window": ({"window": 7}, "window of the plan: got 7, expected 0"),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_for_something_else(oracle: OracleKernels, case: str) -> None:
    changes, message = PLANS[case]
    geometry = replace(GEOMETRY, **changes)
    plan = plan_decode(LENGTHS[: geometry.batch], geometry, backend="emulate")
    oracle.launches.clear()
    with pytest.raises(ValueError, match=message):
        pa_decode(**arguments_of(INPUTS, backend="emulate", arch="gfx950", plan=plan))
    with pytest.raises(ValueError, match=message):  # the reference needs no plan, a wrong one is wrong all the same
        pa_decode(**arguments_of(INPUTS, plan=plan))
    assert not oracle.launches


def test_plans_with_a_window_are_for_one_query_length(oracle: OracleKernels) -> None:
    plan = plan_decode(LENGTHS, replace(GEOMETRY, window=7, query_length=3), backend="emulate")
    with pytest.raises(ValueError, match="query_length of the plan: got 3, expected 2"):
        pa_decode(**arguments_of(INPUTS, backend="emulate", arch="gfx950", plan=plan, sliding_window=7))
    dense = plan_decode(LENGTHS, replace(GEOMETRY, query_length=3), backend="emulate")
    assert pa_decode(**arguments_of(INPUTS, backend="emulate", arch="gfx950", plan=dense)).isfinite().all()


def test_workspaces_for_something_else(oracle: OracleKernels) -> None:
    plan = plan_decode(LENGTHS, GEOMETRY, backend="emulate")
    given = arguments_of(INPUTS, backend="emulate", arch="gfx950")
    for changes in ({"query_length": 1}, {"query_dtype": "fp16"}, {"head_dim": 128}):
        other = make_workspace(plan, replace(GEOMETRY, **changes))
        with pytest.raises(ValueError, match=r"partial_\w+ of the workspace: got .*, as make_workspace"):
            pa_decode(**given, plan=plan, workspace=other)
        with pytest.raises(ValueError, match=r"partial_\w+ of the workspace"):  # the plan that it would make
            pa_decode(**given, workspace=other)
    fits = make_workspace(plan, GEOMETRY)
    assert torch.equal(pa_decode(**given, workspace=fits), pa_decode(**given, plan=plan))
    with pytest.raises(ValueError, match=r"partial_max.stride\(\)"):
        replace(fits, partial_max=fits.partial_max.transpose(0, 1))
    with pytest.raises(ValueError, match=r"partial_sum.data_ptr\(\): .*multiple of 16"):
        replace(fits, partial_sum=torch.empty(fits.partial_sum.numel() + 1)[1:].view(fits.partial_sum.shape))
    with pytest.raises(TypeError, match="partial_sum: got NoneType"):
        replace(fits, partial_sum=None)  # type: ignore[arg-type]
