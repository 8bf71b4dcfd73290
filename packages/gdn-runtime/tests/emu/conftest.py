"""The suite of AMD code objects: compiled here, launched on cdna-emu. Skipped, with the reason, where that fails."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gdn_runtime import env

HERE = Path(__file__).parent
EMULATOR = HERE.parents[2] / "cdna-emu"
NEEDED = ("triton", "flydsl", "elftools", "msgpack", "tinygrad", "numpy", "typer", "rich")
"""What the compilers and the emulator need."""


def load_file(path: Path) -> ModuleType:
    """A module of the repository that no package holds."""
    spec = importlib.util.spec_from_file_location(f"emu_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _obstacle() -> str | None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "unset TRITON_INTERPRET: these tests compile"
    return None


@pytest.hookimpl(trylast=True)  # config.cache is there
def pytest_configure(config: pytest.Config) -> None:
    """Build the core of the emulator, and let kernels be compiled and kept: every worker finds what another made."""
    if _obstacle() is not None:
        return
    if "CDNA_EMU_CORE" not in os.environ:  # a worker of pytest-xdist has the variables from the controller
        os.environ["CDNA_EMU_CORE"] = str(load_file(EMULATOR / "tests" / "conftest.py").fresh_core(config))
    source = str(EMULATOR / "src")
    if source not in sys.path:
        sys.path.insert(0, source)
    os.environ.setdefault("GDN_JIT", "1")
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("GDN_JIT_CACHE_DIR", str(cache.mkdir("code-objects")))
    env.reload()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_if_obstructed(items, HERE)


def skip_if_obstructed(items: list[pytest.Item], folder: Path) -> None:
    """Mark the tests below ``folder`` as skipped where they cannot run."""
    obstacle = _obstacle()
    for item in items:
        if obstacle is not None and folder in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request: pytest.FixtureRequest) -> str:
    """Each AMD architecture."""
    return request.param
