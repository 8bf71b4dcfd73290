"""Tables from samples: equal bytes for equal samples, what wins, what is said about it; and what the runtime reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gdn_runtime import tables
from gdn_tune import tablefile
from gdn_tune.export import ExportError, export
from gdn_tune.records import Facts, Sample
from gdn_tune.spread import Spread
from gdn_tune.tablefile import Table
from tune_testing import K5_FACTS, MODELLED, TIMED, make_key, make_sample

PA_FACTS = Facts(
    B=16, Hq=16, Hkv=2, D=256, page=16, QL=1, query_dtype="bf16", scale_mode="tensor", v_packed=True, sink_dtype="none",
    window=0,
)  # fmt: skip


def steady(median: float, n: int = 101, width: float = 0.01) -> tuple[float, ...]:
    """``n`` times around ``median``, ``width`` of it from end to end."""
    return tuple(median * (1 + width * (i / (n - 1) - 0.5)) for i in range(n))


def one(*samples: Sample, base: tuple[Table, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only row of the only table of ``samples``, and its provenance."""
    (made,) = export(samples, base)
    (row,) = made.table.rows
    return row, made.table.provenance[row["provenance"]]


def sweep(**times: float) -> list[Sample]:
    """Timed samples of block_v=16, 32, 64, as far as they are given."""
    return [make_sample(int(name[1:]), *steady(time)) for name, time in times.items()]


def test_the_row_is_what_the_runtime_reads(tmp_path: Path) -> None:
    """80 compute units, 27 scans: the rule says 32."""
    (made,) = export(sweep(v16=13.0, v32=12.5, v64=11.0))
    path = tmp_path / "t.json"
    tablefile.write(path, made.table.text())
    (found,) = tables.load([path]).rows()
    assert found.row.key == tables.ScanKey("gfx942", 80, 16, 8, True, True, True, "bf16", "fp32", 10, 6)
    assert (found.row.block_v, found.row.us, found.row.num_tokens, found.row.num_seqs) == (64, 11.0, 640, 2)
    origin = found.row.provenance
    assert (origin.source, origin.device, origin.date, origin.n) == ("gdn-tune", "MI308X", "2026-11-30", 101)
    assert not origin.modelled and dict(origin.details) == {
        "toolchain": "flydsl 0.5.0",
        "kernel_digest": f"{64:064d}",
        "protocol": TIMED.text,
    }
    assert made.new == 1 and made.modelled == made.tied == made.kept == 0 and not made.notes
    assert tablefile.read(path) == made.table and made.table.text() == path.read_text()


def test_equal_samples_give_equal_bytes() -> None:
    samples = []
    for index in range(6):
        for block_v in (16, 32, 64):
            for run in range(2):
                times = steady(10.0 + (block_v * 7 + index * 3) % 5, n=20 + run)
                key = {"compute_units": 80 + index, "case": f"c{index}"}
                samples.append(make_sample(block_v, *times, key=key, started=f"2026-11-{10 + run}T00:00:00+00:00"))
    texts = set()
    for seed in range(8):
        random.Random(seed).shuffle(samples)
        (made,) = export(samples)
        texts.add(made.table.text())
    assert len(texts) == 1
    rows = json.loads(texts.pop())["rows"]
    assert [row["cu_num"] for row in rows] == list(range(80, 86))


def test_ties_go_to_the_rule_and_are_recorded() -> None:
    """One per cent apart at a spread of a half per cent or of twenty."""
    row, entry = one(*sweep(v32=10.1, v64=10.0))
    assert row["block_v"] == 64 and "tied" not in entry
    noisy = [make_sample(v, *steady(time, width=0.2)) for v, time in ((16, 30.0), (32, 10.1), (64, 10.0))]
    row, entry = one(*noisy)
    assert row["block_v"] == 32 and entry["tied"] == "block_v=64; block_v=32 cannot be told apart"
    more = [make_sample(v, *steady(time, n=20_001, width=0.2)) for v, time in ((32, 10.1), (64, 10.0))]
    assert "tied" not in one(*more)[1]
    row, entry = one(*(make_sample(v, *steady(time, width=0.2)) for v, time in ((16, 10.0), (64, 10.1))))
    assert row["block_v"] == 16 and entry["tied"] == "block_v=16; block_v=64 cannot be told apart"
    assert export(noisy)[0].tied == 1


