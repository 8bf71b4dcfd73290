"""The commands of ``gdn-tune bench``: options, cases, backends, whole runs on a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from gdn_runtime.errors import UnsupportedError
from gdn_tune import model
from gdn_tune.bench import backends, cases, decode, host, inputs, k5, pa, run, timing
from gdn_tune.bench.commands import COMMANDS
from gdn_tune.bench.options import spread
from gdn_tune.bench.profile import K5, KernelTime
from gdn_tune.bench.results import GAP, GRAPH, KERNELS, LAUNCH, WALL, any_failed
from gdn_tune.cli import app

CPU = torch.device("cpu")
FLAGS = {
    "k5": "--backends --cases --list-cases --model --tp --t --n --dense --snapshot-dtype --with-state-pool "
    "--with-state-pool-cold-check --without-metadata --show-kernels --summary-metrics --summary-only --baseline "
    "--warmup-iters --bench-iters --prof-iters --graph --seed --device --arch --compute-units --csv --json",
    "snapshot": "--backends --batch-size --sequence-length --num-heads --warmup-ms --rep-ms --snapshot-dtype --block-v",
    "pa": "--backends --cases --list-cases --batch --context --page --ql --window --kv-heads --scale-mode --v-form "
    "--budget --caches --sweeps --calls --flush-gib --seed --device --arch --csv --json",
    "host": "--op --calls --rounds --json",
}
FLAGS["block"] = FLAGS["k5"]
SMALL = ("--model", "35b", "--tp", "8", "--t", "100", "--n", "2", "--warmup-iters", "0", "--bench-iters", "1")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], prog_name="gdn-tune")


def make_case(**changes: Any) -> Any:
    shape: dict[str, Any] = {"model": "35b", "tp": 8, "tokens": 100, "count": 2, "snapshot": "bf16", "dense": False}
    return cases.shape(**{**shape, **changes})


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_flag(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0 and result.output.isascii() and f"Usage: gdn-tune bench {name} " in result.output
    assert not [flag for flag in FLAGS[name].split() if f" {flag} " not in f"{result.output} "]


def test_help_of_the_group_imports_no_bench() -> None:
    result = call("--help")
    assert result.exit_code == 0 and all(f"\n  {name} " in result.output for name in COMMANDS)


def test_an_option_takes_the_words_behind_it() -> None:
    several = {"--backends", "--t"}
    assert spread(["--backends", "a", "b", "--dense", "--t", "1", "2"], several) == [
        "--backends", "a", "--backends", "b", "--dense", "--t", "1", "--t", "2",
    ]  # fmt: skip
    assert spread(["--backends", "a", "--backends", "b"], several) == ["--backends", "a", "--backends", "b"]
    assert spread(["--seed", "1", "2"], several) == ["--seed", "1", "2"]


def test_cases_are_listed() -> None:
    lines = call("block", "--list-cases").output.splitlines()
    assert len(lines) > 400 and any(line.startswith("single-35b-tp1-5000: H=32 Hg=16 lens [5000]") for line in lines)
    names = [line.split("-")[0] for line in call("pa", "--list-cases").output.splitlines()]
    assert (names.count("pa"), names.count("sweep"), len(names)) == (48, 144, 192)


# ------------------------------------------------------------------------------------------------ cases


def test_shapes_are_all_combinations() -> None:
    found = cases.choose(models=["35b", "397b"], splits=[1, 8], tokens=[8192], counts=[1, 3], snapshots=["fp32"])
    assert len(found) == 8 and {case.snapshot_dtype for case in found} == {"fp32"}
    assert [(case.num_heads, case.num_key_heads) for case in found[::2]] == [(32, 16), (4, 2), (64, 16), (8, 2)]
    assert found[1].seq_lens == (2730, 2730, 2732) and found[1].batch is None
    (row,) = cases.choose(tokens=[128], counts=[2], dense=True, snapshots=["bf16"])
    assert (row.batch, row.seq_lens, row.num_tokens) == (2, (64,), 128)
    assert [case.snapshot_dtype for case in cases.choose()] == ["bf16", "fp32"]


def test_ids_keep_their_dtype_or_take_the_one_asked_for() -> None:
    (pair,) = {case.id for case in cases.choose(["snapshot-35b-tp1-8192-*"], snapshots=["bf16", "fp32"])}
    assert pair == "snapshot-35b-tp1-8192"
    assert [case.snapshot_dtype for case in cases.choose(["single-35b-tp1-5000"], snapshots=["fp32"])] == ["fp32"]
    assert [case.snapshot_dtype for case in cases.choose(["snapshot-35b-tp1-8192-*"])] == ["bf16", "fp32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cases", "nothing"), "which is no id"),
        (("--cases", "single-35b-tp1-5000", "--t", "64"), "ids and a shape"),
        (("--model", "7b"), "expected one of 35b, 397b"),
        (("--tp", "3"), "expected one of 1, 2, 4, 8"),
        (("--snapshot-dtype", "fp16"), "expected bf16 or fp32"),
        (("--t", "8", "--n", "9"), "n: got 9"),
        (("--t", "9", "--n", "2", "--dense"), "a multiple of n=2"),
        (("--backends", "cuda"), "expected some of"),
        (("--backends", "fla"), "fla needs a GPU"),
        (("--backends", "triton"), "triton cannot run here"),
        (("--device", "cuda"), "there is no GPU"),
        (("--device", "tpu"), "expected cuda or cpu"),
        (("--baseline", "aiter"), "baseline: got 'aiter'"),
        (("--backends", "emulate", "--arch", "sm90"), "arch: got 'sm90', expected gfx942 or gfx950"),
        (("--summary-metrics", "speed"), "expected some of"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("block", *arguments, "--device", "cpu") if "--device" not in arguments else call("block", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="flashinfer is not installed"):
        backends.resolve(["flashinfer"], torch.device("cuda"))
    assert backends.resolve(["reference", "reference"], CPU) == ["reference"]


def test_metrics_have_unambiguous_beginnings() -> None:
    assert run.check_metrics(["wall", "k5 state scan", "host gap"]) == [WALL, K5, GAP]
    with pytest.raises(ValueError, match="got 'k5'"):
        run.check_metrics(["k5"])


# ------------------------------------------------------------------------------------------------ inputs


def test_variants_share_what_is_not_theirs() -> None:
    block = inputs.block_inputs(make_case(), CPU)
    found, left_out = inputs.variants(block, pool=True, cold=True, without_metadata=True)
    assert list(found) == ["", "no-meta", "pool", "pool cold"] and not left_out
    assert found["no-meta"].metadata is None and found["pool"].metadata is block.metadata is not None
    assert all(each.x is block.x for each in found.values())
    pool = found["pool"]
    assert pool.indices is not None and pool.state.shape[0] == 4 and len(set(pool.indices.tolist())) == 2
    assert torch.equal(pool.state[pool.indices.long()], block.state)


def test_a_cold_pool_has_new_indices_each_call() -> None:
    block = inputs.block_inputs(make_case(), CPU)
    cold = inputs.variants(block, cold=True)[0]["pool cold"]
    assert cold.indices is not None
    expected, version = cold.indices.clone(), cold.indices._version
    backends.block_call("reference", cold)()
    assert torch.equal(cold.indices, expected) and cold.indices._version == version + 1


def test_what_a_case_does_not_have_is_left_out() -> None:
    dense = inputs.block_inputs(make_case(dense=True), CPU)
    assert inputs.variants(dense, without_metadata=True) == ({"": dense}, ["no-meta: a dense call has no metadata"])
    stateless = inputs.block_inputs(cases.choose(["dense-35b-tp1-2500"])[0].small(1), CPU)
    assert inputs.variants(stateless, pool=True)[1] == ["pool: the case keeps no final states"]


def test_one_metadata_per_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = inputs.build_prefill_metadata
    monkeypatch.setattr(inputs, "build_prefill_metadata", lambda *args, **kw: made.append(args) or build(*args, **kw))
    plan = run.Plan([make_case()], ["reference", "reference"], CPU, timing.Protocol(0, 1, 1), pool=True)
    seen = []
    list(run.measurements(plan, lambda name, given: seen.append(given.metadata) or (lambda: None)))
    assert len(made) == 1 and len(seen) == 4 and len({id(each) for each in seen}) == 1


# ------------------------------------------------------------------------------------------------ other libraries


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    monkeypatch.setitem(sys.modules, name, module)


def test_fla_gets_heads_states_and_gates_in_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for fla that computes with the reference from what it is given: equal results mean a right adapter."""
    block = inputs.block_inputs(make_case(), CPU)

    def whole(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):  # type: ignore[no-untyped-def]
        assert q.shape[2] == v.shape[2] and cu_seqlens.dtype == torch.int64 and output_final_state
        state = initial_state.transpose(-1, -2).contiguous()
        return backends.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
            backend="reference",
        )  # fmt: skip

    def scan(k, w, u, g, initial_state, output_final_state, cu_seqlens):  # type: ignore[no-untyped-def]
        assert k.shape[2] == u.shape[2] and w.shape == u.shape
        w, u = (each.transpose(1, 2).contiguous() for each in (w, u))
        return backends.chunk_gated_delta_rule_fwd_h(
            k, w, u, g, initial_state=initial_state.transpose(-1, -2).contiguous(), output_final_state=True,
            cu_seqlens=cu_seqlens, use_exp2=False, backend="reference",
        )  # fmt: skip

    fake(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=whole)
    fake(monkeypatch, "fla.ops.common.chunk_delta_h", chunk_gated_delta_rule_fwd_h=scan)
    for got, right in zip(backends.block_call("fla", block)(), backends.block_call("reference", block)(), strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)
    given = inputs.scan_inputs(block)
    for got, right in zip(backends.scan_call("fla", given)(), backends.scan_call("reference", given)(), strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)
    with pytest.raises(UnsupportedError, match="pool"):
        backends.block_call("fla", inputs.variants(block, pool=True)[0]["pool"])
    with pytest.raises(UnsupportedError, match="fp32"):
        backends.block_call("fla", inputs.block_inputs(make_case(snapshot="fp32"), CPU))


