"""Writing bundles: the same bytes always, and never half a bundle, whoever is killed and whoever builds beside."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdn_aot import bundle as writer
from gdn_aot import pool
from gdn_aot.bundle import WORK, kept_folder, prepare_folder, write_bundle
from gdn_runtime.codeobject import CodeObject, read_bundle
from gdn_runtime.codeobject.bundle import read_bundles
from gdn_runtime.errors import BundleError
from gdn_runtime.spec import L2NormSpec
from gdn_runtime.tables import COMPILED, GRID, PACKAGED
from gdn_testing.bundles import fake_code

ARCH = "gfx950"
OLD = [fake_code(L2NormSpec(ARCH, "bf16", heads)) for heads in (2, 4)]
NEW = [fake_code(L2NormSpec(ARCH, "bf16", heads)) for heads in (4, 8, 16)]


def content(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, but for what builders work with."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and WORK not in path.parts
    }


def keys(folder: Path) -> set[str]:
    """Keys of a bundle that must be sound."""
    bundle = read_bundle(folder)
    assert list(bundle.faults()) == []
    return set(bundle.artifacts)


def keys_of(codes: list[CodeObject]) -> set[str]:
    return {writer.spec_key(code.spec) for code in codes}


def leftovers(out: Path) -> list[Path]:
    return list((out / WORK).glob("new-*"))


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    """Twice in one place, in other places, in another order, with the tables in another place."""
    tables = tmp_path / "copy of tables"
    shutil.copytree(PACKAGED, tables, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    write_bundle(tmp_path / "a", ARCH, NEW, [PACKAGED])
    expected = content(tmp_path / "a")
    write_bundle(tmp_path / "a", ARCH, NEW, [PACKAGED])
    write_bundle(tmp_path / "b" / "c d", ARCH, NEW[::-1], [tables])
    assert len(expected) == len(NEW) + 1 and all(str(tmp_path) not in str(text) for text in expected.values())
    assert content(tmp_path / "a") == expected == content(tmp_path / "b" / "c d")
    for out in ("a", "b/c d"):
        assert leftovers(tmp_path / out) == [] and keys(tmp_path / out / ARCH) == keys_of(NEW)
    for path in (tmp_path / "a" / ARCH).iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_bundle_replaces_the_one_before_and_leaves_others_alone(tmp_path: Path) -> None:
    write_bundle(tmp_path, ARCH, OLD, [])
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "somebody's").write_text("file")
    write_bundle(tmp_path, ARCH, NEW, [])
    assert keys(tmp_path / ARCH) == keys_of(NEW)
    assert (tmp_path / "gfx942" / "somebody's").read_text() == "file"


def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def renameat2(self, *_: object) -> int:
            return -1

    write_bundle(tmp_path, ARCH, OLD, [])
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
    write_bundle(tmp_path, ARCH, NEW, [])
    assert keys(tmp_path / ARCH) == keys_of(NEW) and leftovers(tmp_path) == []
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EACCES)
    with pytest.raises(PermissionError):
        write_bundle(tmp_path, ARCH, OLD, [])
    assert keys(tmp_path / ARCH) == keys_of(NEW)
    monkeypatch.undo()
    write_bundle(tmp_path, ARCH, OLD, [])
    assert keys(tmp_path / ARCH) == keys_of(OLD) and leftovers(tmp_path) == []


@pytest.mark.parametrize("step", [1, 2])
def test_killed_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """After the old bundle left its place, and after the new one came there: readers see none, or a whole one."""
    out, reached, renamed, rename = tmp_path / "out", tmp_path / "reached", [0], os.rename
    write_bundle(out, ARCH, OLD, [])

    class Libc:
        def renameat2(self, *_: object) -> int:
            return -1

    def stop_after(source: Path, target: Path) -> None:
        rename(source, target)
        renamed[0] += 1
        if renamed[0] == step:
            reached.touch()
            signal.pause()

    def build() -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
        monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
        monkeypatch.setattr(os, "rename", stop_after)
        write_bundle(out, ARCH, NEW, [])

    pid = in_child(build)
    wait_until(reached.exists)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if step == 1:
        with pytest.raises(ValueError, match="expected a folder with a manifest"):
            read_bundles([out], ARCH)
    prepare_folder(out)
    assert keys(out / ARCH) == keys_of(OLD if step == 1 else NEW) and leftovers(out) == []
    write_bundle(out, ARCH, NEW, [])
    assert keys(out / ARCH) == keys_of(NEW) and leftovers(out) == []


def in_child(action: Callable[[], Any]) -> int:
    """Process id of a fork that runs ``action`` and ends."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("there", [False, True])
