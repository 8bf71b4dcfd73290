"""The errors that gdn-runtime raises, and one way to word them: name, got, expected."""

from __future__ import annotations

from collections.abc import Iterable


class UnsupportedError(ValueError):
    """A legal call that no available backend can serve as asked. The message lists what is supported."""

    def __init__(self, what: str, *, got: object, supported: Iterable[object]) -> None:
        self.what = what
        self.got = got
        self.supported = tuple(supported)
        listed = ", ".join(str(item) for item in self.supported) or "nothing"
        # Not super().__init__: Dynamo cannot trace it, and would report that instead of this error.
        self.args = (f"{what}: got {got}, supported: {listed}",)


def value_error(name: str, got: object, expected: str) -> ValueError:
    """A ValueError worded ``name: got X, expected Y``."""
    return ValueError(f"{name}: got {got}, expected {expected}")


def type_error(name: str, got: object, expected: str) -> TypeError:
    """A TypeError worded ``name: got X, expected Y``."""
    return TypeError(f"{name}: got {got}, expected {expected}")
