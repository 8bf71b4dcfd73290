"""The build of the core: what the wheel and the source distribution hold, and what is said without a compiler."""

import ctypes
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cdna_emu import build_core, native

PACKAGE = Path(__file__).resolve().parent.parent


def test_no_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs a C compiler.*none of cc, gcc, clang was found.*apt-get install"):
        build_core.compiler()
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(RuntimeError, match="'no-such-compiler -m64' was not found"):
        build_core.compile_core(tmp_path / "core.so")


def test_compiler_and_its_options(monkeypatch):
    monkeypatch.setenv("CC", "cc -pipe")
    assert build_core.compiler() == ["cc", "-pipe"]


def test_zig_does_not_compile_for_this_cpu_alone(monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -m ziglang cc")
    *_, cpu = build_core.command_line()
    assert cpu in {"-mcpu=x86_64_v3", "-mcpu=baseline"}
    monkeypatch.setenv("CC", "cc")
    assert build_core.command_line() == ["cc", *build_core.FLAGS]


def test_a_source_that_does_not_compile_shows_the_messages(tmp_path):
    (tmp_path / "broken.c").write_text("int f(void) { return nothing; }\n")
    with pytest.raises(RuntimeError, match=r"broken\.c.*nothing"):
        build_core.build(tmp_path, tmp_path / "out.so")
    with pytest.raises(RuntimeError, match="holds no C source"):
        build_core.build(tmp_path / "empty", tmp_path / "out.so")


def test_sources_compile_without_warnings(tmp_path):
    checked = 0
    for source in sorted(build_core.CORE.glob("*.c")):
        command = [*build_core.compiler(), *build_core.FLAGS, "-O0", "-Wall", "-Wextra", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), source.name
        checked += 1
    assert checked > 5


@pytest.mark.slow
def test_wheel_and_source_distribution(tmp_path):
    copy = tmp_path / "copy"
    skipped = shutil.ignore_patterns("*.so", "__pycache__", "tests", "dist", ".*")
    shutil.copytree(PACKAGE, copy, ignore=skipped)

    def build(target: str, folder: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path / "dist")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    build("sdist", copy)
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    build("wheel", next((tmp_path / "unpacked").iterdir()))

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "cdna_emu/py.typed" in archive.namelist()
        archive.extract("cdna_emu/_core.so", tmp_path)
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
    core = ctypes.CDLL(str(tmp_path / "cdna_emu" / "_core.so"))
    assert core.cdna_sizeof(0) == 48  # Insn

    assert {"hatch_build.py", "pyproject.toml", "src/cdna_emu/build_core.py", "src/cdna_emu/core/core.h"} <= names
    assert {f"src/cdna_emu/core/{path.name}" for path in build_core.CORE.iterdir()} <= names
    assert not any(name.endswith(".so") for name in names)


def test_a_core_of_another_table_of_opcodes_is_refused(monkeypatch):
    monkeypatch.setattr(native.ops, "fingerprint", lambda: 0)
    with pytest.raises(ImportError, match="another table of opcodes; reinstall"):
        native.core.__wrapped__()
