"""Which specs to compile ahead of time: rows of the tuned tables, fanned out over what a call may add to them.

``KERNELS`` is the one table that drives reading, fanning out, compiling and printing. A job is a spec as selection
makes it, so what is compiled here is what a call asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias, get_args

from gdn_runtime.arch import parse_arch
from gdn_runtime.codeobject.facts import CodeObject, canonical_json, spec_json
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.kernels.compile import compile_spec
from gdn_runtime.rules import (
    TPRIME_BLOCK_V,
    Problem,
    fused_prepare_spec,
    l2norm_spec,
    opt_rounding,
    opt_spec,
    output_config,
    output_spec,
    tprime_prepare_spec,
    vk_spec,
    vsplit_spec,
)
from gdn_runtime.spec import (
    AMD_ARCHS,
    HEAD_DIM,
    SCAN_BLOCK_V,
    VSPLIT_BLOCK_V,
    Dtype,
    FusedPrepareSpec,
    KernelSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputSpec,
    PrepareVariant,
    TPrepareSpec,
    VkStateScanSpec,
    VSplitScanSpec,
)
from gdn_runtime.tables import (
    COMPILED,
    Located,
    Provenance,
    count,
    flag,
    parse_row,
    read_rows,
    table_files,
)
from pa_decode.tables import COMPILED as PA_COMPILED

from .columns import cell
from .decode import DecodeKernel

TABLES = (*COMPILED, *PA_COMPILED)
"""The packaged tables that name what is compiled, but for those of the grid of all models: whoever serves one of these
names its table."""

Job: TypeAlias = KernelSpec
Values: TypeAlias = tuple[Any, ...]
Fan: TypeAlias = Mapping[str, Values]
"""Values of fields of ``Problem``, and of what a rule picks (``block_v``, ``variant``), by name."""


@dataclass(frozen=True)
class Shape:
    """What a row asks for: heads on one rank and layout of a model, and what its calls pass. ``block_v`` is None where
    calls may pick any."""

    num_heads: int
    num_key_heads: int
    is_varlen: bool
    use_initial_state: bool
    store_final_state: bool
    use_g: bool = True
    use_gk: bool = False
    save_new_value: bool = True
    block_v: int | None = None


Parse: TypeAlias = Callable[[Mapping[str, object], str, Mapping[str, Provenance]], Shape]


@dataclass(frozen=True)
class Kernel:
    """How the jobs of one kernel are made.

    ``parse`` turns the rows of tables of ``table`` into shapes; ``fan`` gives the values of what a row leaves open,
    ``complete`` those of all that the block leaves to its caller; ``make`` turns a problem, and what a rule would pick,
    into specs of ``kinds``, as selection does; ``compile`` compiles one; ``columns`` are the fields to print.
    """

    name: str
    archs: tuple[str, ...]
    table: str
    parse: Parse
    fan: Fan
    complete: Fan
    make: Callable[..., tuple[KernelSpec, ...]]
    kinds: tuple[type, ...]
    columns: Mapping[str, str]
    compile: Callable[[KernelSpec], CodeObject] = field(default=compile_spec)

    def shapes(self, tables: Iterable[Path] = COMPILED) -> tuple[Shape, ...]:
        """Distinct shapes of the rows of ``tables`` (files and folders), in their order; bad rows and files are
        warnings."""
        return tuple(dict.fromkeys(found.row for found in self.rows(tables)))

    def rows(self, tables: Iterable[Path] = COMPILED) -> Iterator[Located[Shape]]:
        """The shape of every row of ``tables``, with its file and index."""
        for path in tables:
            for file in table_files(path):
                yield from read_rows(file, self.table, self.parse)

    def jobs(self, shapes: Iterable[Shape], arch: str, *, complete: bool = False) -> tuple[Job, ...]:
        """Specs for ``shapes`` on ``arch``, in canonical order. ``complete`` adds what ``--complete`` does."""
        if arch not in self.archs:
            raise UnsupportedError(f"arch of kernel {self.name}", got=repr(arch), supported=self.archs)
        fans = [self.fan, self.complete] if complete else [self.fan]
        return ordered(spec for shape in shapes for fan in fans for spec in self.expand(shape, arch, fan))

    def of_tables(self, paths: Iterable[Path], arch: str, *, complete: bool = False) -> tuple[Job, ...]:
        """``jobs`` of the shapes of ``paths``."""
        return self.jobs(self.shapes(paths), arch, complete=complete)

    def expand(self, shape: Shape, arch: str, fan: Fan) -> Iterator[Job]:
        """Specs of one shape for every combination of the values of ``fan`` that a call can have."""
        asked = {f.name: getattr(shape, f.name) for f in fields(shape)}
        for values in product(*fan.values()):
            chosen = {**asked, **dict(zip(fan, values, strict=True))}
            problem = make_problem(arch, {name: chosen[name] for name in chosen if name in PROBLEM_FIELDS})
            if problem.use_state_indices and not (problem.use_initial_state and problem.store_final_state):
                continue
            picks = {name: chosen[name] for name in ("block_v", "variant") if chosen.get(name) is not None}
            for spec in self.make(problem, **picks):
                spec.check()
                yield spec

    def cells(self, spec: Job) -> tuple[str, ...]:
        """``spec`` as texts for ``columns``; empty where its kind has no such field."""
        return tuple(cell(spec, path) for path in self.columns.values())


PROBLEM_FIELDS = {f.name for f in fields(Problem)}


def make_problem(arch: str, values: Mapping[str, Any]) -> Problem:
    """A call with ``values``. Number and length of the sequences are 1: no spec depends on them, but for what a rule
    picks, and that is fanned out."""
    problem = Problem(
        arch=parse_arch(arch),
        compute_units=1,
        num_heads=1,
        num_key_heads=1,
        num_seqs=1,
        total_chunks=1,
        max_seq_chunks=1,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype="fp32",
        snapshot_dtype="bf16",
        is_varlen=False,
    )
    return replace(problem, **values)


# ------------------------------------------------------------------------------------------------ rows


def parse_opt(row: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]) -> Shape:
    """The shape of a row of K5 `opt`. Raises ValueError."""
    key = parse_row(row, arch, provenances).key
    return Shape(key.num_heads, key.num_key_heads, key.is_varlen, key.use_initial_state, key.store_final_state)


VK_COUNTS = ("K", "V", "BT", "H", "Hg", "T_flat", "N", "block_v")
VK_FLAGS = ("use_g", "use_gk", "use_h0", "store_fs", "save_vn", "is_varlen", "wu_contig")
VK_OPTIONAL = {"us", "provenance"}


def parse_vk(row: Mapping[str, object], arch: str, provenances: Mapping[str, Provenance]) -> Shape:
    """The shape of a row of K5 `vk`. Raises ValueError, UnsupportedError for what the kernel does not do."""
    columns = {"gfx", "dtype", *VK_COUNTS, *VK_FLAGS}
    if not columns <= set(row) <= columns | VK_OPTIONAL:
        raise ValueError(f"columns: got {', '.join(sorted(row))}, expected {', '.join(sorted(columns))}")
    counts = {name: count(row, name) for name in VK_COUNTS}
    flags = {name: flag(row, name) for name in VK_FLAGS}
    fixed = {"gfx": arch, "dtype": "bf16", "K": HEAD_DIM, "V": HEAD_DIM, "BT": 64, "wu_contig": True}
    for name, expected in fixed.items():
        if row[name] != expected:
            raise ValueError(f"{name}: got {row[name]!r}, expected {expected!r}")
    shape = Shape(
        num_heads=counts["H"],
        num_key_heads=counts["Hg"],
        is_varlen=flags["is_varlen"],
        use_initial_state=flags["use_h0"],
        store_final_state=flags["store_fs"],
        use_g=flags["use_g"],
        use_gk=flags["use_gk"],
        save_new_value=flags["save_vn"],
        block_v=counts["block_v"],
    )
    for _ in BLOCK_KERNELS["vk"].expand(shape, arch, BLOCK_KERNELS["vk"].fan):
        pass  # each was checked
    return shape


# ------------------------------------------------------------------------------------------------ kernels


def _make_opt(problem: Problem, block_v: int) -> tuple[KernelSpec, ...]:
    # The block lays g out head-major; the other layout is of calls of the K5 op, by its default.
    return (opt_spec(problem, block_v, opt_rounding(problem.arch.name, block=problem.g_head_major)),)


def _make_vk(problem: Problem, block_v: int) -> tuple[KernelSpec, ...]:
    return (vk_spec(problem, block_v),)


def _make_prepare(problem: Problem, variant: PrepareVariant) -> tuple[KernelSpec, ...]:
    return (fused_prepare_spec(problem, variant),)


def _make_prepare_t(problem: Problem) -> tuple[KernelSpec, ...]:
    return (tprime_prepare_spec(problem),)


def _make_vsplit(problem: Problem, block_v: int) -> tuple[KernelSpec, ...]:
    if block_v not in TPRIME_BLOCK_V[problem.arch.name]:
        return ()
    return (vsplit_spec(problem, block_v, opt_rounding(problem.arch.name, block=True)),)


def _make_triton(problem: Problem) -> tuple[KernelSpec, ...]:
    config, _ = output_config(problem)
    return l2norm_spec(problem), output_spec(problem, config)


BOTH = (True, False)
STATE_DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")
SNAPSHOT_DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
BETA_DTYPES: tuple[Dtype, ...] = get_args(Dtype)
SCAN_COLUMNS = {
    "H": "num_heads",
    "Hg": "num_key_heads",
    "varlen": "is_varlen",
    "BV": "block_v",
    "state": "state_dtype",
    "h0": "use_initial_state",
    "final": "store_final_state",
    "exp2": "use_exp2",
}

_OPT_FAN: Fan = {
    "block_v": SCAN_BLOCK_V,
    "snapshot_dtype": SNAPSHOT_DTYPES,
    "state_dtype": STATE_DTYPES,
    "g_head_major": BOTH,
    "use_state_indices": BOTH,
}
_VSPLIT_FAN: Fan = {
    "block_v": VSPLIT_BLOCK_V,
    "snapshot_dtype": SNAPSHOT_DTYPES,
    "state_dtype": STATE_DTYPES,
    "use_state_indices": BOTH,
}
_VK_FAN: Fan = {"state_dtype": STATE_DTYPES, "g_head_major": (False,)}
_ANY_CALL: Fan = {"use_exp2": BOTH, "use_initial_state": BOTH, "store_final_state": BOTH}

BLOCK_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="opt",
            archs=AMD_ARCHS,
            table=OptStateScanSpec.kernel,
            parse=parse_opt,
            fan=_OPT_FAN,
            complete={**_OPT_FAN, **_ANY_CALL, "g_head_major": (True,)},
            make=_make_opt,
            kinds=(OptStateScanSpec,),
            columns={
                **SCAN_COLUMNS,
                "snapshot": "snapshot_dtype",
                "g [B,H,T]": "g_head_major",
                "pool": "use_state_indices",
            },
        ),
        Kernel(
            name="vk",
            archs=("gfx950",),
            table=VkStateScanSpec.kernel,
            parse=parse_vk,
            fan=_VK_FAN,
            complete=_VK_FAN,  # the block does not call vk
            make=_make_vk,
            kinds=(VkStateScanSpec,),
            columns=SCAN_COLUMNS,
        ),
        Kernel(
            name="prepare",
            archs=AMD_ARCHS,
            table=OptStateScanSpec.kernel,
            parse=parse_opt,
            fan={"variant": get_args(PrepareVariant), "beta_dtype": BETA_DTYPES},
            complete={"variant": get_args(PrepareVariant), "beta_dtype": BETA_DTYPES, "use_exp2": BOTH},
            make=_make_prepare,
            kinds=(FusedPrepareSpec,),
            columns={
                "H": "num_heads",
                "Hg": "num_key_heads",
                "varlen": "is_varlen",
                "variant": "variant",
                "beta": "beta_dtype",
                "exp2": "use_exp2",
            },
        ),
        Kernel(
            name="vsplit",
            archs=AMD_ARCHS,
            table=OptStateScanSpec.kernel,
            parse=parse_opt,
            fan=_VSPLIT_FAN,
            complete={**_VSPLIT_FAN, **_ANY_CALL},
            make=_make_vsplit,
            kinds=(VSplitScanSpec,),
            columns={**SCAN_COLUMNS, "snapshot": "snapshot_dtype", "pool": "use_state_indices"},
        ),
        Kernel(
            name="prepare_t",
            archs=AMD_ARCHS,
            table=OptStateScanSpec.kernel,
            parse=parse_opt,
            fan={"beta_dtype": BETA_DTYPES},
            complete={"beta_dtype": BETA_DTYPES, "use_exp2": BOTH},
            make=_make_prepare_t,
            kinds=(TPrepareSpec,),
            columns={
                "H": "num_heads",
                "Hg": "num_key_heads",
                "varlen": "is_varlen",
                "beta": "beta_dtype",
                "exp2": "use_exp2",
            },
        ),
        Kernel(
            name="triton",
            archs=AMD_ARCHS,
            table=OptStateScanSpec.kernel,
            parse=parse_opt,
            fan={"snapshot_dtype": SNAPSHOT_DTYPES},
            complete={"snapshot_dtype": SNAPSHOT_DTYPES, "use_exp2": BOTH},
            make=_make_triton,
            kinds=(L2NormSpec, OutputSpec),
            columns={
                "kernel": "kernel",
                "H": "num_heads",
                "Hg": "num_key_heads",
                "varlen": "is_varlen",
                "BV": "config.block_v",
                "snapshot": "snapshot_dtype",
                "exp2": "use_exp2",
            },
        ),
    )
}
"""Those of gdn-runtime by name."""

KERNELS: dict[str, Kernel | DecodeKernel] = {**BLOCK_KERNELS, "pa": DecodeKernel()}
"""By the name that the command line uses."""


def jobs(
    arch: str,
    kernels: Sequence[str] | None = None,
    *,
    tables: Iterable[Path] = TABLES,
    complete: bool = False,
) -> tuple[Job, ...]:
    """Specs to compile for ``arch``, each once, in canonical order.

    Args:
        arch: gfx942 or gfx950. Rows of every architecture count: they name model shapes, which run on both.
        kernels: names in ``KERNELS``; None: all that ``arch`` has.
        tables: files and folders of tables; default: ``TABLES``. Bad rows and files are warnings.
        complete: also what no row asks for but a call with the shape of a row may: other states and use_exp2=False;
            other dtypes, scales, windows and sinks of paged decode.

    Raises:
        ValueError: unknown kernel. UnsupportedError: a kernel that ``arch`` does not have, or an unknown ``arch``.
    """
    if parse_arch(arch).name not in AMD_ARCHS:
        raise UnsupportedError("arch", got=repr(arch), supported=AMD_ARCHS)
    names = [name for name, kernel in KERNELS.items() if arch in kernel.archs] if kernels is None else kernels
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        raise ValueError(f"kernel: got {', '.join(unknown)}, expected one of {', '.join(KERNELS)}")
    paths = tuple(tables)
    chosen = [KERNELS[name] for name in names]
    return ordered(spec for kernel in chosen for spec in kernel.of_tables(paths, arch, complete=complete))


def job_key(spec: Job) -> str:
    """Text that is equal for equal specs and orders them: canonical JSON."""
    return canonical_json(spec_json(spec))


def kernel_of(spec: Job) -> Kernel | DecodeKernel:
    """The entry of ``KERNELS`` whose job ``spec`` is."""
    return next(kernel for kernel in KERNELS.values() if isinstance(spec, kernel.kinds))


def ordered(specs: Iterable[Job]) -> tuple[Job, ...]:
    """``specs``, each once, by ``job_key``."""
    return tuple(sorted(dict.fromkeys(specs), key=job_key))
