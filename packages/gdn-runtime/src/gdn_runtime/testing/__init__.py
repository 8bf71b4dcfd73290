"""Inputs, comparisons and the table of cases that the test suites, the benches and the tuner share.

Imported by whoever asks for it, never by the library itself. Needs torch only.
"""

from .cases import CASES, GRID, TORCH_DTYPE, Case, list_cases
from .compare import assert_bitwise_equal, assert_close_rel, assert_finite, assert_same_shape, max_rel, rel_l2
from .inputs import CLOSED_TOKENS, KEY_NOISE, Beta, Gate, GdnInputs, Keys, State, make_inputs

__all__ = [
    "CASES",
    "CLOSED_TOKENS",
    "GRID",
    "KEY_NOISE",
    "TORCH_DTYPE",
    "Beta",
    "Case",
    "Gate",
    "GdnInputs",
    "Keys",
    "State",
    "assert_bitwise_equal",
    "assert_close_rel",
    "assert_finite",
    "assert_same_shape",
    "list_cases",
    "make_inputs",
    "max_rel",
    "rel_l2",
]
