"""Run a K5 code object on the emulator, on poisoned outputs, without the product's own dispatch."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gdn_runtime import env, reference
from gdn_runtime.codeobject import CodeObject, code_object
from gdn_runtime.codeobject.emulate import EmulatorLauncher, collect_results
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.spec import LOG2E, OptStateScanSpec, VkStateScanSpec, VSplitScanSpec
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, assert_close_rel, make_inputs

from .poison import poisoned
from .stages import plan_for, snapshots_for
from .tprime import exact_t, packed, unpacked

ScanSpec: TypeAlias = OptStateScanSpec | VkStateScanSpec | VSplitScanSpec
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}
ORDERS = ("forward", "reverse", "random")


@dataclass(frozen=True)
class ScanProblem:
    """Arguments of K5: w, u [B, H, T, 128] and the cumulative gate [B, H, T] as K1..K4 of the reference make them.

    ``g`` is in log2 units iff ``use_exp2``, None without gates; ``gk`` [B, T, H, K] natural log or None. Rows outside
    the sequences are NaN in all of them. ``t``: T' as the V-split K5 reads it, [chunks, H, T_ELEMENTS], with v of
    ``inputs`` in place of w and u; None for the other kernels.
    """

    inputs: GdnInputs
    plan: ChunkPlan
    w: Tensor
    u: Tensor
    g: Tensor | None
    gk: Tensor | None
    use_exp2: bool
    t: Tensor | None = None

    def value(self, batch: int, rows: slice, chunk: int, state: Tensor) -> Tensor:
        """u - w S^T or T' bf16(v - exp(G) k S^T) of a chunk, [H, tokens, V]. ``state``: [H, V, K], of bf16 numbers."""
        if self.t is None:
            return self.u[batch, :, rows].float() - self.w[batch, :, rows].float() @ state.transpose(1, 2)
        group = self.inputs.num_heads // self.inputs.num_key_heads
        k = self.inputs.k[batch, rows].float().transpose(0, 1).repeat_interleave(group, 0)
        v = self.inputs.v[batch, rows].float().transpose(0, 1)
        assert self.g is not None
        gates = self.decay(self.g[batch, :, rows, None])
        x = v - gates * (k @ state.transpose(1, 2))
        tokens = x.shape[1]
        return unpacked(self.t[chunk])[:, :tokens, :tokens].float() @ x.bfloat16().float()

    def decay(self, gate: Tensor) -> Tensor:
        """exp of a gate in the units of ``g``."""
        return torch.exp(gate / LOG2E if self.use_exp2 else gate)

    @property
    def initial_state(self) -> Tensor | None:
        """[N, H, V, K] or None."""
        return self.inputs.initial_state


@dataclass
class ScanResult:
    """What K5 wrote; ``counters`` and ``registers`` are the emulator's (None for the reference)."""

    h: Tensor
    v_new: Tensor | None
    final_state: Tensor | None
    emulated: Any = None


def scan_problem(
    shape: Sequence[int],
    num_heads: int = 2,
    num_key_heads: int = 1,
    *,
    use_g: bool = True,
    use_gk: bool = False,
    use_exp2: bool = True,
    **options: Any,
) -> ScanProblem:
    """A problem of ``make_inputs(shape, ...)``; the weak gate, about -0.01 a token, unless ``options`` say another."""
    options = {"gate": "weak" if use_g else "zero", "spare_rows": 2, "state": "random", **options}
    inputs = make_inputs(shape, num_heads, num_key_heads, **options)
    plan = plan_for(inputs)
    batch, tokens = inputs.k.shape[:2]
    w, u = (poisoned(batch, num_heads, tokens, 128, dtype=inputs.k.dtype) for _ in range(2))
    g = poisoned(batch, num_heads, tokens)
    reference.prepare(inputs.k, inputs.v, inputs.g, inputs.beta, w=w, u=u, g_cumsum=g, plan=plan, use_exp2=use_exp2)
    gk = None
    if use_gk:
        gk = poisoned(batch, tokens, num_heads, 128)
        gen = torch.Generator().manual_seed(7)
        gk[:, : inputs.num_tokens] = -torch.rand(gk[:, : inputs.num_tokens].shape, generator=gen)
    return ScanProblem(inputs, plan, w, u, g if use_g else None, gk, use_exp2)


