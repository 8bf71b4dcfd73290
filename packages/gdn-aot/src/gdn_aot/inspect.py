"""What bundles hold, whether that is what tables ask for, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gdn_runtime.codeobject.bundle import Artifact, Bundle, bundle_folders, read_bundle, spec_key
from gdn_runtime.errors import BundleError
from gdn_runtime.spec import KernelSpec

from .jobs import jobs

COMPARED = ("vgprs", "agprs", "sgprs", "lds_bytes", "dynamic_lds", "scratch_bytes", "vgpr_spills", "sgpr_spills")
"""Facts whose changes ``diff`` shows, beside the size."""


def open_bundles(path: Path) -> list[Bundle]:
    """The bundles in ``path``: a folder with a manifest, or with one such folder per architecture. Raises as
    ``read_bundle``, ValueError if there is none."""
    return [read_bundle(folder) for folder in bundle_folders(path)]


def faults(path: Path) -> tuple[list[Bundle], list[BundleError]]:
    """The bundles in ``path`` that can be read, and everything that is wrong with any."""
    sound: list[Bundle] = []
    found: list[BundleError] = []
    for folder in bundle_folders(path):
        try:
            bundle = read_bundle(folder)
        except BundleError as error:
            found.append(error)
            continue
        sound.append(bundle)
        found.extend(bundle.faults())
    return sound, found


@dataclass(frozen=True)
class Coverage:
    """Jobs that tables ask for, and what of a bundle serves them. ``unasked`` are artifacts that no row asks for, not
    even completely."""

    arch: str
    asked: int
    missing: tuple[KernelSpec, ...]
    unasked: tuple[Artifact, ...]

    @property
    def percent(self) -> float:
        """Share of the jobs that have an artifact; 100 only if all have."""
        return 100.0 * (self.asked - len(self.missing)) / self.asked if self.asked else 100.0

    @property
    def ok(self) -> bool:
        """Every job has an artifact and every artifact a job."""
        return not self.missing and not self.unasked


def coverage(bundle: Bundle, tables: Iterable[Path], *, complete: bool = False) -> Coverage:
    """How ``bundle`` serves the jobs of ``tables``; ``complete``: those of ``jobs(complete=True)``."""
    paths = tuple(tables)
    every = {spec_key(spec): spec for spec in jobs(bundle.arch, tables=paths, complete=True)}
    plain = {spec_key(spec): spec for spec in jobs(bundle.arch, tables=paths)}
    asked = {**every, **plain} if complete else plain
    missing = tuple(spec for key, spec in asked.items() if key not in bundle.artifacts)
    known = every.keys() | plain.keys()
    unasked = tuple(artifact for key, artifact in bundle.artifacts.items() if key not in known)
    return Coverage(bundle.arch, len(asked), missing, unasked)


@dataclass(frozen=True)
class Change:
    """One artifact whose code differs, and what changed of ``COMPARED`` and "bytes": (before, after) by name."""

    artifact: Artifact
    facts: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Difference:
    """What two bundles of one architecture do not share."""

    arch: str
    added: tuple[Artifact, ...]
    removed: tuple[Artifact, ...]
    changed: tuple[Change, ...]
    equal: int

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not (self.added or self.removed or self.changed)


def difference(before: Bundle, after: Bundle) -> Difference:
    """Which specs appear and vanish from ``before`` to ``after``, and whose code changes. CorruptBundleError for an
    artifact that changed and whose facts are none."""
    old, new = before.artifacts, after.artifacts
    changed = [
        Change(new[key], _changed_facts(_costs(before, old[key]), _costs(after, new[key])))
        for key in new
        if key in old and new[key].sha256 != old[key].sha256
    ]
    return Difference(
        arch=after.arch,
        added=tuple(artifact for key, artifact in new.items() if key not in old),
        removed=tuple(artifact for key, artifact in old.items() if key not in new),
        changed=tuple(changed),
        equal=len(old.keys() & new.keys()) - len(changed),
    )


def _costs(bundle: Bundle, artifact: Artifact) -> dict[str, int]:
    facts = bundle.facts(artifact)
    return {**{name: getattr(facts, name) for name in COMPARED}, "bytes": artifact.size}


def _changed_facts(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
