"""Proof by injection: a kernel with one barrier or one wait less must not pass in silence."""

from __future__ import annotations

import pytest
from kernels.compiled import ARCHS
from kernels.injection import TRIALS, removals
from kernels.triton_cases import CASES, SKIP
from kernels.waits import unmet_needs

import cdna_emu

NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "state_scan" else name for name in TRIALS]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_harmful_removal_is_reported(name: str, arch: str) -> None:
    done = list(removals(TRIALS[name](arch)))
    assert any(r.text.startswith("s_barrier") for r in done)
    assert any(r.text.startswith("s_waitcnt") for r in done)
    silent = [r for r in done if r.harmful and not r.reported]
    assert not silent, silent


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TRIALS)
def test_nothing_is_reported_of_the_kernel_as_it_is(name: str, arch: str) -> None:
    trial = TRIALS[name](arch)
    result, _ = trial.run(trial.compiled.elf, {})
    assert result.report.ok, str(result.report)


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_code_lacks_no_wait(arch: str) -> None:
    """The analysis that says which waits are needed finds nothing in what the compiler wrote."""
    for name, make in CASES.items():
        if (name, arch) not in SKIP:
            kernel = cdna_emu.CodeObject.parse(make(arch).compiled.elf).kernel(None)
            assert unmet_needs(kernel.instructions) == [], name
