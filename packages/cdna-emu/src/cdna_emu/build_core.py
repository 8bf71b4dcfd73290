"""Compiles the core with the system's C compiler: the one place that knows the command line.

Used by the build of the wheel (``hatch_build.py``, which loads this file by its path) and by the tests; it imports
nothing of the package.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORE = Path(__file__).parent / "core"
LIBRARY = "_core.so"
# No contraction into fma and no errno: every operation rounds as the instruction says, and libm calls can be inlined.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
# zig cc compiles for the CPU that it runs on; a library is for others too. It makes no clones of functions for newer
# CPUs as gcc does, and without fma its core is four times slower: so what it builds needs AVX2 and FMA on x86-64.
ZIG_CPU = {"x86_64": "x86_64_v3", "AMD64": "x86_64_v3"}


def compiler() -> list[str]:
    """The command that CC holds, else the first of cc, gcc, clang that is installed; RuntimeError if there is none."""
    chosen = os.environ.get("CC")  # noqa: TID251 - a build runs before env.py can be imported
    command = shlex.split(chosen) if chosen else next(([name] for name in COMPILERS if shutil.which(name)), [])
    if not command or not shutil.which(command[0]):
        wanted = f"CC: {chosen!r} was not found" if chosen else f"none of {', '.join(COMPILERS)} was found"
        raise RuntimeError(
            f"cdna-emu needs a C compiler to build its core; {wanted}. Install one (Debian, Ubuntu: apt-get install "
            "gcc libc6-dev; Fedora: dnf install gcc), or install a wheel that holds the core."
        )
    return command


def command_line() -> list[str]:
    """The compiler and its flags, the same for every way to build; RuntimeError if there is no compiler."""
    command = compiler()
    zig = any(Path(part).name in {"zig", "ziglang"} for part in command)
    return [*command, *FLAGS, *([f"-mcpu={ZIG_CPU.get(platform.machine(), 'baseline')}"] if zig else [])]


def build(source: Path, output: Path) -> None:
    """Compile ``source/*.c`` into the shared library ``output``.

    Raises RuntimeError if there is no compiler, or with its messages if it fails.
    """
    files = sorted(source.glob("*.c"))
    if not files:
        raise RuntimeError(f"{source} holds no C source")
    output.parent.mkdir(parents=True, exist_ok=True)
    base = command_line()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(folder, f"{path.stem}.o") for path in files]
        commands = [[*base, "-c", str(c), "-o", str(o)] for c, o in zip(files, objects, strict=True)]
        list(pool.map(_run, commands))
        _run([*base, "-shared", "-o", str(output), *map(str, objects), "-lm"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


def compile_core(output: Path) -> None:
    """Compile the core of this package into ``output``; errors as of ``build``."""
    build(CORE, output)
