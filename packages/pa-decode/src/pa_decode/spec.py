"""Frozen specs of the kernels of paged decode: what their code depends on, and nothing else.

Batch, grid, compute units, budget, KV heads, width of the table, size of the window and softmax scale are arguments of
a launch, so that no serving length makes a new kernel. R = QL * G rows per sequence and KV head, row r = qi * G + g.
Strides are in bytes, absent tensors are null pointers.

The device code of a spec is found by name (gdn_runtime.spec.KernelSpec), as ``pa_decode.kernels.LANGUAGE.KERNEL``:
flydsl.d256_pipe has ``build(spec)``; triton.attention, triton.reducer and triton.planner have ``compile_jobs(spec)``,
for AMD and NVIDIA alike; gluon.hopper has ``load(spec, device)``, which gives what launches it on the current stream:
``kernel(grid, args)``, args being the values of ``ARGUMENTS`` in their order, None for null.

On 16-byte addresses: every row of a head of ``query`` and ``out``, the caches, ``work_info``, the partials; all else
where its elements may be. Products of strides and indices may need 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gdn_runtime.arch import KNOWN, Fp8, parse_arch
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.spec import AMD_ARCHS, Argument, Language
from gdn_runtime.spec.base import arguments, check_member

from .traits import (
    MAX_BATCH,
    MAX_QUERY_LENGTH,
    MAX_ROWS,
    PIPE_HEAD_DIM,
    PIPE_PAGES,
    PIPE_ROWS,
    cdiv,
    d256_pipe,
    power_of_two_at_least,
    require_packed_k,
)

KERNEL_ABI = 1
"""Raised whenever the arguments or the meaning of a kernel of this package change: a field of every spec, so that code
of another ABI, in a bundle or a cache, is another kernel's."""

AttentionKernel = Literal["d256_pipe", "hopper", "attention"]
"""The kernels of head size 256, FlyDSL on AMD and Gluon on sm90, and the Triton kernel for everything else."""

LANGUAGE: dict[AttentionKernel, Language] = {"d256_pipe": "flydsl", "hopper": "gluon", "attention": "triton"}
PIPE_ARCHS: dict[AttentionKernel, tuple[str, ...]] = {"d256_pipe": AMD_ARCHS, "hopper": ("sm90",)}
"""Architectures of the kernels that take what ``traits.d256_pipe`` says of a problem, on gfx950 and off it."""

QueryDtype = Literal["bf16", "fp16"]
SinkDtype = Literal["none", "bf16", "fp16", "fp32"]
ScaleMode = Literal["tensor", "token"]
"""One K and one V scale for the whole cache, or one of each per token and KV head."""

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 64, 128)

REDUCE_ROWS = 2
"""Rows that a workgroup of the reducer merges."""

FP8_ARCHS = tuple(name for name, facts in KNOWN.items() if facts.fp8 is not None)
WARP = {"amd": 64, "nvidia": 32}
MIN_BATCH_BUCKET = 16


