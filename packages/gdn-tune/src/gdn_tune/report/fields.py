"""JSON of files that others wrote: every value is checked where it is read, and a fault says where it stands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from .data import InputError


def parse(text: str, file: str) -> Fields:
    """The object that ``text`` spells out. Raises InputError for anything else."""

    def refuse(word: str) -> float:
        raise ValueError(f"got {word}, expected finite numbers")

    try:
        values = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: no JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file}: got {kind_of(values)}, expected an object")
    return Fields(values, file)


def kind_of(value: object) -> str:
    """The kind of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number")


class Fields:
    """A JSON object at ``place`` of a file. Every reader raises InputError for what is not there or of another kind,
    unless it is optional and absent or null."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def fault(self, name: str, expected: str) -> InputError:
        """What is wrong with a field."""
        got = kind_of(self.values.get(name))
        if got in ("a number", "a text", "a truth value"):
            got = repr(self.values[name])
        return InputError(f"{self.place}: {name}: got {got}, expected {expected}")

    def text(self, name: str, default: str | None = None) -> str:
        """A text; ``default``: if there is none."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fault(name, "a text")
        return value

    def whole(self, name: str, least: int = 1) -> int:
        """A whole number, at least ``least``."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fault(name, f"a whole number, {least} or more")
        return value

    def number(self, name: str, *, positive: bool = True) -> float:
        """A finite number, above zero unless it need not be."""
        value = self.values.get(name)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not real or (positive and not value > 0):  # type: ignore[operator]
            raise self.fault(name, "a positive number" if positive else "a number")
        return float(value)  # type: ignore[arg-type]

    def optional(self, name: str) -> float | None:
        """A positive number, or None."""
        return self.number(name) if name in self else None

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """An object of finite numbers, in its order; empty if there is none."""
        if name not in self:
            return {}
        inner = self.object(name)
        return {key: inner.number(key, positive=False) for key in inner.values}

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, none below zero; empty if there is none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
            raise self.fault(name, "a list of whole numbers")
        return tuple(value)

    def medians(self, name: str) -> float | None:
        """The median of a list of positive numbers; None if there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            raise self.fault(name, "a list of numbers")
        times = Fields({str(index): each for index, each in enumerate(value)}, f"{self.place}: {name}")
        ordered = sorted(times.number(index) for index in times.values)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def object(self, name: str) -> Fields:
        """An object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return Fields(value, f"{self.place}: {name}")

    def objects(self, name: str, *, empty: bool = True) -> Iterator[Fields]:
        """A list of objects; not ``empty``: at least one."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self.fault(name, "a list of objects")
        if not value and not empty:
            raise InputError(f"{self.place}: {name}: there is nothing in it")
        for index, each in enumerate(value):
            if not isinstance(each, dict):
                raise InputError(f"{self.place}: {name}[{index}]: got {kind_of(each)}, expected an object")
            yield Fields(each, f"{self.place}: {name}[{index}]")

    def versions(self) -> dict[str, str]:
        """Versions of what made and ran the kernels, as the files of benches and benchmarks give them."""
        found = {}
        if "versions" in self:
            inner = self.object("versions")
            found = {name: inner.text(name) for name in inner.values}
        for name in ("python", "torch", "triton", "flydsl", "gdn_runtime", "pa_decode"):
            if name in self and name not in found:
                found[name] = self.text(name)
        return found
