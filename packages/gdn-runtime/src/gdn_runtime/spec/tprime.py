"""Specs of the T' route, AMD only: T' = (I + A)^-1 diag(beta) goes from K1..K4 to K5 in place of w and u.

An internal route of the block for large grids: 5 KB per chunk and value head instead of 32 KB. It has what the block
asks for: gates [B,H,T], no per-key gates, v_new always. Strides are in bytes; absent tensors are null pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from .base import HEAD_DIM, Argument, Dtype, Language, arguments, check_heads, check_member
from .flydsl import AMD_ARCHS, STATE_DTYPES, WORKGROUP, Rounding

AmdRoute = Literal["staged", "tprime"]
AMD_ROUTES: tuple[AmdRoute, ...] = get_args(AmdRoute)
"""What K1..K4 hand to K5: w and u, or T'."""

VSPLIT_BLOCK_V = (64, 128)

T_ELEMENTS = 10 * 16 * 16
"""bf16 of T' of a chunk and value head: the tiles of 16x16 on and below the diagonal of the 4x4."""


@dataclass(frozen=True)
class TPrepareSpec:
    """K1..K4 up to T', bf16 k. g_cumsum as of the other kernels; t [chunks, H, T_ELEMENTS] bf16."""

    language: ClassVar[Language] = "flydsl"
    kernel: ClassVar[str] = "prepare_t"
    block: ClassVar[tuple[int, int, int]] = WORKGROUP
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="k g beta t g_cumsum cu_seqlens sequence_ids chunk_ids",
        i64="k_stride_b k_stride_h g_stride_b g_stride_h beta_stride_b beta_stride_h",
        i32="seq_len k_stride_t g_stride_t beta_stride_t",
    )

    arch: str
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_exp2: bool
    beta_dtype: Dtype

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_member("arch", self.arch, AMD_ARCHS)
        check_heads(self.num_heads, self.num_key_heads)
        check_member("beta dtype", self.beta_dtype, get_args(Dtype))

    def grid(self, num_seqs: int, total_chunks: int, max_seq_chunks: int) -> tuple[int, int, int]:
        """Workgroups: x over chunks (varlen: all of them; dense: of one row), y over value heads by fours, z over rows
        (dense)."""
        heads = -(-self.num_heads // 4)
        return (total_chunks, heads, 1) if self.is_varlen else (max_seq_chunks, heads, num_seqs)


@dataclass(frozen=True)
class VSplitScanSpec:
    """K5 with T' and v in place of w and u, bf16 data; v as the block has it, [B,T,H,128] with free strides.

    ``use_exp2``: g is in log2 units. ``rounding`` as of `opt`.
    """

    language: ClassVar[Language] = "flydsl"
    kernel: ClassVar[str] = "state_scan_vsplit"
    block: ClassVar[tuple[int, int, int]] = WORKGROUP
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="k v t g h v_new initial_state final_state state_indices has_initial_state cu_seqlens chunk_offsets",
        i64="k_stride_b k_stride_h v_stride_b v_stride_h initial_stride final_stride",
        i32="seq_len k_stride_t v_stride_t num_slots index_bytes",
    )

    arch: str
    block_v: int
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_exp2: bool
    use_initial_state: bool
    store_final_state: bool
    use_state_indices: bool
    state_dtype: Dtype
    snapshot_dtype: Dtype
    rounding: Rounding = "truncate"

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_member("arch", self.arch, AMD_ARCHS)
        check_member("block_v", self.block_v, VSPLIT_BLOCK_V)
        check_heads(self.num_heads, self.num_key_heads)
        check_member("state_dtype", self.state_dtype, STATE_DTYPES)
        check_member("snapshot_dtype", self.snapshot_dtype, STATE_DTYPES)
        check_member("rounding", self.rounding, get_args(Rounding))
        if self.use_state_indices:
            check_member("use_initial_state with state indices", self.use_initial_state, (True,))
            check_member("store_final_state with state indices", self.store_final_state, (True,))

    def grid(self, num_seqs: int) -> tuple[int, int, int]:
        """Workgroups: x over tiles of V, y = sequence * H + value head."""
        return HEAD_DIM // self.block_v, num_seqs * self.num_heads, 1
