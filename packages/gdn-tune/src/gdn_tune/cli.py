"""The command ``gdn-tune``. Exit status: 0 done and sound, 1 something failed or differs, 2 wrong use.

A command is registered by the place of its function or typer.Typer, which is imported when the command is called.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .__about__ import __version__
from .console import LazyCommands, say

SUMMARY = "Tune the kernels of gdn-runtime and pa-decode, check and explain their tables, bench them and report."
TABLES = "gdn_tune.table_commands"

COMMANDS: dict[str, tuple[str, str]] = {
    "tune": ("gdn_tune.tune_command:tune", "Check and time every candidate of a kernel."),
    "export": (f"{TABLES}:export", "Make tuned tables of what a store holds."),
    "check": (f"{TABLES}:check", "Say what is wrong with tuned tables."),
    "compare": (f"{TABLES}:compare", "Say how two tables differ."),
    "explain": (f"{TABLES}:explain", "Say which row or rule decides for a call, and why."),
    "import-csv": (f"{TABLES}:import_csv", "Make a tuned table of a CSV."),
    "export-csv": (f"{TABLES}:export_csv", "Print a tuned table as CSV."),
    "report": ("gdn_tune.report.command:report", "Make tables and plots of what was measured, modelled and tuned."),
    "bench": ("gdn_tune.bench.commands:app", "Time the kernels; without a GPU, count them on the emulator."),
}
"""Name -> (module:attribute, line of help)."""


class Registered(LazyCommands):
    """``COMMANDS``."""

    places = COMMANDS


app = typer.Typer(
    cls=Registered,
    help=SUMMARY,
    epilog="Exit status of every command: 0 done and sound, 1 something failed or differs, 2 wrong use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, in pipes too
)


def show_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        say(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=show_version)] = False,
) -> None:
    """Options of the command as a whole."""
