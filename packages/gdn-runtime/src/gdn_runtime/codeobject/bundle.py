"""Reading bundles: the code objects of one architecture in a folder, compiled ahead of time by gdn-aot.

A bundle is ``manifest.json`` and plain code objects beside it. What is read is treated as untrusted: sizes are bounded
before reading, names stay in the folder, nothing is imported or unpickled, and the bytes that are hashed are the bytes
that are loaded. Nothing is ever written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import env
from ..arch import KNOWN
from ..errors import CorruptBundleError, IncompatibleBundleError, value_error
from ..spec import AMD_ARCHS, KERNEL_ABI, KernelSpec
from .facts import CodeObject, LaunchFacts, canonical_json, spec_from_json, spec_json

SCHEMA = 1
"""Version of the manifest's format. Another one is refused."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
"""Twenty times the manifest of every job of both architectures."""
MAX_PAYLOAD_BYTES = 64 << 20
PACKAGED = Path(__file__).parents[1] / "_bundles"
"""Where the wheel carries bundles, one folder per architecture; absent in wheels without."""

_MANIFEST_FIELDS = {
    "schema": int,
    "arch": str,
    "kernel_abi": int,
    "toolchain": dict,
    "source_digest": str,
    "tables": list,
    "artifacts": list,
}
_TABLE_FIELDS = {"file": str, "sha256": str}
_ARTIFACT_FIELDS = {"key": str, "spec": dict, "file": str, "sha256": str, "bytes": int, "facts": dict}
_HEX = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.hsaco")
_LINK_OR_NOT_A_FILE = (errno.ELOOP, errno.EMLINK, errno.ENXIO)


