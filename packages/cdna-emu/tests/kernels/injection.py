"""Faults put into code objects on purpose: one s_barrier or s_waitcnt at a time becomes an s_nop."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from elftools.elf.elffile import ELFFile

from gdn_runtime.testing import make_inputs

from .compiled import Compiled
from .gdn import Device, run_state_scan
from .triton_cases import CASES
from .waits import unmet_needs

S_NOP = (0xBF800000).to_bytes(4, "little")
ORDERS = ({"order": "forward"}, {"order": "reverse"}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2})


OTHER_PATHS = "needed only on paths that this launch does not take"
REDUNDANT_WAIT = "nothing needs it on any path"
REDUNDANT_BARRIER = "what it separates does not meet in LDS in this launch; outputs are the same in every wave order"


@dataclass(frozen=True)
class Trial:
    """A launch that can be repeated: ``run(code, options)`` gives the result and the outputs."""

    compiled: Compiled
    run: Callable[[bytes, dict[str, Any]], tuple[Any, list[torch.Tensor]]]


@dataclass(frozen=True)
class Removal:
    """One instruction removed.

    ``kinds``: findings in any wave order. ``changed``: outputs changed in any. ``harmful``: of a barrier ``changed``,
    of a wait that ``waits.unmet_needs`` knows an instruction that needs it. ``reason``: why it is not harmful.
    """

    address: int
    text: str
    kinds: frozenset[str]
    changed: bool
    harmful: bool
    reason: str

    @property
    def reported(self) -> bool:
        """Whether the checks said something."""
        return bool(self.kinds)


def trial_of_case(arch: str, name: str) -> Trial:
    """A launch of ``triton_cases``."""
    make = CASES[name]

    def run(code: bytes, options: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        case = make(arch)
        result = case.launch(code, **options)
        return result, [x for x in case.args if isinstance(x, torch.Tensor)]

    return Trial(make(arch).compiled, run)


def trial_of_state_scan(arch: str) -> Trial:
    """K5 of gdn-runtime: one head, a sequence of three chunks, the last one not full, and an empty one."""
    inputs = make_inputs([130, 0], 1, 1, state="random")

    def run(code: bytes | None, options: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        device = Device(arch, options=options, code=code)
        outputs = run_state_scan(device, inputs)
        compiled.append(device.launches[0].compiled)
        return device.launches[0].result, outputs

    compiled: list[Compiled] = []
    run(None, {})
    return Trial(compiled[0], run)


TRIALS: dict[str, Callable[[str], Trial]] = {
    "softmax": lambda arch: trial_of_case(arch, "softmax"),
    "matmul-bf16-32": lambda arch: trial_of_case(arch, "matmul-bf16-32"),
    "state_scan": trial_of_state_scan,
}
"""The launches that faults are put into."""


def without(elf: bytes, address: int) -> bytes:
    """The code object with the four-byte instruction at ``address`` of its code replaced by s_nop."""
    start = ELFFile(io.BytesIO(elf)).get_section_by_name(".text")["sh_offset"] + address
    return elf[:start] + S_NOP + elf[start + 4 :]


def removals(trial: Trial, mnemonics: tuple[str, ...] = ("s_barrier", "s_waitcnt")) -> Iterator[Removal]:
    """Remove each executed instruction of these mnemonics in turn."""
    elf = trial.compiled.elf
    result, expected = trial.run(elf, {})
    instructions = [line.instruction for line in result.counters.lines]
    executed = result.counters.by_address()
    for line in result.counters.lines:
        if line.instruction.mnemonic not in mnemonics or not line.executed:
            continue
        faulty = without(elf, line.address)
        kinds: set[str] = set()
        changed = False
        for options in ORDERS if line.instruction.mnemonic == "s_barrier" else ORDERS[:1]:
            broken, outputs = trial.run(faulty, {**options, "strict": False})
            kinds |= broken.report.kinds()
            changed |= not all(map(same_bits, outputs, expected))
        harmful, reason = (
            changed,
            "" if changed else REDUNDANT_BARRIER,
        )
        if line.instruction.mnemonic == "s_waitcnt":
            uses = unmet_needs(instructions, line.address, executed)
            other_paths = unmet_needs(instructions, line.address)
            harmful, reason = bool(uses), "" if uses else OTHER_PATHS if other_paths else REDUNDANT_WAIT
        yield Removal(line.address, line.text, frozenset(kinds), changed, harmful, reason)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
