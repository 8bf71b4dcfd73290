"""Bundles of code that nothing can run, for tests of reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdn_runtime.codeobject import CodeObject
from gdn_runtime.codeobject.bundle import MANIFEST, SCHEMA, manifest_bytes, payload_name, spec_key
from gdn_runtime.codeobject.facts import canonical_json, spec_json
from gdn_runtime.spec import KERNEL_ABI, KernelSpec
from gdn_runtime.testing.launches import facts_of


def fake_code(spec: KernelSpec) -> CodeObject:
    """Bytes that begin like an ELF file and differ from spec to spec."""
    return CodeObject(spec, facts_of(spec), b"\x7fELF" + bytes.fromhex(spec_key(spec)) * 8)


def manifest_of(codes: Iterable[CodeObject], arch: str) -> dict[str, Any]:
    """The manifest of a bundle of ``codes``, all of them for ``arch``; its artifacts are a list, with their keys."""
    artifacts = []
    for code in codes:
        key = spec_key(code.spec)
        artifacts.append(
            {
                "key": key,
                "spec": spec_json(code.spec),
                "file": payload_name(code.spec.kernel, key),
                "sha256": code.digest,
                "bytes": len(code.elf),
                "facts": json.loads(canonical_json(code.facts.to_json())),
            }
        )
    return {
        "schema": SCHEMA,
        "arch": arch,
        "kernel_abi": KERNEL_ABI,
        "toolchain": {"flydsl": "0.5.0"},
        "source_digest": hashlib.sha256(b"sources").hexdigest(),
        "tables": [{"file": "table.json", "sha256": hashlib.sha256(b"table").hexdigest()}],
        "artifacts": sorted(artifacts, key=lambda entry: entry["key"]),
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """What ``write_manifest`` wrote."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    return {**manifest, "artifacts": [{"key": key, **record} for key, record in manifest["artifacts"].items()]}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest``, whatever it says, in the form that readers expect, with its sha256."""
    values = {name: value for name, value in manifest.items() if name != "artifacts"}
    artifacts = [
        (entry["key"], {name: value for name, value in entry.items() if name != "key"})
        for entry in manifest["artifacts"]
    ]
    (folder / MANIFEST).write_bytes(manifest_bytes(values, artifacts))


def write_bundle(folder: Path, codes: Iterable[CodeObject], arch: str) -> Path:
    """A bundle of ``codes`` in ``folder``, which is made."""
    codes = list(codes)
    folder.mkdir(parents=True)
    manifest = manifest_of(codes, arch)
    files = {entry["key"]: entry["file"] for entry in manifest["artifacts"]}
    for code in codes:
        (folder / files[spec_key(code.spec)]).write_bytes(code.elf)
    write_manifest(folder, manifest)
    return folder
