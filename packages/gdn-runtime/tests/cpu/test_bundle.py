"""Bundles: what is read, what is refused and how, and that a refused bundle loads nothing. No compiler is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest import mock

import pytest
import torch

import gdn_runtime
from gdn_runtime import (
    BundleError,
    CaptureError,
    CorruptBundleError,
    IncompatibleBundleError,
    MissingCodeObjectError,
    UnsupportedError,
    env,
    select,
    tables,
)
from gdn_runtime.arch import KNOWN
from gdn_runtime.codeobject import CodeObject, bundle, bundles, code_object, hip, read_bundle, source
from gdn_runtime.codeobject.bundle import MANIFEST, Bundle, spec_key
from gdn_runtime.codeobject.facts import canonical_json, spec_from_json, spec_json
from gdn_runtime.codeobject.launch import Launcher, LoadedKernel
from gdn_runtime.ops import warmup
from gdn_runtime.ops.warmup import specs_of_row
from gdn_runtime.rules import Problem
from gdn_runtime.spec import KERNEL_ABI, FusedPrepareSpec, KernelSpec, L2NormSpec, OutputConfig, OutputSpec
from gdn_testing.bundles import fake_code, manifest_of, read_manifest, write_bundle, write_manifest

ARCH, OTHER = "gfx950", "gfx942"
CUDA = torch.device("cuda", 0)
NORMS = [L2NormSpec(ARCH, "bf16", heads) for heads in (2, 4, 8)]
SPECS: list[KernelSpec] = [
    *NORMS,
    FusedPrepareSpec(ARCH, "wave", 4, 2, True, True, "fp32"),
    OutputSpec(ARCH, "bf16", "bf16", 4, 2, True, True, OutputConfig(64, num_warps=4, num_stages=1)),
]


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    """As in a process that has read nothing, without the packaged bundle, and with compiling forbidden."""
    with (
        mock.patch.object(bundle, "PACKAGED", Path("no such folder")),
        mock.patch.dict(source._codes, clear=True),
        mock.patch.dict(bundle._in_force, clear=True),
        env.override(jit=False, bundle="", backend="auto"),
    ):
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a bundle of ``SPECS`` for one architecture and of one spec for the other."""
    write_bundle(tmp_path / "bundles" / ARCH, map(fake_code, SPECS), ARCH)
    write_bundle(tmp_path / "bundles" / OTHER, [fake_code(L2NormSpec(OTHER, "bf16", 2))], OTHER)
    return tmp_path / "bundles"


@pytest.fixture
def folder(root: Path) -> Path:
    return root / ARCH


