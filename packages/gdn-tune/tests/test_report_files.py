"""``gdn-tune report`` as a command: its files, that they say the same, and that they are there whole or not at all."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import json
import re
import warnings
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from gdn_tune.cli import app
from gdn_tune.report import command, draw, folder
from gdn_tune.report.content import Bars, Dots, Figure, Lines, Section, Series, shown, trimmed
from gdn_tune.report.data import Origin
from gdn_tune.report.read import read
from gdn_tune.report.roofline import roof_of
from gdn_tune.report.texts import plain
from tune_testing import reports

RUN = (Origin("a.json", "block", device="NVIDIA H200", hardware="NVIDIA H200", commit="abc"),)
COUNTED = (Origin("c.json", "counters", arch="gfx950", modelled=True),)
FIGURES: tuple[Figure, ...] = (
    Lines("lines", "Time", "alt", RUN, "tokens of the call", "us",
          (Series("a", ((8192.0, 10.0), (65536.0, 900.0))), Series("b", ((8192.0, 12.0), (65536.0, 905.0))),
           Series("roofline", ((8192.0, 1.0), (65536.0, 8.0)), roof=True), Series("b", ((2500.0, 9.0),), False,
                                                                                   frozenset({0}))),
          marks=((2500.0, "dense"),)),
    Bars("bars", "Stages", "alt", RUN, "us", (("1 x 8192", "x", (("K5", 5.0), ("K6", 3.0)), "8"),)),
    Dots("dots", "Counters", "alt", COUNTED, "share of the bar, %", (("opt", (("instructions", 0.9),), "1/1"),), 1.0,
         True),
)  # fmt: skip


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], prog_name="gdn-tune")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A file of every kind, with a section that has no figures."""
    at = tmp_path_factory.mktemp("inputs")
    counters = {"spec": {"arch": "gfx950"}, "name": "gfx950 <opt> | a", "bars": [{"name": "n", "got": 3, "limit": 4}]}
    (at / "counters.json").write_text(json.dumps({"commit": "c", "rows": [counters]}))
    block = [reports.block_row(tokens, name, us * tokens / 8192)
             for tokens in (8192, 16384) for name, us in (("aiter", 600.125), ("flydsl", 400.0))]  # fmt: skip
    return [reports.save(at / "block.json", "block", block), at / "counters.json", reports.store_file(at / "s.sqlite")]


@pytest.fixture(scope="module")
def made(inputs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of everything."""
    out = tmp_path_factory.mktemp("out") / "new" / "report"
    result = run(*inputs, "--out", out, "--title", "A & B")
    assert result.exit_code == 0, result.output
    assert "Paged decode: No times of paged decode" in result.output and str(out) in result.output
    return out


@pytest.fixture(scope="module")
def sections(inputs: list[Path]) -> list[Section]:
    return command.sections_of(read(inputs), roof_of("NVIDIA H200", None, None))


class Page(HTMLParser):
    """What a page has: images, addresses, cells of tables, tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.cells: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action")]
        if tag == "img":
            self.images.append(found)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("td", "th") and self.cells and self.cells[-1]:
            self.cells[-1][-1] += data.strip("\n")


# ------------------------------------------------------------------------------------------------ the same numbers


def test_every_format_has_the_numbers(made: Path, sections: list[Section]) -> None:
    markdown, whole = (made / "report.md").read_text(), json.loads((made / "report.json").read_text())
    page = Page((made / "report.html").read_text())
    lines = [line.replace("\\|", "/") for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("&lt;", "<") for cell in line.strip("|").split("|")] for line in lines]
    tables = {table["name"]: table for section in whole["sections"] for table in section["tables"]}
    count = 0
    for table in (table for section in sections for table in section.tables):
        saved = list(csv.reader(io.StringIO((made / f"report-{table.name}.csv").read_text())))
        assert saved[0] == [each.name for each in table.columns]
        assert saved[1:] == [[plain(value) for value in row] for row in table.rows]
        assert [tuple(row) for row in tables[table.name]["rows"]] == list(table.rows)
        if not table.data_only:
            people = trimmed(table)
            for row in people.rows:
                words = [shown(value, column) for value, column in zip(row, people.columns, strict=True)]
                assert [word.replace("|", "/") for word in words] in cells and words in page.cells
                count += 1
    assert count == sum(len(t.rows) for s in sections for t in s.tables if not t.data_only) > 10
    assert "600.12" in markdown and "600.125" in (made / "report-block.csv").read_text()


