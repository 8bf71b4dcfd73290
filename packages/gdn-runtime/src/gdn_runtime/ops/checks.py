"""Checks of arguments shared by the public operations. They read shapes, strides and host integers, no device data."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from ..errors import UnsupportedError, type_error, value_error
from ..spec import CHUNK, HEAD_DIM
from .library import traced

STATE_DTYPES = (torch.float32, torch.bfloat16)
DATA_DTYPES = (torch.bfloat16, torch.float16)
BETA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensor(
    name: str,
    value: object,
    *,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> Tensor:
    """``value`` as a tensor of one of ``dtypes`` on ``device``, of ``shape`` if given."""
    if not isinstance(value, Tensor):
        raise type_error(name, type(value).__name__, "a torch.Tensor")
    if value.dtype not in dtypes:
        raise type_error(f"{name}.dtype", value.dtype, _names(dtypes))
    if value.device != device:
        raise value_error(f"{name}.device", value.device, str(device))
    if shape is not None and tuple(value.shape) != shape:
        raise value_error(f"{name}.shape", list(value.shape), str(list(shape)))
    return value


def check_rank(name: str, value: object, dims: str) -> Tensor:
    """``value`` as a tensor with as many dimensions as ``dims`` (such as "B,T,Hg,K") names."""
    if not isinstance(value, Tensor):
        raise type_error(name, type(value).__name__, "a torch.Tensor")
    if value.dim() != len(dims.split(",")):
        raise value_error(f"{name}.shape", list(value.shape), f"[{dims}]")
    return value


def check_rows(name: str, value: Tensor) -> None:
    """The last dimension must be contiguous; batch, token and head strides are free."""
    if value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise value_error(f"{name}.stride(-1)", value.stride(-1), "1 (contiguous rows)")


def check_contiguous(name: str, value: Tensor) -> None:
    """``value`` must be contiguous."""
    if not value.is_contiguous():
        raise value_error(f"{name}.stride()", list(value.stride()), "a contiguous tensor")


def check_heads(num_heads: int, num_key_heads: int) -> None:
    """H must be a positive multiple of Hg."""
    if num_key_heads < 1 or num_heads < 1 or num_heads % num_key_heads:
        raise value_error(
            "heads", f"H={num_heads} value heads, Hg={num_key_heads} key heads", "H a positive multiple of Hg >= 1"
        )


def check_head_dim(key_dim: int, value_dim: int) -> None:
    """K = V = 128."""
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        raise UnsupportedError("head size", got=f"K={key_dim}, V={value_dim}", supported=[f"K=V={HEAD_DIM}"])


def check_chunk_size(chunk_size: object) -> None:
    """64 tokens per chunk."""
    if check_count("chunk_size", chunk_size) != CHUNK:
        raise UnsupportedError("chunk_size", got=chunk_size, supported=[CHUNK])


def check_flag(name: str, value: object) -> bool:
    """``value`` must be a bool: a tensor or an int here usually means shifted positional arguments."""
    if not isinstance(value, bool):
        raise type_error(name, type(value).__name__, "bool")
    return value


def check_count(name: str, value: object) -> int:
    """``value`` must be an int >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise type_error(name, type(value).__name__, "int")
    if value < 0:
        raise value_error(name, value, "an int >= 0")
    return cast(int, value)  # a SymInt while tracing


def check_text(name: str, value: object) -> str:
    """``value`` must be a str, a backend's or an architecture's name."""
    if not isinstance(value, str):
        raise type_error(name, type(value).__name__, "str")
    return value


def check_scale(scale: float | None) -> float:
    """The attention scale; None means K ** -0.5."""
    if scale is None:
        return float(HEAD_DIM**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise type_error("scale", type(scale).__name__, "float or None")
    if not -math.inf < scale < math.inf:  # not math.isfinite: Dynamo cannot trace it on a symbolic float
        raise value_error("scale", scale, "a finite float")
    return float(scale)


def check_no_grad(**tensors: Tensor | None) -> None:
    """There is no backward: refuse inputs that would silently lose their gradient."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise UnsupportedError(
                    f"{name}.requires_grad in grad mode (there is no backward)",
                    got=True,
                    supported=["torch.no_grad()", "torch.inference_mode()", "tensors without requires_grad"],
                )


def check_cu_seqlens(cu_seqlens: object, *, batch: int, device: torch.device) -> Tensor:
    """Packed sequences: B == 1 and offsets [sequences + 1], int32 or int64, on the data's device."""
    tensor = check_tensor("cu_seqlens", cu_seqlens, dtypes=INDEX_DTYPES, device=device)
    if tensor.dim() != 1 or tensor.shape[0] < 2:
        raise value_error("cu_seqlens.shape", list(tensor.shape), "[sequences + 1] with at least one sequence")
    if batch != 1:
        raise value_error("batch size with cu_seqlens", batch, "1 (sequences are packed along the token axis)")
    return tensor


def check_no_varlen_arguments(
    *, num_decodes: int, num_decode_tokens: int, seq_lens_cpu: object, prefill_metadata: object
) -> None:
    """Arguments that mean something only with cu_seqlens."""
    given = {
        "num_decodes": num_decodes or None,
        "num_decode_tokens": num_decode_tokens or None,
        "seq_lens_cpu": seq_lens_cpu,
        "prefill_metadata": prefill_metadata,
    }
    for name, value in given.items():
        if value is not None:
            raise value_error(f"{name} without cu_seqlens", "a value", "cu_seqlens too, or neither")


def check_snapshot_dtype(snapshot_dtype: torch.dtype | None, data_dtype: torch.dtype) -> torch.dtype:
    """dtype of the snapshots h: fp32 or the data's; None means the data's."""
    if snapshot_dtype is None:
        return data_dtype
    if snapshot_dtype not in (torch.float32, data_dtype):
        raise value_error("snapshot_dtype", snapshot_dtype, _names((torch.float32, data_dtype)))
    return snapshot_dtype


def check_output_buffer(o: object, like: Tensor, inputs: dict[str, Tensor | None], *, name: str = "o") -> Tensor:
    """A caller's output: shape, dtype and device of ``like``, rows contiguous, no element twice, no memory of an
    input."""
    tensor = check_tensor(name, o, shape=tuple(like.shape), dtypes=(like.dtype,), device=like.device)
    check_rows(name, tensor)
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride < expected:
            raise value_error(f"{name}.stride()", list(tensor.stride()), "every element at an address of its own")
        expected = stride * size
    check_apart(name, tensor, inputs)
    return tensor


def check_apart(name: str, output: Tensor, others: dict[str, Tensor | None]) -> None:
    """ValueError if ``output``, called ``name``, shares memory with one of the others."""
    if traced():  # a traced tensor has no address
        return
    start, end = _span(output)
    for other_name, other in others.items():
        if other is not None:
            other_start, other_end = _span(other)
            # Interleaved views of one buffer count as overlapping.
            if start < other_end and other_start < end:
                raise value_error(name, f"memory shared with {other_name}", "memory of its own")


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that ``tensor`` can touch."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
