"""What K1..K4 hand to K5 on the backends of code objects, w and u or T': the rule, its override, and the launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn_runtime import UnsupportedError, chunk_gated_delta_rule, env, rules, select
from gdn_runtime.arch import KNOWN
from gdn_runtime.ops.warmup import specs_of_row
from gdn_runtime.rules import Problem
from gdn_runtime.select import Request, Selection
from gdn_runtime.spec import (
    AMD_ARCHS,
    T_ELEMENTS,
    FusedPrepareSpec,
    OptStateScanSpec,
    PrepareSpec,
    TPrepareSpec,
    VSplitScanSpec,
)
from gdn_runtime.tables import ScanRow
from gdn_runtime.testing import make_inputs
from gdn_runtime.testing.launches import Launch, launching_nothing
from gdn_testing.bundles import fake_code, write_bundle
from gdn_testing.specs import usual_problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FULL = {"num_heads": 64, "num_seqs": 10, "total_chunks": 1280, "max_seq_chunks": 128}
"""640 scans at a time: two for each compute unit of either usual part."""


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_has_triton", "_has_flydsl", "_has_emulator"):
        monkeypatch.setattr(select, name, lambda: True)
    select._select.cache_clear()
    with env.override(jit=True, flydsl_runtime_run_only=False, bundle="", amd_route="auto"):
        yield
    select._select.cache_clear()


def choose(
    arch: str = "gfx950", device: torch.device = CUDA, /, given: Problem | None = None, **asked: Any
) -> Selection:
    return select.select(given or usual_problem(arch, **FULL), device, Request(**asked))


def route(chosen: Selection) -> str:
    (reason,) = (reason for reason in chosen.reasons if reason.startswith("route: "))
    return reason.removeprefix("route: ")


# ------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("arch", "scans", "block_v"),
    [
        ("gfx950", 255, None),
        ("gfx950", 256, 128),
        ("gfx950", 5000, 128),
        ("gfx942", 303, None),
        ("gfx942", 304, 64),
        ("gfx942", 607, 64),
        ("gfx942", 608, 128),
    ],
)
def test_scans_per_compute_unit(arch: str, scans: int, block_v: int | None) -> None:
    assert KNOWN[arch].nominal_compute_units == {"gfx942": 304, "gfx950": 256}[arch]
    problem = usual_problem(arch, num_heads=scans, total_chunks=100, max_seq_chunks=100)
    found, why = rules.tprime_block_v(problem)
    assert found == block_v
    assert why == f"{scans} scans at a time on {problem.compute_units} compute units"


def test_few_compute_units_are_full_early() -> None:
    assert rules.tprime_block_v(usual_problem("gfx942", compute_units=80, num_heads=80))[0] == 64
    assert rules.tprime_block_v(usual_problem("gfx942", compute_units=80, num_heads=160))[0] == 128


def test_one_long_sequence_is_not_a_large_grid() -> None:
    """1024 scans, of which only 32 run to the end."""
    ragged = usual_problem("gfx950", num_seqs=32, total_chunks=1000 + 31, max_seq_chunks=1000)
    assert rules.tprime_block_v(ragged) == (None, "33 scans at a time on 256 compute units")


def test_sequences_of_one_chunk_need_as_much_work_as_prepare_wave() -> None:
    """T' has a prepare of one wave per chunk and head only."""
    for seqs, variant, block_v in ((32, "group", None), (33, "wave", 128)):
        problem = usual_problem("gfx950", num_seqs=seqs, total_chunks=seqs, max_seq_chunks=1)
        assert rules.prepare_variant(problem)[0] == variant
        assert rules.tprime_block_v(problem)[0] == block_v


def test_nothing_to_do_is_no_large_grid() -> None:
    assert rules.tprime_block_v(usual_problem("gfx950", total_chunks=0, max_seq_chunks=0))[0] is None


