"""The bars of docs/performance.md: what a steady chunk of the FlyDSL kernels executes, exactly, and by the model."""

import pytest

from gdn_testing.counting import (
    CLASSES,
    WAVES,
    count_prepare,
    count_scan,
    opt_spec,
    prepare_spec,
    prepare_t_spec,
    vk_spec,
    vsplit_spec,
)
from gdn_testing.public_kernel import PREPARES, SCANS, prepare_bars, route_bars, scan_bars

ARCHS = ("gfx942", "gfx950")


def missed(bars):
    return [str(bar) for bar in bars if not bar.ok]


@pytest.mark.parametrize("g_head_major", [True, False], ids=["head-major", "token-major"])
@pytest.mark.parametrize("snapshot", ["bf16", "fp32"])
@pytest.mark.parametrize("block_v", [16, 32, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_opt(arch, block_v, snapshot, g_head_major):
    spec = opt_spec(arch, block_v, snapshot, g_head_major=g_head_major)
    counts = count_scan(spec)
    assert not missed(scan_bars(spec, counts))
    assert counts.resources.groups_per_cu >= 2  # the public kernel: 1 on gfx942
    stored = {"v_new store": 2 * 64 * block_v, "h store": (2 if snapshot == "bf16" else 4) * 128 * block_v}
    assert {name: counts.requests[name].bytes for name in stored} == stored


@pytest.mark.parametrize("block_v", [16, 32, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_snapshots_of_both_types_take_the_same_barriers(arch, block_v):
    bf16, fp32 = (count_scan(opt_spec(arch, block_v, snapshot)) for snapshot in ("bf16", "fp32"))
    assert bf16.classes["barrier"] == fp32.classes["barrier"]


@pytest.mark.parametrize("block_v", [16, 32, 64])
def test_vk_on_gfx950(block_v):
    counts = count_scan(vk_spec(block_v))
    assert counts.resources.scratch_bytes == 0 and counts.resources.vgprs <= 256
    assert counts.requests["h store"].bytes == 2 * 128 * block_v


@pytest.mark.parametrize("variant", ["wave", "group"])
@pytest.mark.parametrize("arch", ARCHS)
def test_prepare(arch, variant):
    spec = prepare_spec(arch, variant)
    counts = count_prepare(spec)
    assert not missed(prepare_bars(spec, counts))
    if variant == "group":
        assert counts.cycles < count_prepare(prepare_spec(arch, "wave")).cycles  # what it is for


@pytest.mark.parametrize("arch", ARCHS)
def test_tprime(arch):
    """The pair of the T' route, bf16 snapshots, a whole head per workgroup."""
    prepare, scan = count_prepare(prepare_t_spec(arch)), count_scan(vsplit_spec(arch, 128, "bf16"))
    assert not missed(route_bars(arch, "bf16", prepare, scan))
    assert prepare.requests["t store"].bytes == 4 * 5120
    stored = {"v_new store": 2 * 64 * 128, "h store": 2 * 128 * 128}
    assert {name: scan.requests[name].bytes for name in stored} == stored


def test_public_figures_are_the_published_totals():
    totals = [public.instructions for public in SCANS.values()]
    assert totals == [1020, 1040, 1384, 1388, 2136, 2184, 1028, 1036, 1368, 1384, 2156, 2228]
    assert [public.instructions for public in PREPARES.values()] == [9763, 5587]
    assert all(set(public.classes) < set(CLASSES) for public in SCANS.values())
    assert all(public.classes["barrier"] == 4 * WAVES for public in SCANS.values())
