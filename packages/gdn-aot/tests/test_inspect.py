"""Coverage both ways, differences, and faults, of bundles of fakes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gdn_aot import inspect, jobs
from gdn_aot.bundle import write_bundle
from gdn_aot.jobs import TABLES
from gdn_runtime.codeobject import CodeObject, read_bundle
from gdn_runtime.errors import CorruptBundleError
from gdn_runtime.spec import L2NormSpec, OptStateScanSpec
from gdn_runtime.tables import PACKAGED
from gdn_testing.bundles import fake_code

ARCH = "gfx942"
JOBS = jobs(ARCH)


def bundle_of(folder: Path, codes: list[CodeObject]) -> inspect.Bundle:
    return read_bundle(write_bundle(folder, ARCH, codes, TABLES))


@pytest.fixture(scope="module", autouse=True)
def _jobs_once() -> Iterator[None]:
    """Working out the jobs of the packaged tables takes seconds, and always gives the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "jobs", functools.cache(jobs))
        yield


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> inspect.Bundle:
    return bundle_of(tmp_path_factory.mktemp("full"), [fake_code(spec) for spec in JOBS])


def test_every_row_has_its_artifacts_and_every_artifact_its_row(full: inspect.Bundle) -> None:
    found = inspect.coverage(full, TABLES)
    assert found.ok and found.percent == 100 and found.asked == len(JOBS) == len(full.artifacts)
    completely = inspect.coverage(full, TABLES, complete=True)
    assert not completely.ok and 0 < completely.percent < 100 and not completely.unasked
    assert len(completely.missing) == completely.asked - len(JOBS)


def test_what_is_missing_and_what_nobody_asks_for_are_named(tmp_path: Path) -> None:
    stranger = L2NormSpec(ARCH, "bf16", 77)
    found = inspect.coverage(bundle_of(tmp_path, [fake_code(spec) for spec in (*JOBS[3:], stranger)]), TABLES)
    assert set(found.missing) == set(JOBS[:3]) and not found.ok
    assert [artifact.spec["num_key_heads"] for artifact in found.unasked] == [77]
    assert found.percent == 100 * (len(JOBS) - 3) / len(JOBS)


def test_artifacts_of_a_complete_build_are_asked_for(tmp_path: Path) -> None:
    extra = next(spec for spec in jobs(ARCH, complete=True) if spec not in JOBS)
    found = inspect.coverage(bundle_of(tmp_path, [fake_code(spec) for spec in (*JOBS, extra)]), TABLES)
    assert found.ok


def test_a_row_more_is_a_job_that_is_missing(tmp_path: Path, full: inspect.Bundle) -> None:
    table = json.loads((PACKAGED / ARCH / "state_scan_opt.json").read_text())
    table["rows"] = [{**table["rows"][0], "H": 48, "Hg": 16}]
    path = tmp_path / "more.json"
    path.write_text(json.dumps(table))
    found = inspect.coverage(full, [*TABLES, path])
    assert found.missing and {spec.num_heads for spec in found.missing if isinstance(spec, OptStateScanSpec)} == {48}
    assert not inspect.coverage(full, [path]).ok


def test_difference(tmp_path: Path) -> None:
    codes = [fake_code(spec) for spec in JOBS[:6]]
    before = bundle_of(tmp_path / "a", codes[:5])
    same = inspect.difference(before, bundle_of(tmp_path / "b", codes[:5]))
    assert same.same and same.equal == 5
    heavier = CodeObject(codes[0].spec, replace(codes[0].facts, vgprs=9, lds_bytes=64), codes[0].elf + b"more")
    other = CodeObject(codes[1].spec, codes[1].facts, codes[1].elf[::-1])
    after = bundle_of(tmp_path / "c", [heavier, other, *codes[2:4], codes[5]])
    found = inspect.difference(before, after)
    assert [a.spec for a in found.added] == [after.artifacts[inspect.spec_key(JOBS[5])].spec]
    assert [a.spec for a in found.removed] == [before.artifacts[inspect.spec_key(JOBS[4])].spec]
    size = len(codes[0].elf)
    changes = {change.artifact.key: change.facts for change in found.changed}
    assert changes == {
        inspect.spec_key(JOBS[0]): {"vgprs": (1, 9), "lds_bytes": (0, 64), "bytes": (size, size + 4)},
        inspect.spec_key(JOBS[1]): {},
    }
    assert found.equal == 2 and not found.same


def test_faults_are_all_found(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [fake_code(spec) for spec in JOBS[:4]])
    assert inspect.faults(tmp_path)[1] == []
    first, second, *_ = bundle.artifacts.values()
    (bundle.folder / first.file).write_bytes(b"\x7fELF")
    (bundle.folder / second.file).unlink()
    (bundle.folder / "stranger").touch()
    sound, found = inspect.faults(tmp_path)
    assert [b.arch for b in sound] == [ARCH] and len(found) == 3
    assert all(isinstance(fault, CorruptBundleError) for fault in found)
    assert {fault.path.name for fault in found} == {first.file, second.file, "stranger"}
