"""Warm calls of the block: refused like cold ones, equal to them, and holding on to nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import UnsupportedError, build_prefill_metadata, chunk_gated_delta_rule, env, select
from gdn_runtime.plan import MAX_WARM, ChunkPlan
from gdn_runtime.testing import assert_bitwise_equal, make_inputs
from gdn_runtime.testing.launches import Launch, launching_nothing
from gdn_testing.refusals import NAMES, Args, gap_in_rows, meta

BF16 = torch.bfloat16
LENS = [70, 0, 65]


def packed() -> Args:
    """A legal call over a pool, with metadata and every option, so that a changed one differs in its value alone."""
    x = make_inputs(LENS, 4, 2, state="random", spare_rows=2)
    assert x.cu_seqlens is not None
    return dict(zip(NAMES, x.tensors, strict=True)) | {
        "scale": 0.1,
        "o": torch.zeros_like(x.v),
        "initial_state": torch.zeros(5, 4, 128, 128),
        "initial_state_indices": torch.tensor([3, -1, 0], dtype=torch.int32),
        "has_initial_state": torch.ones(3, dtype=torch.bool),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": x.cu_seqlens,
        "prefill_metadata": build_prefill_metadata(LENS, cu_seqlens=x.cu_seqlens),
        "use_exp2": True,
        "inplace_final_state": True,
        "check_indices": False,
        "num_decodes": 0,
        "backend": "reference",
    }


def plan_of(args: Args) -> ChunkPlan:
    (plan,) = args["prefill_metadata"].schedule._plans.values()
    return plan


CHANGES: list[Any] = [
    ("q", lambda x: x.half(), TypeError),
    ("q", lambda x: x[0, 0, 0], ValueError),
    ("q", gap_in_rows, ValueError),
    ("k", lambda x: x[:, :, :1], ValueError),
    ("k", meta, ValueError),
    ("k", lambda x: x[0], ValueError),
    ("v", lambda x: x[..., :64], ValueError),
    ("v", lambda x: x.repeat(1, 1, 2, 1)[:, :, :5], ValueError),
    ("v", lambda x: None, TypeError),
    ("g", lambda x: x.bfloat16(), TypeError),
    ("g", lambda x: 0.0, TypeError),
    ("beta", lambda x: x[:, :-1], ValueError),
    ("beta", lambda x: x.double(), TypeError),
    ("beta", meta, ValueError),
    ("o", lambda x: x[:, :-1], ValueError),
    ("o", lambda x: 1, TypeError),
    ("initial_state", lambda x: x.half(), TypeError),
    ("initial_state", lambda x: x.transpose(2, 3), ValueError),
    ("initial_state", lambda x: None, ValueError),
    ("initial_state_indices", lambda x: x.short(), TypeError),
    ("initial_state_indices", lambda x: x[:2], ValueError),
    ("has_initial_state", lambda x: x.int(), TypeError),
    ("cu_seqlens", lambda x: x.clone(), ValueError),
    ("cu_seqlens", lambda x: x.copy_(x.clone()), ValueError),
    ("prefill_metadata", lambda x: 1, TypeError),
    ("scale", lambda x: float("nan"), ValueError),
    ("scale", lambda x: "0.1", TypeError),
    ("output_final_state", lambda x: 1, TypeError),
    ("use_qk_l2norm_in_kernel", lambda x: 1, TypeError),
    ("use_exp2", lambda x: 1, TypeError),
    ("inplace_final_state", lambda x: 1, TypeError),
    ("check_indices", lambda x: 0, TypeError),
    ("num_decodes", lambda x: False, TypeError),
    ("num_decodes", lambda x: 1, ValueError),
    ("backend", lambda x: "flydsl", UnsupportedError),
    ("backend", lambda x: ["reference"], TypeError),
    ("prepare_backend", lambda x: "flydsl", UnsupportedError),
]


@pytest.mark.parametrize(("name", "change", "error"), CHANGES, ids=[f"{k}-{c[0]}" for k, c in enumerate(CHANGES)])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_refused_after_a_legal_call(grad: bool, name: str, change: Any, error: type[Exception]) -> None:
    with torch.set_grad_enabled(grad):
        args = packed()
        for _ in range(2):
            chunk_gated_delta_rule(**args)
        assert len(plan_of(args).warm) == 1
        with pytest.raises(error, match=": got "):
            chunk_gated_delta_rule(**args | {name: change(args.get(name))})


@pytest.mark.parametrize("name", ["q", "v", "initial_state"])
def test_an_output_over_an_input_is_refused_after_a_legal_call(name: str) -> None:
    args = packed()
    chunk_gated_delta_rule(**args)
    shape, size = args["v"].shape, args["v"].numel()
    storage = args[name].view(BF16) if name == "initial_state" else torch.zeros(2 * size, dtype=BF16)
    if name != "initial_state":
        args[name] = storage[: args[name].numel()].view(args[name].shape)
    with pytest.raises(ValueError, match=f"^o: got memory shared with {name}"):
        chunk_gated_delta_rule(**args | {"o": storage.flatten()[:size].view(shape)})


def test_gradients_are_refused_after_a_legal_call() -> None:
    args = packed()
    chunk_gated_delta_rule(**args)
    for name in ("beta", "o"):
        x = args[name].clone().requires_grad_()
        with pytest.raises(UnsupportedError, match=rf"^{name}\.requires_grad in grad mode"):
            chunk_gated_delta_rule(**args | {name: x})
        with torch.no_grad():
            chunk_gated_delta_rule(**args | {name: x})


def test_settings_of_the_moment_count() -> None:
    args = packed() | {"backend": "auto", "check_indices": None}
    chunk_gated_delta_rule(**args)
    with env.override(backend="triton"), pytest.raises(UnsupportedError, match=r"^GDN_BACKEND on cpu: got 'triton'"):
        chunk_gated_delta_rule(**args)
    with env.override(check_indices=True), pytest.raises(ValueError, match="more than once"):
        chunk_gated_delta_rule(**args | {"initial_state_indices": torch.tensor([1, 1, 0], dtype=torch.int32)})


def test_a_warm_call_gives_what_a_cold_one_gives() -> None:
    """Other tensors, another caller's output or none, slots and mask of another batch."""
    args = packed()
    first = args["o"].clone(), args["initial_state"].clone()
    for k in range(4):
        fresh: Args = {
            name: t.clone() if name != "cu_seqlens" and isinstance(t, Tensor) else t for name, t in args.items()
        }
        fresh["initial_state"] = first[1].clone()
        if k % 2:
            fresh["o"] = None
        o, pool = chunk_gated_delta_rule(**fresh)
        assert pool is fresh["initial_state"] and (k % 2 or o is fresh["o"])
        if k == 0:
            first_o, first_pool = o.clone(), pool.clone()
        assert_bitwise_equal(o, first_o, "o")
        assert_bitwise_equal(pool, first_pool, "pool")
    assert len(plan_of(args).warm) == 1
    moved = args | {"initial_state": torch.zeros(5, 4, 128, 128), "o": None}
    moved |= {"initial_state_indices": torch.tensor([0, 1, 4], dtype=torch.int32)}
    moved |= {"has_initial_state": torch.zeros(3, dtype=torch.bool)}
    _, pool = chunk_gated_delta_rule(**moved)
    assert pool is not None and pool[0].any() and pool[4].any() and not pool[[1, 2, 3]].any()
    assert len(plan_of(args).warm) == 1


