"""Files that a report is made of, as the benches and the tuner write them, with figures that tests make up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdn_tune.bench.profile import FUSED_PREPARE, K5, K6
from gdn_tune.bench.results import GAP, KERNELS, LAUNCH, WALL, Measurement, to_json
from gdn_tune.records import Facts
from gdn_tune.store import Store

from . import K5_FACTS, make_sample

DEVICE = "NVIDIA H200: sm90, 132 compute units"
RUN: dict[str, Any] = {
    "schema": 1,
    "version": "0.1.0",
    "commit": "0123456789abcdef",
    "command": "gdn-tune bench block",
    "date": "2026-11-30",
    "device": DEVICE,
    "arch": "sm90",
    "compute_units": 132,
    "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"},
    "protocol": {"warmup": 10, "wall": 50},
}


def facts(tokens: int, length: int, heads: int = 32, *, varlen: bool = True) -> dict[str, Any]:
    """Columns of a call of the block."""
    return {"Model": "35b", "TP": 1, "Hg": heads // 2, "H": heads, "SeqLen": length, "T": tokens, "varlen": varlen,
            "final_st": True}  # fmt: skip


def block_row(tokens: int, backend: str, wall: float, *, snapshot: str = "bf16", variant: str = "") -> Measurement:
    """The block on sequences of 8192 tokens: a tenth of ``wall`` is its gap, the rest its stages."""
    device = 0.9 * wall
    stages = {FUSED_PREPARE: 0.2 * device, K5: 0.5 * device, K6: 0.3 * device}
    metrics = {**stages, KERNELS: device, LAUNCH: 0.5 * wall, WALL: wall, GAP: wall - device}
    return Measurement(f"snapshot-{tokens}-{snapshot}", snapshot, backend, variant, metrics=metrics,
                       facts=facts(tokens, 8192), lengths=(8192,) * (tokens // 8192))  # fmt: skip


def counted_row(tokens: int, cycles: float, snapshot: str = "bf16") -> Measurement:
    """The same on the emulator."""
    metrics = {FUSED_PREPARE: 0.25 * cycles, K5: 0.75 * cycles, KERNELS: cycles}
    return Measurement(f"snapshot-{tokens}-{snapshot}", snapshot, "emulate", unit="cycles", metrics=metrics,
                       facts=facts(tokens, 8192), lengths=(8192,) * (tokens // 8192))  # fmt: skip


def save(path: Path, bench: str, rows: Iterable[Measurement], **changes: Any) -> Path:
    """What a bench writes."""
    path.write_text(json.dumps(to_json(rows, bench=bench, **(RUN | changes))))
    return path


def block_file(path: Path, **changes: Any) -> Path:
    """Two backends, two dtypes of snapshots, a variant, three lengths, the emulator beside them."""
    rows = []
    for index, tokens in enumerate((8192, 16384, 32768)):
        for snapshot, factor in (("bf16", 1.0), ("fp32", 1.25)):
            for backend, wall in (("aiter", 600.0), ("flydsl", 400.0)):
                rows.append(block_row(tokens, backend, wall * 2**index * factor, snapshot=snapshot))
            rows.append(block_row(tokens, "flydsl", 410.0 * 2**index * factor, snapshot=snapshot, variant="pool"))
            rows.append(counted_row(tokens, 90_000.0 * 2**index * factor, snapshot))
    rows.append(Measurement("snapshot-65536-bf16", "bf16", "aiter", facts=facts(65536, 8192), failure="out of memory"))
    return save(path, "block", rows, emulated_arch="gfx950", **changes)


def k5_file(path: Path) -> Path:
    """Device times of K5."""
    rows = [
        Measurement(f"c{tokens}", "bf16", backend, metrics={K5: time * tokens / 8192, WALL: 2 * time * tokens / 8192},
                    facts=facts(tokens, tokens, varlen=False), lengths=(tokens,))
        for tokens in (2500, 8192) for backend, time in (("hip", 200.0), ("triton", 250.5))
    ]  # fmt: skip
    return save(path, "k5", rows)


def snapshot_file(path: Path) -> Path:
    """K5 and K6 alone."""
    rows = [
        {"backend": "triton", "snapshot_dtype": dtype, "k5": k5, "k6": k6, "snapshot_mib": 64.0, "unit": "us"}
        for dtype, k5, k6 in (("bf16", 100.0, 80.0), ("fp32", 106.0, 100.0))
    ]
    shape = {"batch_size": 1, "sequence_length": 8192, "num_heads": 16, "num_key_heads": 16}
    path.write_text(json.dumps({**RUN, "bench": "snapshot", "shape": shape, "rows": rows}))
    return path


def pa_file(path: Path) -> Path:
    """Paged decode over two contexts, cold and warm, and a tile on the emulator."""
    rows = []
    for context in (8192, 131072):
        for batch in (1, 16):
            problem = {"B": batch, "Hq": 16, "Hkv": 2, "page": 64, "QL": 1, "context": context, "window": 0,
                       "scales": "tensor", "V": "packed"}  # fmt: skip
            for backend, factor in (("triton", 2.0), ("flashinfer", 1.5)):
                for cache, more in (("cold", 1.1), ("warm", 1.0)):
                    time = factor * more * (5 + batch * context * 2048 / 4.3e6)
                    metrics = {"us": time, "p90-p10": 0.5, "GB/s": 1.0, "error": 0.01}
                    rows.append(
                        Measurement(f"pa-{batch}-{context}", "", backend, cache, metrics=metrics, facts=problem)
                    )
    rows.append(Measurement("pa-1-8192", "", "emulate", unit="cycles", metrics={"cycles per tile": 2048.0},
                            facts={**problem, "B": 1, "context": 8192}))  # fmt: skip
    return save(path, "pa", rows, emulated_arch="gfx950")


def store_file(path: Path, device: str = "NVIDIA H200") -> Path:
    """Three candidates of two calls, timed (the rule's is the second, and tied with the first in one of them), and a
    call that was modelled."""
    times = {"clear": {16: 15.0, 32: 12.0, 64: 10.0}, "tied": {16: 15.0, 32: 10.001, 64: 10.0}}
    samples = [
        make_sample(width, *(time * (1 + 0.001 * (i % 5 - 2)) for i in range(100)), commit="abc",
                    key={"case": case, "facts": facts_of_call(index), "device": device})
        for index, (case, widths) in enumerate(times.items()) for width, time in widths.items()
    ]  # fmt: skip
    samples += [make_sample(width, cycles=cycles, key={"case": "counted", "arch": "gfx950", "compute_units": 256})
                for width, cycles in ((16, 900.0), (32, 1000.0))]  # fmt: skip
    with Store(path) as store:
        store.add(*samples)
    return path


def facts_of_call(index: int) -> Facts:
    """Calls of 10 chunks and more."""
    return Facts({**K5_FACTS, "total_chunks": 10 + index, "T_flat": 640 + 64 * index})
