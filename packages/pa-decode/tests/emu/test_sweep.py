"""The part of the sweep that CI runs: every pair of values of two axes. The whole is ``nox -s sweep-gfx950``."""

from __future__ import annotations

import pytest

from pa_testing.configurations import PAIRWISE, Configuration
from pa_testing.whole_calls import run


@pytest.mark.parametrize("configuration", PAIRWISE, ids=str)
def test_configuration(configuration: Configuration) -> None:
    run(configuration)
