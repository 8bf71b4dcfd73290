"""What one call looks like to selection, and the pure rules that give each of its stages a spec, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from .arch import ArchFacts
from .errors import UnsupportedError
from .spec import (
    CHUNK,
    FAST_ARCH,
    HEAD_DIM,
    Dtype,
    FastConfig,
    FastPrefillSpec,
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
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from .tables import LaunchCall, ScanKey, vk_block_v

S = TypeVar("S")


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

    @property
    def scans(self) -> float:
        """Mean number of scans, one per sequence and value head, that run at a time."""
        return self.num_heads * self.total_chunks / max(self.max_seq_chunks, 1)

    def spec(self, kind: type[S], **others: Any) -> S:
        """A spec of class ``kind``: its fields that a problem has too are of this one, the others are given."""
        shared = {f.name: getattr(self, f.name) for f in fields(kind) if hasattr(self, f.name)}  # type: ignore[arg-type]
        return kind(**{**shared, "arch": self.arch.name, **others})

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

    def launch_call(self) -> LaunchCall | None:
        """What a row of the tables of launch configurations must match; None for calls that they do not list: fp16 data
        and gates per key."""
        if self.dtype != "bf16" or self.use_gk:
            return None
        return LaunchCall(
            arch=self.arch.name,
            compute_units=self.compute_units,
            num_heads=self.num_heads,
            num_key_heads=self.num_key_heads,
            is_varlen=self.is_varlen,
            total_chunks=self.total_chunks,
            num_seqs=self.num_seqs,
            max_seq_chunks=self.max_seq_chunks,
            gated=self.use_g,
            use_initial_state=self.use_initial_state,
            store_final_state=self.store_final_state,
            snapshot_dtype=self.snapshot_dtype,
            state_dtype=self.state_dtype,
        )


def l2norm_spec(problem: Problem) -> L2NormSpec:
    """The spec of the normalisation of q and k."""
    return problem.spec(L2NormSpec)


# ------------------------------------------------------------------------------------------------ Triton


def prepare_config(problem: Problem) -> tuple[PrepareConfig, str]:
    """Rule for K1..K4: fused with 4 warps, the fastest of {fused, split} x {2, 4, 8 warps} at every shape measured.

    H200, H/Hg = 32/16, 8/2, 64/16, one and four sequences of 8192; for example 107 us against 144 (split) and 139
    (2 warps) at 32/16, 1 x 8192.
    """
    return PrepareConfig("fused", num_warps=4, num_stages=1), "one fused kernel, w and u are formed from registers"


def state_scan_config(problem: Problem) -> tuple[StateScanConfig, str]:
    """Rule for K5: 32 value rows per program while two such programs per compute unit hold all scans, else 64.

    Each scan is split into 128 / block_v programs. H200, 132 SMs, us with 32 / 64 rows: 16 scans 187 / 274, 32 scans
    207 / 288, 64 scans 299 / 333, 96 scans 567 / 411, 128 scans 591 / 451 (8192 tokens each; 16 and 128 rows win
    nowhere).
    """
    scans = problem.scans
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
    return problem.spec(PrepareSpec, config=config)


def state_scan_spec(problem: Problem, config: StateScanConfig) -> StateScanSpec:
    """The spec of K5 of ``problem``."""
    return problem.spec(StateScanSpec, config=config)


def output_spec(problem: Problem, config: OutputConfig) -> OutputSpec:
    """The spec of K6 of ``problem``."""
    return problem.spec(OutputSpec, config=config)


# ------------------------------------------------------------------------------------------------ the fast path of sm90

FAST_TRITON = (3, 6)
"""Version of Triton whose Gluon, an experimental part of it, the kernels are written for and tested with."""

MIN_SEGMENTED = 64
"""Chunks of the longest sequence: 40 chunks and 64 programs take 83 us as a whole and 88 in segments of 16."""

MAX_FAST_GATES = 2**31 - 1
"""The copy engine counts in 32 bits; three numbers per token and value head are the most that it counts here."""


def fast_refusal(problem: Problem, triton_version: tuple[int, ...]) -> str | None:
    """Why the fast path does not take a call that runs on Triton; None if it does."""
    p = problem
    if p.arch.name != FAST_ARCH:
        return f"it is for {FAST_ARCH}, not for {p.arch.name}"
    if triton_version[:2] != FAST_TRITON:
        wanted, got = (".".join(map(str, version)) for version in (FAST_TRITON, triton_version))
        return f"it is written for Triton {wanted}, not for {got}"
    if p.snapshot_dtype != p.dtype:
        return f"snapshots in {p.snapshot_dtype} are asked for, and it keeps none"
    if p.total_chunks == 0:
        return "there are no tokens"
    if 3 * p.total_chunks * CHUNK * p.num_heads > MAX_FAST_GATES:
        return f"{p.total_chunks} chunks of {p.num_heads} heads are more than it can address"
    return None


def segment_chunks(problem: Problem) -> tuple[int, str]:
    """Rule for the chunks per segment of the fast path; 0 for scans over whole sequences.

    Every segment but the last is scanned twice, so that it pays while most compute units would be idle: two scans on a
    unit cost each 40 %. H200, 132 SMs, 8192 tokens, us with segments of 16 / 32 / 64 chunks and whole sequences: 16
    programs 81, 106, 183, 221; 32 programs 126, 122, 189, 229; 64 programs 251, 210, 213, 249.
    """
    p = problem
    programs = 2 * p.scans
    why = f"{programs:.0f} programs scan at a time on {p.compute_units} compute units"
    if 2 * programs > p.compute_units or p.max_seq_chunks < MIN_SEGMENTED:
        return 0, f"whole sequences, {why}"
    size = 32 if programs * p.max_seq_chunks >= 32 * p.compute_units else 16
    if FastConfig(True, size).refusal(num_heads=p.num_heads, num_seqs=p.num_seqs, max_seq_chunks=p.max_seq_chunks):
        return 0, f"whole sequences, {why}, but too many of them for maps of their segments"
    return size, f"segments of {size} chunks, {why}"


def p_in_scan(problem: Problem) -> tuple[bool, str]:
    """Rule for where P of the fast path is formed.

    In the scan, which costs each of its two programs per head a product; prepare writes nothing but the inverse then,
    in its kernel for four chunks and heads. H200, us, with P from prepare and in the scan: 32/16, 4 x 8192 547 and 458,
    1 x 8192 277 and 262, dense 2500 96 and 94; 8/2, 1 x 8192 89 and 86, 8 x 8192 342 and 300.
    """
    if problem.dtype != "bf16":
        return False, "P and an inverse refined for fp16 from prepare"
    return True, "P formed in the scan"


def fast_config(problem: Problem) -> tuple[FastConfig, str]:
    """The rules of ``p_in_scan`` and ``segment_chunks`` together."""
    in_scan, where = p_in_scan(problem)
    segment, why = segment_chunks(problem)
    return FastConfig(in_scan, segment), f"{where}; {why}"


def fast_prefill_spec(problem: Problem, config: FastConfig) -> FastPrefillSpec:
    """The spec of the fast path for ``problem``."""
    return problem.spec(FastPrefillSpec, p_in_scan=config.p_in_scan, segment_chunks=config.segment_chunks)


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
    return problem.spec(FusedPrepareSpec, variant=variant)


TPRIME_BLOCK_V = {"gfx942": (64, 128), "gfx950": (128,)}
"""What ``tprime_block_v`` picks, narrow first."""


def tprime_block_v(problem: Problem) -> tuple[int | None, str]:
    """Rule for the route of a block: columns of v per workgroup of the V-split K5 for the T' route, None for w and u.

    T' takes 37 % fewer bytes and 22 to 24 % fewer instructions of K1..K5, and a prepare of half the time, against a K5
    that splits a head less finely: it waits for a grid that fills the device. Cycles of the emulator's model of both
    kernels per head against prepare "wave" and `opt` with 64 columns (bf16 snapshots): gfx950 -3 % with one scan per
    compute unit and -19 % with two; gfx942 -11 % with two, but +11 % with one, where 64 columns make it +1 %: a tie
    that the bytes decide, for at half of that pace the usual part would need 8 TB/s with w and u.
    """
    p = problem
    scans = p.scans
    why = f"{scans:.0f} scans at a time on {p.compute_units} compute units"
    if prepare_variant(p)[0] != "wave" or scans < p.compute_units:
        return None, why
    tiles = TPRIME_BLOCK_V[p.arch.name]
    return tiles[-1] if scans >= 2 * p.compute_units else tiles[0], why


def tprime_refusal(problem: Problem) -> str | None:
    """What of a call the kernels of the T' route do not take; None if they take all of it. The block passes none of
    it."""
    p = problem
    faults = {
        "no gates": not p.use_g,
        "per-key gates": p.use_gk,
        "gates [B,T,H]": not p.g_head_major,
        "no v_new": not p.save_new_value,
    }
    return next((fault for fault, found in faults.items() if found), None)


def tprime_prepare_spec(problem: Problem) -> TPrepareSpec:
    """The spec of K1..K4 up to T'."""
    return problem.spec(TPrepareSpec)


