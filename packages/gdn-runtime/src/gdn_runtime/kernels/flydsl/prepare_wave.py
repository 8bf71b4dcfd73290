"""Fused prepare, variant "wave": one wave per chunk and value head, four heads of a chunk per workgroup, no barrier."""

from __future__ import annotations

import flydsl.expr as fx

from ...spec.flydsl import FusedPrepareSpec
from ..common import lds
from ..common.lanes import TILE
from ..common.memory import Buffer
from .prepare_chunk import (
    BLOCKS,
    SPREAD_BYTES,
    Outputs,
    Rows,
    cumulate,
    head_major_row,
    in_log2,
    load_gain,
    load_gate,
    locate,
    published,
    root,
    spread,
)
from .prepare_inverse import column_factor, diagonal_m, exp2_tile, invert_diagonal, masks, merge, pack, row_factor
from .prepare_rows import (
    HALVES,
    Columns,
    key_product,
    load_by_token,
    lower_blocks,
    multiply,
    scaled_operand,
    store_rows,
)

WAVES = 4


def prepare_head(spec: FusedPrepareSpec, a, head, wave, lane, region) -> None:
    """One chunk of value head ``head`` by one wave."""
    wide = spec.arch == "gfx950"
    place = locate(spec, a)
    key_head = head // fx.Int32(spec.num_heads // spec.num_key_heads)
    keys = Rows(place, root(place, a.k, key_head, a.k_stride_b, a.k_stride_t, a.k_stride_h), a.k_stride_t)
    gate_root = root(place, a.g, head, a.g_stride_b, a.g_stride_t, a.g_stride_h)
    gain_root = root(place, a.beta, head, a.beta_stride_b, a.beta_stride_t, a.beta_stride_h)
    gate = load_gate(place, gate_root, a.g_stride_t, lane)
    gain = load_gain(spec, place, gain_root, a.beta_stride_t, lane)
    by_token = [load_by_token(keys, block, lane) for block in range(BLOCKS)]
    values = Rows(place, root(place, a.v, head, a.v_stride_b, a.v_stride_t, a.v_stride_h), a.v_stride_t)
    row = head_major_row(spec, place, head, a.seq_len)
    u, w = Outputs(place, a.u, row), Outputs(place, a.w, row)
    lds.sched_fence()

    gate = cumulate(gate)
    gate2 = in_log2(gate)
    sums = Buffer(a.g_cumsum + row * fx.Int64(4), place.left * fx.Int32(4))
    sums.store(published(spec, gate, gate2), lane * fx.Int32(4))
    gates = spread(gate2, gain, lane, region.at(wave * fx.Int32(SPREAD_BYTES)))
    mask = masks(lane)

    m = [diagonal_m(key_product(keys_i, keys_i, wide), gates, i) for i, keys_i in enumerate(by_token)]
    lower = {}
    for i in range(1, BLOCKS):
        factor = row_factor(gates, i)
        for j in range(i):
            tile = key_product(by_token[i], by_token[j], wide) * factor * column_factor(gates, i, j)
            lower[i, j] = pack(tile)
    lds.sched_fence()
    stages = [(values, u, half) for half in range(HALVES)] + [(keys, w, half) for half in range(HALVES)]
    columns = Columns(stages[0][0], stages[0][2], lane)
    lds.sched_fence()
    diagonal = [invert_diagonal(m[i], mask, natural=i < BLOCKS - 1) for i in range(BLOCKS)]
    y = merge(lower, diagonal, wide)
    t_u, t_w = {}, {}
    for j in range(BLOCKS):
        gain_j = gates.gain_by_register[j]
        decayed = gain_j * exp2_tile(gates.gate_by_register[j])
        for i in range(j, BLOCKS):
            t_u[i, j] = scaled_operand(y[j, i], gain_j, spec.arch)
            t_w[i, j] = scaled_operand(y[j, i], decayed, spec.arch)
    lds.sched_fence()
    for number, (rows, out, half) in enumerate(stages):
        operands = [columns.operands(block) for block in range(BLOCKS)]
        if number + 1 < len(stages):
            columns = Columns(stages[number + 1][0], stages[number + 1][2], lane)
        lds.sched_fence()
        t = t_u if out is u else t_w
        for i in range(BLOCKS):
            store_rows(out, multiply(t, operands, i, wide), i, half, lane, spec.arch)
        lds.sched_fence()
