"""Who is timed: the backends of gdn-runtime, and other libraries where they are installed.

Every adapter gives a call without arguments; what a server does once, for a forward pass or at load, happens outside of
it: metadata, transposed states, key heads repeated for libraries that want as many of them as value heads.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gdn_runtime import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd_h
from gdn_runtime.errors import CompileError, MissingCodeObjectError, UnsupportedError
from gdn_runtime.select import backends_for
from gdn_runtime.spec import HEAD_DIM

from .inputs import BlockInputs, ScanInputs, states
from .timing import Call

OWN = ("flydsl", "triton", "reference")
EMULATE = "emulate"
FOREIGN = ("aiter", "fla", "flashinfer")
NAMES = (*OWN, EMULATE, *FOREIGN)
ALIASES = {"hip": "aiter"}
"""The HIP kernels of K5 are aiter's."""
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Adapter:
    """How a library is called. ``block`` and ``scan`` raise UnsupportedError for what it does not have."""

    module: str
    block: Callable[[BlockInputs], Call]
    scan: Callable[[ScanInputs], Call]


def faults(name: str) -> tuple[type[Exception], ...]:
    """What ends the measurement of backend ``name`` and no other: calls that it does not have, kernels that cannot be
    had, memory that does not suffice, and of another library whatever its checks raise."""
    own = (UnsupportedError, MissingCodeObjectError, CompileError, ImportError, torch.cuda.OutOfMemoryError)
    theirs = (RuntimeError, ValueError, TypeError, AssertionError)  # NotImplementedError is a RuntimeError
    return (*own, *theirs) if name in FOREIGN else own


def default(device: torch.device) -> list[str]:
    """The backends that a bench times unless told otherwise: those of AMD and NVIDIA GPUs, or the reference."""
    usable = [each.name for each in backends_for(device) if each.available and each.name in ("flydsl", "triton")]
    return [*sorted(usable)] if device.type == "cuda" and usable else ["reference"]


def resolve(names: Sequence[str], device: torch.device) -> list[str]:
    """Full names, each once. Raises ValueError for an unknown one, and for one that is not usable here."""
    found = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    for name in found:
        if name not in NAMES:
            raise ValueError(f"backends: got {name!r}, expected some of {', '.join(NAMES)}")
        if name in FOREIGN:
            _require(name, device)
            continue
        on = torch.device("cpu") if name == EMULATE else device
        status = next(each for each in backends_for(on) if each.name == name)
        if not status.available:
            raise ValueError(f"backends: {name} cannot run here: {status.reason}")
    return found


def _require(name: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"backends: {name} needs a GPU")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"backends: {name} is not installed")
    try:
        importlib.import_module(ADAPTERS[name].module)
    except ImportError as error:
        raise ValueError(
            f"backends: {name} is installed, but {ADAPTERS[name].module} is not usable: {error}"
        ) from error


def block_call(name: str, inputs: BlockInputs) -> Call:
    """A warm call of the block by backend ``name``. Raises UnsupportedError if it has no such call."""
    call = ADAPTERS[name].block(inputs) if name in ADAPTERS else _own_block(name, inputs)
    return _renewing(inputs, call)


def scan_call(name: str, inputs: ScanInputs) -> Call:
    """The same of K5 alone."""
    call = ADAPTERS[name].scan(inputs) if name in ADAPTERS else _own_scan(name, inputs)
    return _renewing(inputs.block, call)


def _renewing(inputs: BlockInputs, call: Call) -> Call:
    if inputs.moved is None:
        return call

    def renewed() -> Any:
        inputs.renew()
        return call()

    return renewed


def _own_block(name: str, inputs: BlockInputs) -> Call:
    options = states(inputs)
    return lambda: chunk_gated_delta_rule(*inputs.x.tensors, backend=name, **options)


def _own_scan(name: str, inputs: ScanInputs) -> Call:
    options = states(inputs.block)
    k, w, u, g = inputs.block.x.k, inputs.w, inputs.u, inputs.g
    return lambda: chunk_gated_delta_rule_fwd_h(k, w, u, g, g_head_major=True, backend=name, **options)


# ------------------------------------------------------------------------------------------------ other libraries


def _refuse(library: str, inputs: BlockInputs, *, pool: bool = False, fp32_snapshots: bool = False) -> None:
    if inputs.indices is not None and not pool:
        raise UnsupportedError(f"states of {library}", got="a pool", supported=["dense states"])
    if inputs.snapshot_dtype == torch.float32 and not fp32_snapshots:
        raise UnsupportedError(f"snapshots of {library}", got="fp32", supported=["bf16"])


def _aiter_metadata(inputs: BlockInputs) -> Any:
    if inputs.metadata is None:
        return None
    module = importlib.import_module("aiter.ops.prefill_batch_metadata")
    return module.build_gated_delta_rule_prefill_metadata(list(inputs.x.seq_lens), cu_seqlens=inputs.x.cu_seqlens)


