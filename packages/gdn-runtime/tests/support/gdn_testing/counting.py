"""What one steady chunk of a kernel executes on the emulator, and what the timing model makes of it.

The workload is that of the public kernel's figures (``public_kernel``): one packed sequence of 2048 tokens, H = 32
value heads, Hg = 16 key heads, initial and final states, gates in log2 units. One workgroup is traced (value head 5,
the first tile of V), with every check on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

import cdna_emu
from cdna_emu.counters import SIMDS_PER_CU, Resources
from cdna_emu.model import DEFAULTS
from gdn_runtime import env
from gdn_runtime.codeobject.stages.kernels import Kernels
from gdn_runtime.codeobject.stages.prepare import prepare, prepare_t
from gdn_runtime.codeobject.stages.state_scan import state_scan
from gdn_runtime.codeobject.stages.state_scan_vsplit import state_scan_vsplit
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.rules import opt_rounding
from gdn_runtime.spec import (
    T_ELEMENTS,
    FusedPrepareSpec,
    OptStateScanSpec,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from gdn_runtime.testing.tracing import TracedKernel, TracingLauncher

from .scans import TORCH, ScanSpec

TOKENS, VALUE_HEADS, KEY_HEADS, VALUE_HEAD = 2048, 32, 16, 5
PAIR = 2
"""Chunks between the two launches whose difference is taken: a loop may be unrolled by two."""
WAVES = 4
SLOW_MEMORY = 1500
"""Memory latency, in cycles, of the second run of the model."""

LINE = 128
TENSORS = {"load": ("k", "w", "u", "g", "gk", "v", "beta", "t"), "store": ("v_new", "h", "w", "u", "g_cumsum", "t")}
CLASSES = {
    "VALU": ("valu",),
    "SALU": ("salu",),
    "MFMA": ("mfma",),
    "LDS read": ("lds_read", "lds_lanes"),
    "LDS write": ("lds_write", "lds_atomic"),
    "load": ("vmem_load",),
    "store": ("vmem_store",),
    "scalar load": ("smem",),
    "barrier": ("barrier",),
    "wait": ("wait",),
    "s_nop": ("other",),
    "branch": ("branch",),
}
"""Columns of the tables, of the emulator's classes."""

Kernel: TypeAlias = ScanSpec | VSplitScanSpec | FusedPrepareSpec | TPrepareSpec


@dataclass(frozen=True)
class Requests:
    """Accesses to one tensor: wave-instructions, requests by line size, and the fewest that were possible.

    ``tile64`` and ``tile128`` are the distinct lines that hold what was accessed; ``bytes`` are distinct too.
    """

    instructions: float
    lines64: float
    lines128: float
    tile64: float
    tile128: float
    bytes: float


@dataclass(frozen=True)
class Counts:
    """One workgroup and steady chunk (K5), or one workgroup (prepare).

    Attributes:
        classes: wave-instructions by the names of ``CLASSES``.
        matrix_cycles: of the mean SIMD. matrix32: MFMA of the form 16x16x32.
        lds_read, lds_write: LDS cycles, and the fewest.
        requests: by tensor and kind.
        cycles: by the model with one workgroup on a compute unit; ``slow`` with a memory latency of 1500 cycles;
            ``full`` with as many as fit (``resources.groups_per_cu``), of all of them together.
        where: cycles of the mean wave by reason.
        exec_branches: branches on the EXEC mask. longest_wave: wave-instructions.
    """

    classes: dict[str, float]
    matrix_cycles: float
    matrix32: float
    lds_read: tuple[float, float]
    lds_write: tuple[float, float]
    requests: dict[str, Requests]
    cycles: float
    slow: float
    full: float
    where: dict[str, float]
    exec_branches: float
    longest_wave: float
    resources: Resources

    @property
    def instructions(self) -> float:
        """Wave-instructions."""
        return sum(self.classes.values())

    @property
    def lds_cycles(self) -> float:
        """LDS cycles of reads and writes."""
        return self.lds_read[0] + self.lds_write[0]


def opt_spec(arch: str, block_v: int, snapshot: str, *, g_head_major: bool = True) -> OptStateScanSpec:
    """K5 `opt` of the workload, as the block selects it."""
    return OptStateScanSpec(
        arch=arch,
        block_v=block_v,
        g_head_major=g_head_major,
        use_state_indices=False,
        snapshot_dtype="bf16" if snapshot == "bf16" else "fp32",
        rounding=opt_rounding(arch, block=True),
        sched_barrier=arch == "gfx942",
        **_COMMON,
    )


