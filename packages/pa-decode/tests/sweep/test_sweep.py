"""Every configuration of paged decode at head size 256 on gfx950, from the planner to the reducer, against fp32.

Two dtypes x two scale modes x two forms of V x query lengths 1 to 4 (8 heads per KV head) x windows 0, 1, 17, 257, 8193
x two budgets are 320, on pages of 16 and of 64. Values are at most 1/16: rounding the query and P to FP8 leaves more
than the tolerance of larger ones, where few tokens are seen.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_runtime.arch import KNOWN
from pa_decode import make_workspace, pa_decode, plan_decode, reference
from pa_decode.traits import window_tiles
from pa_testing import arguments_of, geometry_of, make_inputs
from pa_testing.attention import TOLERANCE, attend, check_partials, flavour, spec_of, work_of
from pa_testing.pipe_cases import arch_of

ARCH = "gfx950"
COMPUTE_UNITS = KNOWN[ARCH].nominal_compute_units or 1
WINDOWS = (0, 1, 17, 257, 8193)
CONFIGURATIONS = list(
    itertools.product(
        ("bf16", "fp16"), ("tensor", "token"), ("packed", "plain"), (1, 2, 3, 4), WINDOWS, ("small", "large")
    )
)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)), ids=["-".join(map(str, c)) for c in CONFIGURATIONS])
def test_configuration(number: int, page: int) -> None:
    dtype, mode, form, length, window, size = CONFIGURATIONS[number]
    contexts = [8449 if window > 257 else 770, 0, length - 1, 512, 17]
    heads = 1 + number % 2
    shape = sum(-(-context // page) for context in contexts), page, heads, 256
    draw = torch.Generator().manual_seed(1000 + number)
    inputs = make_inputs(
        contexts,
        kv_heads=heads,
        group=8,
        head_dim=256,
        page=page,
        query_length=length,
        window=window,
        scale_mode=mode,
        v_packed=form == "packed",
        flavour=flavour(ARCH),
        sinks=number % 3 == 0,
        dtype=torch.bfloat16 if dtype == "bf16" else torch.float16,
        k=torch.randn(shape, generator=draw),
        v=torch.rand(shape, generator=draw) / 8 - 1 / 16,
        seed=number,
    )
    tiles = window_tiles(window, length) if window else 0
    budget = 1 if size == "small" else inputs.num_kv_heads * len(contexts) * tiles or 2 * COMPUTE_UNITS
    geometry = geometry_of(inputs, arch=ARCH, compute_units=COMPUTE_UNITS)
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, backend="emulate")
    workspace = make_workspace(plan, geometry)
    for part in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        part.fill_(torch.nan)
    out = torch.full_like(inputs.query, torch.nan)
    given_ = {"backend": "emulate", "arch": ARCH, "plan": plan, "workspace": workspace, "out": out}
    pa_decode(**arguments_of(inputs, **given_))
    _check(out, inputs)
    used = int(plan.reduce_info[:, 1].sum())
    assert workspace.partial_out[:, used:].isnan().all()
    if number % 10 == 0:  # as a graph would replay it
        other = dataclasses.replace(inputs, query=inputs.query.flip(0).contiguous())
        pa_decode(**arguments_of(other, **given_))
        _check(out, other)


def _check(out: torch.Tensor, inputs: reference.DecodeInputs) -> None:
    expected = reference.decode(inputs)
    assert float(((out.float() - expected).abs() - TOLERANCE * expected.abs()).max()) <= TOLERANCE


ROWS = [
    (1, 1),
    (15, 1),
    (16, 1),
    (17, 1),
    (31, 1),
    (32, 1),
    (3, 5),
    (4, 4),
    (1, 8),
    (2, 8),
    (4, 8),
    (5, 6),
    (10, 3),
    (12, 2),
]


@pytest.mark.parametrize("name", ["950-16-token", "950-64-tensor", "942-64-token", "942-16-tensor"])
@pytest.mark.parametrize(("group", "length"), ROWS)
def test_rows(name: str, group: int, length: int) -> None:
    """GQA groups and query lengths up to 32 rows, over any contexts, on both architectures."""
    arch, page, mode = arch_of(name), int(name.split("-")[1]), name.split("-")[2]

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(
        contexts=st.lists(st.integers(0, 1100), min_size=1, max_size=4),
        spare=st.integers(0, 5),
        window=st.integers(1, 600),
        seed=st.integers(0, 99),
    )
    def check(contexts: list[int], spare: int, window: int, seed: int) -> None:
        inputs = make_inputs(
            contexts,
            kv_heads=2,
            group=group,
            head_dim=256,
            page=page,
            query_length=length,
            window=window,
            scale_mode=mode,
            v_packed=group % 2 == 0,
            flavour=flavour(arch),
            scale_spread=3.0,
            seed=seed,
        )
        work = work_of(inputs, len(contexts) + spare)
        check_partials(inputs, work, attend(inputs, spec_of(inputs, arch), work))

    check()
