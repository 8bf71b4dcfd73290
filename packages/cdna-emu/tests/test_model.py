"""The timing model against streams short enough to add up by hand."""

import dataclasses

import numpy as np
import pytest
from asm import build
from programs import text

from cdna_emu.counters import CLASSES
from cdna_emu.model import DEFAULTS, MI300X, MI355X, STALLS, Parameters, simulate
from cdna_emu.trace import trace_group

ISSUE = 4
END = ISSUE  # s_endpgm
MEMORY = Parameters(memory_latency=1000, store_latency=3000, scalar_latency=100, lds_latency=50)
FULL = 16  # cycles of the address path for 64 lanes of 16 bytes, and of the LDS of gfx942 for half of that


def traced(body, *, waves=1, arch="gfx942", lds=0):
    out = np.zeros(4096 * waves + 32, np.uint32)
    out = out[-out.ctypes.data % 128 // 4 :]
    code = build(text(body + "  s_endpgm\n", arch=arch, lds=lds), arch)
    return trace_group(code, grid=1, block=64 * waves, args=[out])


def run(body, parameters=None, *, groups=1, **options):
    found = simulate(traced(body, **options), parameters, groups=groups)
    assert set(found.wave) == {*CLASSES, *STALLS}
    if groups == 1 and options.get("waves", 1) == 1:
        assert sum(found.wave.values()) == found.cycles  # every cycle of the one wave has a reason
    return found


POINTER = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32_e32 v1, 4, v0
  v_mov_b32_e32 v2, 0
  v_mov_b32_e32 v3, 0
  v_mov_b32_e32 v4, 0
  v_mov_b32_e32 v5, 0
  s_waitcnt lgkmcnt(0)
"""
READY = 4 + 100 + 0  # the scalar load, issued and waited for; what follows it is shorter


@pytest.mark.parametrize(
    "body, cycles",
    [
        ("  v_mov_b32_e32 v1, 0\n" * 5, 20),
        ("  s_mov_b32 s4, 0\n" * 5, 20),
        ("  v_exp_f32_e32 v1, v0\n  v_rcp_f32_e32 v2, v0\n", 32),
        ("  s_nop 3\n  s_nop 0\n", 20),
        ("  s_waitcnt vmcnt(0) lgkmcnt(0)\n", 4),
    ],
)
def test_issue(body, cycles):
    assert run(body).cycles == cycles + END


MATRIX = "  v_mfma_f32_16x16x16_f16 a[{0}:{1}], v[2:3], v[4:5], {2}\n"
ZEROS = "".join(f"  v_mov_b32_e32 v{k}, 0\n" for k in range(2, 6))


def test_the_matrix_unit_is_busy_for_its_passes():
    found = run(ZEROS + "".join(MATRIX.format(4 * k, 4 * k + 3, 0) for k in range(3)))
    assert found.wave["mfma queue"] == 2 * (16 - ISSUE)
    assert found.units["mfma"] == 48
    assert found.cycles == 4 * 4 + 2 * 16 + ISSUE + END


@pytest.mark.parametrize(
    "after, waits",
    [
        (MATRIX.format(4, 7, 0), 0),
        (MATRIX.format(0, 3, "a[0:3]"), 16 - ISSUE),
        (MATRIX.format(4, 7, "a[0:3]"), 16 - ISSUE),
        ("  v_accvgpr_read_b32 v6, a1\n", 16 + 4 - ISSUE),
        ("  v_accvgpr_write_b32 a1, v2\n", 16 + 4 - ISSUE),
        ("  v_accvgpr_read_b32 v6, a9\n", 0),
        ("  s_mov_b32 s4, 0\n", 0),
    ],
)
def test_results_of_the_matrix_unit(after, waits):
    start = "  v_accvgpr_write_b32 a9, v2\n"
    found = run(ZEROS + start + MATRIX.format(0, 3, 0) + after, Parameters(mfma_latency=4))
    assert found.wave["mfma result"] == waits


def test_loads_wait_in_order_for_stores_too():
    load, store = "  global_load_dwordx4 v[8:11], v1, s[4:5]\n", "  global_store_dwordx4 v1, v[2:5], s[4:5]\n"
    wait = "  s_waitcnt vmcnt(0)\n"
    assert run(POINTER, MEMORY).cycles == READY + END
    one = run(POINTER + load + wait, MEMORY)
    assert one.cycles == READY + ISSUE + FULL + 1000 + END
    assert one.wave["vm wait"] == FULL + 1000 - ISSUE
    both = run(POINTER + store + load + wait, MEMORY)
    assert both.cycles == READY + ISSUE + FULL + 3000 + END
    assert both.units["vmem"] == 2 * FULL
    later = run(POINTER + load + store + wait.replace("0", "1"), MEMORY)
    assert later.cycles == one.cycles  # the store is younger


def test_the_address_path_serves_lines():
    apart = POINTER.replace("v1, 4, v0", "v1, 8, v0") + "  global_load_dword v8, v1, s[4:5]\n  s_waitcnt vmcnt(0)\n"
    assert run(apart, MEMORY).units["vmem"] == 64


def test_lds_accesses_complete_in_order():
    body = "  v_lshlrev_b32_e32 v1, 3, v0\n  v_mov_b32_e32 v2, 0\n  v_mov_b32_e32 v3, 0\n  ds_write_b64 v1, v[2:3]\n"
    start, cycles = 3 * ISSUE + ISSUE, 4  # 64 lanes of 8 bytes on 32 banks
    written = run(body + "  s_waitcnt lgkmcnt(0)\n", MEMORY, lds=512)
    assert written.cycles == start + cycles + 50 + END
    reads = body + "  ds_read_b64 v[4:5], v1\n  ds_read_b64 v[6:7], v1\n  s_waitcnt lgkmcnt(1)\n"
    assert run(reads, MEMORY, lds=512).cycles == start + 2 * cycles + 50 + END
    assert run(reads, MEMORY, lds=512).units["lds"] == 3 * cycles


def test_bank_conflicts_take_their_cycles():
    body = "  v_lshlrev_b32_e32 v1, 7, v0\n  ds_write_b32 v1, v0\n"
    assert run(body, lds=64 * 128).units["lds"] == 64


BRANCH = """
  v_readfirstlane_b32 s6, v0
  s_cmp_lg_u32 s6, 0
  s_cbranch_scc1 .Lon
{}.Lon:
  s_barrier
"""


def test_a_barrier_waits_for_the_last_wave():
    found = run(BRANCH.format("  s_nop 15\n" * 10), waves=2)
    assert found.cycles == 3 * ISSUE + 10 * 64 + ISSUE + 16 + END
    assert found.wave["barrier wait"] == (640 + 2 * 16) / 2


def test_a_wave_that_has_ended_opens_a_barrier():
    body = BRANCH.format("  s_nop 15\n  s_endpgm\n")
    assert run(body, waves=2).cycles == 3 * ISSUE + 64 + ISSUE + 16 + END


@pytest.mark.parametrize("waves, groups, turns", [(1, 1, 1), (4, 1, 1), (5, 1, 2), (4, 2, 2), (2, 4, 2)])
def test_waves_of_a_simd_take_turns(waves, groups, turns):
    found = run("  v_exp_f32_e32 v1, v0\n" * 10, waves=waves, groups=groups)
    assert found.units["valu"] == turns * 160
    assert found.cycles == turns * 160 + END
    assert run("  s_nop 3\n" * 10, waves=waves, groups=groups).cycles == 160 + END


def test_the_difference_of_two_launches():
    step = "  v_exp_f32_e32 v1, v0\n  s_nop 1\n"
    longer, shorter = run(step * 3), run(step * 2)
    chunk = longer - shorter
    assert chunk.cycles == 24
    assert chunk.wave["valu"] == 16 and chunk.wave["other"] == 8 and chunk.units["valu"] == 16


def test_stalls_by_instruction():
    found = run(ZEROS + MATRIX.format(0, 3, 0) * 3)
    (((text, reason), cycles),) = [item for item in found.stalls.items() if item[0][0].startswith("0x0020")]
    assert (reason, cycles) == ("mfma queue", 16 - ISSUE) and "v_mfma" in text
    assert found.longest_stalls(1).count("\n") == 0 and "mfma queue" in found.longest_stalls()
    assert not (found - found).stalls


def test_a_launch_runs_in_batches():
    found = run("  s_nop 0\n", groups=2)
    assert found.launch_cycles(9, 2) == 3 * found.cycles


def test_parameters():
    assert dict(DEFAULTS) == {"gfx942": MI300X, "gfx950": MI355X}
    once = traced("  s_nop 0\n", arch="gfx950")
    assert simulate(once) == simulate(once, MI355X)
    assert simulate(once, dataclasses.replace(MI355X, issue=8)).cycles == 16
    with pytest.raises(ValueError, match="groups: got 0"):
        simulate(once, groups=0)


def test_it_says_that_it_is_a_model():
    found = run("  s_nop 0\n")
    assert "model, no measurement" in str(found) and found.to_dict()["cycles"] == 8
