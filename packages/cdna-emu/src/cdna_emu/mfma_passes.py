"""How long the matrix unit of a SIMD is busy with one MFMA: passes of four cycles.

The numbers and their sources stand in ``core/ops_mfma.def``, the table that the core is compiled from.
"""

from __future__ import annotations

from cdna_emu import ops

CYCLES_PER_PASS = 4

PASSES = {
    name: {arch: op.passes[ops.ARCH_NUMBERS[arch]] for arch in ops.ARCHS if op.on(arch)}
    for name, op in ops.table().items()
    if op.unit == "MFMA"
}
"""Mnemonic to architecture to passes; the f8f6f4 forms with 6-bit and 4-bit inputs only."""


def mfma_passes(mnemonic: str, arch: str, *, cbsz: int = 0, blgp: int = 0) -> int:
    """Passes of one MFMA on "gfx942" or "gfx950".

    Args:
        mnemonic: as LLVM prints it, e.g. "v_mfma_f32_16x16x16_f16".
        cbsz, blgp: formats of A and B of the f8f6f4 forms (0 fp8, 1 bf8, 2 fp6, 3 bf6, 4 fp4); others ignore them.

    Raises ValueError if there is no such matrix instruction on that architecture.
    """
    by_arch = PASSES.get(mnemonic)
    if by_arch is None or arch not in by_arch:
        expected = f"one of {', '.join(by_arch)}" if by_arch else "a matrix instruction"
        raise ValueError(f"{'arch' if by_arch else 'mnemonic'}: got {mnemonic!r} on {arch!r}, expected {expected}")
    eight_bit = "f8f6f4" in mnemonic and (cbsz < 2 or blgp < 2)
    return by_arch[arch] * (2 if eight_bit else 1)


def mfma_cycles(mnemonic: str, arch: str, *, cbsz: int = 0, blgp: int = 0) -> int:
    """Cycles of one MFMA: ``CYCLES_PER_PASS`` for each of its ``mfma_passes``."""
    return CYCLES_PER_PASS * mfma_passes(mnemonic, arch, cbsz=cbsz, blgp=blgp)
