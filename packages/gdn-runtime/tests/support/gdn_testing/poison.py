"""Memory that shows when it is read before it was written.

``torch.empty`` often returns zeros or yesterday's right answer, which hides an output row that no kernel wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

INTEGER_SENTINEL = 0x5A
"""Every byte of a poisoned integer tensor: as int32 or int64 far outside any index range."""

_PATCHED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


def poison(x: Tensor) -> Tensor:
    """Fill x with NaN (floating), True (bool) or ``INTEGER_SENTINEL`` bytes, in place; returns x."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    if x.dtype is torch.bool:
        return x.fill_(True)
    return x.fill_(int.from_bytes(bytes([INTEGER_SENTINEL]) * x.element_size(), sys.byteorder))


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """A new poisoned tensor."""
    return poison(torch.empty(*shape, dtype=dtype, device=device))


@contextmanager
def poison_empty(package: str = "gdn_runtime") -> Iterator[None]:
    """Poison the uninitialised tensors that modules of ``package`` get from torch's Python functions."""

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            out = original(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return poison(out) if caller == package or caller.startswith(f"{package}.") else out

        return allocate

    originals = [(owner, name, getattr(owner, name)) for owner, name in _PATCHED]
    try:
        for owner, name, original in originals:
            setattr(owner, name, wrap(original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
