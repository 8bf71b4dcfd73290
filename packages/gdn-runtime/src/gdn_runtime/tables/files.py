"""Reading table files: what is wrong with one becomes a warning that names it, never an error.

A file is JSON: ``{"format": 1, "kernel": ..., "arch": ..., "provenance": {name: {...}}, "rows": [{...}, ...]}``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from ..spec import AMD_ARCHS
from .rows import Provenance, parse_provenance

FORMAT = 1
PACKAGED = Path(__file__).parent
"""The tables that ship with the package: ARCH/KERNEL.json in this folder, and in its folder ``GRID``."""
COMPILED = tuple(PACKAGED / arch for arch in AMD_ARCHS)
"""The packaged tables whose shapes are compiled ahead of time unless others are named."""
GRID = PACKAGED / "grid"
"""The packaged tables of all model shapes on all cards: calls look their rows up like any other's."""


class Row(Protocol):
    """What all rows have."""

    @property
    def provenance(self) -> Provenance: ...


R = TypeVar("R")
AnyRow = TypeVar("AnyRow", bound=Row)
Key = TypeVar("Key", bound=Hashable)
Parser: TypeAlias = Callable[[Mapping[str, object], str, Mapping[str, Provenance]], R]
"""parser(fields, arch, provenances): the row that they spell out, or ValueError that says what is wrong."""


@dataclass(frozen=True)
class Located(Generic[R]):
    """A row and where it stands: ``index`` counts the rows of ``file`` from 0."""

    row: R
    file: Path
    index: int

    def __str__(self) -> str:
        try:
            name = self.file.relative_to(PACKAGED)
        except ValueError:
            name = self.file
        return f"{name.as_posix()} row {self.index}"


def packaged_file(arch: str, kernel: str) -> Path:
    """Where the package keeps its table of ``kernel`` for ``arch``; it need not exist."""
    return PACKAGED / arch / f"{kernel}.json"


def replaces(*, old_modelled: bool, new_modelled: bool, same_file: bool) -> bool:
    """Whether of two rows for one call the one that is read later counts: what was measured beats what was modelled;
    of two of a kind a later file's wins, and in one file the first."""
    return old_modelled if old_modelled != new_modelled else not same_file


def by_key(
    found: Iterable[Located[AnyRow]], key: Callable[[AnyRow], Key], decision: Callable[[AnyRow], object]
) -> dict[Key, Located[AnyRow]]:
    """The row that counts of each key, in the order in which keys came. Warns of two of one file that have one key and
    other decisions, which the warning shows."""
    rows: dict[Key, Located[AnyRow]] = {}
    for new in found:
        old = rows.setdefault(key(new.row), new)
        if old is new:
            continue
        same_file = old.file == new.file
        modelled = (old.row.provenance.modelled, new.row.provenance.modelled)
        later = replaces(old_modelled=modelled[0], new_modelled=modelled[1], same_file=same_file)
        ours, theirs = decision(old.row), decision(new.row)
        if same_file and ours != theirs:
            warn(f"table {old} ({ours}) and {new} ({theirs}) disagree; {new if later else old} kept")
        if later:
            rows[key(new.row)] = new
    return rows


def table_files(path: Path) -> list[Path]:
    """``path`` itself, or all ``*.json`` below it if it is a folder, in the order of their names."""
    return sorted(path.rglob("*.json")) if path.is_dir() else [path]


def read_rows(file: Path, kernel: str, parse: Parser[R]) -> Iterator[Located[R]]:
    """Rows of ``file`` as ``parse(fields, arch, provenances)`` makes them of their fields; nothing if the file is for
    another kernel.

    Warns (RuntimeWarning) of a file that cannot be read or is no table, and of each row for which ``parse`` raises
    ValueError, and goes on without it.
    """
    yield from read_kernels(file, {kernel: parse})


def read_kernels(file: Path, parsers: Mapping[str, Parser[R]]) -> Iterator[Located[R]]:
    """As ``read_rows``, for a file of any of several kernels, each with a parser of its own."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        _check_header(content)
        provenances = {name: parse_provenance(fields) for name, fields in content.get("provenance", {}).items()}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8 or no JSON, too
        warn(f"table {file}: {error}; file ignored")
        return
    parse = parsers.get(content["kernel"])
    if parse is None:
        return
    for index, fields in enumerate(content["rows"]):
        try:
            if not isinstance(fields, dict):
                raise ValueError(f"got {type(fields).__name__}, expected an object")
            row = parse(fields, content["arch"], provenances)
        except ValueError as error:
            warn(f"table {file} row {index}: {error}; row skipped")
            continue
        yield Located(row, file, index)


def warn(text: str) -> None:
    """RuntimeWarning ``text``. Python shows equal texts once."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _check_header(content: object) -> None:
    """ValueError unless ``content`` is a table of this format."""
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__}, expected an object")
    if content.get("format") != FORMAT:
        raise ValueError(f"format: got {content.get('format')!r}, expected {FORMAT}")
    expected = {"kernel": str, "arch": str, "rows": list}
    for name, kind in expected.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{name}: got {type(content.get(name)).__name__}, expected {kind.__name__}")
    provenances = content.get("provenance", {})
    if not isinstance(provenances, dict) or not all(isinstance(fields, dict) for fields in provenances.values()):
        raise ValueError("provenance: expected an object of objects")
