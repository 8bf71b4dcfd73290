"""Packing by byte offsets, and the messages of the layout checker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pa_decode import (
    check_block_tables,
    check_cache,
    check_page_ids,
    check_seq_lens,
    pack_k,
    pack_v,
    unpack_k,
    unpack_v,
)
from pa_decode.quantise import FN, FNUZ, quantise_tensor, quantise_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 32), (3, 64)])
def test_elements_lie_where_the_kernels_read_them(page: int, heads: int, head_dim: int) -> None:
    blocks = 2
    x = torch.arange(blocks * page * heads * head_dim, dtype=torch.int32).reshape(blocks, page, heads, head_dim)
    k, v, plain = pack_k(x), pack_v(x), pack_v(x, packed=False)
    assert k.shape == (blocks, heads, head_dim // 16, page, 16)
    assert v.shape == (blocks, heads, page // 16, head_dim, 16) and plain.shape == (blocks, heads, head_dim, page)
    block, token, head, d = torch.meshgrid(*(torch.arange(n) for n in x.shape), indexing="ij")
    at = block * heads + head
    assert torch.equal(k.flatten()[((at * (head_dim // 16) + d // 16) * page + token) * 16 + d % 16], x)
    assert torch.equal(plain.flatten()[(at * head_dim + d) * page + token], x)
    assert torch.equal(v.flatten()[((at * (page // 16) + token // 16) * head_dim + d) * 16 + token % 16], x)
    for cache, unpack in ((k, unpack_k), (v, unpack_v), (plain, unpack_v)):
        assert cache.is_contiguous() and torch.equal(unpack(cache), x)


def test_offsets_of_large_caches_exceed_32_bits() -> None:
    """The index map in Python integers, as the kernels must compute it: 131072 blocks of 32 KiB end behind 4 GiB."""
    last = ((131_072 * 2 + 1) * 16 + 15) * 64 * 16
    meta = torch.empty((131_073, 2, 16, 64, 16), dtype=torch.float8_e4m3fn, device="meta")
    assert last > 2**32 and sum((n - 1) * s for n, s in zip((131_073, 2, 16, 1, 1), meta.stride(), strict=True)) == last


def test_pack_reads_views_and_refuses_other_shapes() -> None:
    kv = torch.randn(3, 2, 16, 2, 32).to(torch.float8_e4m3fn)
    for x in kv.unbind(1):
        dense = x.float().to(torch.float8_e4m3fn)
        assert torch.equal(pack_k(x).view(torch.uint8), pack_k(dense).view(torch.uint8))
        assert torch.equal(pack_v(x).view(torch.uint8), pack_v(dense).view(torch.uint8))
    with pytest.raises(ValueError, match=r"x\.shape: got \[3, 16, 2, 20\], expected .*head size a multiple of 16"):
        pack_k(torch.zeros(3, 16, 2, 20))
    with pytest.raises(ValueError, match=r"x\.shape: got \[3, 8, 2, 32\], expected .*page a multiple of 16"):
        pack_v(torch.zeros(3, 8, 2, 32))


def test_helpers_say_what_they_take() -> None:
    nothing: Any = None
    for call, error, message in (
        (lambda: pack_k(nothing), TypeError, "x: got NoneType, expected a torch.Tensor"),
        (lambda: pack_v(torch.zeros(16, 2, 32)), ValueError, r"x\.shape: got \[16, 2, 32\], expected \[blocks, page"),
        (lambda: unpack_k([1]), TypeError, "k_cache: got list"),
        (lambda: unpack_k(torch.zeros(3, 16, 2, 32)), ValueError, r"k_cache\.shape: .*head_dim/16, page, 16\]"),
        (lambda: unpack_k(torch.zeros(3, 2, 2, 16, 8)), ValueError, r"k_cache\.shape: got \[3, 2, 2, 16, 8\]"),
        (
            lambda: unpack_v(torch.zeros(3, 16)),
            ValueError,
            r"v_cache\.shape: .* or \[blocks, kv_heads, head_dim, page\]",
        ),
        (lambda: unpack_v(nothing), TypeError, "v_cache: got NoneType"),
        (lambda: quantise_tokens(torch.zeros(3, 16), FN), ValueError, r"x\.shape: got \[3, 16\]"),
        (lambda: quantise_tokens(nothing, FN), TypeError, "x: got NoneType"),
        (lambda: quantise_tensor(torch.zeros(3, dtype=torch.int32), FN), TypeError, r"x\.dtype: got torch.int32"),
    ):
        with pytest.raises(error, match=message):
            call()  # type: ignore[no-untyped-call]


def test_a_cache_of_no_blocks() -> None:
    x = torch.zeros(0, 16, 2, 32)
    (whole, scale), (by_token, scales_) = quantise_tensor(x, FN), quantise_tokens(x, FN)
    assert scale.tolist() == [0.0] and scales_.shape == (0, 2, 16) and whole.shape == by_token.shape == x.shape
    assert unpack_k(pack_k(whole)).shape == unpack_v(pack_v(whole)).shape == x.shape


def cache(**changes: Any) -> dict[str, Any]:
    x = torch.randn(4, 16, 2, 32).to(torch.float8_e4m3fn)
    return {"k_cache": pack_k(x), "v_cache": pack_v(x)} | changes


def scales(*shape: int) -> Tensor:
    return torch.rand(shape or (4, 2, 16))


def test_facts_of_a_cache() -> None:
    facts = check_cache(**cache(), fp8="fn")
    assert (facts.num_blocks_k, facts.num_blocks_v, facts.num_kv_heads) == (4, 4, 2)
    assert (facts.head_dim, facts.page_size, facts.v_packed, facts.fp8) == (32, 16, True, "fn")
    assert (facts.scale_mode, facts.scale_strides) == ("tensor", (0, 0))
    plain = pack_v(torch.zeros(3, 16, 2, 32, dtype=torch.uint8).view(torch.float8_e4m3fn), packed=False)
    fewer = check_cache(**cache(v_cache=plain))
    assert not fewer.v_packed and fewer.num_blocks_v == 3


@pytest.mark.parametrize("scale", [1.0, torch.ones(1), torch.tensor(2.0)], ids=["float", "[1]", "[]"])
def test_per_tensor_scales(scale: float | Tensor) -> None:
    assert check_cache(**cache(k_scale=scale, v_scale=scale)).scale_mode == "tensor"


def test_per_token_scales_may_be_views() -> None:
    wide = torch.rand(5, 4, 2, 20)
    k, v = wide[1, :, :, 2:18], wide[3, :, :, 4:20]
    facts = check_cache(**cache(k_scale=k, v_scale=v))
    assert facts.scale_mode == "token" and facts.scale_strides == (40, 20)
    assert check_cache(**cache(k_scale=k[..., None], v_scale=v[..., None])).scale_strides == (40, 20)


def shifted(x: Tensor) -> Tensor:
    """A contiguous copy on an address that is one byte off."""
    buffer = torch.empty(x.numel() + 1, dtype=torch.uint8)
    buffer[1:] = x.flatten().view(torch.uint8)
    return buffer[1:].view(x.dtype).view(x.shape)


GOOD = cache()
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not a tensor": ({"k_cache": [1]}, TypeError, r"k_cache: got list, expected a torch.Tensor"),
    "rank": ({"k_cache": torch.zeros(4, 2)}, ValueError, r"k_cache.shape: got \[4, 2\], expected \[blocks"),
    "pack": ({"k_cache": torch.zeros(4, 2, 4, 16, 8)}, ValueError, r"k_cache.shape: got \[4, 2, 4, 16, 8\]"),
    "bytes": ({"k_cache": GOOD["k_cache"].view(torch.uint8)}, TypeError, r"k_cache.dtype: got torch.uint8"),
    "v dtype": ({"v_cache": GOOD["v_cache"].float().to(FNUZ.dtype)}, TypeError, r"v_cache.dtype: got .*fnuz"),
    "v heads": ({"v_cache": GOOD["v_cache"][:, :1]}, ValueError, r"v_cache.shape: got \[4, 1, 1, 32, 16\], expected"),
    "v blocks": ({"v_cache": GOOD["v_cache"].repeat(2, 1, 1, 1, 1)}, ValueError, r"v_cache.shape\[0\]: got 8"),
    "v none": ({"v_cache": GOOD["v_cache"][:0]}, ValueError, r"v_cache.shape\[0\]: got 0"),
    "strided": ({"k_cache": GOOD["k_cache"].repeat(2, 1, 1, 1, 1)[::2]}, ValueError, r"k_cache.stride\(\)"),
    "address": ({"v_cache": shifted(GOOD["v_cache"])}, ValueError, r"v_cache.data_ptr\(\): .* multiple of 16"),
    "one scale": ({"k_scale": scales(1)}, ValueError, r"scales: got k_scale per tensor, v_scale absent"),
    "mixed": ({"k_scale": scales(1), "v_scale": scales()}, ValueError, r"k_scale per tensor, v_scale per token"),
    "scale dtype": ({"k_scale": scales().half(), "v_scale": scales()}, TypeError, r"k_scale.dtype: got torch.float16"),
    "scale type": ({"k_scale": "1", "v_scale": 1.0}, TypeError, r"k_scale: got str"),
    "scale count": ({"k_scale": scales(2), "v_scale": scales(2)}, ValueError, r"k_scale.shape: got \[2\]"),
    "scale shape": (
        {"k_scale": scales(4, 2, 15), "v_scale": scales(4, 2, 15)},
        ValueError,
        r"k_scale.shape: got \[4, 2, 15\], expected \[4, 2, 16\]",
    ),
    "scale tokens": (
        {"k_scale": scales(4, 2, 32)[..., ::2], "v_scale": scales()},
        ValueError,
        r"k_scale.stride\(2\): got 2",
    ),
    "scale strides": (
        {"k_scale": scales(4, 2, 20)[..., :16], "v_scale": scales()},
        ValueError,
        r"v_scale: got .* expected those of k_scale",
    ),
    "scale ranks": ({"k_scale": scales(), "v_scale": scales(4, 2, 16, 1)}, ValueError, r"v_scale: got shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_checker_says_what_is_wrong(case: str) -> None:
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        check_cache(**GOOD | changes)


def test_scales_of_a_head_lie_within_4_gib() -> None:
    stride = (1 << 30) // 3 + 2
    scale = torch.empty(3 * stride + 32).as_strided((4, 2, 16), (stride, 16, 1))  # memory that nothing touches
    with pytest.raises(ValueError, match=r"k_scale.stride\(0\): got 42949\d{5} bytes .* less than 4 GiB"):
        check_cache(**GOOD | {"k_scale": scale, "v_scale": scale})


@pytest.mark.parametrize("packed", [True, False])
def test_a_key_of_four_dimensions_is_an_unsupported_layout(packed: bool) -> None:
    x = torch.zeros(4, 16, 2, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="pack_k"):
        check_cache(x, pack_v(x, packed=packed))


@pytest.mark.parametrize(("own", "device"), [(FN, FNUZ), (FNUZ, FN)], ids=["fn", "fnuz"])
def test_the_other_flavour_is_refused_with_both_names(own: Any, device: Any) -> None:
    k8, _ = quantise_tokens(torch.randn(2, 16, 1, 32), own)
    caches = {"k_cache": pack_k(k8), "v_cache": pack_v(k8)}
    assert check_cache(**caches, fp8=own.name).fp8 == own.name
    with pytest.raises(TypeError, match=rf"k_cache.dtype: got {own.dtype}, expected {device.dtype}"):
        check_cache(**caches, fp8=device.name)


def test_block_tables() -> None:
    table = torch.zeros(3, 9, dtype=torch.int32)
    assert check_block_tables(table[:, 1:6], batch=3, device=CPU).stride(0) == 9
    for bad, error, message in (
        (table.long(), TypeError, r"block_tables.dtype: got torch.int64"),
        (table[:2], ValueError, r"block_tables.shape: got \[2, 9\], expected \[3, "),
        (table[:, :0], ValueError, r"block_tables.shape: got \[3, 0\]"),
        (table[:, ::2], ValueError, r"block_tables.stride\(1\): got 2"),
    ):
        with pytest.raises(error, match=message):
            check_block_tables(bad, batch=3, device=CPU)


def test_seq_lens() -> None:
    lengths = torch.zeros(4, dtype=torch.int32)
    assert check_seq_lens(lengths, batch=4) is lengths
    for bad, error, message in (
        ([1, 2], TypeError, "seq_lens: got list"),
        (lengths.long(), TypeError, r"seq_lens.dtype: got torch.int64"),
        (lengths[:2], ValueError, r"seq_lens.shape: got \[2\], expected \[4\]"),
        (torch.zeros(8, dtype=torch.int32)[::2], ValueError, r"seq_lens.stride\(\)"),
        (lengths.to("meta"), ValueError, r"seq_lens.device: got meta"),
    ):
        with pytest.raises(error, match=message):
            check_seq_lens(bad, batch=4, device=CPU)


def test_page_ids() -> None:
    table = torch.tensor([[0, 3, -1], [2, 9, 9]], dtype=torch.int32)
    check_page_ids(table, torch.tensor([32, 16]), page_size=16, num_blocks=4)
    check_page_ids(table, torch.tensor([0, -4]), page_size=16, num_blocks=1)
    with pytest.raises(ValueError, match=r"block_tables\[0, 2\]: got -1, expected 0 to 3"):
        check_page_ids(table, torch.tensor([33, 16]), page_size=16, num_blocks=4)
    with pytest.raises(ValueError, match=r"block_tables\[1, 1\]: got 9"):
        check_page_ids(table, torch.tensor([0, 17]), page_size=16, num_blocks=4)
    with pytest.raises(ValueError, match=r"seq_lens\[1\]: got 49, expected at most 48"):
        check_page_ids(table, torch.tensor([0, 49]), page_size=16, num_blocks=4)
    stale = torch.tensor([[-1, 3, 1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\]: got -1"):
        check_page_ids(stale, torch.tensor([64]), page_size=16, num_blocks=4, window=48, query_length=2)
    check_page_ids(stale, torch.tensor([64]), page_size=16, num_blocks=4, window=48, query_length=1)
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\]: got 3, expected 0 to 2"):
        check_page_ids(stale, torch.tensor([64]), page_size=16, num_blocks=3, window=33)
