"""Which s_waitcnt a program needs, from its text alone: an analysis that knows nothing of the emulator's own checks.

For every register that an unfinished memory operation writes, the state holds how many later operations of the same
counter have been issued at least (its age); s_waitcnt N finishes what has an age of N or more, because a counter's
operations finish in order. Scalar loads finish in any order, so only a wait for 0 finishes them, and while one may be
under way it is the only wait that says anything about the LDS operations that share its counter. Where paths meet, the
younger age holds. Loads and stores of one counter are in order on gfx9 (CDNA3 ISA, 4.4 "Data dependency resolution").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VECTOR_MEMORY, LDS, SCALAR = "vmcnt", "lds", "scalar"
LDS_WRITE, LDS_FILL = -1, -2
"""Stand for "an LDS write" and "a load from memory into LDS" among the register numbers."""
MAX_AGE = 63
NO_OPERAND = 0xFFFF
FIRST_SPECIAL = 128

State = dict[tuple[str, int], int]
"""(counter, register) -> age."""


@dataclass(frozen=True)
class Use:
    """The instruction at ``address`` needs something that nothing has waited for."""

    address: int
    text: str


def registers(operand: Any) -> Iterator[int]:
    """Operand codes of its registers; nothing for constants."""
    code, count, _ = operand
    if code != NO_OPERAND and (code < FIRST_SPECIAL or code >= 256):
        yield from range(code, code + count)


def event(mnemonic: str) -> str | None:
    """The counter that an instruction raises."""
    if mnemonic.startswith(("buffer_", "global_", "flat_", "scratch_")):
        return None if mnemonic in ("buffer_inv", "buffer_wbl2") else VECTOR_MEMORY
    if mnemonic.startswith("ds_"):
        return LDS
    return SCALAR if mnemonic.startswith(("s_load", "s_buffer_load")) else None


def limits(raw: bytes) -> tuple[int, int]:
    """vmcnt and lgkmcnt of an s_waitcnt of gfx9."""
    value = int.from_bytes(raw[:2], "little")
    return value & 15 | value >> 10 & 0x30, value >> 8 & 15


def wait(state: State, vector_memory: int, lgkm: int) -> State:
    """The state after s_waitcnt."""
    scalar_pending = any(counter == SCALAR for counter, _ in state)

    def finished(counter: str, age: int) -> bool:
        if counter == VECTOR_MEMORY:
            return age >= vector_memory
        return lgkm == 0 or (counter == LDS and not scalar_pending and age >= lgkm)

    return {key: age for key, age in state.items() if not finished(key[0], age)}


def needs(instruction: Any) -> set[int]:
    """Registers that an instruction reads or writes, and LDS accesses that a barrier publishes."""
    record = instruction.record
    if instruction.mnemonic == "s_barrier":
        return {LDS_WRITE, LDS_FILL}
    return {r for operand in (record.dst, record.sdst, *record.src) for r in registers(operand)}


def issued(state: State, instruction: Any) -> State:
    """The state after an instruction that is no wait."""
    counter = event(instruction.mnemonic)
    if counter is None:
        return state
    aged = {key: min(age + (key[0] == counter), MAX_AGE) for key, age in state.items()}
    writes = set(registers(instruction.record.dst))
    if counter == LDS and not writes:
        writes = {LDS_WRITE}
    elif counter == VECTOR_MEMORY and ("_lds_" in instruction.mnemonic or instruction.text.endswith(" lds")):
        writes = {LDS_FILL}
    return aged | {(counter, register): 0 for register in writes}


def edges(instructions: Sequence[Any], executed: Mapping[int, int] | None) -> list[list[int]]:
    """Indices of what may run after each instruction. With the counts of a launch (by address), what did run there: a
    branch was taken as often as it ran more often than the instruction behind it, if nothing else leads there."""
    targets = {i.record.offset for i in instructions if i.mnemonic.startswith(("s_branch", "s_cbranch"))}
    following: list[list[int]] = []
    for index, instruction in enumerate(instructions):
        mnemonic, behind = instruction.mnemonic, index + 1
        falls = mnemonic not in ("s_branch", "s_endpgm") and behind < len(instructions)
        jumps = mnemonic.startswith(("s_branch", "s_cbranch"))
        if executed is not None and falls:
            falls = executed[instructions[behind].address] > 0
            if jumps and behind not in targets:
                jumps = executed[instruction.address] > executed[instructions[behind].address]
        following.append([behind] * falls + [instruction.record.offset] * jumps)
    return following


def unmet_needs(
    instructions: Sequence[Any], removed: int | None = None, executed: Mapping[int, int] | None = None
) -> list[Use]:
    """Instructions that need unfinished operations when the s_waitcnt at address ``removed`` is not there; on the paths
    of one launch if its counts by address are given."""
    following = edges(instructions, executed)
    states: dict[int, State] = {0: {}}
    work = [0]
    while work:
        index = work.pop()
        state, instruction = states[index], instructions[index]
        if instruction.mnemonic == "s_waitcnt":
            after = state if instruction.address == removed else wait(state, *limits(instruction.raw))
        else:
            after = issued(state, instruction)
        for target in following[index]:
            before = states.get(target)
            joined = after if before is None else merge(before, after)
            if joined != before:
                states[target] = joined
                work.append(target)
    return [
        Use(instructions[index].address, instructions[index].text)
        for index, state in sorted(states.items())
        if instructions[index].mnemonic != "s_waitcnt" and needs(instructions[index]) & {key[1] for key in state}
    ]


def merge(a: State, b: State) -> State:
    """What may be unfinished after either."""
    return a | {key: min(age, a.get(key, age)) for key, age in b.items()}
