"""Candidates are all that have a kernel, by brute force; the cycle model ranks them; what is right is what is kept."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from gdn_runtime import reference, rules
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.spec import OptStateScanSpec, OutputConfig, PrepareConfig, StateScanConfig, config_refusal
from gdn_tune import calls
from gdn_tune.calls import DECODE_CASES, GDN_CASES, pick, problem_of
from gdn_tune.candidates import BUDGETS, default, of_geometry, of_problem, specs_of
from gdn_tune.workload import GdnWorkload, deviation
from pa_decode import PaDecodeSchedule
from pa_decode.planner import make_plan

CASE = "snapshot-35b-tp1-8192-bf16"
WIDE = {
    "block_v": range(8, 264, 8),
    "mode": ("fused", "split", "none"),
    "num_warps": range(1, 17),
    "num_stages": range(1, 5),
}
PROBLEMS = [
    (name, arch) for name in (CASE, "dense-397b-tp2-2500", "dtypes-397b-tp4-state-bf16-snapshot-bf16")
    for arch in ("gfx942", "gfx950", "sm90", "sm100")
]  # fmt: skip


def legal(make: Any) -> bool:
    try:
        make().check()
    except UnsupportedError:
        return False
    return True


def tunable(make: Any) -> bool:
    """Whether a table may hold it, on NVIDIA."""
    return legal(make) and config_refusal(make()) is None


def brute_force(op: str, problem: Any) -> list[dict[str, Any]]:
    """Every choice in a wider range, by the specs' own word."""
    rounding = rules.opt_rounding(problem.arch.name, block=True) if problem.arch.vendor == "amd" else None
    if problem.arch.vendor == "amd":
        if op == "k5":
            return [{"block_v": n} for n in WIDE["block_v"] if legal(partial(rules.opt_spec, problem, n, rounding))]
        names = ("wave", "group", "row", "")
        return [{"variant": name} for name in names if legal(partial(rules.fused_prepare_spec, problem, name))]
    make, config_of = (rules.state_scan_spec, StateScanConfig) if op == "k5" else (rules.prepare_spec, PrepareConfig)
    names = ("block_v" if op == "k5" else "mode", "num_warps", "num_stages")
    configs = [dict(zip(names, each, strict=True)) for each in itertools.product(*(WIDE[name] for name in names))]
    return [config for config in configs if tunable(partial(make, problem, config_of(**config)))]


@pytest.mark.parametrize(("name", "arch"), PROBLEMS)
@pytest.mark.parametrize("op", ["k5", "prepare"])
def test_candidates_are_all_that_have_a_kernel(op: str, name: str, arch: str) -> None:
    problem = problem_of(GDN_CASES[name], arch, 80)
    found = of_problem(op, problem)
    assert found[0] == default(op, problem)
    assert sorted(map(str, map(sorted, map(dict.items, found)))) == sorted(
        map(str, map(sorted, map(dict.items, brute_force(op, problem))))
    )


def test_candidates_of_the_block() -> None:
    amd = of_problem("block", problem_of(GDN_CASES[CASE], "gfx942", 80))
    assert len(amd) == 2 * 3 + 2 and len({str(sorted(config.items())) for config in amd}) == len(amd)
    assert amd[0] == {"route": "staged", "variant": "wave", "block_v": 32}
    filled = problem_of(GDN_CASES["snapshot-35b-tp1-65536-bf16"], "gfx942", 80)
    assert of_problem("block", filled)[0] == {"route": "tprime", "block_v": 128}
    problem = problem_of(GDN_CASES[CASE], "sm100", 148)
    staged = [config for config in of_problem("block", problem) if config["path"] == "staged"]
    rest = [{name: value for name, value in config.items() if name != "path"} for config in staged]
    wide = itertools.product(WIDE["block_v"], WIDE["num_warps"], WIDE["num_stages"])
    expected = [triple for triple in wide if tunable(partial(rules.output_spec, problem, OutputConfig(*triple)))]
    assert sorted(tuple(config.values()) for config in rest) == expected


def test_the_fast_path_is_a_candidate_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn_tune.candidates._triton_version", lambda: rules.FAST_TRITON)
    problem = problem_of(GDN_CASES[CASE], "sm90", 132)
    fast = [config for config in of_problem("block", problem) if config["path"] == "fast"]
    assert fast[0] == of_problem("block", problem)[0] == {"path": "fast", "p_in_scan": True, "segment_chunks": 32}
    assert {(config["p_in_scan"], config["segment_chunks"]) for config in fast} == set(
        itertools.product((False, True), (0, 16, 32, 64))
    )
    # 40 chunks: 64 of them are no segment. fp32 snapshots: none.
    short = problem_of(GDN_CASES["dense-35b-tp1-2500"], "sm90", 132)
    segments = {config["segment_chunks"] for config in of_problem("block", short) if config["path"] == "fast"}
    assert segments == {0, 16, 32}
    wide = problem_of(GDN_CASES["snapshot-35b-tp1-8192-fp32"], "sm90", 132)
    assert {config["path"] for config in of_problem("block", wide)} == {"staged"}


@pytest.mark.parametrize("name", list(DECODE_CASES)[::7])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm90"])
def test_budgets_give_plans_of_different_sizes_the_default_first(name: str, arch: str) -> None:
    geometry = DECODE_CASES[name].geometry(arch, 256)
    found = [config["budget"] for config in of_geometry(geometry)]
    sizes = [PaDecodeSchedule.select(geometry, budget=budget).capacity for budget in found]
    assert found[0] == PaDecodeSchedule.select(geometry).budget and len(set(sizes)) == len(sizes)
    assert set(sizes) == {PaDecodeSchedule.select(geometry, budget=budget).capacity for budget in (found[0], *BUDGETS)}
    assert set(found[1:]) <= {128, 256, 512, 1024, 2048, 4096}