def tprime_problem(shape: Sequence[int], num_heads: int = 2, num_key_heads: int = 1, **options: Any) -> ScanProblem:
    """``scan_problem`` with T' in bf16."""
    problem = scan_problem(shape, num_heads, num_key_heads, **options)
    return replace(problem, t=packed(exact_t(problem.inputs).bfloat16()))


def vsplit_spec(problem: ScanProblem, arch: str, block_v: int, **changes: Any) -> VSplitScanSpec:
    """The spec of the V-split K5 for ``problem``, with some fields changed: fp32 snapshots and states, no pool."""
    common = _common(problem, block_v)
    for name in ("use_g", "use_gk", "save_new_value"):
        del common[name]
    fields = {"use_state_indices": False, "snapshot_dtype": "fp32"}
    return VSplitScanSpec(**{**common, **fields, "arch": arch, **changes})


def vk_spec(problem: ScanProblem, block_v: int, **changes: Any) -> VkStateScanSpec:
    """The spec of vk for ``problem``, with some fields changed."""
    return VkStateScanSpec(**{**_common(problem, block_v), "arch": "gfx950", **changes})


def opt_spec(problem: ScanProblem, arch: str, block_v: int, **changes: Any) -> OptStateScanSpec:
    """The spec of opt for ``problem``, with some fields changed: head-major g, fp32 snapshots and states, no pool."""
    fields = {"g_head_major": True, "use_state_indices": False, "snapshot_dtype": "fp32"}
    return OptStateScanSpec(**{**_common(problem, block_v), **fields, "arch": arch, **changes})


def _common(problem: ScanProblem, block_v: int) -> dict[str, Any]:
    state = problem.initial_state
    return {
        "block_v": block_v,
        "num_heads": problem.inputs.num_heads,
        "num_key_heads": problem.inputs.num_key_heads,
        "is_varlen": problem.plan.is_varlen,
        "use_g": problem.g is not None,
        "use_gk": problem.gk is not None,
        "use_exp2": problem.use_exp2,
        "use_initial_state": state is not None,
        "store_final_state": True,
        "save_new_value": True,
        "state_dtype": "bf16" if state is not None and state.dtype is torch.bfloat16 else "fp32",
    }


def _head_major(spec: ScanSpec) -> bool:
    """Whether g is [B, H, T]."""
    return isinstance(spec, VSplitScanSpec) or getattr(spec, "g_head_major", False)


def scan_code(spec: ScanSpec) -> CodeObject:
    """The code object of ``spec``, compiled once per process, or per GDN_JIT_CACHE_DIR."""
    with env.override(jit=True):
        return code_object(spec)


def emulate_scan(
    spec: ScanSpec,
    problem: ScanProblem,
    *,
    order: str = "forward",
    pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    changes: Mapping[str, Any] | None = None,
) -> ScanResult:
    """Launch ``spec`` on ``problem`` with every check on; EmulatedFaultError for any finding.

    With ``pool`` [slots, H, V, K] states are read from it and written to it in place. ``changes`` replace arguments of
    the kernel by name (tensors to alias, for one).
    """
    plan, inputs = problem.plan, problem.inputs
    states = (plan.num_seqs, inputs.num_heads, 128, 128)
    snapshot = TORCH[getattr(spec, "snapshot_dtype", "bf16")]
    h = aligned(snapshots_for(inputs, plan, snapshot))
    v_new = aligned(poisoned(*problem.u.shape, dtype=problem.u.dtype)) if _saves(spec) else None
    initial = problem.initial_state if pool is None else pool
    final = None
    if spec.store_final_state:
        final = aligned(poisoned(*states, dtype=TORCH[spec.state_dtype])) if pool is None else pool
    g = problem.g
    if g is not None and not _head_major(spec):
        g = g.transpose(1, 2).contiguous()
    wu = [problem.w, problem.u]
    if not getattr(spec, "wu_head_major", True):
        wu = [x.transpose(1, 2).contiguous() for x in wu]
        v_new = None if v_new is None else v_new.transpose(1, 2).contiguous()
    values = {
        "k": inputs.k,
        "w": wu[0],
        "u": wu[1],
        "v": inputs.v,
        "t": problem.t,
        "g": g,
        "gk": problem.gk,
        "h": h if h.numel() else None,
        "v_new": v_new,
        "initial_state": initial if spec.use_initial_state else None,
        "final_state": final,
        "state_indices": state_indices,
        "has_initial_state": has_initial_state,
        "cu_seqlens": plan.cu_seqlens,
        "chunk_offsets": plan.chunk_offsets,
        "k_stride_b": inputs.k.stride(0) * inputs.k.element_size(),
        "k_stride_h": inputs.k.stride(2) * inputs.k.element_size(),
        "k_stride_t": inputs.k.stride(1) * inputs.k.element_size(),
        "v_stride_b": inputs.v.stride(0) * inputs.v.element_size(),
        "v_stride_h": inputs.v.stride(2) * inputs.v.element_size(),
        "v_stride_t": inputs.v.stride(1) * inputs.v.element_size(),
        "initial_stride": 0 if initial is None else initial.stride(0) * initial.element_size(),
        "final_stride": 0 if final is None else final.stride(0) * final.element_size(),
        "seq_len": plan.seq_len,
        "num_slots": 0 if pool is None else pool.shape[0],
        "index_bytes": 4 if state_indices is None else state_indices.element_size(),
        **(changes or {}),
    }
    args = [values[argument.name] for argument in spec.ARGUMENTS]
    kernel = EmulatorLauncher(spec.arch, order=order, threads=1).load(scan_code(spec))
    with collect_results() as results:
        kernel(spec.grid(plan.num_seqs), args)
    written = values["v_new"]
    if written is not None and not getattr(spec, "wu_head_major", True):
        written = written.transpose(1, 2)
    return ScanResult(h, written, values["final_state"], results[0])


