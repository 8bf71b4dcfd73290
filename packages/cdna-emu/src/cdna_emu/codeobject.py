"""AMD code objects: ELF header, metadata note, kernel descriptors.

Layout of the kernel descriptor, its registers and the order of the user SGPRs: "User Guide for AMDGPU Backend" of LLVM,
sections "Kernel Descriptor", "Initial Kernel Execution State" and "Code Object V5 Metadata".
"""

import functools
import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from .counters import CLASSES, class_numbers
from .decode import Instruction, decode_text, records

EM_AMDGPU = 224
NT_AMDGPU_METADATA = 32
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}  # EF_AMDGPU_MACH, the low byte of e_flags
_DESCRIPTOR = struct.Struct("<IIIxxxxq20xIIIHHxxxx")
_DAMAGE = (
    *(ELFError, ConstructError, struct.error, UnicodeDecodeError),
    *(msgpack.UnpackException, msgpack.ExtraData, msgpack.FormatError, msgpack.StackError),
    *(LookupError, TypeError, AttributeError, OverflowError),  # values of the metadata note that are of another kind
)
_USER_SGPRS = (  # bit of kernel_code_properties, registers: in the order of the registers
    ("private_segment_buffer", 0, 4),
    ("dispatch_ptr", 1, 2),
    ("queue_ptr", 2, 2),
    ("kernarg_segment_ptr", 3, 2),
    ("dispatch_id", 4, 2),
    ("flat_scratch_init", 5, 2),
    ("private_segment_size", 6, 1),
)


@dataclass(frozen=True, slots=True)
class KernelArg:
    """One entry of `.args` in the metadata note."""

    name: str  # "" if the compiler gave none
    offset: int  # bytes into the kernarg segment
    size: int  # bytes
    kind: str  # .value_kind: "global_buffer", "by_value", "hidden_block_count_x", ...


