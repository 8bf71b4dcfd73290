"""Scratch memory: spills, private arrays, flat addresses of it, and what is checked there."""

import numpy as np
import pytest
from kernels.triton_cases import matmul
from programs import run

END = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32_e32 v60, 2, v0
  s_waitcnt lgkmcnt(0)
  global_store_dword v60, v10, s[4:5]
  s_endpgm
"""


def result(body: str, waves: int = 2, scratch: int = 64, **options: object) -> np.ndarray:
    out = np.zeros(4096, np.uint32)
    done = run(body + END, waves=waves, scratch=scratch, out=out, **options)
    assert done.report.ok, str(done.report)
    return out[: 64 * waves]


def kinds(body: str, scratch: int = 64, **options: object) -> list[str]:
    return [finding.kind for finding in run(body + END, scratch=scratch, **options).report]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_lane_has_its_own(arch: str) -> None:
    """Four dwords of every lane of two waves, addressed by offset, SGPR and VGPR."""
    body = """
  v_mov_b32_e32 v2, v0
  v_add_u32_e32 v3, 0x1000, v0
  v_add_u32_e32 v4, 0x2000, v0
  v_add_u32_e32 v5, 0x3000, v0
  scratch_store_dwordx4 off, v[2:5], off offset:16
  s_mov_b32 s6, 4
  v_mov_b32_e32 v7, 20
  s_waitcnt vmcnt(0)
  scratch_load_dword v20, off, s6 offset:16
  scratch_load_dword v21, v7, off offset:4
  scratch_load_dword v22, v7, s6 offset:4
  s_waitcnt vmcnt(0)
  v_add3_u32 v10, v20, v21, v22
"""
    tid = np.arange(128)
    np.testing.assert_array_equal(result(body, arch=arch), 3 * tid + 0x6000)


def test_bytes_and_halves() -> None:
    body = """
  v_add_u32_e32 v1, 0x80, v0
  v_mov_b32_e32 v2, 0x12340000
  scratch_store_byte off, v1, off offset:1
  scratch_store_short_d16_hi off, v2, off offset:2
  scratch_store_byte off, v0, off
  s_waitcnt vmcnt(0)
  scratch_load_sbyte v3, off, off offset:1
  scratch_load_dword v4, off, off
  s_waitcnt vmcnt(0)
  v_xor_b32_e32 v10, v3, v4
"""
    tid = np.arange(64, dtype=np.uint32)
    byte = tid + np.uint32(0x80)
    expected = byte.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32) ^ (tid | byte << 8 | 0x12340000)
    np.testing.assert_array_equal(result(body, waves=1), expected)


LOADS = ("ubyte", "sbyte", "ushort", "sshort", "ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi")
LOADS += ("short_d16", "short_d16_hi")


@pytest.mark.parametrize("op", LOADS)
def test_loads_do_as_global_loads(op: str) -> None:
    """The same bytes from scratch and from memory."""
    body = f"""
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mul_u32_u24_e32 v1, 0x9e3779, v0
  v_lshlrev_b32_e32 v60, 2, v0
  v_mov_b32_e32 v2, 0x5a5a5a5a
  v_mov_b32_e32 v3, 0x5a5a5a5a
  s_waitcnt lgkmcnt(0)
  scratch_store_dword off, v1, off offset:8
  global_store_dword v60, v1, s[4:5] offset:1024
  s_waitcnt vmcnt(0)
  scratch_load_{op} v2, off, off offset:10
  global_load_{op} v3, v60, s[4:5] offset:1026
  s_waitcnt vmcnt(0)
  v_xor_b32_e32 v10, v2, v3
