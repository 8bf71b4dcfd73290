"""Every check: a program that breaks the rule is reported with both instructions, the mended one is not."""

import numpy as np
import pytest
from programs import findings, run

from cdna_emu.errors import EmulationError

ORDERS = ("forward", "reverse", "random")
ARGUMENT = "s_load_dwordx2 s[4:5], s[0:1], 0x0\n"
TO_LDS = "v_lshlrev_b32_e32 v1, 2, v0\n"  # v1: byte offset of the work-item
ROTATED = "v_xor_b32_e32 v2, 0x100, v1\n"  # v2: that of the same lane in the other wave of a pair


def kinds(body: str, **options) -> list[str]:
    return [finding.kind for finding in findings(body, **options)]


# ---- LDS races

EXCHANGE = (
    TO_LDS
    + ROTATED
    + "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n{barrier}ds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)\ns_endpgm"
)


@pytest.mark.parametrize("order", ORDERS)
def test_race_between_write_and_read(order):
    report = findings(EXCHANGE.format(barrier=""), waves=2, lds=512, order=order)
    assert "race" in report.kinds()
    race = next(finding for finding in report if finding.kind == "race")
    assert {race.instruction.split()[0], race.other_instruction.split()[0]} == {"ds_write_b32", "ds_read_b32"}
    assert {race.wave, race.other_wave} == {0, 1}
    assert findings(EXCHANGE.format(barrier="s_barrier\n"), waves=2, lds=512, order=order).ok


@pytest.mark.parametrize("order", ORDERS)
def test_race_in_the_second_round_of_a_loop(order):
    """Without a barrier after the read the next round's write races with it."""
    loop = (
        TO_LDS
        + ROTATED
        + "s_mov_b32 s6, 0\n.Lloop:\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v3, v2\n"
        + "s_waitcnt lgkmcnt(0)\n{second}s_add_i32 s6, s6, 1\ns_cmp_lt_u32 s6, 3\ns_cbranch_scc1 .Lloop\ns_endpgm"
    )
    assert findings(loop.format(second="s_barrier\n"), waves=2, lds=512, order=order).ok
    report = findings(loop.format(second=""), waves=2, lds=512, order=order)
    assert report.kinds() == {"race"}


@pytest.mark.parametrize("order", ORDERS)
def test_two_writes_race_unless_their_bytes_differ(order):
    same = "v_mov_b32_e32 v1, 0\nds_write_b8 v1, v0{offset}\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    assert findings(same.format(offset=""), waves=2, lds=16, order=order).kinds() == {"race"}
    # The waves write neighbouring halves of the same dwords.
    halves = TO_LDS + "v_and_b32_e32 v1, 0xfc, v1\nv_lshrrev_b32_e32 v2, 6, v0\nv_lshl_add_u32 v1, v2, 1, v1\n"
    halves += "ds_write_b16 v1, v0\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    assert findings(halves, waves=2, lds=256, order=order).ok


@pytest.mark.parametrize("order", ORDERS)
def test_waves_may_store_the_same_value(order):
    """Compilers let every wave store a value that all of them hold; a third that differs is a race."""
    store = "v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v2, 7\n{}ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    assert findings(store.format(""), waves=3, lds=16, order=order).ok
    other = store.format("v_lshrrev_b32_e32 v2, 7, v0\n")
    assert findings(other, waves=3, lds=16, order=order).kinds() == {"race"}


def test_atomics_do_not_race_with_atomics():
    start = "v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v2, 1\ns_mov_b64 s[6:7], exec\nv_cmp_eq_u32_e32 vcc, 0, v0\n"
    start += "s_and_b64 exec, exec, vcc\nds_write_b32 v1, v1\ns_mov_b64 exec, s[6:7]\ns_waitcnt lgkmcnt(0)\ns_barrier\n"
    assert findings(start + "ds_add_u32 v1, v2\ns_waitcnt lgkmcnt(0)\ns_endpgm", waves=3, lds=16).ok
    plain = start + "ds_add_u32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    assert findings(plain, waves=3, lds=16).kinds() == {"race"}


def test_one_wave_does_not_race_with_itself():
    assert findings(EXCHANGE.format(barrier="").replace("0x100", "0x4"), waves=1, lds=512).ok


# ---- copies from memory to LDS

