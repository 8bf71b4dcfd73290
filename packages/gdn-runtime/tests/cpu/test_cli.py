"""python -m gdn_runtime: exit codes, JSON, text and behaviour in a pipe."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn_runtime import __main__ as cli
from gdn_runtime import doctor, env, log, select
from gdn_runtime.__about__ import __version__
from gdn_runtime.errors import UnsupportedError

SOURCE = Path(env.__file__).parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    env.reload()
    yield
    monkeypatch.undo()
    env.reload()


def python(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the package where this one does."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **variables}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `explain` asks of select.explain_shape; answers nothing of interest."""
    asked: dict[str, Any] = {}

    class Answer:
        def as_dict(self) -> dict[str, str]:
            return {"backend": "answer"}

        def __str__(self) -> str:
            return "the answer"

    def explain_shape(**arguments: Any) -> Answer:
        asked.update(arguments)
        return Answer()

    monkeypatch.setattr(select, "explain_shape", explain_shape)
    return asked


# ------------------------------------------------------------------------------------------------ whole process


def test_version() -> None:
    done = python("-m", "gdn_runtime", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gdn-runtime {__version__}\n", "")


def test_doctor_reports_an_unknown_variable_once_and_exits_with_1() -> None:
    done = python("-m", "gdn_runtime", "doctor", "--json", GDN_BACKND="triton")
    assert done.returncode == 1
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert [p for p in report["problems"] if "GDN_BACKND" in p] == [
        "GDN_BACKND is no variable of gdn-runtime and has no effect, did you mean GDN_BACKEND?"
    ]


def test_doctor_without_triton_imports_nothing_of_it() -> None:
    code = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flydsl"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
sys.argv = ["gdn_runtime", "doctor", "--json"]
runpy.run_module("gdn_runtime", run_name="__main__")
"""
    done = python("-c", code)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["versions"]["triton"] == "not installed (triton is blocked)"
    assert report["caches"] == []


def test_importing_the_commands_imports_no_kernel_compiler() -> None:
    code = "import sys, gdn_runtime.__main__; print([m for m in ('triton', 'flydsl') if m in sys.modules])"
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end differently on Windows")
def test_closed_pipe_is_silent() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "gdn_runtime", "env", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == -signal.SIGPIPE


# ------------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "doctor --yaml",
        "env --json --markdown",
        "explain --heads 32",
        "explain --seq-lens 64",
        "explain --heads 0 --seq-lens 64",
        "explain --heads 4 --seq-lens 64 --dense 1,64",
        "explain --heads 4 --seq-lens 64,,1",
        "explain --heads 4 --seq-lens -1",
        "explain --heads 4 --seq-lens 64x0",
        "explain --heads 4 --seq-lens 1x99999999999",
        "explain --heads 4 --dense 64",
        "explain --heads 4 --seq-lens 64 --dtype fp64",
        "explain --heads 4 --seq-lens 64 --device nowhere",
        "explain --heads 4 --seq-lens 64 --backend cuda",
    ],
)
def test_usage_errors_exit_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: python -m gdn_runtime")


@pytest.mark.parametrize("line", ["--help", "doctor --help", "env --help", "explain --help"])
def test_help_has_one_example(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 0
    assert capsys.readouterr().out.count("Example: ") == 1


# ------------------------------------------------------------------------------------------------ doctor and env


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["something"], 1)])
def test_doctor_exit_code_is_that_of_the_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: list[str], code: int
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Report({"torch": "2"}, 1, problems=problems))
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.endswith(f"problems\n  {problems[0] if problems else 'none'}\n")


def test_env_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GDN_K5_BLOCK_V", "32")
    assert cli.main(["env", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    by_name = {entry["name"]: entry for entry in data["variables"]}
    assert set(by_name) == {var.name for var in env.VARIABLES}
    assert (by_name["GDN_K5_BLOCK_V"]["value"], by_name["GDN_K5_BLOCK_V"]["source"]) == (32, "environment")
    assert (by_name["GDN_BACKEND"]["value"], by_name["GDN_BACKEND"]["source"]) == ("auto", "default")
    assert data["unknown"] == {}


def test_env_text_and_exit_code_for_bad_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "hip")
    monkeypatch.setenv("GDN_ACRH", "sm90")
    assert cli.main(["env"]) == 1
    captured = capsys.readouterr()
    assert re.search(r"^GDN_BACKEND +hip  \[environment\]$", captured.out, re.MULTILINE)
    assert "error: GDN_BACKEND: got 'hip', expected one of auto, reference, triton, flydsl, emulate\n" in captured.err
    assert "did you mean GDN_ARCH?" in captured.err


def test_env_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--markdown"]) == 0
    assert capsys.readouterr().out == env.markdown()


# ------------------------------------------------------------------------------------------------ explain


def test_explain_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    line = "explain --heads 32 --key-heads 16 --seq-lens 8192x2,17 --device cpu"
    assert cli.main(line.split()) == 0
    text = capsys.readouterr().out
    assert cli.main([*line.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["backend"], data["prepare_backend"], data["arch"]) == ("reference", "reference", "cpu")
    assert "reference" in text


def test_explain_passes_everything_on(explained: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "explain --heads 32 --key-heads 16 --seq-lens 8192x2,17 --dtype fp16 --state-dtype bf16 --snapshot-dtype fp32"
        " --device cuda:1 --backend triton --prepare-backend reference --arch gfx950:sramecc+"
        " --pool"
    )
    assert cli.main(line.split()) == 0
    assert capsys.readouterr().out == "the answer\n"
    assert explained == {
        "num_heads": 32,
        "num_key_heads": 16,
        "seq_lens": (8192, 8192, 17),
        "is_varlen": True,
        "dtype": torch.float16,
        "state_dtype": torch.bfloat16,
        "snapshot_dtype": torch.float32,
        "device": torch.device("cuda", 1),
        "backend": "triton",
        "prepare_backend": "reference",
        "arch": "gfx950",
        "use_state_indices": True,
    }


@pytest.mark.parametrize("asked", ["--backend emulate", "--backend reference --prepare-backend emulate"])
def test_explain_of_what_is_emulated_is_about_cpu_tensors(explained: dict[str, Any], asked: str) -> None:
    assert cli.main(f"explain --heads 4 --dense 1,64 --arch gfx942 {asked}".split()) == 0
    assert (explained["device"], explained["arch"]) == (torch.device("cpu"), "gfx942")


def test_explain_defaults(
    explained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["explain", "--heads", "8", "--dense", "3,100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"backend": "answer"}
    assert (explained["num_key_heads"], explained["seq_lens"], explained["is_varlen"]) == (8, (100, 100, 100), False)
    assert (explained["state_dtype"], explained["snapshot_dtype"]) == (torch.float32, torch.bfloat16)
    assert (explained["device"], explained["arch"]) == (torch.device("cpu"), None)


def test_arch_option_wins_over_the_variable(explained: dict[str, Any]) -> None:
    with env.override(arch="gfx942"):
        assert cli.main(["explain", "--heads", "8", "--seq-lens", "64"]) == 0
        assert (explained["arch"], explained["device"]) == ("gfx942", torch.device("cuda"))
        assert cli.main(["explain", "--heads", "8", "--seq-lens", "64", "--arch", "sm90"]) == 0
        assert explained["arch"] == "sm90"


@pytest.mark.parametrize(
    ("line", "variable", "message"),
    [
        ("--arch gfx90a", "", "error: --arch: got 'gfx90a', supported: gfx942, gfx950, "),
        ("", "garbage", "error: GDN_ARCH: got 'garbage', supported: gfx942, gfx950, "),
        (
            "--key-heads 3 --device cpu",
            "",
            "error: heads: got H=8 value heads, Hg=3 key heads, supported: H a positive multiple of Hg",
        ),
        ("--device cpu --backend triton --key-heads 3", "", "error: "),
    ],
)
def test_explain_refuses_with_1(capsys: pytest.CaptureFixture[str], line: str, variable: str, message: str) -> None:
    with env.override(arch=variable):
        assert cli.main(["explain", "--heads", "8", "--seq-lens", "64", *line.split()]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)


def test_explain_reports_what_select_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**arguments: Any) -> None:
        raise UnsupportedError("backend on cpu", got="'triton'", supported=["reference"])

    monkeypatch.setattr(select, "explain_shape", refuse)
    assert cli.main(["explain", "--heads", "8", "--seq-lens", "64"]) == 1
    assert capsys.readouterr().err == "error: backend on cpu: got 'triton', supported: reference\n"


@pytest.mark.parametrize(
    ("text", "lengths"), [("8192", (8192,)), ("8192,0,1", (8192, 0, 1)), ("8x3", (8, 8, 8)), ("5,8x2,1", (5, 8, 8, 1))]
)
def test_seq_lens(text: str, lengths: tuple[int, ...]) -> None:
    assert cli.seq_lens(text) == lengths


# ------------------------------------------------------------------------------------------------ logging


def test_logger_has_a_null_handler_and_no_configuration() -> None:
    assert log.logger.name == "gdn_runtime"
    assert [type(handler) for handler in log.logger.handlers] == [logging.NullHandler]
    assert log.logger.level == logging.NOTSET
    assert log.logger.propagate
