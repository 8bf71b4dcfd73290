"""Calls that tuned tables list, run from a bundle as a server would run them (`nox -s roundtrip`, `gpu-gfx950`).

    GDN_TABLES=DIR GDN_BUNDLE=DIR GDN_JIT=0 python ci/run_rows.py TABLES
    GDN_TABLES=DIR GDN_BUNDLE=DIR GDN_JIT=0 python ci/run_rows.py TABLES --device cuda --most-tokens 8192

For each row the call must say that this row decided, nothing may be compiled, and the results must agree with the
reference: K5 alone and in the block, with its prepare, for rows of K5 `opt`; paged decode for rows of pa_decode. On the
emulator, which is used unless --device says otherwise, the rows must be of the usual part of their architecture; of a
card those rows are run that are of its own architecture and number of compute units.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gdn_runtime
from gdn_runtime.arch import KNOWN, arch_of, compute_units
from gdn_runtime.select import select
from gdn_runtime.spec import CHUNK
from gdn_runtime.tables import table_files
from gdn_runtime.testing import make_inputs as make_block_inputs
from gdn_runtime.testing import max_rel, rel_l2
from gdn_tune.formats import OPT, PA, problem_of
from gdn_tune.tablefile import Fields, read
from monorepo import fail
from pa_decode import FLAVOURS, DecodeGeometry, pa_decode, plan_decode, reference
from pa_decode.tables import COUNTS, TEXTS
from pa_testing import arguments_of, make_inputs

MAX_ERROR = 0.01
"""Relative L2 error of the block and of K5 against the reference: operands of products are truncated to bf16. The
largest that was measured is 0.0053, of K5."""
MAX_DECODE_ERROR = 0.08
"""Largest error of decode over the largest value: the query and P are rounded to FP8, 3 bits of mantissa."""
DTYPES = {True: torch.bfloat16, False: torch.float32}


@dataclass(frozen=True)
class Place:
    """Where rows are run: the emulator on CPU tensors, or a card."""

    device: torch.device

    def options(self, arch: str) -> dict[str, Any]:
        """Of a call for ``arch``."""
        return {"backend": "emulate", "arch": arch} if self.device.type == "cpu" else {"backend": "flydsl"}

    def serves(self, arch: str, fields: Fields) -> bool:
        """Whether a row for ``arch`` can decide here."""
        if self.device.type == "cpu":
            return True
        return (arch_of(self.device).name, compute_units(self.device)) == (arch, fields["cu_num"])


def main() -> None:
    """Run the rows of the tables named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu: the emulator; or cuda")
    parser.add_argument("--most-tokens", type=int, default=1 << 30, help="rows with more are left out")
    given = parser.parse_args()
    place = Place(torch.device(given.device))
    runs: dict[str, Callable[[Place, str, Fields], str]] = {OPT.kernel: run_scan, PA.kernel: run_decode}
    done = left_out = 0
    for file in table_files(given.tables):
        table = read(file)
        for index, fields in enumerate(table.rows):
            if not place.serves(table.arch, fields) or fields.get("T_flat", 0) > given.most_tokens:
                left_out += 1
                continue
            print(f"{file} row {index}: {runs[table.kernel](place, table.arch, fields)}", flush=True)
            done += 1
    if not done:
        fail([f"{given.tables}: there are no rows to run on {given.device}; {left_out} left out"])
    loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("triton", "flydsl"))
    if loaded:
        fail([f"imported {', '.join(loaded[:3])}: the bundle did not serve"])
    print(f"{done} rows were run, {left_out} left out; no compiler was imported")


def lengths_of(fields: Fields) -> list[int]:
    """Sequences with the chunks and tokens of a row, the longest first."""
    total, longest, num_seqs = fields["total_chunks"], fields["max_seq_chunks"], fields["N"]
    chunks = [longest]
    while len(chunks) < num_seqs:
        rest = total - sum(chunks)
        chunks.append(min(longest, rest))
    lengths = [count * CHUNK for count in chunks]
    spare = sum(lengths) - fields["T_flat"]
    for index, length in enumerate(lengths):
        taken = min(spare, CHUNK - 1 if length else 0)
        lengths[index] -= taken
        spare -= taken
    return lengths


