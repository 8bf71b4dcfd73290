"""One row of a table of K5 `opt`: the call that it is for, the best block_v, and where that was found out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..spec import AMD_ARCHS, HEAD_DIM, SCAN_BLOCK_V, Dtype, OptStateScanSpec

KERNEL = OptStateScanSpec.kernel
"""Name of the kernel whose tables selection reads."""

FLAGS = ("is_varlen", "use_h0", "store_fs", "snapshot_bf16", "state_bf16")
COUNTS = ("cu_num", "H", "Hg", "V", "total_chunks", "max_seq_chunks", "block_v")
REQUIRED = {"gfx", *FLAGS, *COUNTS}
OPTIONAL = {"T_flat", "N", "us", "provenance"}
"""Columns of a row. Their names are those of the seed's tables."""


class ScanKey(NamedTuple):
    """What a row must match exactly; host-side values only.

    ``compute_units`` keeps a part with disabled compute units from using the rows of a whole one. ``total_chunks`` is
    the sum over the sequences of their 64-token chunks, ``max_seq_chunks`` the largest.
    """

    arch: str
    compute_units: int
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_initial_state: bool
    store_final_state: bool
    snapshot_dtype: Dtype
    state_dtype: Dtype
    total_chunks: int
    max_seq_chunks: int


@dataclass(frozen=True)
class Provenance:
    """Where rows come from.

    ``source`` names who found them ("seed", "gdn-tune", ...), ``device`` the card, ``date`` the day as YYYY-MM-DD,
    ``n`` the timed iterations; empty or None where it is not known. ``modelled`` rows were not timed: they never
    override rows that were. ``details`` holds anything else, e.g. toolchain and protocol.
    """

    source: str
    device: str = ""
    date: str = ""
    n: int | None = None
    modelled: bool = False
    details: tuple[tuple[str, str], ...] = ()


UNKNOWN = Provenance("not stated")


@dataclass(frozen=True)
class ScanRow:
    """``block_v`` for ``key``. ``us`` is the time of the kernel that was measured, in microseconds; ``num_tokens`` and
    ``num_seqs`` describe the shape that was timed and match nothing."""

    key: ScanKey
    block_v: int
    us: float | None = None
    num_tokens: int | None = None
    num_seqs: int | None = None
    provenance: Provenance = UNKNOWN


def parse_row(fields: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]) -> ScanRow:
    """The row that ``fields`` (column -> value) spell out, in a file of ``arch``.

    ``fields["provenance"]``, if there, is a name in ``provenances``. Raises ValueError that says what is wrong.
    """
    unknown = set(fields) - REQUIRED - OPTIONAL
    missing = REQUIRED - set(fields)
    if missing or unknown:
        faults = [f"lacks {name}" for name in sorted(missing)] + [
            f"has unknown field {name}" for name in sorted(unknown)
        ]
        raise ValueError(", ".join(faults))
    gfx = fields["gfx"]
    if gfx != arch or arch not in AMD_ARCHS:
        raise ValueError(f"gfx: got {gfx!r}, expected the arch of the file, {arch!r}, one of {', '.join(AMD_ARCHS)}")
    flags = {name: flag(fields, name) for name in FLAGS}
    counts = {name: count(fields, name) for name in COUNTS}
    if counts["V"] != HEAD_DIM:
        raise ValueError(f"V: got {counts['V']}, expected {HEAD_DIM}")
    if counts["block_v"] not in SCAN_BLOCK_V:
        raise ValueError(f"block_v: got {counts['block_v']}, expected one of {', '.join(map(str, SCAN_BLOCK_V))}")
    if counts["H"] % counts["Hg"]:
        raise ValueError(f"H: got {counts['H']}, expected a multiple of Hg={counts['Hg']}")
    if counts["max_seq_chunks"] > counts["total_chunks"]:
        raise ValueError(f"max_seq_chunks: got {counts['max_seq_chunks']}, expected at most total_chunks")
    key = ScanKey(
        arch=arch,
        compute_units=counts["cu_num"],
        num_heads=counts["H"],
        num_key_heads=counts["Hg"],
        is_varlen=flags["is_varlen"],
        use_initial_state=flags["use_h0"],
        store_final_state=flags["store_fs"],
        snapshot_dtype="bf16" if flags["snapshot_bf16"] else "fp32",
        state_dtype="bf16" if flags["state_bf16"] else "fp32",
        total_chunks=counts["total_chunks"],
        max_seq_chunks=counts["max_seq_chunks"],
    )
    name = fields.get("provenance")
    if name is not None and (not isinstance(name, str) or name not in provenances):
        raise ValueError(f"provenance: got {name!r}, expected one of {', '.join(provenances) or 'none'}")
    return ScanRow(
        key=key,
        block_v=counts["block_v"],
        us=microseconds(fields),
        num_tokens=count(fields, "T_flat") if fields.get("T_flat") is not None else None,
        num_seqs=count(fields, "N") if fields.get("N") is not None else None,
        provenance=UNKNOWN if name is None else provenances[name],
    )


def parse_provenance(fields: Mapping[str, object]) -> Provenance:
    """The provenance that ``fields`` spell out. Raises ValueError that says what is wrong."""
    named = {"source": "", "device": "", "date": ""}
    details = []
    for name, value in fields.items():
        if name in ("n", "modelled"):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {value!r}, expected text")
        if name in named:
            named[name] = value
        else:
            details.append((name, value))
    if not named["source"]:
        raise ValueError("lacks source")
    iterations = count(fields, "n") if fields.get("n") is not None else None
    modelled = flag(fields, "modelled") if "modelled" in fields else False
    return Provenance(**named, n=iterations, modelled=modelled, details=tuple(sorted(details)))


def count(fields: Mapping[str, object], name: str) -> int:
    """The positive integer in ``fields[name]``. Raises ValueError for anything else."""
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name}: got {value!r}, expected a positive integer")
    return value


def flag(fields: Mapping[str, object], name: str) -> bool:
    """The boolean in ``fields[name]``. Raises ValueError for anything else."""
    value = fields[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, expected true or false")
    return value


def microseconds(fields: Mapping[str, object]) -> float | None:
    """``fields["us"]``, None if there is none. Raises ValueError for anything but a positive number."""
    value = fields.get("us")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"us: got {value!r}, expected a positive number of microseconds")
    return float(value)
