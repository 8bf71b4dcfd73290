"""What a report reads: every layout, and every file that is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdn_tune.bench.options import host_facts
from gdn_tune.bench.profile import K5
from gdn_tune.bench.results import WALL, Measurement
from gdn_tune.cli import app
from gdn_tune.report.data import InputError
from gdn_tune.report.read import names, read
from gdn_tune.report.results import parse_shape
from gdn_tune.report.roofline import block_least, least_us, roof_of
from gdn_tune.store import Store
from tune_testing import reports

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def change(path: Path, **changes: Any) -> Path:
    """The same file with other values at its top; None takes one away."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


# ------------------------------------------------------------------------------------------------ what is read


def test_a_bench_of_the_block(tmp_path: Path) -> None:
    data = read([reports.block_file(tmp_path / "a.json")])
    timed = [time for time in data.times if time.unit == "us"]
    assert [(t.shape.tokens, t.shape.snapshot, t.label, t.value) for t in timed[:3]] == [
        (8192, "bf16", "aiter", 600.0), (8192, "bf16", "flydsl", 400.0), (8192, "bf16", "flydsl pool", 410.0),
    ]  # fmt: skip
    assert timed[0].stages[K5] == 0.5 * 0.9 * 600 and timed[0].gap == 600 - 0.9 * 600 and timed[0].how == "wall"
    counted = [time for time in data.times if time.unit == "cycles"]
    assert len(timed) == 18 and len(counted) == 6 and counted[0].value == 90_000.0
    origin, emulated = timed[0].origin, counted[0].origin
    assert origin.device == "NVIDIA H200" and not origin.modelled and origin.versions["torch"] == "2.11.0"
    for word in ("a.json", reports.DEVICE, "triton 3.6.0", "commit 0123456789ab", "2026-11-30", "warmup 10"):
        assert word in origin.line
    assert emulated.modelled and not emulated.device and emulated.arch == "gfx950"
    assert [text for _, text in data.missing] == ["snapshot-65536-bf16 bf16 aiter: out of memory"]


def test_what_the_benches_note_of_their_run_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/gdn-tune", "bench", "k5", "--cases", "dense-*"])
    found = host_facts()
    assert (
        found["schema"] == 1 and found["command"] == "gdn-tune bench k5 --cases 'dense-*'" and len(found["date"]) == 10
    )
    assert {"python", "torch"} <= found["versions"].keys()


def test_what_the_benches_write_is_read(tmp_path: Path) -> None:
    small = ("--backends", "reference", "--device", "cpu")
    shape = ("--model", "35b", "--tp", "8", "--t", "100", "--n", "2", "--warmup-iters", "0", "--bench-iters", "1")
    commands = {
        "block": (*small, *shape),
        "k5": (*small, *shape, "--snapshot-dtype", "fp32"),
        "snapshot": (*small, "--sequence-length", "70", "--num-heads", "1", "--warmup-ms", "0", "--rep-ms", "0",
                     "--block-v", "0"),
        "pa": (*small, "--batch", "1", "--context", "64", "--sweeps", "1", "--calls", "1"),
        "host": ("--op", "pa", "--calls", "2", "--rounds", "1"),
    }  # fmt: skip
    for name, words in commands.items():
        result = CliRunner().invoke(app, ["bench", name, *words, "--json", str(tmp_path / f"{name}.json")])
        assert result.exit_code == 0 or name == "host", result.output  # bars of the host do not matter here
    data = read([tmp_path / f"{name}.json" for name in commands])
    found = {(time.what, time.origin.kind, time.shape.snapshot): time.shape.lengths for time in data.times}
    blocks = {("block", "block", dtype): (50, 50) for dtype in ("bf16", "fp32")}
    alone = {(what, "snapshot", dtype): (70,) for what in ("K5", "K6") for dtype in ("bf16", "fp32")}
    assert found == {**blocks, ("K5", "k5", "fp32"): (50, 50), **alone}
    assert [(row.batch, row.context, row.variant) for row in data.decodes] == [(1, 64, "warm")]
    assert [bar.name for bar in data.bars] == ["decode call"] and data.bars[0].origin.host
    assert all(origin.device == "CPU" and origin.date and origin.commit for origin in data.origins)


