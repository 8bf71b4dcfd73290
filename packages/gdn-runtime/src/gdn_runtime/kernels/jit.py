"""Compiling at run time, and the folder that keeps what was compiled.

A spec has two plain files there: ``NAME.hsaco``, the code, and ``NAME.json``, its facts, the sha256 of both, and
all that the code depends on: the spec, KERNEL_ABI, the kernels' sources, the compilers' versions. Those also make NAME,
so an entry is never out of date. Both files appear whole or not at all, the JSON last; what is loaded is checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..codeobject.facts import CodeObject, LaunchFacts, canonical_json, spec_json, spec_text
from ..errors import CorruptCodeObjectError
from ..spec import KERNEL_ABI, KernelSpec
from . import toolchain
from .compile import compile_spec


def find(spec: KernelSpec, folder: str) -> CodeObject | None:
    """What ``folder`` ("": none) keeps for ``spec``; None if nothing. CorruptCodeObjectError if that is damaged."""
    if not folder:
        return None
    identity = _identity(spec)
    return _load(spec, identity, _place(Path(folder), spec, identity))


def make(spec: KernelSpec, folder: str) -> CodeObject:
    """Compile ``spec`` and keep it in ``folder`` ("": nowhere). Processes that ask for one spec at a time compile it
    once. Raises as ``compile_spec`` and ``find``."""
    if not folder:
        return compile_spec(spec)
    identity = _identity(spec)
    place = _place(Path(folder), spec, identity)
    place.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place.with_suffix(".lock")):
        code = _load(spec, identity, place)
        if code is None:
            code = compile_spec(spec)
            _keep(code, identity, place)
    return code


def keep(code: CodeObject, folder: str) -> None:
    """Keep ``code``, compiled from the sources of this process, in ``folder`` for ``find``."""
    identity = _identity(code.spec)
    _keep(code, identity, _place(Path(folder), code.spec, identity))


def _keep(code: CodeObject, identity: dict[str, Any], place: Path) -> None:
    """``identity`` is that of before the compile: sources that were edited meanwhile must not name this code."""
    facts = code.facts.to_json()
    entry = {**identity, "sha256": code.digest, "facts": facts, "facts_sha256": _digest(facts)}
    write_file(place.with_suffix(".hsaco"), code.elf)
    write_file(place.with_suffix(".json"), canonical_json(entry).encode() + b"\n")


def _identity(spec: KernelSpec) -> dict[str, Any]:
    return {
        "spec": spec_json(spec),
        "kernel_abi": KERNEL_ABI,
        "sources": source_digest(spec),
        "toolchain": toolchain.versions(),
    }


def source_digest(spec: KernelSpec) -> str:
    """sha256 over the files that the code of ``spec`` may come from, in gdn_runtime and in the package of its class:
    specs (and ``traits``, the facts below them), the vocabulary, kernels of its language."""
    digest = hashlib.sha256()
    package = type(spec).__module__.partition(".")[0]
    for name in sorted({"gdn_runtime", package}):
        found = importlib.util.find_spec(name)
        assert found is not None and found.submodule_search_locations
        root = Path(found.submodule_search_locations[0])
        folders = (root / "spec", root / "kernels" / "common", root / "kernels" / spec.language)
        files = [path for folder in folders for path in folder.rglob("*.py")] + list((root / "kernels").glob("*.py"))
        files += [path for path in (root / "spec.py", root / "traits.py") if path.exists()]
        for path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{name}/{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _place(folder: Path, spec: KernelSpec, identity: dict[str, Any]) -> Path:
    return folder / f"{spec.kernel}-{spec.arch}-{_digest(identity)[:32]}"


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()


def _load(spec: KernelSpec, identity: dict[str, Any], place: Path) -> CodeObject | None:
    path = place.with_suffix(".json")
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        entry = json.loads(text)
        if not isinstance(entry, dict) or set(entry) != {*identity, "sha256", "facts", "facts_sha256"}:
            raise ValueError("its fields are not those of an entry")
        if any(entry[name] != value for name, value in json.loads(canonical_json(identity)).items()):
            raise ValueError("it is an entry of something else")
        if entry["facts_sha256"] != _digest(entry["facts"]):
            raise ValueError("its facts do not have their sha256")
        code = CodeObject(spec, LaunchFacts.from_json(entry["facts"]), place.with_suffix(".hsaco").read_bytes())
        if code.digest != entry["sha256"]:
            raise ValueError(f"sha256 of the code: got {code.digest}, expected {entry['sha256']}")
    except (ValueError, FileNotFoundError) as error:
        raise CorruptCodeObjectError(
            f"{path}: {error}. This is no longer what was stored for {spec_text(spec)}: remove the file"
        ) from error
    return code


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears whole, or not at all, and is on the disk then. Its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, 0o644)  # a temporary file is for its owner alone
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, however this process ends
        yield