def test_a_single_time_tells_nothing_apart() -> None:
    row, entry = one(make_sample(64, 10.0), make_sample(32, 20.0))
    assert row["block_v"] == 32 and "cannot be told apart" in entry["tied"]


def test_spread() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert spread.median == 3.0 and spread.n == 5
    assert spread.error == pytest.approx(1.2533 * 1.4826 * 1.0 / 5**0.5)
    assert not Spread(10.0, 0.0, 9).apart(Spread(10.01, 0.0, 9)) and Spread(10.0, 0.0, 9).apart(Spread(10.03, 0.0, 9))


def test_modelled_rows_have_no_time_and_equal_cycles_tie() -> None:
    row, entry = one(make_sample(16, cycles=900.0), make_sample(64, cycles=800.0))
    assert row["block_v"] == 64 and "us" not in row and entry["modelled"] is True and "n" not in entry
    assert entry["device"] == "emulator" and entry["protocol"] == MODELLED.text
    row, entry = one(make_sample(16, cycles=800.0), make_sample(32, cycles=800.0))
    assert row["block_v"] == 32 and "tied" in entry


def test_cycles_of_the_model_tell_tiles_apart_beyond_5_percent_only() -> None:
    """80 compute units, 27 scans: the rule says 32."""
    for cycles, expected in ((953.0, 32), (949.0, 64)):
        row, entry = one(make_sample(32, cycles=1000.0), make_sample(64, cycles=cycles))
        assert row["block_v"] == expected and ("tied" in entry) == (expected == 32)


def test_calls_of_another_table_are_left_out() -> None:
    """By their key: the tokens that were timed are no part of it."""
    here = sweep(v16=13.0, v64=11.0)
    there = [make_sample(32, *steady(9.0), key={"compute_units": 304})]
    other = export([make_sample(32, 9.0, key={"facts": Facts(K5_FACTS, T_flat=639)})])[0].table
    (made,) = export([*here, *there], without=[other])
    assert [row["cu_num"] for row in made.table.rows] == [304] and (made.new, made.left_out) == (1, 1)
    assert len(export([*here, *there], without=[Table(other.kernel, "gfx950")])[0].table.rows) == 2


def test_what_was_timed_wins_over_what_was_modelled() -> None:
    """In one store, over a base, and the other way round."""
    modelled = [make_sample(v, cycles=float(v)) for v in (16, 32, 64)]
    row, entry = one(*modelled, *sweep(v32=12.0, v64=13.0))
    assert row["block_v"] == 32 and row["us"] == 12.0 and "modelled" not in entry
    measured, guessed = export(sweep(v64=11.0))[0].table, export(modelled)[0].table
    row, entry = one(*modelled, base=(measured,))
    assert row["block_v"] == 64 and row["us"] == 11.0 and entry["device"] == "MI308X"
    (made,) = export(modelled, [measured])
    assert made.kept == 1 and not made.new and "the base's row stays" in made.notes[0]
    row, entry = one(*sweep(v64=11.0), base=(guessed,))
    assert row["block_v"] == 64 and "modelled" not in entry
    assert one(*modelled, base=(guessed,))[0]["block_v"] == 16


def test_a_base_keeps_what_the_samples_lack() -> None:
    base = tablefile.read(tables.packaged_file("gfx942", "state_scan_opt"))
    (made,) = export(sweep(v16=1.0), [base])
    assert made.kept == len(base.rows) == len(made.table.rows) - 1 and made.new == 1
    old = {json.dumps([row[name] for name in row if name != "provenance"]) for row in base.rows}
    new = {json.dumps([row[name] for name in row if name != "provenance"]) for row in made.table.rows}
    assert old < new and len(made.table.provenance) == len(base.provenance) + 1
    again = export(sweep(v16=1.0), [made.table])[0].table
    assert again.text() == made.table.text()
    broken = Table(base.kernel, base.arch, base.provenance, [{**base.rows[0], "block_v": 48}])
    with pytest.raises(ValueError, match="state_scan_opt for gfx942, row 0: block_v: got 48"):
        export(sweep(v16=1.0), [broken])


