"""Write the measured tables of docs/emulator.md: ``python -m kernels.report FILE`` from the folder of the tests.

Everything between the lines ``<!-- measured: NAME -->`` and ``<!-- end -->`` of FILE is replaced; NAMEs behind FILE
choose some of the tables.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cdna_emu
from gdn_runtime import env
from gdn_runtime.codeobject.emulate import memory_range
from gdn_runtime.codeobject.launch import Launcher, LoadedKernel
from gdn_runtime.codeobject.stages.backend import CodeObjectStages
from gdn_runtime.reference import recurrent_gated_delta_rule
from gdn_runtime.testing import make_inputs, rel_l2
from gdn_testing import code_object_specs, problem_of, run_stages

from .compiled import ARCHS
from .gdn import Device, Launched, run_block
from .injection import TRIALS, Removal, removals
from .triton_cases import CASES, SKIP

SECONDS = 0.25
"""User CPU time of one measurement of a rate."""
TRIES = 3
"""Measurements of a rate; the best counts: what other programs do to caches and clocks only slows it."""


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


def user_seconds() -> float:
    """User CPU time of this process: it does not run while other programs do."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def rate(launch: Callable[..., Any], **options: Any) -> float:
    """Millions of wave-instructions per second of user CPU time on one thread, decoding left out."""
    launch(threads=1, **options)
    best = 0.0
    for _ in range(TRIES):
        executed, start = 0, user_seconds()
        while user_seconds() - start < SECONDS:
            executed += launch(threads=1, **options).counters.executed
        best = max(best, executed / (user_seconds() - start) / 1e6)
    return best


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


class _Recorder(Launcher):
    """Runs kernels, and keeps what runs each of them again: (symbol, result, launch)."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self.runs: list[tuple[str, Any, Callable[..., Any]]] = []

    def _load(self, code: Any) -> LoadedKernel:
        return _Recorded(code, self.runs)


class _Recorded(LoadedKernel):
    def __init__(self, code: Any, runs: list[tuple[str, Any, Callable[..., Any]]]) -> None:
        super().__init__(code)
        self.parsed, self.runs = cdna_emu.CodeObject.parse(code.elf), runs

    def launch(self, grid: Any, kernarg: bytes, args: Any) -> None:
        facts = self.code.facts
        ranges = [memory_range(x) for x in args if isinstance(x, torch.Tensor) and x.numel()]

        def again(**options: Any) -> Any:
            return cdna_emu.launch(
                self.parsed,
                grid=grid,
                block=facts.block,
                kernarg=kernarg,
                ranges=ranges,
                dynamic_lds=facts.dynamic_lds,
                **options,
            )

        self.runs.append((facts.symbol, again(), again))


def code_object_rows(arch: str) -> Iterator[Row]:
    """The block by gdn-runtime's own AMD code objects: fused prepare, K5 `opt`, and Triton's K6."""
    inputs = make_inputs([70, 0, 64, 1], 2, 1, state="random")
    launcher = _Recorder(arch)
    problem = problem_of(inputs, arch=arch)
    with env.override(jit=True):
        done = run_stages(CodeObjectStages(lambda *_: launcher), inputs, specs=code_object_specs(problem))
    o, state = recurrent_gated_delta_rule(
        *inputs.tensors, initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens
    )
    rows = slice(0, inputs.num_tokens)
    errors = {1: f"{rel_l2(done.final_state, state):.1e}", 2: f"{rel_l2(done.o[:, rows], o[:, rows]):.1e}"}
    for number, (symbol, result, again) in enumerate(launcher.runs):
        rates = rate(again, checks=True), rate(again, checks=False)
        executed, findings = result.counters.executed, len(result.report)
        yield Row(f"gdn, AMD: {symbol}", arch, errors.get(number, ""), executed, *rates, findings)


def kernels_table() -> str:
    """Kernels x architectures."""
    lines = [
        "| kernel | arch | error | wave-instructions | checks on | checks off | findings |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for arch in ARCHS:
        lines.extend(map(str, (*case_rows(arch), *gdn_rows(arch), *code_object_rows(arch))))
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


def main(path: Path, names: list[str]) -> None:
    """Replace the tables of ``path`` that ``names`` name, all of them if there are none."""
    text = path.read_text()
    for name in names or TABLES:
        table = TABLES[name]
        pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{path}: got {count} places for the table {name!r}, expected 1")
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
