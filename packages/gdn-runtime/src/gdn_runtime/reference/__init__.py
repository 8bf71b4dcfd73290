"""The block in plain torch: the token-by-token definition, and the chunked backend that serves CPU callers.

``recurrent_gated_delta_rule`` is what everything else is tested against. ``l2norm``, ``prepare``, ``state_scan`` and
``output`` form a backend: they take the same arguments, write the same preallocated outputs and round at the same
places as the kernels.
"""

from .chunked import l2norm, output, prepare, state_scan
from .recurrence import recurrent_gated_delta_rule

__all__ = ["l2norm", "output", "prepare", "recurrent_gated_delta_rule", "state_scan"]
