"""Figures of the public FlyDSL kernels of ROCm/aiter (snapshot of 2026-08-22), and the bars that ours are held to.

K5 `opt` and the fused prepare, compiled with flydsl 0.5.0 and counted in the same way by another interpreter on the
same workload as ``counting``, g token-major. Instructions are exact; cycles are those of a model with the definition
of ``cdna_emu.model``. For the same code objects our counters give the same instructions, requests and LDS cycles, but
for 4 requests of g (the last one again), LDS reads of fp32 snapshots on gfx950 (ours are 32, 64 and 128 cycles lower),
and two wave-instructions of prepare; our model gives the cycles to 2.4 %, and with several workgroups on a compute
unit up to 14 % fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdn_runtime.spec import CHUNK, HEAD_DIM, FusedPrepareSpec, OptStateScanSpec

from .counting import WAVES, Counts

MATRIX_32 = ("gfx950",)
"""Architectures with the 16x16x32 form, that does twice the work of 16x16x16 in the same time."""


@dataclass(frozen=True)
class PublicScan:
    """K5 per workgroup and steady chunk; fields as of ``Counts``. Requests: (64-byte lines, 128-byte lines)."""

    classes: dict[str, int]
    matrix_cycles: int
    lds_read: tuple[int, int]
    lds_write: tuple[int, int]
    requests: dict[str, tuple[int, int]]
    vgprs: int
    lds_bytes: int
    cycles: int
    slow: int | None

    @property
    def instructions(self) -> int:
        """Wave-instructions."""
        return sum(self.classes.values())


_NAMES = ("VALU", "SALU", "MFMA", "LDS read", "LDS write", "load", "store", "barrier", "wait", "s_nop", "branch")
# Wave-instructions by class, VGPRs, LDS bytes; LDS cycles of reads, least, writes, least; cycles at latency 650, 1500.
_SCANS: dict[tuple[str, int, str], tuple[tuple[int, ...], int, int, tuple[int, ...], int, int | None]] = {
    ("gfx942", 16, "bf16"): (
        (416, 132, 64, 80, 112, 68, 20, 16, 76, 8, 28), 116, 40960, (512, 480, 464, 336), 2388, 4088),
    ("gfx942", 16, "fp32"): (
        (416, 136, 64, 80, 112, 68, 24, 16, 92, 4, 28), 114, 45056, (512, 512, 496, 368), 2408, None),
    ("gfx942", 32, "bf16"): (
        (536, 164, 128, 112, 136, 84, 40, 16, 96, 28, 44), 148, 49152, (768, 704, 544, 416), 2864, 4564),
    ("gfx942", 32, "fp32"): (
        (544, 164, 128, 112, 128, 84, 48, 16, 100, 20, 44), 144, 49152, (768, 768, 608, 480), 2898, None),
    ("gfx942", 64, "bf16"): (
        (784, 292, 256, 176, 176, 116, 80, 16, 124, 40, 76), 214, 65536, (1280, 1152, 704, 576), 3832, 5320),
    ("gfx942", 64, "fp32"): (
        (808, 292, 256, 176, 168, 116, 96, 16, 128, 52, 76), 206, 65536, (1280, 1280, 832, 704), 3944, None),
    ("gfx950", 16, "bf16"): (
        (416, 132, 64, 76, 112, 68, 20, 16, 92, 4, 28), 116, 40960, (240, 240, 440, 168), 2264, 3964),
    ("gfx950", 16, "fp32"): (
        (416, 136, 64, 76, 112, 68, 24, 16, 92, 4, 28), 114, 45056, (288, 256, 440, 184), 2276, None),
    ("gfx950", 32, "bf16"): (
        (536, 164, 128, 108, 136, 84, 40, 16, 104, 8, 44), 148, 49152, (544, 352, 544, 208), 3156, 4856),
    ("gfx950", 32, "fp32"): (
        (544, 164, 128, 108, 128, 84, 48, 16, 112, 8, 44), 144, 49152, (640, 384, 544, 240), 3120, None),
    ("gfx950", 64, "bf16"): (
        (784, 292, 256, 172, 176, 116, 80, 16, 136, 52, 76), 210, 65536, (960, 576, 704, 288), 4100, 5704),
    ("gfx950", 64, "fp32"): (
        (808, 292, 256, 172, 168, 116, 96, 16, 148, 80, 76), 198, 65536, (1152, 640, 704, 352), 4110, None),
}  # fmt: skip


def _scan(key: tuple[str, int, str]) -> PublicScan:
    classes, vgprs, lds_bytes, lds, cycles, slow = _SCANS[key]
    _, block_v, snapshot = key
    lines = block_v * (4 if snapshot == "bf16" else 8)  # of 64 bytes
    requests: dict[str, tuple[int, int]] = {
        "k load": (256, 128),
        "w load": (256, 128),
        "u load": (4 * block_v, 4 * block_v),
        "g load": (64, 64),
        "v_new store": (4 * block_v, 4 * block_v),
        "h store": (lines, lines // 2),
    }
    named = dict(zip(_NAMES, classes, strict=True))
    matrix_cycles = 16 * block_v  # 16x16x16 on both architectures
    return PublicScan(named, matrix_cycles, lds[:2], lds[2:], requests, vgprs, lds_bytes, cycles, slow)


SCANS = {key: _scan(key) for key in _SCANS}
"""By architecture, block_v and snapshot dtype."""


@dataclass(frozen=True)
class PublicPrepare:
    """Fused prepare, one chunk and value head, which is one workgroup. ``full``: with ``groups`` on a compute unit."""

    instructions: int
    barriers: int
    matrix_cycles: int
    lds: tuple[int, int]
    vgprs: int
    lds_bytes: int
    cycles: int
    groups: int
    full: int


PREPARES = {
    "gfx942": PublicPrepare(9763, 16, 1808, (5094, 3842), 66, 17408, 19457, 3, 34074),
    "gfx950": PublicPrepare(5587, 16, 1808, (4557, 1925), 58, 17408, 16127, 7, 44758),
}

INSTRUCTIONS = {
    ("gfx942", "bf16"): 0.55,
    ("gfx942", "fp32"): 0.65,
    ("gfx950", "bf16"): 0.48,
    ("gfx950", "fp32"): 0.58,
}
"""K5: at most this part of the public kernel's wave-instructions."""
CYCLES = 0.6
MAX_BARRIERS, MAX_VGPRS = 2, 256
PREPARE_INSTRUCTIONS = {
    ("gfx942", "wave"): 0.22,
    ("gfx950", "wave"): 0.30,
    ("gfx942", "group"): 0.30,
    ("gfx950", "group"): 0.46,
}


