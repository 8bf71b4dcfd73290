"""What only the GPU suite needs: full-size inputs and comparisons on the device, and counters of side effects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_runtime.testing import GdnInputs, assert_same_shape

_BLOCK = 1 << 26
"""Elements per step of a comparison: 256 MiB in fp32."""


def device_inputs(
    shape: Sequence[int],
    num_heads: int,
    num_key_heads: int,
    *,
    rate: float = 0.01,
    state: bool = True,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cuda",
) -> GdnInputs:
    """As ``make_inputs`` (shape: a list of lengths or a tuple (batch, tokens)), but drawn on the device.

    Log gates are uniform in (-2 ``rate``, 0): 0.01 keeps a state alive for a few chunks.
    """
    packed = isinstance(shape, list)
    batch, tokens = (1, sum(shape)) if packed else shape
    seq_lens = tuple(shape) if packed else (tokens,) * batch
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=gen, device=device, dtype=dtype).mul_(scale)

    def uniform() -> Tensor:
        return torch.rand(batch, tokens, num_heads, generator=gen, device=device)

    q, k = (
        torch.nn.functional.normalize(normal(batch, tokens, num_key_heads, 128).float(), dim=-1).to(dtype)
        for _ in range(2)
    )
    states = None
    if state:
        states = normal(len(seq_lens), num_heads, 128, 128, scale=0.1).to(state_dtype)
    cu_seqlens = torch.tensor([0, *accumulate(shape)], dtype=torch.int32, device=device) if packed else None
    v = normal(batch, tokens, num_heads, 128)
    return GdnInputs(q, k, v, uniform().mul_(-2 * rate), uniform(), states, cu_seqlens, seq_lens)


def errors_on_device(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """(|a - b| / |b| in the Frobenius norm, max |a - b| / max |b|) without a copy to the host; NaN stays NaN."""
    difference = norm = torch.zeros((), dtype=torch.float64, device=actual.device)
    worst = largest = torch.zeros((), device=actual.device)
    rows = max(1, _BLOCK // max(1, actual[0].numel())) if actual.numel() else 1
    for a, b in zip(actual.split(rows), expected.split(rows), strict=True):
        if a.numel() == 0:
            continue
        b32 = b.float()
        gap = a.float() - b32
        difference = difference + gap.norm().double().square()
        norm = norm + b32.norm().double().square()
        worst = torch.maximum(worst, gap.abs().max())
        largest = torch.maximum(largest, b32.abs().max())
    if float(norm) == 0.0:
        return float(difference.sqrt()), float(worst)
    return float((difference / norm).sqrt()), float(worst / largest)


def assert_close_on_device(actual: Tensor, expected: Tensor, rel: float, peak: float, what: str) -> None:
    """Fail unless the relative L2 error is at most ``rel`` and the largest error at most ``peak`` times max |expected|.

    Slices of the first axis that is longer than one are compared block by block. NaN or infinity fails.
    """
    assert_same_shape(actual, expected, what)
    while actual.dim() > 1 and actual.shape[0] == 1:
        actual, expected = actual[0], expected[0]
    l2, worst = errors_on_device(actual, expected)
    print(f"{what}: relative L2 {l2:.2e}, peak {worst:.2e}")
    assert l2 <= rel, f"{what}: relative L2 error {l2:.3e} > {rel:.3e} (peak {worst:.3e})"
    assert worst <= peak, f"{what}: largest error {worst:.3e} of the largest value > {peak:.3e} (relative L2 {l2:.3e})"


def assert_equal_on_device(actual: Tensor, expected: Tensor, what: str) -> None:
    """Fail unless dtype, shape and bits are equal, NaN included."""
    assert_same_shape(actual, expected, what)
    assert actual.dtype == expected.dtype, f"{what}: got {actual.dtype}, expected {expected.dtype}"
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a, b = actual.contiguous().view(as_int), expected.contiguous().view(as_int)
    if not torch.equal(a, b):
        different = a != b
        where = tuple(int(i) for i in different.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {actual.numel()} values differ, "
            f"first at {where}: got {actual[where]}, expected {expected[where]}"
        )


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the Triton kernels that are compiled, or loaded for a new key, while the block runs: by Triton's launcher
    or by ours."""
    from triton import knobs

    seen: list[str] = []
    before = knobs.compilation.listener

    def note(**info: Any) -> None:
        seen.append(info["src"].name)

    knobs.compilation.listener = note
    try:
        yield seen
    finally:
        knobs.compilation.listener = before


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """Whatever makes torch wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def finish_within(seconds: float) -> None:
    """Wait for the current stream; end the whole run if it takes longer: nothing on the device can be saved then."""
    done = torch.cuda.current_stream().record_event()
    limit = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > limit:
            pytest.exit(f"the device still works after {seconds:.0f} s: a kernel hangs", returncode=3)
        time.sleep(0.01)
