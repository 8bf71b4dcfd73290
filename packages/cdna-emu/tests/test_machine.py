"""Launching: arguments, registers at the start, threads, errors. The kernels are written by hand."""

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest
from asm import build

import cdna_emu
from cdna_emu import native
from cdna_emu.codeobject import CodeObject
from cdna_emu.errors import EmulationError
from cdna_emu.kernarg import hidden_arguments, pack
from cdna_emu.machine import launch

ARCHS = ("gfx942", "gfx950")

HEADER = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.Lend_{name}:
  .size {name}, .Lend_{name}-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_dispatch_ptr {dispatch}
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y {ids}
  .amdhsa_system_sgpr_workgroup_id_z {ids}
  .amdhsa_system_vgpr_workitem_id {items}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_next_free_vgpr 32
  .amdhsa_next_free_sgpr 32
  .amdhsa_accum_offset 32
.end_amdhsa_kernel
"""
METADATA = """
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{arch}
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {size}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 32
    .vgpr_count: 32
    .agpr_count: 0
    .max_flat_workgroup_size: {most}
    .args: {args}
...
.end_amdgpu_metadata
"""


def text(body, args, arch="gfx942", *, name="k", ids=0, items=0, lds=0, dispatch=0, most=1024):
    """A .s file; args: (kind, size) each."""
    entries, offset = [], 0
    for kind, size in args:
        offset = -(-offset // size) * size
        space = ", .address_space: global" if kind == "global_buffer" else ""
        entries.append(f"{{.offset: {offset}, .size: {size}, .value_kind: {kind}{space}}}")
        offset += size
    fields = {"arch": arch, "name": name, "body": body, "ids": ids, "items": items, "lds": lds, "dispatch": dispatch}
    return HEADER.format(**fields) + METADATA.format(**fields, args=f"[{', '.join(entries)}]", size=offset, most=most)


POINTER, I32, F32, I64 = ("global_buffer", 8), ("by_value", 4), ("by_value", 4), ("by_value", 8)

# out[i] = x[i] + y[i] for i < n, with 64 work-items in a workgroup.
ADD = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_load_dwordx2 s[8:9], s[0:1], 0x10
  s_load_dword s10, s[0:1], 0x18
  v_lshl_add_u32 v0, s2, 6, v0
  s_waitcnt lgkmcnt(0)
  v_cmp_gt_u32_e32 vcc, s10, v0
  s_and_saveexec_b64 s[12:13], vcc
  s_cbranch_execz .Ldone
  v_lshlrev_b32_e32 v1, 2, v0
  global_load_dword v2, v1, s[4:5]
  global_load_dword v3, v1, s[6:7]
  s_waitcnt vmcnt(0)
  v_add_f32_e32 v2, v2, v3
  global_store_dword v1, v2, s[8:9]
.Ldone:
"""
ADD_ARGS = [POINTER, POINTER, POINTER, I32]


def vectors(n, seed=0):
    generator = np.random.default_rng(seed)
    x, y = (generator.standard_normal(n).astype(np.float32) for _ in range(2))
    return x, y, np.zeros(n, np.float32)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n, threads", [(1, 1), (64, 1), (1000, 1), (1000, 3)])
