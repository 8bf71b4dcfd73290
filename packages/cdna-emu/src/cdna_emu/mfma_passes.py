"""How long the matrix unit of a SIMD is busy with one MFMA: passes of four cycles.

gfx942: "Execution cycles" of the AMD Matrix Instruction Calculator (CDNA3), which are those of the CDNA3 ISA document.
gfx950: the scheduling model that AMD keeps in LLVM (SISchedule.td, SIDPGFX950FullSpeedModel); forms with twice the K
take the passes of the gfx942 form, f64 16x16x4 takes twice as many, and f8f6f4 twice as many when A or B is fp8 or bf8.
"""

from __future__ import annotations

CYCLES_PER_PASS = 4

_BOTH = ("gfx942", "gfx950")
_NEW = ("gfx950",)
_FP8 = ("fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8")


def _table() -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}

    def add(passes: int, archs: tuple[str, ...], *mnemonics: str) -> None:
        for mnemonic in mnemonics:
            table.setdefault(mnemonic, {}).update(dict.fromkeys(archs, passes))

    for kind, k in (("f32", 1), ("f16", 4), ("bf16", 4), ("i8", 4)):
        result = "i32" if kind == "i8" else "f32"
        add(16, _BOTH, f"v_mfma_{result}_32x32x{k}_2b_{kind}")
        add(8, _BOTH, f"v_mfma_{result}_16x16x{k}_4b_{kind}")
        add(2, _BOTH, f"v_mfma_{result}_4x4x{k}_16b_{kind}")
    add(16, _BOTH, "v_mfma_f32_32x32x2_f32")
    add(8, _BOTH, "v_mfma_f32_16x16x4_f32")
    add(8, ("gfx942",), "v_mfma_f32_32x32x4_xf32")
    add(4, ("gfx942",), "v_mfma_f32_16x16x8_xf32")
    add(4, _BOTH, "v_mfma_f64_4x4x4_4b_f64")
    add(8, ("gfx942",), "v_mfma_f64_16x16x4_f64")
    add(16, _NEW, "v_mfma_f64_16x16x4_f64")
    for kind in ("f16", "bf16"):
        add(8, _BOTH, f"v_mfma_f32_32x32x8_{kind}", f"v_smfmac_f32_32x32x16_{kind}")
        add(4, _BOTH, f"v_mfma_f32_16x16x16_{kind}", f"v_smfmac_f32_16x16x32_{kind}")
        add(8, _NEW, f"v_mfma_f32_32x32x16_{kind}", f"v_smfmac_f32_32x32x32_{kind}")
        add(4, _NEW, f"v_mfma_f32_16x16x32_{kind}", f"v_smfmac_f32_16x16x64_{kind}")
    add(8, _BOTH, "v_mfma_i32_32x32x16_i8", "v_smfmac_i32_32x32x32_i8")
    add(4, _BOTH, "v_mfma_i32_16x16x32_i8", "v_smfmac_i32_16x16x64_i8")
    add(8, _NEW, "v_mfma_i32_32x32x32_i8", "v_smfmac_i32_32x32x64_i8")
    add(4, _NEW, "v_mfma_i32_16x16x64_i8", "v_smfmac_i32_16x16x128_i8")
    for kinds in _FP8:
        add(8, _BOTH, f"v_mfma_f32_32x32x16_{kinds}", f"v_smfmac_f32_32x32x32_{kinds}")
        add(4, _BOTH, f"v_mfma_f32_16x16x32_{kinds}", f"v_smfmac_f32_16x16x64_{kinds}")
        add(8, _NEW, f"v_smfmac_f32_32x32x64_{kinds}")
        add(4, _NEW, f"v_smfmac_f32_16x16x128_{kinds}")
    for name in ("v_mfma_f32", "v_mfma_scale_f32"):  # fp6, bf6 and fp4
        add(8, _NEW, f"{name}_32x32x64_f8f6f4")
        add(4, _NEW, f"{name}_16x16x128_f8f6f4")
    return table


PASSES = _table()
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
