"""What emulators of these GPUs got wrong, and where each is tested: FAULTS, and tests that have no better place."""

import ast
from pathlib import Path

import numpy as np
import pytest
from programs import run, text

from cdna_emu.machine import launch

FAULTS = {
    "32x32 MFMA accumulator rows: 8 * (r / 4) + 4 * (lane / 32) + r % 4": ("test_mfma:test_accumulator_rows_of_32x32",),
    "fp8 always read as OCP on gfx942": (
        "test_mfma:test_fp8_is_fnuz_on_gfx942_and_ocp_on_gfx950",
        "test_twin:test_eight_bit_conversions",
        "test_flydsl_probes:test_mfma_fp8_reads_the_format_of_the_architecture",
    ),
    "16-bit buffer loads and stores done as dwords": (
        "test_memory:test_sub_dword_loads",
        "test_memory:test_stores_touch_their_bytes_only",
        "test_flydsl_probes:test_short_access_beside_the_end_of_the_resource",
    ),
    "x3 done as 1": ("test_memory:test_dword_loads", "test_lds:test_wide_reads", "test_memory:test_wide_loads_to_lds"),
    "range check on the first component only": (
        "test_buffers:test_buffer_range_is_per_component",
        "test_buffers:test_buffer_store_out_of_range_is_dropped",
    ),
    "soffset left out of the range check": ("test_buffers:test_soffset_is_inside_the_range_check",),
    "denormals always flushed although the descriptor asks for mode 3": (
        "test_known_faults:test_denormals_obey_the_descriptor",
        "test_valu:test_modes_of_denormals",
        "test_valu:test_f16_denormals_follow_the_mode",
    ),
    "DPP row_bcast": ("test_operands:test_dpp", "test_operands:test_wave_sum_by_dpp"),
    "in-place DPP": ("test_operands:test_dpp_in_place",),
    "inline constant 1 / (2 pi)": (
        "test_operands:test_constants",
        "test_operands:test_constants_of_64_bits",
        "test_operands:test_constants_of_16_bits",
    ),
    "f16 MFMA denormals and infinities": ("test_mfma:test_f16_denormals_and_infinities",),
    "ds_swizzle missing": ("test_lanes:test_swizzle", "test_lanes:test_swizzle_in_place"),
    "s_buffer_load missing": ("test_memory:test_scalar_buffer_loads",),
    "global_load_lds missing": (
        "test_memory:test_loads_to_lds",
        "test_checks:test_copy_to_lds_needs_its_wait_and_a_barrier",
        "test_known_faults:test_each_removal_from_a_copy_to_lds_is_reported",
    ),
    "v_permlane16_swap and v_permlane32_swap missing": ("test_valu:test_permlane_swaps_exchange_rows",),
    "ds_read_b64_tr_b16 and _b8 missing": (
        "test_lanes:test_transposed_reads",
        "test_lanes:test_transposed_read_gives_mfma_operands",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_tests(fault: str) -> None:
    for name in FAULTS[fault]:
        module, function = name.split(":")
        tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.parametrize("mode", range(4))
def test_denormals_obey_the_descriptor(mode: int) -> None:
    """Bit 0 of the field keeps denormal inputs, bit 1 denormal results."""
    body = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mov_b32_e32 v1, 0x00400000
  v_add_f32_e32 v2, v1, v1
  v_mov_b32_e32 v3, 0x00800000
  v_mul_f32_e32 v3, 0.5, v3
  v_lshlrev_b32_e32 v4, 3, v0
  s_waitcnt lgkmcnt(0)
  global_store_dwordx2 v4, v[2:3], s[4:5]
  s_endpgm
"""
    out = np.zeros(4096, np.uint32)
    source = text(body).replace(".amdhsa_float_denorm_mode_32 3", f".amdhsa_float_denorm_mode_32 {mode}")
    assert launch(source, grid=1, block=64, args=[out]).report.ok
    from_denormals, to_denormal = out[0], out[1]
    assert from_denormals == (0x00800000 if mode & 1 else 0)
    assert to_denormal == (0x00400000 if mode & 2 else 0)


# Two waves copy 256 bytes each to LDS and read what the other copied.
COPY = """
  s_load_dwordx2 s[8:9], s[0:1], 0x0
  s_movk_i32 s10, 0x4000
  s_mov_b32 s11, 0x27000
  v_lshlrev_b32_e32 v1, 2, v0
  v_xor_b32_e32 v2, 0x100, v1
  v_readfirstlane_b32 s6, v1
  s_mov_b32 m0, s6
  s_waitcnt lgkmcnt(0)
  {copy}
  {wait}
  {barrier}
  ds_read_b32 v3, v2
  s_waitcnt vmcnt(0) lgkmcnt(0)
  v_add_u32_e32 v4, 0x1000, v1
  global_store_dword v4, v3, s[8:9]
  s_endpgm
"""
COPIES = ("global_load_lds_dword v1, s[8:9]", "buffer_load_dword v1, s[8:11], 0 offen lds")


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("copy", COPIES)
def test_each_removal_from_a_copy_to_lds_is_reported(copy: str, order: str) -> None:
    whole = {"copy": copy, "wait": "s_waitcnt vmcnt(0)", "barrier": "s_barrier"}
    out = np.arange(4096, dtype=np.uint32)
    done = run(COPY.format(**whole), waves=2, lds=512, out=out, order=order)
    assert done.report.ok, str(done.report)
    np.testing.assert_array_equal(out[1024 : 1024 + 128], np.arange(128) ^ 64)
    for part, kinds in (("wait", {"missing-wait", "race"}), ("barrier", {"missing-wait", "race", "uninit-lds"})):
        report = run(COPY.format(**{**whole, part: ""}), waves=2, lds=512, order=order).report
        assert report.kinds() & {"missing-wait", "race"}, (part, str(report))
        assert report.kinds() <= kinds, (part, str(report))
