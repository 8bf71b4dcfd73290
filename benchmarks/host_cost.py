"""Host cost of warm calls on the path of AMD code objects: everything but the launch itself, on CPU tensors.

    python benchmarks/host_cost.py [--json] [--calls N] [--rounds N]

Needs gdn-runtime and its test helpers (packages/gdn-runtime/{src,tests/support}) on PYTHONPATH. A launcher that
launches nothing stands in for HIP: no GPU is needed and nothing is compiled. Times are medians over the calls of a
round; the best round is reported, since a busy machine only adds to it. Python built with --enable-optimizations, as
distributions build it, takes a quarter less than Python built without.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import build_prefill_metadata, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd_h, select
from gdn_runtime.ops.warm import signature
from gdn_testing.launches import launching_nothing

ARCH = "gfx950"
LENGTHS = (1, 40)
HEADS, KEY_HEADS = 2, 1
BAR = 20.0
"""Microseconds that a warm call of K5 may take."""
PARTS = ("validate", "select", "allocate", "pack")
"""What a call does, in order: everything that its checks look at, the lookup of what was selected, the outputs, and the
arguments up to the launch. The rest is the call itself: its 27 parameters, and the way between the parts."""

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


def keep_freed_memory() -> None:
    """Have the CPU's allocator keep what is freed, as the caching allocator of a GPU does: mapping memory anew takes
    longer than everything else here."""
    library = ctypes.CDLL(None)
    for trim_threshold_or_mmap_threshold in (-1, -3):
        library.mallopt(trim_threshold_or_mmap_threshold, 1 << 30)


def inputs() -> dict[str, Any]:
    """A packed batch over a pool, with metadata, as a server calls it."""
    tokens, seqs = sum(LENGTHS), len(LENGTHS)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "q": zeros(1, tokens, KEY_HEADS, 128),
        "k": zeros(1, tokens, KEY_HEADS, 128),
        "v": zeros(1, tokens, HEADS, 128),
        "w": zeros(1, HEADS, tokens, 128),
        "u": zeros(1, HEADS, tokens, 128),
        "g": torch.zeros(1, tokens, HEADS),
        "gates": torch.zeros(1, HEADS, tokens),
        "beta": torch.zeros(1, tokens, HEADS),
        "states": {
            "cu_seqlens": offsets,
            "prefill_metadata": build_prefill_metadata(LENGTHS, cu_seqlens=offsets),
            "initial_state": torch.zeros(4, HEADS, 128, 128),
            "initial_state_indices": torch.arange(seqs, dtype=torch.int32),
            "has_initial_state": torch.ones(seqs, dtype=torch.bool),
            "output_final_state": True,
            "backend": "emulate",
            "arch": ARCH,
        },
    }


def scan_steps(x: dict[str, Any]) -> dict[str, Step]:
    """A whole call of K5, and each part of it alone."""
    k, w, u, gates, states = x["k"], x["w"], x["u"], x["gates"], x["states"]
    state, indices, mask = (states[name] for name in ("initial_state", "initial_state_indices", "has_initial_state"))
    offsets, metadata = states["cu_seqlens"], states["prefill_metadata"]

    def call() -> object:
        return chunk_gated_delta_rule_fwd_h(
            k,
            w,
            u,
            gates,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=offsets,
            prefill_metadata=metadata,
            initial_state_indices=indices,
            has_initial_state=mask,
            g_head_major=True,
            backend="emulate",
            arch=ARCH,
        )

    call()
    (plan,) = states["prefill_metadata"].schedule._plans.values()
    ((key, warm),) = plan.warm.items()
    options = key[-1]
    h, v_new, final = warm.allocate(u, state)
    return {
        "K5 call": call,
        "validate": lambda: signature(k, w, u, gates, None, state, offsets, metadata, None, 0, 0, options),
        "select": lambda: plan.warm.get(key).fits(indices, mask),
        "allocate": lambda: warm.allocate(u, state),
        "pack": lambda: warm.launch(plan, k, w, u, gates, None, h, v_new, state, final, indices, mask),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="calls per round (default: 200)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds (default: 100)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    select._has_emulator = lambda: True  # type: ignore[assignment]  # it is not asked for anything
    with launching_nothing(record=False):
        return run(args)


def run(args: argparse.Namespace) -> int:
    x = inputs()
    steps = scan_steps(x)
    steps["block call"] = lambda: chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], use_qk_l2norm_in_kernel=True, **x["states"]
    )
    steps["block call"]()
    with torch.inference_mode():
        times = {name: microseconds(step, args.calls, args.rounds) for name, step in steps.items()}
    total = times["K5 call"]
    times["rest"] = total - sum(times[name] for name in PARTS)
    report = {"us": {name: round(value, 2) for name, value in times.items()}, "bar_us": BAR, "ok": total <= BAR}
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"K5, packed batch over a pool, metadata given: {total:.1f} us a call (bar: {BAR:g} us)")
        for name in (*PARTS, "rest"):
            print(f"  {name:<10}{times[name]:6.1f} us")
        print(f"block, K1..K6 with l2norm, four launches: {times['block call']:.1f} us a call")
    return 0 if total <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
