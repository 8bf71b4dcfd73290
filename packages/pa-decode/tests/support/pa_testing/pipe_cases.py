"""Problems for the D256 pipe, of pairwise different specs: compiling is most of the time of a test."""

from __future__ import annotations

from typing import Any

import torch

from pa_decode.reference import DecodeInputs
from pa_decode.spec import AttentionSpec

from .attention import flavour, spec_of, work_of
from .inputs import make_inputs

STALE = 99999999

CASES: dict[str, dict[str, Any]] = {
    "950-16-tensor-packed-16": {"page": 16, "group": 8, "query_length": 2},
    "950-64-tensor-plain-16": {"page": 64, "group": 8, "query_length": 2, "v_packed": False},
    "950-16-token-plain-25-window": {"page": 16, "group": 5, "query_length": 5, "v_packed": False, "window": 300},
    "950-64-token-packed-25-window": {"page": 64, "group": 5, "query_length": 5, "window": 300},
    "950-16-token-packed-32": {"page": 16, "group": 4, "query_length": 8},
    "942-64-token-plain-16": {"page": 64, "group": 16, "query_length": 1, "v_packed": False},
    "942-16-token-packed-16": {"page": 16, "group": 16, "query_length": 1},
    "942-16-tensor-plain-24-window": {"page": 16, "group": 12, "query_length": 2, "v_packed": False, "window": 257},
    "942-64-tensor-packed-24-window": {"page": 64, "group": 12, "query_length": 2, "window": 257},
    "950-64-token-packed-1-single": {"page": 64, "group": 1, "query_length": 1, "window": 100},
}
"""By name: architecture, page, scale mode, V form, rows."""

TWINS = [
    ("950-16-tensor-packed-16", "950-64-tensor-plain-16"),
    ("950-16-token-plain-25-window", "950-64-token-packed-25-window"),
    ("942-64-token-plain-16", "942-16-token-packed-16"),
    ("942-16-tensor-plain-24-window", "942-64-tensor-packed-24-window"),
]
"""Cases that differ in the page size and the form of V alone."""


def arch_of(name: str) -> str:
    """Architecture of a case."""
    return f"gfx{name[:3]}"


def options(name: str) -> dict[str, Any]:
    """A case as arguments of ``make_inputs``."""
    return {
        "scale_mode": name.split("-")[2],
        "flavour": flavour(arch_of(name)),
        "dtype": torch.float16 if "window" in name else torch.bfloat16,
        **CASES[name],
    }


def problem(name: str, contexts: list[int], **changes: Any) -> DecodeInputs:
    """A case with some of its options changed; stale ids are ``STALE``."""
    inputs = make_inputs(contexts, **({"kv_heads": 2, "head_dim": 256, "scale_spread": 3.0} | options(name) | changes))
    inputs.block_tables[inputs.block_tables == 2**31 - 1] = STALE
    return inputs


def spec_for(name: str, inputs: DecodeInputs) -> AttentionSpec:
    """The spec of a case."""
    return spec_of(inputs, arch_of(name), single_tile=name.endswith("single"))


def tasks(name: str, inputs: DecodeInputs) -> torch.Tensor:
    """Tasks of several tiles, of one, and unused slots; single tiles where the kernel knows no others."""
    batch = len(inputs.seq_lens)
    return work_of(inputs, 3 * batch + 2 if name.endswith("single") else batch + 3)
