"""env.py: the table of variables, parsing, overrides, reload, threads and torch.compile."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gdn_runtime import env

ROOT = Path(__file__).parents[4]
SOURCE = Path(env.__file__).parent
DEFAULTS = env.Settings(
    backend="auto",
    prepare_mode="auto",
    prefill="auto",
    amd_route="auto",
    check_indices=False,
    k5_block_v=None,
    arch="",
    tables="",
    bundle="",
    jit=False,
    jit_cache_dir="",
    hip_library="",
    flydsl_runtime_run_only=False,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GDN_* variable is set and nothing has been read yet; afterwards the real environment is in force again."""
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    forget()
    yield
    monkeypatch.undo()
    env.reload()


def forget() -> None:
    """As in a process where settings() was never called."""
    env._settings = None
    env._base = None


def test_defaults() -> None:
    assert env.settings() == DEFAULTS


def test_every_field_of_settings_has_a_variable_of_its_type() -> None:
    types = typing.get_type_hints(env.Settings)
    assert [var.attribute for var in env.VARIABLES] == [field.name for field in dataclasses.fields(env.Settings)]
    for var in env.VARIABLES:
        values = [var.parse(text) for text in (var.default, *var.choices)]
        assert all(isinstance(value, types[var.attribute]) for value in values), var.name
        assert all(var.parse(env.spell(value)) == value for value in values), var.name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("GDN_BACKEND", "triton", "triton"),
        ("GDN_BACKEND", " Reference ", "reference"),
        ("GDN_BACKEND", "", "auto"),
        ("GDN_PREPARE_MODE", "split", "split"),
        ("GDN_CHECK_INDICES", "1", True),
        ("GDN_CHECK_INDICES", "off", False),
        ("GDN_CHECK_INDICES", "YES", True),
        ("GDN_K5_BLOCK_V", "32", 32),
        ("GDN_K5_BLOCK_V", "auto", None),
        ("GDN_ARCH", "gfx950", "gfx950"),
    ],
)
def test_legal_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(env.settings(), name.removeprefix("GDN_").lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GDN_BACKEND", "hip"),
        ("GDN_PREPARE_MODE", "both"),
        ("GDN_CHECK_INDICES", "2"),
        ("GDN_CHECK_INDICES", "maybe"),
        ("GDN_K5_BLOCK_V", "33"),
        ("GDN_K5_BLOCK_V", "-16"),
        ("GDN_K5_BLOCK_V", "wide"),
    ],
)
def test_bad_value_names_variable_got_and_expected_at_first_use(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    var = next(var for var in env.VARIABLES if var.name == name)
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {text!r}, expected {var.expected}")):
        env.settings()
    # Still an error on the next use, and gone once the variable is put right.
    with pytest.raises(ValueError, match=name):
        env.settings()
    monkeypatch.delenv(name)
    assert env.settings().backend == "auto"


def test_int_without_choices_takes_any_integer() -> None:
    var = env.Var("GDN_DEPTH", "int", "3", "help")
    assert (var.parse("12"), var.parse("")) == (12, 3)
    with pytest.raises(ValueError, match="GDN_DEPTH: got 'auto', expected an integer"):
        var.parse("auto")


def test_unknown_variable_is_one_warning_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKND", "triton")
    with pytest.warns(RuntimeWarning, match="GDN_BACKND .* did you mean GDN_BACKEND") as caught:
        env.settings()
        env.settings()
    assert len(caught) == 1


def test_unknown_variable_without_a_lookalike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_XYZZY_LONG_NAME", "1")
    assert env.unknown() == {"GDN_XYZZY_LONG_NAME": ()}
    assert "did you mean" not in env.describe_unknown("GDN_XYZZY_LONG_NAME", ())


def test_read_once_and_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    first = env.settings()
    monkeypatch.setenv("GDN_BACKEND", "triton")
    assert env.settings() is first
    assert env.reload().backend == "triton"
    assert env.settings().backend == "triton"


def test_reload_with_a_bad_value_keeps_the_old_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_K5_BLOCK_V", "16")
    env.settings()
    monkeypatch.setenv("GDN_K5_BLOCK_V", "17")
    with pytest.raises(ValueError, match="GDN_K5_BLOCK_V: got '17'"):
        env.reload()
    assert env.settings().k5_block_v == 16


def test_override_nests_and_ends() -> None:
    with env.override(backend="triton", k5_block_v=32) as outer:
        assert (outer.backend, outer.k5_block_v) == ("triton", 32)
        with env.override(k5_block_v=None, check_indices=True):
            inner = env.settings()
            assert (inner.backend, inner.k5_block_v, inner.check_indices) == ("triton", None, True)
        assert env.settings() == outer
    assert env.settings() == DEFAULTS


def test_override_ends_with_an_exception_and_survives_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), env.override(backend="triton"):
        monkeypatch.setenv("GDN_BACKEND", "reference")
        assert env.reload().backend == "triton"
        raise KeyError
    assert env.settings().backend == "reference"