def named(*paths: Path) -> Any:
    return env.override(bundle=os.pathsep.join(map(str, paths)))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit the manifest, and write it in the form that readers expect."""
    manifest = read_manifest(folder)
    change(manifest)
    write_manifest(folder, manifest)


def rename(folder: Path, entry: dict[str, Any]) -> None:
    """Make an entry of a manifest, and its payload, one of the spec that it has now."""
    entry["key"] = bundle.spec_hash(entry["spec"])
    name = bundle.payload_name(entry["file"].rpartition("-")[0], entry["key"])
    (folder / entry["file"]).rename(folder / name)
    entry["file"] = name


def payload(folder: Path, spec: KernelSpec) -> Path:
    return folder / read_bundle(folder).artifacts[spec_key(spec)].file


# ------------------------------------------------------------------------------------------------ reading


def test_a_bundle_gives_what_was_put_in(folder: Path) -> None:
    found = read_bundle(folder, ARCH)
    assert (found.arch, found.kernel_abi, len(found.artifacts)) == (ARCH, KERNEL_ABI, len(SPECS))
    assert found.toolchain == {"flydsl": "0.5.0"} and found.tables[0][0] == "table.json" and len(found.digest) == 64
    for spec in SPECS:
        assert spec in found and found.code_object(spec) == fake_code(spec)
    assert NORMS[0] != L2NormSpec(ARCH, "bf16", 16) not in found
    assert found.code_object(L2NormSpec(ARCH, "bf16", 16)) is None
    assert list(found.faults()) == []


@pytest.mark.parametrize("spec", SPECS)
def test_specs_survive_json(spec: KernelSpec) -> None:
    values = json.loads(canonical_json(spec_json(spec)))
    assert spec_from_json(values) == spec


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spec": "os:system"}, "class of a spec: got 'os:system'"),
        ({"spec": "no.such.module:Spec"}, "class of a spec: got 'no.such.module:Spec'"),
        ({"spec": "gdn_runtime.spec.triton:OutputConfig"}, "class of a spec"),
        ({"spec": None}, "class of a spec: got None"),
        ({"num_heads": True}, "OutputSpec.num_heads: got True, expected a value of type int"),
        ({"is_varlen": 1}, "OutputSpec.is_varlen: got 1"),
        ({"dtype": "int8"}, "OutputSpec.dtype: got 'int8', expected one of bf16, fp16, fp32"),
        ({"config": 7}, "OutputSpec.config: got 7"),
        ({"config": {}}, "fields of OutputConfig: got []"),
        ({"more": 1}, "fields of OutputSpec"),
    ],
)
def test_what_is_no_spec(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        spec_from_json({**spec_json(SPECS[-1]), **change})
    assert complaint in str(caught.value)


def test_artifacts_of_packages_that_are_not_imported(folder: Path, launchers: dict[str, CountingLauncher]) -> None:
    def move(manifest: dict[str, Any]) -> None:
        entry = manifest["artifacts"][0]
        entry["spec"] = {"spec": "antigravity.spec:FlightSpec", "arch": ARCH}
        rename(folder, entry)
        manifest["artifacts"].sort(key=lambda entry: entry["key"])

    edit(folder, move)
    found = read_bundle(folder, ARCH)
    assert list(found.faults()) == [] and len(found.artifacts) == len(SPECS)
    with named(folder):
        assert gdn_runtime.warmup("cpu", arch=ARCH).kernels == len(SPECS) - 1
    assert "antigravity" not in sys.modules
    (artifact,) = (a for a in found.artifacts.values() if a.spec["spec"] == "antigravity.spec:FlightSpec")
    content = (folder / artifact.file).read_bytes()
    (folder / artifact.file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert [type(fault) for fault in found.faults()] == [CorruptBundleError]


def test_no_json_imports_a_module() -> None:
    assert "antigravity" not in sys.modules
    with pytest.raises(ValueError, match="class of a spec"):
        spec_from_json({"spec": "antigravity:fly"})
    assert "antigravity" not in sys.modules


def test_where_bundles_are_looked_for(root: Path, tmp_path: Path) -> None:
    assert bundles(ARCH) == ()
    with named(root):
        (found,) = bundles(ARCH)
        assert found.folder == root / ARCH and bundles(ARCH)[0] is found
        assert [other.arch for other in bundles(OTHER)] == [OTHER]
    with named(root / OTHER, root / ARCH):  # folders with a manifest themselves
        assert [b.folder for b in bundles(ARCH)] == [root / ARCH]
        assert [b.folder for b in bundles(OTHER)] == [root / OTHER]
    with named(root / OTHER):
        assert bundles(ARCH) == ()
    elsewhere = write_bundle(tmp_path / "elsewhere", [fake_code(NORMS[0])], ARCH)
    with named(elsewhere, root):
        assert [b.folder for b in bundles(ARCH)] == [elsewhere, root / ARCH]
    bundle.forget()
    with mock.patch.object(bundle, "PACKAGED", root):
        assert [b.folder for b in bundles(ARCH)] == [root / ARCH]
        with named(elsewhere):
            assert [b.folder for b in bundles(ARCH)] == [elsewhere]
    for nothing in (tmp_path, tmp_path / "typo"):
        with named(root, nothing), pytest.raises(ValueError, match=r"GDN_BUNDLE.*expected a folder with a manifest"):
            bundles(ARCH)


def test_a_folder_may_be_a_link(root: Path, tmp_path: Path) -> None:
    """So that an installation can switch versions by a link."""
    (tmp_path / "current").symlink_to(root)
    with named(tmp_path / "current"):
        assert code_object(NORMS[0]) == fake_code(NORMS[0])


# ------------------------------------------------------------------------------------------------ the path


def test_the_process_then_the_bundles_in_order_then_the_compiler(root: Path, tmp_path: Path) -> None:
    first = replace(fake_code(NORMS[0]), elf=b"\x7fELF, another")
    elsewhere = write_bundle(tmp_path / "elsewhere", [first], ARCH)
    absent = L2NormSpec(ARCH, "bf16", 16)
    jit = mock.Mock()
    jit.find.return_value, jit.make.side_effect = None, lambda spec, where: fake_code(spec)
    with named(elsewhere, root), mock.patch.dict(sys.modules, {source._JIT: jit}):
        assert code_object(NORMS[0]) == first
        assert code_object(NORMS[1]) == fake_code(NORMS[1])
        with pytest.raises(MissingCodeObjectError):
            code_object(absent)
        with env.override(jit=True, flydsl_runtime_run_only=True), pytest.raises(MissingCodeObjectError):
            code_object(absent)
        assert not jit.make.called
        with env.override(jit=True, flydsl_runtime_run_only=False):
            code = code_object(absent)
            assert code == fake_code(absent) and code_object(NORMS[2]) == fake_code(NORMS[2])
        assert [call.args[0] for call in jit.make.mock_calls] == [absent]
        assert code_object(absent) is code
    with named(root):
        assert code_object(NORMS[0]) == first, "the process has one already"


def test_a_miss_names_the_spec_and_the_commands(root: Path) -> None:
    spec = L2NormSpec(ARCH, "bf16", 16)
    build = "gdn-aot build --arch gfx950 --complete --out DIR"
    with pytest.raises(MissingCodeObjectError) as caught:
        code_object(spec)
    for part in ("l2norm (arch=gfx950 dtype=bf16 num_key_heads=16)", "GDN_BUNDLE is not set", build, "GDN_JIT=1"):
        assert part in str(caught.value)
    with named(root), pytest.raises(MissingCodeObjectError) as caught:
        code_object(spec)
    assert f"not in {root / ARCH} ({len(SPECS)} artifacts). Build" in str(caught.value)
    with named(root / OTHER), pytest.raises(MissingCodeObjectError, match="GDN_BUNDLE names no bundle for gfx950"):
        code_object(spec)
    with (
        named(root),
        env.override(jit=True, jit_cache_dir="", flydsl_runtime_run_only=True),
        pytest.raises(MissingCodeObjectError, match="unset FLYDSL_RUNTIME_RUN_ONLY, which forbids compiling it"),
    ):
        code_object(spec)


def test_compiling_beside_a_bundle_is_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    jit = mock.Mock()
    jit.find.return_value, jit.make.side_effect = None, lambda spec, where: fake_code(spec)
    with (
        named(root),
        env.override(jit=True, flydsl_runtime_run_only=False),
        mock.patch.dict(sys.modules, {source._JIT: jit}),
    ):
        code_object(L2NormSpec(ARCH, "bf16", 16))
    assert f"compiling l2norm (arch=gfx950 dtype=bf16 num_key_heads=16): not in {root / ARCH}" in caplog.text


def test_two_architectures_in_one_process(root: Path) -> None:
    with named(root):
        here, there = code_object(NORMS[0]), code_object(L2NormSpec(OTHER, "bf16", 2))
    assert (here.facts.arch, there.facts.arch) == (ARCH, OTHER) and here.elf != there.elf


def test_threads_read_a_payload_once(root: Path) -> None:
    barrier = Barrier(8)
    reads: list[Path] = []
    read_file = bundle.read_file

    def counted(path: Path, limit: int) -> bytes:
        reads.append(path)
        return read_file(path, limit)

    def ask(number: int) -> CodeObject:
        barrier.wait(60)
        return code_object(SPECS[number % 2])

    with named(root), mock.patch.object(bundle, "read_file", counted), ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(ask, range(8)))
    assert len({id(code) for code in codes}) == 2
    assert len(reads) == len(set(reads)) == 3, "the manifest and two payloads"


SERVE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flydsl", "triton", "cdna_emu", "numpy"):
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import builtins, os
opened = os.open
def read_only(path, flags, *more, **options):
    assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), path
    return opened(path, flags, *more, **options)
os.open = read_only
import pickle
pickle.loads = pickle.load = pickle.Unpickler = None
from gdn_runtime.codeobject import code_object
from gdn_runtime.spec import L2NormSpec
print(code_object(L2NormSpec("gfx950", "bf16", 2)).digest)
print(*sorted(name for name in sys.modules if name.startswith("gdn_runtime.kernels")))
"""


