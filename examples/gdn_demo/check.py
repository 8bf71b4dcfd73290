"""Run the block on one backend and measure it against the token-by-token recurrence in fp64."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gdn_runtime import explain
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.select import Explanation

from .layer import Rows, pack
from .server import Server

BOUND = 0.01
"""Largest |error| / |result|, both root mean squares.

The block rounds about a dozen operands to bf16 (q and k once normalised, the operands of K4 to K6, w, u, v_new, the
snapshots, o). One rounding is off by 2^-8 at most, 2^-9.2 = 0.0017 in the mean square; a dozen independent ones that
all reach the result add up to sqrt(12) * 0.0017 = 0.006. Measured, over seeds, lengths and backends: 0.0031 to 0.0047.
For comparison: a beta that is 2 % too large gives 0.016, gates off by one token 0.1, states lost or swapped 0.2.
"""


@dataclass(frozen=True)
class Row:
    """One line of the report. ``seconds`` is None where no call of its own stands behind it."""

    backend: str
    device: str
    part: str
    error: float
    bound: float
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the error keeps to the bound; NaN does not."""
        return self.error <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}

    @staticmethod
    def of_dict(data: dict[str, Any]) -> Row:
        """The inverse of ``as_dict``."""
        return Row(**{field.name: data[field.name] for field in fields(Row)})


@dataclass(frozen=True)
class Batch:
    """The sequences, where each is cut into two prefill passes, and what one unbroken run over them should give."""

    sequences: list[Rows]
    cuts: list[int]
    outputs: list[Tensor]  # of each sequence [T_n, H, 128], fp64
    states: Tensor  # [N, H, V, K], fp64

    @staticmethod
    def of(sequences: list[Rows]) -> Batch:
        """Cut every sequence after three fifths, rarely a multiple of the chunk of 64, and run the definition."""
        lengths = [len(rows) for rows in sequences]
        q, k, v, g, beta = pack(sequences, torch.device("cpu"))
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        o, states = recurrent_gated_delta_rule(q, k, v, g, beta, cu_seqlens=offsets, use_qk_l2norm=True)
        return Batch(sequences, [(3 * n + 4) // 5 for n in lengths], list(o[0].split(lengths)), states)

    @property
    def num_heads(self) -> int:
        """H, value heads."""
        return self.states.shape[1]


def measure(batch: Batch, backend: str, device: torch.device, arch: str | None = None) -> tuple[list[Row], Explanation]:
    """Prefill the batch in two passes and compare both with the unbroken run. Also what ``explain`` says."""
    heads = [rows[:cut] for rows, cut in zip(batch.sequences, batch.cuts, strict=True)]
    tails = [rows[cut:] for rows, cut in zip(batch.sequences, batch.cuts, strict=True)]

    def new_server() -> Server:
        return Server(len(batch.sequences), batch.num_heads, backend, device, arch)

    server = new_server()
    inputs, options = server.call(heads)
    explanation = explain(*inputs, **options)
    if device.type == "cuda" or backend == "emulate":
        new_server().prefill(heads)  # compiles the kernels, so that the times below are those of a running server
    first, second = server.prefill(heads), server.prefill(tails)

    wanted_heads = [o[:cut] for o, cut in zip(batch.outputs, batch.cuts, strict=True)]
    wanted_tails = [o[cut:] for o, cut in zip(batch.outputs, batch.cuts, strict=True)]
    where = device_name(backend, explanation.arch, device)
    return [
        Row(backend, where, "first prefill", relative_error(first.outputs, wanted_heads), BOUND, first.seconds),
        Row(backend, where, "continued", relative_error(second.outputs, wanted_tails), BOUND, second.seconds),
        Row(backend, where, "final states", relative_error([server.states()], [batch.states]), BOUND),
        Row(backend, where, "other slots", float(server.touched_slots()), 0.0),
    ], explanation


def device_name(backend: str, arch: str, device: torch.device) -> str:
    """Where a backend ran, for the report."""
    if device.type == "cuda":
        return f"{arch}, {torch.cuda.get_device_name(device)}"
    return "interpreter" if backend == "triton" else arch


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """RMS of the difference over RMS of ``expected``, over all sequences together."""
    got, want = (torch.cat(parts).cpu().double() for parts in (actual, expected))
    return float((got - want).norm() / want.norm())
