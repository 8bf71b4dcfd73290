"""What the commands share: where they print, how they end, options that several have. Imports nothing heavy."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

WIDE = 10_000
"""Columns where there is no terminal: whoever reads a file or a pipe wants rows whole."""

ON_TERMINAL = sys.stdout.isatty()
out = Console(soft_wrap=True, width=None if ON_TERMINAL else WIDE)
err = Console(stderr=True, soft_wrap=True)

T = TypeVar("T")


class Commands(TyperGroup):
    """Ends with status 1 and one line for what the file system says: a full disk, a file that nobody may read."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read the output has left: the base class ends quietly, with status 1
            failed(f"{type(error).__name__}: {error}")
            raise typer.Exit(1) from error


class LazyCommands(Commands):
    """Commands whose modules are imported when one of them is called: torch takes seconds, and help needs none of it.

    ``places``: name -> ("module:attribute" of a function or of a typer.Typer, its line in the list of commands).
    """

    places: Mapping[str, tuple[str, str]]

    # Typer carries its own copy of click, private in some versions: its types have no name that holds for all.
    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order in which they are registered."""
        return list(self.places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the command; None if there is none of this name."""
        if cmd_name not in self.places:
            return None
        module, _, attribute = self.places[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        app = found if isinstance(found, typer.Typer) else sub_app(found)
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.places.items()])


def sub_app(*functions: Callable[..., Any]) -> typer.Typer:
    """A typer.Typer in plain text, in pipes too, with ``functions`` as its commands."""
    app = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for function in functions:
        app.command()(function)
    return app


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what went wrong.")]
StoreFile = Annotated[Path, typer.Option("--store", metavar="FILE", help="Samples are kept here (SQLite).")]
STORE = Path("gdn-tune.sqlite")
"""Default of ``StoreFile``."""


def usage(action: Callable[[], T]) -> T:
    """What ``action`` gives; its ValueError or ImportError is a wrong use of the command."""
    try:
        return action()
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


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
