"""First call of K5 in a fresh process: from a bundle, against a cold JIT.

    GDN_BUNDLE=DIR python benchmarks/first_call.py [--arch ARCH] [--rounds N] [--json FILE]

Each round is a process of its own. Its clock starts when torch, the emulator and numpy are imported, for a server has
torch and no emulator, and when the emulator has run a first, other kernel, for a GPU has no tables of instructions to
make. The bar holds for a first call: reading the manifest, loading, packing, and the launch, of which most is what the
emulator does for K5, decoding it and running one sequence of 64 tokens. Importing gdn_runtime, with the modules that
launch, is a row beside it. Modules come from bytecode, as pip installs them: a first round, not shown, writes it. The
best round is shown, for a busy machine only adds to it; CPU seconds are those of all threads of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

BAR = 0.1
"""Seconds that a first call from a bundle may take: load, pack and launch on the emulator."""
HEADS, KEY_HEADS, TOKENS = 8, 2, 64
PARTS = {
    "read": "read and check the manifest",
    "load": "read, hash and load the payload",
    "call": "check, select, allocate, pack",
    "emulator": "launch: decode and run it",
}
"""Rows of the table that make up a first call."""


class Clock:
    """Wall and CPU seconds of named parts."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``, timed."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return work()
        finally:
            self.parts[name] = time.perf_counter() - wall, time.process_time() - cpu


