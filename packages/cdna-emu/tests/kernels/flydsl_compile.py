"""Compile the FlyDSL probes for one architecture in a process of its own: ``-m kernels.flydsl_compile ARCH DIR``.

A child process because an instruction that the architecture lacks aborts the compiler, and because errors of its
back end show as lines on standard error only. FlyDSL names its target and its toolchain by the environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .compiled import Compiled

TESTS = Path(__file__).parent.parent
GFX950_ONLY = ("mfma_bf16_k32", "lds_transpose")
WAVE, BLOCK = 64, 256
SHAPE = {
    "buffer_copy": (BLOCK, 0),
    "buffer_short": (BLOCK, 0),
    "lds_reverse": (BLOCK, 4 * BLOCK),
    "lds_direct": (BLOCK, 4 * BLOCK),
    "mfma_bf16_k16": (WAVE, 0),
    "mfma_bf16_k32": (WAVE, 0),
    "mfma_fp8": (WAVE, 0),
    "lds_transpose": (WAVE, 512),
    "shuffles": (WAVE, 0),
    "dpp": (WAVE, 0),
    "to_bf16": (BLOCK, 0),
    "to_fp8": (WAVE, 0),
}
"""Threads per block and bytes of dynamic LDS of each probe, as its ``launch`` call says."""
LINKER = """#!{python}
import sys
from triton._C.libtriton import amd

out = sys.argv.index("-o") + 1
amd.link_hsaco(*(word for word in sys.argv[1:out - 1] + sys.argv[out + 1:] if not word.startswith("-")), sys.argv[out])
"""
"""Stands in for ld.lld of a ROCm installation: Triton carries a linker."""


@cache
def compile_probes(arch: str, folder: Path) -> dict[str, Compiled]:
    """Code objects of all probes by name. RuntimeError with the compiler's words if one does not compile."""
    tools = folder / "rocm"
    linker = tools / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.write_text(LINKER.format(python=sys.executable))
    linker.chmod(0o755)
    (tools / "amdgcn" / "bitcode").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "ARCH": arch,
        "FLYDSL_GPU_ARCH": arch,
        "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        "FLYDSL_RUNTIME_CACHE_DIR": str(folder / "cache"),
        "ROCM_PATH": str(tools),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    child = subprocess.run(
        [sys.executable, "-m", "kernels.flydsl_compile", arch, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if child.returncode or re.search(r"^error:", child.stderr, re.MULTILINE):
        raise RuntimeError(f"{arch}: exit status {child.returncode}\n{child.stderr[-4000:]}")
    compiled = {}
    for name in json.loads(child.stdout.splitlines()[-1]):
        threads, lds = SHAPE[name]
        elf = (folder / f"{name}-{arch}.hsaco").read_bytes()
        compiled[name] = Compiled(f"{name}_0", arch, elf, "", lds, threads)
    return compiled


def main(arch: str, folder: Path) -> None:
    import flydsl.compiler as flyc
    import torch
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu

    from . import flydsl_probes as probes

    def static(*size: int, dtype: torch.dtype = torch.float32) -> Any:
        return flyc.from_torch_tensor(torch.zeros(size, dtype=dtype))

    bf16, int32, int64 = torch.bfloat16, torch.int32, torch.int64
    arguments: dict[str, tuple[Any, ...]] = {
        "buffer_copy": (static(2048), static(2048), 4000),
        "buffer_short": (static(256, dtype=bf16), static(256, dtype=bf16), 301),
        "lds_reverse": (static(256), static(256)),
        "lds_direct": (static(256), static(256)),
        "mfma_bf16_k16": (static(256, dtype=bf16), static(256, dtype=bf16), static(256)),
        "mfma_bf16_k32": (static(512, dtype=bf16), static(512, dtype=bf16), static(256)),
        "mfma_fp8": (static(64, dtype=int64), static(64, dtype=int64), static(256)),
        "lds_transpose": (static(256, dtype=bf16), static(256, dtype=bf16)),
        "shuffles": (static(64), static(576)),
        "dpp": (static(64, dtype=int32), static(640, dtype=int32)),
        "to_bf16": (static(256), static(256, dtype=bf16)),
        "to_fp8": (static(256), static(64, dtype=int32)),
    }
    kernels = []
    for name, args in arguments.items():
        if name in GFX950_ONLY and arch != "gfx950":
            continue
        launcher = getattr(probes, f"launch_{name}")
        launcher._compile_only(*args)
        _, artifact = launcher._last_compiled
        with ir.Context():
            module = ir.Module.parse(artifact.ir)
            binary = next(op for op in module.body.operations if op.operation.name == "gpu.binary")
            (elf,) = (gpu.ObjectAttr(item).object for item in ir.ArrayAttr(binary.attributes["objects"]))
        (folder / f"{name}-{arch}.hsaco").write_bytes(elf)
        kernels.append(name)
    print(json.dumps(kernels))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
