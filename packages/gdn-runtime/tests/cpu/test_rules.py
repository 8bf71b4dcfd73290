"""Rules for block_v: the seed's expected picks, and ours against the cycle model of the kernels."""

from __future__ import annotations

import math

import pytest

from gdn_runtime import UnsupportedError
from gdn_runtime.tables import RULES, gdn_block_v, rule_block_v, seed_block_v, vk_block_v


def seed(num_heads: int, total_chunks: int, max_seq_chunks: int, *, units: int = 80, lds: int = 64 * 1024) -> int:
    return seed_block_v(
        compute_units=units,
        lds_bytes=lds,
        num_heads=num_heads,
        total_chunks=total_chunks,
        max_seq_chunks=max_seq_chunks,
    )


def gdn(arch: str, scans: int, units: int) -> int:
    return gdn_block_v(arch=arch, compute_units=units, num_heads=scans, total_chunks=128, max_seq_chunks=128)


# ------------------------------------------------------------------------------------------------ seed


@pytest.mark.parametrize("num_seqs", range(1, 9))
def test_seed_rule_on_32_heads(num_seqs: int) -> None:
    assert seed(32, 128 * num_seqs, 128) == 64


@pytest.mark.parametrize(("num_seqs", "block_v"), [(1, 16), (2, 32), *((n, 64) for n in range(3, 9))])
def test_seed_rule_on_8_heads(num_seqs: int, block_v: int) -> None:
    assert seed(8, 128 * num_seqs, 128) == block_v


@pytest.mark.parametrize(
    ("num_heads", "chunks", "block_v"), [(16, 40, 32), (16, 938, 32), (16, 2000, 32), (32, 40, 64), (64, 2000, 64)]
)
def test_seed_rule_on_dense_shapes(num_heads: int, chunks: int, block_v: int) -> None:
    assert seed(num_heads, chunks, chunks) == block_v


def test_seed_rule_counts_at_most_two_resident_workgroups() -> None:
    """Twice the LDS asks for twice the workgroups, and the 160 KB of a gfx950 for no more than 128 KB does."""
    assert seed(32, 128, 128) == 64
    assert seed(32, 128, 128, lds=128 * 1024) == 32
    for num_heads in (1, 8, 32, 64, 256):
        assert seed(num_heads, 128, 128, units=256, lds=160 * 1024) == seed(
            num_heads, 128, 128, units=256, lds=128 * 1024
        )


def test_seed_rule_at_its_threshold() -> None:
    """40 workgroups of 64 rows are half of 80; uneven sequences count by chunks, not by their number."""
    assert seed(20, 128, 128) == 64
    assert seed(19, 128, 128) == 32
    assert seed(10, 256, 128) == 64
    assert seed(10, 255, 128) == 32


# ------------------------------------------------------------------------------------------------ gdn

CLOCKS = {
    ("gfx942", "bf16"): {16: (904, 1512, 2208), 32: (1248, 1886), 64: (2026, 3284)},
    ("gfx942", "fp32"): {16: (920, 1600, 2400), 32: (1288, 1924), 64: (2056, 3366)},
    ("gfx950", "bf16"): {16: (730, 1472, 2208), 32: (932, 1598), 64: (1380, 2134)},
    ("gfx950", "fp32"): {16: (800, 1600, 2400), 32: (982, 1856), 64: (1690, 2652)},
}
"""Model cycles of one chunk step of a workgroup, alone on its compute unit, for two side by side, and for three where
so many fit, by architecture and snapshots: ``gdn_tune.model.unit_of`` for two value heads a key head."""
GAP = 1.06
"""Cycles of the rule's tile over those of the fastest: the model tells tiles apart by 5 %, and 64 rows on three
workgroups a compute unit are 5.8 % behind 32 rows on five."""


def clocks(arch: str, snapshot: str, block_v: int, scans: int, units: int) -> int:
    """Model cycles of one chunk step of the fullest compute unit: workgroups run as many at a time as fit."""
    beside = CLOCKS[arch, snapshot][block_v]
    rounds, rest = divmod(math.ceil(scans * (128 // block_v) / units), len(beside))
    return rounds * beside[-1] + (beside[rest - 1] if rest else 0)


@pytest.mark.parametrize("snapshot", ["bf16", "fp32"])
@pytest.mark.parametrize(("arch", "units"), [("gfx942", 80), ("gfx942", 228), ("gfx942", 304), ("gfx950", 256)])
def test_gdn_rule_picks_the_best_tile_of_the_model(arch: str, units: int, snapshot: str) -> None:
    for scans in range(1, 1025):
        fastest = min(clocks(arch, snapshot, block_v, scans, units) for block_v in (16, 32, 64))
        assert clocks(arch, snapshot, gdn(arch, scans, units), scans, units) <= GAP * fastest, scans


def test_gdn_rule_widens_with_the_number_of_scans() -> None:
    assert [gdn("gfx942", scans, 80) for scans in (1, 8, 10, 11, 40, 41, 512)] == [16, 16, 16, 32, 32, 64, 64]
    assert [gdn("gfx950", scans, 256) for scans in (32, 33, 64, 65, 129)] == [16, 32, 32, 64, 64]
    assert [gdn("gfx942", scans, 256) for scans in (32, 33, 128, 129)] == [16, 32, 32, 64]


def test_gdn_rule_counts_scans_that_run_at_a_time() -> None:
    """One long sequence among many short ones runs alone for most of the time."""
    even = gdn_block_v(arch="gfx942", compute_units=80, num_heads=32, total_chunks=400, max_seq_chunks=100)
    uneven = gdn_block_v(arch="gfx942", compute_units=80, num_heads=32, total_chunks=103, max_seq_chunks=100)
    assert (even, uneven) == (64, 32)


@pytest.mark.parametrize("rule", RULES)
def test_rules_take_calls_without_tokens(rule: str) -> None:
    picked, _ = rule_block_v(
        rule,  # type: ignore[arg-type]
        arch="gfx942",
        compute_units=304,
        num_heads=32,
        total_chunks=0,
        max_seq_chunks=0,
    )
    assert picked in (16, 32, 64)


def test_inputs_of_a_rule_are_told() -> None:
    shape = {"compute_units": 80, "num_heads": 8, "total_chunks": 256, "max_seq_chunks": 128}
    assert rule_block_v("gdn", arch="gfx942", **shape) == (32, "16 scans at a time on 80 compute units")
    assert rule_block_v("seed", arch="gfx950", **shape) == (16, "16 scans at a time on 80 compute units of 128 KB LDS")


def test_unknown_rules_and_architectures_are_refused() -> None:
    shape = {"compute_units": 80, "num_heads": 8, "total_chunks": 1, "max_seq_chunks": 1}
    with pytest.raises(UnsupportedError, match=r"^rule: got 'best', supported: gdn, seed$"):
        rule_block_v("best", arch="gfx942", **shape)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r'^arch of rule="seed": got \'sm90\', supported: gfx942, gfx950$'):
        rule_block_v("seed", arch="sm90", **shape)


# ------------------------------------------------------------------------------------------------ vk


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "block_v"),
    [
        (1, 16, 16),
        (1, 32, 16),
        (1, 64, 32),
        (4, 8, 16),
        (8, 8, 32),
        (16, 8, 64),
        (4, 16, 32),
        (8, 16, 64),
        (9, 512, 64),
    ],
)
def test_vk_rule_fills_256_workgroups(num_seqs: int, num_heads: int, block_v: int) -> None:
    assert vk_block_v(num_seqs=num_seqs, num_heads=num_heads) == block_v
