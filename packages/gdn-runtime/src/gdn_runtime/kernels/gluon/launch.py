"""Compiles the kernels of the fast path once per spec and device, and launches them with nothing left to specialise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ...spec import CHUNK, HEAD_DIM
from ..triton.common import TRITON_DTYPE, CompileJob
from .inverse import inverse_kernel
from .prepare import prepare_kernel
from .scan import ROWS, scan_kernel
from .segments import combine_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...spec import FastPrefillSpec

ROW_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
SQUARE_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
GATE_TILE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)

TARGET = GPUTarget("cuda", 90, 32)
WARPS = 4
COMBINE_ROWS, COMBINE_WARPS = 16, 8


class Tiles(NamedTuple):
    """What the launcher makes a tensor map of: a tensor, its shape and strides in elements, for a compiled tile."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"


class Kernel:
    """One compiled kernel, loaded on the current device."""

    def __init__(
        self, fn: Any, types: Mapping[str, str], constants: Mapping[str, Any], *, num_warps: int = WARPS, **options: Any
    ) -> None:
        job = CompileJob.of(fn, types, constants, num_warps, options.get("num_stages", 1))
        source = (GluonASTSource if fn.is_gluon() else ASTSource)(
            fn=fn,
            signature=job.signature,
            constexprs={(fn.arg_names.index(name),): value for name, value in job.constants.items()},
            attrs={(position,): [["tt.divisibility", 16]] for position in job.aligned},
        )
        self._compiled = compile(source, target=TARGET, options={"num_warps": num_warps, **options})
        self._compiled._init_handles()
        self._constants = tuple(job.constants[name] for name, kind in job.signature.items() if kind == "constexpr")

    def __call__(self, programs: int, stream: int, *args: Any) -> None:
        """Launch ``programs`` programs; ``args`` in the order of the kernel, without its constants."""
        kernel, hooks = self._compiled, knobs.runtime
        kernel.run(
            programs,
            1,
            1,
            stream,
            kernel.function,
            kernel.packed_metadata,
            kernel.launch_metadata((programs, 1, 1), stream, *args),
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *args,
            *self._constants,
        )


class Kernels(NamedTuple):
    """The kernels of one spec. ``transfer`` and ``combine`` are None without segments."""

    prepare: Kernel
    scan: Kernel
    transfer: Kernel | None
    combine: Kernel | None


def load(spec: FastPrefillSpec, *, states_on_16_bytes: bool, index_type: str) -> Kernels:
    """Compile the kernels of ``spec`` for the current device; ``states_on_16_bytes``: so are states and their slots.
    Raises UnsupportedError as ``spec.check``."""
    spec.check()
    data, state = TRITON_DTYPE[spec.dtype], TRITON_DTYPE[spec.state_dtype]
    table = "*i32" if spec.is_varlen else "*fp32"

    def rows(columns: int) -> str:
        return f"tensordesc<{data}[1, 1, {CHUNK}, 1, {columns}],{ROW_TILE!r}>"

    square = f"tensordesc<{data}[{CHUNK}, {CHUNK}],{SQUARE_TILE!r}>"
    types = {"q_desc": rows(HEAD_DIM), "k_desc": rows(HEAD_DIM), "v_desc": rows(ROWS.value), "o_desc": rows(ROWS.value)}
    types |= {"t_desc": square, "p_desc": square, "g_desc": f"tensordesc<fp32[{CHUNK}],{GATE_TILE!r}>"}
    types |= dict.fromkeys(("q", "k", "t_out", "p_out"), f"*{data}")
    types |= dict.fromkeys(("g", "g_out", "maps", "starts"), "*fp32")
    types |= {"beta": f"*{TRITON_DTYPE[spec.beta_dtype]}"}
    types |= dict.fromkeys(("cu_seqlens", "chunk_offsets", "sequence_ids", "chunk_ids"), table)
    types |= {"initial_state": f"*{state}" if spec.use_initial_state else "*fp32"}
    types |= {"final_state": f"*{state}" if spec.store_final_state else "*fp32"}
    types |= {"state_indices": index_type if spec.use_state_indices else "*fp32"}
    types |= {"has_initial_state": "*i1" if spec.use_state_mask else "*fp32"}
    constants = {
        "H": spec.num_heads,
        "HG": spec.num_key_heads,
        "HEADS": spec.heads_per_program,
        "ROWS": COMBINE_ROWS,
        "IS_VARLEN": spec.is_varlen,
        "STATE_UNIT": 8 if states_on_16_bytes else 1,
        "USE_INITIAL_STATE": spec.use_initial_state,
        "STORE_FINAL_STATE": spec.store_final_state,
        "USE_INDICES": spec.use_state_indices,
        "USE_STATE_MASK": spec.use_state_mask,
        "SEGMENT": spec.segment_chunks,
        "TRANSFER": False,
        "FORM_P": spec.p_in_scan,
    }
    if spec.p_in_scan:
        prepare = Kernel(inverse_kernel, types, constants)
    else:
        # 128 registers let a 4th program onto an SM.
        prepare = Kernel(prepare_kernel, types, constants, num_stages=1, maxnreg=128)
    if spec.segment_chunks == 0:
        return Kernels(prepare, Kernel(scan_kernel, types, constants), None, None)
    inner = types | {"initial_state": "*fp32"}
    states = {"USE_INITIAL_STATE": True, "USE_STATE_MASK": False}
    scan = Kernel(scan_kernel, inner, constants | states)
    none = {"USE_INITIAL_STATE": False, "USE_STATE_MASK": False, "USE_INDICES": False, "STORE_FINAL_STATE": True}
    transfer_types = inner | {"final_state": "*fp32", "state_indices": "*fp32", "has_initial_state": "*fp32"}
    transfer = Kernel(
        scan_kernel, transfer_types, constants | none | {"STATE_UNIT": 8, "TRANSFER": True, "FORM_P": False}
    )
    combine = Kernel(combine_kernel, types, constants, num_warps=COMBINE_WARPS)
    return Kernels(prepare, scan, transfer, combine)
