"""Bundles of code that nothing can run, for tests of reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdn_runtime.codeobject import CodeObject, KernelArgument, LaunchFacts
from gdn_runtime.codeobject.bundle import MANIFEST, SCHEMA, spec_key
from gdn_runtime.codeobject.facts import canonical_json, spec_json
from gdn_runtime.spec import ARGUMENT_BYTES, KERNEL_ABI, KernelSpec


def facts_of(spec: KernelSpec) -> LaunchFacts:
    """Facts with the arguments and the block of ``spec`` and nothing else of interest."""
    arguments, end = [], 0
    for argument in spec.ARGUMENTS:
        size = ARGUMENT_BYTES[argument.kind]
        start = -(-end // size) * size
        arguments.append(KernelArgument(argument.name, argument.kind, start))
        end = start + size
    return LaunchFacts(
        symbol=spec.kernel,
        arch=spec.arch,
        kernarg_bytes=-(-end // 8) * 8,
        arguments=tuple(arguments),
        block=spec.block,
        lds_bytes=0,
        dynamic_lds=0,
        scratch_bytes=0,
        vgprs=1,
        agprs=0,
        sgprs=16,
        vgpr_spills=0,
        sgpr_spills=0,
    )


def fake_code(spec: KernelSpec) -> CodeObject:
    """Bytes that begin like an ELF file and differ from spec to spec."""
    return CodeObject(spec, facts_of(spec), b"\x7fELF" + bytes.fromhex(spec_key(spec)) * 8)


def manifest_of(codes: Iterable[CodeObject], arch: str) -> dict[str, Any]:
    """The manifest of a bundle of ``codes``, all of them for ``arch``."""
    artifacts = []
    for code in codes:
        key = spec_key(code.spec)
        artifacts.append(
            {
                "key": key,
                "spec": spec_json(code.spec),
                "file": f"{code.spec.kernel}-{key[:16]}.hsaco",
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


def write_manifest(folder: Path, manifest: object) -> None:
    """Write ``manifest`` in the form that readers expect."""
    (folder / MANIFEST).write_text(canonical_json(manifest) + "\n")


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