def test_overlapping_overrides_end_in_any_order() -> None:
    first, second = env.override(backend="triton"), env.override(backend="triton")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert env.settings().backend == "triton"
    second.__exit__(None, None, None)
    assert env.settings().backend == "auto"


def test_override_refuses_what_is_no_setting() -> None:
    with (
        pytest.raises(TypeError, match="got 'GDN_BACKEND', expected one of backend,"),
        env.override(GDN_BACKEND="auto"),
    ):
        pass
    with pytest.raises(ValueError, match="GDN_K5_BLOCK_V: got '33'"), env.override(k5_block_v=33):
        pass
    assert env.settings().k5_block_v is None


def test_override_under_a_bad_environment_leaves_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="GDN_BACKEND"), env.override(k5_block_v=16):
        pass
    monkeypatch.delenv("GDN_BACKEND")
    assert env.settings().k5_block_v is None


def test_readings_tell_value_source_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_PREPARE_MODE", "fused")
    with env.override(backend="triton"):
        monkeypatch.setenv("GDN_K5_BLOCK_V", "17")
        by_name = {reading.var.name: reading for reading in env.readings()}
    assert (by_name["GDN_BACKEND"].value, by_name["GDN_BACKEND"].source) == ("triton", "override")
    assert (by_name["GDN_PREPARE_MODE"].value, by_name["GDN_PREPARE_MODE"].source) == ("fused", "environment")
    assert (by_name["GDN_ARCH"].value, by_name["GDN_ARCH"].source) == ("", "default")
    assert "GDN_K5_BLOCK_V: got '17'" in str(by_name["GDN_K5_BLOCK_V"].error)


def test_threads_parse_once_and_see_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rebuild = env._rebuild

    def counted(*, reread: bool) -> env.Settings:
        calls.append(reread)
        return rebuild(reread=reread)

    monkeypatch.setattr(env, "_rebuild", counted)
    barrier = threading.Barrier(16)
    seen: list[env.Settings] = []

    def work() -> None:
        barrier.wait()
        seen.append(env.settings())

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [True]
    assert len(seen) == 16
    assert all(settings is seen[0] for settings in seen)


def test_threads_override_without_leaks() -> None:
    def work(width: int) -> None:
        for _ in range(50):
            with env.override(k5_block_v=width):
                env.settings()

    threads = [threading.Thread(target=work, args=(width,)) for width in (16, 32, 64, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert env.settings().k5_block_v is None
    assert env._overrides == []


@pytest.mark.parametrize("cold", [True, False])
def test_settings_do_not_break_a_compiled_graph(cold: bool) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def by_backend(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if env.settings().backend == "triton" else 2)

    if not cold:
        env.settings()
    zero = torch.zeros(1)
    assert by_backend(zero).item() == 2
    with env.override(backend="triton"):
        assert by_backend(zero).item() == 1
    assert by_backend(zero).item() == 2


def test_third_party_reads_only_what_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_HOME", "/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    found = env.third_party()
    assert found["TRITON_HOME"] == "/somewhere"
    assert "TRITON_CACHE_DIR" not in found
    assert set(found) <= set(env.THIRD_PARTY)


def test_nobody_else_reads_the_environment() -> None:
    pattern = re.compile(r"\bos\.environ\b|\bgetenv\b|from os import .*environ")
    readers = [path.name for path in SOURCE.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert readers == ["env.py"]


def test_every_variable_is_read_somewhere() -> None:
    others = [p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py") if p.name != "env.py"]
    unread = [v.name for v in env.VARIABLES if not any(re.search(rf"\.{v.attribute}\b", text) for text in others)]
    assert unread == []


def test_documentation_page_is_current() -> None:
    assert (ROOT / "docs" / "environment.md").read_text(encoding="utf-8") == env.markdown()


def test_no_warning_in_a_clean_environment() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.settings()
