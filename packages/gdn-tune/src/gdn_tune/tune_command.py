"""The command ``gdn-tune tune``."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from gdn_runtime import env
from gdn_runtime.arch import KNOWN, parse_arch
from gdn_runtime.spec import AMD_ARCHS

from . import pool, search
from .calls import cases_of, pick
from .console import STORE, Bar, Json, Quiet, StoreFile, failed, print_json, print_table, say, usage
from .export import Candidate, best_run, tied
from .formats import choice_text
from .measure import FIRST, MOST, Limits
from .pool import Answer
from .records import OPS, Sample
from .store import Store, StoreError

LOCAL = "local"
ARCHS = tuple(name for name in KNOWN if name != "cpu")


def tune(
    op: Annotated[str, typer.Argument(metavar="OP", help=f"{', '.join(OPS)}.")],
    arch: Annotated[str, typer.Option(metavar="ARCH", help=f"{', '.join(ARCHS)}.")] = "",
    cases: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Cases by id or pattern (snapshot-35b-*); may be repeated.")
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list-cases", help="Print the cases of OP and leave.")] = False,
    model: Annotated[
        bool, typer.Option("--model", help="Rank by the emulator's cycle model: nothing is timed.")
    ] = False,
    compute_units: Annotated[
        int | None, typer.Option(min=1, help="Of the card that is modelled; or the only number to accept of a card.")
    ] = None,
    store: StoreFile = STORE,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one for each GPU (all of them; 1 with --model).")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Where cases run: local, or dask:ADDRESS of a scheduler (needs gdn-tune[dask]).")
    ] = LOCAL,
    first: Annotated[int, typer.Option(min=10, help="Iterations of every candidate.")] = FIRST,
    most: Annotated[int, typer.Option(min=10, help="Iterations of those that are hard to tell apart.")] = MOST,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without news before a candidate counts as crashed.")
    ] = pool.TIMEOUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check and time every candidate of the cases; keep the samples in a store, for `gdn-tune export`.

    What the store has is not done again. A candidate that takes its process with it is marked crashed. With --executor
    each worker of the cluster has one card, which its environment shows it.
    """
    if op not in OPS:
        raise typer.BadParameter(f"got {op!r}, expected one of {', '.join(OPS)}", param_hint="OP")
    found = cases_of(op)
    if list_cases:
        for case in found.values():
            say(str(case))
        return
    if not arch or not cases:
        raise typer.BadParameter("expected --arch and --cases", param_hint="--arch")
    facts = usage(lambda: parse_arch(arch))
    if model and facts.name not in AMD_ARCHS:
        raise typer.BadParameter(f"got {facts.name}, the emulator has {', '.join(AMD_ARCHS)}", param_hint="--arch")
    names = list(usage(lambda: pick(found, cases)))
    limits = usage(lambda: Limits(first=first, most=max(first, most)))
    with ExitStack() as stack:
        where = open_executor(executor, stack)
        devices = [] if where is not None else usage(lambda: local_devices(workers, model=model))
        try:
            base = stack.enter_context(Store(store))
            given = search.jobs(
                base, op, names, facts.name, compute_units=compute_units, model=model, limits=limits,
                commit=commit(), timeout=timeout,
            )  # fmt: skip
            with Bar(f"{op} {facts.name}", len(given), hidden=quiet or as_json) as advance:
                answers = search.search(base, given, executor=where, devices=devices, done=advance)
            samples = [sample for sample in base.samples(op) if sample.key.arch == facts.name]
        except StoreError as error:
            failed(str(error))
            raise typer.Exit(1) from error
    rows = [
        row for name in names for row in rows_of([s for s in samples if s.key.case == name and s.key.modelled == model])
    ]
    bad = report_faults(answers)
    if as_json:
        errors = {answer.job["case"]: answer.error for answer in answers if answer.error}
        print_json({"op": op, "arch": facts.name, "store": str(store), "rows": rows, "errors": errors})
    elif not quiet:
        unit = "cycles (model)" if model else "us"
        texts = [[str(row[name]) for name in ("case", "config", "value", "n", "verdict")] for row in rows]
        print_table("", ["case", "candidate", unit, "n", ""], texts)
    raise typer.Exit(1 if bad else 0)


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What the store says of one case, the fastest candidate first, those without a time last."""
    ranked = best_run(samples)
    best = {each.key.config for each in tied(ranked)} if ranked else set()
    rows = [_row(each, ranked[0], each.key.config in best, len(best)) for each in ranked]
    timed = {each.key.config for each in ranked}
    last = {sample.key.config: sample for sample in samples if sample.key.config not in timed}
    for config, sample in sorted(last.items(), key=lambda each: each[0].text):
        detail = f"{sample.status}: {sample.detail}" if sample.detail else sample.status
        rows.append({"case": sample.key.case, "config": choice_text(config), "value": "", "n": 0, "verdict": detail})
    return rows


def _row(candidate: Candidate, first: Candidate, is_best: bool, count: int) -> dict[str, Any]:
    value = candidate.spread.median
    verdict = f"{100 * (value / first.spread.median - 1):+.1f} %"
    if is_best:
        verdict = "fastest" if count == 1 else f"{verdict}, {count} cannot be told apart"
    return {
        "case": candidate.key.case,
        "config": choice_text(candidate.key.config),
        "value": round(value, 2),
        "n": sum(sample.n for sample in candidate.samples),
        "verdict": verdict,
    }


def report_faults(answers: Sequence[Answer]) -> int:
    """Print what went wrong; how much did."""
    count = 0
    for answer in answers:
        faults = [answer.error] if answer.error else []
        bad = (sample for sample in answer.samples if sample.status in ("wrong", "crashed"))
        faults += [f"{choice_text(each.key.config)}: {each.status}: {each.detail}" for each in bad]
        for fault in faults:
            failed(f"{answer.job['case']}: {fault}")
        count += len(faults)
    return count


def local_devices(workers: int | None, *, model: bool) -> list[str]:
    """Where children run: GPUs that this process sees, or with ``model`` so many processes. Raises ValueError."""
    if model:
        return [f"{pool.NO_GPU}{index}" for index in range(workers or 1)]
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ValueError("no GPU: --model ranks candidates without one")
    if workers is not None and workers > count:
        raise ValueError(f"workers: got {workers}, expected at most {count}, one for each GPU")
    shown = env.child_environment({})
    # Those of HIP mean nothing to CUDA; HIP reads both, its own first.
    known = [name for name in pool.VISIBLE if shown.get(name) and (torch.version.hip or name.startswith("CUDA"))]
    names = [word.strip() for word in shown[known[0]].split(",")] if known else [str(i) for i in range(count)]
    return names[: workers or count]


def open_executor(text: str, stack: ExitStack) -> Executor | None:
    """The executor that ``text`` names, closed with ``stack``; None: children of this process."""
    if text == LOCAL:
        return None
    kind, _, address = text.partition(":")
    if kind != "dask" or not address:
        raise typer.BadParameter(f"got {text!r}, expected local or dask:ADDRESS", param_hint="--executor")
    try:
        from distributed import Client
    except ImportError as error:
        raise typer.BadParameter(f"{error}: pip install 'gdn-tune[dask]'", param_hint="--executor") from error
    connect: Any = Client
    try:
        client = stack.enter_context(connect(address, set_as_default=False))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"no scheduler at {address}: {error}", param_hint="--executor") from error
    # pure=False: a job that is tried again is another task.
    executor: Executor = stack.enter_context(client.get_executor(pure=False, retries=0))
    return executor


def commit() -> str:
    """The revision of the sources that run, if they are a checkout of git."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return found.stdout.strip()
