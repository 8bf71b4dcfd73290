"""Tables of launch configurations on NVIDIA: what a row is for, what a bad one does, and who wins."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn_runtime import env, rules, select, tables
from gdn_runtime.arch import parse_arch
from gdn_runtime.rules import Problem
from gdn_runtime.spec import FastConfig, OutputConfig, PrepareConfig, StateScanConfig
from gdn_runtime.tables import Provenance, launch_rows, load_launches, packaged_file, parse_launch_row

H200 = Problem(
    arch=parse_arch("sm90"),
    compute_units=132,
    num_heads=8,
    num_key_heads=2,
    num_seqs=2,
    total_chunks=136,
    max_seq_chunks=128,
    dtype="bf16",
    beta_dtype="fp32",
    state_dtype="fp32",
    snapshot_dtype="bf16",
    is_varlen=True,
)
CUDA = torch.device("cuda")
SHAPE: dict[str, Any] = {
    "gfx": "sm90", "cu_num": 132, "H": 8, "Hg": 2, "V": 128, "is_varlen": True, "total_chunks": 136,
}  # fmt: skip
STATES: dict[str, Any] = {
    "N": 2, "max_seq_chunks": 128, "gated": True, "use_h0": True, "store_fs": True, "snapshot_bf16": True,
    "state_bf16": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "prepare": {"mode": "split", "num_warps": 8, "num_stages": 1},
    "state_scan": {"block_v": 16, "num_warps": 8, "num_stages": 4},
    "block": {"path": "staged", "block_v": 128, "num_warps": 8, "num_stages": 1},
    "fast": {"path": "fast", "p_in_scan": False, "segment_chunks": 64},
}


def row(kernel: str, **changes: Any) -> dict[str, Any]:
    """A row of a table; of kernel "fast" one of "block" with that path."""
    states = {} if kernel == "prepare" else STATES
    return {**SHAPE, **states, **CONFIGS[kernel], "us": 12.5, "provenance": "lab", **changes}


def write(file: Path, kernel: str, *rows: object, **changes: Any) -> Path:
    header = {
        "format": 1,
        "kernel": "block" if kernel == "fast" else kernel,
        "arch": "sm90",
        "provenance": {"lab": {"source": "lab", "device": "H200"}, "guess": {"source": "lab", "modelled": True}},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**header, **changes, "rows": rows}))
    return file


@pytest.fixture(autouse=True)
def triton_3_6(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "_triton_version", lambda: (3, 6))
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    select._select.cache_clear()
    tables.forget_launches()
    yield
    select._select.cache_clear()
    tables.forget_launches()


def selected(folder: Path, problem: Problem = H200, **settings: Any) -> select.Selection:
    options = {name: settings.pop(name) for name in ("stages", "backend", "prepare_backend") if name in settings}
    with env.override(tables=str(folder), **settings):
        return select.select(problem, CUDA, **options)


# ------------------------------------------------------------------------------------------------ files


def test_the_packaged_tables_are_empty_and_sound() -> None:
    """They are filled on a card: docs/tuned-tables.md."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in launch_rows.LAUNCH_KERNELS:
            assert json.loads(packaged_file("sm90", kernel).read_text())["kernel"] == kernel
        assert len(load_launches([packaged_file("sm90", "block").parent])) == 0
        assert len(tables.launch_table("")) == 0


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("prepare", PrepareConfig("split", 8, 1)),
        ("state_scan", StateScanConfig(16, 8, 4)),
        ("block", OutputConfig(128, 8, 1)),
        ("fast", FastConfig(False, 64)),
    ],
)
def test_a_row_is_for_calls_that_match_it_exactly(tmp_path: Path, kernel: str, expected: object) -> None:
    table = load_launches([write(tmp_path / "t.json", kernel, row(kernel))])
    name: Any = "block" if kernel == "fast" else kernel
    call = H200.launch_call()
    assert call is not None
    found = table.get(name, call)
    assert found is not None and found.row.config == expected and found.row.us == 12.5
    assert found.row.provenance.device == "H200"
    assert tables.config_fields(found.row.config, name) == CONFIGS[kernel]
    written = {**SHAPE, **({} if kernel == "prepare" else STATES)}
    del written["V"]
    assert tables.key_fields(name, found.row.call) == written
    others: dict[str, Any] = {
        "compute_units": 114, "num_heads": 16, "num_key_heads": 4, "is_varlen": False, "total_chunks": 137,
    }  # fmt: skip
    states: dict[str, Any] = {
        "num_seqs": 3, "max_seq_chunks": 127, "gated": False, "use_initial_state": False, "store_final_state": False,
        "snapshot_dtype": "fp32", "state_dtype": "bf16",
    }  # fmt: skip
    for field, value in (others | states).items():
        hit = table.get(name, call._replace(**{field: value}))
        assert (hit is None) == (kernel != "prepare" or field in others), field


