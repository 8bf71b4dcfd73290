"""The command ``cdna-emu``. Exit status: 0 clean, 1 findings or a launch that failed, 2 wrong use."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from cdna_emu import values
from cdna_emu.__about__ import __version__
from cdna_emu.counters import Counters
from cdna_emu.errors import EmulationError
from cdna_emu.machine import Result, launch, load
from cdna_emu.model import DEFAULTS, Simulation, simulate
from cdna_emu.trace import trace_group

app = typer.Typer(
    help="Run AMD CDNA code objects (gfx942, gfx950) on this CPU: results, races, bounds, counters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

File = Annotated[Path, typer.Argument(help="Code object (ELF, .hsaco) or .s text.", exists=True, dir_okay=False)]
KernelName = Annotated[str | None, typer.Option("--kernel", "-k", help="Kernel symbol; needed if there are several.")]
Grid = Annotated[str, typer.Option(help="Workgroups: x[,y[,z]].")]
Block = Annotated[str, typer.Option(help="Work-items of a workgroup: x[,y[,z]].")]
Arg = Annotated[list[str] | None, typer.Option("--arg", "-a", help=f"One per argument, in order: {values.FORMS}.")]
Arch = Annotated[str | None, typer.Option(help="gfx942 or gfx950; by default what the file says.")]
Lds = Annotated[int, typer.Option(help="Dynamic LDS in bytes.")]
Checks = Annotated[bool, typer.Option("--checks/--no-checks", help="Look for races, missing waits and the like.")]
Order = Annotated[str, typer.Option(help="Order of the waves of a workgroup: forward, reverse or random.")]
Seed = Annotated[int, typer.Option(help="For --order random and random buffers.")]
Threads = Annotated[int | None, typer.Option(help="Threads over workgroups; by default one per core.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Save = Annotated[
    list[str] | None, typer.Option(help="I=FILE.npy: write the buffer of argument I (from 0) to a file afterwards.")
]


def show_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=show_version)] = False,
) -> None:
    """Run AMD CDNA code objects (gfx942, gfx950) on this CPU: results, races, bounds, counters."""


def usage(error: Exception) -> typer.Exit:
    """Say what is wrong with the arguments; exit status 2."""
    err.print(f"error: {error}", markup=False, highlight=False)
    return typer.Exit(2)


def triple(text: str, option: str) -> tuple[int, int, int]:
    """``x[,y[,z]]`` as three numbers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"{option}: got {text!r}, expected x[,y[,z]]")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def read(path: Path) -> bytes | str:
    """A code object, or .s text; ValueError for what can be neither."""
    data = path.read_bytes()
    if data.startswith(b"\x7fELF"):
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text.strip():
        got = "bytes that are no text" if data.strip() else "an empty file"
        raise ValueError(f"{path}: got {got}, expected a code object (ELF) or .s text")
    return text


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors as one message on standard error: exit status 1 if the emulator gave up, 2 for wrong use."""
    try:
        yield
    except EmulationError as error:
        err.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None
    except (ValueError, TypeError, KeyError, ImportError, OSError, MemoryError) as error:
        raise usage(error) from None


def execute(file: Path, texts: list[str], grid: str, block: str, lds: int, **options: Any) -> tuple[Result, list[Any]]:
    """Launch; the result and the arguments, whose buffers hold what the kernel stored. Exits 1 or 2 on errors."""
    with reported():
        arguments = [values.parse(text, options["seed"] + index) for index, text in enumerate(texts)]
        result = launch(
            read(file),
            grid=triple(grid, "--grid"),
            block=triple(block, "--block"),
            args=arguments,
            dynamic_lds=lds,
            strict=False,
            **options,
        )
    return result, arguments


@app.command()
def run(
    file: File,
    grid: Grid = "1",
    block: Block = "64",
    kernel: KernelName = None,
    arg: Arg = None,
    arch: Arch = None,
    lds: Lds = 0,
    checks: Checks = True,
    order: Order = "forward",
    seed: Seed = 0,
    threads: Threads = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Run a kernel; print what was found and the buffers of ``out:`` arguments.

    Example: cdna-emu run scale.hsaco --block 256 -a buf:f32:256:random -a out:f32:256 -a f32:2
    """
    texts = arg or []
    with reported():
        saves = [saved(text, len(texts)) for text in save or []]
    result, arguments = execute(
        file,
        texts,
        grid,
        block,
        lds,
        kernel=kernel,
        arch=arch,
        checks=checks,
        order=order,
        seed=seed,
        threads=threads,
    )
    for index, path in saves:
        if not isinstance(arguments[index], np.ndarray):
            raise usage(ValueError(f"--save: argument {index} ({texts[index]}) is no buffer"))
        with reported():
            np.save(path, arguments[index], allow_pickle=False)
    outputs = {index: arguments[index] for index, text in enumerate(texts) if text.startswith("out:")}
    if as_json:
        data = {"report": result.report.to_dict(), "counters": result.counters.to_dict()}
        print_json({**data, "outputs": {index: array.tolist() for index, array in outputs.items()}})
    else:
        for index, array in outputs.items():
            shown = np.array2string(array, threshold=16, edgeitems=4)
            out.print(f"arg {index} ({texts[index]}): {shown}", markup=False, highlight=False)
        out.print(str(result.report), markup=False, highlight=False)
    if not result.report.ok:
        raise typer.Exit(1)


