"""The host part of the fast path: when its kernels are compiled, and rows as the copy engine takes them."""

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


ROWS = torch.arange(3 * 5 * 4 * 256, dtype=torch.int32).bfloat16().view(3, 5, 4, 256)


@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (ROWS[..., :128].contiguous(), False),
        (ROWS[:, :, 1:3, 128:], False),
        (ROWS[:, :, :, :128].transpose(1, 2), False),
        (ROWS.flatten()[: 129 * 6].view(1, 1, 6, 129)[..., :128], True),
        (ROWS.flatten()[:129].view(1, 1, 1, 129)[..., :128], False),
        (ROWS.flatten()[: 3 * 136].view(1, 3, 1, 136)[..., :128], False),
        (ROWS.flatten()[1:1281].view(1, 5, 2, 128), True),
        (ROWS[:, :, :1, :128].expand(-1, -1, 4, -1), True),
        (ROWS[:1, :1, :, :128].expand(2, 5, -1, -1), True),
    ],
    ids=[
        "plain",
        "projection",
        "transposed",
        "odd heads",
        "one row",
        "one head",
        "odd address",
        "one key",
        "one token",
    ],
)
def test_rows_for_the_copy_engine(x: torch.Tensor, copied: bool, is_varlen: bool) -> None:
    """Multiples of 16 bytes, no two rows in one place, and no copy of what has both already."""
    if is_varlen:
        x = x[:1]
    rows, tiles = prefill._rows(x, is_varlen)
    assert tiles.base is rows and (rows is not x) == copied and torch.equal(rows, x)
    assert rows.data_ptr() % 16 == 0 and tiles.strides[-1] == 1
    token, head = tiles.strides[2:4]
    assert not any(stride % 8 for stride in tiles.strides[:-1]) and min(token, head) >= 128
    for t, h in ((x.shape[1] - 1, 0), (0, x.shape[2] - 1)):  # an axis of one element has no stride of its own
        assert rows[0, t, h].data_ptr() - rows.data_ptr() == 2 * (t * token + h * head)
    if is_varlen:
        assert tiles.strides[0] + tiles.strides[1] == 2**34
    else:
        assert tiles.shape == (1, *x.shape)
        assert rows[-1].data_ptr() - rows.data_ptr() == 2 * (len(x) - 1) * tiles.strides[1]