def test_production_reads_and_does_nothing_else(root: Path) -> None:
    """A fresh process: no kernel language, no pickle, nothing written; the folder may be read-only."""
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    environment = {**os.environ, "GDN_BUNDLE": str(root), "GDN_JIT": "0"}
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [fake_code(NORMS[0]).digest]
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


# ------------------------------------------------------------------------------------------------ integrity


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(folder: Path) -> None:
    one, other = payload(folder, NORMS[0]), payload(folder, NORMS[1])
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


def link(folder: Path) -> None:
    path = payload(folder, NORMS[0])
    path.rename(folder.parent / "moved")
    path.symlink_to(folder.parent / "moved")


def special(folder: Path) -> None:
    path = payload(folder, NORMS[0])
    path.unlink()
    os.mkfifo(path)


def sub_folder(folder: Path) -> None:
    path = payload(folder, NORMS[0])
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        pytest.param(lambda folder: flip(payload(folder, NORMS[0])), r"\.hsaco: sha256: got \w+, expected", id="flip"),
        pytest.param(
            lambda folder: os.truncate(payload(folder, NORMS[0]), 100), r"got 100 bytes, expected 260", id="truncate"
        ),
        pytest.param(
            lambda folder: os.truncate(payload(folder, NORMS[0]), 1 << 40),  # sparse: it must not be read whole
            r"got more than 260 bytes, expected 260",
            id="grown",
        ),
        pytest.param(swap, r"\.hsaco: sha256: got \w+, expected", id="swap"),
        pytest.param(lambda folder: payload(folder, NORMS[0]).unlink(), r"\.hsaco: it is missing", id="delete"),
        pytest.param(link, r"\.hsaco: it is a link", id="link"),
        pytest.param(special, r"\.hsaco: it is no regular file", id="fifo"),
        pytest.param(sub_folder, r"\.hsaco: it is no regular file", id="folder"),
    ],
)
def test_a_damaged_payload(root: Path, folder: Path, damage: Callable[[Path], None], complaint: str) -> None:
    damage(folder)
    with named(root):
        with pytest.raises(CorruptBundleError, match=complaint) as caught:
            code_object(NORMS[0])
        assert caught.value.path.parent == folder and "install the bundle again" in str(caught.value)
        assert source._codes == {}
        assert code_object(NORMS[2]) == fake_code(NORMS[2]), "what is sound serves"
    assert str(caught.value) in map(str, read_bundle(folder).faults())


