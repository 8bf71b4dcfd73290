"""Paged decode on an AMD card, launched through HIP, from the planner kernel to the reducer. The emulator's suite runs
this file too, with the emulator in the card's place.

Tests named smoke ask for nothing but what every bundle of the packaged tables has: they run with GDN_JIT=0 as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.arch import KNOWN, compute_units
from gdn_runtime.errors import CaptureError
from gdn_testing.card import Card
from pa_decode import FLAVOURS, DecodePlan, DecodeWorkspace, make_workspace, pa_decode, plan_decode, reference
from pa_testing import arguments_of, geometry_of, make_inputs

TOLERANCE = 0.005
"""Absolute and relative, V being of amplitude 1/16: against the oracle that rounds the query and P to FP8 as kernels
do, and against fp32 in sequences of ``MANY`` tokens, where rounding averages out."""
MANY = 200
CONTEXTS = [300, 0, 1, 256]
SERVED: dict[str, Any] = {"head_dim": 256, "kv_heads": 2, "group": 8, "page": 16, "query_length": 4}
"""Of a row of the packaged tables, whatever the batch."""
PROBLEMS: dict[str, dict[str, Any]] = {
    "dense": {"page": 16, "query_length": 2, "sinks": True},
    "window": {"page": 64, "query_length": 2, "window": 257, "scale_mode": "token", "v_packed": False},
    "generic": {"head_dim": 64, "group": 3, "query_length": 2, "sinks": True, "dtype": torch.float16},
}


def problem(card: Card, contexts: list[int], **options: Any) -> reference.DecodeInputs:
    fp8 = KNOWN[card.arch].fp8
    assert fp8 is not None
    inputs = make_inputs(contexts, flavour=FLAVOURS[fp8], **options)
    moved = {name: value.to(card.device) for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return replace(inputs, **moved)


def planned(card: Card, inputs: reference.DecodeInputs, budget: int) -> tuple[DecodePlan, DecodeWorkspace]:
    """A plan, and a workspace full of NaN."""
    units = compute_units(card.device) if card.is_real else KNOWN[card.arch].nominal_compute_units
    geometry = geometry_of(inputs, arch=card.arch, compute_units=units or 1)
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, backend=card.options["backend"])
    workspace = make_workspace(plan, geometry)
    for part in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        part.fill_(torch.nan)
    return plan, workspace


def arguments(card: Card, inputs: reference.DecodeInputs, budget: int = 6) -> dict[str, Any]:
    plan, workspace = planned(card, inputs, budget)
    out = torch.full_like(inputs.query, torch.nan)
    return arguments_of(inputs, **card.options, plan=plan, workspace=workspace, out=out)


def near(out: Tensor, inputs: reference.DecodeInputs) -> bool:
    rounded = torch.isclose(out.float(), reference.decode_quantised(inputs), atol=TOLERANCE, rtol=TOLERANCE)
    close = torch.isclose(out.float(), reference.decode(inputs), atol=TOLERANCE, rtol=TOLERANCE)
    many = (inputs.seq_lens >= MANY).repeat_interleave(inputs.query_length).to(out.device)
    return bool(rounded.all() and close[many].all())


# ------------------------------------------------------------------------------------------------ from any bundle


def test_smoke_a_ragged_batch(card: Card) -> None:
    """Empty, shorter than the query, ending on a tile; the plan is that of the integer oracle."""
    inputs = problem(card, CONTEXTS, **SERVED)
    given = arguments(card, inputs)
    out = pa_decode(**given)
    card.wait()
    assert out is given["out"] and near(out, inputs)
    assert not out[inputs.query_length : 2 * inputs.query_length].any()
    plan = given["plan"]
    host = replace(plan, work_info=plan.work_info.cpu(), reduce_info=plan.reduce_info.cpu(), backend="reference")
    host.refresh(inputs.seq_lens.cpu())
    assert torch.equal(plan.work_info.cpu(), host.work_info) and torch.equal(plan.reduce_info.cpu(), host.reduce_info)
    given["out"].fill_(torch.nan)
    again = pa_decode(**given).clone()
    card.wait()
    assert near(again, inputs)


def test_smoke_capture_and_replay_with_other_values(card: Card) -> None:
    """Queries, tables and, with the refresh in the graph, lengths change between replays; scratch holds NaN."""
    inputs = problem(card, CONTEXTS, **SERVED)
    given = arguments(card, inputs)
    plan, workspace, out = given["plan"], given["workspace"], given["out"]

    def call() -> None:
        plan.refresh(inputs.seq_lens)
        pa_decode(**given)

    call()
    replay = card.replay_of(call)
    for lengths in ([256, 1, 0, 300], [0, 0, 0, 0]):
        for x in (inputs.query, inputs.block_tables):
            x.copy_(x.flip(0))
        inputs.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for part in (workspace.partial_out, workspace.partial_max, workspace.partial_sum, out):
            part.fill_(torch.nan)
        replay()
        card.wait()
        assert near(out, inputs)
        inputs.block_tables.copy_(inputs.block_tables.flip(0))
    assert not out.any()


# ------------------------------------------------------------------------------------------------ compiled here


@pytest.fixture
def may_compile() -> None:
    if not env.settings().jit:
        pytest.skip("GDN_JIT=0: these kernels are of no bundle")


@pytest.mark.usefixtures("may_compile")
@pytest.mark.parametrize("case", PROBLEMS)
def test_values(card: Card, case: str) -> None:
    """The pipe dense and with a window, and the kernel for everything else, by budgets of one task and of many."""
    inputs = problem(card, CONTEXTS, **{"head_dim": 256, "group": 8, "kv_heads": 1, **PROBLEMS[case]})
    outs = []
    for budget in (1, 6):
        given = arguments(card, inputs, budget)
        outs.append(pa_decode(**given))
        card.wait()
        used = int(given["plan"].reduce_info[:, 1].sum())
        assert near(outs[-1], inputs) and bool(given["workspace"].partial_out[:, used:].isnan().all())
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=1e-3, rtol=2**-6)


@pytest.mark.usefixtures("may_compile")
def test_without_a_plan(card: Card) -> None:
    inputs = problem(card, [300, 40], **SERVED)
    out = pa_decode(**arguments_of(inputs, **card.options))
    card.wait()
    assert near(out, inputs)


# ------------------------------------------------------------------------------------------------ of a card alone


@pytest.fixture
def real(card: Card) -> Card:
    if not card.is_real:
        pytest.skip("needs a card")
    return card


@pytest.mark.usefixtures("may_compile")
def test_as_the_emulator(real: Card) -> None:
    """The same code objects on both: they differ by the order in which matrix instructions add, if at all."""
    pytest.importorskip("cdna_emu")
    twin = Card(torch.device("cpu"), real.arch)
    out, expected = (pa_decode(**arguments(each, problem(each, CONTEXTS, **SERVED))) for each in (real, twin))
    real.wait()
    assert torch.allclose(out.cpu().float(), expected.float(), atol=1e-4, rtol=2**-7)


def test_smoke_capture_refuses_what_a_graph_must_not_hold(real: Card) -> None:
    inputs = problem(real, CONTEXTS, **SERVED)
    given = arguments(real, inputs)
    pa_decode(**given)
    real.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="making a plan"):
            pa_decode(**{**given, "plan": None})
        pa_decode(**given)
    given["out"].fill_(torch.nan)
    graph.replay()
    real.wait()
    assert near(given["out"], inputs)


def test_smoke_streams(real: Card) -> None:
    """Calls on streams of their own, in turns, give what they give alone."""
    given = [arguments(real, problem(real, CONTEXTS, seed=seed, **SERVED)) for seed in range(2)]
    expected = [pa_decode(**each).clone() for each in given]
    real.wait()
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(20):
        for each, stream in zip(given, streams, strict=True):
            with torch.cuda.stream(stream):
                pa_decode(**each)
    real.wait()
    assert all(torch.equal(each["out"], right) for each, right in zip(given, expected, strict=True))
