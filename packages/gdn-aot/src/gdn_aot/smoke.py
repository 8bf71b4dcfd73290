"""A smoke launch of a code object on cdna-emu: it runs to its end, no check finds anything, what it writes is finite.

The first workgroups of a small problem, 70 tokens (of GDN in two chunks), whatever the heads of the spec: values are
the business of the kernels' own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gdn_runtime.codeobject.emulate import EmulatorLauncher
from gdn_runtime.codeobject.facts import CodeObject
from gdn_runtime.spec import (
    HEAD_DIM,
    T_ELEMENTS,
    FusedPrepareSpec,
    KernelSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputSpec,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from pa_decode import FLAVOURS, pack_k, pack_v
from pa_decode.quantise import encode
from pa_decode.spec import AttentionSpec, PlannerSpec, ReduceSpec

TOKENS, CHUNKS, TAIL = 70, 2, 64
HEADS = 2
"""Value heads that the state scans run; the other kernels run their first workgroups."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Written: TypeAlias = Mapping[str, Tensor]
Case: TypeAlias = tuple[tuple[int, int, int], Mapping[str, Any], Written]
"""Grid, value of each argument by name, and what the launch must have written."""


def launch(code: CodeObject, launcher: EmulatorLauncher) -> None:
    """Run ``code``. EmulatedFaultError for what the emulator finds; ValueError for what was not written or is not
    finite."""
    spec = code.spec
    grid, values, written = CASES[type(spec)](spec)
    launcher.load(code)(grid, [values[argument.name] for argument in spec.ARGUMENTS])
    for name, tensor in written.items():
        if not tensor.isfinite().all() or (tensor.dtype == torch.int32 and bool((tensor < 0).any())):
            raise ValueError(f"{code.facts.symbol}: {name}: got values that are not finite or were not written")


def _rows(heads: int, seed: int, *, head_major: bool = False) -> Tensor:
    """Normalised rows [1,T,heads,128] bf16, or [1,heads,T,128]."""
    shape = (1, heads, TOKENS, HEAD_DIM) if head_major else (1, TOKENS, heads, HEAD_DIM)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1).bfloat16()


def _unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _gates(heads: int, *, head_major: bool) -> Tensor:
    """Cumulated gates of both chunks, decaying by 0.01 a token."""
    steps = torch.cat([torch.arange(1, TAIL + 1), torch.arange(1, TOKENS - TAIL + 1)]) * -0.01
    return steps.expand(1, heads, TOKENS).contiguous() if head_major else steps.view(1, -1, 1).repeat(1, 1, heads)


def _sequences(is_varlen: bool) -> dict[str, Tensor | None]:
    """The schedule of one sequence of all tokens."""
    if not is_varlen:
        return dict.fromkeys(("cu_seqlens", "chunk_offsets", "sequence_ids", "chunk_ids"))
    texts = {"cu_seqlens": [0, TOKENS], "chunk_offsets": [0, CHUNKS], "sequence_ids": [0, 0], "chunk_ids": [0, 1]}
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in texts.items()}


