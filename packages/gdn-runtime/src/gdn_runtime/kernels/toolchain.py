"""The compilers: every private use of FlyDSL, and what stands in for a ROCm installation. Only compile jobs run this.

FlyDSL is pinned to one version (``FLYDSL``), for names that begin with an underscore change without notice.
"""

from __future__ import annotations

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
    }
    found = importlib.util.find_spec("triton")
    if found is not None and found.origin is not None:
        root = Path(found.origin).parent
        tools = folder / "rocm"
        linker = tools / "llvm" / "bin" / "ld.lld"
        linker.parent.mkdir(parents=True)
        script = folder / "link.py"
        (library,) = (root / "_C").glob("libtriton*.so")
        script.write_text(LINKER_SCRIPT.format(library=str(library)))
        linker.write_text(LINKER.format(python=shlex.quote(sys.executable), script=shlex.quote(str(script))))
        linker.chmod(0o755)
        bitcode = tools / "amdgcn" / "bitcode"
        bitcode.parent.mkdir(parents=True)
        bitcode.symlink_to(root / "backends" / "amd" / "lib", target_is_directory=True)
        values["ROCM_PATH"] = str(tools)
    return values


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
