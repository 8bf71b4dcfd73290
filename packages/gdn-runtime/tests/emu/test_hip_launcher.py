"""The HIP launcher against a library that is built here: it logs calls, launches into cdna-emu, and fails when told."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gdn_runtime import env
from gdn_runtime.codeobject import CodeObject, code_object, hip
from gdn_runtime.codeobject.emulate import EmulatorLauncher, memory_range
from gdn_runtime.errors import CaptureError, HipError
from gdn_runtime.spec import OutputConfig, OutputSpec
from gdn_testing.probe import ProbeSpec

SOURCE = Path(__file__).with_name("fake_hip.c")
DEVICE = torch.device("cuda", 1)
STREAM = 77
Callback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
)


class FakeHip:
    """The library, what it was called with, and the launches that it passed to the emulator."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.native = ctypes.CDLL(self.path)
        self.native.fake_call.restype = ctypes.c_char_p
        self.launches: list[dict[str, Any]] = []
        self.ranges: list[tuple[int, int, bool]] = []
        self.codes: dict[str, CodeObject] = {}
        self.raised: list[BaseException] = []
        self._callback = Callback(self._launch)
        self.native.fake_reset(self._callback)

    def _launch(
        self, module: int, symbol: bytes, sizes: Any, lds: int, stream: int, kernarg: int, size: int, device: int
    ) -> int:
        import cdna_emu

        try:
            *grid, bx, by, bz = sizes[:6]
            launch = {
                "symbol": symbol.decode(),
                "grid": tuple(grid),
                "block": (bx, by, bz),
                "dynamic_lds": lds,
                "stream": stream,
                "kernarg": ctypes.string_at(kernarg, size),
                "device": device,
            }
            self.launches.append(launch)
            code = self.codes.get(launch["symbol"])
            if code is not None:
                result = cdna_emu.launch(
                    code.elf,
                    kernel=launch["symbol"],
                    grid=grid,
                    block=(bx, by, bz),
                    kernarg=launch["kernarg"],
                    ranges=self.ranges,
                    dynamic_lds=lds,
                    arch=code.facts.arch,
                )
                assert not result.report, str(result.report)
        except (AssertionError, RuntimeError, ValueError) as error:  # a callback of C cannot raise
            self.raised.append(error)
            return 1
        return 0

    def calls(self) -> list[str]:
        """Calls since the last time."""
        count = self.native.fake_calls()
        calls = [self.native.fake_call(place).decode() for place in range(count)]
        self.native.fake_reset(self._callback)
        return calls

    def fail(self, function: str, code: int) -> None:
        """Let ``function`` return ``code`` until ``calls`` is called."""
        self.native.fake_fail(function.encode(), code)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake library, compiled as the emulator's core is."""
    from cdna_emu import build_core

    output = tmp_path_factory.mktemp("hip") / "libamdhip64.so.7"
    command = [*build_core.compiler(), "-std=c11", "-O1", "-fPIC", "-shared", "-o", str(output), str(SOURCE)]
    subprocess.run(command, check=True)
    return output


@pytest.fixture
def fake(library: Path) -> Iterator[FakeHip]:
    fake = FakeHip(library)
    with mock.patch.object(hip, "current_stream", lambda index: STREAM + index):
        yield fake
    assert not fake.raised, fake.raised
    fake.native.hipSetDevice(0)


@pytest.fixture(scope="module")
def code() -> CodeObject:
    return code_object(ProbeSpec("gfx942"))


@pytest.fixture
def launcher(fake: FakeHip) -> Iterator[hip.HipLauncher]:
    launcher = hip.HipLauncher(DEVICE, arch="gfx942", library=hip.HipLibrary(fake.path))
    yield launcher
    fake.calls()
    launcher.close()


def probe_arguments(count: int = 128) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    source, target = torch.arange(count + 8.0), torch.full((count,), float("nan"))
    return source, target, [source, target, 3, count, 0.5]


