"""What the tests of memory and LDS instructions share: one instruction run, registers of buffers and pointers."""

from typing import Any

import numpy as np
import numpy.typing as npt
from asm import assemble

from cdna_emu.native import State, run_instruction

ARCHS = ("gfx942", "gfx950")
LANES = np.arange(64)
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
RAW = 0x27000  # word 3 of a resource of 32-bit elements


def run(arch: str, text: str, **state: Any) -> State:
    return run_instruction(arch, assemble(text, arch), **state)


def kinds(state: State) -> set[str]:
    return {finding.kind for finding in state.findings}


def resource(
    array: npt.NDArray[Any], records: int | None = None, stride: int = 0, word3: int = RAW, before: int = 0
) -> dict[int, int]:
    """SGPRs 8 to 11. `before`: bytes by which the base lies before the array."""
    base = array.ctypes.data - before
    size = array.nbytes + before if records is None else records
    return {8: base & 0xFFFFFFFF, 9: base >> 32 | stride << 16, 10: size, 11: word3}


def pointers(array: npt.NDArray[Any], offsets: npt.ArrayLike) -> dict[int, U32]:
    """VGPRs 2 and 3: base of the array + offset of each lane."""
    address = (array.ctypes.data + np.asarray(offsets, np.int64)).astype(np.uint64)
    return {2: (address & np.uint64(0xFFFFFFFF)).astype(np.uint32), 3: (address >> np.uint64(32)).astype(np.uint32)}


def base_pair(array: npt.NDArray[Any], before: int = 0) -> dict[int, int]:
    """SGPRs 2 and 3."""
    base = array.ctypes.data - before
    return {2: base & 0xFFFFFFFF, 3: base >> 32}


def random_bytes(count: int, seed: int = 0) -> U8:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def read(data: U8, offsets: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint64]:
    """Little-endian value of up to 8 bytes at each offset."""
    parts = [data[offsets + k].astype(np.uint64) << np.uint64(8 * k) for k in range(size)]
    return np.asarray(np.bitwise_or.reduce(parts), np.uint64)


FORMS = {
    "buffer": "buffer_{op} {data}, v1, s[8:11], 0 offen offset:16",
    "global_base": "global_{op} {data}, v1, s[2:3] offset:16",
    "global": "global_{op} {data}, v[2:3], off offset:16",
    "flat": "flat_{op} {data}, v[2:3] offset:16",
}


def at(array: npt.NDArray[Any], offsets: npt.ArrayLike) -> dict[str, Any]:
    """Registers for all of the forms; bases lie 16 bytes before the array, for the instruction's offset."""
    lane = np.asarray(offsets)
    return {
        "vgpr": {1: lane.astype(np.uint32), **pointers(array, lane - 16)},
        "sgpr": {**resource(array, before=16), **base_pair(array, before=16)},
        "memory": [array],
    }


def registers(n: int, first: int = 4) -> str:
    return f"v{first}" if n == 1 else f"v[{first}:{first + n - 1}]"
