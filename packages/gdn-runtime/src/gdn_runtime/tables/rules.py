"""Rules for the value rows per workgroup (block_v) of the AMD state scans, for shapes that no table lists.

Pure functions of the shape and of two facts of the device; nothing is read, cached or logged here.
"""

from __future__ import annotations

from typing import Literal, get_args

from ..errors import UnsupportedError
from ..spec import HEAD_DIM, SCAN_BLOCK_V

Rule = Literal["gdn", "seed"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""Rules of K5 `opt`: "gdn" was made for the kernels of this package, "seed" for the public kernel before them."""

WIDEST_FIRST = tuple(sorted(SCAN_BLOCK_V, reverse=True))

SEED_LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 128 * 1024}
"""LDS per compute unit that the seed's rule takes for an architecture (gfx950 has 160 KB; the rule caps what it makes
of them, so that both figures give the same picks)."""

VK_WORKGROUPS = 256
"""Workgroups at which the vk rule calls the device full: one for each compute unit of an MI355X."""


def gdn_block_v(*, arch: str, compute_units: int, num_heads: int, total_chunks: int, max_seq_chunks: int) -> int:
    """16 rows while every such workgroup has a compute unit for itself, then 32; 64 once even those of 64 outnumber the
    compute units, on gfx950 once those of 32 do.

    H * total_chunks / max_seq_chunks is the mean number of (sequence, head) scans that run at a time; each is split
    into 128 / block_v workgroups. A narrow tile shortens the chain of one chunk, but two of them on one compute unit
    take longer than one of twice the width (on gfx942 32 rows do not), and read w and k twice. In the cycle model of
    the kernels no tile is more than 6 % faster for any number of scans, on gfx942 with 80, 228 and 304 compute units
    and gfx950 with 256.
    """
    scans = num_heads * total_chunks
    full = compute_units * max_seq_chunks
    if HEAD_DIM // (32 if arch == "gfx950" else 64) * scans > full:
        return 64
    return 32 if HEAD_DIM // 16 * scans > full else 16


def seed_block_v(*, compute_units: int, lds_bytes: int, num_heads: int, total_chunks: int, max_seq_chunks: int) -> int:
    """The rule that the seed's tables were compared with: the widest tile that fills half the resident workgroups.

    ``lds_bytes`` is the LDS of one compute unit; a workgroup of the seed's kernel holds 32768 + 512 * block_v bytes of
    it, and at most two are counted as resident. On 80 compute units with 64 KB it picks the measured best tile in 54 of
    the seed's 55 measurements.
    """
    for block_v in WIDEST_FIRST:
        resident = min(max(1, lds_bytes // (32768 + 512 * block_v)), 2)
        workgroups = (HEAD_DIM // block_v) * num_heads * total_chunks
        if workgroups >= max(1, compute_units * resident // 2) * max_seq_chunks:
            return block_v
    return WIDEST_FIRST[-1]


def vk_block_v(*, num_seqs: int, num_heads: int) -> int:
    """Rule of K5 `vk`: the widest tile whose grid has at least 256 workgroups, else the narrowest.

    The seed's rule knows exceptions for single ranges of tokens of one model (two, three and seven sequences on
    H=32/Hg=16 and H=16); they were fitted to another kernel on another part and are left out.
    """
    for block_v in WIDEST_FIRST:
        if num_seqs * num_heads * (HEAD_DIM // block_v) >= VK_WORKGROUPS:
            return block_v
    return WIDEST_FIRST[-1]


def rule_block_v(
    rule: Rule, *, arch: str, compute_units: int, num_heads: int, total_chunks: int, max_seq_chunks: int
) -> tuple[int, str]:
    """What ``rule`` picks for K5 `opt`, and its inputs in words.

    Raises UnsupportedError for an unknown rule, and for an architecture whose LDS the seed's rule does not know.
    """
    scans = num_heads * total_chunks / max(max_seq_chunks, 1)
    inputs = f"{scans:.0f} scans at a time on {compute_units} compute units"
    if rule == "gdn":
        picked = gdn_block_v(
            arch=arch,
            compute_units=compute_units,
            num_heads=num_heads,
            total_chunks=total_chunks,
            max_seq_chunks=max_seq_chunks,
        )
        return picked, inputs
    if rule != "seed":
        raise UnsupportedError("rule", got=repr(rule), supported=RULES)
    if arch not in SEED_LDS_BYTES:
        raise UnsupportedError('arch of rule="seed"', got=repr(arch), supported=SEED_LDS_BYTES)
    lds_bytes = SEED_LDS_BYTES[arch]
    picked = seed_block_v(
        compute_units=compute_units,
        lds_bytes=lds_bytes,
        num_heads=num_heads,
        total_chunks=total_chunks,
        max_seq_chunks=max_seq_chunks,
    )
    return picked, f"{inputs} of {lds_bytes // 1024} KB LDS"
