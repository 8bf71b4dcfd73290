"""Frozen specs of every kernel: what the code of a kernel depends on, and nothing else.

A spec is the key of a code object: two calls with equal specs run the same machine code. Legality is stated here once;
selection, ahead-of-time compilation and tuning all call ``check``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import UnsupportedError

KERNEL_ABI = 1
"""Raised whenever the arguments or the meaning of a kernel change; a code object of another ABI is refused."""

HEAD_DIM = 128
"""K = V, the only head size of the GDN kernels."""

CHUNK = 64
"""Tokens per chunk (BT), the only chunk size of the kernels."""

GATE_MIN = -128.0
"""Least log gate of a token, natural logarithm. exp(-128) is 0 beside anything that fp32 holds to 1e-7, and a finite
floor keeps a gate of -inf from giving (-inf) - (-inf) inside its chunk."""

LOG2E = 1.4426950408889634
"""log2(e): gates in log2 units are natural ones times this."""

Backend = Literal["reference", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""Implementations of the stages; ``ops.backends`` knows the module of each."""

Dtype = Literal["bf16", "fp16", "fp32"]
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
        _check_heads(self.num_heads, self.num_key_heads)
        _check_member("k dtype", self.dtype, ("bf16", "fp16"))
        _check_member("beta dtype", self.beta_dtype, get_args(Dtype))
        _check_member("prepare mode", self.config.mode, PREPARE_MODES)
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
        _check_heads(self.num_heads, self.num_key_heads)
        _check_member("k dtype", self.dtype, ("bf16", "fp16"))
        _check_member("state_dtype", self.state_dtype, ("fp32", "bf16"))
        _check_member("snapshot_dtype", self.snapshot_dtype, ("fp32", self.dtype))
        _check_member("block_v", self.config.block_v, BLOCK_V)
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
        _check_heads(self.num_heads, self.num_key_heads)
        _check_member("q dtype", self.dtype, ("bf16", "fp16"))
        _check_member("snapshot_dtype", self.snapshot_dtype, ("fp32", self.dtype))
        _check_member("block_v", self.config.block_v, BLOCK_V)
        _check_warps(self.config.num_warps)


def _check_heads(num_heads: int, num_key_heads: int) -> None:
    if num_key_heads <= 0 or num_heads <= 0 or num_heads % num_key_heads:
        got = f"H={num_heads} value heads, Hg={num_key_heads} key heads"
        raise UnsupportedError("heads", got=got, supported=["H a positive multiple of Hg"])


def _check_member(name: str, got: object, supported: tuple[object, ...]) -> None:
    if got not in supported:
        raise UnsupportedError(name, got=got, supported=supported)


def _check_warps(num_warps: int) -> None:
    _check_member("num_warps", num_warps, (1, 2, 4, 8))
