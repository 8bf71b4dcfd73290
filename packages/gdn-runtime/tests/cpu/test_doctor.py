"""doctor.py: what it finds, and that a probe that fails becomes text instead of a traceback."""

from __future__ import annotations

import hashlib
import importlib.abc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdn_runtime import arch, doctor, env, tables
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.ops.warmup import specs_of_row
from gdn_runtime.spec import KERNEL_ABI
from gdn_testing.bundles import fake_code, write_bundle

REFERENCE = SimpleNamespace(name="reference", available=True, reason="torch")
TRITON = SimpleNamespace(name="triton", available=True, reason="compiles at the first call")
NO_TRITON = SimpleNamespace(name="triton", available=False, reason="the package triton is not installed")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without GPU, GPU driver, GDN_* variables or a Triton cache."""
    for name in [name for name in os.environ if name.startswith(env.PREFIX) or name in env.THIRD_PARTY]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_GPU_DRIVERS", ())
    monkeypatch.setattr(doctor, "backends_for", lambda device: [REFERENCE, TRITON])
    monkeypatch.setattr(doctor, "module_version", lambda module: "3.9.0" if module == "triton" else doctor.ABSENT)
    arch._probe.cache_clear()
    yield
    arch._probe.cache_clear()


def add_gpu(
    monkeypatch: pytest.MonkeyPatch, *, major: int = 9, backends: Sequence[SimpleNamespace] = (TRITON,)
) -> None:
    properties = SimpleNamespace(
        name="Fake GPU", major=major, minor=0, multi_processor_count=132, total_memory=80 << 30
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "backends_for", lambda device: [REFERENCE, *backends])


def test_a_machine_in_order() -> None:
    report = doctor.diagnose()
    assert report.problems == []
    assert report.notes == []
    assert report.kernel_abi == KERNEL_ABI
    assert report.versions["torch"] == torch.__version__
    assert [device.device for device in report.devices] == ["cpu"]
    assert report.devices[0].arch == "cpu"
    assert report.devices[0].compute_units is None


def test_json_holds_every_field() -> None:
    report = doctor.diagnose()
    data = json.loads(json.dumps(report.as_dict()))
    assert set(data) == {
        "versions",
        "kernel_abi",
        "bundles",
        "tables",
        "devices",
        "caches",
        "environment",
        "problems",
        "notes",
    }
    assert data["devices"][0]["backends"][0] == {"name": "reference", "available": True, "reason": "torch"}


def test_text_is_aligned() -> None:
    text = doctor.render(doctor.diagnose())
    versions = text.split("\n\n")[0].splitlines()[1:]
    width = 2 + max(map(len, ("gdn_runtime", "cuda of torch"))) + 2
    assert all(line[width - 1] == " " and line[width] != " " for line in versions), text
    assert "backend triton     yes: compiles at the first call" in text
    assert text.endswith("problems\n  none\n")


def test_gpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(monkeypatch)
    report = doctor.diagnose()
    assert report.problems == []
    gpu = report.devices[1]
    assert (gpu.device, gpu.name, gpu.arch, gpu.compute_units, gpu.memory_bytes) == (
        "cuda:0",
        "Fake GPU",
        "sm90",
        132,
        80 << 30,
    )
    assert "compute units      132" in doctor.render(report)
    assert "memory             80.0 GiB" in doctor.render(report)


def test_gpu_without_kernels_is_a_problem_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(monkeypatch, backends=[NO_TRITON])
    (problem,) = doctor.diagnose().problems
    assert problem == "cuda:0 (sm90) has no kernels: triton: the package triton is not installed"


def test_gpu_of_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(monkeypatch, major=5)

    def refuse(device: torch.device) -> list[SimpleNamespace]:
        raise UnsupportedError("architecture of cuda:0", got="sm50", supported=["sm90"])

    monkeypatch.setattr(doctor, "backends_for", refuse)
    report = doctor.diagnose()
    assert report.devices[1].arch.startswith("unknown (architecture of cuda:0: got 'sm50', supported: gfx942")
    assert len(report.problems) == 1
    assert "got sm50, supported: sm90" in report.problems[0]


def test_silent_driver_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(monkeypatch)

    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert doctor.diagnose().problems == ["cuda:0: the driver does not answer: CUDA error: unknown error"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build", "550.54.15"),
        ("NVRM version: something else", "present, version unknown"),
    ],
)
def test_driver_that_torch_cannot_use_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str
) -> None:
    monkeypatch.undo()
    name, _, pattern = doctor._GPU_DRIVERS[0]
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(doctor, "_GPU_DRIVERS", ((name, tmp_path / "version", pattern),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.diagnose()
    assert report.versions["nvidia driver"] == version
    assert report.notes == [
        "the nvidia driver is loaded, but torch sees no GPU: wrong torch build, or no device visible"
    ]


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_CHECK_INDICES", "yes")
    monkeypatch.setenv("GDN_K5_BLOCK_V", "33")
    monkeypatch.setenv("GDN_ARCH", "gfx90a")
    monkeypatch.setenv("GDN_BACKND", "triton")
    report = doctor.diagnose()
    assert report.environment["GDN_CHECK_INDICES"] == "1"
    assert report.environment["GDN_K5_BLOCK_V"] == "33"
    block_v, gdn_arch, unknown = report.problems
    assert block_v == "GDN_K5_BLOCK_V: got '33', expected one of auto, 16, 32, 64, 128"
    assert gdn_arch.startswith("GDN_ARCH: got 'gfx90a', supported: gfx942")
    assert unknown == "GDN_BACKND is no variable of gdn-runtime and has no effect, did you mean GDN_BACKEND?"


def test_cache_that_does_not_exist_yet(tmp_path: Path) -> None:
    report = doctor.diagnose()
    assert report.caches == [doctor.Cache("triton", str(tmp_path / "cache"), None, None)]
    assert f"{tmp_path}/cache (does not exist yet)" in doctor.render(report)


def test_private_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    report = doctor.diagnose()
    assert report.caches == [doctor.Cache("triton", str(tmp_path / "cache"), os.getuid(), "0700")]
    assert report.problems == []


def test_world_writable_cache_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    report = doctor.diagnose()
    assert report.caches[0].mode == "1777"
    assert [p.split(":")[0] for p in report.problems] == [
        f"Triton's cache {tmp_path}/cache can be written by everybody"
    ]


def test_cache_of_another_user_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert doctor.diagnose().problems == [
        f"Triton's cache {tmp_path}/cache belongs to uid {owner}, this process runs as {owner + 1}"
    ]


def test_cache_path_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (problem,) = doctor.diagnose().problems
    assert "cannot be looked at" in problem


def test_triton_home_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert doctor.diagnose().caches[0].path == str(tmp_path / ".triton" / "cache")


def test_without_triton_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "module_version", lambda module: doctor.ABSENT)
    report = doctor.diagnose()
    assert report.caches == []
    assert "caches\n  none\n" in doctor.render(report)


class Refusing(importlib.abc.MetaPathFinder):
    """An import hook that forbids a module by raising, as smoke tests of a thin installation do."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "forbidden_module":
            raise ImportError("forbidden here")


