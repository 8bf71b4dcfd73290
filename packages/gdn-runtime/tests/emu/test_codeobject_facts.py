"""Launch facts and code objects: what they accept, JSON, agreement with specs, and the packing of arguments."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any

import pytest
import torch

from gdn_runtime.codeobject import CodeObject, KernelArgument, LaunchFacts
from gdn_runtime.codeobject.facts import canonical_json, spec_json
from gdn_runtime.codeobject.launch import Packer
from gdn_runtime.errors import UnsupportedError
from gdn_runtime.kernels.compile_server import spec_from_json
from gdn_runtime.spec import (
    FusedPrepareSpec,
    L2NormSpec,
    OptStateScanSpec,
    OutputConfig,
    OutputSpec,
    VkStateScanSpec,
)
from gdn_testing.probe import ProbeSpec

SPECS = (
    ProbeSpec("gfx942"),
    L2NormSpec("gfx950", "fp16", 4),
    OutputSpec("gfx942", "bf16", "fp32", 8, 2, True, False, OutputConfig(64, 4, 1)),
    FusedPrepareSpec("gfx950", "group", 8, 2, False, True, "bf16"),
    VkStateScanSpec("gfx950", 32, 8, 2, True, True, False, True, True, False, True, "bf16"),
    OptStateScanSpec("gfx942", 16, 8, 2, *(True,) * 9, "fp32", "bf16", rounding="nearest", wu_head_major=False),
)


def probe_facts(**changes: Any) -> LaunchFacts:
    """Facts of the probe."""
    offsets = (0, 8, 16, 24, 28)
    arguments = tuple(
        KernelArgument(argument.name, argument.kind, offset)
        for argument, offset in zip(ProbeSpec.ARGUMENTS, offsets, strict=True)
    )
    values = {
        "symbol": "probe_0",
        "arch": "gfx942",
        "kernarg_bytes": 32,
        "arguments": arguments,
        "block": (64, 1, 1),
        "lds_bytes": 0,
        "dynamic_lds": 0,
        "scratch_bytes": 0,
        "vgprs": 4,
        "agprs": 0,
        "sgprs": 10,
        "vgpr_spills": 0,
        "sgpr_spills": 0,
    }
    return LaunchFacts(**values | changes)  # type: ignore[arg-type]


def test_facts_survive_json() -> None:
    facts = probe_facts(lds_bytes=1024, dynamic_lds=512)
    text = canonical_json(facts.to_json())
    assert LaunchFacts.from_json(json.loads(text)) == facts
    assert text == canonical_json(json.loads(text)) and "\n" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"symbol": ""}, "facts.symbol"),
        ({"arch": "gfx90a"}, "facts.arch"),
        ({"arch": "sm90"}, "facts.arch: got sm90, expected an AMD architecture"),
        ({"block": (0, 1, 1)}, "facts.block"),
        ({"block": (1024, 2, 1)}, "facts.block"),
        ({"vgprs": -1}, "facts.vgprs: got -1, expected 0 or more"),
        ({"lds_bytes": 65536, "dynamic_lds": 4}, "LDS: got 65540 bytes in probe_0, expected at most the 65536 bytes"),
        ({"kernarg_bytes": 40}, "facts.kernarg_bytes: got 40, expected 32 or 48"),
        ({"arguments": (KernelArgument("source", "pointer", 8),)}, "offset of source: got 8, expected 0"),
        (
            {"arguments": (KernelArgument("n", "i64", 0), KernelArgument("source", "pointer", 8))},
            "facts.arguments: got n i64, source pointer, expected pointers first",
        ),
    ],
)
def test_impossible_facts_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, UnsupportedError), match=words):
        probe_facts(**changes)


@pytest.mark.parametrize(
    "damage",
    [
        {"symbol": 3},
        {"vgprs": "many"},
        {"vgprs": True},
        {"block": [64, 1]},
        {"block": "64"},
        {"arguments": [{"name": "x", "kind": "i16", "offset": 0}]},
        {"arguments": ["x"]},
        {"kernarg_bytes": None},
        {"surplus": 1},
    ],
)
def test_damaged_json_is_a_value_error(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        LaunchFacts.from_json({**json.loads(canonical_json(probe_facts().to_json())), **damage})


def test_a_missing_field_is_a_value_error() -> None:
    values = probe_facts().to_json()
    del values["sgprs"]
    with pytest.raises(ValueError, match="sgprs"):
        LaunchFacts.from_json(values)


def test_facts_of_another_kernel_are_refused() -> None:
    facts = probe_facts()
    facts.check(ProbeSpec("gfx942"))
    with pytest.raises(ValueError, match="facts of probe: arch: got gfx942, expected gfx950"):
        facts.check(ProbeSpec("gfx950"))
    with pytest.raises(ValueError, match="block"):
        probe_facts(block=(128, 1, 1)).check(ProbeSpec("gfx942"))
    fewer = probe_facts(arguments=facts.arguments[:4], kernarg_bytes=32)
    with pytest.raises(ValueError, match=r"argument 4: got none, expected \('factor', 'f32'\)"):
        fewer.check(ProbeSpec("gfx942"))
    renamed = (*facts.arguments[:3], dataclasses.replace(facts.arguments[3], name="size"), facts.arguments[4])
    with pytest.raises(ValueError, match="argument 3"):
        CodeObject(ProbeSpec("gfx942"), probe_facts(arguments=renamed), b"")


def test_a_code_object_knows_its_digest() -> None:
    code = CodeObject(ProbeSpec("gfx942"), probe_facts(), b"code")
    assert code.digest == hashlib.sha256(b"code").hexdigest()
    assert "code" not in repr(code).replace("CodeObject", "")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_specs_survive_json(spec: Any) -> None:
    text = canonical_json(spec_json(spec))
    assert spec_from_json(json.loads(text)) == spec
    other = dataclasses.replace(spec, arch={"gfx942": "gfx950", "gfx950": "gfx942"}[spec.arch])
    assert canonical_json(spec_json(other)) != text


def test_arguments_are_packed_by_the_facts() -> None:
    tensor = torch.zeros(8)
    pack = Packer(probe_facts(kernarg_bytes=48))
    kernarg = pack([tensor, None, -5, True, 0.5])
    assert kernarg == struct.pack("<QQqif16x", tensor.data_ptr(), 0, -5, 1, 0.5)
    assert pack((tensor[3:], tensor.data_ptr(), 1 << 40, -1, 2)) == struct.pack(
        "<QQqif16x", tensor.data_ptr() + 12, tensor.data_ptr(), 1 << 40, -1, 2.0
    )


def test_holes_between_arguments_are_kept() -> None:
    kinds = (("x", "pointer", 0), ("n", "i32", 8), ("stride", "i64", 16))
    facts = probe_facts(arguments=tuple(KernelArgument(*values) for values in kinds), kernarg_bytes=24)  # type: ignore[arg-type]
    assert Packer(facts)([None, 7, 9]) == struct.pack("<Qi4xq", 0, 7, 9)


@pytest.mark.parametrize(
    ("position", "value", "error", "words"),
    [
        (0, 1.5, TypeError, "probe_0: source: got 1.5, expected a tensor, None or an address"),
        (0, "x", TypeError, "probe_0: source: got 'x'"),
        (1, -8, ValueError, "probe_0: target: got -8"),
        (2, None, TypeError, "probe_0: shift: got None, expected an int that fits 64 bits"),
        (2, torch.tensor(3), TypeError, r"probe_0: shift: got tensor\(3\)"),
        (2, 1 << 63, ValueError, "probe_0: shift: got 9223372036854775808"),
        (3, 1 << 31, ValueError, "probe_0: count: got 2147483648, expected an int that fits 32 bits"),
        (3, 2.0, TypeError, "probe_0: count: got 2.0"),
        (4, torch.ones(1), TypeError, "probe_0: factor"),
        (4, 1e39, ValueError, "probe_0: factor: got 1e"),
    ],
)
def test_arguments_that_do_not_fit(position: int, value: Any, error: type[Exception], words: str) -> None:
    args: list[Any] = [torch.zeros(1), None, 0, 1, 1.0]
    args[position] = value
    with pytest.raises(error, match=words):
        Packer(probe_facts())(args)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_a_wrong_number_of_arguments(count: int) -> None:
    with pytest.raises(ValueError, match=f"arguments of probe_0: got {count}, expected 5: source, target"):
        Packer(probe_facts())([None, None, 0, 1, 1.0, 2][:count])
