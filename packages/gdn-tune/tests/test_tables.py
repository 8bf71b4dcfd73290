"""check, compare, explain and CSV: bad tables of every kind, and the commands around them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gdn_runtime import tables
from gdn_tune import __version__, csvfile, tablefile
from gdn_tune.check import check
from gdn_tune.cli import COMMANDS, app
from gdn_tune.explain import explain
from gdn_tune.store import Store
from pa_decode import tables as pa_tables
from tune_testing import make_sample

OPT = tables.packaged_file("gfx942", "state_scan_opt")
VK = tables.packaged_file("gfx950", "state_scan_vk")
PA = pa_tables.PACKAGED / "gfx950.json"
LAB: dict[str, Any] = {"source": "lab", "device": "MI308X", "date": "2026-11-30", "n": 300}
ROW: dict[str, Any] = {
    "gfx": "gfx942", "cu_num": 80, "H": 16, "Hg": 8, "V": 128, "is_varlen": True, "use_h0": True, "store_fs": True,
    "snapshot_bf16": True, "state_bf16": False, "T_flat": 640, "N": 2, "total_chunks": 10, "max_seq_chunks": 6,
    "block_v": 64, "us": 12.5, "provenance": "lab",
}  # fmt: skip
PA_ROW: dict[str, Any] = {
    "gfx": "gfx942", "cu_num": 80, "B": 16, "Hq": 16, "Hkv": 2, "D": 256, "page": 16, "QL": 1, "query_dtype": "bf16",
    "scale_mode": "tensor", "v_packed": True, "sink_dtype": "none", "window": 0, "budget": 77, "provenance": "lab",
}  # fmt: skip


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="gdn-tune")


def write(path: Path, *rows: object, **changes: Any) -> Path:
    """A table file; ``changes`` replace fields of its header, None takes one away."""
    content = {"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", "provenance": {"lab": LAB}, "rows": rows}
    content = {name: value for name, value in {**content, **changes}.items() if value is not None}
    path.write_text(json.dumps(content))
    return path


def row(**changes: Any) -> dict[str, Any]:
    """``ROW`` with other values; None takes a column away."""
    return {name: value for name, value in {**ROW, **changes}.items() if value is not None}


def found(*paths: Path) -> list[tuple[str, str, int | None]]:
    return [(finding.level, finding.kind, finding.row) for finding in check(paths)[0]]


# ------------------------------------------------------------------------------------------------ check


def test_what_ships_is_sound() -> None:
    findings, counts = check([tables.PACKAGED, pa_tables.PACKAGED])
    assert not [finding for finding in findings if finding.level == "error"]
    assert {finding.kind for finding in findings} <= {"rule", "provenance"} and sum(counts.values()) >= 198
    modelled = [finding for finding in findings if "/grid/" in finding.file or finding.file == str(PA)]
    assert modelled and {(finding.level, finding.kind) for finding in modelled} == {("fact", "rule")}
    assert not any(finding.file == str(VK) for finding in findings)  # a list for the compiler: no call looks it up


def test_a_good_table_has_no_findings(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", row(), row(total_chunks=11, block_v=16), row(total_chunks=11, cu_num=304, H=64))
    assert found(path) == []
    assert found(write(tmp_path / "p.json", PA_ROW, kernel="pa_decode")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "got list, expected an object"),
        ("\xff", "codec can't decode"),
        ("[" * 100_000, "recursion"),
        ('{"format": 1, "format": 1}', "'format' stands twice in one object"),
        ('{"format": 2, "kernel": "state_scan_opt", "arch": "gfx942", "rows": []}', "format: got 2, expected 1"),
        ('{"format": 1, "kernel": "k7", "arch": "gfx942", "rows": []}', "kernel: got 'k7', expected one of"),
        ('{"format": 1, "kernel": "state_scan_opt", "rows": []}', "arch: got NoneType, expected str"),
        ('{"format": 1, "kernel": "state_scan_opt", "arch": "sm90", "rows": []}', "arch: got 'sm90', expected one of"),
        ('{"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", "rows": {}}', "rows: got dict, expected list"),
        ('{"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", "rows": [1]}', "rows 0: got int"),
        ('{"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", "rows": [], "row": []}', "unknown field row"),
        (
            '{"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", "rows": [], "provenance": {"x": 1}}',
            "provenance 0: got int",
        ),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    findings, _ = check([path])
    assert [finding.level for finding in findings] == ["error"] and message in str(findings[0])
    assert str(findings[0]).startswith(f"{path}: ") and str(findings[0]).count(str(path)) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"block_v": None}, "schema", "lacks block_v"),
        ({"bv": 16}, "schema", "has unknown field bv"),
        ({"block_v": 48}, "schema", "block_v: got 48, expected one of 16, 32, 64"),
        ({"block_v": "64"}, "schema", "block_v: got '64'"),
        ({"gfx": "gfx950"}, "schema", "gfx: got 'gfx950'"),
        ({"cu_num": 0}, "schema", "cu_num: got 0"),
        ({"H": True}, "schema", "H: got True"),
        ({"is_varlen": 1}, "schema", "is_varlen: got 1"),
        ({"Hg": 3}, "schema", "expected a multiple of Hg=3"),
        ({"V": 64}, "schema", "V: got 64"),
        ({"max_seq_chunks": 11}, "schema", "expected at most total_chunks"),
        ({"us": -1.0}, "schema", "us: got -1.0"),
        ({"provenance": "else"}, "schema", "provenance: got 'else', expected one of lab"),
        ({"total_chunks": 12, "max_seq_chunks": 9}, "illegal", "640 tokens in 2 sequences have 10 to 11"),
        ({"total_chunks": 9}, "illegal", "640 tokens in 2 sequences have 10 to 11"),
        ({"max_seq_chunks": 4}, "illegal", "expected at most 2 sequences of max_seq_chunks=4"),
    ],
)
def test_bad_rows(tmp_path: Path, changes: dict[str, Any], kind: str, message: str) -> None:
    findings, counts = check([write(tmp_path / "t.json", row(total_chunks=11), row(**changes))])
    errors = [finding for finding in findings if finding.level == "error"]
    assert [(finding.kind, finding.row) for finding in errors] == [(kind, 1)] and message in errors[0].text
    assert list(counts.values()) == [2]


def test_bad_rows_of_the_other_kernels(tmp_path: Path) -> None:
    """A row of vk with a column too few or wrong fixed values; budgets of problems that no kernel takes."""
    good = json.loads(VK.read_text())
    first = good["rows"][0]
    bad = [
        {**first, "K": 64},
        {name: value for name, value in first.items() if name != "N"},
        {**first, "use_g": 1},
        {**first, "block_v": 48},
    ]
    findings, _ = check([write(tmp_path / "v.json", *bad, **{k: good[k] for k in ("kernel", "arch", "provenance")})])
    errors = {finding.row: finding for finding in findings if finding.level == "error"}
    assert {index: finding.kind for index, finding in errors.items()} == {
        0: "schema", 1: "schema", 2: "schema", 3: "illegal",
    }  # fmt: skip
    rows = [{**PA_ROW, "page": 48}, {**PA_ROW, "Hkv": 3}, {**PA_ROW, "budget": 0}, {**PA_ROW, "scale_mode": "block"}]
    findings, _ = check([write(tmp_path / "p.json", *rows, kernel="pa_decode")])
    errors = {finding.row: finding for finding in findings if finding.level == "error"}
    assert sorted(index for index in errors if index is not None) == [0, 1, 2, 3]
    assert errors[0].kind == "illegal" and "page size: got 48" in errors[0].text


def test_rows_of_one_call(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", row(), row(us=13.0), row(block_v=32, T_flat=639))
    findings, _ = check([a])
    assert [(f.level, f.kind, f.row) for f in findings] == [
        ("note", "duplicate", 1), ("error", "conflict", 2), ("note", "rule", 2),
    ]  # fmt: skip
    assert "block_v=32 here, block_v=64 in row 0" in findings[1].text
    b = write(tmp_path / "b.json", row(block_v=16))
    assert found(tmp_path)[3:] == [("note", "override", 0)] == found(a, b)[3:]


def test_what_the_rule_gives(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", row(), row(block_v=32, total_chunks=11))
    (finding,) = check([path])[0]
    assert (finding.level, finding.kind, finding.row) == ("note", "rule", 1)
    assert finding.text == "the rule gives block_v=32 without it: 29 scans at a time on 80 compute units"


def test_modelled_rows_that_the_rule_gives_are_no_fault(tmp_path: Path) -> None:
    """They are counted, and --strict does not mind: what they are for is their shape."""
    model = {"lab": {"source": "x", "modelled": True}}
    path = write(tmp_path / "t.json", row(block_v=32, us=None), provenance=model)
    assert found(path) == [("fact", "rule", 0)]
    result = call("check", path, "--strict")
    assert result.exit_code == 0 and "1 rows, 0 errors, 0 notes; 1 rows say what the rule gives" in result.stdout


def test_provenances(tmp_path: Path) -> None:
    entries = {"lab": LAB, "idle": LAB, "bad": {"n": 3}, "model": {"source": "x", "modelled": True}}
    rows = [row(), row(provenance=None, total_chunks=11), row(provenance="model", cu_num=304)]
    findings, _ = check([write(tmp_path / "t.json", *rows, provenance=entries)])
    assert [(f.level, f.row, f.text) for f in findings] == [
        ("error", None, "bad: lacks source"),
        ("note", 1, "does not say where it is from"),
        ("error", 2, "has a time, and its provenance says that nothing was timed"),
        ("note", None, "idle: no row is from there"),
    ]


def test_the_command_check(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.json", row(block_v=32)), write(tmp_path / "bad.json", row(V=64))
    result = call("check", good)
    assert result.exit_code == 0 and "1 rows, 0 errors, 1 notes; 1 rows say what the rule gives" in result.stdout
    assert call("check", good, "--strict").exit_code == 1 and call("check", good, "-q").output == ""
    result = call("check", good, bad)
    assert result.exit_code == 1 and f"error: {bad} row 0: schema: V: got 64" in result.stderr
    report = json.loads(call("check", bad, "--json").stdout)
    assert report["files"] == {str(bad): 1} and report["findings"][0]["kind"] == "schema"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert call("check", empty).exit_code == 1 and "folder without" in call("check", empty).stderr


# ------------------------------------------------------------------------------------------------ CSV


def test_csv_and_back(tmp_path: Path) -> None:
    """Nothing is lost but provenances that no row has; the columns are those of the public tables."""
    opt = (
        "gfx,cu_num,dtype,K,V,BT,H,Hg,is_varlen,use_h0,store_fs,snapshot_bf16,state_bf16,T_flat,N,total_chunks,"
        "max_seq_chunks,BV,us"
    )
    vk = "arch,dtype,K,V,BT,H,Hg,T_flat,N,use_g,use_gk,use_h0,store_fs,save_vn,is_varlen,wu_contig,BV,duration"
    for path, header in ((OPT, opt), (VK, vk)):
        table = tablefile.read(path)
        text = csvfile.dump(table)
        assert text == call("export-csv", path).stdout
        plain = [line for line in text.splitlines() if not line.startswith("#")]
        assert plain[0] == header and len(plain) == 1 + len(table.rows) and {"True", "False"} & set(plain[1].split(","))
        file = tmp_path / "t.csv"
        for variant in (text, text.replace("\n", "\r\n"), "\ufeff" + text, text.replace("True", "yes")):
            file.write_bytes(variant.encode())
            assert call("import-csv", file, "--out", tmp_path / "out").exit_code == 0
            assert tablefile.read(tmp_path / "out" / table.arch / f"{table.kernel}.json") == table


def test_csv_of_a_stranger(tmp_path: Path) -> None:
    """Comments of any kind, no provenance, columns in another order, two architectures, a row twice."""
    file = tmp_path / "t.csv"
    columns = "gfx,cu_num,dtype,K,V,BT,H,Hg,is_varlen,use_h0,store_fs,snapshot_bf16,state_bf16,T_flat,N,BV,us,"
    line = "gfx942,80,bf16,128,128,64,16,8,True,true,1,yes,False,640,2,64,,10,6"
    content = ["# a comment, rows of it", columns + "total_chunks,max_seq_chunks", line, "", "# more", line]
    content += [line.replace("gfx942,80", "gfx950,256").replace(",,10", ",3.5,10")]
    file.write_text("\n".join(content))
    result = call("import-csv", file, "--out", tmp_path, "--source", "lab", "--n", 7, "--modelled")
    assert result.exit_code == 0, result.stderr
    a, b = (tablefile.read(tmp_path / arch / "state_scan_opt.json") for arch in ("gfx942", "gfx950"))
    expected = {name: value for name, value in row(provenance="import").items() if name != "us"}
    assert a.rows == [expected] and b.rows[0]["us"] == 3.5
    assert a.provenance == {"import": {"source": "lab", "n": 7, "modelled": True}} and list(a.rows[0]) == list(expected)


def test_csv_that_is_wrong(tmp_path: Path) -> None:
    """Every wrong line is named, and nothing is written."""
    good = csvfile.dump(tablefile.read(write(tmp_path / "t.json", row())))
    line = good.splitlines()[-1]
    file = tmp_path / "bad.csv"
    wrong = [
        line.replace("bf16", "fp16"),
        line.replace(",128,128,64,", ",64,128,64,"),
        line.replace("True", "maybe", 1),
        line.replace(",640,", ",six,"),
        line.replace(",64,12.5", ",48,12.5"),
        line.replace(",64,12.5", ",16,12.5"),
        line + ",1",
        line.replace("12.5", "fast"),
        "#: rows nowhere",
        "#: provenance x [1]",
        '"',
    ]
    messages = [
        "dtype: got 'fp16', expected bf16", "K: got '64'", "is_varlen: got 'maybe'", "T_flat: got 'six'",
        "block_v: got 48", "the same call as row 0, another choice", "got 20 cells, expected 19", "us: got 'fast'",
        "rows: got 'nowhere'", "provenance x: got list", "unexpected end of data",
    ]  # fmt: skip
    file.write_text(good + "\n".join(wrong))
    result = call("import-csv", file, "--out", tmp_path / "out")
    lines = result.stderr.splitlines()
    assert result.exit_code == 1 and len(lines) == len(wrong) and not (tmp_path / "out").exists()
    for number, (text, message) in enumerate(zip(lines, messages, strict=True), good.count("\n") + 1):
        assert f"line {number}: " in text and message in text
    for text, message in (("", "got no header"), ("a,b\n1,2\n", "header: got a,b, expected the columns gfx,cu_num")):
        file.write_text(text)
        assert message in call("import-csv", file, "--out", tmp_path / "out").stderr
    assert call("export-csv", PA).exit_code == 2


# ------------------------------------------------------------------------------------------------ compare


def test_compare(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", row(), row(total_chunks=11), row(cu_num=304), row(H=32, provenance=None, us=None))
    model = {"source": "model", "modelled": True}
    b = write(
        tmp_path / "b.json", row(us=25.0), row(total_chunks=11, block_v=16, us=None), row(cu_num=228),
        row(H=32, provenance="model", us=None), provenance={"lab": LAB, "model": model},
    )  # fmt: skip
    assert call("compare", a, a).exit_code == 0 and "0 differences, 4 equal rows" in call("compare", a, a).stdout
    result = call("compare", a, b)
    assert (
        result.exit_code == 1
        and "4 differences, 1 equal rows" in result.stdout
        and "median 2.000 of 1" in result.stdout
    )
    report = json.loads(call("compare", a, b, "--json").stdout)
    kinds = {each["kind"]: each for each in report["differences"]}
    assert sorted(kinds) == ["added", "changed", "evidence", "removed"] and report["ratios"] == [2.0]
    assert kinds["changed"]["old"]["block_v"] == 64 and kinds["changed"]["new"]["block_v"] == 16
    assert kinds["added"]["call"]["cu_num"] == 228 and kinds["removed"]["new"] is None
    assert "block_v=64 (lab, 12.5 us)" in result.stdout and "block_v=64 (model, modelled)" in result.stdout
    assert call("compare", a, write(tmp_path / "c.json", row(V=3))).exit_code == 2
    assert "row 0: V: got 3" in " ".join(call("compare", a, tmp_path / "c.json").stderr.split())


def test_compare_takes_the_rows_that_the_runtime_takes(tmp_path: Path) -> None:
    """Of folders: what was measured, whatever file comes later; in one file the first of two of a kind."""
    origins = {"lab": LAB, "model": {"source": "x", "modelled": True}}
    guess = row(block_v=16, us=None, provenance="model")
    for name, files in {
        "later": {"a": [row()], "b": [guess]},
        "earlier": {"a": [guess], "b": [row()]},
        "one": {"a": [guess, row(), row(block_v=32)]},
        "first": {"a": [row(), row(block_v=32, us=None)], "b": [guess, guess]},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, rows in files.items():
            write(folder / f"{file}.json", *rows, provenance=origins)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows that disagree
            (kept,) = tables.load([folder]).rows()
        assert kept.row.block_v == 64
        assert call("compare", folder, write(tmp_path / f"{name}.json", row())).exit_code == 0, name
    both = tmp_path / "both"
    both.mkdir()
    write(both / "a.json", row())
    write(both / "b.json", row(block_v=32))
    assert call("compare", both, write(tmp_path / "second.json", row(block_v=32))).exit_code == 0


# ------------------------------------------------------------------------------------------------ explain


def test_explain_a_row() -> None:
    shape = "H=32 Hg=16 lens=8192"
    made = explain("k5", "gfx942", shape, 80)
    assert made.by == "row" and made.choice == {"block_v": 64} and made.row == "gfx942/state_scan_opt.json row 0"
    assert made.provenance is not None and made.provenance["source"] == "seed" and made.rule == {"block_v": 32}
    text = call("explain", "--arch", "gfx942", "--compute-units", 80, "--shape", shape).stdout
    assert (
        "block_v=64 from gfx942/state_scan_opt.json row 0" in text
        and "the rule would give block_v=32: 32 scans" in text
    )


def test_explain_the_rule_and_what_almost_matches() -> None:
    made = explain("k5", "gfx942", "H=32 Hg=16 lens=8192", 228)
    assert made.by == "rule" and made.choice == made.rule == {"block_v": 32} and "228 compute units" in made.inputs
    assert re.fullmatch(r"grid/gfx942/state_scan_opt\.json row \d+, which has cu_num=304", made.nearest[0])
    assert made.nearest[1] == "gfx942/state_scan_opt.json row 0, which has cu_num=80"
    made = explain("k5", "gfx942", "H=32 Hg=16 lens=8192x2,100 state=bf16", 80)
    assert made.by == "rule" and "state_bf16=False, total_chunks=256" in made.nearest[0]
    assert explain("k5", "gfx950", "H=8 dense=2,130 fs=no snapshot=fp32 h0=no").call == {
        "gfx": "gfx950", "cu_num": 256, "H": 8, "Hg": 8, "V": 128, "is_varlen": False, "use_h0": False,
        "store_fs": False, "snapshot_bf16": False, "state_bf16": False, "total_chunks": 6, "max_seq_chunks": 3,
    }  # fmt: skip


def test_explain_own_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", row(block_v=16))
    made = explain("k5", "gfx942", "H=16 Hg=8 lens=384,256", 80, [path])
    assert made.by == "row" and made.choice == {"block_v": 16} and made.row == f"{path} row 0"
    assert explain("k5", "gfx942", "H=16 Hg=8 lens=384,256", 80).by == "rule"  # nothing stays behind
    budget = write(tmp_path / "p.json", PA_ROW, kernel="pa_decode")
    shape = "B=16 Hq=16 Hkv=2"
    made = explain("pa", "gfx942", shape, 80, [budget])
    assert made.by == "row" and made.choice == {"budget": 77} and made.row == f"{budget} row 0"
    made = explain("pa", "gfx942", shape + " window=128", 80)
    assert made.by == "rule" and made.choice == {"budget": 160} and made.inputs.startswith("two tasks per compute unit")


def test_explain_a_whole_block() -> None:
    report = json.loads(
        call("explain", "--op", "block", "--arch", "gfx950", "--shape", "H=8 Hg=2 lens=64", "--json").stdout
    )
    assert report["by"] == "rule" and any("K5 state scan" in line for line in report["reasons"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "H=32 lens=64", "--arch", "gfx90a"), "gfx90a"),
        (("--shape", "H=32 lens=64", "--arch", "sm100"), "arch: got 'sm100'"),
        (("--shape", "H=32 lens=64", "--arch", "gfx950", "--op", "prepare"), "tables of prepare are looked up on sm90"),
        (("--shape", "H=5 Hg=2 lens=64", "--arch", "sm90"), "expected a multiple of Hg=2"),
        (("--shape", "H=32 lens=0", "--arch", "sm90", "--op", "block"), "T_flat: got 0"),
        (("--shape", "H=32", "--arch", "gfx942"), "expected lens=... or dense=B,T"),
        (("--shape", "lens=64", "--arch", "gfx942"), "shape: lacks H"),
        (("--shape", "H=32 lens=64 lens=64", "--arch", "gfx942"), "got 'lens=64'"),
        (("--shape", "H=32 lens=1x999999999999", "--arch", "gfx942"), "expected 1 to 1048576 sequences"),
        (("--shape", "H=32 lens=-3", "--arch", "gfx942"), "got '-3'"),
        (("--shape", "H=32 lens=0", "--arch", "gfx942"), "total_chunks: got 0"),
        (("--shape", "H=5 Hg=2 lens=64", "--arch", "gfx942"), "expected a multiple of Hg=2"),
        (("--shape", "H=32 dense=3", "--arch", "gfx942"), "expected B,T"),
        (("--shape", "H=32 lens=64 h0=1", "--arch", "gfx942"), "h0: got '1', expected yes or no"),
        (("--shape", "B=1 Hq=16 Hkv=3", "--arch", "gfx942", "--op", "pa"), "num_heads"),
        (("--shape", "H=1", "--arch", "gfx942", "--op", "pa"), "got 'H=1'"),
        (("--shape", "H=32 lens=64", "--arch", "gfx942", "--op", "k7"), "op: got 'k7'"),
    ],
)
def test_explain_what_is_no_shape(arguments: tuple[str, ...], message: str) -> None:
    result = call("explain", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.replace("│", " ").split()), result.stderr


# ------------------------------------------------------------------------------------------------ export, the command


def test_the_command_export(tmp_path: Path) -> None:
    store, out = tmp_path / "s.sqlite", tmp_path / "out"
    result = call("export", "--store", store, "--out", out)
    assert result.exit_code == 1 and "there is no such store" in result.stderr and not store.exists()
    with Store(store) as opened:
        opened.add(*(make_sample(v, *(10.0 + v + i / 100 for i in range(9))) for v in (16, 32, 64)))
    result = call("export", "--store", store, "--out", out)
    path = out / "gfx942" / "state_scan_opt.json"
    assert result.exit_code == 0 and str(path) in result.stdout, result.stderr
    before = path.read_bytes()
    report = json.loads(call("export", "--store", store, "--out", out, "--base", path, "--json").stdout)
    assert path.read_bytes() == before and report[0]["rows"] == report[0]["new"] == 1
    assert call("check", path, "--strict").exit_code == 0
    assert call("export", "--store", store, "--op", "pa").exit_code == 1
    assert call("export", "--store", store, "--arch", "gfx950").exit_code == 1
    assert call("export", "--store", store, "--op", "k7").exit_code == 2
    store.write_bytes(b"no store" * 99)
    result = call("export", "--store", store, "--out", out)
    assert result.exit_code == 1 and f"StoreError: {store}: file is not a database" in result.stderr


def test_an_unwritable_table_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    tablefile.write(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gdn_tune.tablefile.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        tablefile.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------ help


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from typer.testing import CliRunner
from gdn_tune.cli import app
result = CliRunner().invoke(app, ["--help"])
assert result.exit_code == 0 and not {"torch", "gdn_runtime", "matplotlib", "sqlite3"} & set(sys.modules)
print(result.output)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    text = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, text=True, capture_output=True
    ).stdout
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "0 done and sound, 1 something failed" in " ".join(text.split())


def test_help_of_every_command_is_plain() -> None:
    for name in COMMANDS:
        result = call(name, "--help")
        assert result.exit_code == 0 and result.output.isascii() and f"Usage: gdn-tune {name} " in result.output
    assert call("--version").output == f"{__version__}\n"
    assert call().exit_code == 2 and call("tabulate").exit_code == 2


# ------------------------------------------------------------------------------------------------ documentation

ROOT = Path(__file__).parents[3]


def test_the_documentation_names_every_command() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert not [name for name in COMMANDS if not re.search(rf"`(?:gdn-tune )?{name}\b", text)]


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "packages/gdn-tune/README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tables", row())
    (tmp_path / "example.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "example.py"))
    assert list(names["rows"].values()) == [1] and not names["findings"]
