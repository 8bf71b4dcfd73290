"""Specs of the FlyDSL kernels, AMD only: K5 `opt` and `vk`, and the fused prepare.

One workgroup is 256 work-items. Strides are in bytes; absent tensors are null pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from .base import HEAD_DIM, Argument, Dtype, Language, arguments, check_heads, check_member

AMD_ARCHS = ("gfx942", "gfx950")
SCAN_BLOCK_V = (16, 32, 64)
STATE_DTYPES = ("fp32", "bf16")
WORKGROUP = (256, 1, 1)

Rounding = Literal["truncate", "nearest"]
"""How fp32 becomes bf16: the high 16 bits, or to nearest even with NaN and infinity kept."""

ScanKernel = Literal["opt", "vk"]

PrepareVariant = Literal["wave", "group"]
"""Fused prepare: one wave per chunk and value head, or the four waves of a workgroup."""


@dataclass(frozen=True)
class OptStateScanSpec:
    """K5 `opt` (the seed's mfma16_hip), bf16 data.

    ``use_exp2``: g is in log2 units. ``wu_head_major``: w, u and v_new are [B,H,T,128], else [B,T,H,128].
    ``sched_barrier``: on gfx942, keeps the compiler from moving instructions across the steps of the products. Code for
    gfx950 always does (without, 1 to 11 % more cycles in the emulator's model), so the switch changes nothing there.
    """

    language: ClassVar[Language] = "flydsl"
    kernel: ClassVar[str] = "state_scan_opt"
    block: ClassVar[tuple[int, int, int]] = WORKGROUP
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="k w u g gk h v_new initial_state final_state state_indices has_initial_state "
        "cu_seqlens chunk_offsets",
        i64="k_stride_b k_stride_h initial_stride final_stride",
        i32="seq_len k_stride_t num_slots index_bytes",
    )

    arch: str
    block_v: int
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_g: bool
    use_gk: bool
    use_exp2: bool
    g_head_major: bool
    use_initial_state: bool
    store_final_state: bool
    use_state_indices: bool
    save_new_value: bool
    state_dtype: Dtype
    snapshot_dtype: Dtype
    rounding: Rounding = "truncate"
    wu_head_major: bool = True
    sched_barrier: bool = False

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_member("arch", self.arch, AMD_ARCHS)
        check_member("block_v", self.block_v, SCAN_BLOCK_V)
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


@dataclass(frozen=True)
class VkStateScanSpec:
    """K5 `vk`, the baseline, bf16 data and snapshots, token-major g; gfx950 only (transposed LDS reads, K=32 MFMA)."""

    language: ClassVar[Language] = "flydsl"
    kernel: ClassVar[str] = "state_scan_vk"
    block: ClassVar[tuple[int, int, int]] = WORKGROUP
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="k w u g gk h v_new initial_state final_state cu_seqlens chunk_offsets",
        i64="k_stride_b k_stride_h",
        i32="seq_len k_stride_t",
    )

    arch: str
    block_v: int
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_g: bool
    use_gk: bool
    use_exp2: bool
    use_initial_state: bool
    store_final_state: bool
    save_new_value: bool
    state_dtype: Dtype

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_member("arch of K5 vk", self.arch, ("gfx950",))
        check_member("block_v", self.block_v, SCAN_BLOCK_V)
        check_heads(self.num_heads, self.num_key_heads)
        check_member("state_dtype", self.state_dtype, STATE_DTYPES)

    def grid(self, num_seqs: int) -> tuple[int, int, int]:
        """Workgroups: x over tiles of V, y = sequence * H + value head."""
        return HEAD_DIM // self.block_v, num_seqs * self.num_heads, 1


@dataclass(frozen=True)
class FusedPrepareSpec:
    """K1..K4 in one kernel, bf16 k and v."""

    language: ClassVar[Language] = "flydsl"
    kernel: ClassVar[str] = "prepare"
    block: ClassVar[tuple[int, int, int]] = WORKGROUP
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="k v g beta w u g_cumsum cu_seqlens sequence_ids chunk_ids",
        i64="k_stride_b k_stride_h v_stride_b v_stride_h g_stride_b g_stride_h beta_stride_b beta_stride_h",
        i32="seq_len k_stride_t v_stride_t g_stride_t beta_stride_t",
    )

    arch: str
    variant: PrepareVariant
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_exp2: bool
    beta_dtype: Dtype

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_member("arch", self.arch, AMD_ARCHS)
        check_member("variant", self.variant, get_args(PrepareVariant))
        check_heads(self.num_heads, self.num_key_heads)
        check_member("beta dtype", self.beta_dtype, get_args(Dtype))

    def grid(self, num_seqs: int, total_chunks: int, max_seq_chunks: int) -> tuple[int, int, int]:
        """Workgroups: x over chunks (varlen: all of them; dense: of one row), y over value heads, by fours for "wave",
        z over rows (dense)."""
        heads = self.num_heads if self.variant == "group" else -(-self.num_heads // 4)
        return (total_chunks, heads, 1) if self.is_varlen else (max_seq_chunks, heads, num_seqs)
