"""Uses of torch._C: all in one file, and what they stand for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_runtime
from gdn_runtime import private
from gdn_runtime.ops.library import traced


def test_nothing_else_uses_what_is_private() -> None:
    root = Path(gdn_runtime.__file__).parent
    users = [str(path.relative_to(root)) for path in root.rglob("*.py") if "torch._C" in path.read_text()]
    assert users == ["private.py"]


def test_dispatch_modes_are_counted() -> None:
    assert private.dispatch_modes() == 0 and not traced()
    with FakeTensorMode():
        assert private.dispatch_modes() == 1 and traced()
        with TorchDispatchMode():
            assert private.dispatch_modes() == 2
    assert not traced()


@pytest.mark.parametrize("has_raw", [True, False])
def test_the_stream_is_asked_for_by_index(monkeypatch: pytest.MonkeyPatch, has_raw: bool) -> None:
    """By the function that Triton uses, or, in a PyTorch without it, the public way."""
    if has_raw:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=200 + index))
    name = f"{private.__name__}_again"
    spec = importlib.util.spec_from_file_location(name, private.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: again}):
        spec.loader.exec_module(again)
    assert again.current_stream(3) == (103 if has_raw else 203)
