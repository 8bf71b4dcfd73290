"""What is kept of one measurement: what was run, where and how, and what came out. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Op = Literal["k5", "prepare", "block", "pa"]
Status = Literal["ok", "wrong", "crashed", "skipped"]
OPS: tuple[Op, ...] = get_args(Op)
STATUSES: tuple[Status, ...] = get_args(Status)

MODEL = "model"
"""``protocol["method"]`` of what was modelled, not timed."""


class Facts(Mapping[str, Any]):
    """An immutable JSON object that can be a key: equal content is equal whatever the order it was given in.

    Values are JSON scalars, lists and objects with text keys, all finite. Raises TypeError or ValueError for others.
    """

    __slots__ = ("_values", "text")

    def __init__(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        self.text = json.dumps({**(values or {}), **more}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        """Canonical JSON."""
        self._values: dict[str, Any] = json.loads(self.text)

    @classmethod
    def parse(cls, text: str) -> Facts:
        """The facts that JSON ``text`` spells out. Raises ValueError if it is no JSON object."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"got {type(values).__name__}, expected an object")
        return cls(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Facts) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Facts, (self._values,)

    def __repr__(self) -> str:
        return f"Facts({self.text})"


NOTHING = Facts()
"""An empty object."""


@dataclass(frozen=True)
class Key:
    """What was run, where and how: samples of equal keys are measurements of the same thing.

    ``case`` is an id of the case table, or any text for shapes outside it. ``facts`` are the columns that describe the
    call in a tuned table of ``op`` (``formats.FORMATS``), and whatever else tells two calls apart. ``config`` is the
    candidate, e.g. ``{"block_v": 32}``. ``device`` is the name of the card ("emulator" for modelled samples),
    ``toolchain`` the versions that made and ran the kernels, ``kernel_digest`` the sha256 of the code object or of the
    sources. ``protocol`` has at least ``method`` (``MODEL`` or how time was taken) and whatever changes what a time
    means (warm-up, cold or warm), never how many samples there are.
    """

    op: Op
    case: str
    facts: Facts
    config: Facts
    arch: str
    compute_units: int
    device: str
    toolchain: str
    kernel_digest: str
    protocol: Facts

    def __post_init__(self) -> None:
        """Raise ValueError for what no store keeps."""
        if self.op not in OPS:
            raise ValueError(f"op: got {self.op!r}, expected one of {', '.join(OPS)}")
        if self.compute_units <= 0:
            raise ValueError(f"compute_units: got {self.compute_units}, expected a positive number")
        if not self.protocol.get("method"):
            raise ValueError(f"protocol: got {self.protocol.text}, expected a method")

    @property
    def modelled(self) -> bool:
        """Whether nothing was timed."""
        return bool(self.protocol["method"] == MODEL)


@dataclass(frozen=True)
class Sample:
    """One outcome for ``key``.

    ``times_us``: one time per timed iteration, or per block of them, in microseconds; empty if nothing was timed.
    ``counters`` and ``cycles`` (of the cycle model): of a modelled sample. ``error``: largest deviation from the
    reference, in the unit that the case's tolerance has. ``n``: timed iterations behind ``times_us``. ``detail``: what
    went wrong, or why the candidate was skipped. ``started``: ISO 8601, UTC, with seconds. ``host`` and ``commit``:
    where it ran, and the revision of the sources; empty if not known.
    """

    key: Key
    status: Status
    times_us: tuple[float, ...] = ()
    counters: Facts = NOTHING
    cycles: float | None = None
    error: float | None = None
    n: int = 0
    detail: str = ""
    started: str = ""
    host: str = ""
    commit: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a sample that says nothing or contradicts itself."""
        if self.status not in STATUSES:
            raise ValueError(f"status: got {self.status!r}, expected one of {', '.join(STATUSES)}")
        if not all(0 < time < math.inf for time in self.times_us):
            raise ValueError("times_us: expected positive numbers of microseconds")
        if self.cycles is not None and not 0 < self.cycles < math.inf:
            raise ValueError(f"cycles: got {self.cycles}, expected a positive number")
        if self.status == "ok" and not (self.cycles if self.key.modelled else self.times_us):
            raise ValueError(f"status: got ok without {'cycles' if self.key.modelled else 'times_us'}")
        if self.n < 0:
            raise ValueError(f"n: got {self.n}, expected none or more")
