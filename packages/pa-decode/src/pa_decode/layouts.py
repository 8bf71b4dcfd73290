"""Layouts of the paged cache: packing, unpacking, and one checker that every entry point calls.

K is packed, [N, Hkv, D/16, page, 16]; V is plain, [N, Hkv, D, page], or packed, [N, Hkv, page/16, D, 16]. All loads are
16-byte vectors, hence contiguous caches on 16-byte addresses. The logical form of both is [N, page, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn_runtime.arch import Fp8
from gdn_runtime.errors import type_error, value_error
from gdn_runtime.ops.library import traced

from .quantise import FLAVOURS, flavour_of
from .spec import ScaleMode
from .traits import cdiv, require_packed_k

PACK = 16
"""Bytes of a vector load: FP8 elements that lie side by side."""

Scale = Tensor | float | None

_PACKED_K = f"[blocks, kv_heads, head_dim/{PACK}, page, {PACK}]"


def pack_k(x: Tensor) -> Tensor:
    """[N, page, Hkv, D] -> [N, Hkv, D/16, page, 16], contiguous, of the dtype of ``x``; views with any strides are read
    as they are. TypeError for no tensor, ValueError for another rank or D not a multiple of 16."""
    _check_logical(x, 3)
    return x.reshape(*x.shape[:3], x.shape[3] // PACK, PACK).permute(0, 2, 3, 1, 4).contiguous()


def unpack_k(k_cache: Tensor) -> Tensor:
    """[N, Hkv, D/16, page, 16] -> [N, page, Hkv, D]. TypeError for no tensor, ValueError for another form."""
    if _tensor("k_cache", k_cache).dim() != 5 or k_cache.shape[4] != PACK:
        raise value_error("k_cache.shape", list(k_cache.shape), _PACKED_K)
    return k_cache.permute(0, 3, 1, 2, 4).flatten(3)


def pack_v(x: Tensor, *, packed: bool = True) -> Tensor:
    """[N, page, Hkv, D] -> [N, Hkv, page/16, D, 16], or plain [N, Hkv, D, page]; contiguous, of the dtype of ``x``.
    TypeError for no tensor, ValueError for another rank or a page that is not a multiple of 16."""
    _check_logical(x, 1)
    if not packed:
        return x.permute(0, 2, 3, 1).contiguous()
    blocks, page, heads, head_dim = x.shape
    return x.reshape(blocks, page // PACK, PACK, heads, head_dim).permute(0, 3, 1, 4, 2).contiguous()


def unpack_v(v_cache: Tensor) -> Tensor:
    """Either form of V -> [N, page, Hkv, D]. TypeError for no tensor, ValueError for another form."""
    if _tensor("v_cache", v_cache).dim() == 4:
        return v_cache.permute(0, 3, 1, 2)
    if v_cache.dim() != 5 or v_cache.shape[4] != PACK:
        expected = f"[blocks, kv_heads, page/{PACK}, head_dim, {PACK}] or [blocks, kv_heads, head_dim, page]"
        raise value_error("v_cache.shape", list(v_cache.shape), expected)
    return v_cache.permute(0, 2, 4, 1, 3).flatten(1, 2)


def _check_logical(x: Tensor, packed_dim: int) -> None:
    if _tensor("x", x).dim() != 4 or x.shape[packed_dim] % PACK:
        what = "head size" if packed_dim == 3 else "page"
        raise value_error("x.shape", list(x.shape), f"[blocks, page, kv_heads, head_dim], {what} a multiple of {PACK}")


@dataclass(frozen=True)
class CacheFacts:
    """What the shapes of a cache say. ``scale_strides``: (block, head) strides of per-token scales in elements."""

    num_blocks_k: int
    num_blocks_v: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    v_packed: bool
    fp8: Fp8
    scale_mode: ScaleMode
    scale_strides: tuple[int, int]


def check_cache(
    k_cache: object, v_cache: object, *, k_scale: Scale = None, v_scale: Scale = None, fp8: Fp8 | None = None
) -> CacheFacts:
    """Check a cache and its scales; read no data.

    ``fp8`` is the flavour of the architecture (None: whatever K has). Scales are both absent, both per tensor (a
    float, or an fp32 tensor of one element with at most one dimension), or both per token: fp32 [N, Hkv, page] or
    [N, Hkv, page, 1] with adjacent tokens and equal strides.

    NotImplementedError for an unpacked K of 4 dimensions; TypeError or ValueError say what else is wrong.
    """
    k, v = _tensor("k_cache", k_cache), _tensor("v_cache", v_cache)
    require_packed_k(k.dim() != 4)
    if k.dim() != 5 or k.shape[4] != PACK:
        raise value_error("k_cache.shape", list(k.shape), _PACKED_K)
    blocks, heads, page = k.shape[0], k.shape[1], k.shape[3]
    head_dim = k.shape[2] * PACK
    flavour = flavour_of("k_cache", k.dtype)
    if fp8 is not None:
        check_flavour(k.dtype, fp8)
    if v.dtype != k.dtype:
        raise type_error("v_cache.dtype", v.dtype, f"that of k_cache, {k.dtype}")
    if v.device != k.device:
        raise value_error("v_cache.device", v.device, f"that of k_cache, {k.device}")
    _check_v_shape(v, heads, head_dim, page)
    if not 1 <= v.shape[0] <= blocks:
        raise value_error("v_cache.shape[0]", v.shape[0], f"1 to {blocks}, the blocks of k_cache")
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if not cache.is_contiguous():
            raise value_error(f"{name}.stride()", list(cache.stride()), "a contiguous tensor")
        if not traced() and cache.data_ptr() % PACK:  # a traced tensor has no address
            raise value_error(f"{name}.data_ptr()", hex(cache.data_ptr()), f"an address that is a multiple of {PACK}")
    mode, strides = _check_scales(k_scale, v_scale, (blocks, heads, page), k.device)
    return CacheFacts(blocks, v.shape[0], heads, head_dim, page, v.dim() == 5, flavour.name, mode, strides)


def check_flavour(dtype: torch.dtype, fp8: Fp8) -> None:
    """TypeError unless the dtype of a cache is the FP8 flavour of the architecture: the same bytes differ by a factor
    of two in value, and 0x80 is NaN in one of the two."""
    if dtype != FLAVOURS[fp8].dtype:
        raise type_error("k_cache.dtype", dtype, f"{FLAVOURS[fp8].dtype}, the FP8 flavour of the architecture")


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise type_error(name, type(value).__name__, "a torch.Tensor")
    return value


def _check_v_shape(v: Tensor, heads: int, head_dim: int, page: int) -> None:
    plain, packed = (heads, head_dim, page), (heads, page // PACK, head_dim, PACK)
    if tuple(v.shape[1:]) == plain or (page % PACK == 0 and tuple(v.shape[1:]) == packed):
        return
    expected = f"[blocks, {', '.join(map(str, plain))}] or [blocks, {', '.join(map(str, packed))}]"
    raise value_error("v_cache.shape", list(v.shape), expected)


def scale_mode(name: str, scale: Scale) -> ScaleMode | None:
    """The mode of one scale, None if it is absent."""
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        if scale.dtype != torch.float32:
            raise type_error(f"{name}.dtype", scale.dtype, "torch.float32")
        if scale.dim() <= 1:
            if scale.numel() != 1:
                raise value_error(f"{name}.shape", list(scale.shape), "[1], [], or one scale per token")
            return "tensor"
        return "token"
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise type_error(name, type(scale).__name__, "a torch.Tensor, a float or None")
    return "tensor"


def _check_scales(
    k_scale: Scale, v_scale: Scale, shape: tuple[int, int, int], device: torch.device
) -> tuple[ScaleMode, tuple[int, int]]:
    k_mode, v_mode = scale_mode("k_scale", k_scale), scale_mode("v_scale", v_scale)
    if k_mode != v_mode:
        got = f"k_scale {_mode_text(k_mode)}, v_scale {_mode_text(v_mode)}"
        raise value_error("scales", got, "both absent, both per tensor, or both per token")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, Tensor) and scale.device != device:
            raise value_error(f"{name}.device", scale.device, f"that of k_cache, {device}")
    if k_mode != "token":
        return "tensor", (0, 0)
    assert isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tuple(scale.shape) not in (shape, (*shape, 1)):
            expected = f"{list(shape)} or {[*shape, 1]}: blocks, kv_heads, page of k_cache"
            raise value_error(f"{name}.shape", list(scale.shape), expected)
        if shape[2] > 1 and scale.stride(2) != 1:
            raise value_error(f"{name}.stride(2)", scale.stride(2), "1 (adjacent tokens)")
        # The kernels offset the scales of a head in 32 bits.
        if (apart := 4 * (shape[0] - 1) * scale.stride(0)) >= 1 << 32:
            raise value_error(f"{name}.stride(0)", f"{apart} bytes from first to last block", "less than 4 GiB")
    if k_scale.shape != v_scale.shape or k_scale.stride()[:3] != v_scale.stride()[:3]:
        got = f"shape {list(v_scale.shape)}, strides {list(v_scale.stride())}"
        raise value_error("v_scale", got, f"those of k_scale: {list(k_scale.shape)}, {list(k_scale.stride())}")
    return "token", (k_scale.stride(0), k_scale.stride(1))


def _mode_text(mode: ScaleMode | None) -> str:
    return "absent" if mode is None else f"per {mode}"


def check_block_tables(block_tables: object, *, batch: int, device: torch.device) -> Tensor:
    """``block_tables``, if it is int32 [batch, max_blocks >= 1] on ``device`` with adjacent entries; rows may start
    anywhere, at any stride. TypeError or ValueError say what is wrong; no data is read."""
    table = _tensor("block_tables", block_tables)
    if table.dtype != torch.int32:
        raise type_error("block_tables.dtype", table.dtype, "torch.int32")
    if table.device != device:
        raise value_error("block_tables.device", table.device, str(device))
    if table.dim() != 2 or table.shape[0] != batch or table.shape[1] < 1:
        raise value_error("block_tables.shape", list(table.shape), f"[{batch}, max_blocks >= 1]")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise value_error("block_tables.stride(1)", table.stride(1), "1 (adjacent entries)")
    return table


def check_seq_lens(seq_lens: object, *, batch: int, device: torch.device | None = None) -> Tensor:
    """``seq_lens``, the tokens of each sequence with its query tokens, if it is int32 [batch], contiguous and on
    ``device``. TypeError or ValueError say what is wrong; no data is read."""
    lengths = _tensor("seq_lens", seq_lens)
    if lengths.dtype != torch.int32:
        raise type_error("seq_lens.dtype", lengths.dtype, "torch.int32")
    if device is not None and lengths.device != device:
        raise value_error("seq_lens.device", lengths.device, str(device))
    if tuple(lengths.shape) != (batch,):
        raise value_error("seq_lens.shape", list(lengths.shape), f"[{batch}]")
    if not lengths.is_contiguous():
        raise value_error("seq_lens.stride()", list(lengths.stride()), "a contiguous tensor")
    return lengths


def check_page_ids(
    block_tables: Tensor, seq_lens: Tensor, *, page_size: int, num_blocks: int, window: int = 0, query_length: int = 1
) -> None:
    """For debugging, since it waits for the device: every length fits its row, and every page with a token that a query
    token sees names one of ``num_blocks`` blocks (of V, if it has fewer). ``window`` as of ``normalise_window``. Other
    entries may be anything. ValueError with the first that is wrong."""
    width = block_tables.shape[1]
    for sequence, length in enumerate(seq_lens.tolist()):
        pages = cdiv(max(length, 0), page_size)
        if pages > width:
            raise value_error(f"seq_lens[{sequence}]", length, f"at most {width * page_size}, {width} pages")
        first = max(length - query_length - window + 1, 0) // page_size if window else 0
        for index, page in enumerate(block_tables[sequence, first:pages].tolist(), first):
            if not 0 <= page < num_blocks:
                raise value_error(f"block_tables[{sequence}, {index}]", page, f"0 to {num_blocks - 1}")