def test_the_files_of_this_repository() -> None:
    data = read(sorted(RESULTS.glob("*.json")))
    values = json.loads((RESULTS / "h200-2026-11-30.json").read_text())
    rows = values["side_by_side"]["rows"]
    roof = roof_of("NVIDIA H200", None, None)
    found = {(f"{t.shape.num_heads}/{t.shape.num_key_heads} {t.shape.name}", t.backend): t for t in data.times
             if t.origin.file == "h200-2026-11-30.json" and t.origin.kind == "block"}  # fmt: skip
    for row in rows:
        for backend, us in {**row["event_us"], **row["graph_us"]}.items():
            time = found[row["shape"], backend]
            assert time.value == us and time.how == ("in a graph" if backend in row["graph_us"] else "events")
            assert least_us(roof, time) == pytest.approx(row["floor_us"], abs=0.051)
    counts = json.loads((RESULTS / "amd-counters.json").read_text())["rows"]
    pa_counts = json.loads((RESULTS / "pa-counters.json").read_text())["rows"]
    bars = [bar for row in (*counts, *pa_counts) for bar in row["bars"]]
    got = [bar for bar in data.bars if not bar.origin.host]
    assert [(b.name, b.got, b.limit, b.met) for b in got] == [(b["name"], b["got"], b["limit"], b["ok"]) for b in bars]
    decode = json.loads((RESULTS / "h200-2026-11-30-decode.json").read_text())["rows"]
    first = next(d for d in data.decodes if d.backend == "hopper, attention alone")
    assert first.value == sum(decode[0]["attention_us"]) / 2 and (first.num_heads, first.num_kv_heads) == (16, 2)


def test_shapes_of_runs_side_by_side() -> None:
    class Entry:
        def fault(self, name: str, expected: str) -> InputError:
            return InputError(f"{name}: {expected}")

    entry: Any = Entry()
    assert parse_shape(entry, "32/16 8kx2").lengths == (8192, 8192)
    assert parse_shape(entry, "8/2:dense2500").dense and parse_shape(entry, "8/2:7,9x2").lengths == (7, 9, 9)
    for text in ("", "32:8k", "32/16 8m", "32/0 8k", "32/16 8kx2000000", "32/16 "):
        with pytest.raises(InputError, match="shape"):
            parse_shape(entry, text)


def test_the_block_in_bytes_and_flop() -> None:
    """One chunk, one head: q, k, v, o of 16 KB, g and beta of 256 bytes, a state in and out."""
    entry: Any = None
    size, work = block_least(parse_shape(entry, "1/1 64"))
    assert size == 4 * 64 * 128 * 2 + 2 * 64 * 4 + 2 * 4 * 128 * 128
    square, state = 64 * 64 * 128, 64 * 128 * 128
    assert work == pytest.approx(4 * square + 2 * 64**3 / 3 + 6 * state + 4 * square)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    paths = [reports.k5_file(tmp_path / "a.json"), reports.k5_file(tmp_path / "x" / "a.json")]
    assert names(paths) == [path.as_posix() for path in paths]
    assert {time.origin.file for time in read(paths).times} == set(names(paths))


# ------------------------------------------------------------------------------------------------ roofs


def test_roofs() -> None:
    known = roof_of("NVIDIA H200", None, None)
    assert known is not None and (known.bandwidth, known.rate) == (4.3, 790.0) and "docs/performance.md" in known.source
    assert roof_of("AMD Instinct MI308X", None, None) is None and roof_of("AMD Instinct MI308X", 5.0, None) is None
    given = roof_of("AMD Instinct MI308X", 5.0, 200.0)
    assert given is not None and given.source == "as given" and given.us(5e12, 0) == given.us(0, 2e14) == 1e6
    half = roof_of("NVIDIA H200", 4.8, None)
    assert half is not None and (half.bandwidth, half.rate) == (4.8, 790.0) and "the rate by default" in half.source
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="bandwidth: got"):
            roof_of("NVIDIA H200", bad, None)


# ------------------------------------------------------------------------------------------------ faults


def write(text: str | bytes) -> Callable[[Path], Path]:
    """A maker of a file of ``text``."""

    def make(path: Path) -> Path:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def empty_store(path: Path) -> Path:
    Store(path).close()
    return path


def a_row(**changes: Any) -> Callable[[Path], Path]:
    """A maker of a bench of K5 whose only row differs."""
    row = {"case": "c", "snapshot": "bf16", "backend": "x", "metrics": {K5: 1.0},
           "facts": reports.facts(64, 64), "lengths": [64]}  # fmt: skip

    def make(path: Path) -> Path:
        path.write_text(json.dumps({**reports.RUN, "bench": "k5", "measurements": [row | changes]}))
        return path

    return make


