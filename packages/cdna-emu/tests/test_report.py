"""Findings as text and as JSON."""

import json
from dataclasses import dataclass

import pytest

from cdna_emu.native import NativeFinding
from cdna_emu.report import KERNARG, Report, findings_from, place_of, register_name


@dataclass(frozen=True)
class Line:
    address: int
    text: str

    @property
    def mnemonic(self) -> str:
        return self.text.split()[0]


CODE = [
    Line(0x100, "ds_write_b32 v0, v1"),
    Line(0x108, "ds_read_b32 v2, v0"),
    Line(0x110, "global_store_dword v[2:3], v4, off"),
    Line(0x118, "s_waitcnt lgkmcnt(0)"),
]
SPANS = [(0x10000, 0x1000, True, 0), (0x20000, 0x800, False, 2), (0x40000, 64, False, KERNARG)]
NONE = 0xFFFFFFFF


def finding(**fields):
    values = {"kind": 1, "insn": 0, "wave": 0, "lane": NONE, "other_insn": NONE, "other_wave": NONE, **fields}
    (found,) = findings_from([NativeFinding(**values)], CODE, kernel="k", spans=SPANS)
    return found


def test_a_race_names_both_sides():
    found = finding(kind=1, insn=1, wave=2, lane=5, address=0x40, other_insn=0, other_wave=1)
    assert (found.kind, found.pc, found.wave, found.lane, found.address) == ("race", 0x108, 2, 5, 0x40)
    assert str(found).splitlines() == [
        "LDS race at LDS + 0x40",
        "  0x0108: ds_read_b32 v2, v0",
        "  in k, workgroup (0, 0, 0), wave 2, lane 5",
        "  races with 0x0100: ds_write_b32 v0, v1 of wave 1",
    ]


def test_memory_is_named_by_argument():
    found = finding(kind=3, insn=2, lane=3, address=0x11008, group=(1, 2, 3))
    assert found.place == "arg 0 + 0x1008, 8 bytes past its end (4096 bytes)"
    assert "workgroup (1, 2, 3), wave 0, lane 3" in str(found)
    assert finding(kind=4, insn=2, address=0x20140).place == "arg 2 + 0x140"


@pytest.mark.parametrize(
    "address, place",
    [
        (0x10000, "arg 0 + 0x0"),
        (0x10FFF, "arg 0 + 0xfff"),
        (0xFFF0, "arg 0 - 0x10"),
        (0x40004, "kernel arguments + 0x4"),
        (0x7F0000000000, "address 0x7f0000000000"),
        (0, "arg 0 - 0x10000"),
    ],
)
def test_place(address, place):
    assert place_of("global-bounds", address, "global_load_dword v1, v[2:3], off", SPANS) == place


def test_place_without_any_memory():
    assert place_of("global-bounds", 16, "s_load_dword s0, s[0:1], 0x0", []) == "address 0x10"


@pytest.mark.parametrize(
    "code, name", [(4, "s4"), (106, "vcc_lo"), (124, "m0"), (256, "v0"), (511, "v255"), (513, "a1")]
)
def test_register_names(code, name):
    assert register_name("uninit-vgpr", code) == name


def test_report():
    report = Report([finding(kind=6, insn=1, detail=256)], kernel="k", dropped=2)
    assert not report.ok
    assert report.kinds() == {"uninit-vgpr"}
    text = str(report)
    assert text.startswith("k: 3 findings\n")
    assert "never written: v0" in text
    assert "2 more" in text
    data = json.loads(report.to_json())
    assert data["kernel"] == "k" and not data["ok"] and data["dropped"] == 2
    assert data["findings"][0]["register"] == "v0"
    assert data["findings"][0]["instruction"] == "ds_read_b32 v2, v0"


def test_an_empty_report_is_ok():
    report = Report(kernel="k")
    assert report.ok and str(report) == "k: nothing found"
    assert json.loads(report.to_json())["findings"] == []
