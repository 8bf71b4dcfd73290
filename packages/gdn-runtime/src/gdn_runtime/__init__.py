"""gdn-runtime: the Gated DeltaNet prefill block for serving, on NVIDIA and AMD GPUs and on CPUs."""

from .__about__ import __version__
from .errors import UnsupportedError
from .metadata import (
    GatedDeltaRuleChunkSchedule,
    GatedDeltaRulePrefillMetadata,
    PrefillMetadata,
    build_prefill_metadata,
)
from .ops.block import chunk_gated_delta_rule, explain
from .ops.compat import chunk_gated_delta_rule_opt_vk
from .ops.state_scan import chunk_gated_delta_rule_fwd_h

__all__ = [
    "GatedDeltaRuleChunkSchedule",
    "GatedDeltaRulePrefillMetadata",
    "PrefillMetadata",
    "UnsupportedError",
    "__version__",
    "build_prefill_metadata",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_gated_delta_rule_opt_vk",
    "explain",
]
