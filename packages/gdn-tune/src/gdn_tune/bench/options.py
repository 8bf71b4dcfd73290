"""What the commands of ``bench`` share: options that take several words, and options that several commands have."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..console import sub_app


class ManyWords(TyperCommand):
    """A command whose repeatable options take all the words that follow them: ``--backends triton flydsl``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before every word but the first."""
        several = {
            name
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        return super().parse_args(ctx, spread(args, several))


def spread(args: Sequence[str], several: set[str]) -> list[str]:
    """``args`` with those options of ``several`` repeated that more than one word follows."""
    found: list[str] = []
    option, words = "", 0
    for word in args:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            option, words = word if word in several else "", 0
        elif option:
            found += [option] * (words > 0)
            words += 1
        found.append(word)
    return found


def bench_app(function: Callable[..., Any]) -> typer.Typer:
    """A typer.Typer of one command whose options may take several words."""
    app = sub_app()
    app.info.no_args_is_help = False
    app.command(cls=ManyWords)(function)
    return app


def _words(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


Backends = Annotated[
    list[str], _words("--backends", "NAME...", "flydsl, triton, reference, emulate, aiter (or hip), fla, flashinfer.")
]
CaseIds = Annotated[
    list[str], _words("--cases", "ID...", "Cases of the test suite by id or pattern; see --list-cases.")
]
ListCases = Annotated[bool, typer.Option("--list-cases", help="List the cases and leave.")]
Models = Annotated[list[str], _words("--model", "NAME...", "35b, 397b.")]
Splits = Annotated[list[int], _words("--tp", "N...", "Devices that the heads are split over: 1, 2, 4, 8.")]
Tokens = Annotated[list[int], _words("--t", "N...", "Tokens of the whole call.")]
Counts = Annotated[list[int], _words("--n", "N...", "Sequences.")]
Dense = Annotated[bool, typer.Option("--dense", help="Rows of a dense batch in place of packed sequences.")]
Snapshots = Annotated[list[str], _words("--snapshot-dtype", "DTYPE...", "bf16, fp32.")]
Pool = Annotated[
    bool, typer.Option("--with-state-pool", help="Also with states in random slots of a pool twice as large.")
]
ColdPool = Annotated[
    bool,
    typer.Option("--with-state-pool-cold-check", help="Also with a pool whose indices are written anew each call."),
]
NoMetadata = Annotated[bool, typer.Option("--without-metadata", help="Also without prefill metadata.")]
ShowKernels = Annotated[bool, typer.Option("--show-kernels", help="Print every kernel, or the counters.")]
Metrics = Annotated[
    list[str], _words("--summary-metrics", "NAME...", "Of the summary, e.g. 'wall total', 'K5 state scan'.")
]
SummaryOnly = Annotated[bool, typer.Option("--summary-only", help="Print the summary alone.")]
Baseline = Annotated[
    str, typer.Option("--baseline", metavar="NAME", help="Of the ratios; aiter if it is timed, else the first backend.")
]
Warmup = Annotated[int, typer.Option("--warmup-iters", min=0, help="Calls before anything is timed.")]
BenchIters = Annotated[int, typer.Option("--bench-iters", min=1, help="Calls whose wall time is taken.")]
ProfIters = Annotated[int, typer.Option("--prof-iters", min=1, help="Calls under the profiler.")]
Graph = Annotated[bool, typer.Option("--graph", help="Also the time of a replay of a captured call.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the inputs.")]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cuda or cpu; the GPU if there is one.")]
Arch = Annotated[str, typer.Option("--arch", metavar="NAME", help="Of the backend emulate: gfx942 or gfx950.")]
Units = Annotated[int, typer.Option("--compute-units", min=0, help="Of the backend emulate; 0: of the usual part.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", metavar="FILE", dir_okay=False, help="Also write CSV here.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write everything here as JSON.")
]


def device_of(name: str) -> Any:
    """The torch.device of ``--device``. Raises ValueError for what is not there."""
    import torch

    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"device: got {name!r}, expected cuda or cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device: got 'cuda', but there is no GPU")
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)  # events, graphs and the profiler are of the current one
    return device


def device_line(device: Any) -> str:
    """What is timed: its name, architecture and compute units."""
    from gdn_runtime.arch import arch_of, compute_units

    if device.type == "cpu":
        return f"CPU: {platform.processor() or platform.machine()}"
    import torch

    return f"{torch.cuda.get_device_name(device)}: {arch_of(device).name}, {compute_units(device)} compute units"


SCHEMA = 1
"""Of the JSON of a bench; ``gdn_tune.report.benches`` reads it."""
LIBRARIES = ("torch", "triton", "flydsl", "pa-decode", "aiter", "flash-linear-attention", "flashinfer-python")
"""Whose versions a bench notes where they are installed."""


def versions() -> dict[str, str]:
    """Versions of what a bench may run."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host_facts() -> dict[str, Any]:
    """What the JSON of every bench says of its run: the command, the day (UTC), versions."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["gdn-tune", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
    }


def run_facts(device: Any) -> dict[str, Any]:
    """Where and with what a bench ran, for its JSON."""
    import torch

    from gdn_runtime import __version__
    from gdn_runtime.arch import arch_of, compute_units

    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        ).stdout.strip()
    except OSError:
        commit = ""  # no git here
    facts: dict[str, Any] = {
        "device": device_line(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type != "cpu":
        facts |= {"arch": arch_of(device).name, "compute_units": compute_units(device)}
    return {"version": __version__, "commit": commit or None, **host_facts(), **facts}


def write_text(path: Path | None, text: str) -> None:
    """Write a file, if one is asked for."""
    if path is not None:
        path.write_text(text, encoding="utf-8")


def write_json(path: Path | None, values: Any) -> None:
    """Write ``values``, if a file is asked for."""
    write_text(path, json.dumps(values, indent=1) + "\n")
