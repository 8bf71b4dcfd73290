"""Calls that must be refused: legal arguments to spoil, and the check that a refusal comes before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata
from gdn_runtime.ops import block, sequences, state_scan
from gdn_runtime.testing import assert_bitwise_equal, make_inputs

Args = dict[str, Any]
Change = Callable[[Args], Args]
"""From legal arguments to the ones to replace."""

NAMES = ("q", "k", "v", "g", "beta")
H, HG, T = 4, 2, 70
"""Value heads, key heads and tokens of the calls below."""


def dense() -> Args:
    """A dense call of the block, B = 2."""
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
    """``packed`` with a pool of 5 slots."""
    return packed() | {"initial_state": torch.ones(5, H, 128, 128), "initial_state_indices": int32(3, 1)}


def with_metadata() -> Args:
    """``packed`` with prefill metadata."""
    args = packed()
    return args | {"prefill_metadata": build_prefill_metadata([10, T - 10], cu_seqlens=args["cu_seqlens"])}


def int32(*values: int) -> Tensor:
    """A tensor of int32."""
    return torch.tensor(values, dtype=torch.int32)


def put(**values: Any) -> Change:
    """Arguments replaced by given values."""
    return lambda args: values


def at(name: str, change: Callable[[Tensor], Any]) -> Change:
    """Argument ``name`` replaced by a function of itself."""
    return lambda args: {name: change(args[name])}


def each(names: str | tuple[str, ...], change: Callable[[Tensor], Any]) -> Change:
    """Every argument of ``names`` replaced by a function of itself."""
    return lambda args: {name: change(args[name]) for name in names}


def meta(x: Tensor) -> Tensor:
    """x on another device."""
    return x.to("meta")


def gap_in_rows(x: Tensor) -> Tensor:
    """The same values with a stride of 2 along the last dimension."""
    return torch.stack((x, x), dim=-1)[..., 0]


def refuse(
    op: Callable[..., object],
    args: Args,
    error: type[Exception],
    message: str,
    *,
    may_read_lengths: bool = False,
) -> None:
    """``op(**args)`` must raise exactly ``error``, worded ``name: got X, expected Y`` and starting with ``message``.

    And it must raise before it launches, allocates or changes anything, and before it looks at a length, unless
    ``may_read_lengths``.
    """

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a refused call launched, allocated or read something")

    tensors = {name: x for name, x in args.items() if isinstance(x, Tensor) and x.device.type == "cpu"}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        for module in (block, state_scan):
            patch.setattr(module, "stages", never)
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"), (Tensor, "zero_")):
            patch.setattr(owner, name, never)
        if not may_read_lengths:
            patch.setattr(sequences, "schedule_for", never)
            patch.setattr(sequences, "build_prefill_metadata", never)
        with pytest.raises(error) as caught:
            op(**args)
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.startswith(message), text
    assert ": got " in text and (", expected " in text or ", supported: " in text), text
    for name, x in tensors.items():
        assert_bitwise_equal(x.detach(), before[name], name)
