"""pa-decode: FP8 paged-attention decode for serving."""

from .__about__ import __version__
from .geometry import DecodeGeometry
from .layouts import (
    CacheFacts,
    check_block_tables,
    check_cache,
    check_page_ids,
    check_seq_lens,
    pack_k,
    pack_v,
    unpack_k,
    unpack_v,
)
from .ops import Explanation, explain, pa_decode
from .plan import DecodePlan, DecodeWorkspace, make_workspace, plan_decode, workspace_bytes
from .quantise import FLAVOURS, Flavour, quantise_rows, quantise_tensor, quantise_tokens
from .schedule import PaDecodeSchedule
from .traits import normalise_window

__all__ = [
    "FLAVOURS",
    "CacheFacts",
    "DecodeGeometry",
    "DecodePlan",
    "DecodeWorkspace",
    "Explanation",
    "Flavour",
    "PaDecodeSchedule",
    "__version__",
    "check_block_tables",
    "check_cache",
    "check_page_ids",
    "check_seq_lens",
    "explain",
    "make_workspace",
    "normalise_window",
    "pa_decode",
    "pack_k",
    "pack_v",
    "plan_decode",
    "quantise_rows",
    "quantise_tensor",
    "quantise_tokens",
    "unpack_k",
    "unpack_v",
    "workspace_bytes",
]
