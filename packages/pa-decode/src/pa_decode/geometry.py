"""The one description of a decode problem: schedule, plans, tuning and tests share it. Host integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from gdn_runtime.arch import Fp8, parse_arch
from gdn_runtime.errors import UnsupportedError, type_error, value_error

from .spec import FP8_ARCHS, QueryDtype, ScaleMode, SinkDtype
from .traits import MAX_BATCH, MAX_LENGTH, d256_pipe, require_packed_k


@dataclass(frozen=True)
class DecodeGeometry:
    """Sizes, types and device of a decode problem.

    ``arch`` is a name of gdn_runtime.arch with FP8; ``compute_units`` those of the device. ``batch`` sequences of
    ``query_length`` query tokens, ``num_heads`` query heads over ``num_kv_heads``, ``head_dim`` elements each, pages of
    ``page_size`` tokens. ``window``: 0, or the tokens that a query token sees, its own included
    (traits.normalise_window). ``v_packed``: V is [N, Hkv, page/16, D, 16], else [N, Hkv, D, page]. ``trans_k`` False is
    an unpacked K: NotImplementedError.

    TypeError or ValueError say which field is wrong; whether a kernel exists, ``PaDecodeSchedule.select`` says.
    """

    arch: str
    compute_units: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    query_length: int = 1
    query_dtype: QueryDtype = "bf16"
    scale_mode: ScaleMode = "tensor"
    v_packed: bool = True
    sink_dtype: SinkDtype = "none"
    window: int = 0
    trans_k: bool = True

    def __post_init__(self) -> None:
        require_packed_k(self.trans_k)
        if parse_arch(self.arch).fp8 is None:
            raise UnsupportedError("arch", got=self.arch, supported=FP8_ARCHS)
        for name in ("compute_units", "batch", "num_heads", "num_kv_heads", "head_dim", "page_size", "query_length"):
            check_integer(name, getattr(self, name), 1)
        check_integer("window", self.window, 0, MAX_LENGTH)
        check_integer("batch", self.batch, 1, MAX_BATCH)
        if self.num_heads % self.num_kv_heads:
            raise value_error("num_heads", self.num_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        for name, choices in (("query_dtype", QueryDtype), ("scale_mode", ScaleMode), ("sink_dtype", SinkDtype)):
            if getattr(self, name) not in get_args(choices):
                raise value_error(name, repr(getattr(self, name)), f"one of {', '.join(get_args(choices))}")
        if not isinstance(self.v_packed, bool):
            raise type_error("v_packed", type(self.v_packed).__name__, "bool")

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """R = QL * G, query rows per sequence and KV head."""
        return self.query_length * self.group_size

    @property
    def fp8(self) -> Fp8:
        """Flavour of the cache."""
        flavour = parse_arch(self.arch).fp8
        assert flavour is not None, "checked at construction"
        return flavour

    @property
    def is_pipe(self) -> bool:
        """Whether the D256 pipe takes the problem (traits.d256_pipe)."""
        is_gfx950 = parse_arch(self.arch).name == "gfx950"
        return d256_pipe(is_gfx950, self.head_dim, self.page_size, self.query_length, self.group_size, self.trans_k)


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """``value`` as an int of [least, most], else a TypeError or ValueError that calls it ``name``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(name, type(value).__name__, "int")
    if value < least or (most is not None and value > most):
        raise value_error(name, value, f"an int >= {least}" if most is None else f"an int of {least} to {most}")
    return value
