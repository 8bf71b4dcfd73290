"""Scalar, global and flat memory instructions and loads to LDS, each against numpy."""

import numpy as np
import pytest
from accesses import (
    ARCHS,
    FORMS,
    LANES,
    at,
    base_pair,
    kinds,
    pointers,
    random_bytes,
    read,
    registers,
    resource,
    run,
)
from asm import assemble

from cdna_emu.errors import EmulationError
from cdna_emu.native import run_instruction

STORE_FORMS = {
    "buffer": FORMS["buffer"],
    "global_base": "global_{op} v1, {data}, s[2:3] offset:16",
    "global": "global_{op} v[2:3], {data}, off offset:16",
    "flat": "flat_{op} v[2:3], {data} offset:16",
}


SUB_DWORD = {  # op: bytes, signed, half
    "load_ubyte": (1, False, ""),
    "load_sbyte": (1, True, ""),
    "load_ushort": (2, False, ""),
    "load_sshort": (2, True, ""),
    "load_ubyte_d16": (1, False, "low"),
    "load_ubyte_d16_hi": (1, False, "high"),
    "load_sbyte_d16": (1, True, "low"),
    "load_sbyte_d16_hi": (1, True, "high"),
    "load_short_d16": (2, False, "low"),
    "load_short_d16_hi": (2, False, "high"),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", SUB_DWORD)
def test_sub_dword_loads(arch: str, form: str, op: str) -> None:
    size, signed, half = SUB_DWORD[op]
    data = random_bytes(4096)
    offsets = 16 + 7 * LANES  # any alignment
    state = at(data, offsets)
    old = random_bytes(256, 1).view(np.uint32)
    state["vgpr"][4] = old
    got = run(arch, FORMS[form].format(op=op, data="v4"), **state)
    want = read(data, offsets, size).astype(np.uint32)
    if signed:
        want = (
            want.astype(np.uint8 if size == 1 else np.uint16).view(np.int8 if size == 1 else np.int16).astype(np.int32)
        )
        want = want.view(np.uint32)
    if half == "low":
        want = (old & 0xFFFF0000) | (want & 0xFFFF)
    elif half == "high":
        want = (old & 0xFFFF) | (want & 0xFFFF) << 16
    np.testing.assert_array_equal(got.vgpr(4), want)
    assert not got.findings


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
def test_dword_loads(arch: str, form: str, dwords: int) -> None:
    data = random_bytes(4096)
    offsets = 16 + 20 * LANES[::-1] + LANES % 3
    state = at(data, offsets)
    state["vgpr"][4 + dwords] = np.full(64, 7)
    text = FORMS[form].format(op="load_dword" + (f"x{dwords}" if dwords > 1 else ""), data=registers(dwords))
    mask = 0xF0F0_FFFF_0000_AAAA
    got = run(arch, text, exec_mask=mask, **state)
    on = (mask >> LANES.astype(object) & 1).astype(bool)
    for r in range(dwords):
        want = np.where(on, read(data, offsets + 4 * r, 4).astype(np.uint32), 0)
        np.testing.assert_array_equal(got.vgpr(4 + r), want)
    np.testing.assert_array_equal(got.vgpr(4 + dwords), 7)
    assert not got.findings


STORES = {
    "store_byte": (1, 0),
    "store_byte_d16_hi": (1, 16),
    "store_short": (2, 0),
    "store_short_d16_hi": (2, 16),
    "store_dword": (4, 0),
    "store_dwordx2": (8, 0),
    "store_dwordx3": (12, 0),
    "store_dwordx4": (16, 0),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", STORE_FORMS)
@pytest.mark.parametrize("op", STORES)
def test_stores_touch_their_bytes_only(arch: str, form: str, op: str) -> None:
    size, shift = STORES[op]
    data = random_bytes(4096)
    want = data.copy()
    offsets = 16 + 19 * LANES
    words = np.random.default_rng(2).integers(0, 1 << 32, (4, 64), np.uint32)
    state = at(data, offsets)
    state["vgpr"].update({4 + r: words[r] for r in range(4)})
    mask = 0x8000_0FFF_FFFF_5555
    got = run(arch, STORE_FORMS[form].format(op=op, data=registers(-(-size // 4))), exec_mask=mask, **state)
    for lane in range(64):
        if mask >> lane & 1:
            value = (
                (words[:, lane] >> np.uint32(shift)).view(np.uint8) if shift else words[:, lane].copy().view(np.uint8)
            )
            want[offsets[lane] : offsets[lane] + size] = value[:size]
    np.testing.assert_array_equal(data, want)
    assert not got.findings


@pytest.mark.parametrize("arch", ARCHS)
def test_address_in_destination(arch: str) -> None:
    data = random_bytes(4096)
    offsets = 16 * LANES[::-1]
    got = run(arch, "global_load_dwordx4 v[2:5], v[2:3], off", vgpr=pointers(data, offsets), memory=[data])
    for r in range(4):
        np.testing.assert_array_equal(got.vgpr(2 + r), read(data, offsets + 4 * r, 4).astype(np.uint32))


@pytest.mark.parametrize("arch", ARCHS)
def test_global_offset_is_signed_and_lane_offset_is_not(arch: str) -> None:
    data = np.arange(1024, dtype=np.uint32)
    shifted = data.ctypes.data - 0xFFFF0000
    sgpr = {2: shifted & 0xFFFFFFFF, 3: shifted >> 32}
    lane = (0xFFFF0000 + 1024 + 4 * LANES).astype(np.uint32)
    got = run(arch, "global_load_dword v4, v1, s[2:3] offset:-1024", vgpr={1: lane}, sgpr=sgpr, memory=[data])
    np.testing.assert_array_equal(got.vgpr(4), LANES)


@pytest.mark.parametrize("arch", ARCHS)
def test_global_bounds(arch: str) -> None:
    data = np.full(64, 9, np.uint32)
    state = at(data, 4 * LANES + 4)  # the last lane is outside
    got = run(arch, FORMS["global"].format(op="load_dword", data="v4"), **state)
    np.testing.assert_array_equal(got.vgpr(4), np.where(LANES < 63, 9, 0))
    assert kinds(got) == {"global-bounds"}
    assert got.findings[0].lane == 63
    assert got.findings[0].address == data.ctypes.data + 256


@pytest.mark.parametrize("arch", ARCHS)
def test_store_to_read_only(arch: str) -> None:
    data = np.full(64, 9, np.uint32)
    data.flags.writeable = False
    got = run(arch, STORE_FORMS["global"].format(op="store_dword", data="v4"), **at(data, 4 * LANES))
    np.testing.assert_array_equal(data, 9)
    assert kinds(got) == {"read-only"}


# ---- scalar


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dwords", [1, 2, 4, 8, 16])
def test_scalar_loads(arch: str, dwords: int) -> None:
    data = random_bytes(256).view(np.uint32)
    suffix = f"x{dwords}" if dwords > 1 else ""
    target = "s16" if dwords == 1 else f"s[16:{15 + dwords}]"
    address = data.ctypes.data + 64
    for offset, register, words in (
        ("0x8", "", 18),
        ("-4", "", 15),
        ("0x10", "s5 offset:", 22),
        ("", "s5", 18),
        ("0x7", "", 17),
    ):
        sgpr = {2: address & 0xFFFFFFFF, 3: address >> 32, 5: 11}
        got = run(arch, f"s_load_dword{suffix} {target}, s[2:3], {register}{offset}", sgpr=sgpr, memory=[data])
        np.testing.assert_array_equal([got.sgpr(16 + r) for r in range(dwords)], data[words : words + dwords])
        assert not got.findings


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dwords", [1, 2, 4, 8, 16])
def test_scalar_buffer_loads(arch: str, dwords: int) -> None:
    data = np.arange(1, 65, dtype=np.uint32)
    suffix = f"x{dwords}" if dwords > 1 else ""
    target = "s16" if dwords == 1 else f"s[16:{15 + dwords}]"
    for records, stride in ((44, 0), (11, 4)):
        sgpr = {**resource(data, records, stride), 5: 16}
        got = run(arch, f"s_buffer_load_dword{suffix} {target}, s[8:11], s5 offset:0x8", sgpr=sgpr, memory=[data])
        want = [7 + r if 6 + r < 11 else 0 for r in range(dwords)]
        assert [got.sgpr(16 + r) for r in range(dwords)] == want
        assert kinds(got) == ({"buffer-bounds"} if dwords > 5 else set())


@pytest.mark.parametrize("arch", ARCHS)
def test_scalar_load_out_of_bounds(arch: str) -> None:
    data = np.ones(4, np.uint32)
    got = run(arch, "s_load_dwordx4 s[16:19], s[2:3], 0x4", sgpr={**base_pair(data), 16: 5}, memory=[data])
    assert [got.sgpr(16 + r) for r in range(4)] == [0] * 4
    assert kinds(got) == {"global-bounds"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("text", ["s_dcache_inv", "s_dcache_wb", "buffer_wbl2 sc1", "buffer_inv sc1"])
def test_cache_control_does_nothing(arch: str, text: str) -> None:
    assert not run(arch, text).findings


@pytest.mark.parametrize("arch", ARCHS)
def test_time_is_deterministic(arch: str) -> None:
    text = "s_memtime s[4:5]\ns_nop 0\ns_nop 0\ns_memtime s[6:7]"
    first, second = run(arch, text), run(arch, text)
    assert first.sgpr(6) > first.sgpr(4)
    assert [first.sgpr(n) for n in range(4, 8)] == [second.sgpr(n) for n in range(4, 8)]


# ---- loads to LDS


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ["buffer", "global"])
@pytest.mark.parametrize("op", ["ubyte", "sbyte", "ushort", "sshort", "dword"])
def test_loads_to_lds(arch: str, form: str, op: str) -> None:
    data = random_bytes(4096)
    offsets = 5 * LANES
    size = {"b": 1, "s": 2}.get(op[1], 4) if op != "dword" else 4
    if form == "buffer":
        text, vgpr = f"buffer_load_{op} v1, s[8:11], 0 offen offset:8 lds", {1: offsets}
    else:
        text, vgpr = f"global_load_lds_{op} v1, s[2:3] offset:8", {1: offsets}
    lds = np.full(1024, 0xEE, np.uint8)
    mask = (1 << 64) - 1 - (1 << 10)
    sgpr = {**resource(data), **base_pair(data)}
    got = run(arch, text, vgpr=vgpr, sgpr=sgpr, memory=[data], lds=lds, m0=256, exec_mask=mask)
    want = read(data, offsets + 8, size).astype(np.uint32)
    if op.startswith("s"):
        narrow = want.astype(np.uint8).view(np.int8) if size == 1 else want.astype(np.uint16).view(np.int16)
        want = narrow.astype(np.int32).view(np.uint32)
    want[10] = 0xEEEEEEEE
    words = got.lds.view(np.uint32)
    np.testing.assert_array_equal(words[66:130], want)
    assert (words[:66] == 0xEEEEEEEE).all() and (words[130:] == 0xEEEEEEEE).all()
    assert not got.findings


@pytest.mark.parametrize("form", ["buffer", "global"])
@pytest.mark.parametrize("dwords", [3, 4])
def test_wide_loads_to_lds(form: str, dwords: int) -> None:
    data = random_bytes(4096)
    offsets = 16 * LANES[::-1]
    if form == "buffer":
        text = f"buffer_load_dwordx{dwords} v1, s[8:11], 0 offen lds"
    else:
        text = f"global_load_lds_dwordx{dwords} v1, s[2:3]"
    sgpr = {**resource(data, 16 * 60 + 4), **base_pair(data)}
    got = run("gfx950", text, vgpr={1: offsets}, sgpr=sgpr, memory=[data], lds=np.full(2048, 1, np.uint8), m0=512)
    starts = offsets[:, None] + 4 * np.arange(dwords)
    words = data[starts[:, :, None] + np.arange(4)].view(np.uint32)[:, :, 0]
    if form == "buffer":  # components out of range write zeros
        words = np.where(starts + 4 <= 16 * 60 + 4, words, 0)
    np.testing.assert_array_equal(got.lds[512 : 512 + 256 * dwords].view(np.uint32), words.reshape(-1))
    assert (got.lds[:512] == 1).all() and (got.lds[512 + 256 * dwords :] == 1).all()


def test_wide_loads_to_lds_need_gfx950() -> None:
    for text in ("buffer_load_dwordx4 v1, s[8:11], 0 offen lds", "global_load_lds_dwordx4 v1, s[2:3]"):
        with pytest.raises(ValueError, match="gfx942"):
            assemble(text, "gfx942")
        data = np.zeros(1024, np.uint8)
        code = assemble(text, "gfx950")
        sgpr = {**resource(data), **base_pair(data)}
        try:
            got = run_instruction("gfx942", code, sgpr=sgpr, memory=[data], lds=np.zeros(1024, np.uint8))
        except EmulationError as error:
            assert "unsupported" in str(error)
        else:
            assert kinds(got) == {"unsupported"}


@pytest.mark.parametrize("arch", ARCHS)
def test_load_beyond_the_lds(arch: str) -> None:
    data = random_bytes(256)
    got = run(
        arch,
        "global_load_lds_dword v1, s[2:3]",
        vgpr={1: 4 * LANES},
        sgpr=base_pair(data),
        memory=[data],
        lds=data,
        m0=4,
    )
    np.testing.assert_array_equal(got.lds[4:], data[:-4])
    assert kinds(got) == {"lds-bounds"}


@pytest.mark.parametrize("arch", ARCHS)
def test_accumulation_registers_as_data(arch: str) -> None:
    data = np.arange(256, dtype=np.uint32)
    got = run(arch, "global_load_dwordx4 a[0:3], v1, s[2:3]", vgpr={1: 16 * LANES}, sgpr=base_pair(data), memory=[data])
    for r in range(4):
        np.testing.assert_array_equal(got.agpr(r), 4 * LANES + r)
    out = np.zeros(64, np.uint32)
    text = "buffer_store_dword a7, v1, s[8:11], 0 offen"
    run(arch, text, vgpr={1: 4 * LANES}, agpr={7: LANES}, sgpr=resource(out), memory=[out])
    np.testing.assert_array_equal(out, LANES)


@pytest.mark.parametrize("arch", ARCHS)
def test_bytes_and_lines_are_counted(arch: str) -> None:
    data = np.zeros(4096, np.uint8)
    data = data[-data.ctypes.data % 128 :]
    text = "buffer_load_dwordx2 v[4:5], v1, s[8:11], 0 offen"
    got = run(arch, text, vgpr={1: 8 * LANES}, sgpr=resource(data, 8 * 32), memory=[data])
    assert got.counts[0].bytes == 8 * 32  # lanes out of range ask for nothing
    assert (got.counts[0].lines64, got.counts[0].lines128) == (4, 2)