def test_what_the_manifest_does_not_name(folder: Path) -> None:
    (folder / "extra.hsaco").write_bytes(fake_code(L2NormSpec(ARCH, "bf16", 16)).elf)
    found = read_bundle(folder)
    assert L2NormSpec(ARCH, "bf16", 16) not in found
    (fault,) = found.faults()
    assert fault.path == folder / "extra.hsaco" and "the manifest does not name it" in str(fault)


def entry(manifest: dict[str, Any], **changes: Any) -> None:
    """Change the first artifact."""
    manifest["artifacts"][0].update(changes)


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.pop(name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(lambda m: entry(m, file="../x.hsaco"), "got '../x.hsaco', expected the plain name", id="dot-dot"),
        pytest.param(lambda m: entry(m, file="/etc/x.hsaco"), "got '/etc/x.hsaco', expected the plain", id="absolute"),
        pytest.param(lambda m: entry(m, file="a/b.hsaco"), "got 'a/b.hsaco', expected the plain name", id="sub-folder"),
        pytest.param(lambda m: entry(m, file=".x.hsaco"), "got '.x.hsaco', expected the plain name", id="hidden"),
        pytest.param(lambda m: entry(m, file="x.hsaco\n"), "expected the plain name", id="newline"),
        pytest.param(lambda m: entry(m, file="x\0.hsaco"), "expected the plain name", id="nul"),
        pytest.param(lambda m: entry(m, file=7), "file of the artifact: got 7, expected str", id="not-a-name"),
        pytest.param(lambda m: entry(m, file=m["artifacts"][1]["file"]), r"expected KERNEL-\w{16}\.hsaco", id="shared"),
        pytest.param(lambda m: entry(m, bytes=-1), r"got -1, expected 1 to \d+", id="negative"),
        pytest.param(lambda m: entry(m, bytes=1 << 60), r"expected 1 to \d+", id="huge-payload"),
        pytest.param(lambda m: entry(m, bytes=True), "bytes of the artifact: got True, expected int", id="not-a-size"),
        pytest.param(lambda m: entry(m, sha256="ab"), "got 'ab', expected 64 hexadecimal digits", id="short-hash"),
        pytest.param(lambda m: entry(m, sha256="A" * 64), "expected 64 hexadecimal digits", id="upper-case"),
        pytest.param(lambda m: entry(m, spec={"arch": OTHER}), "got 'gfx942', expected 'gfx950'", id="arch-of-a-spec"),
        pytest.param(lambda m: entry(m, more=1), "fields of the artifact", id="more-fields"),
    ],
)
def test_an_unsound_artifact(
    root: Path, folder: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    """What the manifest says of one artifact is looked at when that one is asked for, and by whoever verifies."""
    first, second, *_ = (entry["spec"] for entry in read_manifest(folder)["artifacts"])
    edit(folder, change)
    with named(root):
        for _ in range(2):
            with pytest.raises(CorruptBundleError, match=complaint) as caught:
                code_object(spec_from_json(first))
            assert caught.value.path == folder / MANIFEST and source._codes == {}
        with pytest.raises(CorruptBundleError, match=complaint):
            gdn_runtime.warmup("cpu", arch=ARCH)
        assert source._codes == {}
        assert code_object(spec_from_json(second)) == fake_code(spec_from_json(second)), "what is sound serves"
    assert str(caught.value) in map(str, read_bundle(folder).faults())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(lambda m: m["artifacts"].reverse(), "for each key, in the order of the keys", id="order"),
        pytest.param(lambda m: m["artifacts"].insert(0, m["artifacts"][0]), "a line for each key", id="twice"),
        pytest.param(lambda m: entry(m, key="A" * 64), "a line for each key", id="upper-case-key"),
        pytest.param(lambda m: entry(m, key="ab"), "a line for each key", id="short-key"),
        pytest.param(lambda m: m["toolchain"].update(flydsl=5), "version of flydsl: got 5", id="toolchain"),
        pytest.param(lambda m: m["toolchain"].update({"\x1b": "1"}), "printable ASCII text", id="escape"),
        pytest.param(lambda m: m["tables"].append({}), "fields of the table", id="tables"),
        pytest.param(lambda m: m.update(source_digest=""), "64 hexadecimal digits", id="source-digest"),
        pytest.param(lambda m: m.update(more=1), "fields of the manifest", id="more"),
        *[
            pytest.param(drop(name), "fields of the manifest", id=f"without-{name}")
            for name in ("arch", "kernel_abi", "toolchain", "source_digest", "tables")
        ],
        pytest.param(drop("schema"), "it has no schema", id="without-schema"),
        pytest.param(lambda m: m.update(schema=True), "it has no schema", id="schema-true"),
    ],
)
def test_an_unsound_manifest(
    root: Path, folder: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    edit(folder, change)
    with named(root):
        with pytest.raises(CorruptBundleError, match=complaint) as caught:
            code_object(NORMS[2])
        assert caught.value.path == folder / MANIFEST
        assert source._codes == {} and bundle._in_force == {}


def test_every_byte_of_a_manifest_counts(root: Path, folder: Path) -> None:
    """Nothing is believed of a manifest of which one bit is another: neither what is asked for nor what is not."""
    path = folder / MANIFEST
    text = path.read_bytes()
    assert json.loads(text).keys() == {"sha256", *manifest_of([], ARCH)}, "JSON for other readers too"
    bundle.forget()
    for place in range(0, len(text), 37):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with named(root), pytest.raises(BundleError) as caught:
            code_object(NORMS[0])
        assert caught.value.path == path and source._codes == {} and bundle._in_force == {}
    for cut in range(0, len(text), 997):
        path.write_bytes(text[:cut])
        with named(root), pytest.raises(CorruptBundleError):
            code_object(NORMS[0])
    path.write_bytes(text)
    with named(root):
        assert code_object(NORMS[0]) == fake_code(NORMS[0])


def test_another_artifact_of_a_manifest_is_not_parsed(folder: Path) -> None:
    """A line that is no JSON at all, in a manifest that was written so, harms its own artifact only."""
    values = {name: value for name, value in read_manifest(folder).items() if name != "artifacts"}
    broken, *rest = read_manifest(folder)["artifacts"]
    lines = {entry.pop("key"): canonical_json(entry) for entry in (broken, *rest)}
    with mock.patch.object(bundle, "canonical_json", lambda x: x if isinstance(x, str) else canonical_json(x)):
        first = next(iter(lines))
        text = bundle.manifest_bytes(values, {**lines, first: "{{}"}.items())
    (folder / MANIFEST).write_bytes(text)
    found = read_bundle(folder)
    with pytest.raises(CorruptBundleError, match=rf"artifact {first}: Expecting property name"):
        found.artifacts[first]
    assert [found.artifacts[key].key for key in found.artifacts if key != first] == list(lines)[1:]
    assert len(found.artifacts) == len(SPECS) and first in found.artifacts and "absent" not in found.artifacts
    with pytest.raises(KeyError):
        found.artifacts["absent"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON of a manifest"),
        ("{", "not JSON of a manifest"),
        ("[]", "not a manifest"),
        ("7", "not a manifest"),
        ("[" * 100_000, "not JSON of a manifest"),
        ('{"schema":1}', "fields of the manifest: got"),
        ('{"arch":1,"artifacts":{\n\n},"schema":1}\n', "fields of the manifest: got"),
        ('{"schema":1,"schema":1}', "name 'schema' stands twice"),
        ('{"schema":1,"arch":{"a":1,"a":2}}', "name 'a' stands twice"),
        ('{"schema":NaN}', "got NaN, expected a number"),
        ('{"schema":1e999}', "it has no schema"),
        ('{"schema":"\N{LATIN SMALL LETTER E WITH ACUTE}"}', "not JSON of a manifest"),
    ],
)
def test_malformed_json(root: Path, folder: Path, text: str, complaint: str) -> None:
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    with named(root), pytest.raises(CorruptBundleError, match=complaint):
        code_object(NORMS[0])


