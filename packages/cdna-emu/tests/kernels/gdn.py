"""The GDN kernels of gdn-runtime on the emulator: its own launch wrappers run, with the launch itself replaced.

A wrapper calls ``kernel[grid](*args, **constants)``; here ``kernel`` compiles the code object that ``compile_jobs``
names for those types, packs the same arguments and gives them to ``cdna_emu.launch``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gdn_runtime import reference
from gdn_runtime.kernels.triton import backend, l2norm, output, prepare, state_scan
from gdn_runtime.kernels.triton.common import CompileJob
from gdn_runtime.metadata import schedule_for
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.spec import OutputConfig, PrepareConfig, StateScanConfig
from gdn_testing import problem_of, triton_specs

from .compiled import Compiled, compile_kernel
from .triton_cases import NULL_SCRATCH

TRITON_TYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.bool: "i1",
}
KERNELS = (
    (l2norm, "l2norm_kernel"),
    (prepare, "prepare_fused_kernel"),
    (prepare, "prepare_inverse_kernel"),
    (prepare, "prepare_wy_kernel"),
    (state_scan, "state_scan_kernel"),
    (output, "output_kernel"),
)


@dataclass
class Launched:
    """One launch that was run: what was compiled, how it was launched, what the emulator says."""

    compiled: Compiled
    grid: tuple[int, int, int]
    args: list[Any]
    result: Any


@dataclass
class Device:
    """Emulated launches of one architecture. ``small`` marks every pointer as reaching less than 2 GiB, as a launch on
    hardware does for tensors of that size: loads and stores then go through buffer resources. ``options`` go to
    ``cdna_emu.launch``; ``code`` stands in for the code object of every launch."""

    arch: str
    small: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    code: bytes | None = None
    launches: list[Launched] = field(default_factory=list)

    def launch(self, job: CompileJob, grid: tuple[int, int, int], args: list[Any]) -> None:
        import cdna_emu

        compiled = compile_job(job, self.arch, small=self.small)
        args = [*args, *NULL_SCRATCH]
        result = cdna_emu.launch(
            compiled.elf if self.code is None else self.code,
            kernel=compiled.name,
            grid=grid,
            block=(compiled.threads, 1, 1),
            args=args,
            dynamic_lds=compiled.dynamic_lds,
            **self.options,
        )
        self.launches.append(Launched(compiled, grid, args, result))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this is open, the launch wrappers of gdn-runtime launch here."""
        patches = [mock.patch.object(module, name, _Kernel(getattr(module, name), self)) for module, name in KERNELS]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def compile_job(job: CompileJob, arch: str, *, small: bool = False) -> Compiled:
    """The code object of a job of gdn-runtime."""
    signature = {name: kind for name, kind in job.signature.items() if kind != "constexpr"}
    pointers = tuple(k for k, kind in enumerate(job.signature.values()) if kind.startswith("*"))
    return compile_kernel(
        job.fn,
        arch,
        signature,
        job.constants,
        aligned=job.aligned,
        small=pointers if small else (),
        num_warps=job.num_warps,
        num_stages=job.num_stages,
    )