def _aiter_block(inputs: BlockInputs) -> Call:
    """The opt_vk pair with its HIP K5."""
    function = importlib.import_module("aiter.ops.triton.gated_delta_net").chunk_gated_delta_rule_opt_vk
    q, k, v, g, beta = inputs.x.tensors
    options = {**states(inputs), "prefill_metadata": _aiter_metadata(inputs), "use_chunk_hip": True}
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": SCALE, **_accepted("aiter", function, options)}
    return lambda: function(**given)


def _aiter_scan(inputs: ScanInputs) -> Call:
    function = importlib.import_module("aiter.ops.chunk_gated_delta_rule_fwd_h").chunk_gated_delta_rule_fwd_h_hip_fn
    options = {**states(inputs.block), "prefill_metadata": _aiter_metadata(inputs.block), "g_head_major": True}
    given = {"k": inputs.block.x.k, "w": inputs.w, "u": inputs.u, "g": inputs.g}
    given |= _accepted("aiter", function, options)
    return lambda: function(**given)


def _accepted(library: str, function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that an installed version takes. Raises UnsupportedError if it lacks one that is not None; bf16
    snapshots are what versions without a choice have."""
    known = inspect.signature(function).parameters
    lacking = {name: value for name, value in options.items() if name not in known and value is not None}
    if lacking.get("snapshot_dtype") == torch.bfloat16:
        del lacking["snapshot_dtype"]
    if lacking:
        raise UnsupportedError(f"arguments of the installed {library}", got=sorted(lacking), supported=list(known))
    return {name: value for name, value in options.items() if name in known}


def _fla_block(inputs: BlockInputs) -> Call:
    _refuse("fla", inputs)
    function = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v, g, beta = inputs.x.tensors
    repeats = v.shape[2] // q.shape[2]
    q, k = (each.repeat_interleave(repeats, dim=2) for each in (q, k))
    offsets = None if inputs.x.cu_seqlens is None else inputs.x.cu_seqlens.long()
    options = {
        "scale": SCALE,
        "initial_state": inputs.state.float().transpose(-1, -2).contiguous(),
        "output_final_state": inputs.case.final_state,
        "cu_seqlens": offsets,
    }
    if offsets is not None and "cu_seqlens_cpu" in inspect.signature(function).parameters:
        options["cu_seqlens_cpu"] = offsets.cpu()
    return lambda: function(q, k, v, g, beta, **options)


def _fla_scan(inputs: ScanInputs) -> Call:
    block = inputs.block
    _refuse("fla", block)
    function = importlib.import_module("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_fwd_h
    k = block.x.k.repeat_interleave(inputs.u.shape[1] // block.x.k.shape[2], dim=2)
    w, u = (each.transpose(1, 2).contiguous() for each in (inputs.w, inputs.u))
    options: dict[str, Any] = {
        # Theirs is in natural logarithms unless told otherwise.
        "g": None if inputs.g is None else (inputs.g.transpose(1, 2) * math.log(2)).contiguous(),
        "initial_state": block.state.float().transpose(-1, -2).contiguous(),
        "output_final_state": block.case.final_state,
        "cu_seqlens": None if block.x.cu_seqlens is None else block.x.cu_seqlens.long(),
    }
    return lambda: function(k, w, u, **options)


def _flashinfer_block(inputs: BlockInputs) -> Call:
    _refuse("flashinfer", inputs)
    function = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    x = inputs.x
    q, k, v, g, beta = (each.flatten(0, 1).contiguous() for each in x.tensors)
    offsets = x.cu_seqlens
    if offsets is None:
        offsets = torch.tensor([0, *x.seq_lens], device=q.device).cumsum(0).int()
    alpha, out = g.exp(), torch.empty_like(v)
    state = inputs.state.float().contiguous()
    final = torch.empty_like(state)
    options: dict[str, Any] = {"output": out, "output_state": final}
    if "max_seqlen" in inspect.signature(function).parameters:
        options["max_seqlen"] = max(x.seq_lens)
    return lambda: function(q, k, v, alpha, beta, SCALE, state, True, offsets, **options)


def _flashinfer_scan(inputs: ScanInputs) -> Call:
    raise UnsupportedError("K5 of flashinfer", got="K5 alone", supported=["the block"])


ADAPTERS: dict[str, Adapter] = {
    "aiter": Adapter("aiter.ops.triton.gated_delta_net", _aiter_block, _aiter_scan),
    "fla": Adapter("fla.ops.gated_delta_rule", _fla_block, _fla_scan),
    "flashinfer": Adapter("flashinfer.gdn_prefill", _flashinfer_block, _flashinfer_scan),
}
"""Signatures of aiter 2026-08, fla 0.6.0 and flashinfer 0.7.2."""
