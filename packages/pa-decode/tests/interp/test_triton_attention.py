"""The attention kernel against the oracle that rounds as it does, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pa_decode import pack_k, pack_v, unpack_k, unpack_v
from pa_decode.reference import DecodeInputs
from pa_testing import make_inputs
from pa_testing.attention import check_partials, work_of
from pa_testing.triton_kernels import attend_by, interpret

CASES: dict[str, dict[str, Any]] = {
    "packed": {"page": 16, "group": 4, "query_length": 2, "head_dim": 128},
    "plain": {"page": 64, "group": 5, "query_length": 3, "v_packed": False, "dtype": torch.float16},
    "window": {"page": 128, "group": 2, "query_length": 8, "window": 17, "scale_mode": "token", "scale_spread": 4.0},
    "plain window": {"page": 16, "window": 257, "scale_mode": "token", "v_packed": False, "head_dim": 256},
    "rows in turns": {"page": 64, "group": 10, "query_length": 4, "head_dim": 256, "scale_mode": "token"},
    "one row more than the pipe takes": {"page": 16, "group": 33, "head_dim": 256},
    "two turns of rows": {"page": 16, "group": 8, "query_length": 8, "head_dim": 256, "window": 40},
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    options = {"head_dim": 64, "kv_heads": 1, **CASES[case]}
    inputs = make_inputs([0, 1, 5, 322, 256], **options)
    work = work_of(inputs, 7)
    check_partials(inputs, work, attend_by(interpret, inputs, "sm90", work))


def repaged(inputs: DecodeInputs, page: int, v_packed: bool) -> DecodeInputs:
    """The same tokens in other pages: each page of the cache becomes several."""
    factor = inputs.k_cache.shape[3] // page
    k, v = (x.reshape(-1, page, *x.shape[2:]) for x in (unpack_k(inputs.k_cache), unpack_v(inputs.v_cache)))
    table = inputs.block_tables.clamp(max=inputs.k_cache.shape[0] - 1)
    table = (table[:, :, None] * factor + torch.arange(factor, dtype=torch.int32)).flatten(1)

    def split(scale: Any) -> Any:
        return scale.unflatten(2, (factor, page)).transpose(1, 2).flatten(0, 1).contiguous()

    return dataclasses.replace(
        inputs,
        k_cache=pack_k(k),
        v_cache=pack_v(v, packed=v_packed),
        block_tables=table,
        k_scale=split(inputs.k_scale),
        v_scale=split(inputs.v_scale),
    )


def test_bits_do_not_depend_on_pages_and_the_form_of_v() -> None:
    inputs = make_inputs([150, 70], page=128, kv_heads=1, group=4, head_dim=64, query_length=2, scale_mode="token")
    work = work_of(inputs, 2)
    expected = attend_by(interpret, inputs, "sm90", work)
    for page in (128, 64, 16):
        for v_packed in (True, False):
            assert attend_by(interpret, repaged(inputs, page, v_packed), "sm90", work).same_as(expected)


def test_a_query_at_any_address_and_huge_elements() -> None:
    """16-bit alignment is enough; a row with one huge element, one of zeros, one of infinity, and of NaN alone."""
    inputs = make_inputs([70], kv_heads=1, group=4, head_dim=64, dtype=torch.bfloat16)
    query = torch.zeros(1, 4, 66, dtype=torch.bfloat16)[:, :, 1:65]
    query.copy_(inputs.query)
    query[0, 0, 5], query[0, 1], query[0, 2, 7], query[0, 3, 0] = 3e4, 0.0, torch.inf, torch.nan
    inputs = dataclasses.replace(inputs, query=query)
    work = work_of(inputs, 1)
    got = attend_by(interpret, inputs, "sm90", work)
    assert got.out[0, 0, 3].isnan().all() and torch.isfinite(got.out[0, 0, :3]).all()
    first = dataclasses.replace(inputs, query=query[:, :3])
    check_partials(first, work, attend_by(interpret, first, "sm90", work))


@pytest.mark.parametrize(("page", "v_packed"), [(16, True), (64, False)])
@pytest.mark.parametrize("size", [1 << 31, 1 << 32])
def test_pages_beyond_2_and_4_gib(page: int, v_packed: bool, size: int) -> None:
    """Pages on both sides of the offset, scales too; of the memory between nothing is ever touched."""
    inputs = make_inputs(
        [3 * page - 5], page=page, kv_heads=2, group=2, head_dim=64, v_packed=v_packed, scale_mode="token"
    )
    work = work_of(inputs, 1)
    expected = attend_by(interpret, inputs, "sm90", work)
    ids = torch.tensor([0, size // (2 * page * 64) - 1, size // (2 * page * 64)])
    used = inputs.block_tables[0, :3].long()

    def far(x: Any) -> Any:
        placed = torch.empty((int(ids[-1]) + 1, *x.shape[1:]), dtype=x.dtype)
        for block, source in zip(ids.tolist(), used.tolist(), strict=True):
            placed[block].copy_(x[source])
        return placed

    table = inputs.block_tables.clone()
    table[0, :3] = ids
    moved = {name: far(getattr(inputs, name)) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    high = dataclasses.replace(inputs, block_tables=table, **moved)
    assert high.k_cache.numel() > size
    assert attend_by(interpret, high, "sm90", work).same_as(expected)
