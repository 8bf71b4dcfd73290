"""Buffer, global and flat atomics against numpy and Python integers."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from accesses import (
    ARCHS,
    LANES,
    U32,
    at,
    kinds,
    registers,
    resource,
    run,
)

from cdna_emu.native import State


def integer_rmw(op: str, bits: int, old: int, value: int, other: int) -> int:
    def signed(x: int) -> int:
        return x - (1 << bits) if x >> bits - 1 else x

    wrapped = (1 << bits) - 1
    return {
        "swap": lambda: value,
        "cmpswap": lambda: value if old == other else old,
        "add": lambda: (old + value) & wrapped,
        "sub": lambda: (old - value) & wrapped,
        "smin": lambda: min(old, value, key=signed),
        "smax": lambda: max(old, value, key=signed),
        "umin": lambda: min(old, value),
        "umax": lambda: max(old, value),
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
        "inc": lambda: 0 if old >= value else old + 1,
        "dec": lambda: value if old == 0 or old > value else old - 1,
    }[op]()


ATOMIC_FORMS = {
    "buffer": "buffer_atomic_{op} {data}, v1, s[8:11], 0 offen offset:16{sc0}",
    "global_base": "global_atomic_{op} {out}v1, {data}, s[2:3] offset:16{sc0}",
    "global": "global_atomic_{op} {out}v[2:3], {data}, off offset:16{sc0}",
    "flat": "flat_atomic_{op} {out}v[2:3], {data} offset:16{sc0}",
}


def atomic(
    arch: str, form: str, op: str, data_registers: int, words: int, returns: bool, state: dict[str, Any]
) -> tuple[State, U32]:
    first = 4 if form == "buffer" or not returns else 10
    out = "" if form == "buffer" or not returns else registers(words, 10) + ", "
    text = ATOMIC_FORMS[form].format(op=op, data=registers(data_registers), out=out, sc0=" sc0" if returns else "")
    got = run(arch, text, **state)
    assert not got.findings
    return got, np.stack([got.vgpr(first + r) for r in range(words)], 1).copy()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ATOMIC_FORMS)
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(
    "op", ["swap", "cmpswap", "add", "sub", "smin", "smax", "umin", "umax", "and", "or", "xor", "inc", "dec"]
)
def test_integer_atomics(arch: str, form: str, bits: int, op: str) -> None:
    rng = np.random.default_rng(bits)
    dtype = np.uint32 if bits == 32 else np.uint64
    memory = rng.integers(0, 1 << bits, 40, dtype)
    memory[:8] = rng.integers(0, 5, 8)
    index = rng.integers(0, 32, 64)  # lanes share addresses: they go in lane order
    value = rng.integers(0, 1 << bits, 64, dtype)
    value[::3] = rng.integers(0, 5, 22)
    other = np.where(LANES % 2, memory[index], value)
    n = bits // 32
    for returns in (False, True):
        got_memory, want = memory.copy(), [int(x) for x in memory]
        state = at(got_memory, index * (bits // 8))
        for first, source in ((4, value), (4 + n, other)):
            pairs = np.ascontiguousarray(source).view(np.uint32).reshape(64, n)
            state["vgpr"].update({first + r: pairs[:, r] for r in range(n)})
        old = []
        for lane in range(64):
            old.append(want[index[lane]])
            want[index[lane]] = integer_rmw(op, bits, old[-1], int(value[lane]), int(other[lane]))
        suffix = "_x2" if bits == 64 else ""
        data_registers = n * (2 if op == "cmpswap" else 1)
        got, returned = atomic(arch, form, op + suffix, data_registers, n, returns, state)
        np.testing.assert_array_equal(got_memory, np.array(want, dtype))
        if returns:
            np.testing.assert_array_equal(returned.view(dtype)[:, 0], np.array(old, dtype))
        else:
            np.testing.assert_array_equal(got.vgpr(4), np.ascontiguousarray(value).view(np.uint32).reshape(64, n)[:, 0])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ATOMIC_FORMS)
@pytest.mark.parametrize("op", ["add_f32", "add_f64", "min_f64", "max_f64"])
def test_float_atomics(arch: str, form: str, op: str) -> None:
    dtype = np.float32 if op.endswith("32") else np.float64
    n = np.dtype(dtype).itemsize // 4
    memory: npt.NDArray[Any] = np.array([1.5, -0.0, np.inf, 1e-40, 1e30, -7], dtype)
    values: npt.NDArray[Any] = np.array([2.25, 0.0, 1.0, 2e-40, -1e30, 1e-3], dtype)
    want = {"add": memory + values, "min": np.minimum(values, memory), "max": np.maximum(values, memory)}[op[:3]]
    for returns in (False, True):
        target = memory.copy()
        state = at(target, np.minimum(LANES, 5) * 4 * n)
        pairs = values[np.minimum(LANES, 5)].view(np.uint32).reshape(64, n)
        state["vgpr"].update({4 + r: pairs[:, r] for r in range(n)})
        _, returned = atomic(arch, form, op, n, n, returns, {**state, "exec_mask": 0x3F, "mode": 0})
        np.testing.assert_array_equal(target, want)
        if returns:
            np.testing.assert_array_equal(returned[:6].view(dtype)[:, 0], memory)


def bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("form", ATOMIC_FORMS)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_atomics(form: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 128)).astype(np.float32)
    if kind == "f16":
        x, y = a.astype(np.float16), b.astype(np.float16)
        want = (x + y).view(np.uint16)
        memory, data = x.view(np.uint32).copy(), y.view(np.uint32)
    else:
        x16, y16 = bf16(a), bf16(b)
        want = bf16((x16.astype(np.uint32) << 16).view(np.float32) + (y16.astype(np.uint32) << 16).view(np.float32))
        memory, data = x16.view(np.uint32).copy(), y16.view(np.uint32)
    for arch in ARCHS:
        if (form, kind, arch) == ("buffer", "bf16", "gfx942"):
            continue  # gfx950 only
        target = memory.copy()
        state = at(target, 4 * LANES)
        state["vgpr"][4] = data
        _, returned = atomic(arch, form, f"pk_add_{kind}", 1, 1, True, state)
        np.testing.assert_array_equal(target.view(np.uint16), want)
        np.testing.assert_array_equal(returned[:, 0], memory)


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_that_share_an_address_sum_up(arch: str) -> None:
    memory = np.zeros(1, np.float32)
    state = at(memory, 0 * LANES)
    state["vgpr"][4] = np.arange(64, dtype=np.float32)
    atomic(arch, "global_base", "add_f32", 1, 1, False, state)
    assert memory[0] == 2016


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_out_of_bounds(arch: str) -> None:
    memory = np.zeros(8, np.uint32)
    sgpr = resource(memory, 28)
    vgpr = {1: 8 * LANES, 4: np.ones(64, np.uint32), 5: np.ones(64, np.uint32)}
    got = run(arch, "buffer_atomic_add_x2 v[4:5], v1, s[8:11], 0 offen sc0", vgpr=vgpr, sgpr=sgpr, memory=[memory])
    np.testing.assert_array_equal(memory, [1, 1, 1, 1, 1, 1, 0, 0])  # the fourth is partly out: all of it is dropped
    np.testing.assert_array_equal(got.vgpr(5), 0)
    assert kinds(got) == {"buffer-bounds"}
    state = at(memory, 4 * LANES)
    got = run(arch, "global_atomic_add v[2:3], v4, off offset:16", **state)
    assert kinds(got) == {"global-bounds"}


@pytest.mark.parametrize("arch", ARCHS)
def test_misaligned_atomic(arch: str) -> None:
    memory = np.zeros(128, np.uint32)
    state = at(memory, 4 * LANES + (LANES == 9))
    state["vgpr"][4] = np.ones(64, np.uint32)
    got = run(arch, "global_atomic_add v[2:3], v4, off offset:16", **state)
    np.testing.assert_array_equal(memory[:64], LANES != 9)
    assert kinds(got) == {"misaligned"}
    assert got.findings[0].lane == 9
