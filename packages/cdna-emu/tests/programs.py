"""Whole kernels from a few lines of assembly: what the tests of checks run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cdna_emu.machine import Result, launch
from cdna_emu.report import Report

HEADER = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl probe
.p2align 8
.type probe,@function
probe:
{body}
.Lend:
.size probe, .Lend-probe
.rodata
.p2align 6
.amdhsa_kernel probe
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_kernarg_size 8
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_vgpr_workitem_id {workitem_id}
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset {accum}
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{arch}
amdhsa.kernels:
  - .name: probe
    .symbol: probe.kd
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .wavefront_size: 64
    .sgpr_count: 102
    .vgpr_count: {vgprs}
    .agpr_count: {agprs}
    .max_flat_workgroup_size: 1024
    .args:
      - .name: out
        .offset: 0
        .size: 8
        .value_kind: global_buffer
        .address_space: global
.end_amdgpu_metadata
"""


def text(body: str, *, arch: str = "gfx942", lds: int = 0, workitem_id: int = 0, scratch: int = 0) -> str:
    """A kernel `probe` with one pointer as its argument; s[0:1] kernarg segment, s2 workgroup id x, v0 work-item id."""
    sizes = {"lds": lds, "scratch": scratch, "workitem_id": workitem_id, "vgprs": 128, "accum": 64, "agprs": 64}
    return HEADER.format(arch=arch, body=body, **sizes)


def run(
    body: str,
    *,
    waves: int = 1,
    block: int | tuple[int, ...] | None = None,
    grid: int = 1,
    out: npt.NDArray[np.uint32] | None = None,
    arch: str = "gfx942",
    lds: int = 0,
    workitem_id: int = 0,
    scratch: int = 0,
    **options: object,
) -> Result:
    """Launch it with `waves` full waves (or `block`), strict=False."""
    memory = np.zeros(4096, np.uint32) if out is None else out
    settings = {"strict": False, "threads": 1, **options}
    return launch(
        text(body, arch=arch, lds=lds, workitem_id=workitem_id, scratch=scratch),
        grid=grid,
        block=64 * waves if block is None else block,
        args=[memory],
        **settings,
    )


def findings(body: str, **options: object) -> Report:
    return run(body, **options).report
