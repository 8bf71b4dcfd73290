"""Selection of the backends that launch AMD code objects: what they take, what they refuse by name, and the specs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gdn_runtime import UnsupportedError, env, select
from gdn_runtime.arch import KNOWN
from gdn_runtime.rules import Problem
from gdn_runtime.select import Request, Selection, explain_shape
from gdn_runtime.spec import AMD_ARCHS, FusedPrepareSpec, OptStateScanSpec, PrepareSpec, StateScanSpec, VkStateScanSpec
from gdn_testing.specs import usual_problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_has_triton", "_has_flydsl", "_has_emulator"):
        monkeypatch.setattr(select, name, lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    select._select.cache_clear()
    with env.override(jit=True, flydsl_runtime_run_only=False, bundle=""):
        yield
    select._select.cache_clear()


def problem(arch: str = "gfx950", **changes: Any) -> Problem:
    return usual_problem(arch, **changes)


def choose(
    arch: str = "gfx950", device: torch.device = CUDA, /, given: Problem | None = None, **asked: Any
) -> Selection:
    return select.select(given or problem(arch), device, Request(**asked))


# ------------------------------------------------------------------------------------------------ which backend


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_auto_is_flydsl_where_code_objects_can_be_had(arch: str) -> None:
    chosen = choose(arch)
    assert (chosen.backend, chosen.prepare_backend) == ("flydsl", "flydsl")
    assert isinstance(chosen.prepare, FusedPrepareSpec) and isinstance(chosen.state_scan, OptStateScanSpec)
    assert arch in chosen.reasons[0] and "flydsl" in chosen.reasons[0]
    with env.override(jit=False):
        chosen = choose(arch)
        assert (chosen.backend, chosen.prepare_backend) == ("triton", "triton")
        assert "GDN_JIT=0" in chosen.reasons[0]
    with env.override(flydsl_runtime_run_only=True):
        assert choose(arch).backend == "triton" and "FLYDSL_RUNTIME_RUN_ONLY=1" in choose(arch).reasons[0]


def test_auto_needs_flydsl_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_flydsl", lambda: False)
    assert choose().backend == "triton" and "not installed" in choose().reasons[0]


def test_auto_of_what_flydsl_does_not_take_is_triton() -> None:
    chosen = choose(given=problem(dtype="fp16", snapshot_dtype="fp16"))
    assert isinstance(chosen.prepare, PrepareSpec) and isinstance(chosen.state_scan, StateScanSpec)
    assert "supported: bf16" in chosen.reasons[0]
    assert choose("sm90").backend == "triton"
    assert choose("cpu", CPU).backend == "reference"


@pytest.mark.parametrize("backend", ["flydsl", "emulate"])
def test_fp16_is_refused_by_name(backend: str) -> None:
    device = CPU if backend == "emulate" else CUDA
    given = problem(dtype="fp16", snapshot_dtype="fp16")
    message = f'^dtype of q, k and v with backend="{backend}": got fp16, supported: bf16$'
    with pytest.raises(UnsupportedError, match=message):
        select.select(given, device, Request(backend=backend))
    with pytest.raises(UnsupportedError, match=message):
        select.select(given, device, Request(backend="reference", prepare_backend=backend))


@pytest.mark.parametrize("arch", ["sm90", "sm100", "cpu"])
def test_flydsl_runs_on_amd_gpus_only(arch: str) -> None:
    device = CPU if arch == "cpu" else CUDA
    with pytest.raises(UnsupportedError) as caught:
        choose(arch, device, backend="flydsl")
    assert "flydsl (not available: runs on gfx942 and gfx950 GPUs only)" in str(caught.value)


def test_emulate_runs_on_cpu_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"emulate \(not available: .*on CPU tensors only\)"):
        choose(backend="emulate")
    monkeypatch.setattr(select, "_has_emulator", lambda: False)
    with pytest.raises(UnsupportedError, match=r"emulate \(not available: the package cdna-emu is not installed\)"):
        choose("gfx950", CPU, backend="emulate", arch="gfx950")


def test_a_backend_for_the_first_stages_alone() -> None:
    chosen = choose(backend="triton", prepare_backend="flydsl")
    assert isinstance(chosen.prepare, FusedPrepareSpec) and isinstance(chosen.state_scan, StateScanSpec)
    chosen = choose("gfx942", CPU, backend="reference", prepare_backend="emulate", arch="gfx942")
    assert (chosen.arch, chosen.prepare_backend, chosen.backend) == ("gfx942", "emulate", "reference")
    chosen = choose(prepare_backend="triton")
    assert isinstance(chosen.prepare, PrepareSpec) and isinstance(chosen.state_scan, OptStateScanSpec)


# ------------------------------------------------------------------------------------------------ emulated architecture


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_emulated_architecture(arch: str) -> None:
    facts = KNOWN[arch]
    expected = (facts, facts.nominal_compute_units)
    assert select.target(CPU, Request("emulate", arch=f"{arch}:sramecc+:xnack-")) == expected
    assert select.target(CPU, Request("reference", "emulate", arch)) == expected
    with env.override(arch=arch):
        assert select.target(CPU, Request("emulate")) == expected
        assert select.target(CPU, Request()) == (KNOWN["cpu"], 1), "GDN_ARCH means nothing to other backends"
        other = next(name for name in AMD_ARCHS if name != arch)
        assert select.target(CPU, Request("emulate", arch=other))[0] == KNOWN[other], "the argument wins"
    with env.override(backend="emulate", arch=arch):
        assert select.target(CPU, Request()) == expected


def test_nothing_names_the_emulated_architecture() -> None:
    with pytest.raises(
        ValueError, match=r'^arch with backend="emulate": got None, expected gfx942 or gfx950 \(or GDN_'
    ):
        select.target(CPU, Request("emulate"))
    with pytest.raises(
        UnsupportedError, match=r"^arch with backend=\"emulate\": got 'sm90', supported: gfx942, gfx950$"
    ):
        select.target(CPU, Request("emulate", arch="sm90"))
    with pytest.raises(UnsupportedError, match=r"^arch: got 'gfx90a', supported: gfx942"):
        select.target(CPU, Request("emulate", arch="gfx90a"))


# ------------------------------------------------------------------------------------------------ specs


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_specs_say_what_the_problem_says(arch: str) -> None:
    given = problem(
        arch,
        snapshot_dtype="fp32",
        state_dtype="bf16",
        beta_dtype="bf16",
        is_varlen=False,
        use_exp2=False,
        use_gk=True,
        save_new_value=False,
        use_state_indices=True,
        g_head_major=False,
    )
    chosen = choose(arch, given=given, rounding="nearest")
    scan = chosen.state_scan
    assert isinstance(scan, OptStateScanSpec)
    for name in (
        "num_heads",
        "num_key_heads",
        "is_varlen",
        "use_exp2",
        "use_g",
        "use_gk",
        "use_initial_state",
        "store_final_state",
        "save_new_value",
        "use_state_indices",
        "g_head_major",
        "state_dtype",
        "snapshot_dtype",
    ):
        assert getattr(scan, name) == getattr(given, name), name
    assert (scan.rounding, scan.wu_head_major, scan.sched_barrier) == ("nearest", True, arch == "gfx942")
    assert isinstance(chosen.prepare, FusedPrepareSpec) and chosen.prepare.beta_dtype == "bf16"
    for spec in (chosen.l2norm, chosen.prepare, scan, chosen.output):
        spec.check()
        assert spec.arch == arch


def test_equal_specs_are_one_object() -> None:
    first, second = choose(), choose(given=problem(num_seqs=2))
    assert first is not second and first.state_scan is second.state_scan and first.output is second.output


def test_waves_take_over_when_there_is_work_for_all_compute_units() -> None:
    def variant(total_chunks: int) -> str:
        chosen = choose(given=problem(total_chunks=total_chunks, max_seq_chunks=total_chunks, num_heads=16))
        assert isinstance(chosen.prepare, FusedPrepareSpec)
        return chosen.prepare.variant

    assert [variant(n) for n in (0, 1, 64, 65, 1000)] == [
        "group",
        "group",
        "group",
        "wave",
        "wave",
    ]  # 4 * 256 / 16 = 64


def test_tile_of_the_state_scan() -> None:
    """Argument, then environment, then table or rule."""

    def tile(**asked: Any) -> tuple[int, str]:
        chosen = choose(**asked)
        assert isinstance(chosen.state_scan, OptStateScanSpec)
        (reason,) = (reason for reason in chosen.reasons if reason.startswith("state scan: "))
        return chosen.state_scan.block_v, reason

    assert 'by rule "gdn"' in tile()[1] or "table" in tile()[1]
    with env.override(k5_block_v=64):
        assert tile() == (64, "state scan: block_v=64 from GDN_K5_BLOCK_V")
        assert tile(block_v=16) == (16, "state scan: block_v=16 was asked for")
    with env.override(k5_block_v=128), pytest.raises(ValueError, match=r"^GDN_K5_BLOCK_V: got 128, expected"):
        choose(backend="flydsl")


def test_names_of_the_kernels() -> None:
    assert choose(kernel="mfma16_hip").state_scan == choose(kernel="opt").state_scan
    chosen = choose(kernel="vk", given=problem(g_head_major=False))
    assert isinstance(chosen.state_scan, VkStateScanSpec)
    assert "vk block_v=" in str(chosen)


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_rounding_of_a_call_that_does_not_say(arch: str) -> None:
    """The block rounds where that is free, K5 alone truncates; either does as it is told."""

    def rounding(**asked: Any) -> str:
        scan = choose(arch, **asked).state_scan
        assert isinstance(scan, OptStateScanSpec)
        return scan.rounding

    assert rounding() == ("nearest" if arch == "gfx950" else "truncate")
    assert rounding(stages=("state_scan",)) == "truncate"
    for asked in ("nearest", "truncate"):
        assert rounding(rounding=asked) == rounding(rounding=asked, stages=("state_scan",)) == asked


VK = {"g_head_major": False}


@pytest.mark.parametrize(
    ("arch", "changes", "asked", "message"),
    [
        ("gfx950", {}, {"kernel": "mfma"}, "kernel: got 'mfma', supported: opt, mfma16_hip, vk"),
        ("gfx950", {}, {"rounding": "up"}, "rounding: got 'up', supported: truncate, nearest"),
        ("gfx950", {}, {"block_v": 128}, "block_v: got 128, supported: 16, 32, 64"),
        ("gfx942", VK, {"kernel": "vk"}, "arch of K5 vk: got gfx942, supported: gfx950"),
        (
            "gfx950",
            VK | {"use_state_indices": True},
            {"kernel": "vk"},
            'initial_state_indices with kernel="vk": got True',
        ),
        ("gfx950", VK | {"use_state_mask": True}, {"kernel": "vk"}, 'has_initial_state with kernel="vk": got True'),
        ("gfx950", {}, {"kernel": "vk"}, 'g_head_major with kernel="vk": got True'),
        ("gfx950", VK | {"snapshot_dtype": "fp32"}, {"kernel": "vk"}, 'snapshot_dtype with kernel="vk": got fp32'),
        (
            "gfx950",
            VK,
            {"kernel": "vk", "rounding": "truncate"},
            "rounding with kernel=\"vk\": got 'truncate', supported: 'nearest'",
        ),
        (
            "gfx950",
            {},
            {"backend": "triton", "kernel": "vk"},
            "kernel with backend=\"triton\": got 'vk', supported: 'opt'",
        ),
        ("gfx950", {}, {"backend": "triton", "rounding": "nearest"}, 'rounding with backend="triton": got '),
        (
            "gfx950",
            {},
            {"backend": "reference", "block_v": 16},
            'block_v with backend="reference": got 16, supported: ',
        ),
    ],
)
def test_refused_kernels(arch: str, changes: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match="^" + re.escape(message)):
        choose(arch, given=problem(arch, **changes), **asked)


# ------------------------------------------------------------------------------------------------ explain


@pytest.mark.parametrize("arch", AMD_ARCHS)
@pytest.mark.parametrize("backend", ["flydsl", "emulate"])
def test_explain_without_a_device(arch: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explanation = explain_shape(
        num_heads=32,
        num_key_heads=16,
        seq_lens=(8192, 8192),
        is_varlen=True,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        snapshot_dtype=torch.float32,
        device=CPU if backend == "emulate" else CUDA,
        backend=backend,
        arch=arch,
        use_state_indices=True,
    )
    scan = explanation.state_scan
    assert isinstance(scan, OptStateScanSpec) and scan.use_state_indices and scan.snapshot_dtype == "fp32"
    lines = str(explanation).splitlines()
    rounding = "nearest" if arch == "gfx950" else "truncate"
    assert lines[:4] == [
        f"arch            {arch}",
        f"K1..K4 prepare  {backend}  fused, one wave per chunk and head",
        f"K5 state scan   {backend}  opt block_v={scan.block_v} rounding={rounding}",
        f"K6 output       {backend}  Triton kernel, block_v=64 num_warps=4 num_stages=1",
    ]
    assert explanation.as_dict()["prepare"]["variant"] == "wave"