COPY = (
    ARGUMENT
    + "v_and_b32_e32 v4, 0xff, v0\nv_lshlrev_b32_e32 v1, 2, v0\nv_xor_b32_e32 v2, 0x100, v1\n"
    + "v_readfirstlane_b32 s6, v1\ns_mov_b32 m0, s6\ns_waitcnt lgkmcnt(0)\nglobal_load_lds_dword v1, s[4:5]\n"
    + "{wait}{barrier}ds_read_b32 v3, v{read}\ns_waitcnt vmcnt(0) lgkmcnt(0)\ns_endpgm"
)
VM = "s_waitcnt vmcnt(0)\n"


def test_copy_to_lds_needs_its_wait_and_a_barrier():
    assert findings(COPY.format(wait=VM, barrier="s_barrier\n", read=2), waves=2, lds=512).ok
    assert findings(COPY.format(wait=VM, barrier="", read=1), waves=2, lds=512).ok
    own = findings(COPY.format(wait="", barrier="", read=1), waves=2, lds=512)
    assert own.kinds() == {"missing-wait"}
    assert own[0].other_instruction.startswith("global_load_lds_dword")
    assert own[0].register is None
    assert "missing-wait" in kinds(COPY.format(wait="", barrier="s_barrier\n", read=2), waves=2, lds=512)
    assert "race" in kinds(COPY.format(wait=VM, barrier="", read=2), waves=2, lds=512)
    late = COPY.format(
        wait="", barrier="s_barrier\n" + VM, read=2
    )  # the wait of one wave says nothing of the other's copy
    assert {"race", "missing-wait"} & set(kinds(late, waves=2, lds=512))


# ---- LDS bounds and contents


