"""``gdn-tune bench pa``: paged decode, with caches cold and warm, in sweeps that alternate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from gdn_runtime.errors import UnsupportedError
from pa_decode.select import choose_target

from ..calls import DECODE_CASES, DecodeCase, pick
from ..console import print_table, say, usage
from . import options as o
from .backends import EMULATE, FOREIGN, default, faults, resolve
from .decode import DECODERS, arch_for, bytes_of, count_tile, decode_call, decode_inputs, error_of
from .emulated import DEFAULT_ARCH, check_arch
from .inputs import SEED
from .results import Measurement, any_failed, number, to_csv, to_json
from .run import failed
from .timing import Call, Flush, clock_us, event_us

COLD, WARM = "cold", "warm"
CACHES = (COLD, WARM)
GIB = 2**30
TOLERANCE = 0.08
"""Of the relative error against fp32: kernels round the query and P to FP8."""
TIME, SPREAD, SPEED, ERROR, TASKS = "us", "p90-p10", "GB/s", "error", "tasks"
CYCLES = "cycles per tile"
SPIN_CYCLES = 200_000
"""About 100 us: a replay is queued in a fifth of that."""

Timer = Callable[[int], Sequence[float]]


def shapes(
    batch: Sequence[int],
    context: Sequence[int],
    page: Sequence[int],
    ql: Sequence[int],
    window: Sequence[int],
    kv_heads: Sequence[int],
    scale_mode: Sequence[str],
    v_form: Sequence[str],
) -> list[DecodeCase]:
    """All combinations, by default one of each; 8 query heads per KV head. Raises ValueError for unknown words."""
    for name, got, expected in (
        ("scale-mode", scale_mode, ("tensor", "token")),
        ("v-form", v_form, ("packed", "plain")),
    ):
        unknown = [word for word in got if word not in expected]
        if unknown:
            raise ValueError(f"{name}: got {unknown[0]}, expected {' or '.join(expected)}")
    return [
        DecodeCase(
            id=f"pa-h{8 * heads}x{heads}-p{size}-q{length}-b{count}-ctx{tokens}-w{seen}-{mode}-{form}",
            batch=count,
            num_heads=8 * heads,
            num_kv_heads=heads,
            page_size=size,
            query_length=length,
            context=tokens,
            scale_mode="token" if mode == "token" else "tensor",
            v_packed=form == "packed",
            window=seen,
        )
        for heads in kv_heads or (2,)
        for size in page or (64,)
        for length in ql or (1,)
        for count in batch or (16,)
        for tokens in context or (8192,)
        for seen in window or (0,)
        for mode in scale_mode or ("tensor",)
        for form in v_form or ("packed",)
    ]


def graph_of(call: Call) -> Call:
    """A replay of ``call`` captured in a graph: attention and reducer with the gap between them, none before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timer_of(call: Call, backend: str, device: torch.device, flush: Flush | None) -> Timer:
    """Times of ``call`` one by one, us; on a GPU of its replays, each behind ``flush``, or behind a kernel that keeps
    the device busy until the host has queued the replay."""
    if device.type != "cuda":
        return lambda count: [clock_us(call, 1) for _ in range(count)]
    replay = call if backend == "reference" else graph_of(call)
    return lambda count: event_us([replay], count, before=flush or (lambda: torch.cuda._sleep(SPIN_CYCLES)))


def alternate(timers: dict[Any, Timer], sweeps: int, calls: int) -> dict[Any, list[float]]:
    """``calls`` times of everyone per sweep, every other sweep in the opposite order: whatever drifts hits all alike.
    The first time of a turn is not kept: the one before it left its caches."""
    times: dict[Any, list[float]] = {name: [] for name in timers}
    for sweep in range(sweeps):
        order = list(timers) if sweep % 2 == 0 else list(timers)[::-1]
        for name in order:
            times[name] += list(timers[name](calls + 1))[1:]
    return times


def spread(times: Sequence[float]) -> float:
    """From the 10th to the 90th percentile."""
    ordered = sorted(times)
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]


