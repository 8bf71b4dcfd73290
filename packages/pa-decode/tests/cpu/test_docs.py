"""The page of pa-decode runs, and says of windows and sizes what the code says."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

import pa_decode
from pa_decode import spec, traits

PAGE = Path(__file__).parents[4] / "docs" / "pa-decode.md"


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(code)
    runpy.run_path(str(file))
    assert "d256_pipe in flydsl, D 256, page 16, 16 rows, scales per token, V packed" in capsys.readouterr().out


def test_every_argument_is_named() -> None:
    arguments = inspect.signature(pa_decode.pa_decode).parameters
    names = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), re.MULTILINE)))
    assert [
        name for name in arguments if arguments[name].kind is inspect.Parameter.KEYWORD_ONLY and name not in names
    ] == []


def test_sizes_are_those_of_the_code() -> None:
    sizes = (
        f"D {', '.join(map(str, spec.HEAD_DIMS))}; page {', '.join(map(str, spec.PAGE_SIZES))}; "
        f"QL up to {traits.MAX_QUERY_LENGTH}; R up to {traits.MAX_ROWS}; B up to {traits.MAX_BATCH}; the pipe: "
        f"D {traits.PIPE_HEAD_DIM}, page {' or '.join(map(str, traits.PIPE_PAGES))}, R up to {traits.PIPE_ROWS}"
    )
    assert sizes in PAGE.read_text()


def test_public_names_exist() -> None:
    assert pa_decode.__all__ and all(hasattr(pa_decode, name) for name in pa_decode.__all__)


def test_the_bound_of_a_window_is_written_once() -> None:
    """No second copy of window_tiles: its constants are those of traits."""
    sources = [path for path in Path(pa_decode.__file__).parent.glob("*.py") if path.name != "traits.py"]
    assert len(sources) > 8
    for path in sources:
        assert not re.search(r"\b25[45]\b|// (TILE|256)|TILE - 1", path.read_text()), path
