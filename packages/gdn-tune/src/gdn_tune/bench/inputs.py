"""The tensors of a bench's call, and its variants: with and without metadata, states dense or in a pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import PrefillMetadata, build_prefill_metadata, reference
from gdn_runtime.metadata import schedule_for
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.testing import TORCH_DTYPE, Case, GdnInputs

SEED = 20260811
NO_METADATA, POOL, POOL_COLD = "no-meta", "pool", "pool cold"


@dataclass(frozen=True)
class BlockInputs:
    """One call of the block. ``metadata`` is None for dense calls and for the variant without it.

    ``state`` is [N,H,V,K] or with ``indices`` the pool; ``moved``: other indices, for calls that write them anew.
    """

    case: Case
    x: GdnInputs
    metadata: PrefillMetadata | None
    state: Tensor
    indices: Tensor | None = None
    moved: Tensor | None = None

    @property
    def snapshot_dtype(self) -> torch.dtype:
        """Of the states between K5 and K6."""
        return TORCH_DTYPE[self.case.snapshot_dtype]

    @property
    def plan(self) -> ChunkPlan:
        """What the kernels know of the sequences."""
        tokens = self.x.k.shape[1]
        if self.x.cu_seqlens is None:
            return ChunkPlan.dense(self.x.num_seqs, tokens)
        return ChunkPlan.varlen(schedule_for(self.x.cu_seqlens, total_tokens=tokens), tokens)

    def renew(self) -> None:
        """Write the indices anew, as a server does whose batch changes: nothing may be kept of them."""
        if self.indices is not None and self.moved is not None:
            self.indices.copy_(self.moved)


@dataclass(frozen=True)
class ScanInputs:
    """What K5 is given: w, u [B,H,T,128] in the dtype of k, g [B,H,T] fp32 cumulated in log2 units, or None."""

    block: BlockInputs
    w: Tensor
    u: Tensor
    g: Tensor | None


def block_inputs(case: Case, device: torch.device, seed: int = SEED) -> BlockInputs:
    """Weak gates, keys of length 1, random initial states; one metadata for all backends."""
    x = case.inputs(state="random", gate="weak", seed=seed, device=device)
    assert x.initial_state is not None
    return BlockInputs(case, x, _metadata(x), x.initial_state)


def _metadata(x: GdnInputs) -> PrefillMetadata | None:
    return None if x.cu_seqlens is None else build_prefill_metadata(x.seq_lens, cu_seqlens=x.cu_seqlens)


def states(inputs: BlockInputs) -> dict[str, Any]:
    """Arguments of ours that name sequences and states."""
    return {
        "initial_state": inputs.state,
        "initial_state_indices": inputs.indices,
        "output_final_state": inputs.case.final_state,
        "cu_seqlens": inputs.x.cu_seqlens,
        "prefill_metadata": inputs.metadata,
        "snapshot_dtype": inputs.snapshot_dtype,
    }


def scan_inputs(block: BlockInputs) -> ScanInputs:
    """w, u and gates of the block's inputs, by the reference."""
    x = block.x
    (batch, tokens, heads, dim), device = x.v.shape, x.k.device
    w, u = (torch.empty(batch, heads, tokens, dim, dtype=x.k.dtype, device=device) for _ in range(2))
    g = torch.empty(batch, heads, tokens, device=device)
    gates = x.g if block.case.gated else torch.zeros_like(x.g)
    reference.prepare(x.k, x.v, gates, x.beta, w=w, u=u, g_cumsum=g, plan=block.plan, use_exp2=True)
    return ScanInputs(block, w, u, g if block.case.gated else None)


def variants(
    block: BlockInputs, *, pool: bool = False, cold: bool = False, without_metadata: bool = False, seed: int = SEED
) -> tuple[dict[str, BlockInputs], list[str]]:
    """(the variants of a call by name, "" being the call itself; what was left out, and why)."""
    found, left_out = {"": block}, []
    if without_metadata:
        if block.metadata is None:
            left_out.append(f"{NO_METADATA}: a dense call has no metadata")
        else:
            found[NO_METADATA] = replace(block, metadata=None)
    if pool or cold:
        if not block.case.final_state:
            left_out.append(f"{POOL}: the case keeps no final states")
        else:
            found |= {name: _pooled(block, seed) for name, wanted in ((POOL, pool), (POOL_COLD, cold)) if wanted}
    return found, left_out


def _pooled(block: BlockInputs, seed: int) -> BlockInputs:
    """The states in slots of a pool of twice as many, in random order."""
    count, device = block.state.shape[0], block.state.device
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(seed))
    indices = order[:count].to(torch.int32).to(device)
    pool = block.state.new_zeros(2 * count, *block.state.shape[1:])
    pool[indices.long()] = block.state
    return replace(block, state=pool, indices=indices, moved=indices.clone())
