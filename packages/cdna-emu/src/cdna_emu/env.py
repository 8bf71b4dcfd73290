"""What the environment can set; nothing else of the package reads it."""

from __future__ import annotations

import os
from pathlib import Path


def core_path() -> Path | None:
    """CDNA_EMU_CORE: the compiled core to load instead of the one that was installed."""
    value = os.environ.get("CDNA_EMU_CORE")
    return Path(value) if value else None