def test_vector_add(arch, n, threads):
    x, y, out = vectors(n)
    groups = -(-n // 64)
    result = launch(build(text(ADD, ADD_ARGS, arch), arch), grid=groups, block=64, args=[x, y, out, n], threads=threads)
    assert result.report.ok, str(result.report)
    assert result.completed
    np.testing.assert_array_equal(out, x + y)
    counters = result.counters
    assert counters["vmem_load"] == 2 * groups and counters["vmem_store"] == groups
    assert counters.executed == sum(counters.values()) == 15 * groups
    assert counters.bytes == 12 * n + 28 * groups
    assert counters.waves == counters.groups == groups


def test_assembly_text_and_torch_tensors_are_taken():
    torch = pytest.importorskip("torch")
    x, y = torch.randn(2, 100)
    out = torch.zeros(100)
    result = launch(text(ADD, ADD_ARGS), grid=2, block=64, args=[x, y, out, 100])
    assert result.report.ok
    assert torch.equal(out, x + y)


def test_out_of_bounds_accesses_are_found_and_not_made():
    x, y, _ = vectors(64)
    behind = np.full(96, 7, np.float32)
    result = launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=1, block=64, args=[x, y, behind[:32], 64])
    (finding,) = result.report
    assert finding.kind == "global-bounds"
    assert finding.instruction == "global_store_dword v1, v2, s[8:9]"
    assert (finding.wave, finding.lane, finding.place) == (0, 32, "arg 2 + 0x80, 0 bytes past its end (128 bytes)")
    np.testing.assert_array_equal(behind[:32], (x + y)[:32])
    np.testing.assert_array_equal(behind[32:], 7)


def test_bounds_are_checked_without_checks():
    x, y, out = vectors(64)
    result = launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=1, block=64, args=[x[:60], y, out, 64], checks=False)
    assert result.report.kinds() == {"global-bounds"}
    np.testing.assert_array_equal(out[60:], y[60:])


def test_a_store_to_a_read_only_array_is_found():
    x, y, out = vectors(64)
    out.flags.writeable = False
    result = launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=1, block=64, args=[x, y, out, 64])
    assert result.report.kinds() == {"read-only"}
    assert not out.any()


def test_one_array_may_be_passed_twice():
    x, y, _ = vectors(64)
    expected = x + y
    result = launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=1, block=64, args=[x, y, x, 64])
    assert result.report.ok
    np.testing.assert_array_equal(x, expected)


def test_a_missing_wait_is_found():
    x, y, out = vectors(64)
    body = ADD.replace("  s_waitcnt vmcnt(0)\n", "")
    result = launch(build(text(body, ADD_ARGS), "gfx942"), grid=1, block=64, args=[x, y, out, 64])
    assert result.report.kinds() == {"missing-wait"}
    assert {finding.register for finding in result.report} == {"v2", "v3"}
    assert all(finding.instruction.startswith("v_add_f32") for finding in result.report)
    assert all(finding.other_instruction.startswith("global_load") for finding in result.report)


def test_findings_do_not_depend_on_threads():
    x, y, out = vectors(640)
    code = build(text(ADD, ADD_ARGS), "gfx942")
    reports = [launch(code, grid=10, block=64, args=[x, y, out[:32], 640], threads=n).report for n in (1, 4)]
    assert reports[0] == reports[1] and len(reports[0]) == 1


# out[work-item] = values of the registers at the start.
START = """
  s_load_dwordx2 s[16:17], s[0:1], 0x0
  v_and_b32_e32 v2, 0x3ff, v0
  v_bfe_u32 v3, v0, 10, 10
  v_bfe_u32 v4, v0, 20, 10
  v_mov_b32_e32 v5, s2
  v_mov_b32_e32 v6, s3
  v_mov_b32_e32 v7, s4
  v_mul_u32_u24_e32 v8, 6, v3
  v_add_u32_e32 v8, v8, v2
  v_mul_u32_u24_e32 v9, 30, v4
  v_add_u32_e32 v8, v8, v9
  s_mul_i32 s5, s4, 3
  s_add_i32 s5, s5, s3
  s_mul_i32 s5, s5, 2
  s_add_i32 s5, s5, s2
  s_mul_i32 s5, s5, 120
  v_add_u32_e32 v8, s5, v8
  v_mul_u32_u24_e32 v8, 24, v8
  s_waitcnt lgkmcnt(0)
  global_store_dwordx4 v8, v[2:5], s[16:17]
  global_store_dwordx2 v8, v[6:7], s[16:17] offset:16
"""


