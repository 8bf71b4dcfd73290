"""Tuned tables: what ships, how files combine, what a bad one does, and who wins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gdn_runtime import env, tables
from gdn_runtime.plan import cdiv
from gdn_runtime.tables import (
    GRID,
    ScanKey,
    ScanRow,
    ScanTable,
    choose_block_v,
    describe,
    load,
    packaged_file,
    seed_block_v,
)
from gdn_runtime.testing import GRID as GRID_CASES
from gdn_runtime.testing import Case

ROW: dict[str, Any] = {
    "gfx": "gfx942",
    "cu_num": 80,
    "H": 16,
    "Hg": 8,
    "V": 128,
    "is_varlen": True,
    "use_h0": True,
    "store_fs": True,
    "snapshot_bf16": True,
    "state_bf16": False,
    "T_flat": 640,
    "N": 2,
    "total_chunks": 10,
    "max_seq_chunks": 6,
    "block_v": 32,
}
KEY = ScanKey("gfx942", 80, 16, 8, True, True, True, "bf16", "fp32", 10, 6)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No tables of the environment, and none read before."""
    with env.override(tables=""):
        tables.reload()
        yield
    tables.reload()


def write(file: Path, *rows: object, **changes: Any) -> Path:
    """A table file of ``rows``; ``changes`` replace fields of its header."""
    header = {"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", **changes}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**header, "rows": rows}))
    return file


def row(**changes: Any) -> dict[str, Any]:
    return {**ROW, **changes}


def picks(*paths: Path) -> dict[ScanKey, int]:
    return {found.row.key: found.row.block_v for found in load(paths).rows()}


# ------------------------------------------------------------------------------------------------ what ships


