"""The call: validate, select, allocate, launch."""

from .decode import explain, pa_decode
from .selection import Explanation

__all__ = ["Explanation", "explain", "pa_decode"]
