"""Faults that other implementations of paged decode have had, by the number of the case.

What only kernels can get wrong is in tests/emu/test_cases_emulate.py, with the same numbers. C21 (edges of a window) is
in test_reference, rounding of both flavours of FP8 (C22) in test_quantise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gdn_runtime.errors import UnsupportedError
from gdn_runtime.testing.launches import Launch, launching_nothing
from pa_decode import make_workspace, pa_decode, plan_decode, reference, select
from pa_decode.quantise import FN, FNUZ
from pa_testing import OracleKernels, arguments_of, geometry_of, make_inputs
from pa_testing.probes import expected_of_probe, scale_probe, with_hidden

EMULATE: dict[str, Any] = {"backend": "emulate", "arch": "gfx950"}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def decoded(
    inputs: reference.DecodeInputs, *, budget: int | None = None, fill: float = float("nan"), **changes: Any
) -> Tensor:
    """The call over a plan of so many tasks, with scratch and output full of ``fill``."""
    geometry = geometry_of(inputs, compute_units=256)
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, backend="emulate")
    workspace = make_workspace(plan, geometry)
    for part in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        part.fill_(fill)
    out = torch.full_like(inputs.query, fill)
    return pa_decode(**arguments_of(inputs, **EMULATE, plan=plan, workspace=workspace, out=out, **changes))


# ------------------------------------------------------------------------------------------------ C14


@contextmanager
def no_launches() -> Iterator[list[Launch]]:
    """The backend "emulate" launches nothing, whether it is installed or not."""
    select.forget()
    with mock.patch.object(select, "_is_installed", lambda package: True), launching_nothing() as launches:
        yield launches
    select.forget()


@pytest.mark.parametrize("given_out", [False, True])
def test_c14_a_warm_call_reads_no_tensor(given_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host part of refresh and call: what it would wait for on a GPU."""
    inputs = make_inputs([300, 0, 2], head_dim=256, group=8, query_length=4, scale_mode="token", sinks=True, window=17)
    geometry = geometry_of(inputs, compute_units=256)
    with no_launches() as launches:
        plan = plan_decode(inputs.seq_lens, geometry, backend="emulate")
        given = arguments_of(inputs, **EMULATE, plan=plan, workspace=make_workspace(plan, geometry))
        if given_out:
            given["out"] = torch.empty_like(inputs.query)
        pa_decode(**given)
        launches.clear()

        def never(self: Tensor, *args: object) -> None:
            raise AssertionError("a warm call read a tensor")

        for name in (
            "tolist",
            "item",
            "numpy",
            "cpu",
            "nonzero",
            "__bool__",
            "__int__",
            "__index__",
            "__float__",
            "to",
        ):
            monkeypatch.setattr(Tensor, name, never)
        plan.refresh(inputs.seq_lens)
        for _ in range(2):
            pa_decode(**given)
        monkeypatch.undo()
    assert [launch.spec.kernel for launch in launches] == ["planner", *["d256_pipe", "reducer"] * 2]


def test_c14_no_kernel_for_a_new_length() -> None:
    """Lengths, batches, widths of the table and numbers of blocks, as a server meets them; windows too."""
    found = set()
    with no_launches() as launches:
        for batch, length in enumerate((1, 17, 1000, 1008, 1016, 8191), 1):
            for window in (0, 100 + batch):
                inputs = make_inputs([length] * batch, head_dim=64, kv_heads=1, window=window)
                pa_decode(**arguments_of(inputs, **EMULATE))
                found |= {(window > 0, launch.spec) for launch in launches}
                launches.clear()
    assert len(found) == 6  # planner, attention and reducer, with and without a window


