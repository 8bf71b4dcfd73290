"""What a serving engine relies on: no compilation, no wait, no growth, capture, streams, devices, torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gdn_runtime import PrefillMetadata, build_prefill_metadata, chunk_gated_delta_rule, env, explain
from gdn_runtime.private import current_stream
from gdn_runtime.testing import GdnInputs
from gdn_testing.device import assert_equal_on_device, compilations, device_inputs, syncs_are_errors

HEADS = (32, 16)
LENGTHS = (1, 17, 1000, 1008, 1016, 8191)
INPUTS = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True, params=["fast", "staged"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both paths of the block; on other devices than sm90 they are one."""
    with env.override(prefill=request.param):
        yield


def metadata_of(x: GdnInputs) -> PrefillMetadata:
    return build_prefill_metadata(x.seq_lens, cu_seqlens=x.cu_seqlens)


def run(x: GdnInputs, **options: object) -> tuple[Tensor, Tensor]:
    options = {"initial_state": x.initial_state, "output_final_state": True, "cu_seqlens": x.cu_seqlens} | options
    return chunk_gated_delta_rule(*x.tensors, **options)


def split(tokens: int, num_seqs: int) -> list[int]:
    """Sequences of about equal length; the first ones are empty if there are fewer tokens than sequences."""
    return [tokens * (n + 1) // num_seqs - tokens * n // num_seqs for n in range(num_seqs)]


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_equal_on_device(actual[0], expected[0], "o")
    assert_equal_on_device(actual[1], expected[1], "final_state")


class PoolCall:
    """A call as an engine makes it: decode rows in front, a pool, slots and flags sliced from per-batch tables."""

    def __init__(self, lens: list[int], *, decodes: int = 0, seed: int = 0) -> None:
        self.x = device_inputs(lens, *HEADS, state=False, seed=seed)
        full = [1] * decodes + lens
        offsets = torch.tensor([0, *full], dtype=torch.int32).cumsum(0).to(torch.int32)
        self.cu = offsets.cuda()
        self.decodes = decodes
        slots = torch.arange(len(full) + 1, 1, -1, dtype=torch.int32, device="cuda")
        self.indices = slots[decodes:]
        self.flags = (slots % 3 != 0)[decodes:]
        self.pool = torch.randn(len(full) + 2, HEADS[0], 128, 128, device="cuda") * 0.1
        self.metadata = build_prefill_metadata(full, cu_seqlens=self.cu, num_decodes=decodes, num_decode_tokens=decodes)

    def __call__(self, pool: Tensor | None = None, **options: object) -> tuple[Tensor, Tensor]:
        return chunk_gated_delta_rule(
            *self.x.tensors,
            initial_state=self.pool if pool is None else pool,
            initial_state_indices=self.indices,
            has_initial_state=self.flags,
            output_final_state=True,
            cu_seqlens=self.cu,
            num_decodes=self.decodes,
            num_decode_tokens=self.decodes,
            prefill_metadata=self.metadata,
            **options,
        )


def test_hook_sees_a_compilation() -> None:
    """The counter of the tests below counts."""
    x = device_inputs([5], 3, 1)
    with compilations() as compiled:
        run(x, use_qk_l2norm_in_kernel=True)
    options = {"cu_seqlens": x.cu_seqlens, "initial_state": x.initial_state, "output_final_state": True}
    fast = explain(*x.tensors, **options).fast is not None
    assert len(compiled) == (3 if fast else 4), compiled
    with compilations() as compiled:
        run(x, use_qk_l2norm_in_kernel=True)
    assert compiled == []


@pytest.mark.parametrize("l2norm", [False, True])
def test_no_compilation_for_new_lengths(l2norm: bool) -> None:
    options = {"use_qk_l2norm_in_kernel": l2norm}
    for lens in ([64], [64] * 9, [8191]):  # the rule for K5 knows two tile widths, the fast path has segments too
        PoolCall(lens)(**options)
        x = device_inputs((len(lens), lens[0]), *HEADS)
        run(x, **options)
    with compilations() as compiled:
        for tokens in LENGTHS:
            for num_seqs in range(1, 10):
                PoolCall(split(tokens, num_seqs), decodes=num_seqs % 4)(**options)
            for batch in (1, 2, 9):
                run(device_inputs((batch, tokens), *HEADS), **options)
    assert compiled == []


@pytest.mark.parametrize("lens", [[1], [1000], [0, 5, 1016, 0, 64], [8191]], ids=str)
def test_no_wait_in_a_warm_call(lens: list[int]) -> None:
    call = PoolCall(lens, decodes=2)
    dense = device_inputs((2, 100), *HEADS)
    packed = device_inputs(lens, *HEADS)
    for warm in (call, lambda: run(dense), lambda: run(packed)):
        warm()
    buffer = torch.empty_like(call.x.v)
    with syncs_are_errors():
        call()
        call(o=buffer)
        run(dense)
        run(packed)  # no metadata: the offsets were read at the first sight of this tensor


def test_no_copy_to_the_host_in_the_trace() -> None:
    call = PoolCall([0, 5, 1016, 0, 64], decodes=2)
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    if not any("scan_kernel" in name for name in names):
        pytest.skip(f"the profiler shows no kernels on this machine (saw {len(names)} events)")
    assert [name for name in names if "Memcpy" in name and ("DtoH" in name or "HtoD" in name)] == []
    kernels = [name for name in names if "kernel" in name and "gdn" not in name]
    # Prepare, state scan, output, or prepare and scan of the fast path; nothing that fills or casts.
    assert len(kernels) == (9 if any("state_scan" in name for name in kernels) else 6), kernels


def requested(which: str = "current") -> int:
    """Bytes that live tensors asked for: memory_allocated() adds what the allocator rounds up."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def test_only_the_outputs_stay_allocated() -> None:
    call = PoolCall([300, 0, 700])
    dense = device_inputs((2, 100), *HEADS)
    buffer = torch.empty_like(call.x.v)
    call()
    run(dense)

    def kept(function: Callable[[], object]) -> int:
        before, allocated = requested(), torch.cuda.memory_allocated()
        result = function()
        growth = requested() - before
        del result
        assert (requested(), torch.cuda.memory_allocated()) == (before, allocated)
        return growth

    def nbytes(*tensors: Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert kept(call) == nbytes(call.x.v)
    assert kept(lambda: call(o=buffer)) == 0
    assert kept(lambda: run(dense)) == nbytes(dense.v, dense.initial_state)
    peaks = set()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.add(requested("peak"))
    assert len(peaks) == 1


def test_capture_and_replay_with_new_values() -> None:
    call = PoolCall([130, 0, 70, 1], decodes=1)
    start = call.pool.clone()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        call()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    call.pool.copy_(start)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_o, captured_pool = call()
    assert captured_pool is call.pool
    torch.cuda.synchronize()
    assert_equal_on_device(call.pool, start, "pool after the capture, which runs nothing")

    for seed in range(1, 4):
        values = PoolCall([130, 0, 70, 1], decodes=1, seed=seed)
        for name in INPUTS:
            getattr(call.x, name).copy_(getattr(values.x, name))
        call.indices.copy_(call.indices.roll(seed))
        call.pool.copy_(start)
        expected_pool = start.clone()
        expected_o, _ = call(pool=expected_pool)
        PoolCall([4000, 3000, 1191], seed=seed)()  # a larger eager call between capture and replay
        captured_o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal_on_device(captured_o, expected_o, "o of the replay")
        assert_equal_on_device(call.pool, expected_pool, "pool of the replay")


def test_capture_keeps_nothing_outside_its_pool() -> None:
    call = PoolCall([130, 70])
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    graph.replay()
    torch.cuda.synchronize()
    del outputs, graph
    assert torch.cuda.memory_allocated() == before


def test_capture_without_metadata_raises() -> None:
    x = device_inputs([130, 70], *HEADS)
    run(x)
    counter = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for route in ({}, {"seq_lens_cpu": [130, 70]}):
            with pytest.raises(RuntimeError, match="capture"):
                run(x, **route)
        counter.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 1
    run(x)


def test_raw_stream_is_the_current_one() -> None:
    stream = torch.cuda.Stream()
    index = stream.device_index
    assert current_stream(index) == torch.cuda.current_stream(index).cuda_stream
    with torch.cuda.stream(stream):
        assert current_stream(index) == stream.cuda_stream != 0


def test_work_goes_to_the_current_stream() -> None:
    x = device_inputs([130, 70], *HEADS)
    metadata = metadata_of(x)
    expected = run(x, prefill_metadata=metadata)
    late = x.with_(**{name: torch.full_like(getattr(x, name), float("nan")) for name in INPUTS})
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: kernels on another stream would run before the values arrive
        for name in INPUTS:
            getattr(late, name).copy_(getattr(x, name))
        result = run(late, prefill_metadata=metadata)
        assert not stream.query()
    stream.synchronize()
    assert_same(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_data_on_a_device_that_is_not_current() -> None:
    here = device_inputs([130, 0, 70], *HEADS)
    moved = {name: getattr(here, name).to("cuda:1") for name in (*INPUTS, "initial_state", "cu_seqlens")}
    there = here.with_(**moved)
    expected = run(here)
    with torch.cuda.device(0):
        for route in ({}, {"prefill_metadata": metadata_of(there)}):
            o, final = run(there, **route)
            assert torch.cuda.current_device() == 0
            assert o.device == final.device == torch.device("cuda:1")
            assert_same((o.to("cuda:0"), final.to("cuda:0")), expected)
        with pytest.raises(ValueError, match="device"):
            run(there.with_(k=here.k))


def test_inference_mode() -> None:
    x = device_inputs([130, 0, 70], *HEADS)
    expected = run(x)
    with torch.inference_mode():
        assert_same(run(x), expected)
        inner = device_inputs([130, 0, 70], *HEADS)
        metadata = metadata_of(inner)
        assert_same(run(inner), expected)
        with syncs_are_errors():
            result = run(inner, prefill_metadata=metadata)
        assert_same(result, expected)
    assert_same(run(x, prefill_metadata=metadata_of(x)), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("inference", [False, True])
def test_offsets_edited_in_place(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = device_inputs([100, 156], *HEADS)
        cu = x.cu_seqlens.to(dtype)
        metadata = build_prefill_metadata([100, 156], cu_seqlens=cu)
        run(x, cu_seqlens=cu)
        cu.copy_(torch.tensor([0, 64, 256]))
        expected = run(x, cu_seqlens=torch.tensor([0, 64, 256], dtype=dtype, device="cuda"))
        assert_same(run(x, cu_seqlens=cu), expected)
        if not inference:
            with pytest.raises(ValueError, match="cu_seqlens"):
                run(x, cu_seqlens=cu, prefill_metadata=metadata)


def layer_of(x: GdnInputs) -> Callable[..., tuple[Tensor, Tensor]]:
    """A model's use of the block: something before it, something behind it."""
    metadata = metadata_of(x)

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        o, final = chunk_gated_delta_rule(
            q * 2,
            k,
            v,
            g,
            beta,
            initial_state=x.initial_state,
            output_final_state=True,
            cu_seqlens=x.cu_seqlens,
            prefill_metadata=metadata,
        )
        return o + 1, final

    return layer


def test_compiled_by_inductor_equals_eager() -> None:
    torch._dynamo.reset()
    for lens in ([130, 0, 70], [200, 5, 1]):
        x = device_inputs(lens, *HEADS)
        layer = layer_of(x)
        assert_same(torch.compile(layer, fullgraph=True)(*x.tensors), layer(*x.tensors))
    torch._dynamo.reset()


def test_compiled_pool_in_place_equals_eager() -> None:
    torch._dynamo.reset()
    call = PoolCall([130, 0, 70], decodes=1)
    expected_pool, pool, untouched = call.pool.clone(), call.pool.clone(), call.pool.clone()
    expected_o, _ = call(pool=expected_pool)

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor) -> Tensor:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=pool,
            initial_state_indices=call.indices,
            has_initial_state=call.flags,
            output_final_state=True,
            cu_seqlens=call.cu,
            num_decodes=1,
            num_decode_tokens=1,
            prefill_metadata=call.metadata,
        )[0]

    compiled = torch.compile(layer, fullgraph=True)
    assert_equal_on_device(compiled(*call.x.tensors, pool), expected_o, "o")
    assert_equal_on_device(pool, expected_pool, "pool")
    assert_equal_on_device(pool[:2], untouched[:2], "slots without an owner")
    pool.copy_(untouched)
    with compilations() as seen:
        assert_equal_on_device(compiled(*call.x.tensors, pool), expected_o, "o of the second call")
    assert seen == []
    assert_equal_on_device(pool, expected_pool, "pool of the second call")
    torch._dynamo.reset()