def _block(arch: str, num_warps: int) -> tuple[int, int, int]:
    return WARP[parse_arch(arch).vendor] * num_warps, 1, 1


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one task and KV head: a workgroup reads tiles [first, end) of a sequence and writes R partial rows.

    ``query`` [B*QL, Hq, D] of ``query_dtype``, rows and heads strided, D contiguous. ``k_cache`` [N, Hkv, D/16, page,
    16] and ``v_cache`` [N, Hkv, page/16, D, 16] (``v_packed``) or [N, Hkv, D, page], contiguous FP8 of the flavour of
    ``arch``, on 16-byte addresses. ``block_tables`` int32 rows of ``table_width`` ids. Scales: fp32 [1], null for 1.0
    ("tensor"), or fp32 rows of ``page`` tokens, K and V with the same two strides, those of one head less than 4 GiB
    apart ("token").

    ``work_info`` int32 [capacity, 4] = sequence, first tile, end tile, ctx; an unused slot is zero, and its workgroup
    leaves at once (first == end) without touching the partials. ``partial_out`` [Hkv, capacity, R, D] of the query's
    dtype is normalised; ``partial_max`` and ``partial_sum`` fp32 [Hkv, capacity, R]: a reference exponent of the row in
    natural logarithm, any finite one, and the sum of exp(score - reference); a row that sees nothing has -inf, 0, and
    zeros in partial_out.

    ``windowed``: the argument ``window`` is read. ``single_tile``: every task is one tile (traits.is_single_tile).
    ``trans_k`` False exists to be refused.
    """

    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="query k_cache v_cache block_tables k_scale v_scale work_info partial_out partial_max partial_sum",
        i64="q_stride_row q_stride_head scale_stride_block scale_stride_head table_stride_row",
        i32="num_kv_heads table_width num_blocks_k num_blocks_v window capacity",
        f32="softmax_scale",
    )

    arch: str
    head_dim: int
    page_size: int
    group_size: int
    query_length: int
    query_dtype: QueryDtype
    scale_mode: ScaleMode
    v_packed: bool
    windowed: bool
    single_tile: bool
    kernel: AttentionKernel = "attention"
    num_warps: int = 4
    trans_k: bool = True
    abi: int = KERNEL_ABI

    @property
    def language(self) -> Language:
        """What the kernel is written in."""
        return LANGUAGE[self.kernel]

    @property
    def fp8(self) -> Fp8:
        """Flavour of the cache, of the quantised query and of P: that of the architecture."""
        flavour = parse_arch(self.arch).fp8
        assert flavour is not None, "check() refuses architectures without FP8"
        return flavour

    @property
    def rows(self) -> int:
        """R, query rows per sequence and KV head."""
        return self.query_length * self.group_size

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of a workgroup."""
        return _block(self.arch, self.num_warps)

    def check(self) -> None:
        """NotImplementedError if K is not packed; UnsupportedError if no kernel exists for this spec."""
        require_packed_k(self.trans_k)
        check_member("abi", self.abi, (KERNEL_ABI,))
        check_member("arch", self.arch, FP8_ARCHS)
        check_member("kernel", self.kernel, get_args(AttentionKernel))
        check_member("query dtype", self.query_dtype, get_args(QueryDtype))
        check_member("scale mode", self.scale_mode, get_args(ScaleMode))
        check_member("head size", self.head_dim, HEAD_DIMS)
        check_member("page size", self.page_size, PAGE_SIZES)
        _check_rows(self.query_length, self.group_size)
        if self.kernel in PIPE_ARCHS:
            check_member(f"arch of {self.kernel}", self.arch, PIPE_ARCHS[self.kernel])
            check_member(f"num_warps of {self.kernel}", self.num_warps, (4,))
            if not d256_pipe(True, self.head_dim, self.page_size, self.query_length, self.group_size, self.trans_k):
                got = f"head size {self.head_dim}, page {self.page_size}, {self.rows} rows"
                supported = [f"head size {PIPE_HEAD_DIM}, page {' or '.join(map(str, PIPE_PAGES))}, {PIPE_ROWS} rows"]
                raise UnsupportedError(f"problem of {self.kernel}", got=got, supported=supported)
        if self.single_tile:
            check_member("windowed with single_tile", self.windowed, (True,))

    def grid(self, capacity: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Workgroups: x over slots of the plan, y over KV heads."""
        return capacity, num_kv_heads, 1


@dataclass(frozen=True)
class ReduceSpec:
    """Merge of the partials of a sequence, in slot order, with the sinks; see ``AttentionSpec`` for the partials.

    ``reduce_info`` int32 [B, 2] = first slot, count. ``out`` [B*QL, Hq, D] of the query's dtype, rows and heads
    strided. Sequences without tasks and rows that see nothing become zero. ``sinks`` [Hq]. ``max_parts``: a power of
    two, no sequence has more tasks.
    """

    language: ClassVar[Language] = "triton"
    kernel: ClassVar[str] = "reducer"
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="partial_out partial_max partial_sum reduce_info sinks out",
        i64="out_stride_row out_stride_head",
        i32="num_kv_heads capacity batch",
    )

    arch: str
    head_dim: int
    group_size: int
    query_length: int
    query_dtype: QueryDtype
    sink_dtype: SinkDtype
    max_parts: int
    num_warps: int = 4
    abi: int = KERNEL_ABI

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of a workgroup."""
        return _block(self.arch, self.num_warps)

    def check(self) -> None:
        """UnsupportedError if no kernel exists for this spec."""
        check_member("abi", self.abi, (KERNEL_ABI,))
        check_member("arch", self.arch, FP8_ARCHS)
        check_member("query dtype", self.query_dtype, get_args(QueryDtype))
        check_member("sink dtype", self.sink_dtype, get_args(SinkDtype))
        check_member("head size", self.head_dim, HEAD_DIMS)
        _check_rows(self.query_length, self.group_size)
        _check_power_of_two("max_parts", self.max_parts, 1)

    def grid(self, batch: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Workgroups: x over the rows of a sequence and KV head, some at a time, y over KV heads, z over sequences."""
        return cdiv(self.query_length * self.group_size, REDUCE_ROWS), num_kv_heads, batch


@dataclass(frozen=True)
class PlannerSpec:
    """Fills ``work_info`` and ``reduce_info`` from int32 ``seq_lens`` [B], bit for bit as ``planner.make_plan``; every
    product in 64 bits. ``max_batch``: a power of two, 16 at least, that the batch does not exceed. One workgroup."""

    language: ClassVar[Language] = "triton"
    kernel: ClassVar[str] = "planner"
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = arguments(
        pointers="seq_lens work_info reduce_info",
        i32="batch capacity max_partitions window query_length",
    )

    arch: str
    max_batch: int
    num_warps: int = 4
    abi: int = KERNEL_ABI

    @classmethod
    def of(cls, arch: str, batch: int) -> PlannerSpec:
        """The planner of a batch."""
        return cls(arch, power_of_two_at_least(max(batch, MIN_BATCH_BUCKET)))

    @property
    def block(self) -> tuple[int, int, int]:
        """Work-items of the workgroup."""
        return _block(self.arch, self.num_warps)

    def check(self) -> None:
        """UnsupportedError if no kernel exists for this spec."""
        check_member("abi", self.abi, (KERNEL_ABI,))
        check_member("arch", self.arch, FP8_ARCHS)
        _check_power_of_two("max_batch", self.max_batch, MIN_BATCH_BUCKET)
        if self.max_batch > MAX_BATCH:
            raise UnsupportedError("max_batch", got=self.max_batch, supported=[f"up to {MAX_BATCH}"])

    def grid(self) -> tuple[int, int, int]:
        """One workgroup."""
        return 1, 1, 1


def _check_rows(query_length: int, group_size: int) -> None:
    rows = query_length * group_size
    if not (1 <= query_length <= MAX_QUERY_LENGTH and group_size >= 1 and rows <= MAX_ROWS):
        raise UnsupportedError(
            "query rows per KV head",
            got=f"query length {query_length} x {group_size} heads per KV head",
            supported=[f"query length 1 to {MAX_QUERY_LENGTH}, at most {MAX_ROWS} rows"],
        )


def _check_power_of_two(name: str, got: int, least: int) -> None:
    if got < least or got & (got - 1):
        raise UnsupportedError(name, got=got, supported=[f"powers of two from {least}"])
