"""The store of samples: one SQLite file, append-only, which processes share and which outlives their being killed.

The journal is a write-ahead log: a writer that dies leaves whole samples or none, and readers do not wait. SQLite's
locks do not hold on most network file systems: keep the file on a local disk.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .records import Facts, Key, Op, Sample

SCHEMA = 1
APPLICATION = 0x67646E74
"""SQLite's ``application_id`` of the file: "gdnt"."""

BUSY_SECONDS = 60.0
"""How long a writer waits for another one. A transaction of this module takes milliseconds."""

CREATE = """
CREATE TABLE keys (
  id INTEGER PRIMARY KEY, op TEXT NOT NULL, case_id TEXT NOT NULL, facts TEXT NOT NULL, config TEXT NOT NULL,
  arch TEXT NOT NULL, compute_units INTEGER NOT NULL, device TEXT NOT NULL, toolchain TEXT NOT NULL,
  kernel_digest TEXT NOT NULL, protocol TEXT NOT NULL,
  UNIQUE (op, case_id, facts, config, arch, compute_units, device, toolchain, kernel_digest, protocol)
);
CREATE TABLE samples (
  id INTEGER PRIMARY KEY AUTOINCREMENT, key INTEGER NOT NULL REFERENCES keys (id), status TEXT NOT NULL,
  times_us TEXT NOT NULL, counters TEXT NOT NULL, cycles REAL, error REAL, n INTEGER NOT NULL, detail TEXT NOT NULL,
  started TEXT NOT NULL, host TEXT NOT NULL, commit_id TEXT NOT NULL
);
CREATE INDEX samples_of_key ON samples (key);
"""
APPEND_ONLY = """
CREATE TRIGGER {table}_{what} BEFORE {what} ON {table} BEGIN SELECT RAISE(ABORT, 'the store is append-only'); END;
"""
KEY_COLUMNS = (
    "op, case_id, facts, config, arch, compute_units, device, toolchain, kernel_digest, protocol"  # in Key's order
)
SAMPLE_COLUMNS = "status, times_us, counters, cycles, error, n, detail, started, host, commit_id"


class StoreError(Exception):
    """The file is no store, a damaged one, or one of another version of this package. The message names it."""


class Store:
    """The samples in ``path``. Use it in the thread that opened it.

    ``create``: for writing; the file is made if it is not there. Raises StoreError if the file cannot be used, and
    OSError if its folder cannot be made.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if not create and not path.is_file():
            raise StoreError(f"{path}: there is no such store")
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Transactions begin where this module says so.
            self._base = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from error
        try:
            self._open(create=create)
        except sqlite3.Error as error:
            self._base.close()
            raise self._fault(error) from error
        except StoreError:
            self._base.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def add(self, *samples: Sample) -> None:
        """Append ``samples``, all or none. They are on the disk when it returns."""
        if not samples:
            return
        try:
            with self._base:
                self._base.execute("BEGIN IMMEDIATE")
                for sample in samples:
                    self._append(sample)
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def samples(self, op: Op | None = None) -> Iterator[Sample]:
        """All samples, in the order in which they were added; of ``op`` only if it is given."""
        where, values = ("", ()) if op is None else (" WHERE op = ?", (op,))
        columns = f"samples.id, keys.id, {KEY_COLUMNS}, {SAMPLE_COLUMNS}"
        query = f"SELECT {columns} FROM samples JOIN keys ON keys.id = samples.key{where} ORDER BY samples.id"
        try:
            for row in self._base.execute(query, values):
                yield self._sample(row)
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def finished(self, op: Op | None = None) -> set[Key]:
        """Keys that have a sample, of whatever status: what a run that goes on need not do again."""
        where, values = ("", ()) if op is None else (" AND op = ?", (op,))
        query = f"SELECT id, {KEY_COLUMNS} FROM keys WHERE EXISTS (SELECT 1 FROM samples WHERE key = keys.id){where}"
        try:
            return {self._key(row[0], row[1:]) for row in self._base.execute(query, values)}
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def __len__(self) -> int:
        try:
            return int(self._base.execute("SELECT count(*) FROM samples").fetchone()[0])
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _open(self, *, create: bool) -> None:
        self._base.execute("PRAGMA foreign_keys = ON")
        if create:
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = FULL")
            with self._base:
                self._base.execute("BEGIN IMMEDIATE")  # of two that make the file, one finds it made
                if not self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self._create()
        application, version = (self._pragma(name) for name in ("application_id", "user_version"))
        if application != APPLICATION:
            raise StoreError(f"{self.path}: this SQLite file is no store of gdn-tune")
        if version != SCHEMA:
            raise StoreError(f"{self.path}: schema: got {version}, expected {SCHEMA}; use the gdn-tune that wrote it")
        fault = self._pragma("quick_check(1)")
        if fault != "ok":
            raise StoreError(f"{self.path}: damaged: {' '.join(str(fault).split())}")

    def _pragma(self, name: str) -> object:
        return self._base.execute(f"PRAGMA {name}").fetchone()[0]

    def _create(self) -> None:
        script = CREATE + "".join(
            APPEND_ONLY.format(table=table, what=what) for table in ("keys", "samples") for what in ("UPDATE", "DELETE")
        )
        for statement in statements(script):  # executescript would commit first
            self._base.execute(statement)
        self._base.execute(f"PRAGMA application_id = {APPLICATION}")
        self._base.execute(f"PRAGMA user_version = {SCHEMA}")

    def _append(self, sample: Sample) -> None:
        key = sample.key
        values = (key.op, key.case, key.facts.text, key.config.text, key.arch, key.compute_units, key.device,
                  key.toolchain, key.kernel_digest, key.protocol.text)  # fmt: skip
        marks = ", ".join("?" * len(values))
        self._base.execute(f"INSERT INTO keys ({KEY_COLUMNS}) VALUES ({marks}) ON CONFLICT DO NOTHING", values)
        (number,) = self._base.execute(f"SELECT id FROM keys WHERE ({KEY_COLUMNS}) = ({marks})", values).fetchone()
        rest = (sample.status, json.dumps(sample.times_us), sample.counters.text, sample.cycles, sample.error, sample.n,
                sample.detail, sample.started, sample.host, sample.commit)  # fmt: skip
        marks = ", ".join("?" * (1 + len(rest)))
        self._base.execute(f"INSERT INTO samples (key, {SAMPLE_COLUMNS}) VALUES ({marks})", (number, *rest))

    def _key(self, number: int, row: Sequence[Any]) -> Key:
        op, case, facts, config, arch, units, device, toolchain, digest, protocol = row
        try:
            texts = [Facts.parse(text) for text in (facts, config, protocol)]
            return Key(op, case, texts[0], texts[1], arch, units, device, toolchain, digest, texts[2])
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self.path}: key {number}: {error}") from error

    def _sample(self, row: Sequence[Any]) -> Sample:
        number, key_number, *rest = row
        key = self._key(key_number, rest[:10])
        status, times, counters, *others = rest[10:]
        try:
            return Sample(key, status, tuple(json.loads(times)), Facts.parse(counters), *others)
        except (TypeError, ValueError) as fault:
            raise StoreError(f"{self.path}: sample {number}: {fault}") from fault

    def _fault(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "malformed" in text:
            text = f"damaged: {text}"
        return StoreError(f"{self.path}: {text}")


def statements(script: str) -> Iterator[str]:
    """The statements of ``script``, one at a time."""
    text = ""
    for line in script.splitlines():
        text += line + "\n"
        if sqlite3.complete_statement(text):
            yield text
            text = ""
