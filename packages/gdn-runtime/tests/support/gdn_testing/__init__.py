"""What tests, demo and benchmarks of gdn-runtime share: inputs, comparisons, poisoned memory, the case table."""

from .compare import assert_bitwise_equal, assert_close_rel, assert_finite, assert_same_shape, max_rel, rel_l2
from .inputs import CLOSED_TOKENS, KEY_NOISE, GdnInputs, make_inputs

__all__ = [
    "CLOSED_TOKENS",
    "KEY_NOISE",
    "GdnInputs",
    "assert_bitwise_equal",
    "assert_close_rel",
    "assert_finite",
    "assert_same_shape",
    "make_inputs",
    "max_rel",
    "rel_l2",
]
