"""Launches of the kernels of ``triton_kernels`` with their inputs and expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import triton_kernels as kernels
from .compiled import Compiled, compile_kernel

NULL_SCRATCH = (0, 0)
"""Triton ends the arguments of every kernel with two scratch pointers, which these kernels do not use."""


@dataclass
class Case:
    """One launch: ``check`` gives the largest error of its outputs relative to the largest expected value."""

    compiled: Compiled
    grid: tuple[int, int, int]
    args: list[Any]
    check: Callable[[], float]
    tolerance: float

    def launch(self, code: bytes | None = None, **options: Any) -> Any:
        """Run ``code`` (default: the compiled one) in the emulator."""
        import cdna_emu

        compiled = self.compiled
        return cdna_emu.launch(
            compiled.elf if code is None else code,
            kernel=compiled.name,
            grid=self.grid,
            block=(compiled.threads, 1, 1),
            args=[*self.args, *NULL_SCRATCH],
            dynamic_lds=compiled.dynamic_lds,
            **options,
        )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected| in fp64; infinite if the actual values are not finite."""
    actual, expected = actual.double(), expected.double()
    if not actual.isfinite().all():
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())


def _normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def add(arch: str) -> Case:
    """The tail of the last block is masked."""
    x, y, out = _normal(1000), _normal(1000, seed=1), torch.zeros(1000)
    compiled = compile_kernel(
        kernels.add_kernel, arch, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 512}
    )
    return Case(compiled, (2, 1, 1), [x, y, out, 1000], lambda: relative_error(out, x + y), 0.0)


def softmax(arch: str) -> Case:
    x, out = _normal(6, 1000) * 3, torch.zeros(6, 1000)
    compiled = compile_kernel(
        kernels.softmax_kernel, arch, {"x": "*fp32", "out": "*fp32", "columns": "i32", "stride": "i32"}, {"BLOCK": 1024}
    )
    expected = x.double().softmax(1)
    return Case(compiled, (6, 1, 1), [x, out, 1000, 1000], lambda: relative_error(out, expected), 2e-6)


def layernorm(arch: str) -> Case:
    """bf16 in and out."""
    x, weight, bias = (
        _normal(*size, seed=k, dtype=torch.bfloat16) for k, size in enumerate(((5, 768), (768,), (768,)))
    )
    out = torch.zeros_like(x)
    signature = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    signature |= {"columns": "i32", "stride": "i32", "epsilon": "fp32"}
    compiled = compile_kernel(kernels.layernorm_kernel, arch, signature, {"BLOCK": 1024})
    expected = torch.nn.functional.layer_norm(x.double(), (768,), weight.double(), bias.double(), 1e-5)
    args = [x, weight, bias, out, 768, 768, 1e-5]
    return Case(compiled, (5, 1, 1), args, lambda: relative_error(out, expected), 2**-8)


def cumsum(arch: str) -> Case:
    x, out = _normal(64, 32), torch.zeros(64, 32)
    compiled = compile_kernel(kernels.cumsum_kernel, arch, {"x": "*fp32", "out": "*fp32"}, {"ROWS": 64, "COLUMNS": 32})
    expected = x.double().cumsum(1).cumsum(0)
    return Case(compiled, (1, 1, 1), [x, out], lambda: relative_error(out, expected), 2e-6)


def transcendental(arch: str) -> Case:
    x, out = _normal(256).abs() * 4 + 0.01, torch.zeros(6, 256)
    compiled = compile_kernel(kernels.transcendental_kernel, arch, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 256})
    functions = (torch.exp, torch.log, torch.sin, torch.cos, torch.sqrt, torch.reciprocal)

    def error() -> float:
        return max(relative_error(row, function(x.double())) for row, function in zip(out, functions, strict=True))

    return Case(compiled, (1, 1, 1), [x, out], error, 2e-6)


FLOAT8 = {
    ("fp8", "gfx942"): ("fp8e4b8", torch.float8_e4m3fnuz),
    ("bf8", "gfx942"): ("fp8e5b16", torch.float8_e5m2fnuz),
    ("fp8", "gfx950"): ("fp8e4nv", torch.float8_e4m3fn),
    ("bf8", "gfx950"): ("fp8e5", torch.float8_e5m2),
}
"""Triton's and torch's type of each 8-bit float of an architecture."""

ELEMENT = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "xf32": torch.float32, "i8": torch.int8}
TRITON_ELEMENT = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "xf32": "fp32", "i8": "i8"}


