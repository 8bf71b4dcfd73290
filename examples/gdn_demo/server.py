"""What a server does with the block: prefill a ragged batch into the slots of a state pool, and go on from there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule

from .layer import HEAD_DIM, Inputs, Rows, pack

PAD = -1
POOL_SLOTS = 16


@dataclass(frozen=True)
class Pass:
    """One forward pass: the output of each sequence [T_n, H, 128], and how long the block took."""

    outputs: list[Tensor]
    seconds: float


class Server:
    """A state pool [slots, H, V, K], and a slot of it for each of ``num_seqs`` sequences, scattered at random.

    Every slot starts as NaN: a real one holds whatever the last request left there, and none of it may be read.
    """

    def __init__(
        self, num_seqs: int, num_heads: int, backend: str, device: torch.device, arch: str | None = None
    ) -> None:
        self.backend = backend
        self.arch = arch
        self.device = device
        self.pool = torch.full((POOL_SLOTS, num_heads, HEAD_DIM, HEAD_DIM), torch.nan, device=device)
        slots = torch.randperm(POOL_SLOTS, generator=torch.Generator().manual_seed(0)).int().to(device)
        self.slots, self.other_slots = slots[:num_seqs], slots[num_seqs:]
        self.started = torch.zeros(num_seqs, dtype=torch.bool, device=device)

    def prefill(self, sequences: list[Rows]) -> Pass:
        """Run the next tokens of every sequence."""
        inputs, options = self.call(sequences)
        self._synchronize()
        begin = time.perf_counter()
        o, _ = chunk_gated_delta_rule(*inputs, **options)
        self._synchronize()
        seconds = time.perf_counter() - begin
        self.started.fill_(True)
        return Pass(list(o[0].split([len(rows) for rows in sequences])), seconds)

    def call(self, sequences: list[Rows]) -> tuple[Inputs, dict[str, Any]]:
        """The arguments of the block for one forward pass. The batch ends with a pad: an empty sequence, no slot."""
        seq_lens = [*(len(rows) for rows in sequences), 0]
        cu_seqlens = torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32, device=self.device)
        # Once per forward pass, from lengths that the scheduler knows; every layer of a model gets this same object.
        metadata = build_prefill_metadata(seq_lens, cu_seqlens=cu_seqlens)
        options = {
            "cu_seqlens": cu_seqlens,
            "prefill_metadata": metadata,
            "use_qk_l2norm_in_kernel": True,
            "initial_state": self.pool,
            "initial_state_indices": torch.cat([self.slots, self.slots.new_tensor([PAD])]),
            "has_initial_state": torch.cat([self.started, self.started.new_zeros(1)]),
            "output_final_state": True,
            "backend": self.backend,
            "arch": self.arch,
        }
        return pack(sequences, self.device), options

    def states(self) -> Tensor:
        """The state of every sequence [N, H, V, K]."""
        return self.pool[self.slots]

    def touched_slots(self) -> int:
        """How many slots that belong to no sequence were written: must be none."""
        return int((~self.pool[self.other_slots].isnan()).flatten(1).any(1).sum())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
