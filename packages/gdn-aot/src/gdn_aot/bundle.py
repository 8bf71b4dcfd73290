"""Writing bundles: a folder per architecture that appears whole, or not at all.

A bundle is put together in ``DIR/.gdn-aot`` and then changes places with ``DIR/ARCH`` in one step. What a builder that
was killed leaves there is in nobody's way, and the next builder removes it. Equal code objects give equal bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gdn_runtime
from gdn_runtime.codeobject.bundle import MANIFEST, SCHEMA, manifest_bytes, payload_name, spec_key
from gdn_runtime.codeobject.facts import CodeObject, spec_json
from gdn_runtime.kernels import jit, toolchain
from gdn_runtime.spec import KERNEL_ABI
from gdn_runtime.tables import GRID, table_files

WORK = ".gdn-aot"
KEPT = "kept"
OLD = "-old"
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def kept_folder(out: Path) -> Path:
    """Where builds of ``out`` keep what they have compiled, for a build that is repeated or was interrupted."""
    return out / WORK / KEPT


def prepare_folder(out: Path) -> None:
    """Make ``out``, and clean up after builders of it that were killed. OSError if nothing can be written there."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass
    work = out / WORK
    if work.exists():
        with _locked(work):
            clean_up(work)


def write_bundle(out: Path, arch: str, codes: Sequence[CodeObject], tables: Iterable[Path]) -> Path:
    """Write the bundle ``out/arch`` of ``codes``, compiled for the shapes of ``tables`` (files and folders), in place
    of the one that is there. Builders of one folder come one after the other; the last one's bundle stays."""
    assert all(code.facts.arch == arch for code in codes)
    files = {payload_name(code.spec.kernel, spec_key(code.spec)): code.elf for code in codes}
    assert len(files) == len(codes), "two artifacts with one file name"
    files[MANIFEST] = manifest(arch, codes, tables)
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work):
        clean_up(work)
        stage = Path(tempfile.mkdtemp(dir=work, prefix=f"new-{arch}-"))
        mine = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(mine, fcntl.LOCK_EX)  # before the lock of ``work`` is given back: who can lock it may remove it
    try:
        folder = stage / arch
        folder.mkdir()
        for name, content in files.items():
            _write(folder / name, content)
        _sync(folder)
        with _locked(work):
            _swap(folder, out / arch)
            _sync(out)
        shutil.rmtree(stage)
    finally:
        os.close(mine)
    return out / arch


def manifest(arch: str, codes: Sequence[CodeObject], tables: Iterable[Path]) -> bytes:
    """The manifest of a bundle: all that the bundle holds and was built from."""
    artifacts = {
        spec_key(code.spec): {
            "spec": spec_json(code.spec),
            "file": payload_name(code.spec.kernel, spec_key(code.spec)),
            "sha256": code.digest,
            "bytes": len(code.elf),
            "facts": code.facts.to_json(),
        }
        for code in codes
    }
    content = {
        "schema": SCHEMA,
        "arch": arch,
        "kernel_abi": KERNEL_ABI,
        "toolchain": {**toolchain.versions(), "gdn-runtime": gdn_runtime.__version__},
        "source_digest": _digest("".join(sorted({jit.source_digest(code.spec) for code in codes})).encode()),
        "tables": table_digests(tables),
    }
    return manifest_bytes(content, sorted(artifacts.items()))


def table_digests(tables: Iterable[Path]) -> list[dict[str, str]]:
    """Name and sha256 of every table file, by name, wherever the tables lie."""
    files = {file for path in tables for file in table_files(path)}
    named = sorted((_table_name(file), _digest(file.read_bytes())) for file in files)
    return [{"file": name, "sha256": digest} for name, digest in named]


def _table_name(file: Path) -> str:
    # Tables of the grid are named like those beside it.
    return "/".join(file.parts[-3 if file.parent.parent.name == GRID.name else -2 :])


def clean_up(work: Path) -> None:
    """Remove what builders that are no longer there left in ``work``, whose lock is held; a bundle that one had taken
    from its place, and for which it put no other there, goes back."""
    for stage in work.glob("new-*"):
        try:
            with _locked(stage, wait=False):
                for old in stage.glob(f"*{OLD}"):
                    place = work.parent / old.name.removesuffix(OLD)
                    if not place.exists():
                        os.rename(old, place)
                        _sync(work.parent)
                shutil.rmtree(stage)
        except (BlockingIOError, FileNotFoundError):
            continue  # its builder is at work, or another one has removed it


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder; it goes with this process. BlockingIOError if it is taken and ``wait`` is false."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _swap(new: Path, place: Path) -> None:
    """Have ``new`` at ``place``, in one step; what was there is at ``new`` afterwards."""
    if not place.exists():
        os.rename(new, place)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(place), RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(place))
    # A file system that cannot exchange: there is no bundle between the two steps, never half of one; and if this
    # process ends there, until ``clean_up`` puts the old one back.
    old = new.with_name(new.name + OLD)
    os.rename(place, old)
    os.rename(new, place)
