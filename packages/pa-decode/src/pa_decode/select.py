"""Which backend serves tensors on a device, and for which architecture. Nothing from a device but facts."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import cast

import torch

from gdn_runtime import env
from gdn_runtime.arch import KNOWN, ArchFacts, Fp8, arch_of, compute_units, parse_arch
from gdn_runtime.errors import UnsupportedError, type_error, value_error
from gdn_runtime.spec import AMD_ARCHS, BACKENDS, Backend

from .spec import FP8_ARCHS

FLAVOUR_ARCH: dict[Fp8, str] = {"fn": "gfx950", "fnuz": "gfx942"}
"""Whose plans the reference makes where no device and nobody names an architecture."""


@dataclass(frozen=True)
class Target:
    """``backend`` runs the kernels of ``arch``; ``compute_units`` are those of the device, or of the usual part where
    there is none. ``reason`` says why this backend."""

    backend: Backend
    arch: str
    compute_units: int
    reason: str


def choose_target(device: torch.device, backend: str = "auto", arch: str | None = None, *, fp8: Fp8) -> Target:
    """The target of a call on ``device`` with a cache of flavour ``fp8``.

    "auto" is GDN_BACKEND if that is set, else the reference on a CPU, Triton on NVIDIA and flydsl on AMD GPUs. ``arch``
    is for CPU tensors (None: GDN_ARCH, else, for the reference, an architecture of the flavour); a GPU has its own.

    UnsupportedError for a backend that does not run there and for another architecture than the device's; ValueError if
    nothing names the emulated one.
    """
    for name, value in (("backend", backend), ("arch", arch)):
        if not isinstance(value, str) and not (name == "arch" and value is None):
            raise type_error(name, type(value).__name__, "str")
    return _choose(device, backend, arch, fp8, env.settings())


@functools.lru_cache(maxsize=256)
def _choose(device: torch.device, asked: str, arch: str | None, fp8: Fp8, settings: env.Settings) -> Target:
    name = "backend"
    if asked == "auto" and settings.backend != "auto":
        asked, name = settings.backend, "GDN_BACKEND"
    reason = f'{name}="{asked}" was asked for'
    own = None if device.type == "cpu" else arch_of(device)
    if asked == "auto":
        asked = "reference" if own is None else "flydsl" if own.vendor == "amd" else "triton"
        reason = f"{asked} is the default on {device if own is None else own.name}"
    available = _backends(device, own)
    if available.get(asked) is not True:
        supported = [f"{name} ({'available' if why is True else why})" for name, why in available.items()]
        raise UnsupportedError(f"{name} on {device}", got=repr(asked), supported=supported)
    facts = _arch(asked, arch, own, fp8, settings.arch)
    units = None if own is None else compute_units(device)
    return Target(cast(Backend, asked), facts.name, units or facts.nominal_compute_units or 1, reason)


def _backends(device: torch.device, own: ArchFacts | None) -> dict[str, str | bool]:
    """True, or why a backend does not run on ``device``."""
    amd = " and ".join(AMD_ARCHS)
    on_nvidia = own is not None and own.vendor == "nvidia" and own.fp8 is not None
    found: dict[str, str | bool] = {
        "reference": True,
        "triton": on_nvidia or "not available: runs on NVIDIA GPUs with FP8",
        "flydsl": (own is not None and own.name in AMD_ARCHS) or f"not available: runs on {amd} GPUs",
        "emulate": own is None or f"not available: runs the code objects of {amd} on CPU tensors",
    }
    for name, package in (("triton", "triton"), ("emulate", "cdna_emu")):
        if found[name] is True and not _is_installed(package):
            found[name] = f"not available: the package {package.replace('_', '-')} is not installed"
    assert found.keys() == set(BACKENDS)
    return found


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def forget() -> None:
    """Look for packages again at the next call, for tests."""
    _choose.cache_clear()


def _arch(backend: str, arch: str | None, own: ArchFacts | None, fp8: Fp8, setting: str) -> ArchFacts:
    if own is not None and (backend != "reference" or own.fp8 is not None):
        if arch is not None and parse_arch(arch) != own:
            raise UnsupportedError("arch", got=repr(arch), supported=[f"{own.name}, that of the device"])
        return own
    text, name = (setting, "GDN_ARCH") if arch is None else (arch, "arch")
    if backend == "reference":
        facts = parse_arch(text, name=name) if text else KNOWN[FLAVOUR_ARCH[fp8]]
        if facts.fp8 is None:
            raise UnsupportedError(name, got=repr(text), supported=FP8_ARCHS)
        return facts
    if not text:
        raise value_error('arch with backend="emulate"', None, f"{' or '.join(AMD_ARCHS)} (or GDN_ARCH)")
    facts = parse_arch(text, name=name)
    if facts.name not in AMD_ARCHS:
        raise UnsupportedError(f'{name} with backend="emulate"', got=repr(text), supported=AMD_ARCHS)
    return facts
