"""Candidates ranked where there is no card: what one steady chunk of their kernels costs on the emulator, times the
chunks that follow one another on a device.

Cycles of a chunk are those of the emulator's timing model for 1, 2, ... workgroups side by side on a compute unit, as
many as fit. A device of C compute units that is given W equal workgroups has at most ceil(W / C) of them on one unit;
they run in rounds of as many as fit, and a last round of the rest. Scans of the block are W = H * total_chunks /
max_seq_chunks * tiles of V at a time, each of max_seq_chunks chunks, as the rules count them. Nothing here knows of
memory bandwidth beyond one compute unit's or of launches, so the figures rank candidates of one call and are no times.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cdna_emu
from cdna_emu.model import DEFAULTS
from gdn_runtime import env
from gdn_runtime.codeobject.stages.backend import CodeObjectStages
from gdn_runtime.rules import Problem
from gdn_runtime.spec import HEAD_DIM, FusedPrepareSpec, OptStateScanSpec, TPrepareSpec, VSplitScanSpec
from gdn_runtime.testing import Case
from gdn_runtime.testing.tracing import TracedKernel, TracingLauncher

from .candidates import Specs, small_heads
from .workload import GdnWorkload

CHUNKS, LESS = 12, 10
"""Chunks of the two scans whose difference is that of steady ones: even, for a loop may be unrolled by two."""
CLASSES = (
    "valu", "salu", "mfma", "lds_read", "lds_lanes", "lds_write", "lds_atomic", "vmem_load", "vmem_store", "smem",
    "barrier", "wait", "other", "branch",
)  # fmt: skip
"""Of wave-instructions, by the emulator's names."""
LINE = 128

Kernel = FusedPrepareSpec | TPrepareSpec | OptStateScanSpec | VSplitScanSpec


@dataclass(frozen=True)
class Unit:
    """One workgroup's steady chunk (K5), or its whole work (K1..K4).

    ``beside[r - 1]``: cycles in which each of r workgroups on one compute unit gets it done. ``counters``:
    wave-instructions by class, and what a workgroup holds.
    """

    beside: tuple[float, ...]
    counters: dict[str, float]