# ------------------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize("arch", AMD_ARCHS)
@pytest.mark.parametrize("backend", ["flydsl", "emulate"])
def test_specs_say_what_the_problem_says(arch: str, backend: str) -> None:
    given = usual_problem(
        arch,
        **FULL,
        snapshot_dtype="fp32",
        state_dtype="bf16",
        beta_dtype="fp16",
        use_exp2=False,
        use_state_indices=True,
    )
    chosen = choose(arch, CPU if backend == "emulate" else CUDA, given=given, backend=backend)
    prepare, scan = chosen.prepare, chosen.state_scan
    assert isinstance(prepare, TPrepareSpec) and isinstance(scan, VSplitScanSpec)
    shared = ("num_heads", "num_key_heads", "is_varlen", "use_exp2")
    for name in (*shared, "beta_dtype"):
        assert getattr(prepare, name) == getattr(given, name), name
    states = ("use_initial_state", "store_final_state", "use_state_indices", "state_dtype", "snapshot_dtype")
    for name in (*shared, *states):
        assert getattr(scan, name) == getattr(given, name), name
    assert (scan.block_v, scan.rounding) == (128, rules.opt_rounding(arch, block=True))
    assert prepare.arch == scan.arch == arch
    assert chosen is not choose(arch, CPU if backend == "emulate" else CUDA, backend=backend)


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_explain_shows_the_route(arch: str) -> None:
    rounding = "nearest" if arch == "gfx950" else "truncate"
    lines = str(choose(arch, backend="flydsl")).splitlines()
    assert lines[1:3] == [
        "K1..K4 prepare  flydsl  fused up to T', one wave per chunk and head",
        f"K5 state scan   flydsl  vsplit block_v=128 rounding={rounding}",
    ]
    units = KNOWN[arch].nominal_compute_units
    assert f"- route: T', 640 scans at a time on {units} compute units" in lines
    few = choose(arch, given=usual_problem(arch), backend="flydsl")
    assert route(few) == f"w and u, 32 scans at a time on {units} compute units"
    assert isinstance(few.prepare, FusedPrepareSpec) and isinstance(few.state_scan, OptStateScanSpec)


def test_the_variable_wins_over_the_rule() -> None:
    with env.override(amd_route="staged"):
        chosen = choose()
        assert isinstance(chosen.state_scan, OptStateScanSpec) and isinstance(chosen.prepare, FusedPrepareSpec)
        assert route(chosen) == "w and u, GDN_AMD_ROUTE asks for them"
    few = usual_problem("gfx950")
    with env.override(amd_route="tprime"):
        assert vsplit_of(choose()).block_v == 128
        assert vsplit_of(choose(given=few)).block_v == 128
        assert vsplit_of(choose("gfx942", given=usual_problem("gfx942"))).block_v == 64
        assert route(choose(given=few)) == "T', GDN_AMD_ROUTE asks for it"
        with env.override(k5_block_v=64):
            assert vsplit_of(choose(given=few)).block_v == 64
        with (
            env.override(k5_block_v=16),
            pytest.raises(UnsupportedError, match=r"^block_v: got 16, supported: 64, 128$"),
        ):
            choose(given=few, backend="flydsl")


def vsplit_of(chosen: Selection) -> VSplitScanSpec:
    assert isinstance(chosen.state_scan, VSplitScanSpec) and isinstance(chosen.prepare, TPrepareSpec)
    return chosen.state_scan


def test_a_tile_of_opt_that_is_asked_for_means_w_and_u() -> None:
    with env.override(k5_block_v=32):
        chosen = choose()
        assert isinstance(chosen.state_scan, OptStateScanSpec) and chosen.state_scan.block_v == 32
        assert route(chosen) == "w and u, GDN_K5_BLOCK_V is of another kernel"


def test_another_backend_for_prepare_means_w_and_u() -> None:
    chosen = choose(prepare_backend="triton")
    assert isinstance(chosen.prepare, PrepareSpec) and isinstance(chosen.state_scan, OptStateScanSpec)
    assert route(chosen) == "w and u, K1..K4 on triton"
    with env.override(amd_route="tprime"):
        with pytest.raises(UnsupportedError, match=r"^GDN_AMD_ROUTE with K1..K4 on triton: got 'tprime', sup"):
            choose(backend="flydsl", prepare_backend="triton")
        # The variable is of the backends of code objects: it says nothing to a call that has none.
        assert not any(reason.startswith("route") for reason in choose(backend="triton").reasons)