"""
    assert not result(body, waves=1).any()


def test_stores_do_as_global_stores() -> None:
    ops = (("byte_d16_hi", "v1", 0), ("short", "v1", 4), ("dwordx3", "v[4:6]", 8))
    body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32_e32 v60, 5, v0\n  s_waitcnt lgkmcnt(0)\n"
    body += "".join(f"  v_mul_u32_u24_e32 v{n}, 0x9e3{n}79, v0\n" for n in (1, 4, 5, 6))
    body += "  v_mov_b32_e32 v9, 0\n  v_mov_b32_e32 v10, 0\n"
    for n in range(0, 20, 4):
        body += f"  scratch_store_dword off, v9, off offset:{n}\n"
        body += f"  global_store_dword v60, v9, s[4:5] offset:{n + 1024}\n"
    for op, data, offset in ops:
        body += f"  scratch_store_{op} off, {data}, off offset:{offset}\n"
        body += f"  global_store_{op} v60, {data}, s[4:5] offset:{offset + 1024}\n"
    body += "  s_waitcnt vmcnt(0)\n  scratch_load_dwordx3 v[20:22], off, off offset:8\n"
    body += "  global_load_dwordx3 v[24:26], v60, s[4:5] offset:1032\n"
    body += "  scratch_load_dwordx2 v[28:29], off, off\n  global_load_dwordx2 v[30:31], v60, s[4:5] offset:1024\n"
    body += "  s_waitcnt vmcnt(0)\n"
    for a, b in ((20, 24), (21, 25), (22, 26), (28, 30), (29, 31)):
        body += f"  v_xor_b32_e32 v9, v{a}, v{b}\n  v_or_b32_e32 v10, v9, v10\n"
    assert not result(body, waves=1).any()


def test_flat_reaches_scratch_and_lds_through_their_apertures() -> None:
    """Even lanes point into scratch, odd ones into LDS."""
    body = """
  s_mov_b64 s[8:9], src_private_base
  s_mov_b64 s[10:11], src_shared_base
  v_and_b32_e32 v1, 1, v0
  v_cmp_eq_u32_e32 vcc, 1, v1
  v_mov_b32_e32 v2, s9
  v_mov_b32_e32 v3, s11
  v_cndmask_b32_e32 v5, v2, v3, vcc
  v_lshlrev_b32_e32 v6, 2, v0
  v_mov_b32_e32 v7, 8
  v_cndmask_b32_e32 v4, v7, v6, vcc
  v_add_u32_e32 v8, 7, v0
  flat_store_dword v[4:5], v8
  s_waitcnt vmcnt(0) lgkmcnt(0)
  v_mov_b32_e32 v10, 0
  s_and_saveexec_b64 s[12:13], vcc
  ds_read_b32 v10, v6
  s_andn2_b64 exec, s[12:13], exec
  scratch_load_dword v10, off, off offset:8
  s_mov_b64 exec, s[12:13]
  s_waitcnt vmcnt(0) lgkmcnt(0)
"""
    np.testing.assert_array_equal(result(body, waves=1, lds=256), np.arange(64) + 7)


def test_the_half_of_an_aperture_is_unsupported() -> None:
    assert kinds("  v_mov_b32_e32 v10, src_private_base\n") == ["unsupported"]


def test_what_was_never_written_is_reported_where_it_is_used() -> None:
    """A spill may hold undefined lanes and registers; they are found where their value matters."""
    spill = "  scratch_store_dwordx2 off, v[30:31], off\n  s_waitcnt vmcnt(0)\n"
    load = "  scratch_load_dwordx2 v[32:33], off, off offset:{}\n  s_waitcnt vmcnt(0)\n"
    assert kinds("  v_mov_b32_e32 v31, 1\n" + spill + load.format(0) + "  v_mov_b32_e32 v10, v33\n") == []
    assert kinds("  v_mov_b32_e32 v31, 1\n" + spill + load.format(0) + "  v_mov_b32_e32 v10, v32\n") == ["uninit-vgpr"]
    assert kinds("  v_mov_b32_e32 v10, 1\n" + spill + load.format(8)) == []
    assert kinds(load.format(8) + "  v_mov_b32_e32 v10, v32\n") == ["uninit-vgpr"]


@pytest.mark.parametrize("offset", [61, 64, 4000, -4])
def test_beyond_the_end_is_reported(offset: int) -> None:
    report = run(f"  scratch_store_dword off, v0, off offset:{offset}\n  s_endpgm\n", scratch=64).report
    assert [finding.kind for finding in report] == ["scratch-bounds"]
    assert "scratch + " in str(report)


def test_without_scratch_every_access_is_beyond_the_end() -> None:
    assert kinds("  v_mov_b32_e32 v10, 1\n  scratch_load_dword v11, off, off\n", scratch=0) == ["scratch-bounds"]


def test_loads_need_a_wait() -> None:
    body = "  scratch_store_dword off, v0, off\n  scratch_load_dword v10, off, off\n"
    assert kinds(body) == ["missing-wait"]
    assert kinds(body + "  s_waitcnt vmcnt(0)\n") == []


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_matmul_that_spills(arch: str) -> None:
    """Too many waves per SIMD for its registers: Triton's compiler spills."""
    case = matmul(arch, "f32", 32, ragged=False, waves_per_eu=8, num_warps=1)
    assert "scratch_load" in case.compiled.assembly
    report = case.launch().report
    assert report.ok, str(report)
    assert case.check() <= case.tolerance
