"""The sweep is set up and skipped as the suite of AMD code objects."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "gdn-runtime" / "tests" / "emu" / "conftest.py"

_spec = importlib.util.spec_from_file_location("sweep_setup_of_gdn_runtime", SHARED)
assert _spec is not None and _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)

pytest_configure = _shared.pytest_configure


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _shared.skip_if_obstructed(items, HERE)