def matmul(
    arch: str,
    element: str,
    tile: int,
    split_k: int = 1,
    ragged: bool = True,
    buffers: bool = False,
    **options: Any,
) -> Case:
    """[80, 150] x [150, 72] in blocks of 64, or whole blocks if not ``ragged``; ``tile`` is the M and N of the MFMA."""
    triton_name, dtype = FLOAT8.get((element, arch)) or (TRITON_ELEMENT[element], ELEMENT[element])
    m, n, k = (80, 72, 150) if ragged else (64, 64, 128)
    if element == "i8":
        a, b = ((_normal(*size, seed=s) * 40).clamp(-128, 127).to(dtype) for s, size in enumerate(((m, k), (k, n))))
    else:
        a, b = _normal(m, k, seed=0).to(dtype), _normal(k, n, seed=1).to(dtype)
    c = torch.zeros(m, n, dtype=torch.int32 if element == "i8" else torch.float32)
    signature = {"a": f"*{triton_name}", "b": f"*{triton_name}", "c": "*i32" if element == "i8" else "*fp32"}
    signature |= dict.fromkeys("MNK", "i32")
    constants = {"BM": 64, "BN": 64, "BK": 64, "SPLIT_K": split_k, "PRECISION": "tf32" if element == "xf32" else "ieee"}
    small = (0, 1, 2) if buffers else ()
    compiled = compile_kernel(
        kernels.matmul_kernel, arch, signature, constants, small=small, matrix_instr_nonkdim=tile, **options
    )
    expected = a.double() @ b.double()
    grid = (-(-m // 64), -(-n // 64), split_k)
    tolerance = {"i8": 0.0, "xf32": 2e-3}.get(element, 2e-6)
    return Case(compiled, grid, [a, b, c, m, n, k], lambda: relative_error(c, expected), tolerance)


def _matmul(element: str, tile: int, **options: Any) -> Callable[[str], Case]:
    return lambda arch: matmul(arch, element, tile, **options)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def _micro(kind: str, *size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Values of a microscaling format as bytes, fp4 in pairs along the last dimension, low half first; and as fp64."""
    bits = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if kind == "e2m1":
        nibbles = torch.stack([bits & 15, bits >> 4], -1).flatten(-2)
        return bits, FP4[nibbles.long()]
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    bits = _normal(*size, seed=seed).to(dtype)
    return bits.view(torch.uint8), bits.double()


def scaled_matmul(arch: str, kind_a: str, kind_b: str, tile: int) -> Case:
    """[64, 256] x [256, 32] of the OCP microscaling formats: a scale of its own for 32 values along k."""
    m, n, k = 64, 32, 256
    a, left = _micro(kind_a, m, k // 2 if kind_a == "e2m1" else k, seed=0)
    b, right = _micro(kind_b, n, k // 2 if kind_b == "e2m1" else k, seed=1)
    b = b.t().contiguous()
    scales = [
        torch.randint(120, 134, (rows, k // 32), generator=torch.Generator().manual_seed(rows), dtype=torch.uint8)
        for rows in (m, n)
    ]
    left, right = (
        x * torch.exp2(s.double() - 127).repeat_interleave(32, 1) for x, s in zip((left, right), scales, strict=True)
    )
    c = torch.zeros(m, n)
    signature = {"a": "*u8", "a_scale": "*u8", "b": "*u8", "b_scale": "*u8", "c": "*fp32"}
    for name, kind in (("a", kind_a), ("b", kind_b)):
        signature[name] = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "e2m1": "*u8"}[kind]
    constants = {"M": m, "N": n, "K": k, "TYPE_A": kind_a, "TYPE_B": kind_b}
    compiled = compile_kernel(kernels.scaled_matmul_kernel, arch, signature, constants, matrix_instr_nonkdim=tile)
    expected = left @ right.t()
    return Case(compiled, (1, 1, 1), [a, scales[0], b, scales[1], c], lambda: relative_error(c, expected), 2e-6)


def _scaled(kind_a: str, kind_b: str, tile: int) -> Callable[[str], Case]:
    return lambda arch: scaled_matmul(arch, kind_a, kind_b, tile)


CASES: dict[str, Callable[[str], Case]] = {
    "add": add,
    "softmax": softmax,
    "layernorm": layernorm,
    "cumsum": cumsum,
    "transcendental": transcendental,
    **{
        f"matmul-{element}-{tile}": _matmul(element, tile)
        for element in ("bf16", "f16", "fp8", "bf8", "i8", "f32")
        for tile in (16, 32)
    },
    "matmul-xf32-16": _matmul("xf32", 16),
    "matmul-bf16-16-buffers": _matmul("bf16", 16, buffers=True),
    "matmul-f16-32-split-k": _matmul("f16", 32, split_k=2),
    "matmul-f16-16-split-k-buffers": _matmul("f16", 16, split_k=2, buffers=True),
    **{
        f"scaled-matmul-{a}-{b}-{tile}": _scaled(a, b, tile)
        for a, b in (("e4m3", "e4m3"), ("e4m3", "e2m1"), ("e2m1", "e2m1"), ("e5m2", "e4m3"))
        for tile in (16, 32)
    },
}
"""Name of each launch -> the function that makes it for an architecture."""

SKIP = {("matmul-xf32-16", "gfx950"): "gfx950 has no xf32"}
SKIP |= {(name, "gfx942"): "gfx942 has no scaled MFMA" for name in CASES if name.startswith("scaled-")}
