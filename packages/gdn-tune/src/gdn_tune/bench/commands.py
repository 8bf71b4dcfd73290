"""``gdn-tune bench``: its commands, imported when they are called."""

from __future__ import annotations

import typer

from ..console import LazyCommands

HERE = "gdn_tune.bench"
COMMANDS: dict[str, tuple[str, str]] = {
    "k5": (f"{HERE}.k5:app", "Time K5 alone: device time of its kernel, ratios."),
    "block": (f"{HERE}.block:app", "Time the block: wall, device per stage, launch, host gap."),
    "snapshot": (f"{HERE}.snapshot:app", "Time K5 and K6 alone for both snapshot dtypes."),
    "pa": (f"{HERE}.pa:app", "Time paged decode, cold and warm, in alternating sweeps."),
    "host": (f"{HERE}.host:app", "Time everything of warm calls but the launches."),
}


class Registered(LazyCommands):
    """``COMMANDS``."""

    places = COMMANDS


app = typer.Typer(
    cls=Registered,
    help="Time the kernels; without a GPU, count them on the emulator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def main() -> None:
    """Time the kernels; without a GPU, count them on the emulator."""
