"""Selection of the fast path of sm90: what it takes, what it leaves to the stages and why, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gdn_runtime import UnsupportedError, env, rules, select
from gdn_runtime.arch import parse_arch
from gdn_runtime.rules import Problem

H200 = Problem(
    arch=parse_arch("sm90"),
    compute_units=132,
    num_heads=32,
    num_key_heads=16,
    num_seqs=4,
    total_chunks=512,
    max_seq_chunks=128,
    dtype="bf16",
    beta_dtype="fp32",
    state_dtype="fp32",
    snapshot_dtype="bf16",
    is_varlen=True,
)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def triton_3_6(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "_triton_version", lambda: (3, 6))
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    select._select.cache_clear()
    yield
    select._select.cache_clear()


def one_sequence(num_heads: int, chunks: int, num_seqs: int = 1) -> Problem:
    return replace(
        H200, num_heads=num_heads, num_key_heads=1, num_seqs=num_seqs, total_chunks=num_seqs * chunks,
        max_seq_chunks=chunks,
    )  # fmt: skip


def test_it_is_the_default_where_it_takes_the_call() -> None:
    found = select.select(H200, CUDA)
    assert found.backend == "triton" and found.fast is not None
    assert found.fast.p_in_scan and found.fast.segment_chunks == 0
    text = str(found)
    assert "K1..K6 fast     triton  whole sequences" in text and "K5 state scan" not in text
    assert "256 programs scan at a time on 132 compute units" in text
    assert found.as_dict()["fast"]["num_heads"] == 32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"snapshot_dtype": "fp32"}, "snapshots in fp32 are asked for"),
        ({"total_chunks": 0, "max_seq_chunks": 0}, "there are no tokens"),
        ({"total_chunks": 2**20}, "more than it can address"),
        ({"arch": parse_arch("sm100")}, "it is for sm90, not for sm100"),
    ],
    ids=str,
)
def test_what_it_leaves_to_the_stages(changes: dict[str, object], reason: str) -> None:
    found = select.select(replace(H200, **changes), CUDA)
    assert found.fast is None
    assert f"stages K1..K6, not the fast path: {reason}" in str(found).replace("1048576 chunks of 32 heads are ", "")
    assert "K5 state scan" in str(found)


@pytest.mark.parametrize("version", [(), (3, 5), (3, 7), (4, 0)])
def test_other_versions_of_triton(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(select, "_triton_version", lambda: version)
    found = select.select(H200, CUDA)
    assert found.fast is None and "it is written for Triton 3.6" in str(found)


def test_who_asks_for_stages_gets_them() -> None:
    found = select.select(H200, CUDA, prepare_backend="triton")
    assert found.fast is None and "prepare_backend asks for stages" in str(found)
    for values in ({"prepare_mode": "split"}, {"k5_block_v": 64}):
        with env.override(**values):
            found = select.select(H200, CUDA)
        assert found.fast is None and "asks for stages" in str(found)
    with env.override(prefill="staged"):
        found = select.select(H200, CUDA)
    assert found.fast is None and "fast path" not in str(found)
    for stages in (("state_scan",), ("l2norm", "prepare")):
        assert select.select(H200, CUDA, stages=stages).fast is None
    assert select.select(H200, CUDA, backend="reference").fast is None


@pytest.mark.parametrize(
    ("num_heads", "chunks", "num_seqs", "expected"),
    [
        (8, 128, 1, 16),
        (16, 128, 1, 16),
        (32, 128, 1, 32),
        (8, 128, 4, 32),
        (64, 128, 1, 0),
        (32, 128, 4, 0),
        (32, 40, 1, 0),
        (8, 63, 1, 0),
        (8, 64, 1, 16),
        (8, 264, 1, 32),
        (1, 128, 1, 16),
    ],
)
def test_segments(num_heads: int, chunks: int, num_seqs: int, expected: int) -> None:
    size, why = rules.segment_chunks(one_sequence(num_heads, chunks, num_seqs))
    assert size == expected and f"{2 * num_heads * num_seqs} programs" in why
    found = select.select(one_sequence(num_heads, chunks, num_seqs), CUDA)
    assert found.fast is not None and found.fast.segment_chunks == expected


def test_maps_of_segments_are_bounded() -> None:
    one_long = replace(one_sequence(8, 128), total_chunks=144)
    assert rules.segment_chunks(replace(one_long, num_seqs=16))[0] == 16
    size, why = rules.segment_chunks(replace(one_long, num_seqs=17))
    assert size == 0 and "too many of them" in why


def test_lengths_hardly_enter_the_spec() -> None:
    """But for the three lengths of segments."""
    specs = {id(select.select(one_sequence(8, chunks), CUDA).fast) for chunks in (1, 17, 64, 65, 128, 1000, 5000)}
    assert len(specs) == 3


def test_fp16_takes_p_from_prepare() -> None:
    found = select.select(replace(H200, dtype="fp16", snapshot_dtype="fp16"), CUDA)
    assert found.fast is not None and not found.fast.p_in_scan
    with pytest.raises(UnsupportedError, match="forms P in the scan"):
        replace(found.fast, p_in_scan=True).check()
    with pytest.raises(UnsupportedError, match="arch of the fast path"):
        replace(found.fast, arch="sm80").check()


@pytest.mark.parametrize(("heads", "expected"), [((8, 2), 4), ((4, 2), 2), ((4, 4), 1), ((6, 2), 1), ((6, 1), 2)])
def test_heads_per_program_divide_the_group(heads: tuple[int, int], expected: int) -> None:
    found = select.select(replace(H200, num_heads=heads[0], num_key_heads=heads[1]), CUDA)
    assert found.fast is not None and found.fast.heads_per_program == expected
