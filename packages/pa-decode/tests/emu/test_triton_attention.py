"""The Triton attention kernel as code objects: values, what is masked, and what must not change a bit.

Few specs, launched often: a compile costs as much as thirty launches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import env
from gdn_runtime.codeobject import code_object
from pa_decode.reference import DecodeInputs
from pa_testing import make_inputs
from pa_testing.attention import Partials, check_partials, flavour, spec_of, work_of
from pa_testing.triton_kernels import attend_by, emulate

CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("gfx942", "window"): {
        "head_dim": 128, "page": 16, "group": 5, "query_length": 4, "scale_mode": "token", "window": 257,
    },
    ("gfx942", "dense"): {"head_dim": 64, "page": 128, "group": 8, "v_packed": False, "dtype": torch.float16},
    ("gfx950", "window"): {
        "head_dim": 64, "page": 64, "group": 3, "query_length": 8, "scale_mode": "token", "window": 257,
        "v_packed": False, "dtype": torch.float16,
    },
    ("gfx950", "dense"): {"head_dim": 256, "page": 128, "group": 10, "query_length": 4},
}  # fmt: skip
"""By architecture, so that pages, forms of V, head sizes, types and scales all occur; rows in turns at 40 of 256."""


def problem(arch: str, case: str, contexts: list[int], **changes: Any) -> DecodeInputs:
    return make_inputs(contexts, kv_heads=2, flavour=flavour(arch), **{**CASES[arch, case], **changes})


@pytest.mark.parametrize("case", ["window", "dense"])
def test_values_and_facts(arch: str, case: str) -> None:
    inputs = problem(arch, case, [0, 1, 6, 600, 256], scale_spread=4.0)
    work = work_of(inputs, 8)
    got = attend_by(emulate(), inputs, arch, work)
    check_partials(inputs, work, got)
    assert attend_by(emulate("random"), inputs, arch, work).same_as(got)
    with env.override(jit=True):
        facts = code_object(spec_of(inputs, arch, kernel="attention")).facts
    assert (facts.scratch_bytes, facts.vgpr_spills) == (0, 0)


def poisoned(inputs: DecodeInputs, value: int, scale: float) -> DecodeInputs:
    """``value`` in every byte of a token that no row sees, ``scale`` as its scales; ids of such pages are stale."""
    k, v = inputs.k_cache.clone().view(torch.uint8), inputs.v_cache.clone().view(torch.uint8)
    scales = [s.clone() if isinstance(s, Tensor) and s.dim() > 1 else s for s in (inputs.k_scale, inputs.v_scale)]
    table = inputs.block_tables.clone()
    page = k.shape[3]
    for sequence, context in enumerate(inputs.seq_lens.tolist()):
        oldest = max(context - inputs.query_length - inputs.window + 1, 0) if inputs.window else 0
        for index in range(-(-context // page)):
            block, token = int(table[sequence, index]), index * page + torch.arange(page)
            hidden = (token < oldest) | (token >= context)
            k[block].transpose(1, 2)[:, hidden] = value
            if v.dim() == 5:
                v[block].transpose(2, 3)[:, hidden.view(-1, 16)] = value
            else:
                v[block][:, :, hidden] = value
            for s in scales:
                if isinstance(s, Tensor) and s.dim() > 1:
                    s[block][:, hidden] = scale
            if hidden.all():
                table[sequence, index] = -1
    dtype = inputs.k_cache.dtype
    return dataclasses.replace(
        inputs, k_cache=k.view(dtype), v_cache=v.view(dtype), k_scale=scales[0], v_scale=scales[1], block_tables=table
    )


@pytest.mark.parametrize("case", ["window", "dense"])
def test_what_no_row_sees_changes_no_bit(arch: str, case: str) -> None:
    """NaN bytes and scales of NaN and infinity behind a sequence and before its window, stale ids of its pages."""
    inputs = problem(arch, case, [600, 1, 65])
    work = work_of(inputs, 5)
    clean = attend_by(emulate(), poisoned(inputs, 0, 0.0), arch, work)
    check_partials(inputs, work, clean)
    for scale in (math.nan, math.inf):
        nan = poisoned(inputs, flavour(arch).nan_bytes[0], scale)
        assert attend_by(emulate("reverse"), nan, arch, work).same_as(clean)


def test_pages_anywhere_and_a_wider_table(arch: str) -> None:
    inputs = problem(arch, "window", [600, 70])
    work = work_of(inputs, 4)
    expected = attend_by(emulate(), inputs, arch, work)
    blocks = inputs.k_cache.shape[0]
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    table = torch.full((2, inputs.block_tables.shape[1] + 3), 2**31 - 1, dtype=torch.int32)[:, 1:]
    counts = [-(-int(context) // inputs.k_cache.shape[3]) for context in inputs.seq_lens]
    for row, count in enumerate(counts):
        table[row, :count] = order.argsort()[inputs.block_tables[row, :count].long()].to(torch.int32)
    assert isinstance(inputs.k_scale, Tensor) and isinstance(inputs.v_scale, Tensor)
    moved = dataclasses.replace(
        inputs,
        k_cache=inputs.k_cache[order],
        v_cache=inputs.v_cache[order],
        k_scale=inputs.k_scale[order],
        v_scale=inputs.v_scale[order],
        block_tables=table,
    )
    assert attend_by(emulate(), moved, arch, work).same_as(expected)


@pytest.mark.parametrize("window", [1, 17, 256, 2**31 - 1])
def test_windows_are_arguments(arch: str, window: int) -> None:
    """One code object for all; also masked tokens with finite scales that would hide every visible one."""
    inputs = problem(arch, "window", [3, 520, 769], window=window)
    work = work_of(inputs, 9)
    got = attend_by(emulate(), inputs, arch, work)
    check_partials(inputs, work, got)
    if window < 2**31 - 1:
        assert attend_by(emulate(), poisoned(inputs, 0x70, 1e9), arch, work).same_as(got)


@pytest.mark.parametrize("context", [256, 257, 516])
def test_sentinels_at_both_ends_of_the_window(arch: str, context: int) -> None:
    """V is zero but for one token, on an edge of some window, where it is 1: just the rows that see it are not zero."""
    inputs = problem(arch, "window", [context], window=100, scale_mode="token")
    queries, group = inputs.query_length, inputs.query.shape[1] // 2
    page = inputs.k_cache.shape[3]
    work = work_of(inputs, 3)
    for token in (context - queries - 99, context - queries - 100, context - 100, context - queries, context - 1):
        v = torch.zeros_like(inputs.v_cache.view(torch.uint8))
        block, slot = int(inputs.block_tables[0, token // page]), token % page
        one = 0x40 if flavour(arch).name == "fnuz" else 0x38
        if v.dim() == 5:
            v[block, :, slot // 16, :, slot % 16] = one
        else:
            v[block, :, :, slot] = one
        got = attend_by(emulate(), dataclasses.replace(inputs, v_cache=v.view(inputs.v_cache.dtype)), arch, work)
        position = context - queries + torch.arange(queries).repeat_interleave(group)
        visible = (token <= position) & (token > position - 100)
        assert torch.equal(_touched(got), visible.expand(2, -1))


def _touched(partials: Partials) -> Tensor:
    """Rows [Hkv, R] with an output that is not zero in some slot."""
    return (partials.out.nan_to_num() != 0).any(-1).any(1)