def test_numbers_of_csv_read_back() -> None:
    assert [plain(value) for value in (0.1 + 0.2, 3, None, True, "a,b")] == [
        "0.30000000000000004",
        "3",
        "",
        "yes",
        "a,b",
    ]


def test_all_say_where_figures_are_from(made: Path) -> None:
    for name in ("report.md", "report.html", "report.json"):
        text = (made / name).read_text()
        for word in ("NVIDIA H200", "2.11.0", "0123456789ab", "2026-11-30", "gdn-tune bench block", "block.json"):
            assert word in text, (name, word)


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_needs_nothing_else(made: Path, sections: list[Section]) -> None:
    text = (made / "report.html").read_text()
    page = Page(text)
    figures = [figure for section in sections for figure in section.figures]
    assert len(page.images) == len(figures) > 3 and [image["alt"] for image in page.images] == [f.alt for f in figures]
    assert all(address.startswith(("data:image/svg+xml;base64,", "#")) for address in page.addresses)
    assert not {"script", "link", "iframe"} & page.tags and not re.search(r"url\(|@import|\son\w+=", text)
    assert "prefers-color-scheme: dark" in text and "overflow-x: auto" in text and "<title>A &amp; B</title>" in text
    for address in page.addresses:
        if address.startswith("data:"):
            image = base64.b64decode(address.partition(",")[2]).decode()
            assert image.rstrip().endswith("</svg>") and not re.search(r'(href|src)="(?!#)', image)


def test_words_of_files_are_words(made: Path) -> None:
    """The counters' kernel is called "<opt> | a"."""
    assert "<opt>" not in (made / "report.html").read_text() and "&lt;opt&gt;" in (made / "report.html").read_text()
    assert "&lt;opt> \\| a" in (made / "report.md").read_text()


# ------------------------------------------------------------------------------------------------ plots


def test_images_are_plots(made: Path, sections: list[Section]) -> None:
    names = {f"report-{figure.name}.png" for section in sections for figure in section.figures}
    assert {path.name for path in made.glob("*.png")} == names
    for name in names:
        with Image.open(made / name) as image:
            assert image.width == round(draw.WIDTH * draw.DPI) and image.height > 100
            colours = image.convert("RGB").reduce(4).getcolors(1 << 24)
        assert colours is not None and len(colours) > 20


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_plots_have_their_words(figure: Any) -> None:
    with draw.settings(draw.LIGHT), warnings.catch_warnings():
        warnings.simplefilter("error")
        canvas = draw.draw(figure, draw.LIGHT)
        (axes,) = canvas.axes
        words = [text.get_text() for text in (*canvas.texts, *axes.texts, *axes.get_yticklabels())]
        legends = [text.get_text() for legend in canvas.legends for text in legend.get_texts()]
        assert axes.get_xlabel() == figure.x and figure.title in words
        assert any("a.json: NVIDIA H200" in word or "c.json: emulator" in word for word in words)
        assert figure.modelled == ("MODELLED, NOT TIMED" in words)
        expected = {
            "lines": {"a", "b", "roofline", "dense"}, "bars": {"K5", "K6", "1 x 8192", "x", "8"},
            "dots": {"opt", "instructions", "1/1"},
        }  # fmt: skip
        assert expected[figure.name] <= {*words, *legends}
        if isinstance(figure, Lines):
            assert axes.get_ylabel() == "us"
            drawn = {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.get_lines()}  # type: ignore[union-attr]
            assert {each.points for each in figure.series} <= drawn


@pytest.mark.parametrize("theme", [draw.LIGHT, draw.DARK], ids=["light", "dark"])
def test_nothing_leaves_the_sheet_and_labels_keep_apart(theme: draw.Theme) -> None:
    series = tuple(Series(f"a backend of long name {i}", ((8192.0, 100.0 + i), (65536.0, 800.0 + i))) for i in range(6))
    with draw.settings(theme):
        canvas = draw.draw(Lines("n", "t", "alt", RUN, "tokens of the call", "us", series), theme)
        canvas.draw_without_rendering()
        (axes,) = canvas.axes
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 6
        edge = canvas.bbox
        for box in (*boxes, axes.yaxis.label.get_window_extent(), axes.xaxis.label.get_window_extent()):
            assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1
        ordered = sorted(boxes, key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(ordered))


