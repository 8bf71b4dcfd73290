"""Specs of the Triton kernels of the block.

They are also keys of AMD code objects; of ``PrepareSpec``, those of mode "fused", for "split" is two kernels.
``ARGUMENTS`` are those of the Triton function in its order. Strides of q, k, v, o and of state slots count units of 8
elements, as for rows on 16-byte addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from .base import HEAD_DIM, Argument, ArgumentKind, Dtype, Language, check_heads, check_member

PrepareMode = Literal["fused", "split"]
PREPARE_MODES: tuple[PrepareMode, ...] = get_args(PrepareMode)
BLOCK_V = (16, 32, 64, 128)
"""Value columns per program of the state scan (BV) and of the output kernel."""


L2NORM_ROWS = 32
"""Rows of 128 per program of the normalisation: 4 warps move 8 KB in and 8 KB out."""
L2NORM_WARPS = 4

AMD_WAVE = 64


def _mixed(*runs: tuple[ArgumentKind, str]) -> tuple[Argument, ...]:
    """Arguments in runs of one kind, names apart by spaces."""
    return tuple(Argument(name, kind) for kind, names in runs for name in names.split())


def _strides(tensors: str) -> tuple[tuple[ArgumentKind, str], ...]:
    """Strides of batch rows, tokens and heads of each tensor, named by one letter."""
    return tuple(
        run
        for tensor in tensors
        for run in (("i64", f"stride_{tensor}b"), ("i32", f"stride_{tensor}t"), ("i64", f"stride_{tensor}h"))
    )


@dataclass(frozen=True)
class PrepareConfig:
    """Launch configuration of K1..K4.

    ``mode`` "fused" runs K1..K4 in one kernel; "split" publishes (I+A)^-1 from a first kernel (K1..K3) and forms w and
    u in a second (K4).
    """

    mode: PrepareMode = "fused"
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class StateScanConfig:
    """Launch configuration of K5: value rows of the state per program, warps, software-pipelining depth."""

    block_v: int = 64
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class OutputConfig:
    """Launch configuration of K6."""

    block_v: int = 128
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class L2NormSpec:
    """Normalisation of q and k [.., Hg, 128] of ``dtype``."""

    language: ClassVar[Language] = "triton"
    kernel: ClassVar[str] = "l2norm"
    block: ClassVar[tuple[int, int, int]] = (L2NORM_WARPS * AMD_WAVE, 1, 1)
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = _mixed(
        ("pointer", "q k q_out k_out"),
        ("i64", "num_rows seq_len stride_qb stride_qt stride_qh stride_kb stride_kt stride_kh"),
    )

    arch: str
    dtype: Dtype
    num_key_heads: int

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_heads(self.num_key_heads, self.num_key_heads)
        check_member("q dtype", self.dtype, ("bf16", "fp16"))

    def grid(self, num_rows: int) -> tuple[int, int, int]:
        """Workgroups: x over ``num_rows`` = B T Hg rows, y over q and k."""
        return -(-num_rows // L2NORM_ROWS), 2, 1


@dataclass(frozen=True)
class PrepareSpec:
    """K1..K4 for one model shape: k [.., Hg, 128], v [.., H, 128] of ``dtype``; beta of ``beta_dtype``."""

    language: ClassVar[Language] = "triton"
    kernel: ClassVar[str] = "prepare"
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = _mixed(
        ("pointer", "k v g beta w u g_cumsum cu_seqlens sequence_ids chunk_ids"),
        ("i32", "seq_len seq_chunks"),
        *_strides("kvgb"),
    )

    arch: str
    dtype: Dtype
    beta_dtype: Dtype
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_exp2: bool
    config: PrepareConfig

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_heads(self.num_heads, self.num_key_heads)
        check_member("k dtype", self.dtype, ("bf16", "fp16"))
        check_member("beta dtype", self.beta_dtype, get_args(Dtype))
        check_member("prepare mode", self.config.mode, PREPARE_MODES)
        _check_warps(self.config.num_warps)

    @property
    def max_registers(self) -> int | None:
        """The most registers that a lane may take on NVIDIA; None for as many as the compiler likes.

        128 instead of the 132 that ptxas takes by itself (no spills) put a 4th program on an SM of sm90.
        """
        one_more_program = self.config == PrepareConfig("fused", 4, self.config.num_stages) and self.dtype == "bf16"
        return 128 if one_more_program and self.arch.startswith("sm") else None

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of a workgroup on AMD."""
        return self.config.num_warps * AMD_WAVE, 1, 1

    def grid(self, total_chunks: int) -> tuple[int, int, int]:
        """Workgroups: x over chunks and value heads, the heads innermost."""
        return total_chunks * self.num_heads, 1, 1


