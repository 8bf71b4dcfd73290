"""Selection: which backend and configuration a call gets, why, and that it depends on nothing but its arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from gdn_runtime import UnsupportedError, chunk_gated_delta_rule, env, explain, select
from gdn_runtime.rules import Problem
from gdn_runtime.select import Selection
from gdn_runtime.spec import StateScanSpec
from gdn_runtime.testing import make_inputs
from gdn_testing.specs import usual_problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GPUS = ("sm90", "gfx942", "gfx950")


@pytest.fixture(autouse=True)
def _no_cached_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    select._select.cache_clear()
    yield
    select._select.cache_clear()


def problem(arch: str = "sm90", **changes: Any) -> Problem:
    return usual_problem(arch, **changes)


def choose(
    on: str = "sm90", device: torch.device = CUDA, /, *, given: Problem | None = None, **options: Any
) -> Selection:
    return select.select(given or problem(on), device, **options)


def tile(selection: Selection) -> int:
    """Value rows per program of K5."""
    spec = selection.state_scan
    return spec.config.block_v if isinstance(spec, StateScanSpec) else spec.block_v


# ------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize("arch", GPUS)
def test_every_choice_is_legal(arch: str) -> None:
    heads = ((1, 1), (4, 2), (8, 2), (16, 16), (32, 16), (64, 16))
    chunks = ((0, 0), (1, 1), (128, 128), (512, 64), (2048, 2048), (3000, 1))
    dtypes = (("bf16", "fp32", "bf16"), ("bf16", "bf16", "fp32"), ("fp16", "fp32", "fp16"), ("fp16", "bf16", "fp32"))
    for (h, hg), (total, longest), (dtype, state, snapshot), varlen in product(heads, chunks, dtypes, (False, True)):
        given = problem(
            arch,
            num_heads=h,
            num_key_heads=hg,
            total_chunks=total,
            max_seq_chunks=longest,
            dtype=dtype,
            state_dtype=state,
            snapshot_dtype=snapshot,
            is_varlen=varlen,
        )
        chosen = choose(given=given)
        for spec in (chosen.l2norm, chosen.prepare, chosen.state_scan, chosen.output):
            spec.check()
            assert spec.arch == arch
        assert (chosen.backend, chosen.prepare_backend, chosen.arch) == ("triton", "triton", arch)


@pytest.mark.parametrize("arch", GPUS)
def test_tiles_grow_with_the_work_and_shrink_with_the_device(arch: str) -> None:
    """More (sequence, head) scans at a time need less splitting of each; more compute units need more."""

    def block_v(**changes: Any) -> int:
        return tile(choose(given=problem(arch, **changes)))

    by_heads = [block_v(num_heads=h, num_key_heads=1) for h in range(1, 257)]
    by_sequences = [block_v(num_seqs=n, total_chunks=128 * n) for n in range(1, 65)]
    by_units = [block_v(compute_units=n) for n in range(1, 1025, 3)]
    assert all(a <= b for a, b in pairwise(by_heads))
    assert all(a <= b for a, b in pairwise(by_sequences))
    assert all(a >= b for a, b in pairwise(by_units))
    assert by_heads[0] < by_heads[-1] and by_units[0] > by_units[-1], "the rule does look at the work"


def test_a_long_sequence_beside_short_ones_counts_as_one() -> None:
    alone = choose(given=problem(num_heads=8, num_key_heads=2)).state_scan
    beside = problem(num_heads=8, num_key_heads=2, num_seqs=32, total_chunks=128 + 31, max_seq_chunks=128)
    assert choose(given=beside).state_scan == alone


def test_choices_ask_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("selection asked the driver")

    for name in ("arch_of", "compute_units"):
        monkeypatch.setattr(select, name, never)
    monkeypatch.setattr(torch.cuda, "get_device_properties", never)
    assert choose("gfx950") == choose("gfx950")
    assert choose("gfx950", arch="gfx950:sramecc+:xnack-").arch == "gfx950"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "num_key_heads": 2}, "heads"),
        ({"num_heads": 0, "num_key_heads": 1}, "heads"),
        ({"dtype": "fp32"}, "k dtype"),
        ({"state_dtype": "fp16"}, "state_dtype"),
        ({"snapshot_dtype": "fp16"}, "snapshot_dtype"),
    ],
)
def test_illegal_problems(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{message}.*: got .*, supported: "):
        choose(given=problem(**changes))


# ------------------------------------------------------------------------------------------------ backends


def test_default_backends() -> None:
    assert choose().backend == "triton" and choose().reasons[0] == "the triton backend is the default on cuda"
    on_cpu = choose("cpu", CPU)
    assert (on_cpu.backend, on_cpu.prepare_backend) == ("reference", "reference")
    assert on_cpu.reasons == ("the reference backend is the default on cpu",)


def test_a_gpu_without_triton_never_falls_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_triton", lambda: False)
    with pytest.raises(UnsupportedError) as caught:
        choose()
    assert "backend on cuda:0: got 'triton'" in str(caught.value)
    assert "triton (not available: the package triton is not installed" in str(caught.value)
    assert choose(backend="reference").backend == "reference"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"only under Triton's interpreter \(TRITON_INTERPRET=1\)"):
        choose("cpu", CPU, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("cpu", CPU, backend="triton").backend == "triton"
    assert choose("cpu", CPU).backend == "reference"


def test_a_backend_for_the_first_stages_alone() -> None:
    mixed = choose(prepare_backend="reference")
    assert (mixed.prepare_backend, mixed.backend) == ("reference", "triton")
    assert 'prepare_backend="reference" was asked for' in mixed.reasons
    assert choose(prepare_backend="auto") == choose()
    with pytest.raises(UnsupportedError, match=r"^prepare_backend on cuda:0: got 'flydsl', supported: reference"):
        choose(prepare_backend="flydsl")


@pytest.mark.parametrize("asked", ["sm80", "gfx950"])
def test_another_arch_than_the_device_has(asked: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^arch for tensors on cuda:0: got '{asked}', supported: gfx942$"):
        choose("gfx942", arch=asked)


# ------------------------------------------------------------------------------------------------ environment


def test_environment_backend() -> None:
    with env.override(backend="reference"):
        assert choose().backend == "reference"
        assert choose().reasons == ('GDN_BACKEND="reference" was asked for',)
        assert choose(backend="triton").backend == "triton", "the argument wins"
    assert choose().backend == "triton"
    with env.override(backend="triton"), pytest.raises(UnsupportedError, match=r"^GDN_BACKEND on cpu: got 'triton'"):
        choose("cpu", CPU)


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_environment_prepare_mode(mode: str) -> None:
    with env.override(prepare_mode=mode):
        chosen = choose()
        assert chosen.prepare.config.mode == mode
        assert f"prepare: mode={mode} from GDN_PREPARE_MODE" in chosen.reasons
        assert choose("cpu", CPU).reasons == ("the reference backend is the default on cpu",)


@pytest.mark.parametrize("block_v", [16, 32, 64, 128])
def test_environment_tile_of_the_state_scan(block_v: int) -> None:
    with env.override(k5_block_v=block_v):
        chosen = choose()
        assert tile(chosen) == block_v
        assert f"state scan: block_v={block_v} from GDN_K5_BLOCK_V" in chosen.reasons
        assert chosen.output == choose(prepare_backend="triton").output
    with pytest.raises(ValueError, match=r"^GDN_K5_BLOCK_V: got '48', expected one of"), env.override(k5_block_v=48):
        choose()


# ------------------------------------------------------------------------------------------------ explain


def test_explain_names_what_a_call_runs() -> None:
    x = make_inputs([70, 0, 10], state="random")
    options: dict[str, Any] = {"initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens, "output_final_state": True}
    explanation = explain(*x.tensors, **options)
    assert (explanation.arch, explanation.prepare_backend, explanation.backend) == ("cpu", "reference", "reference")
    assert str(explanation).splitlines() == [
        "arch            cpu",
        "K1..K4 prepare  reference",
        "K5 state scan   reference",
        "K6 output       reference",
        "- the reference backend is the default on cpu",
    ]
    with env.override(backend="reference"):
        assert explain(*x.tensors, **options).reasons == ('GDN_BACKEND="reference" was asked for',)
    assert explain(*x.tensors, backend="reference").reasons == ('backend="reference" was asked for',)


def test_explain_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn_runtime.ops import block

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("explain launched or allocated")

    x = make_inputs([70, 10])
    pool, slots = torch.ones(3, 4, 128, 128), torch.tensor([2, 0])
    monkeypatch.setattr(block, "stages", never)
    monkeypatch.setattr(torch.Tensor, "new_empty", never)
    explain(
        *x.tensors, cu_seqlens=x.cu_seqlens, initial_state=pool, initial_state_indices=slots, output_final_state=True
    )
    assert (pool == 1).all()


@pytest.mark.parametrize("arch", GPUS)
def test_text_and_json_of_a_selection(arch: str) -> None:
    chosen = choose(arch)
    text = str(chosen)
    for word in (arch, "triton", f"mode={chosen.prepare.config.mode}", f"block_v={tile(chosen)}", "num_warps="):
        assert word in text
    for reason in chosen.reasons:
        assert f"- {reason}" in text.splitlines()
    assert any(reason.startswith("prepare: ") for reason in chosen.reasons)
    assert any(reason.startswith("state scan: ") for reason in chosen.reasons)
    assert any(reason.startswith("output: ") for reason in chosen.reasons)
    loaded = json.loads(json.dumps(chosen.as_dict()))
    assert loaded["state_scan"]["config"]["block_v"] == tile(chosen) and loaded["arch"] == arch


def test_the_environment_reaches_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that selection chose is the one that the stages get."""
    from gdn_runtime import reference
    from gdn_runtime.ops import block

    seen: dict[str, Any] = {}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def stage(*args: object, **kwargs: Any) -> None:
                seen[name] = kwargs["spec"]
                getattr(reference, name)(*args, **kwargs)

            return stage

    monkeypatch.setattr(block, "stages", lambda backend: Recorder())
    x = make_inputs((1, 70))
    chunk_gated_delta_rule(*x.tensors, use_qk_l2norm_in_kernel=True)
    chosen = explain(*x.tensors)
    assert seen == {
        "l2norm": chosen.l2norm,
        "prepare": chosen.prepare,
        "state_scan": chosen.state_scan,
        "output": chosen.output,
    }
