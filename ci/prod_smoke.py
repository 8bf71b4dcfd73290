"""What production relies on, tried in a venv that holds the gdn-runtime wheel and torch only (`nox -s prod-smoke`).

    python ci/prod_smoke.py
    GDN_BUNDLE=DIR python ci/prod_smoke.py gfx942 gfx950

The kernel languages, the packages above gdn-runtime and numpy are hidden from every import, installed or not; then one
variable-length prefill over a state pool is compared with the token recurrence, and the doctor is run. With names of
architectures the code objects of the bundle run it, on the emulator, and paged decode beside it: the packages cdna-emu
and pa-decode must be installed then.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
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
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 2, 8, 128
"""Those of a row of the packaged tables: every bundle that was built from them has its kernels."""
MAX_ERROR = 0.01
"""Largest RMS of the error over RMS of the result. The operands of every product are rounded to bf16 (2^-9 relative);
measured 0.0035, and 0.0050 for the code objects, whose state scan truncates operands."""
EMULATOR_NEEDS = {"cdna_emu", "numpy"}
CONTEXTS, QUERY_LENGTH, PAGE = [40, 0, 2, 300], 4, 16
DECODE_HEADS, DECODE_KV_HEADS, DECODE_HEAD_DIM = 16, 2, 256
"""Those of a row of pa-decode's tables."""
MAX_DECODE_ERROR = 0.05
"""As ``MAX_ERROR``, of decode against fp32: the kernels round the query and P to FP8. Measured 0.03."""


