"""Where code objects come from: the permission to compile, one compile per spec, and the folder that keeps them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from gdn_runtime import env
from gdn_runtime.codeobject import CodeObject, code_object, source
from gdn_runtime.errors import CaptureError, CompileError, CorruptCodeObjectError, MissingCodeObjectError
from gdn_runtime.kernels import jit, toolchain
from gdn_runtime.spec import KernelSpec
from gdn_testing.probe import ProbeSpec

_variants = itertools.count(1)


@pytest.fixture
def spec() -> ProbeSpec:
    """A spec that this process has not seen."""
    return ProbeSpec("gfx942", variant=next(_variants))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that keeps code objects, compiling allowed."""
    with env.override(jit=True, jit_cache_dir=str(tmp_path / "kept"), flydsl_runtime_run_only=False):
        yield tmp_path / "kept"


@pytest.fixture(scope="module")
def compiled() -> CodeObject:
    return jit.compile_spec(ProbeSpec("gfx942"))


class Compiler:
    """Stands in for the compiler: counts, and gives the code of another variant of the probe."""

    def __init__(self, code: CodeObject) -> None:
        self.code, self.count, self.lock = code, 0, threading.Lock()

    def __call__(self, spec: KernelSpec) -> CodeObject:
        with self.lock:
            self.count += 1
        return CodeObject(spec, self.code.facts, self.code.elf)


@pytest.fixture
def compiler(compiled: CodeObject) -> Iterator[Compiler]:
    compiler = Compiler(compiled)
    with mock.patch.object(jit, "compile_spec", compiler):
        yield compiler


def forget(spec: KernelSpec) -> None:
    """As in a process that has not asked for it."""
    source._codes.pop(spec, None)


def test_nothing_compiles_unless_it_is_allowed(spec: ProbeSpec, compiler: Compiler) -> None:
    with env.override(jit=False), pytest.raises(MissingCodeObjectError) as caught:
        code_object(spec)
    assert str(caught.value) == (
        f"no code object of probe (arch=gfx942 deed=scale variant={spec.variant}): GDN_BUNDLE is not set, and the "
        "package carries no bundle for gfx942. Build a bundle that has it and name it: `gdn-aot build --arch gfx942 "
        "--complete --out DIR`, with `--table FILE` if no packaged table has its heads, then GDN_BUNDLE=DIR; or set "
        "GDN_JIT=1 to compile it at the first call"
    )
    with (
        env.override(jit=True, jit_cache_dir="", flydsl_runtime_run_only=True),
        pytest.raises(MissingCodeObjectError, match="FLYDSL_RUNTIME_RUN_ONLY, which forbids"),
    ):
        code_object(spec)
    with (
        env.override(jit=True, jit_cache_dir=""),
        mock.patch.object(source, "capturing", return_value=True),
        pytest.raises(CaptureError, match="warm up first"),
    ):
        code_object(spec)
    assert compiler.count == 0
    with env.override(jit=True, jit_cache_dir=""):
        code = code_object(spec)
    with env.override(jit=False):
        assert code_object(spec) is code
    assert compiler.count == 1


def test_run_only_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYDSL_RUNTIME_RUN_ONLY", "1")
    try:
        assert env.reload().flydsl_runtime_run_only
    finally:
        monkeypatch.undo()
        env.reload()


def test_threads_that_ask_for_one_spec_share_one_compile(folder: Path, compiler: Compiler, spec: ProbeSpec) -> None:
    other = ProbeSpec("gfx942", variant=next(_variants))
    barrier = threading.Barrier(8)

    def ask(number: int) -> CodeObject:
        barrier.wait(60)
        return code_object(other if number % 2 else spec)

    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(ask, range(8)))
    assert compiler.count == 2
    assert len({id(code) for code in codes}) == 2 and [code.spec for code in codes] == [spec, other] * 4


def test_a_failed_compile_is_tried_again(spec: ProbeSpec, compiler: Compiler, folder: Path) -> None:
    with (
        mock.patch.object(jit, "compile_spec", side_effect=CompileError("probe", "no")),
        pytest.raises(CompileError, match="compiling probe: no"),
    ):
        code_object(spec)
    assert code_object(spec).spec == spec and compiler.count == 1


