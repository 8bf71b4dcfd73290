"""The compilers: every private use of FlyDSL, and what stands in for a ROCm installation. Only compile jobs run this.

FlyDSL is pinned to one version (``FLYDSL``), for names that begin with an underscore change without notice.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

FLYDSL = "0.5.0"
WAVE = 64

LINKER = """#!/bin/sh
exec {python} {script} "$@"
"""
LINKER_SCRIPT = """
import importlib.util
import sys

# The extension alone: importing all of triton takes longer than the link.
spec = importlib.util.spec_from_file_location("triton._C.libtriton", {library!r})
libtriton = importlib.util.module_from_spec(spec)
spec.loader.exec_module(libtriton)
out = sys.argv.index("-o") + 1
inputs = [word for word in sys.argv[1 : out - 1] + sys.argv[out + 1 :] if not word.startswith("-")]
libtriton.amd.link_hsaco(*inputs, sys.argv[out])
"""
"""Stands in for ld.lld of a ROCm installation: Triton's wheel carries a linker."""

COMPILER_PREFIXES = ("FLYDSL_", "TRITON_", "AMDGCN_", "MLIR_", "LLVM_", "HSA_")
"""Variables that reach a compiler are taken out of its environment: what no spec names must not change the code."""


def environment(folder: Path) -> dict[str, str]:
    """Variables of a compile server, which keeps its files in ``folder``.

    Where Triton is installed its linker and its bitcode serve FlyDSL, with or without ROCm on the machine.
    """
    values = {
        "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        "FLYDSL_RUNTIME_CACHE_DIR": str(folder / "flydsl"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # Line information names the files of this checkout.
        "TRITON_DISABLE_LINE_INFO": "1",
        # The default of 3.9, said aloud: later versions have another.
        "TRITON_DEFAULT_FP_FUSION": "1",
        # On gfx950 loads straight to LDS make LLVM declare its hidden arguments, which launches here do not have.
        "TRITON_HIP_USE_ASYNC_COPY": "0",
    }
    return values | _stand_in(folder, None)


def cache_environment(folder: Path, rocm: str) -> dict[str, str]:
    """Variables, on top, of a job that leaves an entry for FlyDSL's own cache in ``folder / "entries"``.

    The key of an entry holds the device bitcode that FlyDSL finds at ``rocm``, the machine's ROCm, be there any or not.
    """
    values = {"FLYDSL_RUNTIME_ENABLE_CACHE": "1", "FLYDSL_RUNTIME_CACHE_DIR": str(folder / "entries")}
    return values | _stand_in(folder, Path(rocm) / "amdgcn" / "bitcode")


def run_only_environment(entries: str, rocm: str) -> dict[str, str]:
    """Variables, on top, of a process that takes code from FlyDSL's cache in ``entries`` or fails."""
    return {"FLYDSL_RUNTIME_RUN_ONLY": "1", "FLYDSL_RUNTIME_CACHE_DIR": entries, "ROCM_PATH": rocm}


def _stand_in(folder: Path, bitcode: Path | None) -> dict[str, str]:
    """ROCM_PATH with Triton's linker and ``bitcode`` (None: Triton's), made in ``folder``; nothing without Triton."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return {}
    root = Path(found.origin).parent
    tools = folder / "rocm"
    linker = tools / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    script = folder / "link.py"
    (library,) = (root / "_C").glob("libtriton*.so")
    script.write_text(LINKER_SCRIPT.format(library=str(library)))
    linker.write_text(LINKER.format(python=shlex.quote(sys.executable), script=shlex.quote(str(script))))
    linker.chmod(0o755)
    place = tools / "amdgcn" / "bitcode"
    place.parent.mkdir(parents=True)
    place.symlink_to(bitcode or root / "backends" / "amd" / "lib", target_is_directory=True)
    return {"ROCM_PATH": str(tools)}


def target(arch: str) -> dict[str, str]:
    """Variables that make FlyDSL compile for ``arch``: the target reads the one, kernels the other."""
    return {"ARCH": arch, "FLYDSL_GPU_ARCH": arch}


def versions() -> dict[str, str]:
    """Versions of the compilers that are installed, by package."""
    found = {}
    for package in ("flydsl", "triton", "pytorch-triton-rocm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def preload(language: str) -> None:
    """Import what a job of ``language`` needs, so that the jobs forked from this process have it."""
    import elftools.elf.elffile  # noqa: F401
    import msgpack  # noqa: F401

    if language == "flydsl":
        installed = importlib.metadata.version("flydsl")
        if installed != FLYDSL:
            raise ImportError(f"flydsl: got version {installed}, expected {FLYDSL}", name="flydsl")
        import flydsl.compiler
        import flydsl.expr  # noqa: F401
    else:
        import triton
        import triton.backends.compiler
        import triton.compiler  # noqa: F401


def compile_flydsl(launcher: Any, arguments: tuple[Any, ...]) -> tuple[bytes, int]:
    """The ELF file of the one kernel that a ``@flyc.jit`` launcher starts, for the target in the environment, and the
    bytes of dynamic LDS that it starts it with."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu

    launcher._compile_only(*arguments)
    _, artifact = launcher._last_compiled
    with ir.Context():
        module = ir.Module.parse(artifact.ir)
        binaries = [op for op in module.body.operations if op.operation.name == "gpu.binary"]
        objects = [item for op in binaries for item in ir.ArrayAttr(op.attributes["objects"])]
        launches = re.findall(r"gpu\.launch_func .*", artifact.ir)
        if len(objects) != 1 or len(launches) != 1:
            raise ValueError(f"launcher: got {len(objects)} code objects, {len(launches)} launches, expected one each")
        return gpu.ObjectAttr(objects[0]).object, _dynamic_lds(launches[0], artifact.ir)


