"""Where device code is found, and the sources that code objects are kept under."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from gdn_runtime.errors import UnsupportedError
from gdn_runtime.kernels import jit
from gdn_runtime.spec import L2NormSpec
from pa_decode import DecodeGeometry, PaDecodeSchedule
from pa_decode.spec import KERNEL_ABI, LANGUAGE, AttentionKernel, PlannerSpec

GEOMETRY = DecodeGeometry("gfx950", 256, 8, 16, 2, 256, 64)
SPECS = (
    PaDecodeSchedule.select(GEOMETRY).attention,
    PaDecodeSchedule.select(GEOMETRY).reduce,
    PlannerSpec.of("gfx950", 1),
)


def test_every_kernel_has_a_module() -> None:
    places = [(LANGUAGE[kernel], kernel) for kernel in get_args(AttentionKernel)]
    places += [(spec.language, spec.kernel) for spec in SPECS[1:]]
    for language, kernel in places:
        assert importlib.util.find_spec(f"pa_decode.kernels.{language}.{kernel}") is not None


def test_code_of_another_abi_is_another_kernels() -> None:
    for spec in SPECS:
        assert spec.abi == KERNEL_ABI
        with pytest.raises(UnsupportedError, match=f"abi: got {KERNEL_ABI + 1}, supported: {KERNEL_ABI}"):
            replace(spec, abi=KERNEL_ABI + 1).check()


def test_sources_are_those_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs, what is below them, and kernels of the language; neither host code nor other packages' keys."""
    find = importlib.util.find_spec

    def found(name: str) -> Any:
        return SimpleNamespace(submodule_search_locations=[str(tmp_path)]) if name == "pa_decode" else find(name)

    monkeypatch.setattr(jit.importlib.util, "find_spec", found)
    names = ("spec.py", "traits.py", "plan.py", "kernels/triton/planner.py", "kernels/flydsl/d256_pipe.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    planner, others = SPECS[2], L2NormSpec("gfx950", "bf16", 2)
    seen = {jit.source_digest(planner)}
    before = jit.source_digest(others)
    for name, counts in zip(names, (True, True, False, True, False), strict=True):
        (tmp_path / name).write_text("edited")
        digest = jit.source_digest(planner)
        assert (digest not in seen) is counts, name
        seen.add(digest)
    assert jit.source_digest(others) == before
