"""Problems in which one token of a sequence has all the weight and the only value: a row is that, or exact zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pa_decode.reference import DecodeInputs
from pa_decode.traits import TILE

from .inputs import make_inputs

VALUE = 1 / 16


@dataclasses.dataclass(frozen=True)
class Sentinels:
    """``places``: the token of each sequence; one that the sequence does not have is no token."""

    inputs: DecodeInputs
    places: list[int]

    def check(self, work: Tensor, out: Tensor) -> None:
        """``out`` [1, capacity, R, D] of the tasks ``work``: the value in rows whose task and query token hold and see
        the token, zeros in all others."""
        inputs, group = self.inputs, self.inputs.query.shape[1]
        for slot, (sequence, start, end, context) in enumerate(work.tolist()):
            place = self.places[sequence]
            for row in range(inputs.query_length * group if start < end else 0):
                low, high = inputs.visible(context, row // group)
                sees = max(low, TILE * start) <= place < min(high, TILE * end)
                values = out[0, slot, row]
                right = bool((values > 0.8 * VALUE).all()) if sees else not values.any()
                assert right, f"token {place} of {context}, query token {row // group}, tiles {start} to {end}"


def edges(context: int, length: int, window: int) -> set[int]:
    """The last token that a query token sees and the one behind, with a window the first and the one before."""
    places = set()
    for position in range(context - length, context):
        places |= {position, position + 1}
        if window:
            places |= {position - window, position - window + 1}
    return {place for place in places if place >= 0}


def sentinels(cases: Iterable[tuple[int, int]], *, page: int, **options: Any) -> Sentinels:
    """The problem of (context, place) per sequence, with one KV head; ``options`` go to ``make_inputs``."""
    contexts, places = (list(x) for x in zip(*cases, strict=True))
    values = []
    for context, place in zip(contexts, places, strict=True):
        x = torch.zeros((-(-context // page) * page, 1, 256))
        if place < context:
            x[place] = 1.0
        values.append(x.unflatten(0, (-1, page)))
    ones = torch.cat(values)
    inputs = make_inputs(contexts, kv_heads=1, head_dim=256, page=page, k=ones, v=ones * VALUE, **options)
    changes: dict[str, Any] = {"query": torch.ones_like(inputs.query), "softmax_scale": 20 / 256}
    for name in ("k_scale", "v_scale"):
        scale = getattr(inputs, name)
        # Scales of the tokens that are zeros are those of the other.
        changes[name] = torch.where(scale > 0, scale, scale.amax())
    return Sentinels(dataclasses.replace(inputs, **changes), places)
