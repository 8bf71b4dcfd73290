"""The kernels of the fast path, compiled for sm90 without a GPU: what they may take of an SM."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

CODE = """
import json
from triton.compiler import CompiledKernel
CompiledKernel._init_handles = lambda self: None  # it would load the code onto a device
from gdn_runtime.kernels.gluon.launch import load
from gdn_runtime.spec import FastPrefillSpec
spec = FastPrefillSpec(
    arch="sm90", dtype="bf16", beta_dtype="fp32", state_dtype="fp32", num_heads=32, num_key_heads=16, is_varlen=True,
    use_initial_state=True, store_final_state=True, use_state_indices=True, use_state_mask=True, p_in_scan=True,
    segment_chunks=32,
)
kernels = load(spec, states_on_16_bytes=True, index_type="*i32")
facts = {}
for name, kernel in kernels._asdict().items():
    compiled = kernel._compiled
    facts[name] = {"shared": compiled.metadata.shared, "ptx": compiled.asm["ptx"]}
print(json.dumps(facts))
"""

SHARED_OF_AN_SM = 228 * 1024
RESERVED = 1024
"""Bytes that each program takes besides its own."""


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@pytest.mark.slow
@pytest.mark.skipif(not _triton().startswith("3.6."), reason="the kernels are written for Triton 3.6")
def test_programs_per_sm_and_barriers() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    for name, programs in (("scan", 2), ("prepare", 3), ("transfer", 2), ("combine", 1)):
        assert programs * (facts[name]["shared"] + RESERVED) <= SHARED_OF_AN_SM, name
    body = re.split(r"^\$L__BB0_\d+:", facts["scan"]["ptx"], flags=re.MULTILINE)
    loop = max(body, key=lambda part: part.count("wgmma.mma_async"))
    assert loop.count("wgmma.mma_async") >= 36
    assert loop.count("bar.sync") <= 4, (
        "the compiler keeps all warps in step more often than the order of the scan asks"
    )
