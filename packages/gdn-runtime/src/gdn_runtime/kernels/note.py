"""Reads launch facts out of a code object's ELF file, once, when it has been compiled.

Layout of the note: "User Guide for AMDGPU Backend" of LLVM, section "Code Object V5 Metadata".
"""

from __future__ import annotations

import io
from typing import Any

import msgpack
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

from ..codeobject.facts import NULL_POINTERS, KernelArgument, LaunchFacts
from ..spec import ARGUMENT_BYTES, KernelSpec

NT_AMDGPU_METADATA = 32
MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}
"""Architecture by EF_AMDGPU_MACH, the low byte of e_flags."""


def read_facts(elf: bytes, spec: KernelSpec, dynamic_lds: int) -> LaunchFacts:
    """The facts of the one kernel in ``elf``. The note knows places and sizes of arguments, ``spec`` their names and
    kinds; ValueError where the two do not agree."""
    file = ELFFile(io.BytesIO(elf))
    machine = file["e_flags"] & 0xFF
    if MACHINES.get(machine) != spec.arch:
        raise ValueError(f"EF_AMDGPU_MACH: got {machine:#x} ({MACHINES.get(machine)}), expected {spec.arch}")
    kernels = _metadata(file)["amdhsa.kernels"]
    if len(kernels) != 1:
        raise ValueError(f"kernels in the code object: got {len(kernels)}, expected 1")
    kernel: dict[str, Any] = kernels[0]
    if kernel[".wavefront_size"] != 64:
        raise ValueError(f"wavefront_size: got {kernel['.wavefront_size']}, expected 64")
    x, y, z = spec.block
    block = tuple(kernel.get(".reqd_workgroup_size", spec.block))
    if kernel[".max_flat_workgroup_size"] != x * y * z or block != spec.block:
        got = f"{kernel['.max_flat_workgroup_size']} work-items, {block}"
        raise ValueError(f"workgroup size of the kernel: got {got}, expected {spec.block}, the block of the spec")
    facts = LaunchFacts(
        symbol=kernel[".name"],
        arch=spec.arch,
        kernarg_bytes=kernel[".kernarg_segment_size"],
        arguments=_arguments(kernel.get(".args", []), spec),
        block=spec.block,
        lds_bytes=kernel[".group_segment_fixed_size"],
        dynamic_lds=dynamic_lds,
        scratch_bytes=kernel[".private_segment_fixed_size"],
        vgprs=kernel[".vgpr_count"],
        agprs=kernel.get(".agpr_count", 0),
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel[".vgpr_spill_count"],
        sgpr_spills=kernel[".sgpr_spill_count"],
    )
    facts.check(spec)
    return facts


def _arguments(args: list[dict[str, Any]], spec: KernelSpec) -> tuple[KernelArgument, ...]:
    count = len(spec.ARGUMENTS)
    extra = args[count:]
    null = spec.language == "triton" and [arg[".value_kind"] for arg in extra] == ["global_buffer"] * NULL_POINTERS
    if len(args) < count or (extra and not null):
        kinds = ", ".join(f"{arg['.size']} bytes {arg['.value_kind']}" for arg in args)
        raise ValueError(f"arguments of the kernel: got {len(args)} ({kinds}), expected the {count} of the spec")
    found = []
    for number, (arg, expected) in enumerate(zip(args, spec.ARGUMENTS, strict=False)):
        size = ARGUMENT_BYTES[expected.kind]
        pointer = arg[".value_kind"] == "global_buffer"
        if arg[".size"] != size or arg[".value_kind"] not in ("global_buffer", "by_value"):
            got = f"{arg['.size']} bytes {arg['.value_kind']}"
            raise ValueError(f"argument {number} ({expected.name}): got {got}, expected {size} bytes")
        if pointer and expected.kind != "pointer":
            raise ValueError(f"argument {number} ({expected.name}): got a pointer, expected {expected.kind}")
        found.append(KernelArgument(expected.name, expected.kind, arg[".offset"]))
    return tuple(found)


def _metadata(file: ELFFile) -> dict[str, Any]:
    for section in file.iter_sections():
        if isinstance(section, NoteSection):
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                    return msgpack.unpackb(note["n_descdata"], strict_map_key=False)
    raise ValueError("the code object has no NT_AMDGPU_METADATA note")