def facts_of(case: DecodeCase) -> dict[str, Any]:
    """The columns that describe a call."""
    return {
        "B": case.batch,
        "Hq": case.num_heads,
        "Hkv": case.num_kv_heads,
        "page": case.page_size,
        "QL": case.query_length,
        "context": case.context,
        "window": case.window,
        "scales": case.scale_mode,
        "V": "packed" if case.v_packed else "plain",
    }


def of_case(
    case: DecodeCase,
    backends: Sequence[str],
    device: torch.device,
    *,
    caches: Sequence[str],
    sweeps: int,
    calls: int,
    flush: Flush | None,
    budget: int | None,
    seed: int,
    arch: str,
) -> Iterator[Measurement]:
    """One measurement per backend and state of the caches; correctness first."""
    base = Measurement(case.id, "", "", facts=facts_of(case))
    timers: dict[tuple[str, str], Timer] = {}
    errors: dict[str, dict[str, float]] = {}
    for backend in backends:
        this = replace(base, backend=backend)
        try:
            if backend == EMULATE:
                cycles, counters = count_tile(case, arch)
                yield replace(this, unit="cycles", metrics={CYCLES: cycles}, counters=counters)
                continue
            inputs = decode_inputs(case, device, seed, arch_for(device, backend, arch))
            if backend in DECODERS:
                call, out, tasks = *DECODERS[backend](inputs), 0.0
            else:
                call, out, plan = decode_call(inputs, backend, arch if device.type == "cpu" else None, budget)
                tasks = float(plan.reduce_info[:, 1].sum())
            out.fill_(float("nan"))
            call()
            found = error_of(inputs, out)
            errors[backend] = {ERROR: found} | ({TASKS: tasks} if tasks else {})
            if not found <= TOLERANCE:
                yield replace(this, failure=f"wrong: relative error {found:.3g}, expected at most {TOLERANCE}")
                continue
            for cache in caches:
                timers[backend, cache] = timer_of(call, backend, device, flush if cache == COLD else None)
        except faults(backend) as error:
            yield failed(this, error)
    size = bytes_of(case)
    for (backend, cache), times in alternate(timers, sweeps, calls).items():
        median = statistics.median(times)
        figures = {TIME: median, SPREAD: spread(times), SPEED: size / median / 1e3, **errors[backend]}
        yield replace(base, backend=backend, variant=cache, metrics=figures)


def print_rows(case: DecodeCase, found: Sequence[Measurement]) -> None:
    """A table of one case."""
    timed = [each for each in found if TIME in each.metrics]
    names = (TIME, SPREAD, SPEED, TASKS)
    rows = [
        [each.backend, each.variant, *(number(each.metrics.get(name)) for name in names), f"{each.metrics[ERROR]:.1e}"]
        for each in timed
    ]
    if rows:
        print_table(str(case), ["backend", "caches", *names, ERROR], rows)
    for each in found:
        if each.failure:
            say(f"{case.id}, {each.label}: {each.failure}")
        if each.counters:
            lines = [[name, number(value)] for name, value in {**each.metrics, **each.counters}.items()]
            print_table(f"{case.id}, {each.label}: a workgroup and tile of 256 tokens", ["counter", "value"], lines)


def usable(names: Sequence[str], device: torch.device, arch: str) -> list[str]:
    """Full names; without any, those of ours that decode on ``device``. Raises ValueError for one that does not."""
    if not names:
        return [name for name in default(device) if not _refusal(name, device, arch)]
    found = resolve(names, device)
    for name in found:
        if refusal := _refusal(name, device, arch):
            raise ValueError(f"backends: {refusal}")
    return found


def _refusal(name: str, device: torch.device, arch: str) -> str:
    if name == EMULATE or name in DECODERS:
        return ""
    if name in FOREIGN:
        return f"{name}: its paged decode is not timed here; {', '.join(DECODERS)} is"
    try:
        choose_target(device, name, arch if device.type == "cpu" else None, fp8="fn")
    except UnsupportedError as error:
        return str(error)
    return ""