def test_a_builder_that_is_killed_leaves_nothing_half_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, there: bool
) -> None:
    """Killed at every write that goes to the disk: three payloads, the manifest, the folder, the exchange."""
    out = tmp_path / "out"
    if there:
        write_bundle(out, ARCH, OLD, [])
    reached, calls, fsync = tmp_path / "reached", [0], os.fsync

    def stop(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == step:
            reached.touch()
            signal.pause()
        fsync(descriptor)

    def build() -> None:
        monkeypatch.setattr(os, "fsync", stop)
        write_bundle(out, ARCH, NEW, [])

    pid = in_child(build)
    if step == 7:
        assert os.waitpid(pid, 0)[1] == 0 and not reached.exists()  # there are six
        return
    wait_until(reached.exists)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if step == 6:  # it was in its place already
        assert keys(out / ARCH) == keys_of(NEW)
    elif there:
        assert keys(out / ARCH) == keys_of(OLD)
    else:
        assert not (out / ARCH).exists()
    assert len(leftovers(out)) == 1
    write_bundle(out, ARCH, NEW, [])
    assert keys(out / ARCH) == keys_of(NEW) and leftovers(out) == []


def test_the_work_of_another_builder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go, sync = tmp_path / "reached", tmp_path / "go", writer._sync
    out = tmp_path / "out"

    def wait_here(folder: Path) -> None:
        reached.touch()
        wait_until(go.exists)
        sync(folder)

    def slow() -> None:
        monkeypatch.setattr(writer, "_sync", wait_here)
        write_bundle(out, ARCH, OLD, [])

    pid = in_child(slow)
    wait_until(reached.exists)
    write_bundle(out, ARCH, NEW, [])
    assert keys(out / ARCH) == keys_of(NEW) and len(leftovers(out)) == 1
    go.touch()
    assert os.waitpid(pid, 0)[1] == 0
    assert keys(out / ARCH) == keys_of(OLD) and leftovers(out) == []  # the last one's stays


def test_sixteen_builders_of_one_key_half_of_them_killed(tmp_path: Path, compiler: Any) -> None:
    """Readers meanwhile see a whole bundle or none."""
    spec, out, chance = L2NormSpec(ARCH, "bf16", 2), tmp_path / "out", random.Random(5)

    def slow(spec: Any) -> CodeObject:
        time.sleep(random.Random(os.getpid()).random() * 0.2)
        return fake_code(spec)

    def build() -> None:
        compiler.behave = slow
        for _ in range(4):
            (outcome,) = pool.compile_all([spec], workers=1, kept=kept_folder(out))
            assert outcome.code is not None
            write_bundle(out, ARCH, [outcome.code], [])

    pids = [in_child(build) for _ in range(16)]
    for pid in pids[::2]:
        time.sleep(chance.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        if (out / ARCH).exists():
            assert keys(out / ARCH) == keys_of([fake_code(spec)])
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    assert ends[1::2] == [0] * 8  # the others are done, whatever became of these
    write_bundle(tmp_path / "alone", ARCH, [fake_code(spec)], [])
    write_bundle(out, ARCH, [fake_code(spec)], [])
    assert content(out) == content(tmp_path / "alone") and leftovers(out) == []
    (outcome,) = pool.compile_all([spec], kept=kept_folder(out))
    assert outcome.kept and outcome.code == fake_code(spec)


def test_what_is_written_is_what_readers_accept(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, ARCH, NEW, [*COMPILED, GRID])
    bundle = read_bundle(folder, ARCH)
    assert [bundle.code_object(code.spec) for code in NEW] == NEW
    assert [file for file, _ in bundle.tables] == [
        "gfx942/state_scan_opt.json",
        "gfx950/state_scan_vk.json",
        "grid/gfx942/state_scan_opt.json",
        "grid/gfx950/state_scan_opt.json",
    ]
    assert bundle.toolchain["flydsl"] == "0.5.0" and "gdn-runtime" in bundle.toolchain
    (folder / bundle.artifacts[writer.spec_key(NEW[0].spec)].file).write_bytes(b"\x7fELF")
    with pytest.raises(BundleError, match="got 4 bytes"):
        bundle.code_object(NEW[0].spec)