def test_a_manifest_that_is_missing_a_link_or_too_large(root: Path, folder: Path) -> None:
    path = folder / MANIFEST
    path.rename(folder.parent / "moved.json")
    with named(root), pytest.raises(CorruptBundleError, match=r"manifest\.json: it is missing"):
        code_object(NORMS[0])
    path.symlink_to(folder.parent / "moved.json")
    with named(root), pytest.raises(CorruptBundleError, match=r"manifest\.json: it is a link"):
        code_object(NORMS[0])
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with (
        named(root),
        mock.patch.object(bundle, "MAX_MANIFEST_BYTES", 1 << 16),
        pytest.raises(CorruptBundleError, match="got more than 65536 bytes, expected a manifest"),
    ):
        code_object(NORMS[0])
    assert source._codes == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"schema": 2, "what": "nobody knows"}, "schema: got 2, expected 1"),
        ({"kernel_abi": KERNEL_ABI + 1}, f"KERNEL_ABI: got {KERNEL_ABI + 1}, expected {KERNEL_ABI}"),
        ({"arch": "gfx1250"}, "architecture: got gfx1250, expected gfx950"),
    ],
)
def test_a_bundle_for_something_else(root: Path, folder: Path, changes: dict[str, Any], complaint: str) -> None:
    edit(folder, lambda manifest: manifest.update(changes))
    with named(root), pytest.raises(IncompatibleBundleError, match=complaint) as caught:
        code_object(NORMS[0])
    assert "name one that fits in GDN_BUNDLE" in str(caught.value) and source._codes == {}
    with named(root):
        assert code_object(L2NormSpec(OTHER, "bf16", 2)).facts.arch == OTHER, "the other architecture is not touched"


