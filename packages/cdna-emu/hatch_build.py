"""Build hook: compiles the core into the package, and tags the wheel for this platform and any Python 3."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreBuildHook(BuildHookInterface[Any]):
    """For wheels and editable installs; the source distribution carries the C sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        package = Path(self.root, "src", "cdna_emu")
        build_core = _load(package / "build_core.py")
        library = package / build_core.LIBRARY
        build_core.compile_core(library)
        build_data["artifacts"].append(f"src/cdna_emu/{library.name}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def clean(self, versions: list[str]) -> None:
        package = Path(self.root, "src", "cdna_emu")
        (package / _load(package / "build_core.py").LIBRARY).unlink(missing_ok=True)


def _load(path: Path) -> ModuleType:
    """The module in `path`: the package itself cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
