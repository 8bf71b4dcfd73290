"""Spec of the fast path of the block on sm90: two to four Gluon and Triton kernels that keep no snapshots, w or u."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ..errors import UnsupportedError
from .base import Dtype, Language, check_heads, check_member

PrefillPath = Literal["fast", "staged"]
PREFILL_PATHS: tuple[PrefillPath, ...] = get_args(PrefillPath)

FAST_ARCH = "sm90"

MAX_MAPS = 1024
"""Segments and value heads, counting those that short sequences do not have: their maps and states take 192 KB each."""


@dataclass(frozen=True)
class FastConfig:
    """Launch configuration of the fast path; its fields are those of ``FastPrefillSpec``."""

    p_in_scan: bool
    segment_chunks: int

    def refusal(self, *, num_heads: int, num_seqs: int, max_seq_chunks: int) -> str | None:
        """Why a call of this size is not cut into segments like that; None if it can be."""
        if self.segment_chunks == 0:
            return None
        if self.segment_chunks >= max_seq_chunks:
            return f"{max_seq_chunks} chunks are one segment"
        maps = num_seqs * num_heads * -(-max_seq_chunks // self.segment_chunks)
        return f"{maps} segments and heads are more than {MAX_MAPS}" if maps > MAX_MAPS else None


@dataclass(frozen=True)
class FastPrefillSpec:
    """The whole block for one model shape, with every switch that changes its code.

    ``p_in_scan``: the scan forms P = tril(exp(G_i - G_j) q k^T) itself, and prepare only the inverse, four chunks and
    heads at a time; bf16 alone. Else prepare writes P too. ``segment_chunks``: 0 for one scan per sequence, else
    sequences are cut into segments of so many chunks that are scanned at a time, after a pass that finds the states
    they start from.
    """

    language: ClassVar[Language] = "gluon"
    kernel: ClassVar[str] = "prefill"

    arch: str
    dtype: Dtype
    beta_dtype: Dtype
    state_dtype: Dtype
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_initial_state: bool
    store_final_state: bool
    use_state_indices: bool
    use_state_mask: bool
    p_in_scan: bool
    segment_chunks: int

    @property
    def heads_per_program(self) -> int:
        """Value heads of one key head that a program of the inverse takes, of four chunks and heads."""
        group = self.num_heads // self.num_key_heads
        return 4 if group % 4 == 0 else 2 if group % 2 == 0 else 1

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_member("arch of the fast path", self.arch, (FAST_ARCH,))
        check_heads(self.num_heads, self.num_key_heads)
        check_member("q dtype", self.dtype, ("bf16", "fp16"))
        if self.p_in_scan:
            check_member("q dtype of the fast path that forms P in the scan", self.dtype, ("bf16",))
        check_member("beta dtype", self.beta_dtype, get_args(Dtype))
        check_member("state_dtype", self.state_dtype, ("fp32", "bf16"))
        if self.segment_chunks < 0:
            raise UnsupportedError("segment_chunks", got=self.segment_chunks, supported=["0", "positive numbers"])