@dataclass(frozen=True)
class Bar:
    """``got`` must not exceed ``limit``."""

    name: str
    got: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it is met."""
        return self.got <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.got:g}, at most {self.limit:g}" + ("" if self.ok else ": missed")


def scan_bars(spec: OptStateScanSpec, counts: Counts) -> list[Bar]:
    """The bars of K5 `opt`, g in either layout.

    Requests are held to the distinct lines of the tile; of g, to those and one more per wave, for the last token.
    """
    snapshot = "bf16" if spec.snapshot_dtype == "bf16" else "fp32"
    public = SCANS[spec.arch, spec.block_v, snapshot]
    requests = counts.requests
    bars = [
        Bar("instructions", counts.instructions, INSTRUCTIONS[spec.arch, snapshot] * public.instructions),
        Bar("model cycles", counts.cycles, CYCLES * public.cycles),
        *(Bar(f"64-byte requests, {name}", requests[name].lines64, requests[name].tile64)
          for name in ("k load", "w load", "u load", "v_new store", "h store")),
        Bar("64-byte requests, g load", requests["g load"].lines64, requests["g load"].tile64 + WAVES),
        Bar("128-byte requests, h store", requests["h store"].lines128, requests["h store"].bytes / 128),
        Bar("barriers per wave", counts.classes["barrier"] / WAVES, MAX_BARRIERS),
        Bar("branches on EXEC", counts.exec_branches, 0),
        Bar("LDS bytes", counts.resources.lds_bytes, public.lds_bytes),
        *_registers(counts),
    ]  # fmt: skip
    if spec.arch in MATRIX_32:
        products = 2 * CHUNK * HEAD_DIM * spec.block_v // (16 * 16 * 32)
        bars.append(Bar("products not of the form 16x16x32", products - counts.matrix32, 0))
    return bars


def prepare_bars(spec: FusedPrepareSpec, counts: Counts) -> list[Bar]:
    """The bars of the fused prepare."""
    public = PREPARES[spec.arch]
    limit = PREPARE_INSTRUCTIONS[spec.arch, spec.variant] * public.instructions
    return [
        Bar("instructions", counts.instructions / heads_of(spec), limit),
        Bar("barriers per wave", counts.classes["barrier"] / WAVES, MAX_BARRIERS),
        *_registers(counts),
    ]


STAGED_PAIR = {
    ("gfx942", "bf16"): 3810,
    ("gfx942", "fp32"): 4366,
    ("gfx950", "bf16"): 3210,
    ("gfx950", "fp32"): 3754,
}
"""Wave-instructions of our prepare "wave" and of the two workgroups of `opt` with 64 columns, per chunk and value head,
when the T' route was made; by architecture and snapshot dtype."""

