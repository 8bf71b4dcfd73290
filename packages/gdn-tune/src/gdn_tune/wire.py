"""Keys and samples as plain values, for what crosses to another process as JSON text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .records import Facts, Key, Sample


def key_values(key: Key) -> dict[str, Any]:
    """``key`` for JSON."""
    return {name: dict(value) if isinstance(value, Facts) else value for name, value in vars(key).items()}


def parse_key(values: Mapping[str, Any]) -> Key:
    """The key that ``key_values`` gave. Raises TypeError or ValueError for anything else."""
    fields: dict[str, Any] = {name: Facts(each) if isinstance(each, dict) else each for name, each in values.items()}
    return Key(**fields)


def sample_values(sample: Sample) -> dict[str, Any]:
    """``sample`` for JSON."""
    values = {**vars(sample), "key": key_values(sample.key), "counters": dict(sample.counters)}
    return {**values, "times_us": list(sample.times_us)}


def parse_sample(values: Mapping[str, Any]) -> Sample:
    """The sample that ``sample_values`` gave. Raises TypeError or ValueError for anything else."""
    fields = {**values, "key": parse_key(values["key"]), "counters": Facts(values["counters"])}
    return Sample(**{**fields, "times_us": tuple(values["times_us"])})
