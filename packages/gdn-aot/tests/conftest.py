"""The suite of gdn-aot: a compiler that is none for what is not about compiling, the emulator's core for what runs."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gdn_aot import pool
from gdn_runtime.codeobject import CodeObject
from gdn_runtime.spec import KernelSpec
from gdn_testing.bundles import fake_code

EMULATOR = Path(__file__).parents[2] / "cdna-emu"


def load_file(path: Path) -> ModuleType:
    """A module of the repository that no package holds."""
    spec = importlib.util.spec_from_file_location(f"aot_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.hookimpl(trylast=True)  # config.cache is there
def pytest_configure(config: pytest.Config) -> None:
    """Build the core of the emulator where no fresh one is installed."""
    if "CDNA_EMU_CORE" not in os.environ:  # a worker of pytest-xdist has the variables from the controller
        os.environ["CDNA_EMU_CORE"] = str(load_file(EMULATOR / "tests" / "conftest.py").fresh_core(config))
    source = str(EMULATOR / "src")
    if source not in sys.path:
        sys.path.insert(0, source)


class FakeCompiler:
    """In the place of compile servers: ``behave(spec)`` gives the code of each, or raises; ``asked`` are the specs."""

    def __init__(self) -> None:
        self.behave: Callable[[KernelSpec], CodeObject] = fake_code
        self.asked: list[KernelSpec] = []
        self.servers = 0
        self._lock = threading.Lock()

    def __call__(self) -> FakeCompiler:
        self.servers += 1
        return self

    def compile(self, spec: KernelSpec, timeout: float) -> CodeObject:
        with self._lock:
            self.asked.append(spec)
        return self.behave(spec)

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Nothing is compiled: codes are fakes."""
    fake = FakeCompiler()
    monkeypatch.setattr(pool.compiler, "CompileServer", fake)
    monkeypatch.setattr(pool, "_idle", [])
    return fake


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    pool.close_servers()
