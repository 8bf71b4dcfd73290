"""Calls that candidates run: inputs of a case, the stages of an op on outputs of its own, and what is right.

A reference backend in torch computes what the stages of an op must give from the same inputs; the bars are those of the
kernels' specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gdn_runtime import reference
from gdn_runtime.metadata import schedule_for
from gdn_runtime.ops.backends import Stages, fast_prefill
from gdn_runtime.plan import ChunkPlan
from gdn_runtime.rules import Problem
from gdn_runtime.spec import HEAD_DIM, T_ELEMENTS, TPrepareSpec, VSplitScanSpec
from gdn_runtime.testing import TORCH_DTYPE, Case, GdnInputs

from .candidates import Specs

Outputs = dict[str, Tensor]

BARS: dict[str, tuple[float, float, float]] = {
    "k5": (2e-2, 2e-2, 5e-3),
    "prepare": (5e-2, 0.0, 5e-3),
    "block": (2e-2, 2e-2, 5e-3),
    "pa": (5e-3, 5e-3, 5e-3),
}
"""Of each op: absolute and relative per element, and the mean of the absolute deviations."""
GATES = (1e-3, 1e-5, 1e-3)
"""The same of cumulated gates."""


def deviation(op: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest deviation of any output as a share of its bar: right iff it is at most 1. NaN and infinity in ``got`` are
    infinite."""
    worst = 0.0
    for name, right in expected.items():
        absolute, relative, mean = GATES if name == "g_cumsum" else BARS[op]
        # Piece by piece: in fp64 the largest outputs would not fit beside what is timed.
        pairs = zip(got[name].flatten(0, 1), right.flatten(0, 1), strict=True)
        total, count = 0.0, 0
        for a, b in pairs:
            if not bool(torch.isfinite(a).all()):
                return float("inf")
            gap = (a.float() - b.float()).abs()
            if gap.numel():
                worst = max(worst, float((gap / (absolute + relative * b.float().abs())).max()))
                total, count = total + float(gap.sum()), count + gap.numel()
        worst = max(worst, total / max(count, 1) / mean)
    return worst


