"""What the block launches on the backends of code objects, argument by argument; nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gdn_runtime import UnsupportedError, build_prefill_metadata, chunk_gated_delta_rule, select
from gdn_runtime.codeobject.stages.kernels import MAX_TOKEN_STRIDE, gates, rows
from gdn_runtime.testing import GdnInputs, make_inputs
from gdn_runtime.testing.launches import Launch, launching_nothing

BF16 = torch.bfloat16
LENS = [70, 0, 65]
NAMES = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What the backend "emulate" would launch."""
    monkeypatch.setattr(select, "_has_emulator", lambda: True)
    select._select.cache_clear()
    with launching_nothing() as recorded:
        yield recorded
    select._select.cache_clear()


def run(x: GdnInputs, arch: str = "gfx950", **options: Any) -> tuple[Any, Any]:
    tensors = {name: options.pop(name, t) for name, t in zip(NAMES, x.tensors, strict=True)}
    options = {"cu_seqlens": x.cu_seqlens, "backend": "emulate", "arch": arch} | options
    return chunk_gated_delta_rule(*tensors.values(), **options)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_launches_of_a_block(launches: list[Launch], arch: str) -> None:
    x = make_inputs(LENS, 4, 2, spare_rows=3)
    run(x, arch, use_qk_l2norm_in_kernel=True)
    assert [launch.spec.kernel for launch in launches] == ["l2norm", "prepare", "state_scan_opt", "output"]
    assert {launch.spec.arch for launch in launches} == {arch}
    norm, prepare, scan, output = (launch.values() for launch in launches)
    rows = x.q.shape[1]
    assert launches[0].grid == (-(-rows * 2 // 32), 2, 1)
    assert (norm["num_rows"], norm["seq_len"], norm["stride_qt"], norm["stride_qh"]) == (2 * rows, rows, 32, 16)
    assert launches[1].grid == (4, 4, 1)  # "group": chunks, value heads
    assert launches[2].grid == (8, 12, 1)  # block_v = 16; three sequences
    assert launches[3].grid == (2 * 4 * 4, 1, 1)  # block_v = 64
    for name in ("w", "u", "g_cumsum"):
        assert prepare[name] == scan[{"g_cumsum": "g"}.get(name, name)] != 0
    assert scan["v_new"] == scan["u"] == output["v_new"]  # in place
    assert (scan["h"], scan["g"]) == (output["h"], output["g"])
    assert prepare["k"] == scan["k"] == output["k"] == norm["k_out"] and output["q"] == norm["q_out"]
    assert (output["T"], prepare["seq_len"], scan["seq_len"]) == (rows, rows, rows)
    assert output["scale"] == pytest.approx(128**-0.5)
    assert not any(scan[name] for name in ("gk", "initial_state", "final_state", "state_indices", "num_slots"))


def test_strides_of_fused_rows(launches: list[Launch]) -> None:
    """q, k and v as views of one tensor, gates of any stride; bytes for FlyDSL, units of 8 elements for Triton."""
    x = make_inputs((2, 100), 4, 2)
    fused = torch.zeros(2, 100, 8 * 128 + 64, dtype=BF16)
    q, k, v = fused[..., :1024].unflatten(-1, (8, 128)).split((2, 2, 4), dim=2)
    g = torch.zeros(2, 4, 100).transpose(1, 2)
    beta = torch.zeros(2, 100, 8, dtype=BF16)[..., ::2]
    o = torch.zeros(2, 100, 4, 256, dtype=BF16)[..., :128]
    out, _ = run(x, q=q, k=k, v=v, g=g, beta=beta, o=o, cu_seqlens=None)
    assert out is o
    prepare, scan, output = (launch.values() for launch in launches)
    token, batch = 1088 * 2, 108800 * 2
    expected = {
        "k": k.data_ptr(),
        "v": v.data_ptr(),
        "k_stride_b": batch,
        "k_stride_t": token,
        "k_stride_h": 256,
        "v_stride_b": batch,
        "v_stride_t": token,
        "v_stride_h": 256,
        "g_stride_b": 1600,
        "g_stride_t": 4,
        "g_stride_h": 400,
        "beta_stride_b": 1600,
        "beta_stride_t": 16,
        "beta_stride_h": 4,
        "cu_seqlens": 0,
        "sequence_ids": 0,
        "chunk_ids": 0,
    }
    assert {name: prepare[name] for name in expected} == expected
    assert launches[0].grid == (2, 4, 2)  # chunks of a row, value heads, rows
    assert (scan["k_stride_b"], scan["k_stride_t"], scan["k_stride_h"]) == (batch, token, 256)
    assert (output["q"], output["o"]) == (q.data_ptr(), o.data_ptr())
    for name in "qk":
        strides = tuple(output[f"stride_{name}{axis}"] for axis in "bth")
        assert strides == (batch // 16, token // 16, 16)
    assert tuple(output[f"stride_o{axis}"] for axis in "bth") == (100 * 4 * 256 // 8, 4 * 256 // 8, 256 // 8)


def test_the_schedule_is_the_metadatas(launches: list[Launch]) -> None:
    x = make_inputs(LENS, 4, 2, spare_rows=3)
    assert x.cu_seqlens is not None
    metadata = build_prefill_metadata(LENS, cu_seqlens=x.cu_seqlens)
    for _ in range(2):
        run(x, prefill_metadata=metadata)
    schedule = metadata.schedule
    for launch in launches:
        values = launch.values()
        for name, tensor in (
            ("cu_seqlens", schedule.kernel_cu_seqlens),
            ("chunk_offsets", schedule.chunk_offsets),
            ("sequence_ids", schedule.sequence_ids),
            ("chunk_ids", schedule.chunk_ids),
        ):
            assert values.get(name, tensor.data_ptr()) == tensor.data_ptr(), (launch.spec.kernel, name)
    assert len(launches) == 6


def test_empty_sequences_only_copy_states(launches: list[Launch]) -> None:
    x = make_inputs([0, 0], 4, 2, state="random", spare_rows=3)
    run(x, initial_state=x.initial_state, output_final_state=True)
    (launch,) = launches
    assert launch.spec.kernel == "state_scan_opt" and launch.grid == (8, 8, 1)


def test_rows_off_16_bytes(launches: list[Launch]) -> None:
    x = make_inputs([70, 5], 4, 2)

    def odd(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*t.shape[:3], 130, dtype=t.dtype)[..., 1:129].copy_(t)

    o = odd(x.v)
    run(x, q=odd(x.q), k=odd(x.k), v=odd(x.v), o=o)
    for launch in launches:
        values = launch.values()
        for name in ("q", "k", "v", "o"):
            assert values.get(name, 0) % 16 == 0 and values.get(name) != o.data_ptr(), (launch.spec.kernel, name)
    output = launches[-1].values()
    assert (output["stride_ot"], output["stride_oh"]) == (4 * 16, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": None}, r'^arch with backend="emulate": got None, expected gfx942 or gfx950'),
        ({"arch": "sm90"}, r"^arch with backend=\"emulate\": got 'sm90', supported: gfx942, gfx950$"),
        ({"backend": "flydsl"}, r"^arch for tensors on cpu: got 'gfx950'|^backend on cpu: got 'flydsl'"),
    ],
)
def test_refused_before_anything_is_launched(launches: list[Launch], options: dict[str, Any], message: str) -> None:
    x = make_inputs(LENS, 4, 2)
    with pytest.raises(ValueError, match=message):
        run(x, **options)
    assert not launches


def test_fp16_is_refused(launches: list[Launch]) -> None:
    x = make_inputs(LENS, 4, 2, dtype=torch.float16)
    with pytest.raises(
        UnsupportedError, match=r'^dtype of q, k and v with backend="emulate": got fp16, supported: bf16$'
    ):
        run(x)
    assert not launches


def test_the_first_stages_alone(launches: list[Launch]) -> None:
    x = make_inputs(LENS, 4, 2)
    run(x, backend="reference", prepare_backend="emulate")
    assert [launch.spec.kernel for launch in launches] == ["prepare"]


def test_tokens_too_far_apart_are_copied() -> None:
    """Strides of a token have 24 bits in the kernels, and rows may coincide but not overlap: else there is a copy."""
    most = MAX_TOKEN_STRIDE // 16 * 8  # elements of 2 bytes, whole 16-byte steps
    storage = torch.empty(most + 8 + 128, dtype=BF16)
    for step, kept in ((most, True), (most + 8, False)):
        x = storage.as_strided((1, 2, 1, 128), (0, step, 0, 1))
        assert (rows(x)[0] is x) == kept
        g = storage.as_strided((1, 2, 4), (0, step, 1))
        found, _, token, head = gates(g)
        assert (found is g, token, head) == ((True, 2 * step, 2) if kept else (False, 8, 2))
    for step, kept in ((0, True), (8, False), (120, False), (128, True)):
        x = storage.as_strided((1, 2, 1, 128), (0, step, 0, 1))
        assert (rows(x)[0] is x) == kept
