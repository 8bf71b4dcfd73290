"""Warm calls of K5: refused like cold ones, and the launches of code objects that they make."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import UnsupportedError, build_prefill_metadata, chunk_gated_delta_rule_fwd_h, env, select
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.spec import OptStateScanSpec, VkStateScanSpec
from gdn_runtime.testing import assert_bitwise_equal, make_inputs
from gdn_runtime.testing.launches import Launch, launching_nothing
from gdn_testing.refusals import Args

BF16 = torch.bfloat16
LENS = [70, 0, 65]


def packed() -> Args:
    """A legal call over a pool, with metadata."""
    x = make_inputs(LENS, 4, 2, state="random", spare_rows=2)
    assert x.cu_seqlens is not None
    w = torch.zeros(1, 4, x.k.shape[1], 128, dtype=BF16)
    return {
        "k": x.k,
        "w": w,
        "u": w.clone(),
        "g": torch.zeros(1, x.k.shape[1], 4),
        "gk": torch.zeros(1, x.k.shape[1], 4, 128),
        "initial_state": torch.zeros(5, 4, 128, 128),
        "initial_state_indices": torch.tensor([3, -1, 0], dtype=torch.int32),
        "has_initial_state": torch.ones(3, dtype=torch.bool),
        "output_final_state": True,
        "cu_seqlens": x.cu_seqlens,
        "prefill_metadata": build_prefill_metadata(LENS, cu_seqlens=x.cu_seqlens),
    }


def plan_of(args: Args) -> ChunkPlan:
    (plan,) = args["prefill_metadata"].schedule._plans.values()
    return plan


def edited(x: Tensor) -> Tensor:
    """The same offsets, written again."""
    return x.copy_(x.clone())


CHANGES: list[Any] = [
    ("k", lambda x: x.half(), TypeError),
    ("k", lambda x: x.repeat(1, 1, 2, 1)[:, :, :3], ValueError),
    ("k", lambda x: torch.stack((x, x), -1)[..., 0], ValueError),
    ("k", lambda x: x[:, :-5], ValueError),
    ("k", lambda x: x[0, 0, 0], ValueError),
    ("w", lambda x: x.to("meta"), ValueError),
    ("w", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError),
    ("u", lambda x: x.float(), TypeError),
    ("u", None, TypeError),
    ("g", lambda x: x.mT.contiguous().mT, ValueError),
    ("g", lambda x: 0.0, TypeError),
    ("gk", lambda x: x[:, 1:], ValueError),
    ("initial_state", lambda x: x.half(), TypeError),
    ("initial_state", lambda x: x.transpose(2, 3), ValueError),
    ("initial_state_indices", lambda x: x.short(), TypeError),
    ("initial_state_indices", lambda x: x[:2], ValueError),
    ("has_initial_state", lambda x: x.int(), TypeError),
    ("has_initial_state", lambda x: x.to("meta"), ValueError),
    ("cu_seqlens", lambda x: x.clone(), ValueError),
    ("cu_seqlens", edited, ValueError),
    ("prefill_metadata", lambda x: 1, TypeError),
    ("output_final_state", lambda x: 1, TypeError),
    ("save_new_value", lambda x: 1, TypeError),
    ("use_exp2", lambda x: 1, TypeError),
    ("g_head_major", lambda x: 0, TypeError),
    ("inplace_final_state", lambda x: 1, TypeError),
    ("check_indices", lambda x: 0, TypeError),
    ("num_decodes", lambda x: False, TypeError),
    ("chunk_size", lambda x: 32, UnsupportedError),
    ("backend", lambda x: "flydsl", UnsupportedError),
    ("backend", lambda x: ["reference"], TypeError),
    ("kernel", lambda x: "vk", UnsupportedError),
    ("block_v", lambda x: 32, UnsupportedError),
]


@pytest.mark.parametrize(("name", "change", "error"), CHANGES, ids=[f"{k}-{c[0]}" for k, c in enumerate(CHANGES)])
def test_refused_after_a_legal_call(name: str, change: Any, error: type[Exception]) -> None:
    args = packed()
    # Every option in the call, so that a changed one differs in its value alone.
    args |= {"save_new_value": True, "use_exp2": True, "g_head_major": False, "inplace_final_state": True}
    args |= {"check_indices": False, "num_decodes": 0, "chunk_size": 64}
    chunk_gated_delta_rule_fwd_h(**args)
    chunk_gated_delta_rule_fwd_h(**args)
    assert len(plan_of(args).warm) == 1
    with pytest.raises(error, match=": got "):
        chunk_gated_delta_rule_fwd_h(**args | {name: None if change is None else change(args.get(name))})


def test_gradients_are_refused_after_a_legal_call() -> None:
    args = packed()
    chunk_gated_delta_rule_fwd_h(**args)
    u = args["u"].clone().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"^u\.requires_grad in grad mode"):
        chunk_gated_delta_rule_fwd_h(**args | {"u": u})
    with torch.no_grad():
        chunk_gated_delta_rule_fwd_h(**args | {"u": u})


def test_index_values_are_checked_on_every_call_that_asks() -> None:
    args = packed() | {"check_indices": True}
    chunk_gated_delta_rule_fwd_h(**args)
    assert not plan_of(args).warm
    with pytest.raises(ValueError, match=r"^initial_state_indices\[0\]: got 5"):
        chunk_gated_delta_rule_fwd_h(**args | {"initial_state_indices": torch.tensor([5, 1, 0])})


def test_settings_of_the_moment_count() -> None:
    args = packed()
    chunk_gated_delta_rule_fwd_h(**args)
    with env.override(backend="triton"), pytest.raises(UnsupportedError, match=r"^GDN_BACKEND on cpu: got 'triton'"):
        chunk_gated_delta_rule_fwd_h(**args)
    with env.override(check_indices=True), pytest.raises(ValueError, match="more than once"):
        chunk_gated_delta_rule_fwd_h(**args | {"initial_state_indices": torch.tensor([1, 1, 0], dtype=torch.int32)})


def test_a_warm_call_gives_what_a_cold_one_gives() -> None:
    x = make_inputs((2, 100), 4, 2, state="random")
    w, u = torch.randn(2, 2, 4, 100, 128, generator=torch.Generator().manual_seed(1)).bfloat16() / 12
    args: Args = {"k": x.k, "w": w, "u": u, "initial_state": x.initial_state, "output_final_state": True}
    first = chunk_gated_delta_rule_fwd_h(**args)
    for _ in range(2):
        again = chunk_gated_delta_rule_fwd_h(
            **{name: t.clone() if isinstance(t, Tensor) else t for name, t in args.items()}
        )
        for name, a, b in zip(("h", "v_new", "final_state"), again, first, strict=True):
            assert a is not None and b is not None and a.data_ptr() != b.data_ptr()
            assert_bitwise_equal(a, b, name)
            assert a.is_contiguous()


def test_a_cold_call_allocates_its_outputs_and_no_more(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are the largest tensor of a prefill: not once more to look at."""
    made: list[int] = []

    def noting(allocate: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = allocate(*args, **kwargs)
            made.append(x.numel())
            return x

        return noted

    for name in ("empty", "empty_like", "zeros"):
        monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
    args = packed() | {"backend": "emulate", "arch": "gfx950"}
    made.clear()
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(**args)
    assert v_new is not None and sorted(n for n in made if n > 1) == sorted((h.numel(), v_new.numel()))


# ------------------------------------------------------------------------------------------------ launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What the backend "emulate" would launch."""
    monkeypatch.setattr(select, "_has_emulator", lambda: True)
    with launching_nothing() as recorded:
        yield recorded


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_arguments_of_opt(launches: list[Launch], index_dtype: torch.dtype) -> None:
    args = packed()
    storage = torch.zeros(5, 6, 128, 128)
    args |= {"initial_state": storage[:, :4], "initial_state_indices": torch.tensor([3, -1, 0], dtype=index_dtype)}
    for _ in range(2):
        h, v_new, final = chunk_gated_delta_rule_fwd_h(**args, backend="emulate", arch="gfx950", block_v=32)
        schedule = args["prefill_metadata"].schedule
        launch = launches.pop()
        assert not launches and isinstance(launch.spec, OptStateScanSpec)
        assert launch.grid == (4, 3 * 4, 1)
        k = args["k"]
        assert launch.values() == {
            "k": address(k),
            "w": address(args["w"]),
            "u": address(args["u"]),
            "g": address(args["g"]),
            "gk": address(args["gk"]),
            "h": address(h),
            "v_new": address(v_new),
            "initial_state": address(storage),
            "final_state": address(final),
            "state_indices": address(args["initial_state_indices"]),
            "has_initial_state": address(args["has_initial_state"]),
            "cu_seqlens": address(schedule.kernel_cu_seqlens),
            "chunk_offsets": address(schedule.chunk_offsets),
            "k_stride_b": 0,
            "k_stride_h": 256,
            "initial_stride": 6 * 65536,
            "final_stride": 6 * 65536,
            "seq_len": k.shape[1],
            "k_stride_t": 512,
            "num_slots": 5,
            "index_bytes": torch.tensor([], dtype=index_dtype).element_size(),
        }
    assert len(plan_of(args).warm) == 1


def test_arguments_of_a_dense_call_without_states(launches: list[Launch]) -> None:
    x = make_inputs((2, 100), 4, 2)
    w, u = torch.zeros(2, 2, 4, 100, 128, dtype=BF16)
    k = torch.zeros(2, 100, 3, 256, dtype=BF16)[:, :, :2, :128]
    for _ in range(2):
        h, v_new, final = chunk_gated_delta_rule_fwd_h(
            k, w, u, output_final_state=True, save_new_value=False, backend="emulate", arch="gfx942", state_dtype=BF16
        )
        values = launches.pop().values()
        assert v_new is None and final is not None and final.dtype == BF16
        absent = (
            "g",
            "gk",
            "v_new",
            "initial_state",
            "state_indices",
            "has_initial_state",
            "cu_seqlens",
            "chunk_offsets",
        )
        assert not any(values[name] for name in absent)
        strides = {"k_stride_b": 100 * 768 * 2, "k_stride_t": 768 * 2, "k_stride_h": 512, "final_stride": 4 * 32768}
        assert {name: values[name] for name in strides} == strides
        assert (values["h"], values["final_state"], values["seq_len"]) == (address(h), address(final), 100)
    assert x.k.shape == k.shape


@pytest.mark.parametrize("wide", [128, 130])
def test_rows_off_16_bytes_are_copied(launches: list[Launch], wide: int) -> None:
    """An odd address, with the strides of a contiguous tensor and with others, also when the signature is known."""
    args = packed()
    del args["gk"]
    shape = args["k"].shape
    storage = torch.zeros(shape[0] * shape[1] * shape[2] * wide + 1, dtype=BF16)
    k = storage[1:].view(*shape[:3], wide)[..., :128]
    for odd in (args["k"], k, k):
        chunk_gated_delta_rule_fwd_h(**args | {"k": odd}, backend="emulate", arch="gfx950")
        values = launches.pop().values()
        assert int(values["k"]) % 16 == 0
        assert (values["k_stride_t"], values["k_stride_h"]) == (512, 256)


def test_arguments_of_vk(launches: list[Launch]) -> None:
    args = packed()
    for name in ("initial_state_indices", "has_initial_state", "gk"):
        del args[name]
    args["initial_state"] = args["initial_state"][:3]
    for _ in range(2):
        h, v_new, final = chunk_gated_delta_rule_fwd_h(**args, backend="emulate", arch="gfx950", kernel="vk")
        launch = launches.pop()
        assert isinstance(launch.spec, VkStateScanSpec)
        schedule = args["prefill_metadata"].schedule
        expected = {
            "k": args["k"],
            "w": args["w"],
            "u": args["u"],
            "g": args["g"],
            "gk": None,
            "h": h,
            "v_new": v_new,
            "initial_state": args["initial_state"],
            "final_state": final,
            "cu_seqlens": schedule.kernel_cu_seqlens,
            "chunk_offsets": schedule.chunk_offsets,
        }
        numbers = {"k_stride_b": 0, "k_stride_h": 256, "seq_len": args["k"].shape[1], "k_stride_t": 512}
        assert launch.values() == {name: address(x) for name, x in expected.items()} | numbers


def test_no_sequence_and_no_launch(launches: list[Launch]) -> None:
    k = torch.zeros(0, 64, 1, 128, dtype=BF16)
    w = torch.zeros(0, 2, 64, 128, dtype=BF16)
    h, _, _ = chunk_gated_delta_rule_fwd_h(k, w, w, backend="emulate", arch="gfx950")
    assert not launches and h.shape == (0, 1, 2, 128, 128)


@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_a_dense_plan_keeps_no_tensor_of_its_calls_alive(launches: list[Launch], backend: str) -> None:
    """Plans of dense calls are shared by all batches of a shape, and live as long as the process."""
    x = make_inputs((2, 30), 4, 2, state="random")
    args: Args = {
        "k": x.k,
        "w": torch.zeros(2, 4, 30, 128, dtype=BF16),
        "u": torch.zeros(2, 4, 30, 128, dtype=BF16),
        "g": torch.zeros(2, 30, 4),
        "initial_state": torch.zeros(5, 4, 128, 128),
        "initial_state_indices": torch.tensor([3, 0], dtype=torch.int32),
        "has_initial_state": torch.ones(2, dtype=torch.bool),
        "output_final_state": True,
        "backend": backend,
        "arch": "gfx950" if backend == "emulate" else None,
    }
    del x
    for _ in range(2):
        chunk_gated_delta_rule_fwd_h(**args)
    alive = {name: weakref.ref(value) for name, value in args.items() if isinstance(value, Tensor)}
    assert len(alive) == 7 and len(launches) == (2 if backend == "emulate" else 0)
    args.clear()
    launches.clear()
    gc.collect()
    assert [name for name, reference in alive.items() if reference() is not None] == []