def run_scan(place: Place, arch: str, fields: Fields) -> str:
    """K5 and the block of a row; the errors in words."""
    lengths = lengths_of(fields)
    heads = fields["H"], fields["Hg"]
    state_dtype, snapshot_dtype = DTYPES[fields["state_bf16"]], DTYPES[fields["snapshot_bf16"]]
    row = OPT.parse({name: value for name, value in fields.items() if name != "provenance"}, arch, {})
    selection = select(problem_of(row), place.device, **place.options(arch))
    expected = f"block_v={fields['block_v']} from the tuned table"
    if not any(expected in reason for reason in selection.reasons):
        fail([f"expected {expected}, got", *selection.reasons])
    shape = lengths if fields["is_varlen"] else (len(lengths), lengths[0])
    inputs = make_block_inputs(
        shape, *heads, gate="mixed", state="random" if fields["use_h0"] else "none", state_dtype=state_dtype,
        device=place.device,
    )  # fmt: skip
    common: dict[str, Any] = {
        "initial_state": inputs.initial_state,
        "output_final_state": fields["store_fs"],
        "cu_seqlens": inputs.cu_seqlens,
        "snapshot_dtype": snapshot_dtype,
        "state_dtype": state_dtype,
    }
    where: list[dict[str, Any]] = [place.options(arch), {"backend": "reference"}]
    block = [
        gdn_runtime.chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, **common, **options)
        for options in where
    ]
    # K5 alone: any w and u of the size that the block's have.
    torch.manual_seed(0)
    total = inputs.k.shape[1]
    rows = inputs.k.shape[0], heads[0], total, 128
    w, u = (0.1 * torch.randn(rows, dtype=torch.bfloat16).to(place.device) for _ in range(2))
    decay = -torch.rand(inputs.k.shape[0], total, heads[0]).to(place.device)
    gates = chunk_sums(decay, lengths if fields["is_varlen"] else [lengths[0]])
    scan = [gdn_runtime.chunk_gated_delta_rule_fwd_h(inputs.k, w, u, gates, **common, **options) for options in where]
    errors = {"block": worst(*block), "K5": worst(*scan)}
    for name, error in errors.items():
        if not error <= MAX_ERROR:
            fail([f"{name}: relative error {error:.2e}, expected at most {MAX_ERROR}"])
    return f"block_v={fields['block_v']} of the table; errors " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items())


def chunk_sums(decay: Tensor, lengths: list[int]) -> Tensor:
    """Sums of ``decay`` [B, T, H], in log2 units, over the tokens so far of each chunk of each sequence."""
    parts = [chunk.cumsum(1) for sequence in decay.split(lengths, dim=1) for chunk in sequence.split(CHUNK, dim=1)]
    return torch.cat(parts, dim=1)


def worst(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> float:
    """The largest relative error of the tensors; NaN counts as infinite."""
    errors = [rel_l2(a, b) for a, b in zip(got, expected, strict=True) if a is not None and b is not None]
    return max(error if error == error else float("inf") for error in errors)


def run_decode(place: Place, arch: str, fields: Fields) -> str:
    """Paged decode of a row, contexts of a few hundred tokens; the error in words."""
    names = {**COUNTS, **{name: name for name in (*TEXTS, "v_packed", "window")}}
    geometry = DecodeGeometry(arch=arch, **{name: fields[column] for column, name in names.items()})
    fp8 = KNOWN[arch].fp8
    assert fp8 is not None, "tables of decode are for architectures with FP8"
    inputs = make_inputs(
        [300 + 17 * sequence for sequence in range(geometry.batch)],
        kv_heads=geometry.num_kv_heads,
        group=geometry.group_size,
        head_dim=geometry.head_dim,
        page=geometry.page_size,
        query_length=geometry.query_length,
        window=geometry.window,
        scale_mode=geometry.scale_mode,
        v_packed=geometry.v_packed,
        flavour=FLAVOURS[fp8],
        sinks=geometry.sink_dtype != "none",
        dtype=torch.bfloat16 if geometry.query_dtype == "bf16" else torch.float16,
    )
    moved = {name: value.to(place.device) for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    inputs = replace(inputs, **moved)
    options = place.options(arch)
    plan = plan_decode(inputs.seq_lens, geometry, backend=options["backend"])
    if plan.budget != fields["budget"]:
        fail([f"budget: got {plan.budget}, expected {fields['budget']} from the tuned table"])
    out = pa_decode(**arguments_of(inputs, **options, plan=plan))
    error = max_rel(out, reference.decode(inputs))
    if not error <= MAX_DECODE_ERROR:
        fail([f"decode: relative error {error:.2e}, expected at most {MAX_DECODE_ERROR}"])
    return f"budget={plan.budget} of the table; error {error:.1e}"


if __name__ == "__main__":
    main()
