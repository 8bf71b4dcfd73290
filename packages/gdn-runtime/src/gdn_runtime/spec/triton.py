"""Specs of the Triton kernels of the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .base import Dtype, check_heads, check_member

PrepareMode = Literal["fused", "split"]
PREPARE_MODES: tuple[PrepareMode, ...] = get_args(PrepareMode)
BLOCK_V = (16, 32, 64, 128)
"""Value columns per program of the state scan (BV) and of the output kernel."""


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
class PrepareSpec:
    """K1..K4 for one model shape: k [.., Hg, 128], v [.., H, 128] of ``dtype``; beta of ``beta_dtype``."""

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


@dataclass(frozen=True)
class StateScanSpec:
    """K5 for one model shape, with every switch that changes its code."""

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


@dataclass(frozen=True)
class OutputSpec:
    """K6 for one model shape."""

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


def _check_warps(num_warps: int) -> None:
    check_member("num_warps", num_warps, (1, 2, 4, 8))
