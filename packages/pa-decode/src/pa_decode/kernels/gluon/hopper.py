"""FP8 paged decode at head size 256 on Hopper: compiles and launches ``attention.decode``.

``load(spec, device)`` gives ``kernel(grid, args)``: args are the values of ``AttentionSpec.ARGUMENTS`` in their order,
strides in bytes, None for absent tensors. The launch is one program a multiprocessor, however large the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from .attention import decode
from .layouts import HEAD_DIM

WARP = 32
GROUP_WARPS = 4
"""Of each of the two groups that multiply."""

STAGES = 3
"""Steps of 64 KiB in shared memory: with q and P of 32 rows what a multiprocessor has."""

MIN_ROWS = 4
"""Least rows of a group: 8 columns with both parts, what the matrix unit has at least."""

_TYPES = {"bf16": "bf16", "fp16": "fp16"}


@dataclass
class Pages:
    """What the launcher makes a tensor map of: ``shape`` rows of bytes of ``base``, contiguous."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


def group_rows(rows):
    """Rows of a group for R = ``rows``: half of them, up to a power of two."""
    return max(MIN_ROWS, 1 << ((rows + 1) // 2 - 1).bit_length())


def constants(spec):
    """The values of ``decode``'s constexprs."""
    return {
        "PAGE": spec.page_size,
        "GROUP": spec.group_size,
        "QUERY_LENGTH": spec.query_length,
        "ROWS": group_rows(spec.rows),
        "STAGES": STAGES,
        "PER_TOKEN": spec.scale_mode == "token",
        "V_PACKED": spec.v_packed,
        "WINDOWED": spec.windowed,
    }


def _page_type(block, swizzle):
    return f"tensordesc<fp8e4nv[{block[0]},{block[1]}],{gl.NVMMASharedLayout(swizzle, 8, 2)!r}>"


def source(spec):
    """The compiler's input for ``spec``."""
    values = constants(spec)
    pages = _page_type([spec.page_size, HEAD_DIM], 0)
    types = {
        "query": f"*{_TYPES[spec.query_dtype]}",
        "k_pages": pages,
        "v_pages": _page_type([HEAD_DIM, spec.page_size], spec.page_size) if _is_plain(spec) else pages,
        "block_tables": "*i32",
        "k_scale": "*fp32",
        "v_scale": "*fp32",
        "work_info": "*i32",
        "partial_out": f"*{_TYPES[spec.query_dtype]}",
        "partial_max": "*fp32",
        "partial_sum": "*fp32",
        "softmax_scale": "fp32",
    }
    wide = {argument.name for argument in spec.ARGUMENTS if argument.kind == "i64"}
    signature, aligned = {}, {}
    for position, name in enumerate(decode.arg_names):
        kind = "constexpr" if name in values else types.get(name, "i64" if name in wide else "i32")
        signature[name] = kind
        if name in ("query", "work_info", "partial_out", "partial_max", "partial_sum"):
            aligned[(position,)] = [["tt.divisibility", 16]]
    return GluonASTSource(decode, signature, values, aligned)


def _is_plain(spec):
    """Whether pages of V are [256, page]. At page 16 that is the packed form, byte for byte."""
    return not spec.v_packed and spec.page_size != 16


def compile_spec(spec):
    """The compiled kernel of ``spec``."""
    target = GPUTarget("cuda", int(spec.arch.removeprefix("sm")), WARP)
    return triton.compile(source(spec), target=target, options={"num_warps": GROUP_WARPS})


class HopperKernel:
    """The kernel of one spec on one device."""

    def __init__(self, spec, device):
        self._compiled = compile_spec(spec)
        self._compiled._init_handles()  # or the first launch would load the module, perhaps into a graph
        self._constants = tuple(constants(spec).values())
        self._index = device.index
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._one = torch.ones(1, device=device)
        self._page = spec.page_size
        self._plain = _is_plain(spec)

    def __call__(self, grid, args):
        """Launch on the current stream of the kernel's device; ``grid`` is that of the spec."""
        if torch.cuda.current_device() == self._index:
            self._launch(grid, *args)
        else:
            with torch.cuda.device(self._index):
                self._launch(grid, *args)

    def _launch(
        self, grid, query, k_cache, v_cache, block_tables, k_scale, v_scale, work_info, partial_out, partial_max,
        partial_sum, q_stride_row, q_stride_head, scale_stride_block, scale_stride_head, table_stride_row,
        num_kv_heads, table_width, num_blocks_k, num_blocks_v, window, capacity, softmax_scale,
    ):  # fmt: skip
        heads = num_kv_heads * HEAD_DIM
        k_pages = Pages(k_cache, [num_blocks_k * num_kv_heads * self._page, HEAD_DIM], [HEAD_DIM, 1])
        if self._plain:
            v_pages = Pages(v_cache, [num_blocks_v * heads, self._page], [self._page, 1])
        else:
            v_pages = Pages(v_cache, [num_blocks_v * num_kv_heads * self._page, HEAD_DIM], [HEAD_DIM, 1])
        # Strides: of the query in 16 bytes, of scales and ids in elements.
        self._compiled[min(self._programs, grid[0] * grid[1]), 1, 1](
            query, k_pages, v_pages, block_tables,
            self._one if k_scale is None else k_scale, self._one if v_scale is None else v_scale,
            work_info, partial_out, partial_max, partial_sum,
            q_stride_row // 16, q_stride_head // 16, scale_stride_block // 4, scale_stride_head // 4,
            table_stride_row // 4, num_kv_heads, table_width, window, capacity, softmax_scale, *self._constants,
        )  # fmt: skip


def load(spec, device):
    """The kernel of ``spec``, an ``AttentionSpec`` with ``kernel`` "hopper", on ``device``."""
    spec.check()
    return HopperKernel(spec, device)
