"""Configurations that tables may hold, compiled for sm90 without a GPU: what they take of a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from gdn_runtime.arch import KNOWN
from gdn_runtime.spec import OutputConfig, PrepareConfig, StateScanConfig
from gdn_runtime.spec.nvidia import OUTPUT_WARPS, PREPARE_WARPS, SCAN_STAGES

pytest.importorskip("triton", reason="needs Triton")

CODE = """
import json, re, subprocess, sys, tempfile
from dataclasses import replace
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gdn_runtime import rules, spec
from gdn_runtime.arch import parse_arch
from gdn_runtime.kernels.triton import output, prepare, state_scan
problem = rules.Problem(
    arch=parse_arch("sm90"), compute_units=132, num_heads=32, num_key_heads=16, num_seqs=4, total_chunks=512,
    max_seq_chunks=128, dtype="bf16", beta_dtype="fp32", state_dtype="fp32", snapshot_dtype="bf16", is_varlen=True,
)
KINDS = {
    "prepare": (rules.prepare_spec, spec.PrepareConfig, prepare),
    "state_scan": (rules.state_scan_spec, spec.StateScanConfig, state_scan),
    "output": (rules.output_spec, spec.OutputConfig, output),
}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
for kernel, snapshot, values in json.load(sys.stdin):
    make, config, module = KINDS[kernel]
    one = make(replace(problem, snapshot_dtype=snapshot), config(**values))
    assert spec.config_refusal(one) is None
    for job in module.compile_jobs(one):
        source = ASTSource(
            fn=job.fn,
            signature=job.signature,
            constexprs={(job.fn.arg_names.index(name),): value for name, value in job.constants.items()},
            attrs={(position,): [["tt.divisibility", 16]] for position in job.aligned},
        )
        options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
        # Made for Triton 3.6: 3.9 spills 16 bytes within 128 registers, and nothing within what it takes itself.
        if getattr(one, "max_registers", None) and triton.__version__.startswith("3.6."):
            options["maxnreg"] = one.max_registers
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        numbers = {name.lower(): int(re.search(name + r":(\\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")}
        print(json.dumps({"kernel": job.fn.__name__, "shared": compiled.metadata.shared, **numbers, **values}))
"""

Job = tuple[str, str, dict[str, Any]]


def corners() -> list[Job]:
    """Of every tile the fewest and the most warps and the deepest pipeline, with the snapshots that take most."""
    warps = {width: [pair[1] for pair in SCAN_STAGES if pair[0] == width] for width, _ in SCAN_STAGES}
    tiles = {(width, number) for width, each in warps.items() for number in (min(each), max(each))}
    scans = [StateScanConfig(*tile, SCAN_STAGES[tile]) for tile in sorted(tiles)]
    jobs: list[Job] = [("state_scan", "fp32", vars(scan)) for scan in scans]
    for block_v in (16, 128):
        jobs += [("output", "fp32", vars(OutputConfig(block_v, num_warps, 1))) for num_warps in OUTPUT_WARPS]
    jobs += [("prepare", "bf16", vars(PrepareConfig(mode, num_warps, 1))) for mode, num_warps in PREPARE_WARPS]
    return jobs


@pytest.mark.slow
def test_they_fit_and_spill_nothing() -> None:
    # A process of its own: this one may have Triton's interpreter on.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    jobs = corners()
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(jobs), capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(facts) == len(jobs) + sum(mode == "split" for mode, _ in PREPARE_WARPS)
    for each in facts:
        assert each["shared"] <= KNOWN["sm90"].lds_bytes, each
        assert each["stack"] == each["local"] == 0 and each["reg"] <= 255, each
