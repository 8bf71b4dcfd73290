"""Files that appear whole, or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels.jit comes with the compilers")
from gdn_runtime.kernels import jit


def test_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is shorter than a buffer; and others may read it, whatever temporary files are."""
    place = tmp_path / "made" / "entry.json"
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(os.fstat(descriptor).st_size))
    for content in (b"short", b"x" * 100_000, b""):
        jit.write_file(place, content)
        assert place.read_bytes() == content and seen.pop() == len(content) and not seen
        assert stat.S_IMODE(place.stat().st_mode) == 0o644
    assert [path.name for path in place.parent.iterdir()] == ["entry.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "entry"
    jit.write_file(place, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        jit.write_file(place, b"new")
    assert place.read_bytes() == b"old" and list(tmp_path.iterdir()) == [place]