def test_budgets_are_checked_on_sequences_of_several_tasks() -> None:
    """What is run where there is no card: two tiles, of which a plan may make two tasks or one."""
    small = DECODE_CASES["pa-h16x2-p64-q1-b16-ctx8192"].small(2, 2)
    assert (small.batch, small.context) == (2, 512)
    plans = [
        make_plan([small.context] * small.batch, capacity=capacity, max_partitions=256, window=0, query_length=1)
        for capacity in (2, 4)
    ]
    assert [len(plan.tasks) for plan in plans] == [2, 4]


def test_cases_by_pattern() -> None:
    assert list(pick(GDN_CASES, ["packed-*-2048", "emptylast-35b-tp1"])) == [
        "packed-397b-tp4-2048", "packed-397b-tp8-2048", "emptylast-35b-tp1",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"got 'nothing-\*'"):
        pick(GDN_CASES, ["nothing-*"])


# ------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("op", ["k5", "prepare", "block"])
@pytest.mark.parametrize("name", ["packed-397b-tp8-1024", "dense-35b-tp2-2500", "nogate-35b-tp1-100"])
def test_the_reference_is_right_and_what_is_off_is_not(op: str, name: str) -> None:
    case = GDN_CASES[name].small(2, 2)
    if op == "block" and not case.gated:
        return  # the block has gates always
    problem = problem_of(case, "sm90", 132)
    load = GdnWorkload(op, case, problem, reference, torch.device("cpu"))  # type: ignore[arg-type]
    right, out = load.expected(), load.outputs()
    load.run(
        specs_of(op, problem, {"path": "staged", **vars(OutputConfig())} if op == "block" else default(op, problem)),
        out,
    )
    assert deviation(op, out, right) == 0
    for result in out:
        for spoil, least in ((float("nan"), float("inf")), (1e4, 1.0)):
            spoilt = {key: value.clone() for key, value in out.items()}
            spoilt[result].flatten()[-1] = spoil
            assert deviation(op, spoilt, right) >= least > 0
    untouched = load.outputs()
    assert deviation(op, untouched, right) == float("inf")


def test_a_copy_is_other_memory_with_equal_values() -> None:
    case = GDN_CASES["packed-397b-tp8-1024"].small(1, 2)
    load = GdnWorkload("k5", case, problem_of(case, "sm90", 132), reference, torch.device("cpu"))  # type: ignore[arg-type]
    other = load.copy()
    assert torch.equal(load.w, other.w) and torch.equal(load.x.k, other.x.k)
    assert load.w.data_ptr() != other.w.data_ptr() and load.x.k.data_ptr() != other.x.k.data_ptr()
    assert load.bytes == other.bytes


# ------------------------------------------------------------------------------------------------ model


def test_rounds_of_workgroups() -> None:
    model = pytest.importorskip("gdn_tune.model", exc_type=ImportError)
    problem = problem_of(GDN_CASES[CASE], "gfx942", 80)  # 32 scans of 128 chunks
    unit = model.Unit((100.0, 150.0), {})

    def cycles(width: int) -> float:
        (spec,) = specs_of("k5", problem, {"block_v": width}).kernels()
        assert isinstance(spec, OptStateScanSpec)
        return float(model.cycles_on(problem, spec, unit))

    assert cycles(64) == 128 * 100  # 64 workgroups, one each
    assert cycles(32) == 128 * 150  # 128: two on a unit
    assert cycles(16) == 128 * 2 * 150  # 256: four on a unit, two at a time
    (wave,) = specs_of("prepare", problem, {"variant": "wave"}).kernels()
    assert model.cycles_on(problem, wave, unit) == 6 * 150 + 100  # 128 * 8 workgroups: 13 on a unit


def test_calls_that_differ_in_their_grid_share_their_traces() -> None:
    model = pytest.importorskip("gdn_tune.model", exc_type=ImportError)
    first = problem_of(GDN_CASES["grid-packed-35b-tp2-1024-of-8192-bf16"], "gfx942", 80)
    second = problem_of(GDN_CASES["grid-packed-35b-tp1-8192-of-65536-bf16"], "gfx942", 304)
    assert first != second and model._steady(first) == model._steady(second)
    for name in (
        "grid-packed-397b-tp2-1024-of-8192-bf16",
        "grid-packed-35b-tp2-1024-of-8192-fp32",
        "grid-dense-35b-tp2-1024-bf16",
    ):
        assert model._steady(problem_of(GDN_CASES[name], "gfx942", 80)) != model._steady(first)


def test_tables_list_both_snapshots_of_the_public_shapes() -> None:
    for name in ("dense-35b-tp2-2500", "packed-397b-tp4-1024", "ragged-35b-tp1-1000"):
        case, twin = GDN_CASES[name], GDN_CASES[f"{name}-fp32"]
        assert (case.snapshot_dtype, twin.snapshot_dtype, twin.seq_lens) == ("bf16", "fp32", case.seq_lens)


def test_few_heads_keep_the_ratio() -> None:
    from gdn_tune.candidates import small_heads

    for name, expected in ((CASE, (4, 2)), ("dense-397b-tp1-2500", (4, 1))):
        small = small_heads(problem_of(GDN_CASES[name], "gfx942", 80))
        assert (small.num_heads, small.num_key_heads) == expected
    assert calls.cases_of("pa") is DECODE_CASES and calls.cases_of("k5") is GDN_CASES
