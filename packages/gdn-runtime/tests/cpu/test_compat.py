"""aiter's entry point: the argument order that its callers pin, and switches that are refused instead of ignored."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from gdn_runtime import UnsupportedError, build_prefill_metadata, chunk_gated_delta_rule, chunk_gated_delta_rule_opt_vk
from gdn_runtime.ops import compat
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, make_inputs

PINNED = (
    "q",
    "k",
    "v",
    "o",
    "g",
    "beta",
    "scale",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "cu_seqlens",
    "use_chunk_hip",
    "use_chunk_flydsl",
    "state_dtype",
    "use_exp2",
    "num_decodes",
    "num_decode_tokens",
)
"""The 17 arguments that callers pass by position, as the entry point had them before it grew use_prepare_flydsl."""


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last call handed to the block, by name; the block itself does not run."""
    seen: dict[str, Any] = {}

    def block(*args: object, **kwargs: object) -> tuple[str, str]:
        bound = inspect.signature(chunk_gated_delta_rule).bind(*args, **kwargs)
        seen.update(bound.arguments)
        return "o", "final_state"

    monkeypatch.setattr(compat, "chunk_gated_delta_rule", block)
    return seen


def test_the_pinned_order() -> None:
    parameters = inspect.signature(chunk_gated_delta_rule_opt_vk).parameters
    positional = [p.name for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == PINNED
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for name, p in parameters.items() if name not in PINNED)


def test_each_positional_argument_lands_where_it_should(forwarded: dict[str, Any]) -> None:
    values = {name: object() for name in PINNED}
    values |= {"use_chunk_hip": False, "use_chunk_flydsl": False}  # type: ignore[dict-item]
    assert chunk_gated_delta_rule_opt_vk(*values.values()) == ("o", "final_state")  # type: ignore[arg-type, comparison-overlap]
    for name in PINNED:
        if not name.startswith("use_chunk"):
            assert forwarded[name] is values[name], name
    assert (forwarded["backend"], forwarded["prepare_backend"]) == ("auto", None)


@pytest.mark.parametrize(
    "name", ["seq_lens_cpu", "prefill_metadata", "initial_state_indices", "inplace_final_state", "snapshot_dtype"]
)
def test_each_keyword_lands_where_it_should(forwarded: dict[str, Any], name: str) -> None:
    value = object()
    chunk_gated_delta_rule_opt_vk(None, None, None, g=1, beta=1, **{name: value})  # type: ignore[arg-type]
    assert forwarded[name] is value


def test_the_pinned_call_gives_what_the_block_gives() -> None:
    x = make_inputs([70, 0, 10], state="random")
    o = torch.zeros_like(x.v)
    got, state = chunk_gated_delta_rule_opt_vk(
        x.q,
        x.k,
        x.v,
        o,
        x.g,
        x.beta,
        0.25,
        x.initial_state,
        True,
        True,
        x.cu_seqlens,
        False,
        False,
        torch.float32,
        False,
        0,
        0,
    )
    expected = block(x, scale=0.25, use_qk_l2norm_in_kernel=True, use_exp2=False)
    assert got is o and state is not None
    assert_bitwise_equal(o, expected[0], "o")
    assert_bitwise_equal(state, expected[1], "final_state")


def test_keywords_of_a_serving_framework() -> None:
    x = make_inputs([70, 0, 10], state="random")
    assert x.initial_state is not None and x.cu_seqlens is not None
    pool = torch.zeros(6, 4, 128, 128)
    pool[[5, 0, 2]] = x.initial_state
    cu = torch.tensor([0, 1, 71, 71, 81], dtype=torch.int32)
    metadata = build_prefill_metadata([1, 70, 0, 10], cu_seqlens=cu, num_decodes=1, num_decode_tokens=1)
    o, state = chunk_gated_delta_rule_opt_vk(
        q=x.q,
        k=x.k,
        v=x.v,
        g=x.g,
        beta=x.beta,
        initial_state=pool,
        output_final_state=True,
        cu_seqlens=cu,
        num_decodes=1,
        num_decode_tokens=1,
        prefill_metadata=metadata,
        initial_state_indices=torch.tensor([5, 0, 2], dtype=torch.int32),
        snapshot_dtype=torch.float32,
    )
    expected = block(x)
    assert state is pool
    assert_bitwise_equal(o, expected[0], "o")
    assert_bitwise_equal(pool[[5, 0, 2]], expected[1], "slots")


def block(x: GdnInputs, **options: Any) -> Any:
    return chunk_gated_delta_rule(
        *x.tensors, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens, **options
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("use_chunk_hip", "backend on cpu: got 'hip', supported: reference (available"),
        ("use_chunk_flydsl", "backend on cpu: got 'flydsl', supported: reference (available"),
        ("use_prepare_flydsl", "prepare_backend on cpu: got 'flydsl', supported: reference (available"),
    ],
)
def test_c09_backends_that_are_not_there_are_refused_by_name(flag: str, message: str) -> None:
    x = make_inputs((1, 63), 1, 1, state="random")
    o = torch.full_like(x.v, 7.0)
    with pytest.raises(UnsupportedError, match="^" + re.escape(message)):
        chunk_gated_delta_rule_opt_vk(
            x.q, x.k, x.v, o, x.g, x.beta, initial_state=x.initial_state, output_final_state=True, **{flag: True}
        )
    assert (o == 7).all()


@pytest.mark.parametrize("missing", ["g", "beta"])
def test_gates_are_required(missing: str) -> None:
    x = make_inputs((1, 10))
    given = {"g": x.g, "beta": x.beta} | {missing: None}
    with pytest.raises(TypeError, match=rf"^{missing}: got None, expected a torch.Tensor \[B,T,H\]$"):
        chunk_gated_delta_rule_opt_vk(x.q, x.k, x.v, **given)


def test_both_backends_at_once() -> None:
    x = make_inputs((1, 10))
    with pytest.raises(ValueError, match=r"^use_chunk_hip and use_chunk_flydsl: got both True, expected at most one"):
        chunk_gated_delta_rule_opt_vk(x.q, x.k, x.v, None, x.g, x.beta, use_chunk_hip=True, use_chunk_flydsl=True)


def test_shifted_positional_arguments_do_not_pass() -> None:
    """The order that has use_prepare_flydsl in 14th place puts a bool where state_dtype is."""
    x = make_inputs((1, 10))
    head = (x.q, x.k, x.v, None, x.g, x.beta, None, None, True, False, None, False, False)
    with pytest.raises(ValueError, match=r"^state_dtype: got True, expected float32 or bfloat16$"):
        chunk_gated_delta_rule_opt_vk(*head, True, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^use_chunk_hip: got dtype, expected bool$"):
        chunk_gated_delta_rule_opt_vk(*head[:11], torch.float32)  # type: ignore[arg-type]
