"""The environment variables of gdn-runtime: one typed table, read once.

No other module touches ``os.environ``. ``settings()`` gives the parsed values, ``override(...)`` changes them for a
while, ``reload()`` reads the environment again, ``markdown()`` writes docs/environment.md.
"""

from __future__ import annotations

import difflib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from .errors import value_error
from .spec import AMD_ROUTES, BACKENDS, BLOCK_V, PREFILL_PATHS, PREPARE_MODES

PREFIX = "GDN_"

Kind = Literal["bool", "choice", "int", "str"]
Value = bool | int | str | None
Source = Literal["default", "environment", "override"]

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_AUTO = "auto"


@dataclass(frozen=True)
class Var:
    """One variable. ``default`` is spelled as a user would; an ``int`` whose default is "auto" has the value None then.

    ``choices`` lists every legal spelling of a ``choice`` or ``int``; an ``int`` without choices takes any integer.
    """

    name: str
    kind: Kind
    default: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """Name of the field of ``Settings`` that holds the value: GDN_CHECK_INDICES -> check_indices."""
        return self.name.removeprefix(PREFIX).lower()

    @property
    def expected(self) -> str:
        """The legal values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return {"bool": "one of " + ", ".join(_BOOLS), "int": "an integer"}.get(self.kind, "any text")

    def parse(self, text: str) -> Value:
        """Value of ``text``; blank text means the default. ValueError with name, got and expected otherwise."""
        word = text.strip() or self.default
        if self.kind == "str":
            return word
        word = word.lower()
        if self.choices and word not in self.choices:
            raise value_error(self.name, repr(text), self.expected)
        if self.kind == "choice":
            return word
        if self.kind == "bool":
            if word not in _BOOLS:
                raise value_error(self.name, repr(text), self.expected)
            return _BOOLS[word]
        if word == _AUTO == self.default:
            return None
        try:
            return int(word)
        except ValueError:
            raise value_error(self.name, repr(text), self.expected) from None


VARIABLES: tuple[Var, ...] = (
    Var(
        "GDN_BACKEND",
        "choice",
        _AUTO,
        'Backend of calls that say backend="auto". "auto" picks the fastest one that can serve the call.',
        (_AUTO, *BACKENDS),
    ),
    Var(
        "GDN_PREPARE_MODE",
        "choice",
        _AUTO,
        "Forces one kernel (fused) or two (split) for stages K1..K4. For tuning and for comparing the two.",
        (_AUTO, *PREPARE_MODES),
    ),
    Var(
        "GDN_PREFILL",
        "choice",
        _AUTO,
        "Path of the block on the backend triton. fast: two to four kernels without snapshots, w and u, where they "
        "take the call (sm90, Triton 3.6; see `explain`). staged: K1..K6. auto: as tuned, else fast.",
        (_AUTO, *PREFILL_PATHS),
    ),
    Var(
        "GDN_AMD_ROUTE",
        "choice",
        _AUTO,
        "What K1..K4 hand to K5 in a call of the block on the backends flydsl and emulate: w and u (staged) or T' "
        "(tprime). auto: T' for large grids, unless GDN_K5_BLOCK_V is set.",
        (_AUTO, *AMD_ROUTES),
    ),
    Var(
        "GDN_CHECK_INDICES",
        "bool",
        "0",
        "Checks the values of initial_state_indices on every call that does not pass check_indices. "
        "Copies them to the host, so it synchronises with the device: for debugging.",
    ),
    Var(
        "GDN_K5_BLOCK_V",
        "int",
        _AUTO,
        "Forces the value rows of the state per program of the state scan (K5). For tuning.",
        (_AUTO, *map(str, BLOCK_V)),
    ),
    Var(
        "GDN_ARCH",
        "str",
        "",
        "Architecture that `explain` and compilation work for, e.g. gfx950 or sm90. Empty: ask the device.",
    ),
    Var(
        "GDN_TABLES",
        "str",
        "",
        "Tuned tables that extend and override the packaged ones: files or folders, apart by the path separator of the "
        "system (`:`). A later one wins.",
    ),
    Var(
        "GDN_BUNDLE",
        "str",
        "",
        "Bundles of compiled kernels for AMD GPUs: folders with a manifest.json, or with one such folder per "
        "architecture, apart by the path separator of the system (`:`); the first that has a kernel serves it. Empty: "
        "those of the package.",
    ),
    Var(
        "GDN_JIT",
        "bool",
        "0",
        "Allows compiling a kernel for AMD GPUs that no artifact holds, at the first call that needs it: seconds. "
        "Needs the extra `jit`.",
    ),
    Var(
        "GDN_JIT_CACHE_DIR",
        "str",
        "",
        "Folder that keeps what GDN_JIT compiled for the next process; made if missing. Empty: nothing is kept.",
    ),
    Var(
        "GDN_HIP_LIBRARY",
        "str",
        "",
        "Path of the HIP library (libamdhip64.so). Empty: the one that PyTorch has loaded.",
    ),
    Var(
        "FLYDSL_RUNTIME_RUN_ONLY",
        "bool",
        "0",
        "FlyDSL's own variable; it forbids compiling here too, whatever GDN_JIT says.",
    ),
)

THIRD_PARTY: tuple[str, ...] = (
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCM_PATH",
    "ROCR_VISIBLE_DEVICES",
)
"""Variables of other programs that change what runs here; ``third_party()`` reads them, nothing here writes them."""


@dataclass(frozen=True)
class Settings:
    """Parsed values of ``VARIABLES``, one field each.

    ``k5_block_v`` is None when the choice is left to ``select``; ``arch`` is "" when the device is to be asked,
    ``tables`` and ``bundle`` hold paths, apart by ``os.pathsep``.
    """

    backend: str
    prepare_mode: str
    prefill: str
    amd_route: str
    check_indices: bool
    k5_block_v: int | None
    arch: str
    tables: str
    bundle: str
    jit: bool
    jit_cache_dir: str
    hip_library: str
    flydsl_runtime_run_only: bool


@dataclass(frozen=True)
class Reading:
    """What one variable holds: its value and where it came from, or the error that its text causes."""

    var: Var
    value: Value
    source: Source
    error: str | None = None


_lock = threading.RLock()
_settings: Settings | None = None  # what settings() returns; None until first use
_base: dict[str, Value] | None = None  # values of the environment, by attribute
_overrides: list[Mapping[str, Value]] = []  # active override() blocks, oldest first


def settings() -> Settings:
    """The parsed settings. The environment is read on the first call only.

    Raises ValueError (name, got, expected) for a variable with an illegal value; warns about unknown GDN_* names.
    """
    _ensure_loaded()
    assert _settings is not None
    return _settings


def _ensure_loaded() -> bool:
    if _settings is None:
        with _lock:
            if _settings is None:
                _rebuild(reread=True)
    return True


# While tracing, Dynamo runs the function instead of following it into os.environ and the lock, which it cannot. Being
# called before ``_settings`` is read, it leaves Dynamo a plain object to guard on: override() recompiles what reads it.
# The attribute is all that torch.compiler.assume_constant_result sets, but that imports torch._dynamo, hence triton.
_ensure_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reload() -> Settings:
    """Read the environment again. Active overrides stay on top. On ValueError the old settings stay in force."""
    with _lock:
        return _rebuild(reread=True)


@contextmanager
def override(**values: Value) -> Iterator[Settings]:
    """Settings with ``values`` (fields of ``Settings``) replaced while the block runs, in the whole process.

    For tests, tuners and benches: it is visible to other threads. Blocks nest, the newest wins. Raises TypeError for a
    name that is no setting and ValueError for an illegal value.
    """
    by_attribute = {var.attribute: var for var in VARIABLES}
    for name in values:
        if name not in by_attribute:
            raise TypeError(f"override: got {name!r}, expected one of {', '.join(by_attribute)}")
    layer = {name: by_attribute[name].parse(spell(value)) for name, value in values.items()}
    with _lock:
        _ensure_loaded()  # may raise, so before the layer is in force
        _overrides.append(layer)
        current = _rebuild(reread=False)
    try:
        yield current
    finally:
        with _lock:
            # By identity: two threads may hold equal layers.
            del _overrides[next(i for i, entry in enumerate(_overrides) if entry is layer)]
            _rebuild(reread=False)


def readings() -> tuple[Reading, ...]:
    """Every variable as it stands now, illegal values included; raises nothing. For `doctor` and `env`."""
    with _lock:
        result = []
        for var in VARIABLES:
            layers = [layer for layer in _overrides if var.attribute in layer]
            if layers:
                result.append(Reading(var, layers[-1][var.attribute], "override"))
                continue
            text = os.environ.get(var.name, "")
            source: Source = "environment" if text.strip() else "default"
            try:
                result.append(Reading(var, var.parse(text), source))
            except ValueError as error:
                result.append(Reading(var, text, source, str(error)))
        return tuple(result)


def unknown() -> dict[str, tuple[str, ...]]:
    """GDN_* names of the environment that are no variable, each with the known names that look alike."""
    known = [var.name for var in VARIABLES]
    names = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return {name: tuple(difflib.get_close_matches(name, known, cutoff=0.75)) for name in names}


def describe_unknown(name: str, matches: tuple[str, ...]) -> str:
    """One sentence about an entry of ``unknown()``."""
    hint = f", did you mean {' or '.join(matches)}?" if matches else ""
    return f"{name} is no variable of gdn-runtime and has no effect{hint}"


def third_party() -> dict[str, str]:
    """Those of ``THIRD_PARTY`` that are set."""
    return {name: os.environ[name] for name in THIRD_PARTY if name in os.environ}


def child_environment(changes: Mapping[str, str], *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment of a child process: this one's, with ``changes`` and no names that begin as ``without`` says."""
    return {name: value for name, value in os.environ.items() if not name.startswith(without)} | dict(changes)


