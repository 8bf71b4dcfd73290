"""What the block refuses: the error, its words (name, got, expected), and that nothing was allocated, launched or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn_runtime
from gdn_runtime import UnsupportedError, build_prefill_metadata, chunk_gated_delta_rule
from gdn_runtime.ops import block, sequences
from gdn_testing import assert_bitwise_equal, make_inputs

Args = dict[str, Any]
Change = Callable[[Args], Args]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
H, HG, T = 4, 2, 70
NAMES = ("q", "k", "v", "g", "beta")


def dense() -> Args:
    x = make_inputs((2, T), H, HG, state="random")
    return dict(zip(NAMES, x.tensors, strict=True)) | {"initial_state": x.initial_state, "output_final_state": True}


def packed() -> Args:
    """Lengths 10 and 60, two spare rows."""
    x = make_inputs([10, T - 10], H, HG, state="random", spare_rows=2)
    return dict(zip(NAMES, x.tensors, strict=True)) | {
        "cu_seqlens": x.cu_seqlens,
        "initial_state": x.initial_state,
        "output_final_state": True,
    }


def pooled() -> Args:
    return packed() | {"initial_state": torch.ones(5, H, 128, 128), "initial_state_indices": int32(3, 1)}


def with_metadata() -> Args:
    args = packed()
    return args | {"prefill_metadata": build_prefill_metadata([10, T - 10], cu_seqlens=args["cu_seqlens"])}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refuse(args: Args, error: type[Exception], message: str, *, may_read_lengths: bool = False) -> None:
    """The call must raise exactly ``error`` with a text that starts with ``message``, before it does anything."""

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a refused call allocated, launched or read something")

    tensors = {name: x for name, x in args.items() if isinstance(x, Tensor) and x.device.type == "cpu"}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "stages", never)
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"), (Tensor, "zero_")):
            patch.setattr(owner, name, never)
        if not may_read_lengths:
            patch.setattr(sequences, "schedule_for", never)
            patch.setattr(sequences, "build_prefill_metadata", never)
        with pytest.raises(error) as caught:
            chunk_gated_delta_rule(**args)
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.startswith(message), text
    assert ": got " in text and (", expected " in text or ", supported: " in text), text
    for name, x in tensors.items():
        assert_bitwise_equal(x.detach(), before[name], name)


def put(**values: Any) -> Change:
    return lambda args: values


def at(name: str, change: Callable[[Tensor], Any]) -> Change:
    """Argument ``name`` replaced by a function of itself."""
    return lambda args: {name: change(args[name])}


def both(*changes: Change) -> Change:
    return lambda args: {key: value for change in changes for key, value in change(args).items()}


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


def gap_in_rows(x: Tensor) -> Tensor:
    """The same values with a stride of 2 along the last dimension."""
    return torch.stack((x, x), dim=-1)[..., 0]


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
WITHOUT = "got a value, expected cu_seqlens too, or neither"
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
        both(*(at(n, lambda x: x[..., :64].contiguous()) for n in "qkv")),
        UnsupportedError,
        "head size: got K=64, V=64, supported: K=V=128",
    ),
    (dense, at("v", lambda x: x[..., :64]), UnsupportedError, "head size: got K=128, V=64, supported: K=V=128"),
    (
        dense,
        both(*(at(n, lambda x: x[:, :, :3]) for n in ("v", "g", "beta"))),
        ValueError,
        "heads: got H=3 value heads, Hg=2 key heads, expected H a positive multiple of Hg >= 1",
    ),
    (dense, both(*(at(n, lambda x: x[:, :, :0]) for n in "qk")), ValueError, "heads: got H=4 value heads, Hg=0"),
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
    (dense, both(*(at(n, meta) for n in (*NAMES, "initial_state"))), UnsupportedError, "device type: got meta"),
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
    # sequences
    (dense, put(num_decodes=1), ValueError, f"num_decodes without cu_seqlens: {WITHOUT}"),
    (dense, put(num_decode_tokens=1), ValueError, f"num_decode_tokens without cu_seqlens: {WITHOUT}"),
    (dense, put(seq_lens_cpu=[T]), ValueError, f"seq_lens_cpu without cu_seqlens: {WITHOUT}"),
    (with_metadata, put(cu_seqlens=None), ValueError, f"prefill_metadata without cu_seqlens: {WITHOUT}"),
    (packed, put(num_decodes=-1), ValueError, "num_decodes: got -1, expected an int >= 0"),
    (packed, put(num_decodes=1.0), TypeError, "num_decodes: got float, expected int"),
    (packed, put(num_decode_tokens=True), TypeError, "num_decode_tokens: got bool, expected int"),
    (packed, put(num_decodes=2), ValueError, "num_decodes: got 2, expected 0 to 1 (at least one prefill sequence)"),
    (packed, put(cu_seqlens=[0, 10, 70]), TypeError, f"cu_seqlens: got list, {TENSOR}"),
    (packed, at("cu_seqlens", Tensor.float), TypeError, "cu_seqlens.dtype: got torch.float32, expected int32 or int64"),
    (packed, at("cu_seqlens", Tensor.short), TypeError, "cu_seqlens.dtype: got torch.int16, expected int32 or int64"),
    (packed, at("cu_seqlens", lambda x: x[None]), ValueError, "cu_seqlens.shape: got [1, 3], expected [sequences + 1]"),
    (packed, at("cu_seqlens", lambda x: x[:1]), ValueError, "cu_seqlens.shape: got [1], expected [sequences + 1]"),
    (dense, put(cu_seqlens=int32(0, T)), ValueError, "q.shape[0] with cu_seqlens: got 2, expected 1"),
    # metadata
    (packed, put(prefill_metadata=[10, 60]), TypeError, "prefill_metadata: got list, expected PrefillMetadata"),
    (
        with_metadata,
        at("cu_seqlens", Tensor.clone),
        ValueError,
        "cu_seqlens: got another tensor object, expected the one",
    ),
    (
        with_metadata,
        at("cu_seqlens", lambda x: x.copy_(int32(0, 5, T))),
        ValueError,
        "cu_seqlens._version: got 1, expected 0",
    ),
    (with_metadata, put(num_decodes=1), ValueError, "num_decodes: got 1, expected 0 as in prefill_metadata"),
    (with_metadata, put(num_decode_tokens=10), ValueError, "num_decode_tokens: got 10, expected 0 as in"),
    (
        with_metadata,
        both(*(at(n, lambda x: x[:, :69]) for n in NAMES)),
        ValueError,
        "length of the token axis: got 69, expected at least 70 prefill tokens",
    ),
    # states
    (dense, put(initial_state=[1]), TypeError, f"initial_state: got list, {TENSOR}"),
    (dense, at("initial_state", Tensor.half), TypeError, "initial_state.dtype: got torch.float16, expected float32 or"),
    (
        dense,
        at("initial_state", lambda x: x[0]),
        ValueError,
        "initial_state.shape: got [4, 128, 128], expected [2, 4, 128",
    ),
    (
        dense,
        at("initial_state", lambda x: x[:1]),
        ValueError,
        "initial_state.shape: got [1, 4, 128, 128], expected [2, 4",
    ),
    (
        dense,
        at("initial_state", lambda x: x[:, :2]),
        ValueError,
        "initial_state.shape: got [2, 2, 128, 128], expected [2",
    ),
    (
        pooled,
        at("initial_state", lambda x: x[0, 0, 0, 0]),
        ValueError,
        "initial_state.shape: got [], expected [slots, 4, 12",
    ),
    (
        pooled,
        at("initial_state", lambda x: x[:, :, :64]),
        ValueError,
        "initial_state.shape: got [5, 4, 64, 128], expected",
    ),
    (
        dense,
        at("initial_state", lambda x: x.mT),
        ValueError,
        "initial_state.stride(): got [65536, 16384, 1, 128], expected",
    ),
    (
        pooled,
        put(initial_state=torch.ones(5, 8, 128, 128)[:, ::2]),
        ValueError,
        "initial_state.stride(): got [131072, 32768",
    ),
    (
        pooled,
        at("initial_state", lambda x: x[:1].expand(5, H, 128, 128)),
        ValueError,
        "initial_state.stride(): got [0, 163",
    ),
    (dense, put(state_dtype=FP16), ValueError, "state_dtype: got torch.float16, expected float32 or bfloat16"),
    (dense, put(state_dtype="float32"), ValueError, "state_dtype: got float32, expected float32 or bfloat16"),
    (
        dense,
        put(state_dtype=BF16),
        ValueError,
        "state_dtype: got torch.bfloat16, expected torch.float32 (the dtype of init",
    ),
    (pooled, put(initial_state=None), ValueError, "initial_state_indices without initial_state: got a value, expected"),
    (
        dense,
        put(initial_state=None, inplace_final_state=True),
        ValueError,
        "inplace_final_state without initial_state: got",
    ),
    (
        dense,
        put(initial_state=None, has_initial_state=torch.ones(2, dtype=torch.bool)),
        ValueError,
        "has_initial_state without initial_state: got a value, expected initial_state too, or neither",
    ),
    (
        pooled,
        put(inplace_final_state=False),
        ValueError,
        "inplace_final_state with initial_state_indices: got False, exp",
    ),
    (
        pooled,
        put(output_final_state=False),
        ValueError,
        "output_final_state with initial_state_indices: got False, expect",
    ),
    (
        dense,
        put(inplace_final_state=True, output_final_state=False),
        ValueError,
        "output_final_state with inplace_final_state=True: got False, expected True",
    ),
    (pooled, put(initial_state_indices=[3, 1]), TypeError, f"initial_state_indices: got list, {TENSOR}"),
    (
        pooled,
        at("initial_state_indices", Tensor.float),
        TypeError,
        "initial_state_indices.dtype: got torch.float32, expect",
    ),
    (
        pooled,
        at("initial_state_indices", Tensor.short),
        TypeError,
        "initial_state_indices.dtype: got torch.int16, expected",
    ),
    (
        pooled,
        at("initial_state_indices", lambda x: x[None]),
        ValueError,
        "initial_state_indices.shape: got [1, 2], expecte",
    ),
    (pooled, put(initial_state_indices=int32(1)), ValueError, "initial_state_indices.shape: got [1], expected [2]"),
    (
        pooled,
        put(initial_state_indices=int32(1, 9, 2)[::2]),
        ValueError,
        "initial_state_indices.stride(): got [2], expected",
    ),
    (packed, put(has_initial_state=[True, True]), TypeError, f"has_initial_state: got list, {TENSOR}"),
    (packed, put(has_initial_state=int32(1, 1)), TypeError, "has_initial_state.dtype: got torch.int32, expected bool"),
    (packed, put(has_initial_state=int32(1) > 0), ValueError, "has_initial_state.shape: got [1], expected [2]"),
    (
        packed,
        put(has_initial_state=(int32(1, 1, 1) > 0)[::2]),
        ValueError,
        "has_initial_state.stride(): got [2], expected",
    ),
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
    refuse(args | change(args), error, message)


FITS = "expected 10, the tokens of the first 1 sequences"
WRONG_LENGTHS: list[tuple[Callable[[], Args], Change, str]] = [
    (packed, put(cu_seqlens=int32(1, 10, T)), "cu_seqlens[0]: got 1, expected 0"),
    (packed, put(cu_seqlens=int32(0, 80, T)), "cu_seqlens[2]: got 70, expected at least cu_seqlens[1] = 80"),
    (packed, put(cu_seqlens=int32(0, 10, T + 3)), "length of the token axis: got 72, expected at least 73"),
    (
        packed,
        put(cu_seqlens=torch.tensor([0, 10, 2**31])),
        "cu_seqlens[-1]: got 2147483648, expected at most 2147483647",
    ),
    (packed, put(seq_lens_cpu=[11, 59]), "cu_seqlens[1]: got 10, expected 11, the sum of seq_lens_cpu"),
    (packed, put(seq_lens_cpu=torch.tensor([10, 61])), "cu_seqlens[2]: got 70, expected 71, the sum of seq_lens_cpu"),
    (packed, put(seq_lens_cpu=[T]), "cu_seqlens.numel(): got 3, expected 2 (len(seq_lens_cpu) + 1)"),
    (packed, put(seq_lens_cpu=[-1, 71]), "seq_lens_cpu[0]: got -1, expected >= 0"),
    *(
        (
            base,
            put(num_decodes=1, num_decode_tokens=n, initial_state=None, **more),
            f"num_decode_tokens: got {n}, {FITS}",
        )
        for base, more in ((packed, {}), (packed, {"seq_lens_cpu": [10, 60]}))
        for n in (0, 9, 11)
    ),
]


@pytest.mark.parametrize(("base", "change", "message"), WRONG_LENGTHS, ids=[case[2][:60] for case in WRONG_LENGTHS])
def test_wrong_lengths(base: Callable[[], Args], change: Change, message: str) -> None:
    args = base()
    refuse(args | change(args), ValueError, message, may_read_lengths=True)


def test_lengths_of_a_wrong_type() -> None:
    refuse(packed() | {"seq_lens_cpu": [10.0, 60]}, TypeError, "seq_lens_cpu[0]: got 10.0, ", may_read_lengths=True)


def test_snapshot_dtype_of_fp16_data() -> None:
    args = dense()
    args |= {name: args[name].half() for name in "qkv"}
    refuse(
        args | {"snapshot_dtype": BF16}, ValueError, "snapshot_dtype: got torch.bfloat16, expected float32 or float16"
    )


def test_unavailable_backends_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError) as caught:
        chunk_gated_delta_rule(**dense() | {"backend": "triton"})
    reference, triton = caught.value.supported
    assert str(reference).startswith("reference (available: ")
    assert str(triton).startswith("triton (not available: ")
    assert "interpreter" in str(triton) or "not installed" in str(triton)


def test_explain_raises_what_the_call_raises() -> None:
    args = dense()
    with pytest.raises(ValueError, match=r"^scale: got nan, expected a finite float$"):
        gdn_runtime.explain(**args, scale=float("nan"))
    with pytest.raises(TypeError, match=r"^explain: got \['scales'\], expected arguments of chunk_gated_delta_rule$"):
        gdn_runtime.explain(**args, scales=1.0)
    with pytest.raises(UnsupportedError, match=r"^backend on cpu: got 'hip'"):
        gdn_runtime.explain(**args, backend="hip")


def test_a_refused_call_leaves_pool_and_output_as_they_were() -> None:
    args = pooled() | {"o": torch.full((1, T + 2, H, 128), 7.0, dtype=BF16)}
    for change in ({"backend": "triton"}, {"initial_state_indices": int32(3, 9), "check_indices": True}):
        # ``refuse`` compares every tensor argument with what it was.
        error = UnsupportedError if "backend" in change else ValueError
        refuse(args | change, error, "", may_read_lengths=True)
