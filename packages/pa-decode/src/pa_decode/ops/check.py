"""Checks of the arguments of a call: they read shapes, strides and host values, no device data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gdn_runtime.arch import parse_arch
from gdn_runtime.errors import UnsupportedError, type_error, value_error
from gdn_runtime.ops.checks import check_apart, check_no_grad, check_output_buffer, check_rows

from ..geometry import DecodeGeometry, check_integer
from ..layouts import CacheFacts, Scale, check_block_tables, check_cache, check_flavour, check_seq_lens
from ..plan import DecodePlan, DecodeWorkspace
from ..select import Target, choose_target
from ..spec import QueryDtype, SinkDtype
from ..traits import normalise_window

QUERY_DTYPES: dict[torch.dtype, QueryDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SINK_DTYPES: dict[torch.dtype, SinkDtype] = {**QUERY_DTYPES, torch.float32: "fp32"}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)

CuSeqlens = Tensor | Sequence[int] | None


@dataclass(frozen=True)
class DecodeCall:
    """The checked arguments of one call. ``geometry`` is None for an empty batch; ``inputs`` are the tensors that are
    read, by name."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    k_scale: Scale
    v_scale: Scale
    sinks: Tensor | None
    out: Tensor | None
    softmax_scale: float
    query_length: int
    window: int
    kernel: str
    target: Target
    facts: CacheFacts
    geometry: DecodeGeometry | None
    inputs: Mapping[str, Tensor | None]


