"""The stage functions of a backend, imported when a call first needs them.

The serving path must not import kernels/, triton or flydsl before a call asks for them, so modules are named as text.
"""

from __future__ import annotations

import functools
import importlib
from typing import Protocol, cast

from torch import Tensor

from ..plan import ChunkPlan
from ..spec import Backend, OutputConfig, PrepareConfig, StateScanConfig

_MODULES: dict[Backend, str] = {
    "reference": "gdn_runtime.reference",
    "triton": "gdn_runtime.kernels.triton.backend",
}


class Stages(Protocol):
    """What every backend implements. Outputs are preallocated; rows outside the sequences are neither read nor written.

    Shapes: q, k [B,T,Hg,128]; v, o [B,T,H,128]; g (raw, natural log), beta [B,T,H]; w, u, v_new [B,H,T,128]; g_cumsum
    [B,H,T] fp32; h dense [B,NT,H,128,128], varlen [1,total_chunks,H,128,128]; states [N or slots,H,128,128].
    """

    def l2norm(self, q: Tensor, k: Tensor, *, q_out: Tensor, k_out: Tensor) -> None:
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
        config: PrepareConfig,
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
        config: StateScanConfig,
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
        config: OutputConfig,
    ) -> None:
        """K6."""


@functools.cache
def stages(name: Backend) -> Stages:
    """The stage functions of backend ``name``. ImportError passes through: ``select`` has checked what it can."""
    return cast(Stages, importlib.import_module(_MODULES[name]))