class Without:
    """A meta path finder that finds what ``finder`` finds, except the hidden packages, as if not installed."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self.hidden:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(name, path, target)
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def main() -> None:
    archs = sys.argv[1:]
    hidden = HIDDEN - EMULATOR_NEEDS - {"pa_decode"} if archs else HIDDEN
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
    gdn_runtime = importlib.import_module("gdn_runtime")
    where = Path(str(gdn_runtime.__file__))
    check(where.is_relative_to(sys.prefix), f"gdn_runtime comes from {where}, not from the wheel in {sys.prefix}")
    for arch in archs:
        pa_decode = importlib.import_module("pa_decode")  # its artifacts are those of an imported package
        check_bundle(gdn_runtime, arch)
        check_decode(pa_decode, arch)
    if not archs:
        check_block(gdn_runtime)
    loaded = {name.partition(".")[0] for name in sys.modules} & hidden
    loaded |= {name for name in sys.modules if name.startswith(("gdn_runtime.kernels", "pa_decode.kernels"))}
    check(not loaded, f"imported {', '.join(sorted(loaded))}")
    report = check_doctor(gdn_runtime.__version__)
    served = [bundle["arch"] for bundle in report["bundles"]]
    check(set(archs) <= set(served), f"the doctor sees bundles for {served}, expected {archs}")
    print(f"gdn-runtime {gdn_runtime.__version__} works with torch alone" + ", from the bundle" * bool(archs))


def check_bundle(gdn_runtime: ModuleType, arch: str) -> None:
    """The block by the code objects of the bundle for ``arch``, and a call that the bundle does not serve."""
    importlib.import_module("cdna_emu")  # a server has none: its import is not loading
    start = time.perf_counter()
    done = gdn_runtime.warmup("cpu", arch=arch)
    warm = time.perf_counter() - start
    check_block(gdn_runtime, backend="emulate", arch=arch, use_qk_l2norm_in_kernel=True)
    try:
        check_block(gdn_runtime, value_heads=3 * KEY_HEADS, backend="emulate", arch=arch)
    except gdn_runtime.MissingCodeObjectError as error:
        check(f"gdn-aot build --arch {arch}" in str(error), f"the error does not say what to do: {error}")
    else:
        check(False, "a call that no table lists was served")
    print(f"{arch}: {done.kernels} kernels of the bundle loaded in {warm:.3f} s; the block agrees with the recurrence")


def check_decode(pa_decode: ModuleType, arch: str) -> None:
    """One call of paged decode by the code objects of the bundle, against its reference."""
    inputs = decode_inputs(pa_decode, arch)
    out = pa_decode.pa_decode(**inputs, backend="emulate", arch=arch)
    check_close(out, pa_decode.pa_decode(**inputs), f"decode on {arch}", MAX_DECODE_ERROR)
    print(f"{arch}: paged decode agrees with its reference")


def decode_inputs(pa_decode: ModuleType, arch: str) -> dict[str, Any]:
    """Arguments of a call of paged decode, the cache in the FP8 of ``arch``."""
    import torch

    torch.manual_seed(0)
    pages = [-(-context // PAGE) for context in CONTEXTS]
    k, v = torch.randn(2, sum(pages), PAGE, DECODE_KV_HEADS, DECODE_HEAD_DIM)
    flavour = pa_decode.FLAVOURS["fnuz" if arch == "gfx942" else "fn"]
    (k8, k_scale), (v8, v_scale) = pa_decode.quantise_tensor(k, flavour), pa_decode.quantise_tensor(v, flavour)
    table = torch.full((len(CONTEXTS), max(pages)), -1, dtype=torch.int32)
    for sequence, (count, ids) in enumerate(zip(pages, torch.randperm(sum(pages)).split(pages), strict=True)):
        table[sequence, :count] = ids
    return {
        "query": torch.randn(len(CONTEXTS) * QUERY_LENGTH, DECODE_HEADS, DECODE_HEAD_DIM).bfloat16(),
        "k_cache": pa_decode.pack_k(k8),
        "v_cache": pa_decode.pack_v(v8),
        "block_tables": table,
        "seq_lens": torch.tensor(CONTEXTS, dtype=torch.int32),
        "softmax_scale": DECODE_HEAD_DIM**-0.5,
        "query_length": QUERY_LENGTH,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def check(condition: bool, complaint: str) -> None:
    """End with status 1 and the complaint unless the condition holds."""
    if not condition:
        sys.exit(f"prod-smoke: {complaint}")


def check_block(gdn_runtime: ModuleType, value_heads: int = VALUE_HEADS, **options: Any) -> None:
    """One call of the block on CPU tensors against the recurrence, and pool slots that no sequence owns."""
    import torch

    inputs = make_inputs(value_heads)
    q, k, v, g, beta, pool, cu_seqlens = inputs
    before = pool.clone()
    o, states = gdn_runtime.chunk_gated_delta_rule(*inputs[:5], **call_options(pool, cu_seqlens), **options)
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


def make_inputs(value_heads: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta, a pool of states, and cu_seqlens of ``SEQ_LENS``."""
    import torch

    torch.manual_seed(0)
    total = sum(SEQ_LENS)
    q = torch.randn(1, total, KEY_HEADS, HEAD_DIM)
    k = torch.randn(1, total, KEY_HEADS, HEAD_DIM)
    q, k = ((x / x.norm(dim=-1, keepdim=True)).bfloat16() for x in (q, k))
    v = torch.randn(1, total, value_heads, HEAD_DIM).bfloat16()
    g = -torch.nn.functional.softplus(torch.randn(1, total, value_heads) - 2)
    beta = torch.rand(1, total, value_heads)
    pool = 0.1 * torch.randn(POOL_SLOTS, value_heads, HEAD_DIM, HEAD_DIM)
    cu_seqlens = torch.tensor([0, *SEQ_LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return q, k, v, g, beta, pool, cu_seqlens


def call_options(pool: Tensor, cu_seqlens: Tensor) -> dict[str, Any]:
    """Keywords of the call of the block."""
    import torch

    return {
        "cu_seqlens": cu_seqlens,
        "seq_lens_cpu": SEQ_LENS,
        "initial_state": pool,
        "initial_state_indices": torch.tensor(SLOTS, dtype=torch.int32),
        "output_final_state": True,
    }


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


def check_close(got: Tensor, expected: Tensor, name: str, most: float = MAX_ERROR) -> None:
    """RMS of the difference, relative to the RMS of what is expected."""
    expected = expected.double()
    error = float((got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    check(error <= most, f"{name}: relative RMS error {error:.2e}, at most {most:g}")


def check_doctor(version: str) -> dict[str, Any]:
    """The doctor of the installed wheel answers with JSON that names the version: its report."""
    command = [sys.executable, "-I", "-m", "gdn_runtime", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"doctor --json exited {done.returncode}:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    if not isinstance(report, dict) or report["versions"]["gdn_runtime"] != version:
        sys.exit(f"prod-smoke: doctor --json does not name version {version}: {report}")
    return report


if __name__ == "__main__":
    main()
