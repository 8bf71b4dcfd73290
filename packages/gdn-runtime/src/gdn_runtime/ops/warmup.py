"""Loading the code objects of bundles before the first call, for servers that capture graphs or mind their latency."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from .. import tables
from ..arch import parse_arch
from ..codeobject import source
from ..codeobject.bundle import Artifact, Bundle, bundles, read_bundles
from ..codeobject.facts import is_foreign, spec_text
from ..errors import UnsupportedError, type_error, value_error
from ..rules import (
    Problem,
    fused_prepare_spec,
    l2norm_spec,
    opt_rounding,
    opt_spec,
    output_config,
    output_spec,
    prepare_variant,
    tprime_block_v,
    tprime_prepare_spec,
    vsplit_spec,
)
from ..select import Request, target
from ..spec import AMD_ARCHS, Backend, KernelSpec
from ..tables import ScanRow
from .backends import stages

OWN = f"{__name__.partition('.')[0]}."


@dataclass(frozen=True)
class Warmup:
    """What ``warmup`` found loaded at its end: ``kernels`` for ``arch`` on ``device``, of ``code_bytes`` bytes."""

    arch: str
    device: str
    kernels: int
    code_bytes: int


def warmup(
    device: torch.device | str | None = None,
    *,
    arch: str | None = None,
    bundle: str | os.PathLike[str] | None = None,
    table: str | os.PathLike[str] | None = None,
) -> Warmup:
    """Read, verify and load every artifact of the bundles of an architecture, so that no later call has to.

    Artifacts of other packages (pa_decode) count if this process has imported the package.

    Args:
        device: the AMD GPU to load on, or the CPU, where the emulator is the launcher; None: the current GPU, else the
            CPU.
        arch: gfx942 or gfx950, for the CPU; None: GDN_ARCH. A GPU has its own.
        bundle: a folder with a manifest, or with one such folder per architecture; None: those in force (GDN_BUNDLE,
            else the packaged one). What is loaded from it serves later calls.
        table: a tuned table of gdn-runtime (file or folder): only its artifacts for the heads and the layout of the
            rows.

    Raises:
        MissingCodeObjectError: there is no bundle for the architecture, or none has what a row of ``table`` asks for.
        CorruptBundleError, IncompatibleBundleError: a bundle cannot be used; what was loaded before stays.
        UnsupportedError, ValueError, TypeError: another device or architecture; a table without rows; a path without a
            bundle; arguments of another kind.
        CaptureError: a stream is being captured. HipError: as the driver.
    """
    where = _device(device)
    backend: Backend = "emulate" if where.type == "cpu" else "flydsl"
    facts, _ = target(where, Request(backend=backend, arch=arch))
    if facts.name not in AMD_ARCHS:
        raise UnsupportedError(f"architecture of {where}", got=facts.name, supported=AMD_ARCHS)
    if arch is not None and parse_arch(arch) != facts:
        raise UnsupportedError(f"arch for {where}", got=repr(arch), supported=[facts.name])
    rows = None if table is None else _rows(_path("table", table))
    found = bundles(facts.name) if bundle is None else read_bundles([_path("bundle", bundle)], facts.name)
    if not found:
        raise source.missing("any kernel", facts.name, found)
    if rows is not None:
        _check_rows(rows, facts.name, found)
    launcher_for = cast(Any, stages(backend)).kernels.launcher_for
    count = size = 0
    for one, artifact in _artifacts(found, rows):
        code = source.code_of_artifact(one, artifact)
        launcher_for(code.spec, where).kernel(code.spec)
        count, size = count + 1, size + len(code.elf)
    return Warmup(facts.name, str(where), count, size)


def specs_of_row(row: ScanRow, arch: str) -> tuple[KernelSpec, ...]:
    """Specs of a call of the block that looks like ``row``, with the defaults of all that rows do not say, on ``arch``:
    l2norm, prepare, state scan, output."""
    key = row.key
    facts = parse_arch(arch)
    problem = Problem(
        arch=facts,
        compute_units=key.compute_units if key.arch == arch else facts.nominal_compute_units or 1,
        num_heads=key.num_heads,
        num_key_heads=key.num_key_heads,
        num_seqs=row.num_seqs or 1,
        total_chunks=key.total_chunks,
        max_seq_chunks=key.max_seq_chunks,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype=key.state_dtype,
        snapshot_dtype=key.snapshot_dtype,
        is_varlen=key.is_varlen,
        use_initial_state=key.use_initial_state,
        store_final_state=key.store_final_state,
    )
    rounding = opt_rounding(arch, block=True)
    prepare: KernelSpec = fused_prepare_spec(problem, prepare_variant(problem)[0])
    scan: KernelSpec = opt_spec(problem, row.block_v, rounding)
    vsplit, _ = tprime_block_v(problem)
    if vsplit is not None:
        prepare, scan = tprime_prepare_spec(problem), vsplit_spec(problem, vsplit, rounding)
    return l2norm_spec(problem), prepare, scan, output_spec(problem, output_config(problem)[0])


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise value_error("device", repr(device), "an AMD GPU or the CPU") from error
    if where.type == "cuda" and where.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # as the device of a tensor
    return where


def _path(name: str, value: str | os.PathLike[str]) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise type_error(name, type(value).__name__, "a path")
    return Path(value)


def _rows(path: Path) -> list[ScanRow]:
    rows = [found.row for found in tables.load([path]).rows()]
    if not rows:
        raise value_error("table", repr(str(path)), "a table of K5 with at least one row")
    return rows


def _check_rows(rows: list[ScanRow], arch: str, found: tuple[Bundle, ...]) -> None:
    for spec in dict.fromkeys(spec for row in rows for spec in specs_of_row(row, arch)):
        if not any(spec in bundle for bundle in found):
            raise source.missing(spec_text(spec), arch, found)


def _artifacts(found: tuple[Bundle, ...], rows: list[ScanRow] | None) -> list[tuple[Bundle, Artifact]]:
    """What to load: each key from the first bundle that has it."""
    shapes = None if rows is None else {(r.key.num_heads, r.key.num_key_heads, r.key.is_varlen) for r in rows}
    chosen: dict[str, tuple[Bundle, Artifact]] = {}
    for bundle in found:
        for key, artifact in bundle.artifacts.items():
            if not is_foreign(artifact.spec) and (shapes is None or any(_fits(artifact, *shape) for shape in shapes)):
                chosen.setdefault(key, (bundle, artifact))
    return list(chosen.values())


def _fits(artifact: Artifact, num_heads: int, num_key_heads: int, is_varlen: bool) -> bool:
    """Whether calls of the block with this shape may ask for the artifact. Not every spec has all of these fields."""
    shape = {"num_heads": num_heads, "num_key_heads": num_key_heads, "is_varlen": is_varlen}
    return str(artifact.spec.get("spec")).startswith(OWN) and all(
        artifact.spec.get(name, value) == value for name, value in shape.items()
    )