class GdnWorkload:
    """Inputs of ``case`` on ``device``, for one op of the block, and buffers for what its stages hand on.

    ``run`` writes ``outputs()``: of k5 the snapshots, v_new and, where the case has them, final states; of prepare w, u
    and g_cumsum; of block o and final states.
    """

    def __init__(self, op: str, case: Case, problem: Problem, backend: Stages, device: torch.device) -> None:
        self.op, self.problem, self.backend = op, problem, backend
        self.x: GdnInputs = case.inputs(state="random", gate="weak", device=device)
        self.plan = self._plan()
        heads, tokens = problem.num_heads, self.x.k.shape[1]
        self.rows = self.x.k.shape[0], heads, tokens, HEAD_DIM
        wide: dict[str, Any] = {"dtype": self.x.k.dtype, "device": device}
        self.w, self.u = torch.empty(self.rows, **wide), torch.empty(self.rows, **wide)
        self.g_cumsum = torch.empty(self.rows[:3], device=device)
        self.t: Tensor | None = None
        if op != "prepare":
            self.h, self.v_new = self._snapshots(), torch.empty(self.rows, **wide)
        if op == "k5":
            self._prepare_by_reference(self.w, self.u, self.g_cumsum)

    def copy(self) -> GdnWorkload:
        """The same inputs and buffers in other memory, so that calls in turn outgrow a cache."""
        other = object.__new__(GdnWorkload)
        other.__dict__.update(self.__dict__)
        fields = {name: value.clone() for name, value in vars(self.x).items() if isinstance(value, Tensor)}
        other.x = self.x.with_(**(fields | {"cu_seqlens": self.x.cu_seqlens}))
        for name in ("w", "u", "g_cumsum", "h", "v_new", "t"):
            if isinstance(value := getattr(self, name, None), Tensor):
                setattr(other, name, value.clone())
        return other

    @property
    def bytes(self) -> int:
        """Of the inputs and buffers."""
        tensors = [*vars(self).values(), *vars(self.x).values()]
        return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))

    def outputs(self) -> Outputs:
        """Outputs that hold NaN."""
        if self.op == "prepare":
            found = {"w": torch.empty_like(self.w), "u": torch.empty_like(self.u)}
            found["g_cumsum"] = torch.empty_like(self.g_cumsum)
        elif self.op == "k5":
            found = {"h": torch.empty_like(self.h), "v_new": torch.empty_like(self.v_new)}
        else:
            found = {"o": torch.empty_like(self.x.v)}
        if self.op != "prepare" and self.problem.store_final_state:
            found["final_state"] = torch.empty_like(cast(Tensor, self.x.initial_state))
        for out in found.values():
            out.fill_(float("nan"))
        return found

    def expected(self) -> Outputs:
        """What is right."""
        found = self.outputs()
        if self.op == "prepare":
            self._prepare_by_reference(found["w"], found["u"], found["g_cumsum"])
        elif self.op == "k5":
            self._scan(reference, found, self.w, self.u, None)
        else:
            w, u, g = (torch.empty_like(each) for each in (self.w, self.u, self.g_cumsum))
            self._prepare_by_reference(w, u, g)
            results = {**found, "h": torch.empty_like(self.h), "v_new": torch.empty_like(u)}
            self._scan(reference, results, w, u, None, g)
            self._output(reference, results["v_new"], results["h"], g, found["o"], None)
        return found

    def run(self, specs: Specs, out: Outputs) -> None:
        """The kernels of ``specs``, on the current stream."""
        if self.op == "prepare":
            self._prepare(specs.prepare, out["w"], out["u"], out["g_cumsum"])
        elif self.op == "k5":
            self._scan(self.backend, out, self.w, self.u, specs.state_scan)
        elif specs.fast is not None:
            self._fast(specs.fast, out)
        else:
            self._stages(specs, out)

    def _stages(self, specs: Specs, out: Outputs) -> None:
        """Those stages of the block that ``specs`` has."""
        x, stages, common = self.x, cast(Any, self.backend), {"plan": self.plan, "use_exp2": True}
        results = {**out, "h": self.h, "v_new": self.v_new}
        if self.t is None and isinstance(specs.prepare or specs.state_scan, TPrepareSpec | VSplitScanSpec):
            self.t = x.v.new_zeros(self.plan.total_chunks, self.problem.num_heads, T_ELEMENTS)
        if isinstance(specs.prepare, TPrepareSpec):
            stages.prepare_t(x.k, x.g, x.beta, t=self.t, g_cumsum=self.g_cumsum, spec=specs.prepare, **common)
        elif specs.prepare is not None:
            self._prepare(specs.prepare, self.w, self.u, self.g_cumsum)
        if isinstance(specs.state_scan, VSplitScanSpec):
            states = self._states(results)
            stages.state_scan_vsplit(x.k, x.v, self.t, g=self.g_cumsum, spec=specs.state_scan, **states, **common)
        elif specs.state_scan is not None:
            self._scan(self.backend, results, self.w, self.u, specs.state_scan)
        if specs.output is not None:
            self._output(self.backend, self.v_new, self.h, self.g_cumsum, out["o"], specs.output)

    def _prepare(self, spec: Any, w: Tensor, u: Tensor, g_cumsum: Tensor) -> None:
        x = self.x
        self.backend.prepare(
            x.k, x.v, x.g, x.beta, w=w, u=u, g_cumsum=g_cumsum, plan=self.plan, use_exp2=True, spec=spec
        )

    def _prepare_by_reference(self, w: Tensor, u: Tensor, g_cumsum: Tensor) -> None:
        x = self.x
        reference.prepare(x.k, x.v, x.g, x.beta, w=w, u=u, g_cumsum=g_cumsum, plan=self.plan, use_exp2=True)

    def _scan(
        self, backend: Any, out: Outputs, w: Tensor, u: Tensor, spec: Any, g_cumsum: Tensor | None = None
    ) -> None:
        gates = self.g_cumsum if g_cumsum is None else g_cumsum
        backend.state_scan(
            self.x.k, w, u, g=gates if self.problem.use_g else None, gk=None, **self._states(out), plan=self.plan,
            use_exp2=True, g_head_major=True, spec=spec,
        )  # fmt: skip

    def _output(self, backend: Any, v_new: Tensor, h: Tensor, g_cumsum: Tensor, o: Tensor, spec: Any) -> None:
        backend.output(
            self.x.q, self.x.k, v_new, h, g_cumsum, o=o, scale=HEAD_DIM**-0.5, plan=self.plan, use_exp2=True, spec=spec
        )

    def _fast(self, spec: Any, out: Outputs) -> None:
        x, states = self.x, self._states({**out, "h": self.h, "v_new": self.v_new})
        del states["h"], states["v_new"]
        fast_prefill()(
            x.q, x.k, x.v, x.g, x.beta, o=out["o"], **states, scale=HEAD_DIM**-0.5, plan=self.plan, spec=spec
        )

    def _states(self, out: Outputs) -> dict[str, Any]:
        return {
            "h": out["h"],
            "v_new": out["v_new"],
            "initial_state": self.x.initial_state,
            "final_state": out.get("final_state"),
            "state_indices": None,
            "has_initial_state": None,
        }

    def _plan(self) -> ChunkPlan:
        tokens = self.x.k.shape[1]
        if self.x.cu_seqlens is None:
            return ChunkPlan.dense(self.x.num_seqs, tokens)
        return ChunkPlan.varlen(schedule_for(self.x.cu_seqlens, total_tokens=tokens), tokens)

    def _snapshots(self) -> Tensor:
        plan = self.plan
        lead = (1, plan.total_chunks) if plan.is_varlen else (plan.num_seqs, plan.max_seq_chunks)
        size = (*lead, self.problem.num_heads, HEAD_DIM, HEAD_DIM)
        return torch.empty(size, dtype=TORCH_DTYPE[self.problem.snapshot_dtype], device=self.x.k.device)
