"""The store: what goes in comes out, whoever is killed, whoever else writes, whatever the file is."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gdn_tune.records import Facts, Key, Sample
from gdn_tune.store import SCHEMA, Store, StoreError
from tune_testing import K5_FACTS, make_key, make_sample

WRITER = """
import sys
from pathlib import Path
from tune_testing import make_sample
from gdn_tune.store import Store
path, name, pairs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with Store(path) as store:
    print("open", flush=True)
    for i in range(pairs):
        store.add(*(make_sample(16, 1.0 + i, key={"case": f"{name}-{i}"}, host=half * 20_000) for half in "ab"))
        print(i, flush=True)
"""


def writer(path: Path, name: str, pairs: int) -> subprocess.Popen[str]:
    """A process that adds ``pairs`` of samples and says so after each."""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", WRITER, str(path), name, str(pairs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})


def table(path: Path, *statements: str) -> None:
    """Change the file behind the store's back."""
    with closing(sqlite3.connect(path)) as base, base:
        for statement in statements:
            base.execute(statement)


@pytest.fixture
def sample() -> Sample:
    """One sample with everything in it."""
    key = make_key(
        64, facts=Facts(K5_FACTS, label="ünïcode 'quoted'"), config=Facts(block_v=64, nested={"a": [1, None]})
    )
    return Sample(
        key, "wrong", (1.25, 1e-9, 3.0), Facts(valu=12, lds=3.5), 1234.5, 0.25, 300, "o[3] is off;\nsee \x00",
        "2026-11-30T20:15:00+00:00", "host", "abc",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ records


def test_facts_are_keys() -> None:
    facts = Facts({"b": 1, "a": [True, None, "x"]}, c=0.5)
    assert facts == Facts(c=0.5, a=[True, None, "x"], b=1) and len({facts, Facts({**facts})}) == 1
    assert facts.text == '{"a":[true,null,"x"],"b":1,"c":0.5}' and list(facts) == ["a", "b", "c"] and facts["b"] == 1
    assert Facts(a=1) != Facts(a=1.0) and Facts(a=1) != Facts(a=True) and Facts(a=1) != {"a": 1}
    assert copy.deepcopy(facts) == Facts.parse(facts.text) == facts
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            Facts(a=bad)
    with pytest.raises(TypeError):
        Facts(a=object())
    for text in ("[]", "1", "{", ""):
        with pytest.raises(ValueError):
            Facts.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "k7"}, "op: got 'k7', expected one of k5, prepare, block, pa"),
        ({"compute_units": 0}, "compute_units: got 0"),
        ({"protocol": Facts()}, "protocol: got {}, expected a method"),
    ],
)
def test_bad_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_key(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "fine"}, "status: got 'fine'"),
        ({"times_us": (1.0, 0.0)}, "times_us"),
        ({"times_us": (float("nan"),)}, "times_us"),
        ({"times_us": ()}, "status: got ok without times_us"),
        ({"cycles": -1.0}, "cycles: got -1.0"),
        ({"n": -1}, "n: got -1"),
        ({"key": make_key(protocol=Facts(method="model"))}, "status: got ok without cycles"),
    ],
)
def test_bad_samples(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(**{"key": make_key(), "status": "ok", "times_us": (1.0,), **changes})
    assert Sample(make_key(), "crashed", detail="SIGSEGV").times_us == ()


# ------------------------------------------------------------------------------------------------ store


def test_what_goes_in_comes_out(tmp_path: Path, sample: Sample) -> None:
    others = [
        make_sample(16, 2.0),
        make_sample(16, 3.0, 4.0),
        make_sample(32),
        Sample(make_key(), "skipped", detail="LDS"),
    ]
    path = tmp_path / "new" / "store.sqlite"
    with Store(path) as store:
        assert len(store) == 0 and not store.finished() and not list(store.samples())
        store.add()
        store.add(sample, *others)
        store.add(sample)
    with Store(path) as store:
        assert list(store.samples()) == [sample, *others, sample] and len(store) == 6
        keys: set[Key] = {sample.key, *(other.key for other in others)}
        assert store.finished() == store.finished("k5") == keys and len(keys) == 4
        assert not store.finished("pa") and not list(store.samples("pa"))
    with Store(path, create=False) as store:
        assert len(store) == 6


def test_append_only(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add(make_sample(16, 2.0))
    for statement in (
        "UPDATE samples SET n = 9",
        "DELETE FROM samples",
        "UPDATE keys SET op = 'pa'",
        "DELETE FROM keys",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            table(path, statement)
    with Store(path) as store:
        assert [sample.n for sample in store.samples()] == [1]


def test_a_killed_writer_leaves_whole_transactions(tmp_path: Path) -> None:
    """Killed five times at some moment after it said that a pair was in; that pair is, and no half of another."""
    path, said = tmp_path / "s.sqlite", 0
    for attempt in range(5):
        with writer(path, f"{attempt}", 10_000) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == str(2 + attempt):
                    time.sleep(0.001 * attempt)
                    process.send_signal(signal.SIGKILL)
                    break
            said += 3 + attempt
        assert process.returncode == -signal.SIGKILL
        with Store(path) as store:
            samples = list(store.samples())
            cases = {sample.key.case: sample for sample in samples}
            assert len(samples) % 2 == 0 and len(cases) == len(samples) // 2 >= said
            assert {f"{attempt}-{i}" for i in range(3 + attempt)} <= {key.case for key in store.finished()}
            assert all(len(sample.host) == 20_000 for sample in samples)


def test_two_writers_that_both_make_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    processes = [writer(path, name, 30) for name in ("x", "y")]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    with Store(path) as store:
        assert len(store) == 120 and len(store.finished()) == 60


def test_a_reader_sees_what_another_process_adds(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as reader, Store(path) as other:
        other.add(make_sample(16, 2.0))
        assert len(reader) == 1
        rows = reader.samples()
        assert next(rows).key.case == "varlen-640"  # its query is open, and nobody waits
        other.add(make_sample(16, 3.0))
        assert len(other) == 2


# ------------------------------------------------------------------------------------------------ bad files


@pytest.mark.parametrize("create", [True, False])
def test_files_that_are_no_store(tmp_path: Path, create: bool) -> None:
    text = tmp_path / "text"
    text.write_text("no SQLite, but longer than a header of it would be\n" * 50)
    with pytest.raises(StoreError, match="text: file is not a database"):
        Store(text, create=create)
    assert text.read_text().startswith("no SQLite")
    stranger = tmp_path / "stranger"
    table(stranger, "CREATE TABLE t (x)")
    with pytest.raises(StoreError, match="stranger: this SQLite file is no store of gdn-tune"):
        Store(stranger, create=create)
    with pytest.raises(StoreError, match=r"unable to open|no such store"):
        Store(tmp_path, create=create)


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="gone: there is no such store"):
        Store(tmp_path / "gone", create=False)
    assert not list(tmp_path.iterdir())


def test_another_schema(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    table(path, f"PRAGMA user_version = {SCHEMA + 1}")
    with pytest.raises(StoreError, match=f"got {SCHEMA + 1}, expected {SCHEMA}; use the gdn-tune that wrote"):
        Store(path)


def test_damage(tmp_path: Path) -> None:
    """Pages of zeros, a truncated file, text that is no JSON: a StoreError that names the file, and never less data."""
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add(*(make_sample(16, 1.0 + i, host="x" * 3000) for i in range(50)))
    good = path.read_bytes()
    for place in (4096 * 10, 4096 * 20):
        torn = tmp_path / f"torn-{place}"
        torn.write_bytes(good[:place] + bytes(4096) + good[place + 4096 :])
        with pytest.raises(StoreError, match=f"torn-{place}: damaged"), Store(torn) as store:
            list(store.samples())
    short = tmp_path / "short"
    short.write_bytes(good[: len(good) // 2])
    with pytest.raises(StoreError, match="short: damaged"), Store(short) as store:
        list(store.samples())
    edited = tmp_path / "edited"
    shutil.copy(path, edited)
    table(edited, "DROP TRIGGER samples_UPDATE", "UPDATE samples SET times_us = '[1,' WHERE id = 7")
    with Store(edited) as store, pytest.raises(StoreError, match="edited: sample 7: "):
        list(store.samples())
    table(edited, "DROP TRIGGER keys_UPDATE", "UPDATE keys SET op = 'k7'")
    with Store(edited) as store, pytest.raises(StoreError, match="edited: key 1: op: got 'k7'"):
        store.finished()
    with Store(path) as store:
        assert len(list(store.samples())) == 50
