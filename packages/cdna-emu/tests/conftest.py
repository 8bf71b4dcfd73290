"""Builds the core once per session where no fresh one is installed; tests import helpers from this folder."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "cdna_emu"
for folder in (HERE, PACKAGE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.hookimpl(trylast=True)  # config.cache is there
def pytest_configure(config: pytest.Config) -> None:
    """Before collection: test modules load the core when they are imported."""
    # A worker of pytest-xdist has the variable from the controller.
    if "CDNA_EMU_CORE" not in os.environ:
        os.environ["CDNA_EMU_CORE"] = str(fresh_core(config))


def fresh_core(config: pytest.Config) -> Path:
    """Path of a core as new as the sources: the installed one, that of the last run, or one compiled now."""
    # By its path: the package cannot be imported without a core.
    spec = importlib.util.spec_from_file_location("build_core", PACKAGE / "build_core.py")
    build_core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_core)
    folder = config.cache.mkdir("core") if getattr(config, "cache", None) else tempfile.mkdtemp(prefix="cdna-emu-")
    target = Path(folder, build_core.LIBRARY)
    newest = max(p.stat().st_mtime for p in build_core.CORE.iterdir() if p.suffix in {".c", ".h", ".def"})
    for core in (PACKAGE / build_core.LIBRARY, target):
        if core.exists() and core.stat().st_mtime > newest:
            return core
    partial = target.with_name(f"{os.getpid()}.so")
    try:
        build_core.compile_core(partial)
    except RuntimeError as error:
        raise pytest.UsageError(f"the core of cdna-emu was not compiled: {error}") from error
    partial.replace(target)
    return target
