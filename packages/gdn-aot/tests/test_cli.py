"""The command: what it prints, where, and how it ends. Codes are fakes, but where it says real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gdn_aot import KERNELS, __version__, inspect, jobs
from gdn_aot.cli import app
from gdn_runtime.codeobject import CodeObject, read_bundle
from gdn_runtime.errors import CompileError
from gdn_runtime.spec import KERNEL_ABI, KernelSpec, OutputSpec
from gdn_runtime.tables import PACKAGED
from gdn_testing.bundles import fake_code, read_manifest, write_manifest

ARCH = "gfx950"
BUILD = ("build", "--arch", ARCH, "--kernel", "triton")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def script(*arguments: object, options: tuple[str, ...] = (), **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "COLUMNS": "60"}
    command = [sys.executable, *options, "-m", "gdn_aot", *map(str, arguments)]
    return subprocess.run(command, text=True, env=environment, check=False, **kwargs)


def one_row(folder: Path) -> Path:
    """A table of one shape."""
    table = json.loads((PACKAGED / "gfx942" / "state_scan_opt.json").read_text())
    table["rows"] = table["rows"][:1]
    path = folder / "one.json"
    path.write_text(json.dumps(table))
    return path


@pytest.fixture
def built(compiler: Any, tmp_path: Path) -> Path:
    """A folder with a bundle of the Triton kernels."""
    assert call(*BUILD, "--out", tmp_path / "out", "-q").exit_code == 0
    return tmp_path / "out"


def test_help_of_every_command_is_plain() -> None:
    result = call("--help")
    commands = ("build", "verify", "list", "coverage", "diff", "run", "flydsl-cache", "pack")
    assert result.exit_code == 0 and all(f"\n  {command} " in result.output for command in commands)
    assert "0 done and sound, 1 something failed" in " ".join(result.output.split())
    for command in commands:
        text = call(command, "--help").output
        assert text.isascii() and "--help" in text
    assert "gdn-aot[dask]" in call("build", "--help").output
    assert call("--version").output == f"{__version__}\n"
    assert call().exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build",), "--arch"),
        (("build", "--arch", "gfx90a"), "got 'gfx90a', supported: gfx942, gfx950"),
        (("build", "--arch", "sm90"), "got 'sm90', supported: gfx942, gfx950"),
        (("build", "--arch", ""), "got '', supported: gfx942, gfx950"),
        (("build", "--arch", "MI300"), "got 'MI300', supported: gfx942, gfx950"),
        (("build", "--arch", "gfx950", "--kernel", "k7"), f"got k7, expected one of {', '.join(KERNELS)}"),
        (("build", "--arch", "gfx942", "--kernel", "vk"), "got 'gfx942', supported: gfx950"),
        (("build", "--arch", "gfx950", "--table", "no such file"), "does not exist"),
        (("build", "--arch", "gfx950", "--workers", "0"), "--workers"),
        (("build", "--arch", "gfx950", "--executor", "slurm"), "expected local or dask:ADDRESS"),
        (("build", "--arch", "gfx950", "--out", "/proc/no"), "cannot write to /proc/no"),
        (("verify", "no such folder"), "does not exist"),
        (("verify", "."), "expected a folder with a manifest.json"),
        (("list", "."), "expected a folder with a manifest.json"),
        (("coverage", "."), "expected a folder with a manifest.json"),
        (("diff", "."), "Missing argument"),
        (("run", "."), "expected --emulate"),
        (("pack", "."), "expected --archive FILE"),
        (("compile",), "No such command"),
    ],
)
def test_wrong_use_is_status_2(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()) and not result.stdout
    assert not compiler.asked and list(tmp_path.iterdir()) == []


def test_a_read_only_folder_is_told_before_anything_is_compiled(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs this may be root, to whom no folder is read-only: the answer of the system is a fake."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("gdn_aot.bundle.tempfile.TemporaryFile", refuse)
    result = call(*BUILD, "--out", tmp_path)
    assert result.exit_code == 2 and "cannot write" in result.stderr and "Read-only file system" in result.stderr
    assert not compiler.asked


def test_features_after_the_name_of_an_architecture_are_dropped(compiler: Any, tmp_path: Path) -> None:
    result = call(
        "build", "--arch", "gfx950:sramecc+:xnack-", "--arch", "GFX950", "--kernel", "triton", "--out", tmp_path
    )
    assert result.exit_code == 0 and set(os.listdir(tmp_path)) == {ARCH, ".gdn-aot"}
    assert {spec.arch for spec in compiler.asked} == {ARCH} and len(compiler.asked) == 18


def test_build_tells_what_it_did(compiler: Any, tmp_path: Path) -> None:
    result = call(*BUILD, "--out", tmp_path)
    assert result.exit_code == 0 and not result.stderr
    header, row = (line for line in result.stdout.splitlines() if line.startswith("|") and "---" not in line)
    cells = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (header, row)), strict=True))
    assert (
        cells["triton"] == "18" and cells["kept"] == cells["failed"] == "0" and cells["bundle"] == str(tmp_path / ARCH)
    )
    report = json.loads(call(*BUILD, "--out", tmp_path, "--json").stdout)
    assert report[ARCH]["kept"] == report[ARCH]["jobs"]["triton"] == 18
    assert call(*BUILD, "--out", tmp_path, "-q").output == ""


def test_one_of_the_kernels_fails(compiler: Any, built: Path) -> None:
    """Status 1, its name and the compiler's words on standard error, and the bundle that was there stays."""

    def behave(spec: KernelSpec) -> CodeObject:
        if isinstance(spec, OutputSpec) and spec.num_heads == 64 and spec.snapshot_dtype == "fp32":
            raise CompileError("output", "the compiler reported an error and went on", "error: local memory")
        return fake_code(spec)

    before = read_bundle(built / ARCH).digest
    compiler.behave = behave
    other = built.parent / "other"
    for out, place in ((built, True), (other, False)):
        kept = out / ".gdn-aot" / "kept"
        for path in kept.glob("output-*"):
            path.unlink()
        result = call(*BUILD, "--out", out, "--json")
        assert result.exit_code == 1 and "error: local memory" in result.stderr and "num_heads=64" in result.stderr
        assert "1 of 18 jobs failed" in result.stderr and "Traceback" not in result.stderr
        assert json.loads(result.stdout)[ARCH]["failed"] == 1 and json.loads(result.stdout)[ARCH]["bundle"] is None
        assert (out / ARCH).exists() is place
    assert read_bundle(built / ARCH).digest == before
    compiler.behave, asked = fake_code, len(compiler.asked)
    assert call(*BUILD, "--out", other).exit_code == 0 and len(compiler.asked) == asked + 1  # it goes on where it was