def test_module_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert doctor.module_version("torch") == torch.__version__
    assert doctor.module_version("json") == "installed, version unknown"
    assert doctor.module_version("no_such_module_here") == doctor.ABSENT
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor.module_version("triton") == doctor.ABSENT
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert doctor.module_version("forbidden_module") == f"{doctor.ABSENT} (forbidden here)"


# ------------------------------------------------------------------------------------------------ bundles

ROW = tables.table().rows()[0].row


@pytest.fixture
def bundles(tmp_path: Path) -> Iterator[Path]:
    """A folder with a bundle of what calls like one row of the tables need, for both architectures."""
    for name in ("gfx942", "gfx950"):
        write_bundle(tmp_path / "bundles" / name, map(fake_code, specs_of_row(ROW, name)), name)
    with env.override(bundle=str(tmp_path / "bundles")):
        yield tmp_path / "bundles"


def test_bundles_are_reported(bundles: Path) -> None:
    report = doctor.diagnose()
    assert [(b.arch, b.folder) for b in report.bundles] == [(a, str(bundles / a)) for a in ("gfx942", "gfx950")]
    first = report.bundles[0]
    assert first.artifacts == {"l2norm": 1, "output": 1, "prepare": 1, "state_scan_opt": 1}
    assert first.digest == hashlib.sha256((bundles / "gfx942" / "manifest.json").read_bytes()).hexdigest()
    assert first.toolchain == {"flydsl": "0.5.0"} and list(first.tables) == ["table.json"]
    assert 0 < first.served_rows < first.rows == len(tables.table().rows()) == sum(report.tables.values())
    assert (first.faults, report.problems) == (0, [])
    text = doctor.render(report)
    assert f"bundle {bundles / 'gfx950'}\n  architecture  gfx950\n  artifacts     4 (1 l2norm, 1 output, " in text
    assert f"coverage      {first.served_rows} of {first.rows} rows" in text
    assert json.loads(json.dumps(report.as_dict()))["bundles"][1]["arch"] == "gfx950"


def test_bundles_are_verified(bundles: Path) -> None:
    next((bundles / "gfx942").glob("*.hsaco")).unlink()
    (bundles / "gfx950" / "extra.hsaco").touch()
    report = doctor.diagnose()
    missing, extra = report.problems
    assert "it is missing" in missing and "the manifest does not name it" in extra
    assert [b.faults for b in report.bundles] == [1, 1] and "1 faults, see problems" in doctor.render(report)


def test_bundles_that_cannot_be_read_are_problems(bundles: Path) -> None:
    (bundles / "gfx942" / "manifest.json").write_text("{")
    report = doctor.diagnose()
    assert [b.arch for b in report.bundles] == ["gfx950"]
    assert len(report.problems) == 1 and "not JSON of a manifest" in report.problems[0]
    with env.override(bundle=str(bundles / "typo")):
        report = doctor.diagnose()
    assert report.bundles == [] and "expected a folder with a manifest.json" in report.problems[0]
    assert "bundles     none" in doctor.render(report)


def test_a_bundle_that_everybody_can_write_is_a_problem(bundles: Path) -> None:
    (bundles / "gfx950").chmod(0o777)
    assert doctor.diagnose().problems == [f"bundle {bundles / 'gfx950'} can be written by everybody: chmod o-w it"]
