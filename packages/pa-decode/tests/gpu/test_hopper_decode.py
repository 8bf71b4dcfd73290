"""The Hopper kernel: its accuracy, every number of rows, walks over many tasks, and what masked data must not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pa_decode import explain, pa_decode, reference
from pa_testing import arguments_of, make_inputs
from pa_testing.gpu_calls import on_gpu, planned

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)

TOLERANCE = 0.005
CONTEXTS = [2049, 0, 3, 256, 1000, 16, 770, 65, 1]


def problem(contexts: Sequence[int] = CONTEXTS, **options: Any) -> reference.DecodeInputs:
    return on_gpu(make_inputs(contexts, **({"head_dim": 256, "kv_heads": 2, "group": 8, "query_length": 4} | options)))


def run(inputs: reference.DecodeInputs, budget: int | None = None) -> Tensor:
    """One call, twice: into outputs full of NaN, with scratch full of NaN and with that of the first."""
    plan, workspace = planned(inputs, budget, kernel="hopper")
    outs = []
    for _ in range(2):
        out = torch.full_like(inputs.query, torch.nan)
        pa_decode(**arguments_of(inputs, plan=plan, workspace=workspace, out=out, kernel="hopper"))
        outs.append(out)
    assert torch.equal(*outs)
    return outs[0]


def near(out: Tensor, inputs: reference.DecodeInputs) -> bool:
    return torch.allclose(out.float(), reference.decode(inputs), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("query_length", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error(page: int, query_length: int, dtype: torch.dtype) -> None:
    inputs = problem([3000, 700], page=page, query_length=query_length, dtype=dtype, v_amplitude=1.0)
    assert explain(**arguments_of(inputs)).attention.kernel == "hopper"
    expected = reference.decode(inputs)
    assert (run(inputs).float() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    ("group", "query_length"),
    [
        (1, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (1, 8),
        (9, 1),
        (4, 4),
        (17, 1),
        (8, 3),
        (5, 5),
        (31, 1),
        (32, 1),
        (4, 8),
        (16, 2),
    ],
)
def test_rows(group: int, query_length: int) -> None:
    for page, window in ((16, 33), (64, 0)):
        inputs = problem(group=group, query_length=query_length, page=page, window=window, sinks=True)
        assert near(run(inputs), inputs)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("scale_mode", ["tensor", "token"])
@pytest.mark.parametrize("v_packed", [True, False])
@pytest.mark.parametrize("window", [0, 1, 17, 300])
def test_masked_data_reaches_nothing(page: int, scale_mode: str, v_packed: bool, window: int) -> None:
    """NaN in all bytes and scales that no query token sees, and ids of no page where no visible token is."""
    inputs = problem(page=page, scale_mode=scale_mode, v_packed=v_packed, window=window, scale_spread=16.0)
    inputs = replace(inputs, v_scale=inputs.v_scale / 16)
    out = run(inputs, 24)
    assert near(out, inputs) and not out[4:8].any()
    seen = torch.zeros(inputs.k_cache.shape[0], page, dtype=torch.bool, device="cuda")
    table = torch.full_like(inputs.block_tables, 2**31 - 1)
    for sequence, context in enumerate(inputs.seq_lens.tolist()):
        first = max(0, context - inputs.query_length - window + 1) if window else 0
        for token in range(first, context):
            table[sequence, token // page] = inputs.block_tables[sequence, token // page]
            seen[table[sequence, token // page], token % page] = True
    k, v = (x.view(torch.uint8).clone() for x in (inputs.k_cache, inputs.v_cache))
    k.permute(0, 3, 1, 2, 4)[~seen] = 0x7F
    if v_packed:
        v.permute(0, 2, 4, 1, 3)[~seen.view(-1, page // 16, 16)] = 0xFF
    else:
        v.permute(0, 3, 1, 2)[~seen] = 0xFF
    scales = [inputs.k_scale, inputs.v_scale]
    if scale_mode == "token":
        scales = [torch.where(seen.unsqueeze(1), x, torch.nan) for x in scales]
    dtype = inputs.k_cache.dtype
    poisoned = replace(
        inputs, k_cache=k.view(dtype), v_cache=v.view(dtype), block_tables=table, k_scale=scales[0], v_scale=scales[1]
    )
    assert torch.equal(run(poisoned, 24), out)


@pytest.mark.parametrize("window", [0, 5])
def test_zeros_and_signs(window: int) -> None:
    inputs = problem(window=window, v_amplitude=1 / 4)
    for changes in (
        {"query": torch.zeros_like(inputs.query)},
        {"k_scale": torch.zeros_like(inputs.k_scale)},
        {"v_scale": torch.zeros_like(inputs.v_scale)},
        {"softmax_scale": -inputs.softmax_scale},
        {"softmax_scale": 0.0},
    ):
        changed = replace(inputs, **changes)
        assert near(run(changed), changed)


@pytest.mark.parametrize("page", [16, 64])
def test_a_program_takes_many_tasks(page: int) -> None:
    """150 sequences, some empty, and budgets from one task each to more than two a multiprocessor."""
    contexts = [(37 * n * n) % 1500 if n % 7 else 0 for n in range(149)] + [9000]
    inputs = problem(contexts, page=page, sinks=True)
    for budget in (1, 330, 2000):
        assert near(run(inputs, budget), inputs)


def test_unused_slots_are_untouched() -> None:
    inputs = problem([300, 0, 5])
    plan, workspace = planned(inputs, kernel="hopper")
    pa_decode(**arguments_of(inputs, plan=plan, workspace=workspace, kernel="hopper"))
    used = int(plan.reduce_info[:, 1].sum())
    assert 0 < used < plan.capacity
    for part in workspace.parts.values():
        assert part[:, used:].isnan().all() and not part[:, :used].isnan().any()


def test_replays_are_the_eager_calls_bit_for_bit() -> None:
    inputs = problem(page=64, scale_mode="token", window=257, sinks=True)
    eager = run(inputs)
    plan, workspace = planned(inputs, kernel="hopper")
    out = torch.empty_like(inputs.query)
    given = arguments_of(inputs, plan=plan, workspace=workspace, out=out, kernel="hopper")
    pa_decode(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pa_decode(**given)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)


def test_large_block_ids() -> None:
    """Ids beyond 16 bits, pages beyond 2^31 bytes."""
    contexts, page = [130, 64], 64
    low = problem(contexts, page=page, query_length=1)
    blocks, heads = 70000, 2
    spread = torch.tensor([1, 65535, 65536, 65537, 69998, 69999], device="cuda")[: low.k_cache.shape[0]]
    k, v = (torch.empty(blocks, *x.shape[1:], dtype=torch.uint8, device="cuda") for x in (low.k_cache, low.v_cache))
    for large, small in ((k, low.k_cache), (v, low.v_cache)):
        large[spread] = small.view(torch.uint8)
    known = (low.block_tables >= 0) & (low.block_tables < spread.shape[0])
    ids = spread[low.block_tables.clamp(0, spread.shape[0] - 1).long()].int()
    high = replace(
        low,
        k_cache=k.view(low.k_cache.dtype),
        v_cache=v.view(low.v_cache.dtype),
        block_tables=torch.where(known, ids, -1),
    )
    assert k.numel() > 2**31 and heads == low.num_kv_heads
    assert torch.equal(run(high), run(low))


@pytest.mark.parametrize("query_length", [1, 4, 8])
def test_windows_longer_than_any_context_are_none(query_length: int) -> None:
    """In 32 bits the beginning of such a window is below -2^31 for contexts shorter than the query."""
    inputs = problem([1, 2, 5, 300], query_length=query_length, group=4, page=64)
    expected = run(inputs)
    assert near(expected, inputs)
    for window in (300, 2**31 - 1, 2**40):
        assert torch.equal(run(replace(inputs, window=window)), expected)
