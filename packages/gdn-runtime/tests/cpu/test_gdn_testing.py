"""The helpers of the other tests: a comparison that cannot fail, or an input without its trap, hides everything."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import gdn_runtime.plan
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import (
    CASES,
    GRID,
    KEY_NOISE,
    assert_bitwise_equal,
    assert_close_rel,
    list_cases,
    make_inputs,
    max_rel,
    rel_l2,
)
from gdn_testing import exact_prepare, poison, poison_empty

NAN = float("nan")


def test_relative_errors() -> None:
    a, b = torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])
    assert rel_l2(a, b) == pytest.approx(0.1)
    assert max_rel(a, b) == pytest.approx(0.125)
    assert rel_l2(a, torch.zeros(2)) == pytest.approx(a.norm().item())
    assert rel_l2(b, b) == 0.0 and max_rel(torch.empty(0), torch.empty(0)) == 0.0


def test_close_names_the_worst_place_and_fails_on_nan() -> None:
    expected = torch.ones(2, 3)
    off = expected.clone()
    off[1, 2] = 1.5
    with pytest.raises(AssertionError, match=r"thing: relative L2 error 2\.041e-01 .* worst at \(1, 2\): got 1\.5"):
        assert_close_rel(off, expected, 0.2, "thing")
    assert_close_rel(off, expected, 0.21, "thing")
    off[0, 1] = NAN
    for pair in ((off, expected), (expected, off)):
        with pytest.raises(AssertionError, match=r"not finite, first nan at \(0, 1\)"):
            assert_close_rel(*pair, 1.0, "thing")
    with pytest.raises(AssertionError, match="shape"):
        assert_close_rel(expected, torch.ones(3, 2), 1.0, "thing")


def test_bitwise_sees_zero_signs_dtypes_and_equal_nan() -> None:
    a = torch.tensor([0.0, NAN, 1.0], dtype=torch.bfloat16)
    assert_bitwise_equal(a, a.clone(), "thing")
    b = a.clone()
    b[0] = -0.0
    with pytest.raises(AssertionError, match=r"thing: 1 of 3 values differ, first at \(0,\)"):
        assert_bitwise_equal(a, b, "thing")
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(a, a.float(), "thing")


def test_poison() -> None:
    assert poison(torch.zeros(3, dtype=torch.float16)).isnan().all()
    assert (poison(torch.zeros(3, dtype=torch.int32)) == 0x5A5A5A5A).all()
    assert poison(torch.zeros(3, dtype=torch.bool)).all()


def test_poison_empty_only_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = vars(gdn_runtime.plan)
    make = "[torch.empty(2), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (1,))]"
    monkeypatch.setitem(library, "torch", torch)
    monkeypatch.setitem(library, "x", torch.zeros(2))
    original = torch.empty
    with poison_empty():
        assert all(t.isnan().all() for t in eval(make, library))  # noqa: S307
        assert torch.empty is not original
        assert torch.empty(2).fill_(1.0).sum() == 2.0
        monkeypatch.setitem(library, "__name__", "elsewhere")
        zeros = torch.zeros(2)
        assert not torch.empty_like(zeros).copy_(zeros).isnan().any()
    assert torch.empty is original


@pytest.mark.parametrize("name", KEY_NOISE)
def test_keys_have_the_cosine_of_their_name(name: str) -> None:
    x = make_inputs((1, 64), 2, 2, keys=name)  # type: ignore[arg-type]
    k = x.k[0].float().transpose(0, 1)
    cosines = (k @ k.transpose(-1, -2))[:, ~torch.eye(64, dtype=torch.bool)]
    assert cosines.mean().item() == pytest.approx(1 / (1 + KEY_NOISE[name] ** 2), abs=0.02)  # type: ignore[index]


def test_inputs_are_reproducible_and_sliced_right() -> None:
    x = make_inputs([3, 0, 66], state="random", spare_rows=4, seed=7)
    again = make_inputs([3, 0, 66], state="random", spare_rows=4, seed=7)
    for a, b in zip(x.tensors, again.tensors, strict=True):
        assert_bitwise_equal(a, b, "same seed")
        assert a[:, 69:].isnan().all() and not a[:, :69].isnan().any()
    assert not torch.equal(x.v[:, :69], make_inputs([3, 0, 66], seed=8).v)
    assert x.cu_seqlens is not None and x.cu_seqlens.tolist() == [0, 3, 3, 69]
    last = x.sequence(2)
    assert last.seq_lens == (66,) and torch.equal(last.k, x.k[:, 3:69])
    assert last.initial_state is not None and x.initial_state is not None
    assert torch.equal(last.initial_state[0], x.initial_state[2])
    dense = make_inputs((2, 5), spare_rows=3)
    assert dense.k.shape[1] == 5 and dense.k.stride(0) == 8 * dense.k.stride(1), "a view of a longer axis"
    with pytest.raises(ValueError, match="dense"):
        x.tokens(0, 1, None)
    with pytest.raises(TypeError, match="shape"):
        make_inputs(5)  # type: ignore[arg-type]


def test_closed_gates_are_where_they_should_be() -> None:
    x = make_inputs([0, 3, 130], gate="closed")
    shut = (x.g < -100).all(-1)[0].nonzero().flatten().tolist()
    assert shut == [0, 2, 3, 3 + 63, 3 + 64, 3 + 129]
    assert x.g[0, 0, 0] == float("-inf") and x.g[0, 0, 1] == -1e4


def test_exact_prepare_gives_the_recurrence() -> None:
    """One chunk from a zero state: v_new is u, so u determines the final state."""
    x = make_inputs([40, 64], 2, 1, keys="cos0.8")
    _, u, gate = exact_prepare(x)
    _, state = recurrent_gated_delta_rule(*x.tensors, cu_seqlens=x.cu_seqlens)
    for n, rows in enumerate((slice(0, 40), slice(40, 104))):
        decay = (gate[0, :, rows][:, -1:] - gate[0, :, rows]).exp()[..., None]
        chunk = (u[0, :, rows] * decay).transpose(-1, -2) @ x.k[0, rows].double().transpose(0, 1)
        assert_close_rel(chunk, state[n], 1e-12, "final_state from u")


def test_case_tables() -> None:
    groups = Counter(case.group for case in CASES.values())
    assert groups == {
        "dense": 12,
        "batch2": 4,
        "packed": 8,
        "snapshot": 32,
        "nogate": 3,
        "ragged": 3,
        "single": 2,
        "three": 8,
        "two": 5,
        "emptylast": 1,
        "dtypes": 4,
    }
    assert len(GRID) == 112 + 256
    assert [len(CASES[f"ragged-35b-tp1-{n}"].seq_lens) for n in (1000, 5000, 10000)] == [33, 7, 4]
    assert CASES["three-35b-tp1-0"].seq_lens == (0, 10000, 6384)
    assert all(case.num_tokens == 32768 for case in CASES.values() if case.group in ("packed", "ragged"))
    listed = list_cases().splitlines()
    assert len(listed) == len(CASES) and listed[0].startswith("dense-35b-tp1-2500: H=32 Hg=16")


def test_small_cases_keep_the_layout() -> None:
    small = CASES["three-35b-tp1-65"].small()
    assert small.seq_lens == (65, 3 * 64 + 10000 % 64, 3 * 64 + 6319 % 64)
    assert (small.num_heads, small.num_key_heads) == (2, 1)
    assert len(CASES["ragged-35b-tp1-1000"].small().seq_lens) == 4
    for case in CASES.values():
        inputs = case.small(max_chunks=1, max_seqs=2).inputs()
        assert inputs.num_heads * case.num_key_heads == case.num_heads
        assert (inputs.cu_seqlens is None) == (case.batch is not None)
