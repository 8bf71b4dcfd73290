"""Machine code from assembly text, by the LLVM that Triton carries."""

import functools
import io
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from triton._C.libtriton import amd, llvm

TRIPLE = "amdgcn-amd-amdhsa"


@functools.cache
def _init_targets() -> None:
    llvm.init_targets()


def _object(text: str, arch: str) -> bytes:
    _init_targets()
    relocatable: bytes = amd.assemble_amdgcn(text, TRIPLE, arch, "")
    if not relocatable:
        raise ValueError(f"{arch}: the assembler rejected {text!r}")
    return relocatable


@functools.cache
def assemble(text: str, arch: str) -> bytes:
    """Raw machine code of lines of assembly; ValueError if `arch` lacks one (the reason is on standard error)."""
    relocatable = _object(f".text\n{text}\n", arch)
    code: bytes = ELFFile(io.BytesIO(relocatable)).get_section_by_name(".text").data()
    return code


@functools.cache
def build(text: str, arch: str) -> bytes:
    """Code object (linked ELF) of a whole `.s` file."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.o"), Path(folder, "out.hsaco")
        source.write_bytes(_object(text, arch))
        amd.link_hsaco(str(source), str(target))
        return target.read_bytes()
