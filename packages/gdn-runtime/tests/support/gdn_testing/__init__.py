"""What tests, demo and benchmarks of gdn-runtime share: inputs, comparisons, poisoned memory, the case table."""

from .cases import CASES, GRID, Case, list_cases
from .compare import assert_bitwise_equal, assert_close_rel, assert_finite, assert_same_shape, max_rel, rel_l2
from .exact import KEY_SETS, KeySet, exact_prepare
from .inputs import CLOSED_TOKENS, KEY_NOISE, GdnInputs, make_inputs
from .poison import INTEGER_SENTINEL, poison, poison_empty, poisoned
from .specs import Specs, code_object_specs, problem_of, triton_specs
from .stages import StageResult, plan_for, run_stages, snapshots_for

__all__ = [
    "CASES",
    "CLOSED_TOKENS",
    "GRID",
    "INTEGER_SENTINEL",
    "KEY_NOISE",
    "KEY_SETS",
    "Case",
    "GdnInputs",
    "KeySet",
    "Specs",
    "StageResult",
    "assert_bitwise_equal",
    "assert_close_rel",
    "assert_finite",
    "assert_same_shape",
    "code_object_specs",
    "exact_prepare",
    "list_cases",
    "make_inputs",
    "max_rel",
    "plan_for",
    "poison",
    "poison_empty",
    "poisoned",
    "problem_of",
    "rel_l2",
    "run_stages",
    "snapshots_for",
    "triton_specs",
]
