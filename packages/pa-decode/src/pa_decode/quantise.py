"""FP8 E4M3 in its two flavours, and how caches are quantised: per tensor, or per token and KV head.

No finite value becomes NaN: values beyond the largest finite one are clamped. NaN stays NaN. FNUZ has no negative zero
(its byte, 0x80, is NaN), so that what underflows there becomes +0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn_runtime.arch import Fp8
from gdn_runtime.errors import type_error, value_error

from .traits import FP8_FACTS, MIN_SCALE


@dataclass(frozen=True)
class Flavour:
    """One flavour of E4M3. ``max``: its largest finite value. ``nan_bytes``: the bytes that are NaN.
    ``probability_exponent``: the power of two that P in [0, 1] is multiplied by before it is rounded, the largest that
    stays finite."""

    name: Fp8
    dtype: torch.dtype
    max: float
    nan_bytes: tuple[int, ...]
    probability_exponent: int


def _flavour(name: Fp8, dtype: torch.dtype, nan_bytes: tuple[int, ...]) -> Flavour:
    facts = FP8_FACTS[name]
    return Flavour(name, dtype, facts.max, nan_bytes, facts.probability_exponent)


FN = _flavour("fn", torch.float8_e4m3fn, (0x7F, 0xFF))
FNUZ = _flavour("fnuz", torch.float8_e4m3fnuz, (0x80,))
FLAVOURS: dict[Fp8, Flavour] = {"fn": FN, "fnuz": FNUZ}
"""By name: "fn" for gfx950 and NVIDIA, "fnuz" for gfx942."""


def flavour_of(name: str, dtype: torch.dtype) -> Flavour:
    """The flavour of a dtype; a TypeError about ``name`` if it is none, bytes (uint8) included."""
    for flavour in FLAVOURS.values():
        if flavour.dtype == dtype:
            return flavour
    raise type_error(f"{name}.dtype", dtype, " or ".join(str(flavour.dtype) for flavour in FLAVOURS.values()))


def encode(x: Tensor, flavour: Flavour) -> Tensor:
    """``x`` in FP8, rounded to nearest even and clamped."""
    return x.float().clamp(-flavour.max, flavour.max).to(flavour.dtype)


def quantise_tensor(x: Tensor, flavour: Flavour) -> tuple[Tensor, Tensor]:
    """(FP8 of the shape of ``x``, fp32 scale [1]): x is about FP8 * scale, which the largest finite magnitude sets; 0
    for no elements. TypeError unless ``x`` is a tensor of a floating dtype."""
    magnitude = _finite_magnitude(x)
    largest = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    scale = (largest / flavour.max).reshape(1)
    return encode(x.float() / scale.clamp(min=MIN_SCALE), flavour), scale


def quantise_rows(x: Tensor, flavour: Flavour) -> tuple[Tensor, Tensor]:
    """(FP8 of the shape of ``x`` [..., D], fp32 scales [...]), one scale a row of D: its largest finite magnitude over
    that of FP8. TypeError unless ``x`` is a tensor of a floating dtype."""
    scale = _finite_magnitude(x).amax(-1) / flavour.max
    return encode(x.float() / scale.clamp(min=MIN_SCALE).unsqueeze(-1), flavour), scale


def quantise_tokens(x: Tensor, flavour: Flavour) -> tuple[Tensor, Tensor]:
    """(FP8 of the shape of ``x`` [N, page, Hkv, D], fp32 scales [N, Hkv, page] as the kernels read them), one scale a
    token and KV head. TypeError as ``quantise_rows``, ValueError for another rank."""
    if isinstance(x, Tensor) and x.dim() != 4:
        raise value_error("x.shape", list(x.shape), "[blocks, page, kv_heads, head_dim]")
    quantised, scale = quantise_rows(x, flavour)
    return quantised, scale.transpose(1, 2).contiguous()


def _finite_magnitude(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise type_error("x", type(x).__name__, "a torch.Tensor")
    if not x.is_floating_point():
        raise type_error("x.dtype", x.dtype, "a floating dtype")
    return x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
