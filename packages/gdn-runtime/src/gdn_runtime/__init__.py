"""gdn-runtime: the Gated DeltaNet prefill block for serving, on NVIDIA and AMD GPUs and on CPUs."""

from .__about__ import __version__
from .errors import (
    BundleError,
    CaptureError,
    CorruptBundleError,
    IncompatibleBundleError,
    MissingCodeObjectError,
    UnsupportedError,
)
from .metadata import (
    GatedDeltaRuleChunkSchedule,
    GatedDeltaRulePrefillMetadata,
    PrefillMetadata,
    build_prefill_metadata,
)
from .ops.block import chunk_gated_delta_rule, explain
from .ops.compat import chunk_gated_delta_rule_opt_vk
from .ops.state_scan import chunk_gated_delta_rule_fwd_h
from .ops.warmup import Warmup, warmup

__all__ = [
    "BundleError",
    "CaptureError",
    "CorruptBundleError",
    "GatedDeltaRuleChunkSchedule",
    "GatedDeltaRulePrefillMetadata",
    "IncompatibleBundleError",
    "MissingCodeObjectError",
    "PrefillMetadata",
    "UnsupportedError",
    "Warmup",
    "__version__",
    "build_prefill_metadata",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_gated_delta_rule_opt_vk",
    "explain",
    "warmup",
]