def test_flashinfer_gets_decays_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    block = inputs.block_inputs(make_case(), CPU)

    def whole(q, k, v, g, beta, scale, state, final, cu, *, output, output_state):  # type: ignore[no-untyped-def]
        assert final and float(g.min()) > 0 and float(g.max()) <= 1
        q, k, v, g, beta = (each[None] for each in (q, k, v, g.log(), beta))
        o, end = backends.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=cu,
            backend="reference",
        )  # fmt: skip
        return output.copy_(o[0]), output_state.copy_(end)

    fake(monkeypatch, "flashinfer.gdn_prefill", chunk_gated_delta_rule=whole)
    (o, state), (right, end) = (backends.block_call(name, block)() for name in ("flashinfer", "reference"))
    torch.testing.assert_close(o[None], right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state, end, atol=2e-2, rtol=2e-2)
    with pytest.raises(UnsupportedError, match="K5 alone"):
        backends.scan_call("flashinfer", inputs.scan_inputs(block))


def test_aiter_gets_metadata_of_its_own_and_no_argument_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    block = inputs.block_inputs(make_case(), CPU)
    seen: dict[str, Any] = {}

    def whole(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_chunk_hip, prefill_metadata):  # type: ignore[no-untyped-def]
        seen.update(hip=use_chunk_hip, metadata=prefill_metadata, state=initial_state)

    fake(monkeypatch, "aiter.ops.triton.gated_delta_net", chunk_gated_delta_rule_opt_vk=whole)
    build = {"build_gated_delta_rule_prefill_metadata": lambda lengths, *, cu_seqlens: ("theirs", lengths)}
    fake(monkeypatch, "aiter.ops.prefill_batch_metadata", **build)
    backends.block_call("aiter", block)()
    assert seen["hip"] is True and seen["metadata"] == ("theirs", [50, 50]) and seen["state"] is block.state
    with pytest.raises(UnsupportedError, match="initial_state_indices"):
        backends.block_call("aiter", inputs.variants(block, pool=True)[0]["pool"])
    with pytest.raises(UnsupportedError, match="snapshot_dtype"):
        backends.block_call("aiter", inputs.block_inputs(make_case(snapshot="fp32"), CPU))