@pytest.mark.parametrize("setting", ["auto", "tprime"])
def test_k5_alone_has_no_route(setting: str) -> None:
    with env.override(amd_route=setting):
        chosen = choose(stages=("state_scan",))
        assert isinstance(chosen.state_scan, OptStateScanSpec)
        assert not any(reason.startswith("route") for reason in chosen.reasons)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"use_g": False}, "no gates"),
        ({"use_gk": True}, "per-key gates"),
        ({"g_head_major": False}, "gates [B,T,H]"),
        ({"save_new_value": False}, "no v_new"),
    ],
)
def test_what_the_kernels_do_not_take(changes: dict[str, Any], fault: str) -> None:
    given = usual_problem("gfx950", **FULL, **changes)
    assert isinstance(choose(given=given).state_scan, OptStateScanSpec)
    assert route(choose(given=given)) == f"w and u, {fault}"
    fault = re.escape(fault)
    with pytest.raises(UnsupportedError, match=rf"^K5 with T' in place of w and u: got {fault}, supported: gates "):
        rules.vsplit_spec(given, 128, "nearest")
    with (
        env.override(amd_route="tprime"),
        pytest.raises(UnsupportedError, match=rf"^GDN_AMD_ROUTE with {fault}: got 'tprime', supported: staged$"),
    ):
        choose(given=given, backend="flydsl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm90"}, "arch: got sm90, supported: gfx942, gfx950"),
        ({"block_v": 32}, "block_v: got 32, supported: 64, 128"),
        ({"num_heads": 5}, "heads: got H=5 value heads, Hg=16 key heads"),
        ({"state_dtype": "fp16"}, "state_dtype: got fp16, supported: fp32, bf16"),
        ({"snapshot_dtype": "fp16"}, "snapshot_dtype: got fp16, supported: fp32, bf16"),
        ({"rounding": "up"}, "rounding: got up, supported: truncate, nearest"),
        (
            {"use_state_indices": True, "use_initial_state": False},
            "use_initial_state with state indices: got False, supported: True",
        ),
        (
            {"use_state_indices": True, "store_final_state": False},
            "store_final_state with state indices: got False, supported: True",
        ),
    ],
)
def test_specs_that_no_kernel_has(changes: dict[str, Any], message: str) -> None:
    spec = replace(rules.vsplit_spec(usual_problem("gfx950"), 128, "nearest"), **changes)
    with pytest.raises(UnsupportedError, match=f"^{message}"):
        spec.check()


