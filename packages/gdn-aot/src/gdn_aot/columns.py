"""Specs as texts, for tables."""

from __future__ import annotations

from operator import attrgetter

from gdn_runtime.spec import KernelSpec


def cell(spec: KernelSpec, path: str) -> str:
    """The field of ``spec`` at ``path``, such as "config.block_v"; empty if its kind has no such field."""
    try:
        value = attrgetter(path)(spec)
    except AttributeError:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
