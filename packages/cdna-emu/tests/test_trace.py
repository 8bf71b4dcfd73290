"""Traces of one workgroup: order, addresses, and what they share with the counters of a launch."""

import numpy as np
import pytest
from asm import build
from programs import text as whole

from cdna_emu import EmulationError
from cdna_emu.machine import launch
from cdna_emu.trace import trace_group

BODY = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mul_u32_u24_e32 v1, {stride}, v0
  s_lshl_b32 s6, s2, 8
  s_waitcnt lgkmcnt(0)
  s_add_u32 s4, s4, s6
  s_addc_u32 s5, s5, 0
  {exec}
  global_load_dword v2, v1, s[4:5]
  global_load_dword v3, v1, s[4:5] offset:4
  s_waitcnt vmcnt(0)
  s_barrier
"""


END = "  s_endpgm\n"


def text(body, **options):
    return whole(body + END, **options)


def memory(count=8192):
    raw = np.zeros(count + 32, np.uint32)
    return raw[-raw.ctypes.data % 128 // 4 :][:count]


def traced(stride=4, exec_="s_nop 0", waves=1, group=(0, 0, 0), grid=1, out=None):
    code = build(text(BODY.format(stride=stride, exec=exec_)), "gfx942")
    out = memory() if out is None else out
    return trace_group(code, grid=grid, block=64 * waves, args=[out], group=group), out


def accesses(found, mnemonic="global_load_dword"):
    names = np.array([found.instructions[k].mnemonic for k in found.events["insn"]])
    which = found.events["access"][names == mnemonic]
    assert (which > 0).all()
    return which.astype(np.intp) - 1


def test_events_are_the_launch():
    found, out = traced(waves=3)
    result = launch(build(text(BODY.format(stride=4, exec="s_nop 0")), "gfx942"), grid=1, block=192, args=[out])
    assert len(found.events) == result.counters.executed == found.counters.executed
    assert dict(found.counters) == dict(result.counters)
    assert found.waves == 3 and found.resources == result.registers
    for wave in range(3):
        insns = found.events["insn"][found.events["wave"] == wave]
        assert insns.tolist() == list(range(len(found.instructions)))[: len(insns)]
    at_barrier = [found.instructions[k].mnemonic for k in found.events["insn"]].index("s_barrier")
    assert (found.events["wave"][: at_barrier + 1] == 0).all()  # waves run one after the other between barriers


@pytest.mark.parametrize("stride, lines64, lines128", [(4, 4, 2), (64, 64, 32), (0, 1, 1), (6, 6, 3)])
def test_lines(stride, lines64, lines128):
    found, out = traced(stride)
    first = accesses(found)[0]
    assert found.accesses["address"][first].tolist() == [out.ctypes.data + stride * k for k in range(64)]
    assert found.lines(64)[first] == lines64 and found.lines(128)[first] == lines128
    line = next(line for line in found.counters.lines if line.text.startswith("global_load_dword v2"))
    assert (line.lines64, line.lines128) == (lines64, lines128)


@pytest.mark.parametrize("stride, unique", [(4, 65 * 4), (8, 128 * 4), (0, 8), (2, 63 * 2 + 8), (64, 64 * 8)])
def test_unique_bytes(stride, unique):
    found, _ = traced(stride)
    assert found.unique_bytes(accesses(found)) == unique


@pytest.mark.parametrize("stride, lines64", [(4, 5), (64, 64), (0, 1)])
def test_distinct_lines(stride, lines64):
    found, _ = traced(stride)
    assert found.distinct_lines(accesses(found), 64) == lines64
    assert found.distinct_lines(accesses(found)[:0], 64) == 0


def test_unique_bytes_of_widths():
    body = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32_e32 v1, 4, v0
  v_lshlrev_b32_e32 v2, 2, v0
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[4:7], v1, s[4:5]
  global_load_dword v8, v2, s[4:5] offset:1020
  s_waitcnt vmcnt(0)
"""
    found = trace_group(build(text(body), "gfx942"), grid=1, block=64, args=[memory()])
    wide, narrow = accesses(found, "global_load_dwordx4"), accesses(found)
    assert (found.unique_bytes(wide), found.unique_bytes(narrow)) == (1024, 256)
    assert found.unique_bytes(np.concatenate([wide, narrow])) == 1024 + 252
    assert found.unique_bytes(wide[:0]) == 0


def test_lanes_that_are_off_touch_nothing():
    found, _ = traced(64, "s_mov_b64 exec, 0xf0")
    first = accesses(found)[0]
    assert found.lines(64)[first] == 4 and found.unique_bytes(accesses(found)) == 4 * 8


def test_only_the_chosen_workgroup_runs():
    found, out = traced(group=(3, 1), grid=(4, 2))
    assert found.counters.groups == 1
    assert found.accesses["address"][accesses(found)[0]][0] == out.ctypes.data + 3 * 256
    with pytest.raises(ValueError, match=r"group: got \(4, 1\), expected a workgroup of the grid \(4, 2, 1\)"):
        traced(group=(4, 1), grid=(4, 2))


def test_lds_cycles_are_those_of_the_counters():
    body = "  v_lshlrev_b32_e32 v1, 7, v0\n  ds_write_b32 v1, v0\n"
    found = trace_group(build(text(body, lds=8192), "gfx942"), grid=1, block=64, args=[memory()])
    assert found.events["lds_cycles"].sum() == found.counters.lds_cycles == 64


def test_findings_and_failures():
    code = text("  v_mov_b32_e32 v1, v9\n")
    options = {"grid": 1, "block": 64, "args": [memory()]}
    assert trace_group(code, **options).report.ok
    assert not trace_group(code, checks=True, **options).report.ok
    with pytest.raises(EmulationError, match="could not go on"):
        trace_group(text("  s_sendmsg sendmsg(MSG_INTERRUPT)\n"), **options)
