"""Counters of the AMD kernels on the emulator, beside those of the public kernel: the AMD part of docs/performance.md.

    ./ci/nox -s counters            # writes docs/performance.md and benchmarks/results/amd-counters.json
    ./ci/nox -s counters -- --check # writes nothing; exit status 1 if a bar is missed

Needs cdna-emu, FlyDSL, Triton (its linker) and the test helpers of gdn-runtime on PYTHONPATH; no GPU. Method:
``gdn_testing.counting``; the bars and the public kernel's figures: ``gdn_testing.public_kernel``. Counts of
instructions, requests and LDS cycles are exact for the executed stream and depend on the compiler alone; cycles are a
model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gdn_runtime.spec import HEAD_DIM
from gdn_testing.counting import (
    CLASSES,
    SLOW_MEMORY,
    WAVES,
    Counts,
    count_prepare,
    count_scan,
    opt_spec,
    prepare_spec,
    prepare_t_spec,
    vk_spec,
    vsplit_spec,
)
from gdn_testing.public_kernel import (
    PREPARES,
    SCANS,
    Bar,
    PublicScan,
    heads_of,
    prepare_bars,
    route_bars,
    route_bytes,
    scan_bars,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "amd-counters.json"
ARCHS, BLOCKS, SNAPSHOTS = ("gfx942", "gfx950"), (16, 32, 64), ("bf16", "fp32")
COMMAND = "./ci/nox -s counters"
PIPE = " | "


@dataclass(frozen=True)
class Row:
    """One kernel: what it is, its counts, and the bars that hold for it (none for K5 `vk`)."""

    kernel: str
    arch: str
    variant: str
    spec: Any
    counts: Counts
    bars: list[Bar]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kernel} {self.arch} {self.variant}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        counts = asdict(self.counts)
        counts["instructions"] = self.counts.instructions
        bars = [{**asdict(bar), "ok": bar.ok} for bar in self.bars]
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "variant": self.variant,
            "spec": asdict(self.spec),
            "counts": counts,
            "bars": bars,
        }


def scan_rows(archs: Sequence[str]) -> Iterator[Row]:
    """K5 `opt`, g head-major and token-major."""
    for arch in archs:
        for block_v in BLOCKS:
            for snapshot in SNAPSHOTS:
                for head_major in (True, False):
                    spec = opt_spec(arch, block_v, snapshot, g_head_major=head_major)
                    counts = count_scan(spec)
                    variant = f"{block_v} {snapshot}, g {'head' if head_major else 'token'}-major"
                    yield Row("opt", arch, variant, spec, counts, scan_bars(spec, counts))


def vk_rows(archs: Sequence[str]) -> Iterator[Row]:
    """K5 `vk`."""
    for block_v in BLOCKS if "gfx950" in archs else ():
        spec = vk_spec(block_v)
        yield Row("vk", "gfx950", f"{block_v} bf16, g token-major", spec, count_scan(spec), [])


def prepare_rows(archs: Sequence[str]) -> Iterator[Row]:
    """Fused prepare; g and beta token-major, as the model of the block gives them."""
    for arch in archs:
        for variant in ("wave", "group"):
            spec = prepare_spec(arch, variant)
            counts = count_prepare(spec)
            yield Row("prepare", arch, variant, spec, counts, prepare_bars(spec, counts))


def route_rows(archs: Sequence[str]) -> Iterator[Row]:
    """The kernels of the T' route; bars for whole heads per workgroup."""
    for arch in archs:
        prepare = count_prepare(prepare_t_spec(arch))
        yield Row("prepare_t", arch, "wave", prepare_t_spec(arch), prepare, [])
        for block_v in (64, 128):
            for snapshot in SNAPSHOTS:
                spec = vsplit_spec(arch, block_v, snapshot)
                counts = count_scan(spec)
                bars = route_bars(arch, snapshot, prepare, counts) if block_v == 128 else []
                yield Row("vsplit", arch, f"{block_v} {snapshot}", spec, counts, bars)


KERNELS = {"opt": scan_rows, "vk": vk_rows, "prepare": prepare_rows, "tprime": route_rows}


def line(cells: Iterable[object]) -> str:
    """A row of a table."""
    return f"| {PIPE.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table whose first two columns are text."""
    return [line(head), line(["---", "---"] + ["--:"] * (len(head) - 2)), *map(line, rows)]


def share(got: float, of: float) -> str:
    """A part as a percentage."""
    return f"{100 * got / of:.0f} %"


def number(value: float) -> str:
    """Whole where it is whole."""
    return f"{value:g}" if value == int(value) else f"{value:.1f}"