def pa(
    backends: o.Backends = [],  # noqa: B006
    cases: Annotated[
        list[str], typer.Option("--cases", metavar="ID...", help="By id or pattern; see --list-cases.")
    ] = [],  # noqa: B006
    list_cases: o.ListCases = False,
    batch: Annotated[list[int], typer.Option("--batch", metavar="N...", help="Sequences.")] = [],  # noqa: B006
    context: Annotated[list[int], typer.Option("--context", metavar="N...", help="Tokens of a sequence.")] = [],  # noqa: B006
    page: Annotated[list[int], typer.Option("--page", metavar="N...", help="Tokens of a page: 16, 64.")] = [],  # noqa: B006
    ql: Annotated[list[int], typer.Option("--ql", metavar="N...", help="Query tokens of a sequence.")] = [],  # noqa: B006
    window: Annotated[
        list[int], typer.Option("--window", metavar="N...", help="Tokens that a query sees; 0: all.")
    ] = [],  # noqa: B006
    kv_heads: Annotated[
        list[int], typer.Option("--kv-heads", metavar="N...", help="KV heads, 8 query heads each.")
    ] = [],  # noqa: B006
    scale_mode: Annotated[list[str], typer.Option("--scale-mode", metavar="NAME...", help="tensor, token.")] = [],  # noqa: B006
    v_form: Annotated[list[str], typer.Option("--v-form", metavar="NAME...", help="packed, plain.")] = [],  # noqa: B006
    budget: Annotated[int, typer.Option("--budget", min=0, help="Tasks over all KV heads; 0: table or rule.")] = 0,
    caches: Annotated[
        list[str], typer.Option("--caches", metavar="NAME...", help="cold, warm; both if none is given.")
    ] = [],  # noqa: B006
    sweeps: Annotated[int, typer.Option("--sweeps", min=1, help="Turns, in alternating order.")] = 5,
    calls: Annotated[int, typer.Option("--calls", min=1, help="Timed calls per turn.")] = 50,
    flush_gib: Annotated[float, typer.Option("--flush-gib", min=0, help="Read before every cold call.")] = 2,
    seed: o.Seed = SEED,
    device: o.Device = "",
    arch: o.Arch = DEFAULT_ARCH,
    csv: o.CsvFile = None,
    json: o.JsonFile = None,
) -> None:
    """Time paged decode.

    On a GPU: between events around the replay of a captured call, attention, gap and reducer; plans, workspaces and
    compilation are outside. Cold: behind a read of --flush-gib. Backends and states of the caches take turns, every
    other sweep in the opposite order. Every output is compared with fp32 before it is timed. GB/s count keys, values,
    scales, queries and outputs once. Backend emulate: counters and model cycles of a workgroup and tile.
    """
    if list_cases:
        say("\n".join(map(str, DECODE_CASES.values())))
        return
    where = usage(lambda: o.device_of(device))
    given = batch, context, page, ql, window, kv_heads, scale_mode, v_form
    if cases and any(given):
        raise typer.BadParameter("got ids and a shape, expected either", param_hint="--cases")
    chosen = usage(lambda: list(pick(DECODE_CASES, cases).values()) if cases else shapes(*given))
    arch = usage(lambda: check_arch(arch))
    names = usage(lambda: usable(backends, where, arch))
    unknown = [name for name in caches if name not in CACHES]
    if unknown:
        raise typer.BadParameter(f"got {unknown[0]}, expected cold or warm", param_hint="--caches")
    # Nothing can be flushed for the clock of a CPU that is worth a figure.
    states = list(caches or CACHES) if where.type == "cuda" else [WARM]
    flush = Flush(int(flush_gib * GIB), where) if COLD in states else None
    say(o.device_line(where))
    found: list[Measurement] = []
    facts = {**o.run_facts(where), "seed": seed}
    facts["protocol"] = {"sweeps": sweeps, "calls": calls, "flush_gib": flush_gib, "budget": budget or "table or rule"}
    if EMULATE in names:
        facts["emulated_arch"] = arch
    with torch.inference_mode():
        for case in chosen:
            mine = list(
                of_case(
                    case,
                    names,
                    where,
                    caches=states,
                    sweeps=sweeps,
                    calls=calls,
                    flush=flush,
                    budget=budget or None,
                    seed=seed,
                    arch=arch,
                )
            )
            found += mine
            print_rows(case, mine)
            o.write_text(csv, to_csv(found))
            o.write_json(json, to_json(found, bench="pa", **facts))
            if where.type == "cuda":
                torch.cuda.empty_cache()
    if any_failed(found):
        raise typer.Exit(1)


app = o.bench_app(pa)