# ------------------------------------------------------------------------------------------------ C15


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("heads", [1, 2])
def test_c15_rows_of_any_width(oracle: OracleKernels, heads: int, page: int) -> None:
    inputs = make_inputs(
        [0, 1, 16, 1000, 4097], kv_heads=heads, group=16 // heads, head_dim=256, page=page, extra_width=0
    )
    assert inputs.block_tables.shape[1] == {16: 257, 64: 65}[page]
    expected = reference.decode(inputs)
    for stale in (-1, 2**31 - 1, None):
        padded = with_hidden(inputs, FN.nan_bytes[0], 1.0, stale=stale)
        assert padded.block_tables.stride(0) > padded.block_tables.shape[1]
        assert torch.equal(reference.decode(padded), expected)
        out = decoded(padded)
        assert torch.allclose(out.float(), expected, atol=0.005, rtol=0.005) and not out[0].any()
        assert same_bits(decoded(padded, sliding_window=-1), out)
    attention = [named for spec, _, named in oracle.launches if spec.kernel == "d256_pipe"]
    assert all(named["table_stride_row"] == 4 * padded.block_tables.stride(0) for named in attention)


# ------------------------------------------------------------------------------------------------ C17


@pytest.mark.parametrize(
    ("page", "query_length", "window", "flavour"),
    [(16, 1, 0, FN), (64, 2, 70, FN), (16, 4, 300, FN), (64, 1, 0, FNUZ), (16, 2, 70, FNUZ), (64, 3, 0, FN)],
)
def test_c17_garbage_in_unused_slots(page: int, query_length: int, window: int, flavour: Any) -> None:
    inputs = make_inputs(
        [1024, 1018, 1, 65], page=page, query_length=query_length, window=window, scale_mode="token", flavour=flavour
    )
    plan = plan_decode(inputs.seq_lens, geometry_of(inputs, head_dim=256), budget=16)
    clean = with_hidden(inputs, 0, 0.0)
    expected = reference.decode(clean), reference.decode_quantised(clean)
    parts = reference.partials(clean, plan.work_info, denominator="matched")
    for byte in flavour.nan_bytes:
        for k, v in ((True, False), (False, True), (True, True)):
            for scale in (float("nan"), float("inf")):
                dirty = with_hidden(inputs, byte, scale, k=k, v=v)
                assert torch.equal(reference.decode(dirty), expected[0])
                assert torch.equal(reference.decode_quantised(dirty), expected[1])
        got = reference.partials(dirty, plan.work_info, denominator="matched")
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(got, parts, strict=True))


# ------------------------------------------------------------------------------------------------ C18


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 128, "query_length": 4}])
def test_c18_every_number_of_splits(oracle: OracleKernels, options: dict[str, Any]) -> None:
    """Also with scratch that held NaN or something large."""
    contexts = [1, 0, 16, 8192 if "window" in options else 4096]
    inputs = make_inputs(contexts, kv_heads=1, group=2, head_dim=256, **options)
    one = decoded(inputs, budget=1)
    assert torch.allclose(one.float(), reference.decode(inputs), atol=0.005, rtol=0.005)
    rows = inputs.query_length
    for budget in (2, 8, 64, 256):
        out = decoded(inputs, budget=budget)
        assert torch.allclose(out.float(), one.float(), atol=1e-3, rtol=2**-6)
        assert not out[rows : 2 * rows].any() and same_bits(decoded(inputs, budget=budget, fill=1e30), out)


@pytest.mark.parametrize("budget", [1, 8])
def test_c18_very_negative_equal_logits(oracle: OracleKernels, budget: int) -> None:
    """Keys at the largest FP8 value against the query: scores of -7e6, of which the mean of V remains."""
    inputs = make_inputs([1, 0, 16, 1000], kv_heads=1, group=2, head_dim=256)
    blocks = inputs.k_cache.shape[0]
    k = torch.full((blocks, 1, 16, 16, 16), -FN.max).to(FN.dtype)
    low = replace(
        inputs, k_cache=k, k_scale=torch.ones(1), query=torch.full_like(inputs.query, 64.0), softmax_scale=1.0
    )
    still = replace(low, query=torch.zeros_like(inputs.query))
    assert torch.allclose(decoded(low, budget=budget).float(), reference.decode(still), atol=1e-3, rtol=2**-6)


# ------------------------------------------------------------------------------------------------ C22


