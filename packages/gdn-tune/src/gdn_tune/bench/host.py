"""``gdn-tune bench host``: what a warm call costs on the host, on the path of code objects, but for the launches.

A launcher that launches nothing stands in for HIP, on CPU tensors: no GPU is needed and nothing is compiled. The best
round's median counts, for a busy machine only adds. Python built with --enable-optimizations, as distributions build
it, takes a quarter less than Python built without.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

import pa_decode.select
from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd_h, select
from gdn_runtime.ops.warm import find_scan
from gdn_runtime.testing.launches import launching_nothing
from pa_decode import DecodeGeometry, make_workspace, plan_decode
from pa_decode import pa_decode as decode
from pa_decode.ops.warm import find

from ..console import print_table, say
from . import options as o

ARCH = "gfx950"
LENGTHS = (1, 40)
HEADS, KEY_HEADS = 2, 1
BARS = {"K5 call": 20.0, "decode call": 25.0}
"""Microseconds that a warm call of K5, and one of paged decode over a plan, may take."""
SCAN_PARTS = ("validate", "select", "allocate", "pack")
"""What a call of K5 does, in order: the lookup by all that its checks and selection look at, whether slots, mask and
settings are those of before, the outputs, and the arguments up to the launch. The rest is the call itself: its 27
parameters, and the way between the parts."""

Step = Callable[[], object]


def microseconds(step: Step, calls: int, rounds: int) -> float:
    """Best of ``rounds`` medians of ``calls`` calls, less the cost of the clock."""
    clock = time.perf_counter_ns
    medians = []
    for _ in range(rounds):
        times = []
        for _ in range(calls):
            begin = clock()
            step()
            times.append(clock() - begin)
        empty = []
        for _ in range(calls):
            begin = clock()
            empty.append(clock() - begin)
        medians.append(statistics.median(times) - statistics.median(empty))
    return min(medians) / 1e3


@contextmanager
def no_launches() -> Iterator[None]:
    """Calls on the backend emulate launch nothing, whether the emulator is installed or not."""
    with (
        patch.object(select, "_has_emulator", lambda: True),
        patch.object(pa_decode.select, "_is_installed", lambda package: True),
        launching_nothing(record=False),
        torch.inference_mode(),
    ):
        pa_decode.select.forget()
        try:
            yield
        finally:
            pa_decode.select.forget()


def keep_freed_memory() -> None:
    """Have the CPU's allocator keep what is freed, as the caching allocator of a GPU does: mapping memory anew takes
    longer than everything else here."""
    library = ctypes.CDLL(None)
    for trim_threshold_or_mmap_threshold in (-1, -3):
        library.mallopt(trim_threshold_or_mmap_threshold, 1 << 30)


def gdn_steps() -> dict[str, Step]:
    """A call of K5 and one of the block, as a server makes them over a pool with metadata, and each part of K5's."""
    tokens, seqs = sum(LENGTHS), len(LENGTHS)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    q, k, v = (zeros(1, tokens, heads, 128) for heads in (KEY_HEADS, KEY_HEADS, HEADS))
    w, u = zeros(1, HEADS, tokens, 128), zeros(1, HEADS, tokens, 128)
    gates, g, beta = torch.zeros(1, HEADS, tokens), torch.zeros(1, tokens, HEADS), torch.zeros(1, tokens, HEADS)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    metadata = build_prefill_metadata(LENGTHS, cu_seqlens=offsets)
    state, indices = torch.zeros(4, HEADS, 128, 128), torch.arange(seqs, dtype=torch.int32)
    mask = torch.ones(seqs, dtype=torch.bool)
    states: dict[str, Any] = {
        "cu_seqlens": offsets,
        "prefill_metadata": metadata,
        "initial_state": state,
        "initial_state_indices": indices,
        "has_initial_state": mask,
        "output_final_state": True,
        "backend": "emulate",
        "arch": ARCH,
    }

    def scan() -> object:
        return chunk_gated_delta_rule_fwd_h(k, w, u, gates, g_head_major=True, **states)

    def block() -> object:
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **states)

    scan()
    (plan,) = metadata.schedule._plans.values()
    ((key, warm),) = plan.warm.items()
    known: Any = key
    h, v_new, final = warm.allocate(u, state)
    block()
    return {
        "K5 call": scan,
        "validate": lambda: find_scan(k, w, u, gates, None, state, offsets, metadata, None, 0, 0, known[-1]),
        "select": lambda: warm.fits(indices, mask),
        "allocate": lambda: warm.allocate(u, state),
        "pack": lambda: warm.launch(plan, k, w, u, gates, None, h, v_new, state, final, indices, mask),
        "block call": block,
    }


