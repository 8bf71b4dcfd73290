"""Whole calls on the gfx950 emulator: the planner, the attention kernel, the reducer, and all that they write."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pa_decode import DecodePlan, make_workspace, pa_decode, plan_decode, reference
from pa_decode.reference import DecodeInputs

from .attention import TOLERANCE, Partials, check_partials
from .configurations import ARCH, COMPUTE_UNITS, Configuration, problem
from .inputs import arguments_of, geometry_of
from .triton_kernels import plan_of, same_plan

UNITS = {torch.bfloat16: 2.0**-11, torch.float16: 2.0**-14}
"""Two units of the last place of 1/16, the largest value: what a kernel may differ by from the oracle that rounds as it
does. Measured over a twentieth of the sweep: one at most."""


def run(configuration: Configuration) -> str:
    """A configuration of the sweep; see ``whole_call``. The sha256 is that of every configuration of the case."""
    inputs = problem(configuration)
    budget = configuration.budget_of(len(inputs.seq_lens))
    return whole_call(inputs, budget, expected_of(configuration.case), replayed=configuration.replayed)


@functools.lru_cache(maxsize=2)
def expected_of(case: tuple[Any, ...]) -> Expected:
    """What every configuration of a case must give."""
    return Expected.of(problem(Configuration.of_case(case)))


@dataclass(frozen=True)
class Expected:
    """The output in fp32 on the dequantised cache (``exact``), and with the query and P rounded as kernels do."""

    exact: Tensor
    rounded: Tensor

    @classmethod
    def of(cls, inputs: DecodeInputs) -> Expected:
        """By the two oracles. The problem must be one whose rounding leaves enough of ``TOLERANCE`` to find a fault."""
        exact, rounded = reference.decode(inputs), reference.decode_quantised(inputs)
        assert float((rounded - exact).abs().max()) <= 0.8 * TOLERANCE
        return cls(exact, rounded)


def whole_call(inputs: DecodeInputs, budget: int, expected: Expected, *, replayed: bool) -> str:
    """Make the call, check plan, partials and output, and, if ``replayed``, make it again as a graph would, over other
    values at the same addresses. The sha256 of the bits of the first output."""
    geometry = geometry_of(inputs, ARCH, COMPUTE_UNITS)
    plan = plan_decode(inputs.seq_lens, geometry, budget=budget, backend="emulate")
    workspace = make_workspace(plan, geometry)
    partials = Partials(workspace.partial_out, workspace.partial_max, workspace.partial_sum)
    out = torch.empty_like(inputs.query)

    def call(expected: Expected) -> None:
        for part in (*vars(partials).values(), out):
            part.fill_(torch.nan)
        given = arguments_of(inputs, backend="emulate", arch=ARCH, plan=plan, workspace=workspace, out=out)
        assert pa_decode(**given) is out
        check_plan(plan, inputs)
        check_partials(inputs, plan.work_info, partials, tolerance=UNITS[out.dtype])
        check_output(out, expected, inputs)

    call(expected)
    digest = hashlib.sha256(out.view(torch.int16).numpy().tobytes()).hexdigest()
    if replayed:
        change(inputs)
        plan.refresh(inputs.seq_lens)
        call(Expected.of(inputs))
    return digest


def change(inputs: DecodeInputs) -> None:
    """Other queries, scales of K and V, sinks, lengths and page ids in the same tensors: sequences in the order of
    their ends, scales less."""
    tensors = [inputs.query, inputs.seq_lens, inputs.block_tables]
    if inputs.sinks is not None:
        tensors.append(inputs.sinks)
    for x in tensors:
        x.copy_(x.flip(0))
    for scale, factor in ((inputs.k_scale, 0.75), (inputs.v_scale, 0.625)):
        assert isinstance(scale, Tensor)
        scale.mul_(factor)


def check_plan(plan: DecodePlan, inputs: DecodeInputs) -> None:
    """The tasks that the planner kernel wrote are those of the integer oracle; unused slots are zero."""
    expected = plan_of(
        inputs.seq_lens.tolist(),
        capacity=plan.capacity,
        max_partitions=plan.max_partitions,
        window=plan.window,
        query_length=plan.query_length,
    )
    assert same_plan((plan.work_info, plan.reduce_info), expected)


def check_output(out: Tensor, expected: Expected, inputs: DecodeInputs) -> None:
    """Every element within ``TOLERANCE`` of fp32, absolute and relative, and within ``UNITS`` of what rounding makes of
    it; exact zeros where nothing is visible."""
    for want, tolerance in ((expected.exact, TOLERANCE), (expected.rounded, UNITS[out.dtype])):
        error = (out.float() - want).abs() - tolerance * want.abs()
        assert float(error.max()) <= tolerance, f"output wrong by {float(error.max())}"
    for context, rows in zip(inputs.seq_lens.tolist(), out.unflatten(0, (-1, inputs.query_length)), strict=True):
        assert not rows[: max(inputs.query_length - max(context, 0), 0)].any()
