"""block_v of K5 `opt`: environment, else tuned table, else rule. Host values only; nothing waits for a device."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import env
from ..errors import value_error
from ..spec import SCAN_BLOCK_V
from .files import PACKAGED, Located, by_key, read_rows, table_files
from .rows import KERNEL, ScanKey, ScanRow, parse_row
from .rules import Rule, rule_block_v


class ScanTable:
    """Rows by key; immutable. Compared by identity, so that it may be part of the key of a cache."""

    def __init__(self, rows: Mapping[ScanKey, Located[ScanRow]]) -> None:
        self._rows = dict(rows)
        self.get = self._rows.get  # one dict lookup, nothing around it

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> tuple[Located[ScanRow], ...]:
        """All rows, in the order in which their keys were first read."""
        return tuple(self._rows.values())


_lock = threading.Lock()
_tables: dict[str, ScanTable] = {}  # by value of GDN_TABLES


def table() -> ScanTable:
    """The tables in force: the packaged ones and those of GDN_TABLES, read on the first call. Faults are warnings.

    A cache of choices has the result in its key, so that ``reload`` and another GDN_TABLES take effect.
    """
    paths = env.settings().tables
    found = _tables.get(paths)
    if found is None:
        with _lock:
            found = _tables.get(paths)
            if found is None:
                found = _tables[paths] = load(table_paths(paths))
    return found


def reload() -> ScanTable:
    """Read the files again, for tuners. The environment variable itself is read by ``env.reload``."""
    with _lock:
        _tables.clear()
    _choose.cache_clear()
    return table()


def table_paths(text: str) -> list[Path]:
    """The packaged tables, then the files and folders of ``text``, apart by the path separator of the system."""
    return [PACKAGED, *(Path(entry).expanduser() for entry in text.split(os.pathsep) if entry.strip())]


def load(paths: Iterable[Path]) -> ScanTable:
    """Table of the files and folders ``paths``. A later file overrides an earlier one; in one file the first of two
    rows with the same key is kept, with a warning if they disagree. A measured row beats a modelled one wherever the
    two stand. Raises nothing."""
    found = (row for path in paths for file in table_files(path) for row in read_rows(file, KERNEL, parse_row))
    return ScanTable(by_key(found, lambda row: row.key, lambda row: f"block_v={row.block_v}"))


def choose_block_v(key: ScanKey, *, rule: Rule = "gdn", override: int | None = None) -> tuple[int, str]:
    """block_v for K5 `opt` on ``key``, and the reason in words.

    ``override`` is the value of GDN_K5_BLOCK_V (``env.settings().k5_block_v``; None: not set) and wins; then the row of
    the tables that matches ``key`` exactly; then ``rule``. Raises ValueError for an override that the kernel does not
    have and UnsupportedError for a rule that does not know the architecture.
    """
    return _choose(key, rule, override, table())


@functools.lru_cache(maxsize=4096)
def _choose(key: ScanKey, rule: Rule, override: int | None, rows: ScanTable) -> tuple[int, str]:
    if override is not None:
        if override not in SCAN_BLOCK_V:
            raise value_error("GDN_K5_BLOCK_V", override, f"one of {', '.join(map(str, SCAN_BLOCK_V))} for K5 opt")
        return override, f"block_v={override} from GDN_K5_BLOCK_V"
    found = rows.get(key)
    if found is not None:
        return found.row.block_v, f"block_v={found.row.block_v} from the tuned table, {describe(found)}"
    block_v, inputs = rule_block_v(
        rule,
        arch=key.arch,
        compute_units=key.compute_units,
        num_heads=key.num_heads,
        total_chunks=key.total_chunks,
        max_seq_chunks=key.max_seq_chunks,
    )
    return block_v, f'block_v={block_v} by rule "{rule}", no table row: {inputs}'


def describe(found: Located[Any]) -> str:
    """File, index, time and origin of a row, in words."""
    origin = found.row.provenance
    facts = [
        f"{found.row.us:g} us" if found.row.us is not None else "",
        "modelled" if origin.modelled else "",
        origin.source,
        origin.device,
        origin.date,
    ]
    return f"{found} ({', '.join(fact for fact in facts if fact)})"
