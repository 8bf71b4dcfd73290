"""The fp32 oracle against decode from its definition, its degenerate rows, and boundary sentinels."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pa_decode import pack_k, pack_v, reference
from pa_decode.quantise import FLAVOURS, FN, FNUZ
from pa_decode.reference import DecodeInputs
from pa_testing import make_inputs, naive_decode

CASES = list(itertools.product((16, 64), (True, False), ("tensor", "token"), (0, 1, 17), (False, True)))


@pytest.mark.parametrize("case", range(0, len(CASES), 3))
def test_decode_equals_the_definition(case: int) -> None:
    page, v_packed, scale_mode, window, sinks = CASES[case]
    inputs = make_inputs(
        [0, 2, 5, page, 37],
        page=page,
        v_packed=v_packed,
        scale_mode=scale_mode,
        window=window,
        sinks=sinks,
        query_length=1 + case % 4,
        flavour=(FN, FNUZ)[case % 2],
        scale_spread=8.0,
        seed=case,
    )
    torch.testing.assert_close(reference.decode(inputs).double(), naive_decode(inputs), rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    contexts=st.lists(st.integers(-2, 40), min_size=1, max_size=3),
    query_length=st.integers(1, 5),
    window=st.integers(0, 45),
    seed=st.integers(0, 99),
)
def test_decode_equals_the_definition_anywhere(contexts: list[int], query_length: int, window: int, seed: int) -> None:
    inputs = make_inputs(
        contexts,
        kv_heads=1,
        query_length=query_length,
        window=window,
        seed=seed,
        scale_mode=("tensor", "token")[seed % 2],
        sinks=seed % 3 == 0,
    )
    torch.testing.assert_close(reference.decode(inputs).double(), naive_decode(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("sink", [-math.inf, math.inf, 0.5, None])
def test_degenerate_rows(quantised: bool, sink: float | None) -> None:
    run = reference.decode_quantised if quantised else reference.decode
    inputs = make_inputs([0, -3, 2, 40], query_length=4, seed=5)
    plain = run(inputs)
    if sink is not None:
        inputs = dataclasses.replace(inputs, sinks=torch.full((4,), sink))
    out = run(inputs)
    assert torch.isfinite(out).all()
    assert not out[:8].any() and not out[8:10].any(), "empty contexts, and rows before the first token"
    if sink == math.inf:
        assert not out.any()
    elif sink == 0.5:
        assert out[10:].abs().sum() < plain[10:].abs().sum()
    else:
        torch.testing.assert_close(out, plain, rtol=0, atol=0)


@pytest.mark.parametrize("run", [reference.decode, reference.decode_quantised])
def test_zero_queries_give_the_mean_of_what_is_visible(run: object) -> None:
    inputs = make_inputs([40], query_length=2, window=16, flavour=FN)
    inputs = dataclasses.replace(inputs, query=torch.zeros_like(inputs.query))
    assert callable(run)
    torch.testing.assert_close(run(inputs), naive_decode(inputs).float(), rtol=1e-5, atol=1e-6)


def test_very_negative_equal_logits_give_the_mean_of_v() -> None:
    inputs = make_inputs([33], k=torch.ones(3, 16, 2, 32), seed=3)
    inputs = dataclasses.replace(inputs, query=torch.full_like(inputs.query, -64.0), softmax_scale=3500.0)
    out = reference.decode(inputs)
    zero = dataclasses.replace(inputs, query=torch.zeros_like(inputs.query))
    torch.testing.assert_close(out, reference.decode(zero), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["tensor", "token"])
def test_a_window_as_long_as_the_context_is_none(mode: str) -> None:
    inputs = make_inputs([37, 5], query_length=3, scale_mode=mode)
    for window in (37, 38, 2**31 - 1):
        windowed = dataclasses.replace(inputs, window=window)
        assert torch.equal(reference.decode(windowed), reference.decode(inputs))
        assert torch.equal(reference.decode_quantised(windowed), reference.decode_quantised(inputs))


@pytest.mark.parametrize(("page", "v_packed"), [(16, True), (64, False)])
def test_nothing_masked_reaches_a_result(page: int, v_packed: bool) -> None:
    """NaN in every byte and scale that no query token sees; ids of the pages before the window name nothing."""
    inputs = make_inputs([200, 65], page=page, v_packed=v_packed, scale_mode="token", query_length=2, window=70)
    assert isinstance(inputs.k_scale, Tensor) and isinstance(inputs.v_scale, Tensor)
    expected = reference.decode(inputs), reference.decode_quantised(inputs)
    k, v = inputs.k_cache.view(torch.uint8).clone(), inputs.v_cache.view(torch.uint8).clone()
    k_scale, v_scale, table = inputs.k_scale.clone(), inputs.v_scale.clone(), inputs.block_tables.clone()
    for sequence, context in enumerate(inputs.seq_lens.tolist()):
        first = inputs.visible(context, 0)[0]
        for token in (*range(first), *range(context, -(-context // page) * page)):
            block, slot = int(inputs.block_tables[sequence, token // page]), token % page
            k[block, :, :, slot] = 0x7F
            if v_packed:
                v[block, :, slot // 16, :, slot % 16] = 0x7F
            else:
                v[block, :, :, slot] = 0xFF
            k_scale[block, :, slot], v_scale[block, :, slot] = math.inf, math.nan
        table[sequence, : first // page] = -1
    poisoned = dataclasses.replace(
        inputs,
        k_cache=k.view(torch.float8_e4m3fn),
        v_cache=v.view(torch.float8_e4m3fn),
        k_scale=k_scale,
        v_scale=v_scale,
        block_tables=table,
    )
    assert torch.equal(reference.decode(poisoned), expected[0])
    assert torch.equal(reference.decode_quantised(poisoned), expected[1])


def test_nan_that_is_visible_is_not_hidden() -> None:
    inputs = make_inputs([5])
    query = inputs.query.clone()
    query[0, 0, 0] = math.nan
    out = reference.decode(dataclasses.replace(inputs, query=query))
    assert out[0, 0].isnan().all() and torch.isfinite(out[0, 1:]).all()


def sentinel_inputs(
    context: int, token: int, *, page: int, query_length: int, window: int, mode: str, v_packed: bool
) -> DecodeInputs:
    """V = 0 but at one token, which has by far the largest score."""
    blocks = -(-max(context, token + 1) // page)
    k, v = torch.zeros(blocks * page, 1, 16), torch.zeros(blocks * page, 1, 16)
    k[token], v[token] = 8.0, 1.0
    # The sentinel may lie behind the context: the pages are there all the same.
    inputs = make_inputs(
        [blocks * page],
        kv_heads=1,
        group=1,
        head_dim=16,
        page=page,
        query_length=query_length,
        window=window,
        scale_mode=mode,
        v_packed=v_packed,
        k=k.reshape(blocks, page, 1, 16),
        v=v.reshape(blocks, page, 1, 16),
    )
    return dataclasses.replace(
        inputs, query=torch.ones_like(inputs.query), seq_lens=torch.tensor([context], dtype=torch.int32)
    )


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("query_length", "window"), [(1, 17), (4, 1), (4, 70)])
@pytest.mark.parametrize("mode", ["tensor", "token"])
def test_boundary_sentinels(page: int, query_length: int, window: int, mode: str) -> None:
    contexts = {256 + rest for rest in (0, 1, query_length - 1, query_length, 255)}
    for context in sorted(contexts):
        for query in range(query_length):
            position = context - query_length + query
            edges = {position - window: False, position - window + 1: True, position: True, position + 1: False}
            for token, visible in edges.items():
                inputs = sentinel_inputs(
                    context,
                    token,
                    page=page,
                    query_length=query_length,
                    window=window,
                    mode=mode,
                    v_packed=(context + token) % 2 == 0,
                )
                for run in (reference.decode, reference.decode_quantised):
                    value = float(run(inputs)[query].max())
                    assert (value > 0.9) if visible else value == 0.0, (context, query, token)


@pytest.mark.parametrize("query_length", [1, 4])
@pytest.mark.parametrize("context", [1, 127, 128, 129, 255, 256, 300])
def test_window_of_128_counts_the_own_position(context: int, query_length: int) -> None:
    """Flat weights; one key past the window of the last row is large, the first in it is 1."""
    window, page = 128, 16
    blocks = -(-context // page)
    v = torch.zeros(blocks * page, 1, 16)
    if context > window:
        v[context - 1 - window] = 448.0
    if context >= window:
        v[context - window] = 1.0
    inputs = make_inputs(
        [context],
        kv_heads=1,
        group=1,
        head_dim=16,
        query_length=query_length,
        window=window,
        k=torch.zeros(blocks, page, 1, 16),
        v=v.reshape(blocks, page, 1, 16),
    )
    inputs = dataclasses.replace(inputs, v_scale=None, k_scale=None, v_cache=pack_v(as_fp8(inputs, v)))
    out = reference.decode(inputs)[:, 0, 0].tolist()
    for query in range(query_length):
        first, end = inputs.visible(context, query)
        seen = v[first:end, 0, 0]
        assert out[query] == pytest.approx(float(seen.sum()) / max(len(seen), 1), rel=1e-5)
    if context > window:
        assert out[-1] == pytest.approx(1 / 128)
        assert query_length == 1 or out[-2] > 3.0


def as_fp8(inputs: DecodeInputs, v: Tensor) -> Tensor:
    """``v`` [tokens, 1, D] with scale 1 on the pages of a single sequence."""
    page = inputs.k_cache.shape[3]
    blocks = v.reshape(-1, page, *v.shape[1:])
    cache = torch.zeros((inputs.k_cache.shape[0], *blocks.shape[1:]))
    cache[inputs.block_tables[0, : blocks.shape[0]].long()] = blocks
    return cache.to(FN.dtype)


def test_swapped_scales_move_exactly_their_contribution() -> None:
    inputs = make_inputs([64], scale_mode="token", group=1)
    assert isinstance(inputs.v_scale, Tensor)
    flat = dataclasses.replace(inputs, query=torch.zeros_like(inputs.query), v_scale=torch.ones_like(inputs.v_scale))
    scale = torch.ones_like(inputs.v_scale)
    block = int(inputs.block_tables[0, 1])
    scale[block, 1, 5] = 2.0
    changed = dataclasses.replace(flat, v_scale=scale)
    difference = reference.decode(changed) - reference.decode(flat)
    assert not difference[0, 0].any()
    token = reference.unpack_v(inputs.v_cache)[block, 5, 1].float()
    torch.testing.assert_close(difference[0, 1], token / 64, rtol=1e-4, atol=1e-4)


def test_fp8_flavours_are_read_as_what_they_are() -> None:
    for flavour in FLAVOURS.values():
        inputs = make_inputs([20], flavour=flavour)
        assert inputs.k_cache.dtype == flavour.dtype
        torch.testing.assert_close(reference.decode(inputs).double(), naive_decode(inputs), rtol=1e-5, atol=1e-6)


def test_packed_views_of_interleaved_storage() -> None:
    kv = torch.randn(3, 2, 16, 2, 32)
    k, v = kv.unbind(1)
    assert torch.equal(pack_k(k), pack_k(k.clone())) and torch.equal(pack_v(v), pack_v(v.clone()))
