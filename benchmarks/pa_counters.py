"""Counters of the D256 pipe on the emulator, beside the public kernel, and of the Triton kernel on some of the same
problems: "Paged decode, counted" of docs/performance.md.

    ./ci/nox -s pa-counters            # writes docs/performance.md and benchmarks/results/pa-counters.json
    ./ci/nox -s pa-counters -- --check # writes nothing; exit status 1 if a bar is missed

Needs cdna-emu, FlyDSL, Triton (its linker) and the test helpers of gdn-runtime and pa-decode on PYTHONPATH; no GPU.
Method and bars: ``pa_testing.pipe_counts``. Counts are exact for the executed stream and depend on the compiler alone;
cycles are a model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gdn_testing.public_kernel import Bar
from pa_decode.spec import AttentionSpec, ScaleMode
from pa_testing.pipe_counts import MORE_ROWS, PUBLIC, SHARE, TileCounts, bars, count_tile, pipe_spec

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "pa-counters.json"
COMMAND = "./ci/nox -s pa-counters"
ARCHS, PAGES, ROWS = ("gfx942", "gfx950"), (64, 16), (8, 16, 32)
MODES: tuple[ScaleMode, ...] = ("tensor", "token")
GENERIC: tuple[tuple[int, ScaleMode, int], ...] = (
    (64, "tensor", 16),
    (64, "token", 16),
    (64, "tensor", 32),
    (16, "tensor", 16),
)
"""Page, scales and rows that the Triton kernel is counted with."""
PIPE = " | "


@dataclass(frozen=True)
class Row:
    """One kernel, its counts and its bars; ``more``: of 32 rows, instructions over those of 16."""

    spec: AttentionSpec
    counts: TileCounts
    bars: list[Bar]
    more: float | None

    @property
    def name(self) -> str:
        """For messages."""
        spec = self.spec
        form = "packed" if spec.v_packed else "plain"
        kernel = "" if spec.kernel == "d256_pipe" else f" {spec.kernel}"
        return f"{spec.arch}{kernel} page {spec.page_size} {form} V {spec.scale_mode} R={spec.rows}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        counts = asdict(self.counts) | {"instructions": self.counts.instructions}
        found = [{**asdict(bar), "ok": bar.ok} for bar in self.bars]
        return {
            "name": self.name,
            "spec": asdict(self.spec),
            "counts": counts,
            "bars": found,
            "over_16_rows": self.more,
        }


def rows(archs: Sequence[str]) -> Iterator[Row]:
    """All kernels of the pipe, in the order of the table."""
    for arch in archs:
        for size in PAGES:
            for mode in MODES:
                for packed in (True, False):
                    # A page of 16 tokens holds the same bytes in both forms of V, and is read by the same code.
                    form = packed or size == 16
                    counts = [count_tile(pipe_spec(arch, size, mode, number, v_packed=form)) for number in ROWS]
                    by_rows = dict(zip(ROWS, counts, strict=True))
                    for number, found in by_rows.items():
                        spec = pipe_spec(arch, size, mode, number, v_packed=packed)
                        more = found.instructions / by_rows[16].instructions if number > 16 else None
                        yield Row(spec, found, bars(spec, found), more)


def generic_rows(archs: Sequence[str]) -> Iterator[Row]:
    """The kernel for everything, which no bar holds, with packed V."""
    for arch in archs:
        for page, mode, number in GENERIC:
            spec = replace(pipe_spec(arch, page, mode, number), kernel="attention")
            yield Row(spec, count_tile(spec), [], None)


def generic_table(found: Sequence[Row]) -> list[str]:
    """The rows in Markdown."""
    head = [
        "arch",
        "page, scales, R",
        "instructions",
        "VALU",
        "SALU",
        "MFMA",
        "LDS",
        "load",
        "barrier",
        "wait",
        "s_nop",
    ]
    head += ["MFMA cycles", "K lines", "V lines", "VGPR", "LDS bytes", "per CU", "model", "slow"]
    lines = [PIPE.join(head), PIPE.join(["---"] * 2 + ["--:"] * (len(head) - 2))]
    for row in found:
        spec, c, r = row.spec, row.counts, row.counts.resources
        lds = c.classes["LDS read"] + c.classes["LDS write"]
        classes = [c.classes[name] for name in ("VALU", "SALU", "MFMA")] + [lds]
        classes += [c.classes[name] for name in ("load", "barrier", "wait", "s_nop")]
        loads = [f"{loads.lines}/{loads.distinct}" for loads in (c.keys, c.values)]
        right = [r.vgprs, r.lds_bytes, r.groups_per_cu, f"{c.cycles:.0f}", f"{c.slow:.0f}"]
        cells = [spec.arch, f"{spec.page_size}, {spec.scale_mode}, {spec.rows}", f"**{c.instructions}**"]
        lines.append(PIPE.join([*cells, *map(str, classes), f"{c.matrix_cycles:.0f}", *loads, *map(str, right)]))
    return [f"| {line} |" for line in lines]


def table(found: Sequence[Row]) -> list[str]:
    """The rows in Markdown; forms of V that count alike share one."""
    head = [
        "arch",
        "page, scales, R",
        "public",
        "instructions",
        "of public",
        "of R = 16",
        "VALU",
        "SALU",
        "MFMA",
        "load",
    ]
    head += ["wait", "s_nop", "branch", "MFMA cycles", "K lines", "V lines", "VGPR", "LDS", "per CU", "model", "slow"]
    lines = [PIPE.join(head), PIPE.join(["---"] * 2 + ["--:"] * (len(head) - 2))]
    for row in found:
        spec, c = row.spec, row.counts
        same = [other for other in found if _key(other) == _key(row)]
        if len(same) == 2 and same[1] is row and _cells(same[0]) == _cells(row):
            continue
        alike = len(same) == 2 and _cells(same[0]) == _cells(same[1])
        form = "" if alike else (", packed V" if spec.v_packed else ", plain V")
        public = PUBLIC[spec.arch, spec.page_size, spec.scale_mode]
        share = f"{100 * c.instructions / public:.0f} %"
        variant = f"{spec.page_size}, {spec.scale_mode}, {spec.rows}{form}"
        more = "" if row.more is None else f"{row.more:.2f}"
        lines.append(PIPE.join([spec.arch, variant, str(public), f"**{c.instructions}**", share, more, *_cells(row)]))
    return [f"| {line} |" for line in lines]


def _key(row: Row) -> tuple[Any, ...]:
    spec = row.spec
    return spec.arch, spec.page_size, spec.scale_mode, spec.rows


def _cells(row: Row) -> list[str]:
    c, r = row.counts, row.counts.resources
    classes = [c.classes[name] for name in ("VALU", "SALU", "MFMA", "load", "wait", "s_nop", "branch")]
    lines = [f"{loads.lines}/{loads.distinct}" for loads in (c.keys, c.values)]
    right = [r.vgprs, r.lds_bytes, r.groups_per_cu, f"{c.cycles:.0f}", f"{c.slow:.0f}"]
    return [*map(str, classes), f"{c.matrix_cycles:.0f}", *lines, *map(str, right)]


def page(found: Sequence[Row], generic: Sequence[Row]) -> str:
    """What stands between the markers."""
    missed = [f"- {row.name}: {bar}" for row in found for bar in row.bars if not bar.ok]
    count = sum(len(row.bars) for row in found)
    over = [f"{row.name} {row.more:.2f}" for row in found if row.more is not None and row.more > MORE_ROWS]
    lines = [*table(found), "", f"{count - len(missed)} of {count} bars are met.", *missed]
    if over:
        lines += ["", f"More than {MORE_ROWS} times the instructions of 16 rows: {'; '.join(over)}."]
    lines += ["", "The Triton kernel, which takes what the pipe does not, on problems of the pipe (packed V):", ""]
    lines += generic_table(generic)
    return "\n".join(lines) + "\n"


def write_page(text: str) -> None:
    """Replace what stands between the markers of the page."""
    pattern = r"(<!-- measured: paged decode counters -->\n).*?(<!-- end -->)"
    whole, count = re.subn(pattern, lambda m: f"{m[1]}{text}{m[2]}", PAGE.read_text(), flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE}: got {count} places for the counters, expected 1")
    PAGE.write_text(whole)


def facts() -> dict[str, str]:
    """Commit, command, versions."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "flydsl": version("flydsl"),
        "triton": version("triton"),
        "share": f"{SHARE:g} of the public kernel for up to 16 rows, {MORE_ROWS:g} times that for up to 32",
        "note": "counted on the emulator; cycles are a model, nothing was measured on hardware",
    }


def main() -> int:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description="Counters of the D256 pipe on the emulator.")
    parser.add_argument("--arch", choices=ARCHS, action="append", help="one architecture; nothing is written then")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    for row in rows(options.arch or ARCHS):
        found.append(row)
        missed = ", ".join(str(bar) for bar in row.bars if not bar.ok) or "bars met"
        print(f"{row.name}: {row.counts.instructions} instructions; {missed}", flush=True)
    generic: list[Row] = []
    for row in generic_rows(options.arch or ARCHS):
        generic.append(row)
        print(f"{row.name}: {row.counts.instructions} instructions", flush=True)
    if not (options.check or options.arch):
        write_page(page(found, generic))
        content = {**facts(), "rows": [row.to_dict() for row in [*found, *generic]]}
        RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return int(options.check and any(not bar.ok for row in found for bar in row.bars))


if __name__ == "__main__":
    sys.exit(main())
