"""Kernel arguments: from Python values to the bytes that a kernel reads, by the metadata of the code object."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cdna_emu.report import Span

POINTER_KINDS = {"global_buffer", "image", "sampler", "pipe", "queue"}
NULL_POINTERS = 2  # Triton appends two scratch pointers that its launcher leaves null
_FLOATS = {2: "<e", 4: "<f", 8: "<d"}


class Argument(Protocol):
    """One entry of ``.args`` in the metadata of a code object."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def kind(self) -> str: ...


@dataclass
class Packed:
    """Kernel arguments as bytes, the memory that they point to, and what keeps that memory alive."""

    data: bytearray
    spans: list[Span] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)


def memory_of(value: Any) -> tuple[int, int, bool] | None:
    """Start address, bytes, and may it be written, of a numpy array or torch CPU tensor; None for what is neither."""
    if isinstance(value, np.ndarray):
        start, end = np.lib.array_utils.byte_bounds(value)
        return start, end - start, bool(value.flags.writeable)
    if callable(getattr(value, "data_ptr", None)) and hasattr(value, "stride"):
        if value.device.type != "cpu":
            raise ValueError(f"args: got a tensor on {value.device}, expected CPU tensors")
        if not value.numel():
            return value.data_ptr(), 0, True
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), (last + 1) * value.element_size(), True
    return None


def scalar_bytes(value: Any, size: int, what: str) -> bytes:
    """A by-value argument: int, bool, float, bytes, numpy or ctypes scalar, as ``size`` bytes."""
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        value = bytes(value)
    elif isinstance(value, np.generic) and value.dtype.itemsize == size:
        value = value.tobytes()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise ValueError(f"{what}: got {len(value)} bytes, expected {size}")
        return bytes(value)
    if isinstance(value, int):  # bool too
        if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
            raise ValueError(f"{what}: got {value}, expected an integer of {size} bytes")
        return (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    if isinstance(value, float):
        if size not in _FLOATS:
            raise ValueError(f"{what}: got a float, expected a value of {size} bytes")
        return struct.pack(_FLOATS[size], value)
    raise TypeError(f"{what}: got {type(value).__name__}, expected an int, float, bytes, or a numpy or ctypes scalar")


def pack(arguments: Sequence[Argument], size: int, values: Sequence[Any], hidden: dict[str, int]) -> Packed:
    """Kernarg bytes of a launch.

    Args:
        arguments: ``.args`` of the kernel. size: bytes of its kernarg segment.
        values: one for each argument that is not hidden; up to two pointers at the end may be left out (null).
        hidden: values of hidden arguments by kind; the others are 0.

    ValueError or TypeError for values that do not fit the arguments.
    """
    explicit = [argument for argument in arguments if not argument.kind.startswith("hidden_")]
    rest = explicit[len(values) :]
    if len(values) > len(explicit) or len(rest) > NULL_POINTERS or any(a.kind not in POINTER_KINDS for a in rest):
        raise ValueError(
            f"args: got {len(values)} values, expected {len(explicit)}: "
            + ", ".join(f"{a.name or '?'} ({a.kind}, {a.size} bytes)" for a in explicit)
        )
    packed = Packed(bytearray(size))
    for index, (argument, value) in enumerate(zip(explicit, values, strict=False)):
        what = f"args[{index}]" + (f" ({argument.name})" if argument.name else "")
        memory = memory_of(value)
        if memory is not None:
            if argument.kind not in POINTER_KINDS:
                raise TypeError(f"{what}: got an array, expected a value of {argument.size} bytes ({argument.kind})")
            packed.spans.append((*memory, index))
            packed.alive.append(value)
            value = memory[0]
        elif value is None and argument.kind in POINTER_KINDS:
            value = 0
        elif argument.kind in POINTER_KINDS and not isinstance(value, int | ctypes._SimpleCData | np.integer):
            raise TypeError(f"{what}: got {type(value).__name__}, expected an array, a tensor, an address or None")
        packed.data[argument.offset : argument.offset + argument.size] = scalar_bytes(value, argument.size, what)
    for argument in arguments:
        if argument.kind in hidden:
            raw = scalar_bytes(hidden[argument.kind], argument.size, argument.kind)
            packed.data[argument.offset : argument.offset + argument.size] = raw
    return packed


def hidden_arguments(grid: Sequence[int], block: Sequence[int], dynamic_lds: int) -> dict[str, int]:
    """Hidden arguments by kind, as the AMDGPU code object ABI (v5, v6) defines them; the grid is in workgroups."""
    hidden = {"hidden_dynamic_lds_size": dynamic_lds, "hidden_grid_dims": 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1}
    for axis, groups, items in zip("xyz", grid, block, strict=True):
        hidden[f"hidden_block_count_{axis}"] = groups
        hidden[f"hidden_group_size_{axis}"] = items
        hidden[f"hidden_remainder_{axis}"] = 0  # a grid in workgroups has no part of one
        hidden[f"hidden_global_offset_{axis}"] = 0
    return hidden
