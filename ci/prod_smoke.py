"""What production relies on, tried in a venv that holds the gdn-runtime wheel and torch only (`nox -s prod-smoke`).

The kernel languages, the packages above gdn-runtime and numpy are hidden from every import, installed or not; then one
variable-length prefill over a state pool is compared with the token recurrence, and the doctor is run.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = {"flydsl", "triton", "pa_decode", "gdn_aot", "gdn_tune", "cdna_emu", "numpy"}
SEQ_LENS = [5, 0, 64, 130, 1]
SLOTS = [3, 2, 0, -1, 6]  # -1: reads a zero state, writes none
POOL_SLOTS = 7
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 2, 4, 128
MAX_ERROR = 0.01
"""Largest RMS of the error over RMS of the result. The operands of every product are rounded to bf16 (2^-9 relative);
measured 0.0033."""


class Without:
    """A meta path finder that finds what ``finder`` finds, except the hidden packages, as if not installed."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in HIDDEN:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(name, path, target)
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def main() -> None:
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    gdn_runtime = importlib.import_module("gdn_runtime")
    where = Path(str(gdn_runtime.__file__))
    check(where.is_relative_to(sys.prefix), f"gdn_runtime comes from {where}, not from the wheel in {sys.prefix}")
    check_block(gdn_runtime)
    loaded = sorted(HIDDEN & {name.partition(".")[0] for name in sys.modules})
    check(not loaded, f"imported {', '.join(loaded)}")
    check_doctor(gdn_runtime.__version__)
    print(f"gdn-runtime {gdn_runtime.__version__} works with torch alone")


def check(condition: bool, complaint: str) -> None:
    """End with status 1 and the complaint unless the condition holds."""
    if not condition:
        sys.exit(f"prod-smoke: {complaint}")


def check_block(gdn_runtime: ModuleType) -> None:
    """One call of the block on CPU tensors against the recurrence, and pool slots that no sequence owns."""
    import torch

    torch.manual_seed(0)
    total = sum(SEQ_LENS)
    q = torch.randn(1, total, KEY_HEADS, HEAD_DIM)
    k = torch.randn(1, total, KEY_HEADS, HEAD_DIM)
    q, k = ((x / x.norm(dim=-1, keepdim=True)).bfloat16() for x in (q, k))
    v = torch.randn(1, total, VALUE_HEADS, HEAD_DIM).bfloat16()
    g = -torch.nn.functional.softplus(torch.randn(1, total, VALUE_HEADS) - 2)
    beta = torch.rand(1, total, VALUE_HEADS)
    pool = 0.1 * torch.randn(POOL_SLOTS, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
    before = pool.clone()
    cu_seqlens = torch.tensor([0, *SEQ_LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    o, states = gdn_runtime.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        seq_lens_cpu=SEQ_LENS,
        initial_state=pool,
        initial_state_indices=torch.tensor(SLOTS, dtype=torch.int32),
        output_final_state=True,
    )
    check(states is pool, "the final state is not the pool that was passed")
    expected_pool = before.clone()
    for n, slot in enumerate(SLOTS):
        rows = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        start = before[slot] if slot >= 0 else torch.zeros_like(before[0])
        expected_o, state = recurrence(q[0, rows], k[0, rows], v[0, rows], g[0, rows], beta[0, rows], start)
        if slot >= 0:
            expected_pool[slot] = state
        if SEQ_LENS[n]:
            check_close(o[0, rows], expected_o, f"o of sequence {n}")
    used = [slot for slot in SLOTS if slot >= 0]
    unused = [slot for slot in range(POOL_SLOTS) if slot not in used]
    check_close(pool[used], expected_pool[used], "final states")
    check(torch.equal(pool[unused], before[unused]), "a pool slot that no sequence owns has changed")


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token in fp64: o [T,H,V] and the final state [H,V,K].

    S <- exp(g) S;  S <- S + beta (v - S k) k^T;  o = S q / sqrt(K)      (Gated DeltaNet, arXiv 2412.06464, eq. 10)
    """
    import torch

    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    o = torch.empty_like(v)
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        residual = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", residual * beta[t, :, None], k[t])
        o[t] = torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
    return o, state


def check_close(got: Tensor, expected: Tensor, name: str) -> None:
    """RMS of the difference, relative to the RMS of what is expected."""
    expected = expected.double()
    error = float((got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    check(error <= MAX_ERROR, f"{name}: relative RMS error {error:.2e}, at most {MAX_ERROR:g}")


def check_doctor(version: str) -> None:
    """The doctor of the installed wheel answers with JSON that names the version."""
    command = [sys.executable, "-I", "-m", "gdn_runtime", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"doctor --json exited {done.returncode}:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    check(
        isinstance(report, dict) and version in done.stdout, f"doctor --json does not name version {version}: {report}"
    )


if __name__ == "__main__":
    main()
