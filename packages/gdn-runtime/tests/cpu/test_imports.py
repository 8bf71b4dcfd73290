"""What importing the package, and its Triton kernels, brings along: a server has torch, and triton at most."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

REPORT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import MODULE
print(*sorted(name for name in sys.modules if name.partition(".")[0] in WATCHED))
"""


def imported(module: str, blocked: tuple[str, ...], watched: tuple[str, ...]) -> list[str]:
    """Which of ``watched`` a fresh process holds after importing ``module`` with ``blocked`` out of reach."""
    code = REPORT.replace("BLOCKED", repr(blocked)).replace("WATCHED", repr(watched)).replace("MODULE", module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_package_imports_no_kernel_language() -> None:
    names = imported("gdn_runtime", ("flydsl", "cdna_emu", "numpy"), ("triton", "gdn_runtime"))
    assert "gdn_runtime.ops.block" in names
    assert not [name for name in names if name.startswith(("triton", "gdn_runtime.kernels"))]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("module", ["gdn_runtime.kernels.triton.backend", "gdn_runtime.kernels.triton.crosscompile"])
def test_the_triton_kernels_need_no_numpy(module: str) -> None:
    assert module in imported(module, ("flydsl", "cdna_emu", "numpy"), ("gdn_runtime",))
