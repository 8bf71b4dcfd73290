"""Random traffic of four waves in a few bytes of LDS: findings are those of a check that keeps every byte by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from programs import run

WAVES, LANES, LDS = 4, 64, 512
OPS = {  # bytes, and the part of the data register that a store takes
    "ds_write_b8": (1, 0),
    "ds_write_b8_d16_hi": (1, 2),
    "ds_write_b16": (2, 0),
    "ds_write_b16_d16_hi": (2, 2),
    "ds_write_b32": (4, 0),
    "ds_write_b64": (8, 0),
    "ds_write_b96": (12, 0),
    "ds_write_b128": (16, 0),
    "ds_read_u8": (1, 0),
    "ds_read_u16": (2, 0),
    "ds_read_b32": (4, 0),
    "ds_read_b64": (8, 0),
    "ds_read_b96": (12, 0),
    "ds_read_b128": (16, 0),
}


@dataclass
class Step:
    """One instruction of every wave, or a barrier (`op` empty)."""

    op: str
    address: list[int] = field(default_factory=list)  # by work-item
    value: list[bytes] = field(default_factory=list)  # of four registers
    lanes: int = 0


@dataclass
class Byte:
    """What the check keeps; epochs count from 1."""

    value: int = -1
    held: bool = False
    written: int = 0
    writer: int = 0
    read: int = 0
    readers: set[int] = field(default_factory=set)


def random_steps(rng: random.Random) -> list[Step]:
    align = rng.choice([1, 1, 2, 4, 16])
    values = [rng.randbytes(4) for _ in range(rng.choice([1, 2, 50]))]
    spread = rng.choice([2, 64])  # neighbours in one word, or anywhere
    steps = []
    for _ in range(rng.randint(4, 14)):
        if rng.random() < 0.3:
            steps.append(Step(""))
            continue
        op = rng.choice(sorted(OPS))
        size = OPS[op][0]
        own = rng.random() < 0.5  # a part of the LDS for each wave
        room = LDS // WAVES if own else LDS
        addresses, data = [], []
        for item in range(WAVES * LANES):
            start = item // LANES * room if own else 0
            at = item % LANES * size + rng.randrange(spread) if spread < 64 else rng.randrange(room)
            addresses.append(start + min(at, room - size) // align * align)
            data.append(b"".join(rng.choices(values, k=4)))
        steps.append(Step(op, addresses, data, rng.choice([2**64 - 1, rng.getrandbits(64) | 1])))
    return steps


def program(steps: list[Step]) -> tuple[str, np.ndarray]:
    """Its text; and the memory from which each step loads addresses and values, 5 dwords for each work-item."""
    lines = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "v_mul_u32_u24_e32 v1, 20, v0", "s_waitcnt lgkmcnt(0)"]
    memory = []
    for step in steps:
        if not step.op:
            lines.append("s_barrier")
            continue
        offset = 4 * len(memory)
        for address, value in zip(step.address, step.value, strict=True):
            memory += [address, *np.frombuffer(value, np.uint32).tolist()]
        data = {1: "v12", 2: "v12", 4: "v12", 8: "v[12:13]", 12: "v[12:14]", 16: "v[12:15]"}[OPS[step.op][0]]
        lines += [
            f"s_add_u32 s6, s4, {offset:#x}",
            "s_addc_u32 s7, s5, 0",
            "global_load_dword v8, v1, s[6:7]",
            "global_load_dwordx4 v[12:15], v1, s[6:7] offset:4",
            "s_waitcnt vmcnt(0)",
            f"s_mov_b32 exec_lo, {step.lanes & 0xFFFFFFFF:#x}",
            f"s_mov_b32 exec_hi, {step.lanes >> 32:#x}",
            f"{step.op} v8, {data}" if "write" in step.op else f"{step.op} {data}, v8",
            "s_waitcnt lgkmcnt(0)",
            "s_mov_b64 exec, -1",
        ]
    return "\n".join([*lines, "s_endpgm"]), np.array(memory or [0], np.uint32)


def expected(steps: list[Step], order: list[int]) -> set[tuple[str, int]]:
    """Kind of finding and number of the step."""
    lds = [Byte() for _ in range(LDS)]
    found = set()
    epoch, begin = 1, 0
    for end in [*(k for k, step in enumerate(steps) if not step.op), len(steps)]:
        for wave in order:
            for number in range(begin, end):
                access(lds, steps[number], number, wave, epoch, found)
        epoch, begin = epoch + 1, end + 1
    return found


def access(lds: list[Byte], step: Step, number: int, wave: int, epoch: int, found: set[tuple[str, int]]) -> None:
    size, part = OPS[step.op]
    store = "write" in step.op
    writes = []
    for lane in range(LANES):
        if not step.lanes >> lane & 1:
            continue
        item = wave * LANES + lane
        for k in range(size):
            byte, value = lds[step.address[item] + k], step.value[item][part + k]
            foreign = byte.written == epoch and byte.writer != wave
            if store:
                if foreign and byte.value != value:
                    found.add(("race", number))
                if byte.read == epoch and byte.readers - {wave}:
                    found.add(("race", number))
                byte.held, byte.written, byte.writer = True, epoch, wave
                writes.append((byte, value, k // 4))
                continue
            if foreign:
                found.add(("race", number))
            if not byte.held:
                found.add(("uninit-lds", number))
                byte.held = True
            if byte.read != epoch:
                byte.read, byte.readers = epoch, set()
            byte.readers.add(wave)
    for byte, value, _ in sorted(writes, key=lambda write: write[2]):  # register by register, lanes in order
        byte.value = value


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("seed", range(40))
def test_findings_are_those_of_single_bytes(seed: int, order: str) -> None:
    steps = random_steps(random.Random(seed))
    text, memory = program(steps)
    result = run(text, waves=WAVES, lds=LDS, out=memory, order=order)
    accesses = [line.address for line in result.counters.lines if line.text.startswith("ds_")]
    numbers = dict(zip(accesses, (number for number, step in enumerate(steps) if step.op), strict=True))
    waves = range(WAVES) if order == "forward" else reversed(range(WAVES))
    assert {(finding.kind, numbers[finding.pc]) for finding in result.report} == expected(steps, list(waves))