ROUTE_INSTRUCTIONS, ROUTE_KB = 0.82, 90
"""T' takes at most this part of ``STAGED_PAIR``; KB through memory per chunk and value head, bf16 snapshots, H/Hg 2."""


def route_bytes(prepare: Counts, scan: Counts, parts: int = 1) -> float:
    """Bytes through memory of K1..K5 per chunk and value head, either route. ``prepare``: of a workgroup of four heads;
    ``scan``: of one of ``parts`` workgroups of a head. Rows of k serve two value heads, and are read once by each
    kernel."""
    total = prepare.requests["k load"].bytes / WAVES + scan.requests["k load"].bytes / 2
    for name, requests in prepare.requests.items():
        if name.split()[0] in ("v", "w", "u", "t"):
            total += requests.bytes / WAVES
    for name, requests in scan.requests.items():
        if name.split()[0] in ("v", "u", "v_new", "h"):
            total += parts * requests.bytes
        elif name.split()[0] in ("w", "t"):
            total += requests.bytes  # the parts read the same
    return total


def route_bars(arch: str, snapshot: str, prepare: Counts, scan: Counts) -> list[Bar]:
    """The bars of the T' route: ``prepare`` of a workgroup, ``scan`` with 128 columns."""
    requests = scan.requests
    snapshots = 0 if snapshot == "bf16" else 32
    return [
        Bar("instructions of the pair", prepare.instructions / WAVES + scan.instructions,
            ROUTE_INSTRUCTIONS * STAGED_PAIR[arch, snapshot]),
        Bar("KB through memory", route_bytes(prepare, scan) / 1024, ROUTE_KB + snapshots),
        *(Bar(f"64-byte requests, {name}", requests[name].lines64, requests[name].tile64)
          for name in ("k load", "v load", "v_new store", "h store")),
        Bar("128-byte requests, h store", requests["h store"].lines128, requests["h store"].bytes / 128),
        Bar("barriers per wave, prepare", prepare.classes["barrier"] / WAVES, 0),
        Bar("barriers per wave, K5", scan.classes["barrier"] / WAVES, MAX_BARRIERS),
        Bar("branches on EXEC", scan.exec_branches + prepare.exec_branches, 0),
        *_registers(prepare),
        *_registers(scan),
    ]  # fmt: skip


def heads_of(spec: FusedPrepareSpec) -> int:
    """Value heads of one workgroup."""
    return WAVES if spec.variant == "wave" else 1


def _registers(counts: Counts) -> list[Bar]:
    return [Bar("VGPRs", counts.resources.vgprs, MAX_VGPRS), Bar("scratch bytes", counts.resources.scratch_bytes, 0)]
