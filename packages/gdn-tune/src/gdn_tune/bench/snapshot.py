"""``gdn-tune bench snapshot``: what the dtype of the snapshots costs K5, which writes them, and K6, which reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from gdn_runtime import chunk_gated_delta_rule_fwd_h, env, explain
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.ops.backends import stages
from gdn_runtime.spec import CHUNK, HEAD_DIM
from gdn_runtime.testing import Case

from ..console import err, print_table, say, usage
from . import options as o
from .backends import EMULATE, OWN, SCALE, default, resolve
from .cases import SNAPSHOTS
from .emulated import DEFAULT_ARCH, check_arch, count, problem
from .inputs import SEED, block_inputs, scan_inputs, states
from .profile import K5
from .results import MISSING, number
from .timing import Call, Flush, event_us

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """Of one backend and dtype; times in ``unit``, None where a backend has no such figure."""

    backend: str
    snapshot_dtype: str
    k5: float | None
    k6: float | None
    snapshot_mib: float
    unit: str = "us"


def make_case(batch: int, tokens: int, heads: int, key_heads: int, snapshot: str) -> Case:
    """A dense batch, states in fp32 in and out."""
    return Case(
        id=f"snapshot-b{batch}-t{tokens}-h{heads}-{snapshot}",
        group="snapshot",
        num_heads=heads,
        num_key_heads=key_heads,
        seq_lens=(tokens,),
        batch=batch,
        snapshot_dtype="bf16" if snapshot == "bf16" else "fp32",
    )


def mebibytes(case: Case) -> float:
    """Of the snapshots of a call."""
    chunks = -(-case.seq_lens[0] // CHUNK) * (case.batch or 1)
    return chunks * case.num_heads * HEAD_DIM**2 * (2 if case.snapshot_dtype == "bf16" else 4) / MIB


def calls(backend: str, case: Case, device: torch.device, seed: int) -> tuple[Call, Call]:
    """(K5, K6), the second over what the first gave."""
    block = block_inputs(case, device, seed)
    scan, x = scan_inputs(block), block.x
    options = states(block)
    with env.override(prefill="staged", amd_route="staged"):
        chosen = explain(*x.tensors, backend=backend, **options)
    stage = stages(chosen.backend)

    def k5() -> Any:
        return chunk_gated_delta_rule_fwd_h(x.k, scan.w, scan.u, scan.g, g_head_major=True, backend=backend, **options)

    h, v_new, _ = k5()
    assert v_new is not None and scan.g is not None
    out, plan, gates = torch.empty_like(x.v), block.plan, scan.g

    def k6() -> None:
        stage.output(x.q, x.k, v_new, h, gates, o=out, scale=SCALE, plan=plan, use_exp2=True, spec=chosen.output)

    return k5, k6


def median_us(call: Call, device: torch.device, warmup_ms: float, rep_ms: float) -> float:
    """Median time of ``call`` after ``warmup_ms`` of calls, over ``rep_ms`` of them, three at least. On a GPU each
    follows a read of 256 MiB, which leaves nothing in the caches and keeps the device busy until the call is queued."""
    flush = Flush(256 * MIB, device) if device.type == "cuda" else None

    def once() -> float:
        if flush is not None:
            return event_us([call], 1, before=flush)[0]
        begin = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - begin) / 1e3

    for limit, least in ((warmup_ms, 1), (rep_ms, 3)):
        times: list[float] = []
        while len(times) < least or sum(times) < 1e3 * limit:
            times.append(once())
    return statistics.median(times)


def measured(
    backend: str, case: Case, device: torch.device, *, warmup_ms: float, rep_ms: float, seed: int, arch: str, units: int
) -> Row:
    """One row. Raises UnsupportedError for what the backend does not have."""
    size = mebibytes(case)
    if backend == EMULATE:
        cycles, _ = count(problem(case, arch, units or None), scan_alone=True)
        return Row(backend, case.snapshot_dtype, cycles[K5], None, size, "cycles")
    k5, k6 = calls(backend, case, device, seed)
    first, second = (median_us(call, device, warmup_ms, rep_ms) for call in (k5, k6))
    return Row(backend, case.snapshot_dtype, first, second, size)


def to_csv(rows: Sequence[Row]) -> Iterator[str]:
    """The columns of the microbench, behind the backend and the unit."""
    yield "backend,unit,snapshot_dtype,k5_us,k6_us,snapshot_mib"
    for row in rows:
        times = ["" if value is None else f"{value:.2f}" for value in (row.k5, row.k6)]
        yield ",".join([row.backend, row.unit, row.snapshot_dtype, *times, f"{row.snapshot_mib:.1f}"])


def snapshot(
    backends: o.Backends = [],  # noqa: B006
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows of the batch.")] = 1,
    sequence_length: Annotated[int, typer.Option("--sequence-length", min=1, help="Tokens of a row.")] = 8192,
    num_heads: Annotated[int, typer.Option("--num-heads", min=1, help="Value heads.")] = 16,
    num_key_heads: Annotated[int, typer.Option("--num-key-heads", min=0, help="Key heads; 0: as many.")] = 0,
    block_v: Annotated[
        int, typer.Option("--block-v", min=0, help="Value rows per program of K5; 0: what selection chooses.")
    ] = 64,
    snapshot_dtype: o.Snapshots = [],  # noqa: B006
    warmup_ms: Annotated[float, typer.Option("--warmup-ms", min=0, help="Calls before the timed ones.")] = 25,
    rep_ms: Annotated[float, typer.Option("--rep-ms", min=0, help="Timed calls.")] = 100,
    seed: o.Seed = SEED,
    device: o.Device = "",
    arch: o.Arch = DEFAULT_ARCH,
    compute_units: o.Units = 0,
    csv: o.CsvFile = None,
    json: o.JsonFile = None,
) -> None:
    """Time K5 and K6 alone for both snapshot dtypes.

    States stay fp32; medians of single calls, us (backend emulate: cycles of the model, of K5). Prints CSV too.
    """
    where = usage(lambda: o.device_of(device))
    names = usage(lambda: resolve(backends or default(where), where))
    foreign = [name for name in names if name not in (*OWN, EMULATE)]
    if foreign:
        raise typer.BadParameter(f"{', '.join(foreign)} has no K6 of its own here", param_hint="--backends")
    unknown = [name for name in snapshot_dtype if name not in SNAPSHOTS]
    if unknown:
        raise typer.BadParameter(f"got {unknown[0]}, expected {' or '.join(SNAPSHOTS)}", param_hint="--snapshot-dtype")
    arch = usage(lambda: check_arch(arch))
    rows = []
    with env.override(**({"k5_block_v": block_v} if block_v else {})):
        for backend in names:
            for dtype in snapshot_dtype or SNAPSHOTS:
                case = make_case(batch_size, sequence_length, num_heads, num_key_heads or num_heads, dtype)
                limits: dict[str, Any] = {"warmup_ms": warmup_ms, "rep_ms": rep_ms, "seed": seed}
                try:
                    rows.append(measured(backend, case, where, arch=arch, units=compute_units, **limits))
                except UnsupportedError as error:
                    err.print(f"{backend}, {dtype}: {error}", markup=False, highlight=False)
    heads = ["backend", "snapshots", "K5", "K6", "unit", "MiB of snapshots"]
    cells = [[r.backend, r.snapshot_dtype, number(r.k5), number(r.k6), r.unit, f"{r.snapshot_mib:.1f}"] for r in rows]
    print_table(f"K5 and K6 alone; {o.device_line(where)}; {MISSING}: not measured", heads, cells)
    lines = "\n".join(to_csv(rows))
    say(lines)
    o.write_text(csv, lines + "\n")
    facts: dict[str, Any] = {"bench": "snapshot", **o.run_facts(where), "seed": seed}
    if EMULATE in names:
        facts["emulated_arch"] = arch
    facts["protocol"] = {"warmup_ms": warmup_ms, "rep_ms": rep_ms, "block_v": block_v}
    facts["shape"] = {
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "num_heads": num_heads,
        "num_key_heads": num_key_heads or num_heads,
    }
    o.write_json(json, {**facts, "rows": [asdict(row) for row in rows]})


app = o.bench_app(snapshot)
