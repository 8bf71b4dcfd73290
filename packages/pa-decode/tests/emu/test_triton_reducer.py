"""The reducer as a code object, against the torch merge."""

from __future__ import annotations

import math

import torch

from pa_decode import reference
from pa_testing.triton_kernels import emulate, random_partials, reduce_by

INFO = torch.tensor([[0, 1], [1, 3], [0, 0], [4, 2], [6, 40]], dtype=torch.int32)
SINKS = torch.tensor([0.5, math.inf, -math.inf, 40.0, -2.0, 1.0])


def test_counts_and_sinks(arch: str) -> None:
    """One part, a few, none, and more than are merged at a time; three rows where two are merged at a time."""
    partials = random_partials(2, 50, 3, 64, 46, dtype=torch.bfloat16)
    got = reduce_by(emulate(), partials, INFO, arch, query_length=1, sinks=SINKS)
    expected = reference.reduce(partials.out, partials.reference, partials.total, INFO, query_length=1, sinks=SINKS)
    assert torch.isfinite(got).all()
    assert torch.allclose(got.float(), expected.float(), atol=0.004, rtol=0.008)  # an ulp of bf16
    assert not got[2].any() and not got[:, 1].any()
    for order in ("reverse", "random"):
        again = reduce_by(emulate(order), partials, INFO, arch, query_length=1, sinks=SINKS)
        assert torch.equal(again.view(torch.int16), got.view(torch.int16))
