"""What a launch executed: instructions by class and by address, memory traffic, LDS cycles, registers, occupancy."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cdna_emu.decode import BLGP, CBSZ, Instruction
from cdna_emu.mfma_passes import mfma_cycles
from cdna_emu.native import COUNT_FIELDS, LANES

# Public limits of a compute unit: AMD Instinct MI300 ISA (CDNA3) and AMD Instinct CDNA4 ISA, and LLVM's AMDGPU target.
SIMDS_PER_CU = 4
MAX_WAVES_PER_SIMD = 8
VGPRS_PER_LANE, VGPR_GRANULE = 512, 8  # VGPRs and AGPRs together
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
LDS_GRANULE = {"gfx942": 512, "gfx950": 1280}

CLASSES = (
    "valu",
    "mfma",
    "salu",
    "branch",
    "smem",
    "vmem_load",
    "vmem_store",
    "vmem_atomic",
    "lds_read",
    "lds_write",
    "lds_atomic",
    "lds_lanes",
    "wait",
    "barrier",
    "other",
)
_VMEM = ("buffer_", "global_", "flat_", "scratch_")
_LANES = ("ds_bpermute", "ds_permute", "ds_swizzle")
_IDLE = re.compile(
    r"s_(nop|sleep|setprio|endpgm|icache_inv|dcache_|sethalt|ttrace|sendmsg|code_end|incperflevel|decperflevel)"
)


@functools.cache
def class_of(mnemonic: str) -> str:
    """The class, of ``CLASSES``, that an instruction counts in."""
    if mnemonic.startswith("v_"):
        return "mfma" if mnemonic.startswith(("v_mfma", "v_smfmac")) else "valu"
    if mnemonic.startswith("ds_"):
        if mnemonic.startswith(_LANES):
            return "lds_lanes"
        if mnemonic.startswith("ds_read"):
            return "lds_read"
        return "lds_write" if mnemonic.startswith("ds_write") else "lds_atomic"
    if mnemonic.startswith(_VMEM):
        if "_load" in mnemonic:
            return "vmem_load"
        if "_store" in mnemonic:
            return "vmem_store"
        return "vmem_atomic" if "_atomic" in mnemonic else "other"
    if mnemonic.startswith(("s_load", "s_buffer_load", "s_scratch_load", "s_memtime", "s_memrealtime")):
        return "smem"
    if mnemonic.startswith("s_waitcnt"):
        return "wait"
    if mnemonic.startswith("s_barrier"):
        return "barrier"
    if mnemonic.startswith(("s_branch", "s_cbranch", "s_setpc", "s_swappc", "s_call")):
        return "branch"
    return "other" if _IDLE.match(mnemonic) else "salu"


def class_numbers(instructions: Sequence[Instruction]) -> npt.NDArray[np.uint8]:
    """The class of each instruction, as its place in ``CLASSES``."""
    number = {name: k for k, name in enumerate(CLASSES)}
    return np.array([number[class_of(instruction.mnemonic)] for instruction in instructions], np.uint8)


@dataclass(frozen=True)
class Resources:
    """What one wave, and one workgroup, of a kernel takes.

    Attributes:
        vgprs, agprs, sgprs: registers of a lane or wave as the kernel descriptor allocates them; ``vgprs`` counts the
            accumulation registers too.
        lds_bytes: LDS of a workgroup, static and dynamic. waves: waves of a workgroup.
        waves_per_simd, groups_per_cu: how many fit at once.
        limit: what sets that: "vgprs", "lds" or "waves".
    """

    arch: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    waves: int
    waves_per_simd: float
    groups_per_cu: int
    limit: str


def resources(
    arch: str, *, vgprs: int, agprs: int, sgprs: int, lds_bytes: int, scratch_bytes: int, waves: int
) -> Resources:
    """Occupancy from registers and LDS. Scalar registers never limit here: a wave is taken to own its full set."""
    allocated = max(1, -(-vgprs // VGPR_GRANULE)) * VGPR_GRANULE
    slots = min(MAX_WAVES_PER_SIMD, VGPRS_PER_LANE // allocated) * SIMDS_PER_CU
    by_registers = slots // waves
    granule = LDS_GRANULE[arch]
    by_lds = LDS_BYTES[arch] // (-(-lds_bytes // granule) * granule) if lds_bytes else by_registers + 1
    groups = min(by_registers, by_lds)
    by_vgprs = VGPRS_PER_LANE // allocated < MAX_WAVES_PER_SIMD
    limit = "lds" if by_lds < by_registers else "vgprs" if by_vgprs else "waves"
    return Resources(
        arch=arch,
        vgprs=vgprs,
        agprs=agprs,
        sgprs=sgprs,
        lds_bytes=lds_bytes,
        scratch_bytes=scratch_bytes,
        waves=waves,
        waves_per_simd=groups * waves / SIMDS_PER_CU,
        groups_per_cu=groups,
        limit=limit,
    )


@dataclass(frozen=True)
class Line:
    """Counts of one instruction, summed over the waves of the launch; the fields are those of ``Counters.total``."""

    instruction: Instruction
    kind: str
    executed: int
    lanes: int
    bytes: int
    lines64: int
    lines128: int
    lines64_min: int
    lds_cycles: int
    lds_cycles_min: int
    mfma_cycles: int

    @property
    def address(self) -> int:
        """Bytes from the start of the code section."""
        return self.instruction.address

    @property
    def text(self) -> str:
        """The instruction as the assembler reads it."""
        return self.instruction.text

    def to_dict(self) -> dict[str, int | str]:
        """Plain values, for JSON."""
        counts = {name: getattr(self, name) for name in (*COUNT_FIELDS, "mfma_cycles")}
        return {"address": self.address, "text": self.text, "kind": self.kind, **counts}


def busy_cycles(instruction: Instruction, arch: str) -> int:
    """Cycles for which one MFMA keeps its SIMD's matrix unit busy."""
    flags = instruction.record.flags
    return mfma_cycles(instruction.mnemonic, arch, cbsz=flags >> CBSZ & 7, blgp=flags >> BLGP & 7)