def test_a_bundle_in_the_folder_of_another_architecture(root: Path, folder: Path) -> None:
    folder.rename(root / "aside")
    (root / OTHER).rename(folder)
    with named(root), pytest.raises(IncompatibleBundleError, match="architecture: got gfx942, expected gfx950"):
        code_object(NORMS[0])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda e: e["facts"].update(block=[64, 1, 1]), r"block: got \(64, 1, 1\), expected \(256, 1, 1\)"),
        (lambda e: e["facts"].update(arch=OTHER), "arch: got gfx942, expected gfx950"),
        (
            lambda e: e["facts"].update(arguments=e["facts"]["arguments"][:-1], kernarg_bytes=88),
            "argument 11: got none",
        ),
        (lambda e: e["facts"].update(kernarg_bytes=4), "kernarg_bytes"),
        (lambda e: e["facts"].update(lds_bytes=1 << 20), "LDS: got"),
        (lambda e: e["facts"].update(vgprs=None), "facts.vgprs: got None"),
        (lambda e: e["facts"].update(arguments=[{"name": [], "kind": [], "offset": {}}]), "facts.arguments"),
        (lambda e: e["facts"].pop("symbol"), "facts: got"),
        (lambda e: e["spec"].update(num_key_heads=64), "its key is not the sha256 of its spec"),
    ],
)
def test_facts_and_spec_that_do_not_fit(
    root: Path, folder: Path, change: Callable[..., object], complaint: str
) -> None:
    key = spec_key(NORMS[0])
    edit(folder, lambda manifest: change(next(e for e in manifest["artifacts"] if e["key"] == key)))
    with named(root), pytest.raises(CorruptBundleError, match=complaint):
        code_object(NORMS[0])
    assert source._codes == {}
    assert any(fault.path == folder / MANIFEST for fault in read_bundle(folder).faults())


def test_verifying_sees_a_spec_that_no_kernel_exists_for(folder: Path) -> None:
    codes = [fake_code(spec) for spec in SPECS]
    manifest = manifest_of(codes, ARCH)
    for artifact in manifest["artifacts"]:
        if artifact["spec"]["spec"].endswith(":OutputSpec"):
            artifact["spec"]["config"]["num_warps"] = 3
            rename(folder, artifact)
    manifest["artifacts"].sort(key=lambda artifact: artifact["key"])
    write_manifest(folder, manifest)
    (fault,) = read_bundle(folder).faults()
    assert "num_warps: got 3" in str(fault)