def test_a_launch_reaches_the_kernel(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    kernel = launcher.load(code)
    assert fake.calls() == [
        *("hipGetDevice", "hipSetDevice 1", "hipModuleLoadData", "hipModuleGetFunction probe_0", "hipSetDevice 0"),
    ]
    source, target, args = probe_arguments()
    fake.codes, fake.ranges = {"probe_0": code}, [memory_range(source), memory_range(target)]
    kernel((2, 1, 1), args)
    assert torch.equal(target, source[3:131] / 2)
    assert fake.calls() == [
        *("hipGetDevice", "hipSetDevice 1", f"hipModuleLaunchKernel device 1 stream {STREAM + 1}", "hipSetDevice 0")
    ]
    (launch,) = fake.launches
    assert (launch["grid"], launch["block"], launch["dynamic_lds"]) == ((2, 1, 1), (64, 1, 1), 0)
    assert launch["kernarg"] == kernel.pack(args) and launch["device"] == 1


def test_the_device_is_not_set_where_it_is_current(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    kernel = launcher.load(code)
    fake.native.hipSetDevice(1)
    fake.calls()
    kernel((1, 1, 1), [None, None, 0, 0, 1.0])
    assert fake.calls() == ["hipGetDevice", f"hipModuleLaunchKernel device 1 stream {STREAM + 1}"]


def test_dynamic_lds_is_passed(fake: FakeHip) -> None:
    code = code_object(OutputSpec("gfx942", "bf16", "bf16", 4, 2, True, True, OutputConfig(64, 4, 1)))
    with hip.HipLauncher(DEVICE, arch="gfx942", library=hip.HipLibrary(fake.path)) as launcher:
        numbers = [0 if argument.kind != "f32" else 1.0 for argument in code.facts.arguments[9:]]
        launcher.load(code)((1, 1, 1), [*(None,) * 9, *numbers])
    (launch,) = fake.launches
    assert launch["dynamic_lds"] == code.facts.dynamic_lds > 0
    assert len(launch["kernarg"]) == code.facts.kernarg_bytes
    assert fake.native.fake_alive() == 0


def test_loading_happens_once_whatever_the_threads(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    barrier = threading.Barrier(8)

    def load(_: int) -> object:
        barrier.wait(60)
        kernel = launcher.kernel(ProbeSpec("gfx942"))
        kernel((1, 1, 1), [None, None, 0, 0, 1.0])
        return kernel

    with ThreadPoolExecutor(8) as pool:
        kernels = set(pool.map(load, range(8)))
    calls = fake.calls()
    assert len(kernels) == 1 and calls.count("hipModuleLoadData") == 1 and len(fake.launches) == 8
    assert launcher.load(code) in kernels and fake.calls() == []


def test_threads_do_not_share_argument_buffers(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    kernel = launcher.load(code)

    def launch(number: int) -> None:
        for _ in range(50):
            kernel((1, 1, 1), [number, number, number, number, float(number)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(launch, range(8)))
    expected = {kernel.pack([number, number, number, number, float(number)]) for number in range(8)}
    assert len(fake.launches) == 400 and {launch["kernarg"] for launch in fake.launches} == expected


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        ("hipGetDevice", ["hipGetDevice"]),
        ("hipSetDevice", ["hipGetDevice", "hipSetDevice 1"]),
        ("hipModuleLoadData", ["hipGetDevice", "hipSetDevice 1", "hipModuleLoadData", "hipSetDevice 0"]),
        (
            "hipModuleGetFunction",
            [
                *("hipGetDevice", "hipSetDevice 1", "hipModuleLoadData", "hipModuleGetFunction probe_0"),
                *("hipModuleUnload", "hipSetDevice 0"),
            ],
        ),
    ],
)
def test_a_load_that_fails(
    fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject, function: str, calls: list[str]
) -> None:
    fake.fail(function, 500)
    with pytest.raises(HipError, match=rf"{function}: hipErrorNotFound \(500\): named symbol not found") as caught:
        launcher.load(code)
    assert (caught.value.function, caught.value.code, caught.value.name) == (function, 500, "hipErrorNotFound")
    assert fake.calls() == calls and fake.native.fake_alive() == 0
    launcher.load(code)  # the next one is not spoilt


@pytest.mark.parametrize("function", ["hipGetDevice", "hipSetDevice", "hipModuleLaunchKernel"])
def test_a_launch_that_fails(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject, function: str) -> None:
    kernel = launcher.load(code)
    fake.calls()
    fake.fail(function, 719)
    with pytest.raises(HipError, match=rf"{function}: unknown error \(719\)"):
        kernel((1, 1, 1), [None, None, 0, 0, 1.0])
    calls = fake.calls()
    device = ctypes.c_int()
    fake.native.hipGetDevice(ctypes.byref(device))
    assert device.value == 0
    assert calls[-1] == {"hipGetDevice": "hipGetDevice", "hipSetDevice": "hipSetDevice 1"}.get(
        function, "hipSetDevice 0"
    )
    fake.calls()
    kernel((1, 1, 1), [None, None, 0, 0, 1.0])
    assert len(fake.launches) == 1


def test_an_error_names_kernel_and_grid(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    kernel = launcher.load(code)
    fake.fail("hipModuleLaunchKernel", 1)
    with pytest.raises(HipError, match=r"hipErrorInvalidValue \(1\): .*\(probe_0, grid \(3, 2, 1\)\)"):
        kernel((3, 2, 1), [None, None, 0, 0, 1.0])


def test_bad_arguments_reach_no_library(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    kernel = launcher.load(code)
    fake.calls()
    with pytest.raises(TypeError, match="count"):
        kernel((1, 1, 1), [None, None, 0, 0.5, 1.0])
    with pytest.raises(ValueError, match="three positive extents"):
        kernel((1, 0, 1), [None, None, 0, 0, 1.0])
    assert fake.calls() == []


def test_what_is_not_code_is_refused_by_hip(fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject) -> None:
    broken = CodeObject(code.spec, code.facts, b"not an ELF file")
    with pytest.raises(HipError, match="hipModuleLoadData: hipErrorInvalidImage"):
        launcher.load(broken)


def test_code_of_another_architecture_is_refused(launcher: hip.HipLauncher) -> None:
    with pytest.raises(ValueError, match="code object of probe: got gfx950, expected code for gfx942"):
        launcher.load(code_object(ProbeSpec("gfx950")))


def test_nothing_is_loaded_while_a_stream_is_captured(
    fake: FakeHip, launcher: hip.HipLauncher, code: CodeObject
) -> None:
    with mock.patch.object(hip, "capturing", return_value=True):
        with pytest.raises(CaptureError, match="loading probe_0 while a stream is being captured: warm up first"):
            launcher.load(code)
        assert fake.calls() == []
    kernel = launcher.load(code)
    with mock.patch.object(hip, "capturing", return_value=True):
        launcher.load(code)((1, 1, 1), [None, None, 0, 0, 1.0])
    assert len(fake.launches) == 1 and launcher.load(code) is kernel


def test_close_unloads_and_a_closed_kernel_refuses(fake: FakeHip, code: CodeObject) -> None:
    launcher = hip.HipLauncher(DEVICE, arch="gfx942", library=hip.HipLibrary(fake.path))
    kernel = launcher.load(code)
    other = launcher.load(code_object(ProbeSpec("gfx942", variant=-1)))
    fake.calls()
    fake.fail("hipModuleUnload", 400)
    with pytest.raises(HipError, match="hipModuleUnload: hipErrorInvalidHandle"):
        launcher.close()
    assert fake.calls() == ["hipGetDevice", "hipSetDevice 1", *("hipModuleUnload",) * 2, "hipSetDevice 0"]
    for closed in (kernel, other):
        with pytest.raises(RuntimeError, match="probe_0: its launcher was closed"):
            closed((1, 1, 1), [None, None, 0, 0, 1.0])
    assert launcher.load(code) is not kernel
    launcher.close()
    launcher.close()


def test_the_library_is_that_of_the_variable_or_the_one_loaded(library: Path, fake: FakeHip) -> None:
    with env.override(hip_library=str(library)):
        assert hip.hip_library().path == str(library)
    assert hip.loaded_library() == str(library)
    with env.override(hip_library=""):
        assert hip.hip_library().path == str(library)
    with env.override(hip_library="/nowhere/libamdhip64.so"), pytest.raises(OSError, match="nowhere"):
        hip.hip_library()


def test_without_a_library_the_error_says_so() -> None:
    script = (
        "from gdn_runtime.codeobject import hip\n"
        "try:\n"
        "    hip.hip_library()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "no HIP library is loaded" in done.stdout and "GDN_HIP_LIBRARY" in done.stdout


def test_both_launchers_take_the_same_arguments(fake: FakeHip, arch: str) -> None:
    code = code_object(ProbeSpec(arch))
    results = []
    with hip.HipLauncher(DEVICE, arch=arch, library=hip.HipLibrary(fake.path)) as on_hip:
        launchers: tuple[Callable[[CodeObject], Any], ...] = (on_hip.load, EmulatorLauncher(arch).load)
        for load in launchers:
            source, target, args = probe_arguments(130)
            fake.codes, fake.ranges = {code.facts.symbol: code}, [memory_range(source), memory_range(target)]
            load(code)((3, 1, 1), args)
            results.append(target)
    assert torch.equal(*results) and not results[0].isnan().any()
