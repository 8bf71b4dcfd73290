"""pa-decode: FP8 paged-attention decode for serving. Layouts, quantisation, plans and oracles; kernels come later."""

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
from .plan import DecodePlan, plan_decode
from .quantise import FLAVOURS, Flavour, quantise_rows, quantise_tensor, quantise_tokens
from .schedule import PaDecodeSchedule
from .traits import normalise_window

__all__ = [
    "FLAVOURS",
    "CacheFacts",
    "DecodeGeometry",
    "DecodePlan",
    "Flavour",
    "PaDecodeSchedule",
    "__version__",
    "check_block_tables",
    "check_cache",
    "check_page_ids",
    "check_seq_lens",
    "normalise_window",
    "pack_k",
    "pack_v",
    "plan_decode",
    "quantise_rows",
    "quantise_tensor",
    "quantise_tokens",
    "unpack_k",
    "unpack_v",
]
