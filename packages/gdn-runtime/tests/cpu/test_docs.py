"""The documentation is true: its examples run, its links lead somewhere, and it names what the code has."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_runtime

ROOT = Path(__file__).parents[4]
PAGES = sorted([ROOT / "README.md", *(ROOT / "packages").glob("*/README.md"), *(ROOT / "docs").glob("*.md")])
API = ROOT / "docs" / "api.md"

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

# Pages hold for every reader: no path or address of one machine, nothing left undone.
FORBIDDEN = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|mnt|opt|usr|var)/|\blocalhost\b|\b\d{1,3}(?:\.\d{1,3}){3}\b|https?://"
    r"|\bissues? #?\d|\bpull request|\bTODO\b|\bFIXME\b",
    re.IGNORECASE,
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def examples() -> list[object]:
    found = [(page, number, code) for page in PAGES for number, code in enumerate(BLOCK.findall(page.read_text()))]
    return [pytest.param(code, id=f"{name(page)}-{number}") for page, number, code in found]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings as forges derive them: lower case, punctuation dropped, blanks to hyphens."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def test_pages_and_examples_are_found() -> None:
    assert {"README.md", "docs/api.md", "docs/concepts.md", "docs/serving.md"} <= {name(page) for page in PAGES}
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) == 1
    assert len(BLOCK.findall(API.read_text())) >= 5


@pytest.mark.parametrize("code", examples())
def test_example_runs(code: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    runpy.run_path(str(file))


def test_usage_example_of_the_readme() -> None:
    """In a process of its own, as a user would run it."""
    (code,) = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(code.splitlines()) <= 15
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([1, 346, 4, 128])\narch")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), f"{name(page)}: {target} leads out of the repository"
        assert file.exists(), f"{name(page)}: {target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{name(page)}: {target}: no such heading, only {sorted(anchors(file))}"


def test_every_page_is_reachable_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())}
    missing = [name(page) for page in PAGES if page.parent.name == "docs" and page not in {*linked, index}]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_holds_for_every_reader(page: Path) -> None:
    found = [match.group() for match in FORBIDDEN.finditer(page.read_text())]
    assert not found, f"{name(page)}: {found}"


@pytest.mark.parametrize("public", gdn_runtime.__all__)
def test_api_names_every_public_name(public: str) -> None:
    assert f"`{public}`" in API.read_text()


@pytest.mark.parametrize(
    "function", ["chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd_h", "build_prefill_metadata"]
)
def test_api_names_every_parameter(function: str) -> None:
    (section,) = re.findall(rf"^## {function}\n(.*?)(?=^## |\Z)", API.read_text(), re.MULTILINE | re.DOTALL)
    missing = [
        parameter
        for parameter in inspect.signature(getattr(gdn_runtime, function)).parameters
        if f"`{parameter}`" not in section
    ]
    assert not missing


def test_api_gives_the_defaults_of_the_block() -> None:
    """The second column of the table of keywords starts with the default."""
    wrong = []
    for parameter in inspect.signature(gdn_runtime.chunk_gated_delta_rule).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        default = f'"{parameter.default}"' if isinstance(parameter.default, str) else str(parameter.default)
        row = re.search(rf"^\| `{parameter.name}` \| ([^\s:|]+)", API.read_text(), re.MULTILINE)
        if row is None or row[1] != default:
            wrong.append((parameter.name, default, row and row[1]))
    assert not wrong


def test_demo_reports_its_measurements_as_json() -> None:
    command = (sys.executable, ROOT / "examples" / "demo.py", "--json", "--backend", "reference", "--tokens", "100")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    decode = ["decode, all tokens", "  rounding as FP8", "decode, window", "  rounding as FP8"]
    prefill = ["first prefill", "continued", "final states", "other slots"]
    assert [row["part"] for row in report["rows"]] == prefill + decode
    assert all(row["ok"] == (row["error"] <= row["bound"]) for row in report["rows"])
    assert 0 < report["rows"][0]["error"] < 0.01


def test_demo_refuses_a_batch_that_is_too_small() -> None:
    command = (sys.executable, ROOT / "examples" / "demo.py", "--tokens", "7")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--tokens: got '7', expected 32 to 8192" in done.stderr
