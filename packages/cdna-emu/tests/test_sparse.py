"""Sparse matrix instructions against the twin, and the layout that probes of a GPU found."""

import zlib

import numpy as np
import pytest
from asm import assemble
from test_mfma import inputs, same
from twin import sparse as twin

from cdna_emu.mfma_passes import PASSES
from cdna_emu.native import State, run_instruction

CASES = [(arch, name) for name, op in twin.OPS.items() for arch in op.archs]
LEGAL = np.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE])  # two different places in ascending order
A0, B0, D0, INDEX = 0, 8, 16, 40


def group(first: int, count: int) -> str:
    return f"v[{first}:{first + count - 1}]"


def execute(arch: str, name: str, a, b, index, d, suffix: str = "", **state: object) -> State:
    text = f"{name} {group(D0, len(d))}, {group(A0, len(a))}, {group(B0, len(b))}, v{INDEX} {suffix}"
    registers = {INDEX: index}
    for first, values in ((A0, a), (B0, b), (D0, d)):
        registers |= {first + n: value for n, value in enumerate(values)}
    return run_instruction(arch, assemble(text, arch), vgpr=registers, **state)


def result(state: State, d) -> np.ndarray:
    assert not state.findings
    return np.stack([state.vgpr(D0 + n) for n in range(len(d))])


def operands(name: str, special: float):
    op = twin.OPS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    registers = op.input_registers(op.b)
    a, b = inputs(rng, op.a, registers // 2, special), inputs(rng, op.b, registers, special)
    pairs = rng.choice(LEGAL, (8, 64))
    index = sum(pairs[n].astype(np.uint32) << np.uint32(4 * n) for n in range(8))
    d = rng.standard_normal((op.result_registers, 64)).astype(np.float32).view(np.uint32)
    return a, b, index, d


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_agrees_with_twin(arch: str, name: str) -> None:
    op = twin.OPS[name]
    for special in (0.0, 0.01):
        a, b, index, d = operands(name, special)
        got = result(execute(arch, name, a, b, index, d, exec_mask=0), d)
        assert same(got, twin.run(name, arch, a, b, index, d), op.result)
    for abid in range(1, twin.index_sets(op)):
        for cbsz in (0, 1):
            got = result(execute(arch, name, a, b, index, d, f"cbsz:{cbsz} abid:{abid}"), d)
            assert same(got, twin.run(name, arch, a, b, index, d, cbsz=cbsz, abid=abid), op.result)


def test_passes_cover_every_instruction() -> None:
    assert {name for name in PASSES if name.startswith("v_smfmac")} == set(twin.OPS)
    assert all(set(PASSES[name]) == set(op.archs) for name, op in twin.OPS.items())


@pytest.mark.parametrize(
    ("a_slot", "a_group", "b_slot", "b_group"),
    [(0, 0, 0, 0), (0, 1, 0, 2), (0, 2, 8, 0), (1, 3, 9, 2), (2, 0, 4, 0), (4, 0, 0, 1), (5, 2, 9, 1), (7, 3, 13, 3)],
)
def test_one_hot_probes_of_16x16x64_f16(a_slot: int, a_group: int, b_slot: int, b_group: int) -> None:
    """What meets what: index 0x4 (places 0 and 1) in every group of four."""
    name = "v_smfmac_f32_16x16x64_f16"
    a, b, d = (np.zeros((n, 64), np.uint32) for n in (4, 8, 4))
    a[a_slot // 2, 16 * a_group] = 0x3C00 << a_slot % 2 * 16
    b[b_slot // 2, 16 * b_group] = 0x3C00 << b_slot % 2 * 16
    got = result(execute("gfx950", name, a, b, np.full(64, 0x44444444, np.uint32), d), d).view(np.float32)
    assert got[0, 0] == 1
    assert np.count_nonzero(got) == 1


@pytest.mark.parametrize("pair", [0x0, 0x1, 0x5, 0xF])
def test_an_index_without_meaning_is_unsupported(pair: int) -> None:
    name = "v_smfmac_f32_16x16x32_f16"
    a, b, _, d = operands(name, 0.0)
    state = execute("gfx942", name, a, b, np.full(64, pair * 0x11111111, np.uint32), d)
    assert [finding.kind for finding in state.findings] == ["unsupported"]


def test_a_set_that_is_not_there_is_unsupported() -> None:
    name = "v_smfmac_f32_16x16x64_fp8_fp8"
    a, b, index, d = operands(name, 0.0)
    state = execute("gfx942", name, a, b, index, d, "abid:2")
    assert [finding.kind for finding in state.findings] == ["unsupported"]