@dataclass(frozen=True, slots=True)
class UserSgpr:
    """A group of SGPRs that hold launch state when a wave begins."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Kernel descriptor (`NAME.kd`)."""

    lds_bytes: int  # static LDS of a workgroup
    scratch_bytes: int  # private segment of a lane
    kernarg_size: int  # bytes; 0 in objects that leave it to the metadata
    entry: int  # bytes from the descriptor to the code
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """ValueError: not 64 bytes, or a wave32 kernel."""
        if len(data) != _DESCRIPTOR.size:
            raise ValueError(f"kernel descriptor: got {len(data)} bytes, expected {_DESCRIPTOR.size}")
        lds, scratch, kernarg, entry, rsrc3, rsrc1, rsrc2, properties, preload = _DESCRIPTOR.unpack(data)
        if properties >> 10 & 1:
            raise ValueError("kernel descriptor: got wave32, expected wave64")
        return cls(lds, scratch, kernarg, entry, rsrc1, rsrc2, rsrc3, properties, preload)

    @property
    def mode(self) -> int:
        """FLOAT_MODE: rounding of f32 (bits 0-1), f16 and f64 (2-3); denormals of f32 (4-5), f16 and f64 (6-7)."""
        return self.rsrc1 >> 12 & 0xFF

    @property
    def dx10_clamp(self) -> bool:
        return bool(self.rsrc1 >> 21 & 1)

    @property
    def ieee_mode(self) -> bool:
        return bool(self.rsrc1 >> 23 & 1)

    @property
    def user_sgpr_count(self) -> int:
        """All of them, preloaded kernel arguments too; the workgroup ids follow."""
        return self.rsrc2 >> 1 & 31

    @property
    def user_sgprs(self) -> tuple[UserSgpr, ...]:
        """Those enabled, in register order; "kernarg_preload" are dwords of the kernarg segment."""
        found: list[UserSgpr] = []
        first = 0
        for name, bit, count in _USER_SGPRS:
            if self.properties >> bit & 1:
                found.append(UserSgpr(name, first, count))
                first += count
        if self.preload_count:
            found.append(UserSgpr("kernarg_preload", first, self.preload_count))
        return tuple(found)

    @property
    def preload_count(self) -> int:
        """SGPRs that the hardware fills from the kernarg segment, beginning at dword `preload_offset`.

        Such kernels begin with 256 bytes of code that load the same registers, for firmware that does not.
        """
        return self.preload & 0x7F

    @property
    def preload_offset(self) -> int:
        return self.preload >> 7

    @property
    def workgroup_id(self) -> tuple[bool, bool, bool]:
        """x, y, z: those enabled take one SGPR each, in this order, behind the user SGPRs."""
        return (bool(self.rsrc2 >> 7 & 1), bool(self.rsrc2 >> 8 & 1), bool(self.rsrc2 >> 9 & 1))

    @property
    def workgroup_info(self) -> bool:
        return bool(self.rsrc2 >> 10 & 1)

    @property
    def workitem_id(self) -> int:
        """0: v0 holds x; 1: x and y; 2: x, y and z; ten bits each."""
        return self.rsrc2 >> 11 & 3

    @property
    def vgprs(self) -> int:
        """Allocated registers of a lane, AGPRs included."""
        return 8 * ((self.rsrc1 & 63) + 1)

    @property
    def accum_offset(self) -> int:
        """First register of the allocation that is an AGPR."""
        return 4 * ((self.rsrc3 & 63) + 1)

    @property
    def sgprs(self) -> int:
        """Allocated SGPRs. gfx9 with 800 of them per SIMD always gives 16 to a granule."""
        return 16 * ((self.rsrc1 >> 6 & 15) // 2 + 1)

    @property
    def dynamic_stack(self) -> bool:
        return bool(self.properties >> 11 & 1)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a code object. `metadata`: its map in the note."""

    name: str
    arch: str
    descriptor: Descriptor
    args: tuple[KernelArg, ...]
    kernarg_size: int  # bytes
    metadata: Mapping[str, Any]
    code: bytes = field(repr=False)
    address: int  # of `code`, bytes from the start of .text

    @property
    def lds_bytes(self) -> int:
        return self.descriptor.lds_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.descriptor.scratch_bytes

    @property
    def mode(self) -> int:
        return self.descriptor.mode

    @property
    def vgprs(self) -> int:
        """VGPRs that the code uses, without AGPRs."""
        return self._count("vgpr_count") - self.agprs

    @property
    def agprs(self) -> int:
        return self._count("agpr_count", 0)

    @property
    def sgprs(self) -> int:
        return self._count("sgpr_count")

    @property
    def max_workgroup_size(self) -> int:
        return self._count("max_flat_workgroup_size", 1024)

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f".{key}", default)
        if not isinstance(value, int):
            raise ValueError(f"metadata of {self.name}: .{key}: got {value!r}, expected an integer")
        return value

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        """Decoded at the first use."""
        return decode_text(self.code, arch=self.arch, base=self.address)

    @functools.cached_property
    def classes(self) -> npt.NDArray[np.uint8]:
        """Of the instructions, for the counters."""
        return class_numbers(self.instructions)

    @functools.cached_property
    def has_atomics(self) -> bool:
        """On global memory."""
        return CLASSES.index("vmem_atomic") in self.classes

    @functools.cached_property
    def records(self) -> npt.NDArray[np.void]:
        """The instructions as the core reads them; made once, for launches of the same kernel to begin at once."""
        return records(self.instructions)


@dataclass(frozen=True)
class CodeObject:
    """A code object of one architecture; what several kernels may share."""

    arch: str
    kernels: Mapping[str, Kernel]
    elf: bytes = field(repr=False)

    @classmethod
    def parse(cls, elf: bytes) -> Self:
        """Parse the bytes of an hsaco file.

        ValueError: not an ELF file, truncated, not for gfx942 or gfx950, or without a kernel.
        """
        if elf[:4] != b"\x7fELF":
            raise ValueError(f"elf: got {bytes(elf[:4])!r} at its start, expected an ELF file (b'\\x7fELF')")
        try:
            return cls(*_parse(elf), elf)
        except _DAMAGE as error:
            raise ValueError(
                f"elf: got {len(elf)} bytes, truncated or damaged ({error}), expected a whole file"
            ) from error

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of this name, or the only one. ValueError: no such kernel, or several and no name."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name is None or name not in self.kernels:
            raise ValueError(f"kernel: got {name!r}, expected one of {', '.join(sorted(self.kernels))}")
        return self.kernels[name]


def _parse(elf: bytes) -> tuple[str, dict[str, Kernel]]:
    file = ELFFile(io.BytesIO(elf))
    if file["e_machine"] != "EM_AMDGPU" and file["e_machine"] != EM_AMDGPU:
        raise ValueError(f"elf: got machine {file['e_machine']}, expected EM_AMDGPU")
    machine = file["e_flags"] & 0xFF
    arch = _MACHINES.get(machine)
    if arch is None:
        raise ValueError(f"elf: got EF_AMDGPU_MACH {machine:#x}, expected 0x4c (gfx942) or 0x4f (gfx950)")
    metadata = _metadata(file)
    symbols = {symbol.name: symbol for table in _symbol_tables(file) for symbol in table.iter_symbols()}
    kernels: dict[str, Kernel] = {}
    for entry in metadata.get("amdhsa.kernels", ()):
        kernel = _kernel(file, elf, arch, entry, symbols)
        kernels[kernel.name] = kernel
    if not kernels:
        raise ValueError("elf: got no kernel, expected one in the metadata note at least")
    return arch, kernels


def _symbol_tables(file: ELFFile) -> Iterator[SymbolTableSection]:
    return (section for section in file.iter_sections() if isinstance(section, SymbolTableSection))


def _metadata(file: ELFFile) -> dict[str, Any]:
    for section in file.iter_sections():
        if isinstance(section, NoteSection):
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                    unpacked = msgpack.unpackb(note["n_descdata"], strict_map_key=False)
                    if isinstance(unpacked, dict):
                        return unpacked
    raise ValueError("elf: got no NT_AMDGPU_METADATA note, expected one")


def _bytes_at(file: ELFFile, elf: bytes, address: int, size: int, what: str) -> tuple[bytes, int]:
    """Bytes of a virtual address, and their offset in its section."""
    for section in file.iter_sections():
        start = section["sh_addr"]
        if section["sh_type"] == "SHT_PROGBITS" and start <= address < start + section["sh_size"]:
            offset = address - start
            place = section["sh_offset"] + offset
            size = size or section["sh_size"] - offset
            if place + size > len(elf):
                raise ValueError(f"elf: got {len(elf)} bytes, expected {place + size} for {what}: truncated")
            return elf[place : place + size], offset
    raise ValueError(f"elf: {what}: got address {address:#x}, expected one inside a section")


def _kernel(file: ELFFile, elf: bytes, arch: str, entry: Mapping[str, Any], symbols: Mapping[str, Any]) -> Kernel:
    name, symbol_name = entry[".name"], entry[".symbol"]
    if symbol_name not in symbols:
        raise ValueError(f"kernel {name}: got no symbol {symbol_name}, expected its descriptor there")
    descriptor_address = symbols[symbol_name]["st_value"]
    descriptor = Descriptor.parse(_bytes_at(file, elf, descriptor_address, _DESCRIPTOR.size, symbol_name)[0])
    entry_address = descriptor_address + descriptor.entry
    function = symbols.get(symbol_name.removesuffix(".kd"))
    size = function["st_size"] if function is not None and function["st_value"] == entry_address else 0
    code, offset = _bytes_at(file, elf, entry_address, size, f"code of {name}")
    args = tuple(
        KernelArg(arg.get(".name", ""), arg[".offset"], arg[".size"], arg[".value_kind"])
        for arg in entry.get(".args", ())
    )
    kernarg_size = int(entry.get(".kernarg_segment_size", descriptor.kernarg_size))
    return Kernel(name, arch, descriptor, args, kernarg_size, entry, code, offset)