def test_lds_bounds_and_uninitialised_bytes():
    report = findings(TO_LDS + "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_endpgm", waves=1, lds=128)
    assert report.kinds() == {"lds-bounds"}
    assert (report[0].lane, report[0].address) == (32, 128)
    wide = (
        TO_LDS
        + "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1 offset:16\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    )
    report = findings(wide, waves=1, lds=512)
    assert report.kinds() == {"uninit-lds"}
    assert (report[0].lane, report[0].address) == (60, 256)


def test_lds_content_does_not_survive_a_workgroup():
    body = TO_LDS + "s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 .Lread\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n"
    body += ".Lread:\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    report = findings(body, grid=2, lds=256)
    assert report.kinds() == {"uninit-lds"}
    assert report[0].group == (1, 0, 0)


# ---- barriers


def test_lds_write_under_way_at_a_barrier():
    body = EXCHANGE.replace("s_waitcnt lgkmcnt(0)\n{barrier}", "s_barrier\n")
    report = findings(body, waves=2, lds=512)
    assert report.kinds() == {"lds-at-barrier"}
    assert report[0].instruction == "s_barrier"
    assert report[0].other_instruction.startswith("ds_write_b32")


def test_barrier_that_not_every_wave_reaches():
    body = "v_readfirstlane_b32 s6, v0\ns_cmp_eq_u32 s6, 64\ns_cbranch_scc1 .Lout\ns_barrier\n.Lout:\ns_endpgm"
    report = findings(body, waves=3)
    assert report.kinds() == {"barrier"}
    assert report[0].instruction == "s_barrier"
    assert findings("s_barrier\ns_endpgm", waves=3).ok


def test_different_barriers_meet():
    """The hardware counts arrivals, whatever s_barrier they come from."""
    body = "v_readfirstlane_b32 s6, v0\ns_cmp_eq_u32 s6, 64\ns_cbranch_scc1 .Lother\ns_barrier\ns_endpgm\n"
    body += ".Lother:\ns_barrier\ns_endpgm"
    assert findings(body, waves=3).ok


# ---- waits

LOAD = ARGUMENT + TO_LDS + "s_waitcnt lgkmcnt(0)\n"


@pytest.mark.parametrize(
    "use", ["v_add_u32_e32 v4, v2, v0", "v_mov_b32_e32 v2, v0", "global_store_dword v1, v2, s[4:5]"]
)
def test_vector_load_needs_its_wait(use):
    body = LOAD + "global_load_dword v2, v1, s[4:5]\n{wait}" + use + "\ns_waitcnt vmcnt(0)\ns_endpgm"
    report = findings(body.format(wait=""))
    assert report.kinds() == {"missing-wait"}
    assert report[0].instruction.split()[0] == use.split()[0].removesuffix("_e32") + ("_e32" if "_e32" in use else "")
    assert report[0].other_instruction.startswith("global_load_dword")
    assert report[0].register == "v2"
    assert findings(body.format(wait=VM)).ok


def test_vmcnt_counts_loads_and_stores_in_order():
    body = LOAD + "global_load_dword v2, v1, s[4:5]\nglobal_load_dword v3, v1, s[4:5] offset:256\n"
    body += "global_store_dword v1, v0, s[4:5] offset:512\ns_waitcnt vmcnt({n})\n"
    body += "v_mov_b32_e32 v4, v{r}\ns_waitcnt vmcnt(0)\ns_endpgm"
    for n, r, ok in ((2, 2, True), (2, 3, False), (1, 3, True), (3, 2, False)):
        assert findings(body.format(n=n, r=r)).ok is ok, (n, r)


def test_vmcnt_has_six_bits():
    loads = "".join(f"global_load_dword v{r}, v1, s[4:5]\n" for r in range(2, 22))
    body = LOAD + loads + "s_waitcnt vmcnt({n})\nv_mov_b32_e32 v40, v2\ns_waitcnt vmcnt(0)\ns_endpgm"
    assert findings(body.format(n=19)).ok
    assert findings(body.format(n=20)).kinds() == {"missing-wait"}


def test_two_loads_may_fill_one_register():
    body = (
        LOAD
        + "global_load_short_d16 v2, v1, s[4:5]\nglobal_load_short_d16_hi v2, v1, s[4:5] offset:2\ns_waitcnt vmcnt(0)\n"
    )
    assert findings(body + "v_mov_b32_e32 v3, v2\ns_endpgm").ok


def test_lds_read_needs_its_wait():
    body = TO_LDS + "ds_write_b32 v1, v0\nds_read_b32 v2, v1\nds_read_b32 v3, v1\n{wait}v_add_u32_e32 v4, v2, v0\n"
    body += "s_waitcnt lgkmcnt(0)\ns_endpgm"
    report = findings(body.format(wait=""), lds=256)
    assert report.kinds() == {"missing-wait"}
    assert report[0].register == "v2"
    assert findings(body.format(wait="s_waitcnt lgkmcnt(1)\n"), lds=256).ok
    assert findings(body.format(wait="s_waitcnt lgkmcnt(2)\n"), lds=256).kinds() == {"missing-wait"}
    assert findings(body.format(wait="s_waitcnt vmcnt(0)\n"), lds=256).kinds() == {"missing-wait"}


def test_scalar_loads_return_in_any_order():
    body = (
        ARGUMENT
        + "s_load_dwordx2 s[6:7], s[0:1], 0x0\ns_waitcnt lgkmcnt({n})\ns_mov_b32 s8, s4\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    )
    assert findings(body.format(n=0)).ok
    report = findings(body.format(n=1))
    assert report.kinds() == {"missing-wait"}
    assert report[0].register == "s4"


def test_disjoint_lanes_of_one_register_do_not_conflict():
    """A load in one half of the lanes is no business of a write in the other half."""
    body = LOAD + "s_mov_b64 s[6:7], exec\ns_mov_b32 exec_hi, 0\nglobal_load_dword v2, v1, s[4:5]\n"
    body += "s_mov_b32 exec_lo, 0\ns_mov_b32 exec_hi, -1\nv_mov_b32_e32 v2, 0\ns_mov_b64 exec, s[6:7]\n"
    assert findings(body + "s_waitcnt vmcnt(0)\nv_mov_b32_e32 v3, v2\ns_endpgm").ok
    assert findings(body + "v_mov_b32_e32 v3, v2\ns_waitcnt vmcnt(0)\ns_endpgm").kinds() == {"missing-wait"}


# ---- registers that nobody wrote


def test_uninitialised_vector_register():
    report = findings("v_add_u32_e32 v3, v7, v0\ns_endpgm")
    assert [(f.kind, f.register, f.lane) for f in report] == [("uninit-vgpr", "v7", 0)]
    assert findings("v_mov_b32_e32 v7, 1\nv_add_u32_e32 v3, v7, v0\ns_endpgm").ok


def test_pair_registers_that_op_sel_leaves_out_are_not_read():
    one = "v_mov_b32_e32 v2, 1.0\nv_mov_b32_e32 v4, 1.0\nv_mov_b32_e32 v5, 1.0\n"
    for op in ("v_pk_mul_f32", "v_pk_add_f32"):
        assert findings(one + f"{op} v[6:7], v[2:3], v[4:5] op_sel_hi:[0,1]\ns_endpgm").ok
        for select in ("", " op_sel:[1,0] op_sel_hi:[0,1]", " op_sel:[1,0]"):
            report = findings(one + f"{op} v[6:7], v[2:3], v[4:5]{select}\ns_endpgm")
            assert [(f.kind, f.register) for f in report] == [("uninit-vgpr", "v3")]
    assert findings(one + "s_mov_b32 s8, 0\nv_pk_mul_f32 v[6:7], v[4:5], s[8:9] op_sel_hi:[1,0]\ns_endpgm").ok
    body = one + "v_pk_mov_b32 v[6:7], v[2:3], v[4:5] {}\ns_endpgm"
    assert findings(body.format("op_sel:[0,1]")).ok
    assert [f.register for f in findings(body.format("op_sel:[1,0]"))] == ["v3"]


def test_uninitialised_lanes():
    body = "s_mov_b64 s[6:7], exec\ns_mov_b32 exec_hi, 0\nv_mov_b32_e32 v7, 1\ns_mov_b64 exec, s[6:7]\n"
    body += "v_mov_b32_e32 v3, v7\ns_endpgm"
    assert [(f.kind, f.lane) for f in findings(body)] == [("uninit-vgpr", 32)]
    assert findings(body, block=32).ok  # the upper lanes do not exist


def test_uninitialised_accumulators_are_read_whatever_exec_says():
    zero = "".join(f"v_mov_b32_e32 v{r}, 0\n" for r in range(2, 6))
    body = zero + "s_nop 1\nv_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], {c}\ns_nop 15\ns_endpgm"
    assert findings(body.format(c=0)).ok
    report = findings(body.format(c="a[4:7]"))
    assert report[0].kind == "uninit-vgpr"
    assert report[0].register == "a4"
    assert findings(body.format(c=0), block=32).kinds() == {"uninit-vgpr"}


def test_uninitialised_scalar_register():
    report = findings("s_add_u32 s8, s9, 1\ns_endpgm")
    assert [(f.kind, f.register) for f in report] == [("uninit-sgpr", "s9")]
    vcc = findings("v_cndmask_b32_e32 v1, v0, v0, vcc\ns_endpgm")
    assert [(f.kind, f.register) for f in vcc] == [("uninit-sgpr", "vcc_lo")]  # one finding per instruction and kind


def test_initial_registers_are_known():
    assert findings("s_add_u32 s8, s2, s1\nv_mov_b32_e32 v1, v0\ns_mov_b64 s[4:5], exec\ns_endpgm").ok
    assert findings("s_mov_b32 s8, s3\ns_endpgm").kinds() == {"uninit-sgpr"}


def test_dpp_reads_only_what_lanes_take():
    """row_shr:1 of a row whose last lane was never written takes nothing from that lane."""
    mask = "s_mov_b64 s[6:7], exec\ns_mov_b32 exec_lo, 0x7fff7fff\ns_mov_b32 exec_hi, 0x7fff7fff\nv_mov_b32_e32 v7, 1\n"
    body = (
        mask
        + "s_mov_b64 exec, s[6:7]\ns_nop 4\nv_mov_b32_e32 v3, 0\n"
        + "v_mov_b32_dpp v3, v7 {ctrl} row_mask:0xf bank_mask:0xf\ns_endpgm"
    )
    assert findings(body.format(ctrl="row_shr:1")).ok
    report = findings(body.format(ctrl="row_shl:1"))
    assert [(f.kind, f.lane) for f in report] == [("uninit-vgpr", 15)]


def test_undefined_values_are_handed_on():
    """Spills of scalar registers, and accumulation registers as a place to keep values, report at the use."""
    spill = "v_writelane_b32 v5, s9, 3\nv_readlane_b32 s10, v5, 3\n{use}s_endpgm"
    assert findings(spill.format(use="")).ok
    assert [f.register for f in findings(spill.format(use="s_mov_b32 s11, s10\n"))] == ["s10"]
    moved = "v_accvgpr_write_b32 a3, v9\ns_nop 4\nv_accvgpr_read_b32 v4, a3\n{use}s_endpgm"
    assert findings(moved.format(use="")).ok
    assert [f.register for f in findings(moved.format(use="v_mov_b32_e32 v6, v4\n"))] == ["v4"]


def test_low_halves_do_not_depend_on_high_halves():
    body = "v_mov_b32_e32 v4, 1\ns_mov_b32 s6, 3\nv_mad_u64_u32 v[6:7], s[8:9], s6, 12, v[4:5]\n"
    body += "v_mov_b32_e32 v8, v{r}\ns_endpgm"
    assert findings(body.format(r=6)).ok
    assert [f.register for f in findings(body.format(r=7))] == ["v7"]


# ---- global memory


def test_global_bounds_and_read_only():
    store = LOAD + "global_store_dword v1, v0, s[4:5]\ns_waitcnt vmcnt(0)\ns_endpgm"
    small = np.zeros(40, np.uint32)
    report = findings(store, out=small)
    assert [(f.kind, f.lane) for f in report] == [("global-bounds", 40)]
    assert (small == np.arange(40)).all()
    assert "arg 0" in report[0].place
    fixed = np.zeros(64, np.uint32)
    fixed.flags.writeable = False
    assert findings(store, out=fixed).kinds() == {"read-only"}
    assert not fixed.any()


# ---- waves that do not end well


def test_budget():
    result = run("s_branch .\ns_endpgm".replace(".", ".Lloop").replace("s_branch", ".Lloop:\ns_branch"), budget=1000)
    assert not result.completed
    assert result.report.kinds() == {"budget"}
    with pytest.raises(EmulationError, match="budget"):
        run(".Lloop:\ns_branch .Lloop\ns_endpgm", budget=1000, strict=True)


def test_unsupported_instruction_names_text_and_address():
    result = run("s_nop 0\ns_trap 2\ns_endpgm")
    assert result.report.kinds() == {"unsupported"}
    assert "s_trap" in result.report[0].instruction
    assert result.report[0].pc % 256 == 4


def test_running_off_the_end():
    assert findings("s_nop 0").kinds() == {"unsupported"}


# ---- MFMA hazards

ZEROS = "".join(f"v_mov_b32_e32 v{r}, 0\n" for r in range(2, 24)) + "s_nop 1\n"
MFMA = "v_mfma_f32_16x16x16_bf16 v[8:11], v[2:3], v[4:5], 0\n"


@pytest.mark.parametrize("arch, enough", [("gfx942", 7), ("gfx950", 8)])
def test_mfma_result_needs_wait_states(arch, enough):
    for use in ("v_mov_b32_e32 v20, v9", "v_mov_b32_e32 v9, 0"):
        body = ZEROS + MFMA + "s_nop {n}\n" + use + "\ns_endpgm"
        assert findings(body.format(n=enough - 1), arch=arch).ok
        report = findings(body.format(n=enough - 2), arch=arch)
        assert report.kinds() == {"mfma-hazard"}
        assert report[0].register == "v9"
        assert report[0].other_instruction.startswith("v_mfma")


def test_mfma_chains():
    chain = ZEROS + MFMA + "v_mfma_f32_16x16x16_bf16 v[8:11], v[2:3], v[4:5], v[8:11]\ns_nop 15\ns_endpgm"
    assert findings(chain).ok  # the accumulator is forwarded
    operand = ZEROS + MFMA + "s_nop {n}\nv_mfma_f32_16x16x16_bf16 v[12:15], v[8:9], v[4:5], 0\ns_nop 15\ns_endpgm"
    assert findings(operand.format(n=6)).ok
    assert findings(operand.format(n=5)).kinds() == {"mfma-hazard"}
    part = ZEROS + MFMA + "s_nop {n}\nv_mfma_f32_16x16x16_bf16 v[10:13], v[2:3], v[4:5], v[10:13]\ns_nop 15\ns_endpgm"
    assert findings(part.format(n=4)).ok
    assert findings(part.format(n=3)).kinds() == {"mfma-hazard"}


def test_mfma_reads_a_vector_result_too_early():
    body = ZEROS + "v_mov_b32_e32 v2, 0\n{nops}" + MFMA + "s_nop 15\ns_endpgm"
    assert findings(body.format(nops="s_nop 1\n")).ok
    assert findings(body.format(nops="s_nop 0\n")).kinds() == {"mfma-hazard"}


def test_32x32_takes_longer():
    body = ZEROS + "".join(f"v_mov_b32_e32 v{r}, 0\n" for r in range(24, 48)) + "s_nop 1\n"
    body += "v_mfma_f32_32x32x8_f16 v[24:39], v[2:3], v[4:5], 0\ns_nop {n}\nv_mov_b32_e32 v40, v39\ns_endpgm"
    assert findings(body.format(n=10)).ok
    assert findings(body.format(n=9)).kinds() == {"mfma-hazard"}


# ---- where waves start


def test_work_items_are_packed():
    out = np.zeros(256, np.uint32)
    body = ARGUMENT + "v_and_b32_e32 v1, 0x3ff, v0\nv_bfe_u32 v2, v0, 10, 10\nv_bfe_u32 v3, v0, 20, 10\n"
    body += "v_lshl_add_u32 v4, v2, 2, v1\nv_lshl_add_u32 v4, v3, 4, v4\nv_lshlrev_b32_e32 v4, 2, v4\n"
    body += "s_waitcnt lgkmcnt(0)\nglobal_store_dword v4, v0, s[4:5]\ns_waitcnt vmcnt(0)\ns_endpgm"
    assert findings(body, block=(4, 4, 6), out=out, workitem_id=2).ok
    expected = [x | y << 10 | z << 20 for z in range(6) for y in range(4) for x in range(4)]
    assert out[:96].tolist() == expected
    assert not out[96:].any()


def test_registers_are_poisoned_alike_in_every_workgroup():
    out = np.zeros(4 * 64, np.uint32)
    body = (
        LOAD + "s_lshl_b32 s6, s2, 8\ns_add_u32 s4, s4, s6\ns_addc_u32 s5, s5, 0\nglobal_store_dword v1, v9, s[4:5]\n"
    )
    body += "v_mov_b32_e32 v9, 5\ns_waitcnt vmcnt(0)\ns_endpgm"
    run(body, grid=4, out=out, checks=False)
    assert len(set(out.tolist())) == 1
    assert np.isnan(out[:1].view(np.float32)[0])


def test_checks_can_be_left_out():
    assert findings("v_add_u32_e32 v3, v7, v0\ns_endpgm", checks=False).ok


# ---- counters of requests


def line(body: str, mnemonic: str, **options):
    """Counts of the one instruction of that name."""
    result = run(body, **options)
    assert result.report.ok, str(result.report)
    (found,) = (entry for entry in result.counters.lines if entry.text.startswith(mnemonic))
    return found


def aligned(words: int) -> np.ndarray:
    memory = np.zeros(words + 32, np.uint32)
    skip = -memory.ctypes.data % 128 // 4
    return memory[skip : skip + words]


@pytest.mark.parametrize(
    "shift, lines64, lines128",
    [(2, 4, 2), (3, 8, 4), (6, 64, 32), (7, 64, 64)],
)
def test_lines_of_a_store(shift, lines64, lines128):
    body = ARGUMENT + f"v_lshlrev_b32_e32 v1, {shift}, v0\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v0, s[4:5]\n"
    body += "s_waitcnt vmcnt(0)\ns_endpgm"
    store = line(body, "global_store_dword", out=aligned(4096))
    assert (store.bytes, store.lines64, store.lines64_min, store.lines128) == (256, lines64, 4, lines128)
    # The same addresses in descending order touch the same lines.
    down = body.replace("s_waitcnt lgkm", f"v_sub_u32_e32 v1, {63 << shift}, v1\ns_waitcnt lgkm")
    store = line(down, "global_store_dword", out=aligned(4096))
    assert (store.bytes, store.lines64, store.lines64_min, store.lines128) == (256, lines64, 4, lines128)


@pytest.mark.parametrize(
    "arch, op, data, scale, cycles, least",
    [
        ("gfx942", "b32", "v4", 4, 2, 2),
        ("gfx950", "b32", "v4", 4, 1, 1),
        ("gfx942", "b32", "v4", 8, 4, 2),
        ("gfx950", "b32", "v4", 8, 2, 1),
        ("gfx942", "b32", "v4", 128, 64, 2),
        ("gfx950", "b32", "v4", 128, 32, 1),
        ("gfx942", "b32", "v4", 0, 2, 2),
        ("gfx942", "b64", "v[4:5]", 8, 4, 4),
        ("gfx950", "b64", "v[4:5]", 8, 2, 2),
        ("gfx942", "b128", "v[4:7]", 16, 8, 8),
        ("gfx950", "b128", "v[4:7]", 16, 4, 4),
        ("gfx950", "b128", "v[4:7]", 64, 16, 4),
    ],
)
def test_lds_cycles(arch, op, data, scale, cycles, least):
    body = "".join(f"v_mov_b32_e32 v{r}, 0\n" for r in range(4, 8)) + f"v_mul_u32_u24_e32 v1, {scale}, v0\n"
    body += f"ds_write_{op} v1, {data}\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    write = line(body, "ds_write", arch=arch, lds=8192)
    assert (write.lds_cycles, write.lds_cycles_min) == (cycles, least)
