"""Tables of budgets: what ships, and which of two rows for one problem counts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gdn_runtime import env
from pa_decode import tables
from pa_decode.planner import default_budget
from pa_decode.tables import GRID, PACKAGED, rows, tuned_budget

ROW: dict[str, Any] = {
    "gfx": "gfx942", "cu_num": 80, "B": 3, "Hq": 16, "Hkv": 2, "D": 256, "page": 16, "QL": 1, "query_dtype": "bf16",
    "scale_mode": "tensor", "v_packed": True, "sink_dtype": "none", "window": 0, "budget": 77, "provenance": "card",
}  # fmt: skip
ORIGINS = {"card": {"source": "x", "n": 300}, "model": {"source": "x", "modelled": True}}
CARDS = {("gfx942", 80), ("gfx942", 304), ("gfx950", 256)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    tables.forget()
    yield
    tables.forget()


def write(file: Path, *budgets: tuple[int, str]) -> Path:
    """A table with a row of ``ROW``'s problem for each budget and provenance."""
    found = [{**ROW, "budget": budget, "provenance": name} for budget, name in budgets]
    header = {"format": 1, "kernel": "pa_decode", "arch": "gfx942", "provenance": ORIGINS, "rows": found}
    file.write_text(json.dumps(header))
    return file


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([[(77, "card")], [(88, "card")]], 88),
        ([[(77, "card")], [(88, "model")]], 77),
        ([[(77, "model")], [(88, "card")]], 88),
        ([[(77, "model")], [(88, "model")]], 88),
        ([[(77, "card"), (88, "card")]], 77),
        ([[(77, "model"), (88, "card"), (99, "card")]], 88),
    ],
)
def test_which_of_two_rows_counts(tmp_path: Path, files: list[list[tuple[int, str]]], expected: int) -> None:
    """As in the tables of gdn-runtime: what was measured, then the later file, then the first row, with a warning."""
    paths = [write(tmp_path / f"{index}.json", *budgets) for index, budgets in enumerate(files)]
    (geometry,) = {located.row.geometry for located in rows(paths)}
    with warnings.catch_warnings(record=True) as caught, env.override(tables=":".join(map(str, paths))):
        warnings.simplefilter("always")
        assert tuned_budget(geometry) == expected
    said = [str(warning.message) for warning in caught]
    assert len(said) == sum(len(budgets) - 1 for budgets in files)
    assert all("budget=" in text and "disagree" in text for text in said)


def test_no_problem_has_two_packaged_rows() -> None:
    found = [located.row.geometry for located in rows([PACKAGED])]
    assert len(found) == len(set(found))


def test_the_problems_of_the_public_measurements_have_rows_on_every_card() -> None:
    """Pages of 64, both forms of V, both modes of scales, 1 and 4 query tokens, whole contexts and two windows."""
    asked = set(product((1, 4), ("tensor", "token"), (True, False), (0, 257, 8193), (1, 16, 128), (1, 2)))
    for card in CARDS:
        mine = {
            (g.query_length, g.scale_mode, g.v_packed, g.window, g.batch, g.num_kv_heads)
            for g in (located.row.geometry for located in rows([PACKAGED]))
            if (g.arch, g.compute_units) == card and g.page_size == 64 and g.num_heads == 8 * g.num_kv_heads
        }
        assert asked <= mine, card


def test_rows_of_the_grid_are_modelled_and_say_what_the_rule_gives() -> None:
    """The cycle model has no better budget for any of them."""
    found = [located.row for located in rows([GRID])]
    assert {(row.geometry.arch, row.geometry.compute_units) for row in found} == CARDS
    for row in found:
        assert row.provenance.modelled
        assert row.budget == default_budget(row.geometry.compute_units, pipe=row.geometry.is_pipe)
