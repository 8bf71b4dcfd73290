"""Launches code objects on an AMD GPU, through the HIP library that PyTorch has loaded.

Names and values are those of hip/hip_runtime_api.h: the module functions, and hipModuleLaunchKernel with the arguments
as one buffer (HIP_LAUNCH_PARAM_BUFFER_POINTER).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch

from ..arch import arch_of
from ..env import settings
from ..errors import CaptureError, HipError
from ..private import current_stream
from .facts import CodeObject
from .launch import Grid, Launcher, LoadedKernel, Value, check_grid
from .source import capturing

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3
_MAPS = Path("/proc/self/maps")

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipModuleLoadData": (POINTER(c_void_p), c_void_p),
    "hipModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "hipModuleUnload": (c_void_p,),
    "hipModuleLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
}


class HipLibrary:
    """The functions of one HIP library that launching needs. Each raises HipError unless HIP returns success."""

    def __init__(self, path: str) -> None:
        """OSError for a file that cannot be loaded, AttributeError for a library without these functions."""
        self.path = path
        self._library = ctypes.CDLL(path)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(self._library, name)
            function.argtypes, function.restype = (c_int,), c_char_p
        self._get_device, self._set_device = self._library.hipGetDevice, self._library.hipSetDevice
        self._launch_kernel = self._library.hipModuleLaunchKernel

    def get_device(self) -> int:
        """Number of the device that is current in this thread."""
        device = c_int()
        if code := self._get_device(device):
            self._fail("hipGetDevice", code)
        return device.value

    def set_device(self, device: int) -> None:
        """Make ``device`` current in this thread."""
        if code := self._set_device(device):
            self._fail("hipSetDevice", code, f"device {device}")

    def load(self, elf: bytes, symbol: str) -> tuple[int, int]:
        """Handles of the module and of its kernel ``symbol``, on the current device."""
        module, function = c_void_p(), c_void_p()
        if code := self._library.hipModuleLoadData(module, elf):
            self._fail("hipModuleLoadData", code, symbol)
        if code := self._library.hipModuleGetFunction(function, module, symbol.encode()):
            self._library.hipModuleUnload(module)
            self._fail("hipModuleGetFunction", code, symbol)
        return module.value or 0, function.value or 0

    def unload(self, module: int) -> None:
        """Give a module back."""
        if code := self._library.hipModuleUnload(module):
            self._fail("hipModuleUnload", code)

    def launch(
        self, function: int, grid: Grid, block: Grid, dynamic_lds: int, stream: int, extra: int, symbol: str
    ) -> None:
        """Put a launch on ``stream``; ``extra`` is the address of the list that names the argument buffer."""
        if code := self._launch_kernel(function, *grid, *block, dynamic_lds, stream, None, extra):
            self._fail("hipModuleLaunchKernel", code, f"{symbol}, grid {grid}")

    def _fail(self, function: str, code: int, context: str = "") -> None:
        name = (self._library.hipGetErrorName(code) or b"unknown error").decode(errors="replace")
        text = (self._library.hipGetErrorString(code) or b"").decode(errors="replace")
        raise HipError(function, code, name, text, context)


class HipLauncher(Launcher):
    """Launches on one AMD GPU, on the stream that is current there when a kernel is called.

    ``device`` is a cuda device, as PyTorch calls AMD GPUs too; every tensor must be there. Modules are loaded once,
    until ``close``. The device that is current in the calling thread stays so. UnsupportedError as ``arch_of``,
    RuntimeError without a HIP library.
    """

    def __init__(self, device: torch.device, *, arch: str | None = None, library: HipLibrary | None = None) -> None:
        super().__init__(arch or arch_of(device).name)
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.library = library or hip_library()

    def _load(self, code: CodeObject) -> LoadedKernel:
        if capturing():
            raise CaptureError(f"loading {code.facts.symbol}")
        library = self.library
        previous = library.get_device()
        library.set_device(self.index)
        try:
            module, function = library.load(code.elf, code.facts.symbol)
        finally:
            library.set_device(previous)
        return HipKernel(code, self, module, function)

    def close(self) -> None:
        """Unload everything. The first HipError is raised when all of it was tried."""
        with self._lock:
            kernels = [kernel for kernel in self._by_code.values() if isinstance(kernel, HipKernel)]
            super().close()
            errors = []
            previous = self.library.get_device()
            self.library.set_device(self.index)
            try:
                for kernel in kernels:
                    try:
                        kernel.unload()
                    except HipError as error:
                        errors.append(error)
            finally:
                self.library.set_device(previous)
        if errors:
            raise errors[0]


class _Segment(threading.local):
    """The kernarg buffer of one thread, which HIP copies when it launches."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self._size = c_size_t(size)
        places = (_BUFFER_POINTER, ctypes.addressof(self.buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END)
        self._extra = (c_void_p * 5)(*places)
        self.extra = ctypes.addressof(self._extra)


class HipKernel(LoadedKernel):
    """A kernel in a loaded module."""

    def __init__(self, code: CodeObject, launcher: HipLauncher, module: int, function: int) -> None:
        super().__init__(code)
        self._library, self._index = launcher.library, launcher.index
        self._module, self._function = module, function
        self._segment = _Segment(code.facts.kernarg_bytes)
        facts = code.facts
        self._block, self._dynamic_lds, self._symbol = facts.block, facts.dynamic_lds, facts.symbol

    def launch(self, grid: Grid, kernarg: bytes, args: Sequence[Value]) -> None:
        """Put the launch on the current stream of the launcher's device; returns before it has run. HipError as HIP."""
        if not self._function:
            raise RuntimeError(f"{self._symbol}: its launcher was closed")
        check_grid(grid, self._symbol)
        segment, library, index = self._segment, self._library, self._index
        ctypes.memmove(segment.buffer, kernarg, len(kernarg))
        stream = current_stream(index)
        previous = library.get_device()
        if previous != index:
            library.set_device(index)
        try:
            library.launch(self._function, grid, self._block, self._dynamic_lds, stream, segment.extra, self._symbol)
        finally:
            if previous != index:
                library.set_device(previous)

    def unload(self) -> None:
        """Give the module back; the kernel refuses to launch from now on."""
        self._function = 0
        self._library.unload(self._module)


def hip_library() -> HipLibrary:
    """GDN_HIP_LIBRARY, else the library that PyTorch has loaded. RuntimeError if there is none."""
    path = settings().hip_library or loaded_library()
    if not path:
        raise RuntimeError(
            "no HIP library is loaded: this PyTorch is not built for ROCm; GDN_HIP_LIBRARY can name a libamdhip64.so"
        )
    return _library(path)


@functools.cache
def _library(path: str) -> HipLibrary:
    return HipLibrary(path)


def loaded_library() -> str:
    """Path of the libamdhip64 in this process, or ""."""
    for line in _MAPS.read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libamdhip64.so" in path:
            return path
    return ""
