"""The folder of a report: it is there whole, or as it was before."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

OURS = re.compile(r"report(\.(md|html|json)|-[a-z0-9-]+\.(csv|png))")
"""Names of the files of a report."""


def check(out: Path) -> None:
    """Raise ValueError for a place where a report would end something else: a file, or a folder that holds others."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: got {out}, which is no folder")
    strange = sorted(entry.name for entry in out.iterdir() if not OURS.fullmatch(entry.name)) if out.exists() else []
    if strange:
        raise ValueError(f"out: {out} holds {strange[0]}, expected a new folder, an empty one or that of a report")


def write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Make ``out`` the folder of ``contents``, in place of an earlier report. Raises OSError, and leaves what was
    there."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        new, old = Path(beside, "new"), Path(beside, "old")
        new.mkdir()
        for name, content in contents.items():
            (new / name).write_bytes(content)
        if not out.exists():
            new.rename(out)
            return
        shutil.copymode(out, new)
        out.rename(old)
        try:
            check_again(old)
            new.rename(out)
        except BaseException:
            old.rename(out)
            raise


def check_again(old: Path) -> None:
    """Raise FileExistsError for what was put into the folder while the report was made."""
    try:
        check(old)
    except ValueError as error:
        raise FileExistsError(str(error)) from error
