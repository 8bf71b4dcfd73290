"""The sdists and wheels in dist/ hold what they should: sources, py.typed, licence, true metadata.

The wheel that is checked was built from the sdist, so a file that the sdist lacks is missing here too.
"""

from __future__ import annotations

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
    if problems:
        fail(problems)


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