@pytest.mark.parametrize("changes", [{"arch": "sm90"}, {"num_heads": 5}, {"beta_dtype": "fp64"}])
def test_prepare_specs_that_no_kernel_has(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        replace(rules.tprime_prepare_spec(usual_problem("gfx950")), **changes).check()


# ------------------------------------------------------------------------------------------------ bundles


@pytest.mark.parametrize("jit", [False, True])
def test_a_bundle_without_kernels_of_the_route(tmp_path: Path, jit: bool) -> None:
    """It serves the call by w and u where nothing may be compiled; a bundle with them serves it by T'."""
    with env.override(amd_route="staged"):
        staged = choose(backend="flydsl")
    tprime = choose(backend="flydsl")
    old, new = (
        write_bundle(tmp_path / name / "gfx950", map(fake_code, specs), "gfx950")
        for name, specs in (
            ("old", [staged.prepare, staged.state_scan, staged.output]),
            ("new", [tprime.prepare, tprime.state_scan, tprime.output]),
        )
    )
    with env.override(bundle=str(old), jit=jit):
        chosen = choose()
        assert chosen.backend == "flydsl"
        assert chosen.state_scan == (tprime if jit else staged).state_scan
        if not jit:
            assert route(chosen).startswith(f"w and u, {old} lacks prepare_t (arch=gfx950 ")
    with env.override(bundle=str(new), jit=jit):
        chosen = choose()
        assert (chosen.backend, chosen.prepare, chosen.state_scan) == ("flydsl", tprime.prepare, tprime.state_scan)


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_warmup_asks_for_the_kernels_of_the_route(arch: str) -> None:
    problem = usual_problem(arch, **FULL)
    row = ScanRow(problem.scan_key(), block_v=64, num_seqs=10, num_tokens=81920)
    chosen = choose(arch, given=problem, backend="flydsl")
    assert specs_of_row(row, arch) == (chosen.l2norm, chosen.prepare, chosen.state_scan, chosen.output)


# ------------------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize("arch", AMD_ARCHS)
@pytest.mark.parametrize("shape", [[70, 0, 65], (2, 100)], ids=["varlen", "dense"])
def test_the_launches_of_a_block(shape: Any, arch: str) -> None:
    x = make_inputs(shape, 4, 2, spare_rows=3, state="random")
    fused = torch.zeros(*x.k.shape[:2], 8 * 128, dtype=torch.bfloat16)
    q, k, v = fused.unflatten(-1, (8, 128)).split((2, 2, 4), dim=2)
    options = {"cu_seqlens": x.cu_seqlens, "initial_state": x.initial_state, "output_final_state": True}
    with launching_nothing() as launches, env.override(amd_route="tprime", k5_block_v=128):
        _, final = chunk_gated_delta_rule(q, k, v, x.g, x.beta, **options, backend="emulate", arch=arch)
    assert [launch.spec.kernel for launch in launches] == ["prepare_t", "state_scan_vsplit", "output"]
    prepare, scan, output = (launch.values() for launch in launches)
    seqs, chunks = len(x.seq_lens), 4
    assert launches[0].grid == ((chunks, 1, 1) if x.cu_seqlens is not None else (2, 1, 2))
    assert launches[1].grid == (1, 4 * seqs, 1)
    assert prepare["t"] == scan["t"] != 0 and prepare["g_cumsum"] == scan["g"] == output["g"]
    assert prepare["k"] == scan["k"] == output["k"] == k.data_ptr() and scan["v"] == v.data_ptr()
    assert (scan["h"], scan["v_new"]) == (output["h"], output["v_new"])
    assert len({scan["v_new"], scan["v"], scan["t"], scan["h"]}) == 4
    assert scan["initial_state"] == x.initial_state.data_ptr() and scan["final_state"] == final.data_ptr()
    strides = {"k_stride_t": 2048, "k_stride_h": 256, "v_stride_t": 2048, "v_stride_h": 256}
    batch = 0 if x.cu_seqlens is not None else 2048 * x.k.shape[1]
    assert {name: scan[name] for name in strides} == strides
    assert (scan["k_stride_b"], scan["v_stride_b"], prepare["k_stride_b"]) == (batch, batch, batch)
    assert scan["initial_stride"] == scan["final_stride"] == 4 * 4 * 128 * 128
    assert (scan["seq_len"], prepare["seq_len"]) == (x.k.shape[1], x.k.shape[1])


def test_rows_off_16_bytes_are_copied_first() -> None:
    x = make_inputs((1, 70), 2, 1)
    odd = torch.zeros(1, 70, 2, 130, dtype=torch.bfloat16)[..., 1:129]
    with launching_nothing() as launches, env.override(amd_route="tprime"):
        chunk_gated_delta_rule(x.q, x.k, odd, x.g, x.beta, backend="emulate", arch="gfx950")
    scan = launches[1].values()
    assert scan["v"] != odd.data_ptr() and scan["v"] % 16 == 0 and scan["v_stride_t"] == 512


def test_no_tokens_leave_k5_alone() -> None:
    x = make_inputs([0, 0], 2, 1, state="random")
    launches: list[Launch]
    with launching_nothing() as launches, env.override(amd_route="tprime"):
        chunk_gated_delta_rule(
            *x.tensors,
            cu_seqlens=x.cu_seqlens,
            initial_state=x.initial_state,
            output_final_state=True,
            backend="emulate",
            arch="gfx942",
        )
    assert [launch.spec.kernel for launch in launches] == ["state_scan_vsplit"]


def test_t_is_the_lower_half_of_the_tiles() -> None:
    assert T_ELEMENTS == 256 * (4 * 5 // 2)
