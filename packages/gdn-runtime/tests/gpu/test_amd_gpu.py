"""FlyDSL kernels and bundles on an AMD card, launched through HIP. The emulator's suite runs this file too, with the
emulator in the card's place: what is right is decided there, and here whether the card agrees.

Tests named smoke ask for nothing but what every bundle of the packaged tables has: they run with GDN_JIT=0 as well.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd_h, env, warmup
from gdn_runtime.codeobject.bundle import bundles
from gdn_runtime.errors import CaptureError, MissingCodeObjectError
from gdn_runtime.ops.backends import stages
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, make_inputs
from gdn_testing import code_object_specs, problem_of, run_stages
from gdn_testing.card import Card

BF16, FP32 = torch.bfloat16, torch.float32
TOL = {"gfx942": 1e-2, "gfx950": 5e-3}
"""Relative L2 error against fp64, as on the emulator (tests/emu/test_block_emulate.py), where it was measured."""
HEADS = 8, 2
"""Of a row of the packaged tables."""
LENS = [70, 0, 1, 129]
SLOTS = 6
INDICES = (5, 2, -1, 0)


def inputs_on(card: Card, lens: Any = LENS, heads: tuple[int, int] = (4, 2), **options: Any) -> GdnInputs:
    return make_inputs(lens, *heads, **{"state": "random", **options}, device=card.device)


def run(card: Card, x: GdnInputs, **options: Any) -> tuple[Tensor, Tensor]:
    given = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens, **card.options}
    o, final = chunk_gated_delta_rule(*x.tensors, **given, **options)
    assert final is not None
    card.wait()
    return o, final


def exact(x: GdnInputs, states: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    return recurrent_gated_delta_rule(*x.tensors, initial_state=states, cu_seqlens=x.cu_seqlens, **options)


def close(card: Card, got: tuple[Tensor, ...], expected: tuple[Tensor, ...], names: tuple[str, ...]) -> None:
    for a, b, name in zip(got, expected, names, strict=True):
        assert_close_rel(a.cpu(), b.cpu(), TOL[card.arch], name)


class PoolCall:
    """A call as a server makes it: metadata, states in slots of a pool; slots nobody owns hold NaN."""

    def __init__(self, card: Card, seed: int = 0) -> None:
        self.card, self.x = card, inputs_on(card, heads=HEADS, seed=seed, normalize=False)
        self.indices = torch.tensor(INDICES, dtype=torch.int32, device=card.device)
        self.pool = torch.full((SLOTS, HEADS[0], 128, 128), float("nan"), device=card.device)
        for n, slot in enumerate(INDICES):
            if slot >= 0:
                self.pool[slot] = self.x.initial_state[n]
        self.o = torch.zeros_like(self.x.v)
        self.metadata = build_prefill_metadata(self.x.seq_lens, cu_seqlens=self.x.cu_seqlens)

    def __call__(self) -> Tensor:
        o, states = chunk_gated_delta_rule(
            *self.x.tensors, o=self.o, cu_seqlens=self.x.cu_seqlens, prefill_metadata=self.metadata,
            initial_state=self.pool, initial_state_indices=self.indices, output_final_state=True,
            use_qk_l2norm_in_kernel=True, **self.card.options,
        )  # fmt: skip
        assert states is self.pool and o is self.o
        return o

    def check(self, before: Tensor) -> None:
        """What a call gave that began with the pool ``before``."""
        self.card.wait()
        known = [n for n, slot in enumerate(INDICES) if slot >= 0]
        slots = [INDICES[n] for n in known]
        states = torch.zeros_like(self.x.initial_state)
        states[known] = before[slots]
        o, final = exact(self.x, states, use_qk_l2norm=True)
        close(self.card, (self.o, self.pool[slots]), (o, final[known]), ("o", "states"))
        for slot in set(range(SLOTS)) - set(slots):
            assert_bitwise_equal(self.pool[slot].cpu(), before[slot].cpu(), f"slot {slot}, which nobody owns")


# ------------------------------------------------------------------------------------------------ from any bundle


def test_smoke_a_ragged_batch_over_a_pool(card: Card) -> None:
    """Two calls: the second goes on from the states of the first."""
    call = PoolCall(card)
    for _ in range(2):
        before = call.pool.clone()
        call()
        call.check(before)


def test_smoke_capture_and_replay_with_other_values(card: Card) -> None:
    call = PoolCall(card)
    start = call.pool.clone()
    call()
    replay = card.replay_of(call)
    for seed in range(1, 3):
        other = PoolCall(card, seed=seed)
        for name in ("q", "k", "v", "g", "beta"):
            getattr(call.x, name).copy_(getattr(other.x, name))
        call.x.initial_state.copy_(other.x.initial_state)
        call.pool.copy_(start)
        call.o.fill_(float("nan"))
        replay()
        call.check(start)


def test_smoke_warm_up(card: Card) -> None:
    """Everything of a bundle is loaded; a call of it then loads nothing, and gives what it gave before."""
    if not bundles(card.arch):
        pytest.skip("no bundle: GDN_BUNDLE names none")
    done = warmup(card.device, arch=None if card.is_real else card.arch)
    assert done.arch == card.arch and done.kernels > 0 and done.code_bytes > 0
    first, second = PoolCall(card), PoolCall(card)
    assert_bitwise_equal(first().cpu(), second().cpu(), "a repeat")


def test_smoke_nothing_may_be_compiled(card: Card) -> None:
    """Heads that no table lists: the error names the kernel, and nothing was written."""
    x = inputs_on(card, [70], (6, 3))
    o = torch.full_like(x.v, 7.0)
    with env.override(jit=False, jit_cache_dir=""), pytest.raises(MissingCodeObjectError, match=card.arch):
        # Another signature than that of any other call here: one that was compiled before is served.
        run(card, x, o=o, use_qk_l2norm_in_kernel=True, use_exp2=False)
    card.wait()
    assert bool((o == 7.0).all())


# ------------------------------------------------------------------------------------------------ compiled here


@pytest.fixture
def may_compile() -> None:
    if not env.settings().jit:
        pytest.skip("GDN_JIT=0: these kernels are of no bundle")


@pytest.mark.usefixtures("may_compile")
@pytest.mark.parametrize("route", ["staged", "tprime"])
@pytest.mark.parametrize("layout", [LENS, (2, 100)], ids=["packed", "dense"])
def test_block_by_route(card: Card, route: str, layout: Any) -> None:
    x = inputs_on(card, layout)
    with env.override(amd_route=route):
        got = run(card, x)
        again = run(card, x)
    close(card, got, exact(x, x.initial_state), ("o", "states"))
    for a, b, name in zip(got, again, ("o", "states"), strict=True):
        assert_bitwise_equal(a.cpu(), b.cpu(), f"{name} of a repeat")


@pytest.mark.usefixtures("may_compile")
@pytest.mark.parametrize(("snapshot", "state"), [(FP32, FP32), (BF16, BF16)], ids=["fp32", "bf16"])
def test_block_by_dtype(card: Card, snapshot: torch.dtype, state: torch.dtype) -> None:
    x = inputs_on(card, state_dtype=state)
    o, final = run(card, x, snapshot_dtype=snapshot)
    assert final.dtype == state
    close(card, (o, final), exact(x, x.initial_state), ("o", "states"))


@pytest.mark.usefixtures("may_compile")
@pytest.mark.parametrize("variant", ["wave", "group"])
def test_stages_by_variant_of_prepare(card: Card, variant: Any) -> None:
    """w, u and the gates against the reference on the same inputs, rounding where it does."""
    from gdn_runtime import reference

    x = inputs_on(card, [70, 64, 1])
    specs = code_object_specs(problem_of(x, arch=card.arch), variant=variant, block_v=64, rounding="nearest")
    got = run_stages(stages(card.options["backend"]), x, specs=specs)
    card.wait()
    expected = run_stages(reference, x)
    for name in ("w", "u", "g_cumsum"):
        assert_close_rel(getattr(got, name).cpu(), getattr(expected, name).cpu(), 5e-3, name)
    close(card, (got.o[:, : x.num_tokens], got.final_state), exact(x, x.initial_state), ("o", "states"))


@pytest.mark.usefixtures("may_compile")
@pytest.mark.parametrize(
    ("options", "bound"),
    [({"rounding": "nearest", "block_v": width}, 2e-3) for width in (16, 32, 64)]
    + [({"rounding": "truncate", "block_v": 64}, 1e-2), ({"kernel": "vk"}, 2e-3)],
    ids=["opt-16", "opt-32", "opt-64", "opt-truncate", "vk"],
)
def test_scan_by_kernel(card: Card, options: dict[str, Any], bound: float) -> None:
    if options.get("kernel") == "vk" and card.arch == "gfx942":
        pytest.skip("vk is for gfx950")
    x = inputs_on(card, [70, 0, 65], (2, 1))
    draw = torch.Generator().manual_seed(0)
    rows = 1, 2, x.num_tokens, 128
    w, u = (0.1 * torch.randn(rows, generator=draw, dtype=BF16).to(card.device) for _ in range(2))
    gates = -torch.rand(1, x.num_tokens, 2, generator=draw).to(card.device)
    given = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens}
    got = chunk_gated_delta_rule_fwd_h(x.k, w, u, gates, **given, **card.options, **options)
    card.wait()
    expected = chunk_gated_delta_rule_fwd_h(x.k, w, u, gates, **given, backend="reference")
    for name, a, b in zip(("h", "v_new", "states"), got, expected, strict=True):
        assert_close_rel(a.cpu(), b.cpu(), bound, name)


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
    call, twin = PoolCall(real), PoolCall(Card(torch.device("cpu"), real.arch))
    o, expected = call(), twin()
    real.wait()
    assert_close_rel(o.cpu(), expected, 1e-3, "o")


def test_smoke_nothing_is_loaded_into_a_graph(real: Card) -> None:
    """A kernel that a capture would have to load is an error that says so, and the capture goes on."""
    call = PoolCall(real)
    call()
    backend: Any = stages("flydsl")
    backend.kernels.clear()
    counter = torch.zeros((), device=real.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError):
            call()
        counter.add_(1)
    graph.replay()
    real.wait()
    assert counter.item() == 1
    before = call.pool.clone()
    call()
    call.check(before)


def test_smoke_streams_and_threads(real: Card) -> None:
    """Calls of two threads, each on a stream and data of its own, give what they give alone."""
    calls = [PoolCall(real, seed=seed) for seed in range(2)]
    starts = [call.pool.clone() for call in calls]
    expected = [call().clone() for call in calls]
    real.wait()
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    calls[n].pool.copy_(starts[n])
                    calls[n]()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for call, right in zip(calls, expected, strict=True):
        assert_bitwise_equal(call.o.cpu(), right.cpu(), "o")


def test_smoke_a_warm_call_does_not_wait(real: Card) -> None:
    call = PoolCall(real)
    call()
    real.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
