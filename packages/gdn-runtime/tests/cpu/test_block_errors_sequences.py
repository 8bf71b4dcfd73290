"""What the block refuses (sequences, metadata, states): the error, its words, and that nothing happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
    int32,
    packed,
    pooled,
    put,
    refuse,
    with_metadata,
)

BF16, FP16 = torch.bfloat16, torch.float16
TENSOR = "expected a torch.Tensor"
WITHOUT = "got a value, expected cu_seqlens too, or neither"
REFUSED: list[tuple[Callable[[], Args], Change, type[Exception], str]] = [
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
    (dense, put(cu_seqlens=int32(0, T)), ValueError, "batch size with cu_seqlens: got 2, expected 1"),
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
        each(NAMES, lambda x: x[:, :69]),
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
]


@pytest.mark.parametrize(("base", "change", "error", "message"), REFUSED, ids=[case[3][:60] for case in REFUSED])
def test_refused(base: Callable[[], Args], change: Change, error: type[Exception], message: str) -> None:
    args = base()
    refuse(chunk_gated_delta_rule, args | change(args), error, message)


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
    refuse(chunk_gated_delta_rule, args | change(args), ValueError, message, may_read_lengths=True)


def test_lengths_of_a_wrong_type() -> None:
    refuse(
        chunk_gated_delta_rule,
        packed() | {"seq_lens_cpu": [10.0, 60]},
        TypeError,
        "seq_lens_cpu[0]: got 10.0, ",
        may_read_lengths=True,
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"backend": "triton"}, UnsupportedError),
        ({"initial_state_indices": int32(3, 9), "check_indices": True}, ValueError),
    ],
)
def test_late_refusals_leave_pool_and_output_as_they_were(change: Args, error: type[Exception]) -> None:
    # These two are known only once the schedule is; ``refuse`` compares every tensor argument with what it was.
    args = pooled() | {"o": torch.full((1, T + 2, H, 128), 7.0, dtype=BF16)}
    refuse(chunk_gated_delta_rule, args | change, error, "", may_read_lengths=True)