def test_verifying_sees_another_form_and_a_later_change(folder: Path) -> None:
    found = read_bundle(folder)
    text = (folder / MANIFEST).read_text()
    for other in (json.dumps(json.loads(text), indent=1), canonical_json(json.loads(text)), f" {text}", text + "\n"):
        (folder / MANIFEST).write_text(other)
        assert ["it has changed since it was read" in str(fault) for fault in found.faults()] == [True]
        with pytest.raises(CorruptBundleError, match="not in the form in which manifests are written"):
            read_bundle(folder)


# ------------------------------------------------------------------------------------------------ selection


def problem(arch: str = ARCH, **changes: Any) -> Problem:
    base = Problem(
        arch=KNOWN[arch],
        compute_units=256,
        num_heads=32,
        num_key_heads=16,
        num_seqs=1,
        total_chunks=128,
        max_seq_chunks=128,
        dtype="bf16",
        beta_dtype="fp32",
        state_dtype="fp32",
        snapshot_dtype="bf16",
        is_varlen=True,
    )
    return replace(base, **changes)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle with what ``problem()`` needs but for the normalisation."""
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    chosen = select.select(problem(), CUDA, backend="flydsl")
    codes = map(fake_code, (chosen.prepare, chosen.state_scan, chosen.output))  # type: ignore[arg-type]
    return read_bundle(write_bundle(tmp_path / "served" / ARCH, codes, ARCH))


def test_auto_is_flydsl_where_a_bundle_serves_the_call(served: Bundle) -> None:
    chosen = select.select(problem(), CUDA)
    assert chosen.backend == "triton" and "no bundle for gfx950, and GDN_JIT=0 forbids" in chosen.reasons[0]
    with named(served.folder):
        chosen = select.select(problem(), CUDA)
        assert (chosen.backend, chosen.prepare_backend) == ("flydsl", "flydsl")
        assert chosen.reasons[0] == (
            f"the flydsl backend is the default on gfx950 where a bundle serves the call: {served.folder}"
        )
        assert select.select(problem(OTHER), CUDA).backend == "triton"
        assert select.select(problem(), CUDA, backend="triton").backend == "triton"
        for changes in ({"use_exp2": False}, {"num_heads": 64}, {"dtype": "fp16", "snapshot_dtype": "fp16"}):
            chosen = select.select(problem(**changes), CUDA)
            assert chosen.backend == "triton" and "where flydsl cannot serve" in chosen.reasons[0]
        chosen = select.select(problem(use_exp2=False), CUDA)
        assert f"{served.folder} lacks prepare (arch=gfx950 " in chosen.reasons[0]
    assert select.select(problem(), CUDA).backend == "triton", "the choice follows the bundles in force"


def test_auto_asks_for_the_stages_of_the_call_only(served: Bundle) -> None:
    with named(served.folder):
        normed = select.select(problem(), CUDA, stages=("l2norm", "prepare", "state_scan", "output"))
        assert normed.backend == "triton" and "lacks l2norm (" in normed.reasons[0]
        alone = select.select(problem(beta_dtype="bf16"), CUDA, stages=("state_scan",), rounding="nearest")
        assert alone.backend == "flydsl"
        mixed = select.select(problem(beta_dtype="bf16"), CUDA, prepare_backend="triton")
        assert (mixed.backend, mixed.prepare_backend) == ("flydsl", "triton")


def test_a_broken_bundle_is_never_passed_over(served: Bundle) -> None:
    (served.folder / MANIFEST).write_text("{")
    with named(served.folder):
        with pytest.raises(CorruptBundleError):
            select.select(problem(), CUDA)
        assert select.select(problem(), CUDA, backend="triton").backend == "triton"
        assert select.select(problem("sm90"), CUDA).backend == "triton"
        (status,) = (s for s in select.backends_for(CUDA, KNOWN[ARCH]) if s.name == "flydsl")
        assert status.reason.startswith(f"a call raises: {served.folder / MANIFEST}: not JSON")


# ------------------------------------------------------------------------------------------------ warming up


class CountingLauncher(Launcher):
    """Loads nothing, and counts."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self.loaded: list[CodeObject] = []

    def _load(self, code: CodeObject) -> LoadedKernel:
        self.loaded.append(code)
        return mock.Mock(code=code)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> dict[str, CountingLauncher]:
    """The launchers of a CPU, by architecture."""
    found = {arch: CountingLauncher(arch) for arch in (ARCH, OTHER)}
    stages = mock.Mock()
    stages.kernels.launcher_for = lambda spec, device: found[spec.arch]
    monkeypatch.setattr(warmup, "stages", lambda name: stages)
    return found


