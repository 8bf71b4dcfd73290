"""Counters of hand-written kernels, against what their access patterns say."""

import numpy as np
import pytest
from asm import build
from test_machine import ADD, ADD_ARGS, POINTER, text, vectors

from cdna_emu.counters import CLASSES, class_of, resources
from cdna_emu.machine import launch
from cdna_emu.ops import table


def run(body, args=(), kinds=(), arch="gfx942", **options):
    code = build(text(body, list(kinds), arch, **options), arch)
    result = launch(code, grid=1, block=64, args=list(args), checks=False)
    assert result.report.ok, str(result.report)
    return result.counters


def line(counters, mnemonic):
    (found,) = [line for line in counters.lines if line.text.startswith(mnemonic)]
    return found


@pytest.mark.parametrize(
    "mnemonic, kind",
    [
        ("v_add_f32", "valu"),
        ("v_mfma_f32_16x16x16_bf16", "mfma"),
        ("s_add_i32", "salu"),
        ("s_cbranch_scc1", "branch"),
        ("s_load_dwordx4", "smem"),
        ("s_buffer_load_dword", "smem"),
        ("buffer_load_dwordx4", "vmem_load"),
        ("global_load_lds_dwordx4", "vmem_load"),
        ("flat_store_dword", "vmem_store"),
        ("global_atomic_add_f32", "vmem_atomic"),
        ("ds_read_b64_tr_b16", "lds_read"),
        ("ds_write2_b32", "lds_write"),
        ("ds_add_u32", "lds_atomic"),
        ("ds_bpermute_b32", "lds_lanes"),
        ("s_waitcnt", "wait"),
        ("s_barrier", "barrier"),
        ("s_endpgm", "other"),
        ("s_nop", "other"),
    ],
)
def test_classes(mnemonic, kind):
    assert class_of(mnemonic) == kind


def test_every_instruction_has_a_class():
    assert {class_of(mnemonic) for mnemonic in table()} == set(CLASSES)


@pytest.mark.parametrize(
    "stride, lines64, lines128",
    [(4, 4, 2), (64, 64, 32), (128, 64, 64), (0, 1, 1)],
)
def test_lines_of_global_loads(stride, lines64, lines128):
    memory = np.zeros(64 * 128 + 128, np.uint8)
    memory = memory[-memory.ctypes.data % 128 :][: 64 * 128]
    body = f"""
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mul_u32_u24_e32 v1, {stride}, v0
  s_waitcnt lgkmcnt(0)
  global_load_dword v2, v1, s[4:5]
"""
    found = line(run(body, [memory], [POINTER]), "global_load")
    assert (found.executed, found.lanes, found.bytes) == (1, 64, 256)
    assert (found.lines64, found.lines128, found.lines64_min) == (lines64, lines128, 4)


@pytest.mark.parametrize("stride, worse", [(4, 1), (8, 2), (128, 32)])
def test_lds_bank_conflicts(stride, worse):
    body = f"""
  v_mul_u32_u24_e32 v1, {stride}, v0
  ds_write_b32 v1, v0
  s_waitcnt lgkmcnt(0)
"""
    counters = run(body, lds=64 * 128)
    found = line(counters, "ds_write")
    assert found.lds_cycles == worse * found.lds_cycles_min > 0
    assert counters.lds_efficiency == 1 / worse


def test_lanes_of_valu_instructions():
    half = "  s_mov_b64 exec, 0xffff\n  v_mov_b32_e32 v1, 0\n  v_mov_b32_e32 v2, 0\n"
    assert run(half + "  s_mov_b64 exec, -1\n  v_mov_b32_e32 v3, 0").valu_lane_use == (16 + 16 + 64) / 192


@pytest.mark.parametrize(
    "arch, mfma, cycles",
    [
        ("gfx942", "v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[4:5], 0", 16),
        ("gfx942", "v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], 0", 32),
        ("gfx950", "v_mfma_f32_16x16x32_f16 a[0:3], v[4:7], v[8:11], 0", 16),
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[8:15], v[16:23], 0", 32),
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[8:11], v[16:19], 0 cbsz:4 blgp:4", 16),
    ],
)
def test_mfma_cycles(arch, mfma, cycles):
    body = "\n".join(f"  v_mov_b32_e32 v{n}, 0" for n in range(2, 24)) + f"\n  s_nop 7\n  {mfma}\n  s_nop 7\n  s_nop 7"
    counters = run(body, arch=arch)
    assert counters["mfma"] == 1 and counters.mfma_cycles == cycles


@pytest.mark.parametrize(
    "arch, vgprs, lds, waves, groups, limit",
    [
        ("gfx942", 32, 0, 4, 8, "waves"),
        ("gfx942", 64, 0, 4, 8, "waves"),
        ("gfx942", 65, 0, 4, 7, "vgprs"),
        ("gfx942", 128, 0, 4, 4, "vgprs"),
        ("gfx942", 512, 0, 4, 1, "vgprs"),
        ("gfx942", 32, 65536, 4, 1, "lds"),
        ("gfx942", 32, 20000, 4, 3, "lds"),
        ("gfx950", 32, 65536, 4, 2, "lds"),
    ],
)
def test_occupancy(arch, vgprs, lds, waves, groups, limit):
    found = resources(arch, vgprs=vgprs, agprs=0, sgprs=32, lds_bytes=lds, scratch_bytes=0, waves=waves)
    assert (found.groups_per_cu, found.limit, found.waves_per_simd) == (groups, limit, groups * waves / 4)


def add_counters(groups):
    x, y, out = vectors(64 * groups)
    return launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=groups, block=64, args=[x, y, out, 64 * groups]).counters


def test_counters_as_plain_values():
    counters = add_counters(3)
    data = counters.to_dict(by_address=True)
    assert data["classes"] == dict(counters) and sum(data["classes"].values()) == data["totals"]["executed"]
    assert sum(row["executed"] for row in data["lines"]) == counters.executed
    assert counters.by_address()[data["lines"][0]["address"]] == 3
    assert data["resources"]["arch"] == "gfx942"
