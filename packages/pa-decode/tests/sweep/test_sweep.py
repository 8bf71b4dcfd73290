"""Every configuration of paged decode at head size 256 on gfx950, from the planner to the reducer; what its attention
kernels see at every edge; other groups, query lengths and numbers of KV heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_decode.reference import DecodeInputs
from pa_decode.schedule import PaDecodeSchedule
from pa_decode.traits import TILE, window_tiles
from pa_testing import geometry_of, make_inputs
from pa_testing.attention import attend, check_partials, flavour, spec_of, work_of
from pa_testing.configurations import (
    ARCH,
    AXES,
    COMPUTE_UNITS,
    CONFIGURATIONS,
    GROUP,
    TORCH,
    Configuration,
    one_per_kernel,
)
from pa_testing.pipe_cases import arch_of
from pa_testing.sentinels import edges, sentinels
from pa_testing.sweep_record import BEFORE, Run
from pa_testing.whole_calls import Expected, run, whole_call

_outputs: dict[tuple[object, ...], str] = {}
"""sha256 of the output by case, all of whose configurations run in one worker."""


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_configuration(configuration: Configuration, sweep: Run) -> None:
    """All that a call writes; pages of another size and V in the other form change no bit."""
    schedule = configuration.schedule()
    before = sweep.begin([schedule.attention, schedule.reduce, schedule.planner])
    if before is not None:
        _outputs.setdefault(configuration.case, before["output"])
        pytest.skip(BEFORE)
    output = sweep.noted["output"] = run(configuration)
    assert _outputs.setdefault(configuration.case, output) == output


WINDOWS = tuple(window for window in AXES["window"] if window)


@pytest.mark.parametrize("configuration", one_per_kernel(CONFIGURATIONS), ids=str)
def test_sentinels(configuration: Configuration, sweep: Run) -> None:
    """Every edge of every query token, of pages, tiles and tasks, for contexts that end around those of a tile."""
    spec = configuration.schedule().attention
    if sweep.begin([spec]) is not None:
        pytest.skip(BEFORE)
    length, page = configuration.length, configuration.page
    for window in WINDOWS if spec.windowed else (0,):
        contexts = [2 * TILE + more for more in (0, 1, length - 1, length, TILE - 1)]
        fixed = {0, page - 1, page, TILE - 1, TILE}
        if window > 2 * TILE:  # many tiles a sequence: the edges alone
            contexts, fixed = [window + TILE + 1], set()
        found = sentinels(
            [(context, place) for context in contexts for place in sorted(fixed | edges(context, length, window))],
            page=page,
            group=GROUP,
            query_length=length,
            window=window,
            scale_mode=configuration.mode,
            v_packed=configuration.form == "packed",
            flavour=flavour(ARCH),
            dtype=TORCH[configuration.dtype],
        )
        batch = len(found.places)
        capacity = batch * window_tiles(window, length) if spec.single_tile else batch + batch // 2
        work = work_of(found.inputs, capacity)
        found.check(work, attend(found.inputs, spec, work).out)


# ------------------------------------------------------------------------------------------------ other shapes

FORMS = AXES["form"]
BOUNDARIES: dict[str, dict[str, Any]] = {
    **{f"{pages}-pages-{form}": {"pages": pages, "form": form} for pages in (96, 4096, 4097) for form in FORMS},
    **{f"{heads}-heads-{mode}": {"kv_heads": heads, "mode": mode} for heads in (2, 4) for mode in AXES["mode"]},
    **{
        f"{group}x{length}-{form}": {"group": group, "length": length, "form": form}
        for group, length in ((4, 1), (16, 1), (16, 2), (32, 1), (4, 8))
        for form in FORMS
    },
}
"""Pages of 16 tokens that one task reads; KV heads; query heads per KV head x query tokens."""


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries(name: str, sweep: Run) -> None:
    """Whole calls, each second one made again as a graph would."""
    of = BOUNDARIES[name]
    pages, group, length = of.get("pages"), of.get("group", GROUP), of.get("length", 2)
    contexts = [700, 0, length - 1, 512, 17]
    inputs = make_inputs(
        contexts if pages is None else [500, 500],
        kv_heads=of.get("kv_heads", 1),
        group=group,
        head_dim=256,
        query_length=length,
        window=0 if pages else 257,
        scale_mode=of.get("mode", "token"),
        v_packed=of.get("form", "packed") == "packed",
        flavour=flavour(ARCH),
        sinks=True,
        v_amplitude=1 / 64,  # 1/16 is more than three deviations
        scale_spread=3.0,
    )
    inputs = dataclasses.replace(inputs, softmax_scale=1 / 32)
    if pages is not None:  # the same few pages over and over: the table is long, the cache is not
        draw = torch.Generator().manual_seed(pages)
        inputs = dataclasses.replace(
            inputs,
            block_tables=torch.randint(0, len(inputs.k_cache), (2, pages), generator=draw, dtype=torch.int32),
            seq_lens=torch.tensor([16 * pages - 7, 300], dtype=torch.int32),
        )
    geometry = geometry_of(inputs, ARCH, COMPUTE_UNITS)
    schedule = PaDecodeSchedule.select(geometry, budget=1)
    if sweep.begin([schedule.attention, schedule.reduce, schedule.planner]) is not None:
        pytest.skip(BEFORE)
    whole_call(inputs, 1, Expected.of(inputs), replayed=list(BOUNDARIES).index(name) % 2 == 1)


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
def test_rows(name: str, group: int, length: int, sweep: Run) -> None:
    """GQA groups and query lengths up to 32 rows, over any contexts, on both architectures."""
    arch, page, mode = arch_of(name), int(name.split("-")[1]), name.split("-")[2]

    def problem(contexts: list[int], window: int, seed: int) -> DecodeInputs:
        return make_inputs(
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

    spec = spec_of(problem([1], 1, 0), arch)
    if sweep.begin([spec]) is not None:
        pytest.skip(BEFORE)

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(
        contexts=st.lists(st.integers(0, 1100), min_size=1, max_size=4),
        spare=st.integers(0, 5),
        window=st.integers(1, 600),
        seed=st.integers(0, 99),
    )
    def check(contexts: list[int], spare: int, window: int, seed: int) -> None:
        inputs = problem(contexts, window, seed)
        work = work_of(inputs, len(contexts) + spare)
        check_partials(inputs, work, attend(inputs, spec, work))

    check()
