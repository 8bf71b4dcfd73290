"""Kernel arguments as text: what follows ``--arg`` on the command line."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SCALARS: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
# bf16 is stored as its bits: numpy has no such type.
ELEMENTS: dict[str, type[np.generic]] = {
    "i8": np.int8,
    "u8": np.uint8,
    "i16": np.int16,
    "u16": np.uint16,
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "f16": np.float16,
    "bf16": np.uint16,
    "f32": np.float32,
    "f64": np.float64,
}
FORMS = (
    "TYPE:VALUE (i32:5, f32:1.0), buf:TYPE:COUNT[:zeros|random|range|FILE.npy], out:TYPE:COUNT, null; "
    f"scalars {', '.join(SCALARS)}; elements {', '.join(ELEMENTS)}"
)


def parse(text: str, seed: int = 0) -> Any:
    """The value of one argument: a ctypes scalar, an array, or None for ``null``.

    ``buf`` is memory with contents, ``out`` memory of zeros that the command prints afterwards. ``random``: normal for
    floats, 0 to 99 for integers, of ``seed``. ValueError for what is neither.
    """
    form, *rest = text.split(":")
    if form == "null" and not rest:
        return None
    if form in SCALARS and len(rest) == 1:
        kind = SCALARS[form]
        number = float(rest[0]) if form.startswith("f") else int(rest[0], 0)
        value = kind(number)
        if isinstance(number, int) and value.value != number:
            raise ValueError(f"{text}: does not fit {form}")
        return value
    if form in {"buf", "out"} and len(rest) >= 2 and rest[0] in ELEMENTS:
        element, count = rest[0], int(rest[1], 0)
        fill = ":".join(rest[2:]) or "zeros"
        if count < 0 or (form == "out" and len(rest) > 2):
            raise ValueError(f"{text}: expected {FORMS}")
        return contents(element, count, fill, seed)
    raise ValueError(f"{text}: expected {FORMS}")


def contents(element: str, count: int, fill: str, seed: int) -> Array:
    """An array of ``count`` elements."""
    dtype = ELEMENTS[element]
    if fill == "zeros":
        return np.zeros(count, dtype)
    if fill in {"random", "range"}:
        real = element.startswith(("f", "bf"))
        if fill == "range":
            values: Array = np.arange(count)
        else:
            generator = np.random.default_rng(seed)
            values = generator.standard_normal(count) if real else generator.integers(0, 100, count)
        return bf16_bits(values) if element == "bf16" else values.astype(dtype)
    path = Path(fill)
    if path.suffix != ".npy":
        raise ValueError(f"{fill}: expected zeros, random, range or a .npy file")
    loaded: Array = np.load(path, allow_pickle=False)
    if loaded.size != count or loaded.dtype != dtype:
        raise ValueError(f"{fill}: got {loaded.size} of {loaded.dtype}, expected {count} of {np.dtype(dtype)}")
    return np.ascontiguousarray(loaded)


def bf16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """Bits of finite numbers rounded to bfloat16, to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
