"""Compile every Triton kernel of the block for an AMD GPU without one, and report what the code needs.

    python -m gdn_runtime.kernels.triton.crosscompile --arch gfx942 [--json]

Needs Triton with its AMD back end, no GPU and no ROCm. Exit status 1 if a kernel does not compile or spills to scratch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import triton

from ...arch import parse_arch
from ...rules import (
    Problem,
    l2norm_spec,
    output_config,
    output_spec,
    prepare_config,
    prepare_spec,
    state_scan_config,
    state_scan_spec,
)
from ...spec import PREPARE_MODES, Dtype
from ..toolchain import compile_triton
from . import l2norm, output, prepare, state_scan
from .common import CompileJob

ARCHS = ("gfx942", "gfx950")
HEADS = ((32, 16), (8, 2), (64, 16), (16, 4))
"""(H, Hg) of Qwen3.5-35B and -397B, whole and split over tensor-parallel devices."""


def problems(arch: str) -> Iterator[Problem]:
    """The shapes to compile for, 8 sequences of 8192 tokens: every pair of ``HEADS`` in bf16, the first in fp16."""
    facts = parse_arch(arch)
    kinds: list[tuple[int, int, Dtype]] = [(h, hg, "bf16") for h, hg in HEADS]
    for num_heads, num_key_heads, dtype in [*kinds, (*HEADS[0], "fp16")]:
        for is_varlen in (False, True):
            yield Problem(
                arch=facts,
                compute_units=facts.nominal_compute_units or 1,
                num_heads=num_heads,
                num_key_heads=num_key_heads,
                num_seqs=8,
                total_chunks=8 * 128,
                max_seq_chunks=128,
                dtype=dtype,
                beta_dtype="fp32",
                state_dtype="fp32",
                snapshot_dtype=dtype,
                is_varlen=is_varlen,
            )


def l2norm_jobs(problem: Problem) -> list[CompileJob]:
    """Normalisation of q and k; dense and varlen run the same code."""
    return [] if problem.is_varlen else l2norm.compile_jobs(l2norm_spec(problem))


def prepare_jobs(problem: Problem) -> list[CompileJob]:
    """K1..K4 in both modes, whichever the rule picks."""
    config, _ = prepare_config(problem)
    configs = [replace(config, mode=mode) for mode in PREPARE_MODES]
    return [job for config in configs for job in prepare.compile_jobs(prepare_spec(problem, config))]


def state_scan_jobs(problem: Problem) -> list[CompileJob]:
    """K5 with dense states, and over a pool with a mask where sequences are packed."""
    config, _ = state_scan_config(problem)
    pooled = replace(problem, use_state_indices=True, use_state_mask=True)
    cases = [problem, pooled] if problem.is_varlen else [problem]
    return [job for case in cases for job in state_scan.compile_jobs(state_scan_spec(case, config))]


def output_jobs(problem: Problem) -> list[CompileJob]:
    """K6."""
    config, _ = output_config(problem)
    return output.compile_jobs(output_spec(problem, config))


PROVIDERS: list[Callable[[Problem], list[CompileJob]]] = [l2norm_jobs, prepare_jobs, state_scan_jobs, output_jobs]
"""One function per stage: the code objects that a problem needs with the default configuration."""


@dataclass(frozen=True)
class Report:
    """What one code object needs: registers per lane (VGPRs of the unified file, of which ``agpr`` accumulation ones)
    and per wave, bytes of LDS per workgroup, of scratch per lane, and of code; ``error`` if it did not compile.

    ``vspill`` counts VGPRs kept in scratch, ``sspill`` SGPRs kept in lanes of a VGPR, which costs no memory access.
    """

    kernel: str
    spec: str
    vgpr: int = 0
    agpr: int = 0
    sgpr: int = 0
    lds: int = 0
    scratch: int = 0
    vspill: int = 0
    sspill: int = 0
    code: int = 0
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether this code object is missing or uses scratch."""
        return bool(self.error or self.scratch or self.vspill)


def compile_job(job: CompileJob, arch: str, spec: str) -> Report:
    """Compile one job and read the metadata of its assembly."""
    name = job.fn.__name__
    try:
        binary = compile_triton(job, arch)
    except (RuntimeError, ValueError, triton.TritonError) as error:
        return Report(name, spec, error=f"{type(error).__name__}: {error}")
    text = binary.asm["amdgcn"]
    return Report(
        kernel=name,
        spec=spec,
        vgpr=_number(text, r"\.vgpr_count:\s+(\d+)"),
        agpr=_number(text, r"\.agpr_count:\s+(\d+)"),
        sgpr=_number(text, r"\.sgpr_count:\s+(\d+)"),
        lds=binary.metadata.shared,
        scratch=_number(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        vspill=_number(text, r"\.vgpr_spill_count:\s+(\d+)"),
        sspill=_number(text, r"\.sgpr_spill_count:\s+(\d+)"),
        code=_number(text, r"; codeLenInByte = (\d+)"),
    )


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"assembly: got no match for {pattern!r}, expected the metadata of one AMD kernel")
    return int(found[1])


def compile_all(arch: str) -> Iterator[Report]:
    """Reports of every job of every provider."""
    for problem in problems(arch):
        shape = f"H={problem.num_heads} Hg={problem.num_key_heads} {problem.dtype}"
        layout = "varlen" if problem.is_varlen else "dense"
        for provider in PROVIDERS:
            for job in provider(problem):
                yield compile_job(job, arch, f"{shape} {layout} warps={job.num_warps}")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gdn_runtime.kernels.triton.crosscompile", description=__doc__)
    parser.add_argument("--arch", required=True, choices=ARCHS)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    args = parser.parse_args(argv)
    reports = list(compile_all(args.arch))
    failures = sum(report.failed for report in reports)
    if args.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
        return min(failures, 1)
    columns = ("vgpr", "agpr", "sgpr", "lds", "scratch", "vspill", "sspill", "code")
    print(f"{'kernel':<24}{'spec':<40}" + "".join(f"{column:>8}" for column in columns))
    for report in reports:
        numbers = report.error or "".join(f"{getattr(report, column):>8}" for column in columns)
        print(f"{report.kernel:<24}{report.spec:<40}{numbers}")
    print(f"{args.arch}: {len(reports)} code objects, {failures} failed (not compiled, or scratch in use)")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
