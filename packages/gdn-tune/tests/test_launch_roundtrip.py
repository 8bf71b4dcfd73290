"""From candidates of sm90 to a table that selection reads, with a clock that is made up and kernels that are the
reference's: what a GPU would add is the times alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gdn_runtime import env, reference, rules, select, tables
from gdn_runtime.spec import OutputConfig, PrepareConfig, StateScanConfig
from gdn_tune import candidates, measure, trial, workload
from gdn_tune.calls import DECODE_CASES, GDN_CASES, DecodeCase, problem_of
from gdn_tune.check import check
from gdn_tune.cli import app
from gdn_tune.explain import explain
from gdn_tune.store import Store
from gdn_tune.trial import Trial
from gdn_tune.wire import parse_sample
from pa_decode import PaDecodeSchedule
from pa_decode import tables as pa_tables

CASE = replace(GDN_CASES["packed-397b-tp8-1024"].small(2, 2), num_heads=8, num_key_heads=2)
"""Two sequences of two chunks and a tail, with all heads."""
LONG = replace(CASE, seq_lens=(64 * 20, 64), id="long")
UNITS = 132
BEST: dict[str, dict[str, Any]] = {
    "k5": {"block_v": 128, "num_warps": 8, "num_stages": 2},
    "prepare": {"mode": "split", "num_warps": 8, "num_stages": 1},
    "staged": {"path": "staged", "block_v": 16, "num_warps": 4, "num_stages": 1},
    "fast": {"path": "fast", "p_in_scan": False, "segment_chunks": 16},
    "pa": {"budget": 512},
}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose kernels are the reference's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200 that is made up")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(measure, "input_sets", lambda size, device: 1)
    monkeypatch.setattr(candidates, "_triton_version", lambda: rules.FAST_TRITON)
    monkeypatch.setattr(select, "_triton_version", lambda: rules.FAST_TRITON)
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    monkeypatch.setattr(trial, "stages", lambda backend: reference)
    monkeypatch.setattr(workload, "fast_prefill", lambda: _fast_by_reference)
    select._select.cache_clear()
    yield
    select._select.cache_clear()
    tables.forget_launches()
    pa_tables.forget()


def _fast_by_reference(q: Any, k: Any, v: Any, g: Any, beta: Any, *, o: Any, plan: Any, spec: Any, **rest: Any) -> None:
    heads, rows = v.shape[2], (v.shape[0], v.shape[2], v.shape[1], v.shape[3])
    w, u, v_new = (v.new_empty(rows) for _ in range(3))
    gates = torch.empty(rows[:3])
    scale = rest.pop("scale")
    h = v.new_empty(1, plan.total_chunks, heads, 128, 128)
    reference.prepare(k, v, g, beta, w=w, u=u, g_cumsum=gates, plan=plan, use_exp2=True)
    reference.state_scan(
        k, w, u, g=gates, gk=None, h=h, v_new=v_new, plan=plan, use_exp2=True, g_head_major=True, **rest
    )
    reference.output(q, k, v_new, h, gates, o=o, scale=scale, plan=plan, use_exp2=True)


def clock(best: dict[str, Any]) -> Callable[..., measure.Timer]:
    """A timer by which ``best`` takes 50 us and everything else 100, and which checks that it times no other."""

    def timer(a_trial: Any, key: Any, config: dict[str, Any], loads: Any, outs: Any, report: Any) -> measure.Timer:
        assert dict(key.config) == config
        us = 50.0 if config == best else 100.0

        def timed(count: int) -> Sequence[float]:
            return [us + 0.01 * (index % 3) for index in range(count)]

        return timed

    return timer


def measured(a_trial: Trial, best: dict[str, Any], store: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(trial, "_timer", clock(best))
    monkeypatch.setattr(trial, "trial_of", lambda job: a_trial)
    reports: list[dict[str, Any]] = []
    limits = asdict(measure.Limits(first=20, most=20))
    trial.run({"done": [], "limits": limits, "commit": "abc", "model": False}, reports.append)
    samples = [parse_sample(each["sample"]) for each in reports if "sample" in each]
    with Store(store) as opened:
        opened.add(*samples)
    return samples


def export(store: Path, out: Path) -> list[Path]:
    result = CliRunner().invoke(app, ["export", "--store", str(store), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    files = sorted(out.rglob("*.json"))
    findings, _ = check(files)
    assert not [finding for finding in findings if finding.level == "error"], list(map(str, findings))
    return files


@pytest.mark.parametrize(
    ("op", "best", "case"),
    [("k5", "k5", CASE), ("prepare", "prepare", CASE), ("block", "staged", CASE), ("block", "fast", LONG)],
    ids=["k5", "prepare", "block-staged", "block-fast"],
)
def test_what_is_fastest_is_what_selection_runs(
    op: Any, best: str, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_trial = Trial(op, case, "sm90", UNITS, torch.device("cpu"))
    samples = measured(a_trial, BEST[best], tmp_path / "store", monkeypatch)
    assert {sample.key.config for sample in samples} == {a_trial.key(config, 1).config for config in a_trial.configs}
    assert all(sample.status == "ok" and sample.n >= 20 for sample in samples)
    kernel = {"k5": "state_scan"}.get(op, op)
    (file,) = export(tmp_path / "store", tmp_path / "tables")
    assert file.relative_to(tmp_path).as_posix() == f"tables/sm90/{kernel}.json"
    (row,) = json.loads(file.read_text())["rows"]
    assert BEST[best].items() <= row.items() and row["us"] == 50.01 and row["cu_num"] == UNITS
    (origin,) = json.loads(file.read_text())["provenance"].values()
    assert origin["device"] == "H200 that is made up" and "modelled" not in origin
    problem = problem_of(case, "sm90", UNITS)
    with env.override(tables=str(file)):
        found = select.select(problem, torch.device("cuda"), prepare_backend="triton" if op != "block" else None)
    assert f"from the tuned table, {file} row 0 (50.01 us, gdn-tune, H200 that is made up" in str(found)
    wanted: Any = dict(BEST[best])
    if best == "fast":
        assert found.fast is not None
        assert all(getattr(found.fast, name) == value for name, value in wanted.items() if name != "path")
        return
    wanted.pop("path", None)
    spec: Any = {"k5": found.state_scan, "prepare": found.prepare, "block": found.output}[op]
    kinds: Any = {"k5": StateScanConfig, "prepare": PrepareConfig, "block": OutputConfig}
    assert found.fast is None and spec.config == kinds[op](**wanted)


def test_a_choice_that_cannot_be_told_apart_from_the_rule_s_is_the_rule_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_trial = Trial("k5", CASE, "sm90", UNITS, torch.device("cpu"))
    measured(a_trial, {}, tmp_path / "store", monkeypatch)
    (file,) = export(tmp_path / "store", tmp_path / "tables")
    (row,) = json.loads(file.read_text())["rows"]
    ruled, _ = rules.state_scan_config(problem_of(CASE, "sm90", UNITS))
    assert asdict(ruled).items() <= row.items()
    notes = [finding for finding in check([file])[0] if finding.kind == "rule"]
    assert len(notes) == 1 and "the rule gives block_v=32, num_warps=4, num_stages=3 without it" in str(notes[0])


def test_a_budget_of_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case: DecodeCase = DECODE_CASES["pa-h16x2-p64-q1-b16-ctx8192"]
    a_trial = Trial("pa", case, "sm90", UNITS, torch.device("cpu"))
    monkeypatch.setattr(Trial, "workload", lambda self: _Nothing())
    measured(a_trial, BEST["pa"], tmp_path / "store", monkeypatch)
    (file,) = export(tmp_path / "store", tmp_path / "tables")
    assert file.name == "pa_decode.json" and json.loads(file.read_text())["rows"][0]["budget"] == 512
    geometry = case.geometry("sm90", UNITS)
    with env.override(tables=str(file)):
        budget = pa_tables.tuned_budget(geometry)
    assert budget == 512 != PaDecodeSchedule.select(geometry).budget == UNITS


class _Nothing:
    """A workload whose every budget is right."""

    bytes = 1

    def outputs(self) -> dict[str, torch.Tensor]:
        return {"out": torch.zeros(1, 1)}

    expected = outputs

    def run(self, choice: Any, out: dict[str, torch.Tensor]) -> None:
        assert isinstance(choice, int)


def test_explain_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_trial = Trial("prepare", CASE, "sm90", UNITS, torch.device("cpu"))
    measured(a_trial, BEST["prepare"], tmp_path / "store", monkeypatch)
    (file,) = export(tmp_path / "store", tmp_path / "tables")
    lens = ",".join(map(str, CASE.seq_lens))
    made = explain("prepare", "sm90", f"H=8 Hg=2 lens={lens}", UNITS, [file])
    assert made.by == "row" and made.choice == BEST["prepare"] and made.row == f"{file} row 0"
    assert made.rule == asdict(PrepareConfig("fused", 4, 1)) and "would give mode=fused" in str(made)
    other = explain("prepare", "sm90", f"H=8 Hg=2 lens={lens},64", UNITS, [file])
    assert other.by == "rule" and other.nearest == (
        f"{file} row 0, which has total_chunks={made.call['total_chunks']}",
    )