@dataclass(frozen=True)
class Artifact:
    """One entry of a manifest: the spec and its key, the payload with its size in bytes, facts as ``LaunchFacts``."""

    key: str
    spec: Mapping[str, Any]
    file: str
    sha256: str
    size: int
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.file} ({canonical_json(self.spec)})"


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle whose manifest was read and found sound; payloads are read when they are asked for.

    ``digest`` is the sha256 of the manifest, hence says all about the bundle. ``tables`` are pairs of file name and
    sha256 of the tables that it was built for. ``artifacts`` are by key. Compared by identity.
    """

    folder: Path
    arch: str
    kernel_abi: int
    toolchain: Mapping[str, str]
    source_digest: str
    tables: tuple[tuple[str, str], ...]
    artifacts: Mapping[str, Artifact]
    digest: str

    def __str__(self) -> str:
        return f"{self.folder} ({len(self.artifacts)} artifacts)"

    def __contains__(self, spec: KernelSpec) -> bool:
        return spec_key(spec) in self.artifacts

    def code_object(self, spec: KernelSpec) -> CodeObject | None:
        """The code object of ``spec``, read and verified now; None if the bundle has none. CorruptBundleError."""
        key = spec_key(spec)
        artifact = self.artifacts.get(key)
        if artifact is None:
            return None
        if spec_hash(artifact.spec) != key:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact}: its key is not the sha256 of its spec")
        return self.load(artifact, spec)

    def spec(self, artifact: Artifact) -> KernelSpec:
        """The spec of an artifact of this bundle. CorruptBundleError if it is none, or has another key."""
        try:
            spec = spec_from_json(artifact.spec)
            spec.check()
        except ValueError as error:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact.file}: {error}") from error
        if spec_key(spec) != artifact.key:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact}: its key is not the sha256 of its spec")
        return spec

    def load(self, artifact: Artifact, spec: KernelSpec) -> CodeObject:
        """The code object of an artifact of this bundle, which is that of ``spec``, read and verified now.

        CorruptBundleError if the payload is not the one that the manifest means, or its facts do not fit the spec.
        """
        try:
            facts = LaunchFacts.from_json(artifact.facts)
            facts.check(spec)
        except ValueError as error:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact.file}: {error}") from error
        path = self.folder / artifact.file
        elf = read_file(path, artifact.size)
        if len(elf) != artifact.size:
            raise CorruptBundleError(path, f"got {_size(elf, artifact.size)} bytes, expected {artifact.size}")
        code = CodeObject(spec, facts, elf)
        if code.digest != artifact.sha256:
            raise CorruptBundleError(path, f"sha256: got {code.digest}, expected {artifact.sha256}")
        return code

    def faults(self) -> Iterator[CorruptBundleError]:
        """Verify everything: every payload, every spec, the form of the manifest, and that the folder holds nothing
        else."""
        path = self.folder / MANIFEST
        text = read_file(path, MAX_MANIFEST_BYTES)
        if hashlib.sha256(text).hexdigest() != self.digest:
            yield CorruptBundleError(path, "it has changed since it was read")
        elif canonical_json(json.loads(text)).encode() + b"\n" != text:
            yield CorruptBundleError(path, "it was edited: not in canonical form")
        for artifact in self.artifacts.values():
            try:
                self.load(artifact, self.spec(artifact))
            except CorruptBundleError as error:
                yield error
        expected = {MANIFEST, *(artifact.file for artifact in self.artifacts.values())}
        for name in sorted({entry.name for entry in os.scandir(self.folder)} - expected):
            yield CorruptBundleError(self.folder / name, "the manifest does not name it")


def spec_key(spec: KernelSpec) -> str:
    """Key of the artifact of ``spec``: sha256 of its canonical JSON."""
    return spec_hash(spec_json(spec))


def spec_hash(values: Mapping[str, Any]) -> str:
    """``spec_key`` of a spec that is plain values."""
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()


def read_bundle(folder: Path, arch: str | None = None) -> Bundle:
    """The bundle in ``folder``, of ``arch`` (None: any).

    Raises CorruptBundleError for a manifest that is missing or not sound, and IncompatibleBundleError for a sound one
    of another schema, KERNEL_ABI or architecture. Payloads are not looked at.
    """
    path = folder / MANIFEST
    text = read_file(path, MAX_MANIFEST_BYTES)
    if len(text) > MAX_MANIFEST_BYTES:
        raise CorruptBundleError(path, f"got more than {MAX_MANIFEST_BYTES} bytes, expected a manifest")
    try:
        content = json.loads(text.decode("ascii"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptBundleError(path, f"not JSON of a manifest: {error}") from error
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise CorruptBundleError(path, "not a manifest: it has no schema")
    if content["schema"] != SCHEMA:
        raise IncompatibleBundleError(path, "schema", content["schema"], SCHEMA)
    try:
        return _parse(folder, content, hashlib.sha256(text).hexdigest(), arch)
    except ValueError as error:
        raise CorruptBundleError(path, str(error)) from error


def read_file(path: Path, limit: int) -> bytes:
    """Content of a regular file, ``limit`` + 1 bytes at most; links are not followed. CorruptBundleError if ``path`` is
    missing or no regular file, OSError if it cannot be read."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptBundleError(path, "it is missing") from None
    except OSError as error:
        if error.errno in _LINK_OR_NOT_A_FILE:
            raise CorruptBundleError(path, "it is a link or a special file, expected a regular file") from None
        raise
    parts, left = [], limit + 1
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptBundleError(path, "it is no regular file")
        while left and (part := os.read(descriptor, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


# ------------------------------------------------------------------------------------------------ bundles in force

_lock = threading.Lock()
_in_force: dict[tuple[str, str], tuple[Bundle, ...]] = {}  # by value of GDN_BUNDLE and architecture


def bundles(arch: str) -> tuple[Bundle, ...]:
    """The bundles of ``arch`` in force, first the one that is looked into first; read once per process.

    Those of GDN_BUNDLE, else the packaged one, if any. Raises as ``read_bundle``; ValueError if GDN_BUNDLE names
    anything without a bundle.
    """
    text = env.settings().bundle
    found = _in_force.get((text, arch))
    if found is None:
        with _lock:
            found = _in_force.get((text, arch))
            if found is None:
                found = _in_force[text, arch] = read_bundles(named_paths(text), arch)
    return found


def named_paths(text: str) -> list[Path]:
    """The paths in ``text`` (the value of GDN_BUNDLE); "" is the packaged bundles."""
    return [Path(entry).expanduser() for entry in text.split(os.pathsep) if entry.strip()] or [PACKAGED]


def read_bundles(paths: Iterable[Path], arch: str) -> tuple[Bundle, ...]:
    """The bundles of ``arch`` in ``paths``: folders with a manifest, or with one such folder per architecture.

    Raises as ``read_bundle``; ValueError for a path without any bundle, but for ``PACKAGED``.
    """
    folders = [folder for path in paths for folder in bundle_folders(path)]
    # A folder that is named after another architecture is not even read.
    read = [read_bundle(folder, _named(folder)) for folder in folders if _named(folder) in (None, arch)]
    return tuple(bundle for bundle in read if bundle.arch == arch)


def forget() -> None:
    """Read the folders again at the next call: for tests and for tools that build bundles."""
    with _lock:
        _in_force.clear()


def bundle_folders(path: Path) -> list[Path]:
    """Folders of the bundles in ``path``: itself if it has a manifest, else one folder per architecture. ValueError if
    there is none, but for ``PACKAGED``."""
    if (path / MANIFEST).exists():
        return [path]
    below = [path / arch for arch in AMD_ARCHS if (path / arch).is_dir()]
    if not below and path != PACKAGED:
        expected = f"a folder with a {MANIFEST}, or with folders {', '.join(AMD_ARCHS)} that have one"
        raise value_error("bundle (GDN_BUNDLE)", repr(str(path)), expected)
    return below


def _named(folder: Path) -> str | None:
    """The architecture that the name of ``folder`` promises, if any."""
    return folder.name if folder.name in AMD_ARCHS else None


# ------------------------------------------------------------------------------------------------ manifest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"name {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"got {name}, expected a number")


def _parse(folder: Path, content: dict[str, Any], digest: str, arch: str | None) -> Bundle:
    """ValueError for what is not sound, IncompatibleBundleError for what is not for here."""
    path = folder / MANIFEST
    _check_fields("manifest", content, _MANIFEST_FIELDS)
    if content["kernel_abi"] != KERNEL_ABI:
        raise IncompatibleBundleError(path, "KERNEL_ABI", content["kernel_abi"], KERNEL_ABI)
    if content["arch"] not in KNOWN or (arch is not None and content["arch"] != arch):
        raise IncompatibleBundleError(path, "architecture", content["arch"], arch or " or ".join(AMD_ARCHS))
    for package, version in content["toolchain"].items():
        _text("package of the toolchain", package)
        _text(f"version of {package}", version)
    _hash("source_digest", content["source_digest"])
    tables = []
    for table in content["tables"]:
        _check_fields("table", table, _TABLE_FIELDS)
        tables.append(
            (_text("file of a table", table["file"]), _hash(f"sha256 of table {table['file']}", table["sha256"]))
        )
    artifacts = [_artifact(entry, content["arch"]) for entry in content["artifacts"]]
    keys = [artifact.key for artifact in artifacts]
    if any(low >= high for low, high in pairwise(keys)):
        raise ValueError("artifacts: expected each key once, in order")
    if len({artifact.file for artifact in artifacts}) != len(artifacts):
        raise ValueError("artifacts: expected a file of its own for each")
    return Bundle(
        folder=folder,
        arch=content["arch"],
        kernel_abi=content["kernel_abi"],
        toolchain=content["toolchain"],
        source_digest=content["source_digest"],
        tables=tuple(tables),
        artifacts=dict(zip(keys, artifacts, strict=True)),
        digest=digest,
    )


def _artifact(entry: Any, arch: str) -> Artifact:
    _check_fields("artifact", entry, _ARTIFACT_FIELDS)
    name, size = entry["file"], entry["bytes"]
    if not _PLAIN.fullmatch(name):
        raise value_error("file of an artifact", repr(name), "the plain name of an .hsaco file beside the manifest")
    if entry["spec"].get("arch") != arch:
        raise value_error(f"arch in the spec of {name}", repr(entry["spec"].get("arch")), repr(arch))
    if not 0 < size <= MAX_PAYLOAD_BYTES:
        raise value_error(f"bytes of {name}", size, f"1 to {MAX_PAYLOAD_BYTES}")
    key, sha256 = _hash(f"key of {name}", entry["key"]), _hash(f"sha256 of {name}", entry["sha256"])
    return Artifact(key, entry["spec"], name, sha256, size, entry["facts"])


def _check_fields(name: str, values: Any, kinds: Mapping[str, type]) -> None:
    if type(values) is not dict or values.keys() != kinds.keys():
        got = sorted(values) if type(values) is dict else type(values).__name__
        raise value_error(f"fields of the {name}", got, ", ".join(sorted(kinds)))
    for field, kind in kinds.items():
        if type(values[field]) is not kind:
            raise value_error(f"{field} of the {name}", repr(values[field])[:80], kind.__name__)


def _text(name: str, value: Any) -> str:
    if type(value) is not str or not value.isascii() or not value.isprintable():
        raise value_error(name, repr(value)[:80], "printable ASCII text")
    return value


def _hash(name: str, value: str) -> str:
    if not _HEX.fullmatch(value):
        raise value_error(name, repr(value)[:80], "64 hexadecimal digits")
    return value


def _size(content: bytes, limit: int) -> str:
    return f"more than {limit}" if len(content) > limit else str(len(content))
