"""What a launch did wrong: findings that print as people want to read them, and as JSON."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

# By number of `enum Finding_` in core.h: short name, what is said of it.
KINDS = {
    1: ("race", "LDS race"),
    2: ("lds-bounds", "LDS access out of bounds"),
    3: ("global-bounds", "global access outside every argument"),
    4: ("read-only", "store to a read-only argument"),
    5: ("buffer-bounds", "buffer access outside its resource (loads give 0, stores are dropped)"),
    6: ("uninit-vgpr", "read of a vector register that was never written"),
    7: ("uninit-sgpr", "read of a scalar register that was never written"),
    8: ("uninit-lds", "read of LDS that was never written"),
    9: ("missing-wait", "register used before its s_waitcnt"),
    10: ("lds-at-barrier", "LDS access still under way at a barrier"),
    11: ("mfma-hazard", "MFMA hazard: too few wait states"),
    12: ("barrier", "barrier that not every wave reaches"),
    13: ("budget", "instruction budget exhausted"),
    14: ("unsupported", "unsupported instruction"),
    15: ("misaligned", "misaligned access"),
    16: ("scratch-bounds", "access outside the lane's scratch memory"),
}
NOTHING = 0xFFFFFFFF  # "none" in fields of the core: lane, other_insn, other_wave

Span = tuple[int, int, bool, int]  # start address, bytes, writable, number of the argument


class NativeFindingLike(Protocol):
    """The fields of ``Finding`` in core.h."""

    kind: int
    insn: int
    wave: int
    lane: int
    group: Any
    other_insn: int
    other_wave: int
    detail: int
    address: int


class InstructionLike(Protocol):
    """What the report needs of a decoded instruction."""

    @property
    def address(self) -> int: ...
    @property
    def mnemonic(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class Finding:
    """One thing that a kernel did wrong.

    Attributes:
        kind: short name, a value of ``KINDS``.
        instruction, pc: text of the instruction, and its address in bytes from the start of the code section.
        group, wave, lane: who did it: workgroup (x, y, z), wave in the workgroup, lane; lane None: the whole wave.
        address: device or LDS address in bytes; None if the finding is not about memory.
        place: the address as people read it: "arg 2 + 0x140", "LDS + 0x40".
        register: of findings about registers: "v3", "a0", "s4", else None.
        other_instruction, other_pc, other_wave: what it raced with, or what should have been waited for.
        detail: the core's number for this kind (bytes, register or wait states).
    """

    kind: str
    kernel: str
    instruction: str
    pc: int
    group: tuple[int, int, int]
    wave: int
    lane: int | None
    address: int | None
    place: str | None
    register: str | None
    other_instruction: str | None
    other_pc: int | None
    other_wave: int | None
    detail: int

    @property
    def title(self) -> str:
        """The kind in words."""
        return next(words for name, words in KINDS.values() if name == self.kind)

    def __str__(self) -> str:
        who = f"workgroup {self.group}, wave {self.wave}" + ("" if self.lane is None else f", lane {self.lane}")
        lines = [
            f"{self.title}"
            + (f": {self.register}" if self.register else "")
            + (f" at {self.place}" if self.place else ""),
            f"  {self.pc:#06x}: {self.instruction}",
            f"  in {self.kernel}, {who}" if self.kernel else f"  in {who}",
        ]
        if self.other_instruction is not None:
            whose = "" if self.other_wave is None else f" of wave {self.other_wave}"
            relation = "races with" if self.kind == "race" else "after"
            lines.append(f"  {relation} {self.other_pc:#06x}: {self.other_instruction}{whose}")
        return "\n".join(lines)


class Report(list[Finding]):
    """The findings of one launch, in the order of workgroups.

    Attributes:
        kernel: name of the kernel.
        dropped: findings beyond the limit, counted only.
    """

    def __init__(self, findings: Iterable[Finding] = (), *, kernel: str = "", dropped: int = 0) -> None:
        super().__init__(findings)
        self.kernel = kernel
        self.dropped = dropped

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self and not self.dropped

    def kinds(self) -> set[str]:
        """Short names of the kinds that were found."""
        return {finding.kind for finding in self}

    def __str__(self) -> str:
        if self.ok:
            return f"{self.kernel}: nothing found"
        total = len(self) + self.dropped
        head = f"{self.kernel}: {total} finding" + ("s" if total != 1 else "")
        tail = [f"({self.dropped} more were not kept)"] if self.dropped else []
        return "\n\n".join([head, *map(str, self), *tail])

    def to_json(self) -> str:
        """``{"kernel", "ok", "dropped", "findings": [fields of Finding]}`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """What ``to_json`` writes."""
        return {
            "kernel": self.kernel,
            "ok": self.ok,
            "dropped": self.dropped,
            "findings": [asdict(finding) for finding in self],
        }


def register_name(kind: str, code: int) -> str | None:
    """Name of the register in ``detail`` of findings about registers."""
    if kind not in {"uninit-vgpr", "uninit-sgpr", "missing-wait", "mfma-hazard"}:
        return None
    if code >= 1024:  # NO_OPERAND: about no register
        return None
    if code >= 512:
        return f"a{code - 512}"
    if code >= 256:
        return f"v{code - 256}"
    special = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
    return special.get(code, f"s{code}")


def place_of(kind: str, address: int, instruction: str, spans: Sequence[Span]) -> str:
    """An address relative to LDS, scratch, or the argument that holds it or lies nearest before it, else behind."""
    if kind in LDS_KINDS or (kind == "misaligned" and instruction.startswith("ds_")):
        return f"LDS + {address:#x}"
    if kind == "scratch-bounds":
        return f"scratch + {address:#x}"
    ordered = sorted(span for span in spans if span[1])
    index = bisect.bisect_right([start for start, *_ in ordered], address) - 1
    if index >= 0:
        start, size, _, argument = ordered[index]
        if address < start + size:
            return f"{name_of(argument)} + {address - start:#x}"
        gap = address - (start + size)
        if gap < size + (1 << 20):
            return f"{name_of(argument)} + {address - start:#x}, {gap} bytes past its end ({size} bytes)"
    if index + 1 < len(ordered):
        start, _, _, argument = ordered[index + 1]
        if start - address < 1 << 20:
            return f"{name_of(argument)} - {start - address:#x}"
    return f"address {address:#x}"


def name_of(argument: int) -> str:
    """Name of a known range."""
    return INTERNAL.get(argument, f"arg {argument}")


# Ranges that no argument of the caller stands for.
KERNARG, PACKET = 0xFFFF0001, 0xFFFF0002
INTERNAL = {KERNARG: "kernel arguments", PACKET: "dispatch packet"}


def findings_from(
    native: Iterable[NativeFindingLike],
    instructions: Sequence[InstructionLike],
    *,
    kernel: str,
    spans: Sequence[Span],
) -> list[Finding]:
    """Findings of the core as ``Finding`` objects."""
    return [finding_from(item, instructions, kernel, spans) for item in native]


# Kinds whose `address` of the core is in LDS, and those where it means memory at all.
LDS_KINDS = {"race", "lds-bounds", "uninit-lds"}
MEMORY_KINDS = {"race", "lds-bounds", "global-bounds", "read-only", "buffer-bounds", "uninit-lds", "misaligned"}
MEMORY_KINDS |= {"scratch-bounds"}


def finding_from(
    item: NativeFindingLike, instructions: Sequence[InstructionLike], kernel: str, spans: Sequence[Span]
) -> Finding:
    """One of them."""
    kind = KINDS[item.kind][0]
    at = instructions[item.insn] if item.insn < len(instructions) else None
    other = instructions[item.other_insn] if item.other_insn < len(instructions) else None
    address = int(item.address) if kind in MEMORY_KINDS else None
    has_other = kind == "race" or (other is not None and kind in {"missing-wait", "lds-at-barrier", "mfma-hazard"})
    return Finding(
        kind=kind,
        kernel=kernel,
        instruction=at.text if at else "(no instruction)",
        pc=at.address if at else 0,
        group=(int(item.group[0]), int(item.group[1]), int(item.group[2])),
        wave=int(item.wave),
        lane=int(item.lane) if item.lane < 64 else None,
        address=address,
        place=None if address is None else place_of(kind, address, at.text if at else "", spans),
        register=register_name(kind, item.detail),
        other_instruction=other.text if other and has_other else None,
        other_pc=other.address if other and has_other else None,
        other_wave=int(item.other_wave) if has_other and item.other_wave != NOTHING else None,
        detail=int(item.detail),
    )
