"""The stage functions of a backend, imported when a call first needs them.

The serving path must not import kernels/, triton, flydsl or the emulator before a call asks for them, so modules are
named as text.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from ..plan import ChunkPlan
from ..select import Selection
from ..spec import (
    CODE_OBJECT_BACKENDS,
    Backend,
    FusedPrepareSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputSpec,
    PrepareSpec,
    StateScanSpec,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from .states import StateArguments

_WHERE: dict[Backend, str] = {
    "reference": "gdn_runtime.reference",
    "triton": "gdn_runtime.kernels.triton.backend",
    "flydsl": "gdn_runtime.codeobject.stages.backend:FLYDSL",
    "emulate": "gdn_runtime.codeobject.stages.backend:EMULATE",
}
"""Module of each backend, or the object in it that has the stage functions."""


class Stages(Protocol):
    """What every backend implements. Outputs are preallocated; rows outside the sequences are neither read nor written.
    ``spec`` is what selection chose for the stage; it agrees with the other arguments.

    Shapes: q, k [B,T,Hg,128]; v, o [B,T,H,128]; g (raw, natural log), beta [B,T,H]; w, u, v_new [B,H,T,128]; g_cumsum
    [B,H,T] fp32; h dense [B,NT,H,128,128], varlen [1,total_chunks,H,128,128]; states [N or slots,H,128,128].
    """

    def l2norm(self, q: Tensor, k: Tensor, *, q_out: Tensor, k_out: Tensor, spec: L2NormSpec) -> None:
        """x * rsqrt(sum(x^2) + 1e-6) over the last dimension, in fp32, rounded to x.dtype."""

    def prepare(
        self,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        w: Tensor,
        u: Tensor,
        g_cumsum: Tensor,
        plan: ChunkPlan,
        use_exp2: bool,
        spec: PrepareSpec | FusedPrepareSpec,
    ) -> None:
        """K1..K4."""

    def state_scan(
        self,
        k: Tensor,
        w: Tensor,
        u: Tensor,
        *,
        g: Tensor | None,
        gk: Tensor | None,
        h: Tensor,
        v_new: Tensor | None,
        initial_state: Tensor | None,
        final_state: Tensor | None,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
        plan: ChunkPlan,
        use_exp2: bool,
        g_head_major: bool,
        spec: StateScanSpec | OptStateScanSpec | VkStateScanSpec,
    ) -> None:
        """K5. ``v_new`` may be ``u`` and ``final_state`` may be ``initial_state``."""

    def output(
        self,
        q: Tensor,
        k: Tensor,
        v_new: Tensor,
        h: Tensor,
        g_cumsum: Tensor,
        *,
        o: Tensor,
        scale: float,
        plan: ChunkPlan,
        use_exp2: bool,
        spec: OutputSpec,
    ) -> None:
        """K6."""


class TPrimeStages(Stages, Protocol):
    """What backends that launch code objects implement besides: K1..K5 with T' in place of w and u, for large grids.

    t [chunks, H, T_ELEMENTS] of the dtype of k: T' = (I + A)^-1 diag(beta) of each chunk, rows of a dense batch one
    after the other, its tiles in the order that the kernels agree on.
    """

    def prepare_t(
        self,
        k: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        t: Tensor,
        g_cumsum: Tensor,
        plan: ChunkPlan,
        use_exp2: bool,
        spec: TPrepareSpec,
    ) -> None:
        """K1..K4 but for the products with v and k."""

    def state_scan_vsplit(
        self,
        k: Tensor,
        v: Tensor,
        t: Tensor,
        *,
        g: Tensor,
        h: Tensor,
        v_new: Tensor,
        initial_state: Tensor | None,
        final_state: Tensor | None,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
        plan: ChunkPlan,
        use_exp2: bool,
        spec: VSplitScanSpec,
    ) -> None:
        """The rest of K4, and K5. g [B,H,T]; ``final_state`` may be ``initial_state``."""


@functools.cache
def stages(name: Backend) -> Stages:
    """The stage functions of backend ``name``. ImportError passes through: ``select`` has checked what it can."""
    module, _, attribute = _WHERE[name].partition(":")
    found: Any = importlib.import_module(module)
    return cast(Stages, attrgetter(attribute)(found) if attribute else found)


def tprime_stages(name: Backend) -> TPrimeStages:
    """``stages`` of a backend that launches code objects."""
    assert name in CODE_OBJECT_BACKENDS
    return cast(TPrimeStages, stages(name))


Launch: TypeAlias = Callable[..., None]
"""launch(plan, k, w, u, g, gk, h, v_new, initial_state, final_state, state_indices, has_initial_state)"""


def bind_state_scan(
    name: Backend, spec: OptStateScanSpec | VkStateScanSpec, plan: ChunkPlan, k: Tensor, states: StateArguments
) -> Launch:
    """K5 on a backend that launches code objects, for calls over ``plan`` like this one: shapes, strides, dtypes."""
    assert name in CODE_OBJECT_BACKENDS
    backend: Any = stages(name)
    if states.in_place:
        final_stride = backend.slot_bytes(states.initial_state)
    else:
        final_stride = backend.new_state_stride(spec) if states.store_final else 0
    bound: Launch = backend.bind_state_scan(
        plan,
        k,
        initial_state=states.initial_state,
        final_stride=final_stride,
        state_indices=states.indices,
        spec=spec,
    )
    return bound


@functools.cache
def fast_prefill() -> Callable[..., None]:
    """The fast path of the block, ``kernels.gluon.prefill.prefill``."""
    found: Callable[..., None] = importlib.import_module("gdn_runtime.kernels.gluon.prefill").prefill
    return found


def make_ready(selection: Selection, device: torch.device, *stage_names: str) -> None:
    """Have the code objects of the named stages (fields of ``selection``) loaded, before anything is allocated.

    Nothing to do for backends that compile at a launch. Raises MissingCodeObjectError where there is none and none may
    be compiled, CompileError and HipError as the compiler and the driver.
    """
    for stage in stage_names:
        backend = selection.prepare_backend if stage == "prepare" else selection.backend
        if backend in CODE_OBJECT_BACKENDS:
            cast(Any, stages(backend)).ready(device, getattr(selection, stage))