def vk_spec(block_v: int) -> VkStateScanSpec:
    """K5 `vk` of the workload."""
    return VkStateScanSpec(arch="gfx950", block_v=block_v, **_COMMON)


_COMMON: dict[str, Any] = {
    "num_heads": VALUE_HEADS,
    "num_key_heads": KEY_HEADS,
    "is_varlen": True,
    "use_g": True,
    "use_gk": False,
    "use_exp2": True,
    "use_initial_state": True,
    "store_final_state": True,
    "save_new_value": True,
    "state_dtype": "fp32",
}


def prepare_spec(arch: str, variant: str) -> FusedPrepareSpec:
    """Fused prepare of the workload; beta in fp32."""
    kind = "wave" if variant == "wave" else "group"
    return FusedPrepareSpec(arch, kind, VALUE_HEADS, KEY_HEADS, True, True, "fp32")


def prepare_t_spec(arch: str) -> TPrepareSpec:
    """Prepare up to T' of the workload; beta in fp32."""
    return TPrepareSpec(arch, VALUE_HEADS, KEY_HEADS, True, True, "fp32")


def vsplit_spec(arch: str, block_v: int, snapshot: str) -> VSplitScanSpec:
    """The V-split K5 of the workload, as the block selects it."""
    return VSplitScanSpec(
        arch=arch,
        block_v=block_v,
        num_heads=VALUE_HEADS,
        num_key_heads=KEY_HEADS,
        is_varlen=True,
        use_exp2=True,
        use_initial_state=True,
        store_final_state=True,
        use_state_indices=False,
        state_dtype="fp32",
        snapshot_dtype="bf16" if snapshot == "bf16" else "fp32",
        rounding=opt_rounding(arch, block=True),
    )


