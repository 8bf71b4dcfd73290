"""What the code of the D256 pipe is: registers, what a tile executes, hazards that no compiler looked for."""

from __future__ import annotations

import re

import pytest

from cdna_emu.codeobject import CodeObject
from gdn_runtime.codeobject.source import code_object
from pa_testing.pipe_cases import CASES, problem, spec_for
from pa_testing.pipe_counts import bars, count_tile

DENSE = [name for name in CASES if "window" not in name and "single" not in name]


@pytest.mark.parametrize("name", CASES)
def test_registers_and_lds(name: str) -> None:
    """No scratch and no spills; two workgroups fit a compute unit for up to 16 rows, one for 32."""
    spec = spec_for(name, problem(name, [1]))
    facts = code_object(spec).facts
    assert facts.scratch_bytes == facts.dynamic_lds == facts.vgpr_spills == facts.sgpr_spills == 0
    groups = 2 if spec.rows <= 16 else 1
    assert facts.vgprs <= 512 // groups
    assert facts.lds_bytes <= (64 << 10 if spec.arch == "gfx942" else 160 << 10) // groups


@pytest.mark.parametrize("name", DENSE)
def test_a_tile_meets_its_bars(name: str) -> None:
    spec = spec_for(name, problem(name, [1]))
    counts = count_tile(spec)
    assert [str(bar) for bar in bars(spec, counts) if not bar.ok] == []


@pytest.mark.parametrize("name", [name for name in CASES if "token" in name])
def test_no_dpp_hazard_of_assembly(name: str) -> None:
    """The compiler does not look into assembly: what a broadcast within a row of lanes reads must not have been written
    by one of the two vector instructions before it."""
    spec = spec_for(name, problem(name, [1]))
    found = 0
    recent: list[set[str]] = []
    for text in _texts(code_object(spec).elf):
        mnemonic, _, operands = text.partition(" ")
        if "row_newbcast" in text:
            source = operands.split(", ")[1]
            assert not any(source in written for written in recent[-2:]), text
            found += 1
        if mnemonic == "s_nop":
            recent += [set() for _ in range(int(operands.split()[0], 0) + 1)]
        else:
            recent.append(_written(operands) if mnemonic.startswith("v_") else set())
    assert found >= 2 * 16  # K and V scales of 16 tokens


def _texts(elf: bytes) -> list[str]:
    return [instruction.text for instruction in CodeObject.parse(elf).kernel().instructions]


def _written(operands: str) -> set[str]:
    """Vector registers of the first operand."""
    first = operands.split(", ")[0]
    several = re.fullmatch(r"v\[(\d+):(\d+)\]", first)
    return {f"v{i}" for i in range(int(several[1]), int(several[2]) + 1)} if several else {first}
