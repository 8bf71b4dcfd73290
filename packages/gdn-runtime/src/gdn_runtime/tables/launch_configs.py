"""Launch configurations of the Triton and Gluon kernels of the block: the row of a table, for selection to set before
its rules. Host values only; nothing waits for a device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from .files import Located, Parser, by_key, read_kernels, table_files
from .launch_rows import LAUNCH_KERNELS, LaunchCall, LaunchKernel, LaunchRow, key_of, parse_launch_row
from .lookup import table_paths


class LaunchTable:
    """Rows by key; immutable. Compared by identity, so that it may be part of the key of a cache."""

    def __init__(self, rows: Mapping[object, Located[LaunchRow]]) -> None:
        self._rows = dict(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> tuple[Located[LaunchRow], ...]:
        """All rows, in the order in which their keys were first read."""
        return tuple(self._rows.values())

    def get(self, kernel: LaunchKernel, call: LaunchCall) -> Located[LaunchRow] | None:
        """The row of ``kernel`` that is for ``call``, if there is one."""
        return self._rows.get(key_of(kernel, call))


_PARSERS: dict[str, Parser[LaunchRow]] = {
    kernel: functools.partial(parse_launch_row, kernel) for kernel in LAUNCH_KERNELS
}
_lock = threading.Lock()
_tables: dict[str, LaunchTable] = {}  # by value of GDN_TABLES


def launch_table(paths: str) -> LaunchTable:
    """The tables in force where GDN_TABLES is ``paths``, the packaged ones first; read on the first call. Faults are
    warnings."""
    found = _tables.get(paths)
    if found is None:
        with _lock:
            found = _tables.get(paths)
            if found is None:
                found = _tables[paths] = load_launches(table_paths(paths))
    return found


def forget_launches() -> None:
    """Read the files again at the next call, for tuners."""
    with _lock:
        _tables.clear()


def load_launches(paths: Iterable[Path]) -> LaunchTable:
    """Table of the files and folders ``paths``; of two rows for one call that counts which ``load`` would take. In one
    file two that disagree are a warning. Raises nothing."""
    found = (row for path in paths for file in table_files(path) for row in read_kernels(file, _PARSERS))
    return LaunchTable(by_key(found, lambda row: row.key, lambda row: row.config))
