"""The suite without kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pa_testing import OracleKernels, oracle_kernels


@pytest.fixture
def oracle() -> Iterator[OracleKernels]:
    """The kernels of the backend "emulate", which are oracles."""
    with oracle_kernels() as kernels:
        yield kernels
