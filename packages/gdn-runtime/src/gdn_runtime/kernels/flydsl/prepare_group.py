"""Fused prepare, variant "group": the four waves of a workgroup share a chunk and value head; two barriers.

1. Wave b inverts diagonal block b and packs M below it: tiles (1, 0) and (2, 0), (2, 1) and (3, 1), (3, 2), (3, 0).
2. Wave b does column b of Y = C^T, that is block row b of T beta and T beta e^G.
3. Each wave multiplies T with half of the columns of v or k.
What passes from step to step goes through LDS as MFMA operands, one access of 8 or 16 bytes per lane and tile. Every
wave issues all of its loads before it takes its role: behind a branch they would come too late.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import scf

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
from .prepare_inverse import column, column_factor, diagonal_m, invert_diagonal, masks, pack
from .prepare_rows import Columns, key_product, left_operands, load_by_token, multiply, store_rows, t_operands

LOWER = {0: (1, 2), 1: (2, 3), 2: (3,), 3: (0,)}
"""Blocks whose products with its own each wave takes, all of them among the next two (mod 4)."""

OPERAND_BYTES = 8 * 64
LOWER_PLACES = {(i, j): OPERAND_BYTES * number for number, (i, j) in enumerate(
    (i, j) for i in range(BLOCKS) for j in range(i)
)}  # fmt: skip
NATURAL_PLACES = {block: OPERAND_BYTES * (len(LOWER_PLACES) + block) for block in range(BLOCKS - 1)}
TILES_BYTES = OPERAND_BYTES * (len(LOWER_PLACES) + len(NATURAL_PLACES))


def _t_places():
    places, end = {}, 0
    for row in range(BLOCKS):
        for blocks in left_operands(row):
            places[row, blocks] = end
            end += OPERAND_BYTES * len(blocks)
    return places, end


T_PLACES, T_BYTES = _t_places()
GROUP_LDS = (BLOCKS * SPREAD_BYTES, TILES_BYTES, 2 * T_BYTES)


def by_role(wave, role, waves=range(BLOCKS)) -> None:
    """Trace ``role(w)`` for w of ``waves``; a wave executes that of its number, a scalar."""
    if len(waves) == 1:
        role(waves[0])
        return
    middle = len(waves) // 2
    branch = scf.IfOp((wave < fx.Int32(waves[middle])).ir_value(), [], has_else=True)
    for block, part in ((branch.then_block, waves[:middle]), (branch.else_block, waves[middle:])):
        with ir.InsertionPoint(block):
            by_role(wave, role, part)
            scf.YieldOp([])


def prepare_chunk(spec: FusedPrepareSpec, a, head, wave, lane, regions) -> None:
    """One chunk of value head ``head`` by the four waves of a workgroup."""
    wide = spec.arch == "gfx950"
    spread_region, tiles_region, t_region = regions
    place = locate(spec, a)
    for_u, half = wave < fx.Int32(2), wave & fx.Int32(1)

    gate_root = root(place, a.g, head, a.g_stride_b, a.g_stride_t, a.g_stride_h)
    gain_root = root(place, a.beta, head, a.beta_stride_b, a.beta_stride_t, a.beta_stride_h)
    gate = load_gate(place, gate_root, a.g_stride_t, lane)
    gain = load_gain(spec, place, gain_root, a.beta_stride_t, lane)
    lds.sched_fence()  # these first: loads return in order
    key_root = root(place, a.k, key_head(spec, head), a.k_stride_b, a.k_stride_t, a.k_stride_h)
    keys = Rows(place, key_root, a.k_stride_t, by_block=False)
    by_token = [load_by_token(keys, (wave + fx.Int32(next_)) & fx.Int32(3), lane) for next_ in range(3)]
    value_root = root(place, a.v, head, a.v_stride_b, a.v_stride_t, a.v_stride_h)
    stride_t = for_u.select(a.v_stride_t, a.k_stride_t)
    columns = Columns(Rows(place, for_u.select(value_root, key_root), stride_t, by_block=False), half, lane)
    row = head_major_row(spec, place, head, a.seq_len)
    out = Outputs(place, for_u.select(a.u, a.w), row)
    lds.sched_fence()

    gate, in_block = cumulate(floored(gate))
    gate2 = in_log2(gate)
    gates = Gates(gate2, in_log2(in_block), widened(spec, gain), lane, spread_region.at(wave * fx.Int32(SPREAD_BYTES)))
    mask = masks(lane)
    tiles_place, t_place = tiles_region.at(lane * fx.Int32(8)), t_region.at(lane * fx.Int32(8))
    pairs_place = t_region.at(lane * fx.Int32(16))

    def role(block: int) -> None:
        if block == 0:
            sums = Buffer(a.g_cumsum + row * fx.Int64(4), place.left * fx.Int32(4))
            sums.store(gate2 if spec.use_exp2 else gate, lane * fx.Int32(4))
        m = diagonal_m(key_product(by_token[0], by_token[0], wide), gates, block)
        # Before the tiles below it, whose products then fill this chain's waits: 3 % of modelled time on gfx942.
        (diagonal,) = invert_diagonal([(m, block in NATURAL_PLACES)], mask)
        for other in LOWER[block]:
            i, j = max(block, other), min(block, other)
            ours, theirs = by_token[0], by_token[(other - block) % BLOCKS]
            tile = key_product(*((ours, theirs) if block > other else (theirs, ours)), wide)
            tile = tile * gates.row_factor(i) * column_factor(gates.before(i), gates.gate_by_lane(j))
            lds.write(pack(tile), tiles_place, LOWER_PLACES[i, j])
        if block in NATURAL_PLACES:
            lds.write(diagonal.natural, tiles_place, NATURAL_PLACES[block])
        lds.barrier()

        lower = {(i, j): lds.read(tiles_place, 2, distance) for (i, j), distance in LOWER_PLACES.items() if i <= block}
        naturals = [lds.read(tiles_place, 2, NATURAL_PLACES[j]) for j in range(block)]
        tiles = column(lower, naturals, diagonal, block, wide)
        for number, factor in enumerate((gates.gain, gates.decayed_gain)):
            factors = [factor(j) for j in range(block + 1)]
            for key, operand in t_operands(block, tiles, factors, spec.arch).items():
                at = t_place if operand.numel == 2 else pairs_place
                lds.write(operand, at, T_BYTES * number + T_PLACES[key])

    by_role(wave, role)
    lds.barrier()

    skipped = for_u.select(fx.Int32(0), fx.Int32(T_BYTES))
    t_place = t_region.at(lane * fx.Int32(8) + skipped)
    pairs_place = t_region.at(lane * fx.Int32(16) + skipped)
    t = {}
    for (i, blocks), distance in T_PLACES.items():
        t[i, blocks] = lds.read(t_place if len(blocks) == 1 else pairs_place, 2 * len(blocks), distance)
    operands = [columns.operands(block) for block in range(BLOCKS)]
    for i in range(BLOCKS):
        store_rows(out, multiply(t, operands, i, wide), i, half, lane, spec.arch)
