"""Code objects: what is parsed equals what the assembly says, and damaged input is refused by name."""

from __future__ import annotations

import random
import re
import struct
from typing import Any

import msgpack
import pytest
from asm import build
from kernels.compiled import ARCHS, Compiled
from kernels.triton_cases import CASES

from cdna_emu.codeobject import CodeObject, KernelArg, UserSgpr

NAMES = ("add", "layernorm", "matmul-bf16-32", "matmul-f16-16")
COMPILED = [pytest.param(name, arch, id=f"{name}-{arch}") for arch in ARCHS for name in NAMES]

SOURCE = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl first
.p2align 8
.type first,@function
first:
  s_load_dwordx2 s[6:7], s[4:5], 0x0
  s_waitcnt lgkmcnt(0)
  s_endpgm
.size first, .-first
.globl second
.p2align 8
.type second,@function
second:
  v_mov_b32_e32 v0, 0
  s_endpgm
.size second, .-second
.rodata
.p2align 6
.amdhsa_kernel first
  .amdhsa_group_segment_fixed_size 1040
  .amdhsa_private_segment_fixed_size 16
  .amdhsa_kernarg_size 24
  .amdhsa_user_sgpr_dispatch_ptr 1
  .amdhsa_user_sgpr_queue_ptr 1
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_dispatch_id 1
  .amdhsa_user_sgpr_private_segment_size 1
  .amdhsa_user_sgpr_kernarg_preload_length 3
  .amdhsa_user_sgpr_kernarg_preload_offset 2
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y 0
  .amdhsa_system_sgpr_workgroup_id_z 1
  .amdhsa_system_vgpr_workitem_id 2
  .amdhsa_next_free_vgpr 100
  .amdhsa_next_free_sgpr 40
  .amdhsa_accum_offset 64
  .amdhsa_float_round_mode_32 1
  .amdhsa_float_round_mode_16_64 2
  .amdhsa_float_denorm_mode_32 0
  .amdhsa_float_denorm_mode_16_64 3
  .amdhsa_ieee_mode 0
.end_amdhsa_kernel
.amdhsa_kernel second
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr 1
  .amdhsa_next_free_sgpr 8
  .amdhsa_accum_offset 4
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
{kernels}
.end_amdgpu_metadata
"""
KERNEL = """  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 24
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 1040
    .private_segment_fixed_size: 16
    .wavefront_size: 64
    .sgpr_count: 46
    .vgpr_count: 100
    .agpr_count: 36
    .max_flat_workgroup_size: 256
    .args:
      - {{.name: out, .offset: 0, .size: 8, .value_kind: global_buffer}}
      - {{.offset: 8, .size: 4, .value_kind: by_value}}
      - {{.offset: 16, .size: 4, .value_kind: hidden_block_count_x}}
