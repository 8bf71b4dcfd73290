"""Fused prepare by one wave per chunk and value head: the loads, and M = -A by tiles, of its two kernels.

The wave has no one to share with, so there is no barrier; LDS serves it alone (``Gates``).
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx

from ..common import lds
from ..common.memory import Buffer
from .prepare_chunk import (
    BLOCKS,
    SPREAD_BYTES,
    Gates,
    Place,
    Rows,
    cumulate,
    floored,
    in_log2,
    key_head,
    load_gain,
    load_gate,
    locate,
    root,
    widened,
)
from .prepare_inverse import Masks, column_factor, diagonal_m, invert_diagonal, masks, merge, pack
from .prepare_rows import key_product, load_by_token

WAVES = 4
"""Of a workgroup, and value heads as well."""


@dataclass(frozen=True)
class Data:
    """Loads under way: gate and gain of the lane's token, k by token."""

    place: Place
    gate: object
    gain: object
    keys: Rows
    by_token: list


def load_head(spec, a, head, lane) -> Data:
    """Issue the loads of one chunk of value head ``head``.

    Without this fence and those of the callers the compiler moves the loads to where they are used: 2 % fewer
    instructions, but a fifth more time alone by the emulator's model at a memory latency of 1500 cycles.
    """
    place = locate(spec, a)
    gate_root = root(place, a.g, head, a.g_stride_b, a.g_stride_t, a.g_stride_h)
    gain_root = root(place, a.beta, head, a.beta_stride_b, a.beta_stride_t, a.beta_stride_h)
    gate = load_gate(place, gate_root, a.g_stride_t, lane)
    gain = load_gain(spec, place, gain_root, a.beta_stride_t, lane)
    lds.sched_fence()  # these first: loads return in order
    key_root = root(place, a.k, key_head(spec, head), a.k_stride_b, a.k_stride_t, a.k_stride_h)
    keys = Rows(place, key_root, a.k_stride_t, by_block=True)
    by_token = [load_by_token(keys, block, lane) for block in range(BLOCKS)]
    return Data(place, gate, gain, keys, by_token)


@dataclass(frozen=True)
class System:
    """p(M) of the diagonal blocks, and of those below the diagonal by (row, column)."""

    gates: Gates
    mask: Masks
    diagonal: list
    lower: dict


def form_system(spec, a, data: Data, row, wave, lane, region) -> System:
    """M of the chunk; store its cumulated gates. ``row``: number of the chunk's first row in [B, H, T]; ``region``:
    SPREAD_BYTES of LDS per wave."""
    wide = spec.arch == "gfx950"
    gate, in_block = cumulate(floored(data.gate))
    gate2 = in_log2(gate)
    sums = Buffer(a.g_cumsum + row * fx.Int64(4), data.place.left * fx.Int32(4))
    sums.store(gate2 if spec.use_exp2 else gate, lane * fx.Int32(4))
    gates = Gates(gate2, in_log2(in_block), widened(spec, data.gain), lane, region.at(wave * fx.Int32(SPREAD_BYTES)))
    mask = masks(lane)
    diagonal = [diagonal_m(key_product(keys, keys, wide), gates, i) for i, keys in enumerate(data.by_token)]
    lower = {}
    for i in range(1, BLOCKS):
        before, factor = gates.before(i), gates.row_factor(i)
        for j in range(i):
            tile = key_product(data.by_token[i], data.by_token[j], wide) * factor
            lower[i, j] = pack(tile * column_factor(before, gates.gate_by_lane(j)))
    return System(gates, mask, diagonal, lower)


def invert(system: System, wide: bool):
    """Tiles of Y = C^T, C = (I - M)^-1, on and above the diagonal: {(J, I): tile}."""
    blocks = [(m, i < BLOCKS - 1) for i, m in enumerate(system.diagonal)]
    return merge(system.lower, invert_diagonal(blocks, system.mask), wide)
