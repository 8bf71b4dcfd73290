"""The ops under torch.library's checks, torch.compile, torch.export and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gdn_runtime import (
    UnsupportedError,
    build_prefill_metadata,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_fwd_h,
    env,
)
from gdn_runtime.ops import block, state_scan
from gdn_runtime.testing import GdnInputs, assert_bitwise_equal, make_inputs

BF16, FP32 = torch.bfloat16, torch.float32
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def varlen(lens: list[int], **options: Any) -> GdnInputs:
    return make_inputs(lens, 2, 1, gate="weak", **options)


def dense(batch: int, tokens: int, **options: Any) -> GdnInputs:
    return make_inputs((batch, tokens), 2, 1, gate="weak", **options)


def normal(*shape: int) -> Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def compiled(function: Function) -> tuple[Function, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def equal(got: Any, expected: Any, what: str = "") -> None:
    for n, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a is None or b is None:
            assert a is b, f"{what} result {n}"
        else:
            assert_bitwise_equal(a, b, f"{what} result {n}".strip())
            assert a.stride() == b.stride(), f"{what} stride of result {n}"


# ------------------------------------------------------------------------------------------------ torch.library


def captured(op_owner: Any, call: Function) -> tuple[Any, ...]:
    """Arguments that ``call`` gives the op of a module when it is traced."""
    calls: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_owner, "traced", lambda: True)
        patch.setattr(op_owner, "_op", lambda *args: calls.append(args))
        call()
    (args,) = calls
    addresses = [x.data_ptr() for x in args if isinstance(x, Tensor) and x.numel()]
    assert len(set(addresses)) == len(addresses), "one tensor is two arguments of an op that writes it"
    return args


def block_samples() -> dict[str, Function]:
    x, packed = dense(2, 70, state="random"), varlen([10, 0, 70], state="random", spare_rows=2)
    packed_options = {"cu_seqlens": packed.cu_seqlens, "output_final_state": True}
    metadata = build_prefill_metadata([10, 0, 70], cu_seqlens=packed.cu_seqlens)  # type: ignore[arg-type]
    pool, slots = normal(5, 2, 128, 128), torch.tensor([4, -1, 0])
    return {
        "dense states": lambda: chunk_gated_delta_rule(
            *x.tensors, initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
        ),
        "dense in place": lambda: chunk_gated_delta_rule(
            *x.tensors, initial_state=x.initial_state, output_final_state=True, inplace_final_state=True
        ),
        "cu_seqlens": lambda: chunk_gated_delta_rule(*packed.tensors, **packed_options),
        "schedule": lambda: chunk_gated_delta_rule(*packed.tensors, prefill_metadata=metadata, **packed_options),
        "pool": lambda: chunk_gated_delta_rule(
            *packed.tensors,
            initial_state=pool,
            initial_state_indices=slots,
            has_initial_state=slots > 0,
            o=torch.zeros_like(packed.v),
            prefill_metadata=metadata,
            snapshot_dtype=FP32,
            **packed_options,
        ),
    }


def scan_samples() -> dict[str, Function]:
    x, packed = dense(2, 70, state="random"), varlen([10, 0, 70], state="random")
    metadata = build_prefill_metadata([10, 0, 70], cu_seqlens=packed.cu_seqlens)  # type: ignore[arg-type]
    w, wp = normal(2, 2, 70, 128).to(BF16), normal(1, 2, 80, 128).to(BF16)
    pool, slots = normal(5, 2, 128, 128), torch.tensor([4, -1, 0], dtype=torch.int32)
    schedule = {"cu_seqlens": packed.cu_seqlens, "prefill_metadata": metadata, "output_final_state": True}
    return {
        "dense without v_new": lambda: chunk_gated_delta_rule_fwd_h(x.k, w, w.clone(), save_new_value=False),
        "gates": lambda: chunk_gated_delta_rule_fwd_h(
            x.k, w, w.clone(), x.g, torch.zeros(140, 2, 128), initial_state=x.initial_state, output_final_state=True
        ),
        "schedule": lambda: chunk_gated_delta_rule_fwd_h(
            packed.k, wp, wp.clone(), packed.g, initial_state=packed.initial_state, **schedule
        ),
        "pool without v_new": lambda: chunk_gated_delta_rule_fwd_h(
            packed.k,
            wp,
            wp.clone(),
            packed.g,
            initial_state=pool,
            initial_state_indices=slots,
            save_new_value=False,
            snapshot_dtype=FP32,
            **schedule,
        ),
    }


@pytest.mark.parametrize("name", block_samples())
def test_opcheck_of_the_block(name: str) -> None:
    args = captured(block, block_samples()[name])
    torch.library.opcheck(torch.ops.gdn.chunk_gated_delta_rule_out.default, args)


@pytest.mark.parametrize("name", scan_samples())
def test_opcheck_of_the_state_scan(name: str) -> None:
    args = captured(state_scan, scan_samples()[name])
    torch.library.opcheck(torch.ops.gdn.chunk_gated_delta_rule_fwd_h_out.default, args)


@pytest.mark.parametrize("samples", [block_samples, scan_samples])
def test_the_op_does_what_the_eager_call_does(samples: Callable[[], dict[str, Function]]) -> None:
    owner = block if samples is block_samples else state_scan
    for name in samples():
        eager, through = samples()[name], samples()[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "traced", lambda: True)
            got = through()
        equal(got, eager(), name)


# ------------------------------------------------------------------------------------------------ torch.compile


def test_compile_dense_with_other_lengths() -> None:
    def call(*tensors: Tensor) -> Any:
        return chunk_gated_delta_rule(*tensors, output_final_state=True)

    fast, counter = compiled(call)
    for tokens in (100, 17, 1008):
        x = dense(1, tokens)
        equal(fast(*x.tensors), call(*x.tensors), f"{tokens} tokens")
    assert counter.frame_count <= 2, "one graph for the first length and one for all others"


def test_c14_compile_varlen_with_metadata_and_other_batches() -> None:
    def call(x: GdnInputs, metadata: Any) -> Any:
        return chunk_gated_delta_rule(
            *x.tensors, cu_seqlens=x.cu_seqlens, prefill_metadata=metadata, output_final_state=True
        )

    fast, counter = compiled(call)
    frames = []
    for lens in ([70, 130], [66, 200, 5], [300, 0, 0, 90], [65] * 9, [128, 1]):
        x = varlen(lens)
        metadata = build_prefill_metadata(lens, cu_seqlens=x.cu_seqlens)  # type: ignore[arg-type]
        equal(fast(x, metadata), call(x, metadata), str(lens))
        frames.append(counter.frame_count)
    assert frames[-1] == frames[2], f"graphs per batch {frames}: lengths must not compile new ones for ever"


def test_compile_varlen_without_metadata() -> None:
    def call(x: GdnInputs) -> Any:
        return chunk_gated_delta_rule(*x.tensors, cu_seqlens=x.cu_seqlens, output_final_state=True)

    fast, counter = compiled(call)
    for lens in ([70, 130], [66, 200, 5], [300, 0, 0, 90]):
        equal(fast(varlen(lens)), call(varlen(lens)), str(lens))
    x = varlen([70, 130])
    fast(x)
    x.cu_seqlens.copy_(torch.tensor([0, 20, 200]))  # type: ignore[union-attr]
    equal(fast(x), call(x), "cu_seqlens edited in place")
    with pytest.raises(ValueError, match=r"^length of the token axis: got 200, expected at least 201"):
        x.cu_seqlens.copy_(torch.tensor([0, 20, 201]))  # type: ignore[union-attr]
        fast(x)
    assert counter.frame_count <= 2


def test_compile_decode_prefix() -> None:
    def call(x: GdnInputs, decodes: int) -> Any:
        return chunk_gated_delta_rule(
            *x.tensors, cu_seqlens=x.cu_seqlens, num_decodes=decodes, num_decode_tokens=decodes
        )

    fast, counter = compiled(call)
    for decodes in (3, 300):
        x = varlen([70, 10])
        cu = torch.tensor([*range(decodes), decodes, decodes + 70, decodes + 80], dtype=torch.int32)
        equal(fast(x.with_(cu_seqlens=cu), decodes), call(x, 0), f"{decodes} decodes")
    assert counter.frame_count <= 2


def test_c14_compile_pool_in_place_and_o_of_the_caller() -> None:
    def call(x: GdnInputs, pool: Tensor, slots: Tensor, o: Tensor) -> Any:
        result, state = chunk_gated_delta_rule(
            *x.tensors,
            cu_seqlens=x.cu_seqlens,
            initial_state=pool,
            initial_state_indices=slots,
            output_final_state=True,
            o=o,
        )
        return result, state, pool.sum()  # a reader after the op: sees the written pool

    x = varlen([70, 10], spare_rows=2)
    start = normal(5, 2, 128, 128)
    fast, _ = compiled(call)
    for slots in (torch.tensor([4, 0]), torch.tensor([1, -1])):
        pools, outs = [start.clone(), start.clone()], [torch.full_like(x.v, 7.0), torch.full_like(x.v, 7.0)]
        got = fast(x, pools[0], slots, outs[0])
        expected = call(x, pools[1], slots, outs[1])
        assert got[0] is outs[0] and got[1] is pools[0], "the caller's own tensors come back"
        equal((*got, pools[0], outs[0]), (*expected, pools[1], outs[1]))
        assert not torch.equal(pools[0], start)


def test_compile_options() -> None:
    def call(x: GdnInputs, scale: float) -> Any:
        return chunk_gated_delta_rule(
            *x.tensors,
            scale=scale,
            initial_state=x.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            snapshot_dtype=FP32,
            use_exp2=False,
            seq_lens_cpu=[70, 10],
            cu_seqlens=x.cu_seqlens,
        )

    fast, _ = compiled(call)
    for scale in (0.5, 0.25):
        x = varlen([70, 10], state="random", state_dtype=BF16)
        equal(fast(x, scale), call(x, scale), f"scale {scale}")


def test_compiled_code_follows_the_settings() -> None:
    def call(x: GdnInputs, pool: Tensor, slots: Tensor) -> Any:
        return chunk_gated_delta_rule(
            *x.tensors, initial_state=pool, initial_state_indices=slots, output_final_state=True
        )

    fast, _ = compiled(call)
    x, slots = dense(2, 70), torch.tensor([0, 9])
    fast(x, torch.zeros(3, 2, 128, 128), slots)
    with env.override(check_indices=True), pytest.raises(ValueError, match=r"^initial_state_indices\[1\]: got 9"):
        fast(x, torch.zeros(3, 2, 128, 128), slots)


def test_compile_of_the_state_scan() -> None:
    def call(x: GdnInputs, w: Tensor, u: Tensor, metadata: Any) -> Any:
        return chunk_gated_delta_rule_fwd_h(
            x.k, w, u, x.g, cu_seqlens=x.cu_seqlens, prefill_metadata=metadata, output_final_state=True
        )

    fast, _ = compiled(call)
    for lens in ([70, 10], [130, 0, 5]):
        x = varlen(lens)
        w, u = normal(1, 2, sum(lens), 128).to(BF16), normal(1, 2, sum(lens), 128).to(BF16)
        metadata = build_prefill_metadata(lens, cu_seqlens=x.cu_seqlens)  # type: ignore[arg-type]
        equal(fast(x, w, u, metadata), call(x, w, u, metadata), str(lens))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without prefill_metadata while tracing"):
        fast(x, w, u, None)


def test_compile_of_the_state_scan_without_metadata_is_refused_without_fullgraph_too() -> None:
    x, w = varlen([70, 10]), normal(1, 2, 80, 128).to(BF16)
    fast = torch.compile(chunk_gated_delta_rule_fwd_h, backend="aot_eager")
    with pytest.raises(UnsupportedError, match=r"got cu_seqlens alone, supported: prefill_metadata$"):
        fast(x.k, w, w + 1, cu_seqlens=x.cu_seqlens)


def test_errors_while_compiling_name_what_is_wrong() -> None:
    fast, _ = compiled(lambda x, **options: chunk_gated_delta_rule(*x.tensors, **options))
    x = dense(1, 70)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"g.shape: got \[1, 69, 2\], expected \[1, 70, 2\]"):
        fast(x.with_(g=x.g[:, :69]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UnsupportedError\('head size'"):
        fast(x.with_(v=x.v[..., :64]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compile_without_grad(mode: Any) -> None:
    x = dense(1, 70)
    leaf = x.with_(q=x.q.clone().requires_grad_())
    fast, _ = compiled(lambda x: chunk_gated_delta_rule(*x.tensors, output_final_state=True))
    with mode():
        equal(fast(leaf), chunk_gated_delta_rule(*leaf.tensors, output_final_state=True))


# ------------------------------------------------------------------------------------------------ export, fake tensors


class Block(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = tuple({1: tokens} for _ in range(5))
    program = torch.export.export(Block(), dense(2, 70).tensors, dynamic_shapes=shapes, strict=strict)
    x = dense(2, 131)
    equal(program.module()(*x.tensors), Block()(*x.tensors))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_op(mode: str) -> None:
    x = varlen([70, 10], state="random")
    graph = make_fx(
        lambda x_state, cu, *tensors: chunk_gated_delta_rule(
            *tensors, cu_seqlens=cu, initial_state=x_state, output_final_state=True, o=torch.zeros_like(tensors[2])
        ),
        tracing_mode=mode,
    )(x.initial_state, x.cu_seqlens, *x.tensors)
    ours = [node for node in graph.graph.nodes if "gdn" in str(node.target)]
    assert [str(node.target) for node in ours] == ["gdn.chunk_gated_delta_rule_out.default"]
    expected = chunk_gated_delta_rule(
        *x.tensors, cu_seqlens=x.cu_seqlens, initial_state=x.initial_state, output_final_state=True
    )
    equal(graph(x.initial_state, x.cu_seqlens, *x.tensors), expected)


@pytest.mark.parametrize("shape", [(2, 70), [70, 0, 10]], ids=str)
def test_fake_results_look_like_real_ones(shape: Any) -> None:
    x = make_inputs(shape, 2, 1, spare_rows=2)
    options = {"output_final_state": True, "state_dtype": BF16}
    real = chunk_gated_delta_rule(*x.tensors, cu_seqlens=x.cu_seqlens, **options)
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(y) for y in x.tensors]
        cu = None if x.cu_seqlens is None else mode.from_tensor(x.cu_seqlens)
        fake = chunk_gated_delta_rule(*tensors, cu_seqlens=cu, **options)
    for a, b in zip(fake, real, strict=True):
        assert isinstance(a, FakeTensor) and b is not None
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
