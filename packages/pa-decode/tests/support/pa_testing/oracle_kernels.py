"""A backend whose kernels are the oracles: what the host hands to kernels can be tested without any."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pa_decode import launch, reference, select
from pa_decode.planner import make_plan
from pa_decode.reference import DecodeInputs
from pa_decode.spec import REDUCE_ROWS, AttentionSpec, ReduceSpec


class OracleKernels:
    """Kernels by spec, as ``pa_decode.launch.Kernels``. Tensors are read through the strides that a launch passes.

    ``launches`` holds (spec, grid, arguments by name) of each launch.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, int, int], dict[str, Any]]] = []

    def __call__(self, spec: Any, device: torch.device) -> Any:
        spec.check()
        return functools.partial(self._launch, spec)

    def _launch(self, spec: Any, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        named = dict(zip((argument.name for argument in spec.ARGUMENTS), args, strict=True))
        for argument in spec.ARGUMENTS:
            value = named[argument.name]
            if argument.kind == "pointer":
                assert value is None or isinstance(value, Tensor), argument
            else:
                assert type(value) is (float if argument.kind == "f32" else int), (argument, value)
        self.launches.append((spec, grid, named))
        if isinstance(spec, AttentionSpec):
            _attention(spec, grid, named)
        elif isinstance(spec, ReduceSpec):
            _reduce(spec, grid, named)
        else:
            _plan(named)


def _attention(spec: AttentionSpec, grid: tuple[int, int, int], a: dict[str, Any]) -> None:
    heads, query = a["num_kv_heads"], a["query"]
    assert grid == (a["capacity"], heads, 1) == (a["work_info"].shape[0], heads, 1)
    for name in ("query", "k_cache", "v_cache", "work_info", "partial_out", "partial_max", "partial_sum"):
        assert a[name].data_ptr() % 16 == 0, name
    assert a["q_stride_row"] % 16 == a["q_stride_head"] % 16 == 0
    assert (a["num_blocks_k"], a["num_blocks_v"]) == (a["k_cache"].shape[0], a["v_cache"].shape[0])
    scales = []
    for scale in (a["k_scale"], a["v_scale"]):
        if spec.scale_mode == "token":
            strides = a["scale_stride_block"] // 4, a["scale_stride_head"] // 4, 1
            scale = scale.as_strided((a["num_blocks_k"], heads, spec.page_size), strides)
        scales.append(scale)
    batch, table = query.shape[0] // spec.query_length, a["block_tables"]
    inputs = DecodeInputs(
        query=query.as_strided(query.shape, (a["q_stride_row"] // 2, a["q_stride_head"] // 2, 1)),
        k_cache=a["k_cache"],
        v_cache=a["v_cache"],
        block_tables=table.as_strided((batch, a["table_width"]), (a["table_stride_row"] // 4, 1)),
        seq_lens=torch.zeros(batch, dtype=torch.int32),  # the lengths are those of the tasks
        softmax_scale=a["softmax_scale"],
        query_length=spec.query_length,
        k_scale=scales[0],
        v_scale=scales[1],
        window=a["window"] if spec.windowed else 0,
    )
    assert spec.windowed or a["window"] == 0
    used = a["work_info"][:, 1] != a["work_info"][:, 2]
    assert not spec.single_tile or bool((a["work_info"][:, 2] - a["work_info"][:, 1] <= 1).all())
    made = reference.partials(inputs, a["work_info"], denominator="matched")
    for name, values in zip(("partial_out", "partial_max", "partial_sum"), made, strict=True):
        a[name][:, used] = values[:, used]


def _reduce(spec: ReduceSpec, grid: tuple[int, int, int], a: dict[str, Any]) -> None:
    heads, out, capacity = a["num_kv_heads"], a["out"], a["capacity"]
    rows = spec.group_size * spec.query_length
    assert grid == (-(-rows // REDUCE_ROWS), heads, a["batch"]) and int(a["reduce_info"][:, 1].amax()) <= spec.max_parts
    assert a["partial_out"].shape == (heads, capacity, rows, spec.head_dim) and out.data_ptr() % 16 == 0
    assert (a["sinks"] is None) == (spec.sink_dtype == "none")
    merged = reference.reduce(
        a["partial_out"], a["partial_max"], a["partial_sum"], a["reduce_info"], query_length=spec.query_length,
        sinks=a["sinks"],
    )  # fmt: skip
    out.as_strided(out.shape, (a["out_stride_row"] // 2, a["out_stride_head"] // 2, 1)).copy_(merged)


def _plan(a: dict[str, Any]) -> None:
    names = "capacity", "max_partitions", "window", "query_length"
    made = make_plan(a["seq_lens"].tolist(), **{name: a[name] for name in names})
    a["work_info"].zero_()
    for slot, task in enumerate(made.tasks):
        a["work_info"][slot] = torch.tensor([task.sequence, task.first_tile, task.end_tile, task.context])
    a["reduce_info"].copy_(torch.tensor(made.reduce))


_current = OracleKernels()


@contextmanager
def oracle_kernels() -> Iterator[OracleKernels]:
    """While this is open, the kernels of the backend "emulate" are oracles. It need not be installed."""
    global _current
    _current = OracleKernels()
    where = {"emulate": f"{__name__}:_current"}
    launch.kernels.cache_clear()
    select.forget()
    with mock.patch.dict(launch._WHERE, where), mock.patch.object(select, "_is_installed", lambda package: True):
        yield _current
    launch.kernels.cache_clear()
    select.forget()