class _Kernel:
    """Stands in for a Triton function: ``kernel[grid](...)``."""

    def __init__(self, fn: Any, device: Device) -> None:
        self.fn, self.device = fn, device

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
            bound = inspect.signature(self.fn.fn).bind(*args, **constants)
            values = {p.name: bound.arguments[p.name] for p in self.fn.params if not p.is_constexpr}
            types = {name: _type_of(value) for name, value in values.items()}
            job = CompileJob.of(self.fn, types, constants, num_warps, num_stages)
            self.device.launch(job, (*grid, *(1,) * (3 - len(grid))), list(values.values()))

        return launch


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TRITON_TYPE[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@dataclass(frozen=True)
class Configs:
    """Launch configurations of the stages."""

    prepare: PrepareConfig
    state_scan: StateScanConfig
    output: OutputConfig


CONFIGS = Configs(PrepareConfig("fused", 4, 1), StateScanConfig(32, 4, 1), OutputConfig(64, 4, 1))


def run_block(
    device: Device, inputs: Any, *, use_qk_l2norm: bool = False, configs: Configs = CONFIGS
) -> tuple[Tensor, Tensor]:
    """K1..K6 of a varlen or dense call on the emulator: o [B, T, H, 128] and final states [N, H, 128, 128] fp32.

    Workspaces start as NaN, so that a value nobody wrote shows."""
    q, k, v, g, beta = inputs.tensors
    batch, seq_len, num_heads = v.shape[:3]
    if inputs.cu_seqlens is None:
        plan = ChunkPlan.dense(batch, seq_len)
        chunks = plan.max_seq_chunks
    else:
        schedule = schedule_for(inputs.cu_seqlens, total_tokens=inputs.num_tokens, num_decodes=0, num_decode_tokens=0)
        plan = ChunkPlan.varlen(schedule, seq_len)
        chunks = plan.total_chunks
    nan = float("nan")
    o = torch.zeros_like(v)
    final_state = torch.full((plan.num_seqs, num_heads, 128, 128), nan)
    w, u = (torch.full((batch, num_heads, seq_len, 128), nan, dtype=v.dtype) for _ in range(2))
    g_cumsum = torch.full((batch, num_heads, seq_len), nan)
    h = torch.full((batch, chunks, num_heads, 128, 128), nan, dtype=v.dtype)
    specs = triton_specs(
        problem_of(inputs, arch=device.arch),
        prepare=configs.prepare,
        state_scan=configs.state_scan,
        output=configs.output,
    )
    with device.installed():
        if use_qk_l2norm:
            q_out, k_out = torch.empty_like(q), torch.empty_like(k)
            backend.l2norm(q, k, q_out=q_out, k_out=k_out, spec=specs.l2norm)
            q, k = q_out, k_out
        backend.prepare(k, v, g, beta, w=w, u=u, g_cumsum=g_cumsum, plan=plan, use_exp2=True, spec=specs.prepare)
        backend.state_scan(
            k,
            w,
            u,
            g=g_cumsum,
            gk=None,
            h=h,
            v_new=u,
            initial_state=inputs.initial_state,
            final_state=final_state,
            state_indices=None,
            has_initial_state=None,
            plan=plan,
            use_exp2=True,
            g_head_major=True,
            spec=specs.state_scan,
        )
        scale = v.shape[3] ** -0.5
        backend.output(q, k, u, h, g_cumsum, o=o, scale=scale, plan=plan, use_exp2=True, spec=specs.output)
    return o, final_state


def run_state_scan(device: Device, inputs: Any, config: StateScanConfig = CONFIGS.state_scan) -> list[Tensor]:
    """K5 alone, on w, u and gates of the reference: its outputs v_new, h and the final states."""
    k, v = inputs.k, inputs.v
    batch, seq_len, num_heads = v.shape[:3]
    schedule = schedule_for(inputs.cu_seqlens, total_tokens=inputs.num_tokens, num_decodes=0, num_decode_tokens=0)
    plan = ChunkPlan.varlen(schedule, seq_len)
    w, u, v_new = (torch.zeros(batch, num_heads, seq_len, 128, dtype=v.dtype) for _ in range(3))
    g_cumsum = torch.zeros(batch, num_heads, seq_len)
    reference.prepare(k, v, inputs.g, inputs.beta, w=w, u=u, g_cumsum=g_cumsum, plan=plan, use_exp2=True)
    h = torch.zeros(1, plan.total_chunks, num_heads, 128, 128, dtype=v.dtype)
    final_state = torch.zeros(plan.num_seqs, num_heads, 128, 128)
    with device.installed():
        backend.state_scan(
            k,
            w,
            u,
            g=g_cumsum,
            gk=None,
            h=h,
            v_new=v_new,
            initial_state=inputs.initial_state,
            final_state=final_state,
            state_indices=None,
            has_initial_state=None,
            plan=plan,
            use_exp2=True,
            g_head_major=True,
            spec=triton_specs(problem_of(inputs, arch=device.arch), state_scan=config).state_scan,
        )
    return [v_new, h, final_state]
