"""Buffer resources: range check, strides, what is unsupported."""

from typing import Any

import numpy as np
import pytest
from accesses import (
    ARCHS,
    LANES,
    RAW,
    kinds,
    random_bytes,
    read,
    registers,
    resource,
    run,
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dwords", [2, 3, 4])
def test_buffer_range_is_per_component(arch: str, dwords: int) -> None:
    data = random_bytes(2048)
    records = 16 * 40 + 8  # lane 40 has two components in range, the later lanes none
    offsets = 16 * LANES
    text = f"buffer_load_dwordx{dwords} {registers(dwords)}, v1, s[8:11], 0 offen"
    got = run(arch, text, vgpr={1: offsets, 4: 5, 5: 5, 6: 5, 7: 5}, sgpr=resource(data, records), memory=[data])
    for r in range(dwords):
        inside = offsets + 4 * r + 4 <= records
        np.testing.assert_array_equal(got.vgpr(4 + r), np.where(inside, read(data, offsets + 4 * r, 4), 0))
    assert kinds(got) == {"buffer-bounds"}


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_store_out_of_range_is_dropped(arch: str) -> None:
    data = np.zeros(256, np.uint32)
    vgpr: dict[int, Any] = {1: 16 * LANES, **{4 + r: np.full(64, r + 1) for r in range(4)}}
    run(arch, "buffer_store_dwordx4 v[4:7], v1, s[8:11], 0 offen", vgpr=vgpr, sgpr=resource(data, 92), memory=[data])
    np.testing.assert_array_equal(data[:23], np.tile([1, 2, 3, 4], 6)[:23])
    np.testing.assert_array_equal(data[23:], 0)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("op", "size"), [("ubyte", 1), ("ushort", 2), ("dword", 4)])
def test_buffer_range_ends_at_the_byte(arch: str, op: str, size: int) -> None:
    data = np.full(256, 0x81, np.uint8)
    got = run(
        arch, f"buffer_load_{op} v4, v1, s[8:11], 0 offen", vgpr={1: LANES}, sgpr=resource(data, 37), memory=[data]
    )
    np.testing.assert_array_equal(got.vgpr(4) != 0, LANES + size <= 37)


@pytest.mark.parametrize("arch", ARCHS)
def test_soffset_is_inside_the_range_check(arch: str) -> None:
    data = np.arange(1, 129, dtype=np.uint32)
    sgpr = {**resource(data, 256), 5: 128}
    got = run(
        arch, "buffer_load_dword v4, v1, s[8:11], s5 offen offset:4", vgpr={1: 4 * LANES}, sgpr=sgpr, memory=[data]
    )
    index = LANES + 1 + 32
    np.testing.assert_array_equal(got.vgpr(4), np.where(index < 64, index + 1, 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_offsets_do_not_wrap(arch: str) -> None:
    data = np.arange(1, 129, dtype=np.uint32)
    vgpr = {1: np.where(LANES % 2, 0xFFFFFFF8, 0).astype(np.uint32)}
    got = run(
        arch, "buffer_load_dwordx4 v[4:7], v1, s[8:11], 0 offen offset:8", vgpr=vgpr, sgpr=resource(data), memory=[data]
    )
    for r in range(4):
        np.testing.assert_array_equal(got.vgpr(4 + r), np.where(LANES % 2, 0, 3 + r))


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_without_lane_offset(arch: str) -> None:
    data = np.arange(128, dtype=np.uint32)
    got = run(arch, "buffer_load_dword v4, off, s[8:11], s5 offset:8", sgpr={**resource(data), 5: 16}, memory=[data])
    np.testing.assert_array_equal(got.vgpr(4), 6)


@pytest.mark.parametrize("arch", ARCHS)
def test_structured_buffer(arch: str) -> None:
    data = np.arange(512, dtype=np.uint32)
    sgpr = resource(data, records=40, stride=12)
    text = "buffer_load_dword v4, v[0:1], s[8:11], 0 idxen offen offset:4"
    got = run(arch, text, vgpr={0: LANES, 1: 4}, sgpr=sgpr, memory=[data])
    np.testing.assert_array_equal(got.vgpr(4), np.where(LANES < 40, 3 * LANES + 2, 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_stride_without_index_leaves_records_in_bytes(arch: str) -> None:
    data = np.arange(1, 129, dtype=np.uint32)
    text = "buffer_load_dword v4, v1, s[8:11], 0 offen"
    got = run(arch, text, vgpr={1: 4 * LANES}, sgpr=resource(data, records=128, stride=64), memory=[data])
    np.testing.assert_array_equal(got.vgpr(4), np.where(LANES < 32, LANES + 1, 0))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("stride", "word3"), [(0x8000 | 16, RAW), (0, RAW | 1 << 23)])
def test_swizzled_and_add_thread_id_buffers_are_unsupported(arch: str, stride: int, word3: int) -> None:
    data = np.zeros(128, np.uint32)
    text = "buffer_load_dword v4, v1, s[8:11], 0 offen"
    got = run(arch, text, vgpr={1: 4 * LANES}, sgpr=resource(data, stride=stride, word3=word3), memory=[data])
    assert kinds(got) == {"unsupported"}


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_in_range_but_outside_the_argument(arch: str) -> None:
    data = np.full(64, 3, np.uint32)
    text = "buffer_load_dword v4, v1, s[8:11], 0 offen"
    got = run(arch, text, vgpr={1: 8 * LANES}, sgpr=resource(data, 0xFFFFFFFF), memory=[data])
    np.testing.assert_array_equal(got.vgpr(4), np.where(LANES < 32, 3, 0))
    assert kinds(got) == {"global-bounds"}
