"""Frozen specs of every kernel: what the code of a kernel depends on, and nothing else.

A spec is the key of a code object: two calls with equal specs run the same machine code. Legality is stated here once;
selection, ahead-of-time compilation and tuning all call ``check``. Specs of code objects also name the kernel's
arguments and give its grid.
"""

from .base import (
    ARGUMENT_BYTES,
    BACKENDS,
    CHUNK,
    CODE_OBJECT_BACKENDS,
    GATE_MIN,
    HEAD_DIM,
    KERNEL_ABI,
    LOG2E,
    Argument,
    ArgumentKind,
    Backend,
    Dtype,
    KernelSpec,
    Language,
)
from .flydsl import (
    AMD_ARCHS,
    SCAN_BLOCK_V,
    FusedPrepareSpec,
    OptStateScanSpec,
    PrepareVariant,
    Rounding,
    ScanKernel,
    VkStateScanSpec,
)
from .triton import (
    BLOCK_V,
    L2NORM_ROWS,
    L2NORM_WARPS,
    PREPARE_MODES,
    L2NormSpec,
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
    "CODE_OBJECT_BACKENDS",
    "GATE_MIN",
    "HEAD_DIM",
    "KERNEL_ABI",
    "L2NORM_ROWS",
    "L2NORM_WARPS",
    "LOG2E",
    "PREPARE_MODES",
    "SCAN_BLOCK_V",
    "Argument",
    "ArgumentKind",
    "Backend",
    "Dtype",
    "FusedPrepareSpec",
    "KernelSpec",
    "L2NormSpec",
    "Language",
    "OptStateScanSpec",
    "OutputConfig",
    "OutputSpec",
    "PrepareConfig",
    "PrepareMode",
    "PrepareSpec",
    "PrepareVariant",
    "Rounding",
    "ScanKernel",
    "StateScanConfig",
    "StateScanSpec",
    "VkStateScanSpec",
]
