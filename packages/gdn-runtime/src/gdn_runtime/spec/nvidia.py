"""Which launch configurations of the Triton kernels of the block a tuned table may hold, on NVIDIA GPUs.

Every configuration that passes ``check`` of its spec compiles and runs. Those below were compiled for sm90 (Triton 3.6,
H/Hg = 32/16, bf16 data, packed sequences, bf16 and fp32 snapshots): they stay within the shared memory of a program and
keep no register in local memory, as ``cuobjdump -res-usage`` counts them; 2 warps take all 255 registers of a lane, and
spill with some sizes or some version of Triton.
"""

from __future__ import annotations

from .triton import OutputSpec, PrepareMode, PrepareSpec, StateScanSpec

TUNED_ARCHS = ("sm90",)
"""Architectures whose launch configurations tables may name."""

SCAN_STAGES: dict[tuple[int, int], int] = {
    (16, 4): 4, (16, 8): 4, (32, 4): 4, (32, 8): 4, (64, 4): 3, (64, 8): 4, (128, 8): 4,
}  # fmt: skip
"""K5: the deepest software pipeline by (value rows, warps) of a program."""
OUTPUT_WARPS = (4, 8)
"""K6: warps of a program, with any number of columns."""
PREPARE_WARPS: tuple[tuple[PrepareMode, int], ...] = (("fused", 4), ("fused", 8), ("split", 4), ("split", 8))
"""K1..K4: mode, and warps of a program."""


def config_refusal(spec: PrepareSpec | StateScanSpec | OutputSpec) -> str | None:
    """Why no table may hold the launch configuration of ``spec``; None if one may.

    K6 and K1..K4 have no loop over memory that ``num_stages`` could pipeline: 1 stands for any. Raises UnsupportedError
    as ``spec.check``.
    """
    spec.check()
    depth = 1
    if isinstance(spec, StateScanSpec):
        tile = spec.config.block_v, spec.config.num_warps
        found, depth = tile in SCAN_STAGES, SCAN_STAGES.get(tile, 1)
    elif isinstance(spec, OutputSpec):
        found = spec.config.num_warps in OUTPUT_WARPS
    else:
        found = (spec.config.mode, spec.config.num_warps) in PREPARE_WARPS
    words = " ".join(f"{name}={value}" for name, value in vars(spec.config).items())
    if not found:
        return f"{words}, which spills registers or takes all of them"
    if not 1 <= spec.config.num_stages <= depth:
        return f"{words}, num_stages from 1 to {depth} expected"
    return None