class Counters(Mapping[str, int]):
    """Counters of one launch: a mapping of class (``CLASSES``) to executed wave-instructions.

    ``classes`` are those of the instructions, from ``class_numbers``. ``lines`` has the same and more by instruction.
    Sums over the launch:

    Attributes:
        executed: wave-instructions. waves: waves that ran. groups: workgroups that ran.
        bytes: bytes that lanes asked of global memory. lines64, lines128: distinct aligned lines of 64 and 128 bytes,
            summed over accesses. lines64_min: the fewest 64-byte lines that could hold the bytes of each access.
        lds_cycles, lds_cycles_min: LDS cycles with the bank conflicts that occurred, and without any.
        mfma_cycles: cycles that MFMA units are busy. valu_lanes: lanes enabled in VALU instructions.
        resources: registers, LDS and occupancy.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        classes: npt.NDArray[np.uint8],
        counts: npt.NDArray[np.uint64],
        *,
        resources: Resources,
        groups: int,
    ) -> None:
        self.resources = resources
        self.groups = groups
        self.waves = groups * resources.waves
        self._instructions = instructions
        self._counts = counts
        self._class_numbers = classes
        of_class = {name: classes == number for number, name in enumerate(CLASSES)}
        executed = counts[:, COUNT_FIELDS.index("executed")]
        self._classes = {name: int(executed[rows].sum()) for name, rows in of_class.items()}
        ran = np.flatnonzero(of_class["mfma"] & (executed > 0)).tolist()
        self._mfma = {k: int(executed[k]) * busy_cycles(instructions[k], resources.arch) for k in ran}
        total = dict(zip(COUNT_FIELDS, counts.sum(axis=0, dtype=np.uint64).tolist(), strict=True))
        self.executed: int = total["executed"]
        self.lines64: int = total["lines64"]
        self.lines128: int = total["lines128"]
        self.lines64_min: int = total["lines64_min"]
        self.lds_cycles: int = total["lds_cycles"]
        self.lds_cycles_min: int = total["lds_cycles_min"]
        self.mfma_cycles = sum(self._mfma.values())
        in_lds = np.any([rows for name, rows in of_class.items() if name.startswith("lds")], axis=0)
        self.bytes = int(counts[~in_lds, COUNT_FIELDS.index("bytes")].sum())
        self.valu_lanes = int(counts[of_class["valu"], COUNT_FIELDS.index("lanes")].sum())

    @functools.cached_property
    def lines(self) -> list[Line]:
        """Counts of every instruction of the kernel, in the order of addresses."""
        rows = zip(self._instructions, self._class_numbers.tolist(), self._counts.tolist(), strict=True)
        return [
            Line(
                instruction,
                CLASSES[number],
                mfma_cycles=self._mfma.get(k, 0),
                **dict(zip(COUNT_FIELDS, row, strict=True)),
            )
            for k, (instruction, number, row) in enumerate(rows)
        ]

    def __getitem__(self, name: str) -> int:
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    @property
    def valu_lane_use(self) -> float:
        """Share of lanes that are enabled in VALU instructions, 0 to 1; 1 if there are none."""
        executed = self["valu"]
        return self.valu_lanes / (LANES * executed) if executed else 1.0

    @property
    def line_efficiency(self) -> float:
        """Fewest 64-byte lines over those that were touched, 0 to 1; 1 without global accesses."""
        return self.lines64_min / self.lines64 if self.lines64 else 1.0

    @property
    def lds_efficiency(self) -> float:
        """LDS cycles without bank conflicts over those with, 0 to 1; 1 without LDS accesses."""
        return self.lds_cycles_min / self.lds_cycles if self.lds_cycles else 1.0

    def by_address(self) -> dict[int, int]:
        """Address in bytes to executed wave-instructions."""
        return {line.address: line.executed for line in self.lines}

    def totals(self) -> dict[str, Any]:
        """Sums over the launch, by name."""
        return {
            "executed": self.executed,
            "groups": self.groups,
            "waves": self.waves,
            "bytes": self.bytes,
            "lines64": self.lines64,
            "lines128": self.lines128,
            "lines64_min": self.lines64_min,
            "lds_cycles": self.lds_cycles,
            "lds_cycles_min": self.lds_cycles_min,
            "mfma_cycles": self.mfma_cycles,
            "valu_lane_use": self.valu_lane_use,
        }

    def to_dict(self, *, by_address: bool = False) -> dict[str, Any]:
        """Everything as plain values, for JSON; ``by_address`` adds one entry per executed instruction."""
        out: dict[str, Any] = {
            "classes": dict(self),
            "totals": self.totals(),
            "resources": vars(self.resources),
        }
        if by_address:
            out["lines"] = [line.to_dict() for line in self.lines if line.executed]
        return out