# ------------------------------------------------------------------------------------------------ launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What the backend "emulate" would launch."""
    monkeypatch.setattr(select, "_has_emulator", lambda: True)
    with launching_nothing() as recorded:
        yield recorded


@pytest.mark.parametrize("route", ["staged", "tprime"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_warm_launches_are_those_of_cold_calls(launches: list[Launch], l2norm: bool, route: str) -> None:
    """The same kernels and numbers, and addresses of the tensors at hand."""
    args = packed() | {"backend": "emulate", "arch": "gfx950", "use_qk_l2norm_in_kernel": l2norm}
    with env.override(amd_route=route):
        chunk_gated_delta_rule(**args)
        cold = launches.copy()
        launches.clear()
        moved = args | {name: args[name].clone() for name in (*NAMES, "o", "initial_state", "has_initial_state")}
        chunk_gated_delta_rule(**moved)
    assert len(cold) == 3 + l2norm == len(launches) and len(plan_of(args).warm) == 1
    for a, b in zip(cold, launches, strict=True):
        assert (a.spec, a.grid) == (b.spec, b.grid)
        pointers = {argument.name for argument in a.spec.ARGUMENTS if argument.kind == "pointer"}
        before, after = a.values(), b.values()
        assert {n: x for n, x in before.items() if n not in pointers} == {
            n: x for n, x in after.items() if n not in pointers
        }
    scan = launches[-2].values()
    assert scan["initial_state"] == scan["final_state"] == moved["initial_state"].data_ptr()
    assert scan["has_initial_state"] == moved["has_initial_state"].data_ptr()
    assert launches[-1].values()["o"] == moved["o"].data_ptr()
    if not l2norm:
        assert scan["k"] == moved["k"].data_ptr()


@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_a_dense_plan_keeps_no_tensor_of_its_calls_alive(launches: list[Launch], backend: str) -> None:
    x = make_inputs((2, 30), 4, 2, state="random")
    args: Args = dict(zip(NAMES, x.tensors, strict=True)) | {
        "o": torch.zeros_like(x.v),
        "initial_state": torch.zeros(5, 4, 128, 128),
        "initial_state_indices": torch.tensor([3, 0], dtype=torch.int32),
        "has_initial_state": torch.ones(2, dtype=torch.bool),
        "output_final_state": True,
        "backend": backend,
        "arch": "gfx950" if backend == "emulate" else None,
    }
    del x
    for _ in range(2):
        chunk_gated_delta_rule(**args)
    alive = {name: weakref.ref(value) for name, value in args.items() if isinstance(value, Tensor)}
    assert len(alive) == 9
    args.clear()
    launches.clear()
    gc.collect()
    assert [name for name, reference in alive.items() if reference() is not None] == []


def test_what_a_plan_knows_is_bounded(launches: list[Launch]) -> None:
    """A caller that hands in a pool of another size each time."""
    args = packed() | {"backend": "emulate", "arch": "gfx950"}
    pool = torch.zeros(MAX_WARM + 10, 4, 128, 128)
    for slots in range(4, len(pool)):
        chunk_gated_delta_rule(**args | {"initial_state": pool[:slots]})
        assert 0 < len(plan_of(args).warm) <= MAX_WARM
    assert len(launches) == 4 * (len(pool) - 4)