def aligned(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros at an address that is a multiple of ``LINE``, as a GPU's allocator gives."""
    count = int(np.prod(size))
    raw = torch.zeros(count + LINE, dtype=dtype)
    skip = -raw.data_ptr() % LINE // raw.element_size()
    return raw[skip : skip + count].view(size)


def _random(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = aligned(*size, dtype=dtype)
    out.copy_(torch.randn(size, generator=torch.Generator().manual_seed(len(size) + size[1])) * scale)
    return out


def _plan(tokens: int) -> ChunkPlan:
    chunks = tokens // 64

    def table(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return ChunkPlan(
        is_varlen=True,
        num_seqs=1,
        seq_len=tokens,
        num_tokens=tokens,
        total_chunks=chunks,
        max_seq_chunks=chunks,
        cu_seqlens=table([0, tokens]),
        chunk_offsets=table([0, chunks]),
        sequence_ids=table([0] * chunks),
        chunk_ids=table(range(chunks)),
    )


@functools.cache
def _inputs(tokens: int) -> dict[str, Tensor]:
    heads = VALUE_HEADS
    k = _random(1, tokens, KEY_HEADS, 128)
    k /= k.float().norm(dim=-1, keepdim=True).to(k.dtype)
    gates = torch.rand(1, heads, tokens, generator=torch.Generator().manual_seed(3)) * -0.01
    g = aligned(1, heads, tokens)
    g.copy_(gates.view(1, heads, -1, 64).cumsum(-1).view_as(g))
    return {"k": k, "w": _random(1, heads, tokens, 128, scale=0.1), "u": _random(1, heads, tokens, 128), "g": g}


def _kernels(spec: Kernel, group: Sequence[int]) -> tuple[Kernels, TracedKernel]:
    launcher = TracingLauncher(spec.arch, group)
    with env.override(jit=True):
        kernel = launcher.kernel(spec)
    assert isinstance(kernel, TracedKernel)
    return Kernels(lambda *_: launcher), kernel


def trace_scan(spec: ScanSpec, tokens: int) -> TracedKernel:
    """The traced workgroup of K5 over one sequence of ``tokens``, a multiple of 64."""
    kernels, traced = _kernels(spec, (0, VALUE_HEAD, 0))
    inputs = _inputs(tokens)
    head_major = isinstance(spec, OptStateScanSpec) and spec.g_head_major
    g = inputs["g"]
    if not head_major:
        g = aligned(1, tokens, VALUE_HEADS)
        g.copy_(inputs["g"].transpose(1, 2))
    state = (1, VALUE_HEADS, 128, 128)
    snapshot = TORCH[getattr(spec, "snapshot_dtype", "bf16")]
    state_scan(
        kernels,
        inputs["k"],
        inputs["w"],
        inputs["u"],
        g=g,
        gk=None,
        h=aligned(1, tokens // 64, VALUE_HEADS, 128, 128, dtype=snapshot),
        v_new=aligned(1, VALUE_HEADS, tokens, 128, dtype=torch.bfloat16),
        initial_state=aligned(*state),
        final_state=aligned(*state),
        state_indices=None,
        has_initial_state=None,
        plan=_plan(tokens),
        use_exp2=True,
        g_head_major=head_major,
        spec=spec,
    )
    return traced


def trace_vsplit(spec: VSplitScanSpec, tokens: int) -> TracedKernel:
    """The traced workgroup of the V-split K5 over one sequence of ``tokens``, a multiple of 64."""
    kernels, traced = _kernels(spec, (0, VALUE_HEAD, 0))
    inputs = _inputs(tokens)
    state = (1, VALUE_HEADS, 128, 128)
    state_scan_vsplit(
        kernels,
        inputs["k"],
        _random(1, tokens, VALUE_HEADS, 128),
        _random(tokens // 64, VALUE_HEADS, T_ELEMENTS, scale=0.1),
        g=inputs["g"],
        h=aligned(1, tokens // 64, VALUE_HEADS, 128, 128, dtype=TORCH[spec.snapshot_dtype]),
        v_new=aligned(1, VALUE_HEADS, tokens, 128, dtype=torch.bfloat16),
        initial_state=aligned(*state),
        final_state=aligned(*state),
        state_indices=None,
        has_initial_state=None,
        plan=_plan(tokens),
        use_exp2=True,
        spec=spec,
    )
    return traced


def trace_prepare(spec: FusedPrepareSpec | TPrepareSpec, *, g_head_major: bool = False) -> TracedKernel:
    """A traced workgroup of a fused prepare, in the middle of the sequence: four heads of a chunk, or one ("group")."""
    heads = VALUE_HEAD if getattr(spec, "variant", "wave") == "group" else VALUE_HEAD // WAVES
    kernels, traced = _kernels(spec, (TOKENS // 128, heads, 0))
    inputs = _inputs(TOKENS)
    g, beta = aligned(1, VALUE_HEADS, TOKENS), aligned(1, VALUE_HEADS, TOKENS)
    g.fill_(-0.01)
    beta.copy_(torch.rand(beta.shape, generator=torch.Generator().manual_seed(4)))
    if g_head_major:
        g, beta = g.transpose(1, 2), beta.transpose(1, 2)
    else:
        token_major = (1, TOKENS, VALUE_HEADS)
        g, beta = (aligned(*token_major).copy_(x.transpose(1, 2)) for x in (g, beta))
    size = (1, VALUE_HEADS, TOKENS, 128)
    sums, plan = aligned(*size[:3]), _plan(TOKENS)
    if isinstance(spec, TPrepareSpec):
        t = aligned(TOKENS // 64, VALUE_HEADS, T_ELEMENTS, dtype=torch.bfloat16)
        prepare_t(kernels, inputs["k"], g, beta, t=t, g_cumsum=sums, plan=plan, use_exp2=True, spec=spec)
        return traced
    prepare(
        kernels,
        inputs["k"],
        _random(1, TOKENS, VALUE_HEADS, 128),
        g,
        beta,
        w=aligned(*size, dtype=torch.bfloat16),
        u=aligned(*size, dtype=torch.bfloat16),
        g_cumsum=sums,
        plan=plan,
        use_exp2=True,
        spec=spec,
    )
    return traced


def _requests(kernel: TracedKernel) -> dict[str, Requests]:
    trace = kernel.trace
    events = trace.events[trace.events["access"] > 0]
    kinds = np.array([kind_of(i.mnemonic) for i in trace.instructions])[events["insn"]]
    which = events["access"].astype(np.intp) - 1
    lanes = trace.accesses["address"][which]
    on = (trace.accesses["mask"][which][:, None] & cdna_emu.trace.LANE) != 0
    first = lanes[np.arange(len(which)), on.argmax(axis=1)]
    lines = {size: trace.lines(size) for size in (64, 128)}
    found = {}
    for kind, names in TENSORS.items():
        for name in names:
            start, end = kernel.spans.get(name, (0, 0))
            mine = which[(kinds == kind) & (first >= start) & (first < end)]
            if len(mine):
                found[f"{name} {kind}"] = Requests(
                    len(mine),
                    int(lines[64][mine].sum()),
                    int(lines[128][mine].sum()),
                    trace.distinct_lines(mine, 64),
                    trace.distinct_lines(mine, 128),
                    trace.unique_bytes(mine),
                )
    return found


def kind_of(mnemonic: str) -> str:
    """ "load" or "store" of a vector memory instruction, else ""."""
    kind = cdna_emu.counters.class_of(mnemonic)
    return {"vmem_load": "load", "vmem_store": "store"}.get(kind, "")


@functools.cache
def count_prepare(spec: FusedPrepareSpec | TPrepareSpec, *, g_head_major: bool = False) -> Counts:
    """Counts of one workgroup of a fused prepare."""
    return _counts(trace_prepare(spec, g_head_major=g_head_major))


@functools.cache
def count_scan(spec: ScanSpec | VSplitScanSpec) -> Counts:
    """Counts of one workgroup of K5 and a steady chunk: the difference of launches of 2048 tokens and of two chunks
    less, halved."""
    longer, shorter = (
        _counts(trace_vsplit(spec, tokens) if isinstance(spec, VSplitScanSpec) else trace_scan(spec, tokens))
        for tokens in (TOKENS, TOKENS - 64 * PAIR)
    )

    def per_chunk(a: float, b: float) -> float:
        return (a - b) / PAIR

    def per_chunk_each(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
        return {name: per_chunk(value, b[name]) for name, value in a.items()}

    def requests(name: str) -> Requests:
        a, b = longer.requests[name], shorter.requests[name]
        return Requests(**per_chunk_each(vars(a), vars(b)))

    def pair(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
        return per_chunk(a[0], b[0]), per_chunk(a[1], b[1])

    names = ("matrix_cycles", "matrix32", "cycles", "slow", "full", "exec_branches", "longest_wave")
    return replace(
        longer,
        classes=per_chunk_each(longer.classes, shorter.classes),
        lds_read=pair(longer.lds_read, shorter.lds_read),
        lds_write=pair(longer.lds_write, shorter.lds_write),
        requests={name: requests(name) for name in longer.requests},
        where=per_chunk_each(longer.where, shorter.where),
        **{name: per_chunk(getattr(longer, name), getattr(shorter, name)) for name in names},
    )


def _counts(kernel: TracedKernel) -> Counts:
    trace = kernel.trace
    counters = trace.counters
    parameters = DEFAULTS[trace.resources.arch]
    slow = replace(parameters, memory_latency=SLOW_MEMORY, store_latency=SLOW_MEMORY)
    alone = cdna_emu.simulate(trace, parameters)
    fit = max(1, trace.resources.groups_per_cu)

    def lds(kinds: Sequence[str]) -> tuple[float, float]:
        lines = [line for line in counters.lines if line.kind in kinds]
        return float(sum(line.lds_cycles for line in lines)), float(sum(line.lds_cycles_min for line in lines))

    return Counts(
        classes={name: float(sum(counters[kind] for kind in kinds)) for name, kinds in CLASSES.items()},
        matrix_cycles=counters.mfma_cycles / SIMDS_PER_CU,
        matrix32=float(sum(line.executed for line in counters.lines if "mfma_f32_16x16x32" in line.text)),
        lds_read=lds(CLASSES["LDS read"]),
        lds_write=lds(CLASSES["LDS write"]),
        requests=_requests(kernel),
        cycles=alone.cycles,
        slow=cdna_emu.simulate(trace, slow).cycles,
        full=cdna_emu.simulate(trace, parameters, groups=fit).cycles,
        where=dict(alone.wave),
        exec_branches=float(sum(line.executed for line in counters.lines if "cbranch_exec" in line.text)),
        longest_wave=float(np.bincount(trace.events["wave"]).max()),
        resources=trace.resources,
    )