def test_a_kind_of_figure_that_is_not_known() -> None:
    with pytest.raises(TypeError, match="got Figure, expected Lines, Bars or Dots"):
        draw.draw(Figure("n", "t", "alt", RUN), draw.LIGHT)


# ------------------------------------------------------------------------------------------------ folders


def test_equal_inputs_give_equal_bytes(made: Path, inputs: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Also in another folder that holds settings of matplotlib."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nlines.linewidth: 9\n")
    monkeypatch.chdir(tmp_path)
    result = run(*inputs, "--out", "again", "--title", "A & B", "--quiet")
    assert result.exit_code == 0 and not result.output
    first, second = ({path.name: path.read_bytes() for path in at.iterdir()} for at in (made, tmp_path / "again"))
    assert first.keys() == second.keys() and [name for name in first if first[name] != second[name]] == []
    assert not [name for name in first if b"matplotlib" in first[name] or str(tmp_path).encode() in first[name]]


def test_a_report_takes_the_place_of_one(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o755)
    assert run(*inputs, "--out", out, "--format", "md,csv").exit_code == 0
    assert run(*inputs, "--out", out, "--format", "json").exit_code == 0
    assert [path.name for path in out.iterdir()] == ["report.json"] and out.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_report_stays(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.md").write_text("mine")
    result = run(*inputs, "--out", out, "--format", "md")
    assert result.exit_code == 2 and "holds thesis.md, expected a new folder" in result.output
    file = tmp_path / "file"
    file.touch()
    assert "which is no folder" in run(*inputs, "--out", file, "--format", "md").output
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out", "thesis.md"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    folder.write(out, {"report.md": b"old"})
    monkeypatch.setattr(folder, "check", lambda _: (_ for _ in ()).throw(ValueError("holds another")))
    with pytest.raises(FileExistsError, match="holds another"):
        folder.write(out, {"report.md": b"new"})
    with pytest.raises(TypeError):
        folder.write(out, {"report.md": b"new", "report.json": None})  # type: ignore[dict-item]
    assert (out / "report.md").read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["out"]


# ------------------------------------------------------------------------------------------------ wrong use


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--format", "pdf"], "format: got 'pdf', expected some of md, csv, json, png, html"),
        (["--format", ""], "format: got ''"),
        (["--bandwidth", "-1"], "bandwidth: got -1.0, expected a positive number"),
        (["--rate", "nan"], "rate: got nan"),
        (["--baseline", "nobody"], "baseline: got 'nobody', expected one of aiter, flydsl"),
        (["--device", "MI300X"], "device: got 'MI300X', expected one of NVIDIA H200"),
    ],
)
def test_wrong_options(options: list[str], expected: str, inputs: list[Path], tmp_path: Path) -> None:
    result = run(*inputs, "--out", tmp_path / "out", *options)
    assert result.exit_code == 2 and expected in result.output and not list(tmp_path.iterdir())


def test_wrong_inputs(inputs: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for paths, expected in (
        ([bad], "bad.json: unknown schema"),
        ([inputs[0], inputs[0]], "given twice"),
        ([tmp_path / "none.json"], "does not exist"),
        ([], "Missing argument"),
    ):
        result = run(*paths, "--out", tmp_path / "out", "--format", "md")
        assert result.exit_code == 2 and expected in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_without_matplotlib(inputs: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else real(name, *more)
    )
    result = run(*inputs, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "matplotlib not found: pip install 'gdn-tune[report]'" in result.output
    assert not list(tmp_path.iterdir())
    assert run(*inputs, "--out", tmp_path / "out", "--format", "md,csv,json").exit_code == 0


def test_the_command_is_listed() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "report" in result.output
    flags = ("--out", "--format", "--title", "--device", "--baseline", "--bandwidth", "--rate", "--quiet")
    assert not [flag for flag in flags if flag not in run("--help").output]