HIP_CALLS: dict[str, tuple[Any, ...]] = {
    "mgpuModuleLoad": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "mgpuModuleUnload": (None, ctypes.c_void_p),
    "mgpuModuleGetFunction": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
    "mgpuLaunchKernel": (
        None, ctypes.c_void_p, *(ctypes.c_ssize_t,) * 6, ctypes.c_int32, *(ctypes.c_void_p,) * 3, ctypes.c_size_t,
    ),
    "mgpuStreamCreate": (ctypes.c_void_p,),
    "mgpuStreamDestroy": (None, ctypes.c_void_p),
    "mgpuStreamSynchronize": (None, ctypes.c_void_p),
}  # fmt: skip
"""Result and arguments of the functions through which FlyDSL's host code reaches HIP."""


def load_flydsl(launcher: Any, arguments: tuple[Any, ...]) -> bytes:
    """The ELF file that calling a ``@flyc.jit`` launcher loads and launches. HIP is replaced in this process, so no GPU
    is needed and nothing runs."""
    from flydsl._mlir import ir
    from flydsl._mlir.execution_engine import ExecutionEngine
    from flydsl.compiler import jit_executor, jit_function

    loaded: list[bytes] = []
    launched: list[int] = []

    def call(name: str, *values: Any) -> int | None:
        if name == "mgpuModuleLoad":
            loaded.append(ctypes.string_at(values[0], values[1]))
        if name == "mgpuLaunchKernel":
            launched.append(values[0])
        return 1 if HIP_CALLS[name][0] else None  # any handle but null

    callbacks = {name: ctypes.CFUNCTYPE(*kinds)(functools.partial(call, name)) for name, kinds in HIP_CALLS.items()}

    def ensure_engine(artifact: Any) -> None:
        if artifact._engine is not None:
            return
        context = jit_function._create_mlir_context()
        with context:
            module = ir.Module.parse(artifact._ir_text)
            engine = ExecutionEngine(module, opt_level=3, shared_libs=[])
            for name, callback in callbacks.items():
                engine.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))
            engine.initialize()
        artifact._module, artifact._engine, artifact._jit_module, artifact._ctx = module, engine, None, context

    jit_executor.CompiledArtifact._ensure_engine = ensure_engine
    launcher(*arguments)
    if len(loaded) != 1 or len(launched) != 1:
        raise ValueError(f"launcher: got {len(loaded)} loads, {len(launched)} launches, expected one each")
    return loaded[0]


def _dynamic_lds(launch: str, module: str) -> int:
    size = re.search(r"dynamic_shared_memory_size (%\w+)", launch)
    if size is None:
        return 0
    constant = re.search(rf"{re.escape(size[1])} = llvm\.mlir\.constant\((\d+) : i32\)", module)
    if constant is None:
        raise ValueError("dynamic LDS of the launch: got a value that is computed, expected a constant")
    return int(constant[1])


def compile_triton(job: Any, arch: str) -> Any:
    """What Triton makes of a ``CompileJob`` for an AMD GPU: ``.asm`` and ``.metadata``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=job.fn,
        signature=job.signature,
        constexprs={(job.fn.arg_names.index(name),): value for name, value in job.constants.items()},
        attrs={(position,): [["tt.divisibility", 16]] for position in job.aligned},
    )
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    return triton.compile(source, target=GPUTarget("hip", arch, WAVE), options=options)