def saved(text: str, count: int) -> tuple[int, Path]:
    """``I=FILE.npy`` of --save."""
    index, _, path = text.partition("=")
    if not index.isdecimal() or int(index) >= count or not path:
        raise ValueError(f"--save: got {text!r}, expected I=FILE.npy with I below {count}")
    return int(index), Path(path)


@app.command()
def counters(
    file: File,
    grid: Grid = "1",
    block: Block = "64",
    kernel: KernelName = None,
    arg: Arg = None,
    arch: Arch = None,
    lds: Lds = 0,
    seed: Seed = 0,
    threads: Threads = None,
    lines: Annotated[bool, typer.Option("--lines", help="Rows by instruction; with --model where waves wait.")] = False,
    model: Annotated[bool, typer.Option("--model", help="Add the cycles of workgroup 0 by the timing model.")] = False,
    as_json: Json = False,
) -> None:
    """Run a kernel without checks; print what it executed: classes, memory lines, LDS cycles, occupancy."""
    result, _ = execute(
        file, arg or [], grid, block, lds, kernel=kernel, arch=arch, checks=False, seed=seed, threads=threads
    )
    found = result.counters
    guess = modelled(file, arg or [], found, grid, block, lds, kernel=kernel, arch=arch, seed=seed) if model else None
    if as_json:
        print_json({**found.to_dict(by_address=lines), **({"model": guess.to_dict()} if guess else {})})
    else:
        show_counters(result, lines)
        if guess:
            units = DEFAULTS[found.resources.arch].compute_units
            cycles = guess.launch_cycles(found.groups, units)
            out.print(f"\n{guess}\nof the launch on {units} compute units: {cycles:.0f}", markup=False, highlight=False)
            if lines and guess.stalls:
                out.print(f"where the mean wave waits:\n{guess.longest_stalls()}", markup=False, highlight=False)
    if not result.report.ok:
        err.print(str(result.report), markup=False, highlight=False)
        raise typer.Exit(1)


def modelled(
    file: Path, texts: list[str], found: Counters, grid: str, block: str, lds: int, *, seed: int, **options: Any
) -> Simulation:
    """Workgroup 0 of the launch again, from fresh arguments, as often on a compute unit as the launch fills it."""
    traced = trace_group(
        read(file),
        grid=triple(grid, "--grid"),
        block=triple(block, "--block"),
        args=[values.parse(text, seed + index) for index, text in enumerate(texts)],
        dynamic_lds=lds,
        **options,
    )
    share = math.ceil(found.groups / DEFAULTS[found.resources.arch].compute_units)
    return simulate(traced, groups=max(1, min(found.resources.groups_per_cu, share)))


def show_counters(result: Result, lines: bool) -> None:
    """The counters as tables."""
    found = result.counters
    table = Table(title=f"{result.kernel} ({found.resources.arch})", title_justify="left")
    table.add_column("class")
    table.add_column("wave-instructions", justify="right")
    table.add_column("per wave", justify="right")
    for name, executed in found.items():
        if executed:
            table.add_row(name, f"{executed}", f"{executed / max(1, found.waves):.1f}")
    out.print(table)
    facts = Table(show_header=False)
    facts.add_column("what")
    facts.add_column("value", justify="right")
    for name, value in {**found.totals(), **vars(found.resources)}.items():
        facts.add_row(name, f"{value:.3f}" if isinstance(value, float) else f"{value}")
    out.print(facts)
    if lines:
        columns = ("address", "executed", "lanes", "lines64", "least", "LDS cycles", "least")
        out.print("".join(f"{column:>12}" for column in columns) + "  instruction", highlight=False)
        for line in found.lines:
            if line.executed:
                numbers = (
                    line.executed,
                    line.lanes,
                    line.lines64,
                    line.lines64_min,
                    line.lds_cycles,
                    line.lds_cycles_min,
                )
                row = f"{line.address:#12x}" + "".join(f"{number:>12}" for number in numbers) + f"  {line.text}"
                out.print(row, markup=False, highlight=False)


@app.command()
def disasm(file: File, kernel: KernelName = None, arch: Arch = None, as_json: Json = False) -> None:
    """Print the instructions of the kernels of a file."""
    with reported():
        parsed = load(read(file), arch)
        names = [kernel] if kernel else list(parsed.kernels)
        unknown = [name for name in names if name not in parsed.kernels]
        if unknown:
            raise ValueError(f"--kernel: got {unknown[0]!r}, expected one of {', '.join(parsed.kernels)}")
        listings = {name: [(i.address, i.text) for i in parsed.kernels[name].instructions] for name in names}
    if as_json:
        print_json(
            {
                "arch": parsed.arch,
                "kernels": {
                    name: [{"address": address, "text": text} for address, text in rows]
                    for name, rows in listings.items()
                },
            }
        )
        return
    for name, rows in listings.items():
        out.print(f"{name}:", markup=False, highlight=False)
        for address, text in rows:
            out.print(f"  {address:06x}  {text}", markup=False, highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """Plain JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, default=str))