def test_ids_of_workgroups_and_work_items():
    out = np.zeros((2, 3, 2, 4, 5, 6, 6), np.uint32)
    code = build(text(START, [POINTER], ids=1, items=2), "gfx942")
    result = launch(code, grid=(2, 3, 2), block=(6, 5, 4), args=[out])
    assert result.report.ok, str(result.report)
    gz, gy, gx, z, y, x = np.indices(out.shape[:-1])
    np.testing.assert_array_equal(out, np.stack([x, y, z, gx, gy, gz], -1))


def test_the_dispatch_packet():
    body = """
  s_load_dwordx2 s[16:17], s[2:3], 0x0
  s_load_dwordx8 s[8:15], s[0:1], 0x0
  v_mov_b32_e32 v1, 0
  s_waitcnt lgkmcnt(0)
  v_mov_b32_e32 v2, s9
  v_mov_b32_e32 v3, s10
  v_mov_b32_e32 v4, s11
  v_mov_b32_e32 v5, s12
  global_store_dwordx4 v1, v[2:5], s[16:17]
"""
    out = np.zeros(4, np.uint32)
    result = launch(build(text(body, [POINTER], dispatch=1), "gfx942"), grid=(3, 2), block=(64, 2), args=[out])
    assert result.report.ok, str(result.report)
    assert out.tolist() == [64 | 2 << 16, 1, 192, 4]


def test_hidden_arguments():
    kinds = [
        ("hidden_block_count_x", 4),
        ("hidden_block_count_y", 4),
        ("hidden_block_count_z", 4),
        ("hidden_group_size_x", 2),
        ("hidden_group_size_y", 2),
        ("hidden_group_size_z", 2),
        ("hidden_remainder_x", 2),
        ("hidden_grid_dims", 2),
    ]
    code = build(text("", [POINTER, *kinds]), "gfx942")
    kernel = CodeObject.parse(code).kernel()
    out = np.zeros(4)
    packed = pack(kernel.args, kernel.kernarg_size, [out], hidden_arguments((7, 5, 1), (64, 2, 1), 0))
    assert np.frombuffer(packed.data[:8], np.uint64)[0] == out.ctypes.data
    assert np.frombuffer(packed.data[8:20], np.uint32).tolist() == [7, 5, 1]
    assert np.frombuffer(packed.data[20:30], np.uint16).tolist() == [64, 2, 1, 0, 2]
    assert packed.spans == [(out.ctypes.data, 32, True, 0)]


@pytest.mark.parametrize(
    "kind, value, expected",
    [
        (I32, 5, np.int32(5).tobytes()),
        (I32, -1, b"\xff" * 4),
        (I32, 0xFFFFFFFF, b"\xff" * 4),
        (I32, True, b"\1\0\0\0"),
        (I32, 1.5, np.float32(1.5).tobytes()),
        (I64, 1.5, np.float64(1.5).tobytes()),
        (("by_value", 2), 1.5, np.float16(1.5).tobytes()),
        (I32, np.float32(0.1), np.float32(0.1).tobytes()),
        (I32, np.float64(0.1), np.float32(0.1).tobytes()),
        (I64, np.int32(-2), np.int64(-2).tobytes()),
        (I32, ctypes.c_float(2.0), np.float32(2).tobytes()),
        (I64, b"12345678", b"12345678"),
        (POINTER, None, bytes(8)),
        (POINTER, 0x1234, np.int64(0x1234).tobytes()),
    ],
)
def test_scalars(kind, value, expected):
    kernel = CodeObject.parse(build(text("", [kind]), "gfx942")).kernel()
    assert bytes(pack(kernel.args, kernel.kernarg_size, [value], {}).data) == expected


@pytest.mark.parametrize(
    "kind, value, error, message",
    [
        (I32, 1 << 32, ValueError, "got 4294967296, expected an integer of 4 bytes"),
        (I32, "5", TypeError, "got str"),
        (I32, np.zeros(1), TypeError, "got an array"),
        (I32, b"123", ValueError, "got 3 bytes, expected 4"),
        (POINTER, 1.0, TypeError, "got float, expected an array"),
        (("by_value", 1), 1.0, ValueError, "got a float, expected a value of 1 bytes"),
    ],
)
def test_scalars_that_do_not_fit(kind, value, error, message):
    kernel = CodeObject.parse(build(text("", [kind]), "gfx942")).kernel()
    with pytest.raises(error, match=message):
        pack(kernel.args, kernel.kernarg_size, [value], {})


