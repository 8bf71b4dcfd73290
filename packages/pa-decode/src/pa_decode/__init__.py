"""pa-decode: FP8 paged-attention decode for serving."""

from .__about__ import __version__

__all__ = ["__version__"]