def set_in_process(values: Mapping[str, str]) -> None:
    """Set variables of other programs in this process: a compile job names its target by them."""
    os.environ.update(values)


def spell(value: Value) -> str:
    """``value`` as it would be written in the environment."""
    if value is None:
        return _AUTO
    return str(int(value)) if isinstance(value, bool) else str(value)


def markdown() -> str:
    """docs/environment.md: the table of variables."""
    lines = [
        "# Environment variables",
        "",
        "Written by `python -m gdn_runtime env --markdown` from the table in `gdn_runtime/env.py`.",
        "",
        "Variables are read once, at the first call; an argument of a call wins over its variable. A blank value",
        "counts as not set. An illegal value is a `ValueError`, an unknown `GDN_` name a warning.",
        "",
        "| variable | values | default | meaning |",
        "|---|---|---|---|",
    ]
    for var in VARIABLES:
        values = ", ".join(f"`{choice}`" for choice in var.choices) or {"bool": "`0`, `1`", "str": "text"}.get(
            var.kind, var.kind
        )
        default = f"`{var.default}`" if var.default else "empty"
        lines.append(f"| `{var.name}` | {values} | {default} | {var.help} |")
    return "\n".join(lines) + "\n"


def _rebuild(*, reread: bool) -> Settings:
    """Form the settings from the environment and the overrides. The caller holds the lock."""
    global _base, _settings
    base = _base
    if reread or base is None:
        base = {var.attribute: var.parse(os.environ.get(var.name, "")) for var in VARIABLES}
        for name, matches in unknown().items():
            warnings.warn(describe_unknown(name, matches), RuntimeWarning, stacklevel=2)
    merged = dict(base)
    for layer in _overrides:
        merged.update(layer)
    current = Settings(**merged)  # type: ignore[arg-type]  # parse() gives each field its type; a test checks it
    _base, _settings = base, current
    return current