def test_calls_that_no_table_lists() -> None:
    assert replace(H200, dtype="fp16", snapshot_dtype="fp16").launch_call() is None
    assert replace(H200, use_gk=True).launch_call() is None


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("prepare", lambda r: r.pop("mode"), "lacks mode"),
    ("prepare", lambda r: r.update(N=0), "N: got 0, expected a positive integer"),
    ("prepare", lambda r: r.update(block_v=16), "has unknown field block_v"),
    ("prepare", lambda r: r.update(mode="none"), "prepare mode: got none, supported: fused, split"),
    (
        "prepare",
        lambda r: r.update(num_warps=1),
        "mode=split num_warps=1 num_stages=1, which spills registers or takes all",
    ),
    ("prepare", lambda r: r.update(num_warps=3), "num_warps: got 3, supported: 1, 2, 4, 8"),
    ("prepare", lambda r: r.update(num_stages=2), "num_stages from 1 to 1 expected"),
    ("state_scan", lambda r: r.update(block_v=48), "block_v: got 48, supported: 16, 32, 64, 128"),
    (
        "state_scan",
        lambda r: r.update(block_v=128, num_warps=4),
        "block_v=128 num_warps=4 num_stages=4, which spills registers or takes all",
    ),
    ("state_scan", lambda r: r.update(block_v=64, num_warps=4), "num_stages from 1 to 3 expected"),
    (
        "state_scan",
        lambda r: r.update(num_warps=2),
        "block_v=16 num_warps=2 num_stages=4, which spills registers or takes all",
    ),
    ("state_scan", lambda r: r.update(num_stages=5), "num_stages from 1 to 4 expected"),
    ("state_scan", lambda r: r.update(num_stages=True), "num_stages: got True, expected a positive integer"),
    ("state_scan", lambda r: r.update(gfx="sm100"), "gfx: got 'sm100', expected the arch of the file, 'sm90'"),
    ("state_scan", lambda r: r.update(V=64), "V: got 64, expected 128"),
    ("state_scan", lambda r: r.update(H=7), "H: got 7, expected a multiple of Hg=2"),
    ("state_scan", lambda r: r.update(max_seq_chunks=137), "max_seq_chunks: got 137, expected at most total_chunks"),
    ("state_scan", lambda r: r.update(snapshot_bf16=1), "snapshot_bf16: got 1, expected true or false"),
    ("state_scan", lambda r: r.update(us=-1), "us: got -1, expected a positive number"),
    ("state_scan", lambda r: r.update(provenance="none"), "provenance: got 'none', expected one of lab, guess"),
    ("block", lambda r: r.update(path="slow"), "path: got 'slow', expected one of fast, staged"),
    ("block", lambda r: r.update(segment_chunks=16), "has unknown field segment_chunks"),
    (
        "block",
        lambda r: r.update(num_warps=1),
        "block_v=128 num_warps=1 num_stages=1, which spills registers or takes all",
    ),
    ("fast", lambda r: r.update(segment_chunks=-1), "segment_chunks: got -1, expected a positive integer"),
    ("fast", lambda r: r.update(segment_chunks=False), "segment_chunks: got False, expected a positive integer"),
    ("fast", lambda r: r.update(segment_chunks=128), "128 chunks are one segment"),
    ("fast", lambda r: r.update(segment_chunks=1), "2048 segments and heads are more than 1024"),
    ("fast", lambda r: r.update(snapshot_bf16=False), "snapshots in fp32, and the fast path keeps none"),
    ("fast", lambda r: r.update(p_in_scan=1), "p_in_scan: got 1, expected true or false"),
]


@pytest.mark.parametrize(("kernel", "spoil", "text"), BAD)
def test_a_bad_row_is_skipped_and_named(
    tmp_path: Path, kernel: str, spoil: Callable[[dict[str, Any]], Any], text: str
) -> None:
    bad = row(kernel)
    spoil(bad)
    good = row(kernel, cu_num=114)
    file = write(tmp_path / "t.json", kernel, bad, good)
    with pytest.warns(RuntimeWarning) as caught:
        table = load_launches([file])
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"table {file} row 0: ") and message.endswith("; row skipped") and text in message
    (found,) = table.rows()
    assert found.row.call.compute_units == 114


def test_a_file_that_is_none_is_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("{")
    with pytest.warns(RuntimeWarning, match="file ignored") as caught:
        assert len(load_launches([file])) == 0
    assert len(caught) == 1


def test_two_rows_for_one_call(tmp_path: Path) -> None:
    first, second = row("prepare"), row("prepare", mode="fused")
    file = write(tmp_path / "a.json", "prepare", first, second)
    with pytest.warns(RuntimeWarning, match=r"row 0 .*split.* and .* row 1 .*fused.* disagree; .*row 0 kept"):
        (found,) = load_launches([file]).rows()
    assert found.index == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_launches([write(tmp_path / "b.json", "prepare", first, first)])
        later = write(tmp_path / "c.json", "prepare", second)
        guess = write(tmp_path / "d.json", "prepare", row("prepare", num_warps=4, provenance="guess"))
        assert load_launches([tmp_path / "b.json", later, guess]).rows()[0].file == later


