"""The emulator's suite: AMD code objects on a CPU. Skipped, with the reason, where a part of that is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PARTS = ("cdna_emu", "flydsl", "triton")
"""The emulator, the kernels' language, and Triton, whose linker and bitcode the compile step takes."""


def _obstacle() -> str | None:
    missing = [name for name in PARTS if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = _obstacle()
    for item in items:
        if obstacle is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=obstacle))
