"""The sdists and wheels in dist/ hold what they should: sources, py.typed, licence, true metadata.

The wheel that is checked was built from the sdist, so a file that the sdist lacks is missing here too.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from monorepo import ROOT, Package, fail, packages

DIST = ROOT / "dist"


def main() -> None:
    problems = []
    for package in packages():
        stem = f"{package.module}-{package.version}"
        wheels, sdist = list(DIST.glob(f"{stem}-*.whl")), DIST / f"{stem}.tar.gz"
        if len(wheels) != 1 or not sdist.exists():
            problems.append(f"{package.name}: got {len(wheels)} wheels of {stem}, expected one and an sdist")
            continue
        wheel = wheels[0]
        found = [*check_wheel(package, wheel, stem), *check_sdist(package, sdist, stem)]
        problems += [f"{package.name}: {problem}" for problem in found]
        if not found:
            print(f"{package.name}: {wheel.name} and {sdist.name} are complete")
    for bundled in sorted(DIST.glob("bundled/*.whl")):
        found = check_bundled(bundled)
        problems += [f"{bundled.name}: {problem}" for problem in found]
        if not found:
            print(f"{bundled.name} and the archive beside it carry the same bundles")
    if problems:
        fail(problems)


def check_bundled(bundled: Path) -> list[str]:
    """Where a wheel with bundles is not the wheel of dist/ and, in their place, the files that its manifests name; and
    where the archive beside it holds anything else."""
    name, version, build, *tags = bundled.name.split("-")
    plain = DIST / "-".join((name, version, *tags))
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(plain) as archive:
        expected = {path: archive.read(path) for path in archive.namelist()}
    with zipfile.ZipFile(bundled) as archive:
        found = {path: archive.read(path) for path in archive.namelist()}
    problems = []
    written = {f"{info}/RECORD", f"{info}/WHEEL"}
    if {path for path in expected if found.get(path) != expected[path]} - written:
        problems.append(f"holds other sources than {plain.name}")
    if f"Build: {build}".encode() not in found[f"{info}/WHEEL"].splitlines():
        problems.append(f"WHEEL does not name the build {build}")
    lines = {line[0]: line for line in csv.reader(found[f"{info}/RECORD"].decode().splitlines())}
    for path, content in found.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if lines.get(path, [""])[1:] != ["sha256=" + digest, str(len(content))] and path != f"{info}/RECORD":
            problems.append(f"RECORD is wrong about {path}")
    place = f"{name}/_bundles/"
    carried = {path.removeprefix(place): found[path] for path in found.keys() - expected.keys()}
    named = set()
    for path in carried:
        if path.endswith("/manifest.json"):
            files = [artifact["file"] for artifact in json.loads(carried[path])["artifacts"].values()]
            named |= {path, *(path.replace("manifest.json", file) for file in files)}
    if carried.keys() != named or not named:
        problems.append(f"carries what no manifest names, or lacks it: {sorted(carried.keys() ^ named)[:5]}")
    with tarfile.open(bundled.parent / "gdn-bundles.tar") as beside:
        packed = {member.name: read_member(beside, member) for member in beside}
    if packed != carried:
        problems.append("the archive does not hold the same bundles")
    return problems


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def check_wheel(package: Package, wheel: Path, stem: str) -> list[str]:
    """What the wheel lacks, holds too much of, or says wrongly."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"{stem}.dist-info/METADATA").decode())
        licence_name = f"{stem}.dist-info/licenses/LICENSE"
        licence = archive.read(licence_name) if licence_name in names else None
    sources = source_files(package, package.source.parent)
    problems = [f"wheel lacks {name}" for name in sorted(sources - names)]
    if f"{package.module}/py.typed" not in names:
        problems.append("wheel lacks py.typed")
    if licence != (ROOT / "LICENSE").read_bytes():
        problems.append("wheel does not carry the LICENSE of the repository")
    compiled, pure = any(name.endswith(".so") for name in names), wheel.name.endswith("-none-any.whl")
    if compiled == pure or compiled != any(package.source.rglob("*.c")):
        problems.append("wheel: got a pure one with compiled code, or C sources without a compiled core")
    strangers = {name.split("/")[0] for name in names} - {package.module, f"{stem}.dist-info"}
    problems += [f"wheel also installs {name}" for name in sorted(strangers)]
    return problems + check_metadata(package, metadata)


def check_metadata(package: Package, metadata: Message) -> list[str]:
    """Where METADATA and pyproject.toml differ."""
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    unconditional = {str(requirement) for requirement in required if requirement.marker is None}
    expected = {
        "Name": package.name,
        "Version": package.version,
        "Requires-Python": package.project["requires-python"],
        "License-Expression": package.project["license"],
        "Description-Content-Type": "text/markdown",
    }
    problems = [
        f"metadata {key}: got {metadata[key]}, expected {value}"
        for key, value in expected.items()
        if metadata[key] != value
    ]
    # As Requirement spells them: it orders the limits of a version.
    if unconditional != {str(Requirement(line)) for line in package.project["dependencies"]}:
        problems.append(f"metadata requires {sorted(unconditional)}, expected {package.project['dependencies']}")
    if (package.path / "README.md").read_text().strip() not in str(metadata.get_payload()):
        problems.append("metadata does not carry README.md")
    return problems


def check_sdist(package: Package, sdist: Path, stem: str) -> list[str]:
    """What the sdist lacks; its LICENSE must be a file, since a link would point out of the archive."""
    with tarfile.open(sdist) as archive:
        files = {member.name for member in archive.getmembers() if member.isfile()}
    extra = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    wanted = source_files(package, package.path) | extra
    return [f"sdist lacks {name}" for name in sorted(wanted) if f"{stem}/{name}" not in files]


def source_files(package: Package, base: Path) -> set[str]:
    """Every source file of the import package, relative to ``base``: no bytecode, nothing compiled from C."""
    found = (path for path in package.source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(base).as_posix() for path in found if path.suffix != ".so"}


if __name__ == "__main__":
    main()
