"""Architectures: their facts, and which one a device has. Nothing here ever guesses one.

Sources of the numbers: AMD "CDNA 3" and "CDNA 4" instruction set references (LDS size, MFMA shapes, fp8 formats) and
the MI300X / MI355X data sheets (compute units); CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability" (shared memory per block, fp8), and the A100, H100 and B200 data sheets (SMs).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from .errors import UnsupportedError, type_error

Vendor = Literal["amd", "nvidia", "cpu"]
Fp8 = Literal["fn", "fnuz"]


@dataclass(frozen=True)
class ArchFacts:
    """Facts of one architecture that selection and legality use.

    ``name`` is gfx942, sm90, cpu, ...; ``lds_bytes`` the most LDS / shared memory one workgroup may hold (0: none);
    ``fp8`` the E4M3 flavour of its matrix instructions (None: it has none); ``mfma_bf16_16x16x32`` whether it has that
    instruction. ``nominal_compute_units`` is the CU / SM count of the usual part (gfx942: MI300X, gfx950: MI355X, sm80:
    A100, sm90: H100 SXM, sm100: B200), for planning without a device; parts differ, so where there is a device ask
    ``compute_units``.
    """

    name: str
    vendor: Vendor
    lds_bytes: int
    fp8: Fp8 | None
    mfma_bf16_16x16x32: bool
    nominal_compute_units: int | None


KNOWN: dict[str, ArchFacts] = {
    facts.name: facts
    for facts in (
        ArchFacts("gfx942", "amd", 64 * 1024, "fnuz", False, 304),
        ArchFacts("gfx950", "amd", 160 * 1024, "fn", True, 256),
        ArchFacts("sm80", "nvidia", 163 * 1024, None, False, 108),
        ArchFacts("sm90", "nvidia", 227 * 1024, "fn", False, 132),
        ArchFacts("sm100", "nvidia", 227 * 1024, "fn", False, 148),
        ArchFacts("sm120", "nvidia", 99 * 1024, "fn", False, None),
        ArchFacts("cpu", "cpu", 0, None, False, None),
    )
}
"""Every architecture that gdn-runtime knows, by name."""


def parse_arch(text: str, *, name: str = "arch") -> ArchFacts:
    """Facts of a name such as "gfx950", "gfx950:sramecc+:xnack-" or "sm90".

    Features after a colon do not change what the kernels use and are dropped. Raises UnsupportedError, which calls the
    input ``name`` and lists the known architectures, TypeError for anything but text.
    """
    if not isinstance(text, str):
        raise type_error(name, type(text).__name__, "str")
    facts = KNOWN.get(text.strip().split(":")[0].lower())
    if facts is None:
        raise UnsupportedError(name, got=repr(text), supported=KNOWN)
    return facts


def arch_of(device: torch.device) -> ArchFacts:
    """Facts of the architecture of ``device``, asked from the driver once per device.

    Raises UnsupportedError for a device type other than cpu and cuda, for an architecture that is not in ``KNOWN``, and
    where no driver answers.
    """
    if device.type == "cpu":
        return KNOWN["cpu"]
    return _probe(device.type, _index(device))[0]


def compute_units(device: torch.device) -> int | None:
    """Compute units (AMD) or multiprocessors (NVIDIA) of ``device``; None for a CPU. Raises as ``arch_of``."""
    if device.type == "cpu":
        return None
    return _probe(device.type, _index(device))[1]


def _index(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0


@functools.cache
def _probe(device_type: str, index: int) -> tuple[ArchFacts, int]:
    if device_type != "cuda":
        raise UnsupportedError("device type", got=device_type, supported=["cpu", "cuda"])
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"architecture of cuda:{index}",
            got="no usable GPU driver",
            supported=["a visible GPU", f"GDN_ARCH set to one of {', '.join(KNOWN)}"],
        )
    properties = torch.cuda.get_device_properties(index)
    text = properties.gcnArchName if torch.version.hip else f"sm{properties.major}{properties.minor}"
    return parse_arch(text, name=f"architecture of cuda:{index}"), properties.multi_processor_count
