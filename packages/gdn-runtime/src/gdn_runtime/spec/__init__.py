"""Frozen specs of every kernel: what the code of a kernel depends on, and nothing else.

A spec is the key of a code object: two calls with equal specs run the same machine code. Legality is stated here once;
selection, ahead-of-time compilation and tuning all call ``check``. Specs of code objects also name the kernel's
arguments and give its grid.
"""

from .base import (
    ARGUMENT_BYTES,
    BACKENDS,
    CHUNK,
    GATE_MIN,
    HEAD_DIM,
    KERNEL_ABI,
    LOG2E,
    Argument,
    ArgumentKind,
    Backend,
    Dtype,
)
from .flydsl import (
    AMD_ARCHS,
    SCAN_BLOCK_V,
    FusedPrepareSpec,
    OptStateScanSpec,
    PrepareVariant,
    Rounding,
    VkStateScanSpec,
)
from .triton import (
    BLOCK_V,
    PREPARE_MODES,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareMode,
    PrepareSpec,
    StateScanConfig,
    StateScanSpec,
)

__all__ = [
    "AMD_ARCHS",
    "ARGUMENT_BYTES",
    "BACKENDS",
    "BLOCK_V",
    "CHUNK",
    "GATE_MIN",
    "HEAD_DIM",
    "KERNEL_ABI",
    "LOG2E",
    "PREPARE_MODES",
    "SCAN_BLOCK_V",
    "Argument",
    "ArgumentKind",
    "Backend",
    "Dtype",
    "FusedPrepareSpec",
    "OptStateScanSpec",
    "OutputConfig",
    "OutputSpec",
    "PrepareConfig",
    "PrepareMode",
    "PrepareSpec",
    "PrepareVariant",
    "Rounding",
    "StateScanConfig",
    "StateScanSpec",
    "VkStateScanSpec",
]