def test_trailing_null_pointers_may_be_left_out():
    kernel = CodeObject.parse(build(text("", [POINTER, I64, POINTER, POINTER]), "gfx942")).kernel()
    out = np.zeros(1)
    packed = pack(kernel.args, kernel.kernarg_size, [out, 3], {})
    assert np.frombuffer(packed.data, np.uint64).tolist() == [out.ctypes.data, 3, 0, 0]
    with pytest.raises(ValueError, match="got 1 values, expected 4"):
        pack(kernel.args, kernel.kernarg_size, [out], {})
    with pytest.raises(ValueError, match="got 5 values, expected 4"):
        pack(kernel.args, kernel.kernarg_size, [out, 3, None, None, None], {})


def test_arguments_as_bytes():
    x, y, out = vectors(64)
    kernarg = np.array([a.ctypes.data for a in (x, y, out)], np.uint64).tobytes() + np.int32(64).tobytes()
    ranges = [(a.ctypes.data, a.nbytes, a is out) for a in (x, y, out)]
    code = build(text(ADD, ADD_ARGS), "gfx942")
    assert launch(code, grid=1, block=64, kernarg=kernarg, ranges=ranges).report.ok
    np.testing.assert_array_equal(out, x + y)
    with pytest.raises(ValueError, match="got 27 bytes, expected 28"):
        launch(code, grid=1, block=64, kernarg=kernarg[:-1], ranges=ranges)
    assert launch(code, grid=1, block=64, kernarg=kernarg).report.kinds() == {"global-bounds"}


@pytest.mark.parametrize(
    "arch, options, message",
    [
        ("gfx942", {"grid": 0}, "grid: got 0"),
        ("gfx942", {"grid": (1, 2, 3, 4)}, "grid: got"),
        ("gfx942", {"block": (64, 17)}, "block: got 1088 work-items, expected at most 1024"),
        ("gfx942", {"block": (1, -1)}, "block: got"),
        ("gfx942", {"dynamic_lds": 65537}, "expected at most 65536 bytes of LDS in all on gfx942"),
        ("gfx950", {"dynamic_lds": 163841}, "expected at most 163840 bytes"),
        ("gfx942", {"dynamic_lds": -1}, "dynamic_lds: got -1"),
        ("gfx942", {"order": "sideways"}, "order: got 'sideways'"),
        ("gfx942", {"kernel": "other"}, "kernel: got 'other', expected one of k"),
        ("gfx942", {"arch": "gfx950"}, "got a code object for gfx942, expected gfx950"),
        ("gfx942", {"threads": 0}, "threads: got 0"),
        ("gfx942", {"budget": 0}, "budget: got 0"),
        ("gfx942", {"kernarg": b""}, "kernarg: got bytes beside args"),
        ("gfx942", {"args": []}, "args: got 0 values, expected 4"),
    ],
)
def test_bad_launches(arch, options, message):
    x, y, out = vectors(64)
    code = build(text(ADD, ADD_ARGS, arch), arch)
    with pytest.raises(ValueError, match=message):
        launch(code, **{"grid": 1, "block": 64, "args": [x, y, out, 64], **options})
    assert not out.any()


def test_a_block_beyond_what_the_kernel_was_compiled_for():
    with pytest.raises(ValueError, match="expected at most the 256"):
        launch(build(text("", [], most=256), "gfx942"), grid=1, block=257)


