"""Bundles as files of a release: one archive, or a wheel of gdn-runtime that carries them. Equal in, equal out."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gdn_runtime.codeobject.bundle import Bundle
from gdn_runtime.errors import value_error
from gdn_runtime.kernels.jit import write_file

BUILD = "1bundled"
"""Build tag of the wheel with bundles: an installer that sees both takes this one. It must begin with a digit."""
PLACE = "gdn_runtime/_bundles"
DATE = (1980, 1, 1, 0, 0, 0)


def bundle_files(bundles: Sequence[Bundle]) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file of ``bundles``, in the order of the paths. ValueError for two bundles of one
    architecture, CorruptBundleError as ``Bundle.files``."""
    by_arch = {bundle.arch: bundle for bundle in bundles}
    if len(by_arch) != len(bundles):
        raise value_error("bundles", ", ".join(bundle.arch for bundle in bundles), "one of each architecture")
    for arch, bundle in sorted(by_arch.items()):
        yield from ((f"{arch}/{name}", content) for name, content in bundle.files())


def pack_archive(bundles: Sequence[Bundle], place: Path) -> Path:
    """Write a tar archive of ``bundles``: unpacked, it is a folder for GDN_BUNDLE. Files are root's, read-only."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in bundle_files(bundles):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o444
            archive.addfile(member, io.BytesIO(content))
    write_file(place, buffer.getvalue())
    return place


def pack_wheel(bundles: Sequence[Bundle], wheel: Path, folder: Path) -> Path:
    """Make of ``wheel``, a wheel of gdn-runtime, one in ``folder`` that carries ``bundles`` as well, with the build tag
    ``BUILD``. ValueError unless the bundles were built by the version that the wheel has."""
    name, version, *tags = wheel.name.removesuffix(".whl").split("-")
    if name != "gdn_runtime" or len(tags) != 3:
        raise value_error("wheel", wheel.name, "gdn_runtime-VERSION-PYTHON-ABI-PLATFORM.whl")
    for bundle in bundles:
        built = bundle.toolchain.get("gdn-runtime")
        if built != version:
            raise value_error(f"bundle {bundle.folder}: version of gdn-runtime", built, version)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as source:
        files = {entry.filename: source.read(entry) for entry in source.infolist() if not entry.is_dir()}
    if any(path.startswith(f"{PLACE}/") for path in files):
        raise value_error("wheel", f"{wheel.name}, which carries bundles", "one without")
    files[f"{info}/WHEEL"] = files[f"{info}/WHEEL"].rstrip() + f"\nBuild: {BUILD}\n".encode()
    files.update({f"{PLACE}/{path}": content for path, content in bundle_files(bundles)})
    del files[f"{info}/RECORD"]
    record = io.StringIO()
    lines = csv.writer(record, lineterminator="\n")
    for path, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.writerow((path, f"sha256={digest}", len(content)))
    lines.writerow((f"{info}/RECORD", "", ""))
    files[f"{info}/RECORD"] = record.getvalue().encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        # dist-info last, as the specification recommends
        for path in sorted(files, key=lambda path: (path.startswith(info), path)):
            entry = zipfile.ZipInfo(path, DATE)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            made.writestr(entry, files[path])
    place = folder / "-".join((name, version, BUILD, *tags))
    place = place.with_name(f"{place.name}.whl")
    write_file(place, buffer.getvalue())
    return place
