"""Tunes the kernels of gdn-runtime and pa-decode; checks and explains tuned tables; benches and reports."""

from .__about__ import __version__
from .records import Facts, Key, Sample

__all__ = ["Facts", "Key", "Sample", "__version__"]
