"""The backend "emulate": what the kernels of a call execute, and cycles by the emulator's model, in place of times.

Nothing of the call runs. Its kernels are selected as for a device of the architecture; one workgroup of each is traced
on the emulator, with every check on, and ``gdn_tune.model`` makes cycles of a whole device of it. K6 is not modelled.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gdn_runtime.arch import parse_arch
from gdn_runtime.rules import Problem
from gdn_runtime.select import Request, Selection, select
from gdn_runtime.spec import AMD_ARCHS, OptStateScanSpec, VSplitScanSpec
from gdn_runtime.testing import Case

from ..calls import problem_of
from ..candidates import Specs
from .profile import FUSED_PREPARE, K5
from .results import KERNELS

DEFAULT_ARCH = "gfx950"


def check_arch(arch: str) -> str:
    """The name of ``arch`` without its features. Raises ValueError for one that is not emulated."""
    found = arch.strip().split(":")[0].lower()
    if found not in AMD_ARCHS:
        raise ValueError(f"arch: got {arch!r}, expected {' or '.join(AMD_ARCHS)}")
    return found


def problem(case: Case, arch: str, compute_units: int | None = None) -> Problem:
    """The call on the usual part of ``arch``, or on one of so many compute units."""
    return problem_of(case, arch, compute_units or parse_arch(arch).nominal_compute_units or 1)


def selection(call: Problem, *, scan_alone: bool) -> Selection:
    """What would run: of the block, or of K5 alone."""
    request = Request(backend="emulate", arch=call.arch.name)
    if scan_alone:
        request = replace(request, stages=("state_scan",))
    return select(call, torch.device("cpu"), request)


def count(call: Problem, *, scan_alone: bool = False) -> tuple[dict[str, float], dict[str, float]]:
    """(cycles by stage and in all, counters of a workgroup by kernel). ImportError without cdna-emu and a compiler."""
    from .. import model  # needs the extra

    chosen = selection(call, scan_alone=scan_alone)
    scan = chosen.state_scan
    assert isinstance(scan, OptStateScanSpec | VSplitScanSpec), "what selection has for code objects by default"
    parts = {K5: Specs(state_scan=scan)}
    if not scan_alone:
        parts = {FUSED_PREPARE: Specs(prepare=chosen.prepare), **parts}
    stages: dict[str, float] = {}
    counters: dict[str, float] = {}
    for stage, specs in parts.items():
        stages[stage], found = model.modelled(call, specs)
        counters |= found
    return {**stages, KERNELS: sum(stages.values())}, counters
