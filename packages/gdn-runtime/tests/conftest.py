"""Settings and fixtures of every suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gdn_testing import poison_empty


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tensors are small, and torch's threads spin: on two shared cores a run took 29 s with two, 2 s with one."""
    torch.set_num_threads(1)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory that gdn_runtime allocates holds NaN."""
    with poison_empty():
        yield
