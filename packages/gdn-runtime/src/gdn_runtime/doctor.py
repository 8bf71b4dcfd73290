"""What `python -m gdn_runtime doctor` reports: versions, devices, backends, caches and variables of this machine.

Needs only the standard library and torch. A probe that fails becomes text in the report; it never ends the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from . import env, tables
from .__about__ import __version__
from .arch import arch_of, compute_units, parse_arch
from .codeobject.bundle import Bundle, bundle_folders, named_paths, read_bundle
from .errors import BundleError
from .ops.warmup import specs_of_row
from .select import backends_for
from .spec import KERNEL_ABI
from .tables.lookup import table_paths

ABSENT = "not installed"
_GPU_DRIVERS = (
    ("nvidia driver", Path("/proc/driver/nvidia/version"), r"Kernel Module.*?\s(\d+\.[\d.]+)"),
    ("amdgpu driver", Path("/sys/module/amdgpu/version"), r"([\d.]+)"),
)


@dataclass(frozen=True)
class Backend:
    """Whether a backend would run on a device, and why (not)."""

    name: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Device:
    """One device. ``arch`` holds the reason in words when the architecture is not known."""

    device: str
    name: str
    arch: str
    compute_units: int | None
    memory_bytes: int | None
    backends: tuple[Backend, ...]


@dataclass(frozen=True)
class Cache:
    """A directory that compiled kernels are read from. ``mode`` is octal; None: the directory does not exist yet."""

    name: str
    path: str
    owner_uid: int | None
    mode: str | None


@dataclass(frozen=True)
class BundleReport:
    """One bundle, every artifact of which was verified: ``faults`` were found, and stand among the problems.

    ``digest`` is the sha256 of its manifest. ``artifacts`` counts them by kernel, ``code_bytes`` sums their sizes.
    ``tables`` are the tables that it was built for, by sha256. Of ``rows`` rows of the tables in force, ``served_rows``
    have every kernel that a call like that needs.
    """

    folder: str
    arch: str
    digest: str
    kernel_abi: int
    source_digest: str
    toolchain: dict[str, str]
    tables: dict[str, str]
    artifacts: dict[str, int]
    code_bytes: int
    rows: int
    served_rows: int
    faults: int


@dataclass
class Report:
    """All findings. ``tables`` counts the rows in force by architecture and origin. ``problems`` need an act of the
    user (exit code 1), ``notes`` are worth knowing."""

    versions: dict[str, str]
    kernel_abi: int
    bundles: list[BundleReport] = field(default_factory=list)
    tables: dict[str, int] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """The report as plain data for JSON."""
        return asdict(self)


def diagnose() -> Report:
    """Look at this machine. Launches nothing and writes nothing."""
    report = Report(_versions(), KERNEL_ABI)
    _add_environment(report)
    _add_bundles(report)
    _add_devices(report)
    if not report.versions["triton"].startswith(ABSENT):
        _add_triton_cache(report)
    return report


def render(report: Report) -> str:
    """The report as aligned plain text."""
    lines = ["versions", *_table(list(report.versions.items()))]
    rows = [("ABI", str(report.kernel_abi)), ("bundles", str(len(report.bundles) or "none"))]
    rows += [("tuned rows", f"{count} for {origin}") for origin, count in report.tables.items()]
    lines += ["", "kernels", *_table(rows)]
    for bundle in report.bundles:
        lines += ["", f"bundle {bundle.folder}", *_table(_bundle_rows(bundle))]
    for device in report.devices:
        rows = [("name", device.name), ("architecture", device.arch)]
        if device.compute_units is not None:
            rows.append(("compute units", str(device.compute_units)))
        if device.memory_bytes is not None:
            rows.append(("memory", f"{device.memory_bytes / 2**30:.1f} GiB"))
        for backend in device.backends:
            word = "yes" if backend.available else "no"
            rows.append((f"backend {backend.name}", f"{word}: {backend.reason}" if backend.reason else word))
        lines += ["", f"device {device.device}", *_table(rows)]
    rows = []
    for cache in report.caches:
        state = "does not exist yet" if cache.mode is None else f"owner uid {cache.owner_uid}, mode {cache.mode}"
        rows.append((cache.name, f"{cache.path} ({state})"))
    lines += ["", "caches", *_table(rows or [("none", "")])]
    lines += ["", "environment", *_table(list(report.environment.items()) or [("nothing set", "")])]
    for title, entries in (("notes", report.notes), ("problems", report.problems)):
        lines += ["", title, *([f"  {entry}" for entry in entries] or ["  none"])]
    return "\n".join(lines) + "\n"


def _bundle_rows(bundle: BundleReport) -> list[tuple[str, str]]:
    kinds = ", ".join(f"{count} {kernel}" for kernel, count in bundle.artifacts.items())
    state = "verified" if not bundle.faults else f"{bundle.faults} faults, see problems"
    return [
        ("architecture", bundle.arch),
        ("artifacts", f"{sum(bundle.artifacts.values())} ({kinds}), {bundle.code_bytes / 2**20:.1f} MiB, {state}"),
        ("coverage", f"{bundle.served_rows} of {bundle.rows} rows of the tuned tables"),
        ("digest", bundle.digest),
        ("ABI", str(bundle.kernel_abi)),
        ("sources", bundle.source_digest),
        ("toolchain", ", ".join(f"{package} {version}" for package, version in bundle.toolchain.items())),
        *[("table", f"{file} {digest}") for file, digest in bundle.tables.items()],
    ]


def module_version(module: str) -> str:
    """Version of an installed module, found without importing it; ``ABSENT`` when Python cannot find it."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"{ABSENT} ({error})"
    if found is None:
        return ABSENT
    # Triton comes under several distribution names (triton, pytorch-triton-rocm, ...).
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(distribution)
    return "installed, version unknown"


