"""Reading bundles: the code objects of one architecture in a folder, compiled ahead of time by gdn-aot.

A bundle is ``manifest.json`` and plain code objects beside it. What is read is treated as untrusted: sizes are bounded
before reading, names stay in the folder, nothing is imported or unpickled, and the bytes that are hashed are the bytes
that are loaded. Nothing is ever written.

The manifest is JSON in a fixed form, with one line for each artifact: so the whole is hashed at once (0.5 ms for 0.6
MB), and a line is parsed when its artifact is asked for (parsing all of them took 28 ms, a third of a first call).
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
from .facts import CodeObject, LaunchFacts, canonical_json, is_foreign, spec_from_json, spec_json

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
    "sha256": str,
    "artifacts": dict,
}
_TABLE_FIELDS = {"file": str, "sha256": str}
_ARTIFACT_FIELDS = {"spec": dict, "file": str, "sha256": str, "bytes": int, "facts": dict}
_HEX = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.hsaco")
_OPENING, _CLOSING = '"artifacts":{', "}"
"""End of the line before the lines of the artifacts, and begin of the line after them."""
_KEY = re.compile(rb'"([0-9a-f]{64})":')
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


class Artifacts(Mapping[str, Artifact]):
    """Artifacts of a manifest by key, in the order of the keys.

    What the manifest says of one is parsed and checked when it is first asked for: CorruptBundleError if not sound.
    """

    def __init__(self, path: Path, arch: str, records: Mapping[str, bytes]) -> None:
        self._path, self._arch, self._records = path, arch, records
        self._parsed: dict[str, Artifact] = {}

    def __getitem__(self, key: str) -> Artifact:
        found = self._parsed.get(key)
        if found is None:
            record = self._records[key]
            try:
                found = self._parsed[key] = _artifact(key, _json(record), self._arch)
            except (ValueError, RecursionError) as error:
                raise CorruptBundleError(self._path, f"artifact {key}: {error}") from error
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle whose manifest was read, and is the one that was written; payloads are read when they are asked for.

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
        facts = self.facts(artifact)
        try:
            facts.check(spec)
        except ValueError as error:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact.file}: {error}") from error
        return CodeObject(spec, facts, self._payload(artifact))

    def verify(self, artifact: Artifact) -> None:
        """CorruptBundleError unless the payload, the key and the facts of an artifact are sound and, if this process
        has imported the package of its spec, the spec is one and the facts fit it."""
        if not is_foreign(artifact.spec):
            self.load(artifact, self.spec(artifact))
            return
        if spec_hash(artifact.spec) != artifact.key:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact}: its key is not the sha256 of its spec")
        self.facts(artifact)
        self._payload(artifact)

    def facts(self, artifact: Artifact) -> LaunchFacts:
        """The facts of an artifact of this bundle. CorruptBundleError if they are none."""
        try:
            return LaunchFacts.from_json(artifact.facts)
        except ValueError as error:
            raise CorruptBundleError(self.folder / MANIFEST, f"{artifact.file}: {error}") from error

    def _payload(self, artifact: Artifact) -> bytes:
        path = self.folder / artifact.file
        elf = read_file(path, artifact.size)
        if len(elf) != artifact.size:
            raise CorruptBundleError(path, f"got {_size(elf, artifact.size)} bytes, expected {artifact.size}")
        digest = hashlib.sha256(elf).hexdigest()
        if digest != artifact.sha256:
            raise CorruptBundleError(path, f"sha256: got {digest}, expected {artifact.sha256}")
        return elf

    def _manifest(self) -> bytes:
        path = self.folder / MANIFEST
        text = read_file(path, MAX_MANIFEST_BYTES)
        if hashlib.sha256(text).hexdigest() != self.digest:
            raise CorruptBundleError(path, "it has changed since it was read")
        return text

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of every file, in the order of the names. CorruptBundleError for one that is not what was
        built: its bytes are verified, as they are read."""
        payloads = {artifact.file: artifact for artifact in self.artifacts.values()}
        for name in sorted({MANIFEST, *payloads}):
            yield name, self._manifest() if name == MANIFEST else self._payload(payloads[name])

    def faults(self) -> Iterator[CorruptBundleError]:
        """Verify everything: every artifact (see ``verify``), that the manifest is still what was read, and that the
        folder holds nothing else."""
        try:
            self._manifest()
        except CorruptBundleError as error:
            yield error
        expected = {MANIFEST}
        for key in self.artifacts:
            try:
                artifact = self.artifacts[key]
                expected.add(artifact.file)
                self.verify(artifact)
            except CorruptBundleError as error:
                yield error
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

    Raises CorruptBundleError for a manifest that is missing, or not as it was written, and IncompatibleBundleError for
    one of another schema, KERNEL_ABI or architecture. What it says of single artifacts is looked at when they are asked
    for, and so are payloads.
    """
    path = folder / MANIFEST
    text = read_file(path, MAX_MANIFEST_BYTES)
    if len(text) > MAX_MANIFEST_BYTES:
        raise CorruptBundleError(path, f"got more than {MAX_MANIFEST_BYTES} bytes, expected a manifest")
    parts = _split(text)
    try:
        content = _json(text if parts is None else parts[1])
    except (ValueError, RecursionError) as error:
        raise CorruptBundleError(path, f"not JSON of a manifest: {error}") from error
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise CorruptBundleError(path, "not a manifest: it has no schema")
    if content["schema"] != SCHEMA:
        raise IncompatibleBundleError(path, "schema", content["schema"], SCHEMA)
    try:
        return _parse(folder, content, text, parts, arch)
    except ValueError as error:
        raise CorruptBundleError(path, str(error)) from error


def manifest_bytes(values: Mapping[str, Any], artifacts: Iterable[tuple[str, Any]]) -> bytes:
    """The manifest of ``values`` (all fields but "artifacts" and "sha256") and of ``artifacts`` (pairs of key and other
    fields, by key): canonical JSON, but that each artifact has a line of its own. Its "sha256" is that of the lines of
    the artifacts and of the rest without it."""
    lines = ",\n".join(f'"{key}":{canonical_json(record)}' for key, record in artifacts)
    digest = _manifest_sha256(lines.encode(), values)
    rest = canonical_json({**values, "sha256": digest, "artifacts": {}})
    before, _, after = rest.partition(_OPENING + _CLOSING)
    return f"{before}{_OPENING}\n{lines}\n{_CLOSING}{after}\n".encode()


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


def _json(text: bytes) -> Any:
    return json.loads(text.decode("ascii"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)


def _split(text: bytes) -> tuple[bytes, bytes] | None:
    """The lines of the artifacts, and the JSON without them; None for a text of another form."""
    first, last = text.find(b"\n"), text.rfind(b"\n", 0, -1)
    before, after = text[: max(first, 0)], text[last + 1 :]
    if last <= first or not before.endswith(_OPENING.encode()) or not after.startswith(_CLOSING.encode()):
        return None
    return text[first + 1 : last], before + after


def _manifest_sha256(lines: bytes, rest: Mapping[str, Any]) -> str:
    others = {name: value for name, value in rest.items() if name not in ("artifacts", "sha256")}
    digest = hashlib.sha256(lines)
    digest.update(f"\n{canonical_json(others)}".encode())
    return digest.hexdigest()


def _parse(
    folder: Path, content: dict[str, Any], text: bytes, parts: tuple[bytes, bytes] | None, arch: str | None
) -> Bundle:
    """ValueError for what is not sound, IncompatibleBundleError for what is not for here."""
    path = folder / MANIFEST
    _check_fields("manifest", content, _MANIFEST_FIELDS)
    if content["kernel_abi"] != KERNEL_ABI:
        raise IncompatibleBundleError(path, "KERNEL_ABI", content["kernel_abi"], KERNEL_ABI)
    if content["arch"] not in KNOWN or (arch is not None and content["arch"] != arch):
        raise IncompatibleBundleError(path, "architecture", content["arch"], arch or " or ".join(AMD_ARCHS))
    if parts is None or parts[1] != canonical_json(content).encode() + b"\n":
        raise ValueError("it was edited: not in the form in which manifests are written")
    lines = parts[0]
    if (found := _manifest_sha256(lines, content)) != content["sha256"]:
        raise value_error("sha256 of the manifest", found, f"{content['sha256']}, which it holds")
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
    split = lines.split(b",\n") if lines else []
    matches = [(_KEY.match(line), line) for line in split]
    records = {match[1].decode(): line[match.end() :] for match, line in matches if match}
    if len(records) != len(split) or any(low >= high for low, high in pairwise(records)):
        raise ValueError("artifacts: expected a line for each key, in the order of the keys")
    return Bundle(
        folder=folder,
        arch=content["arch"],
        kernel_abi=content["kernel_abi"],
        toolchain=content["toolchain"],
        source_digest=content["source_digest"],
        tables=tuple(tables),
        artifacts=Artifacts(path, content["arch"], records),
        digest=hashlib.sha256(text).hexdigest(),
    )


def payload_name(kernel: str, key: str) -> str:
    """File name of the artifact ``key``, of a spec of ``kernel``."""
    return f"{kernel}-{key[:16]}.hsaco"


def _artifact(key: str, record: Any, arch: str) -> Artifact:
    _check_fields("artifact", record, _ARTIFACT_FIELDS)
    name, size = record["file"], record["bytes"]
    if not _PLAIN.fullmatch(name):
        raise value_error("file of an artifact", repr(name), "the plain name of an .hsaco file beside the manifest")
    if name != payload_name(name.rpartition("-")[0], key):  # so no two artifacts share one
        raise value_error("file of an artifact", repr(name), payload_name("KERNEL", key))
    if record["spec"].get("arch") != arch:
        raise value_error(f"arch in the spec of {name}", repr(record["spec"].get("arch")), repr(arch))
    if not 0 < size <= MAX_PAYLOAD_BYTES:
        raise value_error(f"bytes of {name}", size, f"1 to {MAX_PAYLOAD_BYTES}")
    return Artifact(key, record["spec"], name, _hash(f"sha256 of {name}", record["sha256"]), size, record["facts"])


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