def _saves(spec: ScanSpec) -> bool:
    return isinstance(spec, VSplitScanSpec) or spec.save_new_value


def aligned(x: Tensor) -> Tensor:
    """A contiguous copy at a multiple of 256 bytes, as memory of a GPU begins: counts of lines depend on it."""
    size = x.element_size()
    room = torch.empty(x.numel() + 256 // size, dtype=x.dtype)
    return room[-room.data_ptr() % 256 // size :][: x.numel()].view(x.shape).copy_(x)


def reserved(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros that takes addresses only: memory comes with the first touch of a page. For offsets of GBs."""
    size = torch.Size(shape).numel() * dtype.itemsize
    # Without MAP_NORESERVE (Linux, 0x4000) the system counts every page as if it came.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def far_arguments(spec: ScanSpec, problem: ScanProblem) -> tuple[dict[str, Any], int, int]:
    """Arguments that put ``problem``, one sequence without spare rows, at the end of a token and a snapshot axis, each
    more than 2^31 elements long: (``changes`` of ``emulate_scan``, its first row, its first chunk)."""
    length, heads = problem.inputs.num_tokens, problem.inputs.num_heads
    begin, chunk = 1 << 25, 70_000
    tokens = begin + length
    far: dict[str, Any] = {name: reserved(1, heads, tokens, 128, dtype=torch.bfloat16) for name in ("w", "u", "v_new")}
    snapshot = TORCH[getattr(spec, "snapshot_dtype", "bf16")]
    far["h"] = reserved(1, chunk + problem.plan.total_chunks, heads, 128, 128, dtype=snapshot)
    far["k"] = reserved(1, tokens, problem.inputs.num_key_heads, 128, dtype=torch.bfloat16)
    far["w"][:, :, begin:], far["u"][:, :, begin:], far["k"][:, begin:] = problem.w, problem.u, problem.inputs.k
    if problem.t is not None:
        far["v"] = reserved(1, tokens, heads, 128, dtype=torch.bfloat16)
        far["v"][:, begin:] = problem.inputs.v
        far["t"] = reserved(chunk + problem.plan.total_chunks, heads, problem.t.shape[2], dtype=torch.bfloat16)
        far["t"][chunk:] = problem.t
    if problem.g is not None:
        head_major = _head_major(spec)
        shape = (heads, tokens) if head_major else (tokens, heads)
        far["g"] = reserved(1, *shape, dtype=torch.float32)
        by_head = far["g"] if head_major else far["g"].transpose(1, 2)
        by_head[:, :, begin:] = problem.g
    far["chunk_offsets"] = torch.tensor([chunk], dtype=torch.int32)
    far["cu_seqlens"] = torch.tensor([begin, tokens], dtype=torch.int32)
    return {**far, "seq_len": tokens}, begin, chunk


def expected_scan(
    spec: ScanSpec,
    problem: ScanProblem,
    *,
    pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> ScanResult:
    """K5 of ``problem`` in fp32, chunk by chunk, cut to bf16 where ``spec`` says and how it says. With ``pool``, the
    final states are a copy of it in which the slots of ``state_indices`` [N] that exist are replaced."""
    plan, inputs = problem.plan, problem.inputs
    truncate = getattr(spec, "rounding", "nearest") == "truncate"
    group = inputs.num_heads // inputs.num_key_heads

    def cut(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -0x10000).view(torch.float32) if truncate else x.bfloat16().float()

    def stored(x: Tensor, dtype: str) -> Tensor:
        return x if dtype == "fp32" else cut(x).bfloat16()

    h = snapshots_for(inputs, plan, TORCH[getattr(spec, "snapshot_dtype", "bf16")])
    chunks = h.view(-1, *h.shape[2:])
    v_new = poisoned(*problem.u.shape, dtype=problem.u.dtype) if _saves(spec) else None
    source = problem.initial_state if pool is None else pool
    slots = plan.num_seqs if pool is None else pool.shape[0]
    if pool is not None:
        final = pool.clone()
    else:
        final = poisoned(plan.num_seqs, inputs.num_heads, 128, 128, dtype=TORCH[spec.state_dtype])
    chunk, begin = 0, 0
    for n, length in enumerate(inputs.seq_lens):
        slot = n if state_indices is None else int(state_indices[n])
        state = torch.zeros(inputs.num_heads, 128, 128)
        known = has_initial_state is None or bool(has_initial_state[n])
        if spec.use_initial_state and 0 <= slot < slots and known:
            state = source[slot].float()
        batch, begin = (0, begin) if plan.is_varlen else (n, 0)
        for first in range(begin, begin + length, 64):
            rows = slice(first, min(first + 64, begin + length))
            chunks[chunk] = stored(state, getattr(spec, "snapshot_dtype", "bf16"))
            value = problem.value(batch, rows, chunk, cut(state))
            chunk += 1
            if v_new is not None:
                v_new[batch, :, rows] = cut(value).bfloat16()
            if problem.g is not None:
                gates = problem.g[batch, :, rows, None]
                value = value * problem.decay(gates[:, -1:] - gates)
                state = state * problem.decay(gates[:, -1:])
            if problem.gk is not None:
                state = state * problem.gk[batch, rows.stop - 1].exp()[:, None]
            keys = inputs.k[batch, rows].float().transpose(0, 1).repeat_interleave(group, 0)
            state = state + cut(value).transpose(1, 2) @ keys
        if 0 <= slot < slots:
            final[slot] = stored(state, spec.state_dtype)
        begin += length if plan.is_varlen else 0
    return ScanResult(h, v_new, final if spec.store_final_state else None)


def assert_as_expected(
    spec: ScanSpec, problem: ScanProblem, result: ScanResult, *, tolerance: float = 1e-3, **states: Tensor | None
) -> None:
    """``result`` is that of ``expected_scan`` up to ``tolerance`` (relative L2), and rows past the last sequence are
    untouched. The tolerance is for single roundings to bf16 (4e-3) that fell the other way; measured: at most 2e-5.

    ``states``: the pool as it was, and what else ``expected_scan`` takes.
    """
    expected = expected_scan(spec, problem, **states)
    used = problem.inputs.num_tokens
    if result.h.numel():
        assert_close_rel(result.h, expected.h, tolerance, "h")
    assert (result.v_new is None) == (expected.v_new is None)
    if result.v_new is not None and expected.v_new is not None:
        assert_close_rel(result.v_new[:, :, :used], expected.v_new[:, :, :used], tolerance, "v_new")
        assert result.v_new[:, :, used:].isnan().all()
    assert (result.final_state is None) == (expected.final_state is None)
    if result.final_state is None or expected.final_state is None:
        return
    final, exact = result.final_state, expected.final_state
    if states.get("pool") is not None:
        given = [int(x) for x in states["state_indices"]]
        kept = [n for n in range(len(final)) if n not in given]
        assert_bitwise_equal(final[kept], states["pool"][kept], "slots of no sequence")
        written = [n for n in range(len(final)) if n in given]
        final, exact = final[written], exact[written]
    if final.numel():
        assert_close_rel(final, exact, tolerance, "final_state")


def without_states(problem: ScanProblem) -> ScanProblem:
    """The same problem from zero states."""
    return replace(problem, inputs=problem.inputs.with_(initial_state=None))
