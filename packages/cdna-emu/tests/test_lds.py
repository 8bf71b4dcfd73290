"""LDS instructions and lane permutation, each against numpy."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from accesses import ARCHS, LANES, U8, U32, kinds, random_bytes, registers, run

MASK = 0xF0F0_FFFF_0000_AAAA
ON = (MASK >> LANES.astype(object) & 1).astype(bool)


def words_at(data: U8, offsets: npt.NDArray[np.int64]) -> U32:
    """Dword at each byte offset, which may have any alignment."""
    return data[offsets[..., None] + np.arange(4)].view(np.uint32)[..., 0]


RNG = np.random.default_rng(31)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
def test_wide_reads(arch: str, dwords: int) -> None:
    data = random_bytes(4096)
    offsets = 20 * LANES[::-1] + LANES % 3
    got = run(
        arch, f"ds_read_b{32 * dwords} {registers(dwords)}, v1 offset:1000", vgpr={1: offsets}, exec_mask=MASK, lds=data
    )
    for r in range(4):
        want = np.where(ON, words_at(data, offsets + 1000 + 4 * r), 0) if r < dwords else 0
        np.testing.assert_array_equal(got.vgpr(4 + r), want)
    assert not got.findings


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "kind", ["u8", "i8", "u16", "i16", *(f"{k}_d16{h}" for k in ("u8", "i8", "u16") for h in ("", "_hi"))]
)
def test_sub_dword_reads(arch: str, kind: str) -> None:
    data = random_bytes(1024)
    old = random_bytes(256, 1).view(np.uint32)
    offsets = 11 * LANES
    got = run(arch, f"ds_read_{kind} v4, v1 offset:3", vgpr={1: offsets, 4: old}, exec_mask=MASK, lds=data)
    word = words_at(data, offsets + 3)
    if "8" in kind[:3]:
        value = (word & 0xFF).astype(np.uint8).view(np.int8 if kind[0] == "i" else np.uint8)
    else:
        value = (word & 0xFFFF).astype(np.uint16).view(np.int16 if kind[0] == "i" else np.uint16)
    want = value.astype(np.int32).view(np.uint32)
    if kind.endswith("_hi"):
        want = want << 16 | old & 0xFFFF
    elif "d16" in kind:
        want = want & 0xFFFF | old & 0xFFFF0000
    np.testing.assert_array_equal(got.vgpr(4), np.where(ON, want, old))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("kind", "size", "shift"),
    [
        ("b8", 1, 0),
        ("b8_d16_hi", 1, 2),
        ("b16", 2, 0),
        ("b16_d16_hi", 2, 2),
        *((f"b{8 * n}", n, 0) for n in (4, 8, 12, 16)),
    ],
)
def test_writes_touch_their_bytes_only(arch: str, kind: str, size: int, shift: int) -> None:
    data = random_bytes(2048)
    values = random_bytes(1024, 2).reshape(64, 16)
    vgpr: dict[int, Any] = {4 + r: values.view(np.uint32)[:, r] for r in range(4)}
    offsets = 19 * LANES
    text = f"ds_write_{kind} v1, {registers(-(-size // 4))} offset:300"
    got = run(arch, text, vgpr={1: offsets, **vgpr}, exec_mask=MASK, lds=data)
    want = data.copy()
    for lane in LANES[ON]:
        want[offsets[lane] + 300 : offsets[lane] + 300 + size] = values[lane, shift : shift + size]
    np.testing.assert_array_equal(got.lds, want)
    assert not got.findings


TWO = [("", 4, 4), ("st64", 4, 256), ("", 8, 8), ("st64", 8, 512)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("form", "size", "unit"), TWO)
def test_two_address_reads(arch: str, form: str, size: int, unit: int) -> None:
    data = random_bytes(8192)
    offsets = size * LANES[::-1]
    n = size // 4
    # the destination holds the address
    text = f"ds_read2{form}_b{8 * size} v[4:{3 + 2 * n}], v4 offset0:5 offset1:2"
    got = run(arch, text, vgpr={4: offsets}, lds=data)
    for k, offset in enumerate((5, 2)):
        for r in range(n):
            np.testing.assert_array_equal(got.vgpr(4 + k * n + r), words_at(data, offsets + offset * unit + 4 * r))
    assert got.counts[0].bytes == 2 * 64 * size


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("form", "size", "unit"), TWO)
def test_two_address_writes_and_exchanges(arch: str, form: str, size: int, unit: int) -> None:
    data = random_bytes(8192)
    n = size // 4
    offsets = 4 * size * LANES % 256
    offsets = np.where(LANES * 4 * size < 256, offsets, offsets + 2048)
    values = random_bytes(64 * 2 * size, 4).reshape(64, 2 * size)
    vgpr = {4 + r: values.view(np.uint32)[:, r] for r in range(2 * n)}
    mask = (1 << (256 // (4 * size))) - 1
    common = {"vgpr": {1: offsets, **vgpr}, "exec_mask": mask, "lds": data}
    want, old = data.copy(), np.zeros((64, 2 * n), np.uint32)
    for lane in range(256 // (4 * size)):
        for k, offset in enumerate((1, 3)):
            place = slice(offsets[lane] + offset * unit, offsets[lane] + offset * unit + size)
            old[lane, k * n : (k + 1) * n] = want[place].view(np.uint32)
            want[place] = values[lane, k * size : (k + 1) * size]
    data0, data1 = registers(n, 4), registers(n, 4 + n)
    got = run(arch, f"ds_write2{form}_b{8 * size} v1, {data0}, {data1} offset0:1 offset1:3", **common)
    np.testing.assert_array_equal(got.lds, want)
    text = f"ds_wrxchg2{form}_rtn_b{8 * size} {registers(2 * n, 20)}, v1, {data0}, {data1} offset0:1 offset1:3"
    got = run(arch, text, **common)
    np.testing.assert_array_equal(got.lds, want)
    for r in range(2 * n):
        np.testing.assert_array_equal(got.vgpr(20 + r), old[:, r])


@pytest.mark.parametrize("arch", ARCHS)
def test_bounds(arch: str) -> None:
    data = np.full(256, 7, np.uint8)
    got = run(arch, "ds_read_b64 v[4:5], v1", vgpr={1: 4 * LANES, 4: 9}, lds=data)
    np.testing.assert_array_equal(got.vgpr(4), np.where(LANES < 63, 0x07070707, 0))
    assert kinds(got) == {"lds-bounds"}
    assert (got.findings[0].lane, got.findings[0].address) == (63, 252)
    got = run(arch, "ds_write_b32 v1, v2 offset:4", vgpr={1: 4 * LANES}, lds=data)
    np.testing.assert_array_equal(got.lds, np.where(np.arange(256) < 4, 7, 0))
    assert kinds(got) == {"lds-bounds"}


@pytest.mark.parametrize("arch", ARCHS)
def test_add_lane_id_forms(arch: str) -> None:
    data = np.arange(256, dtype=np.uint32)
    got = run(arch, "ds_read_addtid_b32 v4 offset:64", m0=128, lds=data)
    np.testing.assert_array_equal(got.vgpr(4), LANES + 48)
    got = run(arch, "ds_write_addtid_b32 v4 offset:64", m0=128, lds=data, vgpr={4: LANES + 1000})
    np.testing.assert_array_equal(got.lds.view(np.uint32)[48:112], LANES + 1000)


# ---- atomics


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def integer_rmw(op: str, bits: int, old: int, data0: int, data1: int) -> int:
    wrapped = (1 << bits) - 1
    name, _, kind = op.partition("_")
    if kind[0] == "i":
        pick = min if name == "min" else max
        return pick(old, data0, key=lambda x: signed(x, bits))
    return {
        "add": lambda: (old + data0) & wrapped,
        "sub": lambda: (old - data0) & wrapped,
        "rsub": lambda: (data0 - old) & wrapped,
        "inc": lambda: 0 if old >= data0 else old + 1,
        "dec": lambda: data0 if old == 0 or old > data0 else old - 1,
        "min": lambda: min(old, data0),
        "max": lambda: max(old, data0),
        "and": lambda: old & data0,
        "or": lambda: old | data0,
        "xor": lambda: old ^ data0,
        "mskor": lambda: old & ~data0 | data1,
        "cmpst": lambda: data1 if old == data0 else old,
        "wrxchg": lambda: data0,
    }[name]()


INTEGER_OPS = [
    "add_u",
    "sub_u",
    "rsub_u",
    "inc_u",
    "dec_u",
    "min_i",
    "max_i",
    "min_u",
    "max_u",
    "and_b",
    "or_b",
    "xor_b",
    "mskor_b",
    "cmpst_b",
    "wrxchg_b",
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("op", INTEGER_OPS)
def test_integer_atomics(arch: str, bits: int, op: str) -> None:
    rng = np.random.default_rng(bits)
    dtype = np.uint32 if bits == 32 else np.uint64
    n, size = bits // 32, bits // 8
    memory = rng.integers(0, 1 << bits, 34, dtype)
    memory[:8] = rng.integers(0, 5, 8)
    index = rng.integers(0, 32, 64)  # lanes share addresses: they go in lane order
    data0 = rng.integers(0, 1 << bits, 64, dtype)
    data0[::3] = rng.integers(0, 5, 22)
    data0 = np.where(LANES % 4 == 1, memory[index], data0)
    data1 = rng.integers(0, 1 << bits, 64, dtype)
    vgpr: dict[int, Any] = {1: index * size}
    for first, source in ((4, data0), (4 + n, data1)):
        vgpr.update({first + r: np.ascontiguousarray(source).view(np.uint32).reshape(64, n)[:, r] for r in range(n)})
    want, old = [int(x) for x in memory], [0] * 64
    for lane in LANES[ON]:
        old[lane] = want[index[lane]]
        want[index[lane]] = integer_rmw(op, bits, old[lane], int(data0[lane]), int(data1[lane]))
    name, kind = op.split("_")
    data = registers(n, 4) + (f", {registers(n, 4 + n)}" if name in ("mskor", "cmpst") else "")
    got = run(arch, f"ds_{name}_rtn_{kind}{bits} {registers(n, 20)}, v1, {data}", vgpr=vgpr, exec_mask=MASK, lds=memory)
    np.testing.assert_array_equal(got.lds.view(dtype), np.array(want, dtype))
    returned = np.stack([got.vgpr(20 + r) for r in range(n)], 1).copy().view(dtype)[:, 0]
    np.testing.assert_array_equal(returned, np.array(old, dtype))
    assert not got.findings
    if name != "wrxchg":
        got = run(arch, f"ds_{name}_{kind}{bits} v1, {data}", vgpr=vgpr, exec_mask=MASK, lds=memory)
        np.testing.assert_array_equal(got.lds.view(dtype), np.array(want, dtype))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("op", ["add", "min", "max", "cmpst"])
def test_float_atomics(arch: str, bits: int, op: str) -> None:
    dtype = np.float32 if bits == 32 else np.float64
    n = bits // 32
    memory = np.resize(np.array([1.5, -0.0, np.inf, 1e-40, 1e30, -7, 0.0, 2.0], dtype), 64)
    data0 = np.resize(np.array([2.25, 0.0, 1.0, 2e-40, -1e30, 1e-3, -0.0, 2.0], dtype), 64)
    data1 = np.arange(64).astype(dtype)
    want = {
        "add": memory + data0,
        "min": np.where(data0 < memory, data0, memory),
        "max": np.where(data0 > memory, data0, memory),
        "cmpst": np.where(memory == data0, data1, memory),
    }[op]
    vgpr: dict[int, Any] = {1: 4 * n * LANES}
    for first, source in ((4, data0), (4 + n, data1)):
        vgpr.update({first + r: source.view(np.uint32).reshape(64, n)[:, r] for r in range(n)})
    data = registers(n, 4) + (f", {registers(n, 4 + n)}" if op == "cmpst" else "")
    got = run(arch, f"ds_{op}_rtn_f{bits} {registers(n, 20)}, v1, {data}", vgpr=vgpr, lds=memory)
    bits_type = np.uint32 if bits == 32 else np.uint64
    np.testing.assert_array_equal(got.lds.view(bits_type), want.view(bits_type))
    np.testing.assert_array_equal(np.stack([got.vgpr(20 + r) for r in range(n)], 1).copy().view(dtype)[:, 0], memory)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ["add_f64", "min_f32", "max_f32", "min_f64", "max_f64", "cmpst_f32", "cmpst_f64"])
def test_float_atomics_without_return(arch: str, form: str) -> None:
    """LDS is as after the form that returns."""
    name, kind = form.split("_")
    n = int(kind[1:]) // 32
    vgpr = {1: 4 * n * LANES, **{r: RNG.standard_normal(64).astype(np.float32) for r in range(4, 8)}}
    memory = RNG.standard_normal(64).astype(np.float32 if n == 1 else np.float64)
    data = registers(n, 4) + (f", {registers(n, 4 + n)}" if name == "cmpst" else "")
    plain = run(arch, f"ds_{form} v1, {data}", vgpr=vgpr, lds=memory)
    returning = run(arch, f"ds_{name}_rtn_{kind} {registers(n, 20)}, v1, {data}", vgpr=vgpr, lds=memory)
    np.testing.assert_array_equal(plain.lds, returning.lds)
    assert name == "cmpst" or (plain.lds != memory.view(np.uint8)).any()


@pytest.mark.parametrize("arch", ARCHS)
def test_add_obeys_the_denormal_mode(arch: str) -> None:
    tiny = np.full(64, 1e-40, np.float32)
    for mode, want in ((0xF0, np.float32(1e-40) + np.float32(1e-40)), (0xC0, 0), (0xD0, 0), (0xE0, 0)):
        got = run(arch, "ds_add_f32 v1, v2", vgpr={1: 4 * LANES, 2: tiny}, lds=tiny, mode=mode)
        np.testing.assert_array_equal(got.lds.view(np.float32), np.float32(want))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_adds(arch: str, kind: str) -> None:
    a, b = np.random.default_rng(3).normal(size=(2, 128)).astype(np.float32)
    if kind == "f16":
        x, y = a.astype(np.float16), b.astype(np.float16)
        want, memory, data = (x + y).view(np.uint16), x.view(np.uint32), y.view(np.uint32)
    else:
        x32, y32 = (v.view(np.uint32) & 0xFFFF0000 for v in (a, b))
        total = (x32.view(np.float32) + y32.view(np.float32)).view(np.uint32)
        want = ((total + 0x7FFF + (total >> 16 & 1)) >> 16).astype(np.uint16)
        memory, data = ((v >> 16).astype(np.uint16).view(np.uint32) for v in (x32, y32))
    got = run(arch, f"ds_pk_add_rtn_{kind} v4, v1, v2", vgpr={1: 4 * LANES, 2: data}, lds=memory)
    np.testing.assert_array_equal(got.lds.view(np.uint16), want)
    np.testing.assert_array_equal(got.vgpr(4), memory)


@pytest.mark.parametrize("arch", ARCHS)
def test_misaligned_atomic(arch: str) -> None:
    got = run(arch, "ds_add_u32 v1, v2", vgpr={1: 8 * LANES + (LANES == 9), 2: 1}, lds=np.zeros(512, np.uint8))
    np.testing.assert_array_equal(got.lds.view(np.uint32)[::2], LANES != 9)
    assert kinds(got) == {"misaligned"}
    assert (got.findings[0].lane, got.findings[0].address) == (9, 73)


@pytest.mark.parametrize("arch", ARCHS)
def test_nop(arch: str) -> None:
    assert not run(arch, "ds_nop").findings
