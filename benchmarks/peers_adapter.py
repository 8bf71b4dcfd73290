"""How a harness that times GDN prefill implementations side by side calls ours.

``gdn()`` returns (make, convert). ``make(inputs, seq_lens, dense)`` gives a zero-argument callable over q, k, v, g
(natural logarithm), beta, h0 fp32 [N,H,K,V], cu (offsets) and scale; metadata and the transposition of the states are
made outside of it, as a server does them once per forward pass and once per load. ``convert(result)`` gives
(o [1,T,H,V], states [N,H,K,V]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule

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
