"""What a report says: ratios, overheads, shares and margins of figures that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdn_tune.bench.profile import FUSED_PREPARE, K5, K6
from gdn_tune.report.command import sections_of
from gdn_tune.report.content import Bars, Column, Dots, Lines, Section, Table, digits, shown, slug, trimmed
from gdn_tune.report.data import BarRow, Data, Decode, Origin, Shape, Time
from gdn_tune.report.decoding import speed
from gdn_tune.report.prefill import lines_of
from gdn_tune.report.read import read
from gdn_tune.report.roofline import block_least, roof_of
from tune_testing import reports

ROOF = roof_of("NVIDIA H200", None, None)
RUN = Origin("a.json", "block", device="NVIDIA H200")


def made(paths: list[Path], **options: Any) -> dict[str, Section]:
    """Sections of a report of ``paths``, by name."""
    return {section.name: section for section in sections_of(read(paths), ROOF, **options)}


def column(table: Table, name: str) -> list[Any]:
    """Values of a column."""
    index = [each.name for each in table.columns].index(name)
    return [row[index] for row in table.rows]


def rows_of(table: Table, **wanted: Any) -> list[dict[str, Any]]:
    """Rows whose columns have these values."""
    found = [dict(zip((each.name for each in table.columns), row, strict=True)) for row in table.rows]
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


# ------------------------------------------------------------------------------------------------ times


def test_ratios_are_of_the_same_shape_and_variant(tmp_path: Path) -> None:
    section = made([reports.block_file(tmp_path / "a.json")])["block"]
    timed, modelled = section.tables
    (fly,) = rows_of(timed, backend="flydsl", variant="", tokens=16384, snapshots="fp32")
    assert fly["us"] == 1000.0 and fly["baseline"] == "aiter" and fly["baseline / time"] == 1.5
    least = block_least(Shape("", 32, 16, (8192, 8192)))
    assert ROOF is not None and fly["roofline us"] == ROOF.us(*least) and fly["x roofline"] == 1000 / ROOF.us(*least)
    (pool,) = rows_of(timed, backend="flydsl", variant="pool", tokens=16384, snapshots="fp32")
    assert pool["baseline / time"] is None  # aiter has no pool
    assert set(column(timed, "backend")) == {"aiter", "flydsl"} and set(column(modelled, "backend")) == {"emulate"}
    other = made([tmp_path / "a.json"], baseline="flydsl")["block"].tables[0]
    (hip,) = rows_of(other, backend="aiter", tokens=8192, snapshots="bf16")
    assert hip["baseline / time"] == 400 / 600
    with pytest.raises(ValueError, match="baseline: got 'fla', expected one of aiter, flydsl"):
        made([tmp_path / "a.json"], baseline="fla")


def test_no_ratio_across_files(tmp_path: Path) -> None:
    rows = [reports.block_row(8192, "flydsl", 400.0)]
    paths = [reports.save(tmp_path / "b.json", "block", rows), reports.block_file(tmp_path / "a.json")]
    table = made(paths, baseline="aiter")["block"].tables[0]
    (alone,) = rows_of(table, file="b.json")
    assert alone["baseline"] == "" and alone["baseline / time"] is None


def test_modelled_figures_are_apart_and_say_so(tmp_path: Path) -> None:
    sections = made([reports.block_file(tmp_path / "a.json"), reports.store_file(tmp_path / "s"),
                     reports.pa_file(tmp_path / "p.json")])  # fmt: skip
    figures = [figure for section in sections.values() for figure in section.figures]
    assert {figure.modelled for figure in figures} == {True, False}
    for figure in figures:
        assert len({origin.modelled for origin in figure.origins}) == 1
        words = (figure.name, figure.x)
        assert figure.modelled == ("modelled" in words[0]) and (not figure.modelled or "us" not in words[1].split())
    for section in sections.values():
        for table in section.tables:
            heads = " ".join(each.name for each in table.columns)
            assert ("modelled" in table.name) == ("modelled" in table.title) and not (
                "modelled" in table.name and "roofline" in heads
            )


def test_points_of_the_plots_are_those_of_the_table(tmp_path: Path) -> None:
    for section in made([reports.block_file(tmp_path / "a.json"), reports.k5_file(tmp_path / "k.json"),
                         reports.pa_file(tmp_path / "p.json")]).values():  # fmt: skip
        numbers = {value for table in section.tables for row in table.rows for value in row}
        shares = (
            {100 * value for value in numbers if isinstance(value, float)} if section.name == "snapshots" else set()
        )
        drawn = 0
        for figure in section.figures:
            if isinstance(figure, Lines):
                values = [y for each in figure.series for _, y in each.points]
            else:
                assert isinstance(figure, Bars)
                values = [value for _, _, parts, _ in figure.rows for _, value in parts]
            drawn += len(values)
            assert set(values) <= numbers | shares, figure.name
        assert drawn or section.name in ("counters", "host", "picks")


def test_lines_join_calls_of_one_layout() -> None:
    shapes = [Shape("", 32, 16, (8192,) * n) for n in (1, 2, 4)] + [Shape("", 32, 16, (100, 7000, 900))]
    times = [Time(RUN, "block", shape, "x", 100.0 * shape.tokens, "in a graph") for shape in shapes]
    times.append(replace(times[0], backend="y", how="events"))
    figure = lines_of((32, 16, ""), times, "n", "t", "us", ROOF, ("x", "y"), lambda row: row.label)
    assert isinstance(figure, Lines)
    x, points, y, *roof = figure.series
    assert x.line and [at for at, _ in x.points] == [8192, 16384, 32768] and not points.line
    assert points.points == ((8000.0, 800_000.0),) and y.hollow == {0} and "Hollow" in figure.note
    assert figure.marks == ((8000.0, "3 ragged sequences"),) and all(each.roof for each in roof) and len(roof) == 2


def test_bars_where_all_calls_have_as_many_tokens() -> None:
    times = [
        Time(RUN, "block", Shape("", 32, 16, (8192,)), name, us, "wall") for name, us in (("a", 90.0), ("b", 70.0))
    ]
    figure = lines_of((32, 16, ""), times, "n", "t", "us", ROOF, ("a", "b"), lambda row: row.label)
    assert isinstance(figure, Bars) and [row[1] for row in figure.rows] == ["a", "b", "roofline"]
    assert (
        lines_of((32, 16, ""), [replace(times[0], shape=Shape("?", 32, 16, ()))], "n", "t", "us", None, (), str) is None
    )  # type: ignore[arg-type]


def test_runs_of_one_backend_do_not_mix(tmp_path: Path) -> None:
    paths = [reports.k5_file(tmp_path / "a.json"), reports.k5_file(tmp_path / "b.json")]
    (figure,) = made(paths)["k5"].figures
    assert isinstance(figure, Lines)
    labels = [each.label for each in figure.series if not each.roof]
    assert labels == ["hip (a.json)", "triton (a.json)", "hip (b.json)", "triton (b.json)"]


# ------------------------------------------------------------------------------------------------ snapshots, stages


def test_what_fp32_snapshots_cost(tmp_path: Path) -> None:
    section = made([reports.snapshot_file(tmp_path / "s.json"), reports.block_file(tmp_path / "a.json")])["snapshots"]
    timed, modelled = section.tables
    alone = {row["part"]: row["overhead"] for row in rows_of(timed, taken="alone")}
    assert alone == pytest.approx({"K5 alone": 0.06, "K6 alone": 0.25})
    assert {row["part"] for row in rows_of(timed, file="a.json")} == {"block", K5, K6}
    assert column(timed, "overhead")[2:] == pytest.approx([0.25] * 27)  # 3 lengths, 3 columns, 3 parts
    assert {row["backend"] for row in rows_of(modelled)} == {"emulate"}
    assert len(section.figures) == 3 + 2 and all("K5 alone" not in figure.title for figure in section.figures)


def test_a_pair_is_of_one_run(tmp_path: Path) -> None:
    rows = {snapshot: reports.block_row(8192, "x", 1.0, snapshot=snapshot) for snapshot in ("bf16", "fp32")}
    paths = [reports.save(tmp_path / f"{snapshot}.json", "block", [row]) for snapshot, row in rows.items()]
    section = made(paths)["snapshots"]
    assert not section.tables and section.text == ["No input has the same call with both dtypes of snapshots."]


def test_stages(tmp_path: Path) -> None:
    section = made([reports.block_file(tmp_path / "a.json")])["stages"]
    (row,) = rows_of(section.tables[0], backend="aiter", snapshots="bf16", shape="1 x 8192")
    assert (row[FUSED_PREPARE], row[K5], row[K6]) == pytest.approx((108.0, 270.0, 162.0))
    assert row["sum, us"] == pytest.approx(540.0) and row["host gap, us"] == pytest.approx(60.0)
    figure = section.figures[0]
    assert isinstance(figure, Bars) and [part for part, _ in figure.rows[0][2]] == [FUSED_PREPARE, K5, K6]


# ------------------------------------------------------------------------------------------------ decode


def test_decode(tmp_path: Path) -> None:
    section = made([reports.pa_file(tmp_path / "p.json")])["decode"]
    (row,) = rows_of(section.tables[0], batch=16, context=8192, backend="triton", caches="warm")
    size = 16 * 8192 * 2 * 512 + 4 * 16 * 16 * 256
    assert row["us"] == 2.0 * (5 + 16 * 8192 * 2048 / 4.3e6) and row["GB/s"] == pytest.approx(size / row["us"] / 1e3)
    assert row["roofline us"] == pytest.approx(size / 4.3e6) and row["p90-p10 us"] == 0.5
    assert row["share of roofline"] == pytest.approx(row["roofline us"] / row["us"])
    assert [figure.name for figure in section.figures if isinstance(figure, Lines)] == [
        f"decode-us-16-2-256-page-64-ql-1-tensor-packed-b{batch}" for batch in (1, 16)
    ]
    assert column(section.tables[1], "cycles per tile (modelled)") == [2048.0]
    assert not any("Shares above" in text for text in section.text)


def test_windows_and_scales_count_in_bytes() -> None:
    row = Decode(RUN, "x", 2, 8192, 64, 4, 10.0, num_heads=16, num_kv_heads=2, head_dim=256, scales="token", window=257)
    assert speed(row) == pytest.approx((2 * 260 * 2 * 520 + 4 * 2 * 4 * 16 * 256) / 10.0 / 1e3)
    assert speed(replace(row, num_heads=None)) is None


# ------------------------------------------------------------------------------------------------ bars, picks


def test_bars() -> None:
    counted = Origin("c.json", "counters", modelled=True)
    figures = (("instructions", 90.0, 100.0), ("requests", 8.0, 8.0), ("scratch", 0.0, 0.0), ("VGPRs", 300.0, 256.0))
    rows = [BarRow(counted, "gfx942", "opt", name, got, limit) for name, got, limit in figures]
    section = next(s for s in sections_of(Data(bars=rows)) if s.name == "counters")
    assert section.text[1] == "3 of 4 bars are met." and section.text[2] == "Missed: opt (gfx942) VGPRs: 300 of 256."
    (figure,) = section.figures
    assert isinstance(figure, Dots) and figure.rows == (("opt", (("instructions", 0.9), ("VGPRs", 300 / 256)), "3/4"),)
    brief, whole = section.tables
    assert not brief.data_only and whole.data_only and column(whole, "share of bar") == [0.9, 1.0, None, 300 / 256]
    assert column(whole, "met") == [True, True, True, False] and column(brief, "met") == [3]


def test_picks(tmp_path: Path) -> None:
    section = made([reports.store_file(tmp_path / "s")])["picks"]
    timed, every, modelled, _ = section.tables
    clear, tied = rows_of(timed)
    assert (clear["pick"], clear["second"], clear["rule"], clear["tied"]) == (
        "block_v=64", "block_v=32", "block_v=32", False,
    )  # fmt: skip
    assert (
        clear["us"] == 10.0 and clear["margin"] == pytest.approx(0.2) and clear["gain over rule"] == pytest.approx(0.2)
    )
    assert tied["tied"] and tied["pick"] == tied["rule"] == "block_v=32" and tied["gain over rule"] == 0
    assert tied["margin"] == pytest.approx(10 / 10.001 - 1) and len(every.rows) == 6 and clear["n"] == 100
    (counted,) = rows_of(modelled)
    assert counted["cycles (modelled)"] == 900.0 and counted["margin"] == pytest.approx(1 / 9)
    assert section.text[2] == "1 of 3 picks are tied; 2 are what the rule gives."


# ------------------------------------------------------------------------------------------------ what is said


def test_sections_without_figures_say_so(tmp_path: Path) -> None:
    sections = made([reports.k5_file(tmp_path / "k.json")])
    assert [name for name, section in sections.items() if section.tables] == ["k5"]
    assert all(section.text for section in sections.values())


def test_numbers_for_people() -> None:
    values = (405.0, 49.8, 2486.8, 0.0037417, 1234567.8, 0.0, 3, 94.23561)
    assert [digits(value) for value in values] == [
        "405", "49.8", "2486.8", "0.0037417", "1234568", "0", "3", "94.236",
    ]  # fmt: skip
    assert digits(2e-5) == "0.00002"
    pairs: Any = ((None, "ratio"), (1.256, "ratio"), (-0.0314, "percent"), (True, "text"), ("", "text"))
    cells = [shown(value, Column("x", kind)) for value, kind in pairs]
    assert cells == ["-", "1.26", "-3.1 %", "yes", "-"]
    assert slug("GB/s", "H=3", "", "X y") == "gb-s-h-3-x-y"
    table = Table("t", "t", (Column("a"), Column("b")), ((1, None), (2, "")))
    assert trimmed(table) == Table("t", "t", (Column("a"),), ((1,), (2,)))
