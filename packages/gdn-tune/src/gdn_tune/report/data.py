"""What a report knows, whatever file it came from: times, decode times, bars, picks, and where each is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


class InputError(ValueError):
    """A file that no report can be made of, or files that do not go together. The message names them."""


@dataclass(frozen=True)
class Origin:
    """A file and what it says of its run; empty where it does not say.

    ``device``: name of the card that was timed, empty if nothing was. ``hardware``: the same with what else the file
    says of it. ``modelled``: whether figures are counts and cycles of a model. ``host``: times of the host alone, which
    no device has a part in.
    """

    file: str
    kind: str
    device: str = ""
    hardware: str = ""
    arch: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    commit: str = ""
    date: str = ""
    command: str = ""
    method: str = ""
    modelled: bool = False
    host: bool = False

    @property
    def where(self) -> str:
        """Device, versions, commit and date in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        hardware = self.hardware or ("emulator" if self.modelled else "")
        named = (
            ("device", hardware),
            ("versions", versions),
            ("commit", self.commit and f"commit {self.commit[:12]}"),
            ("date", self.date),
        )
        return "; ".join(text or f"{name} not given" for name, text in named)

    @property
    def line(self) -> str:
        """Everything that is known of the run."""
        parts = [self.where, self.command and f"command: {self.command}", self.method]
        return f"{self.file}: {'; '.join(part.rstrip('.') for part in parts if part)}."


@dataclass(frozen=True)
class Shape:
    """A call of the block: ``lengths`` of its sequences, of its rows if ``dense``; empty if the file does not say.

    ``name`` is what the file calls it, ``snapshot`` the dtype of the snapshots if the call has some.
    """

    name: str
    num_heads: int
    num_key_heads: int
    lengths: tuple[int, ...]
    dense: bool = False
    snapshot: str = ""

    @property
    def tokens(self) -> int:
        """Of the whole call."""
        return sum(self.lengths)

    @property
    def layout(self) -> str:
        """In words, without the number of tokens where that is all that differs."""
        if not self.lengths:
            return self.name
        most = max(self.lengths)
        if self.dense:
            return "dense" if len(self.lengths) == 1 else f"dense, {len(self.lengths)} rows"
        if all(length == most for length in self.lengths[:-1]):
            return f"sequences of {most}"
        return f"{len(self.lengths)} ragged sequences"

    @property
    def text(self) -> str:
        """In words."""
        if not self.lengths:
            return self.name
        if self.dense:
            return f"dense {len(self.lengths)} x {self.lengths[0]}"
        most = max(self.lengths)
        if all(length == most for length in self.lengths):
            return f"{len(self.lengths)} x {most}"
        return f"{len(self.lengths)} sequences, {self.tokens} tokens"


@dataclass(frozen=True)
class Time:
    """Time of a call by one backend.

    ``what``: the block, K5 or K6. ``value`` in ``unit``: us, or cycles of the emulator's model. ``how`` it was taken.
    ``variant``: e.g. with a pool. ``stages``: time of each in ``unit``, ``gap``: host gap, us.
    """

    origin: Origin
    what: Literal["block", "K5", "K6"]
    shape: Shape
    backend: str
    value: float
    how: str
    variant: str = ""
    unit: str = "us"
    stages: Mapping[str, float] = field(default_factory=dict)
    gap: float | None = None

    @property
    def label(self) -> str:
        """Of its line in a plot."""
        return f"{self.backend} {self.variant}".rstrip()


@dataclass(frozen=True)
class Decode:
    """Time of paged decode by one backend; ``variant`` is the state of the caches. None for what is not known."""

    origin: Origin
    backend: str
    batch: int
    context: int
    page: int
    query_length: int
    value: float
    variant: str = ""
    unit: str = "us"
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    scales: str = ""
    v_form: str = ""
    window: int = 0
    spread: float | None = None

    @property
    def label(self) -> str:
        """Of its line in a plot."""
        return f"{self.backend} {self.variant}".rstrip()

    @property
    def problem(self) -> str:
        """What all contexts and batches of a plot have in common."""
        heads = "" if self.num_heads is None else f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, "
        window = f", window {self.window}" if self.window else ""
        rest = "".join(f", {word}" for word in (self.scales and f"{self.scales} scales",
                                                self.v_form and f"{self.v_form} V") if word)  # fmt: skip
        return f"{heads}page {self.page}, QL {self.query_length}{rest}{window}"


@dataclass(frozen=True)
class BarRow:
    """What was got of a ``limit`` that holds as an upper bound. ``unit`` is empty for counts."""

    origin: Origin
    group: str
    item: str
    name: str
    got: float
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.got <= self.limit

    @property
    def share(self) -> float | None:
        """Of the limit; None where that is zero."""
        return self.got / self.limit if self.limit else None


@dataclass(frozen=True)
class Pick:
    """The candidate that a table takes for a call, of what the tuner measured or modelled.

    ``others``: (choice, value) of all candidates that were right, fastest first, the pick among them. ``margin``: time
    of the fastest other one over that of the pick, less one; below zero where the rule's choice won a tie. ``tied``:
    whether it cannot be told apart from another. ``ruled``: the rule's choice, ``gain``: its time over that of the
    pick, less one.
    """

    origin: Origin
    op: str
    case: str
    arch: str
    compute_units: int
    choice: str
    value: float
    unit: str
    n: int
    others: tuple[tuple[str, float], ...]
    tied: bool = False
    ruled: str = ""

    @property
    def margin(self) -> float | None:
        """See the class."""
        rest = [value for choice, value in self.others if choice != self.choice]
        return min(rest) / self.value - 1 if rest else None

    @property
    def gain(self) -> float | None:
        """See the class."""
        found = dict(self.others).get(self.ruled)
        return found / self.value - 1 if found is not None else None


def labels_of(rows: Sequence[Time | Decode]) -> Callable[[Time | Decode], str]:
    """The label of each of ``rows``: with its file where several have the same one, for runs do not mix."""
    files: dict[str, set[str]] = {}
    for row in rows:
        files.setdefault(row.label, set()).add(row.origin.file)
    return lambda row: row.label if len(files[row.label]) == 1 else f"{row.label} ({row.origin.file})"


@dataclass
class Data:
    """Everything that was read. ``missing``: (origin, what has no figure and why)."""

    times: list[Time] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    bars: list[BarRow] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    missing: list[tuple[Origin, str]] = field(default_factory=list)

    def add(self, other: Data) -> None:
        """Take what another file had."""
        for name in ("times", "decodes", "bars", "picks", "origins", "missing"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def figures(self) -> int:
        """How many there are."""
        return len(self.times) + len(self.decodes) + len(self.bars) + len(self.picks)
