"""Where K5 reads and writes its states: dense tensors or slots of a pool. Checks, and the opt-in check of slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import env
from ..codeobject.source import capturing
from ..errors import value_error
from ..spec import HEAD_DIM
from .checks import INDEX_DTYPES, STATE_DTYPES, check_contiguous, check_flag, check_tensor


@dataclass(frozen=True)
class StateArguments:
    """Checked state arguments of one call: ``in_place`` means the final states replace ``initial_state``."""

    initial_state: Tensor | None
    indices: Tensor | None
    has_initial_state: Tensor | None
    store_final: bool
    in_place: bool
    dtype: torch.dtype

    @staticmethod
    def of_op(
        initial_state: Tensor | None,
        final_state: Tensor | None,
        in_place: bool,
        indices: Tensor | None,
        has_initial_state: Tensor | None,
    ) -> StateArguments:
        """The state arguments of an op call. In place, the op gets ``initial_state=None`` and the states are in
        ``final_state``: one tensor must not appear as two arguments of an op that writes it."""
        before = final_state if in_place else initial_state
        given = before if final_state is None else final_state
        dtype = torch.float32 if given is None else given.dtype
        return StateArguments(before, indices, has_initial_state, final_state is not None, in_place, dtype)

    def check_index_values(self) -> None:
        """Raise ValueError for a slot outside [-1, slots) or used twice. Copies indices to the host: synchronises."""
        if self.indices is None or self.initial_state is None:
            return
        if capturing():
            raise RuntimeError("check_indices: got a CUDA graph capture, expected none (the check reads device memory)")
        slots = self.initial_state.shape[0]
        values = self.indices.tolist()
        for position, slot in enumerate(values):
            if not -1 <= slot < slots:
                raise value_error(f"initial_state_indices[{position}]", slot, f"-1 (pad) or a slot in [0, {slots})")
        twice = sorted(slot for slot, times in Counter(values).items() if slot >= 0 and times > 1)
        if twice:
            raise value_error("initial_state_indices", f"slots {twice} more than once", "each slot at most once")

    def allocate_final(self, num_seqs: int, num_heads: int, device: torch.device) -> Tensor | None:
        """The tensor for the final states [num_seqs,H,V,K] (or the pool itself), None if nobody wants them."""
        if not self.store_final:
            return None
        if self.in_place:
            return self.initial_state
        return torch.empty(num_seqs, num_heads, HEAD_DIM, HEAD_DIM, dtype=self.dtype, device=device)


def check_states(
    *,
    initial_state: object,
    output_final_state: bool,
    state_dtype: torch.dtype | None,
    initial_state_indices: object,
    has_initial_state: object,
    inplace_final_state: bool | None,
    num_seqs: int,
    num_heads: int,
    device: torch.device,
) -> StateArguments:
    """Check the state arguments of a call with ``num_seqs`` prefill sequences (gdn_runtime.chunk_gated_delta_rule)."""
    check_flag("output_final_state", output_final_state)
    if inplace_final_state is not None:
        check_flag("inplace_final_state", inplace_final_state)
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise value_error("state_dtype", state_dtype, "float32 or bfloat16")
    if initial_state is None:
        for name, value in (
            ("initial_state_indices", initial_state_indices),
            ("has_initial_state", has_initial_state),
            ("inplace_final_state", inplace_final_state or None),
        ):
            if value is not None:
                raise value_error(f"{name} without initial_state", "a value", "initial_state too, or neither")
        return StateArguments(None, None, None, output_final_state, False, state_dtype or torch.float32)

    state = check_tensor("initial_state", initial_state, dtypes=STATE_DTYPES, device=device)
    pooled = initial_state_indices is not None
    rows = state.shape[0] if pooled and state.dim() else num_seqs
    expected = (rows, num_heads, HEAD_DIM, HEAD_DIM)
    if tuple(state.shape) != expected:
        first = "slots" if pooled else num_seqs
        raise value_error(
            "initial_state.shape", list(state.shape), f"[{first}, {num_heads}, {HEAD_DIM}, {HEAD_DIM}] ([N,H,V,K])"
        )
    _check_state_strides(state)
    if state_dtype is not None and state_dtype != state.dtype:
        raise value_error("state_dtype", state_dtype, f"{state.dtype} (the dtype of initial_state) or None")

    indices = None
    if pooled:
        indices = check_tensor(
            "initial_state_indices", initial_state_indices, shape=(num_seqs,), dtypes=INDEX_DTYPES, device=device
        )
        check_contiguous("initial_state_indices", indices)
        if inplace_final_state is False:
            raise value_error(
                "inplace_final_state with initial_state_indices", False, "True or None: a pool is updated in place"
            )
        if not output_final_state:
            raise value_error(
                "output_final_state with initial_state_indices", False, "True: a pool is updated in place"
            )
    mask = None
    if has_initial_state is not None:
        mask = check_tensor(
            "has_initial_state", has_initial_state, shape=(num_seqs,), dtypes=(torch.bool,), device=device
        )
        check_contiguous("has_initial_state", mask)
    in_place = pooled if inplace_final_state is None else inplace_final_state
    if in_place and not output_final_state:
        raise value_error("output_final_state with inplace_final_state=True", False, "True")
    return StateArguments(state, indices, mask, output_final_state, in_place, state.dtype)


def _check_state_strides(state: Tensor) -> None:
    inner = (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)
    heads = state.shape[1]
    if state.numel() == 0:
        return
    right = state.stride()[2:] == inner[1:] and (heads == 1 or state.stride(1) == inner[0])
    if not right or (state.shape[0] > 1 and state.stride(0) < heads * inner[0]):
        raise value_error(
            "initial_state.stride()",
            list(state.stride()),
            f"[any >= {heads * inner[0]}, {inner[0]}, {inner[1]}, {inner[2]}]: slots may be apart, each one contiguous",
        )


def wants_index_check(check_indices: bool | None) -> bool:
    """Whether to check slot values: the argument if given, else GDN_CHECK_INDICES."""
    return env.settings().check_indices if check_indices is None else check_flag("check_indices", check_indices)
