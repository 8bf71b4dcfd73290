"""Jobs: how many there are and why, and that no call of the block with a listed shape asks for anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn_aot import KERNELS, jobs
from gdn_aot.jobs import Shape, job_key, kernel_of, ordered
from gdn_runtime import UnsupportedError, env, explain, select, tables
from gdn_runtime.rules import TPRIME_BLOCK_V, Problem
from gdn_runtime.spec import (
    FusedPrepareSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputSpec,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)

ROOT = Path(__file__).parents[3]
ARCHS = ("gfx942", "gfx950")
CPU = torch.device("cpu")

OPT, VK = KERNELS["opt"], KERNELS["vk"]
SHAPES = [
    Shape(32, 16, True, True, True),
    Shape(8, 2, True, True, True),
    Shape(16, 4, True, True, True),
    Shape(32, 16, False, True, False),
    Shape(16, 8, False, True, False),
    Shape(64, 16, False, True, False),
    Shape(32, 8, False, True, False),
]
"""Those of the packaged table, in its order."""


def fanned(shapes: list[Shape], *names: str) -> int:
    """Jobs of K5 `opt` for ``shapes`` when only ``names`` are fanned out, the rest as the block calls it."""
    plain = {"block_v": (16,), "g_head_major": (True,)}
    fan = {name: OPT.fan[name] if name in names else plain[name] for name in OPT.fan if name in names or name in plain}
    return len(ordered(spec for shape in shapes for spec in OPT.expand(shape, "gfx942", fan)))


# ------------------------------------------------------------------------------------------------ counts


def test_shapes_of_the_packaged_table() -> None:
    assert list(OPT.shapes()) == SHAPES


def test_rows_to_shapes_is_many_to_one() -> None:
    """The ragged batches of 32768 tokens have the heads of the 8192-token sequences: they add no shape."""
    rows = list(OPT.rows())
    listed = tables.load(tables.COMPILED).rows()
    assert len(rows) == len(listed)
    ragged = {found.index for found in listed if found.row.num_seqs in (33, 7) and found.row.num_tokens == 32768}
    assert len(ragged) == 4
    assert {found.row for found in rows if found.index in ragged} == {SHAPES[0]}


def test_stages_of_opt() -> None:
    tile_and_types = ("block_v", "snapshot_dtype", "state_dtype")
    assert fanned(SHAPES[:1]) == 1
    assert fanned(SHAPES[:2], *tile_and_types) == 24
    assert fanned(SHAPES, *tile_and_types) == 84
    assert fanned(SHAPES, *tile_and_types, "g_head_major") == 168
    pools = [shape for shape in SHAPES if shape.use_initial_state and shape.store_final_state]
    others = [shape for shape in SHAPES if shape not in pools]
    every = (*tile_and_types, "g_head_major", "use_state_indices")
    assert (fanned(pools, *every), fanned(others, *every)) == (144, 96)
    assert fanned(SHAPES, *every) == 240


@pytest.mark.parametrize("arch", ARCHS)
def test_opt_has_240_jobs(arch: str) -> None:
    found = jobs(arch, ["opt"])
    assert len(found) == len(set(found)) == 240
    assert {spec.arch for spec in found} == {arch}


def test_vk_has_24_jobs_of_26_rows() -> None:
    assert len(list(VK.rows())) == 26
    assert len(VK.shapes()) == 12
    assert len(jobs("gfx950", ["vk"])) == 24


@pytest.mark.parametrize(
    ("arch", "number"), [("gfx942", 240 + 80 + 21 + 42 + 18 + 16), ("gfx950", 240 + 24 + 40 + 21 + 42 + 18 + 16)]
)
def test_all_jobs_of_an_arch(arch: str, number: int) -> None:
    """Prepare: 7 shapes, two variants, three dtypes of beta. Triton: K6 for two snapshot dtypes, l2norm for 4 Hg. T':
    7 shapes with three dtypes of beta; per tile, four pairs of dtypes for 4 shapes without a pool and 3 with and
    without."""
    found = jobs(arch)
    assert len(found) == number
    kinds = [type(spec) for spec in found]
    assert (kinds.count(FusedPrepareSpec), kinds.count(OutputSpec), kinds.count(L2NormSpec)) == (42, 14, 4)
    assert (kinds.count(TPrepareSpec), kinds.count(VSplitScanSpec)) == (21, 40 * len(TPRIME_BLOCK_V[arch]))
    # Paged decode: two pages for each of four pairs of heads and query length, their reducers, batches of 16 to 128.
    assert [kinds.count(kind) for kind in KERNELS["pa"].kinds] == [8, 4, 4]


def test_the_grid_is_compiled_where_its_table_is_named() -> None:
    """Two models on 1, 2, 4 and 8 devices, packed and dense, all with states in and out; what the seed's dense shapes
    lack. With the default tables: all that any packaged row asks for."""
    heads = [(32 // tp, 16 // tp) for tp in (1, 2, 4, 8)] + [(64 // tp, 16 // tp) for tp in (1, 2, 4, 8)]
    grid = {Shape(*pair, varlen, True, True) for pair in heads for varlen in (True, False)}
    dense = {shape for shape in SHAPES if not shape.is_varlen}
    assert set(OPT.shapes([tables.GRID])) == grid | dense
    assert OPT.shapes() == OPT.shapes([tables.PACKAGED / arch for arch in ARCHS])
    for arch in ARCHS:
        alone, default = set(jobs(arch, ["opt"], tables=[tables.GRID])), set(jobs(arch, ["opt"]))
        assert len(alone) == 16 * 12 * 2 * 2 + 4 * 12 * 2 and default <= alone
        assert set(jobs(arch, ["opt"], tables=[tables.PACKAGED])) == alone


@pytest.mark.parametrize("arch", ARCHS)
def test_complete_adds_and_never_drops(arch: str) -> None:
    """K5: the 120 with g as the block lays it out become 7 shapes x 12 x 2 units of g x 5 uses of the states; of T',
    the 40 of a tile likewise, with 4 in place of 12."""
    base, full = set(jobs(arch)), set(jobs(arch, complete=True))
    assert base < full
    vsplit = len(TPRIME_BLOCK_V[arch]) * (7 * 4 * 2 * 5 - 40)
    # Paged decode: 2 dtypes, 2 modes of scales, 2 forms of V and 3 of windows; 4 kinds of sinks and 9 or 10 numbers of
    # tasks; batches up to 4096.
    units = {"gfx942": 10, "gfx950": 9}[arch]
    decode = 8 * (2 * 2 * 2 * 3 - 1) + 4 * (2 * 4 * units - 1) + 5
    assert len(full) - len(base) == (7 * 12 * 2 * 5 - 120) + vsplit + 42 + 21 + 14 + decode


# ------------------------------------------------------------------------------------------------ what the jobs are


def test_fanned_and_pinned_switches_of_opt() -> None:
    values = {f.name: {getattr(spec, f.name) for spec in jobs("gfx942", ["opt"])} for f in fields(OptStateScanSpec)}
    assert values == {
        "arch": {"gfx942"},
        "block_v": {16, 32, 64},
        "num_heads": {8, 16, 32, 64},
        "num_key_heads": {2, 4, 8, 16},
        "is_varlen": {True, False},
        "use_g": {True},
        "use_gk": {False},
        "use_exp2": {True},
        "g_head_major": {True, False},
        "use_initial_state": {True},
        "store_final_state": {True, False},
        "use_state_indices": {True, False},
        "save_new_value": {True},
        "state_dtype": {"fp32", "bf16"},
        "snapshot_dtype": {"fp32", "bf16"},
        "rounding": {"truncate"},
        "wu_head_major": {True},
        "sched_barrier": {True},
    }
    others = [spec for spec in jobs("gfx950", ["opt"]) if isinstance(spec, OptStateScanSpec)]
    assert {spec.sched_barrier for spec in others} == {False}
    assert {(spec.g_head_major, spec.rounding) for spec in others} == {(True, "nearest"), (False, "truncate")}


def test_pools_only_where_states_go_in_and_out() -> None:
    for spec in jobs("gfx942", ["opt"], complete=True):
        assert isinstance(spec, OptStateScanSpec)
        assert not spec.use_state_indices or (spec.use_initial_state and spec.store_final_state)


def test_vk_jobs_are_what_a_call_with_defaults_asks_for() -> None:
    """Rows carry the tile that the rule picks, and the runtime's default of use_exp2 is in the spec."""
    found = set(jobs("gfx950", ["vk"]))
    asked = set()
    for _, seqs, shape in vk_rows():
        for state in ("fp32", "bf16"):
            problem = make_problem("gfx950", shape, num_seqs=seqs, state_dtype=state, g_head_major=False)
            chosen = select.select(problem, CPU, backend="emulate", arch="gfx950", kernel="vk")
            asked.add(chosen.state_scan)
    assert asked == found
    assert {spec.use_exp2 for spec in found if isinstance(spec, VkStateScanSpec)} == {True}


