"""The suite for NVIDIA GPUs: marked ``gpu``, and skipped with a reason where it cannot run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _obstacle() -> str | None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs FP8: compute capability 9.0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = _obstacle()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))
