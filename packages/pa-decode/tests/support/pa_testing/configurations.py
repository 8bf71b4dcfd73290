"""The sweep of paged decode at head size 256 on gfx950: its axes, its problems, and the part of it that CI runs.

A *case* is what K, V, queries and the plan of a configuration follow from: everything but the page size and the form of
V. The four configurations of a case hold the same tokens, so that their outputs have the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gdn_runtime.arch import KNOWN
from pa_decode import DecodeGeometry
from pa_decode.reference import DecodeInputs
from pa_decode.schedule import PaDecodeSchedule
from pa_decode.traits import window_tiles

from .attention import flavour
from .inputs import STALE, geometry_of, make_inputs
from .probes import with_hidden

ARCH = "gfx950"
COMPUTE_UNITS = KNOWN[ARCH].nominal_compute_units or 1
GROUP = 8

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp16"),
    "mode": ("tensor", "token"),
    "length": (1, 2, 3, 4),
    "window": (0, 1, 17, 257, 8193),
    "budget": ("small", "large"),
    "page": (16, 64),
    "form": ("packed", "plain"),
}
"""Values by axis. ``length``: query tokens of a sequence. ``budget``: a task per sequence and what empty ones leave, or
one per tile."""

CASE_AXES = ("dtype", "mode", "length", "window", "budget")
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One value of every axis."""

    dtype: str
    mode: str
    length: int
    window: int
    budget: str
    page: int
    form: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, axis)) for axis in AXES)

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """The configuration that ``str`` named."""
        return BY_NAME[text]

    @classmethod
    def of_case(cls, case: tuple[Any, ...]) -> Configuration:
        """One configuration of a case."""
        return cls(*case, AXES["page"][0], AXES["form"][0])

    @property
    def case(self) -> tuple[Any, ...]:
        """What its values follow from."""
        return tuple(getattr(self, axis) for axis in CASE_AXES)

    def _sum(self, **weights: int) -> int:
        return sum(weight * AXES[axis].index(getattr(self, axis)) for axis, weight in weights.items())

    @property
    def kv_heads(self) -> int:
        """1 or 2, each beside every value of every axis; so are sinks."""
        return 1 + self._sum(dtype=1, mode=1, length=1, window=1, budget=1) % 2

    @property
    def sinks(self) -> str:
        """Dtype of the sinks, or "none"."""
        return ("none", "fp32", self.dtype)[self._sum(mode=1, length=1, window=2, budget=1) % 3]

    @property
    def replayed(self) -> bool:
        """Whether the call is made again over other values, as a graph would: one case in ten."""
        return self._sum(window=2, budget=1) == self._sum(dtype=56, mode=28, length=7) % 10

    @property
    def contexts(self) -> list[int]:
        """Empty (0 or less); whole tiles; shorter than the query; tails of one tile and of many; a window's edge inside
        a tile and, for some, on its edge. In this order a small budget has tasks of several tiles and sequences of
        several tasks."""
        longest = 8450 if self.window > 1025 else 1025
        return [-3 if self.length % 2 else 0, 512, self.length - 1, 257, 25, 256, longest]

    def budget_of(self, batch: int) -> int:
        """Tasks over all KV heads."""
        if self.budget == "small":
            return 1
        return self.kv_heads * batch * window_tiles(self.window, self.length) if self.window else 2 * COMPUTE_UNITS

    def geometry(self) -> DecodeGeometry:
        """What the kernels of this configuration follow from."""
        return DecodeGeometry(
            arch=ARCH,
            compute_units=COMPUTE_UNITS,
            batch=len(self.contexts),
            num_heads=GROUP * self.kv_heads,
            num_kv_heads=self.kv_heads,
            head_dim=256,
            page_size=self.page,
            query_length=self.length,
            query_dtype=self.dtype,  # type: ignore[arg-type]
            scale_mode=self.mode,  # type: ignore[arg-type]
            v_packed=self.form == "packed",
            sink_dtype=self.sinks,  # type: ignore[arg-type]
            window=self.window,
        )

    def schedule(self) -> PaDecodeSchedule:
        """Its kernels and the size of its plan."""
        return PaDecodeSchedule.select(self.geometry(), budget=self.budget_of(len(self.contexts)))


CASES = list(itertools.product(*(AXES[axis] for axis in CASE_AXES)))
CONFIGURATIONS = [Configuration(*values) for values in itertools.product(*AXES.values())]

