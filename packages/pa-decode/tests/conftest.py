"""Settings of every suite."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tensors are small, and torch's threads spin."""
    torch.set_num_threads(1)