def cycles_on(problem: Problem, spec: Kernel, unit: Unit) -> float:
    """Cycles of a kernel on the device of ``problem``; see the module."""
    heads = problem.num_heads
    if isinstance(spec, OptStateScanSpec | VSplitScanSpec):
        at_a_time = heads * problem.total_chunks / problem.max_seq_chunks * (HEAD_DIM // spec.block_v)
        return problem.max_seq_chunks * _rounds(at_a_time / problem.compute_units, unit.beside)
    per_chunk = heads if getattr(spec, "variant", "wave") == "group" else -(-heads // 4)
    return _rounds(problem.total_chunks * per_chunk / problem.compute_units, unit.beside)


def _rounds(groups: float, beside: Sequence[float]) -> float:
    whole, rest = divmod(-int(-groups // 1), len(beside))
    return whole * beside[-1] + (beside[rest - 1] if rest else 0.0)


def modelled(problem: Problem, specs: Specs) -> tuple[float, dict[str, float]]:
    """Cycles of the kernels of ``specs`` up to K5 one after the other, and their counters by kernel.

    K6 is the same for all candidates, and a Triton kernel of which no chunk repeats: it is left out.
    """
    total = 0.0
    counters: dict[str, float] = {}
    for spec in (specs.prepare, specs.state_scan):
        if spec is None:
            continue
        assert isinstance(spec, Kernel), "only AMD kernels run on the emulator"
        unit = unit_of(_small(spec), _steady(problem))
        total += cycles_on(problem, spec, unit)
        counters |= {f"{spec.kernel} {name}": value for name, value in unit.counters.items()}
    return total, counters


def _small(spec: Kernel) -> Kernel:
    """The kernel for ``small_heads``: heads are constants of its addresses and change no instruction of the loop."""
    ratio = spec.num_heads // spec.num_key_heads
    key_heads = -(-4 // ratio)
    return replace(spec, num_heads=ratio * key_heads, num_key_heads=key_heads)


def _steady(problem: Problem) -> Problem:
    """The call that is traced in place of ``problem``: what its grid adds to one sequence of full chunks is arithmetic
    (``cycles_on``), so calls that differ in nothing else share their traces."""
    return replace(small_heads(problem), compute_units=1, num_seqs=1, total_chunks=CHUNKS, max_seq_chunks=CHUNKS)


# ------------------------------------------------------------------------------------------------ counting


@functools.cache
def unit_of(spec: Kernel, problem: Problem) -> Unit:
    """The steady work of a workgroup of ``spec``, counted on the emulator with every check on; ``problem`` has its
    heads and types. Once for each pair in a process. Raises what compiling it raises, and AssertionError where a check
    fails."""
    if isinstance(spec, FusedPrepareSpec | TPrepareSpec):
        trace = _trace(spec, problem, CHUNKS, (CHUNKS // 2, 0, 0))
        return Unit(_beside(trace), _counters(trace))
    longer, shorter = (_trace(spec, problem, chunks, (0, 1, 0)) for chunks in (CHUNKS, LESS))
    steady = CHUNKS - LESS
    pairs = zip(_beside(longer), _beside(shorter), strict=True)
    before = _counters(shorter)
    classes = {name: (value - before[name]) / steady for name, value in _counters(longer).items() if name in CLASSES}
    return Unit(tuple((a - b) / steady for a, b in pairs), {**_counters(longer), **classes})


def _trace(spec: Kernel, problem: Problem, chunks: int, group: tuple[int, int, int]) -> Any:
    """The trace of one workgroup over one sequence of ``chunks`` full chunks."""
    one = replace(problem, num_seqs=1, total_chunks=chunks, max_seq_chunks=chunks)
    batch = None if one.is_varlen else 1
    case = Case(
        "model", "model", one.num_heads, one.num_key_heads, (64 * chunks,), batch, final_state=one.store_final_state,
        state_dtype="bf16" if one.state_dtype == "bf16" else "fp32",
    )  # fmt: skip
    launcher = TracingLauncher(spec.arch, group)
    workload = GdnWorkload("block", case, one, CodeObjectStages(lambda *_: launcher), torch.device("cpu"))
    for holder in (workload, workload.x):
        for name, value in list(vars(holder).items()):
            if isinstance(value, Tensor):
                object.__setattr__(holder, name, _aligned(value))
    specs = Specs(prepare=spec) if isinstance(spec, FusedPrepareSpec | TPrepareSpec) else Specs(state_scan=spec)
    with env.override(jit=True):
        workload.run(specs, {name: _aligned(value) for name, value in workload.outputs().items()})
        kernel = launcher.kernel(spec)
    assert isinstance(kernel, TracedKernel)
    return kernel.trace


def _aligned(x: Tensor) -> Tensor:
    """A copy at a multiple of ``LINE``, as a GPU's allocator gives."""
    raw = torch.zeros(x.numel() + LINE // x.element_size(), dtype=x.dtype)
    skip = -raw.data_ptr() % LINE // x.element_size()
    return raw[skip : skip + x.numel()].view(x.shape).copy_(torch.nan_to_num(x.float()).to(x.dtype))


def _beside(trace: Any) -> tuple[float, ...]:
    parameters = DEFAULTS[trace.resources.arch]
    fit = max(1, trace.resources.groups_per_cu)
    return tuple(float(cdna_emu.simulate(trace, parameters, groups=groups).cycles) for groups in range(1, fit + 1))


def _counters(trace: Any) -> dict[str, float]:
    held = trace.resources
    classes = {name: float(trace.counters[name]) for name in CLASSES}
    resources = {"vgprs": held.vgprs + held.agprs, "lds_bytes": held.lds_bytes, "groups_per_cu": held.groups_per_cu}
    return {**classes, "mfma_cycles": float(trace.counters.mfma_cycles), **resources}
