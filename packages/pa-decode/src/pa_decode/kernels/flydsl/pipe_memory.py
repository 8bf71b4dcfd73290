"""Global memory of the D256 pipe: where the pages of a wave's tokens lie, and what its lanes load of them.

A wave takes tokens 64 w .. 64 w + 63 of every tile, a page of 64 or four of 16, and only tiles in which some query row
sees some of them, so that with pages of 64 every page it asks for is one that the sequence owns.

Pages of 64: the id is read by a scalar load, the page is seen through a resource of its own that ends with it, and all
offsets in it are constants beside one register. Pages of 16: every lane reads the ids that it needs itself, the index
held between the first and the last page that some row sees, so that no other id is ever followed; one 64-bit address
per run of tokens serves all its loads. Either way caches of any size are reached.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from gdn_runtime.kernels.common import lanes, memory

from . import pipe_flow as flow
from .pipe_lanes import HEAD_DIM, PIECE

_RAW_DWORDS = 0x27000
"""Word 3 of a buffer resource: raw bytes."""

LONGEST_IMMEDIATE = 4096
"""Offsets of a load that are constants of the instruction are below this."""

ID_BYTES = 4


def resource(address, size):
    """``size`` bytes (Int32) from ``address`` (Int64) on, as four scalar words: loads past them give 0."""
    low, high = Vec.from_elements([address], fx.Int64).bitcast(fx.Int32)
    return lanes.words(low, high, size, fx.Int32(_RAW_DWORDS))


def load_from(view, words, offset, constant=0):
    """``words`` (1 or 4) at ``offset`` bytes (Int32 per lane) and ``constant`` more."""
    kind = T.i32 if words == 1 else Vec.make_type(words, fx.Int32)
    near, far = constant % LONGEST_IMMEDIATE, constant // LONGEST_IMMEDIATE * LONGEST_IMMEDIATE
    at = (offset + fx.Int32(near)).ir_value() if near else offset.ir_value()
    loaded = rocdl.raw_buffer_load(kind, view.ir_value(), at, fx.Int32(far).ir_value())
    return fx.Int32(loaded) if words == 1 else Vec(loaded, (words,), fx.Int32)


def load_at(address, words, constant=0):
    """``words`` (1 or 4) at a 64-bit address per lane and ``constant`` bytes more; on 4-byte addresses."""
    kind = T.i32 if words == 1 else Vec.make_type(words, fx.Int32)
    place = address + fx.Int64(constant) if constant else address
    loaded = llvm.load(kind, memory.pointer(place), alignment=4)
    return fx.Int32(loaded) if words == 1 else Vec(loaded, (words,), fx.Int32)


def at_most(x, bound):
    """The smaller of two Int32."""
    return (x < bound).select(x, bound)


def at_least(x, bound):
    """The larger of two Int32."""
    return (x > bound).select(x, bound)


def unsigned_divmod(x, divisor):
    """(quotient, remainder) of an Int32 that is not negative and a Python int."""
    quotient = fx.Uint32(x) // fx.Uint32(divisor)
    return fx.Int32(quotient), fx.Int32(fx.Uint32(x) % fx.Uint32(divisor))


def times(count, stride):
    """``count`` (Int32) times ``stride`` (Int32 or Int64), both unsigned, in 64 bits."""
    return memory.offset64(count, stride)


class Pages:
    """What a wave loads of its pages. ``make_pages`` makes one of the two kinds.

    ``cursor``: where a wave is in its table row, a tree that loops carry. Loads are counted for waits: ``key_loads``
    and ``value_loads`` per tile, ``scale_loads`` and ``id_loads`` with them.
    """

    key_loads = value_loads = 16

    def __init__(self, spec, args, shape, task, wave, lane):
        self.spec, self.args, self.shape, self.task, self.wave = spec, args, shape, task, wave
        self.group, self.column = unsigned_divmod(lane, shape.side)
        _, self.of_row = unsigned_divmod(lane, PIECE)
        self.tokens = spec.scale_mode == "token"
        self.scale_loads = 2 * shape.runs if self.tokens else 0
        self.head_bytes = HEAD_DIM * spec.page_size
        self.page_bytes = args.num_kv_heads * fx.Int32(self.head_bytes)
        self.table = args.block_tables + fx.Int64(task.sequence) * args.table_stride_row
        head = fx.Int64(task.head)
        self.keys = args.k_cache + head * fx.Int64(self.head_bytes)
        self.values = args.v_cache + head * fx.Int64(self.head_bytes)
        if self.tokens:
            self.block_stride = fx.Int32(args.scale_stride_block)
            offset = head * args.scale_stride_head
            self.scales = [args.k_scale + offset, args.v_scale + offset]

    def pages_of(self, tokens):
        """Number of the page that holds ``tokens`` (Int32)."""
        return fx.Int32(fx.Uint32(tokens) // fx.Uint32(self.spec.page_size))


class LargePages(Pages):
    """Pages of 64 tokens: one per wave and tile."""

    id_loads = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        shape, m = self.shape, self.column
        quad, rest = unsigned_divmod(m, 4)
        if shape.side == 16:
            token = quad * fx.Int32(16) + rest
        else:
            four, half = unsigned_divmod(quad, 2)
            token = half * fx.Int32(16) + four * fx.Int32(4) + rest
        self.key_at = self.group * fx.Int32(16 * 64) + token * fx.Int32(16)
        if self.spec.v_packed:
            self.value_at = self.group * fx.Int32(16 * HEAD_DIM) + m * fx.Int32(16)
            self.tile_step, self.run_step = 16 * shape.side, 2 * 16 * HEAD_DIM
        else:
            self.value_at = m * fx.Int32(64) + self.group * fx.Int32(16)
            self.tile_step, self.run_step = 64 * shape.side, 32
        self.scale_at = self.group * fx.Int32(16 * ID_BYTES) + self.of_row * fx.Int32(ID_BYTES)

    def start(self, first, last):
        """(cursor, page of tile ``first``, ids of the next), ``last`` the wave's last tile."""
        # A context longer than its row of the table, which is the caller's fault, reads nothing behind the row.
        end = (self.args.table_width - fx.Int32(1)) * fx.Int32(ID_BYTES)
        at = at_most(self._position(first), end)
        cursor = {"at": at, "key": self.key_at, "value": self.value_at}
        self.last = at_most(self._position(last), end)
        page = self.page(self._id(at))
        return cursor, page

    def _position(self, tile):
        """Bytes from the start of the table row to the id of the wave's page in ``tile``."""
        return tile * fx.Int32(4 * ID_BYTES) + self.wave * fx.Int32(ID_BYTES)

    def _id(self, at):
        return memory.scalar_load(self.table, fx.Int64(fx.Uint32(at)))

    def ahead(self, cursor):
        """(cursor of the next tile, its id; of the last tile again, once there is no other)."""
        at = at_most(cursor["at"] + fx.Int32(4 * ID_BYTES), self.last)
        return cursor | {"at": at}, self._id(at)

    def page(self, page):
        """What is known of a page once its id is: addresses."""
        offset = times(page, self.page_bytes)
        found = {"keys": self.keys + offset, "values": self.values + offset}
        if self.tokens:
            by_block = times(page, self.block_stride)
            found["scales"] = [scales + by_block for scales in self.scales]
        return found

    def load_keys(self, cursor, page):
        """(cursor, K by tiles of tokens and pieces)."""
        shape, view = self.shape, resource(page["keys"], fx.Int32(self.head_bytes))
        at = flow.opaque(cursor["key"])
        step, tile = 16 * 64 * shape.groups, 16 * (4 if shape.side == 16 else 32)
        loaded = [
            [load_from(view, 4, at, t * tile + c * step) for c in range(shape.key_pieces)]
            for t in range(shape.key_tiles)
        ]
        return cursor | {"key": at}, loaded

    def load_values(self, cursor, page):
        """(cursor, V by tiles of head elements and runs of tokens)."""
        shape, view = self.shape, resource(page["values"], fx.Int32(self.head_bytes))
        at = flow.opaque(cursor["value"])
        loaded = [
            [load_from(view, 4, at, t * self.tile_step + j * self.run_step) for j in range(shape.runs)]
            for t in range(shape.value_tiles)
        ]
        return cursor | {"value": at}, loaded

    def load_scales(self, page):
        """fp32 scales of K and of V by runs: lane l of a row of 16 has token l of the run of its group."""
        if not self.tokens:
            return []
        places = [address + fx.Int64(fx.Uint32(self.scale_at)) for address in page["scales"]]
        return [[load_at(x, 1, 128 * j).bitcast(fx.Float32) for j in range(self.shape.runs)] for x in places]


