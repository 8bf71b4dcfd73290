"""The D256 pipe alone, on the emulator with all its checks: partials against the oracle, and what must not change them.

One set of specs serves all tests: pairs of page size, V form, scale mode, rows (one or two matrix tiles), window, dtype
and architecture. The whole product is in tests/sweep.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pa_decode import pack_k, pack_v
from pa_decode.layouts import unpack_k, unpack_v
from pa_testing.attention import attend, check_partials, flavour, work_of
from pa_testing.pipe_cases import CASES, STALE, TWINS, arch_of, options, problem, spec_for, tasks
from pa_testing.probes import at_the_end
from pa_testing.sentinels import edges, sentinels


@pytest.mark.parametrize("name", CASES)
def test_partials(name: str) -> None:
    """Ragged: a tail, empty, shorter than the query, around one and two tiles."""
    inputs = problem(name, [1021, 0, 1, 257, 255, 513])
    work = tasks(name, inputs)
    check_partials(inputs, work, attend(inputs, spec_for(name, inputs), work))


@pytest.mark.parametrize("name", ["950-16-token-plain-25-window", "942-64-tensor-packed-24-window"])
def test_all_orders_of_waves_give_the_same_bits(name: str) -> None:
    inputs = problem(name, [511, 700])
    work = work_of(inputs, 3)
    spec = spec_for(name, inputs)
    first = attend(inputs, spec, work)
    assert all(attend(inputs, spec, work, order=order).same_as(first) for order in ("reverse", "random"))


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_pages_their_order_and_the_form_of_v_change_no_bit(one: str, other: str) -> None:
    contexts = [770, 256, 3]
    draw = torch.Generator().manual_seed(5)
    k, v = ([torch.randn((n, 2, 256), generator=draw) * amplitude for n in contexts] for amplitude in (1.0, 1 / 16))
    query = problem(one, contexts).query
    found = []
    for name, seed in ((one, 0), (one, 1), (other, 2)):
        page = CASES[name]["page"]
        blocks = [torch.cat([_in_pages(x, page) for x in values]) for values in (k, v)]
        inputs = problem(name, contexts, k=blocks[0], v=blocks[1], scale_spread=1.0, seed=seed)
        inputs = dataclasses.replace(inputs, query=query)
        found.append(attend(inputs, spec_for(name, inputs), work_of(inputs, 5)))
    assert found[0].same_as(found[1]) and found[0].same_as(found[2])


def _in_pages(x: Tensor, page: int) -> Tensor:
    """[pages, page, kv_heads, D] of tokens; the last page ends with zeros."""
    missing = -len(x) % page
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]).unflatten(0, (-1, page))


@pytest.mark.parametrize("name", [name for name in CASES if "plain" in name or "25" in name])
def test_what_no_row_sees_changes_no_bit(name: str) -> None:
    """NaN in every byte and scale that no row sees; ids of no page before the window."""
    contexts = [700, 256, 2]
    inputs = problem(name, contexts)
    work = work_of(inputs, 5)
    spec = spec_for(name, inputs)
    clean = attend(inputs, spec, work)
    page = inputs.k_cache.shape[3]
    seen = torch.zeros((inputs.k_cache.shape[0], page), dtype=torch.bool)
    table = inputs.block_tables.clone()
    for sequence, context in enumerate(contexts):
        low = max(context - inputs.query_length + 1 - inputs.window, 0) if inputs.window else 0
        for token in range(low, context):
            seen[table[sequence, token // page], token % page] = True
        table[sequence, : low // page] = STALE
    nan = flavour(arch_of(name)).nan_bytes[0]
    k, v = unpack_k(inputs.k_cache), unpack_v(inputs.v_cache)  # [blocks, page, kv_heads, D]
    for x in (k, v):
        x.view(torch.uint8)[~seen] = nan
    scales = {}
    if spec.scale_mode == "token":
        for which in ("k_scale", "v_scale"):
            scale = getattr(inputs, which).clone()
            scale.transpose(1, 2)[~seen] = torch.nan
            scales[which] = scale
    packed = {"k_cache": pack_k(k), "v_cache": pack_v(v, packed=spec.v_packed)}
    poisoned = dataclasses.replace(inputs, block_tables=_off_by_one(table), **packed, **scales)
    assert attend(poisoned, spec, work).same_as(clean)


def _off_by_one(table: Tensor) -> Tensor:
    """The table with rows that begin off 8-byte addresses."""
    wider = torch.full((table.shape[0], table.shape[1] + 1), STALE, dtype=torch.int32)[:, 1:]
    return wider.copy_(table)


@pytest.mark.parametrize("name", [name for name in CASES if "window" in name or name.endswith("32")])
def test_boundary_sentinels(name: str) -> None:
    """One token has all the weight and the only value: seen up to the position of a row and from the window's first
    token on, and not one further; also on the edges of pages, tiles and tasks."""
    length, window, page = CASES[name]["query_length"], CASES[name].get("window", 0), CASES[name]["page"]
    contexts = (512, 513, 512 + length - 1, 512 + length, 767)
    fixed = {0, page, 255, 256}
    cases = [(context, place) for context in contexts for place in sorted(fixed | edges(context, length, window))]
    found = sentinels(cases, **options(name))
    work = work_of(found.inputs, len(cases) + 4)
    found.check(work, attend(found.inputs, spec_for(name, found.inputs), work).out)


@pytest.mark.parametrize("name", ["950-16-token-packed-32", "942-64-tensor-packed-24-window"])
def test_unusual_numbers(name: str) -> None:
    """A query of zeros, one with a huge element; K and V scales of 0, V scales from 2^-16 to 1."""
    inputs = problem(name, [300, 300, 300, 300], kv_heads=1, extra_width=0)
    length = inputs.query_length
    query = inputs.query.clone()
    query[:length] = 0
    query[length : 2 * length, :, 7] = 1000.0
    scales = {}
    if inputs.v_scale.dim() > 1:
        k_scale, v_scale = inputs.k_scale.clone(), inputs.v_scale.clone()
        for sequence in range(2, 4):
            pages = inputs.block_tables[sequence].long()
            if sequence == 2:
                k_scale[pages], v_scale[pages] = 0.0, 0.0
            else:
                v_scale[pages] *= 2.0 ** -torch.arange(16.0)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    inputs = dataclasses.replace(inputs, query=query, **scales)
    work = work_of(inputs, 6)
    # A share below 2^-5 sums P before it is rounded.
    check_partials(inputs, work, attend(inputs, spec_for(name, inputs), work), sums=0.06)


def test_very_negative_scores_are_not_nothing() -> None:
    name = "950-64-tensor-plain-16"
    blocks = torch.ones((5, 64, 1, 256))
    inputs = problem(name, [300], kv_heads=1, k=-blocks, v=blocks / 16)
    inputs = dataclasses.replace(inputs, query=torch.full_like(inputs.query, 100.0), softmax_scale=4.0)
    work = work_of(inputs, 1)
    got = attend(inputs, spec_for(name, inputs), work)
    check_partials(inputs, work, got, sums=0.02)  # 2^-7 is a rounding unit of the scores
    assert bool((got.out == 1 / 16).all()) and bool((got.reference < -1e5).all())


def test_views_and_absent_scales() -> None:
    """Rows of the query and scales of tokens that lie apart; scales of a tensor that are not given are 1."""
    name = "950-64-token-packed-25-window"
    inputs = problem(name, [600, 70])
    work, spec = work_of(inputs, 4), spec_for(name, inputs)
    wide = torch.full((inputs.query.shape[0], 2 * inputs.query.shape[1] + 1, 264), torch.nan, dtype=inputs.query.dtype)
    query = wide[:, 1::2, 8:].copy_(inputs.query)
    scales = {}
    for which in ("k_scale", "v_scale"):
        scale = getattr(inputs, which)
        apart = torch.full((scale.shape[0], 3, 3 * scale.shape[1], scale.shape[2] + 1), torch.nan)
        scales[which] = apart[:, 1, ::3, 1:].copy_(scale)
    views = dataclasses.replace(inputs, query=query, **scales)
    assert attend(views, spec, work).same_as(attend(inputs, spec, work))

    name = "950-16-tensor-packed-16"
    inputs = problem(name, [300, 70])
    ones = dataclasses.replace(inputs, k_scale=torch.ones(1), v_scale=torch.ones(1))
    absent = dataclasses.replace(inputs, k_scale=None, v_scale=None)
    work, spec = work_of(inputs, 4), spec_for(name, inputs)
    assert attend(absent, spec, work).same_as(attend(ones, spec, work))


@pytest.mark.parametrize("name", TWINS[0])
def test_pages_beyond_4_gib(name: str) -> None:
    """K and V in one storage of 4 GiB and a bit, of which nothing but the last pages is ever touched."""
    inputs = problem(name, [300, 70])
    blocks, heads = inputs.k_cache.shape[:2]
    page = inputs.k_cache.shape[3] * heads * 256  # bytes
    base = (1 << 32) // page + 1
    storage = torch.empty((base + 2 * blocks) * page, dtype=torch.uint8)
    caches = {}
    for which, first in (("k_cache", 0), ("v_cache", blocks)):
        small = getattr(inputs, which)
        large = storage[first * page :].view(small.dtype)[: (base + blocks) * page].view(-1, *small.shape[1:])
        large[base:].copy_(small)
        caches[which] = large
    table = torch.where(inputs.block_tables == STALE, STALE, inputs.block_tables + base)
    far = dataclasses.replace(inputs, block_tables=table, **caches)
    work, spec = work_of(inputs, 4), spec_for(name, inputs)
    assert attend(far, spec, work).same_as(attend(inputs, spec, work))


def test_windows_longer_than_the_context_are_none() -> None:
    """The same bits for a window of the context and for the longest; the tasks are those of no window."""
    name = "942-16-tensor-plain-24-window"
    inputs = problem(name, [600, 70], window=600)
    work, spec = work_of(inputs, 4), spec_for(name, inputs)
    longest = dataclasses.replace(inputs, window=2**40)
    first = attend(inputs, spec, work)
    assert attend(longest, spec, work).same_as(first)
    check_partials(dataclasses.replace(inputs, window=0), work, first)


def test_an_empty_plan_touches_nothing() -> None:
    name = "950-16-tensor-packed-16"
    inputs = problem(name, [0, 0])
    work = work_of(inputs, 2)
    got = attend(inputs, spec_for(name, inputs), work)
    assert all(part.isnan().all() for part in vars(got).values())


@pytest.mark.parametrize("name", TWINS[1])
def test_a_context_beyond_its_table_reads_nothing_behind_it(name: str) -> None:
    """The caller's fault, but not one that reads other memory or touches other sequences. The table ends with its
    memory."""
    inputs = problem(name, [70, 900], window=700)
    short = dataclasses.replace(inputs, block_tables=at_the_end(inputs.block_tables[:, : 300 // CASES[name]["page"]]))
    work, spec = work_of(inputs, 6), spec_for(name, inputs)
    own = work[:, 0] == 0
    expected, got = (attend(x, spec, work) for x in (inputs, short))
    for one, other in zip(vars(expected).values(), vars(got).values(), strict=True):
        assert torch.equal(one[:, own].view(torch.uint8), other[:, own].view(torch.uint8))
