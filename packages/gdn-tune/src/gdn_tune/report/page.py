"""A report as one HTML page that needs nothing else: images in it, no script, no address."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

import jinja2

from .content import Section, shown, sources, trimmed
from .data import Data
from .draw import DARK, LIGHT, svg
from .texts import missing, told

TEMPLATE = "page.html.j2"


def page(title: str, sections: Sequence[Section], data: Data) -> str:
    """The page: every figure once for light and once for dark screens."""
    names = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    template = names.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    here = [
        replace(section, tables=[trimmed(table) for table in section.tables if not table.data_only])
        for section in told(sections)
    ]
    images = {
        figure.name: [address(svg(figure, theme)) for theme in (LIGHT, DARK)]
        for section in here
        for figure in section.figures
    }
    return template.render(
        title=title,
        sections=here,
        images=images,
        shown=shown,
        missing=missing(sections, data),
        sources=sources,
        zip=zip,
    )


def address(image: bytes) -> str:
    """An SVG image as the address of itself."""
    return f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}"