class SmallPages(Pages):
    """Pages of 16 tokens: a run of tokens is a page. Cursors are per lane."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        shape, m = self.shape, self.column
        quad, rest = unsigned_divmod(m, 4)
        # Pages of the wave's four that a lane needs: of its rows of K's operand (one or, S = 32, two), of its runs.
        if shape.side == 16:
            key_pages, token = [quad], rest
        else:
            four, half = unsigned_divmod(quad, 2)
            key_pages, token = [half + fx.Int32(2 * t) for t in range(2)], four * fx.Int32(4) + rest
        run_pages = [self.group + fx.Int32(2 * j) for j in range(shape.runs)]
        self.places = [page * fx.Int32(ID_BYTES) for page in (*key_pages, *run_pages)]
        self.id_loads = len(self.places)
        key_at, value_at = self.group * fx.Int32(16 * 16) + token * fx.Int32(16), m * fx.Int32(16)
        self.lane_keys = self.keys + fx.Int64(fx.Uint32(key_at))
        self.lane_values = self.values + fx.Int64(fx.Uint32(value_at))
        if self.tokens:
            self.views = [resource(address, fx.Int32(-1)) for address in self.scales]
        task = self.task
        self.view = resource(self.table, self.args.table_width * fx.Int32(ID_BYTES))
        self.first_page, self.last_page = (
            self.pages_of(token) * fx.Int32(ID_BYTES) for token in (task.low, task.context - fx.Int32(1))
        )

    def start(self, first, last):
        """(cursor, page of tile ``first``)."""
        base = first * fx.Int32(16 * ID_BYTES) + self.wave * fx.Int32(4 * ID_BYTES)
        cursor = {"at": [base + place for place in self.places]}
        return cursor, self.page(self._ids(cursor["at"]))

    def _ids(self, places):
        ids = []
        for at in places:
            held = at_most(at, self.last_page)
            if self.spec.windowed:
                held = at_least(held, self.first_page)
            ids.append(load_from(self.view, 1, held))
        return ids

    def ahead(self, cursor):
        """(cursor of the next tile, its ids)."""
        cursor = {"at": [at + fx.Int32(16 * ID_BYTES) for at in cursor["at"]]}
        return cursor, self._ids(cursor["at"])

    def page(self, ids):
        runs = self.shape.runs
        by_key, by_run = ids[:-runs], ids[-runs:]
        found = {
            "keys": [self.lane_keys + times(x, self.page_bytes) for x in by_key],
            "values": [self.lane_values + times(x, self.page_bytes) for x in by_run],
        }
        if self.tokens:
            found["scales"] = [x * self.block_stride + self.of_row * fx.Int32(ID_BYTES) for x in by_run]
        return found

    def load_keys(self, cursor, page):
        """(cursor, K by tiles of tokens and pieces)."""
        shape, loaded = self.shape, []
        step = 16 * 16 * shape.groups
        for t in range(shape.key_tiles):
            address, tile = (page["keys"][0], 64 * t) if shape.side == 16 else (page["keys"][t], 0)
            loaded.append([load_at(address, 4, tile + c * step) for c in range(shape.key_pieces)])
        return cursor, loaded

    def load_values(self, cursor, page):
        """(cursor, V by tiles of head elements and runs of tokens)."""
        shape = self.shape
        tiles = range(shape.value_tiles)
        return cursor, [[load_at(address, 4, 16 * shape.side * t) for address in page["values"]] for t in tiles]

    def load_scales(self, page):
        """fp32 scales of K and of V by runs: lane l of a row of 16 has token l of the run of its group."""
        if not self.tokens:
            return []
        return [[load_from(view, 1, at).bitcast(fx.Float32) for at in page["scales"]] for view in self.views]


def make_pages(spec, args, shape, task, wave, lane):
    """The ``Pages`` of a spec."""
    kind = LargePages if spec.page_size == 64 else SmallPages
    return kind(spec, args, shape, task, wave, lane)
