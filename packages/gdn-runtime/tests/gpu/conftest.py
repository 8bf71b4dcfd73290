"""The GPU suite: marked ``gpu``, and skipped with a reason where it cannot run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA or ROCm device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 would run the kernels on the host: unset it"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = _obstacle()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Full-size cases need most of the device: give back what the last test cached if little is free."""
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()
