"""Uses of torch._C, which is no public interface: all of them, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _current_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


# Triton's launcher asks the same function. The public way makes a Stream object: 1.7 us.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
"""Handle of the stream that is current on a GPU, by its index."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many torch dispatch modes (fake tensors, make_fx) are on in this thread. There is no public way to ask."""