def test_warmup_loads_every_artifact_once(root: Path, launchers: dict[str, CountingLauncher]) -> None:
    with named(root):
        done = gdn_runtime.warmup("cpu", arch=ARCH)
        assert (done.arch, done.device, done.kernels, done.code_bytes) == (ARCH, "cpu", len(SPECS), 260 * len(SPECS))
        assert {code.spec for code in launchers[ARCH].loaded} == set(SPECS)
        assert gdn_runtime.warmup("cpu", arch=ARCH) == done
        assert len(launchers[ARCH].loaded) == len(SPECS) and launchers[OTHER].loaded == []
        assert launchers[ARCH].kernel(SPECS[0]).code is code_object(SPECS[0])
        with env.override(arch=OTHER):
            assert gdn_runtime.warmup("cpu").kernels == 1


def test_warmup_from_a_named_bundle_serves_later_calls(root: Path, launchers: dict[str, CountingLauncher]) -> None:
    assert gdn_runtime.warmup("cpu", arch=ARCH, bundle=root).kernels == len(SPECS)
    assert gdn_runtime.warmup("cpu", arch=ARCH, bundle=root / ARCH).kernels == len(SPECS)
    assert code_object(SPECS[0]) == fake_code(SPECS[0])
    with pytest.raises(MissingCodeObjectError, match="no code object of any kernel: GDN_BUNDLE is not set"):
        gdn_runtime.warmup("cpu", arch=OTHER)
    with pytest.raises(ValueError, match="expected a folder with a manifest"):
        gdn_runtime.warmup("cpu", arch=ARCH, bundle=root.parent / "typo")


def test_warmup_for_a_table(tmp_path: Path, launchers: dict[str, CountingLauncher]) -> None:
    table = tables.table().rows()[0].file
    rows = [found.row for found in tables.load([table]).rows()]
    specs = {spec for row in rows for spec in specs_of_row(row, ARCH)}
    strangers = {L2NormSpec(ARCH, "bf16", 7), FusedPrepareSpec(ARCH, "wave", 14, 7, True, True, "fp32")}
    write_bundle(tmp_path / "all" / ARCH, map(fake_code, specs | strangers), ARCH)
    assert gdn_runtime.warmup("cpu", arch=ARCH, bundle=tmp_path / "all", table=table).kernels == len(specs)
    assert {code.spec for code in launchers[ARCH].loaded} == specs
    lacking = specs_of_row(rows[0], ARCH)[2]
    write_bundle(tmp_path / "some" / ARCH, map(fake_code, specs - {lacking}), ARCH)
    with pytest.raises(MissingCodeObjectError, match=r"no code object of state_scan_opt .*gdn-aot build"):
        gdn_runtime.warmup("cpu", arch=ARCH, bundle=tmp_path / "some", table=table)
    (tmp_path / "empty.json").write_text("{}")
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="table: got"):
        gdn_runtime.warmup("cpu", arch=ARCH, bundle=tmp_path / "all", table=tmp_path / "empty.json")


def test_warmup_refuses(root: Path, folder: Path, launchers: dict[str, CountingLauncher]) -> None:
    with pytest.raises(ValueError, match="arch"):
        gdn_runtime.warmup("cpu", bundle=root)
    with pytest.raises(UnsupportedError, match="sm90"):
        gdn_runtime.warmup("cpu", arch="sm90", bundle=root)
    flip(payload(folder, NORMS[0]))
    with pytest.raises(BundleError, match="sha256"):
        gdn_runtime.warmup("cpu", arch=ARCH, bundle=root)


def test_capture_with_an_unloaded_artifact(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = mock.Mock(spec=hip.HipLibrary)
    library.get_device.return_value, library.load.return_value = 0, (1, 2)
    launcher = hip.HipLauncher(CUDA, arch=ARCH, library=library)
    with named(root):
        warm = launcher.kernel(NORMS[0])
        monkeypatch.setattr(hip, "capturing", lambda: True)
        assert launcher.kernel(NORMS[0]) is warm
        with pytest.raises(CaptureError, match=r"loading l2norm .*: warm up first, with gdn_runtime\.warmup\(\)"):
            launcher.kernel(NORMS[1])
    assert library.load.call_count == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("device", "no such device", ValueError),
        ("device", "meta", UnsupportedError),
        ("device", -1, ValueError),
        ("device", [], ValueError),
        ("arch", 950, TypeError),
        ("arch", b"gfx950", TypeError),
        ("bundle", 1, TypeError),
        ("bundle", b"folder", TypeError),
        ("table", [], TypeError),
    ],
)
def test_warmup_names_what_it_does_not_take(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name}( type)?: got .*, (expected|supported)"):
        gdn_runtime.warmup(**{"device": "cpu", "arch": ARCH, name: value})