def _strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of x [1,T,heads,...] in bytes by the names of arguments."""
    _, token, head, *_ = x.stride()
    size = x.element_size()
    return {f"{name}_stride_b": 0, f"{name}_stride_t": size * token, f"{name}_stride_h": size * head}


def _scan(spec: OptStateScanSpec | VkStateScanSpec | VSplitScanSpec) -> Case:
    heads = spec.num_heads
    # The V-split K5 has no switches for gates and v_new.
    use_g, use_gk, save = (
        (True, False, True) if isinstance(spec, VSplitScanSpec) else (spec.use_g, spec.use_gk, spec.save_new_value)
    )
    pool = not isinstance(spec, VkStateScanSpec) and spec.use_state_indices
    k, v = _rows(spec.num_key_heads, 0), _rows(heads, 3)
    snapshots = torch.bfloat16 if isinstance(spec, VkStateScanSpec) else DTYPES[spec.snapshot_dtype]
    states = torch.zeros(1, heads, HEAD_DIM, HEAD_DIM, dtype=DTYPES[spec.state_dtype])
    h = _unwritten(1, CHUNKS, heads, HEAD_DIM, HEAD_DIM, dtype=snapshots)
    v_new = _unwritten(1, heads, TOKENS, HEAD_DIM)
    final = states if pool else torch.full_like(states, float("nan"))
    head_major = isinstance(spec, VSplitScanSpec) or (isinstance(spec, OptStateScanSpec) and spec.g_head_major)
    gk = torch.full((1, TOKENS, heads, HEAD_DIM), -0.01)
    slot = states.stride(0) * states.element_size()
    values = {
        "k": k,
        "v": v,
        "t": torch.zeros(CHUNKS, heads, T_ELEMENTS, dtype=torch.bfloat16),
        "w": _rows(heads, 1, head_major=True) * 0.1,
        "u": _rows(heads, 2, head_major=True),
        "g": _gates(heads, head_major=head_major) if use_g else None,
        "gk": gk if use_gk else None,
        "h": h,
        "v_new": v_new if save else None,
        "initial_state": states if spec.use_initial_state else None,
        "final_state": final if spec.store_final_state else None,
        "state_indices": torch.zeros(1, dtype=torch.int32) if pool else None,
        "has_initial_state": None,
        **_sequences(spec.is_varlen),
        **_strides("k", k),
        **_strides("v", v),
        "initial_stride": slot,
        "final_stride": slot,
        "seq_len": TOKENS,
        "num_slots": 1,
        "index_bytes": 4,
    }
    written = {"h": h[:, :, :HEADS]}
    if save:
        written["v_new"] = v_new[:, :HEADS]
    if spec.store_final_state:
        written["final_state"] = final[:, :HEADS]
    tiles, _, _ = spec.grid(1)
    return (tiles, HEADS, 1), values, written


def _prepare(spec: FusedPrepareSpec | TPrepareSpec) -> Case:
    heads = spec.num_heads
    k, v = _rows(spec.num_key_heads, 0), _rows(heads, 1)
    g = torch.full((1, TOKENS, heads), -0.01)
    beta = torch.full((1, TOKENS, heads), 0.5, dtype=DTYPES[spec.beta_dtype])
    w, u = _unwritten(1, heads, TOKENS, HEAD_DIM), _unwritten(1, heads, TOKENS, HEAD_DIM)
    t, gates = _unwritten(CHUNKS, heads, T_ELEMENTS), _unwritten(1, heads, TOKENS, dtype=torch.float32)
    values = {
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "w": w,
        "u": u,
        "t": t,
        "g_cumsum": gates,
        **_sequences(spec.is_varlen),
        **_strides("k", k),
        **_strides("v", v),
        **_strides("g", g),
        **_strides("beta", beta),
        "seq_len": TOKENS,
    }
    chunks, _, rows = spec.grid(1, CHUNKS, CHUNKS)
    written = {"t": t[:, :1]} if isinstance(spec, TPrepareSpec) else {"w": w[:, :1], "u": u[:, :1]}
    return (chunks, 1, rows), values, {**written, "g_cumsum": gates[:, :1]}


def _units(name: str, x: Tensor) -> dict[str, int]:
    """Strides of x [1,T,heads,128] in units of 8 elements, by the names of the Triton kernels' arguments."""
    batch, token, head, _ = x.stride()
    return {f"stride_{name}b": batch // 8, f"stride_{name}t": token // 8, f"stride_{name}h": head // 8}


def _output(spec: OutputSpec) -> Case:
    q, k = _rows(spec.num_key_heads, 0), _rows(spec.num_key_heads, 1)
    o = _unwritten(1, TOKENS, spec.num_heads, HEAD_DIM)
    values = {
        "q": q,
        "k": k,
        "v_new": _rows(spec.num_heads, 2, head_major=True),
        "h": torch.zeros(1, CHUNKS, spec.num_heads, HEAD_DIM, HEAD_DIM, dtype=DTYPES[spec.snapshot_dtype]),
        "g": _gates(spec.num_heads, head_major=True),
        "o": o,
        **_sequences(spec.is_varlen),
        "scale": 1.0,
        "T": TOKENS,
        **_units("q", q),
        **_units("k", k),
        **_units("o", o),
    }
    tiles = HEAD_DIM // spec.config.block_v
    return (tiles, 1, 1), values, {"o": o[:, :TAIL, :1]}


def _l2norm(spec: L2NormSpec) -> Case:
    q, k = _rows(spec.num_key_heads, 0), _rows(spec.num_key_heads, 1)
    q_out, k_out = _unwritten(*q.shape), _unwritten(*k.shape)
    rows = TOKENS * spec.num_key_heads
    values = {
        "q": q,
        "k": k,
        "q_out": q_out,
        "k_out": k_out,
        "num_rows": rows,
        "seq_len": TOKENS,
        **_units("q", q),
        **_units("k", k),
    }
    return spec.grid(rows), values, {"q_out": q_out, "k_out": k_out}


# ------------------------------------------------------------------------------------------------ paged decode


def _attention(spec: AttentionSpec) -> Case:
    """One sequence of ``TOKENS`` tokens, of one KV head: one tile of pages in their order."""
    page, size, rows = spec.page_size, spec.head_dim, spec.rows
    pages = -(-TOKENS // page)
    flavour = FLAVOURS[spec.fp8]
    x = torch.randn(2, pages, page, 1, size, generator=torch.Generator().manual_seed(0)) / 4
    k, v = (encode(part, flavour) for part in x)
    partial_out = _unwritten(1, 1, rows, size, dtype=DTYPES[spec.query_dtype])
    partial_max, partial_sum = (_unwritten(1, 1, rows, dtype=torch.float32) for _ in range(2))
    per_token = spec.scale_mode == "token"
    scale = torch.ones(pages, 1, page) if per_token else torch.ones(1)
    query = torch.randn(spec.query_length, spec.group_size, size, generator=torch.Generator().manual_seed(1))
    values = {
        "query": query.to(DTYPES[spec.query_dtype]),
        "k_cache": pack_k(k),
        "v_cache": pack_v(v, packed=spec.v_packed),
        "block_tables": torch.arange(pages, dtype=torch.int32),
        "k_scale": scale,
        "v_scale": scale.clone(),
        "work_info": torch.tensor([[0, 0, 1, TOKENS]], dtype=torch.int32),
        "partial_out": partial_out,
        "partial_max": partial_max,
        "partial_sum": partial_sum,
        "q_stride_row": 2 * spec.group_size * size,
        "q_stride_head": 2 * size,
        "scale_stride_block": 4 * page * per_token,
        "scale_stride_head": 4 * page * per_token,
        "table_stride_row": 4 * pages,
        "num_kv_heads": 1,
        "table_width": pages,
        "num_blocks_k": pages,
        "num_blocks_v": pages,
        "window": TAIL * spec.windowed,
        "capacity": 1,
        "softmax_scale": size**-0.5,
    }
    written = {"partial_out": partial_out, "partial_max": partial_max, "partial_sum": partial_sum}
    return spec.grid(1, 1), values, written


def _reduce(spec: ReduceSpec) -> Case:
    """One sequence of one KV head in two parts, or as many as there may be."""
    rows, parts = spec.group_size * spec.query_length, min(spec.max_parts, 2)
    dtype = DTYPES[spec.query_dtype]
    out = _unwritten(spec.query_length, spec.group_size, spec.head_dim, dtype=dtype)
    values = {
        "partial_out": torch.ones(1, parts, rows, spec.head_dim, dtype=dtype),
        "partial_max": torch.zeros(1, parts, rows),
        "partial_sum": torch.ones(1, parts, rows),
        "reduce_info": torch.tensor([[0, parts]], dtype=torch.int32),
        "sinks": None if spec.sink_dtype == "none" else torch.zeros(spec.group_size, dtype=DTYPES[spec.sink_dtype]),
        "out": out,
        "out_stride_row": 2 * spec.group_size * spec.head_dim,
        "out_stride_head": 2 * spec.head_dim,
        "num_kv_heads": 1,
        "capacity": parts,
        "batch": 1,
    }
    return spec.grid(1, 1), values, {"out": out}


def _planner(spec: PlannerSpec) -> Case:
    """Two sequences, one of them empty; -1 where nothing was written."""
    capacity = 3
    work_info, reduce_info = torch.full((capacity, 4), -1, dtype=torch.int32), torch.full((2, 2), -1, dtype=torch.int32)
    values = {
        "seq_lens": torch.tensor([0, 600], dtype=torch.int32),
        "work_info": work_info,
        "reduce_info": reduce_info,
        "batch": 2,
        "capacity": capacity,
        "max_partitions": capacity,
        "window": 0,
        "query_length": 1,
    }
    return spec.grid(), values, {"work_info": work_info, "reduce_info": reduce_info}


CASES: Mapping[type[KernelSpec], Callable[[Any], Case]] = {
    OptStateScanSpec: _scan,
    VkStateScanSpec: _scan,
    VSplitScanSpec: _scan,
    FusedPrepareSpec: _prepare,
    TPrepareSpec: _prepare,
    OutputSpec: _output,
    L2NormSpec: _l2norm,
    AttentionSpec: _attention,
    ReduceSpec: _reduce,
    PlannerSpec: _planner,
}
"""By the class of the spec."""