@pytest.mark.parametrize("arch, lds", [("gfx942", 65536), ("gfx950", 163840)])
def test_all_of_the_lds_may_be_used(arch, lds):
    body = f"""
  v_mov_b32_e32 v1, {lds - 4}
  v_mov_b32_e32 v2, 3
  ds_write_b32 v1, v2
  s_waitcnt lgkmcnt(0)
"""
    assert launch(build(text(body, [], arch), arch), grid=1, block=1, dynamic_lds=lds).report.ok
    report = launch(build(text(body, [], arch), arch), grid=1, block=1, dynamic_lds=lds - 4).report
    assert report.kinds() == {"lds-bounds"}
    assert report[0].address == lds - 4


ENDLESS = ".Lagain:\n  s_branch .Lagain"


def test_a_launch_that_never_ends():
    code = build(text(ENDLESS, []), "gfx942")
    with pytest.raises(EmulationError, match="instruction budget exhausted"):
        launch(code, grid=1, block=64, budget=1000)
    result = launch(code, grid=1, block=64, budget=1000, strict=False)
    assert not result.completed and result.report.kinds() == {"budget"}
    assert result.counters["branch"] == 1000


def test_an_instruction_that_is_not_emulated_is_named():
    code = build(text("  s_nop 0\n  s_sendmsg sendmsg(MSG_INTERRUPT)\n", []), "gfx942")
    with pytest.raises(EmulationError, match=r"unsupported instruction\n.*0x0004: s_sendmsg"):
        launch(code, grid=1, block=64)


COUNT_UP = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mov_b32_e32 v1, 0
  v_mov_b32_e32 v2, 1.0
  s_waitcnt lgkmcnt(0)
  global_atomic_add_f32 v1, v2, s[4:5]
"""


def test_kernels_with_atomics_run_on_one_thread(monkeypatch):
    seen = set()
    pool = cdna_emu.machine.ThreadPoolExecutor
    monkeypatch.setattr("cdna_emu.machine.ThreadPoolExecutor", lambda *a: seen.add(a) or pool(*a))
    total = np.zeros(1, np.float32)
    result = launch(build(text(COUNT_UP, [POINTER]), "gfx942"), grid=50, block=64, args=[total], threads=4)
    assert result.report.ok and total[0] == 3200 and not seen
    x, y, out = vectors(640)
    launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=10, block=64, args=[x, y, out, 640], threads=4)
    assert seen


def test_occupancy():
    x, y, out = vectors(64)
    for lds, groups, limit in ((0, 32, "waves"), (16384, 4, "lds"), (16385, 3, "lds")):
        code = build(text(ADD, ADD_ARGS, lds=lds), "gfx942")
        registers = launch(code, grid=1, block=64, args=[x, y, out, 64]).registers
        assert (registers.groups_per_cu, registers.limit, registers.lds_bytes) == (groups, limit, lds)
        assert registers.waves_per_simd == groups / 4
        assert registers.vgprs == 32


def test_launches_from_several_threads():
    code = CodeObject.parse(build(text(ADD, ADD_ARGS), "gfx942"))
    data = [vectors(1000, seed) for seed in range(4)]

    def one(x, y, out):
        launch(code, grid=16, block=64, args=[x, y, out, 1000])

    workers = [threading.Thread(target=one, args=item) for item in data]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for x, y, out in data:
        np.testing.assert_array_equal(out, x + y)


def test_a_missing_core_says_how_to_get_it(tmp_path):
    code = "import cdna_emu"
    env = {"PYTHONPATH": ":".join(sys.path), "CDNA_EMU_CORE": str(tmp_path / "none.so")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CoreMissingError" in done.stderr and "none.so" in done.stderr


def test_too_little_memory_is_said(monkeypatch):
    class Core:
        @staticmethod
        def cdna_run(*_):
            return 2

    monkeypatch.setattr(native, "core", Core)
    x, y, out = vectors(64)
    with pytest.raises(MemoryError, match="a launch needs more memory than there is"):
        launch(build(text(ADD, ADD_ARGS), "gfx942"), grid=1, block=64, args=[x, y, out, 64])
