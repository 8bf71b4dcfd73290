"""The documentation quotes commands that exist: each parses, its cases match, its letters lead to it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gdn_tune.calls import DECODE_CASES, GDN_CASES, pick
from gdn_tune.cli import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("performance", "tuned-tables", "tuning")]
QUOTED = re.compile(r"`(gdn-tune [^`]+)`|^ {4}(gdn-tune .+)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\b(?:OP|COMMAND|ARCH|ID|FILE|DIR|TABLE|OLD|NEW|CSV)\b|\.\.\.|\$")
"""Of what a command takes, in place of a value."""


def commands() -> list[Any]:
    found = []
    for page in PAGES:
        for match in QUOTED.finditer(page.read_text()):
            for part in re.split(r"&&|;", match[1] or match[2]):
                text = " ".join(part.split())
                if text.startswith("gdn-tune ") and not PLACEHOLDER.search(text):
                    found.append(pytest.param(text, id=f"{page.stem}: {text[:60]}"))
    return found


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The command that ``text`` names and the values of its options. Raises what a wrong use raises; runs nothing."""
    command: Any = typer.main.get_command(app)
    name, *rest = shlex.split(text)
    context = command.make_context(name, rest)
    path = []
    while hasattr(command, "resolve_command"):
        # What the group has not taken for itself is the name of a command and what that takes.
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)
        context = command.make_context(name, rest, parent=context)
    return " ".join(path), context.params


def test_commands_are_found() -> None:
    texts = [param.values[0] for param in commands()]
    assert sum("bench" in text for text in texts) >= 8 and any(text.startswith("gdn-tune tune k5") for text in texts)


@pytest.mark.parametrize("text", commands())
def test_a_quoted_command_parses_and_its_cases_exist(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in shlex.split(text)[2:]:
        if re.fullmatch(r"[a-z][\w./-]*", word):  # it may be a file that must exist
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    path, options = parse(text)
    if options.get("cases"):
        table = DECODE_CASES if path == "bench pa" or options.get("op") == "pa" else GDN_CASES
        assert pick(table, options["cases"])


@pytest.mark.parametrize("text", ["gdn-tune bench k5 --casse x", "gdn-tune bench k6", "gdn-tune bench pa --page x"])
def test_a_wrong_command_does_not_parse(text: str) -> None:
    with pytest.raises(Exception, match=r"No such|valid integer"):
        parse(text)


# ------------------------------------------------------------------------------------------------ published numbers


def published() -> str:
    (section,) = re.findall(
        r"^## Published numbers\n(.*?)^## ", (ROOT / "docs/performance.md").read_text(), re.M | re.S
    )
    return str(section)


def test_every_published_number_has_a_row_that_says_what_is_here() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+) \|$", published(), re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 45))
    assert all(cell.strip() for row in rows for cell in row)


def test_letters_lead_to_commands_and_every_command_is_used() -> None:
    section = published()
    named = set(re.findall(r"^\| ([A-Z]) \| `gdn-tune ", section, re.MULTILINE))
    rows = "\n".join(re.findall(r"^\| (?![A-Z] \|).*", section, re.MULTILINE))
    used = set(re.findall(r"not run: ([A-Z])\b|\(([A-Z])\)|bar of ([A-Z]) ", rows))
    assert {letter for match in used for letter in match if letter} == named


@pytest.mark.slow
def test_cycles_of_the_published_shape_are_those_of_the_model() -> None:
    """What command M prints of one sequence of 8192 tokens: K5 on gfx942 with 80 compute units, and what fp32 costs."""
    pytest.importorskip("gdn_tune.model", exc_type=ImportError)
    from gdn_tune.bench.emulated import count, problem
    from gdn_tune.bench.profile import K5

    names = (f"snapshot-35b-tp1-8192-{dtype}" for dtype in ("bf16", "fp32"))
    bf16, fp32 = (count(problem(GDN_CASES[name], "gfx942", 80), scan_alone=True)[0][K5] for name in names)
    rows = dict(re.findall(r"^\| (\d+) \| (.+)$", published(), re.MULTILINE))
    assert f"{fp32:.0f}; {bf16:.0f} cycles" in rows["15"]
    assert f"+{100 * (fp32 / bf16 - 1):.1f} % of the cycles" in rows["16"]