def child(arch: str, waking: Path) -> dict[str, Any]:
    """One round, in this process: seconds by part. ``waking`` is code of another kernel, for the emulator."""
    import cdna_emu

    elf = waking.read_bytes()
    (program,) = cdna_emu.CodeObject.parse(elf).kernels.values()
    # All its numbers are 0, of rows too: it touches no memory.
    cdna_emu.launch(elf, grid=1, block=program.max_workgroup_size, kernarg=bytes(program.kernarg_size))
    gc.freeze()  # collections pass over the emulator's objects, which a server does not have
    clock = Clock()
    clock("import", _import_runtime)
    from gdn_runtime import chunk_gated_delta_rule_fwd_h, env
    from gdn_runtime.codeobject import bundle, code_object

    inside = [0.0, 0.0]
    launch = cdna_emu.launch

    def timed_launch(*args: Any, **options: Any) -> Any:
        own = Clock()
        result = own("launch", lambda: launch(*args, **options))
        inside[:] = [sum(pair) for pair in zip(inside, own.parts["launch"], strict=True)]
        return result

    jit = env.settings().jit
    if not jit:
        clock("read", lambda: bundle.bundles(arch))
    torch.manual_seed(0)
    k = torch.randn(1, TOKENS, KEY_HEADS, 128).bfloat16()
    w, u = torch.randn(2, 1, HEADS, TOKENS, 128).bfloat16()
    g, pool = -torch.rand(1, TOKENS, HEADS), torch.zeros(2, HEADS, 128, 128)
    cdna_emu.launch = timed_launch
    options: dict[str, Any] = {
        "initial_state": pool,
        "initial_state_indices": torch.zeros(1, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "seq_lens_cpu": [TOKENS],
        "output_final_state": True,
        "block_v": 64,
        "backend": "emulate",
        "arch": arch,
    }
    made: list[Any] = []
    if jit:
        clock("first", lambda: chunk_gated_delta_rule_fwd_h(k, w, u, g, **options))
    else:
        source = sys.modules["gdn_runtime.codeobject.source"]
        find = source._find
        load = Clock()

        def timed_find(spec: Any) -> Any:
            made.append(spec)
            return load("load", lambda: find(spec))

        source._find = timed_find  # type: ignore[attr-defined]
        clock("first", lambda: chunk_gated_delta_rule_fwd_h(k, w, u, g, **options))
        clock.parts["load"] = load.parts["load"]
        assert code_object(made[0]).spec.kernel == "state_scan_opt"
    whole = clock.parts.pop("first")
    loaded = clock.parts.get("load", (0.0, 0.0))
    clock.parts["emulator"] = inside[0], inside[1]
    clock.parts["call"] = whole[0] - inside[0] - loaded[0], whole[1] - inside[1] - loaded[1]
    artifacts = [len(found.artifacts) for found in bundle.bundles(arch)] if not jit else []
    digests = [found.digest for found in bundle.bundles(arch)] if not jit else []
    return {"parts": clock.parts, "artifacts": artifacts, "digests": digests}


def _import_runtime() -> None:
    from gdn_runtime.ops.backends import stages

    stages("emulate")


def rounds(arch: str, count: int, jit: bool, bytecode: str) -> dict[str, Any]:
    """The best of ``count`` fresh processes, whose bytecode is in the folder ``bytecode``, after one that writes it."""
    changes = {"GDN_JIT": str(int(jit)), "GDN_JIT_CACHE_DIR": "", "FLYDSL_RUNTIME_RUN_ONLY": "0"}
    environment = {**os.environ, **changes, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    if jit:
        environment.pop("GDN_BUNDLE", None)
    results = []
    for _ in range(count + 1):
        command = [sys.executable, __file__, "--arch", arch, "--child", str(_waking(arch))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"first_call: a round failed:\n{done.stderr}")
        results.append(json.loads(done.stdout))
    best: dict[str, Any] = min(results[1:], key=seconds)
    return best


def _waking(arch: str) -> Path:
    """Some code object that is not K5's."""
    from gdn_runtime.codeobject import bundles

    found = [one.folder / name.file for one in bundles(arch) for name in one.artifacts.values()]
    if not found:
        sys.exit(f"first_call: GDN_BUNDLE names no bundle for {arch}")
    return min(path for path in found if path.name.startswith("l2norm"))


def seconds(result: dict[str, Any], which: int = 0) -> float:
    """Wall (0) or CPU (1) seconds of a first call."""
    return float(sum(result["parts"][name][which] for name in PARTS if name in result["parts"]))


def table(bundle: dict[str, Any], jit: dict[str, Any]) -> str:
    """Both results, part by part, in milliseconds."""
    lines = [f"{'milliseconds: wall (CPU)':<36}{'bundle':>18}{'cold JIT':>22}"]
    for name, text in {**PARTS, "import": "beside it: import gdn_runtime"}.items():
        if name == "import":
            cells = [f"{1e3 * seconds(result):.1f} ({1e3 * seconds(result, 1):.1f})" for result in (bundle, jit)]
            lines.append(f"{'first call':<36}{cells[0]:>18}{cells[1]:>22}")
        pairs = [result["parts"].get(name) for result in (bundle, jit)]
        left, right = ("-" if pair is None else f"{1e3 * pair[0]:.1f} ({1e3 * pair[1]:.1f})" for pair in pairs)
        lines.append(f"{text:<36}{left:>18}{right + ' *' * (name == 'call'):>22}")
    return "\n".join([*lines, "* with compiling, in another process: its CPU time is not in this figure"])


def main() -> None:
    parser = argparse.ArgumentParser(description="First call of K5: from a bundle, against a cold JIT.")
    parser.add_argument("--arch", choices=("gfx942", "gfx950"), default="gfx950")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.arch, args.child)))
        return
    with tempfile.TemporaryDirectory() as bytecode:
        bundle = rounds(args.arch, args.rounds, False, bytecode)
        jit = rounds(args.arch, min(args.rounds, 3), True, bytecode)
    print(f"{args.arch}, bundle of {bundle['artifacts']} artifacts\n{table(bundle, jit)}")
    first = seconds(bundle)
    print(f"first call from the bundle: {first:.3f} s, at most {BAR} s: {'yes' if first <= BAR else 'NO'}")
    if args.json is not None:
        report = {
            "command": f"GDN_BUNDLE=DIR python benchmarks/first_call.py --arch {args.arch} --rounds {args.rounds}",
            "commit": _commit(),
            "device": f"cpu: {_processor()}, {len(os.sched_getaffinity(0))} cores",
            "python": sys.version.split()[0],
            "versions": {name: _version(name) for name in ("torch", "flydsl", "triton")},
            "bar_s": BAR,
            "first_call_s": first,
            "bundle": bundle,
            "jit": jit,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(first > BAR)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
