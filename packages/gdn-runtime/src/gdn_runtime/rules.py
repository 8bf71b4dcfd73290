"""What one call looks like to selection, and the pure rules that give each of its stages a spec, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from .arch import ArchFacts
from .errors import UnsupportedError
from .spec import (
    HEAD_DIM,
    Dtype,
    FusedPrepareSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputConfig,
    OutputSpec,
    PrepareConfig,
    PrepareSpec,
    PrepareVariant,
    Rounding,
    StateScanConfig,
    StateScanSpec,
    VkStateScanSpec,
)
from .tables import ScanKey, vk_block_v


@dataclass(frozen=True)
class Problem:
    """What selection may look at: the shape of one call and the facts of the device that it is for."""

    arch: ArchFacts
    compute_units: int
    num_heads: int
    num_key_heads: int
    num_seqs: int
    total_chunks: int
    max_seq_chunks: int
    dtype: Dtype
    beta_dtype: Dtype
    state_dtype: Dtype
    snapshot_dtype: Dtype
    is_varlen: bool
    use_exp2: bool = True
    use_g: bool = True
    use_gk: bool = False
    use_initial_state: bool = True
    store_final_state: bool = True
    save_new_value: bool = True
    use_state_indices: bool = False
    use_state_mask: bool = False
    g_head_major: bool = True

    def scan_key(self) -> ScanKey:
        """What a row of the tuned tables of K5 must match."""
        return ScanKey(
            arch=self.arch.name,
            compute_units=self.compute_units,
            num_heads=self.num_heads,
            num_key_heads=self.num_key_heads,
            is_varlen=self.is_varlen,
            use_initial_state=self.use_initial_state,
            store_final_state=self.store_final_state,
            snapshot_dtype=self.snapshot_dtype,
            state_dtype=self.state_dtype,
            total_chunks=self.total_chunks,
            max_seq_chunks=self.max_seq_chunks,
        )


def l2norm_spec(problem: Problem) -> L2NormSpec:
    """The spec of the normalisation of q and k."""
    return L2NormSpec(problem.arch.name, problem.dtype, problem.num_key_heads)


# ------------------------------------------------------------------------------------------------ Triton


def prepare_config(problem: Problem) -> tuple[PrepareConfig, str]:
    """Rule for K1..K4: fused with 4 warps, the fastest of {fused, split} x {2, 4, 8 warps} at every shape measured.

    H200, H/Hg = 32/16, 8/2, 64/16, one and four sequences of 8192; for example 107 us against 144 (split) and 139
    (2 warps) at 32/16, 1 x 8192.
    """
    return PrepareConfig("fused", num_warps=4, num_stages=1), "one fused kernel, w and u are formed from registers"


def state_scan_config(problem: Problem) -> tuple[StateScanConfig, str]:
    """Rule for K5: 32 value rows per program while two such programs per compute unit hold all scans, else 64.

    H * total_chunks / max_seq_chunks is the mean number of (sequence, head) scans that run at a time; each is split
    into 128 / block_v programs. H200, 132 SMs, us with 32 / 64 rows: 16 scans 187 / 274, 32 scans 207 / 288, 64 scans
    299 / 333, 96 scans 567 / 411, 128 scans 591 / 451 (8192 tokens each; 16 and 128 rows win nowhere).
    """
    scans = problem.num_heads * problem.total_chunks / max(problem.max_seq_chunks, 1)
    narrow = scans * (HEAD_DIM // 32) <= 2 * problem.compute_units
    why = f"{scans:.0f} scans at a time on {problem.compute_units} compute units"
    if problem.arch.vendor == "amd":
        return StateScanConfig(32 if narrow else 64, num_warps=4, num_stages=1), why
    block_v, num_stages = (32, 3) if narrow else (64, 2)
    return StateScanConfig(block_v, num_warps=4, num_stages=num_stages), why


def output_config(problem: Problem) -> tuple[OutputConfig, str]:
    """Rule for K6. 64 columns with 4 warps beat 128 by 3 % and 32 by a factor of 2 on an H200 at every shape measured
    for ``prepare_config``."""
    return OutputConfig(64, num_warps=4, num_stages=1), "two programs per chunk and value head"


def prepare_spec(problem: Problem, config: PrepareConfig) -> PrepareSpec:
    """The spec of K1..K4 of ``problem``."""
    p = problem
    return PrepareSpec(
        p.arch.name, p.dtype, p.beta_dtype, p.num_heads, p.num_key_heads, p.is_varlen, p.use_exp2, config
    )


def state_scan_spec(problem: Problem, config: StateScanConfig) -> StateScanSpec:
    """The spec of K5 of ``problem``."""
    p = problem
    return StateScanSpec(
        arch=p.arch.name,
        dtype=p.dtype,
        state_dtype=p.state_dtype,
        snapshot_dtype=p.snapshot_dtype,
        num_heads=p.num_heads,
        num_key_heads=p.num_key_heads,
        is_varlen=p.is_varlen,
        use_g=p.use_g,
        use_gk=p.use_gk,
        use_initial_state=p.use_initial_state,
        store_final_state=p.store_final_state,
        save_new_value=p.save_new_value,
        use_state_indices=p.use_state_indices,
        use_state_mask=p.use_state_mask,
        g_head_major=p.g_head_major,
        use_exp2=p.use_exp2,
        config=config,
    )


def output_spec(problem: Problem, config: OutputConfig) -> OutputSpec:
    """The spec of K6 of ``problem``."""
    p = problem
    return OutputSpec(
        p.arch.name, p.dtype, p.snapshot_dtype, p.num_heads, p.num_key_heads, p.is_varlen, p.use_exp2, config
    )


# ------------------------------------------------------------------------------------------------ AMD code objects


def check_code_objects(problem: Problem, backend: str) -> None:
    """Raise UnsupportedError for what the AMD kernels do not take and no spec of theirs says."""
    if problem.dtype != "bf16":
        raise UnsupportedError(f'dtype of q, k and v with backend="{backend}"', got=problem.dtype, supported=["bf16"])


def prepare_variant(problem: Problem) -> tuple[PrepareVariant, str]:
    """Rule for the fused prepare: one wave per chunk and value head once there are more than four of those per compute
    unit. Fewer leave most of a compute unit idle, and the four waves of a group then finish a chunk in a third of the
    time for 1.6 to 1.8 times the instructions."""
    work = problem.total_chunks * problem.num_heads
    why = f"{work} chunks and heads on {problem.compute_units} compute units"
    return ("wave" if work > 4 * problem.compute_units else "group"), why


def fused_prepare_spec(problem: Problem, variant: PrepareVariant) -> FusedPrepareSpec:
    """The spec of the FlyDSL K1..K4."""
    p = problem
    return FusedPrepareSpec(p.arch.name, variant, p.num_heads, p.num_key_heads, p.is_varlen, p.use_exp2, p.beta_dtype)


def opt_spec(problem: Problem, block_v: int, rounding: Rounding) -> OptStateScanSpec:
    """The spec of K5 `opt`."""
    p = problem
    return OptStateScanSpec(
        arch=p.arch.name,
        block_v=block_v,
        num_heads=p.num_heads,
        num_key_heads=p.num_key_heads,
        is_varlen=p.is_varlen,
        use_g=p.use_g,
        use_gk=p.use_gk,
        use_exp2=p.use_exp2,
        g_head_major=p.g_head_major,
        use_initial_state=p.use_initial_state,
        store_final_state=p.store_final_state,
        use_state_indices=p.use_state_indices,
        save_new_value=p.save_new_value,
        state_dtype=p.state_dtype,
        snapshot_dtype=p.snapshot_dtype,
        rounding=rounding,
        sched_barrier=p.arch.name == "gfx942",
    )


def vk_spec(problem: Problem, block_v: int) -> VkStateScanSpec:
    """The spec of K5 `vk`. Raises UnsupportedError for what only `opt` can do."""
    p = problem
    limits = (
        ("initial_state_indices", p.use_state_indices, False),
        ("has_initial_state", p.use_state_mask, False),
        ("g_head_major", p.use_g and p.g_head_major, False),
        ("snapshot_dtype", p.snapshot_dtype, "bf16"),
    )
    for name, got, supported in limits:
        if got != supported:
            what = [str(supported) if isinstance(supported, str) else "none", 'any with kernel="opt"']
            raise UnsupportedError(f'{name} with kernel="vk"', got=got, supported=what)
    return VkStateScanSpec(
        arch=p.arch.name,
        block_v=block_v,
        num_heads=p.num_heads,
        num_key_heads=p.num_key_heads,
        is_varlen=p.is_varlen,
        use_g=p.use_g,
        use_gk=p.use_gk,
        use_exp2=p.use_exp2,
        use_initial_state=p.use_initial_state,
        store_final_state=p.store_final_state,
        save_new_value=p.save_new_value,
        state_dtype=p.state_dtype,
    )


def vk_tile(problem: Problem) -> tuple[int, str]:
    """Rule for the value rows per workgroup of K5 `vk`."""
    block_v = vk_block_v(num_seqs=problem.num_seqs, num_heads=problem.num_heads)
    return block_v, f"block_v={block_v} by the rule of vk: {problem.num_seqs * problem.num_heads} scans"
