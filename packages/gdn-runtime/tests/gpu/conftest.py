"""The GPU suite: marked ``gpu``, and skipped with a reason where it cannot run.

test_amd_gpu.py is for AMD cards: it launches code objects. The rest is about the Triton kernels, on NVIDIA and AMD
cards; test_fast_prefill_gpu.py is for sm90 alone and says so itself.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gdn_runtime import env
from gdn_runtime.arch import arch_of
from gdn_testing.card import Card

HERE = Path(__file__).parent
CODE_OBJECTS = "test_amd_gpu.py"


def _obstacle(file: str) -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA or ROCm device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 would run the kernels on the host: unset it"
    if file == CODE_OBJECTS and torch.version.hip is None:
        return "needs an AMD GPU"
    if file != CODE_OBJECTS and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            obstacle = _obstacle(item.path.name)
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Full-size cases need most of the device: give back what the last test cached if little is free."""
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _triton_unless_code_objects(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls that leave the backend open get Triton on AMD cards too: there the default is FlyDSL, which rounds in other
    places and has a suite of its own."""
    if torch.version.hip is None or request.path.name == CODE_OBJECTS:
        yield
        return
    with env.override(backend="triton"):
        yield


@pytest.fixture
def card() -> Card:
    device = torch.device("cuda", torch.cuda.current_device())
    return Card(device, arch_of(device).name)
