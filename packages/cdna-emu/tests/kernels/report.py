"""Write the measured tables of docs/emulator.md: ``python -m kernels.report FILE`` from the folder of the tests.

Everything between the lines ``<!-- measured: NAME -->`` and ``<!-- end -->`` of FILE is replaced.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cdna_emu
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_testing import make_inputs, rel_l2

from .compiled import ARCHS
from .gdn import Device, Launched, run_block
from .injection import TRIALS, Removal, removals
from .triton_cases import CASES, SKIP

SECONDS = 0.25
"""Time per measured rate."""


@dataclass
class Row:
    """One kernel on one architecture; rates in millions of wave-instructions per second on one thread."""

    kernel: str
    arch: str
    error: str
    executed: int
    checked: float
    unchecked: float
    findings: int

    def __str__(self) -> str:
        rates = f"{self.checked:.1f} | {self.unchecked:.1f}"
        return f"| {self.kernel} | {self.arch} | {self.error} | {self.executed:,} | {rates} | {self.findings} |"


def rate(launch: Callable[..., Any], **options: Any) -> float:
    """Millions of wave-instructions per second of one thread, decoding left out."""
    launch(threads=1, **options)
    executed, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        executed += launch(threads=1, **options).counters.executed
    return executed / (time.perf_counter() - start) / 1e6


def case_rows(arch: str) -> Iterator[Row]:
    """The launches of ``triton_cases``."""
    for name, make in CASES.items():
        if (name, arch) in SKIP:
            continue
        case = make(arch)
        result = case.launch()
        error = case.check()
        code = cdna_emu.CodeObject.parse(case.compiled.elf)

        def launch(case: Any = case, code: Any = code, **options: Any) -> Any:
            return case.launch(code, **options)

        rates = rate(launch, checks=True), rate(launch, checks=False)
        yield Row(name, arch, f"{error:.1e}" if error else "0", result.counters.executed, *rates, len(result.report))


def gdn_rows(arch: str) -> Iterator[Row]:
    """Every launch of one packed batch, with the error of the block's output beside the last one."""
    inputs = make_inputs([70, 0, 64, 1], 2, 1, state="random")
    device = Device(arch)
    o, final_state = run_block(device, inputs, use_qk_l2norm=True)
    expected_o, expected_state = recurrent_gated_delta_rule(
        *inputs.tensors, initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens, use_qk_l2norm=True
    )
    errors = {
        "state_scan_kernel": f"{rel_l2(final_state, expected_state):.1e}",
        "output_kernel": f"{rel_l2(o, expected_o):.1e}",
    }
    for launched in device.launches:
        name = launched.compiled.name
        launch = _again(launched)
        rates = rate(launch, checks=True), rate(launch, checks=False)
        executed = launched.result.counters.executed
        yield Row(f"gdn: {name}", arch, errors.get(name, ""), executed, *rates, len(launched.result.report))


def _again(launched: Launched) -> Callable[..., Any]:
    code = cdna_emu.CodeObject.parse(launched.compiled.elf)
    # Outputs of the first run are inputs of a repetition where a kernel works in place: only its speed is of interest.
    args = [x.clone() if isinstance(x, torch.Tensor) else x for x in launched.args]

    def launch(**options: Any) -> Any:
        return cdna_emu.launch(
            code,
            grid=launched.grid,
            block=(launched.compiled.threads, 1, 1),
            args=args,
            dynamic_lds=launched.compiled.dynamic_lds,
            **options,
        )

    return launch


def kernels_table() -> str:
    """Kernels x architectures."""
    lines = [
        "| kernel | arch | error | wave-instructions | checks on | checks off | findings |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for arch in ARCHS:
        lines.extend(map(str, (*case_rows(arch), *gdn_rows(arch))))
    return "\n".join(lines)


def injection_table() -> str:
    """Removals per kernel and architecture, and the ones that nothing was reported of."""
    lines = [
        "| kernel | arch | barriers | reported | outputs changed | waits | reported |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    silent = [
        "",
        "Removals without a report:",
        "",
        "| kernel | arch | address | instruction | reason |",
        "|---|---|---|---|---|",
    ]
    for arch in ARCHS:
        for name, make in TRIALS.items():
            done = list(removals(make(arch)))
            barriers = [r for r in done if r.text.startswith("s_barrier")]
            waits = [r for r in done if not r.text.startswith("s_barrier")]
            lines.append(
                f"| {name} | {arch} | {len(barriers)} | {_reported(barriers)} | {sum(r.changed for r in barriers)} "
                f"| {len(waits)} | {_reported(waits)} |"
            )
            silent += [
                f"| {name} | {arch} | {r.address:#x} | `{r.text}` | {r.reason} |" for r in done if not r.reported
            ]
    return "\n".join(lines + silent)


def _reported(done: list[Removal]) -> int:
    return sum(r.reported for r in done)


TABLES = {"kernels": kernels_table, "injection": injection_table}


def main(path: Path) -> None:
    """Replace the tables of ``path``."""
    text = path.read_text()
    for name, table in TABLES.items():
        pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{path}: got {count} places for the table {name!r}, expected 1")
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
