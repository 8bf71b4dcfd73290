"""``gdn-tune report``: the command."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..console import Quiet, say, usage
from . import folder
from .bars import counters_section, host_section
from .choices import picks_section
from .content import Section
from .data import Data
from .decoding import decode_section
from .prefill import baseline_of, snapshot_section, stages_section, times_section
from .read import read
from .roofline import Roof, roof_of
from .texts import markdown, to_csv, to_json

FORMATS = ("md", "csv", "json", "png", "html")
NEEDS = {"png": ("matplotlib",), "html": ("matplotlib", "jinja2")}
TITLE = "Report of gdn-tune"


def parse_formats(text: str) -> list[str]:
    """Formats of "md,csv". Raises ValueError for others, for none, and for those whose libraries are not there."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise ValueError(f"format: got {unknown[0]!r}, expected some of {', '.join(FORMATS)}")
    needed = {library: name for name in names for library in NEEDS.get(name, ())}
    lacking = [library for library in needed if importlib.util.find_spec(library) is None]
    if lacking:
        raise ImportError(
            f"format {needed[lacking[0]]}: {' and '.join(lacking)} not found: pip install 'gdn-tune[report]'"
        )
    return list(dict.fromkeys(names))


def sections_of(data: Data, roof: Roof | None = None, baseline: str = "") -> list[Section]:
    """The sections of a report. Raises ValueError for a ``baseline`` that nothing was timed with."""
    block = [time for time in data.times if time.what == "block"]
    scans = [time for time in data.times if time.what == "K5" and time.origin.kind == "k5"]
    calls = [time for time in block if time.origin.kind == "block"]
    found = baseline_of([*calls, *scans], baseline)
    counted = [row for row in data.bars if not row.origin.host]
    return [
        times_section(calls, "block", "block", "Time of the block", roof, found),
        times_section(scans, "K5", "k5", "Device time of K5", roof, found),
        snapshot_section(data.times),
        stages_section(block),
        decode_section(data.decodes, roof),
        counters_section(counted),
        host_section([row for row in data.bars if row.origin.host]),
        picks_section(data.picks),
    ]


def contents(title: str, sections: Sequence[Section], data: Data, formats: Iterable[str]) -> dict[str, bytes]:
    """The files of a report by name; equal data give equal bytes."""
    formats = set(formats)
    found: dict[str, bytes] = {}
    images: dict[str, str] = {}
    if "png" in formats:
        from . import draw

        for section in sections:
            for figure in section.figures:
                images[figure.name] = f"report-{figure.name}.png"
                found[images[figure.name]] = draw.png(figure)
    if "md" in formats:
        found["report.md"] = markdown(title, sections, data, images).encode()
    if "csv" in formats:
        tables = [table for section in sections for table in section.tables]
        found |= {f"report-{table.name}.csv": to_csv(table).encode() for table in tables}
    if "json" in formats:
        found["report.json"] = to_json(title, sections, data).encode()
    if "html" in formats:
        from .page import page

        found["report.html"] = page(title, sections, data).encode()
    return found


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="JSON of the benches, stores, files as in benchmarks/results.",
            exists=True,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the report; replaces one in it.")],
    formats: Annotated[
        str, typer.Option("--format", metavar="NAME,...", help=f"Some of {', '.join(FORMATS)}.")
    ] = "md,csv,json,png,html",
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="Of the report.")] = TITLE,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Only times of this card, where inputs have several.")
    ] = "",
    baseline: Annotated[
        str, typer.Option("--baseline", metavar="NAME", help="Of the ratios; aiter if it is timed, else the first.")
    ] = "",
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", metavar="TB/S", help="Of the roofline; default: see the docs.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="TFLOP/S", help="Of the roofline, bf16; default: see the docs.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make tables and plots of what was measured, modelled and tuned.

    Time against tokens per backend with the roofline, what fp32 snapshots cost, stages, paged decode, the emulator's
    counters against their bars, tuned picks with their margins: each where its figures are in the inputs. Every figure
    says where it is from. Equal inputs give equal bytes. png and html need the extra "report".
    """
    names = usage(lambda: parse_formats(formats))
    usage(lambda: folder.check(out))
    data = usage(lambda: read(inputs, device))
    timed = next((origin.device for origin in data.origins if origin.device and not origin.host), "")
    roof = usage(lambda: roof_of(timed, bandwidth, rate))
    sections = usage(lambda: sections_of(data, roof, baseline))
    made = contents(title, sections, data, names)
    folder.write(out, made)
    if not quiet:
        figures = sum(len(section.figures) for section in sections)
        tables = sum(len(section.tables) for section in sections)
        say(f"{out}: {len(made)} files, {tables} tables, {figures} figures")
        for section in sections:
            if not section.tables:
                say(f"{section.title}: {' '.join(section.text)}")
