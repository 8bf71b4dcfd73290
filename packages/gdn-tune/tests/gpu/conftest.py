"""The suite of the tuner on a GPU: marked ``gpu``, and skipped with a reason where it cannot run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA or ROCm device"
    compiler = "triton" if torch.version.hip is None else "flydsl"
    return None if importlib.util.find_spec(compiler) else f"{compiler} is not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = _obstacle()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))
