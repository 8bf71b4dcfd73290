"""The interpreter suite: Triton's kernels on the CPU. Skipped, with the reason, in a process that cannot interpret."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "set TRITON_INTERPRET=1: these tests run the Triton kernels on the CPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = _obstacle()
    for item in items:
        if obstacle is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> None:
    """Triton decides when a kernel is defined: a module imported too early would be compiled after all."""
    from gdn_runtime.kernels.triton.common import INTERPRETED

    assert INTERPRETED.value, "gdn_runtime.kernels was imported before TRITON_INTERPRET=1 was set"
