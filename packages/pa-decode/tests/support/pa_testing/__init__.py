"""What the suites of pa-decode share: inputs, and a decode written token by token."""

from .inputs import geometry_of, make_inputs
from .naive import naive_decode

__all__ = ["geometry_of", "make_inputs", "naive_decode"]