@dataclass(frozen=True)
class StateScanSpec:
    """K5 for one model shape, with every switch that changes its code."""

    language: ClassVar[Language] = "triton"
    kernel: ClassVar[str] = "state_scan"
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = _mixed(
        (
            "pointer",
            "k w u g gk h v_new initial_state final_state state_indices has_initial_state cu_seqlens chunk_offsets",
        ),
        ("i32", "T"),
        ("i64", "num_slots"),
        *_strides("k"),
        ("i64", "stride_in stride_out"),
    )

    arch: str
    dtype: Dtype
    state_dtype: Dtype
    snapshot_dtype: Dtype
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_g: bool
    use_gk: bool
    use_initial_state: bool
    store_final_state: bool
    save_new_value: bool
    use_state_indices: bool
    use_state_mask: bool
    g_head_major: bool
    use_exp2: bool
    config: StateScanConfig

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_heads(self.num_heads, self.num_key_heads)
        check_member("k dtype", self.dtype, ("bf16", "fp16"))
        check_member("state_dtype", self.state_dtype, ("fp32", "bf16"))
        check_member("snapshot_dtype", self.snapshot_dtype, ("fp32", self.dtype))
        check_member("block_v", self.config.block_v, BLOCK_V)
        _check_warps(self.config.num_warps)

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of a workgroup on AMD."""
        return self.config.num_warps * AMD_WAVE, 1, 1

    def grid(self, num_seqs: int) -> tuple[int, int, int]:
        """Workgroups: x over sequences, value heads and tiles of V, the tiles innermost."""
        return HEAD_DIM // self.config.block_v * num_seqs * self.num_heads, 1, 1


@dataclass(frozen=True)
class OutputSpec:
    """K6 for one model shape."""

    language: ClassVar[Language] = "triton"
    kernel: ClassVar[str] = "output"
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = _mixed(
        ("pointer", "q k v_new h g o cu_seqlens sequence_ids chunk_ids"),
        ("f32", "scale"),
        ("i32", "T"),
        *_strides("qko"),
    )

    arch: str
    dtype: Dtype
    snapshot_dtype: Dtype
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_exp2: bool
    config: OutputConfig

    def check(self) -> None:
        """Raise UnsupportedError if no kernel exists for this spec."""
        check_heads(self.num_heads, self.num_key_heads)
        check_member("q dtype", self.dtype, ("bf16", "fp16"))
        check_member("snapshot_dtype", self.snapshot_dtype, ("fp32", self.dtype))
        check_member("block_v", self.config.block_v, BLOCK_V)
        _check_warps(self.config.num_warps)

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of a workgroup on AMD."""
        return self.config.num_warps * AMD_WAVE, 1, 1

    def grid(self, total_chunks: int) -> tuple[int, int, int]:
        """Workgroups: x over chunks, value heads and tiles of V, the tiles innermost."""
        return HEAD_DIM // self.config.block_v * total_chunks * self.num_heads, 1, 1


def _check_warps(num_warps: int) -> None:
    check_member("num_warps", num_warps, (1, 2, 4, 8))
