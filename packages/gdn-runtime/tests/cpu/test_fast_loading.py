"""When the kernels of the fast path are compiled: once per spec, device and what else their code depends on."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn_runtime.errors import CaptureError
from gdn_runtime.spec import FastPrefillSpec

prefill = pytest.importorskip("gdn_runtime.kernels.gluon.prefill", reason="needs Triton", exc_type=ImportError)

SPEC = FastPrefillSpec(
    arch="sm90", dtype="bf16", beta_dtype="fp32", state_dtype="fp32", num_heads=32, num_key_heads=16, is_varlen=True,
    use_initial_state=True, store_final_state=True, use_state_indices=True, use_state_mask=True, p_in_scan=True,
    segment_chunks=0,
)  # fmt: skip
GPU = torch.device("cuda", 0)
SLOTS = torch.zeros(1, dtype=torch.int32)


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; without one torch cannot be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled, instead of compiling it."""
    made: list[Any] = []

    def load(spec: FastPrefillSpec, **options: Any) -> object:
        made.append((spec, options))
        return object()

    monkeypatch.setattr(prefill, "load", load)
    return made


def test_once_per_what_the_code_depends_on(loads: list[Any]) -> None:
    loaded = prefill._Loaded()
    first = loaded(SPEC, GPU, True, SLOTS)
    assert loaded(SPEC, GPU, True, SLOTS) is first and len(loads) == 1
    others = [
        loaded(replace(SPEC, use_state_mask=False), GPU, True, SLOTS),
        loaded(SPEC, torch.device("cuda", 1), True, SLOTS),
        loaded(SPEC, GPU, False, SLOTS),
        loaded(SPEC, GPU, True, SLOTS.long()),
    ]
    assert len({id(kernels) for kernels in (first, *others)}) == 5 == len(loads) == len(loaded)
    assert loads[-1] == (SPEC, {"states_on_16_bytes": True, "index_type": "*i64"})


def test_not_into_a_graph(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prefill._Loaded()
    known = loaded(SPEC, GPU, True, SLOTS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert loaded(SPEC, GPU, True, SLOTS) is known
    with pytest.raises(CaptureError, match=r"^compiling the kernels of the fast path while .*: warm up first"):
        loaded(SPEC, GPU, False, SLOTS)
    assert len(loads) == len(loaded) == 1


def test_again_after_a_compile_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prefill._Loaded()
    answers = iter([RuntimeError("ptxas"), "kernels"])

    def load(spec: FastPrefillSpec, **options: Any) -> object:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(prefill, "load", load)
    with pytest.raises(RuntimeError, match="ptxas"):
        loaded(SPEC, GPU, True, None)
    assert loaded(SPEC, GPU, True, None) == "kernels"


def test_threads_compile_once(loads: list[Any]) -> None:
    loaded = prefill._Loaded()
    start = threading.Barrier(8)
    found: list[object] = []

    def ask() -> None:
        start.wait()
        found.append(loaded(SPEC, GPU, True, SLOTS))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1 and len(found) == 8 and len(set(map(id, found))) == 1