def decode_steps() -> dict[str, Step]:
    """A warm call of paged decode over a plan with and without a caller's output, its parts, a refresh, and a call that
    is checked anew."""
    batch, heads, kv_heads, dim, page, blocks = 16, 16, 2, 256, 64, 64
    geometry = DecodeGeometry(
        arch=ARCH, compute_units=256, batch=batch, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        page_size=page, scale_mode="token", sink_dtype="fp32",
    )  # fmt: skip
    fp8 = torch.float8_e4m3fn
    k_cache = torch.zeros(blocks, kv_heads, dim // 16, page, 16, dtype=torch.uint8).view(fp8)
    v_cache = torch.zeros(blocks, kv_heads, page // 16, dim, 16, dtype=torch.uint8).view(fp8)
    query = torch.zeros(batch, heads, dim, dtype=torch.bfloat16)
    table = torch.zeros(batch, blocks, dtype=torch.int32)
    lengths = torch.full((batch,), 1000, dtype=torch.int32)
    scales, sinks = torch.ones(2, blocks, kv_heads, page), torch.zeros(heads)
    plan = plan_decode(lengths, geometry, backend="emulate")
    options: dict[str, Any] = {
        "softmax_scale": 1 / 16,
        "k_scale": scales[0],
        "v_scale": scales[1],
        "sinks": sinks,
        "plan": plan,
        "workspace": make_workspace(plan, geometry),
        "backend": "emulate",
        "arch": ARCH,
    }
    out = torch.empty_like(query)

    def call() -> object:
        return decode(query, k_cache, v_cache, table, lengths, **options)

    def cold() -> object:
        plan.warm.clear()
        plan.seen.clear()
        return call()

    call()
    ((key, warm),) = plan.warm.items()
    tensors = query, k_cache, v_cache, table, options["k_scale"], options["v_scale"], sinks, lengths, None
    launch = query, k_cache, v_cache, table, scales[0], scales[1], sinks, plan, options["workspace"], out
    return {
        "decode call": call,
        "decode call, out given": lambda: decode(query, k_cache, v_cache, table, lengths, out=out, **options),
        "decode: look up": lambda: find(plan, options["workspace"], tensors, None, key[-1]),
        "decode call, views made anew": lambda: decode(query, k_cache.view(fp8), v_cache, table, lengths, **options),
        "decode: allocate": lambda: torch.empty_like(warm.out),
        "decode: pack": lambda: warm(*launch),
        "decode: refresh": lambda: plan.refresh(lengths),
        "decode: first call of a kind": cold,
    }


STEPS: dict[str, Callable[[], dict[str, Step]]] = {"gdn": gdn_steps, "pa": decode_steps}


def costs(ops: list[str], calls: int, rounds: int) -> dict[str, float]:
    """Microseconds of every step of ``ops``."""
    with no_launches():
        steps = {name: step for op in ops for name, step in STEPS[op]().items()}
        times = {name: microseconds(step, calls, rounds) for name, step in steps.items()}
    if "K5 call" in times:
        times["K5: rest"] = times["K5 call"] - sum(times[name] for name in SCAN_PARTS)
    return times


def host(
    op: Annotated[list[str], typer.Option("--op", metavar="NAME...", help="gdn, pa; both if none is given.")] = [],  # noqa: B006
    calls: Annotated[int, typer.Option("--calls", min=1, help="Calls per round.")] = 200,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds.")] = 50,
    json: o.JsonFile = None,
) -> None:
    """Time everything of warm calls but the launches.

    A launcher that launches nothing stands in for the device. Exit status 1: a bar is missed.
    """
    unknown = sorted(set(op) - STEPS.keys())
    if unknown:
        raise typer.BadParameter(f"got {', '.join(unknown)}, expected {' or '.join(STEPS)}", param_hint="--op")
    torch.set_num_threads(1)
    keep_freed_memory()
    times = costs(op or list(STEPS), calls, rounds)
    missed = [name for name, bar in BARS.items() if times.get(name, 0.0) > bar]
    rows = [[name, f"{value:.1f}", f"{BARS[name]:g}" if name in BARS else ""] for name, value in times.items()]
    print_table("host time of a warm call", ["step", "us", "bar"], rows)
    for name in missed:
        say(f"{name}: the bar of {BARS[name]:g} us is missed")
    facts: dict[str, Any] = {"bench": "host", **o.run_facts(torch.device("cpu"))}
    facts["protocol"] = {"calls": calls, "rounds": rounds}
    o.write_json(json, {**facts, "us": times, "bars": BARS})
    if missed:
        raise typer.Exit(1)


app = o.bench_app(host)