def test_only_what_was_right_wins() -> None:
    wrong = Sample(make_key(16), "wrong", steady(1.0), error=3.0, n=101)
    crashed = Sample(make_key(64), "crashed", detail="SIGSEGV")
    assert one(wrong, crashed, *sweep(v32=12.0))[0]["block_v"] == 32
    (made,) = export([wrong, crashed])
    assert not made.table.rows and "no candidate was right" in made.notes[0]
    later = make_sample(16, *steady(2.0), started="2026-12-01T00:00:00+00:00")
    assert one(wrong, later, *sweep(v32=12.0))[0]["block_v"] == 16
    undone = Sample(make_key(16), "wrong", started="2026-12-02T00:00:00+00:00")
    assert one(wrong, later, undone, *sweep(v32=12.0))[0]["block_v"] == 32


def test_runs_are_not_mixed() -> None:
    """Another toolchain or protocol is another run; the complete one counts, then the newer one."""
    old = sweep(v16=10.0, v32=11.0)
    new = [
        make_sample(v, *steady(time), key={"toolchain": "flydsl 0.6.0"}, started="2026-12-05T00:00:00+00:00")
        for v, time in ((32, 5.0), (16, 6.0))
    ]
    row, entry = one(*old, *new)
    assert row["block_v"] == 32 and entry["toolchain"] == "flydsl 0.6.0" and entry["date"] == "2026-12-05"
    assert one(*old, new[0])[0]["block_v"] == 16
    changed = make_sample(16, *steady(20.0), key={"kernel_digest": "new"}, started="2026-12-05T00:00:00+00:00")
    assert one(*old, changed)[0]["block_v"] == 32  # the time of the code that is gone does not count


def test_paged_decode() -> None:
    def candidate(budget: int, time: float) -> Sample:
        key = make_key(op="pa", facts=PA_FACTS, config=Facts(budget=budget), arch="gfx950", compute_units=256, case="p")
        return Sample(key, "ok", steady(time), n=101, started="2026-11-30T00:00:00+00:00")

    (made,) = export([candidate(256, 20.0), candidate(512, 15.0)])
    from pa_decode.tables import parse_row

    (row,) = made.table.rows
    origins = {name: tables.parse_provenance(entry) for name, entry in made.table.provenance.items()}
    parsed = parse_row(row, "gfx950", origins)
    assert parsed.budget == 512 and parsed.geometry.batch == 16 and made.table.kernel == "pa_decode"


def test_what_is_no_row() -> None:
    with pytest.raises(
        ExportError, match="varlen-640 on gfx942 with 80 compute units: the facts lack Hg, total_chunks"
    ):
        facts = {name: value for name, value in K5_FACTS.items() if name not in ("Hg", "total_chunks")}
        export([make_sample(16, 1.0, key={"facts": Facts(facts)})])
    with pytest.raises(ExportError, match="block_v: got 48"):
        export([make_sample(48, 1.0)])
    with pytest.raises(ExportError, match="H: got 16, expected a multiple of Hg=3"):
        export([make_sample(16, 1.0, key={"facts": Facts(K5_FACTS, Hg=3)})])
    with pytest.raises(ExportError, match="640 tokens in 2 sequences have 10 to 11"):
        export([make_sample(16, 1.0, key={"facts": Facts(K5_FACTS, total_chunks=12)})])
    (made,) = export([make_sample(16, 1.0, key={"config": Facts(kernel="vk", block_v=16)})])
    assert not made.table.rows and "no column for" in made.notes[0]
    ungated = make_sample(16, 1.0, key={"facts": Facts(K5_FACTS, gated=False)})
    (made,) = export([ungated, make_sample(64, 2.0, key={"facts": Facts(K5_FACTS, gated=True)})])
    assert [row["block_v"] for row in made.table.rows] == [64] and "no column for gated=False" in made.notes[0]
    (made,) = export([make_sample(16, 1.0, key={"op": "prepare", "config": Facts(variant="wave")})])
    assert made.notes == ["gfx942 prepare: no call looks up a table, the rule stays"] and not made.table.rows
