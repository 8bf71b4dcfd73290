"""The block under the name and with the switches of aiter's entry point, for callers that move over unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import type_error, value_error
from ..metadata import PrefillMetadata
from .block import chunk_gated_delta_rule
from .checks import check_flag


def chunk_gated_delta_rule_opt_vk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    use_chunk_hip: bool = False,
    use_chunk_flydsl: bool = False,
    state_dtype: torch.dtype | None = None,
    use_exp2: bool = True,
    num_decodes: int = 0,
    num_decode_tokens: int = 0,
    *,
    use_prepare_flydsl: bool = False,
    seq_lens_cpu: Sequence[int] | Tensor | None = None,
    prefill_metadata: PrefillMetadata | None = None,
    initial_state_indices: Tensor | None = None,
    inplace_final_state: bool | None = None,
    snapshot_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_gated_delta_rule`` with aiter's argument order: the first 17 arguments may be positional.

    ``use_chunk_hip`` / ``use_chunk_flydsl`` are ``backend="hip"`` / ``"flydsl"``, ``use_prepare_flydsl`` is
    ``prepare_backend="flydsl"``; a backend that is not available raises UnsupportedError, where aiter would quietly run
    Triton. Neither flag: ``backend="auto"``.
    """
    if g is None or beta is None:
        raise type_error("g" if g is None else "beta", None, "a torch.Tensor [B,T,H]")
    check_flag("use_chunk_hip", use_chunk_hip)
    check_flag("use_chunk_flydsl", use_chunk_flydsl)
    check_flag("use_prepare_flydsl", use_prepare_flydsl)
    if use_chunk_hip and use_chunk_flydsl:
        raise value_error("use_chunk_hip and use_chunk_flydsl", "both True", "at most one of them")
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        o=o,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_dtype=state_dtype,
        snapshot_dtype=snapshot_dtype,
        use_exp2=use_exp2,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        seq_lens_cpu=seq_lens_cpu,
        prefill_metadata=prefill_metadata,
        initial_state_indices=initial_state_indices,
        inplace_final_state=inplace_final_state,
        backend="hip" if use_chunk_hip else "flydsl" if use_chunk_flydsl else "auto",
        prepare_backend="flydsl" if use_prepare_flydsl else None,
    )