@pytest.mark.parametrize(("arch", "own", "other"), [("gfx950", FN, FNUZ), ("gfx942", FNUZ, FN)])
def test_c22_flavours_of_an_architecture(oracle: OracleKernels, arch: str, own: Any, other: Any) -> None:
    inputs = make_inputs([40, 3], head_dim=256, group=8, scale_mode="token", flavour=own)
    given = arguments_of(inputs, backend="emulate", arch=arch)
    pa_decode(**given)
    oracle.launches.clear()
    for dtype, names in ((other.dtype, rf"got {other.dtype}, expected {own.dtype}"), (torch.uint8, "got torch.uint8")):
        caches = {name: getattr(inputs, name).view(dtype) for name in ("k_cache", "v_cache")}
        with pytest.raises(TypeError, match=rf"k_cache\.dtype: {names}"):
            pa_decode(**(given | caches))
    with pytest.raises(UnsupportedError, match=r"query\.dtype"):
        pa_decode(**(given | {"query": inputs.query.to(own.dtype)}))
    assert not oracle.launches


# ------------------------------------------------------------------------------------------------ C23


def test_c23_interleaved_halves_are_refused_or_packed(oracle: OracleKernels) -> None:
    """K and V in one storage, block by block: packed halves by their strides; unpacked ones are what pack_k reads."""
    inputs = make_inputs([40, 3], head_dim=256, group=8)
    both = torch.zeros((inputs.k_cache.shape[0], 2, *inputs.k_cache.shape[1:]), dtype=torch.uint8).view(FN.dtype)
    for name, half in zip(("k_cache", "v_cache"), both.unbind(1), strict=True):
        shaped = half.view(torch.uint8).view(FN.dtype).as_strided(getattr(inputs, name).shape, half.stride())
        with pytest.raises(ValueError, match=rf"{name}\.stride\(\)"):
            pa_decode(**arguments_of(inputs, **EMULATE, **{name: shaped}))
    unpacked = torch.zeros((4, 2, 16, 2, 256), dtype=torch.uint8).view(FN.dtype)
    with pytest.raises(NotImplementedError, match="pack_k"):
        pa_decode(**arguments_of(inputs, **EMULATE, k_cache=unpacked[:, 0], v_cache=unpacked[:, 1]))
    assert not oracle.launches


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("v_packed", [True, False])
def test_c23_each_scale_is_that_of_its_token(oracle: OracleKernels, page: int, v_packed: bool) -> None:
    """Also as views with an offset into something larger, and with two tokens' or two heads' scales swapped."""
    inputs = make_inputs(
        [256, 37, 0], page=page, head_dim=256, group=2, query_length=2, v_packed=v_packed, scale_mode="token"
    )
    probe, expected = scale_probe(inputs)
    out = decoded(probe)
    assert torch.allclose(out.float(), expected, rtol=2**-7, atol=0.0)
    assert isinstance(probe.k_scale, Tensor) and isinstance(probe.v_scale, Tensor)
    wide = torch.full((2, probe.k_scale.shape[0], 3, page + 4), float("nan"))
    wide[0, :, 1:, 4:], wide[1, :, 1:, 4:] = probe.k_scale, probe.v_scale
    assert same_bits(decoded(replace(probe, k_scale=wide[0, :, 1:, 4:], v_scale=wide[1, :, 1:, 4:])), out)
    block = int(probe.block_tables[0, 1])
    for axis in (1, 2):  # heads, tokens
        for name in ("k_scale", "v_scale"):
            scale = getattr(probe, name).clone()
            scale[block].select(axis - 1, 0).fill_(1.0)
            scale[block].select(axis - 1, 1).fill_(2.0)
            first = replace(probe, **{name: scale})
            swapped = scale.clone()
            index = torch.arange(scale.shape[axis])
            index[:2] = torch.tensor([1, 0])
            swapped[block] = swapped[block].index_select(axis - 1, index)
            second = replace(probe, **{name: swapped})
            results = decoded(first), decoded(second)
            for changed, result in zip((first, second), results, strict=True):
                assert torch.allclose(result.float(), expected_of_probe(changed), rtol=2**-7, atol=0.0)
            assert not torch.equal(*results)