"""


def two_kernels(arch: str = "gfx942") -> bytes:
    kernels = "".join(KERNEL.format(name=name) for name in ("first", "second"))
    return build(SOURCE.format(arch=arch, kernels=kernels.rstrip()), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_descriptor_and_arguments(arch: str) -> None:
    code = CodeObject.parse(two_kernels(arch))
    assert code.arch == arch and list(code.kernels) == ["first", "second"]
    kernel = code.kernel("first")
    assert kernel.args == (
        KernelArg("out", 0, 8, "global_buffer"),
        KernelArg("", 8, 4, "by_value"),
        KernelArg("", 16, 4, "hidden_block_count_x"),
    )
    assert (kernel.lds_bytes, kernel.scratch_bytes, kernel.kernarg_size) == (1040, 16, 24)
    assert (kernel.vgprs, kernel.agprs, kernel.sgprs, kernel.max_workgroup_size) == (64, 36, 46, 256)
    descriptor = kernel.descriptor
    assert descriptor.user_sgprs == (
        UserSgpr("dispatch_ptr", 0, 2),
        UserSgpr("queue_ptr", 2, 2),
        UserSgpr("kernarg_segment_ptr", 4, 2),
        UserSgpr("dispatch_id", 6, 2),
        UserSgpr("private_segment_size", 8, 1),
        UserSgpr("kernarg_preload", 9, 3),
    )
    assert (descriptor.user_sgpr_count, descriptor.preload_count, descriptor.preload_offset) == (12, 3, 2)
    assert descriptor.workgroup_id == (True, False, True) and descriptor.workitem_id == 2
    assert descriptor.mode == 1 | 2 << 2 | 0 << 4 | 3 << 6
    assert (descriptor.ieee_mode, descriptor.dx10_clamp, descriptor.dynamic_stack) == (False, True, False)
    assert (descriptor.vgprs, descriptor.accum_offset) == (104, 64)


def test_each_kernel_has_its_own_code() -> None:
    code = CodeObject.parse(two_kernels())
    first, second = (code.kernel(name) for name in ("first", "second"))
    assert [i.text for i in first.instructions] == [
        "s_load_dwordx2 s[6:7], s[4:5], 0x0", "s_waitcnt lgkmcnt(0)", "s_endpgm",
    ]  # fmt: skip
    assert [(i.address, i.text) for i in second.instructions] == [(256, "v_mov_b32_e32 v0, 0"), (260, "s_endpgm")]
    assert second.descriptor.user_sgprs == (UserSgpr("kernarg_segment_ptr", 0, 2),)
    with pytest.raises(ValueError, match="kernel: got None, expected one of first, second"):
        code.kernel()
    with pytest.raises(ValueError, match="kernel: got 'third', expected one of first, second"):
        code.kernel("third")


def directive(compiled: Compiled, name: str) -> int:
    match = re.search(rf"^\s*\.amdhsa_{name} (\d+)$", compiled.assembly, re.MULTILINE)
    assert match, name
    return int(match[1])


def metadata_value(compiled: Compiled, name: str) -> int:
    match = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)$", compiled.assembly, re.MULTILINE)
    assert match, name
    return int(match[1])


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_descriptor_of_triton_equals_its_assembly(name: str, arch: str) -> None:
    compiled = CASES[name](arch).compiled
    code = CodeObject.parse(compiled.elf)
    kernel = code.kernel()
    descriptor = kernel.descriptor
    assert code.arch == arch and kernel.name == compiled.name
    assert descriptor.user_sgpr_count == directive(compiled, "user_sgpr_count")
    assert descriptor.preload_count == directive(compiled, "user_sgpr_kernarg_preload_length")
    assert sum(group.count for group in descriptor.user_sgprs) == descriptor.user_sgpr_count
    assert descriptor.workgroup_id == tuple(
        bool(directive(compiled, f"system_sgpr_workgroup_id_{axis}")) for axis in "xyz"
    )
    assert descriptor.workitem_id == directive(compiled, "system_vgpr_workitem_id")
    assert descriptor.accum_offset == directive(compiled, "accum_offset")
    assert descriptor.mode >> 4 & 3 == directive(compiled, "float_denorm_mode_32") == 3
    assert kernel.lds_bytes == directive(compiled, "group_segment_fixed_size")
    assert kernel.scratch_bytes == directive(compiled, "private_segment_fixed_size")
    assert (
        kernel.kernarg_size == directive(compiled, "kernarg_size") == metadata_value(compiled, "kernarg_segment_size")
    )
    assert kernel.vgprs + kernel.agprs == metadata_value(compiled, "vgpr_count") <= descriptor.vgprs
    assert kernel.sgprs == metadata_value(compiled, "sgpr_count") <= descriptor.sgprs
    last = kernel.args[-1]
    assert last.offset + last.size <= kernel.kernarg_size
    assert any(instruction.text == "s_endpgm" for instruction in kernel.instructions)


def with_flags(elf: bytes, flags: int) -> bytes:
    return elf[:48] + struct.pack("<I", flags) + elf[52:]


def without_kernels(elf: bytes) -> bytes:
    """The name of the list of kernels in the metadata note changes by a letter."""
    assert elf.count(b"amdhsa.kernels") == 1
    return elf.replace(b"amdhsa.kernels", b"amdhsa.kernelz")


def test_damaged_files_are_refused() -> None:
    elf = two_kernels()
    cases: list[tuple[bytes, str]] = [
        (b"", "expected an ELF file"),
        (b"MZ" + elf[2:], "expected an ELF file"),
        (with_flags(elf, 0x3F), r"EF_AMDGPU_MACH 0x3f, expected 0x4c \(gfx942\) or 0x4f \(gfx950\)"),
        (elf[:18] + struct.pack("<H", 62) + elf[20:], "machine EM_X86_64, expected EM_AMDGPU"),
        (without_kernels(elf), "got no kernel, expected one"),
        (elf.replace(b"AMDGPU\0", b"AMDGPX\0"), "got no NT_AMDGPU_METADATA note"),
    ]
    for damaged, message in cases:
        with pytest.raises(ValueError, match=message):
            CodeObject.parse(damaged)


@pytest.mark.parametrize("kept", [4, 16, 63, 64, 200, 600, 1100, 0.5, 0.9])
def test_truncated_files_are_refused(kept: float) -> None:
    elf = two_kernels()
    with pytest.raises(ValueError, match="elf: got"):
        CodeObject.parse(elf[: kept if isinstance(kept, int) else int(len(elf) * kept)])


def test_random_damage_is_an_error_or_harmless() -> None:
    elf = two_kernels()
    chance = random.Random(1)
    for _ in range(500):
        damaged = bytearray(elf)
        for _ in range(3):
            damaged[chance.randrange(len(elf))] = chance.randrange(256)
        try:
            code = CodeObject.parse(bytes(damaged))
        except ValueError:
            continue
        for kernel in code.kernels.values():
            assert all(instruction.text for instruction in kernel.instructions)


def test_a_wave32_kernel_is_refused() -> None:
    elf = bytearray(two_kernels())
    code = CodeObject.parse(bytes(elf)).kernel("second").descriptor
    packed = struct.pack("<IHH", code.rsrc2, code.properties, code.preload)
    place = elf.rindex(packed) + 4
    elf[place : place + 2] = struct.pack("<H", code.properties | 1 << 10)
    with pytest.raises(ValueError, match="got wave32, expected wave64"):
        CodeObject.parse(bytes(elf))


def test_metadata_is_that_of_the_note() -> None:
    elf = two_kernels()
    code = CodeObject.parse(elf)
    start = elf.index(b"AMDGPU\0\0") + 8
    length = struct.unpack_from("<I", elf, start - 16)[0]
    note: dict[str, Any] = msgpack.unpackb(elf[start : start + length])
    assert [dict(kernel.metadata) for kernel in code.kernels.values()] == note["amdhsa.kernels"]
