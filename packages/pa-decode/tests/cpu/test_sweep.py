"""The configurations of the sweep: what CI runs of them, what each exercises, what a fault looks like; the record."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

from pa_decode import reference
from pa_decode.spec import PlannerSpec
from pa_decode.traits import TILE
from pa_testing import make_inputs
from pa_testing.attention import TOLERANCE, work_of
from pa_testing.configurations import AXES, CASES, CONFIGURATIONS, PAIRWISE, Configuration, pairs, problem
from pa_testing.sentinels import edges, sentinels
from pa_testing.sweep_record import Record, Run, digest_of_sources
from pa_testing.triton_kernels import plan_of

OF_CASES = [Configuration.of_case(case) for case in CASES]


def test_ci_runs_every_pair_of_values_of_two_axes() -> None:
    sizes = [len(values) for values in AXES.values()]
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS) == math.prod(sizes) == 2 * 320
    every = pairs(CONFIGURATIONS)
    assert len(every) == sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert pairs(PAIRWISE) == every
    assert len(set(PAIRWISE)) == len(PAIRWISE) == 20, "as many as there are pairs of windows and query lengths"
    for name in ("kv_heads", "replayed"):
        assert {getattr(c, name) for c in PAIRWISE} == {getattr(c, name) for c in CONFIGURATIONS}
    assert {c.sinks for c in PAIRWISE} >= {"none", "fp32", "fp16"}
    assert {c.schedule().attention.single_tile for c in PAIRWISE} == {True, False}


def test_heads_sinks_and_replays_are_beside_every_value() -> None:
    for axis, values in AXES.items():
        for value in values:
            these = [c for c in CONFIGURATIONS if getattr(c, axis) == value]
            assert {c.kv_heads for c in these} == {1, 2}
            assert {("none", "fp32", c.dtype).index(c.sinks) for c in these} == {0, 1, 2}
            assert {c.replayed for c in these} == {True, False}
    assert sum(c.replayed for c in CONFIGURATIONS) == 2 * 32
    assert {(c.window, c.budget) for c in CONFIGURATIONS if c.replayed} == {
        (c.window, c.budget) for c in CONFIGURATIONS
    }


@pytest.mark.parametrize("configuration", OF_CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_what_a_case_exercises(configuration: Configuration) -> None:
    """Empty and short sequences, whole tiles, tails; tasks of several tiles and sequences of several tasks; a window
    that begins inside a tile, but for that of (8193, 2), which begins with one."""
    c = configuration
    contexts, schedule = c.contexts, c.schedule()
    assert min(contexts) <= 0 and c.length - 1 in contexts
    assert any(n > 0 and n % TILE == 0 for n in contexts) and any(n > TILE and n % TILE for n in contexts)
    work, reduce = plan_of(
        contexts,
        capacity=schedule.capacity,
        max_partitions=schedule.max_partitions,
        window=c.window,
        query_length=c.length,
    )
    tiles = (work[:, 2] - work[:, 1]).tolist()
    one_token = c.window == 1 and c.length == 1
    assert schedule.attention.single_tile == (c.window > 0 and (c.budget == "large" or one_token))
    if c.budget == "large" or one_token:
        assert max(tiles) == 1
    else:
        assert max(tiles) >= 2
    assert int(reduce[:, 1].max()) >= 2 or c.window == 1
    assert work[-1].tolist() == [0, 0, 0, 0] or c.budget == "small", "a slot that nothing uses"
    lows = [n - c.length - c.window + 1 for n in contexts if n >= c.length + c.window]
    assert not c.window or any(low % TILE for low in lows) or (c.window, c.length) == (8193, 2)


def test_a_limit_of_rounding_where_a_row_sees_three_tokens() -> None:
    """V of at most 1/16, K twice as large as in the sweep: the query's rounding alone takes more than the tolerance, on
    every page size, form and kernel."""
    draw = torch.Generator().manual_seed(38)
    k, v = torch.randn((2, 16, 2, 256), generator=draw), torch.rand((2, 16, 2, 256), generator=draw) / 8 - 1 / 16
    inputs = make_inputs(
        [3, 2], kv_heads=2, group=8, head_dim=256, query_length=4, dtype=torch.float16, k=k, v=v, seed=38
    )
    error = (reference.decode_quantised(inputs) - reference.decode(inputs)).abs()
    assert float(error.max()) == pytest.approx(0.00534, rel=0.01) and TOLERANCE == 0.005


def test_the_configurations_of_a_case_hold_the_same_tokens() -> None:
    case = CASES[37]
    four = [c for c in CONFIGURATIONS if c.case == case]
    assert len(four) == 4
    outputs = [reference.decode_quantised(problem(c)) for c in four]
    assert all(torch.equal(output, outputs[0]) for output in outputs) and bool(outputs[0].any())
    other = reference.decode_quantised(problem(Configuration.of_case(CASES[36])))
    assert not torch.equal(other, outputs[0])


@pytest.mark.parametrize("window", [0, 1, 17, 257])
def test_sentinels_find_a_window_that_is_one_token_off(window: int) -> None:
    length, page = 3, 16
    cases = [(c, place) for c in (512, 514, 767) for place in sorted({0, 15, 256} | edges(c, length, window))]
    found = sentinels(cases, page=page, group=2, query_length=length, window=window)
    work = work_of(found.inputs, len(cases) + 20)
    found.check(work, reference.partials(found.inputs, work, denominator="matched")[0])
    wrong = [dataclasses.replace(found.inputs, window=w) for w in (window - 1, window + 1) if window > 1]
    shifted = found.inputs.seq_lens + 1
    for inputs in wrong or [dataclasses.replace(found.inputs, window=2 if window else 600)]:
        with pytest.raises(AssertionError, match="token"):
            found.check(work, reference.partials(inputs, work)[0])
    later = work.clone()
    later[:, 3] = torch.where(work[:, 1] < work[:, 2], shifted[work[:, 0].long()], 0)
    with pytest.raises(AssertionError, match="token"):
        found.check(work, reference.partials(found.inputs, later)[0])


# ------------------------------------------------------------------------------------------------ the record


def test_what_passed_is_kept(tmp_path: Path) -> None:
    """Also behind a line that a killed run left unfinished; ``clear`` forgets it."""
    record = Record(tmp_path / "sweep")
    assert not record.passed
    record.add("test_a[1]", {"key": "k", "output": "x"})
    (path,) = (tmp_path / "sweep").iterdir()
    with path.open("a") as file:
        file.write('{"test": "test_b[1]", "ke')
    Record(tmp_path / "sweep").add("test_c[1]", {"key": "m"})
    record = Record(tmp_path / "sweep")
    assert record.passed == {
        "test_a[1]": {"test": "test_a[1]", "key": "k", "output": "x"},
        "test_c[1]": {"test": "test_c[1]", "key": "m"},
    }
    record.clear()
    assert not record.passed and not Record(tmp_path / "sweep").passed


def test_what_passed_counts_for_the_same_kernels_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {16: "a", 32: "b"}
    monkeypatch.setattr(
        "pa_testing.sweep_record.code_object",
        lambda spec: dataclasses.make_dataclass("Code", ["digest"])(digests[spec.max_batch]),
    )
    specs = [PlannerSpec("gfx950", 16), PlannerSpec("gfx950", 32)]
    record = Record(tmp_path)
    first = Run("test", record, "sources")
    assert first.begin(specs) is None
    record.add("test", first.noted)
    before = Run("test", record, "sources").begin(specs)
    assert before is not None and before["key"] == first.noted["key"]
    assert Run("other", record, "sources").begin(specs) is None
    assert Run("test", record, "edited").begin(specs) is None
    digests[32] = "c"
    assert Run("test", record, "sources").begin(specs) is None


def test_digests_of_sources(tmp_path: Path) -> None:
    for name in ("a.py", "core/b.c", "kernels/k.py", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    first = digest_of_sources([tmp_path], without="kernels")
    for name, same in (("kernels/k.py", True), ("c.txt", True), ("core/b.c", False), ("a.py", False)):
        (tmp_path / name).write_text("other")
        assert (digest_of_sources([tmp_path], without="kernels") == first) is same, name
        (tmp_path / name).write_text(name)
    (tmp_path / "a.py").rename(tmp_path / "d.py")
    assert digest_of_sources([tmp_path], without="kernels") != first