def test_compiled_dense_call_equals_eager() -> None:
    torch._dynamo.reset()
    x = device_inputs((2, 100), *HEADS)
    layer = torch.compile(
        lambda *tensors: chunk_gated_delta_rule(
            *tensors, initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
        ),
        fullgraph=True,
    )
    assert_same(layer(*x.tensors), run(x, use_qk_l2norm_in_kernel=True))
    torch._dynamo.reset()


FIRST_CALL = """
import threading
import torch
from gdn_runtime import chunk_gated_delta_rule
gen = torch.Generator("cuda").manual_seed(0)
q, k = (torch.nn.functional.normalize(torch.randn(1, 200, 2, 128, generator=gen, device="cuda"), dim=-1).bfloat16()
        for _ in range(2))
v = torch.randn(1, 200, 4, 128, generator=gen, device="cuda").bfloat16()
g = -torch.rand(1, 200, 4, generator=gen, device="cuda")
beta = torch.rand(1, 200, 4, generator=gen, device="cuda")
cu = torch.tensor([0, 130, 200], device="cuda")
results, errors, gate = {}, [], threading.Barrier(8)
def work(i):
    try:
        gate.wait()
        results[i] = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, output_final_state=True)
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
torch.cuda.synchronize()
assert not errors, errors
assert all(torch.equal(a, b) for r in results.values() for a, b in zip(r, results[0]))
assert results[0][0].isfinite().all()
print("equal", len(results))
"""


def test_first_call_from_eight_threads() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "GDN_PREFILL": env.settings().prefill,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.split() == ["equal", "8"], result.stderr


def test_threads_with_streams_of_their_own() -> None:
    calls = [PoolCall(split(1000 + 64 * n, 1 + n), seed=n) for n in range(4)]
    starts = [call.pool.clone() for call in calls]
    expected = [tuple(t.clone() for t in call()) for call in calls]
    for call, start in zip(calls, starts, strict=True):
        call.pool.copy_(start)
    torch.cuda.synchronize()
    results: dict[int, tuple[Tensor, Tensor]] = {}

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                calls[n].pool.copy_(starts[n])
                results[n] = calls[n]()
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert_same(results[n], expected[n])
