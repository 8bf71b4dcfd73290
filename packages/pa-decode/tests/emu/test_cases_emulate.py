"""Faults that other implementations of paged decode have had, on the code objects; numbers as in test_cases. And draws
of lengths, windows and plans that nobody chose.

The kernels are those that the other tests of the pipe and of the call have compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gdn_runtime.arch import KNOWN
from pa_decode import DecodePlan, DecodeWorkspace, make_workspace, pa_decode, pack_v, plan_decode, reference
from pa_decode.reference import DecodeInputs
from pa_testing import arguments_of, geometry_of, make_inputs
from pa_testing.attention import Partials, attend, check_partials, flavour, work_of
from pa_testing.pipe_cases import CASES, STALE, arch_of, problem, spec_for
from pa_testing.probes import scale_probe, with_hidden

TOLERANCE = 0.005


def attended(name: str, inputs: DecodeInputs, spare: int = 3) -> tuple[Partials, Tensor]:
    """Partials of a case, and the work of its plan."""
    work = work_of(inputs, len(inputs.seq_lens) + spare)
    return attend(inputs, spec_for(name, inputs), work), work


def whole(name: str, inputs: DecodeInputs) -> Tensor:
    """[B*QL, Hq, D] in fp32 of sequences that are one task each."""
    got, work = attended(name, inputs, spare=0)
    assert work[:, 0].tolist() == list(range(len(inputs.seq_lens))) and bool((work[:, 1] < work[:, 2]).all())
    heads = inputs.num_kv_heads
    rows = got.out.float().unflatten(2, (inputs.query_length, -1))  # [Hkv, B, QL, G, D]
    return rows.permute(1, 2, 0, 3, 4).reshape(-1, heads * rows.shape[3], rows.shape[4])


# ------------------------------------------------------------------------------------------------ the call


def call(
    arch: str, contexts: list[int], budget: int, fill: float = float("nan"), **changes: Any
) -> tuple[DecodeInputs, dict[str, Any]]:
    """A dense problem, and its arguments over a plan, scratch and output full of ``fill``."""
    inputs = make_inputs(
        contexts, page=16, query_length=2, sinks=True, head_dim=256, group=8, kv_heads=1, flavour=flavour(arch)
    )
    inputs = dataclasses.replace(inputs, **changes)
    geometry = geometry_of(inputs, arch=arch, compute_units=KNOWN[arch].nominal_compute_units or 1)
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, backend="emulate")
    workspace = make_workspace(plan, geometry)
    for part in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        part.fill_(fill)
    out = torch.full_like(inputs.query, fill)
    return inputs, arguments_of(inputs, backend="emulate", arch=arch, plan=plan, workspace=workspace, out=out)


def test_c14_a_call_writes_output_and_scratch_alone(arch: str) -> None:
    """As its op says; a larger call with other tensors in between changes nothing."""
    inputs, given = call(arch, [300, 0, 40], 4)
    plan, workspace = given["plan"], given["workspace"]
    assert isinstance(plan, DecodePlan) and isinstance(workspace, DecodeWorkspace)
    read = {name: x for name, x in given.items() if isinstance(x, Tensor) and name != "out"}
    read |= {"work_info": plan.work_info, "reduce_info": plan.reduce_info}
    before = {name: x.contiguous().view(torch.uint8).clone() for name, x in read.items()}
    first = pa_decode(**given).clone()
    _, larger = call(arch, [700, 300, 300, 9], 9)
    pa_decode(**larger)
    given["out"].fill_(torch.nan)
    assert torch.equal(pa_decode(**given), first) and not first[2:4].any()
    for name, x in read.items():
        assert torch.equal(x.contiguous().view(torch.uint8), before[name]), name
    assert torch.allclose(first.float(), reference.decode(inputs), atol=TOLERANCE, rtol=TOLERANCE)


def test_c18_every_number_of_splits(arch: str) -> None:
    contexts = [1, 0, 16, 1100]
    inputs, given = call(arch, contexts, 1)
    one = pa_decode(**given).float()
    assert torch.allclose(one, reference.decode(inputs), atol=TOLERANCE, rtol=TOLERANCE)
    for budget in (5, 6, 64):
        outs = [pa_decode(**call(arch, contexts, budget, fill)[1]) for fill in (float("nan"), 1e30)]
        assert torch.equal(*outs) and not outs[0][2:4].any()
        assert torch.allclose(outs[0].float(), one, atol=1e-3, rtol=2**-6)


def test_c18_very_negative_equal_logits(arch: str) -> None:
    """Scores of about -7e6 (-4e6 in FNUZ) in every split; what remains is the mean of V, the sinks having all the
    weight if there are any."""
    contexts = [16, 700]
    inputs, _ = call(arch, contexts, 1)
    fp8 = flavour(arch)
    changes: dict[str, Any] = {
        "k_cache": torch.full(inputs.k_cache.shape, -fp8.max).to(fp8.dtype),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1) / 16,
        "query": torch.full_like(inputs.query, 64.0),
        "softmax_scale": 1.0,
    }
    for budget in (1, 6):
        assert not pa_decode(**call(arch, contexts, budget, **changes)[1]).any()
        low, given = call(arch, contexts, budget, **changes, sinks=torch.full_like(inputs.sinks, -torch.inf))  # type: ignore[arg-type]
        mean = reference.decode(dataclasses.replace(low, query=torch.zeros_like(low.query)))
        out = pa_decode(**given).float()
        assert torch.allclose(out, mean, atol=2e-3 * float(mean.abs().max()), rtol=2**-6)


# ------------------------------------------------------------------------------------------------ the pipe


@pytest.mark.parametrize("name", ["950-16-tensor-packed-16", "942-64-token-plain-16", "950-64-token-packed-25-window"])
def test_c15_rows_of_any_width(name: str) -> None:
    """Tables that end with the longest row, and with their memory, in rows that are wider."""
    page = CASES[name]["page"]
    width = {16: 33, 64: 9}[page]
    for longest in (width * page, (width - 1) * page + 1):
        inputs = problem(name, [0, 1, 16, 250, longest], extra_width=0)
        assert inputs.block_tables.shape[1] == width
        expected, work = attended(name, inputs)
        check_partials(inputs, work, expected)
        for stale in (-1, 2**31 - 1, None):
            hidden = with_hidden(inputs, flavour(arch_of(name)).nan_bytes[0], float("nan"), stale=stale)
            assert attended(name, hidden)[0].same_as(expected)


@pytest.mark.parametrize(
    ("name", "heads", "ids"),
    [
        ("950-64-token-packed-25-window", 2, [1, 65535, 65536, 65537, 131071, 131072]),
        ("950-16-token-packed-32", 1, [524287, 524288, 1048576, 0, 65535, 65536]),
        ("942-64-token-plain-16", 2, [131072, 131071, 65537, 65536, 65535, 1]),
    ],
)
def test_c16_large_block_ids(name: str, heads: int, ids: list[int]) -> None:
    """Beyond 16 bits, and pages beyond 4 GiB: bits of the same pages in low places. Pages that an id cut to 16 bits, or
    an offset to 32, would name hold something else; no other memory of the caches is touched."""
    page = CASES[name]["page"]
    low = problem(name, [3 * page, 3 * page - 5], kv_heads=heads)
    expected, _ = attended(name, low)
    used = low.block_tables[:, :3].long()
    spread = torch.tensor(ids).reshape(2, 3)
    wrong = [k for k in {k & 0xFFFF for k in ids} | {k & (1 << 20) - 1 for k in ids} if k not in ids]
    dtype = low.k_cache.dtype

    def place(x: Tensor, filler: float) -> Tensor:
        far = torch.empty((max(ids) + 1, *x.shape[1:]), dtype=x.dtype)
        if x.dtype == dtype:
            far, x = far.view(torch.uint8), x.view(torch.uint8)
        for block in wrong:
            far[block] = filler
        far[spread.flatten()] = x[used.flatten()]
        return far.view(dtype) if far.dtype == torch.uint8 else far

    nan = flavour(arch_of(name)).nan_bytes[0]
    assert isinstance(low.k_scale, Tensor) and isinstance(low.v_scale, Tensor)
    table = torch.full_like(low.block_tables, STALE)
    table[:, :3] = spread
    high = dataclasses.replace(
        low,
        k_cache=place(low.k_cache, nan),
        v_cache=place(low.v_cache, nan),
        k_scale=place(low.k_scale, torch.nan),
        v_scale=place(low.v_scale, torch.nan),
        block_tables=table,
    )
    assert high.k_cache.numel() > 1 << 32
    assert attended(name, high)[0].same_as(expected)


@pytest.mark.parametrize("name", ["950-16-token-packed-32", "950-64-tensor-plain-16", "942-16-tensor-plain-24-window"])
@pytest.mark.parametrize("spare", [0, 6])
def test_c17_garbage_in_unused_slots(name: str, spare: int) -> None:
    """In K alone, in V alone, in both; a full last tile, a tail, one token, one more than a page. Also finite values
    that would decide a maximum which NaN does not."""
    inputs = problem(name, [512, 506, 1, 65])
    clean, _ = attended(name, with_hidden(inputs, 0, 0.0), spare)
    nan = flavour(arch_of(name)).nan_bytes[-1]
    for k, v, scale in ((True, False, torch.nan), (False, True, torch.nan), (True, True, torch.inf)):
        assert attended(name, with_hidden(inputs, nan, scale, k=k, v=v), spare)[0].same_as(clean)
    assert attended(name, with_hidden(inputs, 0x77, 1e9), spare)[0].same_as(clean)


@pytest.mark.parametrize("name", ["950-16-token-plain-25-window", "942-64-tensor-packed-24-window"])
def test_c21_edges_of_a_window_of_128(name: str) -> None:
    """Flat weights; the key before the window of the last row is large, the first in it is 1."""
    window, page, large = 128, CASES[name]["page"], flavour(arch_of(name)).max
    contexts = [1, 127, 128, 129, 255, 256, 300, 641]
    inputs = problem(name, contexts, window=window, kv_heads=1)
    v = torch.zeros((inputs.k_cache.shape[0], page, 1, 256))
    for row, context in zip(inputs.block_tables, contexts, strict=True):
        for token, value in ((context - 1 - window, large), (context - window, 1.0)):
            if token >= 0:
                v[row[token // page], token % page] = value
    form = pack_v(v.to(inputs.v_cache.dtype), packed=inputs.v_cache.dim() == 5)
    scales = {}
    for which in ("k_scale", "v_scale"):
        scales[which] = torch.ones_like(getattr(inputs, which))
    inputs = dataclasses.replace(inputs, v_cache=form, query=torch.zeros_like(inputs.query), **scales)
    out = whole(name, inputs)
    assert torch.allclose(out, reference.decode(inputs), rtol=2**-8, atol=0.0)
    last = out.unflatten(0, (len(contexts), -1))[:, -1, 0, 0].tolist()
    assert last == [0.0, 0.0, *[pytest.approx(1 / 128)] * 6]
    for context, rows in zip(contexts, out.unflatten(0, (len(contexts), -1)), strict=True):
        assert context <= window or float(rows[-2].min()) > 1.0, "its window begins one key before"
    own = dataclasses.replace(inputs, window=1, query=torch.ones_like(inputs.query))
    assert torch.equal(whole(name, own), reference.decode(own))


@pytest.mark.parametrize("name", ["950-64-token-packed-25-window", "942-16-token-packed-16"])
def test_c22_scales_of_zero_and_tiny_ones(name: str) -> None:
    """By token, in turns with usual ones, and for a whole sequence."""
    inputs = problem(name, [300, 40, 33], scale_spread=1.0)
    scales = {}
    for which in ("k_scale", "v_scale"):
        scale = getattr(inputs, which).clone()
        scale[:, :, 0::4], scale[:, :, 1::4] = 0.0, 2.0**-20
        for sequence, value in ((1, 0.0), (2, 2.0**-20)):
            scale[inputs.block_tables[sequence, : -(-40 // scale.shape[2])].long()] = value
        scales[which] = scale
    inputs = dataclasses.replace(inputs, **scales)
    got, work = attended(name, inputs)
    check_partials(inputs, work, got, sums=0.06)  # as where V scales are far apart


@pytest.mark.parametrize(
    "name",
    [
        "950-16-token-plain-25-window",
        "950-64-token-packed-25-window",
        "950-16-token-packed-32",
        "942-64-token-plain-16",
        "942-16-token-packed-16",
    ],
)
def test_c23_each_scale_is_that_of_its_token(name: str) -> None:
    probe, expected = scale_probe(problem(name, [256, 37, 200]))
    assert torch.allclose(whole(name, probe), expected, rtol=2**-7, atol=0.0)


# ------------------------------------------------------------------------------------------------ windows, long tasks


@pytest.mark.parametrize("name", ["950-16-token-plain-25-window", "950-64-token-packed-1-single"])
def test_t4_t6_a_short_window_beside_large_scales(name: str) -> None:
    """W = 257 and 1, of which every tile may be a task; V scales of 1e9 and large bytes on all tokens before it,
    ids of no page where no token of a page is seen."""
    single = name.endswith("single")
    for window in (257, 1):
        inputs = problem(name, [770, 513, 256, 3], window=window)
        spare = 8 if single else 0
        got, work = attended(name, inputs, spare)
        check_partials(inputs, work, got)
        assert not single or bool((work[:, 2] - work[:, 1] <= 1).all())
        for stale in (-1, 2**31 - 1, None):
            assert attended(name, with_hidden(inputs, 0x77, 1e9, stale=stale), spare)[0].same_as(got)


def test_t5_one_task_over_a_long_window() -> None:
    """W = 8193 over 33 tiles, by one workgroup."""
    name = "950-16-token-plain-25-window"
    inputs = problem(name, [8449], window=8193, kv_heads=1)
    got, work = attended(name, inputs, spare=0)
    assert work.tolist() == [[0, 0, 34, 8449]]
    check_partials(inputs, work, got)


@pytest.mark.parametrize("pages", [4096, 4097])
def test_a_task_of_so_many_pages(pages: int) -> None:
    """The same few pages over and over: the table is long, the cache is not."""
    name = "950-16-tensor-packed-16"
    inputs = problem(name, [500], kv_heads=1)
    draw = torch.Generator().manual_seed(3)
    table = torch.randint(0, inputs.k_cache.shape[0], (1, pages), generator=draw, dtype=torch.int32)
    lengths = torch.tensor([16 * pages - 7], dtype=torch.int32)
    inputs = dataclasses.replace(inputs, block_tables=table, seq_lens=lengths)
    got, work = attended(name, inputs, spare=0)
    assert len(work) == 1
    check_partials(inputs, work, got)


# ------------------------------------------------------------------------------------------------ draws


@pytest.mark.parametrize("name", ["950-16-token-plain-25-window", "950-16-tensor-packed-16", "942-64-token-plain-16"])
def test_any_lengths_windows_and_plans(name: str) -> None:
    """The same draws each time; sweep-gfx950 has more."""

    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(
        contexts=st.lists(st.integers(0, 600), min_size=1, max_size=4),
        window=st.integers(1, 600),
        spare=st.integers(0, 7),
        extra_width=st.integers(0, 3),
        kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
        seed=st.integers(0, 99),
    )
    def check(contexts: list[int], window: int, spare: int, extra_width: int, kv_heads: int, seed: int) -> None:
        changes = {"window": window} if "window" in name else {}
        inputs = problem(name, contexts, extra_width=extra_width, kv_heads=kv_heads, seed=seed, **changes)
        got, work = attended(name, inputs, spare)
        check_partials(inputs, work, got)

    check()
