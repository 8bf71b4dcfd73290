"""Records that tests make up."""

from __future__ import annotations

from typing import Any

from gdn_tune.records import Facts, Key, Sample

K5_FACTS = Facts(
    H=16, Hg=8, V=128, is_varlen=True, use_h0=True, store_fs=True, snapshot_bf16=True, state_bf16=False,
    T_flat=640, N=2, total_chunks=10, max_seq_chunks=6,
)  # fmt: skip
TIMED = Facts(method="events", warmup=10, cache="cold")
MODELLED = Facts(method="model")


def make_key(block_v: int = 32, **changes: Any) -> Key:
    """A candidate of K5."""
    fields: dict[str, Any] = {
        "op": "k5",
        "case": "varlen-640",
        "facts": K5_FACTS,
        "config": Facts(block_v=block_v),
        "arch": "gfx942",
        "compute_units": 80,
        "device": "MI308X",
        "toolchain": "flydsl 0.5.0",
        "kernel_digest": f"{block_v:064d}",
        "protocol": TIMED,
        **changes,
    }
    return Key(**fields)


def make_sample(block_v: int = 32, *times: float, key: dict[str, Any] | None = None, **changes: Any) -> Sample:
    """A sample of a candidate; without ``times`` it was modelled, at ``cycles`` if they are given."""
    if not times:
        fields = {"cycles": 1000.0, **changes}
        return Sample(make_key(block_v, device="emulator", protocol=MODELLED, **(key or {})), "ok", **fields)
    fields = {"n": len(times), "started": "2026-11-30T20:15:00+00:00", **changes}
    return Sample(make_key(block_v, **(key or {})), "ok", times, **fields)
