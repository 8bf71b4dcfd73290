"""Loads and launches Triton and Gluon kernels on NVIDIA GPUs: compiled once per spec, nothing left to specialise."""

from __future__ import annotations

import importlib
import threading

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn_runtime.errors import CaptureError

WARP = 32


class NvidiaKernels:
    """Kernels by spec and device. Thread safe."""

    def __init__(self):
        self._by_spec = {}
        # Hashing a spec takes 2 us. Selection gives equal specs as one object, which is kept beside its kernel.
        self._by_identity = {}
        self._lock = threading.Lock()

    def __call__(self, spec, device):
        """The kernel of ``spec`` on ``device``, compiled at the first call. CaptureError while a stream is captured."""
        index = torch.cuda.current_device() if device.index is None else device.index
        found = self._by_identity.get((id(spec), index))
        if found is not None and found[0] is spec:
            return found[1]
        with self._lock:
            kernel = self._by_spec.get((spec, index))
            if kernel is None:
                spec.check()
                if torch.cuda.is_current_stream_capturing():
                    raise CaptureError(f"compiling {spec.kernel}")
                with torch.cuda.device(index):
                    kernel = self._by_spec[spec, index] = _load(spec, torch.device("cuda", index))
            self._by_identity[id(spec), index] = spec, kernel
        return kernel


class TritonKernel:
    """A kernel compiled for the current device, with its constants."""

    def __init__(self, job, arch, index):
        source = ASTSource(
            fn=job.fn,
            signature=job.signature,
            constexprs={(job.fn.arg_names.index(name),): value for name, value in job.constants.items()},
            attrs={(position,): [["tt.divisibility", 16]] for position in job.aligned},
        )
        target = GPUTarget("cuda", int(arch.removeprefix("sm")), WARP)
        options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
        self._compiled = triton.compile(source, target=target, options=options)
        self._compiled._init_handles()  # or the first launch would load the module, perhaps into a graph
        self._constants = tuple(job.constants[name] for name, kind in job.signature.items() if kind == "constexpr")
        self._index = index

    def __call__(self, grid, args):
        """Launch on the current stream of the kernel's device; constants come after the arguments."""
        if torch.cuda.current_device() == self._index:
            self._compiled[grid](*args, *self._constants)
        else:
            with torch.cuda.device(self._index):
                self._compiled[grid](*args, *self._constants)


def _load(spec, device):
    module = importlib.import_module(f"pa_decode.kernels.{spec.language}.{spec.kernel}")
    if spec.language == "gluon":
        return module.load(spec, device)
    (job,) = module.compile_jobs(spec)
    names = [argument.name for argument in spec.ARGUMENTS]
    assert list(job.signature)[: len(names)] == names, "the first parameters of a kernel are the arguments of its spec"
    return TritonKernel(job, spec.arch, device.index)


KERNELS = NvidiaKernels()