def check_call(
    query: object,
    k_cache: object,
    v_cache: object,
    block_tables: object,
    seq_lens: object,
    *,
    softmax_scale: float,
    query_length: int | None,
    cu_seqlens_q: CuSeqlens,
    k_scale: Scale,
    v_scale: Scale,
    sinks: Tensor | None,
    sliding_window: int,
    window_left: int | None,
    out: Tensor | None,
    backend: str,
    kernel: str,
    arch: str | None,
) -> DecodeCall:
    """The call, or the error that says what is wrong with it."""
    facts = check_cache(k_cache, v_cache, k_scale=k_scale, v_scale=v_scale)
    assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
    q = _check_query(query, facts, k_cache.device)
    batch, length = _check_query_length(q.shape[0], query_length, cu_seqlens_q)
    table = check_block_tables(block_tables, batch=batch, device=q.device)
    lengths = check_seq_lens(seq_lens, batch=batch, device=q.device)
    _check_sinks(sinks, q)
    window = normalise_window(sliding_window, window_left)
    if not isinstance(kernel, str):
        raise type_error("kernel", type(kernel).__name__, "str")
    target = choose_target(q.device, backend, arch, fp8=facts.fp8)
    flavour = parse_arch(target.arch).fp8
    assert flavour is not None, "choose_target refuses architectures without FP8"
    check_flavour(k_cache.dtype, flavour)
    inputs: dict[str, Tensor | None] = {"query": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": sinks}
    inputs |= {"block_tables": table, "seq_lens": lengths}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        inputs[name] = scale if isinstance(scale, Tensor) else None
    if out is not None:
        check_output_buffer(out, q, inputs, name="out")
    check_no_grad(**inputs, out=out)
    geometry = None
    if batch:
        geometry = DecodeGeometry(
            arch=target.arch,
            compute_units=target.compute_units,
            batch=batch,
            num_heads=q.shape[1],
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            page_size=facts.page_size,
            query_length=length,
            query_dtype=QUERY_DTYPES[q.dtype],
            scale_mode=facts.scale_mode,
            v_packed=facts.v_packed,
            sink_dtype="none" if sinks is None else SINK_DTYPES[sinks.dtype],
            window=window,
        )
    return DecodeCall(
        q,
        k_cache,
        v_cache,
        table,
        lengths,
        k_scale,
        v_scale,
        sinks,
        out,
        _check_softmax_scale(softmax_scale),
        length,
        window,
        kernel,
        target,
        facts,
        geometry,
        inputs,
    )


def check_made(inputs: Mapping[str, Tensor | None], out: Tensor | None, plan: object, workspace: object) -> None:
    """What a caller made for a call, or None: TypeError for something else, ValueError if what a call writes, ``out``
    and the workspace, is in the memory of anything else."""
    made: dict[str, Tensor | None] = {}
    if plan is not None:
        if not isinstance(plan, DecodePlan):
            raise type_error("plan", type(plan).__name__, "a DecodePlan or None")
        made |= {"work_info of the plan": plan.work_info, "reduce_info of the plan": plan.reduce_info}
    if workspace is not None:
        if not isinstance(workspace, DecodeWorkspace):
            raise type_error("workspace", type(workspace).__name__, "a DecodeWorkspace or None")
        parts = {f"{name} of the workspace": part for name, part in workspace.parts.items()}
        for name, part in parts.items():
            check_apart(name, part, {**inputs, **made})
        made |= parts
    if out is not None:
        check_apart("out", out, made)


def _check_query(query: object, facts: CacheFacts, device: torch.device) -> Tensor:
    if not isinstance(query, Tensor):
        raise type_error("query", type(query).__name__, "a torch.Tensor")
    if query.dtype in FP8_DTYPES:
        raise UnsupportedError("query.dtype", got=query.dtype, supported=[*QUERY_DTYPES, "the kernels quantise it"])
    if query.dtype not in QUERY_DTYPES:
        raise type_error("query.dtype", query.dtype, " or ".join(map(str, QUERY_DTYPES)))
    if query.device != device:
        raise value_error("query.device", query.device, f"that of k_cache, {device}")
    if query.dim() != 3 or query.shape[2] != facts.head_dim:
        raise value_error("query.shape", list(query.shape), f"[batch * query_length, heads, {facts.head_dim}]")
    if query.shape[1] == 0 or query.shape[1] % facts.num_kv_heads:
        raise value_error("query.shape[1]", query.shape[1], f"a multiple of the {facts.num_kv_heads} KV heads")
    check_rows("query", query)
    return query


def _check_query_length(rows: int, query_length: int | None, cu_seqlens_q: CuSeqlens) -> tuple[int, int]:
    """(batch, query tokens per sequence)."""
    if query_length is not None:
        check_integer("query_length", query_length, 1)
    if cu_seqlens_q is None:
        length = query_length or 1
        if rows % length:
            raise value_error("query.shape[0]", rows, f"a multiple of query_length = {length}")
        return rows // length, length
    batch = _check_offsets(cu_seqlens_q)
    length = query_length or max(rows // max(batch, 1), 1)
    if batch * length != rows:
        expected = f"{rows} query rows in sequences of {'equal length' if query_length is None else query_length}"
        raise value_error("cu_seqlens_q", f"{batch} sequences", expected)
    if isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.device.type != "cpu":
        return batch, length  # reading it would wait for the device
    offsets = cu_seqlens_q.tolist() if isinstance(cu_seqlens_q, Tensor) else list(cu_seqlens_q)
    lengths = [end - start for start, end in pairwise(offsets)]
    if offsets[0] != 0 or any(one != length for one in lengths):
        supported = [f"0, {length}, {2 * length}, ...: {length} query tokens in every sequence"]
        raise UnsupportedError("cu_seqlens_q", got=offsets, supported=supported)
    return batch, length


def _check_offsets(cu_seqlens_q: Tensor | Sequence[int]) -> int:
    """The number of sequences."""
    if isinstance(cu_seqlens_q, Tensor):
        if cu_seqlens_q.dtype not in (torch.int32, torch.int64):
            raise type_error("cu_seqlens_q.dtype", cu_seqlens_q.dtype, "torch.int32 or torch.int64")
        if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
            raise value_error("cu_seqlens_q.shape", list(cu_seqlens_q.shape), "[batch + 1]")
        return cu_seqlens_q.shape[0] - 1
    if isinstance(cu_seqlens_q, str) or not isinstance(cu_seqlens_q, Sequence):
        raise type_error("cu_seqlens_q", type(cu_seqlens_q).__name__, "a tensor or a sequence of ints")
    for index, offset in enumerate(cu_seqlens_q):
        check_integer(f"cu_seqlens_q[{index}]", offset, 0)
    if not cu_seqlens_q:
        raise value_error("cu_seqlens_q", "no entry", "batch + 1 entries")
    return len(cu_seqlens_q) - 1


def _check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise type_error("sinks", type(sinks).__name__, "a torch.Tensor or None")
    if sinks.dtype not in SINK_DTYPES:
        raise type_error("sinks.dtype", sinks.dtype, " or ".join(map(str, SINK_DTYPES)))
    if sinks.device != query.device:
        raise value_error("sinks.device", sinks.device, f"that of query, {query.device}")
    if tuple(sinks.shape) != (query.shape[1],) or not sinks.is_contiguous():
        got = f"{list(sinks.shape)}, strides {list(sinks.stride())}"
        raise value_error("sinks", got, f"[{query.shape[1]}], one per query head, contiguous")


def _check_softmax_scale(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise type_error("softmax_scale", type(scale).__name__, "float")
    if not math.isfinite(scale):
        raise value_error("softmax_scale", scale, "a finite float")
    return float(scale)
