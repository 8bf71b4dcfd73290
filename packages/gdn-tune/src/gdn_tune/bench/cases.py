"""Which calls a bench makes: cases of the test suite by id, or shapes of the models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from gdn_runtime.testing import Case
from gdn_runtime.testing.cases import KEY_HEADS, VALUE_HEADS, StateDtype, list_cases

from ..calls import GDN_CASES, pick

MODELS = tuple(VALUE_HEADS)
SPLITS = (1, 2, 4, 8)
SNAPSHOTS: tuple[StateDtype, ...] = get_args(StateDtype)
DEFAULT_TOKENS = 8192


def shape(model: str, tp: int, tokens: int, count: int, snapshot: str, *, dense: bool) -> Case:
    """``tokens`` in ``count`` sequences of equal length, the last one with what is left over; dense: in ``count`` rows.
    Initial states in, final states out. Raises ValueError for what is no shape."""
    for name, got, expected in (("model", model, MODELS), ("tp", tp, SPLITS), ("snapshot-dtype", snapshot, SNAPSHOTS)):
        if got not in expected:
            raise ValueError(f"{name}: got {got}, expected one of {', '.join(map(str, expected))}")
    if not 1 <= count <= tokens:
        raise ValueError(f"n: got {count}, expected 1 to {tokens}, the number of tokens")
    each, rest = divmod(tokens, count)
    if dense and rest:
        raise ValueError(f"t: got {tokens}, expected a multiple of n={count} for dense rows")
    lengths = (each,) if dense else (each,) * (count - 1) + (each + rest,)
    return Case(
        id=f"{'dense' if dense else 'varlen'}-{model}-tp{tp}-t{tokens}-n{count}",
        group="shape",
        num_heads=VALUE_HEADS[model] // tp,
        num_key_heads=KEY_HEADS // tp,
        seq_lens=lengths,
        batch=count if dense else None,
        snapshot_dtype=cast(StateDtype, snapshot),
    )


def choose(
    patterns: Sequence[str] = (),
    *,
    models: Sequence[str] = (),
    splits: Sequence[int] = (),
    tokens: Sequence[int] = (),
    counts: Sequence[int] = (),
    dense: bool = False,
    snapshots: Sequence[str] = (),
) -> list[Case]:
    """The cases that ids or ``patterns`` of them name, with the snapshot dtypes asked for in place of their own; or all
    combinations of the shapes given. Raises ValueError for both, and for what does not exist."""
    unknown = [name for name in snapshots if name not in SNAPSHOTS]
    if unknown:
        raise ValueError(f"snapshot-dtype: got {', '.join(unknown)}, expected {' or '.join(SNAPSHOTS)}")
    if patterns:
        if models or splits or tokens or counts or dense:
            raise ValueError("cases: got ids and a shape, expected either")
        return list(_with_snapshots(pick(GDN_CASES, patterns).values(), snapshots))
    return [
        shape(model, split, number, count, snapshot, dense=dense)
        for model in models or MODELS[:1]
        for split in splits or SPLITS[:1]
        for number in tokens or (DEFAULT_TOKENS,)
        for count in counts or (1,)
        for snapshot in snapshots or SNAPSHOTS
    ]


def _with_snapshots(cases: Iterable[Case], snapshots: Sequence[str]) -> Iterator[Case]:
    if not snapshots:
        yield from cases
        return
    seen = set()
    for case in cases:
        # Cases that come in pairs have the dtype in their names.
        name = case.id.removesuffix(f"-{case.snapshot_dtype}") if case.group in ("snapshot", "grid") else case.id
        if name not in seen:
            seen.add(name)
            yield from (replace(case, id=name, snapshot_dtype=cast(StateDtype, each)) for each in snapshots)


def listed() -> str:
    """One line per case."""
    return list_cases(GDN_CASES)


def facts_of(case: Case) -> dict[str, Any]:
    """The columns of the K5 harness that describe a call."""
    heads = {(VALUE_HEADS[model] // tp, KEY_HEADS // tp): (model, tp) for model in MODELS for tp in SPLITS}
    model, tp = heads.get((case.num_heads, case.num_key_heads), ("", ""))
    return {
        "Model": model,
        "TP": tp,
        "Hg": case.num_key_heads,
        "H": case.num_heads,
        "SeqLen": max(case.seq_lens),
        "T": case.num_tokens,
        "varlen": case.batch is None,
        "final_st": case.final_state,
    }
