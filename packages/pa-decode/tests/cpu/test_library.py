"""The ops of torch.library: what they write, tracing, compilation. Kernels are oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pa_decode import pa_decode
from pa_testing import OracleKernels, arguments_of
from pa_testing.oracle_calls import EMULATE, close, op_arguments, planned, problem


def test_ops(oracle: OracleKernels) -> None:
    """Not test_schema: it compares FP8 tensors with torch.allclose, which has no FP8; the test below does its work."""
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs)
    for part in workspace.parts.values():
        part.zero_()
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    op: Any = torch.ops.pa_decode.decode_out.default
    torch.library.opcheck(op, op_arguments(inputs, plan, workspace), test_utils=tests)
    before = [x.clone() for x in (inputs.query, inputs.block_tables, inputs.seq_lens, plan.work_info)]
    args = op_arguments(inputs, plan, workspace)
    op(*args)
    assert close(args[15], inputs)
    for x, old in zip((inputs.query, inputs.block_tables, inputs.seq_lens, plan.work_info), before, strict=True):
        assert torch.equal(x, old)
    mutated = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == {"partial_out", "partial_max", "partial_sum", "out"}
    write = (inputs.seq_lens, plan.work_info, plan.reduce_info, 256, 0, 4, "emulate", "gfx950")
    torch.library.opcheck(torch.ops.pa_decode.write_plan.default, write)


@pytest.mark.parametrize("scale_mode", ["tensor", "token"])
def test_ops_write_what_their_schema_says(oracle: OracleKernels, scale_mode: str) -> None:
    """Bytes and versions of every argument, FP8 caches included."""
    inputs = problem(sinks=True, scale_mode=scale_mode, window=17)
    plan, workspace = planned(inputs)
    args = op_arguments(inputs, plan, workspace)
    op: Any = torch.ops.pa_decode.decode_out.default
    names = [argument.name for argument in op._schema.arguments]
    written = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    tensors = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)}
    assert written <= tensors.keys() and not op._schema.returns
    before = {name: (_bytes(x), x._version) for name, x in tensors.items()}
    op(*args)
    for name, x in tensors.items():
        assert (_bytes(x) != before[name][0]) is (name in written), name
        assert name in written or x._version == before[name][1], name


def _bytes(x: Tensor) -> list[int]:
    flat: list[int] = x.contiguous().view(torch.uint8).flatten().tolist()
    return flat


@pytest.mark.parametrize("with_plan", [True, False])
def test_compiled_without_breaks(oracle: OracleKernels, with_plan: bool) -> None:
    inputs = problem(sinks=True)
    plan, workspace = planned(inputs) if with_plan else (None, None)

    def call(query: Tensor, seq_lens: Tensor) -> Tensor:
        if plan is not None:
            plan.refresh(seq_lens)
        changed = {"query": query * 2, "seq_lens": seq_lens, "plan": plan, "workspace": workspace}
        return pa_decode(**arguments_of(inputs, **EMULATE, **changed)) + 1

    expected = call(inputs.query, inputs.seq_lens)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(inputs.query, inputs.seq_lens), expected)
