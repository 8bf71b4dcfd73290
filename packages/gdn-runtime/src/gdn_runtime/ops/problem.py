"""The facts of one call that selection looks at."""

from __future__ import annotations

import torch

from ..plan import ChunkPlan
from ..rules import Problem
from ..select import DTYPES, Request, target
from .states import StateArguments


def make_problem(
    plan: ChunkPlan,
    states: StateArguments,
    *,
    device: torch.device,
    request: Request,
    num_heads: int,
    num_key_heads: int,
    dtype: torch.dtype,
    beta_dtype: torch.dtype,
    snapshot_dtype: torch.dtype,
    use_exp2: bool,
    use_g: bool = True,
    use_gk: bool = False,
    save_new_value: bool = True,
    g_head_major: bool = True,
) -> Problem:
    """The problem of a call with ``num_heads`` value heads over ``num_key_heads`` key heads.

    Raises as ``select.target``.
    """
    facts, units = target(device, request)
    return Problem(
        arch=facts,
        compute_units=units,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        num_seqs=plan.num_seqs,
        total_chunks=plan.total_chunks,
        max_seq_chunks=plan.max_seq_chunks,
        dtype=DTYPES[dtype],
        beta_dtype=DTYPES[beta_dtype],
        state_dtype=DTYPES[states.dtype],
        snapshot_dtype=DTYPES[snapshot_dtype],
        is_varlen=plan.is_varlen,
        use_exp2=use_exp2,
        use_g=use_g,
        use_gk=use_gk,
        use_initial_state=states.initial_state is not None,
        store_final_state=states.store_final,
        save_new_value=save_new_value,
        use_state_indices=states.indices is not None,
        use_state_mask=states.has_initial_state is not None,
        g_head_major=g_head_major,
    )
