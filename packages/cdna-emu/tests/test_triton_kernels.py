"""Code objects that Triton compiles for gfx942 and gfx950, run on the emulator and compared with fp64."""

from __future__ import annotations

import pytest
from kernels.compiled import ARCHS
from kernels.triton_cases import CASES, SKIP

LAUNCHES = [
    pytest.param(name, arch, id=f"{name}-{arch}") for arch in ARCHS for name in CASES if (name, arch) not in SKIP
]


@pytest.mark.parametrize(("name", "arch"), LAUNCHES)
def test_result_and_report(name: str, arch: str) -> None:
    case = CASES[name](arch)
    result = case.launch()
    assert result.report.ok, str(result.report)
    error = case.check()
    assert error <= case.tolerance, f"relative error {error:.3g}"


@pytest.mark.parametrize("order", ["reverse", "random"])
@pytest.mark.parametrize("name", ["softmax", "cumsum", "matmul-bf16-32"])
def test_wave_order_changes_nothing(name: str, order: str) -> None:
    """The waves of a block run in another order: same bits, no race."""
    first, second = CASES[name]("gfx950"), CASES[name]("gfx950")
    first.launch()
    result = second.launch(order=order, seed=3)
    assert result.report.ok, str(result.report)
    for a, b in zip(first.args, second.args, strict=True):
        assert not hasattr(a, "equal") or a.equal(b)
