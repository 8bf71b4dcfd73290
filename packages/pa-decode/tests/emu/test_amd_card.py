"""The suite of AMD cards, tests/gpu/test_amd_gpu.py, with a gfx950 of the emulator in the card's place. Tests that need
a real one are skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gdn_testing.card import Card

_spec = importlib.util.spec_from_file_location("amd_gpu", Path(__file__).parents[1] / "gpu" / "test_amd_gpu.py")
assert _spec is not None and _spec.loader is not None
_suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_suite)
globals().update({name: value for name, value in vars(_suite).items() if name.startswith("test_")})
may_compile, real = _suite.may_compile, _suite.real


@pytest.fixture
def card() -> Card:
    return Card(torch.device("cpu"), "gfx950")