def test_tables_that_ask_for_nothing(compiler: Any, built: Path, tmp_path: Path) -> None:
    table = tmp_path / "broken.json"
    table.write_text("{")
    with pytest.warns(RuntimeWarning, match="broken.json"):
        result = call("build", "--arch", ARCH, "--table", table, "--out", built)
    assert result.exit_code == 2 and "got no row that asks for a kernel" in " ".join(result.stderr.split())
    with pytest.warns(RuntimeWarning, match="broken.json"):
        assert call("coverage", built, "--table", table).exit_code == 2
    assert table.read_text() == "{"


def test_verify(compiler: Any, built: Path) -> None:
    result = call("verify", built)
    assert result.exit_code == 0 and "gfx950: 18 artifacts sound" in result.stdout
    payload = next((built / ARCH).glob("*.hsaco"))
    payload.write_bytes(payload.read_bytes()[::-1])
    (built / ARCH / "extra").touch()
    result = call("verify", built / ARCH, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and {Path(fault["path"]).name for fault in report["faults"]} == {payload.name, "extra"}
    result = call("verify", built)
    assert result.exit_code == 1 and result.stderr.count("CorruptBundleError") == 2 and not result.stdout
    manifest = built / ARCH / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"kernel_abi":{KERNEL_ABI}', '"kernel_abi":99'))
    for command in ("verify", "list", "coverage"):
        result = call(command, built)
        assert result.exit_code == 1 and "IncompatibleBundleError" in result.stderr and "99" in result.stderr


def test_list_is_legible_in_a_pipe(compiler: Any, built: Path) -> None:
    result = call("list", built, "--all")
    header = next(line for line in result.stdout.splitlines() if line.startswith("| kernel"))
    for word in ("varlen", "snapshot", "VGPR", "scratch", "bytes"):
        assert word in header
    rows = [line for line in result.stdout.splitlines() if line.startswith(("| output", "| l2norm"))]
    assert len(rows) == 18 and not any("…" in row for row in rows)
    assert "KERNEL_ABI" in call("list", built).stdout
    report = json.loads(call("list", built, "--json").stdout)[ARCH]
    assert len(report["artifacts"]) == 18 and report["tables"][0]["file"] == "gfx942/state_scan_opt.json"


def test_coverage(compiler: Any, built: Path, tmp_path: Path) -> None:
    table = one_row(tmp_path)
    asked = len(jobs(ARCH, tables=[table]))
    result = call("coverage", built, "--table", table)
    assert result.exit_code == 1 and f"3 of {asked} jobs covered" in result.stdout
    assert result.stderr.count("missing:") == asked - 3 and "no row asks for" in result.stderr
    assert call("build", "--arch", ARCH, "--table", table, "--out", built).exit_code == 0
    result = call("coverage", built, "--table", table, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)[ARCH]["percent"] == 100


def test_diff(compiler: Any, built: Path, tmp_path: Path) -> None:
    assert call("diff", built, built).exit_code == 0
    other = tmp_path / "other"
    assert call("build", "--arch", ARCH, "--arch", "gfx942", "--kernel", "vk", "--out", other).exit_code == 2
    assert call("build", "--arch", ARCH, "--kernel", "vk", "--out", other).exit_code == 0
    result = call("diff", built, other)
    assert result.exit_code == 1 and "24 appear, 18 vanish, 0 change, 0 equal" in result.stdout
    report = json.loads(call("diff", built, other, "--json").stdout)
    assert len(report[ARCH]["added"]) == 24 and report["only_in_one"] == []
    assert call("build", "--arch", "gfx942", "--kernel", "triton", "--out", other).exit_code == 0
    assert "gfx942: only in" in call("diff", built, other).stdout


@pytest.mark.parametrize(
    "command",
    [
        ("verify",),
        ("list",),
        ("list", "--all"),
        ("list", "--json"),
        ("coverage",),
        ("diff", "AGAIN"),
        ("run", "--emulate"),
        ("pack", "--archive", "no.tar"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("field", ["facts", "spec", "file"])
def test_what_a_manifest_says_is_not_believed(
    compiler: Any, built: Path, tmp_path: Path, field: str, command: tuple[str, ...]
) -> None:
    """A manifest with its right sha256 and a wrong line: status 1 and the error, or what does not need the field."""
    manifest = read_manifest(built / ARCH)
    entry = manifest["artifacts"][0]
    if field == "file":
        entry["file"] = "../" + entry["file"]
    else:
        del entry[field]["vgprs" if field == "facts" else "num_key_heads"]
    entry["sha256"] = "0" * 64
    write_manifest(built / ARCH, manifest)
    name, *options = command
    options = [str(tmp_path / "sound") if option == "AGAIN" else option for option in options]
    if "AGAIN" in command:
        assert call(*BUILD, "--out", tmp_path / "sound", "-q").exit_code == 0
    result = CliRunner().invoke(app, [name, str(built), *options])
    needs = {"facts": {"verify", "list", "diff", "run", "pack"}, "spec": {"verify", "list", "run", "pack"}}
    if field == "file" or (name in needs[field] and "--json" not in command):
        assert result.exit_code == 1 and "The bundle is not what was built" in result.stderr + result.stdout
        assert isinstance(result.exception, SystemExit)
    else:
        assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not (tmp_path / "no.tar").exists()


# ------------------------------------------------------------------------------------------------ pack


def plain_wheel(folder: Path) -> Path:
    """A wheel of gdn-runtime, as far as packing looks at it."""
    from gdn_runtime import __version__ as version

    info = f"gdn_runtime-{version}.dist-info"
    wheel = folder / f"gdn_runtime-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gdn_runtime/__init__.py", "")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_pack(compiler: Any, built: Path, tmp_path: Path) -> None:
    wheel = plain_wheel(tmp_path)
    made = []
    for name in ("a", "b"):
        os.utime(next((built / ARCH).glob("*.hsaco")), (time.time(), 1e9))
        out = tmp_path / name
        result = call("pack", built, "--archive", out / "bundles.tar", "--wheel", wheel, "--out", out)
        assert result.exit_code == 0, result.stderr
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert made[0] == made[1] and len(made[0]) == 2
    with tarfile.open(tmp_path / "a" / "bundles.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert call("diff", built, tmp_path / "unpacked").exit_code == 0
    (bundled,) = (tmp_path / "a").glob("*.whl")
    assert bundled.name == wheel.name.replace("-py3", "-1bundled-py3")
    with zipfile.ZipFile(bundled) as archive:
        archive.extractall(tmp_path / "installed")
        names = set(archive.namelist())
        (record,) = (name for name in names if name.endswith("/RECORD"))
        assert {line.split(",")[0] for line in archive.read(record).decode().splitlines()} == names
        assert b"Build: 1bundled" in archive.read(record.replace("RECORD", "WHEEL"))
    assert call("diff", built, tmp_path / "installed" / "gdn_runtime" / "_bundles").exit_code == 0
    result = call("pack", built, "--wheel", bundled, "--out", tmp_path)
    assert result.exit_code == 2 and "expected gdn_runtime-VERSION-PYTHON-ABI-PLATFORM.whl" in result.stderr
    stranger = wheel.rename(tmp_path / "gdn_runtime-9.9-py3-none-any.whl")
    result = call("pack", built, "--wheel", stranger, "--out", tmp_path)
    assert result.exit_code == 2 and "version of gdn-runtime" in result.stderr
    (built / ARCH / "extra").touch()
    assert call("pack", built, "--archive", tmp_path / "no.tar").exit_code == 1 and not (tmp_path / "no.tar").exists()


@pytest.mark.parametrize("name", ["manifest.json", "*.hsaco"])
def test_pack_takes_no_bytes_that_it_did_not_verify(
    compiler: Any, built: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes between the check of the bundle and its packing."""
    verify = inspect.faults

    def faults(path: Path) -> object:
        found = verify(path)
        file = next((built / ARCH).glob(name))
        file.write_bytes(file.read_bytes()[:-1] + b"~")
        return found

    monkeypatch.setattr(inspect, "faults", faults)
    result = call("pack", built, "--archive", tmp_path / "no.tar")
    assert (
        result.exit_code == 1 and result.stderr.startswith("CorruptBundleError: ") and "Traceback" not in result.stderr
    )
    assert not (tmp_path / "no.tar").exists()


# ------------------------------------------------------------------------------------------------ processes


def test_a_closed_pipe_and_python_o(compiler: Any, built: Path) -> None:
    """No traceback; and a failure is a failure under -O, where no assertion runs."""
    read, write = os.pipe()
    os.close(read)
    result = script("list", built, "--all", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert result.returncode == 1 and "Traceback" not in result.stderr and "Exception" not in result.stderr
    (built / ARCH / "extra").touch()
    result = script("verify", built, options=("-O",), capture_output=True)
    assert result.returncode == 1 and "CorruptBundleError" in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1  # whole, though the terminal would be narrow


def test_a_build_that_was_killed_goes_on_real(tmp_path: Path) -> None:
    """Triton's kernels of one shape: killed after the first, built again, then elsewhere, at other workers, and run."""
    table, out = one_row(tmp_path), tmp_path / "out"
    build = ("build", "--arch", ARCH, "--kernel", "triton", "--table", table)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "gdn_aot", *map(str, build), "--out", str(out), "--workers", "1"]
    with subprocess.Popen(command, env=environment) as process:
        deadline = time.monotonic() + 300
        while not list((out / ".gdn-aot" / "kept").glob("*.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (out / ARCH).exists()
    again = json.loads(call(*build, "--out", out, "--json").stdout)[ARCH]
    assert again["kept"] >= 1 and again["kept"] < again["jobs"]["triton"] == 3
    assert call(*build, "--out", tmp_path / "elsewhere", "--workers", "3").exit_code == 0
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name / ARCH).iterdir()} for name in ("out", "elsewhere")
    )
    assert first == second and len(first) == 4
    assert call("coverage", out, "--table", table).exit_code == 1  # Triton's alone
    result = call("run", out, "--emulate")
    assert result.exit_code == 0 and "gfx950: 3 artifacts launched, 0 failed" in result.stdout
