"""Tuned tables, and rules for the value rows per workgroup of the AMD state scans."""

from .files import COMPILED, GRID, PACKAGED, Located, by_key, packaged_file, read_rows, replaces, table_files
from .launch_configs import LaunchTable, forget_launches, launch_table, load_launches
from .launch_rows import (
    CONFIG_COLUMNS,
    KEY_COLUMNS,
    LaunchCall,
    LaunchConfig,
    LaunchKernel,
    LaunchRow,
    config_fields,
    key_fields,
    launch_refusal,
    parse_launch_row,
)
from .lookup import ScanTable, choose_block_v, describe, load, reload, table
from .rows import Provenance, ScanKey, ScanRow, count, flag, parse_provenance, parse_row
from .rules import RULES, Rule, gdn_block_v, rule_block_v, seed_block_v, vk_block_v

__all__ = [
    "COMPILED",
    "CONFIG_COLUMNS",
    "GRID",
    "KEY_COLUMNS",
    "PACKAGED",
    "RULES",
    "LaunchCall",
    "LaunchConfig",
    "LaunchKernel",
    "LaunchRow",
    "LaunchTable",
    "Located",
    "Provenance",
    "Rule",
    "ScanKey",
    "ScanRow",
    "ScanTable",
    "by_key",
    "choose_block_v",
    "config_fields",
    "count",
    "describe",
    "flag",
    "forget_launches",
    "gdn_block_v",
    "key_fields",
    "launch_refusal",
    "launch_table",
    "load",
    "load_launches",
    "packaged_file",
    "parse_launch_row",
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