BY_NAME = {str(c): c for c in CONFIGURATIONS}
PAIRWISE = [
    Configuration.parse(name)
    for name in (
        "bf16-tensor-1-1-large-64-packed",
        "bf16-tensor-1-17-small-64-plain",
        "bf16-tensor-1-257-large-64-packed",
        "bf16-tensor-1-8193-large-64-packed",
        "bf16-token-2-8193-small-64-plain",
        "bf16-token-3-0-small-64-plain",
        "bf16-token-4-1-small-16-plain",
        "bf16-token-4-17-large-16-plain",
        "bf16-token-4-257-small-16-plain",
        "bf16-token-4-8193-large-16-plain",
        "fp16-tensor-2-0-small-16-packed",
        "fp16-tensor-3-1-large-16-packed",
        "fp16-tensor-3-257-large-16-packed",
        "fp16-tensor-4-0-small-64-packed",
        "fp16-token-1-0-large-16-plain",
        "fp16-token-2-1-small-64-plain",
        "fp16-token-2-17-large-16-packed",
        "fp16-token-2-257-small-64-plain",
        "fp16-token-3-17-large-64-plain",
        "fp16-token-3-8193-large-64-plain",
    )
]
"""What CI runs: every pair of values of two axes, with the fewest attention kernels and reducers to compile that a
search found (13 and 16)."""


def pairs(configurations: Iterable[Configuration]) -> set[frozenset[tuple[str, Any]]]:
    """Pairs of values of two axes that appear together in one of the configurations."""
    each = ([(axis, getattr(c, axis)) for axis in AXES] for c in configurations)
    return {frozenset(pair) for values in each for pair in itertools.combinations(values, 2)}


def one_per_kernel(configurations: Iterable[Configuration]) -> list[Configuration]:
    """The first configuration of every attention kernel."""
    found: dict[Any, Configuration] = {}
    for configuration in configurations:
        found.setdefault(configuration.schedule().attention, configuration)
    return list(found.values())


# ------------------------------------------------------------------------------------------------ problems


def problem(configuration: Configuration) -> DecodeInputs:
    """The tensors of a configuration. What no query token sees is NaN (bytes of K and V, scales), its page ids stale.

    K of at most 1.5 and V of at most 1/16: rounding the query to FP8 moves scores in proportion to K, and a row that
    sees two tokens by a quarter of that times the difference of their V; the tolerance is for kernels.
    """
    contexts, heads, page = configuration.contexts, configuration.kv_heads, configuration.page
    number = CASES.index(configuration.case)
    draw = torch.Generator().manual_seed(1000 + number)

    def values(amplitude: float) -> Tensor:
        """Pages of all sequences; of a factor of three between tokens, and between their scales."""
        blocks = []
        for context in contexts:
            tokens = max(context, 0)
            x = (torch.rand((tokens, heads, 256), generator=draw) * 2 - 1) * amplitude
            x *= 3.0 ** -torch.rand((tokens, heads, 1), generator=draw)
            blocks.append(torch.cat([x, x.new_zeros((-tokens % page, *x.shape[1:]))]).unflatten(0, (-1, page)))
        return torch.cat(blocks)

    inputs = make_inputs(
        contexts,
        kv_heads=heads,
        group=GROUP,
        head_dim=256,
        page=page,
        query_length=configuration.length,
        window=configuration.window,
        scale_mode=configuration.mode,
        v_packed=configuration.form == "packed",
        flavour=flavour(ARCH),
        dtype=TORCH[configuration.dtype],
        k=values(1.5),
        v=values(1 / 16),
        seed=CONFIGURATIONS.index(configuration),  # pages in another order each time
    )
    query = torch.randn(inputs.query.shape, generator=draw).to(inputs.query.dtype)
    sinks = torch.randn(query.shape[1], generator=draw)
    given = None if configuration.sinks == "none" else sinks.to({"fp32": torch.float32, **TORCH}[configuration.sinks])
    inputs = dataclasses.replace(inputs, query=query, sinks=given)
    stale = (-1, STALE, None)[number % 3]
    nan = flavour(ARCH).nan_bytes[number % len(flavour(ARCH).nan_bytes)]
    inputs = with_hidden(inputs, nan, torch.nan, stale=stale)
    assert geometry_of(inputs, ARCH, COMPUTE_UNITS) == configuration.geometry()
    return inputs