def seed_shapes() -> Iterator[tuple[str, ScanKey]]:
    """Family and key of every shape of the seed, bf16 snapshots; one batch may belong to two families."""

    def key(heads: tuple[int, int], lengths: list[int], *, varlen: bool) -> ScanKey:
        chunks = [cdiv(length, 64) for length in lengths]
        return ScanKey("gfx942", 80, *heads, varlen, True, varlen, "bf16", "fp32", sum(chunks), max(chunks))

    for heads in ((32, 16), (8, 2)):
        for num_seqs in range(1, 9):
            yield "8192-token sequences", key(heads, [8192] * num_seqs, varlen=True)
    for length in (1000, 5000, 10000):
        full, rest = divmod(32768, length)
        yield "ragged", key((32, 16), [length] * full + [rest], varlen=True)
    for heads in ((16, 4), (8, 2)):
        for length in (1024, 2048, 4096, 8192):
            yield "32k tokens", key(heads, [length] * (32768 // length), varlen=True)
    for heads in ((32, 16), (16, 8), (64, 16), (32, 8)):
        for length in (2500, 60000, 128000):
            yield "dense", key(heads, [length], varlen=False)


def seed_table() -> ScanTable:
    """The packaged rows of the seed."""
    return load([packaged_file("gfx942", "state_scan_opt")])


def seed_pick(key: ScanKey) -> int:
    return seed_block_v(
        compute_units=80,
        lds_bytes=64 * 1024,
        num_heads=key.num_heads,
        total_chunks=key.total_chunks,
        max_seq_chunks=key.max_seq_chunks,
    )


def test_packaged_table_holds_the_shapes_of_the_seed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = load([packaged_file("gfx942", "state_scan_opt")])
    shapes = {key for _, key in seed_shapes()}
    assert {found.row.key for found in table.rows()} == {
        key._replace(snapshot_dtype=snapshot) for key in shapes for snapshot in ("bf16", "fp32")
    }
    assert len(table) == 76
    kinds = {
        (key.num_heads, key.num_key_heads, key.is_varlen, key.use_initial_state, key.store_final_state)
        for key in shapes
    }
    assert kinds == {
        (32, 16, True, True, True),
        (8, 2, True, True, True),
        (16, 4, True, True, True),
        (32, 16, False, True, False),
        (16, 8, False, True, False),
        (64, 16, False, True, False),
        (32, 8, False, True, False),
    }


def test_seed_rule_agrees_with_the_seed_but_once() -> None:
    """32 of 32 for the sequences of 8192 tokens, 3 of 3 ragged, 19 of the other 20: 35B, TP 2, 2500 tokens, dense."""
    table = seed_table()
    agreed: dict[str, int] = {}
    wrong = []
    for family, key in seed_shapes():
        for snapshot in ("bf16", "fp32"):
            found = table.get(key._replace(snapshot_dtype=snapshot))
            assert found is not None
            if found.row.block_v == seed_pick(key):
                agreed[family] = agreed.get(family, 0) + 1
            else:
                wrong.append((key.num_heads, key.total_chunks, snapshot, found.row.block_v, seed_pick(key)))
    assert agreed == {"8192-token sequences": 32, "ragged": 2 * 3, "32k tokens": 2 * 8, "dense": 2 * 11}
    assert wrong == [(16, 40, "bf16", 64, 32), (16, 40, "fp32", 64, 32)]


def test_rows_that_the_seed_did_not_time_are_marked() -> None:
    """It timed fp32 snapshots for the sequences of 8192 tokens only."""
    timed = {key for family, key in seed_shapes() if family == "8192-token sequences"}
    for found in seed_table().rows():
        key = found.row.key
        expected = key.snapshot_dtype == "fp32" and key._replace(snapshot_dtype="bf16") not in timed
        assert found.row.provenance.modelled == expected, str(found)


def test_times_of_the_seed_are_on_the_rows_that_it_gives_them_for() -> None:
    timed = {
        (found.row.key.num_heads, found.row.num_tokens, found.row.key.snapshot_dtype): found.row
        for found in tables.table().rows()
        if found.row.us is not None
    }
    assert {shape: (found.block_v, found.us) for shape, found in timed.items()} == {
        (32, 8192, "bf16"): (64, 483.2),
        (32, 8192, "fp32"): (64, 512.9),
        (16, 2500, "bf16"): (64, 144.3),
    }
    assert timed[16, 2500, "bf16"].provenance.n == 200
    assert not any(found.provenance.modelled for found in timed.values())


def test_descriptive_columns_match_the_key() -> None:
    for found in tables.table().rows():
        key, tokens, seqs = found.row.key, found.row.num_tokens, found.row.num_seqs
        assert tokens is not None
        assert seqs is not None
        assert (key.total_chunks - seqs) * 64 < tokens <= key.total_chunks * 64, str(found)
        assert key.max_seq_chunks <= key.total_chunks <= key.max_seq_chunks * seqs, str(found)
        assert found.row.provenance.source == ("gdn-tune" if found.file.is_relative_to(GRID) else "seed")


CARDS = {"gfx942": (80, 304), "gfx950": (256,)}


def key_of(case: Case, arch: str, units: int) -> ScanKey:
    chunks = [cdiv(length, 64) for length in case.seq_lens] * (case.batch or 1)
    heads = case.num_heads, case.num_key_heads
    return ScanKey(
        arch, units, *heads, case.batch is None, True, case.final_state, case.snapshot_dtype, case.state_dtype,
        sum(chunks), max(chunks),
    )  # fmt: skip


def test_every_case_of_the_grid_and_every_shape_of_the_seed_has_a_row_on_every_card() -> None:
    table = tables.table()
    cards = [(arch, units) for arch, counts in CARDS.items() for units in counts]
    grid = {key_of(case, arch, units) for case in GRID_CASES.values() for arch, units in cards}
    seed = {
        key._replace(arch=arch, compute_units=units, snapshot_dtype=snapshot)
        for _, key in seed_shapes() for arch, units in cards for snapshot in ("bf16", "fp32")
    }  # fmt: skip
    assert len(GRID_CASES) == 368 and {found.row.key for found in table.rows()} == grid | seed


def test_rows_of_the_grid_are_modelled_and_stand_beside_no_others() -> None:
    """So that none of them takes the place of a row of the seed, and no call has two packaged rows."""
    grid = list(load([GRID]).rows())
    assert len(grid) == 752 + 414 and all(found.row.provenance.modelled and found.row.us is None for found in grid)
    assert not {found.row.key for found in grid} & {found.row.key for found in seed_table().rows()}


def test_every_packaged_file_is_named_after_its_arch_and_kernel() -> None:
    for file in sorted(tables.PACKAGED.rglob("*.json")):
        content = json.loads(file.read_text())
        below = GRID if file.is_relative_to(GRID) else tables.PACKAGED
        assert file == below / content["arch"] / f"{content['kernel']}.json"
    assert packaged_file("gfx950", "state_scan_vk").exists() and packaged_file("gfx942", "state_scan_opt").exists()


def test_import_reads_no_table_and_warns_of_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    code = "import gdn_runtime.tables.lookup as t; assert not t._tables"
    environment = {**os.environ, "GDN_TABLES": str(bad)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)


# ------------------------------------------------------------------------------------------------ combining files


def test_key_matches_exactly(tmp_path: Path) -> None:
    table = load([write(tmp_path / "a.json", ROW)])
    assert table.get(KEY) is not None
    others: dict[str, Any] = {
        "arch": "gfx950",
        "compute_units": 304,
        "num_heads": 32,
        "num_key_heads": 16,
        "is_varlen": False,
        "use_initial_state": False,
        "store_final_state": False,
        "snapshot_dtype": "fp32",
        "state_dtype": "bf16",
        "total_chunks": 11,
        "max_seq_chunks": 5,
    }
    assert list(others) == list(ScanKey._fields)
    for field, value in others.items():
        assert table.get(KEY._replace(**{field: value})) is None, field


def test_a_later_file_wins(tmp_path: Path) -> None:
    first = write(tmp_path / "first.json", ROW, row(H=32))
    second = write(tmp_path / "second.json", row(block_v=64), row(H=64))
    assert picks(first, second) == {KEY._replace(num_heads=32): 32, KEY: 64, KEY._replace(num_heads=64): 32}
    assert picks(second, first)[KEY] == 32


def test_a_folder_stands_for_its_files_by_name(tmp_path: Path) -> None:
    write(tmp_path / "gfx942" / "b.json", row(block_v=64))
    write(tmp_path / "gfx942" / "a.json", row(block_v=16))
    write(tmp_path / "vk.json", {"not": "a row of opt"}, kernel="state_scan_vk")
    (tmp_path / "readme.txt").write_text("no table")
    assert picks(tmp_path) == {KEY: 64}


def test_rows_of_one_file_that_disagree_are_named_and_the_first_kept(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", ROW, row(H=32), row(block_v=64))
    with pytest.warns(RuntimeWarning, match=r"a\.json row 0 \(block_v=32\) and .*a\.json row 2 \(block_v=64\)"):
        assert picks(file)[KEY] == 32


def test_equal_rows_are_silent(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert picks(write(tmp_path / "a.json", row(us=9.5), ROW)) == {KEY: 32}
    assert not recwarn.list


def test_modelled_rows_never_override_measured_ones(tmp_path: Path) -> None:
    origins = {"model": {"source": "gdn-tune", "modelled": True}, "card": {"source": "gdn-tune", "n": 300}}
    model = write(tmp_path / "model.json", row(block_v=64, provenance="model"), provenance=origins)
    better = write(tmp_path / "better.json", row(block_v=16, provenance="model"), provenance=origins)
    card = write(tmp_path / "card.json", row(block_v=32, provenance="card"), provenance=origins)
    assert picks(card, model) == {KEY: 32}
    assert picks(model, card) == {KEY: 32}
    assert picks(model, better) == {KEY: 16}
    both = write(
        tmp_path / "both.json",
        row(block_v=64, provenance="model"),
        row(block_v=32, provenance="card"),
        provenance=origins,
    )
    with pytest.warns(RuntimeWarning, match=r"row 1 \(block_v=32\) disagree; .*both\.json row 1 kept"):
        assert picks(both) == {KEY: 32}


def test_provenance_is_kept(tmp_path: Path) -> None:
    origin = {"source": "gdn-tune", "device": "MI308X", "date": "2026-11-30", "n": 300, "toolchain": "flydsl 0.5.0"}
    file = write(tmp_path / "a.json", row(us=12.5, provenance="x"), provenance={"x": origin})
    (found,) = load([file]).rows()
    assert found.row == ScanRow(
        key=KEY,
        block_v=32,
        us=12.5,
        num_tokens=640,
        num_seqs=2,
        provenance=tables.Provenance("gdn-tune", "MI308X", "2026-11-30", 300, False, (("toolchain", "flydsl 0.5.0"),)),
    )
    assert describe(found) == f"{file.as_posix()} row 0 (12.5 us, gdn-tune, MI308X, 2026-11-30)"


# ------------------------------------------------------------------------------------------------ bad files and rows


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ROW.items() if key != name}


BAD_ROWS = [
    pytest.param(without("cu_num"), "lacks cu_num", id="no cu_num"),
    pytest.param(without("use_h0"), "lacks use_h0", id="no use_h0"),
    pytest.param({**without("us"), "uss": 1.0}, "has unknown field uss", id="typing error"),
    pytest.param(row(H="16"), "H: got '16', expected a positive integer", id="text for a number"),
    pytest.param(row(N=True), "N: got True, expected a positive integer", id="flag for a number"),
    pytest.param(row(total_chunks=0), "total_chunks: got 0, expected a positive integer", id="no chunks"),
    pytest.param(row(is_varlen=1), "is_varlen: got 1, expected true or false", id="number for a flag"),
    pytest.param(row(block_v=128), "block_v: got 128, expected one of 16, 32, 64", id="illegal block_v"),
    pytest.param(row(V=256), "V: got 256, expected 128", id="other head size"),
    pytest.param(row(Hg=5), "H: got 16, expected a multiple of Hg=5", id="heads"),
    pytest.param(row(max_seq_chunks=11), "max_seq_chunks: got 11, expected at most total_chunks", id="chunks"),
    pytest.param(row(gfx="gfx950"), "gfx: got 'gfx950', expected the arch of the file", id="wrong arch"),
    pytest.param(row(us=-1), "us: got -1, expected a positive number", id="negative time"),
    pytest.param(row(us=float("nan")), "us: got nan, expected a positive number", id="no time"),
    pytest.param(row(provenance="who"), "provenance: got 'who', expected one of none", id="unknown provenance"),
    pytest.param([1, 2], "got list, expected an object", id="no object"),
]


@pytest.mark.parametrize(("bad", "fault"), BAD_ROWS)
def test_a_bad_row_is_skipped_by_name_and_the_rest_stays(tmp_path: Path, bad: object, fault: str) -> None:
    file = write(tmp_path / "a.json", row(H=32), bad, ROW)
    with pytest.warns(RuntimeWarning) as caught:
        assert picks(file) == {KEY._replace(num_heads=32): 32, KEY: 32}
    (warning,) = caught.list
    text = str(warning.message)
    assert text.startswith(f"table {file} row 1: {fault}"), text


def test_files_of_an_unknown_arch_have_no_good_row(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="expected the arch of the file, 'sm90', one of gfx942, gfx950"):
        assert picks(write(tmp_path / "a.json", row(gfx="sm90"), arch="sm90")) == {}


BAD_FILES = [
    pytest.param(b"{", "Expecting property name", id="cut off"),
    pytest.param(b"\xff\xfe", "can't decode byte", id="no text"),
    pytest.param(b"[]", "got list, expected an object", id="no object"),
    pytest.param(b"[" * 100_000, "recursion", id="deep"),
    pytest.param(b'{"format": 2}', "format: got 2, expected 1", id="newer format"),
    pytest.param(b'{"format": 1, "kernel": "state_scan_opt", "rows": []}', "arch: got NoneType", id="no arch"),
    pytest.param(b'{"format": 1, "kernel": "x", "arch": "x"}', "rows: got NoneType", id="no rows"),
    pytest.param(
        b'{"format": 1, "kernel": "x", "arch": "x", "rows": [], "provenance": {"a": 1}}',
        "provenance: expected an object of objects",
        id="provenance",
    ),
    pytest.param(
        b'{"format": 1, "kernel": "x", "arch": "x", "rows": [], "provenance": {"a": {"n": 3}}}',
        "lacks source",
        id="no source",
    ),
]


@pytest.mark.parametrize(("content", "fault"), BAD_FILES)
def test_a_bad_file_is_ignored_by_name_and_the_others_stay(tmp_path: Path, content: bytes, fault: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    good = write(tmp_path / "good.json", ROW)
    with pytest.warns(RuntimeWarning) as caught:
        assert picks(bad, good) == {KEY: 32}
    (warning,) = caught.list
    assert str(warning.message).startswith(f"table {bad}: ")
    assert fault in str(warning.message)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"nowhere\.json: .*No such file"):
        assert picks(tmp_path / "nowhere.json") == {}


# ------------------------------------------------------------------------------------------------ environment, reload


def test_environment_lists_files_and_folders(tmp_path: Path) -> None:
    packaged = len(tables.table())
    first = write(tmp_path / "first.json", ROW, row(H=32))
    write(tmp_path / "more" / "second.json", row(block_v=64))
    listed = os.pathsep.join((str(first), "", str(tmp_path / "more")))
    with env.override(tables=listed):
        table = tables.table()
        assert len(table) == packaged + 2
        assert choose_block_v(KEY)[0] == 64
        assert tables.table() is table
    assert len(tables.table()) == packaged
    assert choose_block_v(KEY)[1].startswith('block_v=32 by rule "gdn"')


def test_an_own_row_overrides_a_packaged_one(tmp_path: Path) -> None:
    key = ScanKey("gfx942", 80, 32, 16, True, True, True, "bf16", "fp32", 128, 128)
    mine = write(tmp_path / "mine.json", row(H=32, Hg=16, total_chunks=128, max_seq_chunks=128, block_v=16))
    assert choose_block_v(key)[0] == 64
    with env.override(tables=str(mine)):
        assert choose_block_v(key) == (16, f"block_v=16 from the tuned table, {mine} row 0 (not stated)")


def test_files_are_read_once_until_reload(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", ROW)
    with env.override(tables=str(file)):
        assert choose_block_v(KEY)[0] == 32
        write(file, row(block_v=64))
        assert choose_block_v(KEY)[0] == 32
        tables.reload()
        assert choose_block_v(KEY)[0] == 64
        file.unlink()
        assert choose_block_v(KEY)[0] == 64


# ------------------------------------------------------------------------------------------------ choice


def test_environment_beats_table_beats_rule() -> None:
    key = ScanKey("gfx942", 80, 16, 8, False, True, False, "bf16", "fp32", 40, 40)
    assert choose_block_v(key, override=16) == (16, "block_v=16 from GDN_K5_BLOCK_V")
    origin = "gfx942/state_scan_opt.json row 58 (144.3 us, seed, one gfx942 card with 80 compute units)"
    assert choose_block_v(key) == (64, f"block_v=64 from the tuned table, {origin}")
    binned = key._replace(compute_units=228)
    assert choose_block_v(binned) == (
        16,
        'block_v=16 by rule "gdn", no table row: 16 scans at a time on 228 compute units',
    )
    block_v, reason = choose_block_v(key._replace(compute_units=304))
    assert block_v == 16 and re.fullmatch(
        r"block_v=16 from the tuned table, grid/gfx942/state_scan_opt\.json row \d+ "
        r"\(modelled, gdn-tune, emulator, \d{4}-\d\d-\d\d\)",
        reason,
    )
    assert choose_block_v(key._replace(total_chunks=39, max_seq_chunks=39), rule="seed") == (
        32,
        'block_v=32 by rule "seed", no table row: 16 scans at a time on 80 compute units of 64 KB LDS',
    )


@pytest.mark.parametrize("block_v", [0, 8, 48, 128])
def test_an_override_that_the_kernel_lacks_is_refused(block_v: int) -> None:
    expected = rf"^GDN_K5_BLOCK_V: got {block_v}, expected one of 16, 32, 64 for K5 opt$"
    with pytest.raises(ValueError, match=expected):
        choose_block_v(KEY, override=block_v)
