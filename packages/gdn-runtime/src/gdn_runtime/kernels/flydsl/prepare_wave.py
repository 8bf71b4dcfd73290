"""Fused prepare, variant "wave": one wave per chunk and value head, four heads of a chunk per workgroup, no barrier."""

from __future__ import annotations

from ...spec.flydsl import FusedPrepareSpec
from ..common import lds
from .prepare_chunk import BLOCKS, Outputs, Rows, head_major_row, root
from .prepare_head import form_system, invert, load_head
from .prepare_rows import HALVES, Columns, multiply, store_rows, t_operands


def prepare_head(spec: FusedPrepareSpec, a, head, wave, lane, region) -> None:
    """One chunk of value head ``head`` by one wave."""
    wide = spec.arch == "gfx950"
    data = load_head(spec, a, head, lane)
    place, keys = data.place, data.keys
    value_root = root(place, a.v, head, a.v_stride_b, a.v_stride_t, a.v_stride_h)
    values = Rows(place, value_root, a.v_stride_t, by_block=True)
    row = head_major_row(spec, place, head, a.seq_len)
    u, w = Outputs(place, a.u, row), Outputs(place, a.w, row)
    lds.sched_fence()

    system = form_system(spec, a, data, row, wave, lane, region)
    lds.sched_fence()
    stages = [(rows, out, half) for rows, out in ((values, u), (keys, w)) for half in range(HALVES)]
    columns = Columns(values, 0, lane)
    lds.sched_fence()
    y = invert(system, wide)
    gains = [system.gates.gain(j) for j in range(BLOCKS)]
    decayed = [system.gates.decayed_gain(j) for j in range(BLOCKS)]
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
