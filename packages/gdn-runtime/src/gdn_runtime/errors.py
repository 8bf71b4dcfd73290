"""The errors that gdn-runtime raises, and one way to word them: name, got, expected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


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


class MissingCodeObjectError(RuntimeError):
    """There is no code object of a spec, and none may be made. The message names the spec and the ways out."""

    def __init__(self, spec: str, reason: str) -> None:
        self.spec = spec
        super().__init__(f"no code object of {spec}: {reason}")


WARM_UP = "warm up first, with gdn_runtime.warmup() or one call of the same kind"


class CaptureError(RuntimeError):
    """A stream is being captured, and something would have to be done before: compiling, loading, allocating."""

    def __init__(self, what: str, advice: str = WARM_UP) -> None:
        super().__init__(f"{what} while a stream is being captured: {advice}")


class CorruptCodeObjectError(RuntimeError):
    """A stored code object is not what was stored."""


class BundleError(RuntimeError):
    """A bundle cannot be used, and nothing of it was. ``path`` is the file or folder at fault."""

    def __init__(self, path: Path, what: str, advice: str) -> None:
        self.path = path
        super().__init__(f"{path}: {what}. {advice}")


class CorruptBundleError(BundleError):
    """A bundle is not what was built: something of it is missing, has changed, or does not belong to it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what, "The bundle is not what was built, this was not loaded: install the bundle again")


class IncompatibleBundleError(BundleError):
    """A bundle is for another version of gdn-runtime or another architecture. ``got`` and ``expected`` say which."""

    def __init__(self, path: Path, what: str, got: object, expected: object) -> None:
        self.got, self.expected = got, expected
        advice = (
            "The bundle is for something else, nothing of it was loaded: name one that fits in GDN_BUNDLE, or build it "
            "with the gdn-aot of this release"
        )
        super().__init__(path, f"{what}: got {got}, expected {expected}", advice)


class CompileError(RuntimeError):
    """A spec did not compile. ``stderr`` holds what the compiler said; ``crashed``: a process died, trying again may
    help."""

    def __init__(self, spec: str, reason: str, stderr: str = "", *, crashed: bool = False) -> None:
        self.spec, self.reason, self.stderr, self.crashed = spec, reason, stderr, crashed
        super().__init__(f"compiling {spec}: {reason}" + (f"\n{stderr.strip()[-4000:]}" if stderr.strip() else ""))


class HipError(RuntimeError):
    """A function of the HIP library failed. ``function``, ``code`` and ``name`` say which one and how."""

    def __init__(self, function: str, code: int, name: str, text: str, context: str = "") -> None:
        self.function, self.code, self.name, self.text = function, code, name, text
        super().__init__(f"{function}: {name} ({code}): {text}" + (f" ({context})" if context else ""))


class EmulatedFaultError(RuntimeError):
    """The emulator found a kernel doing something wrong. ``report`` holds all findings (``cdna_emu.Report``)."""

    def __init__(self, kernel: str, count: int, shown: str, report: object) -> None:
        self.kernel, self.report = kernel, report
        super().__init__(f"{kernel}: {count} finding{'s' * (count != 1)} of the emulator\n{shown}")
