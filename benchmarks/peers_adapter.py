"""How a harness that times implementations side by side calls ours.

``gdn()`` returns (make, convert). ``make(inputs, seq_lens, dense)`` gives a zero-argument callable over q, k, v, g
(natural logarithm), beta, h0 fp32 [N,H,K,V], cu (offsets) and scale; metadata and the transposition of the states are
made outside of it, as a server does them once per forward pass and once per load. ``convert(result)`` gives
(o [1,T,H,V], states [N,H,K,V]).

``attn()`` returns (make, tolerance) for paged decode. ``make(case)`` gives a zero-argument callable that writes
``case.o`` [B QL, Hq, D]; a case has q, k and v [pages, page, kv heads, D] FP8, bt (block table), sl (lengths), o, page
and ql. The cache is repacked, the plan and the workspace are made outside of it: a server keeps the cache packed and
plans once per step for all layers. ``tolerance`` is of the relative error against fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule
from gdn_runtime.arch import arch_of, compute_units
from pa_decode import DecodeGeometry, make_workspace, pa_decode, pack_k, pack_v, plan_decode

Result = tuple[Tensor, Tensor | None]


def gdn() -> tuple[Callable[[dict[str, Any], list[int], bool], Callable[[], Result]], Callable[[Result], Result]]:
    """The block: fp32 states in and out."""

    def make(inputs: dict[str, Any], seq_lens: list[int], dense: bool) -> Callable[[], Result]:
        state = inputs["h0"].transpose(-1, -2).contiguous()
        cu_seqlens = None if dense else inputs["cu"]
        metadata = None if dense else build_prefill_metadata(seq_lens, cu_seqlens=inputs["cu"])

        def call() -> Result:
            return chunk_gated_delta_rule(
                inputs["q"],
                inputs["k"],
                inputs["v"],
                inputs["g"],
                inputs["beta"],
                scale=inputs["scale"],
                initial_state=state,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
                prefill_metadata=metadata,
            )

        return call

    def convert(result: Result) -> Result:
        o, state = result
        return o, None if state is None else state.transpose(-1, -2)

    return make, convert


K_SCALE, V_SCALE = 0.5, 0.25
"""Scales of the cache of a ``case``, per tensor."""


def attn() -> tuple[Callable[[Any], Callable[[], Tensor]], float]:
    """Paged decode over a packed FP8 cache. The Hopper kernel is as exact as bf16; where the Triton kernel runs, the
    query and P are rounded to FP8, as by kernels of other libraries: hence the tolerance."""

    def make(case: Any) -> Callable[[], Tensor]:
        device, heads, kv_heads, head_dim = case.q.device, case.q.shape[1], case.k.shape[2], case.q.shape[2]
        geometry = DecodeGeometry(
            arch=arch_of(device).name,
            compute_units=compute_units(device) or 1,
            batch=case.sl.shape[0],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=case.page,
            query_length=case.ql,
        )
        k_cache, v_cache = pack_k(case.k), pack_v(case.v)
        k_scale, v_scale = (torch.tensor([scale], device=device) for scale in (K_SCALE, V_SCALE))
        plan = plan_decode(case.sl, geometry)
        workspace = make_workspace(plan, geometry)

        def call() -> Tensor:
            return pa_decode(
                case.q,
                k_cache,
                v_cache,
                case.bt,
                case.sl,
                softmax_scale=head_dim**-0.5,
                query_length=case.ql,
                k_scale=k_scale,
                v_scale=v_scale,
                plan=plan,
                workspace=workspace,
                out=case.o,
            )

        return call

    return make, 0.08
