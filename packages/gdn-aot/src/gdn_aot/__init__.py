"""Compiles the AMD kernels of gdn-runtime ahead of time. ``jobs`` says which ones."""

from .__about__ import __version__
from .jobs import KERNELS, Job, jobs

__all__ = ["KERNELS", "Job", "__version__", "jobs"]
