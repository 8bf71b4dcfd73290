"""From files to figures: what each is, and whether they go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import benches, picks, results
from .data import Data, InputError, Origin
from .fields import parse

SQLITE = b"SQLite format 3\0"
KINDS = (
    f"JSON of gdn-tune bench ({', '.join(benches.READERS)}), a store of gdn-tune, or a file as those of "
    "benchmarks/results: runs side by side, the fast path, paged decode, counters, first calls"
)


def read(paths: Sequence[Path], device: str = "") -> Data:
    """Everything in ``paths``, in their order; ``device``: of the timed cards only that one.

    Raises InputError for a file that is none of ``KINDS``, is damaged or empty or given twice, and for times of more
    than one device; OSError for what cannot be read.
    """
    data = Data()
    for path, name in zip(paths, names(paths), strict=True):
        data.add(_read(path, name))
    if device:
        _keep(data, device)
    timed: dict[str, str] = {}
    for origin in data.origins:
        if origin.device and not origin.host:
            timed.setdefault(origin.device, origin.file)
    if len(timed) > 1:
        text = ", ".join(f"{name} ({file})" for name, file in timed.items())
        raise InputError(f"got times of {text}, expected one device: choose it with --device, or report each alone")
    if not data.figures:
        why = f": {data.missing[0][1]}" if data.missing else ""
        raise InputError(f"there is no figure in {', '.join(names(paths))}{why}")
    return data


def names(paths: Sequence[Path]) -> list[str]:
    """What files are called: by their names alone where these differ. Raises InputError for one that is there twice."""
    twice = [str(path) for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise InputError(f"{twice[0]}: given twice")
    counts = Counter(path.name for path in paths)
    return [path.name if counts[path.name] == 1 else path.as_posix() for path in paths]


def _read(path: Path, name: str) -> Data:
    content = path.read_bytes()
    if not content.strip():
        raise InputError(f"{name}: empty")
    if content.startswith(SQLITE):
        return picks.read(path, name)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: neither JSON nor a store; expected {KINDS}") from error
    values = parse(text, name)
    if "bench" in values:
        return benches.read(values, name)
    reader = results.reader_of(values)
    if reader is None:
        raise InputError(f"{name}: unknown schema; expected {KINDS}")
    return reader(values, name)


def _keep(data: Data, device: str) -> None:
    known = list(dict.fromkeys(origin.device for origin in data.origins if origin.device and not origin.host))
    if device not in known:
        raise InputError(f"device: got {device!r}, expected one of {', '.join(known) or 'none: nothing was timed'}")

    def kept(origin: Origin) -> bool:
        return origin.host or origin.device in ("", device)

    data.times = [row for row in data.times if kept(row.origin)]
    data.decodes = [row for row in data.decodes if kept(row.origin)]
    data.picks = [row for row in data.picks if kept(row.origin)]
    data.origins = [origin for origin in data.origins if kept(origin)]
    data.missing = [pair for pair in data.missing if kept(pair[0])]
