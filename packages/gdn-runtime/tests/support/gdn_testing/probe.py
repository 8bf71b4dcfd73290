"""Spec of a small FlyDSL kernel that does what it is told, failures included: for tests of the path of code objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gdn_runtime.spec import Argument, Language

Deed = Literal["scale", "lds over the limit", "wrong arch", "sleep", "raise", "take 3 GiB"]


@dataclass(frozen=True)
class ProbeSpec:
    """target[i] = factor * source[i + shift] for i < count, fp32; one work-item each. Other deeds fail to compile."""

    language: ClassVar[Language] = "flydsl"
    kernel: ClassVar[str] = "probe"
    block: ClassVar[tuple[int, int, int]] = (64, 1, 1)
    ARGUMENTS: ClassVar[tuple[Argument, ...]] = (
        Argument("source", "pointer"),
        Argument("target", "pointer"),
        Argument("shift", "i64"),
        Argument("count", "i32"),
        Argument("factor", "f32"),
    )

    arch: str
    deed: Deed = "scale"
    variant: int = 0

    def check(self) -> None:
        """Every probe is legal."""
