"""Fused prepare, variant "wave": one wave per chunk and value head, four heads of a chunk per workgroup, no barrier."""

from __future__ import annotations

import flydsl.expr as fx

from ...spec.flydsl import FusedPrepareSpec
from ..common import lds
from ..common.memory import Buffer
from .prepare_chunk import (
    BLOCKS,
    SPREAD_BYTES,
    Gates,
    Outputs,
    Rows,
    cumulate,
    floored,
    head_major_row,
    in_log2,
    key_head,
    load_gain,
    load_gate,
    locate,
    root,
    widened,
)
from .prepare_inverse import column_factor, diagonal_m, invert_diagonal, masks, merge, pack
from .prepare_rows import HALVES, Columns, key_product, load_by_token, multiply, store_rows, t_operands

WAVES = 4
"""Of a workgroup, and value heads as well."""


def prepare_head(spec: FusedPrepareSpec, a, head, wave, lane, region) -> None:
    """One chunk of value head ``head`` by one wave.

    Without the fences the compiler moves the loads to where they are used: 2 % fewer instructions, but a fifth more
    time alone by the emulator's model at a memory latency of 1500 cycles.
    """
    wide = spec.arch == "gfx950"
    place = locate(spec, a)
    gate_root = root(place, a.g, head, a.g_stride_b, a.g_stride_t, a.g_stride_h)
    gain_root = root(place, a.beta, head, a.beta_stride_b, a.beta_stride_t, a.beta_stride_h)
    gate = load_gate(place, gate_root, a.g_stride_t, lane)
    gain = load_gain(spec, place, gain_root, a.beta_stride_t, lane)
    lds.sched_fence()  # these first: loads return in order
    key_root = root(place, a.k, key_head(spec, head), a.k_stride_b, a.k_stride_t, a.k_stride_h)
    keys = Rows(place, key_root, a.k_stride_t, by_block=True)
    by_token = [load_by_token(keys, block, lane) for block in range(BLOCKS)]
    value_root = root(place, a.v, head, a.v_stride_b, a.v_stride_t, a.v_stride_h)
    values = Rows(place, value_root, a.v_stride_t, by_block=True)
    row = head_major_row(spec, place, head, a.seq_len)
    u, w = Outputs(place, a.u, row), Outputs(place, a.w, row)
    lds.sched_fence()

    gate, in_block = cumulate(floored(gate))
    gate2 = in_log2(gate)
    sums = Buffer(a.g_cumsum + row * fx.Int64(4), place.left * fx.Int32(4))
    sums.store(gate2 if spec.use_exp2 else gate, lane * fx.Int32(4))
    gates = Gates(gate2, in_log2(in_block), widened(spec, gain), lane, region.at(wave * fx.Int32(SPREAD_BYTES)))
    mask = masks(lane)

    m = [diagonal_m(key_product(keys_i, keys_i, wide), gates, i) for i, keys_i in enumerate(by_token)]
    lower = {}
    for i in range(1, BLOCKS):
        before, factor = gates.before(i), gates.row_factor(i)
        for j in range(i):
            tile = key_product(by_token[i], by_token[j], wide) * factor
            lower[i, j] = pack(tile * column_factor(before, gates.gate_by_lane(j)))
    lds.sched_fence()
    stages = [(rows, out, half) for rows, out in ((values, u), (keys, w)) for half in range(HALVES)]
    columns = Columns(values, 0, lane)
    lds.sched_fence()
    diagonal = invert_diagonal([(m[i], i < BLOCKS - 1) for i in range(BLOCKS)], mask)
    y = merge(lower, diagonal, wide)
    gains = [gates.gain(j) for j in range(BLOCKS)]
    decayed = [gates.decayed_gain(j) for j in range(BLOCKS)]
    t_u, t_w = {}, {}
    for i in range(BLOCKS):
        tiles = [y[j, i] for j in range(i + 1)]
        t_u |= t_operands(i, tiles, gains, spec.arch)
        t_w |= t_operands(i, tiles, decayed, spec.arch)
    lds.sched_fence()
    for number, (_, out, half) in enumerate(stages):
        operands = [columns.operands(block) for block in range(BLOCKS)]
        # The rows of the next stage come while this one multiplies.
        for rows, _, next_half in stages[number + 1 : number + 2]:
            columns = Columns(rows, next_half, lane)
        lds.sched_fence()
        t = t_u if out is u else t_w
        for i in range(BLOCKS):
            store_rows(out, multiply(t, operands, i, wide), i, half, lane, spec.arch)
        lds.sched_fence()
