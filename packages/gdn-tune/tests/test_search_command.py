"""The command: candidates of a small call on the emulator from end to end, and wrong uses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gdn_runtime import tables
from gdn_tune import pool, tablefile
from gdn_tune.cli import app
from gdn_tune.export import export
from gdn_tune.formats import OPT
from gdn_tune.records import MODEL
from gdn_tune.store import Store
from gdn_tune.tune_command import rows_of
from tune_testing import make_sample

emulated = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("cdna_emu", "flydsl")), reason="needs the extra model"
)


@pytest.fixture(autouse=True)
def children() -> Iterator[None]:
    yield
    pool.close_children()


@emulated
def test_a_model_ranks_candidates_that_are_right(tmp_path: Path) -> None:
    file = tmp_path / "store"
    call = ["tune", "prepare", "--arch", "gfx950", "--cases", "dtypes-35b-tp2-*", "--model", "--store", str(file)]
    result = CliRunner().invoke(app, [*call, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["errors"] == {} and len(report["rows"]) == 4
    with Store(file) as store:
        samples = list(store.samples())
    assert {sample.key.config["variant"] for sample in samples} == {"wave", "group"}
    for sample in samples:
        # 256 value heads and chunks on 256 compute units: a wave takes them by fours, on a quarter of the units.
        assert sample.status == "ok" and sample.key.protocol["method"] == MODEL and sample.key.device == "emulator"
        assert sample.cycles is not None and sample.cycles > 1000 and sample.error is not None and 0 < sample.error < 1
        assert sample.counters["prepare mfma"] > 0 and sample.key.kernel_digest and "flydsl" in sample.key.toolchain
    fastest = [row for row in report["rows"] if row["verdict"] == "fastest"]
    assert len(fastest) == 2 and {row["config"] for row in fastest} == {"variant=group"}
    assert CliRunner().invoke(app, [*call, "--quiet"]).exit_code == 0
    with Store(file) as store:
        assert len(store) == len(samples)  # a second run has nothing to do
    (table,) = export(samples)
    assert not table.table.rows and "no call looks up a table" in table.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["k6", "--arch", "gfx942", "--cases", "*"], "got 'k6', expected one of k5, prepare, block, pa"),
        (["k5", "--cases", "*"], "expected --arch and --cases"),
        (["k5", "--arch", "gfx1100", "--cases", "*", "--model"], "gfx1100"),
        (["k5", "--arch", "gfx942", "--cases", "none-*", "--model"], "'none-*'"),
        (
            ["k5", "--arch", "gfx942", "--cases", "*", "--model", "--executor", "ray:x"],
            "expected local or dask:ADDRESS",
        ),
    ],
)
def test_wrong_uses(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments, "--store", str(tmp_path / "store")])
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_gpu(tmp_path: Path) -> None:
    call = ["tune", "k5", "--arch", "sm90", "--cases", "emptylast-35b-tp1", "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 2 and "no GPU: --model ranks candidates without one" in result.output
    result = CliRunner().invoke(app, [*call, "--model"])
    assert result.exit_code == 2 and "the emulator has gfx942, gfx950" in " ".join(result.output.split())


def test_cases_are_listed() -> None:
    result = CliRunner().invoke(app, ["tune", "pa", "--list-cases"])
    assert result.exit_code == 0 and "pa-h16x2-p16-q1-b16-ctx8192: B=16 Hq=16 Hkv=2 D=256" in result.output


def test_rows_say_who_is_fastest_and_who_cannot_be_told_apart() -> None:
    apart = [
        make_sample(16, *[10.0, 10.1] * 50),
        make_sample(32, *[9.0, 9.1] * 50),
        make_sample(64, *[12.0, 12.1] * 50),
    ]
    verdicts = {row["config"]: row["verdict"] for row in rows_of(apart)}
    assert verdicts == {"block_v=32": "fastest", "block_v=16": "+11.0 %", "block_v=64": "+33.1 %"}
    tied = [*apart[:2], make_sample(64, *[9.01, 9.1] * 50)]
    assert [row["verdict"] for row in rows_of(tied)][:2] == [
        "+0.0 %, 2 cannot be told apart",
        "+0.1 %, 2 cannot be told apart",
    ]


@emulated
@pytest.mark.slow
def test_rows_of_the_shipped_grid_are_made_again(tmp_path: Path) -> None:
    """By the commands of docs/tuned-tables.md, for two of its cases; but for the day and what was installed."""
    shipped = tablefile.read(tables.GRID / "gfx950" / "state_scan_opt.json")
    place = {OPT.key_of(row): row for row in shipped.rows}
    store, out = tmp_path / "store", tmp_path / "out"
    cases = ("grid-packed-397b-tp8-1024-of-16384-bf16", "grid-packed-397b-tp4-8192-of-8192-bf16")
    call = ["tune", "k5", "--model", "--arch", "gfx950", "--compute-units", "256", "--store", str(store), "--quiet"]
    result = CliRunner().invoke(app, [*call, *(word for case in cases for word in ("--cases", case))])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["export", "--store", str(store), "--out", str(out)]).exit_code == 0
    made = tablefile.read(out / "gfx950" / "state_scan_opt.json")
    assert {row["block_v"] for row in made.rows} == {16, 64} and len(made.rows) == 2

    def facts(table: tablefile.Table, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        entry = dict(table.provenance[row["provenance"]])
        for name in ("date", "toolchain", "kernel_digest"):
            del entry[name]
        return {**row, "provenance": ""}, entry

    for row in made.rows:
        assert facts(made, row) == facts(shipped, place[OPT.key_of(row)])
