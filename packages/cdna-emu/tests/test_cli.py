"""The command cdna-emu: output, JSON, exit status."""

import json

import numpy as np
import pytest
from asm import build
from test_machine import ADD, ADD_ARGS, ENDLESS, text
from typer.testing import CliRunner

from cdna_emu import values
from cdna_emu.__about__ import __version__
from cdna_emu.cli import app

ARGS = ["-a", "buf:f32:100:range", "-a", "buf:f32:100:random", "-a", "out:f32:100", "-a", "i32:100"]


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def add(tmp_path):
    path = tmp_path / "add.hsaco"
    path.write_bytes(build(text(ADD, ADD_ARGS), "gfx942"))
    return path


@pytest.mark.parametrize("command", [[], ["run"], ["counters"], ["disasm"]])
def test_help(command):
    done = call(*command, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.output and "Traceback" not in done.output
    for option in ("--grid", "--block", "--kernel", "--json") if command in (["run"], ["counters"]) else ():
        assert option in done.output


def test_version():
    assert call("--version").output.strip() == __version__


def test_run(add, tmp_path):
    saved = tmp_path / "sum.npy"
    done = call("run", add, "--grid", "2", "--block", "64", *ARGS, "--save", f"2={saved}")
    assert done.exit_code == 0, done.output
    assert "k: nothing found" in done.output
    x, y = values.parse("buf:f32:100:range", 0), values.parse("buf:f32:100:random", 1)
    np.testing.assert_array_equal(np.load(saved), x + y)
    assert "arg 2 (out:f32:100)" in done.output


def test_run_as_json(add):
    done = call("run", add, "--grid", 2, *ARGS, "--json", "--threads", 1)
    assert done.exit_code == 0
    data = json.loads(done.output)
    assert data["report"]["ok"] and data["counters"]["classes"]["vmem_load"] == 4
    assert len(data["outputs"]["2"]) == 100


def test_findings_end_with_1(add):
    done = call("run", add, "--grid", 2, *ARGS[:-1], "i32:101")
    assert done.exit_code == 1
    assert "past its end" in done.output
    assert json.loads(call("run", add, "--grid", 2, *ARGS[:-1], "i32:101", "--json").output)["report"]["ok"] is False


def test_a_missing_wait_is_found_unless_checks_are_off(tmp_path):
    path = tmp_path / "add.s"
    path.write_text(text(ADD.replace("  s_waitcnt vmcnt(0)\n", ""), ADD_ARGS))
    assert call("run", path, "--grid", 2, *ARGS).exit_code == 1
    assert call("run", path, "--grid", 2, *ARGS, "--no-checks").exit_code == 0


def test_a_launch_that_fails_ends_with_1(tmp_path):
    path = tmp_path / "bad.hsaco"
    path.write_bytes(build(text("  s_sendmsg sendmsg(MSG_INTERRUPT)\n" + ENDLESS, []), "gfx942"))
    done = call("run", path)
    assert done.exit_code == 1
    assert "unsupported instruction" in done.output and "s_sendmsg" in done.output


@pytest.mark.parametrize(
    "words, message",
    [
        (["--grid", "x"], "--grid"),
        (["--grid", "1,2,3,4"], "--grid"),
        (["--block", "2000"], "block: got 2000"),
        (["--kernel", "other"], "kernel: got 'other'"),
        (["--arch", "gfx950"], "expected gfx950"),
        (["--arch", "gfx90a"], "arch: got 'gfx90a', expected one of gfx942, gfx950"),
        (["-a", "buf:f32:1000000000000000"], "error: "),
        (["-a", "i33:5"], "i33:5: expected"),
        (["-a", "i32:5000000000"], "does not fit i32"),
        (["--save", "9=x.npy"], "--save"),
        (["--save", "x.npy"], "--save"),
        (["--lds", "70000"], "65536"),
    ],
)
def test_wrong_use_ends_with_2(add, words, message):
    arguments = ARGS if "-a" not in words else []
    done = call("run", add, *arguments, *words)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_files_that_are_no_code_objects_end_with_2(tmp_path, add):
    assert call("run", tmp_path / "none.hsaco").exit_code == 2
    (tmp_path / "cut.hsaco").write_bytes(add.read_bytes()[:300])
    assert call("run", tmp_path / "cut.hsaco").exit_code == 2
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank.s").write_bytes(b"\n \n")
    for command in ("run", "counters", "disasm"):
        for name, got in (
            ("noise", "bytes that are no text"),
            ("empty", "an empty file"),
            ("blank.s", "an empty file"),
        ):
            done = call(command, tmp_path / name)
            assert done.exit_code == 2
            assert f"{name}: got {got}, expected a code object (ELF) or .s text" in done.output


def test_a_result_that_cannot_be_saved_ends_with_2(add, tmp_path):
    done = call("run", add, "--grid", 2, *ARGS, "--save", f"2={tmp_path}/none/x.npy")
    assert done.exit_code == 2
    assert "No such file" in done.output


def test_counters(add):
    done = call("counters", add, "--grid", 2, *ARGS, "--lines", "--model")
    assert done.exit_code == 0, done.output
    assert "vmem_load" in done.output and "global_load_dword v2, v1, s[4:5]" in done.output
    assert "model, no measurement" in done.output
    assert "where the mean wave waits" in done.output and "vm wait       0x" in done.output
    data = json.loads(call("counters", add, "--grid", 2, *ARGS, "--lines", "--model", "--json").output)
    assert data["totals"]["waves"] == 2
    assert {"address", "text", "executed"} <= set(data["lines"][0])
    assert data["model"]["cycles"] > 0


def test_disasm(add):
    done = call("disasm", add)
    assert done.exit_code == 0
    assert done.output.splitlines()[0] == "k:"
    assert "  000000  s_load_dwordx4 s[4:7], s[0:1], 0x0" in done.output.splitlines()
    data = json.loads(call("disasm", add, "--json").output)
    assert data["arch"] == "gfx942" and data["kernels"]["k"][-1]["text"] == "s_endpgm"
    assert call("disasm", add, "--kernel", "other").exit_code == 2


@pytest.mark.parametrize(
    "argument, dtype, count",
    [
        ("buf:f16:3", np.float16, 3),
        ("buf:bf16:4:random", np.uint16, 4),
        ("out:i64:2", np.int64, 2),
        ("buf:u8:0", np.uint8, 0),
    ],
)
def test_buffers(argument, dtype, count):
    array = values.parse(argument)
    assert array.dtype == dtype and array.size == count


def test_buffer_contents(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4, dtype=np.int32))
    np.testing.assert_array_equal(values.parse(f"buf:i32:4:{tmp_path}/a.npy"), [0, 1, 2, 3])
    with pytest.raises(ValueError, match="got 4 of int32, expected 5 of int32"):
        values.parse(f"buf:i32:5:{tmp_path}/a.npy")
    np.testing.assert_array_equal(values.parse("buf:bf16:3:range").astype(np.uint32) << 16, [0, 0x3F800000, 0x40000000])
    assert values.parse("null") is None
    assert values.parse("f64:0.5").value == 0.5
    assert values.parse("u32:0xffffffff").value == 0xFFFFFFFF


@pytest.mark.parametrize(
    "argument", ["", "buf", "buf:f32", "buf:f32:-1", "buf:f32:4:ones", "out:f32:4:zeros", "f32:x", "null:1"]
)
def test_bad_arguments(argument):
    with pytest.raises(ValueError):
        values.parse(argument)
