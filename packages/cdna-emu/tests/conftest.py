"""Builds the core once per session where no compiled one is installed; tests import helpers from this folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
for folder in (HERE, SOURCE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.hookimpl(trylast=True)  # config.cache is there
def pytest_configure(config: pytest.Config) -> None:
    """Before collection: test modules may load the core when they are imported."""
    from cdna_emu import native

    if hasattr(config, "workerinput"):  # a worker of pytest-xdist: the controller has built it and set the variable
        return
    try:
        native.find_core()
    except ImportError:
        if "CDNA_EMU_CORE" in os.environ:
            raise
        os.environ["CDNA_EMU_CORE"] = str(built_core(config))


def built_core(config: pytest.Config) -> Path:
    """Path of a core compiled from the sources of this checkout unless pytest's cache has it."""
    from cdna_emu import build_core

    folder = config.cache.mkdir("core") if getattr(config, "cache", None) else tempfile.mkdtemp(prefix="cdna-emu-")
    target = Path(folder, "_core.so")
    sources = [path for path in (SOURCE / "cdna_emu" / "core").iterdir() if path.suffix in {".c", ".h", ".def"}]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return target
    fresh = target.with_name(f"{os.getpid()}.so")
    try:
        build_core.build(SOURCE / "cdna_emu" / "core", fresh)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise pytest.UsageError(
            f"the core of cdna-emu cannot be compiled (is there a C compiler, cc?): {error}"
        ) from error
    fresh.replace(target)
    return target