def test_the_parser_takes_no_other_arch() -> None:
    with pytest.raises(ValueError, match=r"^gfx: got 'gfx942', expected the arch of the file, 'gfx942', one of sm90$"):
        parse_launch_row("prepare", row("prepare", gfx="gfx942"), "gfx942", {"lab": Provenance("lab")})


# ------------------------------------------------------------------------------------------------ selection


def test_each_stage_takes_its_row_and_says_so(tmp_path: Path) -> None:
    for kernel in ("prepare", "state_scan", "block"):
        write(tmp_path / f"{kernel}.json", kernel, row(kernel))
    found = selected(tmp_path)
    assert found.fast is None
    assert found.prepare.config == PrepareConfig("split", 8, 1)  # type: ignore[union-attr]
    assert found.state_scan.config == StateScanConfig(16, 8, 4)  # type: ignore[union-attr]
    assert found.output.config == OutputConfig(128, 8, 1)
    origin = "(12.5 us, lab, H200)"
    text = str(found)
    assert f"stages K1..K6, not the fast path: the tuned table says so, {tmp_path}/block.json row 0 {origin}" in text
    for words in (
        f"prepare: mode=split num_warps=8 num_stages=1 from the tuned table, {tmp_path}/prepare.json row 0 {origin}",
        f"state scan: block_v=16 num_warps=8 num_stages=4 from the tuned table, {tmp_path}/state_scan.json",
        f"output: block_v=128 num_warps=8 num_stages=1 from the tuned table, {tmp_path}/block.json",
    ):
        assert words in text
    alone = selected(tmp_path, stages=("state_scan",))
    assert alone.state_scan == found.state_scan


def test_the_fast_path_takes_its_row(tmp_path: Path) -> None:
    write(tmp_path / "fast.json", "fast", row("fast"))
    found = selected(tmp_path)
    assert found.fast is not None and (found.fast.p_in_scan, found.fast.segment_chunks) == (False, 64)
    assert "fast path, no snapshots, w or u: p_in_scan=False segment_chunks=64 from the tuned table" in str(found)
    # The stages beside it have none.
    assert found.output.config == rules.output_config(H200)[0]


def test_the_environment_wins(tmp_path: Path) -> None:
    for kernel in ("prepare", "state_scan", "block"):
        write(tmp_path / f"{kernel}.json", kernel, row(kernel))
    fast = selected(tmp_path, prefill="fast")
    config, _ = rules.fast_config(H200)
    assert fast.fast == rules.fast_prefill_spec(H200, config) and "from the tuned table" not in str(fast)
    stages = selected(tmp_path, k5_block_v=32, prepare_mode="fused")
    assert stages.prepare.config == PrepareConfig("fused", 8, 1)  # type: ignore[union-attr]
    assert stages.state_scan.config == StateScanConfig(32, 8, 4)  # type: ignore[union-attr]
    assert "block_v=32 from GDN_K5_BLOCK_V" in str(stages) and "mode=fused from GDN_PREPARE_MODE" in str(stages)
    write(tmp_path / "block.json", "fast", row("fast"))
    tables.forget_launches()
    staged = selected(tmp_path, prefill="staged")
    assert staged.fast is None and staged.output.config == rules.output_config(H200)[0]


def test_a_row_of_the_fast_path_where_it_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "fast.json", "fast", row("fast"))
    monkeypatch.setattr(select, "_triton_version", lambda: (3, 9))
    found = selected(tmp_path)
    assert found.fast is None and "it is written for Triton 3.6" in str(found)
    assert found.output.config == rules.output_config(H200)[0]


def test_no_other_backend_or_arch_reads_them(tmp_path: Path) -> None:
    for kernel in ("prepare", "state_scan", "block"):
        write(tmp_path / f"{kernel}.json", kernel, row(kernel))
    assert "tuned table" not in str(selected(tmp_path, backend="reference"))
    sm100 = replace(H200, arch=parse_arch("sm100"))
    assert "tuned table" not in str(selected(tmp_path, sm100))
    assert "tuned table" not in str(selected(tmp_path, replace(H200, dtype="fp16", snapshot_dtype="fp16")))


def test_a_lookup_is_made_once_a_call_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "fast.json", "fast", row("fast"))
    lookups: list[str] = []
    get = tables.LaunchTable.get

    def counted(self: tables.LaunchTable, kernel: Any, call: Any) -> Any:
        lookups.append(kernel)
        return get(self, kernel, call)

    monkeypatch.setattr(tables.LaunchTable, "get", counted)
    first = selected(tmp_path)
    made = len(lookups)
    assert made and all(selected(tmp_path) is first for _ in range(3)) and len(lookups) == made
    tables.forget_launches()
    write(tmp_path / "fast.json", "fast", row("fast", segment_chunks=32))
    again = selected(tmp_path)
    assert again.fast is not None and again.fast.segment_chunks == 32
