"""What is written once, and what must not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pa_decode

SOURCES = {
    path.relative_to(Path(pa_decode.__file__).parent).as_posix(): path.read_text()
    for path in Path(pa_decode.__file__).parent.rglob("*.py")
}


def where(pattern: str) -> set[str]:
    return {name for name, text in SOURCES.items() if re.search(pattern, text)}


def test_sources_are_found() -> None:
    assert len(SOURCES) > 30 and "traits.py" in SOURCES


def test_the_bound_of_windows_is_written_once() -> None:
    """Tiles of a window's union are W + QL - 2 over the tile, rounded up, plus 1; others call."""
    assert where(r"query_length\s*-\s*2\b") == {"traits.py"}
    assert where(r"\bdef (window_tiles|visible_tiles_bound|task_pages_bound|is_single_tile)\b") == {"traits.py"}
    assert where(r"\bvisible_tiles_bound\(") == {"traits.py", "planner.py"}
    assert {"plan.py", "schedule.py"} <= where(r"\bis_single_tile\(")


@pytest.mark.parametrize(
    "pattern",
    [
        "from_table_width",
        "(?i)per_token_m1",
        "(?i)reuse_kv_pages",
        r"(?i)\bnhd\b",
        r"(?i)stride_k_(block|token|head)|k_stride_(block|token|page)",
    ],
)
def test_what_is_gone_stays_gone(pattern: str) -> None:
    """Unpacked K, and rules of grid widths and tables that chose between kernels of one shape."""
    assert where(pattern) == set()


def test_only_one_place_refuses_an_unpacked_k() -> None:
    assert where("NotImplementedError\\(") == {"traits.py"}
    assert {"geometry.py", "layouts.py", "plan.py", "schedule.py", "spec.py"} <= where(r"\brequire_packed_k\(")
