"""The Triton backend of the block: the four stage launchers behind one module name."""

from .l2norm import l2norm
from .output import output
from .prepare import prepare
from .state_scan import state_scan

__all__ = ["l2norm", "output", "prepare", "state_scan"]