NO_FACTS = {name: value for name, value in reports.facts(64, 64).items() if name != "H"}
FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (write(""), "a.json: empty"),
    "blank": (write(" \n"), "a.json: empty"),
    "no JSON": (write("{"), "a.json: no JSON"),
    "not finite": (write('{"bench": NaN}'), "got NaN, expected finite numbers"),
    "deep": (write("[" * 100_000), "a.json: no JSON"),
    "a list": (write("[1]"), "got a list, expected an object"),
    "bytes": (write(b"\xff\xfe\x00"), "neither JSON nor a store"),
    "unknown": (write("{}"), "unknown schema; expected JSON of gdn-tune bench"),
    "unknown rows": (write('{"rows": [{"us": 1}]}'), "unknown schema"),
    "bench": (write('{"bench": "flops"}'), "bench: got 'flops', expected one of block, k5, snapshot, pa, host"),
    "later schema": (lambda p: change(reports.k5_file(p), schema=2), "schema: got 2, expected 1"),
    "no rows": (lambda p: change(reports.k5_file(p), measurements=[]), "measurements: there is nothing in it"),
    "rows lost": (lambda p: change(reports.k5_file(p), measurements=None), "got nothing, expected a list of objects"),
    "row": (lambda p: change(reports.k5_file(p), measurements=[1]), r"measurements\[0\]: got a number"),
    "metric": (a_row(metrics={K5: "fast"}), r"measurements\[0\]: metrics: K5 state scan: got 'fast'"),
    "unit": (a_row(unit="s"), "unit: got 's', expected us or cycles"),
    "facts": (a_row(facts=NO_FACTS), "facts: H: got nothing, expected a whole number, 1 or more"),
    "lengths": (a_row(lengths=[-1]), "lengths: got a list, expected a list of whole numbers"),
    "all failed": (a_row(failure="no GPU"), "no figure in a.json: c bf16 x: no GPU"),
    "no time": (a_row(metrics={WALL: 0.0}), "no figure in a.json: c x: no K5"),
    "empty store": (empty_store, "a.json: there is nothing in it"),
    "damaged store": (write(b"SQLite format 3\0" + b"\0" * 100), "a.json: "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_say_where_they_stand(name: str, tmp_path: Path) -> None:
    make, expected = FAULTS[name]
    with pytest.raises(InputError, match=expected) as raised:
        read([make(tmp_path / "a.json")])
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.parametrize("name", ["amd-counters", "h200-2026-11-30", "h200-2026-11-30-fast", "h200-2026-11-30-decode"])
def test_files_of_benchmarks_that_lost_something(name: str, tmp_path: Path) -> None:
    values = json.loads((RESULTS / f"{name}.json").read_text())
    for rows in (values.get("rows"), values.get("side_by_side", {}).get("rows")):
        if rows:
            rows.append({name: value for name, value in rows[0].items() if name not in ("bars", "shape", "batch")})
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"a\.json: .*rows\[\d+\]: (bars|shape|batch): got nothing"):
        read([path])


def test_two_devices(tmp_path: Path) -> None:
    paths = [reports.k5_file(tmp_path / "a.json"), reports.store_file(tmp_path / "b.sqlite", device="MI308X")]
    with pytest.raises(InputError, match=r"NVIDIA H200 \(a.json\), MI308X \(b.sqlite\), expected one device"):
        read(paths)
    one = read(paths, "MI308X")
    assert not one.times and [pick.case for pick in one.picks] == ["clear", "tied", "counted"]
    with pytest.raises(InputError, match="device: got 'MI300X', expected one of NVIDIA H200, MI308X"):
        read(paths, "MI300X")


def test_a_device_is_the_same_in_a_bench_and_in_a_store(tmp_path: Path) -> None:
    """Names are what torch says, with whatever stands in brackets."""
    bench = change(reports.k5_file(tmp_path / "a.json"), device="AMD Radeon (X, y): gfx942, 80 compute units")
    data = read([bench, reports.store_file(tmp_path / "b.sqlite", device="AMD Radeon (X, y)")])
    assert {origin.device for origin in data.origins} == {"AMD Radeon", ""}


def test_what_is_counted_is_no_device(tmp_path: Path) -> None:
    counted = reports.save(tmp_path / "a.json", "block", [reports.counted_row(8192, 1000.0)], device="CPU: x86_64")
    data = read([counted, reports.k5_file(tmp_path / "b.json")])
    assert {origin.device for origin in data.origins} == {"", "NVIDIA H200"}


def test_one_file_twice(tmp_path: Path) -> None:
    path = reports.k5_file(tmp_path / "a.json")
    with pytest.raises(InputError, match="given twice"):
        read([path, tmp_path / "." / "a.json"])


def test_a_bench_without_what_later_ones_note(tmp_path: Path) -> None:
    row = Measurement("c", "bf16", "triton", metrics={K5: 10.0}, facts=reports.facts(64, 64))
    gone = dict.fromkeys(("schema", "versions", "date", "command", "arch", "protocol"))
    path = change(reports.save(tmp_path / "a.json", "k5", [row], torch="2.10.0"), **gone)
    data = read([path])
    assert not data.times[0].shape.lengths and least_us(roof_of("NVIDIA H200", None, None), data.times[0]) is None
    assert "date not given" in data.origins[0].where and data.origins[0].versions == {
        "gdn_runtime": "0.1.0",
        "torch": "2.10.0",
    }
