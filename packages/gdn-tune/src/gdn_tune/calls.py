"""The calls that are tuned: cases of the GDN block by id, decode problems by id, and what tables know of them."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

from gdn_runtime.arch import parse_arch
from gdn_runtime.plan import cdiv
from gdn_runtime.rules import Problem
from gdn_runtime.spec import CHUNK, HEAD_DIM
from gdn_runtime.testing import CASES, GRID, Case
from pa_decode import DecodeGeometry
from pa_decode.spec import ScaleMode
from pa_decode.traits import TILE

from .records import Facts

T = TypeVar("T")


@dataclass(frozen=True)
class DecodeCase:
    """``batch`` sequences of ``context`` tokens each; bf16 queries of ``num_heads`` heads over ``num_kv_heads``."""

    id: str
    batch: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    query_length: int
    context: int
    head_dim: int = 256
    scale_mode: ScaleMode = "tensor"
    v_packed: bool = True
    window: int = 0

    def geometry(self, arch: str, compute_units: int) -> DecodeGeometry:
        """The problem on a device."""
        return DecodeGeometry(
            arch=arch,
            compute_units=compute_units,
            batch=self.batch,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            query_length=self.query_length,
            scale_mode=self.scale_mode,
            v_packed=self.v_packed,
            window=self.window,
        )

    def small(self, max_tiles: int, max_batch: int) -> DecodeCase:
        """The same problem for a CPU: at most ``max_batch`` sequences of at most ``max_tiles`` tiles that a task may
        be, so that plans of several tasks a sequence are among those that are run."""
        return replace(self, batch=min(self.batch, max_batch), context=min(self.context, max_tiles * TILE))

    def __str__(self) -> str:
        heads = f"Hq={self.num_heads} Hkv={self.num_kv_heads} D={self.head_dim}"
        rest = f"page {self.page_size}, {self.query_length} query tokens, {self.scale_mode} scales"
        return f"{self.id}: B={self.batch} {heads}, context {self.context}, {rest}"


def _decode_cases() -> Iterable[DecodeCase]:
    for heads, kv_heads in ((16, 2), (8, 1)):
        for page in (16, 64):
            for length in (1, 4):
                for batch in (1, 16, 128):
                    for context in (8192, 131072):
                        name = f"pa-h{heads}x{kv_heads}-p{page}-q{length}-b{batch}-ctx{context}"
                        yield DecodeCase(name, batch, heads, kv_heads, page, length, context)


def _sweep_cases() -> Iterable[DecodeCase]:
    """The problems of the public measurements of the pipe, at their shorter context: pages of 64 tokens, both forms of
    V and modes of scales, whole contexts and two windows."""
    modes: tuple[ScaleMode, ...] = get_args(ScaleMode)
    for (heads, kv_heads), length, batch in itertools.product(((16, 2), (8, 1)), (1, 4), (1, 16, 128)):
        for window, mode, packed in itertools.product((0, 257, 8193), modes, (True, False)):
            form = "packed" if packed else "plain"
            name = f"sweep-h{heads}x{kv_heads}-p64-q{length}-b{batch}-ctx8192-w{window}-{mode}-{form}"
            yield DecodeCase(
                name, batch, heads, kv_heads, 64, length, 8192, scale_mode=mode, v_packed=packed, window=window
            )


DECODE_CASES: dict[str, DecodeCase] = {case.id: case for case in (*_decode_cases(), *_sweep_cases())}
"""Heads of Qwen3-Next and Qwen3.5, whole and split over two devices, by id."""

SEED_GROUPS = ("dense", "packed", "ragged", "snapshot")
"""Groups of the test suite that are the seven shapes of the public tables."""


def _other_snapshots() -> Iterable[Case]:
    """fp32 snapshots for those of ``SEED_GROUPS`` that the test suite has with bf16 alone: tables list both."""
    for case in CASES.values():
        if case.group in SEED_GROUPS and case.group != "snapshot":
            yield replace(case, id=f"{case.id}-fp32", snapshot_dtype="fp32")


GDN_CASES: dict[str, Case] = {**CASES, **GRID, **{case.id: case for case in _other_snapshots()}}
"""The cases of the test suite, the grid of the benches, and what tables list beside them, by id."""


def pick(cases: Mapping[str, T], patterns: Sequence[str]) -> dict[str, T]:
    """Those of ``cases`` whose id is one of ``patterns``, or matches one with ``*``, ``?`` or ``[...]``, in their own
    order. Raises ValueError for a pattern that nothing matches."""
    wanted = set()
    for pattern in patterns:
        found = {name for name in cases if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(f"cases: got {pattern!r}, which is no id of a case and matches none")
        wanted |= found
    return {name: case for name, case in cases.items() if name in wanted}


def cases_of(op: str) -> Mapping[str, Case | DecodeCase]:
    """The cases of an op, by id."""
    return DECODE_CASES if op == "pa" else GDN_CASES


def problem_of(case: Case, arch: str, compute_units: int) -> Problem:
    """What selection would look at: bf16 data, fp32 beta, initial states read, gates [B,H,T] as in the block."""
    chunks = [cdiv(length, CHUNK) for length in case.seq_lens] * (case.batch or 1)
    return Problem(
        arch=parse_arch(arch),
        compute_units=compute_units,
        num_heads=case.num_heads,
        num_key_heads=case.num_key_heads,
        num_seqs=len(chunks),
        total_chunks=sum(chunks),
        max_seq_chunks=max(chunks),
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype=case.state_dtype,
        snapshot_dtype=case.snapshot_dtype,
        is_varlen=case.batch is None,
        use_g=case.gated,
        store_final_state=case.final_state,
    )


def gdn_facts(case: Case, problem: Problem) -> Facts:
    """The columns of a table of K5, and what else tells two calls apart."""
    return Facts(
        H=problem.num_heads,
        Hg=problem.num_key_heads,
        V=HEAD_DIM,
        is_varlen=problem.is_varlen,
        use_h0=problem.use_initial_state,
        store_fs=problem.store_final_state,
        snapshot_bf16=problem.snapshot_dtype == "bf16",
        state_bf16=problem.state_dtype == "bf16",
        T_flat=case.num_tokens,
        N=problem.num_seqs,
        total_chunks=problem.total_chunks,
        max_seq_chunks=problem.max_seq_chunks,
        gated=problem.use_g,
    )


def decode_facts(geometry: DecodeGeometry) -> Facts:
    """The columns of a table of budgets."""
    return Facts(
        B=geometry.batch,
        Hq=geometry.num_heads,
        Hkv=geometry.num_kv_heads,
        D=geometry.head_dim,
        page=geometry.page_size,
        QL=geometry.query_length,
        query_dtype=geometry.query_dtype,
        scale_mode=geometry.scale_mode,
        v_packed=geometry.v_packed,
        sink_dtype=geometry.sink_dtype,
        window=geometry.window,
    )