def _versions() -> dict[str, str]:
    versions = {
        "gdn_runtime": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": module_version("triton"),
        "flydsl": module_version("flydsl"),
        "cuda of torch": torch.version.cuda or "none",
        "hip of torch": torch.version.hip or "none",
    }
    for name, path, pattern in _GPU_DRIVERS:
        try:
            match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        versions[name] = match.group(1) if match else "present, version unknown"
    return versions


def _add_environment(report: Report) -> None:
    for reading in env.readings():
        if reading.source != "default":
            report.environment[reading.var.name] = env.spell(reading.value)
        if reading.error:
            report.problems.append(reading.error)
        elif reading.var.attribute == "arch" and reading.value:
            try:
                parse_arch(str(reading.value), name=reading.var.name)
            except ValueError as error:
                report.problems.append(str(error))
    report.problems += [env.describe_unknown(name, matches) for name, matches in env.unknown().items()]
    report.environment.update(env.third_party())


def _add_bundles(report: Report) -> None:
    texts = {reading.var.attribute: str(reading.value) for reading in env.readings()}
    rows = [found.row for found in tables.load(table_paths(texts["tables"])).rows()]
    for row in rows:
        origin = row.provenance
        words = (row.key.arch, origin.source, origin.device, origin.date, "modelled" if origin.modelled else "")
        name = ", ".join(word for word in words if word)
        report.tables[name] = report.tables.get(name, 0) + 1
    for path in named_paths(texts["bundle"]):
        try:
            folders = bundle_folders(path)
        except (OSError, ValueError) as error:
            report.problems.append(str(error))
            continue
        for folder in folders:
            try:
                _add_bundle(report, read_bundle(folder, folder.name if folder.parent == path else None), rows)
            except (BundleError, OSError) as error:
                report.problems.append(str(error))


def _add_bundle(report: Report, bundle: Bundle, rows: list[tables.ScanRow]) -> None:
    faults = [str(fault) for fault in bundle.faults()]
    report.problems += faults
    if sys.platform != "win32" and bundle.folder.stat().st_mode & stat.S_IWOTH:
        report.problems.append(f"bundle {bundle.folder} can be written by everybody: chmod o-w it")
    kinds = Counter(artifact.file.rpartition("-")[0] for artifact in bundle.artifacts.values())
    served = sum(all(spec in bundle for spec in specs_of_row(row, bundle.arch)) for row in rows)
    report.bundles.append(
        BundleReport(
            folder=str(bundle.folder),
            arch=bundle.arch,
            digest=bundle.digest,
            kernel_abi=bundle.kernel_abi,
            source_digest=bundle.source_digest,
            toolchain=dict(bundle.toolchain),
            tables=dict(bundle.tables),
            artifacts=dict(sorted(kinds.items())),
            code_bytes=sum(artifact.size for artifact in bundle.artifacts.values()),
            rows=len(rows),
            served_rows=served,
            faults=len(faults),
        )
    )


def _add_devices(report: Report) -> None:
    report.devices.append(_device(torch.device("cpu"), platform.processor() or platform.machine(), _host_memory()))
    if not torch.cuda.is_available():
        for name, _, _ in _GPU_DRIVERS:
            if name in report.versions:
                report.notes.append(
                    f"the {name} is loaded, but torch sees no GPU: wrong torch build, or no device visible"
                )
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            properties = torch.cuda.get_device_properties(index)
        except RuntimeError as error:
            report.problems.append(f"{device}: the driver does not answer: {error}")
            continue
        entry = _device(device, properties.name, properties.total_memory)
        report.devices.append(entry)
        if not any(backend.available for backend in entry.backends if backend.name != "reference"):
            reasons = "; ".join(f"{b.name}: {b.reason}" for b in entry.backends if not b.available)
            report.problems.append(f"{device} ({entry.arch}) has no kernels: {reasons or 'no backend knows it'}")


def _device(device: torch.device, name: str, memory_bytes: int | None) -> Device:
    units: int | None = None
    try:
        arch = arch_of(device).name
        units = compute_units(device)
    except (ValueError, RuntimeError) as error:
        arch = f"unknown ({error})"
    try:
        backends = tuple(Backend(b.name, b.available, b.reason) for b in backends_for(device))
    except (ValueError, RuntimeError, ImportError) as error:
        backends = (Backend("any", False, str(error)),)
    return Device(str(device), name, arch, units, memory_bytes, backends)


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _add_triton_cache(report: Report) -> None:
    """Triton's own rule (triton.knobs): TRITON_CACHE_DIR, else .triton/cache below TRITON_HOME or the user's home."""
    variables = env.third_party()
    home = Path(variables.get("TRITON_HOME") or Path.home())
    path = Path(variables.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        status = path.stat()
    except FileNotFoundError:
        report.caches.append(Cache("triton", str(path), None, None))
        return
    except OSError as error:
        report.problems.append(f"Triton's cache {path} cannot be looked at: {error}")
        return
    report.caches.append(Cache("triton", str(path), status.st_uid, f"{stat.S_IMODE(status.st_mode):04o}"))
    # Whoever can write there decides what code this process loads into the GPU and, as .so files, into itself.
    if sys.platform != "win32" and status.st_uid != os.getuid():
        report.problems.append(
            f"Triton's cache {path} belongs to uid {status.st_uid}, this process runs as {os.getuid()}"
        )
    if sys.platform != "win32" and status.st_mode & stat.S_IWOTH:
        report.problems.append(
            f"Triton's cache {path} can be written by everybody: chmod o-w it, or set TRITON_CACHE_DIR"
        )


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in rows]
