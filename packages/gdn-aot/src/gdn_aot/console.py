"""What the commands share: where they print, how they end, options that several have."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from gdn_runtime.arch import parse_arch
from gdn_runtime.codeobject.bundle import Bundle
from gdn_runtime.errors import BundleError, UnsupportedError
from gdn_runtime.spec import AMD_ARCHS

from . import inspect

WIDE = 10_000
"""Columns where there is no terminal: whoever reads a file or a pipe wants rows whole."""

ON_TERMINAL = sys.stdout.isatty()
out = Console(soft_wrap=True, width=None if ON_TERMINAL else WIDE)
err = Console(stderr=True, soft_wrap=True)

T = TypeVar("T")


class Commands(TyperGroup):
    """Ends with status 1 and one line for a bundle that is not sound, and for what the file system says: a full disk, a
    file that nobody may read."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (BundleError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever read the output has left: the base class ends quietly, with status 1
            failed(f"{type(error).__name__}: {error}")
            raise typer.Exit(1) from error


def parse_archs(values: list[str]) -> list[str]:
    """Names of architectures, each once; "gfx950:sramecc+" is gfx950."""
    names = []
    for value in values:
        try:
            name = parse_arch(value).name
        except UnsupportedError:
            name = ""
        if name not in AMD_ARCHS:
            raise typer.BadParameter(f"got {value!r}, supported: {', '.join(AMD_ARCHS)}")
        names.append(name)
    return list(dict.fromkeys(names))


Archs = Annotated[
    list[str],
    typer.Option("--arch", help=f"{' or '.join(AMD_ARCHS)}; may be repeated.", callback=parse_archs),
]
Tables = Annotated[
    list[Path] | None,
    typer.Option(
        "--table",
        help="Tuned table, or folder of them; may be repeated. Default: the packaged ones but for the grid.",
        exists=True,
    ),
]
Complete = Annotated[
    bool, typer.Option("--complete", help="Also what no row asks for but calls with its shape may: see docs/aot.md.")
]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A bundle, or a folder of bundles by architecture.", exists=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what went wrong.")]


def usage(action: Callable[[], T]) -> T:
    """What ``action`` gives; its ValueError or ImportError is a wrong use of the command."""
    try:
        return action()
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


def opened(folder: Path) -> list[Bundle]:
    """The bundles in ``folder``. BundleError if one cannot be read."""
    return usage(lambda: inspect.open_bundles(folder))


def say(text: str) -> None:
    """Print a line."""
    out.print(text, markup=False, highlight=False)


def failed(text: str) -> None:
    """Print a line about what went wrong on standard error."""
    err.print(text, style="red", markup=False, highlight=False)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table of texts: Markdown where there is no terminal."""
    shape = box.SIMPLE_HEAD if ON_TERMINAL else box.MARKDOWN
    table = Table(*columns, title=title or None, title_justify="left", box=shape)
    for row in rows:
        table.add_row(*row)
    out.print(table, markup=False, highlight=False)


def print_json(values: Any) -> None:
    """Print ``values``, whatever the width of the terminal."""
    sys.stdout.write(json.dumps(values, indent=1, sort_keys=True) + "\n")
    sys.stdout.flush()  # an error of a closed pipe belongs here, not to the end of the interpreter


class Bar:
    """A bar on a terminal that counts calls, and nothing elsewhere."""

    def __init__(self, text: str, total: int, *, hidden: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=err, disable=hidden or not err.is_terminal)
        self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, _: object = None) -> None:
        self._bar.advance(self._task)
