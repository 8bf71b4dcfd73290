"""arch.py: names, detection through a faked driver, caching per device. No architecture is ever guessed (case C27)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from gdn_runtime import arch
from gdn_runtime.errors import UnsupportedError


class FakeDriver:
    """Stands in for torch.cuda: one entry per device, counting how often each is asked."""

    def __init__(self, *devices: SimpleNamespace) -> None:
        self.devices = devices
        self.asked: list[int] = []
        self.current = 0

    def properties(self, index: int) -> SimpleNamespace:
        self.asked.append(index)
        return self.devices[index]


@pytest.fixture(autouse=True)
def fresh_probes() -> Iterator[None]:
    arch._probe.cache_clear()
    yield
    arch._probe.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, *, hip: str | None) -> FakeDriver:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", driver.properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    return driver


def nvidia(major: int, minor: int, units: int) -> SimpleNamespace:
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=units)


def amd(name: str, units: int) -> SimpleNamespace:
    return SimpleNamespace(gcnArchName=name, major=9, minor=4, multi_processor_count=units)


@pytest.mark.parametrize("name", list(arch.KNOWN))
def test_known_names(name: str) -> None:
    assert arch.parse_arch(name) is arch.KNOWN[name]
    assert arch.KNOWN[name].name == name


@pytest.mark.parametrize("text", ["gfx950:sramecc+", "gfx950:sramecc+:xnack-", " GFX950 "])
def test_features_and_case_do_not_matter(text: str) -> None:
    assert arch.parse_arch(text).name == "gfx950"


@pytest.mark.parametrize(
    "text", ["", "gfx90a", "gfx94", "gfx9500", "sm_90", "90", "garbage", ":gfx950", "gfx942,gfx950"]
)
def test_garbage_is_refused_with_the_list_of_known_names(text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        arch.parse_arch(text, name="GDN_ARCH")
    message = str(caught.value)
    assert message.startswith(f"GDN_ARCH: got {text!r}")
    assert all(name in message for name in arch.KNOWN)


def test_cpu_has_no_units_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, FakeDriver(), hip=None)
    assert arch.arch_of(torch.device("cpu")).name == "cpu"
    assert arch.arch_of(torch.device("cpu", 0)).vendor == "cpu"
    assert arch.compute_units(torch.device("cpu")) is None
    assert driver.asked == []


@pytest.mark.parametrize(
    ("major", "minor", "name"), [(8, 0, "sm80"), (9, 0, "sm90"), (10, 0, "sm100"), (12, 0, "sm120")]
)
def test_nvidia_by_capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, name: str) -> None:
    install(monkeypatch, FakeDriver(nvidia(major, minor, 77)), hip=None)
    assert arch.arch_of(torch.device("cuda", 0)).name == name
    assert arch.compute_units(torch.device("cuda", 0)) == 77


@pytest.mark.parametrize(
    ("text", "name", "fp8"), [("gfx942:sramecc+:xnack-", "gfx942", "fnuz"), ("gfx950:sramecc+:xnack-", "gfx950", "fn")]
)
def test_amd_by_name_not_by_unit_count(monkeypatch: pytest.MonkeyPatch, text: str, name: str, fp8: str) -> None:
    install(monkeypatch, FakeDriver(amd(text, 80)), hip="7.0")
    facts = arch.arch_of(torch.device("cuda", 0))
    assert (facts.name, facts.fp8) == (name, fp8)
    assert arch.compute_units(torch.device("cuda", 0)) == 80


@pytest.mark.parametrize(("device", "hip"), [(amd("gfx90a:sramecc+:xnack-", 104), "7.0"), (nvidia(7, 5, 40), None)])
def test_unknown_device_is_an_error_and_not_a_guess(
    monkeypatch: pytest.MonkeyPatch, device: SimpleNamespace, hip: str | None
) -> None:
    install(monkeypatch, FakeDriver(device), hip=hip)
    with pytest.raises(
        UnsupportedError, match=r"architecture of cuda:0: got '(gfx90a:.*|sm75)', supported: gfx942, gfx950"
    ):
        arch.arch_of(torch.device("cuda", 0))


def test_mixed_devices_are_cached_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, FakeDriver(amd("gfx942", 304), amd("gfx950", 256)), hip="7.0")
    for _ in range(3):
        assert arch.arch_of(torch.device("cuda", 0)).name == "gfx942"
        assert arch.arch_of(torch.device("cuda", 1)).name == "gfx950"
        assert arch.compute_units(torch.device("cuda", 1)) == 256
    assert driver.asked == [0, 1]


def test_device_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, FakeDriver(nvidia(8, 0, 108), nvidia(9, 0, 132)), hip=None)
    assert arch.arch_of(torch.device("cuda")).name == "sm80"
    driver.current = 1
    assert arch.arch_of(torch.device("cuda")).name == "sm90"


def test_no_driver_is_an_error_that_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"cuda:0: got no usable GPU driver, supported: .*GDN_ARCH"):
        arch.arch_of(torch.device("cuda"))


@pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
def test_other_device_types_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"device type: got {kind}, supported: cpu, cuda"):
        arch.arch_of(torch.device(kind))


def test_facts_that_kernels_rely_on() -> None:
    assert arch.KNOWN["gfx942"].lds_bytes == 65536
    assert arch.KNOWN["gfx950"].lds_bytes == 163840
    assert {name for name, facts in arch.KNOWN.items() if facts.mfma_bf16_16x16x32} == {"gfx950"}
    assert {name for name, facts in arch.KNOWN.items() if facts.fp8 == "fnuz"} == {"gfx942"}
