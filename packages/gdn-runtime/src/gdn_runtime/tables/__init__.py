"""Tuned tables and rules for the value rows per workgroup of the AMD state scans."""

from .files import COMPILED, GRID, PACKAGED, Located, packaged_file, read_rows, replaces, table_files
from .lookup import ScanTable, choose_block_v, describe, load, reload, table
from .rows import Provenance, ScanKey, ScanRow, count, flag, parse_provenance, parse_row
from .rules import RULES, Rule, gdn_block_v, rule_block_v, seed_block_v, vk_block_v

__all__ = [
    "COMPILED",
    "GRID",
    "PACKAGED",
    "RULES",
    "Located",
    "Provenance",
    "Rule",
    "ScanKey",
    "ScanRow",
    "ScanTable",
    "choose_block_v",
    "count",
    "describe",
    "flag",
    "gdn_block_v",
    "load",
    "packaged_file",
    "parse_provenance",
    "parse_row",
    "read_rows",
    "reload",
    "replaces",
    "rule_block_v",
    "seed_block_v",
    "table",
    "table_files",
    "vk_block_v",
]