def vk_rows() -> Iterator[tuple[int, int, Shape]]:
    rows = json.loads(tables.packaged_file("gfx950", "state_scan_vk").read_text())["rows"]
    for index, (row, found) in enumerate(zip(rows, VK.rows(), strict=True)):
        yield index, row["N"], found.row


def make_problem(arch: str, shape: Shape, **changes: Any) -> Problem:
    facts = select.parse_arch(arch)
    values = {
        "arch": facts,
        "compute_units": facts.nominal_compute_units,
        "num_heads": shape.num_heads,
        "num_key_heads": shape.num_key_heads,
        "num_seqs": 1,
        "total_chunks": 1,
        "max_seq_chunks": 1,
        "dtype": "bf16",
        "beta_dtype": "fp32",
        "state_dtype": "fp32",
        "snapshot_dtype": "bf16",
        "is_varlen": shape.is_varlen,
        "use_initial_state": shape.use_initial_state,
        "store_final_state": shape.store_final_state,
        **changes,
    }
    return Problem(**values)


@pytest.fixture(autouse=True)
def _emulator_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection only: nothing runs."""
    monkeypatch.setattr(select, "_has_emulator", lambda: True)
    select._select.cache_clear()


# ------------------------------------------------------------------------------------------------ coverage


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"{s.num_heads}-{s.num_key_heads}-{'varlen' if s.is_varlen else 'dense'}"
)
def test_complete_holds_whatever_the_block_asks_for(arch: str, shape: Shape) -> None:
    """Every option of a call that a spec depends on, through the checks and the selection of the block itself."""
    full, base = set(jobs(arch, complete=True)), set(jobs(arch))
    asked: set[object] = set()
    asked_by_default: set[object] = set()
    tprime = TPRIME_BLOCK_V[arch]
    forced = [("auto", None), ("auto", 16), ("auto", 32), ("auto", 64), *(("tprime", block_v) for block_v in tprime)]
    for route, block_v in forced:
        with env.override(amd_route=route, k5_block_v=block_v):
            for usual, chosen in selections(arch, shape, every_beta=block_v in (None, tprime[-1])):
                specs = {chosen.l2norm, chosen.prepare, chosen.state_scan, chosen.output}
                asked |= specs
                asked_by_default |= specs if usual else set()
    assert asked_by_default <= base
    assert asked <= full
    # Nothing is compiled for this shape that no call asks for, but K5 with g as [B,T,H], which its own op takes.
    mine = {
        spec
        for kernel in ("opt", "vsplit", "prepare", "prepare_t")
        for spec in KERNELS[kernel].jobs([shape], arch, complete=True)
        if getattr(spec, "g_head_major", True)
    }
    unasked = mine - asked
    assert {spec.variant for spec in unasked if isinstance(spec, FusedPrepareSpec)} == {"wave"}  # for larger batches
    assert len(unasked) == 6


def selections(arch: str, shape: Shape, *, every_beta: bool) -> Iterator[tuple[bool, select.Selection]]:
    """Selection of each call, and whether it has the states of the row and default options."""
    tokens, seqs = 70, 2
    batch = 1 if shape.is_varlen else seqs
    q, k = (torch.zeros(batch, tokens, shape.num_key_heads, 128, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(batch, tokens, shape.num_heads, 128, dtype=torch.bfloat16)
    g = torch.zeros(batch, tokens, shape.num_heads)
    layout = {"cu_seqlens": torch.tensor([0, 5, tokens], dtype=torch.int32)} if shape.is_varlen else {}
    states = {
        dtype: torch.zeros(seqs, shape.num_heads, 128, 128, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    slots = torch.arange(seqs, dtype=torch.int32)
    betas = (torch.float32, torch.bfloat16, torch.float16) if every_beta else (torch.float32,)
    flags, snapshots = (True, False), (None, torch.float32)
    for dtype, final, snapshot, exp2, beta in product(states, flags, snapshots, flags, betas):
        options = {"output_final_state": final, "snapshot_dtype": snapshot, "use_exp2": exp2}
        uses: list[dict[str, Any]] = [{"state_dtype": dtype}, {"initial_state": states[dtype]}]
        if final:
            uses.append({"initial_state": states[dtype], "initial_state_indices": slots})
        for use in uses:
            chosen = explain(q, k, v, g, g.to(beta), backend="emulate", arch=arch, **layout, **options, **use)
            usual = exp2 and "initial_state" in use and final == shape.store_final_state
            yield usual, chosen


@pytest.mark.parametrize("arch", ARCHS)
def test_jobs_hold_for_every_batch(arch: str) -> None:
    """Off-table batches of a listed shape: other numbers and lengths of sequences, other numbers of compute units."""
    base, scans = set(jobs(arch)), set()
    for shape, seqs, chunks, units in product(SHAPES, (1, 3, 40), (1, 17, 2000), (1, 80, 256, 304)):
        problem = make_problem(
            arch, shape, num_seqs=seqs, total_chunks=seqs * chunks, max_seq_chunks=chunks, compute_units=units
        )
        chosen = select.select(problem, CPU, backend="emulate", arch=arch)
        assert {chosen.l2norm, chosen.prepare, chosen.state_scan, chosen.output} <= base
        scans.add((type(chosen.state_scan), chosen.state_scan.block_v))
    assert {block_v for kind, block_v in scans if kind is VSplitScanSpec} == set(TPRIME_BLOCK_V[arch])
    assert {block_v for kind, block_v in scans if kind is OptStateScanSpec} == {16, 32, 64}


# ------------------------------------------------------------------------------------------------ order, tables


def test_jobs_are_in_canonical_order() -> None:
    found = jobs("gfx950")
    keys = [job_key(spec) for spec in found]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert jobs("gfx950", ["triton", "vk", "pa", "opt", "prepare_t", "prepare", "vsplit"]) == found
    assert ordered([*reversed(found), *found]) == found


def test_jobs_of_an_own_table(tmp_path: Path) -> None:
    row = json.loads(tables.packaged_file("gfx942", "state_scan_opt").read_text())["rows"][0]
    rows = [{**row, "H": 4, "Hg": 4, "block_v": 16}, {**row, "H": 4, "Hg": 4, "total_chunks": 999, "block_v": 64}]
    for entry in rows:
        del entry["provenance"]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"format": 1, "kernel": "state_scan_opt", "arch": "gfx942", "rows": rows}))
    assert len(jobs("gfx950", ["opt"], tables=[own])) == 48
    assert jobs("gfx950", ["vk"], tables=[own]) == ()


VK_ROW = {
    "gfx": "gfx950", "dtype": "bf16", "K": 128, "V": 128, "BT": 64, "H": 32, "Hg": 16, "T_flat": 2500, "N": 1,
    "use_g": True, "use_gk": False, "use_h0": True, "store_fs": False, "save_vn": True, "is_varlen": False,
    "wu_contig": True, "block_v": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"dtype": "fp16"}, "dtype: got 'fp16', expected 'bf16'"),
        ({"V": 64}, "V: got 64, expected 128"),
        ({"wu_contig": False}, "wu_contig: got False, expected True"),
        ({"use_g": "yes"}, "use_g: got 'yes', expected true or false"),
        ({"gfx": "gfx942"}, "gfx: got 'gfx942', expected 'gfx950'"),
        ({"block_v": 128}, "block_v: got 128, supported: 16, 32, 64"),
        ({"Hg": 7}, "heads: got H=32 value heads, Hg=7 key heads"),
        ({"colour": 1}, "columns: got BT, H,"),
    ],
)
def test_bad_vk_rows_are_skipped_by_name(tmp_path: Path, changes: dict[str, object], fault: str) -> None:
    file = tmp_path / "vk.json"
    content = {"format": 1, "kernel": "state_scan_vk", "arch": "gfx950", "rows": [{**VK_ROW, **changes}, VK_ROW]}
    file.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match=re.escape(f"vk.json row 0: {fault}")):
        assert len(jobs("gfx950", ["vk"], tables=[file])) == 2


def test_vk_is_refused_on_gfx942() -> None:
    with pytest.raises(UnsupportedError, match=r"^arch of kernel vk: got 'gfx942', supported: gfx950$"):
        jobs("gfx942", ["vk"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^kernel: got k5, expected one of opt, vk, prepare, vsplit, prepare_t, triton, pa$"
    ):
        jobs("gfx942", ["k5"])
    with pytest.raises(UnsupportedError, match=r"^arch: got 'sm90', supported: gfx942, gfx950$"):
        jobs("sm90")


def test_cells_print_a_job() -> None:
    spec = jobs("gfx950", ["vk"])[0]
    assert kernel_of(spec) is VK
    cells = dict(zip(VK.columns, VK.cells(spec), strict=True))
    assert cells["exp2"] == "yes"
    assert cells["H"] == str(spec.num_heads)  # type: ignore[attr-defined]
    for spec in jobs("gfx950"):
        cells = dict(zip(kernel_of(spec).columns, kernel_of(spec).cells(spec), strict=True))
        missing = {name for name, text in cells.items() if not text}
        if kernel_of(spec) is not KERNELS["pa"]:  # whose kernels share few fields
            assert missing == ({"H", "varlen", "BV", "snapshot", "exp2"} if isinstance(spec, L2NormSpec) else set())


def test_every_switch_is_explained() -> None:
    page = (ROOT / "docs" / "aot.md").read_text()
    for kind in (kind for kernel in KERNELS.values() for kind in kernel.kinds):
        for f in fields(kind):
            assert re.search(rf"^\|[^|]*`{f.name}`", page, re.MULTILINE), f"{kind.__name__}.{f.name}"


def test_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "packages/gdn-aot/README.md").read_text(), re.M | re.S)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out == "401 kernels; 24 of K5 vk, 240 of K5 opt\n"
