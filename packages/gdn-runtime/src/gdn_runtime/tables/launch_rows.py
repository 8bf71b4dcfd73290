"""One row of a table of launch configurations on NVIDIA: the call that it is for, the best one, and where it is from.

Tables are named after what they configure: "prepare" (K1..K4), "state_scan" (K5), and "block": the fast path with its
segments, or the stages with the configuration of K6. All are for bf16 data.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from ..errors import UnsupportedError
from ..spec import (
    HEAD_DIM,
    TUNED_ARCHS,
    Dtype,
    FastConfig,
    FastPrefillSpec,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareSpec,
    StateScanConfig,
    StateScanSpec,
    config_refusal,
)
from .rows import UNKNOWN, Provenance, count, flag, microseconds

LaunchKernel = Literal["prepare", "state_scan", "block"]
LAUNCH_KERNELS: tuple[LaunchKernel, ...] = get_args(LaunchKernel)
LaunchConfig = PrepareConfig | StateScanConfig | OutputConfig | FastConfig


class LaunchCall(NamedTuple):
    """What configurations may depend on; host values only. See ``ScanKey``. ``gated``: one gate per token and head."""

    arch: str
    compute_units: int
    num_heads: int
    num_key_heads: int
    is_varlen: bool
    total_chunks: int
    num_seqs: int
    max_seq_chunks: int
    gated: bool
    use_initial_state: bool
    store_final_state: bool
    snapshot_dtype: Dtype
    state_dtype: Dtype


_CALL_COLUMNS = {
    "gfx": "arch", "cu_num": "compute_units", "H": "num_heads", "Hg": "num_key_heads", "is_varlen": "is_varlen",
    "total_chunks": "total_chunks", "N": "num_seqs", "max_seq_chunks": "max_seq_chunks", "gated": "gated",
    "use_h0": "use_initial_state", "store_fs": "store_final_state", "snapshot_bf16": "snapshot_dtype",
    "state_bf16": "state_dtype",
}  # fmt: skip
_FLAGS = ("is_varlen", "gated", "use_h0", "store_fs")
_DTYPES = ("snapshot_bf16", "state_bf16")
_ALL = tuple(_CALL_COLUMNS)
KEY_COLUMNS: dict[LaunchKernel, tuple[str, ...]] = {
    "prepare": ("gfx", "cu_num", "H", "Hg", "is_varlen", "total_chunks"),
    "state_scan": _ALL,
    "block": _ALL,
}
"""Columns that a row must match, by table. K1..K4 see neither states nor snapshots."""

CONFIG_COLUMNS: dict[LaunchKernel, tuple[str, ...]] = {
    "prepare": ("mode", "num_warps", "num_stages"),
    "state_scan": ("block_v", "num_warps", "num_stages"),
    "block": ("path", "p_in_scan", "segment_chunks", "block_v", "num_warps", "num_stages"),
}
"""Columns of the configuration. Of "block", path "fast" has the next two, path "staged" the last three, of K6."""

_PATHS: dict[str, type[FastConfig] | type[OutputConfig]] = {"fast": FastConfig, "staged": OutputConfig}


@dataclass(frozen=True)
class LaunchRow:
    """``config`` in a table of ``kernel`` for calls like ``call``; ``us``: its time in microseconds."""

    kernel: LaunchKernel
    call: LaunchCall
    config: LaunchConfig
    us: float | None = None
    provenance: Provenance = UNKNOWN

    @property
    def key(self) -> Hashable:
        """What rows for the same calls have in common."""
        return key_of(self.kernel, self.call)


def key_of(kernel: LaunchKernel, call: LaunchCall) -> Hashable:
    """What a row of ``kernel`` must have to be for ``call``."""
    return kernel, *(getattr(call, _CALL_COLUMNS[column]) for column in KEY_COLUMNS[kernel])


def key_fields(kernel: LaunchKernel, call: LaunchCall) -> dict[str, Any]:
    """The key as the columns of a row of ``kernel``."""
    values = {column: getattr(call, _CALL_COLUMNS[column]) for column in KEY_COLUMNS[kernel]}
    return {column: value == "bf16" if column in _DTYPES else value for column, value in values.items()}


def config_fields(config: LaunchConfig, kernel: LaunchKernel) -> dict[str, Any]:
    """The configuration as the columns of a row of ``kernel``."""
    path = {kind: name for name, kind in _PATHS.items()}
    first = {"path": path[type(config)]} if kernel == "block" else {}  # type: ignore[index]
    return {**first, **vars(config)}


def parse_launch_row(
    kernel: LaunchKernel, row: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]
) -> LaunchRow:
    """The row that ``row`` (column -> value) spells out, in a file of ``arch``. Raises ValueError that says what is
    wrong, UnsupportedError (a ValueError) for a configuration that no kernel has or that spills registers."""
    kind = _kind(kernel, row)
    config_columns = [field.name for field in fields(kind)]
    required = {*KEY_COLUMNS[kernel], "V", *config_columns} | ({"path"} if kernel == "block" else set())
    missing, unknown = required - set(row), set(row) - required - {"T_flat", "N", "us", "provenance"}
    if missing or unknown:
        faults = [f"lacks {name}" for name in sorted(missing)]
        raise ValueError(", ".join(faults + [f"has unknown field {name}" for name in sorted(unknown)]))
    if row["gfx"] != arch or arch not in TUNED_ARCHS:
        expected = f"the arch of the file, {arch!r}, one of {', '.join(TUNED_ARCHS)}"
        raise ValueError(f"gfx: got {row['gfx']!r}, expected {expected}")
    if count(row, "V") != HEAD_DIM:
        raise ValueError(f"V: got {row['V']}, expected {HEAD_DIM}")
    for name in ("T_flat", "N"):
        if row.get(name) is not None:
            count(row, name)
    call = _call(kernel, row)
    if call.num_heads % call.num_key_heads:
        raise ValueError(f"H: got {call.num_heads}, expected a multiple of Hg={call.num_key_heads}")
    if call.max_seq_chunks > call.total_chunks:
        raise ValueError(f"max_seq_chunks: got {call.max_seq_chunks}, expected at most total_chunks")
    config = kind(**{name: _value(row, name) for name in config_columns})
    refusal = launch_refusal(call, config)
    if refusal is not None:
        raise UnsupportedError(
            f"configuration of {kernel}", got=refusal, supported=["those that gdn-tune has as candidates"]
        )
    source = row.get("provenance")
    if source is not None and (not isinstance(source, str) or source not in provenances):
        raise ValueError(f"provenance: got {source!r}, expected one of {', '.join(provenances) or 'none'}")
    origin = UNKNOWN if source is None else provenances[source]
    return LaunchRow(kernel, call, config, microseconds(row), origin)


def launch_refusal(call: LaunchCall, config: LaunchConfig) -> str | None:
    """Why no table may give ``config`` to ``call``; None if one may. Raises UnsupportedError if no kernel has it."""
    c = call
    beta: Dtype = "fp32"
    shape = (c.num_heads, c.num_key_heads, c.is_varlen)
    if isinstance(config, PrepareConfig):
        return config_refusal(PrepareSpec(c.arch, "bf16", beta, *shape, True, config))
    if isinstance(config, OutputConfig):
        return config_refusal(OutputSpec(c.arch, "bf16", c.snapshot_dtype, *shape, True, config))
    if isinstance(config, StateScanConfig):
        return config_refusal(
            StateScanSpec(
                arch=c.arch, dtype="bf16", state_dtype=c.state_dtype, snapshot_dtype=c.snapshot_dtype,
                num_heads=c.num_heads, num_key_heads=c.num_key_heads, is_varlen=c.is_varlen, use_g=c.gated,
                use_gk=False, use_initial_state=c.use_initial_state, store_final_state=c.store_final_state,
                save_new_value=True, use_state_indices=False, use_state_mask=False, g_head_major=True, use_exp2=True,
                config=config,
            )
        )  # fmt: skip
    FastPrefillSpec(
        c.arch, "bf16", beta, c.state_dtype, *shape, c.use_initial_state, c.store_final_state, False, False,
        config.p_in_scan, config.segment_chunks,
    ).check()  # fmt: skip
    if c.snapshot_dtype != "bf16":
        return f"snapshots in {c.snapshot_dtype}, and the fast path keeps none"
    return config.refusal(num_heads=c.num_heads, num_seqs=c.num_seqs, max_seq_chunks=c.max_seq_chunks)


def _kind(kernel: LaunchKernel, row: Mapping[str, object]) -> type[LaunchConfig]:
    if kernel == "prepare":
        return PrepareConfig
    if kernel == "state_scan":
        return StateScanConfig
    path = row.get("path")
    if not isinstance(path, str) or path not in _PATHS:
        raise ValueError(f"path: got {path!r}, expected one of {', '.join(_PATHS)}")
    return _PATHS[path]


def _call(kernel: LaunchKernel, row: Mapping[str, object]) -> LaunchCall:
    """The call of a row. What the key lacks changes nothing for the kernel: a plain call stands for it."""
    values: dict[str, Any] = {
        "num_seqs": 1, "max_seq_chunks": 1, "gated": True, "use_initial_state": True, "store_final_state": True,
        "snapshot_dtype": "bf16", "state_dtype": "fp32",
    }  # fmt: skip
    for column in KEY_COLUMNS[kernel]:
        if column in _DTYPES:
            value: object = "bf16" if flag(row, column) else "fp32"
        elif column in _FLAGS:
            value = flag(row, column)
        else:
            value = row[column] if column == "gfx" else count(row, column)
        values[_CALL_COLUMNS[column]] = value
    return LaunchCall(**values)


def _value(row: Mapping[str, object], name: str) -> Any:
    if name == "mode":
        return row[name]  # check() says if it is none
    if name == "p_in_scan":
        return flag(row, name)
    return 0 if name == "segment_chunks" and type(row[name]) is int and row[name] == 0 else count(row, name)
