"""``gdn-tune bench k5``: device time of K5 alone, and how many times faster than the baseline each backend is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import typer

from ..console import print_table, say, usage
from . import options as o
from .backends import EMULATE, default, resolve, scan_call
from .cases import choose, listed
from .emulated import DEFAULT_ARCH, check_arch
from .inputs import SEED, BlockInputs, ScanInputs, scan_inputs
from .profile import K5
from .results import MISSING, WALL, Measurement, any_failed, columns_of, number, ratio, ratio_text
from .run import Plan, baseline_of, check_metrics, report
from .timing import Call, Protocol


class Scans:
    """Calls of K5 over w and u that the reference makes of the block's inputs, once per case."""

    def __init__(self) -> None:
        self._made: ScanInputs | None = None

    def __call__(self, backend: str, inputs: BlockInputs) -> Call:
        """K5 of ``backend``, for the block's ``inputs``."""
        if self._made is None or self._made.block.x is not inputs.x:
            self._made = None  # before the next ones are made: two do not fit
            self._made = scan_inputs(inputs)
        return scan_call(backend, replace(self._made, block=inputs))


def device_time(measured: Measurement) -> float | None:
    """Of the kernels of K5; on a CPU the wall."""
    return measured.metrics.get(K5, measured.metrics.get(WALL))


def harness_table(measurements: Sequence[Measurement], baseline: str) -> tuple[list[str], list[list[str]]]:
    """(heads, rows): the call's facts, the time of each backend, and the baseline's over that of every other one."""
    columns = columns_of(measurements)
    others = [column for column in columns if column[0] != baseline]
    found = {(each.case, each.snapshot, each.label): each for each in measurements}
    rows = []
    for case, snapshot in dict.fromkeys((each.case, each.snapshot) for each in measurements):
        mine = [found.get((case, snapshot, label)) for _, _, label in columns]
        facts = next(each.facts for each in mine if each is not None)
        times = [number(None if each is None else device_time(each)) for each in mine]
        ratios = []
        for _, _, label in others:
            each = found.get((case, snapshot, label))
            metric = K5 if each is not None and K5 in each.metrics else WALL
            ratios.append(ratio_text(None if each is None else ratio(measurements, each, metric, baseline)))
        rows.append([*(str(value) or MISSING for value in facts.values()), snapshot, *times, *ratios])
    heads = [*next(iter(measurements)).facts, "snap"]
    heads += [label if "(" in label else f"{label}(us)" for _, _, label in columns]
    return heads + [f"{baseline}/{label}" for _, _, label in others], rows


def k5(
    backends: o.Backends = [],  # noqa: B006
    cases: o.CaseIds = [],  # noqa: B006
    list_cases: o.ListCases = False,
    model: o.Models = [],  # noqa: B006
    tp: o.Splits = [],  # noqa: B006
    t: o.Tokens = [],  # noqa: B006
    n: o.Counts = [],  # noqa: B006
    dense: o.Dense = False,
    snapshot_dtype: o.Snapshots = [],  # noqa: B006
    with_state_pool: o.Pool = False,
    with_state_pool_cold_check: o.ColdPool = False,
    without_metadata: o.NoMetadata = False,
    show_kernels: o.ShowKernels = False,
    summary_metrics: o.Metrics = [],  # noqa: B006
    summary_only: o.SummaryOnly = False,
    baseline: o.Baseline = "",
    warmup_iters: o.Warmup = 5,
    bench_iters: o.BenchIters = 50,
    prof_iters: o.ProfIters = 50,
    graph: o.Graph = False,
    seed: o.Seed = SEED,
    device: o.Device = "",
    arch: o.Arch = DEFAULT_ARCH,
    compute_units: o.Units = 0,
    csv: o.CsvFile = None,
    json: o.JsonFile = None,
) -> None:
    """Time K5 alone.

    One prepared input, and for packed sequences one metadata, for all backends. Device time: the profiler's self time
    of the kernels of K5, by name, per call. The last table has a row per case with the ratios of the baseline's time
    over the others': above 1 is faster than the baseline. Without --cases the shapes are those of --model, --tp, --t
    and --n.
    """
    if list_cases:
        say(listed())
        return
    where = usage(lambda: o.device_of(device))
    names = usage(lambda: resolve(backends or default(where), where))
    plan = Plan(
        cases=usage(
            lambda: choose(cases, models=model, splits=tp, tokens=t, counts=n, dense=dense, snapshots=snapshot_dtype)
        ),
        backends=names,
        device=where,
        protocol=Protocol(warmup_iters, bench_iters, prof_iters, graph),
        pool=with_state_pool,
        cold_pool=with_state_pool_cold_check,
        without_metadata=without_metadata,
        seed=seed,
        arch=usage(lambda: check_arch(arch)),
        compute_units=compute_units,
        scan_alone=True,
    )
    base = usage(lambda: baseline_of(baseline, [name for name in names if name != EMULATE] or names))
    found = report(
        plan,
        Scans(),
        title="k5",
        metrics=usage(lambda: check_metrics(summary_metrics)) if summary_metrics else [],
        baseline=base,
        show_kernels=show_kernels,
        summary_only=summary_only,
        csv=csv,
        json=json,
    )
    print_table("K5, device time", *harness_table(found, base))
    if any_failed(found):
        raise typer.Exit(1)


app = o.bench_app(k5)