# ------------------------------------------------------------------------------------------------ whole runs


def test_the_block_by_the_reference_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "modelled", lambda problem, specs: (1000.0, {f"{specs.kernels()[0].kernel} valu": 7.0}))
    csv, kept = tmp_path / "a.csv", tmp_path / "a.json"
    result = call(
        "block", "--backends", "reference", "emulate", *SMALL, "--device", "cpu", "--with-state-pool",
        "--without-metadata", "--show-kernels", "--csv", csv, "--json", kept,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "reference no-meta" in result.output and "emulate (cycles)" in result.output
    found = json.loads(kept.read_text())
    labels = [(each["backend"], each["variant"], each["snapshot"]) for each in found["measurements"]]
    assert labels[:4] == [("reference", name, "bf16") for name in ("", "no-meta", "pool")] + [("emulate", "", "bf16")]
    assert len(labels) == 8 and found["seed"] == inputs.SEED
    counted = found["measurements"][3]
    assert counted["metrics"] == {"K1-K4 prepare": 1000.0, K5: 1000.0, KERNELS: 2000.0} and counted["unit"] == "cycles"
    assert found["measurements"][0]["metrics"][WALL] > 0 and len(csv.read_text().splitlines()) == 9
    assert "wall total (reference/x above 1: faster than reference)" in result.output


def test_the_summary_alone() -> None:
    result = call(
        "block", "--backends", "reference", *SMALL, "--snapshot-dtype", "bf16", "--device", "cpu", "--summary-only"
    )
    assert result.exit_code == 0 and "stage" not in result.output and "wall total" in result.output


def test_a_case_without_gates_is_left_out_of_the_block_and_not_of_k5(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("--device", "cpu", "--backends", "reference", "--warmup-iters", "0", "--bench-iters", "1")
    result = call("block", "--cases", "nogate-35b-tp1-100", *few)
    assert result.exit_code == 0 and "nogate-35b-tp1-100: left out, the block has gates" in result.output
    result = call("k5", "--cases", "nogate-35b-tp1-100", *few)
    assert result.exit_code == 0 and "reference(us)" in result.output


def test_k5_counted_on_the_emulator() -> None:
    result = call(
        "k5", "--backends", "emulate", *SMALL, "--snapshot-dtype", "bf16", "--arch", "gfx942", "--show-kernels"
    )
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith(f"| {K5}"))
    assert float(line.split("|")[2]) > 100 and "state_scan_opt mfma" in result.output


def test_the_snapshot_bench_prints_its_csv(tmp_path: Path) -> None:
    few = ("--sequence-length", "100", "--num-heads", "2", "--num-key-heads", "1", "--warmup-ms", "0", "--rep-ms", "0")
    file = tmp_path / "a.csv"
    result = call("snapshot", "--backends", "reference", "--device", "cpu", *few, "--csv", file)
    assert result.exit_code == 0, result.output
    head, *rows = file.read_text().splitlines()
    assert head.endswith("snapshot_dtype,k5_us,k6_us,snapshot_mib") and head in result.output
    assert [row.split(",")[2] for row in rows] == ["bf16", "fp32"] and [row.split(",")[-1] for row in rows] == [
        "0.1",
        "0.2",
    ]
    assert all(float(value) > 0 for row in rows for value in row.split(",")[3:])


def test_paged_decode_by_the_reference(tmp_path: Path) -> None:
    kept = tmp_path / "a.json"
    few = ("--batch", "2", "--context", "300", "--page", "16", "--scale-mode", "token", "--sweeps", "2", "--calls", "2")
    result = call("pa", "--backends", "reference", "--device", "cpu", *few, "--window", "0", "100", "--json", kept)
    assert result.exit_code == 0, result.output
    found = json.loads(kept.read_text())["measurements"]
    assert [(each["variant"], each["facts"]["window"]) for each in found] == [("warm", 0), ("warm", 100)]
    assert all(each["metrics"]["us"] > 0 and each["metrics"]["error"] < 0.02 for each in found)


def test_flashinfer_decodes_an_unpacked_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that attends, in fp32, over what it was given: the oracle finds its output right."""

    class Wrapper:
        def __init__(self, buffer: Any, layout: str, **options: Any) -> None:
            assert layout == "NHD" and options == {"use_tensor_cores": True, "backend": "fa2"}

        def plan(
            self, offsets: Any, pages: Any, last: Any, heads: int, kv_heads: int, dim: int, page: int, **more: Any
        ) -> None:
            self.scale, self.group = more["sm_scale"], heads // kv_heads
            self.rows = [pages[a:b].long() for a, b in pairwise(offsets.tolist())]
            self.lengths = [page * (len(row) - 1) + int(rest) for row, rest in zip(self.rows, last, strict=True)]

        def run(self, query: Any, cache: Any, *, k_scale: float, v_scale: float, out: Any) -> None:
            for index, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
                k, v = (x[row].float().flatten(0, 1)[:length].repeat_interleave(self.group, dim=1) for x in cache)
                scores = torch.einsum("hd,thd->ht", query[index].float(), k) * self.scale * k_scale
                out[index] = torch.einsum("ht,thd->hd", scores.softmax(-1), v) * v_scale

    fake(monkeypatch, "flashinfer.decode", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(decode, "FLASHINFER_WORKSPACE", 64)
    for form, context in (("packed", 300), ("plain", 65)):
        (case,) = pa.shapes([2], [context], [16], [], [], [], [], [form])
        given = decode.decode_inputs(case, CPU, 0, "gfx950")
        attend, out = decode.DECODERS["flashinfer"](given)
        attend()
        assert decode.error_of(given, out) < 5e-3
    (case,) = pa.shapes([2], [64], [], [], [], [], ["token"], [])
    with pytest.raises(UnsupportedError, match="per token"):
        decode.DECODERS["flashinfer"](decode.decode_inputs(case, CPU, 0, "gfx950"))


def test_who_decodes() -> None:
    assert pa.usable([], CPU, "gfx950") == ["reference"]
    assert pa._refusal("flashinfer", CPU, "gfx950") == ""
    assert "aiter: its paged decode is not timed here" in pa._refusal("aiter", CPU, "gfx950")
    with pytest.raises(ValueError, match="triton cannot run here"):
        pa.usable(["triton"], CPU, "gfx950")


def test_a_decode_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pa, "error_of", lambda given, out: float("nan"))
    result = call("pa", "--backends", "reference", "--device", "cpu", "--batch", "1", "--context", "64")
    assert result.exit_code == 1 and "wrong: relative error nan" in result.output and "GB/s" not in result.output


def test_sweeps_alternate() -> None:
    turns: list[str] = []

    def timer(name: str) -> pa.Timer:
        return lambda count: turns.append(name) or [float(index) for index in range(count)]

    times = pa.alternate({"a": timer("a"), "b": timer("b")}, sweeps=3, calls=2)
    assert turns == ["a", "b", "b", "a", "a", "b"] and times == {"a": [1.0, 2.0] * 3, "b": [1.0, 2.0] * 3}


@pytest.mark.parametrize("missed", [False, True])
def test_host_cost_is_held_against_its_bars(missed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(host, "BARS", dict.fromkeys(host.BARS, 0.0 if missed else 1e6))
    threads = torch.get_num_threads()
    result = call("host", "--calls", "2", "--rounds", "1", "--json", tmp_path / "a.json")
    torch.set_num_threads(threads)
    assert result.exit_code == int(missed) and ("is missed" in result.output) == missed
    times = json.loads((tmp_path / "a.json").read_text())["us"]
    parts = sum(times[name] for name in (*host.SCAN_PARTS, "K5: rest"))
    assert parts == pytest.approx(times["K5 call"]) and times["decode call"] > 0


def test_what_fails_is_reported_and_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, given: Any) -> timing.Call:
        if name == "fla":
            raise RuntimeError("out of  shared memory")
        if name == "aiter":
            raise UnsupportedError("states of aiter", got="a pool", supported=["dense states"])
        return lambda: None

    plan = run.Plan([make_case()], ["fla", "aiter", "reference"], CPU, timing.Protocol(0, 1, 1))
    ((_, found),) = run.measurements(plan, make)
    assert [each.failure for each in found][::2] == ["RuntimeError: out of shared memory", ""]
    assert "dense states" in found[1].failure and [each.unsupported for each in found] == [False, True, False]
    assert any_failed(found) and not any_failed(found[1:])
    with pytest.raises(RuntimeError, match="ours"):

        def break_ours(name: str, given: Any) -> timing.Call:
            raise RuntimeError("ours")

        list(run.measurements(replace(plan, backends=["reference"]), break_ours))


def test_inputs_that_do_not_fit_fail_whoever_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(run, "block_inputs", full)
    monkeypatch.setattr(run.emulated, "count", lambda call, *, scan_alone: ({K5: 5.0}, {}))
    plan = run.Plan([make_case()], ["reference", "emulate"], CPU, timing.Protocol(0, 1, 1))
    ((_, found),) = run.measurements(plan, backends.block_call)
    assert [(each.backend, each.failure) for each in found] == [
        ("reference", "OutOfMemoryError: no memory"),
        ("emulate", ""),
    ]
    assert found[1].metrics == {K5: 5.0} and found[1].unit == "cycles"


def test_k5_prepares_once_per_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = k5.scan_inputs
    monkeypatch.setattr(k5, "scan_inputs", lambda block: made.append(block) or prepare(block))
    scans, found = (
        k5.Scans(),
        inputs.variants(inputs.block_inputs(make_case(), CPU), pool=True, without_metadata=True)[0],
    )
    results = [scans("reference", each)() for each in found.values()]
    assert len(made) == 1 and all(torch.equal(result[0], results[0][0]) for result in results)
    scans("reference", inputs.block_inputs(make_case(), CPU))
    assert len(made) == 2


# ------------------------------------------------------------------------------------------------ timing


def test_a_measurement_on_a_gpu_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "event_us", lambda calls, repeats: [float(repeats), 100.0, 90.0])
    monkeypatch.setattr(timing, "launch_us", lambda call, repeats: 30.0)
    profile = [KernelTime("state_scan_kernel", 60.0), KernelTime("Memcpy DtoD", 5.0)]
    monkeypatch.setattr(timing, "profiled", lambda call, iterations: profile)
    made: list[int] = []
    metrics, kernels = timing.measure(lambda: made.append(1), torch.device("cuda"), timing.Protocol(3, 50, 20))
    assert len(made) == 3 and kernels == tuple(profile)
    assert metrics == {K5: 60.0, "other": 5.0, KERNELS: 65.0, LAUNCH: 30.0, WALL: 90.0, GAP: 25.0}
    monkeypatch.setattr(timing, "profiled", lambda call, iterations: [])
    assert timing.measure(lambda: None, torch.device("cuda"), timing.Protocol(0, 50, 20))[0] == {
        LAUNCH: 30.0,
        WALL: 90.0,
    }
    with pytest.raises(ValueError, match="wall: got 0"):
        timing.Protocol(wall=0)


def test_a_call_that_cannot_be_captured_has_no_time_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "graph_timer", lambda calls: lambda count: [3.0] * count)
    assert timing.in_a_graph(lambda: None, 5) == {GRAPH: 3.0}

    def refuse(calls: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "graph_timer", refuse)
    assert timing.in_a_graph(lambda: None, 5) == {}


def test_the_reference_makes_what_k5_is_given() -> None:
    block = inputs.block_inputs(make_case(), CPU)
    given = inputs.scan_inputs(block)
    assert given.g is not None and bool(torch.isfinite(given.w.float()).all()) and given.w.shape == (1, 4, 100, 128)
    h, v_new, _ = backends.scan_call("reference", given)()
    assert bool(torch.isfinite(h.float()).all()) and v_new.shape == given.u.shape