def test_the_folder_keeps_what_was_compiled(folder: Path, compiler: Compiler, spec: ProbeSpec) -> None:
    made = code_object(spec)
    forget(spec)
    with (
        env.override(flydsl_runtime_run_only=True),
        mock.patch.object(source, "capturing", return_value=True),
    ):
        kept = code_object(spec)
    assert kept == made and kept is not made and compiler.count == 1
    names = sorted(path.name for path in folder.iterdir())
    (stem,) = {name.partition(".")[0] for name in names}
    assert names == [f"{stem}.hsaco", f"{stem}.json", f"{stem}.lock"] and stem.startswith("probe-gfx942-")
    assert (folder / f"{stem}.hsaco").read_bytes() == made.elf
    entry = json.loads((folder / f"{stem}.json").read_text())
    assert entry["sha256"] == made.digest and entry["spec"]["variant"] == spec.variant
    assert entry["toolchain"]["flydsl"] == toolchain.FLYDSL


@pytest.mark.parametrize("changed", ["sources", "toolchain", "abi"])
def test_what_the_code_depends_on_is_in_the_key(
    folder: Path, compiler: Compiler, spec: ProbeSpec, changed: str
) -> None:
    code_object(spec)
    forget(spec)
    patch = {
        "sources": mock.patch.object(jit, "source_digest", return_value="0" * 64),
        "toolchain": mock.patch.object(toolchain, "versions", return_value={"flydsl": "0.5.1"}),
        "abi": mock.patch.object(jit, "KERNEL_ABI", 0),
    }[changed]
    with patch:
        code_object(spec)
    assert compiler.count == 2 and len(list(folder.glob("*.json"))) == 2


def test_sources_that_change_during_a_compile_do_not_name_its_code(
    folder: Path, compiler: Compiler, spec: ProbeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edited(given: KernelSpec) -> CodeObject:
        monkeypatch.setattr(jit, "source_digest", lambda spec: "0" * 64)
        return compiler(given)

    monkeypatch.setattr(jit, "compile_spec", edited)
    code_object(spec)
    assert jit.find(spec, str(folder)) is None, "code of the old sources under the name of the new ones"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def other_facts(path: Path) -> None:
    entry = json.loads(path.read_text())
    entry["facts"]["block"] = [128, 1, 1]
    path.write_text(json.dumps(entry))


def other_spec(path: Path) -> None:
    entry = json.loads(path.read_text())
    entry["spec"]["variant"] = -1
    path.write_text(json.dumps(entry))


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("hsaco", flip),
        ("hsaco", truncate),
        ("hsaco", Path.unlink),
        ("json", flip),
        ("json", truncate),
        ("json", other_facts),
        ("json", other_spec),
        ("json", lambda path: path.write_text("[]")),
        ("json", lambda path: path.write_bytes(b"\xff\xfe")),
    ],
)
def test_a_damaged_entry_is_an_error(
    folder: Path, compiler: Compiler, spec: ProbeSpec, suffix: str, damage: object
) -> None:
    code_object(spec)
    forget(spec)
    (path,) = folder.glob(f"*.{suffix}")
    damage(path)  # type: ignore[operator]
    with pytest.raises(CorruptCodeObjectError, match=r"no longer what was stored for probe .*: remove the file"):
        code_object(spec)
    assert compiler.count == 1
    for path in folder.iterdir():
        path.unlink()
    assert code_object(spec).spec == spec and compiler.count == 2


def test_no_bit_of_an_entry_can_change(folder: Path, compiler: Compiler, spec: ProbeSpec) -> None:
    code_object(spec)
    (path,) = folder.glob("*.json")
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 7):  # the last byte is a newline
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CorruptCodeObjectError):
            jit.find(spec, str(folder))


def test_a_writer_that_dies_leaves_no_entry(folder: Path, compiler: Compiler, spec: ProbeSpec) -> None:
    with mock.patch.object(jit.os, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        code_object(spec)
    assert not list(folder.glob("*.json"))
    assert code_object(spec).spec == spec and compiler.count == 2


def test_sources_are_those_of_the_language_and_the_package(spec: ProbeSpec) -> None:
    digest = jit.source_digest(spec)
    assert len(digest) == 64 and digest == jit.source_digest(ProbeSpec("gfx950"))
    with mock.patch.object(ProbeSpec, "language", "triton"):
        assert jit.source_digest(spec) != digest
