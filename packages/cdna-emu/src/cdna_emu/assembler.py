"""Code objects from .s text, by the assembler and linker that Triton carries."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

TRIPLE = "amdgcn-amd-amdhsa"
_TARGET = re.compile(r'^\s*\.amdgcn_target\s+"amdgcn-amd-amdhsa-(?:unknown)?-(gfx[0-9a-f]+)', re.MULTILINE)


def target_of(text: str) -> str | None:
    """Architecture that the ``.amdgcn_target`` of the text names, or None."""
    match = _TARGET.search(text)
    return match[1] if match else None


def assemble(text: str, arch: str | None = None) -> bytes:
    """Code object (ELF) of a whole .s file.

    ``arch`` defaults to the ``.amdgcn_target`` of the text. ImportError without Triton; ValueError for text that the
    assembler rejects: its messages, with line numbers, are on standard error.
    """
    arch = arch or target_of(text)
    if arch is None:
        raise ValueError("arch: got None, expected an architecture, for the text has no .amdgcn_target")
    try:
        from triton._C.libtriton import amd, llvm
    except ImportError as error:
        raise ImportError(".s text needs the assembler that Triton carries: pip install 'cdna-emu[asm]'") from error
    llvm.init_targets()
    relocatable = amd.assemble_amdgcn(text, TRIPLE, arch, "")
    if not relocatable:
        raise ValueError(f"{arch}: the assembler rejected the text; its messages are on standard error")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.o"), Path(folder, "out.hsaco")
        source.write_bytes(relocatable)
        amd.link_hsaco(str(source), str(target))
        return target.read_bytes()
