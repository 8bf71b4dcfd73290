"""What the block refuses (data, output, flags, backends): the error, its words, and that nothing happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn_runtime
from gdn_runtime import UnsupportedError, chunk_gated_delta_rule
from gdn_testing.refusals import (
    NAMES,
    Args,
    Change,
    H,
    T,
    at,
    dense,
    each,
    gap_in_rows,
    meta,
    packed,
    pooled,
    put,
    refuse,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def sharing(name: str) -> Change:
    """``o`` in the memory of argument ``name``."""

    def change(args: Args) -> Args:
        x, like = args[name], args["v"]
        size = max(x.numel() * x.element_size(), like.numel() * like.element_size())
        buffer = torch.zeros(size, dtype=torch.uint8)
        inside = buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)
        return {name: inside, "o": buffer[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)}

    return change


def interleaved(args: Args) -> Args:
    rows = torch.zeros(*args["v"].shape[:2], 2, H, 128, dtype=BF16)
    return {"v": rows[:, :, 0], "o": rows[:, :, 1]}


def new_o(**options: Any) -> Change:
    return lambda args: {"o": torch.zeros_like(args["v"], **options)}


TENSOR = "expected a torch.Tensor"
ROWS = "expected 1 (contiguous rows)"
DATA = "bfloat16 or float16"
NO_GRAD = "requires_grad in grad mode (there is no backward): got True, supported: torch.no_grad()"
REFUSED: list[tuple[Callable[[], Args], Change, type[Exception], str]] = [
    # tensors at all
    (dense, put(g=None), TypeError, f"g: got NoneType, {TENSOR}"),
    (dense, put(beta=None), TypeError, f"beta: got NoneType, {TENSOR}"),
    (dense, put(q=None), TypeError, f"q: got NoneType, {TENSOR}"),
    (dense, put(k=[1.0]), TypeError, f"k: got list, {TENSOR}"),
    (dense, put(v=3), TypeError, f"v: got int, {TENSOR}"),
    # ranks and shapes
    (dense, at("q", lambda x: x[0]), ValueError, "q.shape: got [70, 2, 128], expected [B,T,Hg,K]"),
    (dense, at("k", lambda x: x[0]), ValueError, "k.shape: got [70, 2, 128], expected [B,T,Hg,K]"),
    (dense, at("v", lambda x: x[None]), ValueError, "v.shape: got [1, 2, 70, 4, 128], expected [B,T,H,V]"),
    (dense, at("k", lambda x: x[:, :69]), ValueError, "k.shape: got [2, 69, 2, 128], expected [2, 70, 2, 128]"),
    (dense, at("k", lambda x: x[:, :, :1]), ValueError, "k.shape: got [2, 70, 1, 128], expected [2, 70, 2, 128]"),
    (dense, at("k", lambda x: x[..., :64]), ValueError, "k.shape: got [2, 70, 2, 64], expected [2, 70, 2, 128]"),
    (dense, at("v", lambda x: x[:1]), ValueError, "v.shape: got [1, 70, 4, 128], expected [2, 70, 4, 128]"),
    (dense, at("g", lambda x: x[0]), ValueError, "g.shape: got [70, 4], expected [2, 70, 4]"),
    (dense, at("g", lambda x: x.mT), ValueError, "g.shape: got [2, 4, 70], expected [2, 70, 4]"),
    (dense, at("beta", lambda x: x[..., :2]), ValueError, "beta.shape: got [2, 70, 2], expected [2, 70, 4]"),
    (
        dense,
        each("qkv", lambda x: x[..., :64].contiguous()),
        UnsupportedError,
        "head size: got K=64, V=64, supported: K=V=128",
    ),
    (dense, at("v", lambda x: x[..., :64]), UnsupportedError, "head size: got K=128, V=64, supported: K=V=128"),
    (
        dense,
        each(("v", "g", "beta"), lambda x: x[:, :, :3]),
        ValueError,
        "heads: got H=3 value heads, Hg=2 key heads, expected H a positive multiple of Hg >= 1",
    ),
    (dense, each("qk", lambda x: x[:, :, :0]), ValueError, "heads: got H=4 value heads, Hg=0"),
    (dense, at("v", lambda x: x[:, :, :0]), ValueError, "heads: got H=0 value heads, Hg=2"),
    # dtypes
    (dense, at("q", Tensor.float), TypeError, f"q.dtype: got torch.float32, expected {DATA}"),
    (dense, at("k", Tensor.half), TypeError, "k.dtype: got torch.float16, expected bfloat16"),
    (dense, at("v", Tensor.half), TypeError, "v.dtype: got torch.float16, expected bfloat16"),
    (dense, at("g", Tensor.bfloat16), TypeError, "g.dtype: got torch.bfloat16, expected float32"),
    (dense, at("beta", Tensor.double), TypeError, "beta.dtype: got torch.float64, expected float32 or bfloat16"),
    # devices
    *(
        (pooled, at(name, meta), ValueError, f"{name}.device: got meta, expected cpu")
        for name in ("k", "v", "g", "beta", "cu_seqlens", "initial_state", "initial_state_indices")
    ),
    (dense, each((*NAMES, "initial_state"), meta), UnsupportedError, "device type: got meta"),
    (dense, new_o(device="meta"), ValueError, "o.device: got meta, expected cpu"),
    (
        packed,
        put(has_initial_state=torch.ones(2, dtype=torch.bool, device="meta")),
        ValueError,
        "has_initial_state.device",
    ),
    # strides
    *((dense, at(name, gap_in_rows), ValueError, f"{name}.stride(-1): got 2, {ROWS}") for name in "qkv"),
    # o
    (dense, put(o=[1]), TypeError, f"o: got list, {TENSOR}"),
    (dense, new_o(dtype=FP32), TypeError, "o.dtype: got torch.float32, expected bfloat16"),
    (dense, put(o=torch.zeros(2, 71, H, 128, dtype=BF16)), ValueError, "o.shape: got [2, 71, 4, 128], expected [2, 70"),
    (dense, put(o=torch.zeros(2, T, H, 256, dtype=BF16)[..., ::2]), ValueError, f"o.stride(-1): got 2, {ROWS}"),
    (
        dense,
        put(o=torch.zeros(2, 1, H, 128, dtype=BF16).expand(2, T, H, 128)),
        ValueError,
        "o.stride(): got [512, 0, 128, 1], expected every element at an address of its own",
    ),
    *((dense, sharing(n), ValueError, f"o: got memory shared with {n}, expected") for n in (*NAMES, "initial_state")),
    *(
        (pooled, sharing(name), ValueError, f"o: got memory shared with {name}, expected memory of its own")
        for name in ("cu_seqlens", "initial_state", "initial_state_indices")
    ),
    (dense, interleaved, ValueError, "o: got memory shared with v, expected memory of its own"),
    (dense, lambda args: {"o": args["v"]}, ValueError, "o: got memory shared with v"),
    # scale
    *(
        (dense, put(scale=s), ValueError, f"scale: got {s}, expected a finite float")
        for s in (float("nan"), -float("inf"))
    ),
    (dense, put(scale="0.1"), TypeError, "scale: got str, expected float or None"),
    (dense, put(scale=True), TypeError, "scale: got bool, expected float or None"),
    (dense, put(scale=torch.tensor(0.1)), TypeError, "scale: got Tensor, expected float or None"),
    # snapshots
    (dense, put(snapshot_dtype=FP16), ValueError, "snapshot_dtype: got torch.float16, expected float32 or bfloat16"),
    (dense, put(snapshot_dtype=FP64), ValueError, "snapshot_dtype: got torch.float64, expected float32 or bfloat16"),
    (dense, put(snapshot_dtype="bf16"), ValueError, "snapshot_dtype: got bf16, expected float32 or bfloat16"),
    # backend and arch
    (dense, put(backend="cuda"), UnsupportedError, "backend on cpu: got 'cuda', supported: reference (available: "),
    (dense, put(backend=None), TypeError, "backend: got NoneType, expected str"),
    (dense, put(prepare_backend=1), TypeError, "prepare_backend: got int, expected str"),
    (
        dense,
        put(prepare_backend="flydsl"),
        UnsupportedError,
        "prepare_backend on cpu: got 'flydsl', supported: reference",
    ),
    (dense, put(arch="sm90"), UnsupportedError, "arch for tensors on cpu: got 'sm90', supported: cpu"),
    (dense, put(arch="gfx1"), UnsupportedError, "arch: got 'gfx1', supported: gfx942, gfx950"),
    (dense, put(arch=950), TypeError, "arch: got int, expected str"),
    # flags
    *(
        (dense, put(**{flag: value}), TypeError, f"{flag}: got {type(value).__name__}, expected bool")
        for flag in (
            "output_final_state",
            "use_qk_l2norm_in_kernel",
            "use_exp2",
            "inplace_final_state",
            "check_indices",
        )
        for value in (1, torch.tensor(True))
    ),
    # no backward
    *(
        (dense, at(name, lambda x: x.clone().requires_grad_()), UnsupportedError, f"{name}.{NO_GRAD}")
        for name in (*NAMES, "initial_state")
    ),
    (dense, lambda args: {"o": torch.zeros_like(args["v"]).requires_grad_()}, UnsupportedError, f"o.{NO_GRAD}"),
]


@pytest.mark.parametrize(("base", "change", "error", "message"), REFUSED, ids=[case[3][:60] for case in REFUSED])
def test_refused(base: Callable[[], Args], change: Change, error: type[Exception], message: str) -> None:
    args = base()
    refuse(chunk_gated_delta_rule, args | change(args), error, message)


def test_snapshot_dtype_of_fp16_data() -> None:
    args = dense()
    args |= {name: args[name].half() for name in "qkv"}
    message = "snapshot_dtype: got torch.bfloat16, expected float32 or float16"
    refuse(chunk_gated_delta_rule, args | {"snapshot_dtype": BF16}, ValueError, message)


def test_unavailable_backends_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError) as caught:
        chunk_gated_delta_rule(**dense() | {"backend": "triton"})
    reference, triton, flydsl, emulate = caught.value.supported
    assert str(reference).startswith("reference (available: ")
    assert str(triton).startswith("triton (not available: ")
    assert "interpreter" in str(triton) or "not installed" in str(triton)
    assert str(flydsl) == "flydsl (not available: runs on gfx942 and gfx950 GPUs only)"
    assert str(emulate).startswith(("emulate (available: ", "emulate (not available: the package cdna-emu is not"))


def test_explain_raises_what_the_call_raises() -> None:
    args = dense()
    with pytest.raises(ValueError, match=r"^scale: got nan, expected a finite float$"):
        gdn_runtime.explain(**args, scale=float("nan"))
    with pytest.raises(TypeError, match=r"^explain: got \['scales'\], expected arguments of chunk_gated_delta_rule$"):
        gdn_runtime.explain(**args, scales=1.0)
    with pytest.raises(UnsupportedError, match=r"^backend on cpu: got 'hip'"):
        gdn_runtime.explain(**args, backend="hip")
