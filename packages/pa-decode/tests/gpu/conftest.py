"""The GPU suite: marked ``gpu``, and skipped with a reason where it cannot run.

test_amd_gpu.py is for AMD cards, test_hopper_decode.py for sm90, test_decode_gpu.py for NVIDIA GPUs with FP8: Triton
kernels of paged decode run on those alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gdn_runtime.arch import arch_of
from gdn_testing.card import Card

HERE = Path(__file__).parent
CODE_OBJECTS = "test_amd_gpu.py"


def _obstacle(file: str) -> str | None:
    if file == CODE_OBJECTS:
        return None if torch.cuda.is_available() and torch.version.hip is not None else "needs an AMD GPU"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs FP8: compute capability 9.0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            obstacle = _obstacle(item.path.name)
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture
def card() -> Card:
    device = torch.device("cuda", torch.cuda.current_device())
    return Card(device, arch_of(device).name)
