"""``gdn-tune bench block``: wall time, device time per stage, launch-only time and host gap of the block."""

from __future__ import annotations

import typer

from ..console import say, usage
from . import options as o
from .backends import EMULATE, block_call, default, resolve
from .cases import choose, listed
from .emulated import DEFAULT_ARCH, check_arch
from .inputs import SEED
from .results import any_failed
from .run import Plan, baseline_of, check_metrics, report
from .timing import Protocol


def block(
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
    warmup_iters: o.Warmup = 10,
    bench_iters: o.BenchIters = 50,
    prof_iters: o.ProfIters = 20,
    graph: o.Graph = False,
    seed: o.Seed = SEED,
    device: o.Device = "",
    arch: o.Arch = DEFAULT_ARCH,
    compute_units: o.Units = 0,
    csv: o.CsvFile = None,
    json: o.JsonFile = None,
) -> None:
    """Time the block.

    Wall: median between two events around one call. Stages: the profiler's device time, by the names of kernels. Launch
    only: median host time of a call that is not waited for, a floor on the wall. Host gap: wall less kernels. A gap
    with launch only near the wall is a host that is too slow; launch only far above what it is elsewhere, and near the
    wall, is a call that waits for the device. Without --cases the shapes are those of --model, --tp, --t and --n.
    """
    if list_cases:
        say(listed())
        return
    where = usage(lambda: o.device_of(device))
    chosen = usage(
        lambda: choose(cases, models=model, splits=tp, tokens=t, counts=n, dense=dense, snapshots=snapshot_dtype)
    )
    for case in chosen:
        if not case.gated:
            say(f"{case.id}: left out, the block has gates")
    names = usage(lambda: resolve(backends or default(where), where))
    plan = Plan(
        cases=[case for case in chosen if case.gated],
        backends=names,
        device=where,
        protocol=Protocol(warmup_iters, bench_iters, prof_iters, graph),
        pool=with_state_pool,
        cold_pool=with_state_pool_cold_check,
        without_metadata=without_metadata,
        seed=seed,
        arch=usage(lambda: check_arch(arch)),
        compute_units=compute_units,
    )
    found = report(
        plan,
        block_call,
        title="block",
        metrics=usage(lambda: check_metrics(summary_metrics)),
        baseline=usage(lambda: baseline_of(baseline, [name for name in names if name != EMULATE] or names)),
        show_kernels=show_kernels,
        summary_only=summary_only,
        csv=csv,
        json=json,
    )
    if any_failed(found):
        raise typer.Exit(1)


app = o.bench_app(block)
