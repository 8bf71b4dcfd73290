"""Tables, ratios and CSV of fabricated measurements."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from gdn_tune.bench import k5
from gdn_tune.bench.profile import K5, K6, KernelTime
from gdn_tune.bench.results import (
    GAP,
    KERNELS,
    LAUNCH,
    WALL,
    Measurement,
    print_case,
    ratio,
    stage_table,
    summary,
    to_csv,
    to_json,
    totals,
)


def made(backend: str, variant: str = "", wall: float | None = None, **changes: Any) -> Measurement:
    metrics = {} if wall is None else {WALL: wall, K5: wall / 2}
    fields: dict[str, Any] = {"facts": {"T": 8192}, "metrics": metrics, **changes}
    return Measurement("a", fields.pop("snapshot", "bf16"), backend, variant, **fields)


HIP, HIP_BARE = made("aiter", "", 600.0), made("aiter", "no-meta", 800.0)
FLY, FLY_BARE = made("flydsl", "", 500.0), made("flydsl", "no-meta", 640.0)
POOL = made("flydsl", "pool", 510.0)
EVERYTHING = [HIP, HIP_BARE, FLY, FLY_BARE, POOL]


def test_ratios_are_those_of_the_same_variant() -> None:
    heads, rows = summary(EVERYTHING, WALL, "aiter")
    columns = ["aiter", "aiter no-meta", "flydsl", "flydsl no-meta", "flydsl pool"]
    assert heads == ["case", "snapshots", *columns, "aiter/flydsl", "aiter/flydsl no-meta", "aiter/flydsl pool"]
    assert rows == [["a", "bf16", "600.0", "800.0", "500.0", "640.0", "510.0", "1.20x", "1.25x", "-"]]


def test_a_dash_stands_where_there_is_nothing() -> None:
    other = made("flydsl", "", 400.0, snapshot="fp32")
    failed = made("aiter", snapshot="fp32", failure="out of memory")
    heads, rows = summary([HIP, FLY, other, failed], WALL, "aiter")
    assert rows[1] == ["a", "fp32", "-", "400.0", "-"]
    assert summary([HIP, FLY], K6, "aiter")[1] == [["a", "bf16", "-", "-", "-"]]
    assert len(heads) == 5


def test_no_ratio_of_other_units_nor_without_the_baseline() -> None:
    counted = made("emulate", "", 900.0, unit="cycles")
    assert ratio([HIP, counted], counted, WALL, "aiter") is None
    assert summary([HIP, counted], WALL, "aiter")[1][0][-1] == "-"
    heads, rows = summary([FLY, POOL], WALL, "aiter")
    assert heads == ["case", "snapshots", "flydsl", "flydsl pool"] and len(rows[0]) == 4
    nothing = made("flydsl", "", None, metrics={WALL: 0.0})
    assert ratio([HIP, nothing], nothing, WALL, "aiter") is None


def test_totals_and_the_host_gap() -> None:
    found = totals({K5: 100.0, K6: 50.0}, wall=180.0, launch=40.0)
    assert found == {K5: 100.0, K6: 50.0, KERNELS: 150.0, LAUNCH: 40.0, WALL: 180.0, GAP: 30.0}


def test_the_stage_table_hides_what_nobody_ran_and_has_a_rule_before_the_totals() -> None:
    first = made("triton", metrics=totals({K5: 100.0}, wall=180.0, launch=40.0))
    second = made("aiter", metrics=totals({K5: 90.0, K6: 0.0}, wall=95.0, launch=50.0))
    heads, rows = stage_table([first, second, made("fla", failure="no")])
    assert heads == ["stage", "triton", "aiter"]
    assert [row[0] for row in rows] == [K5, "---", KERNELS, LAUNCH, WALL, GAP]
    assert rows[0][1:] == ["100.0", "90.0"] and rows[-1][1:] == ["80.0", "5.0"]
    assert stage_table([made("fla", failure="no")])[1] == []


def test_a_case_is_printed_with_its_kernels_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = (KernelTime("state_scan_kernel", 90.0), KernelTime("scan_kernel", 8.0, 2.0))
    print_case(
        "title", [made("triton", wall=100.0, kernels=kernels), made("fla", failure="no pool")], show_kernels=True
    )
    text = capsys.readouterr().out
    assert "title" in text and "fla: no pool" in text and "kernels of triton" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| scan_kernel"))
    assert [cell.strip() for cell in line.split("|")[1:-1]] == ["scan_kernel", "K5+K6 scan", "8.0", "2"]
    print_case("title", [made("fla", failure="no pool")], show_kernels=False)
    assert capsys.readouterr().out.splitlines() == ["title", "fla: no pool"]


def test_csv_has_a_line_per_measurement_and_reads_back() -> None:
    failed = made("fla", failure='no "pool", sorry')
    rows = list(csv.DictReader(io.StringIO(to_csv([FLY_BARE, failed]))))
    assert rows[0]["variant"] == "no-meta" and rows[0][WALL] == "640.000" and rows[0]["T"] == "8192"
    assert rows[1]["failure"] == 'no "pool", sorry' and rows[1][WALL] == ""
    assert list(rows[0])[:2] == ["case", "T"] and list(rows[0])[-1] == "failure"


def test_json_holds_everything() -> None:
    kept = json.loads(json.dumps(to_json([made("triton", wall=1.0, kernels=(KernelTime("k", 1.0),))], seed=3)))
    assert kept["seed"] == 3 and kept["measurements"][0]["kernels"] == [{"name": "k", "us": 1.0, "launches": 1.0}]


def test_the_harness_table_compares_device_times() -> None:
    # The walls say the opposite: the host of the first is slow.
    first = made("aiter", metrics={WALL: 100.0, K5: 80.0})
    second = made("flydsl", metrics={WALL: 200.0, K5: 40.0})
    heads, rows = k5.harness_table([first, second], "aiter")
    assert heads == ["T", "snap", "aiter(us)", "flydsl(us)", "aiter/flydsl"]
    assert rows == [["8192", "bf16", "80.0", "40.0", "2.00x"]]


def test_the_harness_table_has_the_wall_on_a_cpu() -> None:
    first, second = made("triton", metrics={WALL: 100.0}), made("reference", metrics={WALL: 200.0})
    assert k5.harness_table([first, second], "triton")[1] == [["8192", "bf16", "100.0", "200.0", "0.50x"]]
