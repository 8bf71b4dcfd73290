"""What suites and benchmarks share beside ``gdn_runtime.testing``: poisoned memory, specs, stages, exact results."""

from .exact import KEY_SETS, KeySet, exact_prepare
from .poison import INTEGER_SENTINEL, poison, poison_empty, poisoned
from .specs import Specs, code_object_specs, problem_of, triton_specs
from .stages import StageResult, plan_for, run_stages, snapshots_for

__all__ = [
    "INTEGER_SENTINEL",
    "KEY_SETS",
    "KeySet",
    "Specs",
    "StageResult",
    "code_object_specs",
    "exact_prepare",
    "plan_for",
    "poison",
    "poison_empty",
    "poisoned",
    "problem_of",
    "run_stages",
    "snapshots_for",
    "triton_specs",
]