def ratio(got: float, least: float) -> str:
    """What was taken over the least."""
    return f"{number(got)}/{number(least)}"


def public_keys(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """The public kernel's rows that belong to ours."""
    return [key for key in SCANS if any(row.arch == key[0] for row in rows)]


def instructions(rows: Sequence[Row]) -> list[str]:
    """Wave-instructions by class, ours under the public kernel's."""
    names = [name for name in CLASSES if name != "scalar load"]
    body: list[list[object]] = []
    for arch, block_v, snapshot in public_keys(rows):
        public = SCANS[arch, block_v, snapshot]
        classes = [public.classes.get(name, 0) for name in names]
        body.append([arch, f"{block_v} {snapshot}, public", public.instructions, "", "", *classes])

        def cells(row: Row, public: PublicScan = public) -> list[object]:
            bar = row.bars[0]
            part = f"{share(bar.got, public.instructions)}{'' if bar.ok else ' (missed)'}"
            total, limit = f"**{number(bar.got)}**", share(bar.limit, public.instructions)
            return [total, part, limit, *(number(row.counts.classes[name]) for name in names)]

        body += ours(matching(rows, arch, block_v, snapshot), cells)
    return table(["arch", "BV, snapshot", "instructions", "of public", "bar", *names], body)


def ours(rows: Sequence[Row], cells: Callable[[Row], list[object]]) -> list[list[object]]:
    """Rows of a table; one for both layouts of g if they do not differ."""
    found = [(row, cells(row)) for row in rows]
    if len(found) == 2 and found[0][1] == found[1][1]:
        row, values = found[0]
        return [[row.arch, row.variant.split(",")[0], *values]]
    return [[row.arch, row.variant, *values] for row, values in found]


def matching(rows: Sequence[Row], arch: str, block_v: int, snapshot: str) -> list[Row]:
    """Our rows of one row of the public kernel."""
    return [row for row in rows if row.arch == arch and row.variant.startswith(f"{block_v} {snapshot},")]


TENSORS = ("k load", "w load", "u load", "v_new store", "h store", "g load")


def memory(rows: Sequence[Row]) -> list[str]:
    """Requests and LDS cycles over the least."""
    body: list[list[object]] = []
    for arch, block_v, snapshot in public_keys(rows):
        public = SCANS[arch, block_v, snapshot]
        requests = [f"{lines64}; {lines128}" for lines64, lines128 in map(public.requests.__getitem__, TENSORS)]
        lds = ratio(public.lds_read[0] + public.lds_write[0], public.lds_read[1] + public.lds_write[1])
        body.append([arch, f"{block_v} {snapshot}, public", *requests, lds, public.matrix_cycles])

        def cells(row: Row) -> list[object]:
            c = row.counts
            own = [c.requests[name] for name in TENSORS]
            requests = [f"{ratio(r.lines64, r.tile64)}; {ratio(r.lines128, r.tile128)}" for r in own]
            return [*requests, ratio(c.lds_cycles, c.lds_read[1] + c.lds_write[1]), number(c.matrix_cycles)]

        body += ours(matching(rows, arch, block_v, snapshot), cells)
    return table(["arch", "BV, snapshot", *TENSORS, "LDS cycles", "MFMA cycles per SIMD"], body)


def resources(rows: Sequence[Row]) -> list[str]:
    """Registers, LDS, barriers and the model."""
    body: list[list[object]] = []
    for arch, block_v, snapshot in public_keys(rows):
        public = SCANS[arch, block_v, snapshot]
        barriers = public.classes["barrier"] // WAVES
        left = [public.vgprs, public.lds_bytes, "", barriers]
        body.append([arch, f"{block_v} {snapshot}, public", *left, public.cycles, "", public.slow or "", ""])

        def cells(row: Row, public: PublicScan = public) -> list[object]:
            c, r = row.counts, row.counts.resources
            bar = next(bar for bar in row.bars if bar.name == "model cycles")
            part = f"{share(c.cycles, public.cycles)}{'' if bar.ok else ' (missed)'}"
            left = [r.vgprs, r.lds_bytes, r.groups_per_cu, number(c.classes["barrier"] / WAVES)]
            return [*left, f"**{number(c.cycles)}**", part, number(c.slow), number(c.full)]

        body += ours(matching(rows, arch, block_v, snapshot), cells)
    head = ["VGPRs", "LDS bytes", "WG/CU", "barriers", "model", "of public", f"latency {SLOW_MEMORY}", "WG/CU together"]
    return table(["arch", "BV, snapshot", *head], body)


def where(rows: Sequence[Row]) -> list[str]:
    """Where the model's cycles go."""
    reasons = ("mfma queue", "mfma result", "vm wait", "lgkm wait", "barrier wait")
    body: list[list[object]] = []
    for row in rows:
        issue = sum(value for name, value in row.counts.where.items() if name not in (*reasons, "valu busy"))
        cells = [f"{row.counts.where[name]:.0f}" for name in reasons]
        body.append([row.arch, f"{row.kernel} {row.variant}", f"{issue:.0f}", *cells])
    return table(["arch", "kernel", "issue", *reasons], body)


def vk_table(rows: Sequence[Row]) -> list[str]:
    """K5 `vk`."""
    head = ["instructions", "LDS cycles", "MFMA cycles", "VGPRs", "LDS bytes", "WG/CU", "barriers", "model"]
    body: list[list[object]] = []
    for row in rows:
        c, r = row.counts, row.counts.resources
        lds = ratio(c.lds_cycles, c.lds_read[1] + c.lds_write[1])
        barriers = number(c.classes["barrier"] / WAVES)
        left = [number(c.instructions), lds, number(c.matrix_cycles), r.vgprs, r.lds_bytes, r.groups_per_cu]
        body.append([row.arch, row.variant, *left, barriers, number(c.cycles)])
    return table(["arch", "BV, snapshot", *head], body)


def prepare_table(rows: Sequence[Row]) -> list[str]:
    """Fused prepare per chunk and value head."""
    head = ["instructions", "of public", "bar", "longest wave", "barriers", "LDS cycles", "MFMA cycles per SIMD"]
    head += ["VGPRs", "LDS bytes", "WG/CU", "model, alone", "per chunk-head, WG/CU together"]
    body: list[list[object]] = []
    for arch, public in PREPARES.items():
        mine = [row for row in rows if row.arch == arch]
        if not mine:
            continue
        left = [public.instructions, "", "", "", public.barriers, ratio(*public.lds), public.matrix_cycles]
        full = number(round(public.full / public.groups))
        body.append([arch, "public", *left, public.vgprs, public.lds_bytes, public.groups, public.cycles, full])
        for row in mine:
            c, r, heads = row.counts, row.counts.resources, heads_of(row.spec)
            bar = row.bars[0]
            part = f"{share(bar.got, public.instructions)}{'' if bar.ok else ' (missed)'}"
            barriers = number(c.classes["barrier"] / WAVES)
            least = (c.lds_read[1] + c.lds_write[1]) / heads
            left = [f"**{number(bar.got)}**", part, share(bar.limit, public.instructions), number(c.longest_wave)]
            middle = [barriers, ratio(c.lds_cycles / heads, least), number(c.matrix_cycles / heads)]
            right = [r.vgprs, r.lds_bytes, r.groups_per_cu, number(c.cycles)]
            full = f"{c.full / (heads * r.groups_per_cu):.0f}"
            body.append([arch, row.variant, *left, *middle, *right, full])
    return table(["arch", "kernel", *head], body)


def route_table(staged: Sequence[Row], route: Sequence[Row]) -> list[str]:
    """K1..K5 with T' beside K1..K5 with w and u, prepare "wave" and `opt` with 64 columns, per chunk and value head."""
    head = ["instructions, K1..K4 + K5", "sum", "of w, u", "KB", "MFMA cycles", "LDS cycles", "VGPRs", "LDS bytes"]
    head += ["WG/CU", "barriers", "model, K1..K4 + K5", "sum", "of w, u", "one head per CU", "of w, u"]
    body: list[list[object]] = []
    for arch in ARCHS:
        for snapshot in SNAPSHOTS:
            of = ("wave", f"64 {snapshot}, g head-major")
            base = [row for row in staged if row.arch == arch and row.variant in of]
            new = [row for row in route if row.arch == arch]
            if not base or not new:
                continue
            scan, prepare = sorted(base, key=lambda row: row.kernel)
            pairs = [("w, u", prepare, scan)]
            pairs += [("T'", new[0], row) for row in new if row.variant.endswith(snapshot)]
            whole: list[float] = []
            for name, first, second in pairs:
                cells, sums = route_cells(first.counts, second.counts, second.spec.block_v)
                whole = whole or sums
                shares = [share(got, of) for got, of in zip(sums, whole, strict=True)]
                cells = [*cells[:2], shares[0], *cells[2:11], shares[1], cells[11], shares[2]]
                body.append([arch, f"{name}, {second.spec.block_v} {snapshot}", *cells])
    return table(["arch", "route, BV, snapshot", *head], body)


def route_cells(prepare: Counts, scan: Counts, block_v: int) -> tuple[list[object], list[float]]:
    """A row of ``route_table``, and its sums: instructions, cycles of full compute units, of one head on each."""
    parts, r = HEAD_DIM // block_v, scan.resources
    groups = r.groups_per_cu
    instructions = prepare.instructions / WAVES, parts * scan.instructions
    first = prepare.full / (WAVES * prepare.resources.groups_per_cu)
    full = first, parts * scan.full / groups
    # Workgroups of one head on a compute unit: all that fit, or one.
    alone = first + (scan.full * parts / groups if parts >= groups else scan.cycles)
    matrix = f"{number(prepare.matrix_cycles / WAVES)} + {number(parts * scan.matrix_cycles)}"
    lds = f"{number(prepare.lds_cycles / WAVES)} + {number(parts * scan.lds_cycles)}"
    cells: list[object] = [f"{number(instructions[0])} + {number(instructions[1])}", f"**{number(sum(instructions))}**"]
    cells += [number(route_bytes(prepare, scan, parts) / 1024), matrix, lds, r.vgprs, r.lds_bytes, groups]
    cells += [number(scan.classes["barrier"] / WAVES), f"{full[0]:.0f} + {full[1]:.0f}", f"**{sum(full):.0f}**"]
    return [*cells, f"{alone:.0f}"], [sum(instructions), sum(full), alone]


def verdict(rows: Sequence[Row]) -> list[str]:
    """What the bars say."""
    missed = [f"- {row.name}: {bar}" for row in rows for bar in row.bars if not bar.ok]
    count = sum(len(row.bars) for row in rows)
    return [f"{count - len(missed)} of {count} bars are met.", *(["", "Missed:", "", *missed] if missed else [])]


def page(rows: dict[str, list[Row]]) -> str:
    """The tables between the markers."""
    everything = [row for found in rows.values() for row in found]
    staged = [*rows["opt"], *rows["prepare"]]
    one_layout = [row for row in everything if row.kernel != "opt" or "head-major" in row.variant]
    parts = [
        ["### K5 `opt`: wave-instructions per workgroup and steady chunk", "", *instructions(rows["opt"])],
        ["### K5 `opt`: requests over the least, LDS cycles over the least", "", *memory(rows["opt"])],
        ["### K5 `opt`: registers, LDS, barriers, cycles of the model", "", *resources(rows["opt"])],
        ["### K5 `vk`", "", *vk_table(rows["vk"])],
        ["### Fused prepare, per chunk and value head", "", *prepare_table(rows["prepare"])],
        ["### T' in place of w and u, per chunk and value head", "", *route_table(staged, rows["tprime"])],
        ["### Where the model's cycles go (mean wave)", "", *where(one_layout)],
        ["### Bars", "", *verdict(everything)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def write_page(path: Path, text: str) -> None:
    """Replace what stands between the markers of ``path``."""
    pattern = r"(<!-- measured: counters -->\n).*?(<!-- end -->)"
    whole, count = re.subn(pattern, lambda m: f"{m[1]}{text}{m[2]}", path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{path}: got {count} places for the counters, expected 1")
    path.write_text(whole)


def facts() -> dict[str, str]:
    """Commit, command, versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "commit": commit.stdout.strip(),
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "flydsl": version("flydsl"),
        "triton": version("triton"),
        "note": "counted on the emulator; cycles are a model, nothing was measured on hardware",
    }


def main() -> int:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description="Counters of the AMD kernels on the emulator.")
    parser.add_argument("--arch", choices=ARCHS, action="append", help="one architecture; nothing is written then")
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="some kernels; nothing is written then")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[Row]] = {}
    for name, make in KERNELS.items():
        rows[name] = []
        for row in make(options.arch or ARCHS) if name in (options.kernel or KERNELS) else ():
            rows[name].append(row)
            bars = ", ".join(str(bar) for bar in row.bars if not bar.ok) or ("bars met" if row.bars else "no bars")
            cycles = f"{number(row.counts.instructions)} instructions, {number(row.counts.cycles)} cycles (model)"
            print(f"{row.name}: {cycles}; {bars}", flush=True)
    found = [row for group in rows.values() for row in group]
    if not (options.check or options.arch or options.kernel):
        write_page(PAGE, page(rows))
        RESULTS.parent.mkdir(exist_ok=True)
        content = {**facts(), "rows": [row.to_dict() for row in found]}
        RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    missed = any(not bar.ok for row in found for bar in row.bars)
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