def vsplit_spec(problem: Problem, block_v: int, rounding: Rounding) -> VSplitScanSpec:
    """The spec of the V-split K5. Raises UnsupportedError for what only the other kernels of K5 do."""
    refusal = tprime_refusal(problem)
    if refusal is not None:
        raise UnsupportedError("K5 with T' in place of w and u", got=refusal, supported=["gates [B,H,T] and v_new"])
    return problem.spec(VSplitScanSpec, block_v=block_v, rounding=rounding)


def opt_rounding(arch: str, *, block: bool) -> Rounding:
    """Rule for how K5 `opt` makes bf16 of fp32 where a call does not say: for the ``block``, or for the op of K5 alone.

    The op truncates, as aiter's does by default. The block rounds on gfx950, whose packed convert takes the place of a
    byte permutation: instructions of a chunk -1 to +2 %, error of o 3.8e-3 to 4.4e-3 instead of 4.8e-3 to 7.0e-3 (no
    decay, 65 to 1000 tokens). gfx942 has no such convert: 1.7 to 2.3 times the instructions, so the block truncates.
    """
    return "nearest" if block and arch == "gfx950" else "truncate"


def opt_spec(problem: Problem, block_v: int, rounding: Rounding) -> OptStateScanSpec:
    """The spec of K5 `opt`."""
    barrier = problem.arch.name == "gfx942"
    return problem.spec(OptStateScanSpec, block_v=block_v, rounding=rounding, sched_barrier=barrier)


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
    return problem.spec(VkStateScanSpec, block_v=block_v)


def vk_tile(problem: Problem) -> tuple[int, str]:
    """Rule for the value rows per workgroup of K5 `vk`."""
    block_v = vk_block_v(num_seqs=problem.num_seqs, num_heads=problem.num_heads)
    return block_v, f"block_v={block_v} by the rule of vk: {problem.num_seqs * problem.num_heads} scans"
