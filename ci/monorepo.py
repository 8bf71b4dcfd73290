"""The packages of this repository, as the scripts beside this file see them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """One folder of packages/: its distribution name, its import name, its version, and its pyproject.toml."""

    path: Path
    name: str
    module: str
    version: str
    project: dict[str, Any]
    tools: dict[str, Any]

    @property
    def source(self) -> Path:
        return self.path / "src" / self.module

    @property
    def fragments(self) -> list[Path]:
        """Changelog fragments of changes that are not released yet."""
        return sorted((self.path / "changes").glob("*.md"))

    @property
    def released(self) -> str | None:
        """The newest version that CHANGELOG.md describes, None before the first release."""
        match = re.search(r"^## (\S+)", (self.path / "CHANGELOG.md").read_text(), re.MULTILINE)
        return match[1] if match else None


def packages() -> list[Package]:
    """Every package of the repository, by name."""
    return [_package(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]


def _package(path: Path) -> Package:
    pyproject = tomllib.loads((path / "pyproject.toml").read_text())
    project = pyproject["project"]
    module = project["name"].replace("-", "_")
    about = (path / "src" / module / "__about__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', about, re.MULTILINE)
    if not match:
        fail([f"{path.name}: src/{module}/__about__.py does not set __version__"])
    return Package(path, project["name"], module, match[1], project, pyproject["tool"])


def git(*arguments: str) -> list[str]:
    """The output lines of a git command in this checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def fail(problems: list[str]) -> NoReturn:
    """Print the problems, one a line, and exit 1."""
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1)
